"""Tables: what each looks like, and that a reader who knows nothing else gets the records back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.trimming.compaction.document import read, write
from proxy.trimming.compaction.table import tabulated, tabulated_lines


def compact(text: str) -> str:
    return write(tabulated(read(text)))


def decoded(value: Any) -> Any:
    """Return the document that tables stand for."""
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "columns" not in value or not {"rows", "rows_by_key", "lines"} & value.keys():
        return {name: decoded(member) for name, member in value.items()}
    constant = value.get("in_every_row", {})
    if "rows_by_key" in value:
        return {key: constant | record(value["columns"], row) for key, row in value["rows_by_key"].items()}
    rows = value["rows"] if "rows" in value else value["lines"]
    return [constant | record(value["columns"], row) for row in rows]


def record(columns: Sequence[Any], row: Sequence[Any]) -> dict[str, Any]:
    """Return the object that a row stands for."""
    made: dict[str, Any] = {}
    for column, cell in zip(columns, row, strict=False):
        if isinstance(column, str):
            made[column] = decoded(cell)
        else:
            ((name, inner),) = column.items()
            made[name] = record(inner, cell)
    if len(row) > len(columns):
        made |= decoded(row[-1])
    return made


@pytest.mark.parametrize(
    ("text", "table"),
    [
        pytest.param(
            '[{"identity": 1, "price": 1.10}, {"identity": 2, "price": 2.0}, {"identity": 3, "price": 3}]',
            '{"columns":["identity","price"],"rows":[[1,1.10],[2,2.0],[3,3]]}',
            id="records",
        ),
        pytest.param(
            '{"users": {"ann": {"identity": 1, "city": "Rome"}, "bob": {"identity": 2, "city": "Oslo"},'
            ' "eve": {"identity": 3, "city": "Bern"}}, "n": 3}',
            '{"users":{"columns":["identity","city"],"rows_by_key":'
            '{"ann":[1,"Rome"],"bob":[2,"Oslo"],"eve":[3,"Bern"]}},"n":3}',
            id="a map of records",
        ),
        pytest.param(
            '[{"name": "a", "seats": {"front": 1, "back": 2}},'
            ' {"name": "b", "seats": {"back": 4, "front": 3}},'
            ' {"name": "c", "seats": {"front": 5, "back": 6}}]',
            '{"columns":["name",{"seats":["front","back"]}],"rows":[["a",[1,2]],["b",[3,4]],["c",[5,6]]]}',
            id="objects inside",
        ),
        pytest.param(
            '[{"id": 1, "status": "available"}, {"id": 2, "status": "available"},'
            ' {"id": 3, "status": "available"}]',
            '{"columns":["id"],"in_every_row":{"status":"available"},"rows":[[1],[2],[3]]}',
            id="what all have alike",
        ),
        pytest.param(
            '[{"identity": 1, "city": "Rome"}, {"identity": 2, "city": "Oslo", "note": "x"},'
            ' {"identity": 3, "city": "Bern"}]',
            '{"columns":["identity","city"],"rows":[[1,"Rome"],[2,"Oslo",{"note":"x"}],[3,"Bern"]]}',
            id="what only some have",
        ),
        pytest.param(
            '[{"identity": 1, "parts": [{"number": 1, "weight": 2}, {"number": 3, "weight": 4},'
            ' {"number": 5, "weight": 6}]}, {"identity": 2, "parts": []}, {"identity": 3, "parts": {}}]',
            '{"columns":["identity","parts"],"rows":['
            '[1,{"columns":["number","weight"],"rows":[[1,2],[3,4],[5,6]]}],[2,[]],[3,{}]]}',
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
        pytest.param(
            '[{"identity_of_it":1},{"identity_of_it":2},{"identity_of_it":3},7]', id="not all are records"
        ),
        pytest.param(
            '[{"identity_of_it":1},{"identity_of_it":2},{"identity_of_it":3},{}]', id="an empty one"
        ),
        pytest.param(
            '[{"identity_of_it":1},{"identity_of_it":2},{"identity_of_it":3,"identity_of_it":4}]',
            id="a key twice",
        ),
        pytest.param(
            '{"a":{"identity_of_it":1},"a":{"identity_of_it":2},"b":{"identity_of_it":3}}', id="a name twice"
        ),
        pytest.param('[{"one_name":1},{"two_names":2},{"three_names":3}]', id="nothing in common"),
        pytest.param(
            '{"t":[{"columns":["a"],"rows":[]}],"r":[{"identity_of_it":1},{"identity_of_it":2},'
            '{"identity_of_it":3}]}',
            id="something that looks like a table is there already",
        ),
        pytest.param("[1,[2,[]],{}]", id="no objects"),
    ],
)
def test_what_stays(text: str) -> None:
    assert compact(text) == text


def test_values_that_only_look_alike_are_not_told_once() -> None:
    text = '[{"identity":1,"k":1,"v":true},{"identity":2,"k":"1","v":1},{"identity":3,"k":1,"v":1}]'
    table = '{"columns":["identity","k","v"],"rows":[[1,1,true],[2,"1",1],[3,1,1]]}'
    assert compact(text) == table


def test_a_long_text_stays_in_its_row() -> None:
    records = [{"identity": number, "text": "long " * 30} for number in range(4)]
    assert "in_every_row" not in compact(json.dumps(records))


def test_objects_inside_that_differ_or_are_short_stay_objects() -> None:
    text = '[{"identity":1,"at":{"x":2}},{"identity":3,"at":{"y":4}},{"identity":3,"at":[]},'
    text += '{"identity":4,"at":1}]'
    assert compact(text) == '{"columns":["identity","at"],"rows":[[1,{"x":2}],[3,{"y":4}],[3,[]],[4,1]]}'
    other = '[{"identity":1,"at":{"x":2}},{"identity":3,"at":{"y":4}},{"identity":3,"at":{"x":5}}]'
    assert compact(other) == '{"columns":["identity","at"],"rows":[[1,{"x":2}],[3,{"y":4}],[3,{"x":5}]]}'
    short = '[{"identity_of_the_record":1,"at":{"x":2}},{"identity_of_the_record":3,"at":{"x":4}}]'
    assert compact(short) == '{"columns":["identity_of_the_record","at"],"rows":[[1,{"x":2}],[3,{"x":4}]]}'
    mixed = '[{"identity_of_the_record":1,"at":{"x":2}},{"identity_of_the_record":3,"at":7}]'
    assert compact(mixed) == '{"columns":["identity_of_the_record","at"],"rows":[[1,{"x":2}],[3,7]]}'


def test_lines() -> None:
    records = [{"identity": number, "city": f"c{number}"} for number in range(4)]
    values = [read(json.dumps(each)) for each in records]
    table = tabulated_lines(values)
    assert table is not None
    assert write(table) == '{"columns":["identity","city"],"lines":[[0,"c0"],[1,"c1"],[2,"c2"],[3,"c3"]]}'
    assert decoded(json.loads(write(table))) == records
    assert tabulated_lines([table, table]) is None
    assert tabulated_lines(values[:1]) is None


SCALARS: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3) | st.just("available since long")
)


def records(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return lists of records, each with what `inner` gives or without."""
    required = {"identity": SCALARS, "place": st.fixed_dictionaries({"city": SCALARS, "street": SCALARS})}
    optional = {"note": SCALARS, "parts": inner, "columns": SCALARS, "rows": SCALARS}
    return st.lists(st.fixed_dictionaries(required, optional=optional), max_size=4)


RECORDS = records(records(SCALARS))
DOCUMENTS = st.recursive(
    RECORDS | st.dictionaries(st.text(max_size=2), st.fixed_dictionaries({"identity_of_it": SCALARS})),
    lambda inner: (
        st.dictionaries(st.text(max_size=3), inner | SCALARS, max_size=4) | st.lists(inner, max_size=3)
    ),
    max_leaves=6,
)


def _looks_like_a_table(value: Any) -> bool:
    if isinstance(value, dict):
        return {"columns", "rows"} <= value.keys() or any(map(_looks_like_a_table, value.values()))
    return isinstance(value, list) and any(map(_looks_like_a_table, value))


@settings(deadline=None, max_examples=60)
@given(DOCUMENTS)
def test_any_document_can_be_read_back(value: Any) -> None:
    text = json.dumps(value)
    table = compact(text)
    again = json.loads(table)
    assert (again if _looks_like_a_table(value) else decoded(again)) == value
    assert compact(table) == table
    assert compact(text) == table
