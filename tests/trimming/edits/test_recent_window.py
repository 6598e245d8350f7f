"""`recent_window`: its table, its settings, and what holds of it on any history."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.trimming.edits.recent_window import RecentWindow
from proxy.trimming.model import PlanningContext
from proxy.trimming.planner import plan
from proxy.trimming.policy import Policy
from tests.trimming.edits.golden import Case, cases
from tests.trimming.edits.held import check, draft_of, recorded
from tests.trimming.histories import TRIED, valid
from tests.trimming.notation import count, entries


@pytest.mark.parametrize("case", cases("recent_window"), ids=str)
def test_golden(case: Case) -> None:
    case.check()


def test_a_budget_is_one_or_the_other() -> None:
    assert (RecentWindow().tokens, RecentWindow().ratio) == (None, 0.65)
    assert (RecentWindow(tokens=5).tokens, RecentWindow(tokens=5).ratio) == (5, None)
    assert RecentWindow(ratio=0.5).ratio == 0.5
    for wrong in ({"tokens": 5, "ratio": 0.5}, {"tokens": None, "ratio": None}):
        with pytest.raises(ValidationError, match="set one of tokens, ratio"):
            RecentWindow.model_validate(wrong)
    with pytest.raises(ValidationError):
        RecentWindow.model_validate("recent")


def test_only_a_ratio_needs_a_target() -> None:
    def policy(**edit: Any) -> Policy:
        return Policy.model_validate(
            {"trigger": {"every_request": True}, "edits": [{"type": "recent_window", **edit}]}
        )

    assert policy(tokens=5).edits
    with pytest.raises(ValidationError, match="recent_window needs a target"):
        policy()


def test_of_a_window_of_128000_tokens_the_recent_conversation_gets_its_part() -> None:
    """0.6 of the window less the system prompt, and of that 65 %."""
    policy = Policy.model_validate(
        {
            "trigger": {"every_request": True},
            "target": {"ratio": 0.6},
            "keep": {"rounds": 0},
            "edits": [{"type": "recent_window"}],
        }
    )
    known = PlanningContext(count=count, fixed_tokens=2_000, context_window=128_000)
    budget = int(0.65 * (128_000 * 0.6 - 2_000))
    assert budget == 48_620
    log = entries([ChatMessage.of({"role": "user", "content": "x" * 990}) for _ in range(80)])
    assert sum(entry.tokens for entry in log) + 2_000 > 128_000 * 0.6
    made = plan(log, policy, "p", known)
    assert made.tokens_sent - 2_000 == budget // 1_000 * 1_000
    assert made.view == tuple(entry.message for entry in log[-(budget // 1_000) :])


def test_its_own_target_takes_the_place_of_the_policys() -> None:
    log = entries([ChatMessage.of({"role": "user", "content": "x" * 990}) for _ in range(80)])
    policy = Policy.model_validate(
        {
            "trigger": {"messages": 10},
            "keep": {"rounds": 0},
            "edits": [{"type": "recent_window", "ratio": 0.5, "target": {"ratio": 0.25}}],
        }
    )
    made = plan(log, policy, "p", PlanningContext(count=count, fixed_tokens=2_000, context_window=80_000))
    assert made.tokens_sent == 2_000 + 9_000
    assert made.target == 20_000
    assert (
        plan(log, policy, "p", PlanningContext(count=count)).tokens_sent == 80_000
    )  # of a window that nobody knows


def test_of_a_recorded_session_the_newest_that_fits_stays() -> None:
    draft = draft_of(recorded("deerflow-thread-4f3e55ee"))
    after = check(RecentWindow(tokens=20_000), draft)
    stopped = check(RecentWindow(tokens=20_000, on_overflow="stop"), draft)
    assert draft.total > 38_000
    assert 10_000 < stopped.total < after.total <= 20_000


@TRIED
@given(valid(), st.integers(1, 400), st.sampled_from(["skip", "stop"]), st.integers(0, 2))
def test_it_is_safe_on_any_history(
    log: list[Message], tokens: int, on_overflow: Literal["skip", "stop"], kept: int
) -> None:
    draft = draft_of(log, {"rounds": kept, "spans": 2})
    after = check(RecentWindow(tokens=tokens, on_overflow=on_overflow), draft)
    protected = sum(draft.tokens[position] for position in draft.protected)
    assert after.total <= max(tokens, protected)
    gone = [span for span in draft.spans if after.messages[span.start] is None]
    if gone and on_overflow == "stop":
        assert not [place for place, _ in after.remaining(0, gone[-1].start) if place not in draft.protected]
