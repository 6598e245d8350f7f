"""What a summary may cover: whole rounds of the history, and what lies behind in the current one."""

from __future__ import annotations

from msgspec.structs import replace

from proxy.trimming.draft import Draft
from proxy.trimming.edits.summarize import Beginning, beginnings
from proxy.trimming.model import Gap
from tests.trimming.edits.held import draft_of
from tests.trimming.notation import messages

LOG = (
    "assistant hi",
    "user 1",
    "assistant | a f",
    "tool a 1",
    "user 2",
    "assistant 2",
    "user 3",
    "assistant 3",
)


def stops(draft: Draft, keep_rounds: int) -> list[int]:
    return [each.stop for each in beginnings(draft, keep_rounds)]


def test_a_beginning_ends_with_a_round_of_the_history() -> None:
    draft = draft_of(messages(LOG))
    assert stops(draft, 2) == []
    assert stops(draft, 1) == [4]
    assert list(beginnings(draft, 1)) == [
        Beginning(stop=4, until=4, messages=4, tokens=44, rounds=1, new_messages=4, new_tokens=44)
    ]
    assert draft.history_before(1) == 4


def test_where_no_round_need_stay_it_may_end_in_the_current_one_but_not_after_the_newest_span() -> None:
    draft = draft_of(messages((*LOG, "assistant | b f, c f", "tool b 1", "tool c 2", "assistant | d f")))
    # The question is protected; the answer and the calls after it are not. The newest call is open.
    assert stops(draft, 0) == [4, 6, 8, 11]
    last = list(beginnings(draft, 0))[-1]
    assert (last.until, last.messages, last.rounds) == (11, 10, 2)
    assert stops(draft_of(messages(LOG)), 0) == [4, 6]
    assert stops(draft_of([]), 0) == []


def test_of_a_preamble_alone_spans_may_go() -> None:
    assert stops(draft_of(messages(("assistant 1", "assistant 2", "assistant 3"))), 0) == [1, 2]
    assert stops(draft_of(messages(("assistant 1", "assistant 2", "assistant 3"))), 1) == []


def test_what_is_protected_is_not_counted_and_ends_nothing_in_the_current_round() -> None:
    draft = replace(draft_of(messages((*LOG, "assistant 4"))), protected=frozenset({1, 2, 3, 6, 7}))
    assert [(each.stop, each.messages, each.rounds) for each in beginnings(draft, 0)] == [
        (4, 1, 0),
        (6, 3, 1),
    ]


def test_what_is_gone_is_not_counted_but_new_where_no_summary_covers_it() -> None:
    draft = draft_of(messages(LOG))
    draft = draft.after([draft.removing(4, "an_edit", ""), draft.removing(5, "an_edit", "")])
    last = list(beginnings(draft, 0, 3))[-1]
    assert (last.stop, last.messages, last.rounds) == (6, 4, 1)
    assert (last.new_messages, last.new_tokens) == (3, 33)


def test_what_earlier_moves_dropped_is_new_where_no_summary_covers_it() -> None:
    draft = draft_of(messages(LOG))
    entries = tuple(
        replace(each, position=each.position + (10 if each.position < 4 else 20)) for each in draft.entries
    )
    gaps = (
        Gap(start=0, stop=10, edit="e", reason="", tokens=500, tool_calls=2),
        Gap(start=14, stop=24, edit="e", reason="", tokens=1000, tool_calls=0),
    )
    draft = replace(draft, entries=entries, gaps=gaps)
    first, second = beginnings(draft, 0, 5)
    # The second gap lies between two rounds: whatever covers the first of these covers it.
    assert (first.until, first.new_messages, first.new_tokens) == (24, 5 + 4 + 10, 250 + 44 + 1000)
    assert (second.until, second.new_messages, second.messages) == (26, 21, 6)
