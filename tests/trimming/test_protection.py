"""What is never trimmed."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.conversation import rounds, spans
from proxy.trimming.history import is_pinned
from proxy.trimming.policy import Policy
from proxy.trimming.trim import protected
from tests.trimming.notation import messages

LOG = messages(
    [
        "assistant welcome",  # 0, round 0
        "user first",  # 1, round 1
        "assistant | a search",  # 2
        "tool a never forget",  # 3
        "assistant done",  # 4
        "user second",  # 5, round 2
        "assistant | a search, b fetch",  # 6
        "tool a one",  # 7
        "tool b two",  # 8
        "assistant more | c search",  # 9
        "tool c three",  # 10
    ]
)
OPEN = [*LOG, *messages(["assistant | d search, e search", "tool d four"])]
NOTHING = {"rounds": 0}


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        pytest.param({"rounds": 0, "spans": 4}, {5}, id="the latest user message, whatever else"),
        pytest.param({"rounds": 1, "spans": 0}, {5}, id="no span of a round"),
        pytest.param({"rounds": 1, "spans": 1}, {5, 9, 10}, id="the newest span of the current round"),
        pytest.param({"rounds": 1, "spans": 2}, {5, 6, 7, 8, 9, 10}, id="whole spans"),
        pytest.param({"rounds": 1, "spans": 9}, {5, 6, 7, 8, 9, 10}, id="never beyond the rounds"),
        pytest.param({"rounds": 2, "spans": 1}, {4, 5, 9, 10}, id="the newest of each round"),
        pytest.param({"rounds": 3, "spans": 1}, {0, 4, 5, 9, 10}, id="the preamble is a round"),
        pytest.param({"rounds": 9, "spans": 9}, set(range(11)), id="all of it"),
        pytest.param({"rounds": 0, "first_user": True}, {1, 5}, id="the first user message"),
    ],
)
def test_keep(keep: dict[str, Any], expected: set[int]) -> None:
    policy = Policy.model_validate({"keep": keep})
    assert protected(LOG, spans(LOG), rounds(LOG), policy) == expected


@pytest.mark.parametrize(
    ("pin", "expected"),
    [
        pytest.param({"regex": "never"}, {2, 3, 5}, id="a pin protects the whole span"),
        pytest.param({"regex": "never", "roles": ["user"]}, {5}, id="only of its roles"),
        pytest.param({"regex": "^done$"}, {4, 5}, id="one message"),
    ],
)
def test_pins(pin: dict[str, Any], expected: set[int]) -> None:
    policy = Policy.model_validate({"keep": NOTHING, "pin": [pin]})
    assert protected(LOG, spans(LOG), rounds(LOG), policy) == expected


def test_calls_that_wait_are_protected_with_the_results_that_came() -> None:
    policy = Policy.model_validate({"keep": NOTHING})
    assert protected(OPEN, spans(OPEN), rounds(OPEN), policy) == {5, 11, 12}


def test_an_empty_log_and_one_without_a_question() -> None:
    policy = Policy.model_validate({"keep": {"first_user": True, "spans": 1}, "pin": [{"regex": "x"}]})
    assert protected([], [], [], policy) == frozenset()
    alone = LOG[:1]
    assert protected(alone, spans(alone), rounds(alone), policy) == {0}


def test_without_a_question_the_last_span_stays_so_that_something_is_sent() -> None:
    policy = Policy.model_validate({"keep": NOTHING})
    log = messages(["assistant hello", "assistant | a f", "tool a 1"])
    assert protected(log, spans(log), rounds(log), policy) == {1, 2}


def test_what_comes_later_pins_nothing_on_arrival() -> None:
    policy = Policy.model_validate({"pin": [{"regex": "two"}]})
    assert [is_pinned(LOG, position, policy) for position in (7, 8, 10)] == [False, True, False]
    by_its_block = Policy.model_validate({"pin": [{"regex": "more", "roles": ["assistant"]}]})
    assert is_pinned(LOG, 10, by_its_block)
    assert not is_pinned(LOG, 8, Policy())
