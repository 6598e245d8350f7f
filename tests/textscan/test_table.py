"""Tables: what each looks like, and that a reader who knows nothing else gets the records back."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from time import process_time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.textscan.document import read_json, write_json
from proxy.textscan.table import as_table, lines_as_table


def compact(text: str) -> str:
    value = read_json(text)
    assert value is not None
    table = as_table(value)
    return write_json(value if table is None else table)


HEADING = re.compile(r"([^{]*)(\{.*\})( per line)?", re.DOTALL)


def decoded(value: Any) -> Any:
    """Return the document that tables stand for."""
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    members = [member(name, held) for name, held in value.items()]
    if len(members) == 1 and members[0][0] is None:
        return members[0][1]
    return dict(members)


def member(name: str, held: Any) -> tuple[str | None, Any]:
    """Return a member of an object; what is the object itself has no name."""
    heading = HEADING.fullmatch(name)
    if heading is None:
        return name, decoded(held)
    columns = Columns(heading[2])
    if isinstance(held, dict):
        made: Any = {key: columns.record(row, key) for key, row in held.items()}
    else:
        made = [columns.record(row) for row in held]
    return heading[1] or None, made


class Columns:
    """The columns of a heading, read as its documentation says."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.place = 0
        self.columns = self._braces()
        assert self.place == len(text)

    def _braces(self) -> list[tuple[str, str, Any]]:
        """Read `{…}`: for each column its name, its kind, and its constant or its own columns."""
        found: list[tuple[str, str, Any]] = []
        while self._next() != "}":
            name = self._until("=?[{,}")
            sign = self.text[self.place]
            if sign == "=":
                self.place += 1
                constant = self._until(",}")
                found.append((name, "key" if constant == "<key>" else "constant", literal(constant)))
            elif sign == "?":
                self.place += 1
                found.append((name, "optional", None))
            elif sign == "[":
                self.place += 2
                found.append((name, "list", self._braces()))
            elif sign == "{":
                found.append((name, "object", self._braces()))
            else:
                found.append((name, "cell", None))
        self.place += 1
        return found

    def _next(self) -> str:
        """Step over a brace that opens, or a comma."""
        if self.text[self.place] in "{,":
            self.place += 1
        return self.text[self.place]

    def _until(self, signs: str) -> str:
        start = self.place
        while self.text[self.place] not in signs:
            self.place += 1
        return self.text[start : self.place]

    def record(self, row: list[Any], key: str | None = None) -> dict[str, Any]:
        """Return the object that a row stands for."""
        cells = list(row)
        made = taken(self.columns, cells, key)
        for rest in cells:
            made |= decoded(rest)
        return made


def taken(columns: Sequence[tuple[str, str, Any]], cells: list[Any], key: str | None = None) -> dict[str, Any]:
    """Return the fields of these columns, taking from `cells` what is theirs."""
    made: dict[str, Any] = {}
    for name, kind, held in columns:
        if kind == "constant":
            made[name] = held
        elif kind == "key":
            made[name] = key
        elif kind == "object":
            made[name] = taken(held, cells.pop(0) if any(map(has_cell, held)) else [])
        elif kind == "list":
            made[name] = [taken(held, list(row)) for row in cells.pop(0)]
        else:
            cell = cells.pop(0)
            if kind == "cell" or cell is not None:
                made[name] = decoded(cell)
    return made


def has_cell(column: tuple[str, str, Any]) -> bool:
    _, kind, held = column
    return kind in {"cell", "optional", "list"} or (kind == "object" and any(map(has_cell, held)))


def literal(text: str) -> Any:
    """Return what a constant is: a number, a truth value, null, or a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


@pytest.mark.parametrize(
    ("text", "table"),
    [
        pytest.param(
            '[{"identity": 1, "price": 1.10}, {"identity": 2, "price": 2.0}, {"identity": 3, "price": 3}]',
            '{"{identity,price}":[[1,1.10],[2,2.0],[3,3]]}',
            id="records",
        ),
        pytest.param(
            '{"users": {"ann": {"identity": 1, "city": "Rome"}, "bob": {"identity": 2, "city": "Oslo"},'
            ' "eve": {"identity": 3, "city": "Bern"}}, "n": 3}',
            '{"users{identity,city}":{"ann":[1,"Rome"],"bob":[2,"Oslo"],"eve":[3,"Bern"]},"n":3}',
            id="a map of records",
        ),
        pytest.param(
            '{"A1": {"item": "A1", "left": 3}, "B2": {"item": "B2", "left": 4}}',
            '{"{item=<key>,left}":{"A1":[3],"B2":[4]}}',
            id="records that hold their key",
        ),
        pytest.param(
            '[{"name": "a", "seats": {"front": 1, "back": 2}},'
            ' {"name": "b", "seats": {"back": 4, "front": 3}},'
            ' {"name": "c", "seats": {"front": 5, "back": 6}}]',
            '{"{name,seats{front,back}}":[["a",[1,2]],["b",[3,4]],["c",[5,6]]]}',
            id="objects inside",
        ),
        pytest.param(
            '[{"id": 1, "status": "available"}, {"id": 2, "status": "available"}, {"id": 3, "status": "available"}]',
            '{"{id,status=available}":[[1],[2],[3]]}',
            id="what all have alike",
        ),
        pytest.param(
            '[{"n": 1, "at": {"floor": 2, "door": null}, "note": ""},'
            ' {"n": 1, "at": {"floor": 2, "door": null}, "note": ""},'
            ' {"n": 1, "at": {"floor": 2, "door": null}, "note": ""}]',
            '{"{n=1,at{floor=2,door=null},note=}":[[],[],[]]}',
            id="all alike",
        ),
        pytest.param(
            '{"list of": [{"name": "a", "score": 1}, {"name": "b", "score": 2, "by": 3},'
            ' {"name": "c", "score": 4, "by": 5}, {"name": "d", "score": 6, "by": 7}]}',
            '{"list of{name,score,by?}":[["a",1,null],["b",2,3],["c",4,5],["d",6,7]]}',
            id="what most have",
        ),
        pytest.param(
            '[{"name": "a", "score": 1}, {"name": "b", "score": 2, "by": null},'
            ' {"name": "c", "score": 4, "by": 5}, {"name": "d", "score": 6, "by": 7}]',
            '{"{name,score}":[["a",1],["b",2,{"by":null}],["c",4,{"by":5}],["d",6,{"by":7}]]}',
            id="what most have, if only nothing",
        ),
        pytest.param(
            '[{"order": 1, "parts": [{"number": 1, "weight": 2}, {"number": 3, "weight": 4}]},'
            ' {"order": 2, "parts": []}, {"order": 3, "parts": [{"number": 5, "weight": 6}]}]',
            '{"{order,parts[]{number,weight}}":[[1,[[1,2],[3,4]]],[2,[]],[3,[[5,6]]]]}',
            id="lists of records in records",
        ),
        pytest.param(
            '[{"a,b": 1, "name": 2}, {"a,b": 3, "name": 4}, {"a,b": 5, "name": 6}]',
            '{"{name}":[[2,{"a,b":1}],[4,{"a,b":3}],[6,{"a,b":5}]]}',
            id="a name that no heading can hold",
        ),
        pytest.param(
            '{"": [{"name": 1, "score": 2}, {"name": 3, "score": 4}],'
            ' "f{x": [{"name": 1, "score": 2}, {"name": 3, "score": 4}]}',
            '{"":{"{name,score}":[[1,2],[3,4]]},"f{x":{"{name,score}":[[1,2],[3,4]]}}',
            id="names that no heading can follow",
        ),
        pytest.param(
            '[{"identity": 1, "city": "Rome"}, {"identity": 2, "city": "Oslo", "note": "x"},'
            ' {"identity": 3, "city": "Bern"}]',
            '{"{identity,city}":[[1,"Rome"],[2,"Oslo",{"note":"x"}],[3,"Bern"]]}',
            id="what only some have",
        ),
        pytest.param(
            '[{"identity": 1, "parts": [{"number": 1, "weight": 2}, {"number": 3, "weight": 4},'
            ' {"number": 5, "weight": 6}]}, {"identity": 2, "parts": []}, {"identity": 3, "parts": {}}]',
            '{"{identity,parts}":[[1,{"{number,weight}":[[1,2],[3,4],[5,6]]}],[2,[]],[3,{}]]}',
            id="records in records",
        ),
    ],
)
def test_tables(text: str, table: str) -> None:
    assert compact(text) == table
    assert decoded(json.loads(table)) == json.loads(text)
    assert compact(table) == table


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('[{"a":1},{"a":2}]', id="it does not pay"),
        pytest.param('[{"identity_of_it":1}]', id="one record"),
        pytest.param('[{"identity_of_it":1},{"identity_of_it":2},{"identity_of_it":3},7]', id="not all are records"),
        pytest.param('[{"identity_of_it":1},{"identity_of_it":2},{"identity_of_it":3},{}]', id="an empty one"),
        pytest.param(
            '[{"identity_of_it":1},{"identity_of_it":2},{"identity_of_it":3,"identity_of_it":4}]', id="a key twice"
        ),
        pytest.param('{"a":{"identity_of_it":1},"a":{"identity_of_it":2},"b":{"identity_of_it":3}}', id="a name twice"),
        pytest.param('[{"one_name":1},{"two_names":2},{"three_names":3}]', id="nothing in common"),
        pytest.param(
            '{"t":[{"rows of{a}":[]}],"r":[{"identity_of_it":1},{"identity_of_it":2},{"identity_of_it":3}]}',
            id="something that looks like a table is there already",
        ),
        pytest.param("[1,[2,[]],{}]", id="no objects"),
    ],
)
def test_what_stays(text: str) -> None:
    assert compact(text) == text


def test_values_that_only_look_alike_are_not_told_once() -> None:
    text = '[{"identity":1,"k":1,"v":true},{"identity":2,"k":"1","v":1},{"identity":3,"k":1,"v":1}]'
    assert compact(text) == '{"{identity,k,v}":[[1,1,true],[2,"1",1],[3,1,1]]}'


@pytest.mark.parametrize(
    "value",
    [
        "3",
        "-1e5",
        "-0.50",
        "true",
        "null",
        "NaN",
        "a,b",
        "{a}",
        "<key>",
        "[]",
        " a",
        "a ",
        'say "a"',
        "a\\b",
        "a\nb",
        "x" * 101,
    ],
)
def test_texts_that_a_heading_cannot_hold_stay_in_their_rows(value: str) -> None:
    records = [{"identity": number, "of": value} for number in range(3)]
    table = compact(json.dumps(records))
    assert table.startswith('{"{identity,of}":[[0,')
    assert decoded(json.loads(table)) == records


@pytest.mark.parametrize(
    "value", ["", "a", "a b", "k=v", "a/b?c=[1]", "v1.2", "-", "nullable", "2024-05-20", "007", "x" * 100, "é"]
)
def test_texts_that_a_heading_can_hold_stand_bare(value: str) -> None:
    records = [{"identity": number, "of": value} for number in range(3)]
    table = compact(json.dumps(records))
    assert table == f'{{"{{identity,of={value}}}":[[0],[1],[2]]}}'
    assert decoded(json.loads(table)) == records


def test_objects_inside_that_differ_or_are_short_stay_objects() -> None:
    text = '[{"identity":1,"at":{"x":2}},{"identity":3,"at":{"y":4}},{"identity":3,"at":[]},'
    text += '{"identity":4,"at":1}]'
    assert compact(text) == '{"{identity,at}":[[1,{"x":2}],[3,{"y":4}],[3,[]],[4,1]]}'
    other = '[{"identity":1,"at":{"x":2}},{"identity":3,"at":{"y":4}},{"identity":3,"at":{"x":5}}]'
    assert compact(other) == '{"{identity,at}":[[1,{"x":2}],[3,{"y":4}],[3,{"x":5}]]}'
    short = '[{"identity_of_the_record":1,"at":{"x":2}},{"identity_of_the_record":3,"at":{"x":4}}]'
    assert compact(short) == '{"{identity_of_the_record,at}":[[1,{"x":2}],[3,{"x":4}]]}'
    mixed = '[{"identity_of_the_record":1,"at":{"x":2}},{"identity_of_the_record":3,"at":7}]'
    assert compact(mixed) == '{"{identity_of_the_record,at}":[[1,{"x":2}],[3,7]]}'


def test_lines() -> None:
    records = [{"identity": number, "city": f"c{number}"} for number in range(4)]
    values = [read_json(json.dumps(each)) for each in records]
    table = lines_as_table(values)
    assert table is not None
    assert write_json(table) == '{"{identity,city} per line":[[0,"c0"],[1,"c1"],[2,"c2"],[3,"c3"]]}'
    assert decoded(json.loads(write_json(table))) == records
    assert lines_as_table([table, table]) is None
    assert lines_as_table(values[:1]) is None


SCALARS: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3) | st.just("available since long")
)


def records(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return lists of records, each with what `inner` gives or without."""
    required = {"identity": SCALARS, "place": st.fixed_dictionaries({"city": SCALARS, "street": SCALARS})}
    optional = {"note": SCALARS, "parts": inner, "a,b": SCALARS, "at": inner}
    return st.lists(st.fixed_dictionaries(required, optional=optional), max_size=4)


RECORDS = records(records(SCALARS))
DOCUMENTS = st.recursive(
    RECORDS | st.dictionaries(st.text(max_size=2), st.fixed_dictionaries({"identity_of_it": SCALARS})),
    lambda inner: st.dictionaries(st.text(max_size=3), inner | SCALARS, max_size=4) | st.lists(inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100)
@given(DOCUMENTS)
def test_any_document_can_be_read_back(value: Any) -> None:
    text = json.dumps(value)
    table = compact(text)
    again = json.loads(table)
    assert again == value or decoded(again) == value
    assert compact(table) == table
    assert compact(text) == table
    assert len(table) <= len(write_json(read_json(text) or []))


def test_a_name_of_nothing_but_braces_takes_time_in_proportion() -> None:
    start = process_time()
    text = json.dumps({"{" * 300_000: "\\"})
    assert compact(text) == text.replace(": ", ":")
    assert process_time() - start < 5
