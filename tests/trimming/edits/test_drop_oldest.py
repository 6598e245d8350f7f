"""`drop_oldest`: its table, and that it stops as soon as it may."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from proxy.dialects import Message
from proxy.trimming.edits.drop_oldest import DropOldest
from tests.trimming.edits.golden import Case, cases
from tests.trimming.histories import TRIED, valid
from tests.trimming.notation import lines


@pytest.mark.parametrize("case", cases("drop_oldest"), ids=str)
def test_golden(case: Case) -> None:
    case.check()


def test_without_a_target_it_drops_nothing() -> None:
    draft = Case({"before": ["user q1", "assistant a1", "user q2"]}).draft()
    assert list(DropOldest().apply(draft)) == []
    assert list(DropOldest().apply(replace(draft, target=1)))


def test_an_empty_log_has_nothing_to_drop() -> None:
    assert list(DropOldest().apply(Case({"before": [], "fixed_tokens": 9, "target": 1}).draft())) == []


@TRIED
@given(valid(), st.integers(1, 300))
def test_it_drops_no_more_than_it_must_and_its_own_work_is_left_alone(
    log: list[Message], target: int
) -> None:
    draft = Case({"before": lines(log), "target": target}).draft()
    changes = list(DropOldest().apply(draft))
    after = draft.after(changes)
    assert after.within_target or not [
        position for position, _ in after.remaining(0, len(after.messages)) if position not in draft.protected
    ]
    if changes:
        newest = changes[-1].position
        past = [turn for turn in draft.rounds[:-1] if turn.start <= newest < turn.stop]
        start = past[0].start if past else next(span.start for span in draft.spans if newest < span.stop)
        assert draft.after([change for change in changes if change.position < start]).total > target
    assert list(DropOldest().apply(after)) == []
