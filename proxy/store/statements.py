"""Statements of SQLAlchemy Core on a connection of Python's own `sqlite3`.

SQLAlchemy's way from a statement to its rows takes five times as long as SQLite itself does. Here a statement
is compiled at its first use; after that, running it is one call of `sqlite3`, which keeps the prepared
statement by its text. What was compiled lives as long as its statement: one that is made for a single call
leaves nothing behind.

It knows no table, no file and no transaction.
"""

from __future__ import annotations

import re
import sqlite3
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final, TypeAlias, cast
from weakref import ref

from sqlalchemy import Boolean, Executable, Float, Insert, Update, UpdateBase
from sqlalchemy.dialects.sqlite.base import SQLiteDialect
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import MultipleResultsFound
from sqlalchemy.sql.elements import BindParameter, ColumnElement, TextClause
from sqlalchemy.sql.selectable import ReturnsRows, SelectBase

from proxy.store.connection import Parameters

Values: TypeAlias = Mapping[str, Any]
_Make: TypeAlias = Callable[[Sequence[Any]], Any]

_DIALECT: Final[Dialect] = SQLiteDialect(paramstyle="qmark")
_named_tuple: Final[Any] = namedtuple  # noqa: PYI024 - for rows, whose names are known only at run time
_LIST: Final = re.compile(r"\(__\[POSTCOMPILE_(\w+)\]\)")
"""Where SQLAlchemy leaves room for the values of an expanding IN."""


class Rows:
    """What a statement returned, all of it fetched. Rows get their names when they are looked at."""

    __slots__ = ("_make", "_rows")

    def __init__(self, rows: list[tuple[Any, ...]], make: _Make) -> None:
        """Hold `rows` as SQLite gave them; `make` makes of one what is given out."""
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


class SqliteConnection:
    """A connection of `sqlite3` that executes SQLAlchemy's statements. It neither begins nor commits."""

    __slots__ = ("_raw",)

    dialect = _DIALECT
    """Which SQL is spoken."""

    def __init__(self, raw: sqlite3.Connection) -> None:
        """Execute on `raw`."""
        self._raw = raw

    def execute(self, statement: Executable, parameters: Parameters | None = None, /) -> Rows:
        """Execute a statement, once or once for each of several parameters, which all have the same names."""
        # Nearly always it is a dictionary; to ask one whether it is a sequence takes longer than all this.
        if type(parameters) is not dict and isinstance(parameters, Sequence):
            if len(parameters) != 1:
                return self._execute_many(statement, parameters)
            parameters = parameters[0]
        asked = cast("Values", parameters or {})
        return self.run(compiled_for(statement, asked), asked)

    def run(self, compiled: Compiled, asked: Values) -> Rows:
        """Execute a statement that is compiled, once."""
        if compiled.is_plain:
            cursor = self._raw.execute(compiled.text, compiled.pick(asked))
        else:
            cursor = self._raw.execute(*compiled.bound(asked))
        if cursor.description is None:
            return NOTHING
        return Rows(cursor.fetchall(), compiled.make or compiled.maker(cursor.description))

    def _execute_many(self, statement: Executable, several: Sequence[Values]) -> Rows:
        if several:
            compiled = compiled_for(statement, several[0])
            if compiled.lists:
                raise TypeError("a statement with a list in it is executed for one list at a time")
            values = compiled.pick if compiled.is_plain else compiled.values
            self._raw.executemany(compiled.text, map(values, several))
        return NOTHING


@dataclass(slots=True)
class Compiled:
    """A statement as SQLite takes it."""

    text: str
    order: tuple[str, ...]
    """Names of the parameters in the order of their places in `text`."""
    fixed: dict[str, Any]
    """Values that the statement itself holds."""
    lists: frozenset[str]
    """Those of the parameters that are lists; `text` has SQLAlchemy's mark in their place."""
    converters: tuple[tuple[int, Callable[[Any], Any]], ...]
    """For columns whose values SQLite gives in another type: their places, and what makes the right one."""
    columns: int | None
    """How many columns it returns; None where only SQLite knows."""
    inserts: bool
    """Whether it inserts rows, and returns none."""
    changes: str
    """The table of which it changes rows, and returns none; empty where it does not."""
    make: _Make | None = None
    """Makes a row; None before the first execution, which tells the names of the columns."""
    texts: dict[tuple[int, ...], str] = field(default_factory=dict[tuple[int, ...], str])
    """Texts with room for so many values in each list."""
    pick: Callable[[Values], tuple[Any, ...]] = field(default=lambda _: (), init=False)
    """Takes the values out, in the order of their places."""
    is_plain: bool = field(default=True, init=False)
    """Whether text and values are all that there is: no list, and nothing that the statement itself holds."""

    def __post_init__(self) -> None:
        """Make what takes the values out, once for all executions."""
        self.is_plain = not self.lists and not self.fixed
        order = self.order
        if len(order) > 1:
            self.pick = itemgetter(*order)
        elif order:
            self.pick = lambda asked: (asked[order[0]],)

    def values(self, asked: Values) -> tuple[Any, ...]:
        """Return the values in the order of their places."""
        return self.pick({**self.fixed, **asked} if self.fixed else asked)

    def bound(self, asked: Values) -> tuple[str, tuple[Any, ...]]:
        """Return text and values."""
        values = self.values(asked)
        return self._expanded(values) if self.lists else (self.text, values)

    def _expanded(self, values: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
        """Give each list as many places as the next power of two, so that a few texts serve all lengths.

        The places that are left over repeat the last value, which changes nothing about what is in the list.
        """
        flat: list[Any] = []
        sizes: list[int] = []
        for name, value in zip(self.order, values, strict=True):
            if name in self.lists:
                size = 1 << (len(value) - 1).bit_length() if value else 0
                sizes.append(size)
                flat += value
                flat += value[-1:] * (size - len(value))
            else:
                flat.append(value)
        key = tuple(sizes)
        text = self.texts.get(key)
        if text is None:
            room = iter(sizes)
            text = self.texts[key] = _LIST.sub(lambda _: f"({', '.join('?' * next(room))})", self.text)
        return text, tuple(flat)

    def maker(self, description: Sequence[Sequence[Any]]) -> _Make:
        """Return what makes a row, and keep it."""
        names = [column[0] for column in description]
        if self.columns is not None and self.columns != len(names):
            raise TypeError(f"the statement has {self.columns} columns, and SQLite returns {len(names)}")
        named: _Make = _named_tuple("Row", names, rename=True)._make
        self.make = _converting(named, self.converters) if self.converters else named
        return self.make


class _Forms:
    """What a statement was compiled to."""

    __slots__ = ("by_names", "sets", "statement")

    def __init__(self, statement: Executable) -> None:
        name = id(statement)
        self.statement = ref(statement, lambda _: _CACHE.pop(name, None))
        self.sets = isinstance(statement, UpdateBase)
        """Whether it sets the columns that are named: for each set of names it has a text of its own."""
        self.by_names: dict[tuple[str, ...], Compiled] = {}


_CACHE: Final[dict[int, _Forms]] = {}
"""A memo of what the statements alone determine, by their `id`: a table of weak keys takes far longer."""


def compiled_for(statement: Executable, asked: Values) -> Compiled:
    """Return what a statement is for SQLite, compiled at its first use with parameters of these names."""
    forms = _CACHE.get(id(statement))
    if forms is None or forms.statement() is not statement:
        forms = _CACHE[id(statement)] = _Forms(statement)
    names = tuple(asked) if forms.sets else ()
    return forms.by_names.get(names) or forms.by_names.setdefault(names, _compile(statement, list(names)))


def _compile(statement: Executable, columns: list[str]) -> Compiled:
    if not isinstance(statement, SelectBase | UpdateBase | TextClause):
        raise TypeError(f"{type(statement).__name__} is no statement that reads or writes rows")
    compiler = statement.compile(dialect=_DIALECT, column_keys=columns or None)
    binds: Mapping[str, BindParameter[Any]] = compiler.binds
    lists = frozenset(name for name, bind in binds.items() if bind.expanding)
    for bind in binds.values():
        kind = bind.type.dialect_impl(_DIALECT)
        if kind.bind_processor(_DIALECT) is not None and not isinstance(kind, (Boolean, Float)):
            raise TypeError(f"SQLite takes no {bind.type!r} as it is")
    order = tuple(compiler.positiontup or ())
    fixed = {name: bind.effective_value for name, bind in binds.items() if not bind.required}
    exported: list[ColumnElement[Any]] = []
    if isinstance(statement, ReturnsRows):
        exported += statement.exported_columns
    converters = tuple(
        (place, convert)
        for place, column in enumerate(exported)
        if (convert := column.type.dialect_impl(_DIALECT).result_processor(_DIALECT, None)) is not None
    )
    return Compiled(
        text=compiler.string,
        order=order,
        fixed=fixed,
        lists=lists,
        converters=converters,
        columns=len(exported) or None,
        inserts=isinstance(statement, Insert) and not exported,
        changes=statement.table.description if isinstance(statement, Update) and not exported else "",
    )


def _converting(named: _Make, converters: tuple[tuple[int, Callable[[Any], Any]], ...]) -> _Make:
    def make(row: Sequence[Any]) -> Any:
        values = list(row)
        for place, convert in converters:
            values[place] = convert(values[place])
        return named(values)

    return make


NOTHING: Final = Rows([], tuple)
"""What a statement returns that returns no rows."""
