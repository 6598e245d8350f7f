"""How an exchange begins, and rows of exchanges."""

from __future__ import annotations

from functools import partial

import pytest

from proxy.conversation import ROOT, body_id
from proxy.errors import InvalidRequest
from proxy.store.exchanges import SettleSnapshot, settle_snapshots
from proxy.store.records import Body, Status
from proxy.store.store import Store
from proxy.store.tree import NodePlace
from tests.support.talk import Talk, body, message, opening, settlement

pytestmark = pytest.mark.anyio


async def test_a_request_is_stored_before_it_is_answered(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "hello \x00 мир", 7, name="Ann")
    exchange = await talk.begin(
        asked,
        kind="first",
        created_at=1_234,
        model="gpt-x",
        agent="writer",
        stream=True,
        parameters={"seed": 1, "stop": ["\x00"]},
        tools=b'[ {"type":"function"} ]',
        instructions=(message("system", "be brief"),),
        instructions_tokens=3,
    )
    row = await store.exchange(exchange)
    assert row is not None
    assert (row.session_key, row.tenant, row.session) == (talk.key, "tenant", "session")
    assert (row.status, row.kind, row.created_at, row.settled_at) == (Status.PENDING, "first", 1_234, None)
    assert (row.model, row.agent, row.policy, row.policy_version, row.stream) == (
        "gpt-x",
        "writer",
        "default",
        "v1",
        True,
    )
    assert row.parameters == {"seed": 1, "stop": ["\x00"]}
    assert row.messages == (body_id(asked.message.raw),)
    assert (row.nodes, row.replies, row.receipt) == ((), (), {})
    assert row.tools is not None
    assert await store.tools(talk.key, row.tools) == b'[ {"type":"function"} ]'
    version = await store.instructions(talk.key, row.instructions)
    assert version is not None
    assert (version.messages, version.tokens, version.created_at) == ((message("system", "be brief"),), 3, 1_234)


async def test_a_session_whose_first_request_is_open_is_there_and_holds_nothing(store: Store) -> None:
    talk = Talk(store=store)
    await talk.begin(body("user", "hello"), created_at=1_234, instructions=(message("system", "x"),))
    row = await store.session("tenant", "session")
    assert row is not None
    assert (row.key, row.tenant, row.id) == (talk.key, "tenant", "session")
    assert (row.head, row.instructions, row.arrival, row.messages, row.requests) == (ROOT, None, None, 0, 0)
    assert (row.created_at, row.updated_at) == (1_234, 1_234)
    assert await store.branches(talk.key) == []
    assert await store.instructions(talk.key) is None  # the newest that was answered: none was


async def test_a_second_time_changes_nothing(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "hello")
    exchange = await talk.begin(asked)
    await talk.settle(exchange, asked, replies=(body("assistant", "hi"),))
    settled = await store.exchange(exchange)
    await store.begin(opening(exchange, asked, model="another", created_at=1_000))
    assert await store.exchange(exchange) == settled


async def test_a_session_changes_when_an_exchange_ends_and_never_back(store: Store) -> None:
    talk = Talk(store=store)
    await talk.begin(created_at=5_000)
    later = await talk.begin(created_at=6_000)
    earlier = await talk.begin(created_at=4_000)
    row = await store.session("tenant", "session")
    assert row is not None
    assert (row.created_at, row.updated_at) == (5_000, 5_000)
    for exchange in (later, earlier):
        at = 7_000 if exchange == later else 6_500
        await talk.settle(exchange, body("user", exchange), replies=(body("assistant", "hi"),), settled_at=at)
        row = await store.session("tenant", "session")
        assert row is not None
        assert (row.created_at, row.updated_at) == (5_000, 7_000)


async def test_another_form_of_a_stored_message_is_kept_with_the_exchange_that_brought_it(store: Store) -> None:
    talk = Talk(store=store)
    settled = await talk.say("hello", "hi")
    form = message("assistant", "hi", name="other")
    await talk.begin(body("user", "more"), forms=((settled.head, form),))
    await talk.begin(body("user", "still more"), forms=((settled.head, form),))
    forms = [record async for record in store.export(talk.key) if record["record"] == "form"]
    assert forms == [{"record": "form", "node": settled.head, "body": body_id(form.raw), "exchange": talk.exchanges[1]}]
    assert await store.forms(talk.key, talk.exchanges[0]) == {}
    other = message("assistant", "reply, as it was said another time")
    await talk.begin(body("user", "and more"), forms=((settled.head, other),))
    for exchange, last in zip(talk.exchanges[1:], (form, form, other), strict=True):
        assert await store.forms(talk.key, exchange) == {settled.head: last}
    assert await store.body(talk.key, body_id(form.raw)) == (body_id(form.raw), form)


@pytest.mark.parametrize("field", ["tenant", "session", "model", "agent", "policy"])
async def test_a_name_that_cannot_be_stored_is_refused_on_every_database(store: Store, field: str) -> None:
    talk = Talk(store=store)
    with pytest.raises(InvalidRequest, match=field) as refused:
        await talk.begin(body("user", "hello"), **{field: "a\x00b"})
    assert refused.value.param == field
    assert await store.sessions(None, limit=10) == ([], None)


async def test_instructions_are_stored_again_with_a_session_that_was_made_again(store: Store) -> None:
    talk = Talk(store=store)
    brief = (message("system", "be brief"),)
    asked = body("user", "hello")
    exchange = await talk.begin(asked, instructions=brief)
    await talk.settle(exchange, asked, replies=(body("assistant", "hi"),))
    await talk.begin(body("user", "again"), instructions=brief, created_at=9_000)
    newest = await store.instructions(talk.key)
    assert newest is not None
    assert (newest.messages, newest.created_at) == (brief, 1_000)
    await store.delete(talk.key)
    assert await store.instructions(talk.key, newest.version) is None
    await talk.begin(asked, instructions=brief, created_at=9_000)
    anew = await store.instructions(talk.key, newest.version)
    assert anew is not None
    assert (anew.messages, anew.created_at) == (brief, 9_000)


async def test_exchanges_are_listed_page_by_page_newest_first(store: Store) -> None:
    talk = Talk(store=store)
    made = [await talk.begin(created_at=1_000 + number // 2) for number in range(5)]
    await Talk(store=store, tenant="other").begin()
    first, after = await store.exchanges(talk.key, limit=2)
    second, more = await store.exchanges(talk.key, limit=2, after=after)
    third, end = await store.exchanges(talk.key, limit=2, after=more)
    assert [row.id for row in (*first, *second, *third)] == made[::-1]
    assert end is None
    assert (await store.exchanges(talk.key, limit=5))[1] is None
    with pytest.raises(InvalidRequest):
        await store.exchanges(talk.key, limit=5, after="x")


async def test_what_a_process_left_pending_is_interrupted_and_the_rest_is_not(store: Store) -> None:
    talk = Talk(store=store)
    await talk.say("one", "1")
    left = [await talk.begin(body("user", "two")), await Talk(store=store, tenant="other").begin(body("user", "two"))]
    assert await store.interrupt_pending(5_000) == 2
    assert await store.interrupt_pending(6_000) == 0
    for exchange in left:
        row = await store.exchange(exchange)
        assert row is not None
        assert (row.status, row.settled_at) == (Status.INTERRUPTED, 5_000)
    done = await store.exchange(talk.exchanges[0])
    assert done is not None
    assert (done.status, done.settled_at) == (Status.COMPLETE, 2_000)


async def test_only_what_the_processes_with_these_marks_left_is_interrupted(store: Store) -> None:
    talk, other = Talk(store=store), Talk(store=store, tenant="other")
    ids = [f"exc_{n:024x}{mark}" for n, mark in enumerate(("aaaaaaaa", "bbbbbbbb", "cccccccc", "aaaaaaaa"))]
    for exchange in ids[:3]:
        await store.begin(opening(exchange, body("user", "hello"), session=talk.session))
    await store.begin(opening(ids[3], body("user", "hello"), session=other.session))
    assert await store.interrupt_pending(5_000, ()) == 0
    assert await store.interrupt_pending(5_000, ("dddddddd",)) == 0
    assert await store.interrupt_pending(5_000, ("aaaaaaaa", "cccccccc")) == 3
    rows = [await store.exchange(exchange) for exchange in ids]
    assert [row and row.status for row in rows] == [
        *(Status.INTERRUPTED, Status.PENDING, Status.INTERRUPTED, Status.INTERRUPTED)
    ]


async def test_an_exchange_nobody_knows_is_not_there(store: Store) -> None:
    assert await store.exchange("exc_none") is None


async def found(talk: Talk, exchange: str, *messages: Body, base: str = ROOT) -> SettleSnapshot:
    asked = settlement(exchange, *messages, base=base)
    read = await talk.store._database.write(partial(settle_snapshots, settlements={talk.key: asked}))
    return read[talk.key]


async def test_session_and_exchange_are_read_as_they_are_now(store: Store) -> None:
    talk = Talk(store=store)
    settled = await talk.say("one", "1")
    exchange = await talk.begin(body("user", "two"), model="gpt-x", digest="said", created_at=1_234)
    read = await found(talk, exchange)
    session, state, under = read.session, read.state, read.under
    assert session == await store.session("tenant", "session")
    assert session is not None
    assert session.head == settled.head
    assert state is not None
    assert (state.status, state.model, state.digest, state.created_at) == (Status.PENDING.value, "gpt-x", "said", 1_234)
    assert (state.nodes, state.replies, state.instructions, state.tools) == ("[]", "[]", None, None)
    assert under is None


async def test_what_is_not_there_is_none(store: Store) -> None:
    talk = Talk(store=store)
    assert await found(talk, "exc_none") == SettleSnapshot(session=None, state=None)
    await talk.say("one", "1")
    assert await found(talk, "exc_none") == SettleSnapshot(session=await store.session("tenant", "session"), state=None)


async def test_where_the_base_stands_is_told_if_the_first_message_is_new_there(store: Store) -> None:
    talk = Talk(store=store)
    one, two = await talk.say("one", "1"), await talk.say("two", "2")
    new, known = body("user", "new"), body("user", "two")
    if store._database.blocks:
        assert (await found(talk, "exc", new, known, base=one.head)).under == NodePlace(
            node=one.head, depth=2, round=1, tokens_total=10, recorded="tenant"
        )
        assert (await found(talk, "exc", known, base=two.head)).under == NodePlace(
            node=two.head, depth=4, round=2, tokens_total=20, recorded="tenant"
        )
        first = (await found(talk, "exc", new)).under
        assert first == NodePlace(node=ROOT, depth=0, round=0, tokens_total=0, recorded="tenant")
    for base, messages in ((one.head, [known, new]), (one.head, []), ("ab" * 20, [new]), (ROOT, [body("user", "one")])):
        assert (await found(talk, "exc", *messages, base=base)).under is None
