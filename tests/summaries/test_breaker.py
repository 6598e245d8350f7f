"""The circuit breaker, as a dialogue with a clock that stands until it is turned."""

from __future__ import annotations

import pytest

from proxy.summaries.breaker import FAILURES, LONGEST_PAUSE, PAUSE, Breaker


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock)


def fail(breaker: Breaker, times: int, name: str = "a") -> None:
    for _ in range(times):
        assert breaker.admits(name)
        breaker.failed(name)


def test_it_opens_after_failures_in_a_row(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, FAILURES - 1)
    assert breaker.pause("a") == 0
    fail(breaker, 1)
    assert not breaker.admits("a")
    assert breaker.pause("a") == PAUSE
    clock.now += PAUSE - 1
    assert not breaker.admits("a")
    assert breaker.pause("a") == 1


def test_a_success_between_them_makes_it_count_anew(breaker: Breaker) -> None:
    fail(breaker, FAILURES - 1)
    breaker.succeeded("a")
    fail(breaker, FAILURES - 1)
    assert breaker.admits("a")


def test_names_have_nothing_to_do_with_each_other(breaker: Breaker) -> None:
    fail(breaker, FAILURES)
    assert breaker.admits("b")


def test_after_the_pause_one_is_let_through(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, FAILURES)
    clock.now += PAUSE
    assert breaker.admits("a")
    assert not breaker.admits("a")
    assert breaker.pause("a") > 0
    breaker.succeeded("a")
    assert breaker.admits("a")
    fail(breaker, FAILURES - 1)
    assert breaker.admits("a")


def test_if_that_one_fails_the_pause_is_twice_as_long_up_to_a_limit(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, FAILURES)
    lengths = [breaker.pause("a")]
    for _ in range(8):
        clock.now += breaker.pause("a")
        fail(breaker, 1)
        lengths.append(breaker.pause("a"))
    assert lengths[:4] == [PAUSE, 2 * PAUSE, 4 * PAUSE, 8 * PAUSE]
    assert lengths[-1] == LONGEST_PAUSE


def test_one_that_was_given_up_leaves_the_place_to_another(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, FAILURES)
    clock.now += PAUSE
    assert breaker.admits("a")
    breaker.abandoned("a")
    assert breaker.admits("a")
    breaker.abandoned("never heard of")


def test_who_asks_to_be_left_alone_is_left_alone_at_once(breaker: Breaker, clock: Clock) -> None:
    breaker.failed("a", 7.0)
    assert breaker.pause("a") == 7
    clock.now += 7
    assert breaker.admits("a")
    breaker.failed("a", 1e9)
    assert breaker.pause("a") == LONGEST_PAUSE


def test_failures_of_those_that_went_before_do_not_shorten_a_pause(breaker: Breaker) -> None:
    fail(breaker, FAILURES)
    breaker.failed("a")  # it was let through before
    assert breaker.pause("a") == PAUSE


def test_the_longest_unheard_of_are_forgotten(breaker: Breaker) -> None:
    fail(breaker, FAILURES, "first")
    for number in range(2_000):
        fail(breaker, FAILURES, f"name {number}")
    assert breaker.admits("first")
    assert not breaker.admits("name 1999")
