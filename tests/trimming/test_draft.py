"""The picture of the log that edits look at."""

from __future__ import annotations

from proxy.history.spans import rounds, spans
from proxy.trimming.draft import Draft, overlay
from proxy.trimming.trigger import Size
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
    assert draft().size == Size(140, 3, 1)


def test_it_is_within_a_target_that_it_does_not_exceed_and_never_without_one() -> None:
    assert [draft(target).within_target for target in (139, 140, None)] == [False, True, False]


def test_changes_make_another_draft() -> None:
    before = draft()
    removed = before.removing(2, "an_edit", "too old")
    replaced = before.replacing(0, "an_edit", "too long", message("user hi"))
    after = before.after([removed, replaced])
    assert (removed.tokens_before, removed.tokens_after, removed.message) == (15, 0, None)
    assert (replaced.tokens_before, replaced.tokens_after) == (15, 12)
    assert after.size == Size(122, 2, 0)
    assert lines(each for _, each in after.standing(0, 3)) == ["user hi", "assistant | a search"]
    assert [position for position, _ in after.standing(1, 3)] == [1]
    assert before == draft()


def test_of_several_changes_of_one_message_the_last_one_stands() -> None:
    before = draft()
    changes = [before.replacing(0, "e", "", message("user hi")), before.removing(0, "e", "")]
    assert overlay(before.messages, before.tokens, changes) == ((None, *before.messages[1:]), (0, 10, 15))
