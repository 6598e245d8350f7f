"""The hot endpoint, and the client's side of one request."""

from __future__ import annotations

import asyncio
import gc
import gzip
import os
import weakref
import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from types import SimpleNamespace
from typing import Any, Final

import anyio
import anyio.lowlevel
import orjson
import pytest
import zstandard

from proxy.config import Settings
from proxy.errors import ClientLeft, TooLarge, UpstreamTimeout
from proxy.pipeline import Background, ClientRequest
from proxy.server.authentication import Authenticator
from proxy.server.budgets import Budgets
from proxy.server.endpoint import ClientConnection, DialectEndpoint
from proxy.server.limits import MemoryBudget

pytestmark = pytest.mark.anyio

NO_STORE: Any = None
BUDGETS = Budgets((), NO_STORE, once_back=NO_STORE)

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

    def connect(self, *headers: tuple[bytes, bytes]) -> ClientConnection:
        scope = {"headers": list(headers), "method": "POST", "query_string": b"a=1"}
        return ClientConnection(scope, self.receive, self.send)


async def test_a_body_comes_in_pieces() -> None:
    assert await _Server(_piece(b"ab", more=True), _piece(b"", more=True), _piece(b"c")).connect().body(3) == b"abc"


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
    assert connection.first.get(b"a") == b"1"
    assert connection.first.get(b"b") is None


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


async def _connected(client: _Leaving) -> ClientConnection:
    async def send(_: Any) -> None:
        pass

    connection = ClientConnection({"headers": [], "method": "POST", "query_string": b""}, client, send)
    await connection.body(100)
    return connection


async def test_work_is_stopped_when_the_client_leaves() -> None:
    client, work = _Leaving(), _Work()
    connection = await _connected(client)
    client.leaves.set()
    await connection.serve(work(), Background())  # it comes back: nobody else need hear of it
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

    await connection.serve(work(), Background(), stops=False)
    assert connection.gone


async def test_a_request_that_was_watched_is_freed_without_the_garbage_collector() -> None:
    client, background = _Leaving(), Background()

    async def serve() -> weakref.ref[ClientConnection]:
        connection, watched = await _connected(client), asyncio.Event()

        async def receive() -> dict[str, Any]:
            watched.set()
            return await client()

        connection._receive = receive
        await connection.serve(watched.wait(), background)  # type: ignore[arg-type]
        return weakref.ref(connection)

    gc.disable()
    try:
        reference = await serve()
        await background.drain()
        await asyncio.sleep(0)
        assert reference() is None
    finally:
        gc.enable()


async def test_a_server_that_stops_cancels_the_work_and_hears_of_it() -> None:
    work = _Work()
    connection = await _connected(_Leaving())

    async def serve() -> None:
        await connection.serve(work(), Background())

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
        await connection.serve(work(), Background())


LOCAL = (b"host", b"localhost")
LEFT = {"type": "http.disconnect"}


class _Chat:
    """An exchange that answers in one word, or does what it is told."""

    def __init__(self, does: Callable[[Any], Awaitable[None]] | None = None) -> None:
        self.calls: list[ClientRequest] = []
        self._does = does

    async def answer(self, call: ClientRequest, client: ClientConnection) -> None:
        self.calls.append(call)
        if self._does is not None:
            await self._does(client)
        await client.start(200, [])
        await client.end(b"fine")


async def _served(
    chat: _Chat, *received: dict[str, Any], headers: tuple[tuple[bytes, bytes], ...] = (LOCAL,), **sections: Any
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
    services: Any = SimpleNamespace(
        settings=settings,
        app=SimpleNamespace(background=Background()),
        authenticator=Authenticator(settings.auth, b"s" * 32),
        budget=MemoryBudget(settings.server),
        budgets=BUDGETS,
    )
    endpoint = DialectEndpoint(services, chat)  # type: ignore[arg-type]  # as much of it as is needed
    await endpoint.serve(ClientConnection(scope, receive, send))
    status = sent[0]["status"] if sent else None
    return status, b"".join(message.get("body", b"") for message in sent)


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
        ((LOCAL, (b"authorization", b"Bearer key-of-the-admin")), 403),
        ((LOCAL, (b"content-encoding", b"br")), 400),
        ((LOCAL, (b"content-length", b"11")), 413),
    ],
)
async def test_who_is_turned_away(headers: tuple[tuple[bytes, bytes], ...], status: int) -> None:
    chat = _Chat()
    sections = {"auth": {"admin_key": "key-of-the-admin"}, "server": {"max_body_bytes": 10}}
    told, body = await _served(chat, _piece(b"{}"), headers=headers, **sections)
    assert (told, chat.calls) == (status, [])
    assert body.startswith(b'{"error":')


# The tests' names hold the bodies. They have to be the same in each process, so gzip must not note the time.
_BODY: Final = b'{"model": "m", "messages": [%s]}' % b", ".join([b'{"role": "user", "content": "hi"}'] * 9)
_RAW_DEFLATE: Final = zlib.compressobj(wbits=-15)


@pytest.mark.parametrize(
    ("encoding", "encoded"),
    [
        (b"gzip", gzip.compress(_BODY, mtime=0)),
        (b"gzip", gzip.compress(_BODY[:9], mtime=0) + gzip.compress(_BODY[9:], mtime=0)),
        (b"X-GZip", gzip.compress(_BODY, mtime=0)),
        (b"deflate", zlib.compress(_BODY)),
        (b"deflate", _RAW_DEFLATE.compress(_BODY) + _RAW_DEFLATE.flush()),
        (b"zstd", zstandard.compress(_BODY)),
        (b"zstd", zstandard.compress(_BODY[:9]) + zstandard.compress(_BODY[9:])),
        (b"identity", _BODY),
        (b"", _BODY),
    ],
)
async def test_an_encoded_body_is_decoded(encoding: bytes, encoded: bytes) -> None:
    chat = _Chat()
    halves = _piece(encoded[:20], more=True), _piece(encoded[20:])
    assert await _served(chat, *halves, headers=(LOCAL, (b"content-encoding", encoding))) == (200, b"fine")
    (call,) = chat.calls
    assert (call.body, call.headers) == (_BODY, [LOCAL])


@pytest.mark.parametrize(
    ("encoding", "encoded", "status", "says"),
    [
        (b"br", b"x", 400, b"Send the request body as gzip, deflate or zstd"),
        (b"gzip, zstd", b"x", 400, b"Send the request body as gzip, deflate or zstd"),
        (b"gzip", b"no gzip", 400, b"The request body is not gzip: "),
        (b"gzip", gzip.compress(_BODY, mtime=0)[:-9], 400, b"it has no end"),
        (b"zstd", b"no zstd", 400, b"The request body is not zstd: "),
        (b"zstd", zstandard.ZstdCompressor(level=22).compress(os.urandom(9_000_000)), 400, b"is not zstd: "),
        # A megabyte of nothing in a few bytes: no more of it is decoded than may be.
        (b"gzip", gzip.compress(bytes(1_000_000), mtime=0), 413, b"server.max_body_bytes"),
        (b"zstd", zstandard.compress(bytes(1_000_000)), 413, b"server.max_body_bytes"),
    ],
)
async def test_an_encoded_body_that_is_refused(encoding: bytes, encoded: bytes, status: int, says: bytes) -> None:
    chat = _Chat()
    limit = len(encoded) + 1000
    told, body = await _served(
        chat, _piece(encoded), headers=(LOCAL, (b"content-encoding", encoding)), server={"max_body_bytes": limit}
    )
    assert (told, chat.calls) == (status, [])
    assert says in body


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
