from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.conversation import ROOT, content_hash, names_under
from proxy.store.store import Store
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
    assert names == names_under(
        ROOT, map(content_hash, [*(one.message for one in asked), message("assistant", "end")])
    )


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
    # Which of the nodes so far it goes under, what it asks, what is answered.
    st.tuples(
        st.integers(0, 99), st.sampled_from("xy"), st.lists(st.sampled_from("abc"), min_size=1, max_size=3)
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
            exchange,
            asked,
            replies=tuple(body("assistant", one) for one in answers),
            base=base,
            at_head=False,
        )
        known[settled.nodes[0]] = [*known[base], question]
        for node, answer in zip(settled.replies, answers, strict=True):
            known[node] = [*known[settled.nodes[0]], answer]
    for node, texts in known.items():
        assert await talk.texts(node) == texts
    parents = {row.parent for node in known for row in await store.path(talk.key, node)}
    leaves = {branch.head: branch.depth for branch in await store.branches(talk.key)}
    assert leaves == {node: len(texts) for node, texts in known.items() if node not in parents}
