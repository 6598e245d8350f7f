"""What a mapping of a policy refuses whatever it says."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from proxy.trimming.section import Natural, Positive, Section, Share


class Example(Section, frozen=True):
    last: Positive = 3
    """How many."""


def test_what_a_field_says_of_itself_is_in_the_schema() -> None:
    assert Example.model_json_schema()["properties"]["last"]["description"] == "How many."


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        Example.model_validate({"lsat": 3})


def test_it_is_frozen() -> None:
    with pytest.raises(ValidationError, match="Instance is frozen"):
        Example().last = 4  # type: ignore[misc]  # this is the mistake


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [(Positive, 1, 0), (Natural, 0, -1), (Share, 1, 1.5), (Share, 0.1, 0), (Share, 0.1, float("nan"))],
)
def test_numbers_have_ranges(kind: type, good: float, bad: float) -> None:
    assert TypeAdapter(kind).validate_python(good) == good
    with pytest.raises(ValidationError, match="Input should be"):
        TypeAdapter(kind).validate_python(bad)


@pytest.mark.parametrize("kind", [Positive, Natural, Share])
def test_yes_is_no_number(kind: type) -> None:
    with pytest.raises(ValidationError, match="not true or false"):
        TypeAdapter(kind).validate_python(True)
