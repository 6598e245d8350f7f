"""Bodies with a `Content-Encoding`, in steps: others get their turn, whatever a body decodes to."""

from __future__ import annotations

import asyncio
import gzip
from typing import Final

import anyio
import pytest
import zstandard

from proxy.server.encoding import decoded

pytestmark = pytest.mark.anyio

_SKIPPED: Final = b"\x50\x2a\x4d\x18" + bytes(4)  # a frame of zstd that holds nothing


@pytest.mark.parametrize("held", [b"", b"ab"])
@pytest.mark.parametrize("encoding", [b"gzip", b"zstd"])
async def test_others_get_their_turn_and_pieces_are_not_tiny(encoding: bytes, held: bytes) -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    part = gzip.compress(held) if encoding == b"gzip" else zstandard.compress(held) + _SKIPPED
    body = part * (400_000 // len(part))
    async with anyio.create_task_group() as group:
        group.start_soon(other)
        pieces = [piece async for piece in decoded(body, encoding)]
        group.cancel_scope.cancel()
    assert b"".join(pieces) == held * (len(body) // len(part))
    assert 10 <= turns <= 20
    assert len(pieces) <= turns + 1


@pytest.mark.parametrize("encoding", [b"gzip", b"zstd"])
async def test_a_body_of_many_pieces_is_whole(encoding: bytes) -> None:
    body = b"".join(b"%d " % number for number in range(500_000))
    encoded = gzip.compress(body, 1) if encoding == b"gzip" else zstandard.compress(body)
    assert b"".join([piece async for piece in decoded(encoded, encoding)]) == body
