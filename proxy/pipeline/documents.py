"""Sessions and summaries as JSON documents, and as JSON Lines for export and import.

The HTTP API and the command line show the same documents.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from datetime import UTC, datetime
from typing import Any, Final, cast

import orjson

from proxy.dialects import JsonObject
from proxy.errors import InvalidRequest
from proxy.store import SessionRow, SummaryRow

DEFAULT_TENANT: Final = "default"
"""The tenant of every request where there is no authentication."""


def session_document(row: SessionRow, finishing: Collection[str] = ()) -> dict[str, Any]:
    """Return a session; `finishing` are the tools that finish a task."""
    return {
        "id": row.id,
        "tenant": row.tenant,
        "created_at": timestamp(row.created_at),
        "updated_at": timestamp(row.updated_at),
        "messages": row.messages,
        "rounds": row.rounds,
        "tokens": row.tokens,
        "requests": row.requests,
        "tokens_sent": row.tokens_sent,
        "tokens_saved": row.tokens_saved,
        "cost": row.cost,
        "head": row.head or None,
        "finished": any(name in finishing for name in row.calls),
    }


def summary_document(row: SummaryRow) -> dict[str, Any]:
    """Return a summary that a model has written."""
    return {
        "summary": row.text,
        "summarized_until": row.until,
        "summary_tokens": row.tokens,
        "created_at": timestamp(row.created_at),
        "message_count": row.covered_messages,
        "original_tokens": row.covered_tokens,
        "compression_rate": compression_rate(row.tokens, row.covered_tokens),
        "kind": "model",
        "model": row.model,
        "generation": row.generation,
        "id": row.id,
        "predecessor": row.predecessor,
        "usage": row.usage,
        "cost": row.cost,
    }


def compression_rate(left: int, original: int) -> float | None:
    """Return the fraction of the tokens that is left."""
    return round(left / original, 3) if original else None


def timestamp(milliseconds: int) -> str:
    """Return a stored time as ISO 8601 in UTC."""
    moment = datetime.fromtimestamp(milliseconds / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


async def write_lines(records: AsyncIterator[JsonObject]) -> AsyncIterator[bytes]:
    """Yield each record as a line."""
    async for record in records:
        yield orjson.dumps(record) + b"\n"


def read_lines(lines: bytes) -> list[JsonObject]:
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


def session_id_of(records: list[JsonObject]) -> str:
    """Return the id of the session that the records are of.

    Raises:
        InvalidRequest: the first record does not say it.
    """
    name = records[0].get("id")
    if not isinstance(name, str) or not name:
        raise InvalidRequest("The first line does not name a session. Send what export wrote, from its first line on.")
    return name
