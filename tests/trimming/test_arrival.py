"""What happens to a message the first time it is sent, and every time after."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from proxy.trimming.history import arrive, trimmed_history
from proxy.trimming.model import Change, Cut, Entry, Gap, PlanningContext, Size
from proxy.trimming.policy import Policy
from tests.trimming.notation import KNOWN, count, log, message
from tests.trimming.notation import entries as entries_of

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
            [
                (2, Size(tokens=920, messages=2, tool_calls=0)),
                (4, Size(tokens=925, messages=2, tool_calls=1)),
            ],
        ).changes
        == ()
    )
    # What comes behind all of them does not count.
    assert (
        arrive(entries[4:], when, known, [*gaps, (9, Size(tokens=9, messages=9, tool_calls=9))]).decided
        == whole[4:]
    )


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
        Change(position=at, edit="e", reason="", message=None, tokens_before=1, tokens_after=0)
        for at in (0, 2, 5, 9)
    ]
    cut = Cut(
        position=6,
        policy="p",
        version="v",
        changes=tuple(changes),
        tokens=0,
        messages=0,
        tool_calls=0,
        gaps=gaps,
    )
    assert [change.position for change in trimmed_history(arrived, cut).changes] == [1, 3]
    assert changes[1].at(2) is changes[1]
