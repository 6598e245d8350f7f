"""The proxy's own tools: when they are offered, how arguments are read, and answers from a store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import orjson
import pytest

from proxy.config import VirtualToolSettings
from proxy.conversation import ROOT, body_of
from proxy.dialects import Call, Message
from proxy.dialects.chat import CHAT
from proxy.dialects.chat.message import ChatMessage
from proxy.dialects.chat.request import parse_chat_request
from proxy.errors import InvalidRequest, StoreUnavailable
from proxy.recall import COMPRESS, RECALL, OwnTools, Recall, RecallBranch, offered, ref_of, sent_whole
from proxy.recall.answering import ALLOWED, FAILED, NO_COMPRESSION, UNAVAILABLE, Asked, read_asked
from proxy.store import Body, Opening, Reply, Settlement, Status, Store, session_key
from proxy.trimming import Entry
from tests.support.stores import empty_store

pytestmark = pytest.mark.anyio

KEY = session_key("t", "s")
LOG = "\n".join(f"entry {number}: fine" for number in range(1, 2_000)) + "\nentry 2000: the valve broke"
CALL = {"id": "c1", "type": "function", "function": {"name": "read_log", "arguments": '{"day": 3}'}}
FIRST: list[dict[str, Any]] = [
    {"role": "user", "content": "Look at the log, my order is ORD-7781.", "agent": "Planner"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": LOG},
]
REPLY = {"role": "assistant", "content": "It is fine."}
ASK = ChatMessage.of({"role": "user", "content": "What broke? A valve?"})


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = await Store.open(empty_store(tmp_path / "palimpsest.db"))
    yield opened
    await opened.close()


async def keep(store: Store, messages: Sequence[dict[str, Any]], session: str = "s", base: str = ROOT) -> str:
    """Store these messages and a reply; return the node of the reply."""
    bodies = tuple(Body(message=ChatMessage.of(message), tokens=1) for message in messages)
    name = f"ex_{session}_{base[:8]}"
    opening = Opening(
        tenant="t",
        session=session,
        exchange=name,
        created_at=1,
        kind="resend",
        base=base,
        messages=bodies,
        instructions=None,
        instructions_tokens=0,
        digest="d",
        model="m",
        agent=None,
        policy="p",
        policy_version="v",
        stream=False,
        parameters={},
        tools=None,
    )
    await store.begin(opening)
    reply = Reply(body=Body(message=ChatMessage.of(REPLY), tokens=1))
    settled = await store.settle(
        Settlement(
            tenant="t",
            session=session,
            exchange=name,
            settled_at=2,
            status=Status.COMPLETE,
            kind="resend",
            base=base,
            at_head=False,
            moves_head=True,
            messages=bodies,
            arrivals=tuple(() for _ in bodies),
            policy_version="v",
            agent=None,
            replies=(reply,),
            cut=None,
            tokens_before=0,
            tokens_sent=0,
            receipt={},
        )
    )
    return settled.head


@pytest.fixture
async def branch(store: Store) -> RecallBranch:
    return RecallBranch(key=KEY, tip=await keep(store, FIRST), depth=4, fresh=(ASK,), whole=frozenset({3, 4}))


def ref(message: dict[str, Any] | Message) -> str:
    return ref_of(body_of(message if isinstance(message, Message) else ChatMessage.of(message)))


async def ask(store: Store, branch: RecallBranch, **arguments: Any) -> str:
    return await Recall(store).answer(branch, orjson.dumps(arguments).decode())


async def test_a_ref_gives_the_original(store: Store, branch: RecallBranch) -> None:
    told = await ask(store, branch, ref=f"ref={ref(FIRST[2])}")
    assert f"{ref(FIRST[2])}: the result of a tool, lines 1-" in told
    assert "\nentry 1: fine\nentry 2: fine\n" in told
    assert await ask(store, branch, ref=ref(FIRST[2]), lines="2000") == await ask(
        store, branch, ref=body_of(ChatMessage.of(FIRST[2])), lines="2000-3000"
    )
    assert "\n2000: entry 2000: the valve broke\n" in await ask(store, branch, ref=ref(FIRST[2]), grep="broke$")
    assert "Planner" in await ask(store, branch, ref=ref(FIRST[0]))
    assert ASK.text in await ask(store, branch, ref=ref(ASK))  # it may not be stored yet


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ref": "ref_ffffffffffffffff"}, "There is nothing under ref_ffffffffffffffff in this conversation."),
        ({"ref": "the log"}, "'the log' is not a ref"),
        ({"ref": "x" * 5_000}, "x' is not a ref"),
        ({"ref": "ref_ffffffffffffffff", "lines": "b-a"}, "lines is 'b-a'."),
        ({"ref": "ref_ffffffffffffffff", "grep": "("}, "grep is not a valid RE2"),
        ({"ref": "a", "query": "b"}, "Both"),
        ({}, "Neither"),
        ({"query": "helicopter"}, "Nothing in this conversation matches."),
    ],
)
async def test_a_call_that_cannot_be_answered_gets_the_reason(
    store: Store, branch: RecallBranch, arguments: dict[str, Any], words: str
) -> None:
    told = await ask(store, branch, **arguments)
    assert words in told
    assert len(told) < 600


async def test_no_other_session_is_read(store: Store, branch: RecallBranch) -> None:
    other = {"role": "user", "content": "the secret of the other one is a valve"}
    await keep(store, [other], session="other")
    assert "There is nothing" in await ask(store, branch, ref=ref(other))
    assert "secret" not in await ask(store, branch, query="secret valve")


async def test_a_deleted_session_is_not_read(store: Store, branch: RecallBranch) -> None:
    await store.delete(KEY)
    assert "There is nothing" in await ask(store, branch, ref=ref(FIRST[2]))
    assert "Nothing in this conversation" in await ask(store, branch, query="ORD-7781")


async def test_a_search_leaves_out_messages_that_the_model_was_sent(store: Store, branch: RecallBranch) -> None:
    told = await ask(store, branch, query="valve broke")
    assert f"1. {ref(FIRST[2])}: the result of the tool read_log, message 3\n  2000| entry 2000: the" in told
    assert "1 matching message is already in your context in full." in told
    assert "A valve?" not in told
    told = await ask(store, branch, query="ORD-7781", lines="1-2")
    assert f"{ref(FIRST[0])}: what the user said (agent Planner), message 1" in told
    assert "lines and grep go with a ref" in told


async def test_only_this_branch_is_searched(store: Store, branch: RecallBranch) -> None:
    head = await keep(store, [{"role": "user", "content": "a rainbow"}], base=branch.tip)
    assert "a rainbow" in await ask(store, RecallBranch(key=KEY, tip=head, depth=6), query="rainbow")
    assert "Nothing" in await ask(store, branch, query="rainbow")


async def test_a_search_is_limited_to_the_newest_messages(
    store: Store, branch: RecallBranch, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = '{"query": "ORD-7781"}'
    with monkeypatch.context() as limited:
        limited.setattr("proxy.recall.answering._MOST_MESSAGES", 3)
        assert "Only the newest 3 of 5 messages were searched." in await Recall(store).answer(branch, question)
    with monkeypatch.context() as limited:
        limited.setattr("proxy.recall.answering._MOST_BYTES", 1)
        assert "Only the newest 1 of 5 messages were searched." in await Recall(store).answer(branch, question)
    monkeypatch.setattr("proxy.recall.answering._PORTION", 2)  # two readings
    assert ref(FIRST[0]) in await Recall(store).answer(branch, question)


class _Failing(Store):
    """A store that raises an error, or hangs where there is none."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    async def body(self, *_: Any) -> Any:
        if self.error is None:
            await anyio.sleep_forever()
        else:
            raise self.error

    async def path(self, *_: Any, **__: Any) -> Any:
        await self.body()


@pytest.mark.parametrize("arguments", ['{"ref": "ref_ffffffffffffffff"}', '{"query": "a"}'])
async def test_a_store_that_fails_or_hangs_is_reported_to_the_model(
    arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    branch = RecallBranch(key=KEY, tip="n", depth=1)
    assert await Recall(_Failing(StoreUnavailable("gone"))).answer(branch, arguments) == UNAVAILABLE
    monkeypatch.setattr("proxy.recall.answering._SECONDS", 0)
    assert await Recall(_Failing(None)).answer(branch, arguments) == UNAVAILABLE


async def test_a_call_is_answered_by_the_tool_of_its_name(store: Store, branch: RecallBranch) -> None:
    async def compress() -> str:
        return "It is being made."

    tools = OwnTools((RECALL, COMPRESS), Recall(store), branch, compress)
    assert tools.names == {RECALL, COMPRESS}
    assert "valve broke" in await tools.answer(Call(id="1", name=RECALL, arguments='{"query": "valve"}'))
    assert await tools.answer(Call(id="1", name=COMPRESS, arguments="what?")) == "It is being made."
    assert (
        await OwnTools((COMPRESS,), Recall(store), branch).answer(Call(id="1", name=COMPRESS, arguments=""))
        == NO_COMPRESSION
    )


async def test_an_internal_error_is_logged_and_the_model_is_told(caplog: pytest.LogCaptureFixture) -> None:
    tools = OwnTools((RECALL,), Recall(_Failing(ZeroDivisionError())), RecallBranch(key=KEY, tip="n", depth=1))
    assert await tools.answer(Call(id="1", name=RECALL, arguments='{"ref": "ref_ffffffffffffffff"}')) == FAILED
    assert "a call of recall_context failed" in caplog.text


async def test_thousands_of_messages_are_searched(store: Store) -> None:
    said = [{"role": "user", "content": f"{number} " + "parcel " * 50} for number in range(3_000)]
    said[17] = {"role": "user", "content": "the door code is 9-tulip-4"}
    head = await keep(store, said)
    told = await ask(store, RecallBranch(key=KEY, tip=head, depth=3_001), query="door code 9-tulip-4")
    assert "message 18\n  1| the door code is 9-tulip-4" in told


# ------------------------------------------------------------------------------------ the branch


def user_message(text: str) -> Message:
    return ChatMessage.of({"role": "user", "content": text})


async def test_a_branch_counts_stored_and_fresh_messages() -> None:
    assert RecallBranch(key="k", tip="n", depth=7, fresh=(user_message("a"),)).messages == 8


async def test_positions_of_messages_that_the_view_holds_unchanged() -> None:
    entries = [
        Entry(message=user_message(text), tokens=1, ref="ref", position=at)
        for at, text in ((3, "a"), (4, "b"), (9, "c"))
    ]
    view = [entries[0].message, user_message("stub of b"), entries[2].message]
    assert sent_whole(entries, view) == {3, 9}


# ------------------------------------------------------------------------------------ definitions


BOTH = VirtualToolSettings(recall_context=True, compress_chat_history=True)
ALWAYS = VirtualToolSettings(recall_context=True, compress_chat_history=True, only_with_tools=False)


def names(settings: VirtualToolSettings, *, has_tools: bool = True, **given: bool) -> tuple[str, ...]:
    return tuple(tool.name for tool in offered(settings, has_tools=has_tools, **given))


@pytest.mark.parametrize(
    ("switches", "expected"),
    [
        ({}, ()),
        ({"recall_context": True}, (RECALL,)),
        ({"compress_chat_history": True}, (COMPRESS,)),
        ({"recall_context": True, "compress_chat_history": True}, (RECALL, COMPRESS)),
    ],
)
async def test_the_tools_that_are_switched_on_are_offered(switches: dict[str, bool], expected: tuple[str, ...]) -> None:
    assert names(VirtualToolSettings(**switches)) == expected


async def test_without_tools_of_the_client_they_are_offered_only_if_the_settings_say_so() -> None:
    assert names(BOTH, has_tools=False) == ()
    assert names(ALWAYS, has_tools=False) == (RECALL, COMPRESS)


async def test_without_a_store_or_a_policy_none_is_offered() -> None:
    assert names(BOTH, stateless=True) == ()
    assert names(BOTH, off=True) == ()


async def test_the_definitions_are_short_and_say_how_to_leave_out_a_parameter() -> None:
    request = parse_chat_request(b'{"model": "m", "messages": [{"role": "user", "content": "a"}]}')
    made = CHAT.requests.offer_tools(request, offered(ALWAYS, has_tools=False)).tools
    assert made is not None
    assert len(made) < 1_400  # some 300 tokens
    recall, _ = offered(ALWAYS, has_tools=False)
    assert all(told.count("{unset}") == 1 for _, told in recall.parameters)


# ------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ('{"ref": " ref_1 "}', Asked(ref="ref_1", query="", lines="", grep="")),
        ('{"query": "a b", "ref": "", "lines": "", "grep": ""}', Asked(ref="", query="a b", lines="", grep="")),
        ('{"query": "a", "ref": null, "lines": null, "grep": null}', Asked(ref="", query="a", lines="", grep="")),
        ('{"ref": "r", "lines": "10 - 20", "grep": " x "}', Asked(ref="r", query="", lines="10-20", grep=" x ")),
        ('{"ref": "r", "lines": "7"}', Asked(ref="r", query="", lines="7-7", grep="")),
        ('{"ref": "r", "lines": 7}', Asked(ref="r", query="", lines="7-7", grep="")),
        ('{"ref": "r", "lines": [3, 9]}', Asked(ref="r", query="", lines="3-9", grep="")),
        ('{"ref": "r", "lines": "x"}', Asked(ref="r", query="", lines="x", grep="")),
        ('{"ref": "r", "more": 1}', Asked(ref="r", query="", lines="", grep="")),
    ],
)
async def test_valid_arguments(arguments: str, asked: Asked) -> None:
    assert read_asked(arguments) == asked


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "not valid JSON"),
        ('{"ref": "r"', "not valid JSON"),
        ("[" * 5_000, "not valid JSON"),
        ('["ref"]', "not a JSON object"),
        ('"ref_1"', "not a JSON object"),
        ("{}", "Neither"),
        ('{"ref": " ", "query": ""}', "Neither"),
        ('{"grep": "a"}', "Neither"),
        ('{"ref": "r", "query": "q"}', "Both"),
        ('{"ref": 7}', '"ref" must be a string'),
        ('{"query": ["a"]}', '"query" must be a string'),
        ('{"ref": "r", "grep": {}}', '"grep" must be a string'),
        ('{"ref": "r", "lines": true}', '"lines" must be a string'),
        ('{"ref": "r", "lines": [1, 2, 3]}', '"lines" must be a string'),
        ('{"ref": "r", "lines": []}', '"lines" must be a string'),
    ],
)
async def test_wrong_arguments_are_refused_with_what_is_allowed(arguments: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        read_asked(arguments)
    assert words in raised.value.message
    assert ALLOWED in raised.value.message
