"""Writes records that share their keys as a table: the keys once, then a row of values for each record.

    {"seats": [{"id": 1, "at": {"x": 2, "y": 3}, "ok": true}, {"id": 4, "at": {"x": 5, "y": 6}, "ok": true}]}

becomes

    {"seats{id,at{x,y},ok=true}": [[1, [2, 3]], [4, [5, 6]]]}

The braces after a list's name describe its rows:

    price           a cell of the row
    price=3         the same value in every row, without a cell; strings are not quoted
    at{x,y}         an object: its cells are a list, absent if all its values are constant
    items[]{x,y}    a list of records, each a list of cells
    note?           an optional key: null means absent (no other null is in the column)
    id=<key>        the key of the row, if rows have keys (`{"seats{id=<key>,x}": {"A1": [2]}}`)

A list without a name becomes an object with nothing before the braces (`{"{id,x}": [[1, 2], [4, 5]]}`). JSON Lines
have `per line` after the braces. Keys that few records have stand in an object at the end of the row. Only the order
of keys is lost. A document that already has such a name stays as it is. A table is made only if it is shorter.
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

KEY: Final = "<key>"  # in a heading: the key of the row
PER_LINE: Final = " per line"  # ends the heading of JSON Lines

_ENDS: Final = ("\\", '}"', f'{PER_LINE}"')  # a document that already has a heading contains one of these
_NAME: Final = re.compile(r"[^\s,{}\[\]=?<>\"\\](?:[^,{}\[\]=?<>\"\\\x00-\x1f\ud800-\udfff]*[^\s,{}\[\]=?<>\"\\])?")
"""A name that can stand in a heading."""
_BARE: Final = re.compile(r"(?:[^\s,{}\[\]<>\"\\](?:[^,{}<>\"\\\x00-\x1f\ud800-\udfff]{0,98}[^\s,{}<>\"\\])?)?")
"""A string that can stand in a heading; a longer one stays in the rows."""
_LITERAL: Final = re.compile(r"null|true|false|NaN|-?(?:Infinity|(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)")
"""A string that would read as another type."""
_TABLE_COST: Final = 8
_NESTED_COST: Final = 6
_KEY_COST: Final = 3  # characters beside names and values; a key has quotes and a colon
_ABSENT_COST: Final = 5  # characters of a cell for an absent value


_Fields: TypeAlias = "dict[str, JsonValue]"  # the members of one record
_Held: TypeAlias = "dict[str, list[JsonValue]]"  # the values of all records, by name
_name_of: Final = itemgetter(0)
_value_of: Final = itemgetter(1)


class _Column(Struct, frozen=True, kw_only=True):
    """One key of records."""

    name: str
    values: list[JsonValue]  # one for each record; None if absent
    constant: str | None = None  # the shared value as the heading writes it; None if values differ
    inner: tuple[_Column, ...] = ()  # columns of nested objects with equal keys, or of lists of them
    is_list: bool = False
    is_optional: bool = False
    cells: tuple[_Column, ...] = ()  # the inner columns that have cells

    @property
    def has_cell(self) -> bool:
        """Whether rows have a cell for it."""
        return self.constant is None and (self.is_list or not self.inner or bool(self.cells))

    def heading(self) -> str:
        """Return the column's part of the heading."""
        if self.constant is not None:
            return f"{self.name}={self.constant}"
        if self.inner:
            return f"{self.name}{'[]' if self.is_list else ''}{_heading(self.inner)}"
        return f"{self.name}?" if self.is_optional else self.name


def as_table(value: JsonValue, source: str | None = None) -> JsonValue | None:
    """Return the document with tables in it; None if no table makes it shorter. `source` is its text, if known."""
    if (source is None or any(end in source for end in _ENDS)) and _has_table(value):
        return None
    table = _tabulated(value)
    return table if _has_table(table) else None


def lines_as_table(values: list[JsonValue]) -> Members | None:
    """Return the documents of JSON Lines as one table; None if that is not shorter."""
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
    """Return a member of an object; the heading of its table follows its name."""
    made = _table_of(held)
    if not isinstance(made, _Table):
        return name, made
    # An empty name would read as a list without a name; a name with a brace would have no clear end.
    return (f"{name}{made[0]}", made[1]) if name and "{" not in name else (name, (tuple(made),))


def _table(records: Sequence[JsonValue], names: Sequence[str] = ()) -> _Table | None:
    """Return the table of records; None if they are not records, or a table would not be shorter."""
    if len(records) < 2:
        return None
    held = _by_name(records)
    objects = _objects(records) if held is None else []
    if objects is None:
        return None
    first = held if held is not None else objects[0]
    everywhere = first if held is not None else set(first).intersection(*objects[1:])
    shared = [name for name in first if name in everywhere and _NAME.fullmatch(name)]
    # Checked first, so that nested values are visited only once.
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
    """Return the values of records by name, if all have the same names without duplicates; else None.

    If the names have the same order, the usual case, no record is looked at by itself.
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
    """Return the fields of each value; None if one is not an object, is empty, or has a duplicate key."""
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
    """Tell whether writing the names once saves more characters than it costs."""
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
    """Return the columns of values that are objects with equal keys; an empty tuple otherwise."""
    held = _by_name(values) if len(values) > 1 else None
    if held is None or not _pays(len(values), held, _NESTED_COST) or not all(map(_NAME.fullmatch, held)):
        return ()
    return tuple([_column(name, column, ()) for name, column in held.items()])


def _constant(values: Sequence[JsonValue]) -> str | None:
    """Return the shared value as a heading writes it; None if values differ or a heading cannot hold it."""
    first = values[0]
    if values.count(first) < len(values) or any(type(value) is not type(first) for value in values):
        return None
    if isinstance(first, Number):
        return first
    if isinstance(first, str):
        return first if _BARE.fullmatch(first) and not _LITERAL.fullmatch(first) else None
    return "null" if first is None else "true" if first else "false"


def _optional(objects: Sequence[_Fields], shared: Iterable[str]) -> list[_Column]:
    """Return the keys for which a cell in every row is shorter than the key in the records that have it."""
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
    """Return the rows. They are built column by column, which is faster."""
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
    """Tell whether any name in the document has the form of a heading."""
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
