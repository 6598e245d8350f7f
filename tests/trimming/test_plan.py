"""What a plan tells of its changes."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.trimming.plan import Change, Cut, Gap, Plan, Summary, SummaryRole
from tests.trimming.notation import line, message


def planned(arrivals: tuple[Change, ...], cut: Cut | None, *, moved: bool = False, **more: Any) -> Plan:
    return Plan(
        "p",
        "v",
        cut,
        moved=moved,
        fired="",
        arrivals=arrivals,
        tokens_before=0,
        tokens_sent=0,
        view=(),
        **more,
    )


def test_changes_of_arrival_come_first_and_edits_are_named_once() -> None:
    short = Change(3, "truncate_tool_output", "", None, 9, 5)
    gone, other = Change(3, "keep_tool_calls", "", None, 5, 0), Change(4, "keep_tool_calls", "", None, 5, 0)
    plan = planned((short,), Cut(5, "p", "v", (gone, other), 0, 0, 0))
    assert plan.changes == (short, gone, other)
    assert plan.edits == ("truncate_tool_output", "keep_tool_calls")


def test_a_move_tells_what_it_did_itself_and_names_what_was_dropped_before() -> None:
    stub, gone = Change(7, "truncate_tool_output", "", None, 9, 5), Change(7, "drop_oldest", "", None, 5, 0)
    gap = Gap(3, 5, "keep_tool_calls", "", 20, 1)
    cut = Cut(9, "p", "v", (), 0, 0, 0, (gap, Gap(7, 8, "drop_oldest", "", 9, 1)))
    plan = planned((), cut, moved=True, made=(stub, gone), earlier=(gap,))
    assert plan.changes == (stub, gone)
    assert plan.edits == ("keep_tool_calls", "truncate_tool_output", "drop_oldest")
    assert gap.messages == 2


def test_without_a_cut_there_is_what_arrival_changed() -> None:
    assert planned((), None).changes == ()
    assert planned((), None).edits == ()


def test_a_move_tells_what_earlier_ones_did_to_messages_that_are_still_sent() -> None:
    old = Change(2, "truncate_tool_output", "", message("tool a short"), 90, 15)
    later, gone = Change(2, "clear_tool_results", "", None, 15, 0), Change(1, "drop_oldest", "", None, 9, 0)
    new = Change(4, "truncate_tool_output", "", message("tool a short"), 90, 15)
    cut = Cut(6, "p", "v", (old, later, new), 0, 0, 0, (Gap(1, 2, "drop_oldest", "", 9, 0),))
    plan = planned((), cut, moved=True, made=(gone, later, new))
    assert plan.changes == (gone, old, later, new)
    assert plan.edits == ("drop_oldest", "truncate_tool_output", "clear_tool_results")


@pytest.mark.parametrize(
    ("role", "sent"), [("user", "user So."), ("system", "system So."), ("merge", "system So.")]
)
def test_a_summary_is_a_message(role: SummaryRole, sent: str) -> None:
    assert line(Summary("So.", role, 2, 30, "statistics", 2, 25).message) == sent
