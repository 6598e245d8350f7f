"""One HTTP exchange over ASGI: >> what the server hands in, << what is sent back."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import anyio
import orjson
import pytest

from proxy.api.connection import ClientLeft, Connection
from proxy.errors import TooLarge, UpstreamTimeout

pytestmark = pytest.mark.anyio

DISCONNECT: dict[str, Any] = {"type": "http.disconnect"}


def _piece(body: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


class _Server:
    """The server's side: hands in `incoming` one by one, then waits; keeps what it is given."""

    def __init__(self, *incoming: dict[str, Any]) -> None:
        self.incoming = list(incoming)
        self.sent: list[MutableMapping[str, Any]] = []

    async def receive(self) -> MutableMapping[str, Any]:
        if not self.incoming:
            await anyio.sleep_forever()
        return self.incoming.pop(0)

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.sent.append(message)

    def connect(self, *headers: tuple[bytes, bytes]) -> Connection:
        scope = {"headers": list(headers), "method": "POST", "query_string": b"a=1"}
        return Connection(scope, self.receive, self.send)


async def test_a_body_comes_in_pieces() -> None:
    assert (
        await _Server(_piece(b"ab", more=True), _piece(b"", more=True), _piece(b"c")).connect().body(3)
        == b"abc"
    )


async def test_a_body_over_the_limit_is_refused_before_it_is_read() -> None:
    server = _Server(_piece(b"abcd"))
    with pytest.raises(TooLarge, match="3 bytes"):
        await server.connect((b"content-length", b"4")).body(3)
    assert server.incoming


async def test_a_body_that_does_not_say_its_length_is_refused_where_it_passes_the_limit() -> None:
    with pytest.raises(TooLarge):
        await _Server(_piece(b"ab", more=True), _piece(b"cd")).connect().body(3)


async def test_a_client_may_leave_before_its_request_is_here() -> None:
    connection = _Server(_piece(b"ab", more=True), DISCONNECT).connect()
    with pytest.raises(ClientLeft):
        await connection.body(10)
    assert connection.gone


async def test_leaving_is_noticed_after_the_body_and_nothing_is_sent_then() -> None:
    server = _Server(_piece(b"x"), DISCONNECT)
    connection = server.connect()
    await connection.body(10)
    await connection.left()
    await connection.start(200, [])
    await connection.write(b"x")
    await connection.end()
    assert connection.gone
    assert server.sent == []


async def test_an_error_is_a_response_before_the_start_and_an_event_after_it() -> None:
    error = UpstreamTimeout("slow")
    before, after = _Server(), _Server()
    await before.connect().fail(error, [(b"x-session-id", b"s")])
    assert before.sent[0]["status"] == 504
    assert (b"x-session-id", b"s") in before.sent[0]["headers"]
    assert orjson.loads(before.sent[1]["body"])["error"]["code"] == "upstream_timeout"
    connection = after.connect()
    await connection.start(200, [])
    await connection.fail(error)
    assert after.sent[-1] == {
        "type": "http.response.body",
        "body": b"data: " + orjson.dumps(error.body()) + b"\n\n",
        "more_body": False,
    }


async def test_headers_are_found_by_lower_case_name() -> None:
    connection = _Server().connect((b"a", b"1"), (b"a", b"2"))
    assert connection.header(b"a") == b"1"
    assert connection.header(b"b") is None
