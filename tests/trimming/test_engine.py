"""From a log and a policy to what is sent: when the cut moves, and what is sent between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from proxy.trimming.engine import UNKNOWN_PRICES, bypass, plan
from proxy.trimming.plan import Change, Cut, Entry, Gap, Known, Plan, Summary
from proxy.trimming.policy import Policy
from proxy.trimming.prices import Prices, Step
from proxy.trimming.protocol import NO_RESULT
from proxy.trimming.trigger import UNKNOWN_WINDOW
from proxy.wire.messages import Message
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
    assert moved.cut.gaps == (
        Gap(0, 6, "drop_oldest", "its round was the oldest", 120, 0),
        Gap(6, 7, "e", "", 20, 0),
        Gap(7, 12, "drop_oldest", "its round was the oldest", 100, 0),
    )
    other = policy(trigger={"tokens": 99}, target={"tokens": 60}, edits=[DROP])
    anew = plan(later, other, "p", KNOWN, cut, start=4)
    assert anew.cut is not None
    assert anew.cut.changes == cut.changes[:1]
    assert anew.cut.gaps == (Gap(0, 12, "drop_oldest", "its round was the oldest", 240, 0),)
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


SCALED = replace(KNOWN, scale=2.0)


def test_limits_are_in_tokens_as_upstream_counts_them() -> None:
    twice = policy(trigger={"tokens": 200}, target={"tokens": 120}, edits=[DROP])
    assert plan(log(*turns(1, 2)), twice, "p", SCALED).fired == ""
    made = plan(log(*turns(1, 3)), twice, "p", SCALED)
    assert (made.fired, made.tokens_before, made.tokens_sent) == ("tokens 240 > 200", 120, 40)
    assert made.target == 120


def test_a_missed_target_is_told_and_waited_for_as_upstream_counts() -> None:
    kept = policy(
        trigger={"tokens": 200}, target={"tokens": 120}, edits=[DROP], keep={"rounds": 4, "spans": 2}
    )
    first = plan(log(*turns(1, 4)), kept, "p", SCALED)
    assert first.warnings == ("target missed: 320 tokens are 200 above 120",)
    # It must have grown by 80 of upstream's tokens: 40 of these.
    waits = plan(log(*turns(1, 4), "user abcdefghi", "user abcdefghi"), kept, "p", SCALED, first.cut)
    assert (waits.moved, waits.tokens_sent) == (False, 198)
    assert plan(log(*turns(1, 5)), kept, "p", SCALED, first.cut).moved


def test_a_target_is_told_as_it_is_set_and_a_miss_is_at_least_one_token() -> None:
    even = policy(trigger={"tokens": 101}, target={"tokens": 100}, edits=[DROP])
    # 76 tokens are 98.8 of upstream's, 77 are 100.1.
    known = replace(KNOWN, scale=1.3)
    made = plan(log("user " + "x" * 67), even, "p", known)
    assert (made.moved, made.target) == (False, 100)
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


def paid(plans: Sequence[Plan], known: Known) -> list[float]:
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


def asked(trimming: Policy, known: Known, requests: int) -> list[Plan]:
    """Return the plans of a session in which an agent calls a tool again and again."""
    plans: list[Plan] = []
    for last in range(requests):
        cut = plans[-1].cut if plans else None
        plans.append(plan(log(*calls(last)), trimming, "p", known, cut))
    return plans


CLEAR = {"type": "clear_tool_results", "keep": 2}
MASK = {"type": "keep_tool_calls", "scope": "all"}


@pytest.mark.parametrize(
    ("edit", "prices", "requests", "most"),
    [
        (SHORTER, PRICES, 80, 0.9),
        (CLEAR, PRICES, 70, 0.7),
        (MASK, PRICES, 70, 0.5),
        (CLEAR, replace(PRICES, read=0.5, write=1.0, minimum=1024), 70, 0.3),
        (MASK, replace(PRICES, read=0.5, write=1.0, minimum=1024), 70, 0.3),
        (MASK, replace(PRICES, read=0.05), 70, 0.7),
        # Above 9000 tokens everything costs twice as much.
        (SHORTER, replace(PRICES, steps=(Step(9000, 2.0),)), 70, 0.8),
        # What is shorter than 4096 tokens is paid in full again and again.
        (CLEAR, replace(PRICES, minimum=4096), 70, 0.7),
        (MASK, replace(PRICES, minimum=4096), 90, 0.98),
        # Reading costs a twenty-fifth of writing, and a third of the text stays: the first move costs about
        # 5000. After 75 requests that is a small part of all; after a hundred it has paid.
        (SHORTER, replace(PRICES, read=0.05), 90, 1.035),
        (SHORTER, replace(PRICES, read=0.05), 100, 1.0),
    ],
)
def test_cost_auto_saves_in_a_long_session_and_loses_little_in_any(
    edit: dict[str, Any], prices: Prices, requests: int, most: float
) -> None:
    known = replace(KNOWN, fixed_tokens=500, prices=prices)
    plans = asked(policy(trigger={"cost": "auto"}, keep=NEWEST, edits=[edit]), known, requests)
    trimmed = paid(plans, known)
    untrimmed = paid(asked(Policy(), known, requests), known)
    moves = [at for at, made in enumerate(plans) if made.moved]
    assert moves
    for stop in range(1, requests + 1):
        assert sum(trimmed[:stop]) <= 1.035 * sum(untrimmed[:stop])
    assert sum(trimmed) < most * sum(untrimmed)
    for at in moves:
        # The account of a cut is what was really paid, up to and with the request of the move.
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
    steep = replace(PRICES, steps=(Step(9000, 2.0),))
    auto = policy(trigger={"cost": "auto"}, keep=NEWEST, edits=[SHORTER])
    even, uneven = (asked(auto, replace(KNOWN, prices=prices), 60) for prices in (PRICES, steep))
    assert max(made.tokens_sent for made in uneven) < max(made.tokens_sent for made in even)


def test_in_a_short_session_nothing_pays() -> None:
    auto = policy(trigger={"cost": "auto"}, keep=NEWEST, edits=[SHORTER])
    plans = asked(auto, replace(KNOWN, prices=PRICES), 6)
    assert not any(made.moved for made in plans)
    assert plans[-1].tokens_sent > 2048


def test_where_no_cut_is_kept_nothing_pays() -> None:
    known = replace(KNOWN, prices=PRICES, idle=301)
    auto = policy(trigger={"cost": "auto"}, keep=NEWEST, edits=[SHORTER])
    assert plan(log(*calls(5)), auto, "p", known).moved
    assert not plan(log(*calls(5)), auto, "p", replace(known, keeps=False)).moved
    edit = {**SHORTER, "when": {"cost": "auto"}}
    other = policy(trigger={"every_request": True}, keep=NEWEST, edits=[edit])
    assert plan(log(*calls(5)), other, "p", known).made
    assert not plan(log(*calls(5)), other, "p", replace(known, keeps=False)).made


def test_what_comes_in_a_cold_cache_is_trimmed_at_once() -> None:
    auto = policy(trigger={"cost": "auto"}, keep=NEWEST, edits=[SHORTER])
    known = replace(KNOWN, prices=PRICES)
    assert not plan(log(*calls(5)), auto, "p", known).moved
    cold = plan(log(*calls(5)), auto, "p", replace(known, idle=301))
    assert cold.moved
    assert len(cold.made) == 3
    # What was imported was never sent: it is in no cache.
    assert plan(log("user q", "user " + "x" * 3000), auto, "p", known).fired == ""
    found = ["user q", *(f"function f {n:0600}" for n in range(5))]
    moved = plan(log(*found), auto, "p", known)
    assert (moved.moved, len(moved.made)) == (True, 3)
    assert moved.cut is not None
    assert moved.cut.account is not None
    assert moved.cut.account.turns == 1


def test_prices_that_nobody_knows_are_assumed_and_that_is_told() -> None:
    auto = policy(trigger={"cost": "auto"}, keep=NEWEST, edits=[SHORTER])
    made = plan(log(*calls(5)), auto, "p", replace(KNOWN, idle=301))
    assert made.moved
    assert made.warnings == (UNKNOWN_PRICES,)
    edit = {**SHORTER, "when": {"cost": "auto"}}
    pays = policy(trigger={"every_request": True}, keep=NEWEST, edits=[edit])
    assert plan(log(*calls(5)), pays, "p", replace(KNOWN, prices=PRICES)).made == ()
    assert plan(log(*calls(5)), pays, "p", KNOWN).warnings == (UNKNOWN_PRICES,)
    assert len(plan(log(*calls(5)), pays, "p", replace(KNOWN, idle=301)).made) == 3
    # Where the trigger does not fire, nothing is reckoned.
    rarely = policy(trigger={"messages": 99}, keep=NEWEST, edits=[edit])
    made = plan(log(*calls(5)), rarely, "p", replace(KNOWN, idle=301))
    assert (made.moved, made.warnings) == (False, ())


def test_another_version_that_reckons_asks_for_all_of_it_when_it_may_pay() -> None:
    dropping = policy(trigger={"messages": 9}, target={"tokens": 2600}, edits=[DROP])
    cut = plan(log(*calls(5)), dropping, "p", KNOWN).cut
    assert cut is not None
    assert cut.gaps
    auto = policy(trigger={"cost": "auto"}, keep=NEWEST, edits=[SHORTER])
    whole = log(*calls(8))
    part = [*whole[:1], *whole[cut.gaps[0].stop :]]
    asks = plan(part, auto, "p", replace(KNOWN, idle=301), cut)
    assert (asks.needs_whole, asks.moved, asks.cut) == (True, False, cut)
    made = plan(whole, auto, "p", replace(KNOWN, idle=301), cut)
    assert made.moved
    assert len(made.made) == 6
    # Where nothing has grown by enough, nobody looks.
    calm = plan([*part, *log(*calls(8), "assistant so", "user so")[-2:]], auto, "p", KNOWN, cut)
    assert (calm.needs_whole, calm.moved) == (False, False)


def test_where_only_time_has_passed_the_cut_moves_only_if_there_is_something_to_do() -> None:
    idle = policy(trigger={"idle_seconds": 60}, edits=[SHORTER])
    waiting = replace(KNOWN, idle=61)
    made = plan(log(*calls(2)), idle, "p", waiting)
    assert (made.moved, made.fired, len(made.made)) == (True, "idle for 61 s", 2)
    again = plan(log(*calls(2), "user so"), idle, "p", waiting, made.cut)
    assert (again.moved, again.fired, again.cut) == (False, "", made.cut)
    assert plan(log(*calls(2)), idle, "p", replace(KNOWN, idle=60)).cut is None
    both = policy(trigger={"idle_seconds": 60, "messages": 1}, edits=[SHORTER])
    assert plan(log(*calls(2), "user so"), both, "p", waiting, made.cut).moved


def test_an_overflow_moves_the_cut_to_what_upstream_takes() -> None:
    made = plan(log(*turns(1, 4)), Policy(), "p", SCALED, overflow=100)
    assert made.fired == "overflow: more than 200 tokens may be too many"
    assert (made.moved, made.tokens_sent, made.target) == (True, 80, 200)
    assert made.cut is not None
    assert [gap.edit for gap in made.cut.gaps] == ["drop_oldest"]
    least = plan(log(*turns(1, 1), "user " + "x" * 90), Policy(), "p", KNOWN, overflow=50)
    assert least.warnings == ("target missed: 100 tokens are 50 above 50",)


def test_after_an_overflow_what_is_gone_stays_gone_under_another_version() -> None:
    cut = plan(log(*turns(1, 3)), HUNDRED, "p", KNOWN).cut
    assert cut is not None
    whole = log(*turns(1, 5))
    made = plan(whole[4:], Policy(), "p", KNOWN, cut, overflow=90)
    assert (made.needs_whole, made.moved, made.tokens_sent) == (False, True, 80)
    assert made.earlier == cut.gaps
    assert made.cut is not None
    assert made.cut.gaps == (Gap(0, 6, "drop_oldest", "its round was the oldest", 120, 0),)
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
    assert (len(first.view), first.settled) == (7, (5,))
    between = plan(log(*calls(3), "user so"), Policy(), "p", KNOWN, first.cut)
    assert between.settled == ()
    still = plan(log(*calls(3)), shorter, "p", KNOWN, first.cut)
    assert (still.moved, still.settled) == (False, (5,))
    second = plan(log(*calls(5)), shorter, "p", KNOWN, first.cut)
    assert (second.moved, second.settled) == (True, (5, 9))
    assert second.view[:5] == first.view[:5]
    third = plan(log(*calls(5)), shorter, "p", KNOWN, second.cut)
    assert (third.moved, third.settled) == (False, (9,))


def test_what_a_move_changes_is_no_part_that_stayed() -> None:
    newest = policy(trigger={"messages": 9}, edits=[{"type": "keep_rounds", "last": 3}])
    entries = log(*turns(1, 1), "user q", "assistant | a f", "tool a long", *turns(2, 3), "user so")
    stub = Change(4, "clear_tool_results", "", log("tool a")[0].message, 14, 10)
    cut = Cut(5, "p", newest.version, (stub,), 0, 5, 1)
    before = plan(entries[:9], newest, "p", KNOWN, cut)
    assert (before.moved, before.settled) == (False, (5,))
    # The first round goes: what ended with the stub is another part now.
    made = plan(entries, newest, "p", KNOWN, cut)
    assert [change.position for change in made.made] == [0, 1]
    assert (made.moved, len(made.view), made.settled) == (True, 8, (3,))


def test_what_stands_before_a_gap_is_not_said_to_stay() -> None:
    both = policy(
        trigger={"messages": 4}, target={"tokens": 1}, keep={"rounds": 1, "spans": 1}, edits=[SHORTER, DROP]
    )
    made = plan(log(*turns(1, 1), *calls(2)), both, "p", KNOWN)
    # Of the first round nothing is left; the question of the second stays, its first call goes.
    assert lines(made.view)[0] == "user q"
    assert (len(made.view), made.settled) == (3, ())


def test_with_repairs_no_part_is_said_to_stay() -> None:
    shorter = policy(trigger={"messages": 4}, edits=[SHORTER])
    made = plan(log(*calls(2), *BROKEN), shorter, "p", KNOWN)
    assert made.moved
    assert made.settled == ()


def test_a_move_that_changes_nothing_lets_a_client_send_what_it_will() -> None:
    nothing = policy(trigger={"every_request": True}, edits=[SHORTER])
    assert plan(log(*BROKEN), nothing, "p", KNOWN).warnings == ()
    dropped = plan(log(*turns(1, 3)), HUNDRED, "p", KNOWN).cut
    # Another version puts everything back.
    entries = log(*turns(1, 3), *BROKEN)
    made = plan(entries, nothing, "p", KNOWN, dropped)
    assert made.moved
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
    lead = [] if role == "merge" else [made.summary.message]
    assert list(made.view) == [*lead, *(entry.message for entry in log(*LONG_TURNS[:9])[6:])]
    assert (made.summary.until, made.summary.covered_messages) == (6, 6)
    assert made.tokens_sent == made.summary.tokens + sum(entry.tokens for entry in log(*LONG_TURNS[:9])[6:])
    assert made.cut.gaps == (Gap(0, 6, "summarize", "it is summed up", made.summary.covered_tokens, 0),)
    assert made.cut.messages == len(made.view)
    later = plan(log(*LONG_TURNS[:11])[6:], summing(role=role), "p", KNOWN, made.cut)
    assert (later.moved, later.summary) == (False, made.summary)
    assert later.view[: len(made.view)] == made.view
    again = plan(log(*LONG_TURNS[:16])[6:], summing(role=role), "p", KNOWN, made.cut)
    assert again.summary is not None
    assert (again.moved, again.summary.generation, again.summary.covered_messages) == (True, 2, 12)


def test_another_version_sums_up_all_of_it_again() -> None:
    cut = plan(log(*LONG_TURNS[:9]), summing(), "p", KNOWN).cut
    anew = plan(log(*LONG_TURNS[:16]), summing(heading="So far"), "p", KNOWN, cut)
    assert anew.summary is not None
    assert (anew.summary.generation, anew.summary.covered_messages) == (1, 12)
    none = plan(log(*LONG_TURNS[:16]), HUNDRED, "p", KNOWN, cut)
    assert none.moved
    assert (none.summary, none.cut and none.cut.summary) == (None, None)


def test_a_summary_of_what_the_client_left_out_stays_in_the_cut_and_is_not_sent() -> None:
    cut = plan(log(*LONG_TURNS[:9]), summing(), "p", KNOWN).cut
    assert cut is not None
    assert cut.summary is not None
    window = plan(log(*LONG_TURNS[:14])[6:], summing(keep_rounds=9), "p", KNOWN, cut, start=6)
    assert window.moved
    assert window.summary is None
    assert window.cut is not None
    assert window.cut.summary == cut.summary


def test_of_a_summary_that_covers_more_than_was_left_out_the_rest_is_told_anew() -> None:
    cut = plan(log(*LONG_TURNS[:9]), summing(role="user"), "p", KNOWN).cut
    assert cut is not None
    assert cut.summary is not None
    other = policy(trigger={"messages": 6}, edits=[SHORTER])
    made = plan(log(*LONG_TURNS[:14])[4:], other, "p", KNOWN, cut, start=4)
    assert made.moved
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
    gap = Gap(0, 2, "summarize", "", 90_000, 0)

    def asks(tokens: int) -> bool:
        summary = Summary("So far.", "merge", 2, tokens, "statistics", 2, 90_000)
        cut = Cut(2, "p", "of another policy", (), tokens, 0, 0, (gap,), summary)
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
def test_an_edit_with_a_limit_of_its_own_goes_on_below_the_policys_target(
    edit: dict[str, Any], sent: int
) -> None:
    known = replace(KNOWN, context_window=1_000)
    own = policy(trigger={"tokens": 500}, target={"ratio": 0.9}, edits=[edit])
    made = plan(log(*turns(1, 20)), own, "mine", known)
    assert sent - 80 < made.tokens_sent <= sent
    assert (made.tokens_sent == 800) == (sent == 800)
