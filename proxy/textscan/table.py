"""Records that share their keys, as a table: the keys once, then a row of values for each.

    {"seats": [{"id": 1, "at": {"x": 2, "y": 3}, "ok": true}, {"id": 4, "at": {"x": 5, "y": 6}, "ok": true}]}

becomes

    {"seats{id,at{x,y},ok=true}": [[1, [2, 3]], [4, [5, 6]]]}

What follows a list's name in braces is what each of its rows holds. In it

    price           a cell of the row
    price=3         the same in every row, where it has no cell; a text stands bare
    at{x,y}         an object: its cells are a list, and there is none where all of it is the same
    items[]{x,y}    a list of records: of each a list of its cells
    note?           what some records lack: null, in a column where nothing else is null
    id=<key>        the key of the row, where rows have keys (`{"seats{id=<key>,x}": {"A1": [2]}}`)

A list without a name is an object with nothing before the braces (`{"{id,x}": [[1, 2], [4, 5]]}`), and
records that were a line each have `per line` behind them. An object at the end of a row holds what few records
have. Nothing is lost but the order of keys. A document that has such a name already is left alone. What pays is
judged by length.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from operator import itemgetter
from typing import Final, TypeAlias

from msgspec import Struct

from proxy.textscan.document import CONTAINERS, OBJECTS, JsonValue, Members, Number, is_items, is_members

KEY: Final = "<key>"  # stands for the key of a row
PER_LINE: Final = " per line"  # ends the heading of records that were a line each

_ENDS: Final = ("\\", '}"', f'{PER_LINE}"')  # a document with a heading has one of these in its text
_NAME: Final = re.compile(r"[^\s,{}\[\]=?<>\"\\](?:[^,{}\[\]=?<>\"\\\x00-\x1f\ud800-\udfff]*[^\s,{}\[\]=?<>\"\\])?")
"""A name that can stand in a heading."""
_BARE: Final = re.compile(r"(?:[^\s,{}\[\]<>\"\\](?:[^,{}<>\"\\\x00-\x1f\ud800-\udfff]{0,98}[^\s,{}<>\"\\])?)?")
"""A text that can stand there; a longer one stays with what it tells of."""
_LITERAL: Final = re.compile(r"null|true|false|NaN|-?(?:Infinity|(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)")
"""A text that would be taken for something else."""
_TABLE_COST: Final = 8
_NESTED_COST: Final = 6
_KEY_COST: Final = 3  # characters that a form needs beside its names and values; a key has quotes and a colon
_ABSENT_COST: Final = 5  # characters of a cell for what is not there


_Fields: TypeAlias = "dict[str, JsonValue]"  # the members of one record
_Held: TypeAlias = "dict[str, list[JsonValue]]"  # by name what each record has of it
_name_of: Final = itemgetter(0)
_value_of: Final = itemgetter(1)


class _Column(Struct, frozen=True, kw_only=True):
    """One key of records."""

    name: str
    values: list[JsonValue]  # what each record has of it; None where it is absent
    constant: str | None = None  # what all records have, as it is written in the heading; None where they differ
    inner: tuple[_Column, ...] = ()  # where every value is an object with the same keys, or a list of such: these
    is_list: bool = False
    is_optional: bool = False
    cells: tuple[_Column, ...] = ()  # of the inner ones those that a row holds anything of

    @property
    def has_cell(self) -> bool:
        """Whether a row holds anything of it."""
        return self.constant is None and (self.is_list or not self.inner or bool(self.cells))

    def heading(self) -> str:
        """Return how the column is announced."""
        if self.constant is not None:
            return f"{self.name}={self.constant}"
        if self.inner:
            return f"{self.name}{'[]' if self.is_list else ''}{_heading(self.inner)}"
        return f"{self.name}?" if self.is_optional else self.name


def tabulated(value: JsonValue, source: str | None = None) -> JsonValue | None:
    """Return the document with tables where they pay; None where none does. `source` is its text, if there is one."""
    if (source is None or any(end in source for end in _ENDS)) and _has_table(value):
        return None
    table = _tabulated(value)
    return table if _has_table(table) else None


def tabulated_lines(values: list[JsonValue]) -> Members | None:
    """Return documents that stood on a line each as one table; None where that does not pay."""
    table = None if _has_table(values) else _table(values)
    return None if table is None else ((f"{table[0]}{PER_LINE}", table[1]),)


def _tabulated(value: JsonValue) -> JsonValue:
    table = _table_of(value)
    return (tuple(table),) if isinstance(table, _Table) else table


class _Table(tuple[str, JsonValue]):
    """A heading, and the rows under it."""

    __slots__ = ()


def _table_of(value: JsonValue) -> JsonValue | _Table:
    if is_members(value):
        names = [name for name, _ in value]
        if len(value) > 1 and len(set(names)) == len(names):
            table = _table([member for _, member in value], names)
            if table is not None:
                return table
        return tuple([_member(name, held) if type(held) in CONTAINERS else (name, held) for name, held in value])
    if is_items(value):
        table = _table(value)
        if table is not None:
            return table
        return [_tabulated(item) if type(item) in CONTAINERS and item else item for item in value]
    return value


def _member(name: str, held: JsonValue) -> tuple[str, JsonValue]:
    """Return a member of an object, the heading of its table behind its name."""
    made = _table_of(held)
    if not isinstance(made, _Table):
        return name, made
    # Nothing before the braces says that there is no name; and where it ends must be plain.
    return (f"{name}{made[0]}", made[1]) if name and "{" not in name else (name, (tuple(made),))


def _table(records: Sequence[JsonValue], names: Sequence[str] = ()) -> _Table | None:
    """Return the table of records; None where they are none, or where it would not be shorter."""
    if len(records) < 2:
        return None
    held = _by_name(records)
    objects = _objects(records) if held is None else []
    if objects is None:
        return None
    first = held if held is not None else objects[0]
    everywhere = first if held is not None else set(first).intersection(*objects[1:])
    shared = [name for name in first if name in everywhere and _NAME.fullmatch(name)]
    # Asked first: what is inside of it is looked into once.
    if not _pays(len(records), shared, _TABLE_COST):
        return None
    if held is None:
        held = {name: [fields[name] for fields in objects] for name in shared}
    columns = [*(_column(name, held[name], names) for name in shared), *_optional(objects, shared)]
    rows = _rows(_with_cells(columns), len(records))
    if objects or len(columns) < len(first):
        known = frozenset(column.name for column in columns)
        for record, row in zip(records, rows, strict=True):
            rest = tuple([_member(name, value) for name, value in record if name not in known])
            if rest:
                row.append(rest)
    return _Table((_heading(columns), tuple(zip(names, rows, strict=True)) if names else rows))


def _by_name(records: Sequence[JsonValue]) -> _Held | None:
    """Return the values of records by name, where all have the names of the first one, each once; else None.

    Where they have them in the same order, as most have, nothing is done record by record.
    """
    first = records[0] if records else None
    if type(first) not in OBJECTS or not first or not OBJECTS.issuperset(map(type, records)):
        return None
    names, width = [name for name, _ in first], len(first)
    if len(set(names)) < width or set(map(len, records)) != {width}:
        return None
    members = list(chain.from_iterable(records))
    if list(map(_name_of, members)) == names * len(records):
        values = list(map(_value_of, members))
        return {name: values[at::width] for at, name in enumerate(names)}
    objects: list[_Fields] = list(map(dict, records))
    if any(fields.keys() != objects[0].keys() for fields in objects):
        return None
    return {name: [fields[name] for fields in objects] for name in names}


def _objects(values: Sequence[JsonValue]) -> list[_Fields] | None:
    """Return the fields of each value; None where one is no object, an empty one or has a key twice."""
    objects: list[_Fields] = []
    for value in values:
        if type(value) not in OBJECTS or not value:
            return None
        fields: _Fields = dict(value)
        if len(fields) < len(value):
            return None
        objects.append(fields)
    return objects


def _pays(records: int, names: Iterable[str], cost: int) -> bool:
    """Tell whether saying the names once saves more characters than it costs."""
    return (records - 1) * sum(len(name) + _KEY_COST for name in names) > cost


def _column(name: str, values: list[JsonValue], keys: Sequence[str]) -> _Column:
    first = values[0]
    if type(first) in CONTAINERS:
        is_list = is_items(first)
        if is_list:
            inner = _inner(list(chain.from_iterable(values)) if all(map(is_items, values)) else [])
        else:
            inner = _inner(values)
        return _Column(name=name, values=values, inner=inner, is_list=is_list, cells=_with_cells(inner))
    if keys and type(first) is str and first == keys[0] and values == keys:
        return _Column(name=name, values=values, constant=KEY)
    return _Column(name=name, values=values, constant=_constant(values))


def _inner(values: Sequence[JsonValue]) -> tuple[_Column, ...]:
    """Return the columns of values that are objects with the very same keys; none where they are not."""
    held = _by_name(values) if len(values) > 1 else None
    if held is None or not _pays(len(values), held, _NESTED_COST) or not all(map(_NAME.fullmatch, held)):
        return ()
    return tuple([_column(name, column, ()) for name, column in held.items()])


def _constant(values: Sequence[JsonValue]) -> str | None:
    """Return what all are, as a heading says it; None where they differ or it cannot say it."""
    first = values[0]
    if values.count(first) < len(values) or any(type(value) is not type(first) for value in values):
        return None
    if isinstance(first, Number):
        return first
    if isinstance(first, str):
        return first if _BARE.fullmatch(first) and not _LITERAL.fullmatch(first) else None
    return "null" if first is None else "true" if first else "false"


def _optional(objects: Sequence[_Fields], shared: Iterable[str]) -> list[_Column]:
    """Return the keys that so many have that a cell in every row is shorter."""
    told = frozenset(shared)
    counts = Counter(name for fields in objects for name in fields if name not in told)
    return [
        _Column(name=name, values=[fields.get(name) for fields in objects], is_optional=True)
        for name, count in counts.items()
        if count * (len(name) + _KEY_COST) > (len(objects) - count) * _ABSENT_COST + len(name) + _KEY_COST
        and _NAME.fullmatch(name)
        and all(fields.get(name, True) is not None for fields in objects)
    ]


def _heading(columns: Sequence[_Column]) -> str:
    return f"{{{','.join([column.heading() for column in columns])}}}"


def _with_cells(columns: Iterable[_Column]) -> tuple[_Column, ...]:
    return tuple([column for column in columns if column.has_cell])


def _rows(columns: Sequence[_Column], count: int) -> list[list[JsonValue]]:
    """Return what each of so many records holds of the columns; column by column, which is faster than row by row."""
    if not columns:
        return [[] for _ in range(count)]
    return list(map(list, zip(*map(_cells, columns), strict=True)))


def _cells(column: _Column) -> list[JsonValue]:
    values = column.values
    if column.is_list and column.inner:
        rows = iter(_rows(column.cells, sum(map(len, values))))
        return [list(islice(rows, len(value))) for value in values]
    if column.inner:
        return list(_rows(column.cells, len(values)))
    if CONTAINERS.isdisjoint(map(type, values)):
        return values
    return [_tabulated(value) if type(value) in CONTAINERS else value for value in values]


def _has_table(value: JsonValue) -> bool:
    """Tell whether somewhere a name has the form of a heading."""
    left = [value]
    while left:
        value = left.pop()
        if type(value) in OBJECTS:
            for name, held in value:
                if "{" in name and name.removesuffix(PER_LINE).endswith("}"):
                    return True
                if type(held) in CONTAINERS:
                    left.append(held)
        else:
            left += [item for item in value if type(item) in CONTAINERS]
    return False
