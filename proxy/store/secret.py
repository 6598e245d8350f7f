"""Secrets that all workers share: made once, at the first use, by whoever comes first."""

from __future__ import annotations

import secrets
from typing import Final

from sqlalchemy import select

from proxy.store.database import Connection
from proxy.store.schema import SECRETS, insert_new

_BYTES: Final = 32


def secret_of(connection: Connection, name: str) -> bytes | None:
    """Return the secret with this name, 32 bytes."""
    found: str | None = connection.execute(
        select(SECRETS.c.value).where(SECRETS.c.name == name)
    ).scalar_one_or_none()
    return None if found is None else bytes.fromhex(found)


def make_secret(connection: Connection, name: str) -> bytes:
    """Return the secret with this name, a new one where there is none."""
    fresh = secrets.token_bytes(_BYTES)
    insert_new(connection, SECRETS, [{"name": name, "value": fresh.hex()}])
    return secret_of(connection, name) or fresh
