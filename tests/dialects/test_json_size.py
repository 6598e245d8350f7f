"""Values and items are counted in the bytes as a parser would count them."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects import jsontext
from proxy.dialects.jsontext import excess_of

LEAVES = st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab",[]{}\\:\n', max_size=8)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a",[{\\', max_size=4), inner, max_size=4),
)


def values_in(value: Any) -> int:
    """Count as `excess_of` says it does."""
    if isinstance(value, (list, dict)):
        inner = value if isinstance(value, list) else list(value.values())
        return 1 + max(1, sum(map(values_in, inner)))
    return 1


def items_in(value: Any) -> int:
    if not isinstance(value, dict):
        value = dict.fromkeys("a") if not isinstance(value, list) else dict(enumerate(value))
    return max([max(1, len(each)) for each in value.values() if isinstance(each, (list, dict))], default=0)


@given(value=VALUES, window=st.integers(1, 40))
def test_the_count_is_that_of_the_parsed_value(value: Any, window: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsontext, "_WINDOW", window)
        text = orjson.dumps(value)
        values, items = values_in(value), items_in(value)
        assert excess_of(text, values, 1_000) is None
        assert excess_of(text, values - 1, 1_000) == ("values" if values > 0 else None)
        assert excess_of(text, 1_000, max(items, 1)) is None
        if items > 1:
            assert excess_of(text, 1_000, items - 1) == "items"


@pytest.mark.parametrize("window", [1, 7, 100])
def test_signs_in_strings_do_not_count(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsontext, "_WINDOW", window)
    value = {"a": ['x",[', "y\\"], "b": {"c": [1, 2], "d": {}, "e": ","}}
    text, values, items = orjson.dumps(value), values_in(value), items_in(value)
    assert (values, items) == (11, 3)
    assert excess_of(text, values, 1_000) is None
    assert excess_of(text, values - 1, 1_000) == "values"
    assert excess_of(text, values, items) is None
    assert excess_of(text, values, items - 1) == "items"
    assert excess_of(text, 1_000, 1_000) is None


def test_text_that_ends_in_an_escape_is_no_json_and_harms_nothing() -> None:
    assert excess_of(b'["\\', 1, 1) == "values"
    assert excess_of(b'[",\\', 2, 1) is None
