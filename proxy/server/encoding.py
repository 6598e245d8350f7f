"""Request bodies with a `Content-Encoding`, as Codex sends them: gzip, deflate, or zstd."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Final

import zstandard

from proxy.errors import InvalidRequest
from proxy.upstream import READABLE, Inflater

_FED_BYTES: Final = 262_144  # encoded bytes that are decoded in one step
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
        for piece in _DECODERS[encoding](body, encoding):
            yield piece
            await asyncio.sleep(0)
    except (zlib.error, zstandard.ZstdError) as why:
        raise InvalidRequest(f"The request body is not {encoding.decode()}: {why}", param="Content-Encoding") from why


def _inflated(body: bytes, encoding: bytes) -> Iterator[bytes]:
    inflater = Inflater(encoding)
    for start in range(0, len(body), _FED_BYTES):
        inflater.feed(body[start : start + _FED_BYTES])
        while piece := inflater.take():
            yield piece
    if not inflater.complete:
        raise zlib.error("it has no end")


def _from_zstd(body: bytes, _: bytes) -> Iterator[bytes]:
    with zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).stream_reader(body, read_across_frames=True) as read:
        while piece := read.read(_PIECE_BYTES):
            yield piece


_DECODERS: Final = {b"zstd": _from_zstd, **dict.fromkeys(READABLE, _inflated)}
