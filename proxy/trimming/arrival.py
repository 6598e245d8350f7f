"""What happens to a message the first time it is sent, and every time after.

The first time, the `on_arrival` edits of the policy decide; what they decided is recorded, and
from then on it is done again as it was, whatever the policy says by then: the bytes that were sent
once are sent again. A decision depends on the message and on what precedes it, on nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from proxy.history.spans import is_result
from proxy.trimming.plan import Change, Entry, Known
from proxy.trimming.policy import Policy
from proxy.trimming.protection import pinned_so_far
from proxy.trimming.trigger import Size
from proxy.wire.messages import Message


@dataclass(frozen=True, slots=True)
class Arrived:
    """The log after `on_arrival`: what the cut and everything after it build upon."""

    messages: tuple[Message | None, ...]
    """What stands at each position of the log; None where a recorded decision removed it."""
    tokens: tuple[int, ...]
    """Tokens of what stands there."""
    decided: tuple[tuple[Change, ...], ...]
    """For each message what was decided when it was first sent, or just now."""

    @property
    def changes(self) -> tuple[Change, ...]:
        """All of that, by position."""
        return tuple(change for changes in self.decided for change in changes)


def arrive(entries: Sequence[Entry], policy: Policy, known: Known) -> Arrived:
    """Do again what is recorded, and decide for what is sent for the first time."""
    decided = tuple(_decided(entries, policy, known))
    messages: list[Message | None] = [entry.message for entry in entries]
    tokens = [entry.tokens for entry in entries]
    for position, changes in enumerate(decided):
        for change in changes:
            messages[position], tokens[position] = change.message, change.tokens_after
    return Arrived(tuple(messages), tuple(tokens), decided)


def _decided(entries: Sequence[Entry], policy: Policy, known: Known) -> Iterator[tuple[Change, ...]]:
    """Yield for each entry what was or is decided about it."""
    if not policy.on_arrival:
        yield from (entry.arrival or () for entry in entries)
        return
    originals = [entry.message for entry in entries]
    tokens, calls = known.fixed_tokens, 0
    for position, entry in enumerate(entries):
        tokens += entry.tokens
        calls += is_result(entry.message)
        if entry.arrival is not None:
            yield entry.arrival
        elif not is_result(entry.message) or pinned_so_far(originals, position, policy):
            yield ()
        else:
            size = Size(tokens, position + 1, calls)
            yield tuple(_new(position, entry, size, policy, known))


def _new(position: int, entry: Entry, size: Size, policy: Policy, known: Known) -> Iterator[Change]:
    """Yield what the policy's edits decide about a tool result; `size` is that of the log up to it."""
    message, tokens = entry.message, entry.tokens
    for edit in policy.arrival_edits:
        if edit.when is not None and not edit.when.holds(size, known.context_window):
            continue
        shortened = edit.shorten(message, entry)
        if shortened is None:
            continue
        after = known.count(shortened.message)
        if after < tokens:
            yield Change(position, edit.type, shortened.reason, shortened.message, tokens, after)
            message, tokens = shortened.message, after
