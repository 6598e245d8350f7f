"""From a log and a policy to what is sent."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import orjson
import pytest
from msgspec.structs import replace

from proxy.dialects import Message
from proxy.dialects.chat.protocol import NO_RESULT
from proxy.trimming.cost import HIGHEST_KNOWN, HIGHEST_READ, HIGHEST_RISK, NO_CHANGE, Costs, worst_of
from proxy.trimming.draft import Draft
from proxy.trimming.edits.summarize import COMPACTION, Summarize
from proxy.trimming.model import (
    Account,
    Change,
    Cut,
    Entry,
    Gap,
    Hidden,
    Plan,
    PlanningContext,
    Prices,
    ReadySummary,
    Size,
    Step,
    Summary,
    SummaryRequest,
)
from proxy.trimming.planner import (
    ASKED,
    REFUSED,
    UNBOUND,
    UNKNOWN_PRICES,
    bypass,
    compaction,
    plan,
    requested_in_time,
    tokens_left,
    untrimmed,
    without_bound_reasoning,
)
from proxy.trimming.policy import Policy
from proxy.trimming.settings import UNKNOWN_WINDOW
from tests.trimming.edits.held import draft_of
from tests.trimming.notation import DIALECT, KNOWN, count, lines, log, message, messages

# ------------------------------------------------------------------------------------------ engine

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
    assert (made.cut, made.trimmed, made.fired) == (None, False, "")
    assert (made.tokens_before, made.tokens_sent) == (80, 80)
    assert (made.changes, made.warnings, made.decided) == ((), (), ((), (), (), ()))


def test_above_the_trigger_the_cut_moves_to_the_end_and_the_target_is_met() -> None:
    entries = log(*turns(1, 3))
    made = plan(entries, HUNDRED, "mine", KNOWN)
    assert made.fired == "tokens 120 > 100"
    assert lines(made.view) == [f"user {3:010}", f"assistant {3:010}"]
    assert (made.tokens_before, made.tokens_sent) == (120, 40)
    assert made.cut is not None
    assert made.trimmed
    gap = Gap(start=0, stop=4, edit="drop_oldest", reason="its round was the oldest", tokens=80, tool_calls=0)
    assert made.cut == Cut(
        position=6, policy="mine", version=HUNDRED.version, changes=(), tokens=40, messages=2, tool_calls=0, gaps=(gap,)
    )
    assert [change.position for change in made.made] == [0, 1, 2, 3]
    assert made.changes == made.made
    assert made.edits == ("drop_oldest",)
    assert (made.earlier, made.messages_before, made.needs_whole) == ((), 6, False)


def test_between_two_moves_a_view_begins_with_the_last_one() -> None:
    first = plan(log(*turns(1, 3)), HUNDRED, "mine", KNOWN)
    second = plan(log(*turns(1, 4)), HUNDRED, "mine", KNOWN, first.cut)
    assert not second.trimmed
    assert second.cut == first.cut
    assert second.view[: len(first.view)] == first.view
    assert second.tokens_sent == 80
    third = plan(log(*turns(1, 5)), HUNDRED, "mine", KNOWN, second.cut)
    assert third.trimmed
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
    assert made.cut.gaps == (
        Gap(start=0, stop=8, edit="drop_oldest", reason="its round was the oldest", tokens=160, tool_calls=0),
    )
    # The receipt of a move tells what it dropped itself, one by one, and sums up the rest.
    assert [change.position for change in made.changes] == [4, 5, 6, 7]
    assert made.earlier == cut.gaps
    assert made.tokens_before - made.tokens_sent == sum(
        [*(change.tokens_before for change in made.changes), *(gap.tokens for gap in made.earlier)]
    )


def test_a_block_that_lost_some_of_its_calls_is_decided_about_anew_and_whole() -> None:
    calls = policy(trigger={"every_request": True}, edits=[{"type": "keep_tool_calls", "last": 1, "scope": "all"}])
    entries = log("user 1", "assistant | a f, b f", "tool a 1", "tool b 2")
    first = plan(entries, calls, "p", KNOWN)
    assert first.cut is not None
    assert first.cut.gaps == ()
    assert [(change.position, change.message is None) for change in first.cut.changes] == [(1, False), (2, True)]
    assert lines(first.view) == ["user 1", "assistant | b f", "tool b 2"]
    more = [*entries, *log(*["user"] * 4, "assistant | c f", "tool c 3")[4:]]
    second = plan(more, calls, "p", KNOWN, first.cut)
    assert second.cut is not None
    assert lines(second.view) == ["user 1", "assistant | c f", "tool c 3"]
    assert second.cut.gaps == (
        Gap(
            start=1, stop=4, edit="keep_tool_calls", reason="not among the newest 1 tool calls", tokens=32, tool_calls=2
        ),
    )
    assert second.cut.changes == ()


def test_a_log_without_what_the_cut_dropped_is_planned_as_the_whole_one() -> None:
    cut = plan(log(*turns(1, 3)), HUNDRED, "p", KNOWN).cut
    for last in (4, 5):
        whole = log(*turns(1, last))
        made = plan(whole[4:], HUNDRED, "p", KNOWN, cut)
        again = plan(whole, HUNDRED, "p", KNOWN, cut)
        assert replace(again, decided=again.decided[4:]) == made
        assert (made.tokens_before, made.messages_before) == (last * 40, last * 2)
        assert made.trimmed == (last == 5)


def test_another_version_decides_about_everything_and_asks_for_it() -> None:
    cut = plan(log(*turns(1, 3)), HUNDRED, "p", KNOWN).cut
    other = policy(trigger={"tokens": 110}, target={"tokens": 109}, edits=[DROP])
    whole = log(*turns(1, 5))
    asks = plan(whole[4:], other, "p", KNOWN, cut)
    assert (asks.needs_whole, asks.trimmed, asks.fired, asks.cut) == (True, False, "", cut)
    assert asks.tokens_sent == 120
    waits = plan(whole[4:8], other, "p", KNOWN, cut)
    assert (waits.needs_whole, waits.tokens_sent) == (False, 80)
    made = plan(whole, other, "p", KNOWN, cut)
    assert made.cut is not None
    assert (made.needs_whole, made.trimmed, made.earlier) == (False, True, ())
    assert made.cut.gaps == (
        Gap(start=0, stop=6, edit="drop_oldest", reason="its round was the oldest", tokens=120, tool_calls=0),
    )
    assert made.changes == made.made
    assert len(made.made) == 6


def test_what_the_request_does_not_speak_of_is_not_counted_and_stays_as_it_was() -> None:
    cut = plan(log(*turns(1, 4)), HUNDRED, "p", KNOWN).cut
    assert cut is not None
    assert cut.gaps[0].stop == 6
    cut = replace(
        cut,
        changes=(
            Change(position=1, edit="e", reason="", message=None, tokens_before=20, tokens_after=0),
            Change(position=6, edit="e", reason="", message=None, tokens_before=20, tokens_after=0),
        ),
    )
    stays = log(*turns(1, 5))[4:]
    made = plan(stays, HUNDRED, "p", KNOWN, cut, start=4)
    assert (made.tokens_before, made.messages_before) == (120, 6)
    assert made.earlier == (
        Gap(start=4, stop=6, edit="drop_oldest", reason="its round was the oldest", tokens=40, tool_calls=0),
    )
    assert lines(made.view) == ["assistant 0000000004", *turns(5, 5)]
    later = log(*turns(1, 7))[4:]
    moved = plan(later, HUNDRED, "p", KNOWN, cut, start=4)
    assert moved.cut is not None
    assert moved.cut.changes == cut.changes[:1]
    assert moved.cut.gaps == (
        Gap(start=0, stop=6, edit="drop_oldest", reason="its round was the oldest", tokens=120, tool_calls=0),
        Gap(start=6, stop=7, edit="e", reason="", tokens=20, tool_calls=0),
        Gap(start=7, stop=12, edit="drop_oldest", reason="its round was the oldest", tokens=100, tool_calls=0),
    )
    other = policy(trigger={"tokens": 99}, target={"tokens": 60}, edits=[DROP])
    anew = plan(later, other, "p", KNOWN, cut, start=4)
    assert anew.cut is not None
    assert anew.cut.changes == cut.changes[:1]
    assert anew.cut.gaps == (
        Gap(start=0, stop=12, edit="drop_oldest", reason="its round was the oldest", tokens=240, tool_calls=0),
    )
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
    known = PlanningContext(count=count, fixed_tokens=50)
    made = plan(log(*turns(1, 2)), HUNDRED, "mine", known)
    assert made.fired == "tokens 130 > 100"
    assert (made.tokens_before, made.tokens_sent) == (130, 70)


def test_a_target_that_cannot_be_met_is_told_and_the_next_move_waits() -> None:
    kept = policy(trigger={"tokens": 100}, target={"tokens": 60}, edits=[DROP], keep={"rounds": 4, "spans": 2})
    first = plan(log(*turns(1, 4)), kept, "p", KNOWN)
    assert first.warnings == ("target missed: 160 tokens are 100 above 60",)
    assert first.trimmed
    waits = plan(log(*turns(1, 4), "user abcdefghi"), kept, "p", KNOWN, first.cut)
    assert (waits.trimmed, waits.tokens_sent) == (False, 179)
    moves = plan(log(*turns(1, 5)), kept, "p", KNOWN, first.cut)
    assert (moves.trimmed, moves.tokens_sent) == (True, 160)


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
    assert made.tokens_before - made.tokens_sent == sum(c.tokens_before - c.tokens_after for c in made.changes)


def test_an_edit_runs_only_when_its_condition_holds_as_things_then_stand() -> None:
    rounds = [
        line for n in (1, 2) for line in (f"user {n}", "assistant | a f", "tool a 1", "assistant | b f", "tool b 2")
    ]
    calls = {"type": "keep_tool_calls", "last": 2, "when": {"tool_calls": 3}}
    then = {"type": "keep_tool_calls", "last": 1, "scope": "all", "when": {"tool_calls": 2}}
    made = plan(log(*rounds, "user 3"), policy(trigger={"every_request": True}, edits=[calls, then]), "p", KNOWN)
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
    both = policy(on_arrival=[SHORT], trigger={"every_request": True}, edits=[{"type": "keep_tool_calls", "last": 0}])
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
    assert made.trimmed
    assert made.warnings == ("target missed: 500 tokens are 440 above 60",)


SCALED = replace(KNOWN, scale=2.0)


def test_limits_are_in_tokens_as_upstream_counts_them() -> None:
    twice = policy(trigger={"tokens": 200}, target={"tokens": 120}, edits=[DROP])
    assert plan(log(*turns(1, 2)), twice, "p", SCALED).fired == ""
    made = plan(log(*turns(1, 3)), twice, "p", SCALED)
    assert (made.fired, made.tokens_before, made.tokens_sent) == ("tokens 240 > 200", 120, 40)
    assert made.target == 120


def test_a_missed_target_is_told_and_waited_for_as_upstream_counts() -> None:
    kept = policy(trigger={"tokens": 200}, target={"tokens": 120}, edits=[DROP], keep={"rounds": 4, "spans": 2})
    first = plan(log(*turns(1, 4)), kept, "p", SCALED)
    assert first.warnings == ("target missed: 320 tokens are 200 above 120",)
    # It must have grown by 80 of upstream's tokens: 40 of these.
    waits = plan(log(*turns(1, 4), "user abcdefghi", "user abcdefghi"), kept, "p", SCALED, first.cut)
    assert (waits.trimmed, waits.tokens_sent) == (False, 198)
    assert plan(log(*turns(1, 5)), kept, "p", SCALED, first.cut).trimmed


def test_a_target_is_told_as_it_is_set_and_a_miss_is_at_least_one_token() -> None:
    even = policy(trigger={"tokens": 101}, target={"tokens": 100}, edits=[DROP])
    # 76 tokens are 98.8 of upstream's, 77 are 100.1.
    known = replace(KNOWN, scale=1.3)
    made = plan(log("user " + "x" * 67), even, "p", known)
    assert (made.trimmed, made.target) == (False, 100)
    always = policy(trigger={"every_request": True}, target={"tokens": 100}, edits=[DROP])
    made = plan(log("user " + "x" * 67), always, "p", known)
    assert (made.target, made.warnings) == (100, ("target missed: 101 tokens are 1 above 100",))
    assert plan(log("user " + "x" * 66), always, "p", known).warnings == ()


def calls(last: int) -> list[str]:
    """Return one question and so many calls with results of 610 tokens."""
    asked = (line for n in range(last) for line in (f"assistant | c{n} f", f"tool c{n} {n:0600}"))
    return ["user q", *asked]


SHORTER = {"type": "truncate_tool_output", "max_bytes": 100}
NEWEST = {"rounds": 1, "spans": 2}
PRICES = Prices(read=0.1, write=1.25, output=5.0, lifetime=300.0, minimum=0, source="known")


def paid(plans: Sequence[Plan], known: PlanningContext) -> list[float]:
    """Return what each request costs: what it has in common with the one before it is read from the cache."""
    prices = known.prices or PRICES
    before: list[Message] = []
    found: list[float] = []
    for made in plans:
        view = list(made.view)
        same = next(
            (at for at, pair in enumerate(zip(before, view, strict=False)) if pair[0] != pair[1]),
            min(len(before), len(view)),
        )
        cached = sum(map(known.count, view[:same])) + (known.fixed_tokens if before else 0)
        whole = known.fixed_tokens + sum(map(known.count, view))
        cached = cached if cached >= prices.minimum else 0
        found.append(prices.factor(whole) * (prices.read * cached + prices.write * (whole - cached)))
        before = view
    return found


def asked(trimming: Policy, known: PlanningContext, requests: int) -> list[Plan]:
    """Return the plans of a session in which an agent calls a tool again and again."""
    plans: list[Plan] = []
    for last in range(requests):
        cut = plans[-1].cut if plans else None
        plans.append(plan(log(*calls(last)), trimming, "p", known, cut))
    return plans


CLEAR = {"type": "clear_tool_results", "keep": 2}
MASK = {"type": "keep_tool_calls", "scope": "all"}


@pytest.mark.no_cover  # whole sessions, of which each step is tested elsewhere: being traced would double their time
@pytest.mark.parametrize(
    ("edit", "prices", "requests", "most"),
    [
        (SHORTER, PRICES, 80, 0.92),
        (CLEAR, PRICES, 70, 0.7),
        (MASK, PRICES, 70, 0.5),
        (CLEAR, replace(PRICES, read=0.5, write=1.0, minimum=1024), 70, 0.5),
        (MASK, replace(PRICES, read=0.5, write=1.0, minimum=1024), 70, 0.5),
        (MASK, replace(PRICES, read=0.05), 70, 0.7),
        # Above 9000 tokens everything costs twice as much.
        (SHORTER, replace(PRICES, steps=(Step(above=9000, factor=2.0),)), 70, 0.8),
        # What is shorter than 4096 tokens is paid in full again and again.
        (CLEAR, replace(PRICES, minimum=4096), 70, 0.7),
        (MASK, replace(PRICES, minimum=4096), 90, 0.98),
        # Reading costs a twenty-fifth of writing, and a third of the text stays: the first move costs about
        # 5000. After 95 requests it is soon paid back; after 120 nearly all of it is.
        (SHORTER, replace(PRICES, read=0.05), 100, 1.08),
        (SHORTER, replace(PRICES, read=0.05), 120, 1.01),
    ],
)
def test_cost_auto_saves_in_a_long_session_and_loses_little_in_any(
    edit: dict[str, Any], prices: Prices, requests: int, most: float
) -> None:
    known = replace(KNOWN, fixed_tokens=500, prices=prices)
    plans = asked(policy(trigger={"cost": "auto"}, keep=NEWEST, edits=[edit]), known, requests)
    trimmed = paid(plans, known)
    untrimmed = paid(asked(Policy(), known, requests), known)
    moves = [at for at, made in enumerate(plans) if made.trimmed]
    assert moves
    risk = HIGHEST_KNOWN if prices == worst_of(prices) else HIGHEST_RISK
    for stop in range(1, requests + 1):
        assert sum(trimmed[:stop]) <= (1 + risk) * sum(untrimmed[:stop])
    assert sum(trimmed) < most * sum(untrimmed)
    # By what cached tokens are taken to cost.
    judged = replace(known, prices=replace(prices, read=min(prices.read, HIGHEST_READ)))
    trimmed, untrimmed = paid(plans, judged), paid(asked(Policy(), judged, requests), judged)
    for at in moves:
        # The account of a cut is what was paid, up to and with the request of the move.
        cut = plans[at].cut
        assert cut is not None
        assert cut.account is not None
        assert cut.account.turns == at + 1
        assert cut.account.untrimmed == pytest.approx(sum(untrimmed[: at + 1]))
        assert cut.account.saved == pytest.approx(sum(untrimmed[: at + 1]) - sum(trimmed[: at + 1]))
        assert plans[at].fired.startswith("cost: ")
        assert plans[at].warnings == ()


def test_a_step_of_the_price_is_reason_enough() -> None:
    # Above 9000 tokens everything costs twice as much.
    steep = replace(PRICES, steps=(Step(above=9000, factor=2.0),))
    auto = policy(trigger={"cost": "auto"}, keep=NEWEST, edits=[SHORTER])
    even, uneven = (asked(auto, replace(KNOWN, prices=prices), 60) for prices in (PRICES, steep))
    assert max(made.tokens_sent for made in uneven) < max(made.tokens_sent for made in even)


@pytest.mark.parametrize(
    ("entries", "dropped", "earlier"),
    [
        (calls(5), (), 0),
        ([*calls(5), "user again"], (), 5),
        ([*calls(5), "user again", *calls(2)[1:]], (), 5),
        (["user q", "assistant a", "user again", "user and again", *calls(6)[1:]], (), 1),
        # What was dropped before the newest user message counts as requests where an account has it;
        ([*calls(9), "user again"], (1, 2), 8),
        # of what was dropped behind that message nobody knows.
        (["user q", "assistant a", "user again", *calls(9)[1:]], (3, 4), 0),
        (calls(9), (1, 2), 0),
    ],
)
def test_what_a_session_risks_grows_with_the_requests_before_the_newest_user_message(
    monkeypatch: pytest.MonkeyPatch, entries: list[str], dropped: Collection[int], earlier: int
) -> None:
    told: list[int] = []

    def timely(costs: Costs, *_given: object) -> bool:
        told.append(costs.earlier)
        return False

    monkeypatch.setattr(Costs, "timely", timely)
    auto = policy(trigger={"cost": "auto"}, keep=NEWEST, edits=[SHORTER])
    loaded = [entry for entry in log(*entries) if entry.position not in dropped]
    plan(loaded, auto, "p", replace(KNOWN, prices=PRICES))
    assert told == [earlier]


def test_in_a_short_session_nothing_pays() -> None:
    auto = policy(trigger={"cost": "auto"}, keep=NEWEST, edits=[SHORTER])
    plans = asked(auto, replace(KNOWN, prices=PRICES), 6)
    assert not any(made.trimmed for made in plans)
    assert plans[-1].tokens_sent > 2048


def test_where_no_cut_is_kept_nothing_pays() -> None:
    known = replace(KNOWN, prices=PRICES, idle=301)
    auto = policy(trigger={"cost": "auto"}, keep=NEWEST, edits=[SHORTER])
    assert plan(log(*calls(5)), auto, "p", known).trimmed
    assert not plan(log(*calls(5)), auto, "p", replace(known, keeps=False)).trimmed
    edit = {**SHORTER, "when": {"cost": "auto"}}
    other = policy(trigger={"every_request": True}, keep=NEWEST, edits=[edit])
    assert plan(log(*calls(5)), other, "p", known).made
    assert not plan(log(*calls(5)), other, "p", replace(known, keeps=False)).made


def test_what_comes_in_a_cold_cache_is_trimmed_at_once() -> None:
    auto = policy(trigger={"cost": "auto"}, keep=NEWEST, edits=[SHORTER])
    known = replace(KNOWN, prices=PRICES)
    assert not plan(log(*calls(5)), auto, "p", known).trimmed
    cold = plan(log(*calls(5)), auto, "p", replace(known, idle=301))
    assert cold.trimmed
    assert len(cold.made) == 3
    # What was imported was never sent: it is in no cache.
    assert plan(log("user q", "user " + "x" * 3000), auto, "p", known).fired == ""
    found = ["user q", *(f"function f {n:0600}" for n in range(5))]
    moved = plan(log(*found), auto, "p", known)
    assert (moved.trimmed, len(moved.made)) == (True, 3)
    assert moved.cut is not None
    assert moved.cut.account is not None
    assert moved.cut.account.turns == 1


def test_prices_that_nobody_knows_are_assumed_and_that_is_told() -> None:
    auto = policy(trigger={"cost": "auto"}, keep=NEWEST, edits=[SHORTER])
    made = plan(log(*calls(5)), auto, "p", replace(KNOWN, idle=301))
    assert made.trimmed
    assert made.warnings == (UNKNOWN_PRICES,)
    edit = {**SHORTER, "when": {"cost": "auto"}}
    pays = policy(trigger={"every_request": True}, keep=NEWEST, edits=[edit])
    assert plan(log(*calls(5)), pays, "p", replace(KNOWN, prices=PRICES)).made == ()
    assert plan(log(*calls(5)), pays, "p", KNOWN).warnings == (UNKNOWN_PRICES,)
    assert len(plan(log(*calls(5)), pays, "p", replace(KNOWN, idle=301)).made) == 3
    # Where the trigger does not fire, nothing is reckoned.
    rarely = policy(trigger={"messages": 99}, keep=NEWEST, edits=[edit])
    made = plan(log(*calls(5)), rarely, "p", replace(KNOWN, idle=301))
    assert (made.trimmed, made.warnings) == (False, ())


def test_another_version_that_reckons_asks_for_all_of_it_when_it_may_pay() -> None:
    dropping = policy(trigger={"messages": 9}, target={"tokens": 2600}, edits=[DROP])
    cut = plan(log(*calls(5)), dropping, "p", KNOWN).cut
    assert cut is not None
    assert cut.gaps
    auto = policy(trigger={"cost": "auto"}, keep=NEWEST, edits=[SHORTER])
    whole = log(*calls(8))
    part = [*whole[:1], *whole[cut.gaps[0].stop :]]
    asks = plan(part, auto, "p", replace(KNOWN, idle=301), cut)
    assert (asks.needs_whole, asks.trimmed, asks.cut) == (True, False, cut)
    made = plan(whole, auto, "p", replace(KNOWN, idle=301), cut)
    assert made.trimmed
    assert len(made.made) == 6
    # Where nothing has grown by enough, nobody looks.
    calm = plan([*part, *log(*calls(8), "assistant so", "user so")[-2:]], auto, "p", KNOWN, cut)
    assert (calm.needs_whole, calm.trimmed) == (False, False)


def test_where_only_time_has_passed_the_cut_moves_only_if_there_is_something_to_do() -> None:
    idle = policy(trigger={"idle_seconds": 60}, edits=[SHORTER])
    waiting = replace(KNOWN, idle=61)
    made = plan(log(*calls(2)), idle, "p", waiting)
    assert (made.trimmed, made.fired, len(made.made)) == (True, "idle for 61 s", 2)
    again = plan(log(*calls(2), "user so"), idle, "p", waiting, made.cut)
    assert (again.trimmed, again.fired, again.cut) == (False, "", made.cut)
    assert plan(log(*calls(2)), idle, "p", replace(KNOWN, idle=60)).cut is None
    both = policy(trigger={"idle_seconds": 60, "messages": 1}, edits=[SHORTER])
    assert plan(log(*calls(2), "user so"), both, "p", waiting, made.cut).trimmed


def test_an_overflow_moves_the_cut_to_what_upstream_takes() -> None:
    made = plan(log(*turns(1, 4)), Policy(), "p", SCALED, overflow=100)
    assert made.fired == "overflow: more than 200 tokens may be too many"
    assert (made.trimmed, made.tokens_sent, made.target) == (True, 80, 200)
    assert made.cut is not None
    assert [gap.edit for gap in made.cut.gaps] == ["drop_oldest"]
    least = plan(log(*turns(1, 1), "user " + "x" * 90), Policy(), "p", KNOWN, overflow=50)
    assert least.warnings == ("target missed: 100 tokens are 50 above 50",)


def test_after_an_overflow_what_is_gone_stays_gone_under_another_version() -> None:
    cut = plan(log(*turns(1, 3)), HUNDRED, "p", KNOWN).cut
    assert cut is not None
    whole = log(*turns(1, 5))
    made = plan(whole[4:], Policy(), "p", KNOWN, cut, overflow=90)
    assert (made.needs_whole, made.trimmed, made.tokens_sent) == (False, True, 80)
    assert made.earlier == cut.gaps
    assert made.cut is not None
    assert made.cut.gaps == (
        Gap(start=0, stop=6, edit="drop_oldest", reason="its round was the oldest", tokens=120, tool_calls=0),
    )
    # Where all of the log is there, the new version decides about all of it.
    anew = plan(whole, Policy(), "p", KNOWN, cut, overflow=90)
    assert (anew.earlier, len(anew.made)) == ((), 6)


def test_what_was_replaced_stays_as_it_was_sent() -> None:
    shorter = policy(trigger={"messages": 4}, edits=[SHORTER])
    first = plan(log(*calls(2)), shorter, "p", KNOWN)
    assert first.cut is not None
    assert [change.position for change in first.cut.changes] == [2, 4]
    second = plan(log(*calls(4)), shorter, "p", KNOWN, first.cut)
    assert second.cut is not None
    assert second.view[:5] == first.view
    assert [change.position for change in second.made] == [6, 8]
    assert second.cut.changes == first.cut.changes + second.made
    assert second.changes == second.cut.changes
    # Of another version nothing stays.
    longer = policy(trigger={"messages": 4}, edits=[{**SHORTER, "max_bytes": 200}])
    other = plan(log(*calls(4)), longer, "p", KNOWN, first.cut)
    assert [change.position for change in other.made] == [2, 4, 6, 8]
    assert other.changes == other.made
    assert other.view[2] != first.view[2]


def test_parts_that_stay_as_they_are_end_with_the_last_change() -> None:
    shorter = policy(trigger={"messages": 4}, keep={"rounds": 1, "spans": 1}, edits=[SHORTER])
    first = plan(log(*calls(3)), shorter, "p", KNOWN)
    assert (len(first.view), first.stable_ends) == (7, (5,))
    between = plan(log(*calls(3), "user so"), Policy(), "p", KNOWN, first.cut)
    assert between.stable_ends == ()
    still = plan(log(*calls(3)), shorter, "p", KNOWN, first.cut)
    assert (still.trimmed, still.stable_ends) == (False, (5,))
    second = plan(log(*calls(5)), shorter, "p", KNOWN, first.cut)
    assert (second.trimmed, second.stable_ends) == (True, (5, 9))
    assert second.view[:5] == first.view[:5]
    third = plan(log(*calls(5)), shorter, "p", KNOWN, second.cut)
    assert (third.trimmed, third.stable_ends) == (False, (9,))


def test_what_a_move_changes_is_no_part_that_stayed() -> None:
    newest = policy(trigger={"messages": 9}, edits=[{"type": "keep_rounds", "last": 3}])
    entries = log(*turns(1, 1), "user q", "assistant | a f", "tool a long", *turns(2, 3), "user so")
    stub = Change(
        position=4,
        edit="clear_tool_results",
        reason="",
        message=log("tool a")[0].message,
        tokens_before=14,
        tokens_after=10,
    )
    cut = Cut(position=5, policy="p", version=newest.version, changes=(stub,), tokens=0, messages=5, tool_calls=1)
    before = plan(entries[:9], newest, "p", KNOWN, cut)
    assert (before.trimmed, before.stable_ends) == (False, (5,))
    # The first round goes: what ended with the stub is another part now.
    made = plan(entries, newest, "p", KNOWN, cut)
    assert [change.position for change in made.made] == [0, 1]
    assert (made.trimmed, len(made.view), made.stable_ends) == (True, 8, (3,))


def test_what_stands_before_a_gap_is_not_said_to_stay() -> None:
    both = policy(trigger={"messages": 4}, target={"tokens": 1}, keep={"rounds": 1, "spans": 1}, edits=[SHORTER, DROP])
    made = plan(log(*turns(1, 1), *calls(2)), both, "p", KNOWN)
    # Of the first round nothing is left; the question of the second stays, its first call goes.
    assert lines(made.view)[0] == "user q"
    assert (len(made.view), made.stable_ends) == (3, ())


def test_with_repairs_no_part_is_said_to_stay() -> None:
    shorter = policy(trigger={"messages": 4}, edits=[SHORTER])
    made = plan(log(*calls(2), *BROKEN), shorter, "p", KNOWN)
    assert made.trimmed
    assert made.stable_ends == ()


def test_a_move_that_changes_nothing_lets_a_client_send_what_it_will() -> None:
    nothing = policy(trigger={"every_request": True}, edits=[SHORTER])
    assert plan(log(*BROKEN), nothing, "p", KNOWN).warnings == ()
    dropped = plan(log(*turns(1, 3)), HUNDRED, "p", KNOWN).cut
    # Another version puts everything back.
    entries = log(*turns(1, 3), *BROKEN)
    made = plan(entries, nothing, "p", KNOWN, dropped)
    assert made.trimmed
    assert made.view == tuple(entry.message for entry in entries)
    assert made.warnings == ()


def summing(**keys: Any) -> Policy:
    settings = {"min_messages": 0, "min_new_messages": 0, "growth_ratio": 0, "keep_rounds": 1}
    edit = {"type": "summarize", "mode": "statistics", **settings, **keys}
    return policy(trigger={"messages": 6}, edits=[edit])


LONG_TURNS = [line + " and more" * 30 for line in turns(1, 12)]


@pytest.mark.parametrize("role", ["merge", "system", "user"])
def test_a_summary_stands_before_the_view_or_in_the_instructions(role: str) -> None:
    made = plan(log(*LONG_TURNS[:9]), summing(role=role), "p", KNOWN)
    assert made.summary is not None
    assert made.cut is not None
    assert made.cut.summary == made.summary
    # One whole round stays, and the current one; what is covered is not sent.
    lead = [] if role == "merge" else [made.summary.message(DIALECT)]
    assert list(made.view) == [*lead, *(entry.message for entry in log(*LONG_TURNS[:9])[6:])]
    assert (made.summary.until, made.summary.covered_messages) == (6, 6)
    assert made.tokens_sent == made.summary.tokens + sum(entry.tokens for entry in log(*LONG_TURNS[:9])[6:])
    assert made.cut.gaps == (
        Gap(
            start=0,
            stop=6,
            edit="summarize",
            reason="it is summed up",
            tokens=made.summary.covered_tokens,
            tool_calls=0,
        ),
    )
    assert made.cut.messages == len(made.view)
    later = plan(log(*LONG_TURNS[:11])[6:], summing(role=role), "p", KNOWN, made.cut)
    assert (later.trimmed, later.summary) == (False, made.summary)
    assert later.view[: len(made.view)] == made.view
    again = plan(log(*LONG_TURNS[:16])[6:], summing(role=role), "p", KNOWN, made.cut)
    assert again.summary is not None
    assert (again.trimmed, again.summary.generation, again.summary.covered_messages) == (True, 2, 12)


def test_another_version_sums_up_all_of_it_again() -> None:
    cut = plan(log(*LONG_TURNS[:9]), summing(), "p", KNOWN).cut
    anew = plan(log(*LONG_TURNS[:16]), summing(heading="So far"), "p", KNOWN, cut)
    assert anew.summary is not None
    assert (anew.summary.generation, anew.summary.covered_messages) == (1, 12)
    none = plan(log(*LONG_TURNS[:16]), HUNDRED, "p", KNOWN, cut)
    assert none.trimmed
    assert (none.summary, none.cut and none.cut.summary) == (None, None)


def test_a_summary_of_what_the_client_left_out_stays_in_the_cut_and_is_not_sent() -> None:
    cut = plan(log(*LONG_TURNS[:9]), summing(), "p", KNOWN).cut
    assert cut is not None
    assert cut.summary is not None
    window = plan(log(*LONG_TURNS[:14])[6:], summing(keep_rounds=9), "p", KNOWN, cut, start=6)
    assert window.trimmed
    assert window.summary is None
    assert window.cut is not None
    assert window.cut.summary == cut.summary


def test_of_a_summary_that_covers_more_than_was_left_out_the_rest_is_told_anew() -> None:
    cut = plan(log(*LONG_TURNS[:9]), summing(role="user"), "p", KNOWN).cut
    assert cut is not None
    assert cut.summary is not None
    other = policy(trigger={"messages": 6}, edits=[SHORTER])
    made = plan(log(*LONG_TURNS[:14])[4:], other, "p", KNOWN, cut, start=4)
    assert made.trimmed
    # The messages that it covered are sent again from there on; before them it stands for the others.
    assert (made.summary, len(made.view)) == (None, 10)
    assert made.cut is not None
    assert made.cut.summary == replace(cut.summary, until=4)
    after = plan(log(*LONG_TURNS[:15])[4:], other, "p", KNOWN, made.cut, start=4)
    assert (after.summary, after.view[:10]) == (None, made.view)
    whole = plan(log(*LONG_TURNS[:15]), other, "p", KNOWN, made.cut)
    assert whole.summary == made.cut.summary


def test_a_summary_is_part_of_what_grows() -> None:
    auto = policy(trigger={"cost": "auto"}, keep=NEWEST, edits=[SHORTER])
    entries = log(*turns(1, 1), *calls(4))[2:]
    gap = Gap(start=0, stop=2, edit="summarize", reason="", tokens=90_000, tool_calls=0)

    def asks(tokens: int) -> bool:
        summary = Summary(
            text="So far.",
            role="merge",
            until=2,
            tokens=tokens,
            kind="statistics",
            covered_messages=2,
            covered_tokens=90_000,
        )
        cut = Cut(
            position=2,
            policy="p",
            version="of another policy",
            changes=(),
            tokens=tokens,
            messages=0,
            tool_calls=0,
            gaps=(gap,),
            summary=summary,
        )
        made = plan(entries, auto, "p", replace(KNOWN, prices=PRICES), cut)
        assert (made.summary, made.tokens_sent) == (summary, tokens + 11 + 4 * 620)
        return made.needs_whole

    # The last result has 610 tokens: a third of what was sent, or, with a long summary, hardly anything.
    assert [asks(10), asks(60_500)] == [True, False]


SUMMARY = {"type": "summarize", "mode": "statistics", "keep_rounds": 0, "min_messages": 1}


@pytest.mark.parametrize(
    ("edit", "sent"),
    [
        (DROP, 800),
        ({**DROP, "target": {"tokens": 300}}, 280),
        ({**DROP, "when": {"tokens": 900}, "target": {"tokens": 300}}, 800),
        (SUMMARY, 800),
        ({**SUMMARY, "upper": 400, "lower": 300}, 300),
        ({**SUMMARY, "upper": 850, "lower": 300}, 800),
    ],
)
def test_an_edit_with_a_limit_of_its_own_goes_on_below_the_policys_target(edit: dict[str, Any], sent: int) -> None:
    known = replace(KNOWN, context_window=1_000)
    own = policy(trigger={"tokens": 500}, target={"ratio": 0.9}, edits=[edit])
    made = plan(log(*turns(1, 20)), own, "mine", known)
    assert sent - 80 < made.tokens_sent <= sent
    assert (made.tokens_sent == 800) == (sent == 800)


BY_MODEL = {"type": "summarize", "mode": "model", "min_messages": 4, "min_new_messages": 4, "keep_rounds": 1}
SUMMING = policy(trigger={"tokens": 200}, edits=[BY_MODEL])


def tenfold(entries: Sequence[Entry]) -> list[Entry]:
    """Return a log whose messages have ten times the tokens, so that a summary has some room."""
    return [replace(entry, tokens=10 * entry.tokens) for entry in entries]


def ready(until: int, **fields: Any) -> ReadySummary:
    """Return a summary by a model of thirty tokens."""
    return ReadySummary(
        text="s" * 20, tokens=30, until=until, model="small", covered_messages=until, covered_tokens=9999, **fields
    )


def test_a_summary_is_wanted_in_time_and_used_by_the_next_move() -> None:
    large = policy(trigger={"tokens": 2000}, edits=[BY_MODEL])
    assert plan(tenfold(log(*turns(1, 4))), large, "p", KNOWN).summary_request is None
    early = plan(tenfold(log(*turns(1, 4), "user 1")), large, "p", KNOWN)
    # 1710 tokens are more than four fifths of 2000: four rounds of history, of which the newest stays.
    assert (early.trimmed, early.summary_request) == (False, SummaryRequest(stop=6, room=1199, urgent=False))
    known = replace(KNOWN, ready_summary=ready(6))
    longer = log(*turns(1, 5))
    waiting = plan(longer, SUMMING, "p", known)
    assert (waiting.trimmed, waiting.summary_request, waiting.summary) == (False, None, None)
    more = log(*turns(1, 5), "user 1")
    made = plan(more, SUMMING, "p", known)
    assert (made.fired, made.summary_request) == ("tokens 211 > 200", None)
    assert made.summary == Summary(
        text="s" * 20,
        role="merge",
        until=6,
        tokens=30,
        kind="model",
        covered_messages=6,
        covered_tokens=9999,
        model="small",
    )
    assert lines(made.view) == [*turns(4, 5), "user 1"]
    assert made.tokens_sent == 30 + 91
    assert made.cut is not None
    assert made.cut.gaps == (
        Gap(start=0, stop=6, edit="summarize", reason="it is summed up", tokens=120, tool_calls=0),
    )
    # Between two moves it stands, whatever else is ready.
    later = replace(KNOWN, ready_summary=ready(10))
    after = plan(more + log(*turns(1, 6), "user 1")[11:], SUMMING, "p", later, made.cut)
    assert (after.trimmed, after.summary) == (False, made.summary)


def test_a_log_that_would_go_out_as_it_came_wants_its_summary_before_the_trigger_fires() -> None:
    large = policy(trigger={"tokens": 2000}, edits=[BY_MODEL])
    known = replace(KNOWN, context_window=100_000)
    made = plan(tenfold(log(*turns(1, 4), "user 1")), large, "p", known)
    assert (made.trimmed, made.fired, made.summary_request) == (
        False,
        "",
        SummaryRequest(stop=6, room=1199, urgent=False),
    )


def test_a_log_that_would_go_out_as_it_came_gets_the_summary_that_somebody_asked_for() -> None:
    # The policy has none of its own: `POST …/compact` made it.
    calm = policy(trigger={"tokens": 20_000}, target={"tokens": 10_000}, edits=[DROP])
    entries = tenfold(log(*turns(1, 5), "user 1"))
    known = replace(KNOWN, context_window=100_000, ready_summary=ready(6, asked=True))
    assert calm.summarizer is None
    made = plan(entries, calm, "p", known)
    assert (made.trimmed, made.fired) == (True, ASKED)
    assert made.summary is not None
    assert (made.summary.until, made.summary.text) == (6, "s" * 20)


def test_what_arrives_is_trimmed_in_a_log_without_a_cut() -> None:
    known = replace(KNOWN, context_window=100_000)
    entries = log("user 1", "assistant | a f", f"tool a {300 * 'x'}")
    made = plan(entries, policy(on_arrival=[SHORT]), "p", known)
    assert (made.cut, [change.position for change in made.changes]) == (None, [2])
    assert made.tokens_sent < made.tokens_before
    # It keeps its bytes under a policy that trims nothing.
    again = plan(recorded(entries, made), policy(), "p", known)
    assert (again.view, again.tokens_sent) == (made.view, made.tokens_sent)


def test_what_the_client_was_not_shown_is_sent_in_a_log_without_a_cut() -> None:
    known = replace(KNOWN, context_window=100_000)
    entries = log("user 1", "assistant 1", "user 2")
    hidden = Hidden(before=(message("user so"),), reply=None, after=(), tokens=12)
    entries[1] = replace(entries[1], hidden=hidden)
    made = plan(entries, policy(), "p", known)
    assert lines(made.view) == ["user 1", "user so", "assistant 1", "user 2"]


def test_where_none_is_ready_a_move_says_that_it_would_have_used_one() -> None:
    both = policy(trigger={"tokens": 2000}, target={"tokens": 1500}, edits=[BY_MODEL, DROP])
    entries = tenfold(log(*turns(1, 5), "user 1"))
    made = plan(entries, both, "p", KNOWN)
    # What drop_oldest did is enough; three rounds would have been enough for a summary of 390 tokens.
    assert made.edits == ("drop_oldest",)
    assert made.summary_request == SummaryRequest(stop=6, room=390, urgent=True)
    again = plan(entries, both, "p", replace(KNOWN, ready_summary=ready(6)))
    assert (again.edits, again.summary_request) == (("summarize",), None)
    # What was dropped may be summed up later.
    next_one = tenfold(log(*turns(1, 7), "user 1"))
    after = plan(next_one, both, "p", replace(KNOWN, ready_summary=ready(8)), made.cut)
    assert after.summary is not None
    assert (after.summary.until, after.summary.covered_messages) == (8, 8)
    assert after.earlier == (
        Gap(start=0, stop=4, edit="drop_oldest", reason="its round was the oldest", tokens=800, tool_calls=0),
    )


def test_what_was_dropped_while_it_was_made_is_used_by_the_next_move_and_no_sooner() -> None:
    both = policy(trigger={"tokens": 2000}, target={"tokens": 1500}, edits=[BY_MODEL, DROP])
    first = plan(tenfold(log(*turns(1, 5), "user 1")), both, "p", KNOWN)
    assert first.made[-1].position == 3
    known = replace(
        KNOWN,
        ready_summary=ReadySummary(
            text="s" * 290, tokens=300, until=4, model="small", covered_messages=4, covered_tokens=800
        ),
    )
    # All that it covers is gone: between two moves nothing changes.
    longer = tenfold(log(*turns(1, 6), "user 1"))
    between = plan(longer, both, "p", known, first.cut)
    assert (between.trimmed, between.summary) == (False, None)
    assert between.view[: len(first.view) - 1] == first.view[:-1]
    longest = tenfold(log(*turns(1, 7), "user 1"))
    made = plan(longest, both, "p", known, first.cut)
    # It comes on top; what is next makes room for it.
    assert made.summary is not None
    assert (made.summary.until, made.summary.tokens, made.summary_request) == (4, 300, None)
    assert (made.edits, made.tokens_sent) == (("drop_oldest", "summarize"), 300 + 2 * 400 + 110)
    assert made.cut is not None
    again = plan([*longest, *tenfold(log(*turns(1, 7), "user 1", "assistant 1"))[15:]], both, "p", known, made.cut)
    assert (again.trimmed, again.summary, again.edits) == (False, made.summary, made.edits)
    assert again.view[: len(made.view)] == made.view


def test_where_nothing_makes_room_for_it_one_that_makes_the_view_larger_is_not_used() -> None:
    dropping = policy(trigger={"tokens": 200}, target={"tokens": 150}, edits=[DROP])
    first = plan(log(*turns(1, 5), "user 1"), dropping, "p", KNOWN)
    assert first.cut is not None
    cut = replace(first.cut, version=SUMMING.version)
    longer = log(*turns(1, 7), "user 1")
    known = replace(KNOWN, ready_summary=ready(4))
    made = plan(longer, SUMMING, "p", known, cut)
    assert (made.trimmed, made.summary, made.tokens_sent) == (True, None, 211)
    # One that makes room itself is used, though that is not enough.
    tools = policy(trigger={"tool_calls": 1}, edits=[BY_MODEL])
    calls = [line for n in range(4) for line in (f"assistant | c{n} f", f"tool c{n} {TEN}")]
    some = plan(log(*turns(1, 4), "user 1", *calls), tools, "p", known)
    assert some.summary is not None
    assert (some.summary.until, some.tokens_sent) == (
        4,
        30 + 80 + plan(log("user 1", *calls), Policy(), "p", KNOWN).tokens_sent,
    )


def test_what_keep_rounds_leaves_to_sum_up_is_said_where_it_is_nothing() -> None:
    calls = [line for n in range(9) for line in (f"assistant | c{n} f", f"tool c{n} {TEN}")]
    entries = log(*turns(1, 1), "user 1", *calls)
    words = (
        "nothing could be summed up: keep_rounds is 1, and there are 1 whole rounds; "
        "keep_rounds: 0 sums up within a round, too"
    )
    made = plan(entries, SUMMING, "p", KNOWN)
    assert (made.trimmed, made.warnings) == (True, (words,))
    statistics = policy(trigger={"tokens": 200}, edits=[{**BY_MODEL, "mode": "statistics"}])
    assert plan(entries, statistics, "p", KNOWN).warnings == (words,)
    # Once: until the next move nobody is told again.
    more = [*entries, *log(*turns(1, 1), "user 1", *calls, "assistant so")[len(entries) :]]
    assert plan(more, SUMMING, "p", KNOWN, made.cut).warnings == ()
    # With 0, where other edits did enough, and where there is something to sum up, there is nothing to say.
    inside = policy(trigger={"tokens": 200}, edits=[{**BY_MODEL, "keep_rounds": 0}])
    assert plan(entries, inside, "p", KNOWN).warnings == ()
    ample = {**BY_MODEL, "budget_ratio": 1}
    both = policy(trigger={"tokens": 200}, target={"tokens": 150}, edits=[ample, DROP])
    enough = plan(log(*turns(1, 1), f"user {'1' * 200}", "assistant 1", "user 1"), both, "p", KNOWN)
    assert (enough.trimmed, enough.warnings) == (True, ())
    wanting = plan(tenfold(log(*turns(1, 4), "user 1")), SUMMING, "p", KNOWN)
    assert wanting.summary_request is not None
    assert wanting.warnings == ()
    assert plan(entries, policy(trigger={"tokens": 200}, edits=[SHORT]), "p", KNOWN).warnings == ()


def test_a_trim_says_that_no_summary_is_made_because_the_target_leaves_it_too_little_room() -> None:
    entries = tenfold(log(*turns(1, 5), "user 1"))
    said = "no summary is made: budget_ratio leaves it 119 tokens, and it takes 120"
    for share, warnings in ((0.1195, (said,)), (0.12, ())):
        edit = {**BY_MODEL, "budget_ratio": share}
        made = plan(entries, policy(trigger={"tokens": 1200}, target={"tokens": 1000}, edits=[edit, DROP]), "p", KNOWN)
        assert (made.trimmed, made.summary_request is None) == (True, bool(warnings))
        assert made.warnings == warnings
    # Without a target there is no such limit, and code sums up in any room.
    for edit in ({**BY_MODEL, "budget_ratio": 0.01}, {**BY_MODEL, "mode": "statistics"}):
        made = plan(entries, policy(trigger={"tokens": 1200}, edits=[edit]), "p", KNOWN)
        assert (made.trimmed, made.warnings) == (True, ())


def test_another_is_wanted_only_when_enough_is_new_since_the_newest() -> None:
    made = plan(log(*turns(1, 5), "user 1"), SUMMING, "p", replace(KNOWN, ready_summary=ready(6)))
    longer = log(*turns(1, 7), "user 1")
    known = replace(KNOWN, ready_summary=ready(6))
    short = plan(longer, SUMMING, "p", known, made.cut)
    # 30 and 171 tokens: the trigger fires, and the rounds 4 to 6 were not summed up yet.
    assert (short.tokens_sent, short.trimmed) == (201, True)
    assert short.summary_request == SummaryRequest(stop=12, room=149, urgent=True)
    strict = policy(trigger={"tokens": 200}, edits=[{**BY_MODEL, "min_new_messages": 7}])
    cut = replace(made.cut, version=strict.version) if made.cut is not None else None
    assert plan(longer, strict, "p", known, cut).summary_request is None


def test_under_another_version_what_is_ready_is_used_again() -> None:
    known = replace(KNOWN, ready_summary=ready(6))
    entries = log(*turns(1, 5), "user 1")
    made = plan(entries, SUMMING, "p", known)
    other = policy(trigger={"tokens": 130}, edits=[BY_MODEL])
    more = [*entries, *log(*turns(1, 5), "user 1", "assistant 1", "user 2")[11:]]
    again = plan(more, other, "p", known, made.cut)
    assert again.trimmed
    assert again.summary == made.summary
    assert again.view[:5] == made.view


@pytest.mark.parametrize("given", [Policy(), SUMMING], ids=["without edits", "with them"])
def test_what_somebody_asked_for_moves_the_cut_at_once_and_once(given: Policy) -> None:
    entries = log(*turns(1, 3), "user 1")
    known = replace(KNOWN, ready_summary=ready(4, asked=True))
    made = plan(entries, given, "p", known)
    assert (made.trimmed, made.fired, made.edits) == (True, ASKED, ("summarize",))
    assert lines(made.view) == [*turns(3, 3), "user 1"]
    assert made.summary is not None
    assert made.cut is not None
    assert (made.cut.policy, made.cut.version, made.cut.position) == ("p", given.version, 7)
    more = entries + log(*turns(1, 3), "user 1", "assistant 1")[7:]
    again = plan(more, given, "p", known, made.cut)
    assert (again.trimmed, again.fired) == (False, "")
    assert again.view == (*made.view, more[-1].message)


def test_what_somebody_asked_for_is_not_used_where_it_makes_nothing_smaller() -> None:
    entries = log(*turns(1, 2))
    useless = ReadySummary(
        text="s" * 90, tokens=100, until=2, model="small", covered_messages=2, covered_tokens=40, asked=True
    )
    made = plan(entries, SUMMING, "p", replace(KNOWN, ready_summary=useless))
    assert (made.trimmed, made.fired, made.cut) == (False, "", None)
    beyond = plan(entries, SUMMING, "p", replace(KNOWN, ready_summary=ready(9, asked=True)))
    assert not beyond.trimmed


def test_beside_what_somebody_asked_for_the_policy_does_what_it_fires_for() -> None:
    known = replace(KNOWN, ready_summary=ready(4, asked=True))
    dropping = policy(trigger={"tokens": 200}, target={"tokens": 100}, edits=[DROP])
    entries = log(*turns(1, 5), "user 1")
    made = plan(entries, dropping, "p", known)
    assert made.fired == f"{ASKED}; tokens 211 > 200"
    assert made.edits == ("summarize", "drop_oldest")
    assert made.tokens_sent <= 100
    # Under another version all begins anew: the policy does what it says, though it does not fire.
    first = plan(entries, dropping, "p", KNOWN)
    other = policy(trigger={"tokens": 201}, target={"tokens": 60}, edits=[DROP])
    further = replace(KNOWN, ready_summary=ready(8, asked=True))
    asks = plan(entries[6:], other, "p", further, first.cut)
    assert (asks.needs_whole, asks.trimmed) == (True, False)
    again = plan(entries, other, "p", further, first.cut)
    assert (again.fired, again.edits) == (ASKED, ("summarize", "drop_oldest"))
    assert again.tokens_sent <= 60
    # An overflow uses it too.
    over = plan(entries, Policy(), "p", known, overflow=100)
    assert over.edits == ("summarize", "drop_oldest")


def test_what_the_client_left_out_is_not_brought_back_by_a_summary() -> None:
    entries = log(*turns(1, 6), "user 1")[2:]
    known = replace(KNOWN, ready_summary=ready(6))
    made = plan(entries, SUMMING, "p", known, start=2)
    assert (made.summary, made.summary_request) == (None, None)
    assert compaction(entries, SUMMING, KNOWN, start=2) is None


def test_what_would_be_summed_up_if_somebody_asked() -> None:
    entries = tenfold(log(*turns(1, 4), "user 1"))
    assert compaction(entries, SUMMING, KNOWN) == SummaryRequest(stop=6, room=1199, urgent=False)
    assert compaction(entries, SUMMING, replace(KNOWN, ready_summary=ready(6))) is None
    # Without a policy that says otherwise no round of the history stays.
    assert compaction(entries, policy(), KNOWN) == SummaryRequest(stop=8, room=1599, urgent=False)
    cut = plan(entries, SUMMING, "p", replace(KNOWN, ready_summary=ready(6, asked=True))).cut
    assert cut is not None
    assert compaction(entries[6:], SUMMING, KNOWN, cut) == SummaryRequest(stop=8, room=400 + 30 - 1, urgent=False)
    more = [*entries[6:], *tenfold(log(*turns(1, 6), "user 1"))[9:]]
    assert compaction(more, SUMMING, KNOWN, cut) == SummaryRequest(stop=10, room=710 + 30 - 1, urgent=False)
    assert compaction(entries[8:], SUMMING, KNOWN, cut) is None
    limited = policy(trigger={"tokens": 2000}, target={"tokens": 1900}, edits=[BY_MODEL])
    assert compaction(entries, limited, KNOWN) == SummaryRequest(stop=6, room=494, urgent=False)


CHEAP = Prices(read=0.1, write=1.0, output=2.0, lifetime=300.0, minimum=0, source="known")


def test_where_cost_moves_the_cut_a_summary_is_wanted_once_it_pays() -> None:
    sums = {**BY_MODEL, "max_tokens": 50}
    paying = policy(trigger={"cost": "auto"}, edits=[sums])
    known = replace(KNOWN, prices=CHEAP, fixed_tokens=3000)
    few = plan(log(*(line for n in range(4) for line in turns(n, n)), "user 1"), paying, "p", known)
    assert few.summary_request is None
    lines_of = [line for n in range(60) for line in (f"user {n:0100}", f"assistant {n:0100}")]
    asked = [
        made.summary_request
        for stop in range(1, len(lines_of), 2)
        if not (made := plan(log(*lines_of[:stop]), paying, "p", known)).trimmed
    ]
    wanted = [each for each in asked if each is not None]
    assert wanted
    assert not any(each.urgent for each in wanted)
    # It is used when the move pays, too.
    later = replace(known, ready_summary=ready(wanted[0].stop))
    used = [plan(log(*lines_of[:stop]), paying, "p", later).summary for stop in range(1, len(lines_of), 2)]
    assert any(used)
    # And where an edit must pay, one that would not is not waited for.
    strict = policy(trigger={"tokens": 3200}, edits=[{**sums, "when": {"cost": "auto"}}])
    assert plan(log(*lines_of[:11]), strict, "p", known).summary_request is None
    assert plan(log(*lines_of[:119]), strict, "p", known).summary_request == SummaryRequest(
        stop=116, room=12759, urgent=True
    )


def hid(entry: Entry) -> Entry:
    """Return the entry of a reply with a hidden round of thirty tokens before it."""
    before = (message("assistant | x recall"), message("tool x 0123456789"))
    return replace(entry, hidden=Hidden(before=before, reply=None, after=(), tokens=30))


def test_what_the_client_was_not_shown_is_sent_and_counted_where_it_is_sent() -> None:
    entries = log(*turns(1, 2))
    entries = [*entries[:3], hid(entries[3])]
    keeping = policy(trigger={"tokens": 100}, edits=[{"type": "keep_rounds", "last": 5}])
    made = plan(entries, keeping, "p", KNOWN)
    assert lines(made.view) == [*turns(1, 2)[:3], "assistant | x recall", f"tool x {TEN}", turns(1, 2)[3]]
    assert (made.tokens_before, made.tokens_sent, made.messages_before, made.trimmed) == (110, 110, 6, True)
    assert made.fired == "tokens 110 > 100"
    off = bypass(entries, KNOWN)
    assert (off.view, off.tokens_sent) == (tuple(entry.message for entry in entries), 80)


def test_what_the_client_was_not_shown_goes_with_what_is_dropped_or_changed() -> None:
    entries = log(*turns(1, 6))
    entries = [hid(each) if at in {1, 11} else each for at, each in enumerate(entries)]
    made = plan(entries, HUNDRED, "p", KNOWN)
    # Of the newest turns nothing is touched.
    assert made.edits == ("drop_oldest",)
    assert made.tokens_sent == 40 + 30
    assert [change.position for change in made.made][:2] == [0, 1]
    assert made.warnings == ("target missed: 70 tokens are 10 above 60",)
    assert made.cut is not None
    assert made.cut.gaps == (
        Gap(start=0, stop=10, edit="drop_oldest", reason="its round was the oldest", tokens=200, tool_calls=0),
    )
    again = plan([*entries[10:], *log(*turns(1, 7))[12:13]], HUNDRED, "p", KNOWN, made.cut)
    assert (again.trimmed, again.view[:4]) == (False, made.view)
    # Only where upstream refuses more.
    least = plan(entries, HUNDRED, "p", KNOWN, overflow=45)
    assert lines(least.view) == turns(6, 6)


def _forked(*at: int | None, **keys: Any) -> list[Plan]:
    """Return the plans of three rounds, where others go on from these positions."""
    entries = log(*turns(1, 2), "user " + TEN)
    edited = policy(**({"trigger": {"tokens": 60}, "target": {"tokens": 60}, "edits": [DROP]} | keys))
    return [plan(entries, edited, "mine", replace(KNOWN, fork=fork)) for fork in at]


def test_a_move_that_changes_nothing_of_a_branch_is_kept_where_it_begins() -> None:
    alone, shared = _forked(None, 4)
    assert alone.cut is not None
    assert shared.cut == replace(alone.cut, position=4, tokens=alone.cut.tokens - 20, messages=2)
    assert replace(shared, cut=alone.cut) == alone
    # Another branch from there needs no move of its own, and sends the same before its own words.
    other = log(*turns(1, 2), "user another")
    made = plan(other, HUNDRED, "mine", replace(KNOWN, fork=4), shared.cut)
    assert (made.trimmed, lines(made.view)) == (False, [*turns(2, 2), "user another"])


def test_what_is_cleared_before_a_branch_is_kept_there_too() -> None:
    entries = log("user q", "assistant | a f", "tool a " + "x" * 500, "assistant ok", "user " + TEN)
    edited = policy(trigger={"every_request": True}, edits=[SHORT])
    made = plan(entries, edited, "p", replace(KNOWN, fork=4)).cut
    assert made is not None
    assert (made.position, made.messages, made.tool_calls) == (4, 4, 1)
    assert [change.position for change in made.changes] == [2]


def test_calls_of_the_branch_itself_are_not_counted_where_its_cut_stands() -> None:
    entries = log(*turns(1, 2), "user q", "assistant | a f", "tool a 1")
    edited = policy(trigger={"tokens": 80}, target={"tokens": 75}, edits=[DROP])
    made = plan(entries, edited, "p", replace(KNOWN, fork=4)).cut
    assert made is not None
    assert (made.position, made.messages, made.tool_calls, made.tokens) == (4, 2, 0, 40)


@pytest.mark.parametrize("fork", [0, 5, 6])
def test_a_branch_that_begins_nowhere_keeps_its_cut_at_the_end(fork: int) -> None:
    alone, made = _forked(None, fork)
    assert made == alone


def test_a_move_that_reaches_into_the_branch_is_kept_at_the_end() -> None:
    alone, made = _forked(None, 1)
    assert made == alone
    again = plan(
        log(*turns(1, 4), "user " + TEN),
        HUNDRED,
        "mine",
        replace(KNOWN, fork=8),
        Cut(position=8, policy="mine", version="v", changes=(), tokens=0, messages=0, tool_calls=0),
    )
    assert again.cut is not None
    assert (again.trimmed, again.cut.position) == (True, 9)  # there is one at the place already


def test_a_repaired_view_is_no_other_branchs() -> None:
    entries = log("user q", "assistant | a f", "user " + TEN * 4, "assistant ok", "user " + TEN)
    cuts = [
        plan(
            entries,
            policy(trigger={"every_request": True}, edits=[SHORT]),
            "p",
            replace(KNOWN, fork=4),
            composed=composed,
        ).cut
        for composed in (False, True)
    ]
    assert [made and made.position for made in cuts] == [4, 5]


def test_a_summary_that_covers_only_what_is_before_a_branch_is_kept_there() -> None:
    edits = [{"type": "summarize", "mode": "statistics", "keep_rounds": 1, "min_messages": 0}]
    edited = policy(trigger={"tokens": 60}, edits=edits)
    made = plan(log(*turns(1, 9), "user " + TEN), edited, "p", replace(KNOWN, fork=18)).cut
    assert made is not None
    assert made.summary is not None
    assert (made.position, made.summary.until <= 18) == (18, True)


# ------------------------------------------------------------------------------------------ demand

PRICES_DEMAND = Prices(read=0.1, write=1.25, output=5.0, lifetime=300.0, minimum=0, source="known")


def edit(**settings: Any) -> Summarize:
    """Return the edit without its conditions, keeping one round, unless the settings say otherwise."""
    free = {"keep_rounds": 1, "min_messages": 0, "min_new_messages": 0, "growth_ratio": 0}
    return Summarize.model_validate({"mode": "model", **free, **settings})


def policy_demand(trigger: dict[str, Any] | None, sums: Summarize) -> Policy:
    keys = {"trigger": trigger, "edits": [sums]} if trigger is not None else {}
    return Policy.model_validate(keys)


def talk(rounds: int) -> Draft:
    """Return a talk of so many rounds of 220 tokens, and a question."""
    lines = [line for n in range(rounds) for line in (f"user {n}{'?' * 99}", f"assistant {n}{'.' * 99}")]
    return draft_of(messages([*lines, "user and now"]))


@pytest.mark.parametrize(
    ("trigger", "settings", "size", "added"),
    [
        ({"tokens": 1000}, {}, Size(tokens=800, messages=0, tool_calls=0), None),
        ({"tokens": 1000}, {}, Size(tokens=801, messages=0, tool_calls=0), 199),
        ({"tokens": 1000}, {"soft": 0.5}, Size(tokens=501, messages=0, tool_calls=0), 499),
        ({"tokens": 1000}, {}, Size(tokens=1200, messages=0, tool_calls=0), 0),
        ({"ratio": 0.5}, {}, Size(tokens=801, messages=0, tool_calls=0), 199),
        ({"messages": 10}, {}, Size(tokens=900, messages=8, tool_calls=0), None),
        ({"messages": 10}, {}, Size(tokens=900, messages=9, tool_calls=0), 100),
        ({"tool_calls": 10}, {}, Size(tokens=900, messages=0, tool_calls=9), 100),
        ({"tool_calls": 10, "tokens": 1000}, {}, Size(tokens=900, messages=0, tool_calls=1), 100),
        ({"every_request": True}, {}, Size(tokens=1, messages=1, tool_calls=0), 0),
        ({"every_request": True}, {"upper": 1000}, Size(tokens=900, messages=0, tool_calls=0), 100),
        ({"every_request": True}, {"upper": 1000}, Size(tokens=800, messages=0, tool_calls=0), None),
        ({"idle_seconds": 9}, {}, Size(tokens=1, messages=1, tool_calls=0), None),
        ({"idle_seconds": 9}, {"upper": 1000}, Size(tokens=900, messages=0, tool_calls=0), 100),
        ({"cost": "auto"}, {"upper": 1000}, Size(tokens=800, messages=0, tool_calls=0), None),
        ({"messages": 10}, {"upper": 1000}, Size(tokens=800, messages=99, tool_calls=0), None),
        ({"messages": 10}, {"upper": 1000}, Size(tokens=900, messages=99, tool_calls=0), 100),
        ({"tokens": 1000}, {"when": {"messages": 10}}, Size(tokens=900, messages=8, tool_calls=0), None),
        ({"tokens": 1000}, {"when": {"messages": 10}}, Size(tokens=900, messages=9, tool_calls=0), 100),
        (None, {}, Size(tokens=9999, messages=99, tool_calls=99), None),
    ],
)
def test_a_summary_is_due_from_a_part_of_what_moves_the_cut(
    trigger: dict[str, Any] | None, settings: dict[str, Any], size: Size, added: int | None
) -> None:
    known = replace(KNOWN, context_window=2000)
    sums = edit(**settings)
    assert tokens_left(policy_demand(trigger, sums), sums, known, size) == added
    # Where upstream counts twice as many, half as many are enough.
    twice, half = replace(known, scale=2.0), replace(size, tokens=size.tokens // 2)
    later = tokens_left(policy_demand(trigger, sums), sums, twice, half)
    if size.tokens % 2 == 0:
        assert later == (None if added is None else added // 2)


def test_what_comes_before_the_trigger_fires_counts() -> None:
    draft = replace(talk(9), target=1500)
    assert draft.total == 9 * 220 + 17
    near = requested_in_time(draft, edit(budget_ratio=0.1), 0, None)
    assert near == SummaryRequest(stop=6, room=150, urgent=False)
    later = requested_in_time(draft, edit(budget_ratio=0.1), 300, None)
    assert later == SummaryRequest(stop=10, room=150, urgent=False)
    assert requested_in_time(draft, edit(min_messages=20), 0, None) is None


def costs(draft: Draft, turns: int) -> Costs:
    places = len(draft.messages)
    account = Account(turns=turns, untrimmed=10**6, saved=0.0)
    return Costs(
        prices=PRICES_DEMAND,
        warm=True,
        messages=draft.messages,
        tokens=draft.tokens,
        summary=None,
        fixed=0,
        cached=places - 1,
        account=account,
        earlier=0,
        reads=(0,) * places,
    )


def test_where_cost_moves_the_cut_it_must_pay_what_it_costs_to_make() -> None:
    draft = talk(9)
    sums = edit(max_tokens=100)
    assert requested_in_time(draft, sums, None, costs(draft, 8)) is None
    wanted = requested_in_time(draft, sums, None, costs(draft, 30))
    assert wanted == SummaryRequest(stop=16, room=1759, urgent=False)
    assert requested_in_time(draft, sums, None, None) is None
    assert requested_in_time(draft, edit(min_messages=99), None, costs(draft, 30)) is None
    # 1760 tokens are read to write 100; 337 are sent instead of 1997, of which 1980 were cached. Later ones
    # cost 166 less each.
    loss = 1.25 * 337 - 0.1 * 1980 - 1.25 * 17 + 1760 + 5 * 100
    gain = 0.1 * 1660
    for turns in (8, 13, 15, 30):
        assert wanted is not None
        paying = costs(draft, turns).summary_pays(draft, sums.imagined(draft, wanted), NO_CHANGE)
        assert paying == (loss <= gain * turns)


def test_who_asks_gets_all_of_it_but_what_must_stay() -> None:
    draft = talk(9)
    assert edit(keep_rounds=2).requested_now(draft) == SummaryRequest(stop=14, room=1539, urgent=False)
    # No more rounds stay than leave one to sum up, and no condition counts.
    strict = edit(keep_rounds=99, min_messages=99, min_new_messages=99, growth_ratio=9)
    assert strict.requested_now(draft) == SummaryRequest(stop=2, room=219, urgent=False)
    # A target that is met already, and upper and lower, are no reason to stop.
    assert edit(upper=9999, lower=9000).requested_now(replace(draft, target=9999)) == SummaryRequest(
        stop=16, room=1759, urgent=False
    )


def test_in_one_long_round_what_lies_behind_is_summed_up() -> None:
    calls = [line for n in range(9) for line in (f"assistant | c{n} f", f"tool c{n} {'=' * 90}")]
    draft = draft_of(messages(["user do it", *calls]), {"rounds": 1, "spans": 4})
    assert COMPACTION.requested_now(draft) == SummaryRequest(stop=11, room=5 * 110 - 1, urgent=False)
    assert edit(keep_rounds=10).requested_now(draft) == SummaryRequest(stop=11, room=5 * 110 - 1, urgent=False)


def test_what_is_summed_up_is_not_again() -> None:
    draft = talk(9)
    made = ReadySummary(text="so", tokens=12, until=16, model="small", covered_messages=16, covered_tokens=1760)
    assert edit().requested_now(replace(draft, ready_summary=made)) is None
    standing = Summary(
        text="so", role="merge", until=16, tokens=12, kind="model", covered_messages=16, covered_tokens=1760
    )
    assert edit().requested_now(replace(draft, summary=standing)) is None
    # It is made of that one and of a round, and has fewer tokens than these.
    assert edit().requested_now(replace(draft, ready_summary=replace(made, until=14))) == SummaryRequest(
        stop=16, room=12 + 220 - 1, urgent=False
    )
    assert COMPACTION.requested_now(draft_of(messages(["user hi"]))) is None
    assert COMPACTION.requested_now(draft_of([])) is None


# ------------------------------------------------------------------------------------------ reasoning


def thinking(text: str) -> Message:
    return DIALECT.message(b'{"role":"assistant","content":"%b","reasoning_details":[{"data":"x"}]}' % text.encode())


def looping(rounds: int, *, first: Message | None = None) -> tuple[Entry, ...]:
    """Return rounds of forty tokens, the last one a question that was answered in part."""
    entries = list(log(*turns(1, rounds)))
    if first is not None:
        entries[1] = replace(entries[1], message=first)
    return tuple(entries)


@pytest.mark.parametrize(
    ("keys", "rounds", "window", "reasons", "fired"),
    [
        ({}, 3, None, True, False),  # 120 tokens, the last entry is a reply
        ({}, 3, None, False, True),
        ({"trim_at": "any"}, 3, None, True, True),
        ({}, 4, None, True, True),  # 160 > 1.25 * 100
        ({}, 3, 110, True, True),  # it would not fit
        ({"trigger": {"every_request": True}}, 3, None, True, True),
    ],
)
def test_a_trim_waits_for_a_user_message_where_reasoning_is_sent(
    keys: dict[str, Any], rounds: int, window: int | None, reasons: bool, fired: bool
) -> None:
    entries = looping(rounds, first=thinking("0123456789") if reasons else None)
    given = policy(**{"trigger": {"tokens": 100}, "target": {"tokens": 60}, "edits": [DROP], **keys})
    made = plan(entries, given, "mine", replace(KNOWN, context_window=window))
    assert made.trimmed is fired
    assert bool(made.fired) is fired


def test_a_trim_that_waited_comes_with_the_next_user_message() -> None:
    entries = (*looping(3, first=thinking("0123456789")), *log(*turns(1, 4))[6:7])
    assert plan(entries, HUNDRED, "mine", KNOWN).trimmed
    assert not plan(entries[:-1], HUNDRED, "mine", KNOWN).trimmed


def test_trimming_that_pays_waits_too() -> None:
    paying = policy(trigger={"cost": "auto", "tokens": 10**6}, target={"tokens": 60}, edits=[DROP])
    known = replace(KNOWN, idle=10**6, prices=Prices(read=0.1, write=1.0, output=4.0, lifetime=1.0, minimum=1))
    entries = looping(60, first=thinking("0123456789"))
    assert plan(looping(60), paying, "mine", known).trimmed
    assert not plan(entries, paying, "mine", known).trimmed


def working(replies: int, thought: str = "x") -> tuple[Entry, ...]:
    """Return a turn in which a tool was called so often, with reasoning of so many bytes before each call."""
    entries = [entry_at(0, message("user work"))]
    for number in range(replies):
        call = {"id": f"c{number}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        said = {"role": "assistant", "tool_calls": [call], "reasoning_details": [{"data": thought}]}
        result = {"role": "tool", "tool_call_id": f"c{number}", "content": "found it " * 20}
        entries += [
            entry_at(len(entries) + at, DIALECT.message(orjson.dumps(each))) for at, each in enumerate((said, result))
        ]
    return tuple(entries)


def entry_at(position: int, said: Message) -> Entry:
    return Entry(message=said, tokens=count(said), ref=f"ref_{position}", position=position)


COLD = replace(KNOWN, idle=10**6, prices=Prices(read=0.1, write=1.0, output=4.0, lifetime=1.0, minimum=1))
WARM = replace(KNOWN, prices=Prices(read=0.1, write=1.0, output=1.0, lifetime=1e9, minimum=1))


@pytest.mark.parametrize("idle", [None, 10**6])
def test_instructions_alone_are_never_trimmed(idle: int | None) -> None:
    paying = policy(trigger={"cost": "auto"}, edits=[DROP], target={"tokens": 60})
    made = plan((), paying, "mine", replace(COLD, fixed_tokens=9000, idle=idle), composed=True)
    assert (made.trimmed, made.view, made.tokens_sent) == (False, (), 9000)


def test_trimming_that_pays_does_not_wait_for_ever() -> None:
    paying = policy(trigger={"cost": "auto"}, target={"tokens": 60}, edits=[DROP])
    assert [plan(working(replies), paying, "mine", COLD).trimmed for replies in (5, 7, 8, 60)] == [
        False,
        False,
        True,
        True,
    ]


def test_reasoning_of_the_current_turn_has_a_price_where_trimming_must_pay() -> None:
    clear = {"type": "clear_tool_results", "keep": 1, "digest_chars": 0}
    paying = policy(trigger={"cost": "auto"}, trim_at="any", edits=[clear], keep={"rounds": 0, "spans": 0})

    def first_trim(thought: int) -> int | None:
        trimmed = (
            replies for replies in range(5, 90) if plan(working(replies, "x" * thought), paying, "mine", WARM).trimmed
        )
        return next(trimmed, None)

    assert [first_trim(thought) for thought in (1, 400, 4_000)] == [15, 79, None]
    again = (*working(26, "x" * 4_000), entry_at(53, message("user and now?")))
    assert plan(again, paying, "mine", WARM).trimmed  # what was thought in an earlier turn is missed no more


def test_a_tool_loop_whose_reasoning_is_required_and_checked_is_not_trimmed() -> None:
    loop, bound = working(5), replace(KNOWN, keeps_loop=True, binds_loop=True)
    for keys in ({}, {"trim_at": "any"}, {"trigger": {"every_request": True}}):
        given = policy(**{"trigger": {"tokens": 100}, "target": {"tokens": 60}, "edits": [DROP], **keys})
        assert plan(loop, given, "mine", KNOWN).trimmed
        assert not plan(loop, given, "mine", bound).trimmed
        assert plan((*loop, entry_at(11, message("user and now?"))), given, "mine", bound).trimmed
        assert plan(loop, given, "mine", bound, overflow=500).trimmed
    known = replace(KNOWN, ready_summary=ready(4, asked=True))
    assert plan(loop, SUMMING, "mine", known).trimmed
    assert not plan(loop, SUMMING, "mine", replace(known, keeps_loop=True, binds_loop=True)).trimmed


def test_when_to_trim_and_whom_to_hear_are_no_part_of_the_version() -> None:
    assert policy(trim_at="any", agents="merge").version == policy().version


def test_what_a_provider_refused_to_take_trimmed_is_sent_as_it_is_from_then_on() -> None:
    entries = log(*turns(1, 3))
    opened = untrimmed(entries, HUNDRED, "mine", KNOWN)
    assert opened.view == tuple(entry.message for entry in entries)
    assert (opened.trimmed, opened.fired, opened.edits) == (True, REFUSED, ())
    more = log(*turns(1, 5))
    later = plan(more, HUNDRED, "mine", KNOWN, opened.cut)
    assert len(later.view) == 10
    assert (later.trimmed, later.fired, later.cut) == (False, "", opened.cut)
    assert plan(more, HUNDRED, "mine", KNOWN, opened.cut, overflow=60).tokens_sent <= 60
    other = policy(trigger={"tokens": 100}, target={"tokens": 70}, edits=[DROP])
    assert plan(more, other, "mine", KNOWN, opened.cut).trimmed
    assert untrimmed((), policy(), "mine", KNOWN).tokens_sent == 0


def test_reasoning_that_upstream_refuses_is_left_out_from_then_on() -> None:
    resting = policy()
    entries = [*log("user 1"), entry_at(1, thinking("2")), entry_at(2, message("user 3"))]
    first = plan(entries, resting, "mine", KNOWN)
    made = without_bound_reasoning(first, entries, KNOWN)
    assert made is not None
    assert made.cut is not None
    assert (made.cut.position, made.trimmed, made.fired) == (3, True, UNBOUND)
    assert (made.cut.tokens, made.cut.messages) == (made.tokens_sent, 3)
    assert made.tokens_before == first.tokens_before
    assert lines(made.view) == ["user 1", "assistant 2", "user 3"]
    assert not any(message.has_reasoning for message in made.view)
    later = [*entries, entry_at(3, thinking("4")), entry_at(4, message("user 5"))]
    again = plan(later, resting, "mine", KNOWN, made.cut)
    assert again.view[:3] == made.view
    assert again.view[3].has_reasoning  # it was made behind this view
    twice = without_bound_reasoning(again, later, KNOWN)
    assert twice is not None
    assert not any(message.has_reasoning for message in twice.view)


def test_without_reasoning_or_where_it_is_required_or_after_a_refusal_nothing_else_is_sent() -> None:
    resting, plain = policy(), log("user 1", "assistant 2", "user 3")
    assert without_bound_reasoning(plan(plain, resting, "mine", KNOWN), plain, KNOWN) is None
    loop = working(2)
    required = replace(KNOWN, keeps_loop=True)
    assert without_bound_reasoning(plan(loop, resting, "mine", required), loop, required) is None
    open_end = loop[1:]
    made = plan(open_end, resting, "mine", required, start=1)
    assert without_bound_reasoning(made, open_end, required, start=1) is None
    assert without_bound_reasoning(untrimmed(loop, resting, "mine", KNOWN), loop, KNOWN) is None
    assert without_bound_reasoning(plan(loop, resting, "mine", KNOWN), loop, KNOWN) is not None
