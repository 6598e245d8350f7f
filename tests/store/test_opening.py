from __future__ import annotations

import pytest

from proxy.conversation import ROOT, body_id
from proxy.errors import InvalidRequest
from proxy.store.records import Status
from proxy.store.store import Store
from tests.support.talk import Talk, body, message, opening

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
    assert (version.messages, version.tokens, version.created_at) == (
        (message("system", "be brief"),),
        3,
        1_234,
    )


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


async def test_another_form_of_a_stored_message_is_kept_with_the_exchange_that_brought_it(
    store: Store,
) -> None:
    talk = Talk(store=store)
    settled = await talk.say("hello", "hi")
    form = message("assistant", "hi", name="other")
    await talk.begin(body("user", "more"), forms=((settled.head, form),))
    await talk.begin(body("user", "still more"), forms=((settled.head, form),))
    forms = [record async for record in store.export(talk.key) if record["record"] == "form"]
    assert forms == [
        {"record": "form", "node": settled.head, "body": body_id(form.raw), "exchange": talk.exchanges[1]}
    ]
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
