"""The operator's patterns: what is refused, and that no text makes them slow."""

from __future__ import annotations

import pytest

from proxy.trimming.settings import checked, group_names, is_found, named_groups


def test_a_pattern_that_is_taken_is_the_very_same() -> None:
    assert checked("a+b") == "a+b"


@pytest.mark.parametrize("regex", ["(", "(?=a)", r"(a)\1", "a{5000}"])
def test_what_the_engine_does_not_take_is_refused_with_its_reason(regex: str) -> None:
    with pytest.raises(ValueError, match=r"not a pattern that RE2 takes: .+"):
        checked(regex)


def test_where_a_pattern_is_found() -> None:
    assert is_found("b+", "abc")
    assert not is_found("^b", "abc")


def test_the_named_groups_of_a_pattern() -> None:
    assert group_names("(?P<a>x)(y)(?P<b>z)") == {"a", "b"}
    assert named_groups("(?P<a>x)|(?P<b>y)", "say y") == {"b": "y"}
    assert named_groups("(?P<a>x)", "say y") is None


def test_a_pattern_that_would_take_for_ever_elsewhere() -> None:
    assert named_groups("^(a+)+(?P<end>!)$", "a" * 1_000_000) is None
