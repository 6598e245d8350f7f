"""What a unit of work sees of a database: a connection that executes statements, and the rows they give.

Statements are SQLAlchemy's (Core), one text for every database. SQLAlchemy's own connection is such a
connection (PostgreSQL); `statements` has another for SQLite, where a statement of work takes less time
than SQLAlchemy's way to it. It knows no table and no database.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from sqlalchemy import Executable

Row: TypeAlias = Any
"""A named tuple: its values by place, by name of the column, and all of them by `_asdict()`."""

Parameters: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Values by name for one execution, or such values for each of several."""


class Rows(Protocol):
    """What a statement returned; to be taken once, by one of these ways."""

    def __iter__(self) -> Iterator[Row]: ...

    def all(self) -> Sequence[Row]:
        """Return every row."""
        ...

    def one_or_none(self) -> Row | None:
        """Return the one row, None where there is none.

        Raises:
            MultipleResultsFound: there are several.
        """
        ...

    def scalars(self) -> Iterable[Any]:
        """Return the first value of every row."""
        ...

    def scalar_one_or_none(self) -> Any:
        """Return the first value of the one row, None where there is none.

        Raises:
            MultipleResultsFound: there are several.
        """
        ...


class Dialect(Protocol):
    """Which SQL is spoken."""

    name: str
    """`sqlite` or `postgresql`."""


class Connection(Protocol):
    """A connection in a transaction, which belongs to whoever gave it."""

    @property
    def dialect(self) -> Dialect:
        """Which SQL is spoken."""
        ...

    def execute(self, statement: Executable, parameters: Parameters | None = None, /) -> Rows:
        """Execute a statement, once or once for each of several parameters.

        A statement that is run often is made once and kept: making one costs more than running it.
        """
        ...
