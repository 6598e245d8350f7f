"""The picture of the log that edits look at."""

from __future__ import annotations

from msgspec.structs import replace

from proxy.conversation import rounds, spans
from proxy.trimming.draft import Draft, overlay
from proxy.trimming.model import Hidden, Size, Summary
from proxy.trimming.settings import Target
from tests.trimming.notation import count, entries, lines, message, messages

LOG = ("user hello", "assistant | a search", "tool a sunny")


def draft(target: int | None = None) -> Draft:
    log = messages(LOG)
    return Draft(
        entries=tuple(entries(log)),
        messages=tuple(log),
        tokens=tuple(map(count, log)),
        spans=spans(log),
        rounds=rounds(log),
        protected=frozenset(),
        count=count,
        fixed_tokens=100,
        target=target,
    )


def test_it_measures_what_would_be_sent() -> None:
    assert draft().total == 100 + 15 + 10 + 15
    assert draft().size == Size(tokens=140, messages=3, tool_calls=1)


def test_it_is_within_a_target_that_it_does_not_exceed_and_never_without_one() -> None:
    assert [draft(target).within() for target in (139, 140, None)] == [False, True, False]


def test_changes_make_another_draft() -> None:
    before = draft()
    removed = before.removing(2, "an_edit", "too old")
    replaced = before.replacing(0, "an_edit", "too long", message("user hi"))
    after = before.after([removed, replaced])
    assert (removed.tokens_before, removed.tokens_after, removed.message) == (15, 0, None)
    assert (replaced.tokens_before, replaced.tokens_after) == (15, 12)
    assert after.size == Size(tokens=122, messages=2, tool_calls=0)
    assert lines(each for _, each in after.remaining(0, 3)) == ["user hi", "assistant | a search"]
    assert [position for position, _ in after.remaining(1, 3)] == [1]
    assert before == draft()


def test_of_several_changes_of_one_message_the_last_one_stands() -> None:
    before = draft()
    changes = [before.replacing(0, "e", "", message("user hi")), before.removing(0, "e", "")]
    assert overlay(before.messages, before.tokens, changes) == ((None, *before.messages[1:]), (0, 10, 15))


SUMMARY = Summary(
    text="So far.", role="merge", until=2, tokens=30, kind="statistics", covered_messages=2, covered_tokens=25
)


def test_a_summary_counts_and_takes_the_place_of_an_earlier_one() -> None:
    first = draft().after([draft().removing(0, "sums", "")], SUMMARY)
    assert (first.total, first.summary) == (100 + 30 + 10 + 15, SUMMARY)
    assert first.size == Size(tokens=155, messages=2, tool_calls=1)
    assert first.after([]).summary == SUMMARY
    longer = replace(SUMMARY, tokens=40)
    assert first.after([], longer).total == 165


def test_it_knows_which_edits_made_what_stands_there() -> None:
    once = draft().after([draft().replacing(0, "an_edit", "", message("user hi"))])
    assert once.made_by == (("an_edit",), (), ())
    twice = once.after([once.replacing(0, "another", "", message("user h")), once.removing(2, "another", "")])
    assert twice.made_by == (("an_edit", "another"), (), ("another",))


def test_a_limit_is_in_tokens_as_upstream_counts_and_the_drafts_own_where_none_is_given() -> None:
    given = replace(draft(77), scale=1.3, context_window=2600)
    assert given.limit(None) == 77
    assert given.limit(Target(tokens=130)) == 100
    assert given.limit(Target(ratio=0.5)) == 1000
    assert replace(given, context_window=None).limit(Target(ratio=0.5)) is None
    assert draft().limit(None) is None


def test_what_the_client_was_not_shown_counts_and_goes_with_a_change() -> None:
    own = tuple(messages(("assistant | x recall", "tool x 1")))
    before = replace(draft(), hidden={1: Hidden(before=own, reply=None, after=(), tokens=21)}, tokens=(15, 31, 15))
    assert before.size == Size(tokens=161, messages=5, tool_calls=2)
    assert before.after([before.removing(0, "e", "")]).hidden == before.hidden
    after = before.after([before.replacing(1, "e", "", before.entries[1].message)])
    assert (after.hidden, after.size) == ({}, Size(tokens=140, messages=3, tool_calls=1))


def test_places_and_positions() -> None:
    moved = replace(draft(), entries=tuple(replace(each, position=each.position + 4) for each in draft().entries))
    assert [moved.position(place) for place in (0, 2, 3)] == [4, 6, 7]
    assert (moved.end, replace(moved, entries=()).end) == (7, 0)
