"""Ids: which of them nobody else has."""

from __future__ import annotations

import pytest

from proxy.dialects import is_random


@pytest.mark.parametrize(
    ("name", "random"),
    [
        ("call_9f86d081884c7d659a2feaa0", True),
        ("toolu_01A09q90qw90lq917835lq9", True),
        ("chatcmpl-tool-5f3a9c0e7d", True),
        ("D681PevKs", True),
        ("550e8400-e29b-41d4-a716-446655440000", True),
        ("function-call-1234567890123456", True),
        ("functions.get_weather:0", False),
        ("call_1", False),
        ("call_00000001", False),
        ("tool_call_20260101", False),
        ("searchTheWholeWeb", False),
        ("", False),
    ],
)
def test_ids_that_others_have_too_are_not_random(name: str, random: bool) -> None:
    assert is_random(name) is random
