"""Sessions as JSON Lines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from proxy.errors import InvalidRequest
from proxy.pipeline import read_lines, session_id_of, write_lines

pytestmark = pytest.mark.anyio


async def test_what_was_written_is_read_again() -> None:
    records: list[dict[str, Any]] = [{"id": "会话", "text": "a\nb"}, {"n": 1}]

    async def given() -> AsyncIterator[dict[str, Any]]:
        for record in records:
            yield record

    lines = b"".join([line async for line in write_lines(given())])
    assert lines.count(b"\n") == 2
    assert read_lines(lines + b"\n \n") == records
    assert session_id_of(records) == "会话"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (b"", "nothing"),
        (b" \n", "nothing"),
        (b"{}\n\n{}", "Line 2"),
        (b"{}\n{}\n{", "Line 3"),
        (b"[1]", "Line 1"),
        (b"{}\nnull", "Line 2"),
    ],
)
async def test_what_is_wrong_is_said_with_its_line(lines: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        read_lines(lines)


@pytest.mark.parametrize("first", [{}, {"id": ""}, {"id": 3}])
async def test_records_must_say_whose_they_are(first: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="first line"):
        session_id_of([first])
