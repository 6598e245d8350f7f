"""One HTTP exchange over ASGI: >> what the server hands in, << what is sent back."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import anyio
import orjson
import pytest

from proxy.errors import TooLarge, UpstreamTimeout
from proxy.server.connection import ClientLeft, Connection

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


class _Work:
    """Work that waits for ever, and notes how it ended."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.cancelled = False

    async def __call__(self) -> None:
        self.began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


class _Leaving:
    """A client whose request is here, and that leaves when it is told to."""

    def __init__(self) -> None:
        self.leaves = asyncio.Event()
        self._sent = False

    async def __call__(self) -> dict[str, Any]:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": b"{}"}
        await self.leaves.wait()
        return {"type": "http.disconnect"}


async def _connected(client: _Leaving) -> Connection:
    async def send(_: Any) -> None:
        pass

    connection = Connection({"headers": [], "method": "POST", "query_string": b""}, client, send)
    await connection.body(100)
    return connection


async def test_work_is_stopped_when_the_client_leaves() -> None:
    client, work = _Leaving(), _Work()
    connection = await _connected(client)
    client.leaves.set()
    await connection.serve(work())  # it comes back: nobody else need hear of it
    assert work.cancelled
    assert connection.gone
    current = asyncio.current_task()
    assert current is not None
    assert not current.cancelling()


async def test_work_that_is_to_be_finished_goes_on_without_the_client() -> None:
    client = _Leaving()
    connection = await _connected(client)

    async def work() -> None:
        client.leaves.set()
        while not connection.gone:  # noqa: ASYNC110 - nobody is told of it
            await asyncio.sleep(0)

    await connection.serve(work(), stops=False)
    assert connection.gone


async def test_a_server_that_stops_cancels_the_work_and_hears_of_it() -> None:
    work = _Work()
    connection = await _connected(_Leaving())

    async def serve() -> None:
        await connection.serve(work())

    async with asyncio.TaskGroup() as group:
        serving = group.create_task(serve())
        await work.began.wait()
        serving.cancel()
    assert serving.cancelled()
    assert work.cancelled
    assert not connection.gone


async def test_what_goes_wrong_with_the_work_is_told() -> None:
    connection = await _connected(_Leaving())

    async def work() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await connection.serve(work())
