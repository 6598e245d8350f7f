"""Reading a branch for a summary from a store with several branches and summaries."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from proxy.store import Store, SummaryRow, SummaryStatus
from proxy.summaries import Caller, Given, Work
from proxy.summaries.jobs import BranchState, Stretch, read_branch
from proxy.trimming import Summarize, SummaryRequest
from tests.support.talk import Talk, body

pytestmark = pytest.mark.anyio

EDIT = Summarize(mode="model")
TURNS = 6
GONE = BranchState(newest=None, attempt=None, stretch=None)


@pytest.fixture
async def talk(store: Store) -> Talk:
    """Twelve messages of 5 tokens: q0, a0, q1, …"""
    talk = Talk(store=store)
    for number in range(TURNS):
        await talk.say(f"q{number}", f"a{number}")
    return talk


async def nodes_of(talk: Talk) -> list[str]:
    session = await talk.store.session(talk.tenant, talk.session)
    assert session is not None
    return [row.node for row in await talk.store.path(talk.key, session.head)]


def work(talk: Talk, tip: str, stop: int, **changes: Any) -> Work:
    wanted = SummaryRequest(stop=stop, room=1_000, urgent=False)
    return Work(
        key=talk.key,
        session=talk.session,
        tip=tip,
        wanted=wanted,
        edit=EDIT,
        model="gpt",
        caller=Caller(tenant="tenant"),
        **changes,
    )


def row(name: str, nodes: list[str], until: int, **changes: Any) -> SummaryRow:
    plain = SummaryRow(
        id=name,
        node=nodes[until - 1],
        tip=nodes[-1],
        recipe=EDIT.recipe,
        until=until,
        generation=1,
        status=SummaryStatus.READY,
        reason="",
        model="m",
        text="a summary",
        state={"facts": {}, "told": "it went on"},
        tokens=9,
        covered_messages=until,
        covered_tokens=5 * until,
        predecessor=None,
        asked=False,
        usage=None,
        cost=None,
        exchange=None,
        created_at=1,
    )
    return replace(plain, **changes)


def count(messages: Any) -> list[int]:
    return [5] * len(messages)


async def look(talk: Talk, wanted: Work) -> BranchState:
    return await read_branch(talk.store, wanted, count)


def texts(span: Stretch | None) -> list[str]:
    assert span is not None
    return [message.text for message in span.messages]


async def test_without_a_summary_all_messages_up_to_the_stop_are_covered(talk: Talk) -> None:
    nodes = await nodes_of(talk)
    seen = await look(talk, work(talk, nodes[-1], 4))
    assert (seen.newest, seen.attempt) == (None, None)
    assert texts(seen.stretch) == ["q0", "a0", "q1", "a1"]
    assert seen.stretch is not None
    assert seen.stretch == Stretch(
        start=0, messages=seen.stretch.messages, nodes=tuple(nodes[:4]), tokens=20, earlier=(), predecessor=None
    )
    assert seen.stretch.stop == 4


async def test_the_summary_that_covers_most_is_the_predecessor(talk: Talk) -> None:
    nodes = await nodes_of(talk)
    first, second = row("1", nodes, 2), row("2", nodes, 6, created_at=2)
    other = row("3", nodes, 8, recipe="another", created_at=3)
    for each in (first, second, other):
        assert await talk.store.keep_summary(talk.key, each)
    seen = await look(talk, work(talk, nodes[-1], 10))
    assert seen.stretch is not None
    assert seen.stretch.predecessor == second
    assert (seen.stretch.start, seen.stretch.stop, seen.stretch.tokens) == (6, 10, 50)
    assert texts(seen.stretch) == ["q3", "a3", "q4", "a4"]
    assert seen.stretch.earlier == ("q0", "q1", "q2")
    assert seen.attempt == second


async def test_a_summary_that_covers_enough_is_found(talk: Talk) -> None:
    nodes = await nodes_of(talk)
    kept = row("1", nodes, 6)
    await talk.store.keep_summary(talk.key, kept)
    for stop in (5, 6):
        seen = await look(talk, work(talk, nodes[-1], stop))
        assert (seen.newest, seen.stretch) == (kept, None)


async def test_a_refused_summary_is_an_attempt_and_no_predecessor(talk: Talk) -> None:
    nodes = await nodes_of(talk)
    ready = row("1", nodes, 4)
    refused = row("2", nodes, 8, status=SummaryStatus.REFUSED, reason="it is empty", text="", created_at=2)
    for each in (ready, refused):
        await talk.store.keep_summary(talk.key, each)
    seen = await look(talk, work(talk, nodes[-1], 8))
    assert seen.attempt == refused
    assert seen.stretch is not None
    assert seen.stretch.predecessor == ready


async def test_summaries_of_other_branches_are_ignored(talk: Talk) -> None:
    old = await nodes_of(talk)
    asked = body("user", "q1 in other words")
    exchange = await talk.begin(asked, base=old[1], kind="rewind")
    await talk.settle(exchange, asked, base=old[1], at_head=False, replies=(body("assistant", "b1"),))
    nodes = await nodes_of(talk)
    assert len(nodes) == 4
    for name, until in (("1", 12), ("2", 10), ("3", 8), ("4", 6)):
        await talk.store.keep_summary(talk.key, row(name, old, until))
    seen = await look(talk, work(talk, nodes[-1], 4))
    assert seen.attempt is None
    assert texts(seen.stretch) == ["q0", "a0", "q1 in other words", "b1"]

    shared = row("5", old, 2)  # where the branches part
    await talk.store.keep_summary(talk.key, shared)
    seen = await look(talk, work(talk, nodes[-1], 4))
    assert seen.stretch is not None
    assert seen.stretch.predecessor == shared
    assert texts(seen.stretch) == ["q1 in other words", "b1"]
    assert seen.stretch.earlier == ("q0",)


@pytest.mark.parametrize("spoilt", [{"generation": 5}, {"state": {}}, {"state": {"facts": 3, "told": ""}}])
async def test_a_summary_of_the_last_generation_or_without_state_is_no_predecessor(
    talk: Talk, spoilt: dict[str, Any]
) -> None:
    nodes = await nodes_of(talk)
    kept = row("1", nodes, 6, **spoilt)
    await talk.store.keep_summary(talk.key, kept)
    seen = await look(talk, work(talk, nodes[-1], 10))
    assert seen.newest == kept
    assert seen.stretch is not None
    assert (seen.stretch.start, seen.stretch.predecessor, len(seen.stretch.messages)) == (0, None, 10)


@pytest.mark.parametrize("portion", [1, 4, 5, 100])
async def test_a_long_branch_is_read_in_portions(talk: Talk, monkeypatch: pytest.MonkeyPatch, portion: int) -> None:
    monkeypatch.setattr("proxy.summaries.jobs._PORTION", portion)
    nodes = await nodes_of(talk)
    whole = await look(talk, work(talk, nodes[-1], 9))
    assert texts(whole.stretch) == ["q0", "a0", "q1", "a1", "q2", "a2", "q3", "a3", "q4"]
    kept = row("1", nodes, 5)
    await talk.store.keep_summary(talk.key, kept)
    seen = await look(talk, work(talk, nodes[-1], 9))
    assert texts(seen.stretch) == ["a2", "q3", "a3", "q4"]
    assert seen.stretch is not None
    assert (seen.stretch.predecessor, seen.stretch.tokens) == (kept, 45)
    assert seen.stretch.nodes == tuple(nodes[5:9])
    assert seen.stretch.earlier == ("q0", "q1", "q2")


async def test_a_branch_that_is_too_short_has_no_stretch(talk: Talk) -> None:
    nodes = await nodes_of(talk)
    assert await look(talk, work(talk, nodes[-1], 13)) == GONE
    assert await look(talk, work(talk, "0" * 40, 2)) == GONE


async def test_given_messages_are_not_read_from_the_store(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = await nodes_of(talk)
    rows = await talk.store.path(talk.key, nodes[-1])
    kept = row("1", nodes, 4)
    await talk.store.keep_summary(talk.key, kept)
    monkeypatch.setattr(talk.store, "path", None)
    given = Given(messages=tuple(each.message for each in rows), nodes=(*nodes[:-1], "not stored yet"))
    asked = work(talk, "not stored yet", 12, given=given)
    seen = await look(talk, asked)
    assert seen.stretch is not None
    assert (seen.stretch.predecessor, seen.stretch.tokens) == (kept, 60)
    assert seen.stretch.nodes[-1] == "not stored yet"


@pytest.mark.parametrize("known", [0, 4])
async def test_given_messages_follow_the_stored_ones(talk: Talk, known: int) -> None:
    nodes = await nodes_of(talk)
    rows = await talk.store.path(talk.key, nodes[-1])
    kept = row("1", nodes, 4)
    if known:
        await talk.store.keep_summary(talk.key, kept)
    given = Given(messages=tuple(each.message for each in rows[8:]), nodes=tuple("abcd"), base=nodes[7])
    seen = await look(talk, work(talk, "d", 10, given=given))
    assert texts(seen.stretch) == ["q0", "a0", "q1", "a1", "q2", "a2", "q3", "a3", "q4", "a4"][known:]
    assert seen.stretch is not None
    assert (seen.stretch.nodes, seen.stretch.tokens) == ((*nodes[known:8], "a", "b"), 50)
    assert seen.stretch.predecessor == (kept if known else None)
    assert await look(talk, work(talk, "d", 10, given=replace(given, base="0" * 40))) == GONE
