"""The upstream: the destination and credential of a request, its answer, and the errors."""

from __future__ import annotations

import asyncio
import os
import re
import ssl
import zlib
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final

import aiohttp
import anyio.to_thread
from msgspec import Struct
from msgspec.structs import replace
from multidict import CIMultiDict
from pydantic import SecretStr
from yarl import URL

from proxy.config import UpstreamSettings
from proxy.dialects.jsontext import excess_of
from proxy.errors import UpstreamError, UpstreamTimeout, UpstreamUnreachable
from proxy.upstream.connections import RequestBody, open_session, origin_of

if TYPE_CHECKING:
    from zlib import _Decompress  # pyright: ignore[reportPrivateUsage] - the type has no public name

Headers = list[tuple[bytes, bytes]]

FIRST_STATUS: Final = 200  # 101 would switch the protocol unasked; aiohttp skips the other 1xx
LAST_STATUS: Final = 599
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")  # characters that a header must not hold
_NOT_ASCII: Final = re.compile("[\x80-\xff]")
_ERRNO: Final = re.compile(r"\[Errno (\d+)\]")
_GZIP: Final = frozenset({b"gzip", b"x-gzip"})
READABLE: Final = _GZIP | {b"deflate"}  # content encodings that can be decoded
_GZIP_BITS: Final = 31  # zlib's `wbits`
_ZLIB_BITS: Final = 15
_RAW_BITS: Final = -15
_ZLIB_HEADER: Final = 2  # the first bytes of a deflated body, which tell whether it has a zlib header
_PIECE_BYTES: Final = 1_048_576  # largest piece that is decompressed in one step
MAX_REPLY_BYTES: Final = 67_108_864  # longest answer that is read whole, in decoded bytes
_LEAST_STREAM: Final = 50_331_648  # bytes that each stream may always hold: 160,000 tokens of 300 bytes
_STREAM_PART: Final = 4  # one stream may take this part (a quarter) of the memory for answers
MAX_REPLY_VALUES: Final = 2_000_000  # most JSON values of an answer that is read whole
_LARGE_BYTES: Final = 1_048_576  # answers up to this size need no reservation of memory
HELD_BYTES: Final = 4_194_304  # memory is reserved in steps of this many bytes of an answer
_OPENING_BYTES: Final = 262_144  # most bytes of a body that `opening` reads ahead
_COPIES: Final = 2  # an answer is in memory twice: in pieces and joined
_VALUE_BYTES: Final = 64  # memory of a small JSON value
_MEMORY_SECONDS: Final = 30.0  # how long an answer waits for memory
_FAILURES: Final = (aiohttp.ClientError, OSError, UnicodeError)
"""What aiohttp raises when there is no answer. `UnicodeError`: the host name is invalid."""
_OF_PROXY: Final = (
    *(aiohttp.ClientProxyConnectionError, aiohttp.ClientHttpProxyError, aiohttp.ClientConnectorDNSError),
    UnicodeError,
)
"""What aiohttp raises when a forward proxy cannot be used. DNS errors too: the proxy resolves the server's name."""


class Destination(Struct, frozen=True, kw_only=True):
    """Where a request goes."""

    base_url: str  # replaces the client's `/v1`; without a slash at its end
    authorization: bytes | None  # the header to send instead of the client's; None: see `forwards_credentials`
    forwards_credentials: bool  # whether the client's own `Authorization` is forwarded
    forwards_query: bool = False  # whether the client's query string is forwarded; it may hold a key too
    setting: str = "upstream.base_url"  # the setting that names the address, for error messages
    api_key: bytes | None = None  # the `x-api-key` to send instead of the client's, if the API uses that header


class Inflater:
    """Decodes a body piece by piece: gzip with one or more members, deflate with or without a zlib header."""

    def __init__(self, encoding: bytes) -> None:
        """Begin a body in one of the `READABLE` encodings."""
        self._gzip = encoding in _GZIP
        self._input = b""
        self._stream: _Decompress | None = None
        self._members = 0

    @property
    def complete(self) -> bool:
        """Whether the body may end here and everything in it was taken."""
        return self._stream is None and not self._input

    def feed(self, data: bytes) -> None:
        """Take more of the encoded body."""
        self._input += data

    def take(self) -> bytes:
        """Return the next piece, at most `_PIECE_BYTES` long, or `b""` if more must be fed. Raises `zlib.error`.

        Bytes after a complete member that do not begin another member are ignored.
        """
        while self._input:
            stream = self._stream = self._stream or self._begin()
            if stream is None:
                return b""
            piece = stream.decompress(self._input, _PIECE_BYTES)
            self._input = stream.unconsumed_tail
            if stream.eof:
                self._input, self._stream = stream.unused_data, None
                self._members += 1
            if piece:
                return piece
        return b""

    def _begin(self) -> _Decompress | None:
        """Return a decompressor for the next member, or None if there is none or too little of it is here yet."""
        if self._members and not (self._gzip and self._input.startswith(b"\x1f")):  # padding
            self._input = b""
            return None
        if self._gzip:
            return zlib.decompressobj(_GZIP_BITS)
        if len(self._input) < _ZLIB_HEADER:
            return None
        header = self._input[:_ZLIB_HEADER]
        has_header = header[0] & 0x0F == zlib.DEFLATED and int.from_bytes(header) % 31 == 0
        return zlib.decompressobj(_ZLIB_BITS if has_header else _RAW_BITS)


class AnswerMemory:
    """The memory that large answers of one process share.

    An answer that is read whole waits for room, at most `_MEMORY_SECONDS`; then it proceeds, since it was paid for.
    Streams do not wait.
    """

    def __init__(self) -> None:
        """Begin with no answer."""
        self.most = 134_217_728
        self._held: dict[Answer, int] = {}  # the oldest first
        self._freed = asyncio.Event()
        self.on_freed: Callable[[], object] = lambda: None
        """Called when a large answer is done."""

    async def take(self, answer: Answer, size: int) -> None:
        """Reserve `size` more bytes for an answer. Waits for room, unless it is the oldest answer that holds memory."""
        held = self._held
        held.setdefault(answer, 0)
        with suppress(TimeoutError):
            async with asyncio.timeout(_MEMORY_SECONDS):
                while sum(held.values()) + size > self.most and next(iter(held)) is not answer:
                    self._freed.clear()
                    await self._freed.wait()
        held[answer] += size

    def take_for_stream(self, answer: Answer, size: int) -> bool:
        """Reserve `size` more bytes for a stream. Returns False if there is no room."""
        held = self._held.get(answer, 0) + size
        longest = max(_LEAST_STREAM, self.most // _STREAM_PART) * _COPIES
        if held > longest or sum(self._held.values()) + size > max(self.most, longest):
            return False
        self._held[answer] = held
        return True

    def give_back(self, answer: Answer) -> None:
        """Release what an answer reserved."""
        if self._held.pop(answer, None) is not None:
            self._freed.set()
            self.on_freed()


class Answer:
    """The upstream's answer: status, headers, and a body that is read once.

    The caller must close it; until then it may occupy a connection.
    """

    def __init__(
        self, response: aiohttp.ClientResponse, error_of: Callable[[Exception], UpstreamError], memory: AnswerMemory
    ) -> None:
        self.status = response.status
        self.headers: Headers = list(response.raw_headers)
        self._response = response
        self._content = response.content
        self._error_of = error_of
        self._memory = memory
        self._body: bytes | None = None
        self._inflater: Inflater | None = None
        self._ahead = b""  # what `opening` has read; returned again by `chunk`
        encoding = (self.header(b"content-encoding") or b"").lower()
        self.encoding: Final = b"" if encoding == b"identity" else encoding
        """The content encoding in lower case; empty if the body is not encoded."""
        self.media_type: Final = (self.header(b"content-type") or b"").partition(b";")[0].strip().lower()

    async def opening(self, told: Callable[[bytes], bytes | None], seconds: float) -> bytes | None:
        """Read ahead until `told`, called with the beginning of the body, returns something; return that.

        Returns None after so many seconds, after `_OPENING_BYTES`, or at the end of the body. What was read ahead is
        returned again by `chunk`.
        """
        text, found = b"", None
        try:
            async with asyncio.timeout(seconds):
                while found is None and len(text) < _OPENING_BYTES and (piece := await self.chunk(plain=True)):
                    text += piece
                    found = told(text)
        except (TimeoutError, UpstreamError):  # the next `chunk` raises it again
            pass
        finally:
            self._ahead = text
        return found

    def header(self, name: bytes) -> bytes | None:
        """Return the first header with this name, or None."""
        value = self._response.headers.get(name.decode())
        return None if value is None else value.encode("utf-8", "surrogateescape")

    @property
    def readable(self) -> bool:
        """Whether `chunk(plain=True)` can decode the content encoding."""
        return not self.encoding or self.encoding in READABLE

    @property
    def ended(self) -> bool:
        """Whether the whole body was certainly returned."""
        return not self._ahead and self._content.at_eof() and (self._inflater is None or self._inflater.complete)

    async def chunk(self, *, plain: bool = False) -> bytes:
        """Return the bytes of the body that arrived since the last call, at least one; `b""` at its end.

        `plain` undoes the content encoding, which must be `readable`. Raises `UpstreamTimeout` if nothing arrived for
        `read_timeout`, and `UpstreamUnreachable` if the connection broke; first, everything that arrived is returned.
        """
        if self._ahead:
            ahead, self._ahead = self._ahead, b""
            return ahead
        if plain and self.encoding:
            return await self._decoded()
        return await self._piece()

    async def _piece(self) -> bytes:
        """Return the bytes of the body that arrived, still encoded."""
        try:
            return await self._content.readany()
        except (*_FAILURES, RuntimeError) as why:  # RuntimeError: the session was closed
            piece = self._content._read_nowait(-1)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - public methods raise before the buffer is read
            if not piece:
                raise self._error_of(why) from why
            return piece

    async def _decoded(self) -> bytes:
        """Return the bytes of the body that arrived, decoded."""
        if self._inflater is None:
            self._inflater = Inflater(self.encoding)
        inflater = self._inflater
        try:
            while not (inflated := inflater.take()):
                piece = await self._piece()
                if not piece:
                    if inflater.complete:
                        return b""
                    raise UpstreamUnreachable("Connection lost: the upstream's encoded answer has no end. Try again.")
                inflater.feed(piece)
        except zlib.error as why:
            raise UpstreamUnreachable("The upstream's answer is not encoded as it says. Try again.") from why
        if len(inflated) == _PIECE_BYTES:  # more may be buffered: let other tasks run
            await asyncio.sleep(0)
        return inflated

    async def chunks(self, *, plain: bool = False) -> AsyncIterator[bytes]:
        """Yield the body's bytes as they arrive; see `chunk`."""
        while chunk := await self.chunk(plain=plain):
            yield chunk

    async def read(self) -> bytes:
        """Return the whole body, decoded if it is `readable`.

        Raises what `chunk` raises, and an `UpstreamError` if the body is too large.
        """
        if self._body is None:
            plain, parts, size, room = self.readable, list[bytes](), 0, _LARGE_BYTES
            while not self.ended and (part := await self.chunk(plain=plain)):
                parts.append(part)
                size += len(part)
                if size > MAX_REPLY_BYTES:
                    parts.clear()  # the error's traceback keeps this frame alive
                    raise too_large(f"is longer than {MAX_REPLY_BYTES} bytes")
                if size > room:
                    await self._memory.take(self, HELD_BYTES * _COPIES)
                    room += HELD_BYTES
            body = b"".join(parts)
            if size > _LARGE_BYTES:
                await anyio.to_thread.run_sync(check_values, body)
                await self._memory.take(self, body.count(b",") * _VALUE_BYTES)
            self._body = body
        return self._body

    def hold_stream(self) -> bool:
        """Reserve memory for `HELD_BYTES` more of this stream until it is closed. Returns False if there is none."""
        return self._memory.take_for_stream(self, HELD_BYTES * _COPIES)

    async def aclose(self) -> None:
        """Return the connection to the pool, or close it if the body was not read to its end."""
        self._memory.give_back(self)
        self._response.close()

    async def discard(self) -> None:
        """Close the answer and drop its body."""
        await self.aclose()
        self._body = None


def check_values(text: bytes) -> None:
    """Raise an `UpstreamError` if an answer or an event holds too many JSON values to be parsed."""
    if excess_of(text, MAX_REPLY_VALUES, len(text)) is not None:
        raise too_large(f"holds more than {MAX_REPLY_VALUES} JSON values")


def too_large(problem: str) -> UpstreamError:
    """Return the error for an answer that exceeds a limit. `problem` is the predicate: "is longer than …"."""
    return UpstreamError(f"The upstream's answer {problem}. It was not read further.", code="upstream_too_large")


class Upstream:
    """The configured provider. One per process, created inside the event loop."""

    def __init__(self, settings: UpstreamSettings, *, shares_key: bool) -> None:
        """Open no connection yet. `shares_key`: clients send the proxy's own keys, which must not go upstream."""
        self._settings = settings
        self.memory: Final = AnswerMemory()
        self.base: Final = Destination(
            base_url=settings.base_url,
            authorization=_bearer(settings.api_key),
            forwards_credentials=settings.api_key is None and not shares_key,
            forwards_query=True,
        )
        """The default destination: for what no route matches and no other base serves."""
        self.anthropic: Final = Destination(
            base_url=settings.anthropic_base_url,
            authorization=None,
            forwards_credentials=settings.anthropic_api_key is None and not shares_key,
            forwards_query=True,
            setting="upstream.anthropic_base_url",
            api_key=_plain(settings.anthropic_api_key),
        )
        """The destination of the Messages API, for models that no route matches."""
        self._bases = {"messages": self.anthropic}  # by dialect; all others go to `base`
        self._routes: list[tuple[tuple[str, ...], Destination, Destination]] = []
        """Patterns of models, their destination, and their destination for the Messages API, with `x-api-key`."""
        for route in settings.routes:
            destination = Destination(
                base_url=route.base_url,
                authorization=_bearer(route.api_key),
                forwards_credentials=False,
                setting="the base_url of its entry in upstream.routes",
            )
            keyed = replace(destination, api_key=_plain(route.api_key))
            self._routes.append((route.models, destination, keyed))
        self._session = open_session(
            connect_timeout=settings.connect_timeout,
            read_timeout=settings.read_timeout,
            limit=settings.max_connections,
            ca_file=settings.ca,
        )

    async def aclose(self) -> None:
        """Close every connection."""
        await self._session.close()

    @property
    def has_routes(self) -> bool:
        """Whether some models have a provider of their own."""
        return bool(self._routes)

    def destination(self, model: str, dialect: str = "chat") -> Destination:
        """Return the destination for `model`: the first route that matches, else the base of the dialect.

        The client's own key and its query string go to a base only, never to a route.
        """
        for patterns, destination, keyed in self._routes:
            if any(fnmatchcase(model, pattern) for pattern in patterns):
                return keyed if dialect in self._bases else destination
        return self._bases.get(dialect, self.base)

    async def ask(
        self,
        destination: Destination,
        method: str,
        path: str,
        headers: Sequence[tuple[bytes, bytes]],
        content: bytes | AsyncIterable[bytes],
    ) -> Answer:
        """Send a request and return the answer once its status and headers have arrived.

        `path` is appended to the base address: `/chat/completions`, quoted, with its query. `headers` are the client's
        without those that must not go upstream (`headers.to_upstream`). Raises an `UpstreamError` without an answer.
        """
        if destination.authorization is not None:
            headers = [*headers, (b"authorization", destination.authorization)]
        if destination.api_key is not None:
            headers = [*headers, (b"x-api-key", destination.api_key)]
        if not path.isascii():  # a URL must not hold such bytes
            path = _NOT_ASCII.sub(lambda match: f"%{ord(match[0]):02X}", path)
        body: RequestBody | AsyncIterable[bytes] | None = None
        if not isinstance(content, bytes):
            body = content
        elif content:
            body = RequestBody(content, self._settings.read_timeout)
        error_of = partial(_error_of, destination, self._settings)
        try:
            response = await self._session.request(
                method,
                URL(destination.base_url + path, encoded=True),
                headers=_as_text(headers),
                data=body,
                allow_redirects=False,
                proxy=origin_of(destination.base_url, self._settings.proxy).proxy,
            )
        except _FAILURES as why:
            raise error_of(why) from why
        odd = not FIRST_STATUS <= response.status <= LAST_STATUS
        if odd or _CONTROL.search(b"".join(chain.from_iterable(response.raw_headers))):
            response.close()
            raise UpstreamUnreachable(
                f"{origin_of(destination.base_url).name} did not answer with valid HTTP. Check {destination.setting}."
            )
        return Answer(response, error_of, self.memory)


def _as_text(headers: Sequence[tuple[bytes, bytes]]) -> CIMultiDict[str]:
    """Return the headers as text. aiohttp encodes it to the same bytes if they are valid UTF-8."""
    texts: CIMultiDict[str] = CIMultiDict()
    for name, value in headers:
        try:
            text = value.decode()
        except UnicodeDecodeError:
            text = value.decode("latin-1")
        texts.add(name.decode("latin-1"), text)
    return texts


def _error_of(destination: Destination, settings: UpstreamSettings, why: Exception) -> UpstreamError:
    """Return the proxy's error for one of aiohttp's. It names host and port, but no key, path or query."""
    setting = destination.setting
    try:
        origin = origin_of(destination.base_url, settings.proxy)
    except ValueError:
        return UpstreamUnreachable(f"The upstream's address is not a URL. Check {setting}.")
    name, way = origin.name, origin.name
    if origin.proxy is not None:
        way = f"{name} through the proxy {origin.proxy_name}"
        ways = "upstream.proxy" if settings.proxy is not None else "HTTP_PROXY, HTTPS_PROXY and NO_PROXY"
        if isinstance(why, _OF_PROXY):
            cause = f"HTTP {why.status}" if isinstance(why, aiohttp.ClientHttpProxyError) else _cause_of(why)
            return UpstreamUnreachable(f"Could not connect to {way} ({cause}). Check {ways}.")
        setting = f"{setting} and {ways}"
    if isinstance(why, aiohttp.ConnectionTimeoutError):
        return UpstreamTimeout(
            f"Could not connect to {way} within {settings.connect_timeout:g} s. "
            f"Check {setting}, or raise upstream.connect_timeout."
        )
    if isinstance(why, TimeoutError) and not isinstance(why, aiohttp.ClientOSError):
        return UpstreamTimeout(
            f"{name} was silent for {settings.read_timeout:g} s. Try again, or raise upstream.read_timeout."
        )
    if isinstance(why, aiohttp.ClientConnectorCertificateError):
        setting = f"{setting} and upstream.ca"
    if isinstance(why, (aiohttp.ClientConnectorError, UnicodeError)):
        return UpstreamUnreachable(f"Could not connect to {way} ({_cause_of(why)}). Check {setting}.")
    if isinstance(why, aiohttp.ClientResponseError):
        return UpstreamUnreachable(f"{name} did not answer with valid HTTP. Check {setting}.")
    # Some agents decide by the words of an error whether to retry. "connection lost" is one of the phrases they know.
    return UpstreamUnreachable(f"Connection lost: {name} broke it before the answer was complete. Try again.")


def _cause_of(why: aiohttp.ClientConnectorError | UnicodeError) -> str:
    """Return in plain words why the connection failed."""
    if isinstance(why, UnicodeError):
        return "the host name is invalid"
    if isinstance(why, aiohttp.ClientConnectorDNSError):
        return "the host name is not known"
    if isinstance(why, aiohttp.ClientConnectorCertificateError):
        refused = why.certificate_error
        told = refused.verify_message if isinstance(refused, ssl.SSLCertVerificationError) else refused
        return f"its certificate is refused: {told}"
    if isinstance(why, aiohttp.ClientSSLError):
        return "the TLS handshake failed"
    number = why.os_error.errno
    if number is None and (found := _ERRNO.search(str(why.os_error))) is not None:  # several addresses failed
        number = int(found[1])
    return os.strerror(number).lower() if number is not None else "no address answers"


def _plain(key: SecretStr | None) -> bytes | None:
    return None if key is None else key.get_secret_value().encode()


def _bearer(key: SecretStr | None) -> bytes | None:
    return None if key is None else f"Bearer {key.get_secret_value()}".encode()
