"""Records that share their keys, as a table: the keys once, then a row of values for each.

    [{"id": 1, "at": {"x": 2, "y": 3}, "ok": true}, {"id": 4, "at": {"x": 5, "y": 6}, "ok": true}]

becomes

    {"columns": ["id", {"at": ["x", "y"]}], "in_every_row": {"ok": true}, "rows": [[1, [2, 3]], [4, [5, 6]]]}

An object of such records has `rows_by_key` instead of `rows`, records that were a line each have `lines`. A
row that has an object more than there are columns holds in it what only some records have. Nothing is lost
but the order of keys, and every value stands there as it was. A document that holds an object of this form
already is left alone, so that no table can be mistaken. It does not know tokens: what pays is judged by
length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from proxy.trimming.compaction.document import Members, Value, is_items, is_members

COLUMNS: Final = "columns"
EVERY_ROW: Final = "in_every_row"
ROWS: Final = "rows"
ROWS_BY_KEY: Final = "rows_by_key"
LINES: Final = "lines"

_FORMS: Final = frozenset({ROWS, ROWS_BY_KEY, LINES})
_TABLE_COST: Final = 26
_CONSTANTS_COST: Final = 18
_LONGEST_CONSTANT: Final = 100
"""Characters of a value that is told once for all rows; a longer text stays with what it tells of."""
_NESTED_COST: Final = 6
_KEY_COST: Final = 3
"""Characters that a form needs beside its names and values; a key has quotes and a colon."""


@dataclass(frozen=True, slots=True)
class _Column:
    """One key that all records have."""

    name: str
    inner: tuple[_Column, ...] = ()
    """Where every value is an object with the same keys: these."""


def tabulated(value: Value) -> Value:
    """Return the document with tables where they pay."""
    return value if _has_table(value) else _tabulated(value)


def tabulated_lines(values: list[Value]) -> Members | None:
    """Return documents that stood on a line each as one table; None where that does not pay."""
    return None if _has_table(values) else _table(values, LINES)


def _tabulated(value: Value) -> Value:
    if is_members(value):
        names = [name for name, _ in value]
        if len(set(names)) == len(names):
            table = _table([member for _, member in value], ROWS_BY_KEY, names)
            if table is not None:
                return table
        return tuple(
            [(name, _tabulated(held) if isinstance(held, (tuple, list)) else held) for name, held in value]
        )
    if is_items(value):
        table = _table(value, ROWS)
        if table is not None:
            return table
        return [_tabulated(item) if isinstance(item, (tuple, list)) and item else item for item in value]
    return value


def _table(records: Sequence[Value], form: str, names: Sequence[str] = ()) -> Members | None:
    """Return the table of records; None where they are none, or where it would not be shorter."""
    if len(records) < 2:
        return None
    objects = _objects(records)
    if objects is None:
        return None
    columns = _columns(objects)
    saved = (len(objects) - 1) * sum(len(column.name) + _KEY_COST for column in columns)
    if saved <= _TABLE_COST:
        return None
    constant = _constants(objects, columns)
    shared = {column.name for column in columns}
    columns = [column for column in columns if column.name not in constant]
    rows: list[Value] = []
    for fields in objects:
        row = _cells(fields, columns)
        rest = tuple([(name, _tabulated(value)) for name, value in fields.items() if name not in shared])
        rows.append([*row, rest] if rest else row)
    heading: Members = ((COLUMNS, [_heading(column) for column in columns]),)
    if constant:
        heading += ((EVERY_ROW, tuple(constant.items())),)
    return (*heading, (form, tuple(zip(names, rows, strict=True)) if names else rows))


def _objects(values: Sequence[Value]) -> list[dict[str, Value]] | None:
    """Return the fields of each value; None where one is no object, an empty one or has a key twice."""
    objects: list[dict[str, Value]] = []
    for value in values:
        if not is_members(value) or not value:
            return None
        fields = dict(value)
        if len(fields) < len(value):
            return None
        objects.append(fields)
    return objects


def _columns(objects: Sequence[dict[str, Value]]) -> list[_Column]:
    """Return the keys that all have, in the order of the first."""
    shared = [name for name in objects[0] if all(name in fields for fields in objects)]
    return [_Column(name, _inner([fields[name] for fields in objects])) for name in shared]


def _inner(values: Sequence[Value]) -> tuple[_Column, ...]:
    """Return the columns of values that are objects with the very same keys; none where they are not."""
    if not is_members(values[0]):
        return ()
    objects = _objects(values)
    if objects is None or any(fields.keys() != objects[0].keys() for fields in objects):
        return ()
    names = sum(len(name) + _KEY_COST for name in objects[0])
    return tuple(_columns(objects)) if (len(objects) - 1) * names > _NESTED_COST else ()


def _constants(objects: Sequence[dict[str, Value]], columns: Sequence[_Column]) -> dict[str, Value]:
    """Return what all records have alike, where telling it once pays."""
    constant: dict[str, Value] = {}
    saved = 0
    for column in columns:
        first = objects[0][column.name]
        if isinstance(first, (tuple, list)) or len(str(first)) > _LONGEST_CONSTANT:
            continue
        if all(_is_same(fields[column.name], first) for fields in objects):
            constant[column.name] = first
            saved += (len(objects) - 1) * (len(str(first)) + 1)
    return constant if saved > _CONSTANTS_COST else {}


def _is_same(value: Value, other: Value) -> bool:
    """Tell whether two scalars are written alike: 1 is not "1", nor is it true."""
    return type(value) is type(other) and value == other


def _heading(column: _Column) -> Value:
    return ((column.name, [_heading(each) for each in column.inner]),) if column.inner else column.name


def _cells(fields: dict[str, Value], columns: Sequence[_Column]) -> list[Value]:
    return [
        _cells(dict(fields[column.name]), column.inner) if column.inner else _tabulated(fields[column.name])
        for column in columns
    ]


def _has_table(value: Value) -> bool:
    """Tell whether somewhere an object has the form of a table."""
    if is_members(value):
        if COLUMNS in (names := {name for name, _ in value}) and names & _FORMS:
            return True
        return any(_has_table(held) for _, held in value if isinstance(held, (tuple, list)) and held)
    return any(_has_table(item) for item in value if isinstance(item, (tuple, list)) and item)
