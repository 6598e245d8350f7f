"""Calls of the proxy's own tools, answered from a store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import orjson
import pytest

from proxy.conversation import ROOT, body_of
from proxy.dialects import Call, Message
from proxy.dialects.chat.message import ChatMessage
from proxy.errors import StoreUnavailable
from proxy.recall import COMPRESS, RECALL, OwnTools, Recall, RecallBranch, ref_of, sent_whole
from proxy.recall.answering import FAILED, NO_COMPRESSION, UNAVAILABLE
from proxy.store import Body, Opening, Reply, Settlement, Status, Store, session_key
from proxy.trimming import Entry

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
    opened = await Store.open(f"sqlite:///{tmp_path / 'palimpsest.db'}")
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


pytestmark = pytest.mark.anyio


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
        ({"ref": "the log"}, "'the log' is no ref"),
        ({"ref": "x" * 5_000}, "x' is no ref"),
        ({"ref": "ref_ffffffffffffffff", "lines": "b-a"}, "lines is 'b-a'."),
        ({"ref": "ref_ffffffffffffffff", "grep": "("}, "grep is no regular expression"),
        ({"ref": "a", "query": "b"}, "Both"),
        ({}, "Neither"),
        ({"query": "helicopter"}, "Nothing in this conversation matches."),
    ],
)
async def test_what_cannot_be_is_said(
    store: Store, branch: RecallBranch, arguments: dict[str, Any], words: str
) -> None:
    told = await ask(store, branch, **arguments)
    assert words in told
    assert len(told) < 600


async def test_nothing_is_read_of_another_session(store: Store, branch: RecallBranch) -> None:
    other = {"role": "user", "content": "the secret of the other one is a valve"}
    await keep(store, [other], session="other")
    assert "There is nothing" in await ask(store, branch, ref=ref(other))
    assert "secret" not in await ask(store, branch, query="secret valve")


async def test_what_was_deleted_is_not_there(store: Store, branch: RecallBranch) -> None:
    await store.delete(KEY)
    assert "There is nothing" in await ask(store, branch, ref=ref(FIRST[2]))
    assert "Nothing in this conversation" in await ask(store, branch, query="ORD-7781")


async def test_a_search_finds_what_is_not_before_the_model(store: Store, branch: RecallBranch) -> None:
    told = await ask(store, branch, query="valve broke")
    assert f"1. {ref(FIRST[2])}: the result of the tool read_log, message 3\n  2000| entry 2000: the" in told
    assert "1 message with such words stands in full before you." in told
    assert "A valve?" not in told
    told = await ask(store, branch, query="ORD-7781", lines="1-2")
    assert f"{ref(FIRST[0])}: what the user said (agent Planner), message 1" in told
    assert "lines and grep go with a ref" in told


async def test_only_this_branch_is_searched(store: Store, branch: RecallBranch) -> None:
    head = await keep(store, [{"role": "user", "content": "a rainbow"}], base=branch.tip)
    assert "a rainbow" in await ask(store, RecallBranch(key=KEY, tip=head, depth=6), query="rainbow")
    assert "Nothing" in await ask(store, branch, query="rainbow")


async def test_so_much_is_searched_and_no_more(
    store: Store, branch: RecallBranch, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = '{"query": "ORD-7781"}'
    told = await Recall(store, most_messages=3).answer(branch, question)
    assert "Only the newest 3 of 5 messages were searched." in told
    told = await Recall(store, most_bytes=1).answer(branch, question)
    assert "Only the newest 1 of 5 messages were searched." in told
    monkeypatch.setattr("proxy.recall.answering._PORTION", 2)  # two readings
    assert ref(FIRST[0]) in await Recall(store).answer(branch, question)


class _Failing(Store):
    """A store whose database does what it is told."""

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
async def test_a_store_that_fails_or_waits_is_said_to(arguments: str) -> None:
    branch = RecallBranch(key=KEY, tip="n", depth=1)
    assert await Recall(_Failing(StoreUnavailable("gone"))).answer(branch, arguments) == UNAVAILABLE
    assert await Recall(_Failing(None), seconds=0).answer(branch, arguments) == UNAVAILABLE


async def test_calls_are_answered_by_their_names(store: Store, branch: RecallBranch) -> None:
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


async def test_a_mistake_of_ours_is_said_and_logged(caplog: pytest.LogCaptureFixture) -> None:
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


async def test_it_has_the_stored_messages_and_the_new_ones() -> None:
    assert RecallBranch(key="k", tip="n", depth=7, fresh=(user_message("a"),)).messages == 8


async def test_what_stands_in_the_view_as_it_is() -> None:
    entries = [
        Entry(message=user_message(text), tokens=1, ref="ref", position=at)
        for at, text in ((3, "a"), (4, "b"), (9, "c"))
    ]
    view = [entries[0].message, user_message("stub of b"), entries[2].message]
    assert sent_whole(entries, view) == {3, 9}
