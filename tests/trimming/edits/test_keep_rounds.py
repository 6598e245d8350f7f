"""`keep_rounds`: its table, and what holds of it on any history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects import Message
from proxy.trimming.edits.keep_rounds import KeepRounds
from tests.trimming.edits.golden import Case, cases
from tests.trimming.edits.held import check, draft_of, recorded, standing
from tests.trimming.histories import TRIED, valid


@pytest.mark.parametrize("case", cases("keep_rounds"), ids=str)
def test_golden(case: Case) -> None:
    case.check()


def test_of_a_recorded_session_the_newest_rounds_stay_as_they_were() -> None:
    session = recorded("tau-airline-t46-r3")
    after = standing(check(KeepRounds(last=3), draft_of(session)))
    assert sum(message.role == "user" for message in session) == 13
    assert sum(message.role == "user" for message in after) == 3 + 1
    assert after == session[len(session) - len(after) :]


@TRIED
@given(valid(), st.integers(0, 4), st.integers(0, 2))
def test_it_is_safe_on_any_history(log: list[Message], last: int, kept: int) -> None:
    draft = draft_of(log, {"rounds": kept, "spans": 2})
    after = check(KeepRounds(last=last), draft)
    users = [message for message in log if message.role == "user"]
    assert [message for message in standing(after) if message.role == "user"][-last - 1 :] == users[
        -last - 1 :
    ]
