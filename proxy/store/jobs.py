"""Units that wait for an SQLite database: run one by one, and their callers told, each in its event loop."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeAlias

from msgspec import Struct

from proxy.store.database import Unit
from proxy.store.failures import unavailable
from proxy.store.statements import SqliteConnection

_LOG: Final = logging.getLogger("palimpsest.store")


class Job(Struct, frozen=True, kw_only=True):
    """A unit that waits."""

    unit: Unit[Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    short: bool = False
    """Whether it may run on an event loop."""
    lasting: bool = True
    """Whether its caller may hear of it only once the power may fail."""


class Failed(Struct, frozen=True, kw_only=True):
    """What a unit raised."""

    error: Exception


Outcome: TypeAlias = tuple[Job, Any]
"""A job and what its unit returned, or `Failed`."""


def run(raw: sqlite3.Connection, job: Job, *, alone: bool) -> Any:
    """Run one unit so that its failure takes back its own work and nothing else."""
    connection = SqliteConnection(raw)
    if alone:  # the transaction itself can be taken back
        return job.unit(connection)
    raw.execute("SAVEPOINT unit")
    try:
        result = job.unit(connection)
    except Exception as why:
        if not raw.in_transaction:
            raise  # SQLite has taken back everything (the disk is full or fails)
        raw.execute("ROLLBACK TO unit")
        raw.execute("RELEASE unit")
        return Failed(error=raised(why))
    raw.execute("RELEASE unit")
    return result


def raised(why: Exception) -> Exception:
    """Return what the caller hears of it."""
    failure = unavailable(why)
    if failure is None:
        return why
    failure.__cause__ = why
    return failure


def tell(outcomes: list[Outcome], here: asyncio.AbstractEventLoop | None = None) -> None:
    """Let the callers go on, each in its own event loop; `here` is the one that this runs on."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Outcome]] = {}
    for outcome in outcomes:
        by_loop.setdefault(outcome[0].loop, []).append(outcome)
    for loop, theirs in by_loop.items():
        if loop is here:
            _resolve(theirs)
        else:
            soon(loop, partial(_resolve, theirs))


def soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> bool:
    """Have a loop call this; return whether it is there: else nobody waits in it any more."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        if not loop.is_closed():
            raise
        return False
    return True


def _resolve(outcomes: list[Outcome]) -> None:
    for job, result in outcomes:
        if job.future.done():  # the caller was cancelled; its write is done all the same
            if isinstance(result, Failed):
                _LOG.error("work that nobody waits for any more failed: %s", result.error)
            continue
        if isinstance(result, Failed):
            job.future.set_exception(result.error)
        else:
            job.future.set_result(result)
