"""SQLAlchemy's statements, compiled once and run by the driver itself.

SQLAlchemy's own way from a statement to its rows takes several times as long as the database does.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, TypeAlias

from sqlalchemy import Executable, UpdateBase
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import MultipleResultsFound
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.elements import BindParameter, TextClause
from sqlalchemy.sql.selectable import ReturnsRows, SelectBase

from proxy.store.packing import decoder_of, encoder_of

Values: TypeAlias = Mapping[str, Any]
MakeRow: TypeAlias = Callable[[Sequence[Any]], Any]

_named_tuple: Final[Any] = namedtuple  # noqa: PYI024 - for rows, whose names are known only at run time


class FetchedRows:
    """What a statement returned, all of it fetched. Rows get their names when they are looked at."""

    __slots__ = ("_make", "_rows")

    def __init__(self, rows: Sequence[Sequence[Any]], make: MakeRow) -> None:
        """Hold `rows` as the driver gave them; `make` makes of one what is given out."""
        self._rows = rows
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return map(self._make, self._rows)

    def all(self) -> list[Any]:
        """Return every row."""
        return list(map(self._make, self._rows))

    def one_or_none(self) -> Any:
        """Return the one row, None where there is none."""
        if len(self._rows) > 1:
            raise MultipleResultsFound("Multiple rows were found when one or none was required")
        return self._make(self._rows[0]) if self._rows else None

    def scalars(self) -> list[Any]:
        """Return the first value of every row."""
        return [row[0] for row in map(self._make, self._rows)]

    def scalar_one_or_none(self) -> Any:
        """Return the first value of the one row, None where there is none."""
        row = self.one_or_none()
        return None if row is None else row[0]


NO_ROWS: Final = FetchedRows((), tuple)
"""What a statement returned that returns nothing."""


class CompiledStatement:
    """A statement as a driver takes it."""

    def __init__(self, statement: Executable, columns: tuple[str, ...], dialect: Dialect) -> None:
        """Compile it; `columns` are those that an INSERT or UPDATE sets, empty for all."""
        if not isinstance(statement, SelectBase | UpdateBase | TextClause):
            raise TypeError(f"{type(statement).__name__} is no statement that reads or writes rows")
        self.compiler: SQLCompiler = statement.compile(dialect=dialect, column_keys=list(columns) or None)
        self.binds: Mapping[str, BindParameter[Any]] = self.compiler.binds
        self.text = self.compiler.string
        self.order = tuple(self.compiler.positiontup or ())
        """Names of the parameters in the order of their places in `text`."""
        self.lists = frozenset(name for name, bind in self.binds.items() if bind.expanding)
        """Those of the parameters that are lists; `text` has SQLAlchemy's mark in their place."""
        self.fixed = {name: bind.effective_value for name, bind in self.binds.items() if not bind.required}
        """Values that the statement itself holds."""
        self.exported = list(statement.exported_columns) if isinstance(statement, ReturnsRows) else []
        """The columns that it returns, as far as it says so."""
        self.make: MakeRow | None = None
        """Makes a row; None before the first execution, which tells the names of the columns."""
        self.converters: list[tuple[int, Callable[[Any], Any]]] = [
            (place, decode)
            for place, column in enumerate(self.exported)
            if (decode := decoder_of(column.type)) is not None
        ]
        """Places of columns whose values the driver gives in another type, and what makes the right one of those that
        are not NULL."""

    def maker(self, names: Sequence[str]) -> MakeRow:
        """Return what makes a row with these names of columns, and keep it."""
        if self.exported and len(self.exported) != len(names):
            raise TypeError(f"the statement has {len(self.exported)} columns, and {len(names)} were returned")
        named: MakeRow = _named_tuple("Row", names, rename=True)._make
        converters = self.converters

        def converting(row: Sequence[Any]) -> Any:
            values = list(row)
            for place, convert in converters:
                if values[place] is not None:
                    values[place] = convert(values[place])
            return named(values)

        self.make = converting if converters else named
        return self.make

    def picker(self, order: Sequence[str]) -> Callable[[Values], Sequence[Any]]:
        """Return what takes values out, in the order of their places, as the driver gets them."""
        pick, encoders = _picker(order), self.encoders(order)
        if not encoders:
            return pick

        def encoding(asked: Values) -> list[Any]:
            values = list(pick(asked))
            for place, encode in encoders:
                value = values[place]
                if value is not None:
                    values[place] = list(map(encode, value)) if order[place] in self.lists else encode(value)
            return values

        return encoding

    def rows_picker(self, order: Sequence[str]) -> Callable[[Sequence[Values]], list[tuple[Any, ...]]]:
        """Return what does so for several executions, without lists: a column at a time takes half as long."""
        pick, encoders, fixed = _picker(order), self.encoders(order), self.fixed

        def encoding(several: Sequence[Values]) -> list[tuple[Any, ...]]:
            if not order:
                return [()] * len(several)
            columns: list[Sequence[Any]] = list(
                zip(*[pick({**fixed, **asked} if fixed else asked) for asked in several], strict=True)
            )
            for place, encode in encoders:
                columns[place] = [None if value is None else encode(value) for value in columns[place]]
            return list(zip(*columns, strict=True))

        return encoding

    def encoders(self, order: Sequence[str]) -> list[tuple[int, Callable[[str], bytes]]]:
        """Return the places of the values that are encoded, and by what."""
        kinds = [(place, encoder_of(self.binds[name].type)) for place, name in enumerate(order)]
        return [(place, encode) for place, encode in kinds if encode is not None]


def _picker(order: Sequence[str]) -> Callable[[Values], tuple[Any, ...]]:
    if len(order) > 1:
        return itemgetter(*order)
    return (lambda asked: (asked[order[0]],)) if order else (lambda _: ())
