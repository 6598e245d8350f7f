"""`upgrade` and `downgrade`; and the store for commands that work on it, whether the proxy runs or not."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from proxy.cli.options import Config
from proxy.config import Settings, load
from proxy.errors import InvalidRequest, NotFound, StoreUnavailable
from proxy.store import SessionRow, SqliteFile, Store, address_of
from proxy.store import downgrade as migrate_back
from proxy.store import upgrade as migrate_forward


def upgrade(
    config: Config = None, revision: Annotated[str, typer.Argument(help="Revision to migrate to.")] = "head"
) -> None:
    """Migrate the store's tables to this version. `serve` does it too, unless `store.migrate` is false."""
    asyncio.run(migrate_forward(load(config).store.url, revision))
    typer.echo("The store is up to date.")


def downgrade(
    revision: Annotated[str, typer.Argument(help="Revision to migrate back to, such as -1 or base.")],
    config: Config = None,
) -> None:
    """Migrate the store's tables back. Data that only newer tables hold is lost."""
    asyncio.run(migrate_back(load(config).store.url, revision))
    typer.echo("The store is downgraded.")


def require_store(settings: Settings) -> None:
    """Raise `StoreUnavailable` if opening the store would create it."""
    address = address_of(settings.store.url)
    if isinstance(address, SqliteFile) and not address.path.exists():
        raise StoreUnavailable(
            f"The store cannot be used. There is no file {str(address.path.absolute())!r}: "
            "go to the folder of its configuration, or name the configuration with --config."
        )


async def find_session(store: Store, session: str, tenant: str | None) -> SessionRow:
    """Return the session of this id; the tenant must be named if several have it."""
    rows = [row for row in await store.find(session) if tenant is None or row.tenant == tenant]
    if not rows:
        raise NotFound(f"There is no session {session!r}. `palimpsest sessions list` shows all sessions.")
    if len(rows) > 1:
        raise InvalidRequest(
            f"Several tenants have a session {session!r}. Name one with --tenant: "
            + ", ".join(row.tenant for row in rows)
        )
    return rows[0]
