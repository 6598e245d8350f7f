"""What the moves of the cut so far have left of a log."""

from __future__ import annotations

from msgspec.structs import replace

from proxy.trimming.history import TrimmedHistory, arrive, trimmed_history
from proxy.trimming.model import Change, Cut, Gap, Hidden, Summary
from proxy.trimming.policy import Policy
from tests.trimming.notation import KNOWN, lines, log, message

LOG = ("user one", "assistant | a f", "tool a long and long", "user two", "assistant three", "user four")
ARRIVED = arrive(log(*LOG), Policy(), KNOWN)
SHORT = Change(
    position=2,
    edit="an_edit",
    reason="why",
    message=message("tool a short"),
    tokens_before=23,
    tokens_after=15,
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
        SHORT,
        Change(
            position=2,
            edit="another",
            reason="why",
            message=message("tool a"),
            tokens_before=15,
            tokens_after=10,
        ),
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
        later, cut(SHORT, GONE, gaps=(Gap(start=0, stop=1, edit="e", reason="", tokens=13, tool_calls=0),)), 3
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
    entries[2] = replace(entries[2], arrival=(replace(SHORT, edit="at_once"),))
    arrived = arrive(entries, Policy(), KNOWN)
    assert trimmed_history(arrived, None).touched
    assert trimmed_history(arrived, None).made_by[2] == ("at_once",)
    assert trimmed_history(arrived, cut(SHORT)).made_by[2] == ("at_once", "an_edit")


def test_what_of_a_log_is_sent_where_something_else_remains() -> None:
    whole = trimmed_history(ARRIVED, None)
    sent = trimmed_history(
        ARRIVED, cut(SHORT, gaps=(Gap(start=3, stop=5, edit="e", reason="", tokens=0, tool_calls=0),))
    )
    stood = whole.sent_as(sent)
    assert [tokens for _, tokens in stood] == [13, 10, 15, 0, 0, 14]
    assert [message is None for message, _ in stood] == [False, False, False, True, True, False]
    assert sent.sent_as(sent) == list(zip(sent.messages, sent.tokens, strict=True))


def test_what_the_client_was_not_shown_goes_with_a_message_that_is_as_it_was() -> None:
    rounds = Hidden(
        before=(message("assistant | x recall"), message("tool x 1")), reply=None, after=(), tokens=21
    )
    entries = [replace(entry, hidden=rounds if at in {1, 4} else None) for at, entry in enumerate(log(*LOG))]
    arrived = arrive(entries, Policy(), KNOWN)
    assert arrived.tokens == (13, 31, 23, 13, 36, 14)
    whole = trimmed_history(arrived, None)
    assert (whole.hidden, whole.touched) == ({1: rounds, 4: rounds}, True)
    released = Change(
        position=4,
        edit="hidden_rounds",
        reason="why",
        message=entries[4].message,
        tokens_before=36,
        tokens_after=15,
    )
    behind = trimmed_history(
        arrived, cut(released, gaps=(Gap(start=0, stop=1, edit="e", reason="", tokens=13, tool_calls=0),))
    )
    assert behind.hidden == {0: rounds}
    assert behind.tokens == (31, 23, 13, 15, 14)
    assert behind.gaps == (Gap(start=0, stop=1, edit="e", reason="", tokens=13, tool_calls=0),)
    early = Change(
        position=4,
        edit="an_edit",
        reason="why",
        message=message("assistant 3"),
        tokens_before=15,
        tokens_after=11,
    )
    decided = arrive(
        [replace(each, arrival=(early,) if at == 4 else ()) for at, each in enumerate(entries)],
        Policy(),
        KNOWN,
    )
    assert trimmed_history(decided, None).hidden == {1: rounds}
    assert decided.tokens == (13, 31, 23, 13, 11, 14)
