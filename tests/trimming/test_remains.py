"""What the moves of the cut so far have left of a log."""

from __future__ import annotations

from msgspec.structs import replace

from proxy.trimming.arrival import arrive
from proxy.trimming.plan import Change, Cut, Gap, Hidden, Summary
from proxy.trimming.policy import Policy
from proxy.trimming.remains import TrimmedHistory, trimmed_history
from tests.trimming.notation import KNOWN, lines, log, message

LOG = ("user one", "assistant | a f", "tool a long and long", "user two", "assistant three", "user four")
ARRIVED = arrive(log(*LOG), Policy(), KNOWN)
SHORT = Change(2, "an_edit", "why", message("tool a short"), 23, 15)
GONE = Change(3, "another", "why", None, 13, 0)
SUMMARY = Summary("So far.", "merge", 3, 17, "statistics", 3, 50)


def cut(*changes: Change, gaps: tuple[Gap, ...] = (), summary: Summary | None = None) -> Cut:
    return Cut(5, "p", "v", changes, 0, 0, 0, gaps, summary)


def stands(remains: TrimmedHistory) -> list[str | None]:
    return [lines([each])[0] if each is not None else None for each in remains.messages]


def test_without_a_cut_all_of_it_stands() -> None:
    remains = trimmed_history(ARRIVED, None)
    assert (remains.log, remains.messages, remains.tokens) == (ARRIVED, ARRIVED.messages, ARRIVED.tokens)
    assert (remains.changes, remains.summary, remains.touched) == ((), None, False)
    assert remains.made_by == ((),) * 6
    assert not trimmed_history(ARRIVED, cut()).touched


def test_what_was_replaced_stands_so_and_by_which_edits() -> None:
    twice = (SHORT, Change(2, "another", "why", message("tool a"), 15, 10), GONE)
    remains = trimmed_history(ARRIVED, cut(*twice))
    assert stands(remains) == ["user one", "assistant | a f", "tool a ", None, "assistant three", "user four"]
    assert remains.tokens == (13, 10, 10, 0, 15, 14)
    assert remains.made_by == ((), (), ("an_edit", "another"), ("another",), (), ())
    assert remains.changes == twice
    assert remains.touched


def test_what_lies_in_gaps_is_not_there_and_changes_find_their_places() -> None:
    remains = trimmed_history(ARRIVED, cut(GONE, gaps=(Gap(0, 1, "e", "", 13, 0), Gap(1, 3, "e", "", 33, 1))))
    assert stands(remains) == [None, "assistant three", "user four"]
    assert [entry.position for entry in remains.log.entries] == [3, 4, 5]
    assert remains.changes == (replace(GONE, position=0),)
    assert remains.made_by == (("another",), (), ())


def test_what_the_request_does_not_speak_of_is_passed_over() -> None:
    later = arrive(log(*LOG)[3:], Policy(), KNOWN)
    remains = trimmed_history(later, cut(SHORT, GONE, gaps=(Gap(0, 1, "e", "", 13, 0),)), 3)
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
    entries[2] = replace(entries[2], arrival=(replace(SHORT, edit="at_once"),))
    arrived = arrive(entries, Policy(), KNOWN)
    assert trimmed_history(arrived, None).touched
    assert trimmed_history(arrived, None).made_by[2] == ("at_once",)
    assert trimmed_history(arrived, cut(SHORT)).made_by[2] == ("at_once", "an_edit")


def test_what_of_a_log_is_sent_where_something_else_remains() -> None:
    whole = trimmed_history(ARRIVED, None)
    sent = trimmed_history(ARRIVED, cut(SHORT, gaps=(Gap(3, 5, "e", "", 0, 0),)))
    stood = whole.standing_as(sent)
    assert [tokens for _, tokens in stood] == [13, 10, 15, 0, 0, 14]
    assert [message is None for message, _ in stood] == [False, False, False, True, True, False]
    assert sent.standing_as(sent) == list(zip(sent.messages, sent.tokens, strict=True))


def test_what_the_client_was_not_shown_goes_with_a_message_that_is_as_it_was() -> None:
    rounds = Hidden((message("assistant | x recall"), message("tool x 1")), None, (), 21)
    entries = [replace(entry, hidden=rounds if at in {1, 4} else None) for at, entry in enumerate(log(*LOG))]
    arrived = arrive(entries, Policy(), KNOWN)
    assert arrived.tokens == (13, 31, 23, 13, 36, 14)
    whole = trimmed_history(arrived, None)
    assert (whole.hidden, whole.touched) == ({1: rounds, 4: rounds}, True)
    released = Change(4, "hidden_rounds", "why", entries[4].message, 36, 15)
    behind = trimmed_history(arrived, cut(released, gaps=(Gap(0, 1, "e", "", 13, 0),)))
    assert behind.hidden == {0: rounds}
    assert behind.tokens == (31, 23, 13, 15, 14)
    assert behind.gaps == (Gap(0, 1, "e", "", 13, 0),)
    early = Change(4, "an_edit", "why", message("assistant 3"), 15, 11)
    decided = arrive(
        [replace(each, arrival=(early,) if at == 4 else ()) for at, each in enumerate(entries)],
        Policy(),
        KNOWN,
    )
    assert trimmed_history(decided, None).hidden == {1: rounds}
    assert decided.tokens == (13, 31, 23, 13, 11, 14)
