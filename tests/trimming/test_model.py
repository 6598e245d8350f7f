"""The records of a plan, and the view that is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.dialects.chat.protocol import NO_RESULT
from proxy.trimming.model import Change, Cut, Gap, Hidden, Plan, PlanningContext, Summary, SummaryRole
from proxy.trimming.planner import View, merged, view_of
from tests.trimming.notation import DIALECT, count, entries, line, lines, message, messages

# -------------------------------------------------------------------------------------------- plan


def planned(arrivals: tuple[Change, ...], cut: Cut | None, *, trimmed: bool = False, **more: Any) -> Plan:
    return Plan(
        policy="p",
        version="v",
        cut=cut,
        trimmed=trimmed,
        fired="",
        arrivals=arrivals,
        tokens_before=0,
        tokens_sent=0,
        view=(),
        **more,
    )


def test_changes_of_arrival_come_first_and_edits_are_named_once() -> None:
    short = Change(position=3, edit="truncate_tool_output", reason="", message=None, tokens_before=9, tokens_after=5)
    gone, other = (
        Change(position=3, edit="keep_tool_calls", reason="", message=None, tokens_before=5, tokens_after=0),
        Change(position=4, edit="keep_tool_calls", reason="", message=None, tokens_before=5, tokens_after=0),
    )
    plan = planned(
        (short,), Cut(position=5, policy="p", version="v", changes=(gone, other), tokens=0, messages=0, tool_calls=0)
    )
    assert plan.changes == (short, gone, other)
    assert plan.edits == ("truncate_tool_output", "keep_tool_calls")


def test_a_move_tells_what_it_did_itself_and_names_what_was_dropped_before() -> None:
    stub, gone = (
        Change(position=7, edit="truncate_tool_output", reason="", message=None, tokens_before=9, tokens_after=5),
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
    plan = planned((), cut, trimmed=True, made=(stub, gone), earlier=(gap,))
    assert plan.changes == (stub, gone)
    assert plan.edits == ("keep_tool_calls", "truncate_tool_output", "drop_oldest")
    assert gap.messages == 2


def test_of_edits_at_one_place_the_one_that_is_met_there_first_is_named_first() -> None:
    gaps = [
        Gap(start=start, stop=start + 1, edit=edit, reason="", tokens=9, tool_calls=0)
        for start, edit in ((4, "drop_oldest"), (5, "summarize"))
    ]
    changes = [
        Change(position=1, edit=edit, reason="", message=None, tokens_before=9, tokens_after=0)
        for edit in ("summarize", "drop_oldest")
    ]
    cut = Cut(
        position=9,
        policy="p",
        version="v",
        changes=tuple(changes),
        tokens=0,
        messages=0,
        tool_calls=0,
        gaps=tuple(gaps),
    )
    assert planned((), cut, earlier=tuple(gaps)).edits == ("summarize", "drop_oldest")


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
        Change(position=2, edit="clear_tool_results", reason="", message=None, tokens_before=15, tokens_after=0),
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
    plan = planned((), cut, trimmed=True, made=(gone, later, new))
    assert plan.changes == (gone, old, later, new)
    assert plan.edits == ("drop_oldest", "truncate_tool_output", "clear_tool_results")


@pytest.mark.parametrize(("role", "sent"), [("user", "user So."), ("system", "system So."), ("merge", "system So.")])
def test_a_summary_is_a_message(role: SummaryRole, sent: str) -> None:
    assert (
        line(
            Summary(
                text="So.", role=role, until=2, tokens=30, kind="statistics", covered_messages=2, covered_tokens=25
            ).message(DIALECT)
        )
        == sent
    )


# -------------------------------------------------------------------------------------------- view

KNOWN = PlanningContext(count=count, fixed_tokens=100)
SOUND = messages(("user one", "assistant | a f", "tool a 1", "user two"))


def tokens(given: list[Message]) -> list[int]:
    return [count(each) for each in given]


def summary(role: Any) -> Summary:
    return Summary(
        text="So far.", role=role, until=3, tokens=17, kind="statistics", covered_messages=3, covered_tokens=50
    )


def shown(left: Sequence[Message | None], given: Sequence[int], context: PlanningContext, **more: Any) -> View:
    return view_of(entries(SOUND), left, given, context, **more)


def test_what_stands_is_sent_with_its_tokens() -> None:
    view = shown([SOUND[0], None, None, SOUND[3]], [13, 0, 0, 13], KNOWN, repairing=True)
    assert view == View(messages=(SOUND[0], SOUND[3]), tokens=126, notes=())
    assert view.size.tool_calls == 0
    assert shown(SOUND, tokens(SOUND), KNOWN, repairing=False).size.tool_calls == 1
    assert shown([], [], KNOWN, repairing=True) == View(messages=(), tokens=100)


@pytest.mark.parametrize("repairing", [True, False])
def test_a_summary_is_sent_before_it_or_added_to_the_instructions(repairing: bool) -> None:
    def view(role: str) -> View:
        return shown(SOUND, tokens(SOUND), KNOWN, repairing=repairing, summary=summary(role))

    assert lines(view("user").messages) == ["user So far.", *lines(SOUND)]
    assert lines(view("system").messages) == ["system So far.", *lines(SOUND)]
    assert view("merge").messages == tuple(SOUND)
    assert {view(role).tokens for role in ("user", "system", "merge")} == {100 + 17 + 13 + 10 + 11 + 13}


def test_what_breaks_the_rules_is_repaired_where_that_is_asked_and_counted_anew() -> None:
    broken = [SOUND[1], SOUND[0], SOUND[2], SOUND[3]]
    as_it_is = shown(broken, tokens(broken), KNOWN, repairing=False)
    assert (as_it_is.messages, as_it_is.tokens, as_it_is.notes) == (tuple(broken), 147, ())
    view = shown([None, *broken], [0, *tokens(broken)], KNOWN, repairing=True, summary=summary("user"))
    assert lines(view.messages) == ["user So far.", "assistant | a f", f"tool a {NO_RESULT}", "user one", "user two"]
    assert view.tokens == 100 + 17 + 10 + (10 + len(NO_RESULT)) + 13 + 13
    assert len(view.notes) == 2


def test_tokens_that_were_given_are_kept_where_a_message_stays() -> None:
    # What the counter says now may differ from what was stored: only what is put in is counted here.
    view = shown(SOUND[:2], [1000, 2000], KNOWN, repairing=True)
    assert view.tokens == 100 + 3000 + 10 + len(NO_RESULT)


def test_a_summary_ends_the_last_instruction() -> None:
    first, last = message("system be good"), message("developer be short")
    assert lines(merged((first, last), summary("merge"), DIALECT)) == [
        "system be good",
        "developer be short\n\nSo far.",
    ]
    assert lines(merged((), summary("merge"), DIALECT)) == ["system So far."]
    empty = ChatMessage.of({"role": "system", "content": None})
    assert lines(merged((empty,), summary("merge"), DIALECT)) == ["system So far."]


def test_instructions_in_parts_get_another_part() -> None:
    part = {"type": "text", "text": "be good", "cache_control": {"type": "ephemeral"}}
    given = ChatMessage.of({"role": "system", "content": [part], "name": "boss"})
    (longer,) = merged((given,), summary("merge"), DIALECT)
    assert longer.data == {"role": "system", "content": [part, {"type": "text", "text": "So far."}], "name": "boss"}
    assert given.data["content"] == [part]


OWN = tuple(messages(("assistant | x recall", "tool x found")))


def test_what_the_client_was_not_shown_is_sent_where_it_belongs() -> None:
    both = message("assistant | a f, y recall")
    mixed = Hidden(before=OWN, reply=both, after=(message("tool y also"),), tokens=50)
    given = [13, 60, 11, 13]
    view = shown(SOUND, given, KNOWN, repairing=True, hidden={1: mixed})
    assert lines(view.messages) == [
        "user one",
        "assistant | x recall",
        "tool x found",
        "assistant | a f, y recall",
        "tool y also",
        "tool a 1",
        "user two",
    ]
    assert (view.tokens, view.notes, view.size.tool_calls) == (100 + sum(given), (), 3)


def test_beside_what_is_repaired_it_stays_and_with_it_it_goes() -> None:
    before = Hidden(before=OWN, reply=None, after=(), tokens=24)
    lost = [None, *SOUND[:2], SOUND[3]]
    view = shown(lost, [0, 13, 34, 13], KNOWN, repairing=True, hidden={2: before})
    assert lines(view.messages)[1:5] == [
        "assistant | x recall",
        "tool x found",
        "assistant | a f",
        f"tool a {NO_RESULT}",
    ]
    assert view.tokens == 100 + 13 + 34 + 10 + len(NO_RESULT) + 13
    nameless = message("assistant so | f")
    bare = nameless.replacing("tool_calls", [{"type": "function"}])
    view = shown([SOUND[0], bare], [13, 36], KNOWN, repairing=True, hidden={1: before})
    assert lines(view.messages) == ["user one", "assistant so"]
    assert view.tokens == 100 + 13 + 12
