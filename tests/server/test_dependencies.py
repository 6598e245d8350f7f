"""Whose sessions are meant, and which one a path names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson
import pytest

from proxy.errors import Forbidden, InvalidRequest, NotFound
from proxy.server.authentication import Identity
from proxy.server.dependencies import json_response, session_of, tenant_of
from proxy.store import Store
from tests.support.stores import empty_store
from tests.support.talk import Talk

pytestmark = pytest.mark.anyio

ADMIN, ANNE, BERT = Identity(tenant="", admin=True), Identity(tenant="anne"), Identity(tenant="bert")
ODD = ["a/b", "100%", "a%2Fb", "会话", "a b+c", "ü?#&", "..", "%"]


class _Services:
    """As much of the open services as is asked for."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.app = self


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[Any]:
    store = await Store.open(empty_store(tmp_path / "s.db"))
    yield _Services(store)
    await store.close()


@pytest.mark.parametrize(
    ("caller", "tenant", "owner"),
    [(ADMIN, None, None), (ADMIN, "anne", "anne"), (ANNE, None, "anne"), (ANNE, "anne", "anne")],
)
def test_whose_sessions_are_meant(caller: Identity, tenant: str | None, owner: str | None) -> None:
    assert tenant_of(caller, tenant) == owner


@pytest.mark.parametrize("tenant", ["bert", "", "ANNE"])
def test_a_tenant_names_no_other(tenant: str) -> None:
    with pytest.raises(Forbidden):
        tenant_of(ANNE, tenant)


@pytest.mark.parametrize("name", ODD)
async def test_an_id_in_a_path_is_decoded_once(services: Any, name: str) -> None:
    await Talk(store=services.store, tenant="anne", session=name).say("a", "b")
    for caller in (ANNE, ADMIN):
        assert (await session_of(quote(name, safe=""), services, caller)).id == name
    with pytest.raises(NotFound):
        await session_of(quote(quote(name, safe=""), safe="") + "x", services, ANNE)


@pytest.mark.parametrize("written", ["none", "%00", "%ff", "%ED%A0%80", "", "s%20"])
async def test_what_is_not_there(services: Any, written: str) -> None:
    await Talk(store=services.store, tenant="anne", session="s").say("a", "b")
    for caller in (ANNE, ADMIN):
        with pytest.raises(NotFound) as found:
            await session_of(written, services, caller)
        assert found.value.param == "session"


async def test_one_name_and_two_owners(services: Any) -> None:
    for tenant in ("anne", "bert"):
        await Talk(store=services.store, tenant=tenant, session="s").say("a", "b")
    assert (await session_of("s", services, ANNE)).tenant == "anne"
    assert (await session_of("s", services, BERT)).tenant == "bert"
    assert (await session_of("s", services, ADMIN, "bert")).tenant == "bert"
    with pytest.raises(InvalidRequest) as several:
        await session_of("s", services, ADMIN)
    assert several.value.param == "tenant"
    with pytest.raises(NotFound):
        await session_of("s", services, ADMIN, "carl")
    with pytest.raises(Forbidden):
        await session_of("s", services, ANNE, "bert")


def test_messages_keep_their_bytes() -> None:
    raw = b'{ "role":"user", "x":1.50 }'
    answer = json_response({"data": [orjson.Fragment(raw)]}, 201)
    assert (answer.status_code, answer.body) == (201, b'{"data":[' + raw + b"]}")
    assert answer.headers["content-type"] == "application/json"
