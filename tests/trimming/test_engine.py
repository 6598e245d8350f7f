"""From a log and a policy to what is sent: when the cut moves, and what is sent between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from proxy.trimming.engine import bypass, plan
from proxy.trimming.plan import Change, Cut, Entry, Gap, Known, Plan
from proxy.trimming.policy import Policy
from proxy.trimming.protocol import NO_RESULT
from proxy.trimming.trigger import UNKNOWN_WINDOW
from tests.trimming.notation import KNOWN, count, lines, log

DROP = {"type": "drop_oldest"}
SHORT = {"type": "truncate_tool_output", "max_bytes": 100}
TEN = "0123456789"  # with the price of a message, twenty tokens


def policy(**keys: Any) -> Policy:
    return Policy.model_validate({"keep": {"rounds": 0}, **keys})


def turns(first: int, last: int) -> list[str]:
    """Return lines of rounds of forty tokens."""
    return [line for n in range(first, last + 1) for line in (f"user {n:010}", f"assistant {n:010}")]


def recorded(entries: Sequence[Entry], earlier: Plan) -> list[Entry]:
    """Return a log whose beginning was sent with an earlier plan."""
    decided = earlier.decided
    return [replace(entry, arrival=changes) for entry, changes in zip(entries, decided, strict=False)] + list(
        entries[len(decided) :]
    )


HUNDRED = policy(trigger={"tokens": 100}, target={"tokens": 60}, edits=[DROP])


def test_below_the_trigger_everything_is_sent_as_it_is() -> None:
    entries = log(*turns(1, 2))
    made = plan(entries, HUNDRED, "mine", KNOWN)
    assert made.view == tuple(entry.message for entry in entries)
    assert (made.policy, made.version) == ("mine", HUNDRED.version)
    assert (made.cut, made.moved, made.fired) == (None, False, "")
    assert (made.tokens_before, made.tokens_sent) == (80, 80)
    assert (made.changes, made.warnings, made.decided) == ((), (), ((), (), (), ()))


def test_above_the_trigger_the_cut_moves_to_the_end_and_the_target_is_met() -> None:
    entries = log(*turns(1, 3))
    made = plan(entries, HUNDRED, "mine", KNOWN)
    assert made.fired == "tokens 120 > 100"
    assert lines(made.view) == [f"user {3:010}", f"assistant {3:010}"]
    assert (made.tokens_before, made.tokens_sent) == (120, 40)
    assert made.cut is not None
    assert made.moved
    gap = Gap(0, 4, "drop_oldest", "its round was the oldest", 80, 0)
    assert made.cut == Cut(6, "mine", HUNDRED.version, (), 40, 2, 0, (gap,))
    assert [change.position for change in made.made] == [0, 1, 2, 3]
    assert made.changes == made.made
    assert made.edits == ("drop_oldest",)
    assert (made.earlier, made.messages_before, made.needs_whole) == ((), 6, False)


def test_between_two_moves_a_view_begins_with_the_last_one() -> None:
    first = plan(log(*turns(1, 3)), HUNDRED, "mine", KNOWN)
    second = plan(log(*turns(1, 4)), HUNDRED, "mine", KNOWN, first.cut)
    assert not second.moved
    assert second.cut == first.cut
    assert second.view[: len(first.view)] == first.view
    assert second.tokens_sent == 80
    third = plan(log(*turns(1, 5)), HUNDRED, "mine", KNOWN, second.cut)
    assert third.moved
    assert lines(third.view) == turns(5, 5)


def test_a_move_decides_anew_on_what_still_stands() -> None:
    calls = policy(trigger={"every_request": True}, edits=[{"type": "keep_tool_calls", "last": 1}])
    rounds = [line for n in (1, 2, 3) for line in (f"user {n}", "assistant | a f", f"tool a {n}")]
    standing = plan(log(*rounds), calls, "p", KNOWN).cut
    again = plan(log(*rounds, "user 4"), calls, "p", KNOWN, standing)
    assert lines(again.view) == ["user 1", "user 2", "user 3", "assistant | a f", "tool a 3", "user 4"]
    assert again.cut is not None
    assert (again.fired, again.cut.position, again.cut.tool_calls) == ("every_request", 10, 1)


def test_what_a_move_dropped_stays_dropped() -> None:
    entries = log(*turns(1, 3))
    cut = plan(entries, HUNDRED, "p", KNOWN).cut
    assert cut is not None
    longer = log(*turns(1, 5))
    made = plan(longer, HUNDRED, "p", KNOWN, cut)
    assert made.cut is not None
    assert made.cut.gaps == (Gap(0, 8, "drop_oldest", "its round was the oldest", 160, 0),)
    # The receipt of a move tells what it dropped itself, one by one, and sums up the rest.
    assert [change.position for change in made.changes] == [4, 5, 6, 7]
    assert made.earlier == cut.gaps
    assert made.tokens_before - made.tokens_sent == sum(
        [*(change.tokens_before for change in made.changes), *(gap.tokens for gap in made.earlier)]
    )


def test_a_block_that_lost_some_of_its_calls_is_decided_about_anew_and_whole() -> None:
    calls = policy(
        trigger={"every_request": True},
        edits=[{"type": "keep_tool_calls", "last": 1, "scope": "all"}],
    )
    entries = log("user 1", "assistant | a f, b f", "tool a 1", "tool b 2")
    first = plan(entries, calls, "p", KNOWN)
    assert first.cut is not None
    assert first.cut.gaps == ()
    assert [(change.position, change.message is None) for change in first.cut.changes] == [
        (1, False),
        (2, True),
    ]
    assert lines(first.view) == ["user 1", "assistant | b f", "tool b 2"]
    more = [*entries, *log(*["user"] * 4, "assistant | c f", "tool c 3")[4:]]
    second = plan(more, calls, "p", KNOWN, first.cut)
    assert second.cut is not None
    assert lines(second.view) == ["user 1", "assistant | c f", "tool c 3"]
    assert second.cut.gaps == (Gap(1, 4, "keep_tool_calls", "not among the newest 1 tool calls", 32, 2),)
    assert second.cut.changes == ()


def test_a_log_without_what_the_cut_dropped_is_planned_as_the_whole_one() -> None:
    cut = plan(log(*turns(1, 3)), HUNDRED, "p", KNOWN).cut
    for last in (4, 5):
        whole = log(*turns(1, last))
        made = plan(whole[4:], HUNDRED, "p", KNOWN, cut)
        again = plan(whole, HUNDRED, "p", KNOWN, cut)
        assert replace(again, decided=again.decided[4:]) == made
        assert (made.tokens_before, made.messages_before) == (last * 40, last * 2)
        assert made.moved == (last == 5)


def test_another_version_decides_about_everything_and_asks_for_it() -> None:
    cut = plan(log(*turns(1, 3)), HUNDRED, "p", KNOWN).cut
    other = policy(trigger={"tokens": 110}, target={"tokens": 109}, edits=[DROP])
    whole = log(*turns(1, 5))
    asks = plan(whole[4:], other, "p", KNOWN, cut)
    assert (asks.needs_whole, asks.moved, asks.fired, asks.cut) == (True, False, "", cut)
    assert asks.tokens_sent == 120
    waits = plan(whole[4:8], other, "p", KNOWN, cut)
    assert (waits.needs_whole, waits.tokens_sent) == (False, 80)
    made = plan(whole, other, "p", KNOWN, cut)
    assert made.cut is not None
    assert (made.needs_whole, made.moved, made.earlier) == (False, True, ())
    assert made.cut.gaps == (Gap(0, 6, "drop_oldest", "its round was the oldest", 120, 0),)
    assert made.changes == made.made
    assert len(made.made) == 6


def test_what_the_request_does_not_speak_of_is_not_counted_and_stays_as_it_was() -> None:
    cut = plan(log(*turns(1, 4)), HUNDRED, "p", KNOWN).cut
    assert cut is not None
    assert cut.gaps[0].stop == 6
    cut = replace(cut, changes=(Change(1, "e", "", None, 20, 0), Change(6, "e", "", None, 20, 0)))
    stays = log(*turns(1, 5))[4:]
    made = plan(stays, HUNDRED, "p", KNOWN, cut, start=4)
    assert (made.tokens_before, made.messages_before) == (120, 6)
    assert made.earlier == (Gap(4, 6, "drop_oldest", "its round was the oldest", 40, 0),)
    assert lines(made.view) == ["assistant 0000000004", *turns(5, 5)]
    later = log(*turns(1, 7))[4:]
    moved = plan(later, HUNDRED, "p", KNOWN, cut, start=4)
    assert moved.cut is not None
    assert moved.cut.changes == cut.changes[:1]
    assert moved.cut.gaps == (Gap(0, 12, "drop_oldest", "its round was the oldest", 240, 0),)
    other = policy(trigger={"tokens": 99}, target={"tokens": 60}, edits=[DROP])
    anew = plan(later, other, "p", KNOWN, cut, start=4)
    assert anew.cut is not None
    assert anew.cut.changes == cut.changes[:1]
    assert anew.cut.gaps == moved.cut.gaps
    assert (anew.earlier, len(anew.made)) == ((), 8)


def test_a_window_that_begins_behind_the_gaps_goes_out_as_the_client_sent_it() -> None:
    cut = plan(log(*turns(1, 3)), HUNDRED, "p", KNOWN).cut
    window = log(*turns(1, 3), *BROKEN)[4:]
    made = plan(window, HUNDRED, "p", KNOWN, cut, start=4)
    assert made.view == tuple(entry.message for entry in window)
    assert (made.warnings, made.earlier, made.edits) == ((), (), ())


def test_a_cut_beyond_the_log_is_ignored() -> None:
    standing = plan(log(*turns(1, 3)), HUNDRED, "mine", KNOWN).cut
    made = plan(log(*turns(1, 2)), HUNDRED, "mine", KNOWN, standing)
    assert made.cut is None
    assert made.tokens_sent == 80


def test_a_changed_policy_applies_from_the_next_move() -> None:
    standing = plan(log(*turns(1, 3)), HUNDRED, "mine", KNOWN).cut
    other = policy(trigger={"tokens": 110}, target={"tokens": 80}, edits=[DROP])
    waiting = plan(log(*turns(1, 4)), other, "mine", KNOWN, standing)
    assert waiting.cut == standing
    assert waiting.version == other.version
    moved = plan(log(*turns(1, 5)), other, "mine", KNOWN, standing)
    assert moved.cut is not None
    assert moved.cut.version == other.version
    assert moved.tokens_sent == 80
    assert plan(log(*turns(1, 4)), Policy(), "none", KNOWN, standing).cut == standing


def test_what_is_sent_beside_the_log_counts() -> None:
    known = Known(count, fixed_tokens=50)
    made = plan(log(*turns(1, 2)), HUNDRED, "mine", known)
    assert made.fired == "tokens 130 > 100"
    assert (made.tokens_before, made.tokens_sent) == (130, 70)


def test_a_target_that_cannot_be_met_is_told_and_the_next_move_waits() -> None:
    kept = policy(
        trigger={"tokens": 100}, target={"tokens": 60}, edits=[DROP], keep={"rounds": 4, "spans": 2}
    )
    first = plan(log(*turns(1, 4)), kept, "p", KNOWN)
    assert first.warnings == ("target missed: 160 tokens are 100 above 60",)
    assert first.moved
    waits = plan(log(*turns(1, 4), "user abcdefghi"), kept, "p", KNOWN, first.cut)
    assert (waits.moved, waits.tokens_sent) == (False, 179)
    moves = plan(log(*turns(1, 5)), kept, "p", KNOWN, first.cut)
    assert (moves.moved, moves.tokens_sent) == (True, 160)


def test_edits_run_in_order_until_the_target_is_met() -> None:
    both = policy(trigger={"tokens": 500}, target={"tokens": 400}, edits=[SHORT, DROP])
    long = ["user q", "assistant | a f", "tool a " + "x" * 600, "user q"]
    assert plan(log(*long), both, "p", KNOWN).edits == ("truncate_tool_output",)
    assert plan(log(*turns(1, 10), *long), both, "p", KNOWN).edits == ("drop_oldest", "truncate_tool_output")
    changes = plan(log(*turns(1, 10), *long), both, "p", KNOWN).changes
    assert [change.position for change in changes] == sorted(change.position for change in changes)


def test_without_a_target_each_edit_runs_once() -> None:
    calls = {"type": "keep_tool_calls", "last": 1}
    once = policy(trigger={"messages": 3}, edits=[SHORT, calls])
    rounds = [line for n in (1, 2) for line in (f"user {n}", "assistant | a f", "tool a " + "x" * 600)]
    made = plan(log(*rounds, "user 3"), once, "p", KNOWN)
    assert made.fired == "messages 7 > 3"
    assert [(change.position, change.edit) for change in made.changes] == [
        (1, "keep_tool_calls"),
        (2, "truncate_tool_output"),
        (2, "keep_tool_calls"),
        (5, "truncate_tool_output"),
    ]
    two = [change for change in made.changes if change.position == 2]
    assert two[0].tokens_after == two[1].tokens_before
    assert made.tokens_before - made.tokens_sent == sum(
        c.tokens_before - c.tokens_after for c in made.changes
    )


def test_an_edit_runs_only_when_its_condition_holds_as_things_then_stand() -> None:
    rounds = [
        line
        for n in (1, 2)
        for line in (f"user {n}", "assistant | a f", "tool a 1", "assistant | b f", "tool b 2")
    ]
    calls = {"type": "keep_tool_calls", "last": 2, "when": {"tool_calls": 3}}
    then = {"type": "keep_tool_calls", "last": 1, "scope": "all", "when": {"tool_calls": 2}}
    made = plan(
        log(*rounds, "user 3"), policy(trigger={"every_request": True}, edits=[calls, then]), "p", KNOWN
    )
    assert made.cut is not None
    assert made.cut.tool_calls == 2


@pytest.mark.parametrize(
    "keys",
    [
        {"trigger": {"ratio": 0.5}, "edits": [{"type": "keep_tool_calls"}]},
        {"trigger": {"every_request": True}, "target": {"ratio": 0.5}, "edits": [DROP]},
        {"trigger": {"every_request": True}, "edits": [{"type": "keep_tool_calls", "when": {"ratio": 0.5}}]},
        {"on_arrival": [{**SHORT, "when": {"ratio": 0.5}}]},
    ],
)
def test_a_ratio_of_an_unknown_window_is_told(keys: dict[str, Any]) -> None:
    entries = log(*turns(1, 9))
    made = plan(entries, policy(**keys), "p", KNOWN)
    assert made.warnings == (UNKNOWN_WINDOW,)
    assert made.changes == ()
    assert plan(entries, policy(**keys), "p", replace(KNOWN, context_window=10**6)).warnings == ()


def test_ratios_are_of_the_context_window() -> None:
    half = policy(trigger={"ratio": 0.5}, target={"ratio": 0.3}, edits=[DROP])
    made = plan(log(*turns(1, 3)), half, "p", replace(KNOWN, context_window=200))
    assert made.fired == "ratio 0.600 > 0.5 of 200 tokens"
    assert made.tokens_sent == 40


BROKEN = ("user q", "assistant | a f", "user " + TEN)


def test_what_a_client_sent_itself_goes_out_as_it_is() -> None:
    entries = log(*BROKEN)
    made = plan(entries, Policy(), "p", KNOWN)
    assert made.view == tuple(entry.message for entry in entries)
    assert made.warnings == ()


def test_what_was_put_together_here_is_repaired() -> None:
    made = plan(log(*BROKEN), Policy(), "p", KNOWN, composed=True)
    assert lines(made.view) == ["user q", "assistant | a f", f"tool a {NO_RESULT}", "user " + TEN]
    assert made.warnings == ("repaired: 1 x tool call without a result, a result was put in",)
    assert made.tokens_sent == made.tokens_before + 10 + len(NO_RESULT)


def test_what_was_trimmed_is_repaired() -> None:
    dropped = plan(log(*BROKEN, *turns(1, 3)), HUNDRED, "p", KNOWN)
    assert lines(dropped.view) == turns(3, 3)
    assert dropped.warnings == ()
    made = plan(log(*turns(1, 3), *BROKEN), HUNDRED, "p", KNOWN)
    assert lines(made.view) == ["user q", "assistant | a f", f"tool a {NO_RESULT}", "user " + TEN]
    assert made.tokens_sent == 11 + 10 + (10 + len(NO_RESULT)) + 20
    # The edits met the target; what the repair put in is told.
    assert made.warnings == (
        "target missed: 89 tokens are 29 above 60",
        "repaired: 1 x tool call without a result, a result was put in",
    )


def test_what_arrival_changed_is_sent_so_from_then_on() -> None:
    arriving = policy(on_arrival=[SHORT])
    entries = log("user q", "assistant | a f", "tool a " + "x" * 600)
    first = plan(entries, arriving, "p", KNOWN)
    assert first.edits == ("truncate_tool_output",)
    assert first.tokens_sent == sum(map(count, first.view)) < first.tokens_before
    assert first.decided == ((), (), first.arrivals)
    longer = [*entries, *log("assistant so", "user q2")]
    second = plan(recorded(longer, first), Policy(), "q", KNOWN)
    assert second.view[:3] == first.view
    assert second.arrivals == first.arrivals


def test_a_cut_builds_upon_what_arrival_changed() -> None:
    both = policy(
        on_arrival=[SHORT], trigger={"every_request": True}, edits=[{"type": "keep_tool_calls", "last": 0}]
    )
    made = plan(log("user q", "assistant | a f", "tool a " + "x" * 600, "user q2"), both, "p", KNOWN)
    assert made.cut is not None
    (arrived,), (_, removed) = made.arrivals, made.made
    assert removed.tokens_before == arrived.tokens_after
    assert lines(made.view) == ["user q", "user q2"]
    assert made.edits == ("truncate_tool_output", "keep_tool_calls")


def test_bypass_sends_everything() -> None:
    arriving = policy(on_arrival=[SHORT])
    entries = log("user q", "assistant | a f", "tool a " + "x" * 600)
    sent = recorded(entries, plan(entries, arriving, "p", KNOWN))
    made = bypass([*sent, *log("user q2")], replace(KNOWN, fixed_tokens=7))
    assert lines(made.view) == [*lines(entry.message for entry in entries), "user q2"]
    assert (made.policy, made.version, made.cut, made.changes) == ("off", "", None, ())
    assert made.tokens_before == made.tokens_sent == 7 + 11 + 10 + 610 + 12
    assert made.decided == (*(entry.arrival for entry in sent), ())


def test_bypass_repairs_what_was_put_together_here() -> None:
    assert bypass(log(*BROKEN), KNOWN).warnings == ()
    made = bypass(log(*BROKEN), KNOWN, composed=True)
    assert len(made.view) == 4
    assert made.warnings == ("repaired: 1 x tool call without a result, a result was put in",)


def test_an_empty_log() -> None:
    made = plan([], HUNDRED, "p", replace(KNOWN, fixed_tokens=500))
    assert made.view == ()
    assert made.moved
    assert made.warnings == ("target missed: 500 tokens are 440 above 60",)
