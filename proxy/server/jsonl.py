"""Sessions as JSON Lines: one record a line, as export writes and import reads them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import orjson

from proxy.dialects import JsonObject
from proxy.errors import InvalidRequest


async def written(records: AsyncIterator[JsonObject]) -> AsyncIterator[bytes]:
    """Yield each record as a line."""
    async for record in records:
        yield orjson.dumps(record) + b"\n"


def read(lines: bytes) -> list[JsonObject]:
    """Return the records of these lines.

    Raises:
        InvalidRequest: a line is no JSON object, or there is none; the message names its number.
    """
    if not lines.strip():
        raise InvalidRequest("There is nothing to import. Send what export wrote, JSON Lines.")
    records: list[JsonObject] = []
    for number, line in enumerate(lines.rstrip().split(b"\n"), start=1):
        try:
            record: Any = orjson.loads(line)
        except orjson.JSONDecodeError as why:
            raise InvalidRequest(f"Line {number} is not JSON: {why}. Send what export wrote.") from why
        if not isinstance(record, dict):
            raise InvalidRequest(f"Line {number} is no JSON object. Send what export wrote.")
        records.append(cast("JsonObject", record))
    return records


def session_named(records: list[JsonObject]) -> str:
    """Return the id of the session that the records are of.

    Raises:
        InvalidRequest: the first record does not say it.
    """
    name = records[0].get("id")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(
            "The first line does not name a session. Send what export wrote, from its first line on."
        )
    return name
