from __future__ import annotations

from functools import partial

import pytest

from proxy.conversation import ROOT
from proxy.store.exchanges import Standing, standing
from proxy.store.records import Body, Status
from proxy.store.store import Store
from proxy.store.tree import Place
from tests.support.talk import Talk, body, settlement

pytestmark = pytest.mark.anyio


async def found(talk: Talk, exchange: str, *messages: Body, base: str = ROOT) -> Standing:
    asked = settlement(exchange, *messages, base=base)
    return await talk.store._database.write(partial(standing, settlement=asked))


async def test_session_and_exchange_are_read_as_they_are_now(store: Store) -> None:
    talk = Talk(store=store)
    settled = await talk.say("one", "1")
    exchange = await talk.begin(body("user", "two"), model="gpt-x", digest="said", created_at=1_234)
    session, state, under = await found(talk, exchange)
    assert session == await store.session("tenant", "session")
    assert session is not None
    assert session.head == settled.head
    assert state is not None
    assert (state.status, state.model, state.digest, state.created_at) == (
        Status.PENDING.value,
        "gpt-x",
        "said",
        1_234,
    )
    assert (state.nodes, state.replies, state.instructions, state.tools) == ("[]", "[]", None, None)
    assert under is None


async def test_what_is_not_there_is_none(store: Store) -> None:
    talk = Talk(store=store)
    assert await found(talk, "exc_none") == (None, None, None)
    await talk.say("one", "1")
    assert await found(talk, "exc_none") == (await store.session("tenant", "session"), None, None)


async def test_where_the_base_stands_is_told_if_the_first_message_is_new_there(store: Store) -> None:
    talk = Talk(store=store)
    one, two = await talk.say("one", "1"), await talk.say("two", "2")
    new, known = body("user", "new"), body("user", "two")
    if store._database.blocks:
        assert (await found(talk, "exc", new, known, base=one.head)).under == Place(
            node=one.head, depth=2, round=1, tokens_total=10, recorded="tenant"
        )
        assert (await found(talk, "exc", known, base=two.head)).under == Place(
            node=two.head, depth=4, round=2, tokens_total=20, recorded="tenant"
        )
    for base, messages in ((one.head, [known, new]), (one.head, []), ("ab" * 20, [new]), (ROOT, [new])):
        assert (await found(talk, "exc", *messages, base=base)).under is None
