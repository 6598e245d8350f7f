"""What was recalled for a reply goes when it is old, and not before."""

from __future__ import annotations

from msgspec.structs import replace

from proxy.conversation import rounds, spans
from proxy.trimming.draft import Draft
from proxy.trimming.model import Change, Entry, Hidden
from proxy.trimming.planner import plan
from proxy.trimming.policy import Policy
from proxy.trimming.trim import ReleaseHidden, recalled_lately
from tests.trimming.edits.held import draft_of
from tests.trimming.growing import hidden
from tests.trimming.notation import KNOWN, log, messages

TALK = [line for n in range(1, 6) for line in (f"user {n}", f"assistant {n}")]


def hiding(lines: list[str], *places: int) -> list[Entry]:
    """Return a log in which the replies at these places have hidden rounds."""
    made = log(*lines)
    return [
        replace(each, hidden=hidden(each, KNOWN)) if at in places else each for at, each in enumerate(made)
    ]


def draft(target: int | None, *protected: int) -> Draft:
    """Return the draft of a talk in which three replies have hidden rounds each."""
    entries = hiding(TALK, 1, 3, 9)
    found: dict[int, Hidden] = {at: each.hidden for at, each in enumerate(entries) if each.hidden is not None}
    tokens = tuple(each.tokens + (each.hidden.tokens if each.hidden else 0) for each in entries)
    made = draft_of(entries)
    return replace(made, tokens=tokens, hidden=found, target=target, protected=frozenset(protected))


def test_what_is_old_goes_from_the_oldest_until_the_target_is_met() -> None:
    each = draft(None).hidden[1].tokens
    assert [change.position for change in ReleaseHidden().apply(draft(None))] == [1, 3, 9]
    assert [change.position for change in ReleaseHidden().apply(draft(None, 3))] == [1, 9]
    before = draft(None)
    assert [change.position for change in ReleaseHidden().apply(draft(before.total - each))] == [1]
    (change,) = ReleaseHidden().apply(draft(before.total - each))
    assert change == Change(
        position=1,
        edit="hidden_rounds",
        reason=change.reason,
        message=before.messages[1],
        tokens_before=11 + each,
        tokens_after=11,
    )
    after = before.after([change])
    assert (after.total, sorted(after.hidden)) == (before.total - each, [3, 9])
    assert after.messages == before.messages


def test_what_costs_nothing_or_is_gone_stays_as_it_is() -> None:
    before = draft(None)
    free = replace(before, tokens=tuple(each.tokens for each in before.entries))
    assert list(ReleaseHidden().apply(free)) == []
    gone = replace(before, messages=(None,) * 10)
    assert list(ReleaseHidden().apply(gone)) == []


def test_of_the_newest_rounds_it_stays() -> None:
    given = messages(TALK)
    parts, turns = spans(given), rounds(given)
    assert recalled_lately(parts, turns, ()) == frozenset()
    assert recalled_lately(parts, turns, (1, 3, 5, 9)) == {5, 9}
    assert recalled_lately(parts[:2], turns[:1], (1,)) == {1}


def test_of_one_long_round_the_newest_spans_count() -> None:
    calls = [line for n in range(20) for line in (f"assistant | c{n} f", f"tool c{n} 1")]
    given = messages(["user 1", *calls])
    assert recalled_lately(spans(given), rounds(given), range(1, 41, 2)) == set(range(9, 41))


def test_a_move_lets_it_go_before_anything_else_and_the_view_stays_so() -> None:
    entries = hiding(TALK, 1, 3, 9)
    policy = Policy.model_validate(
        {
            "trigger": {"tokens": 150},
            "target": {"tokens": 140},
            "keep": {"rounds": 0},
            "edits": [{"type": "drop_oldest"}],
        }
    )
    made = plan(entries, policy, "p", KNOWN)
    assert [change.edit for change in made.made] == ["hidden_rounds", "hidden_rounds"]
    assert made.edits == ()
    newest = entries[9].hidden
    assert newest is not None
    assert made.view == (*(each.message for each in entries[:9]), *newest.before, entries[9].message)
    every = [entry.hidden for entry in entries if entry.hidden is not None]
    assert made.tokens_before == 110 + sum(hidden.tokens for hidden in every)
    assert made.messages_before == 10 + sum(hidden.messages for hidden in every)
    assert made.tokens_sent == 110 + newest.tokens
    assert made.settled == (4,)
    more = [*entries, *log(*TALK, "user 6")[10:]]
    again = plan(more, policy, "p", KNOWN, made.cut)
    assert not again.moved
    assert again.view == (*made.view, more[-1].message)
    off = Policy()
    assert len(plan(entries, off, "p", KNOWN).view) == 16
