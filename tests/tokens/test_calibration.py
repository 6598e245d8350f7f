from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.tokens.counter import Calibration


def scale_of(calibration: Calibration, model: str) -> float:
    return calibration.snapshot().get(model, 1.0)


def test_the_scale_of_an_unknown_model_is_1() -> None:
    calibration = Calibration()
    assert scale_of(calibration, "m") == 1.0
    assert calibration.snapshot() == {}


def test_the_first_observation_counts_wholly_and_later_ones_a_fifth() -> None:
    calibration = Calibration()
    calibration.learn("m", 1000, 1500)
    assert scale_of(calibration, "m") == 1.5
    calibration.learn("m", 1000, 1000)
    assert scale_of(calibration, "m") == 1.4
    calibration.learn("m", 2000, 2000)
    assert scale_of(calibration, "m") == 1.32


def test_each_model_has_its_own_scale() -> None:
    calibration = Calibration()
    calibration.learn("b", 1000, 1200)
    calibration.learn("a", 1000, 900)
    assert scale_of(calibration, "c") == 1.0
    assert list(calibration.snapshot().items()) == [("a", 0.9), ("b", 1.2)]


@pytest.mark.parametrize(
    ("counted", "reported"),
    [(499, 600), (600, 499), (1000, 2001), (1001, 500), (0, 0), (0, 5000), (5000, 0), (-1000, -1000)],
)
def test_small_and_implausible_observations_are_ignored(counted: int, reported: int) -> None:
    calibration = Calibration()
    calibration.learn("m", counted, reported)
    assert calibration.snapshot() == {}


@pytest.mark.parametrize(("counted", "reported", "scale"), [(500, 500, 1.0), (500, 1000, 2.0), (1000, 500, 0.5)])
def test_ratios_at_the_limits_are_plausible(counted: int, reported: int, scale: float) -> None:
    calibration = Calibration()
    calibration.learn("m", counted, reported)
    assert scale_of(calibration, "m") == scale


def test_small_differences_do_not_change_the_scale() -> None:
    calibration = Calibration()
    calibration.learn("m", 10_000, 11_234)
    scales = {scale_of(calibration, "m")}
    for reported in (11_236, 11_233, 11_235, 11_231):
        calibration.learn("m", 10_000, reported)
        scales.add(scale_of(calibration, "m"))
    assert scales == {1.12}


def test_the_least_recently_used_model_is_forgotten_first() -> None:
    calibration = Calibration(models=2)
    calibration.learn("a", 1000, 1100)
    calibration.learn("b", 1000, 1200)
    calibration.learn("a", 1000, 1100)
    calibration.learn("c", 1000, 1300)
    assert calibration.snapshot() == {"a": 1.1, "c": 1.3}
    calibration.learn("a", 1000, 1100)
    calibration.learn("d", 1000, 1400)
    assert calibration.snapshot() == {"a": 1.1, "d": 1.4}


@given(st.lists(st.tuples(st.integers(-10, 10**6), st.integers(-10, 10**6))))
def test_whatever_is_reported_the_scale_is_plausible(observations: list[tuple[int, int]]) -> None:
    calibration = Calibration()
    for counted, reported in observations:
        calibration.learn("m", counted, reported)
        assert 0.5 <= scale_of(calibration, "m") <= 2.0


def test_threads_may_share_a_calibration() -> None:
    calibration = Calibration(models=20)

    def work(seed: int) -> None:
        for number in range(2000):
            model = f"m{(seed * number) % 31}"
            calibration.learn(model, 1000, 1250)
            assert scale_of(calibration, model) in {1.0, 1.25}

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, (3, 5, 7, 11)))
    assert set(calibration.snapshot().values()) == {1.25}
    assert len(calibration.snapshot()) == 20
