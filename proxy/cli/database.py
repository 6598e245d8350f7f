"""`upgrade` and `downgrade`: the tables of the store."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from proxy.cli.options import Config
from proxy.config import load
from proxy.store import migrate


def upgrade(
    config: Config = None,
    revision: Annotated[str, typer.Argument(help="The revision to go to.")] = "head",
) -> None:
    """Bring the store's tables to this version (`serve` does it too, unless `store.migrate` is false)."""
    url = load(config).store.url
    asyncio.run(migrate.upgrade(url, revision))
    typer.echo("The store's tables are brought up to date.")


def downgrade(
    revision: Annotated[str, typer.Argument(help="The revision to go back to, such as -1 or base.")],
    config: Config = None,
) -> None:
    """Take the store's tables back to an older version. What only newer tables hold is lost."""
    url = load(config).store.url
    asyncio.run(migrate.downgrade(url, revision))
    typer.echo("The store's tables are taken back.")
