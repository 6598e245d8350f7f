"""One connection, byte by byte: >> what is asked, << what comes, in whatever pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.upstream.channel import FIELD_BYTES, Broken, Channel

pytestmark = pytest.mark.anyio

HEAD = b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"4;ext=1\r\nthis\r\n3\r\n is\r\n0\r\nX-Trailer: t\r\n\r\n"
)


class _Wire(asyncio.Transport):
    """The other end, as far as the channel can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.channel = Channel()
        self.sent = b""
        self.unsent = 0
        self.reading = True
        self.ended = False
        self.channel.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.sent += b"".join(list_of_data)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.ended

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def abort(self) -> None:
        self.end()

    def end(self, why: Exception | None = None) -> None:
        """Let the connection end."""
        if not self.ended:
            self.ended = True
            self.channel.connection_lost(why)

    async def ask(self, *came: bytes, body: bytes = b"{}", ends: bool = False) -> Channel:
        """Ask, and let this come for an answer."""
        loop = asyncio.get_running_loop()
        for data in came:
            loop.call_soon(self.channel.data_received, data)
        if ends:
            loop.call_soon(self.end)
        await self.channel.ask(HEAD, body, 5)
        return self.channel


async def _body(channel: Channel) -> bytes:
    body = b""
    while piece := await channel.piece():
        body += piece
    return body


@pytest.mark.parametrize(
    ("answer", "body", "free"),
    [
        (OK, b"ok", True),
        (CHUNKED, b"this is", True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"ok", True),
        (b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + OK, b"ok", True),
        (OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), b"ok", False),
        (OK.replace(b"1.1", b"1.0"), b"ok", False),
        (OK.replace(b"1.1", b"1.0").replace(b"\r\n\r\n", b"\r\nConnection: keep-alive\r\n\r\n"), b"ok", True),
        (OK.replace(b"2\r\n\r\nok", b"0\r\n\r\n"), b"", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\n\r\n", b"", False),
        (b"HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n", b"", False),
        (OK + b"HTTP/1.1 200 OK\r\n", b"ok", False),
        (OK + b"nonsense", b"ok", False),
        (OK.replace(b"\r\n", b"\n"), b"ok", True),
        (CHUNKED.replace(b"3\r\n", b"3 \r\n"), b"this is", True),
    ],
)
async def test_an_answer_ends_where_it_says(answer: bytes, body: bytes, *, free: bool) -> None:
    channel = await _Wire().ask(answer)
    assert (await _body(channel), channel.complete, channel.free) == (body, True, free)
    assert await channel.piece() == b""


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\n\r\nto the end",
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n\r\nto the end",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nto the end",
    ],
)
async def test_an_answer_without_a_length_ends_with_the_connection(answer: bytes) -> None:
    channel = await _Wire().ask(answer, ends=True)
    assert (await _body(channel), channel.complete, channel.free) == (b"to the end", True, False)


async def test_an_answer_without_a_length_is_not_whole_where_the_connection_was_reset() -> None:
    wire = _Wire()
    channel = await wire.ask(b"HTTP/1.1 200 OK\r\n\r\nhalf")
    wire.end(ConnectionResetError())
    assert await channel.piece() == b"half"
    with pytest.raises(Broken):
        await channel.piece()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nhalf",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n0\r\n",
    ],
)
async def test_all_that_came_before_a_break_is_given(answer: bytes) -> None:
    channel = await _Wire().ask(answer, ends=True)
    assert await channel.piece() == b"half"
    for _ in range(2):
        with pytest.raises(Broken):
            await channel.piece()
    assert not channel.free


async def test_what_came_before_nonsense_is_given() -> None:
    wire = _Wire()
    channel = await wire.ask(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\nxyz\r\n")
    assert await channel.piece() == b"half"
    with pytest.raises(Broken):
        await channel.piece()
    assert wire.ended


@pytest.mark.parametrize(
    "came",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 099 What\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nX: a\0b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * FIELD_BYTES + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 1_000_000,
        b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 129 + b"\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000,
    ],
)
async def test_what_is_no_answer_breaks_the_connection(came: bytes) -> None:
    wire = _Wire()
    with pytest.raises(Broken):
        await wire.ask(came, ends=not came or came.endswith(b"Le"))
    assert wire.ended
    assert not wire.channel.free


async def test_endless_trailers_break_the_connection() -> None:
    wire = _Wire()
    channel = await wire.ask(
        CHUNKED.partition(b"0\r\n")[0] + b"0\r\n", *[b"X: " + b"a" * 60_000 + b"\r\n"] * 6
    )
    assert await channel.piece() == b"this is"
    with pytest.raises(Broken):
        await channel.piece()


async def test_fields_come_as_they_are_and_trailers_are_none_of_them() -> None:
    fields = (
        b"Set-Cookie: a=1\r\nset-cookie: b=2\r\nX-Raw: \xff\xfe\r\nX-Empty:\r\nX-Space:  two  words \t\r\n"
    )
    channel = await _Wire().ask(CHUNKED.replace(b"Transfer", fields + b"Transfer", 1))
    assert channel.headers == [
        (b"Set-Cookie", b"a=1"),
        (b"set-cookie", b"b=2"),
        (b"X-Raw", b"\xff\xfe"),
        (b"X-Empty", b""),
        (b"X-Space", b"two  words"),
        (b"Transfer-Encoding", b"chunked"),
    ]


@given(
    answer=st.sampled_from([OK, CHUNKED, b"HTTP/1.1 100 Continue\r\n\r\n" + OK]),
    cuts=st.lists(st.integers(1, 120), max_size=12),
)
def test_an_answer_is_the_same_in_whatever_pieces_it_comes(answer: bytes, cuts: list[int]) -> None:
    async def run() -> tuple[int, list[tuple[bytes, bytes]], bytes, bool]:
        places = sorted({0, *(cut for cut in cuts if cut < len(answer)), len(answer)})
        pieces = [answer[start:stop] for start, stop in pairwise(places)]
        channel = await _Wire().ask(*pieces)
        return channel.status, channel.headers, await _body(channel), channel.free

    async def whole() -> tuple[int, list[tuple[bytes, bytes]], bytes, bool]:
        channel = await _Wire().ask(answer)
        return channel.status, channel.headers, await _body(channel), channel.free

    assert asyncio.run(run()) == asyncio.run(whole())


@pytest.mark.parametrize("size", [2, 200_000])
async def test_requests_follow_each_other_on_one_connection(size: int) -> None:
    wire = _Wire()
    for _ in range(2):
        channel = await wire.ask(OK, body=b"a" * size)
        assert await _body(channel) == b"ok"
        channel.rest()
        assert channel.free
    assert wire.sent == (HEAD + b"a" * size) * 2


async def test_who_rests_and_hears_something_closes() -> None:
    wire = _Wire()
    channel = await wire.ask(OK)
    channel.rest()
    channel.data_received(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
    assert (wire.ended, channel.closed, channel.free) == (True, True, False)
    with pytest.raises(Broken):
        await channel.ask(HEAD, b"{}", 5)


async def test_what_comes_after_the_answer_ends_the_connections_use() -> None:
    wire = _Wire()
    channel = await wire.ask(OK)
    channel.data_received(b"more")
    assert (await _body(channel), channel.free) == (b"ok", False)


async def test_an_answer_before_all_was_sent_ends_the_connections_use() -> None:
    wire = _Wire()
    wire.unsent = 1000
    channel = await wire.ask(OK.replace(b"200 OK", b"413 Large"))
    assert (channel.status, await _body(channel), channel.free) == (413, b"ok", False)


async def test_the_upstream_waits_for_a_slow_reader() -> None:
    wire = _Wire()
    size = 1_000_000
    channel = await wire.ask(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"a" * (size // 2))
    assert not wire.reading
    assert len(await channel.piece()) == size // 2
    assert wire.reading
    channel.data_received(b"a" * (size // 2))
    assert (len(await channel.piece()), channel.complete) == (size // 2, True)
    assert (wire.reading, channel.free) == (True, True)


async def test_silence_is_told_from_a_slow_client_and_a_slow_upload() -> None:
    wire = _Wire()
    channel = wire.channel
    wire.unsent = 3
    asking = asyncio.get_running_loop().create_task(channel.ask(HEAD, b"{}", 0.01))
    await asyncio.sleep(0)
    for wire.unsent in (2, 1, 0):  # each time some more of the request has gone out
        channel._heard -= 1
        channel._check()
        assert not wire.ended
    channel.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 900000\r\n\r\n" + b"a" * 600_000)
    await asking
    channel._heard -= 1
    channel._check()  # the client takes its time
    assert not wire.ended
    assert await channel.piece()
    channel._heard -= 1
    channel._check()
    assert wire.ended
    with pytest.raises(TimeoutError):
        await channel.piece()


async def test_silence_before_an_answer_is_a_time_out() -> None:
    wire = _Wire()
    with pytest.raises(TimeoutError):
        await wire.channel.ask(HEAD, b"{}", 0.01)
    assert wire.ended
