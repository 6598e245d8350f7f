from __future__ import annotations

from functools import partial

import pytest

from proxy.store.records import Status
from proxy.store.standing import standing
from proxy.store.store import Store
from tests.support.talk import Talk, body

pytestmark = pytest.mark.anyio


async def test_session_and_exchange_are_read_as_they_are_now(store: Store) -> None:
    talk = Talk(store)
    settled = await talk.say("one", "1")
    exchange = await talk.begin(body("user", "two"), model="gpt-x", digest="said", created_at=1_234)
    session, state = await store._database.write(partial(standing, key=talk.key, exchange=exchange))
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


async def test_what_is_not_there_is_none(store: Store) -> None:
    talk = Talk(store)
    unit = partial(standing, key=talk.key, exchange="exc_none")
    assert await store._database.write(unit) == (None, None)
    await talk.say("one", "1")
    assert (await store._database.write(unit))[1] is None
