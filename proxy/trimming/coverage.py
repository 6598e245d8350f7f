"""What a summary may cover: beginnings of the log, from the least to the most.

A beginning ends where a whole round of the history does. Where no round of the history need stay, it may end
inside the current round too, after any of its spans but the newest: an agent that runs 300 calls on one
instruction has one round. What is protected is never counted. It does not know who sums up, nor whether that
is worth it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from proxy.conversation import Round
from proxy.trimming.draft import Draft
from proxy.trimming.gaps import clipped


class Beginning(Struct, frozen=True, kw_only=True):
    """A beginning of the log that may be covered."""

    stop: int
    """Place after the last message of it."""
    until: int
    """Position of the first message that is not in it."""
    messages: int
    """Messages of it that stand and are not protected."""
    tokens: int
    """Their tokens."""
    rounds: int
    """Whole rounds in which there are any."""
    new_messages: int
    """Messages of it that no summary covers yet and that are not protected, those dropped before included."""
    new_tokens: int
    """Their tokens, as they would be sent if nothing were trimmed."""


class _Group(Struct, frozen=True, kw_only=True):
    """What is covered together: a round of the history, or a span of the current one."""

    start: int
    stop: int
    is_round: bool
    """Whether it is a whole round that a user's message begins."""
    ends: bool
    """Whether a beginning may end after it."""


def beginnings(draft: Draft, keep_rounds: int, since: int = 0) -> Iterator[Beginning]:
    """Yield what may be covered; `since` is the position of the first message that no summary covers yet."""
    messages = tokens = rounds = new_messages = new_tokens = 0
    gaps = iter(clipped(draft.gaps, since, draft.end))
    gap = next(gaps, None)
    for group in _groups(draft, keep_rounds):
        free = 0
        for place in range(group.start, group.stop):
            if place in draft.protected:
                continue
            entry = draft.entries[place]
            if draft.messages[place] is not None:
                free, tokens = free + 1, tokens + draft.tokens[place]
            if entry.position >= since:
                new_messages, new_tokens = new_messages + 1, new_tokens + entry.tokens
        until = draft.position(group.stop)
        while gap is not None and gap.stop <= until:
            new_messages, new_tokens = new_messages + gap.messages, new_tokens + gap.tokens
            gap = next(gaps, None)
        messages += free
        rounds += bool(free) and group.is_round
        if group.ends:
            yield Beginning(
                stop=group.stop,
                until=until,
                messages=messages,
                tokens=tokens,
                rounds=rounds,
                new_messages=new_messages,
                new_tokens=new_tokens,
            )


def start_of_newest(rounds: Sequence[Round], last: int) -> int:
    """Return where the newest `last` rounds of the history begin; 0 where there are not more than these.

    The last of `rounds` is the current one and no history; what precedes the first user message is no round.
    """
    history = [each for each in rounds[:-1] if each.number > 0]
    if len(history) <= last:
        return 0
    return history[-last].start if last else rounds[-1].start


def _groups(draft: Draft, keep_rounds: int) -> Iterator[_Group]:
    """Yield what may be covered, the oldest first."""
    last = start_of_newest(draft.rounds, keep_rounds)
    for each in draft.rounds:
        if each.stop <= last:
            yield _Group(start=each.start, stop=each.stop, is_round=each.number > 0, ends=each.number > 0)
    if keep_rounds == 0 and draft.rounds:
        for span in draft.spans[:-1]:
            if span.start >= draft.rounds[-1].start:
                free = any(at not in draft.protected for at, _ in draft.standing(span.start, span.stop))
                yield _Group(start=span.start, stop=span.stop, is_round=False, ends=free)
