"""What a plan tells of its changes."""

from __future__ import annotations

from proxy.trimming.plan import Change, Cut, Plan


def planned(arrivals: tuple[Change, ...], cut: Cut | None) -> Plan:
    return Plan(
        "p", "v", cut, moved=False, fired="", arrivals=arrivals, tokens_before=0, tokens_sent=0, view=()
    )


def test_changes_of_arrival_come_first_and_edits_are_named_once() -> None:
    short = Change(3, "truncate_tool_output", "", None, 9, 5)
    gone, other = Change(3, "keep_tool_calls", "", None, 5, 0), Change(4, "keep_tool_calls", "", None, 5, 0)
    plan = planned((short,), Cut(5, "p", "v", (gone, other), 0, 0, 0))
    assert plan.changes == (short, gone, other)
    assert plan.edits == ("truncate_tool_output", "keep_tool_calls")


def test_without_a_cut_there_is_what_arrival_changed() -> None:
    assert planned((), None).changes == ()
    assert planned((), None).edits == ()
