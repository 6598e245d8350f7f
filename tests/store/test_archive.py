from __future__ import annotations

import orjson
import pytest

from proxy.conversation import ROOT
from proxy.dialects import JsonObject
from proxy.dialects.chat.message import ChatMessage
from proxy.errors import NotFound
from proxy.store.records import Body, Kept, Status
from proxy.store.store import Store
from proxy.trimming import Cut, Gap
from tests.support.asides import HIDDEN, failed, reply, say, summary
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
            position=1,
            policy="default",
            version="v1",
            changes=(),
            tokens=9,
            messages=1,
            tool_calls=0,
            gaps=(gap,),
        ),
        kept=Kept(nodes=(), messages=()),
    )
    failed = await talk.begin(
        body("user", "never answered"), forms=((made.head, message("assistant", "one")),)
    )
    await talk.settle(failed, status=Status.FAILED)
    records = await exported(store, talk.key)
    kinds = [record["record"] for record in records]
    assert kinds == [
        "session",
        "exchange",
        "exchange",
        "cut",
        "form",
        "instructions",
        "node",
        "node",
        *["body"] * 5,
    ]
    first = records[0]
    assert (first["format"], first["tenant"], first["id"], first["head"]) == (
        1,
        "tenant",
        "session",
        made.head,
    )
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
