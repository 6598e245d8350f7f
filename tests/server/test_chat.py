"""The hot route on its own: who is turned away before the exchange hears of it. Leaving clients: e2e."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from proxy.config import Settings
from proxy.errors import UpstreamTimeout
from proxy.pipeline import Call
from proxy.server.chat import ChatEndpoint
from proxy.server.connection import Connection
from proxy.server.gate import Authenticator

pytestmark = pytest.mark.anyio

LOCAL = (b"host", b"localhost")
LEFT = {"type": "http.disconnect"}


class _Chat:
    """An exchange that answers in one word, or does what it is told."""

    def __init__(self, does: Callable[[Any], Awaitable[None]] | None = None) -> None:
        self.calls: list[Call] = []
        self._does = does

    async def answer(self, call: Call, client: Connection) -> None:
        self.calls.append(call)
        if self._does is not None:
            await self._does(client)
        await client.start(200, [])
        await client.end(b"fine")


async def _served(
    chat: _Chat,
    *received: dict[str, Any],
    headers: tuple[tuple[bytes, bytes], ...] = (LOCAL,),
    **sections: Any,
) -> tuple[int | None, bytes]:
    """Serve one request; return the status (None: nothing was said) and the body."""
    settings = Settings(**sections)
    waiting = list(received)
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if not waiting:
            await anyio.sleep_forever()
        return waiting.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"headers": list(headers), "method": "POST", "query_string": b"a=b"}
    gate = Authenticator(settings.auth, b"s" * 32)
    endpoint = ChatEndpoint(settings, gate, chat)  # type: ignore[arg-type]  # as much of it as is asked for
    await endpoint.serve(Connection(scope, receive, send))
    status = sent[0]["status"] if sent else None
    return status, b"".join(message.get("body", b"") for message in sent)


def _piece(body: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_the_exchange_gets_the_request_as_it_came() -> None:
    chat = _Chat()
    assert await _served(chat, _piece(b"{", more=True), _piece(b"}")) == (200, b"fine")
    (call,) = chat.calls
    assert (call.tenant, call.query, call.body, call.headers) == ("default", b"a=b", b"{}", [LOCAL])


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ((), 403),
        (((b"host", b"evil.example"),), 403),
        ((LOCAL, (b"authorization", b"Bearer root")), 403),
        ((LOCAL, (b"content-encoding", b"gzip")), 400),
        ((LOCAL, (b"content-length", b"11")), 413),
    ],
)
async def test_who_is_turned_away(headers: tuple[tuple[bytes, bytes], ...], status: int) -> None:
    chat = _Chat()
    sections = {"auth": {"admin_key": "root"}, "server": {"max_body_bytes": 10}}
    told, body = await _served(chat, _piece(b"{}"), headers=headers, **sections)
    assert (told, chat.calls) == (status, [])
    assert body.startswith(b'{"error":')


async def test_a_client_that_leaves_before_it_has_asked() -> None:
    chat = _Chat()
    assert await _served(chat, _piece(b"{", more=True), LEFT) == (None, b"")
    assert chat.calls == []


async def test_an_error_of_the_exchange_is_told() -> None:
    async def fail(_: Any) -> None:
        raise UpstreamTimeout("Too late.")

    status, body = await _served(_Chat(fail), _piece(b"{}"))
    assert (status, b"Too late." in body) == (504, True)


@pytest.mark.parametrize(("on_disconnect", "answered"), [("cancel", False), ("finish", True)])
async def test_a_client_that_leaves_stops_its_exchange_unless_told_otherwise(
    on_disconnect: str, answered: bool
) -> None:
    ended: list[bool] = []

    async def wait(client: Any) -> None:
        try:
            while not client.gone:
                await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
        except anyio.get_cancelled_exc_class():
            ended.append(False)
            raise
        ended.append(True)

    sections: dict[str, Any] = {"sessions": {"on_disconnect": on_disconnect}}
    assert await _served(_Chat(wait), _piece(b"{}"), LEFT, **sections) == (None, b"")
    assert ended == [answered]
