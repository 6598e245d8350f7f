"""What a plan tells of its changes."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.trimming.model import Change, Cut, Gap, Plan, Summary, SummaryRole
from tests.trimming.notation import DIALECT, line, message


def planned(arrivals: tuple[Change, ...], cut: Cut | None, *, moved: bool = False, **more: Any) -> Plan:
    return Plan(
        policy="p",
        version="v",
        cut=cut,
        moved=moved,
        fired="",
        arrivals=arrivals,
        tokens_before=0,
        tokens_sent=0,
        view=(),
        **more,
    )


def test_changes_of_arrival_come_first_and_edits_are_named_once() -> None:
    short = Change(
        position=3, edit="truncate_tool_output", reason="", message=None, tokens_before=9, tokens_after=5
    )
    gone, other = (
        Change(position=3, edit="keep_tool_calls", reason="", message=None, tokens_before=5, tokens_after=0),
        Change(position=4, edit="keep_tool_calls", reason="", message=None, tokens_before=5, tokens_after=0),
    )
    plan = planned(
        (short,),
        Cut(position=5, policy="p", version="v", changes=(gone, other), tokens=0, messages=0, tool_calls=0),
    )
    assert plan.changes == (short, gone, other)
    assert plan.edits == ("truncate_tool_output", "keep_tool_calls")


def test_a_move_tells_what_it_did_itself_and_names_what_was_dropped_before() -> None:
    stub, gone = (
        Change(
            position=7, edit="truncate_tool_output", reason="", message=None, tokens_before=9, tokens_after=5
        ),
        Change(position=7, edit="drop_oldest", reason="", message=None, tokens_before=5, tokens_after=0),
    )
    gap = Gap(start=3, stop=5, edit="keep_tool_calls", reason="", tokens=20, tool_calls=1)
    cut = Cut(
        position=9,
        policy="p",
        version="v",
        changes=(),
        tokens=0,
        messages=0,
        tool_calls=0,
        gaps=(gap, Gap(start=7, stop=8, edit="drop_oldest", reason="", tokens=9, tool_calls=1)),
    )
    plan = planned((), cut, moved=True, made=(stub, gone), earlier=(gap,))
    assert plan.changes == (stub, gone)
    assert plan.edits == ("keep_tool_calls", "truncate_tool_output", "drop_oldest")
    assert gap.messages == 2


def test_without_a_cut_there_is_what_arrival_changed() -> None:
    assert planned((), None).changes == ()
    assert planned((), None).edits == ()


def test_a_move_tells_what_earlier_ones_did_to_messages_that_are_still_sent() -> None:
    old = Change(
        position=2,
        edit="truncate_tool_output",
        reason="",
        message=message("tool a short"),
        tokens_before=90,
        tokens_after=15,
    )
    later, gone = (
        Change(
            position=2, edit="clear_tool_results", reason="", message=None, tokens_before=15, tokens_after=0
        ),
        Change(position=1, edit="drop_oldest", reason="", message=None, tokens_before=9, tokens_after=0),
    )
    new = Change(
        position=4,
        edit="truncate_tool_output",
        reason="",
        message=message("tool a short"),
        tokens_before=90,
        tokens_after=15,
    )
    cut = Cut(
        position=6,
        policy="p",
        version="v",
        changes=(old, later, new),
        tokens=0,
        messages=0,
        tool_calls=0,
        gaps=(Gap(start=1, stop=2, edit="drop_oldest", reason="", tokens=9, tool_calls=0),),
    )
    plan = planned((), cut, moved=True, made=(gone, later, new))
    assert plan.changes == (gone, old, later, new)
    assert plan.edits == ("drop_oldest", "truncate_tool_output", "clear_tool_results")


@pytest.mark.parametrize(
    ("role", "sent"), [("user", "user So."), ("system", "system So."), ("merge", "system So.")]
)
def test_a_summary_is_a_message(role: SummaryRole, sent: str) -> None:
    assert (
        line(
            Summary(
                text="So.",
                role=role,
                until=2,
                tokens=30,
                kind="statistics",
                covered_messages=2,
                covered_tokens=25,
            ).message(DIALECT)
        )
        == sent
    )
