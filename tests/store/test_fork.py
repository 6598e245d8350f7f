"""Forks: a session is created from another one's history."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import pytest
from sqlalchemy import delete

from proxy.conversation import ROOT, body_id
from proxy.errors import Conflict, InvalidRequest, NotFound
from proxy.store import archive as module
from proxy.store.archive import fork_session
from proxy.store.database import Result, Unit
from proxy.store.records import FORKED, Exchange, Kept, SessionRow
from proxy.store.schema import BODIES
from proxy.store.store import Store
from proxy.trimming import Cut, Gap
from tests.support.asides import HIDDEN, RECIPE, failed, reply, settle, summary
from tests.support.story import SHORTENED
from tests.support.talk import Talk, body, infer, message

pytestmark = pytest.mark.anyio

CUT = Cut(
    position=3,
    policy="default",
    version="v1",
    changes=(),
    tokens=9,
    messages=1,
    tool_calls=0,
    gaps=(Gap(start=0, stop=1, edit="drop_oldest", reason="old", tokens=5, tool_calls=0),),
)


async def told(store: Store) -> tuple[Talk, list[str]]:
    """Store a session with summaries and hidden rounds; return it with the nodes of its branch."""
    talk = Talk(store=store, tenant="team", session="story")
    asked = body("user", "one", 4)
    exchange = await talk.begin(asked, instructions=(message("system", "brief"),))
    first = await settle(talk, exchange, asked, replies=(reply("1", HIDDEN),), arrivals=((SHORTENED,),), scale=1.5)
    await talk.say("two", "2", cut=CUT, kept=Kept(nodes=(first.head,), messages=(0,)))
    calls = [{"id": "c1", "type": "function", "function": {"name": "finish", "arguments": "{}"}}]
    asked = body("user", "three")
    exchange = await talk.begin(asked, tools=b'[{"x":1}]')
    await settle(talk, exchange, asked, replies=(reply("3", HIDDEN, tool_calls=calls),), cost=0.5)
    row = await row_of(talk)
    nodes = [each.node for each in await store.path(talk.key, row.head)]
    await store.keep_summary(talk.key, summary("a", nodes[1], 2, tip=nodes[5]))
    await store.keep_summary(talk.key, summary("b", nodes[3], 4, tip=nodes[5], predecessor="sum_a"))
    await store.keep_summary(talk.key, failed("c", nodes[1], 2, created_at=9_000))
    return talk, nodes


async def row_of(talk: Talk) -> SessionRow:
    row = await talk.store.session(talk.tenant, talk.session)
    assert row is not None
    return row


async def records(store: Store, key: str, kind: str) -> list[dict[str, Any]]:
    return [record async for record in store.export(key) if record["record"] == kind]


async def test_a_fork_has_the_history_and_stands_at_its_end(store: Store) -> None:
    talk, nodes = await told(store)
    before = await row_of(talk)
    made = await store.fork("team", talk.key, nodes[-1], "fork")
    new = Talk(store=store, tenant="team", session="fork")
    assert made == await row_of(new)
    assert (made.head, made.messages, made.rounds, made.tokens) == (nodes[-1], 6, 3, before.tokens)
    assert (made.model, made.tools, made.scale) == (before.model, before.tools, 1.5)
    assert (made.instructions, made.arrival) == (before.instructions, FORKED)
    assert (made.requests, made.tokens_sent, made.tokens_saved, made.cost) == (0, 0, 0, None)
    assert (made.hidden, made.summaries, made.calls) == (2, 2, ("finish",))
    assert before.updated_at < made.created_at <= made.updated_at
    assert await row_of(talk) == before
    for theirs, ours in zip(await store.path(talk.key, nodes[-1]), await store.path(new.key, nodes[-1]), strict=True):
        assert (ours.node, ours.message, ours.tokens, ours.tokens_total, ours.arrival, ours.policy) == (
            theirs.node,
            theirs.message,
            theirs.tokens,
            theirs.tokens_total,
            theirs.arrival,
            theirs.policy,
        )
        assert (ours.source, ours.created_at, ours.exchange) == (theirs.source, theirs.created_at, None)
    assert await store.instructions(new.key) == await store.instructions(talk.key)
    assert made.tools is not None
    assert await store.tools(new.key, made.tools) == b'[{"x":1}]'
    assert await store.cut(new.key, nodes, "default", None) == await store.cut(talk.key, nodes, "default", None)
    assert await store.exchanges(new.key, limit=9) == ([], None)
    old = [{**each, "exchange": None} for each in await records(store, talk.key, "hidden")]
    assert await records(store, new.key, "hidden") == old


async def test_originals_are_read_in_the_fork_after_the_other_is_gone(store: Store) -> None:
    talk, nodes = await told(store)
    await store.fork("team", talk.key, nodes[-1], "fork")
    await store.delete(talk.key)
    new = Talk(store=store, tenant="team", session="fork")
    asked = message("user", "one")
    assert await store.body(new.key, body_id(asked.raw)[:16]) == (body_id(asked.raw), asked)
    await new.say("four", "4")
    assert await new.texts((await row_of(new)).head) == ["one", "1", "two", "2", "three", "3", "four", "4"]


async def test_ready_summaries_come_along_and_are_of_the_forks_branch(store: Store) -> None:
    talk, nodes = await told(store)
    await store.fork("team", talk.key, nodes[3], "fork")  # before the end of the branch they were made on
    key = Talk(store=store, tenant="team", session="fork").key
    rows = await store.summary_rows(key)
    assert [(row.id, row.tip, row.predecessor) for row in rows] == [
        ("sum_b", nodes[3], "sum_a"),
        ("sum_a", nodes[3], None),
    ]
    assert {(row.cost, row.exchange) for row in rows} == {(None, None)}  # it was paid for elsewhere
    assert [row.usage for row in rows] == [None, None]
    ready, attempt = await store.ready_summary(key, [nodes[3]], RECIPE)
    assert (ready, attempt) == (rows[0], rows[0])
    assert (await row_of(Talk(store=store, tenant="team", session="fork"))).cost is None


async def test_what_comes_after_the_node_stays_away(store: Store) -> None:
    talk, nodes = await told(store)
    made = await store.fork("team", talk.key, nodes[1], "fork")
    key = Talk(store=store, tenant="team", session="fork").key
    assert (made.head, made.messages, made.hidden, made.summaries, made.calls) == (nodes[1], 2, 1, 1, ())
    assert len(await records(store, key, "node")) == 2
    assert len(await records(store, key, "body")) == 3  # the tools are one
    assert await records(store, key, "cut") == []
    assert [branch.head for branch in await store.branches(key)] == [nodes[1]]


async def test_both_go_on_by_themselves(store: Store) -> None:
    talk, nodes = await told(store)
    await store.fork("team", talk.key, nodes[-1], "fork")
    new = Talk(store=store, tenant="team", session="fork")
    await new.say("left", "l")
    await talk.say("right", "r")
    assert (await new.texts((await row_of(new)).head))[-2:] == ["left", "l"]
    assert (await talk.texts((await row_of(talk)).head))[-2:] == ["right", "r"]
    again = await store.fork("team", new.key, (await row_of(new)).head, "second")
    assert again.messages == 8


async def test_without_an_id_each_reply_leads_to_where_it_came_from(store: Store) -> None:
    talk, nodes = await told(store)

    async def leads_to(key: str, node: str) -> str | None:
        messages = [row.message for row in await store.path(key, node)]
        return (await infer(store, messages, tenant="team")).session

    assert await leads_to(talk.key, nodes[-1]) == "story"
    await store.fork("team", talk.key, nodes[-1], "fork")
    for node in (nodes[1], nodes[3], nodes[5]):
        assert await leads_to(talk.key, node) == "story"  # of two nobody would know which it is
    new = Talk(store=store, tenant="team", session="fork")
    own = await new.say("left", "l")
    assert await leads_to(new.key, own.head) == "fork"
    await store.fork("team", new.key, own.head, "second")
    assert await leads_to(new.key, own.head) == "fork"


# ------------------------------------------------------------------------------------ what is asked of it


async def test_a_history_without_instructions_and_tools_is_forked(store: Store) -> None:
    talk = Talk(store=store, tenant="team", session="plain")
    settled = await talk.say("one", "1")
    made = await store.fork("team", talk.key, settled.head, "fork")
    assert (made.instructions, made.tools, made.hidden, made.summaries) == (None, None, 0, 0)
    assert await Talk(store=store, tenant="team", session="fork").texts(made.head) == ["one", "1"]


@pytest.mark.parametrize("node", [ROOT, "ab" * 20, "a\x00b"])
async def test_a_node_that_is_not_there_makes_nothing(store: Store, node: str) -> None:
    talk, _ = await told(store)
    with pytest.raises(NotFound, match="no node"):
        await store.fork("team", talk.key, node, "fork")
    assert await store.find("fork") == []


async def test_the_session_of_another_is_not_there(store: Store) -> None:
    talk, nodes = await told(store)
    for tenant, key in (("other", talk.key), ("team", "0" * 32)):
        with pytest.raises(NotFound, match="no such session"):
            await store.fork(tenant, key, nodes[-1], "fork")
    with pytest.raises(InvalidRequest, match="session holds a NUL"):
        await store.fork("team", talk.key, nodes[-1], "a\x00b")


async def test_an_id_that_is_taken_stays_whose_it_is(store: Store) -> None:
    talk, nodes = await told(store)
    before = await row_of(talk)
    with pytest.raises(Conflict, match="'story'"):
        await store.fork("team", talk.key, nodes[-1], "story")
    assert await row_of(talk) == before
    asked = [store.fork("team", talk.key, node, "fork") for node in nodes[:4]]
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["Conflict"] * 3 + ["SessionRow"]


# ---------------------------------------------------------------------------------------- in portions


@pytest.fixture
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PORTION", 2)


@pytest.mark.usefixtures("small_portions")
async def test_portions_make_the_same_as_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    talk, nodes = await told(store)
    await store.fork("team", talk.key, nodes[-1], "pieces")
    monkeypatch.setattr(module, "PORTION", 100)
    await store.fork("team", talk.key, nodes[-1], "whole")
    pieces, whole = [
        [record async for record in store.export(Talk(store=store, tenant="team", session=name).key)]
        for name in ("pieces", "whole")
    ]
    assert pieces[1:] == whole[1:]
    for record in (pieces[0], whole[0]):
        for name in ("id", "created_at", "updated_at"):
            del record[name]
    assert pieces[0] == whole[0]


class Meddled:
    """A database that calls a function before the write with this number."""

    blocks: ClassVar[bool] = False
    in_order: ClassVar[bool] = False

    def __init__(self, store: Store, number: int, action: Callable[[], Awaitable[object]]) -> None:
        self._database = store._database
        self._left = number
        self._action = action

    async def read(self, unit: Unit[Result], *, short: bool = False) -> Result:
        return await self._database.read(unit, short=short)

    async def write(self, unit: Unit[Result], *, durable: bool = True, again: bool = True) -> Result:
        self._left -= 1
        if self._left == 0:
            await self._action()
        return await self._database.write(unit, durable=durable, again=again)

    def start(self, exchange: Exchange) -> asyncio.Future[Any]:
        return self._database.start(exchange)

    @property
    def is_busy(self) -> bool:
        return self._database.is_busy

    async def probe(self, unit: Unit[None], *, same: bool) -> None:
        await self._database.probe(unit, same=same)

    async def close(self) -> None:
        await self._database.close()


@pytest.mark.usefixtures("small_portions")
async def test_a_source_that_goes_meanwhile_leaves_no_half_fork(store: Store) -> None:
    talk, nodes = await told(store)
    meddled = Meddled(store, 2, lambda: store.delete(talk.key))
    with pytest.raises(NotFound, match="deleted while"):
        await fork_session(meddled, "team", talk.key, nodes[-1], "fork")
    assert await store.find("fork") == []


@pytest.mark.usefixtures("small_portions")
async def test_a_text_that_is_missing_leaves_no_half_fork(store: Store) -> None:
    talk, nodes = await told(store)
    text = body_id(message("user", "two").raw)
    lose = delete(BODIES).where(BODIES.c.session == talk.key, BODIES.c.body == text)
    meddled = Meddled(store, 2, lambda: store._database.write(lambda c: c.execute(lose)))
    with pytest.raises(NotFound, match="deleted while"):
        await fork_session(meddled, "team", talk.key, nodes[-1], "fork")
    assert await store.find("fork") == []


@pytest.mark.usefixtures("small_portions")
async def test_a_fork_that_is_deleted_meanwhile_stays_away(store: Store) -> None:
    talk, nodes = await told(store)
    key = Talk(store=store, tenant="team", session="fork").key
    with pytest.raises(Conflict, match="deleted while"):
        await fork_session(Meddled(store, 2, lambda: store.delete(key)), "team", talk.key, nodes[-1], "fork")
    assert await store.find("fork") == []


@pytest.mark.usefixtures("small_portions")
async def test_what_was_said_in_a_fork_meanwhile_is_not_lost(store: Store) -> None:
    talk, nodes = await told(store)
    new = Talk(store=store, tenant="team", session="fork")
    made = await fork_session(Meddled(store, 2, lambda: new.say("early", "e")), "team", talk.key, nodes[-1], "fork")
    assert made.head == nodes[-1]
    early, *_ = [each.head for each in await store.branches(new.key) if each.head != nodes[-1]]
    assert await new.texts(early) == ["early", "e"]


@pytest.mark.usefixtures("small_portions")
async def test_one_whose_caller_is_cancelled_is_made_before_the_store_is_closed(store: Store, store_url: str) -> None:
    talk, nodes = await told(store)
    other = await Store.open(store_url, migrate=False)
    forking = asyncio.get_running_loop().create_task(other.fork("team", talk.key, nodes[-1], "fork"))
    refused = asyncio.get_running_loop().create_task(other.fork("team", talk.key, nodes[-1], "story"))
    await asyncio.sleep(0)
    forking.cancel()
    refused.cancel()
    for task in (forking, refused):
        with pytest.raises(asyncio.CancelledError):
            await task
    await other.close()
    (made,) = await store.find("fork")
    assert (made.head, made.messages) == (nodes[-1], 6)
