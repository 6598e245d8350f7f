"""Nodes, texts, hidden rounds, lineage."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.conversation import ROOT, body_id, content_hash, names_under
from proxy.dialects.chat import CHAT
from proxy.dialects.chat.message import ChatMessage
from proxy.errors import NotFound
from proxy.store import tree
from proxy.store.archive import HiddenRecord
from proxy.store.history import Lineage
from proxy.store.records import Body, Reply, SessionRow, Settled
from proxy.store.sessions import decode_calls, encode_calls
from proxy.store.store import Store
from proxy.store.tree import calls_of, hidden_at, is_message, marks_to, messages_in, named_bodies
from proxy.trimming import Hidden
from tests.support.asides import HIDDEN, reply, say, settle
from tests.support.talk import Talk, body, message

pytestmark = pytest.mark.anyio


async def test_a_path_leads_from_the_root_to_the_node(store: Store) -> None:
    talk = Talk(store=store)
    first = await talk.say("one", "1")
    second = await talk.say("two", "2")
    assert [row.node for row in await store.path(talk.key, second.head)] == [
        *first.nodes,
        *first.replies,
        *second.nodes,
        *second.replies,
    ]
    assert await talk.texts(first.head) == ["one", "1"]
    assert await store.path(talk.key, ROOT) == []
    assert await store.path(talk.key, "ab" * 20) == []
    assert await store.path("other", second.head) == []


async def test_a_branch_of_thousands_of_messages_is_read_and_known(store: Store) -> None:
    talk = Talk(store=store)
    asked = [body("user", f"m{number}", 1) for number in range(1_999)]
    exchange = await talk.begin(*asked)
    settled = await talk.settle(exchange, *asked, replies=(body("assistant", "end", 1),))
    rows = await store.path(talk.key, settled.head)
    assert [row.depth for row in rows] == list(range(1, 2_001))
    assert [row.tokens_total for row in rows] == list(range(1, 2_001))
    names = [row.node for row in rows]
    assert names == names_under(ROOT, map(content_hash, [*(one.message for one in asked), message("assistant", "end")]))


async def test_a_branch_is_read_a_few_large_messages_at_a_time(store: Store) -> None:
    talk = Talk(store=store)
    sizes = [700_000] * 20 + [10] * 300
    asked = [body("user", f"{number} " + "x" * size, 1) for number, size in enumerate(sizes)]
    exchange = await talk.begin(*asked)
    settled = await talk.settle(exchange, *asked, replies=(body("assistant", "end", 1),))
    nodes = (await store.lineage(talk.key, [settled.head])).nodes(settled.head)
    portions = [rows async for rows in store.portions(talk.key, nodes)]
    assert [row.node for rows in portions for row in rows] == [*settled.nodes, *settled.replies]
    assert [len(rows) for rows in portions[:3]] == [8, 2, 2]
    assert len(portions) < 25
    texts = [record async for record in store.export(talk.key) if record["record"] == "body"]
    assert len(texts) == len(nodes)
    reading = store.portions(talk.key, nodes)
    await anext(reading)
    await store.delete(talk.key)
    with pytest.raises(NotFound, match="deleted while it was read"):
        await anext(reading)


async def test_a_text_that_stands_in_many_places_is_stored_once(store: Store) -> None:
    talk = Talk(store=store)
    for _ in range(3):
        await talk.say("continue", "done")
    records = [record async for record in store.export(talk.key)]
    assert len([record for record in records if record["record"] == "body"]) == 2
    assert len([record for record in records if record["record"] == "node"]) == 6


async def test_a_message_comes_back_to_the_byte(store: Store) -> None:
    text = '{ "role" : "user",\n "content":"\\u0000 \\ud83e\\udd8a é 𝕏","x":1.0e3,"x":1' + "0" * 30 + "}"
    raw = text.encode()
    talk = Talk(store=store)
    asked = body("user", "placeholder")
    asked = type(asked)(message=type(asked.message)(raw), tokens=3)
    exchange = await talk.begin(asked)
    settled = await talk.settle(exchange, asked, replies=(body("assistant", "1"),))
    row = (await store.path(talk.key, settled.head))[0]
    assert row.message.raw == raw
    assert await store.body(talk.key, row.body) == (row.body, asked.message)


async def test_what_is_stored_keeps_the_count_it_was_stored_with(store: Store) -> None:
    talk = Talk(store=store)
    heads: list[str] = []
    for tokens in (5, 9):  # counted by another model's vocabulary the second time
        asked = body("user", "same", tokens)
        exchange = await talk.begin(asked)
        reply = body("assistant", str(tokens))
        heads.append((await talk.settle(exchange, asked, replies=(reply,), at_head=False)).head)
    rows = await store.path(talk.key, heads[-1])
    assert [(row.tokens, row.tokens_total) for row in rows] == [(5, 5), (5, 10)]


requests = st.lists(
    # The index of its parent node, its question, and its answers.
    st.tuples(st.integers(0, 99), st.sampled_from("xy"), st.lists(st.sampled_from("abc"), min_size=1, max_size=3)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(story=requests, session=st.uuids())
async def test_whatever_is_branched_each_leaf_is_a_branch_and_each_path_its_messages(
    store: Store, story: list[tuple[int, str, list[str]]], session: UUID
) -> None:
    talk = Talk(store=store, session=str(session))
    await store.delete(talk.key)  # hypothesis may tell a story twice
    known: dict[str, list[str]] = {ROOT: []}
    for place, question, answers in story:
        base = list(known)[place % len(known)]
        asked = body("user", question)
        exchange = await talk.begin(asked)
        settled = await talk.settle(
            exchange, asked, replies=tuple(body("assistant", one) for one in answers), base=base, at_head=False
        )
        known[settled.nodes[0]] = [*known[base], question]
        for node, answer in zip(settled.replies, answers, strict=True):
            known[node] = [*known[settled.nodes[0]], answer]
    for node, texts in known.items():
        assert await talk.texts(node) == texts
    parents = {row.parent for node in known for row in await store.path(talk.key, node)}
    leaves = {branch.head: branch.depth for branch in await store.branches(talk.key)}
    assert leaves == {node: len(texts) for node, texts in known.items() if node not in parents}


async def test_a_text_is_found_by_the_beginning_of_its_name(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "one")
    name = body_id(asked.message.raw)
    await talk.begin(asked, tools=b'[{"type":"function"}]')
    for digits in (8, 12, 16, 40):
        assert await store.body(talk.key, name[:digits]) == (name, asked.message)
    for wrong in (name[:7], "", name + "0", name[:12].upper() + "g", "%" * 12, "f" * 40):
        assert await store.body(talk.key, wrong) is None
    assert await store.body("other", name) is None


async def test_a_beginning_that_two_names_share_names_neither(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = "abcdefabcdef"
    names = {b'{"a":1}': shared + "0" * 28, b'{"b":1}': shared + "f" * 28}
    monkeypatch.setattr("proxy.store.tree.body_of", lambda text: names[text.raw])
    talk = Talk(store=store)
    await talk.begin(*(Body(message=ChatMessage(raw), tokens=1) for raw in names))
    assert await store.body(talk.key, shared) is None
    assert await store.body(talk.key, shared + "f") == (shared + "f" * 28, ChatMessage(b'{"b":1}'))


async def test_tools_are_no_message_and_messages_no_tools(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "one")
    await talk.begin(asked, tools=b'[{"type":"function"}]')
    tools = body_id(b'[{"type":"function"}]')
    assert await store.tools(talk.key, tools) == b'[{"type":"function"}]'
    assert await store.body(talk.key, tools) is None
    assert await store.tools(talk.key, body_id(asked.message.raw)) is None
    assert await store.tools(talk.key, "0" * 40) is None


async def test_equal_instructions_are_one_version_and_keep_their_bytes(store: Store) -> None:
    talk = Talk(store=store)
    leading = (
        ChatMessage(b'{"role":"system", "content":"a"}'),
        ChatMessage(b' {"role":"developer","content":"\\u00e9"}'),
    )
    versions = set()
    for at in (1_000, 2_000):
        row = await store.exchange(await talk.begin(instructions=leading, instructions_tokens=8, created_at=at))
        assert row is not None
        versions.add(row.instructions)
    (version,) = versions
    found = await store.instructions(talk.key, version)
    assert found is not None
    assert (found.version, found.tokens, found.created_at) == (version, 8, 1_000)
    assert [one.raw.strip() for one in found.messages] == [one.raw.strip() for one in leading]
    assert await store.instructions(talk.key, "0" * 40) is None


def test_a_text_given_twice_is_one_body() -> None:
    assert list(named_bodies([body("user", "a"), body("user", "b"), body("user", "a")])) == [
        body_id(message("user", text).raw) for text in "ab"
    ]


def test_a_message_begins_with_a_brace() -> None:
    assert is_message(b' \n{"role":"user"}')
    assert not is_message(b"\t[]")
    assert messages_in('[{"a": 1} ,{"b":2}]', CHAT) == (ChatMessage(b'{"a": 1}'), ChatMessage(b'{"b":2}'))


def call(name: str, number: str = "c1", arguments: str = "{}") -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


async def row_of(talk: Talk) -> SessionRow:
    row = await talk.store.session(talk.tenant, talk.session)
    assert row is not None
    return row


def test_each_tool_is_named_once_in_the_order_of_the_calls() -> None:
    asked = message("assistant", "", tool_calls=[call("look"), call("finish", "c2"), call("look", "c3")])
    assert calls_of(asked, partial=False) == ("look", "finish")
    assert calls_of(message("user", "look"), partial=False) == ()


def test_of_a_reply_that_broke_off_whole_calls_count() -> None:
    broken = message("assistant", "", tool_calls=[call("look"), call("finish", "c2", '{"result": "al')])
    assert calls_of(broken, partial=True) == ("look",)


def test_names_come_back_from_their_column() -> None:
    odd = ChatMessage(
        b'{"role":"assistant","tool_calls":[{"id":"1","type":"function",'
        b'"function":{"name":"a\\u0000","arguments":"{}"}}]}'
    )
    names = calls_of(odd, partial=False)
    assert names == ("a\ufffd",)  # no database holds a NUL
    assert decode_calls(encode_calls(names)) == names
    assert encode_calls(()) is None
    assert decode_calls(None) == ()


async def test_the_row_names_the_calls_of_the_reply_at_the_head(store: Store) -> None:
    talk = Talk(store=store)
    await talk.say("one", "1")
    assert (await row_of(talk)).calls == ()
    asked = body("user", "two")
    exchange = await talk.begin(asked)
    calling = body("assistant", "", tool_calls=[call("finish_task")])
    await talk.settle(exchange, asked, replies=(calling,))
    assert (await row_of(talk)).calls == ("finish_task",)
    await talk.say("beside", "b", moves_head=False)
    assert (await row_of(talk)).calls == ("finish_task",)
    result = body("tool", "done", tool_call_id="c1")
    await talk.settle(await talk.begin(result), result, replies=(body("assistant", "fine"),))
    assert (await row_of(talk)).calls == ()


async def test_of_several_replies_the_first_one_counts(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "one")
    both = tuple(body("assistant", "", tool_calls=[call(name)]) for name in ("first", "second"))
    await talk.settle(await talk.begin(asked), asked, replies=both)
    assert (await row_of(talk)).calls == ("first",)


async def test_of_a_reply_that_broke_off_the_row_names_whole_calls(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "one")
    broken = body("assistant", "", tool_calls=[call("finish", arguments='{"a')])
    await settle(talk, await talk.begin(asked), asked, replies=(Reply(body=broken, partial=True),))
    assert (await row_of(talk)).calls == ()


async def test_results_alone_are_calls_of_nobody(store: Store) -> None:
    talk = Talk(store=store)
    result = body("tool", "done", tool_call_id="c1")
    exchange = await talk.begin(result)
    await settle(talk, exchange, result, replies=(), finished=True)
    row = await row_of(talk)
    assert (row.messages, row.calls) == (1, ())


async def kept(talk: Talk, *nodes: str, total: int = 1) -> dict[str, Hidden]:
    return await talk.store._database.read(lambda c: hidden_at(c, talk.key, nodes, total))


async def count(talk: Talk) -> int:
    row = await talk.store.session(talk.tenant, talk.session)
    assert row is not None
    return row.hidden


def replies(*hidden: Hidden | None) -> list[Reply]:
    return [reply(f"answer {number}", each) for number, each in enumerate(hidden)]


async def test_it_comes_back_to_the_byte(store: Store) -> None:
    talk = Talk(store=store)
    settled = await say(talk, "one", *replies(HIDDEN))
    found = await kept(talk, *settled.nodes, *settled.replies)
    assert found == {settled.head: HIDDEN}
    assert [each.raw for each in found[settled.head].before] == [each.raw for each in HIDDEN.before]
    assert await count(talk) == 1
    assert await kept(Talk(store=store, session="other"), settled.head) == {}


async def test_each_reply_has_its_own(store: Store) -> None:
    talk = Talk(store=store)
    other = Hidden(before=(), reply=None, after=HIDDEN.after, tokens=4)
    settled = await say(talk, "one", *replies(HIDDEN, None, other))
    assert await kept(talk, *settled.replies, total=2) == {settled.replies[0]: HIDDEN, settled.replies[2]: other}
    assert await count(talk) == 2


async def test_a_reply_that_is_there_already_stays_what_it_was(store: Store) -> None:
    """Views that contain it must not change, whether it has hidden rounds or not."""
    talk = Talk(store=store)
    other = Hidden(before=HIDDEN.before, reply=None, after=(), tokens=4)
    for text, first, second in (("one", HIDDEN, other), ("two", None, other), ("three", HIDDEN, None)):
        made = await say(talk, text, *replies(first))
        asked = body("user", text)
        again = await talk.begin(asked, base=talk.bases[talk.exchanges[-1]], kind="rewind")
        repeated = await settle(talk, again, asked, replies=tuple(replies(second)), at_head=False, kind="rewind")
        assert repeated.replies == made.replies
        assert (await kept(talk, *made.replies)).get(made.head) == first
    assert await count(talk) == 2


async def test_of_equal_replies_the_first_one_counts(store: Store) -> None:
    talk = Talk(store=store)
    other = Hidden(before=HIDDEN.before, reply=None, after=(), tokens=4)
    settled = await say(talk, "one", reply("same", HIDDEN), reply("same", other))
    assert await kept(talk, *settled.replies) == {settled.head: HIDDEN}
    assert await count(talk) == 1


async def test_the_store_is_asked_where_the_session_has_some(store: Store) -> None:
    talk = Talk(store=store)
    settled = await say(talk, "one", *replies(None))
    row = await store.session(talk.tenant, talk.session)
    assert row is not None
    assert await store.hidden(row, [settled.head]) == {}
    settled = await say(talk, "two", *replies(HIDDEN))
    row = await store.session(talk.tenant, talk.session)
    assert row is not None
    assert await store.hidden(row, [settled.head]) == {settled.head: HIDDEN}
    assert await store.hidden(row, []) == {}


@pytest.mark.parametrize("total", [3, 100])
async def test_they_are_found_among_few_and_among_many(
    store: Store, monkeypatch: pytest.MonkeyPatch, total: int
) -> None:
    """They are looked up by their own ids if they are fewer than the messages, and otherwise by the messages' ids."""
    talk = Talk(store=store)
    settled = [await say(talk, f"q{number}", *replies(HIDDEN)) for number in range(3)]
    nodes = [name for each in settled for name in (*each.nodes, *each.replies)]
    monkeypatch.setattr("proxy.store.tree._AT_ONCE", 2)
    assert await kept(talk, *nodes[:5], total=total) == {each.head: HIDDEN for each in settled[:2]}


@pytest.mark.parametrize("text", ["[]", '"text"', "{", ""])
def test_a_record_with_what_is_no_message_is_refused(text: str) -> None:
    for wrong in (
        HiddenRecord(node="node", before=(text,), reply=None, after=(), tokens=0, created_at=0),
        HiddenRecord(node="node", before=(), reply=text, after=(), tokens=0, created_at=0),
        HiddenRecord(node="node", before=(), reply=None, after=(text,), tokens=0, created_at=0),
    ):
        with pytest.raises(ValueError, match=r"no message|JSON|data|empty"):
            wrong.read(CHAT)
    assert HiddenRecord(node="node", before=(), reply=None, after=(), tokens=3, created_at=0).read(CHAT) == Hidden(
        before=(), reply=None, after=(), tokens=3
    )


async def grown(talk: Talk, base: str, name: str, *tokens: int) -> Settled:
    """Add messages with these token counts under `base`, and a reply of five tokens."""
    asked = [body("user", f"{name}{number}", count) for number, count in enumerate(tokens)]
    exchange = await talk.begin(*asked, base=base)
    return await talk.settle(exchange, *asked, base=base, at_head=False, replies=(body("assistant", f"{name} ok"),))


async def names(store: Store, talk: Talk, end: str) -> list[str]:
    return [row.node for row in await store.path(talk.key, end)]


def told(found: Lineage, end: str) -> list[str | None]:
    return [found.node_at(end, position) for position in range(found.depth(end))]


@pytest.mark.parametrize("length", [1, 63, 64, 65, 66, 319, 320, 321, 700])
async def test_a_branch_of_any_length_is_read_whole(store: Store, length: int) -> None:
    talk = Talk(store=store)
    end = (await grown(talk, ROOT, "m", *range(1, length + 1))).nodes[-1]
    found = await store.lineage(talk.key, [end])
    assert told(found, end) == await names(store, talk, end)
    assert found.depth(end) == length
    assert (found.node_at(end, length), found.node_at(end, -1)) == (None, None)
    assert found.tokens(end, 0, length) == length * (length + 1) // 2
    assert found.tokens(end, length - 1, length) == length
    assert found.tokens(end, length - 1, length + 5) == length


async def test_branches_of_branches(store: Store) -> None:
    talk = Talk(store=store)
    trunk = await grown(talk, ROOT, "trunk", *[1] * 200)
    second = await grown(talk, trunk.nodes[99], "second", *[10] * 90)
    third = await grown(talk, second.nodes[4], "third", 100)
    fourth = await grown(talk, third.replies[0], "fourth", 1000)
    other = await grown(talk, ROOT, "other", 3, 4)
    ends = [
        *(trunk.head, second.head, third.replies[0], fourth.nodes[0], other.replies[0]),
        *(trunk.nodes[0], trunk.nodes[99], second.nodes[0], second.nodes[4]),
    ]
    found = await store.lineage(talk.key, ends)
    for end in ends:
        rows = await store.path(talk.key, end)
        assert told(found, end) == [row.node for row in rows]
        for start, stop in ((0, len(rows)), (50, 102), (99, 100), (100, 106), (104, 108)):
            assert found.tokens(end, start, stop) == sum(row.tokens for row in rows[start:stop])
    assert fourth.nodes[0] in found
    assert fourth.replies[0] not in found


async def test_what_branches_share_is_read_once(store: Store) -> None:
    talk = Talk(store=store)
    trunk = await grown(talk, ROOT, "trunk", *[1] * 300)
    ends = [(await grown(talk, trunk.nodes[299], f"turn {number}", 1)).head for number in range(20)]
    read: list[int] = []

    def counted(*given: object, **named: object) -> list[object]:
        marks = marks_to(*given, **named)  # type: ignore[arg-type]  # as they came
        read.append(len(marks))
        return list(marks)

    with patch.object(tree, "marks_to", counted):
        found = await store.lineage(talk.key, ends)
    assert all(found.depth(end) == 302 for end in ends)
    assert max(read) < 300
    assert sum(read) < 302 + 20 * 70


async def test_what_is_not_stored_has_no_branch(store: Store) -> None:
    talk = Talk(store=store)
    end = (await talk.say("one", "1")).head
    found = await store.lineage(talk.key, [end, "f" * 40, ROOT, "a\x00"])
    assert told(found, end) == await names(store, talk, end)
    for absent in ("f" * 40, ROOT):
        assert (found.depth(absent), found.node_at(absent, 0), found.tokens(absent, 0, 9)) == (0, None, 0)
    assert (await store.lineage(talk.key, [])).depth(end) == 0
    assert (await store.lineage("0" * 32, [end])).depth(end) == 0
