"""What was dropped, summed up."""

from __future__ import annotations

from operator import attrgetter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.conversation import spans
from proxy.trimming.draft import clipped
from proxy.trimming.history import KEPT_APART, gaps_of, joined, missing_of, outside_gaps
from proxy.trimming.model import Change, Gap, Size
from tests.trimming.notation import log, messages


def gap(start: int, stop: int, reason: str = "old", edit: str = "drop_oldest") -> Gap:
    return Gap(
        start=start, stop=stop, edit=edit, reason=reason, tokens=(stop - start) * 10, tool_calls=stop - start
    )


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
        position=6,
        edit="drop_oldest",
        reason="old",
        message=entries[0].message,
        tokens_before=10,
        tokens_after=10,
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
        position=1,
        edit="other",
        reason="shorter",
        message=entries[1].message,
        tokens_before=10,
        tokens_after=9,
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
    back = Change(
        position=2, edit="other", reason="back", message=entries[2].message, tokens_before=0, tokens_after=11
    )
    assert gaps_of(entries, parts, [gone(2), shorter, *rest, back]) == ([], set())
