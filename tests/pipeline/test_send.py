"""Asking the upstream, and asking once more: what is sent then, and that no connection is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from proxy.pipeline.inquiry import RESCUED, UpstreamSender
from proxy.pipeline.turn import Call

from proxy.errors import UpstreamBusy
from proxy.store import Status
from proxy.upstream import Answer
from tests.support.house import LONG, SESSION, Heard, House, opened
from tests.support.upstream import Upstream as Provider

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    with Provider() as upstream:
        yield upstream


@pytest.fixture
async def house(provider: Provider, tmp_path: Path) -> AsyncIterator[House]:
    provider.forget()
    async with opened(provider, tmp_path, upstream={"max_connections": 1, "connect_timeout": 1}) as house:
        yield house


WINDOW = "echo+ctx:4000"


async def test_an_overflow_is_asked_once_more_over_one_connection(house: House, provider: Provider) -> None:
    client = await house.ask(WINDOW, messages=LONG)
    assert (client.status, len(provider.log)) == (200, 2)
    row = await house.last()
    assert RESCUED in row.receipt["warnings"]
    assert row.status is Status.COMPLETE
    assert row.tokens_sent * 2 <= row.tokens_before
    assert client.headers["x-context-tokens-sent"] == str(row.tokens_sent)


async def test_the_query_of_the_client_goes_to_no_route(provider: Provider, tmp_path: Path) -> None:
    routes = [{"models": ["echo+*"], "base_url": provider.base_url, "api_key": "sk-route"}]
    provider.forget()
    async with opened(provider, tmp_path, upstream={"routes": routes}) as house:
        for model in ("echo", "echo+ctx:4000"):
            body = orjson.dumps({"model": model, "messages": [{"role": "user", "content": "hi"}]})
            await house.chat.answer(
                Call(tenant="t", headers=[SESSION], query=b"api-version=1&key=sk-client", body=body), Heard()
            )
    base, route = provider.log
    assert (base.query, route.query) == ("api-version=1&key=sk-client", "")
    assert ("authorization", "Bearer sk-route") in route.headers


async def test_usage_that_is_refused_after_an_overflow_is_not_asked_for_again(
    house: House, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may look at the length first, and at the fields of what is short enough then."""
    sent: list[bool] = []
    ask = house.upstream.ask

    async def refusing(*given: Any) -> Answer:
        destination, method, path, fields, body = given
        asked = orjson.loads(body)
        sent.append("stream_options" in asked)
        if len(asked["messages"]) < len(LONG) and sent[-1]:
            body = orjson.dumps({**asked, "model": "plain"})
        return await ask(destination, method, path, fields, body)

    monkeypatch.setattr(house.upstream, "ask", refusing)
    client = await house.ask(WINDOW, messages=LONG, stream=True)
    assert (client.status, client.got.endswith(b"data: [DONE]\n\n")) == (200, True)
    assert sent == [True, True, False]
    assert RESCUED in (await house.last()).receipt["warnings"]
    provider.forget()
    await house.ask(WINDOW, stream=True)
    assert sent[3:] == [False]  # it is remembered


async def test_an_error_after_a_rescue_tells_of_what_was_sent_last(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = house.upstream.ask
    asked: list[bytes] = []

    async def busy(*given: Any) -> Answer:
        asked.append(given[-1])
        if len(asked) == 2:
            raise UpstreamBusy("All are in use.")
        return await ask(*given)

    monkeypatch.setattr(house.upstream, "ask", busy)
    client = await house.ask(WINDOW, messages=LONG)
    assert isinstance(client.error, UpstreamBusy)
    row = await house.last()
    assert RESCUED in client.headers["x-context-warning"]
    assert client.headers["x-context-tokens-sent"] == str(row.tokens_sent)
    assert client.headers["x-context-messages-sent"] == str(len(orjson.loads(asked[1])["messages"]))


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_rescue_that_fails_keeps_no_connection(
    house: House, provider: Provider, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    why: type[BaseException] = asyncio.CancelledError if cancelled else ZeroDivisionError

    async def fail(*_: Any) -> bool:
        raise why

    with monkeypatch.context() as patch:
        patch.setattr(UpstreamSender, "_replan", fail)
        with pytest.raises(why):
            await house.ask(WINDOW, messages=LONG)
    await house.background.drain()
    row = await house.last()
    assert row.status is (Status.CANCELLED if cancelled else Status.FAILED)
    assert len(provider.log) == 1
    assert (await house.ask()).status == 200  # there is one connection only


async def test_what_does_not_get_shorter_is_not_asked_again(house: House, provider: Provider) -> None:
    client = await house.ask(WINDOW, messages=[{"role": "user", "content": "parcel " * 6_000}])
    assert (client.status, len(provider.log)) == (400, 1)
    assert orjson.loads(client.got)["error"]["code"] == "context_length_exceeded"
    assert RESCUED not in (await house.last()).receipt["warnings"]


async def test_a_second_plan_is_made_where_the_first_is_too_long_by_its_bytes(
    house: House, provider: Provider
) -> None:
    """Much of what is left here is not text: it counts for more with upstream than the counter thinks."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    short: list[dict[str, Any]] = []
    for number in range(160):
        called = {"role": "assistant", "content": None, "tool_calls": [{**call, "id": f"c{number}"}]}
        short += [called, {"role": "tool", "tool_call_id": f"c{number}", "content": "1"}]
    said = [*LONG[:-1], LONG[-1], *short]
    client = await house.ask(WINDOW, messages=said)
    assert (client.status, len(provider.log)) == (200, 2)
