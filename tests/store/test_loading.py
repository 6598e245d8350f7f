from __future__ import annotations

import asyncio
import json

import pytest
from msgspec.structs import replace

from proxy.errors import Conflict, InvalidRequest
from proxy.store.records import SessionRow, Source, StandingCut
from proxy.store.store import Store
from proxy.trimming import Change
from tests.support.story import CUT, LATER, told
from tests.support.talk import Talk, body, message

pytestmark = pytest.mark.anyio


async def test_an_export_makes_the_same_log_under_another_name(store: Store) -> None:
    records = await told(store)
    lines = [json.loads(json.dumps(record)) for record in records]  # by any JSON library
    made = await store.load("to", "copy", lines)
    old, new = (
        Talk(store=store, tenant="from", session="story"),
        Talk(store=store, tenant="to", session="copy"),
    )
    before = await store.session("from", "story")
    assert before is not None
    assert made == await store.session("to", "copy")
    assert _log_of(made) == _log_of(before)
    assert (made.requests, made.tokens_sent, made.tokens_saved) == (0, 0, 0)
    leaves = {branch.head for branch in await store.branches(old.key)}
    assert {branch.head for branch in await store.branches(new.key)} == leaves
    for leaf in leaves:
        for theirs, ours in zip(
            await store.path(old.key, leaf), await store.path(new.key, leaf), strict=True
        ):
            assert ours.message == theirs.message
            assert (ours.tokens, ours.tokens_total, ours.round) == (
                theirs.tokens,
                theirs.tokens_total,
                theirs.round,
            )
            assert (ours.source, ours.agent, ours.created_at) == (
                theirs.source,
                theirs.agent,
                theirs.created_at,
            )
            assert (ours.exchange, ours.policy, ours.arrival) == (None, theirs.policy, theirs.arrival)
    assert await store.instructions(new.key) == await store.instructions(old.key)
    first, reply = (await store.path(new.key, made.head))[:2]
    assert first.policy == "v1"
    assert first.arrival == (
        Change(
            position=0,
            edit="truncate_tool_output",
            reason="long",
            message=message("user", "o"),
            tokens_before=4,
            tokens_after=1,
        ),
    )
    assert (reply.policy, reply.arrival) == (None, None)
    names = [row.node for row in await store.path(new.key, made.head)]
    assert await store.cut(new.key, names, "default", "writer") == StandingCut(
        cut=CUT, node=first.node, kept=None
    )
    later = await store.cut(old.key, names, "default", None)
    assert await store.cut(new.key, names, "default", None) == later
    assert later == StandingCut(cut=LATER, node=names[2], kept=(names[1], names[2]))
    assert await store.exchanges(new.key, limit=9) == ([], None)
    assert (made.hidden, made.summaries, made.cost, made.calls) == (1, 2, None, ("finish",))
    rows = await store.summary_rows(old.key)
    assert await store.summary_rows(new.key) == [
        replace(row, usage=None, cost=None, exchange=None) for row in rows
    ]
    (hidden,) = [record async for record in store.export(new.key) if record["record"] == "hidden"]
    assert [
        hidden | {"exchange": record["exchange"]} for record in records if record["record"] == "hidden"
    ] == [record for record in records if record["record"] == "hidden"]
    await new.say("three", "3")  # and it goes on
    assert await new.texts((await store.find("copy"))[0].head) == [
        *("one \x00", "1", "zwei", "2", "drei", "3"),
        *("three", "3"),
    ]


def _log_of(row: SessionRow) -> tuple[object, ...]:
    return (
        (row.head, row.instructions, row.arrival, row.created_at, row.updated_at),
        (row.messages, row.rounds, row.tokens),
    )


async def test_a_session_that_is_there_is_not_loaded_over(store: Store) -> None:
    records = await told(store)
    before = await store.session("from", "story")
    with pytest.raises(Conflict, match="'story'"):
        await store.load("from", "story", records)
    assert await store.session("from", "story") == before
    results = await asyncio.gather(
        *(store.load("to", "copy", records) for _ in range(4)), return_exceptions=True
    )
    assert sorted(type(result).__name__ for result in results) == [
        "Conflict",
        "Conflict",
        "Conflict",
        "SessionRow",
    ]


async def test_an_empty_session_is_a_session(store: Store) -> None:
    await Talk(store=store, tenant="from", session="empty").begin(body("user", "never answered"))
    records = [record async for record in store.export(Talk(store=store, tenant="from", session="empty").key)]
    made = await store.load("to", "empty", records)
    assert (made.head, made.messages, made.instructions) == ("", 0, None)


async def test_a_name_that_cannot_be_stored_is_refused(store: Store) -> None:
    with pytest.raises(InvalidRequest, match="session holds a NUL"):
        await store.load("to", "a\x00b", await told(store))


async def test_messages_from_elsewhere_are_imported(store: Store) -> None:
    records = [record for record in await told(store) if record["record"] not in {"exchange", "form"}]
    for record in records:
        record.pop("source", None)
    made = await store.load("to", "copy", records)
    assert {
        row.source for row in await store.path(Talk(store=store, tenant="to", session="copy").key, made.head)
    } == {Source.IMPORT}
