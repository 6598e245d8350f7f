from __future__ import annotations

from typing import Any

import pytest

from proxy.config.layers import laid_over


@pytest.mark.parametrize(
    ("below", "above", "both"),
    [
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": {"x": 1, "y": {"z": 1}}}, {"a": {"y": {"w": 2}}}, {"a": {"x": 1, "y": {"z": 1, "w": 2}}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"a": {"x": 1}}, {"a": None}, {"a": None}),
        ({"a": None}, {"a": {"x": 1}}, {"a": {"x": 1}}),
        ({"a": {"x": 1}}, {"a": {}}, {"a": {"x": 1}}),
    ],
)
def test_mappings_are_merged_and_all_else_is_replaced(
    below: dict[str, Any], above: dict[str, Any], both: dict[str, Any]
) -> None:
    assert laid_over(below, above) == both


def test_neither_is_changed() -> None:
    below, above = {"a": {"x": 1}}, {"a": {"y": 2}}
    laid_over(below, above)["a"]["z"] = 3
    assert (below, above) == ({"a": {"x": 1}}, {"a": {"y": 2}})
