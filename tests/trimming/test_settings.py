"""Triggers, targets, patterns, and the sections of a policy file."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from proxy.trimming import settings
from proxy.trimming.model import ASSUMED, Cut, PlanningContext, Size
from proxy.trimming.settings import (
    Natural,
    Positive,
    Section,
    Share,
    Target,
    Trigger,
    checked,
    compiled,
    group_names,
    is_found,
    named_groups,
)

# ----------------------------------------------------------------------------------------- trigger


def known(window: int | None = None, idle: float | None = None) -> PlanningContext:
    return PlanningContext(count=len, context_window=window, idle=idle)  # type: ignore[arg-type]  # nothing is counted here


def standing(tokens: int = 0, messages: int = 0, tool_calls: int = 0) -> Cut:
    return Cut(position=1, policy="p", version="v", changes=(), tokens=tokens, messages=messages, tool_calls=tool_calls)


@pytest.mark.parametrize(
    ("keys", "below", "above", "words"),
    [
        (
            {"tokens": 100},
            Size(tokens=100, messages=9, tool_calls=9),
            Size(tokens=101, messages=0, tool_calls=0),
            "tokens 101 > 100",
        ),
        (
            {"ratio": 0.5},
            Size(tokens=500, messages=9, tool_calls=9),
            Size(tokens=501, messages=0, tool_calls=0),
            "ratio 0.501 > 0.5 of 1000 tokens",
        ),
        (
            {"messages": 10},
            Size(tokens=99, messages=10, tool_calls=9),
            Size(tokens=0, messages=11, tool_calls=0),
            "messages 11 > 10",
        ),
        (
            {"tool_calls": 2},
            Size(tokens=99, messages=99, tool_calls=2),
            Size(tokens=0, messages=0, tool_calls=3),
            "tool_calls 3 > 2",
        ),
    ],
)
def test_a_key_is_passed_by_what_is_above_it(keys: dict[str, Any], below: Size, above: Size, words: str) -> None:
    trigger = Trigger.model_validate(keys)
    assert trigger.fired(below, known(1000), None, None) == ""
    assert trigger.fired(above, known(1000), None, None) == words
    assert (trigger.holds(below, known(1000)), trigger.holds(above, known(1000))) == (False, True)


def test_every_request_fires_at_every_request() -> None:
    assert (
        Trigger(every_request=True).fired(Size(tokens=0, messages=0, tool_calls=0), known(), standing(), None)
        == "every_request"
    )
    assert Trigger(every_request=True).holds(Size(tokens=0, messages=0, tool_calls=0), known())


def test_any_key_is_enough_to_fire_and_all_are_needed_to_hold() -> None:
    trigger = Trigger(messages=10, tool_calls=2)
    assert trigger.fired(Size(tokens=0, messages=11, tool_calls=0), known(), None, None) == "messages 11 > 10"
    assert (
        trigger.fired(Size(tokens=0, messages=11, tool_calls=3), known(), None, None)
        == "messages 11 > 10; tool_calls 3 > 2"
    )
    assert not trigger.holds(Size(tokens=0, messages=11, tool_calls=0), known())
    assert trigger.holds(Size(tokens=0, messages=11, tool_calls=3), known())


def test_a_ratio_of_an_unknown_window_neither_fires_nor_holds() -> None:
    assert Trigger(ratio=0.5).fired(Size(tokens=10**9, messages=0, tool_calls=0), known(), None, None) == ""
    assert not Trigger(ratio=0.5, messages=1).holds(Size(tokens=10**9, messages=5, tool_calls=0), known())


@pytest.mark.parametrize(
    ("keys", "target", "after", "waits", "fires"),
    [
        pytest.param(
            {"tokens": 100},
            60,
            standing(100),
            Size(tokens=100, messages=0, tool_calls=0),
            Size(tokens=101, messages=0, tool_calls=0),
            id="the move helped",
        ),
        pytest.param(
            {"tokens": 100},
            60,
            standing(150),
            Size(tokens=189, messages=0, tool_calls=0),
            Size(tokens=190, messages=0, tool_calls=0),
            id="trigger minus target",
        ),
        pytest.param(
            {"tokens": 100},
            None,
            standing(150),
            Size(tokens=174, messages=0, tool_calls=0),
            Size(tokens=175, messages=0, tool_calls=0),
            id="no target: a fourth",
        ),
        pytest.param(
            {"tokens": 100},
            100,
            standing(150),
            Size(tokens=150, messages=0, tool_calls=0),
            Size(tokens=151, messages=0, tool_calls=0),
            id="at least one",
        ),
        pytest.param(
            {"tokens": 3},
            None,
            standing(5),
            Size(tokens=5, messages=0, tool_calls=0),
            Size(tokens=6, messages=0, tool_calls=0),
            id="at least one of few",
        ),
        pytest.param(
            {"ratio": 0.1},
            60,
            standing(150),
            Size(tokens=189, messages=0, tool_calls=0),
            Size(tokens=190, messages=0, tool_calls=0),
            id="ratio",
        ),
        pytest.param(
            {"messages": 8},
            60,
            standing(0, 9),
            Size(tokens=0, messages=10, tool_calls=0),
            Size(tokens=0, messages=11, tool_calls=0),
            id="messages: a fourth",
        ),
        pytest.param(
            {"tool_calls": 2},
            60,
            standing(0, 0, 3),
            Size(tokens=0, messages=0, tool_calls=3),
            Size(tokens=0, messages=0, tool_calls=4),
            id="calls: at least one",
        ),
    ],
)
def test_after_a_move_that_left_it_above_it_waits(
    keys: dict[str, Any], target: int | None, after: Cut, waits: Size, fires: Size
) -> None:
    trigger = Trigger.model_validate(keys)
    assert trigger.fired(waits, known(1000), after, target) == ""
    assert trigger.fired(fires, known(1000), after, target) != ""


def test_time_fires_when_the_session_was_idle_for_longer() -> None:
    minute = Trigger(idle_seconds=60)
    assert minute.fired(Size(tokens=0, messages=0, tool_calls=0), known(), None, None) == ""
    assert minute.fired(Size(tokens=0, messages=0, tool_calls=0), known(idle=60), None, None) == ""
    assert minute.fired(Size(tokens=0, messages=0, tool_calls=0), known(idle=60.6), None, None) == "idle for 61 s"
    assert not minute.holds(Size(tokens=0, messages=0, tool_calls=0), known(idle=60))
    assert minute.holds(Size(tokens=0, messages=0, tool_calls=0), known(idle=61))
    auto = Trigger(idle_seconds="auto")
    assert auto.fired(Size(tokens=0, messages=0, tool_calls=0), known(idle=ASSUMED.lifetime), None, None) == ""
    assert auto.fired(Size(tokens=0, messages=0, tool_calls=0), known(idle=301), None, None) == "idle for 301 s"


def test_cost_is_judged_elsewhere() -> None:
    auto = Trigger(cost="auto")
    assert auto.fired(Size(tokens=10**9, messages=10**9, tool_calls=10**9), known(), None, None) == ""
    assert auto.holds(Size(tokens=0, messages=0, tool_calls=0), known())


@pytest.mark.parametrize(("keys", "only"), [({"ratio": 0.5}, True), ({"ratio": 0.5, "cost": "auto"}, False)])
def test_whether_only_a_ratio_fires(keys: dict[str, Any], only: bool) -> None:
    assert Trigger.model_validate(keys).only_ratio == only


@pytest.mark.parametrize("keys", [{}, {"every_request": False}])
def test_a_trigger_that_never_fires_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(
        ValidationError, match="at least one of tokens, ratio, messages, tool_calls, idle_seconds, cost, every_request"
    ):
        Trigger.model_validate(keys)


@pytest.mark.parametrize("keys", [{}, {"tokens": 5, "ratio": 0.5}])
def test_a_target_has_one_unit(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="set one of tokens, ratio"):
        Target.model_validate(keys)


def test_a_target_in_tokens() -> None:
    assert Target(tokens=5).within(None) == 5
    assert Target(ratio=0.6).within(128000) == 76800
    assert Target(ratio=0.6).within(None) is None


def test_what_part_of_each_threshold_is_reached() -> None:
    trigger = Trigger.model_validate({"tokens": 100, "ratio": 0.5, "messages": 8, "tool_calls": 2})
    assert list(trigger.shares(Size(tokens=150, messages=2, tool_calls=1), known(1000))) == [1.5, 0.3, 0.25, 0.5]
    assert (
        list(Trigger(every_request=True, cost="auto").shares(Size(tokens=150, messages=2, tool_calls=1), known(1000)))
        == []
    )


# ----------------------------------------------------------------------------------------- section


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


# ------------------------------------------------------------------------------------------- regex


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


def test_patterns_that_somebody_looks_for_put_none_of_a_policy_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_found("a pin", "this is a pin")
    for number in range(300):
        assert compiled(f"typed {number}").search("typed 7") is None or number == 7
    monkeypatch.setattr(settings, "_RE2", None)  # to compile it anew would fail
    assert is_found("a pin", "this is a pin")
