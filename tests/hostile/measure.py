"""What the attacks of docs/security.md cost: `python -m tests.hostile.measure [PART OF A NAME ...]`.

Each attack runs against a proxy with `server.max_memory: 512MB`, in every dialect if that makes a difference. Another
process requests `/healthz` all the time. The table shows the answers, the proxy's peak memory, and the longest time
that the other process waited.
"""

from __future__ import annotations

import asyncio
import gzip
import multiprocessing
import os
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, TypeAlias

import orjson
from msgspec import Struct

from tests.hostile.provider import EVENTS, JSON, LAST, Does, HostileProvider
from tests.hostile.seeds import DIALECTS, Seeds
from tests.support.raw_socket import seconds_of
from tests.support.served import Served, config_file, peak, resident

MEGABYTE: Final = 1_048_576
MAX_MEMORY: Final = 512 * MEGABYTE
PATIENCE: Final = 60.0
EXCHANGES: Final = 100_000
FORGETFUL: Final = {"trigger": {"every_request": True}, "target": {"tokens": 100}, "edits": [{"type": "drop_oldest"}]}
"""A policy with which the session grows but the view does not."""
TINY: Final = b'{"role":"user","content":"a"}'

# ------------------------------------------------------------------------------------------ upstream's part


def answers(*pieces: bytes, head: bytes = JSON) -> Does:
    """Return a function that writes these pieces and closes the connection."""

    async def does(writer: asyncio.StreamWriter, seeds: Seeds, stream: bool) -> None:
        writer.write(head + LAST)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        writer.close()

    return does


def _with_usage(seeds: Seeds, usage: bytes) -> bytes:
    body = orjson.dumps({**seeds.answer, "usage": {"marker": 0}})
    return body.replace(b'{"marker":0}', usage)


def _with_text(seeds: Seeds, text: bytes) -> bytes:
    """Return an answer with arbitrary JSON in place of its text."""
    written = orjson.dumps(seeds.answer)
    for own in ("fine 好", "fine"):
        written = written.replace(orjson.dumps(own), text)
    return written


def of_dialect(make: Callable[[Seeds], bytes], head: bytes = JSON) -> Does:
    async def does(writer: asyncio.StreamWriter, seeds: Seeds, stream: bool) -> None:
        writer.write(head + LAST + make(seeds))
        await writer.drain()
        writer.close()

    return does


def _deep(seeds: Seeds) -> bytes:
    return _with_text(seeds, b"[" * 800 + b"]" * 800)


def _digits(seeds: Seeds) -> bytes:
    number = b"9" * 4000
    names = (b"prompt_tokens", b"input_tokens", b"completion_tokens", b"output_tokens", b"total_tokens")
    return _with_usage(seeds, b"{" + b",".join(b'"%b":%b' % (name, number) for name in names) + b"}")


def _one_event(seeds: Seeds) -> bytes:
    name, data = seeds.events[1]
    return seeds.streamed([(name, orjson.dumps(data)[:-1] + b',"more":"' + b"a" * (20 * MEGABYTE) + b'"}')])


def _many_values(seeds: Seeds) -> bytes:
    name, data = seeds.events[1]
    return seeds.streamed([(name, orjson.dumps(data)[:-1] + b',"more":[' + b"[]," * 5_000_000 + b"1]}")])


def _packed(pack: Callable[[bytes], bytes], cut: int | None = None) -> Callable[[Seeds], bytes]:
    return lambda seeds: pack(orjson.dumps(seeds.answer))[:cut]


def _members(data: bytes) -> bytes:
    return gzip.compress(data[:40]) + gzip.compress(data[40:])


def _raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


@cache
def _gzip_bomb(begin: bytes) -> bytes:
    """Return `begin` and 200 MB of spaces, compressed. A function, so that importing this module stays fast."""
    return gzip.compress(begin + b" " * (200 * MEGABYTE), 1)


def _zstd_bomb() -> bytes:
    """Return a frame of 200 MB of spaces, as run-length blocks."""
    size = 131_072
    blocks = [(size << 3 | 1 << 1 | last).to_bytes(3, "little") + b" " for last in [0] * 1_599 + [1]]
    return b"\x28\xb5\x2f\xfd\x00\x58" + b"".join(blocks)


def endless_stream(megabytes: int) -> Does:
    """Return a function that streams texts of this total size, without an end."""

    async def does(writer: asyncio.StreamWriter, seeds: Seeds, stream: bool) -> None:
        writer.write(EVENTS + LAST)
        at = next(at for at, (_, data) in enumerate(seeds.events) if b'"fi"' in orjson.dumps(data))
        for name, data in seeds.events[:at]:
            writer.write(seeds.streamed([(name, orjson.dumps(data))]).removesuffix(seeds.closing))
        name, data = seeds.events[at]
        delta = orjson.dumps(data).replace(b'"fi"', b'"' + b"word " * 10_000 + b'"')
        piece = seeds.streamed([(name, delta)]).removesuffix(seeds.closing) * 2
        for _ in range(megabytes * 10):
            writer.write(piece)
            await writer.drain()
        writer.close()

    return does


async def _slow_stream(writer: asyncio.StreamWriter, seeds: Seeds, stream: bool) -> None:
    """Stream an answer for twenty seconds."""
    writer.write(EVENTS + LAST)
    *events, last = [
        seeds.streamed([(name, orjson.dumps(data))]).removesuffix(seeds.closing) for name, data in seeds.events
    ]
    for event in events:
        writer.write(event)
        await writer.drain()
        await asyncio.sleep(20 / len(events))
    writer.write(last + seeds.closing)
    await writer.drain()
    writer.close()


async def _silent_close(writer: asyncio.StreamWriter, seeds: Seeds, stream: bool) -> None:
    """Answer like a server that keeps the connection open, and close it a moment later."""
    body = orjson.dumps(seeds.answer)
    writer.write(JSON + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    await asyncio.sleep(0.002)
    writer.close()


DOES: Final[dict[str, Does]] = {
    "100 MB": answers(b'{"a":"', *[b"a" * MEGABYTE] * 100, b'"}'),
    "60 MB": answers(b'{"a":"', *[b"a" * MEGABYTE] * 60, b'"}'),
    "values": answers(b'{"choices":[' + b"[]," * 3_000_000 + b"1]}"),
    "event": of_dialect(_one_event, EVENTS),
    "values of an event": of_dialect(_many_values, EVENTS),
    "deep": of_dialect(_deep),
    "digits": of_dialect(_digits),
    "gzip": of_dialect(_packed(gzip.compress), JSON + b"Content-Encoding: gzip\r\n"),
    "members": of_dialect(_packed(_members), JSON + b"Content-Encoding: gzip\r\n"),
    "cut": of_dialect(_packed(gzip.compress, -9), JSON + b"Content-Encoding: gzip\r\n"),
    "raw deflate": of_dialect(_packed(_raw_deflate), JSON + b"Content-Encoding: deflate\r\n"),
    "bomb": of_dialect(lambda _: _gzip_bomb(b""), JSON + b"Content-Encoding: gzip\r\n"),
    "bomb in zstd": answers(_zstd_bomb(), head=JSON + b"Content-Encoding: zstd\r\n"),
    "bomb in br": answers(gzip.compress(b" " * MEGABYTE), head=JSON + b"Content-Encoding: br\r\n"),
    "bomb of events": of_dialect(lambda _: _gzip_bomb(b"data: "), EVENTS + b"Content-Encoding: gzip\r\n"),
    "600": answers(b"{}", head=b"HTTP/1.1 600 Odd\r\nContent-Type: application/json\r\n"),
    "999": answers(b"{}", head=b"HTTP/1.1 999 Odd\r\nContent-Type: application/json\r\n"),
    "control": of_dialect(lambda seeds: orjson.dumps(seeds.answer), JSON + b"X-A: a\x01b\r\n"),
    "endless stream": endless_stream(160),
    "slow": _slow_stream,
    "silent": _silent_close,
}

# ------------------------------------------------------------------------------------------- client's part


class Answer(Struct, frozen=True, kw_only=True):
    """The answer to a request; the status is 0 if nothing came."""

    status: int
    body: bytes = b""

    @property
    def code(self) -> str:
        """The status and, for an error, its code or type."""
        found = ""
        with suppress(orjson.JSONDecodeError, AttributeError):
            error = orjson.loads(self.body).get("error") or {}
            found = error.get("code") or error.get("type") or ""
        return f"{self.status} {found}".strip()


async def ask(port: int, *pieces: bytes, patience: float = PATIENCE) -> Answer:
    """Send bytes on a new connection; return what arrives until it is closed."""
    data = b""
    try:
        async with asyncio.timeout(patience):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
            try:
                with suppress(ConnectionError):
                    for piece in pieces:
                        writer.write(piece)
                        await writer.drain()
                data = await _read(reader)
            finally:
                writer.close()
    except TimeoutError:
        return Answer(status=-1, body=data)
    head, _, body = data.partition(b"\r\n\r\n")
    return Answer(status=int(head.split(b" ", 2)[1]) if head else 0, body=body)


async def _read(reader: asyncio.StreamReader) -> bytes:
    """Read until the connection is closed or breaks. Of long data, return only the beginning and the end."""
    data = b""
    try:
        while piece := await reader.read(1 << 20):
            data = (data + piece) if len(data) < 200_000 else data[:100_000] + (data + piece)[-100_000:]
    except ConnectionError:  # keep what arrived before it
        data += bytes(vars(reader)["_buffer"])
    return data


def post(path: str, body: bytes, *headers: bytes, kind: bytes = b"application/json") -> bytes:
    """Return a request."""
    lines = [b"POST %b HTTP/1.1" % path.encode(), b"Host: localhost", b"Connection: close", b"Content-Type: " + kind]
    return b"\r\n".join([*lines, *headers, b"Content-Length: %d" % len(body), b"", body])


class Target(Struct, frozen=True, kw_only=True):
    """The attacked proxy."""

    port: int
    process: int
    seeds: Seeds
    provider: HostileProvider

    def chat(self, model: str, *headers: bytes, stream: bool = False) -> bytes:
        """Return a small request."""
        more = {"model": model, "stream": True} if stream else {"model": model}
        return post(self.seeds.path, orjson.dumps(self.seeds.body(self.seeds.talks[-1], more)), *headers)


Attack: TypeAlias = Callable[[Target], Awaitable[str]]
ATTACKS: Final[dict[str, Attack]] = {}
ONCE: Final[set[str]] = set()
"""Attacks that do not depend on the dialect."""


def attack(name: str, *, once: bool = False) -> Callable[[Attack], Attack]:
    """Add an attack to the list."""

    def added(made: Attack) -> Attack:
        ATTACKS[name] = made
        if once:
            ONCE.add(name)
        return made

    return added


def told(answers: Iterable[Answer]) -> str:
    """Return the number of each answer as text."""
    found = Counter(answer.code for answer in answers)
    return ", ".join(
        code if number == 1 and len(found) == 1 else f"{code} x{number}" for code, number in found.most_common()
    )


async def flood(target: Target, begin: bytes, piece: bytes, most: int = 256 * MEGABYTE) -> str:
    """Send pieces without end, up to `most` bytes."""
    return told([await ask(target.port, begin, *[piece] * (most // len(piece)))])


BEGIN: Final = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"


@attack("endless headers", once=True)
async def _(target: Target) -> str:
    return await flood(target, BEGIN, b"X-A: b\r\n" * 8192)


@attack("endless request line", once=True)
async def _(target: Target) -> str:
    return await flood(target, b"GET /", b"a" * 65_536)


@attack("endless trailers")
async def _(target: Target) -> str:
    begin = (
        b"POST %b HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" % target.seeds.path.encode()
    )
    return await flood(target, begin, b"X-A: b\r\n" * 8192)


@attack("3,000 half requests", once=True)
async def _(target: Target) -> str:
    answers = await asyncio.gather(*[ask(target.port, BEGIN, patience=30) for _ in range(3000)])
    return told(answers)


@attack("20 connections of 4 MB of requests", once=True)
async def _(target: Target) -> str:
    begun = b"GET / HTTP/1.1\r\n\r\n" * 200_000
    return told(await asyncio.gather(*[ask(target.port, begun, patience=5) for _ in range(20)]))


@attack("48 MB of tiny messages")
async def _(target: Target) -> str:
    body = target.seeds.raw_body(b",".join([TINY] * (48 * MEGABYTE // 30)))
    return told([await ask(target.port, post(target.seeds.path, body))])


@attack("48 MB of tiny values")
async def _(target: Target) -> str:
    body = target.seeds.raw_body(TINY, b',"metadata":[' + b"0," * 24_000_000 + b"1]")
    return told([await ask(target.port, post(target.seeds.path, body))])


@attack("48 MB of levels")
async def _(target: Target) -> str:
    body = target.seeds.raw_body(TINY, b',"metadata":' + b"[" * (48 * MEGABYTE))
    return told([await ask(target.port, post(target.seeds.path, body))])


@attack("12 MB of messages of no content, 8 at once")
async def _(target: Target) -> str:
    body = target.seeds.raw_body(b",".join([b"{}"] * 99_000) + b',{"role":"user","content":"%b"}' % (b"a" * 12_000_000))
    return told(await asyncio.gather(*[ask(target.port, post(target.seeds.path, body)) for _ in range(8)]))


@attack("90,000 messages, 8 at once")
async def _(target: Target) -> str:
    body = target.seeds.raw_body(b",".join([TINY] * 90_000))
    return told(await asyncio.gather(*[ask(target.port, post(target.seeds.path, body)) for _ in range(8)]))


@attack("1.9 million values, 8 at once")
async def _(target: Target) -> str:
    body = target.seeds.raw_body(TINY, b',"metadata":{"a":[' + b"0," * 1_900_000 + b"1]}")
    return told(await asyncio.gather(*[ask(target.port, post(target.seeds.path, body)) for _ in range(8)]))


@attack("40 bodies of 40 MB at once")
async def _(target: Target) -> str:
    body = target.seeds.raw_body(b'{"role":"user","content":"%b"}' % (b"a" * 40_000_000))
    return told(await asyncio.gather(*[ask(target.port, post(target.seeds.path, body)) for _ in range(40)]))


@attack("40 bodies of 40 MB at once to other paths", once=True)
async def _(target: Target) -> str:
    body = b'{"model":"echo","messages":[{"role":"user","content":"%b"}]}' % (b"a" * 40_000_000)
    paths = ("/v1/messages/count_tokens", "/v1/responses/compact", "/v1/responses/input_tokens", "/v1/embeddings")
    asked = [ask(target.port, post(path, body)) for path in paths for _ in range(10)]
    return told(await asyncio.gather(*asked))


@attack("import of 48 MB of tiny lines", once=True)
async def _(target: Target) -> str:
    return told(
        [await ask(target.port, post("/sessions/import", b"{}\n" * (16 * MEGABYTE), kind=b"application/x-ndjson"))]
    )


@attack("import of 48 MB of values", once=True)
async def _(target: Target) -> str:
    body = b'{"record":"session","a":[' + b"[]," * (16 * MEGABYTE) + b"1]}"
    return told([await ask(target.port, post("/sessions/import", body, kind=b"application/x-ndjson"))])


@attack("import of 800 levels, of 4,000 digits", once=True)
async def _(target: Target) -> str:
    session = b'{"record":"session","format":1,"created_at":1,"updated_at":1,"head":"0"}\n'
    deep = b'{"record":"body","body":"0","tokens":1,"data":' + b"[" * 800 + b"]" * 800 + b"}"
    digits = b'{"record":"body","body":"0","tokens":' + b"9" * 4000 + b',"data":1}'
    asked = [
        ask(target.port, post("/sessions/import", session + line, kind=b"application/x-ndjson"))
        for line in (deep, digits)
    ]
    return told(await asyncio.gather(*asked))


@attack("10 imports of 40 MB at once", once=True)
async def _(target: Target) -> str:
    body = b'{"record":"body","body":"0","tokens":1,"data":"%b"}' % (b"a" * 40_000_000)
    asked = [ask(target.port, post("/sessions/import", body, kind=b"application/x-ndjson")) for _ in range(10)]
    return told(await asyncio.gather(*asked))


@attack("requests that are bombs in gzip, zstd, br")
async def _(target: Target) -> str:
    bombs = {b"gzip": gzip.compress(b" " * (100 * MEGABYTE), 1), b"zstd": _zstd_bomb(), b"br": b"a" * MEGABYTE}
    asked = [post(target.seeds.path, bomb, b"Content-Encoding: " + encoding) for encoding, bomb in bombs.items()]
    asked += [post("/sessions/import", bomb, b"Content-Encoding: " + encoding) for encoding, bomb in bombs.items()]
    return told([await ask(target.port, request) for request in asked])


def _answered(name: str, model: str, *, times: int = 1, stream: bool = False) -> None:
    """Add an attack by an answer of the upstream."""

    async def made(target: Target) -> str:
        asked = [ask(target.port, target.chat(model, stream=stream)) for _ in range(times)]
        found = await asyncio.gather(*asked)
        last = Counter(_end_of(answer) for answer in found) if stream else Counter[str]()
        return told(found) + "".join(f"; {end} x{number}" for end, number in last.items())

    attack(name)(made)


def _end_of(answer: Answer) -> str:
    """Return how a stream ended."""
    tail = answer.body[-2000:]
    return "error event" if b"upstream_too_large" in tail else "whole" if b"ine \xe5\xa5\xbd" in answer.body else "cut"


_answered("answer of 100 MB", "100 MB")
_answered("answer of 60 MB, 10 at once", "60 MB", times=10)
_answered("answer of 3 million values", "values")
_answered("answer of 800 levels", "deep")
_answered("answer with 4,000 digits of tokens", "digits")
_answered("answer in two gzip members", "members")
_answered("answer in truncated gzip", "cut")
_answered("answer in raw deflate", "raw deflate")
_answered("bomb in gzip, 10 at once", "bomb", times=10)
_answered("bomb in zstd, 10 at once", "bomb in zstd", times=10)
_answered("bomb in br, 10 at once", "bomb in br", times=10)
_answered("bomb of events, 10 at once", "bomb of events", times=10, stream=True)
_answered("answer with status 600", "600")
_answered("answer with status 999", "999")
_answered("answer with control bytes in a header", "control")
_answered("event of 20 MB", "event", stream=True)
_answered("event of 20 MB, 100 at once", "event", times=100, stream=True)
_answered("event of 5 million values, 4 at once", "values of an event", times=4, stream=True)
_answered("stream without an end, 3 at once", "endless stream", times=3, stream=True)
_answered("one endless stream", "endless stream", stream=True)


@attack("20 clients that do not read")
async def _(target: Target) -> str:
    return await _unread(target, target.chat("endless stream", stream=True))


@attack("20 clients that do not read answers of 60 MB")
async def _(target: Target) -> str:
    return await _unread(target, target.chat("60 MB"))


async def _unread(target: Target, request: bytes) -> str:
    before = resident(target.process)
    opened = [await asyncio.open_connection("127.0.0.1", target.port, limit=1024) for _ in range(20)]
    for _, writer in opened:
        writer.write(request)
    await asyncio.sleep(5)
    held = resident(target.process) - before
    for _, writer in opened:
        writer.transport.abort()
    await asyncio.sleep(10)
    left = resident(target.process) - before
    return f"{held / MEGABYTE:.0f} MB held, {left / MEGABYTE:.0f} MB left 10 s after they went"


READS: Final = {
    "context": "/sessions/{session}/context?policy=off",
    "view": "/exchanges/{exchange}/view?diff=true",
    "receipts": "/sessions/{session}/exchanges?limit=1000",
    "search": "/search?q=nobody",
    "page": "/ui/sessions/{session}",
    "lab": "/ui/policies/lab?session={session}&policy=off",
    "cache page": "/ui/cache",
}
"""Routes that read whole sessions."""


def _reads(name: str, path: str) -> None:
    """Add an attack in which twelve requests at once read a session of 95 MB."""

    async def made(target: Target) -> str:
        session, exchange = "read", await _long_session(target, "read")
        asked = get(path.format(session=session, exchange=exchange))
        return told(await asyncio.gather(*[ask(target.port, asked) for _ in range(12)]))

    attack(f"12 reads of 95 MB: {name}", once=True)(made)


async def _long_session(target: Target, session: str) -> str:
    """Store a session of 2,000 messages of 48 kB; return the id of its last exchange."""
    rows = (await ask(target.port, get(f"/sessions/{session}/exchanges?limit=1"))).body
    count = 0 if b'"id":"' in rows else 20
    headers = (b"X-Session-ID: " + session.encode(), b"X-Session-Mode: append", b"X-Context-Policy: forgetful")
    for part in range(count):
        messages = [
            {"role": role, "content": f"{part} {number} " + "word " * 9_600}
            for number in range(50)
            for role in ("user", "assistant")
        ]
        messages.append({"role": "user", "content": "and now?"})
        body = orjson.dumps({"model": "echo", "messages": messages})
        answer = await ask(target.port, post("/v1/chat/completions", body, *headers))
        assert answer.status == 200, answer.body
    rows = (await ask(target.port, get(f"/sessions/{session}/exchanges?limit=1"))).body
    return rows.partition(b'"id":"')[2].partition(b'"')[0].decode()


def get(path: str) -> bytes:
    """Return a request without a body."""
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()


for _name, _path in READS.items():
    _reads(_name, _path)


@attack("1,000 slow streams")
async def _(target: Target) -> str:
    await asyncio.gather(*[ask(target.port, target.chat("echo")) for _ in range(20)])
    before = resident(target.process)
    most = 0
    async with asyncio.TaskGroup() as group:
        slow = target.chat("slow", stream=True)
        asked = [group.create_task(ask(target.port, slow)) for _ in range(1000)]
        while not all(task.done() for task in asked):
            most = max(most, resident(target.process))
            await asyncio.sleep(0.5)
    return f"{told([task.result() for task in asked])}; {(most - before) / 1000 / 1000:.0f} kB each"


async def _talk(target: Target, number: int, counted: Counter[str]) -> None:
    """Send requests on one connection, in new sessions of twenty exchanges each, as JSON and as streams."""
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    while counted["asked"] < EXCHANGES:
        counted["sessions"] += 1
        session = b"X-Session-ID: load-%d" % counted["sessions"]
        history: list[dict[str, Any]] = []
        for turn in range(20):
            counted["asked"] += 1
            history += [{"role": "user", "content": f"{number} {counted['asked']} " + "word " * 20}]
            body = orjson.dumps(target.seeds.body(history, {"stream": turn % 2 == 1}))
            writer.write(post(target.seeds.path, body, session).replace(b"Connection: close\r\n", b""))
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
            if length:
                await reader.readexactly(int(length))
            else:
                await reader.readuntil(b"\r\n0\r\n\r\n")
            counted[head[9:12].decode()] += 1
            history += [{"role": "assistant", "content": "fine"}]
    writer.close()


@attack("100,000 exchanges", once=True)
async def _(target: Target) -> str:
    counted: Counter[str] = Counter()
    at: dict[int, int] = {}
    async with asyncio.TaskGroup() as group:
        talks = [group.create_task(_talk(target, number, counted)) for number in range(16)]
        while not all(task.done() for task in talks):
            await asyncio.sleep(0.2)
            at.setdefault(counted["asked"] // 10_000, resident(target.process))
    sizes = ", ".join(f"{thousands}0,000: {size // MEGABYTE}" for thousands, size in at.items() if thousands)
    return f"{counted['200']} answered; MB after {sizes}"


@attack("upstream that closes silently, 1,500 requests")
async def _(target: Target) -> str:
    lines: list[str] = []
    for name, header in (("without", ()), ("with", (b"Idempotency-Key: %s",))):
        asked, count = target.provider.asked, Counter[str]()

        async def client(number: int, header: tuple[bytes, ...] = header, count: Counter[str] = count) -> None:
            for turn in range(150):
                headers = [each % b"key-%d-%d" % (number, turn) if b"%" in each else each for each in header]
                count[(await ask(target.port, target.chat("silent", *headers))).code] += 1

        await asyncio.gather(*[client(number) for number in range(10)])
        asked = target.provider.asked - asked
        lines.append(
            f"{name} Idempotency-Key: " + ", ".join(f"{key} x{n}" for key, n in count.items()) + f", asked {asked}"
        )
    return "; ".join(lines)


# -------------------------------------------------------------------------------------------------- running


def _probe(port: int, pipe: Connection) -> None:
    """Request `/healthz` until told to stop; report the time of the slowest answer."""
    slowest, errors = 0.0, 0
    while not pipe.poll(0.02):
        begun = time.monotonic()
        try:
            seconds_of(port)
        except (AssertionError, OSError):
            errors += 1
        slowest = max(slowest, time.monotonic() - begun)
    pipe.send((slowest, errors))


class Result(Struct, frozen=True, kw_only=True):
    """The result of an attack."""

    said: str
    peak: float  # megabytes
    left: float  # megabytes a second afterwards
    slowest: float  # seconds, of the other process
    errors: int  # failed requests of the other process
    seconds: float


def measured(name: str, target: Target) -> Result:
    """Run an attack."""
    Path(f"/proc/{target.process}/clear_refs").write_text("5")  # reset the peak
    mine, theirs = multiprocessing.Pipe()
    probe = multiprocessing.get_context("spawn").Process(target=_probe, args=(target.port, theirs))
    probe.start()
    time.sleep(0.5)
    begun = time.monotonic()
    said = asyncio.run(_made(name, target))
    seconds = time.monotonic() - begun
    mine.send(None)
    slowest, errors = mine.recv()
    probe.join()
    time.sleep(1)
    most, left = (size(target.process) / MEGABYTE for size in (peak, resident))
    return Result(said=said, peak=most, left=left, slowest=slowest, errors=errors, seconds=seconds)


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def _made(name: str, target: Target) -> str:
    return await ATTACKS[name](target)


def main(*wanted: str) -> int:
    """Run the attacks whose names contain one of these texts, or all; return 1 if the proxy fails at one."""
    os.environ["NO_PROXY"] = "127.0.0.1"  # noqa: TID251 - of this program and its child
    failed = 0
    folder = Path(tempfile.mkdtemp(prefix="hostile"))
    with HostileProvider(DOES) as provider:
        sections = {"server": {"max_memory": MAX_MEMORY}, "telemetry": {"log_level": "warning"}}
        sections["policies"] = {"forgetful": {"match": {"models": ["nobody"]}, **FORGETFUL}}
        config = config_file(folder, provider, f"sqlite:///{folder / 'p.db'}", **sections)
        with Served(config) as served:
            served.wait()
            port = int(served.url.rpartition(":")[2])
            say("| attack | answered | peak, MB | left, MB | others waited, s | took, s |\n|---|---|---|---|---|---|")
            for name in ATTACKS:
                if wanted and not any(part in name for part in wanted):
                    continue
                for dialect, seeds in DIALECTS.items():
                    if name in ONCE and dialect != "chat":
                        continue
                    target = Target(port=port, process=served.process.pid, seeds=seeds, provider=provider)
                    found = measured(name, target)
                    traces = served.log.count("Traceback")
                    bad = found.peak > 700 or found.slowest > 1 or found.errors or traces
                    failed |= bool(bad)
                    title = name if name in ONCE else f"{name} ({dialect})"
                    line = f"| {title} | {found.said} | {found.peak:.0f} | {found.left:.0f} | {found.slowest:.2f} "
                    line += f"| {found.seconds:.1f} |"
                    say(line + (f" <- {found.errors} errors, {traces} tracebacks" if bad else ""))
            (folder / "copy.log").write_text(served.log)
            say(f"log: {folder / 'copy.log'}")
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
