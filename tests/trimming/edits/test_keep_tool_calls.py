"""`keep_tool_calls`: its table, and the acceptance figures of the system that it comes from."""

from __future__ import annotations

import pytest

from proxy.trimming.edits.keep_tool_calls import KeepToolCalls
from proxy.trimming.model import Change
from proxy.trimming.planner import plan
from proxy.trimming.policy import Policy
from tests.trimming.edits.golden import Case, cases
from tests.trimming.edits.held import outcome
from tests.trimming.notation import KNOWN, log

CITIES = ("Tokyo", "Delhi", "Shanghai", "Cairo", "Mexico", "Beijing", "Mumbai", "London")


@pytest.mark.parametrize("case", cases("keep_tool_calls"), ids=str)
def test_golden(case: Case) -> None:
    case.check()


@pytest.mark.parametrize("answered", [True, False], ids=["with the current call", "before it"])
def test_eight_rounds_of_one_call_each_keep_three_from_history(*, answered: bool) -> None:
    policy = Policy(trigger={"every_request": True}, edits=({"type": "keep_tool_calls", "last": 3},))  # type: ignore[arg-type]  # as in a file
    stored, history, from_history, sent = [], [], [], []
    lines: list[str] = []
    for city in CITIES:
        question, call, result = (
            f"user weather in {city}?",
            "assistant | call_1 weather",
            f"tool call_1 sunny in {city}",
        )
        view = plan(log(*lines, question, *((call, result) if answered else ())), policy, "p", KNOWN).view
        texts = [message.text for message in view if message.role == "tool"]
        history.append(sum(line.startswith("tool") for line in lines))
        from_history.append(sum(city not in text for text in texts))
        sent.append(len(texts))
        lines += [question, call, result, f"assistant it is sunny in {city}"]
        stored.append(sum(line.startswith("tool") for line in lines))
        assert [message.text for message in view if message.role == "user"] == [
            line[5:] for line in lines if line.startswith("user")
        ]
    assert stored == [1, 2, 3, 4, 5, 6, 7, 8]
    assert history == [0, 1, 2, 3, 4, 5, 6, 7]
    assert from_history == [0, 1, 2, 3, 3, 3, 3, 3]
    assert sent == ([1, 2, 3, 4, 4, 4, 4, 4] if answered else from_history)


def test_it_leaves_alone_what_an_earlier_edit_removed() -> None:
    case = Case(
        {
            "edit": {"type": "keep_tool_calls", "last": 0},
            "before": ["user q1", "assistant | a f", "tool a 1", "user q2"],
        }
    )
    draft = case.draft()
    emptied = draft.after(
        [
            Change(position=position, edit="other", reason="", message=None, tokens_before=10, tokens_after=0)
            for position in (1, 2)
        ]
    )
    assert list(KeepToolCalls(last=0).apply(emptied)) == []


def test_its_own_work_is_left_alone() -> None:
    for case in cases("keep_tool_calls"):
        edit, draft = case.edit(), case.draft()
        changes, _ = outcome(edit, draft)
        assert list(edit.apply(draft.after(changes))) == [], str(case)
