from __future__ import annotations

from typing import Any

import pytest

from proxy.dialects.jsontext import is_array, is_object


@pytest.mark.parametrize(
    ("value", "object_", "array"),
    [({}, True, False), ({"a": 1}, True, False), ([], False, True), ([{}], False, True)]
    + [(value, False, False) for value in (None, "", "{}", "[]", 0, 1.5, True)],
)
def test_an_object_and_an_array_are_told_apart(value: Any, object_: bool, array: bool) -> None:
    assert is_object(value) is object_
    assert is_array(value) is array
