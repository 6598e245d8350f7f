"""What happens to a message the first time it is sent, and every time after.

The first time, the `on_arrival` edits of the policy decide; what they decided is recorded, and
from then on it is done again as it was, whatever the policy says by then: the bytes that were sent
once are sent again. A decision depends on the message and on what precedes it, on nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from proxy.dialects import Message
from proxy.trimming.gaps import standing
from proxy.trimming.plan import Change, Entry, Gap, Hidden, PlanningContext
from proxy.trimming.policy import Policy
from proxy.trimming.protection import pinned_so_far
from proxy.trimming.trigger import Size


class Arrived(Struct, frozen=True, kw_only=True):
    """The log after `on_arrival`, or a part of it: what the cut and everything after it build upon."""

    entries: tuple[Entry, ...]
    """The messages as they would be sent if nothing were trimmed, by position."""
    messages: tuple[Message | None, ...]
    """What stands in the place of each; None where a recorded decision removed it."""
    tokens: tuple[int, ...]
    """Tokens of what stands there, hidden rounds included."""
    decided: tuple[tuple[Change, ...], ...]
    """For each message what was decided when it was first sent, or just now."""
    changes: tuple[Change, ...]
    """All of that, by position."""
    hidden: Mapping[int, Hidden]
    """By place what the client was not shown, whatever became of the message there."""

    def without(self, gaps: Sequence[Gap]) -> Arrived:
        """Return what lies in none of the gaps."""
        if not gaps:
            return self
        entries = self.entries
        left = standing(range(len(entries)), gaps, lambda place: entries[place].position)
        return _arrived(
            tuple([entries[place] for place in left]),
            tuple([self.messages[place] for place in left]),
            tuple([self.tokens[place] for place in left]),
            tuple([self.decided[place] for place in left]),
        )

    def placed(self, changes: Iterable[Change]) -> list[Change]:
        """Return those of the changes whose message is here, with its place instead of its position."""
        places = {entry.position: place for place, entry in enumerate(self.entries)}
        return [
            moved(change, place) for change in changes if (place := places.get(change.position)) is not None
        ]


def arrive(
    entries: Sequence[Entry], policy: Policy, known: PlanningContext, missing: Sequence[tuple[int, Size]] = ()
) -> Arrived:
    """Do again what is recorded, and decide for what is sent for the first time.

    `missing` is what stands in the log and is not among the entries, as (position after it, size).
    """
    if policy.on_arrival and any(entry.arrival is None for entry in entries):
        decided = tuple(_decided(entries, policy, known, missing))
    else:
        decided = tuple([entry.arrival or () for entry in entries])
    messages: list[Message | None] = [entry.message for entry in entries]
    tokens = [
        entry.tokens if entry.hidden is None else entry.tokens + entry.hidden.tokens for entry in entries
    ]
    if any(decided):
        for place, changes in enumerate(decided):
            for change in changes:
                messages[place], tokens[place] = change.message, change.tokens_after
    return _arrived(tuple(entries), tuple(messages), tuple(tokens), decided)


def _arrived(
    entries: tuple[Entry, ...],
    messages: tuple[Message | None, ...],
    tokens: tuple[int, ...],
    decided: tuple[tuple[Change, ...], ...],
) -> Arrived:
    """Return these as the log, with what follows from them."""
    changes = [change for each in decided for change in each] if any(decided) else ()
    hidden = {place: entry.hidden for place, entry in enumerate(entries) if entry.hidden is not None}
    return Arrived(
        entries=entries,
        messages=messages,
        tokens=tokens,
        decided=decided,
        changes=tuple(changes),
        hidden=hidden,
    )


def moved(change: Change, position: int) -> Change:
    """Return the change as one of the message at `position`."""
    if change.position == position:
        return change
    return Change(
        position=position,
        edit=change.edit,
        reason=change.reason,
        message=change.message,
        tokens_before=change.tokens_before,
        tokens_after=change.tokens_after,
    )


def _decided(
    entries: Sequence[Entry], policy: Policy, known: PlanningContext, missing: Sequence[tuple[int, Size]]
) -> Iterator[tuple[Change, ...]]:
    """Yield for each entry what was or is decided about it."""
    originals = [entry.message for entry in entries]
    # Whether a message is a result is read from its text: only where somebody asks.
    counting = any(edit.when is not None and edit.when.tool_calls is not None for edit in policy.on_arrival)
    tokens, count, calls = known.fixed_tokens, 0, 0
    absent = iter(missing)
    stop, size = next(absent, _NOTHING)
    run, following = 0, None
    for place, entry in enumerate(entries):
        if entry.position != following:
            run = place
        following = entry.position + 1
        while stop <= entry.position:
            tokens, count, calls = tokens + size.tokens, count + size.messages, calls + size.tool_calls
            stop, size = next(absent, _NOTHING)
        tokens, count = tokens + entry.tokens, count + 1
        if counting:
            calls += entry.message.is_result
        if entry.arrival is not None:
            yield entry.arrival
        elif not entry.message.is_result or pinned_so_far(originals, place, policy, run):
            yield ()
        else:
            yield tuple(_new(entry, Size(tokens=tokens, messages=count, tool_calls=calls), policy, known))


_NOTHING = (float("inf"), Size(tokens=0, messages=0, tool_calls=0))
"""What is missing after the last of it."""


def _new(entry: Entry, size: Size, policy: Policy, known: PlanningContext) -> Iterator[Change]:
    """Yield what the policy's edits decide about a tool result; `size` is that of the log up to it."""
    message, tokens = entry.message, entry.tokens
    for edit in policy.arrival_edits:
        if edit.when is not None and not edit.when.holds(size, known):
            continue
        shortened = edit.shorten(message, entry)
        if shortened is None:
            continue
        after = known.count(shortened.message)
        if after < tokens:
            yield Change(
                position=entry.position,
                edit=edit.type,
                reason=shortened.reason,
                message=shortened.message,
                tokens_before=tokens,
                tokens_after=after,
            )
            message, tokens = shortened.message, after
