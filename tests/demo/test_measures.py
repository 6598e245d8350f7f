from dataclasses import replace

import pytest

from proxy.demo.measures import Outcome
from tests.demo.measured import FIRST, SECOND, outcome, run


def test_a_run_adds_its_steps_up() -> None:
    measured = run(FIRST, SECOND)
    assert (measured.tokens, measured.forwarded, measured.cached, measured.moves) == (4000, 3000, 1500, 1)
    assert measured.saved_percent == 25.0


def test_everything_holds() -> None:
    assert outcome().holds
    assert all(check.holds for check in outcome().checks)


@pytest.mark.parametrize(
    ("wrong", "claim"),
    [
        (outcome(refused=1), "requests refused by the upstream: 1 of 5"),
        (outcome(whole=run(FIRST, replies_equal=False)), "as it was recorded"),
        (outcome(trimmed=run(FIRST, SECOND, stored_equal=False)), "all 4 messages"),
        (outcome(trimmed=run(FIRST, replace(SECOND, moved=False))), "less was sent on"),
        (outcome(trimmed=run(FIRST, replace(SECOND, forwarded_tokens=3000))), "less was sent on"),
        (outcome(trimmed=run(FIRST, SECOND, extended=False)), "began with all of the last one"),
        (outcome(whole=run(FIRST, bytes_equal=False)), "byte for byte"),
    ],
    ids=["refused", "reply", "store", "no move", "nothing saved", "cache", "bytes"],
)
def test_each_thing_that_does_not_hold_is_said(wrong: Outcome, claim: str) -> None:
    failed = [check.claim for check in wrong.checks if not check.holds]
    assert len(failed) == 1
    assert claim in failed[0]
    assert not wrong.holds
