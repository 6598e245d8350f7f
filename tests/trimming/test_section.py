"""What a mapping of a policy refuses whatever it says."""

from __future__ import annotations

from functools import cached_property

import pytest
from pydantic import TypeAdapter, ValidationError

from proxy.trimming.settings import Natural, Positive, Section, Share


class Example(Section, frozen=True):
    last: Positive = 3
    """How many."""

    @cached_property
    def words(self) -> str:
        return f"the last {self.last}"


class Narrower(Example, frozen=True):
    """What another section has, too."""


def test_what_a_field_says_of_itself_is_in_the_schema() -> None:
    assert Example.model_json_schema()["properties"]["last"]["description"] == "How many."


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        Example.model_validate({"lsat": 3})


def test_it_is_frozen() -> None:
    with pytest.raises(ValidationError, match="Instance is frozen"):
        Example().last = 4  # type: ignore[misc]  # this is the mistake


@pytest.mark.parametrize("kind", [Example, Narrower])
@pytest.mark.parametrize("deep", [False, True])
def test_what_follows_from_settings_follows_from_those_of_a_copy(kind: type[Example], deep: bool) -> None:
    three = kind()
    assert three.words == "the last 3"
    copy = three.model_copy(update={"last": 4}, deep=deep)
    assert (copy.last, copy.words) == (4, "the last 4")
    same = three.model_copy(deep=deep)
    assert (same, same.words, same.model_fields_set) == (three, "the last 3", three.model_fields_set)
    assert vars(three) == {"last": 3, "words": "the last 3"}


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
