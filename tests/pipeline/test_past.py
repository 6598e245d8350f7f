"""What the log knows of a request, and stored replies in the form in which a request carries them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from msgspec.structs import replace

from proxy.conversation import Kind, Mode
from proxy.dialects.chat.message import ChatMessage
from proxy.dialects.chat.request import parse_chat_request
from proxy.pipeline.asking import RequestContext
from proxy.pipeline.past import WAITING, History, HistoryLoader, request_form
from proxy.recall import ref_of
from proxy.store import Kept, Store
from proxy.tokens import TokenCounter
from proxy.trimming import Cut, Gap
from tests.support.talk import Talk, body

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
HALF = {"id": "c2", "type": "function", "function": {"name": "g", "arguments": '{"a": '}}


def _form(data: dict[str, Any], reasoning: Any = "auto", *, partial: bool = False) -> dict[str, Any]:
    return request_form(ChatMessage.of({"role": "assistant"} | data), reasoning, partial=partial).data


def test_what_only_a_response_has_goes() -> None:
    reply: dict[str, Any] = {
        "content": "hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    assert _form(reply) == {"role": "assistant", "content": "hi"}


def test_a_reply_without_them_keeps_its_bytes() -> None:
    message = ChatMessage(b'{ "role":"assistant", "content": "hi" }')
    assert request_form(message, "auto", partial=False) is message


@pytest.mark.parametrize(
    "data", [{"content": None, "tool_calls": [CALL]}, {"content": ""}, {"content": "x", "refusal": "no"}]
)
def test_what_a_request_may_have_stays(data: dict[str, Any]) -> None:
    assert _form(data) == {"role": "assistant"} | data


def test_audio_is_sent_back_by_its_id() -> None:
    assert _form({"content": None, "audio": {"id": "a1", "data": "AAAA", "expires_at": 1}})["audio"] == {
        "id": "a1"
    }


@pytest.mark.parametrize(
    ("mode", "calls", "kept"),
    [("auto", True, True), ("auto", False, False), ("keep", False, True), ("drop", True, False)],
)
def test_reasoning_goes_back_where_it_is_wanted(mode: str, calls: bool, kept: bool) -> None:
    data: dict[str, Any] = {"content": "x", "reasoning_content": "hm"} | (
        {"tool_calls": [CALL]} if calls else {}
    )
    assert ("reasoning_content" in _form(data, mode)) is kept


def test_what_exists_only_to_be_sent_back_is_kept_unless_all_is_dropped() -> None:
    data = {"content": "x", "reasoning_details": [{"type": "reasoning.text"}]}
    assert "reasoning_details" in _form(data)
    assert "reasoning_details" not in _form(data, "drop")


def test_a_reply_that_broke_off_loses_the_calls_that_are_not_whole() -> None:
    assert _form({"content": "x", "tool_calls": [CALL, HALF]}, partial=True)["tool_calls"] == [CALL]
    assert "tool_calls" not in _form({"content": "x", "tool_calls": [HALF]}, partial=True)
    assert _form({"content": "x", "tool_calls": [HALF]})["tool_calls"] == [HALF]


def test_a_ref_names_a_text() -> None:
    assert ref_of("0123456789abcdef0000") == "ref_0123456789abcdef"


# ------------------------------------------------------------------- a request in its place in the log

ASKING = RequestContext(tenant="tenant")
COUNTER = TokenCounter("estimate")


@pytest.fixture
async def talk(tmp_path: Path) -> AsyncIterator[Talk]:
    store = await Store.open(f"sqlite:///{tmp_path / 's.db'}")
    yield Talk(store=store)
    await store.close()


async def past_of(talk: Talk, *messages: dict[str, Any], asking: RequestContext = ASKING) -> History:
    memory = HistoryLoader(talk.store, COUNTER, "auto")
    request = parse_chat_request(orjson.dumps({"model": "m", "messages": messages}))
    return await memory.past_of(request, await memory.incoming(request, asking), talk.session, asking)


def user(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **fields}


ONE = {"role": "assistant", "content": "1"}


@pytest.mark.anyio
async def test_who_said_a_message_is_known_and_does_not_go_out(talk: Talk) -> None:
    await talk.settle(
        await talk.begin(asked := body("user", "one", agent="planner", is_internal=True)),
        asked,
        replies=(body("assistant", "1"),),
    )
    for said in (
        [user("two", agent="boss")],
        [user("one", agent="planner", is_internal=True), ONE, user("two", agent="boss")],
    ):
        past = await past_of(talk, *said)
        assert [(entry.agent, entry.is_internal) for entry in past.entries] == [
            ("planner", True),
            (None, False),
            ("boss", False),
        ]
        assert all(not entry.message.own_fields for entry in past.entries)
        assert [entry.position for entry in past.entries] == [0, 1, 2]
        assert past.fresh[0].message.data == user("two", agent="boss")  # it is stored as it came


@pytest.mark.anyio
@pytest.mark.parametrize(("agent", "internal"), [(7, True), (None, "true"), ({"name": "x"}, 1)])
async def test_fields_of_ours_that_say_nothing(talk: Talk, agent: Any, internal: Any) -> None:
    past = await past_of(talk, user("one", agent=agent, is_internal=internal))
    (entry,) = past.entries
    assert (entry.agent, entry.is_internal) == (None, internal is True)


@pytest.mark.anyio
async def test_it_is_known_when_the_session_was_used_last(talk: Talk) -> None:
    assert (await past_of(talk, user("one"))).updated_at is None
    await talk.say("one", "1", settled_at=7_000)
    assert (await past_of(talk, user("two"))).updated_at == 7_000
    assert (await past_of(talk, user("one"), ONE, user("two"))).updated_at == 7_000


@pytest.mark.anyio
async def test_what_a_cut_dropped_is_there_only_where_it_is_wanted(talk: Talk) -> None:
    first = await talk.say("one", "1")
    asked = body("user", "two")
    gap = Gap(start=0, stop=2, edit="drop_oldest", reason="old", tokens=10, tool_calls=0)
    made = Cut(
        position=3, policy="lean", version="v1", changes=(), tokens=9, messages=1, tool_calls=0, gaps=(gap,)
    )
    exchange = await talk.begin(asked)
    await talk.settle(
        exchange, asked, replies=(body("assistant", "2"),), cut=made, kept=Kept(nodes=(), messages=(0,))
    )
    lean = replace(ASKING, policy="lean")
    past = await past_of(talk, user("three"), asking=lean)
    assert [(entry.position, entry.message.text) for entry in past.entries] == [
        (2, "two"),
        (3, "2"),
        (4, "three"),
    ]
    assert past.standing is not None
    assert past.standing.cut == made
    whole = await past_of(talk, user("three"), asking=replace(lean, whole=True))
    assert [entry.message.text for entry in whole.entries] == ["one", "1", "two", "2", "three"]
    assert whole.standing == past.standing
    assert first.head in whole.nodes
    assert whole.size > past.size


@pytest.mark.anyio
async def test_a_window_says_where_it_begins(talk: Talk) -> None:
    for number in range(3):
        await talk.say(f"q{number}", f"a{number}")
    said = [
        user("q1"),
        {"role": "assistant", "content": "a1"},
        user("q2"),
        {"role": "assistant", "content": "a2"},
        user("q3"),
    ]
    past = await past_of(talk, *said)
    assert (past.arrival.kind, past.start) == (Kind.WINDOWED, 2)
    assert [entry.position for entry in past.entries] == [2, 3, 4, 5, 6]


# ----------------------------------------------------------------- agents that share it and use tools


async def _calls(talk: Talk, agent: str, *ids: str) -> None:
    """Have an agent ask and be answered with calls."""
    calls = [{"id": one, "type": "function", "function": {"name": "f", "arguments": "{}"}} for one in ids]
    asked = body("user", f"{agent} asks")
    reply = body("assistant", f"{agent} calls", tool_calls=calls)
    await talk.settle(await talk.begin(asked, agent=agent), asked, replies=(reply,), agent=agent)


def _result(call: str) -> dict[str, Any]:
    return {"role": "tool", "content": f"result of {call}", "tool_call_id": call}


def _shown(past: History) -> list[str]:
    """Return what would be sent if nothing were trimmed."""
    return [entry.message.text for entry in past.entries if not entry.arrival]


@pytest.mark.anyio
async def test_what_others_said_since_stands_before_the_calls_that_a_request_answers(talk: Talk) -> None:
    await _calls(talk, "A", "c1")
    await talk.say("b", "rb", agent="B")
    past = await past_of(talk, _result("c1"), asking=replace(ASKING, agent="A"))
    assert _shown(past) == ["A asks", "b", "rb", "A calls", "result of c1"]
    assert [entry.position for entry in past.entries] == [0, 1, 2, 3, 4]
    assert past.carried == past.nodes[1:]
    assert [body.message.text for body in past.fresh] == ["result of c1"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("agent", "is_shown"), [("B", False), ("A", True), (None, True)], ids=["other", "own", "nobody"]
)
async def test_calls_of_another_agent_that_wait_are_left_out_until_they_are_answered(
    talk: Talk, agent: str | None, is_shown: bool
) -> None:
    await _calls(talk, "A", "c1")
    asking = replace(ASKING, agent=agent)
    past = await past_of(talk, user("b"), asking=asking)
    assert _shown(past) == ["A asks", *(["A calls"] if is_shown else []), "b"]
    assert [entry.position for entry in past.entries] == [0, 1, 2]
    if not is_shown:
        (change,) = past.entries[1].arrival or ()
        assert (change.position, change.edit, change.message) == (1, WAITING, None)
    await talk.say("c", "rc", agent="C")
    past = await past_of(talk, user("b"), asking=asking)
    assert _shown(past) == ["A asks", *(["A calls"] if is_shown else []), "c", "rc", "b"]


@pytest.mark.anyio
async def test_calls_that_are_answered_are_shown_to_all(talk: Talk) -> None:
    await _calls(talk, "A", "c1", "c2")
    result = body("tool", "42", tool_call_id="c1")
    await talk.settle(await talk.begin(result), result, replies=(body("assistant", "so"),), agent="A")
    asking = replace(ASKING, agent="B")
    said = ["A asks", "A calls", "42", "so"]
    assert _shown(await past_of(talk, user("b"), asking=asking)) == [*said, "b"]
    # Who sends a result for another agent has seen the calls; and nothing more may be new.
    await _calls(talk, "A", "c3")
    said += ["A asks", "A calls"]
    assert _shown(await past_of(talk, _result("c3"), asking=asking)) == [*said, "result of c3"]
    append = replace(asking, mode=Mode.APPEND)
    system = {"role": "system", "content": "Be brief."}
    assert _shown(await past_of(talk, system, asking=append)) == said
