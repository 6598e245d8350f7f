"""A request in its place in the stored history, and variants of stored messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from cachetools import FIFOCache
from msgspec.structs import replace

from proxy.conversation import Kind, Mode, body_of
from proxy.dialects.chat import CHAT
from proxy.dialects.chat.message import ChatMessage
from proxy.dialects.chat.request import parse_chat_request
from proxy.pipeline.context import RequestContext
from proxy.pipeline.history import WAITING, History, HistoryLoader
from proxy.recall import ref_of
from proxy.store import Kept, Mark, Store
from proxy.tokens import TokenCounter
from proxy.trimming import Cut, Gap, Policy
from tests.support.stores import empty_store
from tests.support.talk import Talk, body


def test_a_ref_is_the_beginning_of_a_body_id() -> None:
    assert ref_of("0123456789abcdef0000") == "ref_0123456789abcdef"


CONTEXT = RequestContext(dialect=CHAT, tenant="tenant", policy_name="lean", policy=Policy(), session="session")
COUNTER = TokenCounter("estimate")


@pytest.fixture
async def talk(tmp_path: Path) -> AsyncIterator[Talk]:
    store = await Store.open(empty_store(tmp_path / "s.db"))
    yield Talk(store=store)
    await store.close()


async def load(
    talk: Talk, *messages: dict[str, Any], context: RequestContext = CONTEXT, whole: bool = False
) -> History:
    loader = HistoryLoader(talk.store, COUNTER, "auto")
    request = parse_chat_request(orjson.dumps({"model": "m", "messages": messages}))
    return await loader.load(request, context, whole=whole)


def user(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **fields}


ONE = {"role": "assistant", "content": "1"}


@pytest.mark.anyio
async def test_our_own_fields_of_a_message_are_read_and_not_sent(talk: Talk) -> None:
    await talk.settle(
        await talk.begin(asked := body("user", "one", agent="planner", is_internal=True)),
        asked,
        replies=(body("assistant", "1"),),
    )
    for said in (
        [user("two", agent="boss")],
        [user("one", agent="planner", is_internal=True), ONE, user("two", agent="boss")],
    ):
        history = await load(talk, *said)
        assert [(entry.agent, entry.is_internal) for entry in history.entries] == [
            ("planner", True),
            (None, False),
            ("boss", False),
        ]
        assert all(not entry.message.own_fields for entry in history.entries)
        assert [entry.position for entry in history.entries] == [0, 1, 2]
        assert history.fresh[0].message.data == user("two", agent="boss")  # it is stored as it came


@pytest.mark.anyio
@pytest.mark.parametrize(("agent", "internal"), [(7, True), (None, "true"), ({"name": "x"}, 1)])
async def test_our_own_fields_of_another_type_are_ignored(talk: Talk, agent: Any, internal: Any) -> None:
    history = await load(talk, user("one", agent=agent, is_internal=internal))
    (entry,) = history.entries
    assert (entry.agent, entry.is_internal) == (None, internal is True)


@pytest.mark.anyio
async def test_a_history_tells_when_its_session_was_used_last(talk: Talk) -> None:
    assert (await load(talk, user("one"))).updated_at is None
    await talk.say("one", "1", settled_at=7_000)
    assert (await load(talk, user("two"))).updated_at == 7_000
    assert (await load(talk, user("one"), ONE, user("two"))).updated_at == 7_000


@pytest.mark.anyio
async def test_what_a_cut_dropped_is_loaded_only_with_the_whole_history(talk: Talk) -> None:
    first = await talk.say("one", "1")
    asked = body("user", "two")
    gap = Gap(start=0, stop=2, edit="drop_oldest", reason="old", tokens=10, tool_calls=0)
    made = Cut(position=3, policy="lean", version="v1", changes=(), tokens=9, messages=1, tool_calls=0, gaps=(gap,))
    exchange = await talk.begin(asked)
    await talk.settle(exchange, asked, replies=(body("assistant", "2"),), cut=made, kept=Kept(nodes=(), messages=(0,)))
    history = await load(talk, user("three"), context=CONTEXT)
    assert [(entry.position, entry.message.text) for entry in history.entries] == [(2, "two"), (3, "2"), (4, "three")]
    assert history.standing is not None
    assert history.standing.cut == made
    whole = await load(talk, user("three"), whole=True, context=CONTEXT)
    assert [entry.message.text for entry in whole.entries] == ["one", "1", "two", "2", "three"]
    assert whole.standing == history.standing
    assert first.head in whole.nodes
    assert whole.size > history.size


@pytest.mark.anyio
async def test_a_window_tells_where_it_starts_in_the_branch(talk: Talk) -> None:
    for number in range(3):
        await talk.say(f"q{number}", f"a{number}")
    said = [
        user("q1"),
        {"role": "assistant", "content": "a1"},
        user("q2"),
        {"role": "assistant", "content": "a2"},
        user("q3"),
    ]
    history = await load(talk, *said)
    assert (history.arrival.kind, history.start) == (Kind.WINDOWED, 2)
    assert [entry.position for entry in history.entries] == [2, 3, 4, 5, 6]


# ----------------------------------------------------------------- agents that share it and use tools


async def _calls(talk: Talk, agent: str, *ids: str) -> None:
    """Have an agent ask and be answered with calls."""
    calls = [{"id": one, "type": "function", "function": {"name": "f", "arguments": "{}"}} for one in ids]
    asked = body("user", f"{agent} asks")
    reply = body("assistant", f"{agent} calls", tool_calls=calls)
    await talk.settle(await talk.begin(asked, agent=agent), asked, replies=(reply,), agent=agent)


def _result(call: str) -> dict[str, Any]:
    return {"role": "tool", "content": f"result of {call}", "tool_call_id": call}


def _shown(history: History) -> list[str]:
    """Return what would be sent if nothing were trimmed."""
    return [entry.message.text for entry in history.entries if not entry.arrival]


@pytest.mark.anyio
async def test_calls_move_behind_what_other_agents_said_once_a_request_answers_them(talk: Talk) -> None:
    await _calls(talk, "A", "c1")
    await talk.say("b", "rb", agent="B")
    history = await load(talk, _result("c1"), context=replace(CONTEXT, agent="A"))
    assert _shown(history) == ["A asks", "b", "rb", "A calls", "result of c1"]
    assert [entry.position for entry in history.entries] == [0, 1, 2, 3, 4]
    assert history.carried == history.nodes[1:]
    assert [body.message.text for body in history.fresh] == ["result of c1"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("agent", "is_shown"), [("B", False), ("A", True), (None, True)], ids=["other", "own", "nobody"]
)
async def test_open_calls_of_another_agent_are_left_out_until_they_are_answered(
    talk: Talk, agent: str | None, is_shown: bool
) -> None:
    await _calls(talk, "A", "c1")
    context = replace(CONTEXT, agent=agent)
    history = await load(talk, user("b"), context=context)
    assert _shown(history) == ["A asks", *(["A calls"] if is_shown else []), "b"]
    assert [entry.position for entry in history.entries] == [0, 1, 2]
    if not is_shown:
        (change,) = history.entries[1].arrival or ()
        assert (change.position, change.edit, change.message) == (1, WAITING, None)
    await talk.say("c", "rc", agent="C")
    history = await load(talk, user("b"), context=context)
    assert _shown(history) == ["A asks", *(["A calls"] if is_shown else []), "c", "rc", "b"]


@pytest.mark.anyio
async def test_answered_calls_are_shown_to_every_agent(talk: Talk) -> None:
    await _calls(talk, "A", "c1", "c2")
    result = body("tool", "42", tool_call_id="c1")
    await talk.settle(await talk.begin(result), result, replies=(body("assistant", "so"),), agent="A")
    context = replace(CONTEXT, agent="B")
    said = ["A asks", "A calls", "42", "so"]
    assert _shown(await load(talk, user("b"), context=context)) == [*said, "b"]
    # Who sends a result for another agent has seen the calls; and nothing more may be new.
    await _calls(talk, "A", "c3")
    said += ["A asks", "A calls"]
    assert _shown(await load(talk, _result("c3"), context=context)) == [*said, "result of c3"]
    append = replace(context, mode=Mode.APPEND)
    system = {"role": "system", "content": "Be brief."}
    assert _shown(await load(talk, system, context=append)) == said


# ------------------------------------------------------------------------- variants of stored messages

STORED = ChatMessage(b'{"role":"assistant","content":"hi","refusal":null}')
SENT = ChatMessage(b'{"role":"assistant","content":"hi"}')


@pytest.fixture
def loader(talk: Talk) -> HistoryLoader:
    return HistoryLoader(talk.store, COUNTER, "auto")


def _mark(node: str) -> Mark:
    return Mark(node=node, depth=1, body=body_of(STORED), tokens=3, arrival=None)


@pytest.mark.anyio
async def test_only_another_text_is_a_variant_and_each_is_offered_once(loader: HistoryLoader) -> None:
    marks = [_mark("a"), _mark("b")]
    assert loader._new_variants("s", [STORED, SENT], marks) == (("b", SENT),)
    assert loader._new_variants("s", [STORED, SENT], marks) == ()


@pytest.mark.anyio
async def test_a_variant_belongs_to_its_node_and_its_session(loader: HistoryLoader) -> None:
    for session, node in (("s", "a"), ("s", "b"), ("t", "a")):
        assert loader._new_variants(session, [SENT], [_mark(node)]) == ((node, SENT),)


@pytest.mark.anyio
async def test_a_new_message_is_no_variant(loader: HistoryLoader) -> None:
    assert loader._new_variants("s", [SENT, SENT], [_mark("a")]) == (("a", SENT),)


@pytest.mark.anyio
async def test_a_forgotten_variant_is_offered_again(loader: HistoryLoader) -> None:
    loader._variants = FIFOCache(4)
    names = [str(number) for number in range(9)]
    for name in names:
        assert loader._new_variants("s", [SENT], [_mark(name)])
    assert not loader._new_variants("s", [SENT], [_mark(names[-1])])
    assert loader._new_variants("s", [SENT], [_mark(names[0])])


@pytest.mark.anyio
async def test_a_variant_that_the_client_sends_comes_with_the_history(talk: Talk) -> None:
    reply = body("assistant", "1", refusal=None)
    await talk.settle(await talk.begin(asked := body("user", "one")), asked, replies=(reply,))
    history = await load(talk, user("one"), ONE, user("two"))
    assert [(node, sent.data) for node, sent in history.variants] == [(history.nodes[1], ONE)]


# ------------------------------------------------------------------------------- what a process remembers


@pytest.mark.anyio
async def test_the_sessions_that_are_remembered_are_bounded_early(loader: HistoryLoader) -> None:
    for number in range(30_001):  # a process that has served more takes no more memory
        loader.remember(CONTEXT, f"session {number}", [f"reply {number}"])
    key = (CONTEXT.tenant, CONTEXT.dialect.name)
    assert loader._replies.get((*key, "reply 0")) is None
    assert loader._replies.get((*key, "reply 1")) == "session 1"
