"""The log as earlier requests left it: decisions on arrival, gaps, the current cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from proxy.conversation import spans
from proxy.dialects import Call, Message
from proxy.dialects.chat.message import ChatMessage
from proxy.trimming.draft import answered_by, clipped
from proxy.trimming.edits.truncate_tool_output import TruncateToolOutput
from proxy.trimming.history import (
    KEPT_APART,
    TrimmedHistory,
    arrive,
    gaps_of,
    joined,
    missing_of,
    outside_gaps,
    trimmed_history,
)
from proxy.trimming.model import Change, Cut, Entry, Gap, Hidden, PlanningContext, Size, Summary
from proxy.trimming.policy import Pin, Policy
from tests.trimming.notation import KNOWN, count, lines, log, message, messages
from tests.trimming.notation import entries as entries_of

# ----------------------------------------------------------------------------------------- arrival

LONG = "x" * 900
SHORT = {"type": "truncate_tool_output", "max_bytes": 100}


def policy(**keys: Any) -> Policy:
    return Policy.model_validate({"on_arrival": [SHORT], **keys})


def with_long_results(*more: str) -> list[Entry]:
    return log("user " + LONG, "assistant | a search, b search", f"tool a {LONG}", "tool b short", *more)


def test_only_tool_results_over_the_limits_are_changed_and_all_is_decided() -> None:
    entries = with_long_results()
    arrived = arrive(entries, policy(), KNOWN)
    (change,) = arrived.changes
    assert arrived.decided == ((), (), (change,), ())
    assert (change.position, change.edit) == (2, "truncate_tool_output")
    assert change.tokens_before == 910
    assert change.message is not None
    assert change.tokens_after == count(change.message) < 910
    assert arrived.messages == (entries[0].message, entries[1].message, change.message, entries[3].message)
    assert arrived.tokens == (910, 10, change.tokens_after, 15)


@pytest.mark.parametrize(
    ("looked", "policy_of"),
    [((ChatMessage, "answers_call"), policy), ((Pin, "fits"), partial(policy, pin=[{"regex": "never"}]))],
    ids=["the calls", "a pin"],
)
def test_what_parallel_results_share_is_looked_at_once_for_each(
    looked: tuple[type, str], policy_of: Callable[[], Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    number = 300
    calls = ", ".join(f"c{at} search" for at in range(number))
    entries = log("user hi", f"assistant | {calls}", *(f"tool c{at} {LONG}" for at in range(number)))
    times = 0
    look = getattr(*looked)

    def counted(*given: Any) -> Any:
        nonlocal times
        times += 1
        return look(*given)

    monkeypatch.setattr(*looked, counted)
    assert len(arrive(entries, policy_of(), KNOWN).changes) == number
    assert times <= number + 1


@pytest.mark.parametrize("recorded", [(), (3,), (2, 3)])
def test_each_result_is_shortened_for_what_its_call_asked(recorded: tuple[int, ...]) -> None:
    log_lines = ("tool a 1", "assistant | a x, b x, a y, z()", "tool a 1", "tool b 1", "function z 1", "tool c 1")
    entries = [replace(each, arrival=() if each.position in recorded else None) for each in log(*log_lines)]
    seen: list[tuple[int, str | None]] = []

    class Told(TruncateToolOutput, frozen=True):
        def shorten_all(  # on arrival, nothing is cleared
            self,
            message: Message,
            entry: Entry,
            calls: Mapping[str, Call],
            *,
            is_cleared: bool = False,  # noqa: ARG002
        ) -> None:
            call = answered_by(message, calls)
            seen.append((entry.position, call.name if call is not None else None))

    chosen = policy().model_copy(update={"on_arrival": (Told(),)})
    arrive(entries, chosen, KNOWN)
    told = [(0, None), (2, "x"), (3, "x"), (4, "z"), (5, None)]
    assert seen == [each for each in told if each[0] not in recorded]


def test_what_is_recorded_is_done_again_whatever_the_policy_says() -> None:
    entries = with_long_results()
    decided = arrive(entries, policy(), KNOWN).decided
    recorded = [replace(entry, arrival=changes) for entry, changes in zip(entries, decided, strict=True)]
    for other in (policy(), Policy(), policy(on_arrival=[{**SHORT, "max_bytes": 300}])):
        again, first = arrive(recorded, other, KNOWN), arrive(entries, policy(), KNOWN)
        assert (again.messages, again.tokens, again.decided) == (first.messages, first.tokens, first.decided)


def test_what_is_new_is_decided_beside_what_is_recorded() -> None:
    entries = with_long_results("assistant | c f", f"tool c {LONG}")
    recorded = [replace(entry, arrival=()) for entry in entries[:4]] + entries[4:]
    assert [change.position for change in arrive(recorded, policy(), KNOWN).changes] == [5]


def test_what_was_left_alone_stays_so() -> None:
    entries = [replace(entry, arrival=()) for entry in with_long_results()]
    assert arrive(entries, policy(), KNOWN).changes == ()


def test_a_recorded_removal_is_done_again() -> None:
    gone = Change(position=0, edit="an_edit", reason="why", message=None, tokens_before=12, tokens_after=0)
    arrived = arrive([replace(log("user hi")[0], arrival=(gone,))], Policy(), KNOWN)
    assert (arrived.messages, arrived.tokens) == ((None,), (0,))


def test_without_edits_nothing_is_decided() -> None:
    entries = with_long_results()
    arrived = arrive(entries, Policy(), KNOWN)
    assert arrived.decided == ((), (), (), ())
    assert arrived.messages == tuple(entry.message for entry in entries)


def test_pins_bind_it_and_keep_does_not() -> None:
    pin = {"pin": [{"regex": "^short$"}]}
    entries = with_long_results("user so", "assistant | a f", f"tool a {LONG}")
    kept = policy(keep={"rounds": 9, "spans": 99}, **pin)
    # The pinned result comes after the first long one: when that was sent, nothing was pinned yet.
    assert [change.position for change in arrive(entries, kept, KNOWN).changes] == [2, 6]
    pinned = policy(pin=[{"regex": "search me", "roles": ["assistant"]}])
    block = [message("assistant search me | a f"), message(f"tool a {LONG}")]
    assert arrive(entries_of(block), pinned, KNOWN).changes == ()


def test_the_longer_log_is_decided_as_the_shorter_was() -> None:
    entries = with_long_results("user so", "assistant | c f", f"tool c {LONG}")
    known = PlanningContext(count=count, fixed_tokens=5)
    when = policy(on_arrival=[{**SHORT, "when": {"tokens": 1900}}])
    whole = arrive(entries, when, known).decided
    assert [len(changes) for changes in whole] == [0, 0, 0, 0, 0, 0, 1]
    for stop in range(len(entries)):
        assert arrive(entries[:stop], when, known).decided == whole[:stop]


def test_edits_act_one_after_the_other_each_under_its_own_condition() -> None:
    twice = [{**SHORT, "max_bytes": 300}, SHORT, {**SHORT, "max_bytes": 50, "when": {"messages": 3}}]
    (first, second) = arrive(with_long_results(), policy(on_arrival=twice), KNOWN).changes
    assert first.tokens_after == second.tokens_before
    assert second.tokens_after < second.tokens_before
    assert "900 bytes: 100 bytes kept" in second.reason


def test_what_would_not_cost_less_stays() -> None:
    dear = PlanningContext(count=lambda _: 10**6)
    assert arrive(with_long_results(), policy(), dear).changes == ()


def test_what_is_missing_counts_where_it_stood() -> None:
    entries = with_long_results("user so", "assistant | c f", f"tool c {LONG}")
    known = PlanningContext(count=count, fixed_tokens=5)
    when = policy(on_arrival=[{**SHORT, "when": {"tokens": 1900, "messages": 6, "tool_calls": 2}}])
    whole = arrive(entries, when, known).decided
    assert [len(changes) for changes in whole] == [0, 0, 0, 0, 0, 0, 1]
    # The first block lies in gaps: what stood there is told by its size.
    gaps = [(2, Size(tokens=920, messages=2, tool_calls=0)), (4, Size(tokens=925, messages=2, tool_calls=2))]
    assert arrive(entries[4:], when, known, gaps).decided == whole[4:]
    assert arrive(entries[4:], when, known, gaps[:1]).changes == ()
    assert (
        arrive(
            entries[4:],
            when,
            known,
            [(2, Size(tokens=920, messages=2, tool_calls=0)), (4, Size(tokens=925, messages=2, tool_calls=1))],
        ).changes
        == ()
    )
    # What comes behind all of them does not count.
    assert arrive(entries[4:], when, known, [*gaps, (9, Size(tokens=9, messages=9, tool_calls=9))]).decided == whole[4:]


def test_what_lies_in_gaps_is_taken_out_and_changes_find_their_places() -> None:
    entries = with_long_results("user so", "user and")
    arrived = arrive(entries, policy(), KNOWN)
    assert arrived.without(()) is arrived
    gaps = (
        Gap(start=0, stop=1, edit="e", reason="", tokens=0, tool_calls=0),
        Gap(start=4, stop=5, edit="e", reason="", tokens=0, tool_calls=0),
    )
    left = arrived.without(gaps)
    assert [entry.position for entry in left.entries] == [1, 2, 3, 5]
    assert (left.messages, left.tokens) == (
        tuple(arrived.messages[at] for at in (1, 2, 3, 5)),
        tuple(arrived.tokens[at] for at in (1, 2, 3, 5)),
    )
    assert left.changes == arrived.changes
    changes = [
        Change(position=at, edit="e", reason="", message=None, tokens_before=1, tokens_after=0) for at in (0, 2, 5, 9)
    ]
    cut = Cut(
        position=6, policy="p", version="v", changes=tuple(changes), tokens=0, messages=0, tool_calls=0, gaps=gaps
    )
    assert [change.position for change in trimmed_history(arrived, cut).changes] == [1, 3]
    assert changes[1].at(2) is changes[1]


# -------------------------------------------------------------------------------------------- gaps


def gap(start: int, stop: int, reason: str = "old", edit: str = "drop_oldest") -> Gap:
    return Gap(start=start, stop=stop, edit=edit, reason=reason, tokens=(stop - start) * 10, tool_calls=stop - start)


def gone(place: int, edit: str = "drop_oldest") -> Change:
    return Change(position=place, edit=edit, reason="old", message=None, tokens_before=10, tokens_after=0)


@pytest.mark.parametrize(
    ("gaps", "left"),
    [
        ([], [0, 1, 2, 3, 4, 5]),
        ([gap(0, 2)], [2, 3, 4, 5]),
        ([gap(1, 2), gap(2, 4), gap(5, 6)], [0, 4]),
        ([gap(0, 6)], []),
    ],
)
def test_what_lies_in_no_gap_stands(gaps: list[Gap], left: list[int]) -> None:
    assert outside_gaps(range(6), gaps, int) == left
    assert outside_gaps(left, gaps, int) == left


def test_what_is_not_given_is_told_with_its_size() -> None:
    entries = log("user 0", "user 1", "user 2", "user 3", "user 4", "user 5")
    gaps = [gap(1, 3), gap(4, 5)]
    left = outside_gaps(entries, gaps, attrgetter("position"))
    assert missing_of(left, gaps, 0) == [
        (3, Size(tokens=20, messages=2, tool_calls=2)),
        (5, Size(tokens=10, messages=1, tool_calls=1)),
    ]
    assert missing_of(entries, gaps, 0) == []
    assert missing_of([*entries[:3], *left[2:]], gaps, 0) == [(5, Size(tokens=10, messages=1, tool_calls=1))]
    assert missing_of([], gaps, 0) == [
        (3, Size(tokens=20, messages=2, tool_calls=2)),
        (5, Size(tokens=10, messages=1, tool_calls=1)),
    ]
    # From position 2 on; one message of the first gap is not spoken of.
    assert missing_of(left[1:], gaps, 2) == [
        (3, Size(tokens=10, messages=1, tool_calls=1)),
        (5, Size(tokens=10, messages=1, tool_calls=1)),
    ]
    assert missing_of(entries[3:], gaps, 3) == []
    assert missing_of([entries[3], entries[5]], gaps, 3) == [(5, Size(tokens=10, messages=1, tool_calls=1))]


def test_a_part_of_a_gap_has_its_share() -> None:
    gaps = [gap(0, 4), gap(6, 8)]
    assert clipped(gaps, 0, 9) == tuple(gaps)
    assert clipped(gaps, 1, 7) == (gap(1, 4), gap(6, 7))
    assert clipped(gaps, 4, 6) == ()


def test_spans_that_were_removed_whole_become_gaps() -> None:
    lines = ("user a", "assistant | a f, b f", "tool a 1", "tool b 2", "assistant ok", "user b", "user c")
    parts = spans(messages(lines))
    entries = log(*["user"] * 10, *lines)[10:]
    some = [gone(0), gone(2), gone(4, "other"), gone(5, "other")]
    kept = Change(
        position=6, edit="drop_oldest", reason="old", message=entries[0].message, tokens_before=10, tokens_after=10
    )
    found, places = gaps_of(entries, parts, [*some, kept])
    assert found == [
        Gap(start=10, stop=11, edit="drop_oldest", reason="old", tokens=11, tool_calls=0),
        Gap(start=14, stop=16, edit="other", reason="old", tokens=12 + 11, tool_calls=0),
    ]
    assert places == {0, 4, 5}
    found, places = gaps_of(entries, parts, [gone(place) for place in range(4)])
    assert (found, places) == (
        [Gap(start=10, stop=14, edit="drop_oldest", reason="old", tokens=11 + 10 + 11 + 11, tool_calls=2)],
        {0, 1, 2, 3},
    )
    assert gaps_of(entries, parts, []) == ([], set())


def test_what_is_not_side_by_side_is_not_one_gap() -> None:
    entries = log("user a", "user b", "user c")
    parts = spans([entry.message for entry in entries[::2]])
    found, _ = gaps_of(entries[::2], parts, [gone(0), gone(1)])
    assert [(each.start, each.stop) for each in found] == [(0, 1), (2, 3)]


def test_gaps_side_by_side_become_one_where_they_say_the_same() -> None:
    assert joined([gap(4, 6), gap(0, 2), gap(2, 4)]) == (gap(0, 6),)
    apart = (gap(0, 2), gap(2, 3, "other"), gap(3, 4, "other", "edit"), gap(5, 6))
    assert joined(apart) == apart
    assert joined([]) == ()


def test_where_edits_took_turns_the_oldest_become_one() -> None:
    turns = [gap(2 * each, 2 * each + 2, f"reason {each}") for each in range(KEPT_APART + 2)]
    found = joined([*turns, gap(90, 95)])
    assert found == (gap(0, 6, "reason 1"), *turns[3:], gap(90, 95))
    # The longer one says why.
    longer = [gap(0, 5, "long"), *(gap(5 + each, 6 + each, f"reason {each}") for each in range(KEPT_APART))]
    assert joined(longer)[0] == gap(0, 6, "long")
    # What then says the same as the next one joins it.
    same = [gap(0, 1, "a"), gap(1, 4, "b"), gap(4, 5, "a")]
    same += [gap(5 + each, 6 + each, f"reason {each}") for each in range(KEPT_APART - 1)]
    assert joined([same[0], same[1], gap(4, 5, "c"), gap(5, 6, "b"), *same[4:]])[0] == gap(0, 6, "b")


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from("abc"), st.booleans()), max_size=40))
def test_nothing_is_lost_and_joining_again_changes_nothing(parts: list[tuple[int, str, bool]]) -> None:
    gaps: list[Gap] = []
    at = 0
    for length, reason, apart in parts:
        at += apart
        gaps.append(gap(at, at + length, reason))
        at += length
    found = joined(gaps)
    assert joined(found) == found
    assert outside_gaps(range(at), found, int) == outside_gaps(range(at), gaps, int)
    assert sum(each.tokens for each in found) == sum(each.tokens for each in gaps)
    assert all(each.tokens == each.messages * 10 == each.tool_calls * 10 for each in found)


def test_a_span_that_earlier_moves_began_to_remove_becomes_a_gap_with_the_last_of_it() -> None:
    entries = log("user a", "assistant | a f, b f", "tool a 1", "tool b 2", "user b")
    parts = spans([entry.message for entry in entries])
    # In their order: an earlier move took one result, this one shortens the block and then takes all of it.
    shorter = Change(
        position=1, edit="other", reason="shorter", message=entries[1].message, tokens_before=10, tokens_after=9
    )
    rest = [gone(1, "other"), gone(3, "other")]
    assert gaps_of(entries, parts, [gone(2), shorter]) == ([], set())
    found, places = gaps_of(entries, parts, [shorter, gone(2), *rest])
    assert places == {1, 2, 3}
    assert found == [
        Gap(start=1, stop=2, edit="other", reason="old", tokens=10, tool_calls=0),
        Gap(start=2, stop=3, edit="drop_oldest", reason="old", tokens=11, tool_calls=1),
        Gap(start=3, stop=4, edit="other", reason="old", tokens=11, tool_calls=1),
    ]
    # What was put back last stands.
    back = Change(position=2, edit="other", reason="back", message=entries[2].message, tokens_before=0, tokens_after=11)
    assert gaps_of(entries, parts, [gone(2), shorter, *rest, back]) == ([], set())


# ----------------------------------------------------------------------------------------- remains

LOG = ("user one", "assistant | a f", "tool a long and long", "user two", "assistant three", "user four")
ARRIVED = arrive(log(*LOG), Policy(), KNOWN)
SHORT_REMAINS = Change(
    position=2, edit="an_edit", reason="why", message=message("tool a short"), tokens_before=23, tokens_after=15
)
GONE = Change(position=3, edit="another", reason="why", message=None, tokens_before=13, tokens_after=0)
SUMMARY = Summary(
    text="So far.", role="merge", until=3, tokens=17, kind="statistics", covered_messages=3, covered_tokens=50
)


def cut(*changes: Change, gaps: tuple[Gap, ...] = (), summary: Summary | None = None) -> Cut:
    return Cut(
        position=5,
        policy="p",
        version="v",
        changes=changes,
        tokens=0,
        messages=0,
        tool_calls=0,
        gaps=gaps,
        summary=summary,
    )


def stands(remains: TrimmedHistory) -> list[str | None]:
    return [lines([each])[0] if each is not None else None for each in remains.messages]


def test_without_a_cut_all_of_it_stands() -> None:
    remains = trimmed_history(ARRIVED, None)
    assert (remains.log, remains.messages, remains.tokens) == (ARRIVED, ARRIVED.messages, ARRIVED.tokens)
    assert (remains.changes, remains.summary, remains.touched) == ((), None, False)
    assert remains.made_by == ((),) * 6
    assert not trimmed_history(ARRIVED, cut()).touched


def test_what_was_replaced_stands_so_and_by_which_edits() -> None:
    twice = (
        SHORT_REMAINS,
        Change(position=2, edit="another", reason="why", message=message("tool a"), tokens_before=15, tokens_after=10),
        GONE,
    )
    remains = trimmed_history(ARRIVED, cut(*twice))
    assert stands(remains) == ["user one", "assistant | a f", "tool a ", None, "assistant three", "user four"]
    assert remains.tokens == (13, 10, 10, 0, 15, 14)
    assert remains.made_by == ((), (), ("an_edit", "another"), ("another",), (), ())
    assert remains.changes == twice
    assert remains.touched


def test_what_lies_in_gaps_is_not_there_and_changes_find_their_places() -> None:
    remains = trimmed_history(
        ARRIVED,
        cut(
            GONE,
            gaps=(
                Gap(start=0, stop=1, edit="e", reason="", tokens=13, tool_calls=0),
                Gap(start=1, stop=3, edit="e", reason="", tokens=33, tool_calls=1),
            ),
        ),
    )
    assert stands(remains) == [None, "assistant three", "user four"]
    assert [entry.position for entry in remains.log.entries] == [3, 4, 5]
    assert remains.changes == (replace(GONE, position=0),)
    assert remains.made_by == (("another",), (), ())


def test_what_the_request_does_not_speak_of_is_passed_over() -> None:
    later = arrive(log(*LOG)[3:], Policy(), KNOWN)
    remains = trimmed_history(
        later, cut(SHORT_REMAINS, GONE, gaps=(Gap(start=0, stop=1, edit="e", reason="", tokens=13, tool_calls=0),)), 3
    )
    assert stands(remains) == [None, "assistant three", "user four"]
    assert remains.changes == (replace(GONE, position=0),)


def test_a_summary_of_what_the_client_left_out_itself_is_not_sent() -> None:
    summed = cut(summary=SUMMARY)
    assert trimmed_history(ARRIVED, summed).summary == SUMMARY
    assert trimmed_history(ARRIVED, summed).touched
    assert trimmed_history(arrive(log(*LOG)[2:], Policy(), KNOWN), summed, 2).summary == SUMMARY
    assert trimmed_history(arrive(log(*LOG)[3:], Policy(), KNOWN), summed, 3).summary is None


def test_what_was_done_on_arrival_is_told_first() -> None:
    entries = log(*LOG)
    entries[2] = replace(entries[2], arrival=(replace(SHORT_REMAINS, edit="at_once"),))
    arrived = arrive(entries, Policy(), KNOWN)
    assert trimmed_history(arrived, None).touched
    assert trimmed_history(arrived, None).made_by[2] == ("at_once",)
    assert trimmed_history(arrived, cut(SHORT_REMAINS)).made_by[2] == ("at_once", "an_edit")


def test_what_of_a_log_is_sent_where_something_else_remains() -> None:
    whole = trimmed_history(ARRIVED, None)
    sent = trimmed_history(
        ARRIVED, cut(SHORT_REMAINS, gaps=(Gap(start=3, stop=5, edit="e", reason="", tokens=0, tool_calls=0),))
    )
    stood = whole.sent_as(sent)
    assert [tokens for _, tokens in stood] == [13, 10, 15, 0, 0, 14]
    assert [message is None for message, _ in stood] == [False, False, False, True, True, False]
    assert sent.sent_as(sent) == list(zip(sent.messages, sent.tokens, strict=True))


def test_what_the_client_was_not_shown_goes_with_a_message_that_is_as_it_was() -> None:
    rounds = Hidden(before=(message("assistant | x recall"), message("tool x 1")), reply=None, after=(), tokens=21)
    entries = [replace(entry, hidden=rounds if at in {1, 4} else None) for at, entry in enumerate(log(*LOG))]
    arrived = arrive(entries, Policy(), KNOWN)
    assert arrived.tokens == (13, 31, 23, 13, 36, 14)
    whole = trimmed_history(arrived, None)
    assert (whole.hidden, whole.touched) == ({1: rounds, 4: rounds}, True)
    released = Change(
        position=4, edit="hidden_rounds", reason="why", message=entries[4].message, tokens_before=36, tokens_after=15
    )
    behind = trimmed_history(
        arrived, cut(released, gaps=(Gap(start=0, stop=1, edit="e", reason="", tokens=13, tool_calls=0),))
    )
    assert behind.hidden == {0: rounds}
    assert behind.tokens == (31, 23, 13, 15, 14)
    assert behind.gaps == (Gap(start=0, stop=1, edit="e", reason="", tokens=13, tool_calls=0),)
    early = Change(
        position=4, edit="an_edit", reason="why", message=message("assistant 3"), tokens_before=15, tokens_after=11
    )
    decided = arrive(
        [replace(each, arrival=(early,) if at == 4 else ()) for at, each in enumerate(entries)], Policy(), KNOWN
    )
    assert trimmed_history(decided, None).hidden == {1: rounds}
    assert decided.tokens == (13, 31, 23, 13, 11, 14)
