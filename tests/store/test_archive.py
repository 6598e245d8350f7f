"""Export and import."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from msgspec.structs import replace

from proxy.conversation import ROOT, body_id
from proxy.dialects import JsonObject
from proxy.dialects.chat.message import ChatMessage
from proxy.errors import Conflict, InvalidRequest, NotFound
from proxy.pipeline.session_view import read_lines, write_lines
from proxy.store import tree
from proxy.store.archive import read_records
from proxy.store.database import StoreConnection
from proxy.store.records import Body, Kept, SessionRow, Source, StandingCut, Status
from proxy.store.store import Store
from proxy.trimming import Cut, Gap
from tests.support.asides import HIDDEN, failed, reply, say, summary
from tests.support.stores import empty_store
from tests.support.story import CUT, LATER, SHORTENED, told
from tests.support.talk import Talk, body, message

pytestmark = pytest.mark.anyio


async def exported(store: Store, key: str) -> list[JsonObject]:
    return [record async for record in store.export(key)]


async def test_everything_of_a_session_is_in_its_export(store: Store) -> None:
    talk = Talk(store=store)
    asked = Body(message=ChatMessage(b'{"role":"user",  "content":"spaced"}'), tokens=4)
    exchange = await talk.begin(asked, instructions=(message("system", "x"),), tools=b"[{}]")
    gap = Gap(start=0, stop=1, edit="drop_oldest", reason="old", tokens=4, tool_calls=0)
    made = await talk.settle(
        exchange,
        asked,
        replies=(body("assistant", "1"),),
        cut=Cut(
            position=1, policy="default", version="v1", changes=(), tokens=9, messages=1, tool_calls=0, gaps=(gap,)
        ),
        kept=Kept(nodes=(), messages=()),
    )
    failed = await talk.begin(body("user", "never answered"), forms=((made.head, message("assistant", "one")),))
    await talk.settle(failed, status=Status.FAILED)
    records = await exported(store, talk.key)
    kinds = [record["record"] for record in records]
    assert kinds == ["session", "exchange", "exchange", "cut", "form", "instructions", "node", "node", *["body"] * 5]
    first = records[0]
    assert (first["format"], first["tenant"], first["id"], first["head"]) == (1, "tenant", "session", made.head)
    assert "session" not in first
    texts = {
        orjson.dumps(record["data"]) if "data" in record else record["text"].encode()
        for record in records
        if record["record"] == "body"
    }
    assert texts == {
        asked.message.raw,
        message("assistant", "1").raw,
        message("user", "never answered").raw,
        message("assistant", "one").raw,
        b"[{}]",
    }
    assert [record for record in records if record.get("text")] == [
        record for record in records if record.get("tokens") == 4 and record["record"] == "body"
    ]
    assert {record["id"]: record["status"] for record in records if record["record"] == "exchange"} == {
        exchange: "complete",
        failed: "failed",
    }
    (kept,) = (record for record in records if record["record"] == "cut")
    assert kept["changes"] == {"why": [["drop_oldest", "old"]], "gaps": [[0, 0, 1, 4, 0]], "kept": []}
    assert orjson.loads(orjson.dumps(records)) == records  # plain JSON


async def test_forms_are_read_once_for_an_export_and_not_for_a_message_that_is_there(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Talk(store=store)
    said = [await talk.say(f"question {number}", f"answer {number}") for number in range(5)]
    forms = [(made.head, message("assistant", f"form {number}")) for number, made in enumerate(said)]
    await talk.begin(body("user", "more"), forms=tuple(forms[:3]))
    await talk.begin(body("user", "and more"), forms=tuple(forms[2:]))
    whole = await exported(store, talk.key)
    assert [record["data"]["content"] for record in whole if record.get("data", {}).get("content", "")[:4] == "form"]
    read: list[str] = []
    found = tree.forms_in

    def forms_in(connection: StoreConnection, key: str) -> list[tree.Form]:
        read.append(key)
        return found(connection, key)

    monkeypatch.setattr("proxy.store.tree.forms_in", forms_in)
    monkeypatch.setattr("proxy.store.archive._AT_ONCE", 2)
    assert await exported(store, talk.key) == whole
    assert len(read) == 2  # once for the forms, once for the texts
    (reply,) = [row for row in await store.path(talk.key, said[0].head) if row.node == said[0].head]
    assert await store.body(talk.key, reply.body[:8]) is not None
    assert len(read) == 2
    assert await store.body(talk.key, body_id(forms[0][1].raw)[:12]) is not None
    assert len(read) == 3


async def test_what_stands_beside_the_messages_is_in_it_but_for_attempts(store: Store) -> None:
    talk = Talk(store=store)
    made = await say(talk, "one", reply("1", HIDDEN))
    for row in (summary("b", made.head, 2, created_at=2), summary("a", made.nodes[0], 1, created_at=1)):
        assert await store.keep_summary(talk.key, row)
    await store.keep_summary(talk.key, failed("c", made.head, 2))
    records = await exported(store, talk.key)
    (hidden,) = (record for record in records if record["record"] == "hidden")
    assert hidden["node"] == made.head
    assert [text.encode() for text in hidden["before"]] == [each.raw for each in HIDDEN.before]
    assert HIDDEN.reply is not None
    assert hidden["reply"].encode() == HIDDEN.reply.raw
    kept = [record for record in records if record["record"] == "summary"]
    assert [(each["id"], each["state"], each["cost"]) for each in kept] == [
        ("sum_a", {"values": ["42"]}, 0.25),
        ("sum_b", {"values": ["42"]}, 0.25),
    ]
    kinds = [record["record"] for record in records]
    assert max(kinds.index("hidden"), kinds.index("summary")) < kinds.index("node")  # what they name
    assert orjson.loads(orjson.dumps(records)) == records


async def test_a_long_session_comes_page_by_page_whole_and_parents_first(store: Store) -> None:
    talk = Talk(store=store)
    asked = [body("user", f"m{number}") for number in range(250)]
    exchange = await talk.begin(*asked)
    await talk.settle(exchange, *asked, replies=(body("assistant", "end"),))
    records = await exported(store, talk.key)
    seen = {ROOT}
    for record in records:
        if record["record"] == "node":
            assert record["parent"] in seen
            seen.add(record["node"])
    assert len(seen) == 252
    assert len({record["body"] for record in records if record["record"] == "body"}) == 251


async def test_a_session_nobody_knows_has_no_export(store: Store) -> None:
    with pytest.raises(NotFound):
        await exported(store, "none")


async def test_an_export_of_a_session_that_is_deleted_meanwhile_ends_with_that(store: Store) -> None:
    talk = Talk(store=store)
    await talk.say("one", "1")
    records = store.export(talk.key)
    assert (await anext(records))["record"] == "session"
    assert await store.delete(talk.key)
    with pytest.raises(NotFound, match="deleted while it was exported"):
        [record async for record in records]


async def test_an_export_makes_the_same_log_under_another_name(store: Store) -> None:
    records = await told(store)
    lines = [json.loads(json.dumps(record)) for record in records]  # by any JSON library
    made = await store.load("to", "copy", lines)
    old, new = (Talk(store=store, tenant="from", session="story"), Talk(store=store, tenant="to", session="copy"))
    before = await store.session("from", "story")
    assert before is not None
    assert made == await store.session("to", "copy")
    assert _log_of(made) == _log_of(before)
    assert (made.requests, made.tokens_sent, made.tokens_saved) == (0, 0, 0)
    leaves = {branch.head for branch in await store.branches(old.key)}
    assert {branch.head for branch in await store.branches(new.key)} == leaves
    for leaf in leaves:
        for theirs, ours in zip(await store.path(old.key, leaf), await store.path(new.key, leaf), strict=True):
            assert ours.message == theirs.message
            assert (ours.tokens, ours.tokens_total, ours.round) == (theirs.tokens, theirs.tokens_total, theirs.round)
            assert (ours.source, ours.agent, ours.created_at) == (theirs.source, theirs.agent, theirs.created_at)
            assert (ours.exchange, ours.policy, ours.arrival) == (None, theirs.policy, theirs.arrival)
    assert await store.instructions(new.key) == await store.instructions(old.key)
    first, reply = (await store.path(new.key, made.head))[:2]
    assert first.policy == "v1"
    assert first.arrival == (SHORTENED,)
    assert (reply.policy, reply.arrival) == (None, None)
    names = [row.node for row in await store.path(new.key, made.head)]
    assert await store.cut(new.key, names, "default", "writer") == StandingCut(cut=CUT, node=first.node, kept=None)
    later = await store.cut(old.key, names, "default", None)
    assert await store.cut(new.key, names, "default", None) == later
    assert later == StandingCut(cut=LATER, node=names[2], kept=(names[1], names[2]))
    assert await store.exchanges(new.key, limit=9) == ([], None)
    assert (made.hidden, made.summaries, made.cost, made.calls) == (1, 2, None, ("finish",))
    rows = await store.summary_rows(old.key)
    assert await store.summary_rows(new.key) == [replace(row, usage=None, cost=None, exchange=None) for row in rows]
    (hidden,) = [record async for record in store.export(new.key) if record["record"] == "hidden"]
    assert [hidden | {"exchange": record["exchange"]} for record in records if record["record"] == "hidden"] == [
        record for record in records if record["record"] == "hidden"
    ]
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
    results = await asyncio.gather(*(store.load("to", "copy", records) for _ in range(4)), return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["Conflict", "Conflict", "Conflict", "SessionRow"]


async def test_an_empty_session_is_a_session(store: Store) -> None:
    await Talk(store=store, tenant="from", session="empty").begin(body("user", "never answered"))
    records = [record async for record in store.export(Talk(store=store, tenant="from", session="empty").key)]
    made = await store.load("to", "empty", records)
    assert (made.head, made.messages, made.instructions) == ("", 0, None)


@pytest.mark.parametrize("levels", [100, 300, 800])
async def test_a_message_of_many_levels_goes_out_and_comes_back(store: Store, levels: int) -> None:
    talk, deep = Talk(store=store), b"[" * levels + b"]" * levels
    asked = Body(message=ChatMessage(b'{"role":"user","content":"a","deep":' + deep + b"}"), tokens=4)
    await talk.settle(await talk.begin(asked), asked, replies=(body("assistant", "1"),))
    lines = b"".join([line async for line in write_lines(store.export(talk.key))])
    made = await store.load("to", "copy", read_lines(lines))
    rows = await store.path(Talk(store=store, tenant="to", session="copy").key, made.head)
    assert rows[0].message.raw == asked.message.raw


async def test_a_name_that_cannot_be_stored_is_refused(store: Store) -> None:
    with pytest.raises(InvalidRequest, match="session holds a NUL"):
        await store.load("to", "a\x00b", await told(store))


async def test_messages_from_elsewhere_are_imported(store: Store) -> None:
    records = [record for record in await told(store) if record["record"] not in {"exchange", "form"}]
    for record in records:
        record.pop("source", None)
    made = await store.load("to", "copy", records)
    assert {row.source for row in await store.path(Talk(store=store, tenant="to", session="copy").key, made.head)} == {
        Source.IMPORT
    }


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> list[JsonObject]:
    """The records of that story."""

    async def tell() -> list[JsonObject]:
        store = await Store.open(empty_store(tmp_path_factory.mktemp("story") / "palimpsest.db"))
        records = await told(store)
        await store.close()
        return records

    return asyncio.run(tell())


def _set(**values: Any) -> Callable[[JsonObject], None]:
    return lambda record: record.update(values)


def _drop(name: str) -> Callable[[JsonObject], None]:
    def drop(record: JsonObject) -> None:
        del record[name]

    return drop


def _dropping(position: int) -> JsonObject:
    return {"why": [["drop_oldest", "old"]], "drop": [[0, 0, [[position, [5]]]]]}


def _gaps(*gaps: tuple[int, int, int, int], **more: Any) -> Callable[[JsonObject], None]:
    """Set gaps of (start, stop, tokens, tool_calls), and say nothing of what was kept."""
    changes = {"why": [["drop_oldest", "old"]], "gaps": [[0, *gap] for gap in gaps]}
    return _set(changes=changes | more)


def _summing(**changes: Any) -> Callable[[JsonObject], None]:
    summary = {"text": "So far.", "role": "system", "until": 1, "tokens": 3, "kind": "statistics"}
    return _set(changes={"summary": summary | {"covered_messages": 1, "covered_tokens": 4} | changes})


def _putting(text: str) -> JsonObject:
    return {"why": [["drop_oldest", "old"]], "put": [[0, 0, 0, 5, 1, text]]}


@pytest.mark.parametrize(
    ("kind", "spoil", "says"),
    [
        ("session", _set(format=2), "its format is 2"),
        ("session", _set(head="ab" * 20), "its head abab"),
        ("session", _set(arrival="removed"), "its arrival 'removed'"),
        ("session", _set(instructions="ab" * 20), "its instructions abab"),
        ("session", _set(record="chapter"), "'chapter'"),
        ("session", _set(created_at="now"), "created_at"),
        ("session", _set(created_at=10**18), "created_at"),  # a year that no calendar has
        ("session", _set(arrival="a\x00b"), "arrival holds a NUL"),
        ("instructions", _set(data=[{"role": "system", "content": "other"}]), "its version is"),
        ("instructions", _drop("data"), "neither `data` nor `text`"),
        ("body", _set(data={"role": "user", "content": "other"}, text=None), "its body is"),
        ("body", _set(text="{"), "unexpected end of data"),
        ("body", _set(text='"\ud800"'), "surrogate"),
        ("node", _set(parent="ab" * 20), "its parent abab"),
        ("node", _set(node="ab" * 20), "its node is abab"),
        ("node", _set(body="ab" * 20), "there is no message with the text abab"),
        ("node", _set(tokens=-1), "tokens"),
        ("node", _set(tokens=2**40), "tokens"),
        ("node", _set(source="dream"), "source"),
        ("node", _set(agent="a\x00b"), "agent holds a NUL"),
        ("cut", _set(node="ab" * 20), "it stands at abab"),
        ("cut", _set(changes={"drop": 1}), "drop"),
        ("cut", _set(changes={"drop": [[0, 0, [[1, [5]]]]]}), "name a reason"),
        ("cut", _set(policy="a\x00b"), "policy holds a NUL"),
        ("cut", _set(position=2), "its position is 2, and its node has 1 messages"),
        ("cut", _set(position=0), "stands at position 0, which"),
        ("cut", _set(changes=_dropping(1)), "stands at position 1, which"),
        ("cut", _set(changes=_dropping(-1)), "stands at position -1, which"),
        ("cut", _gaps((0, 2, 5, 0)), "a gap from 0 to 2 is not in order from 0 to 1"),
        ("cut", _gaps((-1, 1, 5, 0)), "a gap from -1 to 1"),
        ("cut", _gaps((0, 0, 5, 0)), "a gap from 0 to 0"),
        ("cut", _gaps((0, 1, 5, 0), (0, 1, 5, 0)), "a gap from 0 to 1 is not in order from 1 to 1"),
        ("cut", _gaps((0, 1, -5, 0)), "the gap at 0 counts"),
        ("cut", _gaps((0, 1, 5, 2)), "the gap at 0 counts what 1 messages cannot have"),
        ("cut", _gaps(kept=[]), "are not the messages outside its gaps"),
        ("cut", _gaps((0, 1, 5, 0), kept=["ab" * 20]), "are not the messages outside its gaps"),
        ("cut", _summing(until=2), "its summary covers 2 messages, and it stands after 1"),
        ("cut", _summing(until=-1), "its summary covers -1"),
        ("cut", _summing(tokens=-1), "its summary counts what 1 messages cannot have"),
        ("cut", _summing(covered_messages=2), "its summary counts what 1 messages cannot have"),
        ("cut", _summing(covered_tokens=2**40), "its summary counts"),
        ("cut", _summing(role="tool"), "role"),
        ("cut", _set(changes={"account": {"turns": 1}}), "account"),
        ("cut", _set(changes=_putting("[]")), "puts what is no message"),
        ("cut", _set(changes=_putting("{")), "unexpected end of data"),
        ("hidden", _set(node="ab" * 20), "it belongs to abab"),
        ("hidden", _set(before=["[]"]), "is no message"),
        ("hidden", _set(after="[]"), "after"),
        ("hidden", _set(tokens=-1), "tokens"),
        ("summary", _set(node="ab" * 20), "a branch with abab"),
        ("summary", _set(until=2), "it covers 2 messages"),
        ("summary", _set(predecessor="sum_0"), "its predecessor sum_0 does not stand in a line above"),
        ("summary", _set(state=[]), "state"),
        ("node", _set(policy="a\x00b"), "policy holds a NUL"),
        ("node", _set(arrival=_dropping(1)), "stands at position 1, which"),
        ("node", _set(arrival=[]), "array"),
        ("node", _set(arrival=_putting('"text"')), "puts what is no message"),
    ],
)
def test_a_record_that_is_wrong_is_named_by_its_line(
    story: list[JsonObject], kind: str, spoil: Callable[[JsonObject], None], says: str
) -> None:
    records = copy.deepcopy(story)
    line, record = next((line, one) for line, one in enumerate(records, 1) if one["record"] == kind)
    spoil(record)
    with pytest.raises(InvalidRequest, match=says) as refused:
        read_records(records)
    assert refused.value.message.startswith(f"Line {line}: ")
    assert refused.value.param == f"[{line - 1}]"


def test_instructions_may_have_the_name_that_older_versions_gave_them(story: list[JsonObject]) -> None:
    records = copy.deepcopy(story)
    record = next(one for one in records if one["record"] == "instructions")
    older = body_id(record["text"].encode() if "text" in record else orjson.dumps(record["data"]))
    assert older != record["version"]
    records[0]["instructions"] = record["version"] = older
    assert [row["version"] for row in read_records(records).instructions.values()] == [older]


def test_what_a_cut_kept_is_of_its_branch(story: list[JsonObject]) -> None:
    records = copy.deepcopy(story)
    (cut,) = (record for record in records if record["record"] == "cut" and record["position"] == 3)
    depth_three = [node for node in _nodes_at(records, 3) if node != cut["node"]]
    assert len(depth_three) == 1
    read_records(records)
    cut["changes"]["kept"][1] = depth_three[0]
    with pytest.raises(InvalidRequest, match="what it kept is not of its branch"):
        read_records(records)


@pytest.mark.parametrize(
    ("kind", "says"), [("hidden", "another line says already"), ("summary", "there are two summaries sum_b")]
)
def test_what_is_there_once_is_not_said_twice(story: list[JsonObject], kind: str, says: str) -> None:
    twice = [record for record in story if record["record"] == kind][-1:]
    with pytest.raises(InvalidRequest, match=says):
        read_records([*story, *twice])


def _nodes_at(records: list[JsonObject], depth: int) -> list[str]:
    names = [""]
    for _ in range(depth):
        names = [one["node"] for one in records if one["record"] == "node" and one["parent"] in names]
    return names


@pytest.mark.parametrize(("records", "says"), [([], "hold 0"), ([1], "Line 1"), ([{"record": "node"}], "Line 1")])
def test_what_is_no_export_is_refused(records: list[Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        read_records(records)
