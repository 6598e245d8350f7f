"""Request bodies with a `Content-Encoding`: gzip, deflate, or zstd."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator
from io import BytesIO
from typing import Final

import zstandard

from proxy.errors import InvalidRequest
from proxy.upstream import READABLE, Inflater

_FED_BYTES: Final = 32_768
"""Encoded bytes that are decoded in one step. They may decode to nothing, and take long all the same."""
_PIECE_BYTES: Final = 1_048_576  # most decoded bytes of one piece
_WINDOW_BYTES: Final = 8_388_608  # the largest window of zstd over HTTP (RFC 9659)


async def decoded(body: bytes, encoding: bytes) -> AsyncIterator[bytes]:
    """Yield the decoded body in pieces. Other requests get their turn between two of them.

    Raises `InvalidRequest` for another encoding, and for a body that is not what its encoding says.
    """
    if encoding not in _DECODERS:
        raise InvalidRequest(
            "Send the request body as gzip, deflate or zstd, or without Content-Encoding.", param="Content-Encoding"
        )
    try:
        parts: list[bytes] = []
        size = 0
        for part in _DECODERS[encoding](body, encoding):
            parts.append(part)
            size += len(part)
            if not part or size >= _PIECE_BYTES:
                if size:
                    yield b"".join(parts)
                parts, size = [], 0
                await asyncio.sleep(0)
        if size:
            yield b"".join(parts)
    except (zlib.error, zstandard.ZstdError) as why:
        raise InvalidRequest(f"The request body is not {encoding.decode()}: {why}", param="Content-Encoding") from why


def _inflated(body: bytes, encoding: bytes) -> Iterator[bytes]:
    """Yield the decoded parts, and an empty one after each step."""
    inflater = Inflater(encoding)
    for start in range(0, len(body), _FED_BYTES):
        inflater.feed(body[start : start + _FED_BYTES])
        while part := inflater.take():
            yield part
        yield b""
    if not inflater.complete:
        raise zlib.error("it has no end")


def _from_zstd(body: bytes, _: bytes) -> Iterator[bytes]:
    """Yield the decoded parts, and an empty one after each step."""
    source = _Steps(body)
    decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
    with decompressor.stream_reader(source, read_size=_FED_BYTES, read_across_frames=True) as reader:
        while True:
            try:
                part = reader.read1(_PIECE_BYTES)
            except BlockingIOError:
                yield b""
                continue
            if not part:
                break
            yield part


class _Steps(BytesIO):
    """A body that is read in steps. Between two of them `read` raises `BlockingIOError`."""

    _pauses = False

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next step."""
        self._pauses = not self._pauses
        if not self._pauses:
            raise BlockingIOError
        return super().read(size)


_DECODERS: Final = {b"zstd": _from_zstd, **dict.fromkeys(READABLE, _inflated)}
