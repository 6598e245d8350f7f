"""What the store needs of a database: units of work, read or written, each all or nothing.

A unit is a plain function over a synchronous connection (see `connection`), so that one code serves every
database. It may be run again from its beginning, so it must do nothing but read and write there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ClassVar, Protocol, TypeAlias, TypeVar

from proxy.store.connection import Connection

Result = TypeVar("Result")

Unit: TypeAlias = Callable[[Connection], Result]
"""Work on a connection; it never commits."""


class Database(Protocol):
    """One database, open."""

    blocks: ClassVar[bool]
    """Whether a `short` unit holds up the event loop that asks for it, and so must be short indeed."""
    in_order: ClassVar[bool]
    """Whether writes are run, and are durable, in the order in which they were asked for."""

    async def read(self, unit: Unit[Result], *, short: bool = False) -> Result:
        """Run a unit that only reads. A `short` one takes a millisecond, and need not go to a thread.

        It sees all that the event loop had heard of when it came to it: short ones of one turn may see one
        state, that of the first of them.

        Raises:
            StoreUnavailable: the database cannot be used.
        """
        ...

    async def write(
        self, unit: Unit[Result], *, short: bool = False, lasting: bool = True, again: bool = True
    ) -> Result:
        """Run a unit in a transaction, and return what it returned once that is durable.

        A `short` one takes a millisecond, and need not go to a thread. One that need not be `lasting` may
        be lost with the power, not with the process, until a later lasting one is durable. One that may not
        be run `again` is not, where a connection was lost that may have taken its COMMIT along.

        Once it is asked for it is done, even if the caller is cancelled. If it raises, nothing of it is kept.

        Raises:
            StoreUnavailable: the database cannot be used; nothing of it is kept.
        """
        ...

    def start(
        self, unit: Unit[Result], *, short: bool = False, lasting: bool = True, again: bool = True
    ) -> asyncio.Future[Result]:
        """Do what `write` does, without a task of the caller's: it is done when the future is.

        Raises:
            StoreUnavailable: the database is closed.
        """
        ...

    async def close(self) -> None:
        """Finish what was asked for, and let go of the database."""
        ...
