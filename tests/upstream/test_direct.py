"""Requests straight to their server, over real sockets, on asyncio's own event loop and on uvloop's."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import socket
import ssl
import struct
import subprocess
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy.upstream import direct
from proxy.upstream.channel import Broken
from proxy.upstream.direct import DirectResponse, DirectTransport, Origin, Unreachable, origin_of

pytestmark = pytest.mark.anyio

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
LIMITS: dict[str, Any] = {"connect_timeout": 5, "read_timeout": 5}


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": request.param}


class _Server:
    """Answers each request with the next of `answers`, the last one again and again; `b""` closes."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = 0
        self.open = 0
        self.port = 0
        self.tired = 0
        """So many connections, the first ones, are closed as soon as another request comes on them."""
        self.writers: list[asyncio.StreamWriter] = []

    @property
    def origin(self) -> Origin:
        found = origin_of(f"http://127.0.0.1:{self.port}/v1")
        assert found is not None
        return found

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        self.open += 1
        self.writers.append(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                if not answer or number <= self.tired:
                    break
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def _serving(*answers: bytes, encrypted: ssl.SSLContext | None = None) -> AsyncIterator[_Server]:
    server = _Server(*answers)
    listening = await asyncio.start_server(server, "127.0.0.1", 0, ssl=encrypted)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
        for writer in server.writers:
            writer.close()


@pytest.fixture
async def transport() -> AsyncGenerator[DirectTransport]:
    opened = DirectTransport()
    yield opened
    await opened.aclose()


async def _read(response: DirectResponse) -> bytes:
    body = b""
    while not response.ended and (piece := await response.piece()):
        body += piece
    await response.aclose()
    return body


async def _until(true: Any) -> None:
    async with asyncio.timeout(5):
        while not true():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0.005)


async def test_what_is_sent_is_what_was_given_with_host_and_length(transport: DirectTransport) -> None:
    headers = [
        (b"X-B", b"1"),
        (b"x-a", b"two  words"),
        (b"X-B", b"2"),
        (b"X-U", "grün 蓝".encode() + b"\xff"),
    ]
    async with _serving(OK) as server:
        response = await transport.ask(server.origin, b"/v1/x?q=%20", headers, b"{}", **LIMITS)
        assert (response.status, await _read(response)) == (200, b"ok")
    lines = [b"%b: %b" % field for field in headers]
    assert server.requests[0].split(b"\r\n") == [
        b"POST /v1/x?q=%20 HTTP/1.1",
        b"Host: 127.0.0.1:%d" % server.port,
        *lines,
        b"Content-Length: 2",
        b"",
        b"{}",
    ]


@pytest.mark.parametrize("size", [0, 3_000_000])
async def test_a_body_goes_whole_whatever_its_size(transport: DirectTransport, size: int) -> None:
    async with _serving(OK) as server:
        assert await _read(await transport.ask(server.origin, b"/x", [], b"a" * size, **LIMITS)) == b"ok"
    assert server.requests[0].endswith(b"Content-Length: %d\r\n\r\n" % size + b"a" * size)


@pytest.mark.parametrize("value", [b"a\r\nX-More: b", b"a\nb", b"a\rb", b"a\0b"])
async def test_a_header_cannot_become_two(transport: DirectTransport, value: bytes) -> None:
    async with _serving(OK) as server:
        with pytest.raises(ValueError, match="end of a line"):
            await transport.ask(server.origin, b"/x", [(b"X", value)], b"", **LIMITS)
    assert server.requests == []


async def test_a_connection_is_used_again_and_several_where_several_ask(transport: DirectTransport) -> None:
    async with _serving(OK) as server:
        for _ in range(3):
            await _read(await transport.ask(server.origin, b"/x", [], b"", **LIMITS))
        assert server.connections == 1
        both = [await transport.ask(server.origin, b"/x", [], b"", **LIMITS) for _ in range(2)]
        assert server.connections == 2
        for response in both:
            await _read(response)


@pytest.mark.parametrize("late", [False, True], ids=["swept", "sweep-is-late"])
async def test_a_connection_that_rested_too_long_is_not_used_again(late: bool) -> None:
    """A server may close it at any moment by then, and what is sent just then is lost."""
    transport = DirectTransport(idle_seconds=0.01)
    async with _serving(OK) as server:
        for asked in range(5):
            assert await _read(await transport.ask(server.origin, b"/x", [], b"", **LIMITS)) == b"ok"
            if late and transport._sweeping is not None:
                transport._sweeping.cancel()
            await asyncio.sleep(0.02)  # the pause itself, not a wait
            server.tired = server.connections  # these get no answer any more
            assert server.connections == asked + 1
    await transport.aclose()
    patient = DirectTransport()
    async with _serving(OK) as server:
        await _read(await patient.ask(server.origin, b"/x", [], b"", **LIMITS))
        server.tired = server.connections
        with pytest.raises(Broken):
            await patient.ask(server.origin, b"/x", [], b"", **LIMITS)
    await patient.aclose()
    assert direct.IDLE_SECONDS < 5


@pytest.mark.parametrize("ending", [b"Connection: close\r\n", b""])
async def test_a_connection_that_ends_is_not_used_again(transport: DirectTransport, ending: bytes) -> None:
    async with _serving(OK.replace(b"\r\n\r\n", b"\r\n" + ending + b"\r\n")) as server:
        await _read(await transport.ask(server.origin, b"/x", [], b"", **LIMITS))
        if not ending:  # the server closes while nobody asks
            server.writers[0].close()
            await _until(lambda: all(channel.closed for channel in transport._open))
        assert await _read(await transport.ask(server.origin, b"/x", [], b"", **LIMITS)) == b"ok"
        assert server.connections == 2


@pytest.mark.parametrize(
    ("says", "connections"),
    [(b"timeout=1, max=9", 2), (b"max=9;Timeout=0", 2), (b"timeout=5", 1), (b"max=1", 1)],
)
async def test_a_connection_rests_no_longer_than_the_server_says(
    transport: DirectTransport, says: bytes, connections: int
) -> None:
    async with _serving(OK.replace(b"\r\n\r\n", b"\r\nKeep-Alive: " + says + b"\r\n\r\n")) as server:
        for _ in range(2):
            await _read(await transport.ask(server.origin, b"/x", [], b"", **LIMITS))
        assert server.connections == connections


async def test_a_server_that_soon_closes_is_given_up_a_second_before() -> None:
    transport = DirectTransport(idle_seconds=60)
    async with _serving(OK.replace(b"\r\n\r\n", b"\r\nKeep-Alive: timeout=30\r\n\r\n"), OK) as server:
        both = [await transport.ask(server.origin, b"/x", [], b"", **LIMITS) for _ in range(2)]
        for response in both:
            await _read(response)
        seconds = [resting.until - resting.since for resting in transport._idle[server.origin]]
        assert seconds == pytest.approx([29, 60])
    await transport.aclose()


@pytest.mark.parametrize("first", [0, 1], ids=["soon-first", "late-first"])
async def test_each_connection_is_closed_when_it_is_given_up(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "_SPARE_SECONDS", 0.99)
    transport = DirectTransport(idle_seconds=60)
    soon = OK.replace(b"\r\n\r\n", b"\r\nKeep-Alive: timeout=1\r\n\r\n")  # a hundredth of a second
    async with _serving(soon, OK) as server:
        both = [await transport.ask(server.origin, b"/x", [], b"", **LIMITS) for _ in range(2)]
        await _read(both.pop(first))
        await _read(both.pop())
        await _until(lambda: server.open == 1)
        [left] = transport._idle[server.origin]
        assert left.until - left.since == pytest.approx(60)
        assert transport._sweeping is not None
        assert transport._sweeping.when() == pytest.approx(left.until, abs=10)
    await transport.aclose()


async def test_an_end_that_the_event_loop_has_not_heard_of_is_seen(
    transport: DirectTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "_FRESH_SECONDS", 0.0)
    async with _serving(OK) as server:
        await _read(await transport.ask(server.origin, b"/x", [], b"1", **LIMITS))
        [kept] = transport._open.values()
        with socket.socket(fileno=os.dup(server.writers[0].get_extra_info("socket").fileno())) as theirs:
            theirs.shutdown(socket.SHUT_WR)  # at once: the event loop has no say in it
        assert select.select([kept], [], [], 5)[0] == [kept]
        await _read(await transport.ask(server.origin, b"/x", [], b"2", **LIMITS))
        assert [request[-1:] for request in server.requests] == [b"1", b"2"]
        assert server.connections == 2


@pytest.mark.parametrize("end", ["none", "closed", "reset", "said"])
def test_a_connection_is_looked_at_without_taking_anything_of_it(end: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
        with ours, theirs:
            ours.setblocking(False)
            if end == "said":
                theirs.sendall(b"x")
            elif end == "reset":
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if end in {"closed", "reset"}:
                theirs.close()
            if end != "none":
                select.select([ours], [], [], 5)
            assert direct._has_news(ours) is (end != "none")
            if end == "said":
                assert ours.recv(9) == b"x"


@pytest.mark.parametrize("name", [b"Idempotency-Key", b"x-idempotency-key"])
async def test_what_the_client_allows_to_come_twice_is_sent_once_more(
    transport: DirectTransport, name: bytes
) -> None:
    """The server closes just as the request comes: whether it was read cannot be told."""
    async with _serving(OK, b"", OK) as server:
        await _read(await transport.ask(server.origin, b"/x", [], b"1", **LIMITS))
        assert await _read(await transport.ask(server.origin, b"/x", [(name, b"k")], b"2", **LIMITS)) == b"ok"
        assert [request[-1:] for request in server.requests] == [b"1", b"2", b"2"]
        assert server.connections == 2


async def test_it_is_sent_once_more_at_most_and_not_at_all_where_the_connection_was_new() -> None:
    key = [(b"Idempotency-Key", b"k")]
    for answers, requests in (((OK, b""), 3), ((b"",), 1)):
        transport = DirectTransport()
        async with _serving(*answers) as server:
            if len(answers) > 1:
                await _read(await transport.ask(server.origin, b"/x", [], b"", **LIMITS))
            with pytest.raises(Broken):
                await transport.ask(server.origin, b"/x", key, b"", **LIMITS)
            assert len(server.requests) == requests
            assert not transport._open
        await transport.aclose()


async def test_what_was_answered_by_one_byte_is_not_sent_again(transport: DirectTransport) -> None:
    async with _serving(OK, b"H") as server:
        await _read(await transport.ask(server.origin, b"/x", [], b"", **LIMITS))
        asking = asyncio.get_running_loop().create_task(
            transport.ask(server.origin, b"/x", [(b"Idempotency-Key", b"k")], b"", **LIMITS)
        )
        await _until(lambda: len(server.requests) == 2)
        server.writers[0].close()
        with pytest.raises(Broken):
            await asking
        assert (len(server.requests), server.connections) == (2, 1)


async def test_any_other_request_is_never_sent_twice(transport: DirectTransport) -> None:
    async with _serving(OK, b"") as server:
        await _read(await transport.ask(server.origin, b"/x", [], b"", **LIMITS))
        with pytest.raises(Broken):
            await transport.ask(server.origin, b"/x", [], b"", **LIMITS)
        assert (len(server.requests), server.connections) == (2, 1)
        assert not transport._open  # what failed holds on to its request: nothing may hold on to it


async def test_an_answer_that_is_not_wanted_to_its_end_closes(transport: DirectTransport) -> None:
    async with _serving(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nfirst") as server:
        response = await transport.ask(server.origin, b"/x", [], b"", **LIMITS)
        await response.aclose()
        await _until(lambda: server.open == 0)


async def test_who_stops_asking_closes(transport: DirectTransport) -> None:
    async with _serving(b"HTTP/1.1 200 OK\r\n") as server:
        asking = asyncio.get_running_loop().create_task(
            transport.ask(server.origin, b"/x", [], b"", **LIMITS)
        )
        await _until(lambda: server.requests)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await _until(lambda: server.open == 0)
        assert not transport._open


async def test_silence_is_a_time_out_before_and_during_the_answer(transport: DirectTransport) -> None:
    limits = LIMITS | {"read_timeout": 0.05}
    async with _serving(b"HTTP/1.1 200", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf") as server:
        with pytest.raises(TimeoutError):
            await transport.ask(server.origin, b"/x", [], b"", **limits)
        response = await transport.ask(server.origin, b"/x", [], b"", **limits)
        with pytest.raises(TimeoutError):
            await _read(response)
        await response.aclose()


async def test_nobody_listening_is_unreachable(transport: DirectTransport) -> None:
    async with _serving(OK) as server:
        origin = server.origin
    with pytest.raises(Unreachable):
        await transport.ask(origin, b"/x", [], b"", **LIMITS)


@pytest.mark.parametrize("host", ["nobody.invalid", "a..b", ".a", "a" * 64 + ".example"])
async def test_a_host_that_is_not_known_is_unreachable(transport: DirectTransport, host: str) -> None:
    origin = origin_of(f"http://{host}/v1")
    assert origin is not None
    with pytest.raises(Unreachable):
        await transport.ask(origin, b"/x", [], b"", **LIMITS)


async def test_a_connection_that_does_not_come_is_a_time_out(
    transport: DirectTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(direct, "start_connection", never)
    async with _serving(OK) as server:
        with pytest.raises(TimeoutError):
            await transport.ask(server.origin, b"/x", [], b"", connect_timeout=0.01, read_timeout=5)


async def test_a_name_is_looked_up(transport: DirectTransport) -> None:
    async with _serving(OK) as server:
        origin = origin_of(f"http://localhost:{server.port}")
        assert origin is not None
        assert await _read(await transport.ask(origin, b"/x", [], b"", **LIMITS)) == b"ok"
    assert b"\r\nHost: localhost:%d\r\n" % server.port in server.requests[0]


async def test_connections_that_nobody_needs_are_closed_after_a_while(transport: DirectTransport) -> None:
    async with _serving(OK) as server:
        await _read(await transport.ask(server.origin, b"/x", [], b"", **LIMITS))
        transport._sweep()  # too early
        assert server.open == 1
        assert transport._sweeping is not None
        transport._idle[server.origin] = [
            resting._replace(until=resting.since) for resting in transport._idle[server.origin]
        ]
        transport._sweep()
        assert (transport._idle, transport._open) == ({}, {})
        await _until(lambda: server.open == 0)


async def test_closing_closes_what_is_idle_and_what_is_in_use() -> None:
    transport = DirectTransport()
    async with _serving(OK, b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf") as server:
        await _read(await transport.ask(server.origin, b"/x", [], b"", **LIMITS))
        first = await transport.ask(server.origin, b"/x", [], b"", **LIMITS)
        await transport.aclose()
        await _until(lambda: server.open == 0)
        with pytest.raises(Broken):
            await _read(first)
        await first.aclose()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate that names localhost, signed by itself, with its key in one file."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("there is no openssl to make a certificate with")
    made = tmp_path / "both.pem"
    words = (
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    files = ["-keyout", str(made), "-out", str(tmp_path / "certificate.pem")]
    subprocess.run([program, *words.split(), *files], check=True, capture_output=True)  # noqa: S603 - no stranger's
    made.write_bytes(made.read_bytes() + (tmp_path / "certificate.pem").read_bytes())
    return made


@pytest.mark.parametrize(
    ("host", "trusted"), [("localhost", True), ("127.0.0.1", False), ("localhost", False)]
)
async def test_an_encrypted_connection_needs_a_certificate_that_is_trusted_and_names_the_host(
    transport: DirectTransport,
    certificate: Path,
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    *,
    trusted: bool,
) -> None:
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(certificate)
    ours = direct._encryption.__wrapped__()
    if trusted or host != "localhost":
        ours.load_verify_locations(certificate)
    monkeypatch.setattr(direct, "_encryption", lambda: ours)
    async with _serving(OK, encrypted=theirs) as server:
        origin = origin_of(f"https://{host}:{server.port}/v1")
        assert origin is not None
        if trusted:
            for _ in range(2):
                assert await _read(await transport.ask(origin, b"/v1/x", [], b"{}", **LIMITS)) == b"ok"
            assert server.connections == 1
        else:
            with pytest.raises(Unreachable):
                await transport.ask(origin, b"/v1/x", [], b"{}", **LIMITS)


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("http://a.example/v1", (False, "a.example", 80, b"a.example", "/v1")),
        ("https://a.example:443", (True, "a.example", 443, b"a.example", "")),
        ("https://A.example:8443/a%20b", (True, "A.example", 8443, b"A.example:8443", "/a%20b")),
        ("http://[::1]:81/v1", (False, "::1", 81, b"[::1]:81", "/v1")),
        ("http://[::1]", (False, "::1", 80, b"[::1]", "")),
    ],
)
def test_where_an_address_leads(url: str, parts: tuple[bool, str, int, bytes, str]) -> None:
    origin = origin_of(url)
    assert origin == Origin(**dict(zip(Origin.__struct_fields__, parts, strict=False)))  # type: ignore[arg-type]
    assert origin is not None
    assert url.startswith(f"{origin.scheme}://")


@pytest.mark.parametrize(
    "url",
    [
        "http://anne:secret@a.example/v1",
        "ftp://a.example",
        "http://bücher.example",
        "http://a.example?q",
        "a",
    ],
)
def test_addresses_that_need_more_than_this(url: str) -> None:
    assert origin_of(url) is None
