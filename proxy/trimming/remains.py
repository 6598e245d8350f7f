"""What remains of a log: what the moves of the cut so far have left of it, and by which edits.

It does not decide anything; `engine` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from proxy.dialects import Message
from proxy.trimming.arrival import Arrived
from proxy.trimming.draft import overlay
from proxy.trimming.plan import Change, Cut, Gap, Hidden, Summary


class TrimmedHistory(Struct, frozen=True, kw_only=True):
    """The log without its gaps, and what now stands at each place of it."""

    log: Arrived
    messages: tuple[Message | None, ...]
    tokens: tuple[int, ...]
    changes: tuple[Change, ...] = ()
    """What earlier moves did to messages of this log, by place."""
    summary: Summary | None = None
    hidden: Mapping[int, Hidden] = {}
    """By place what is sent with messages of this log that the client was not shown."""
    gaps: tuple[Gap, ...] = ()
    """What earlier moves dropped: this log lies between."""

    @property
    def touched(self) -> bool:
        """Whether any of it is not as it arrived."""
        return bool(self.changes or self.summary or self.hidden or self.log.changes)

    @property
    def made_by(self) -> tuple[tuple[str, ...], ...]:
        """For each place the types of the edits that made what stands there, the first one first."""
        made: list[tuple[str, ...]] = [_types(changes) for changes in self.log.decided]
        for change in self.changes:
            made[change.position] += (change.edit,)
        return tuple(made)

    def standing_as(self, sent: TrimmedHistory) -> list[tuple[Message | None, int]]:
        """Return for each place what of it is sent where `sent` is what remains, with its tokens."""
        if sent.log is self.log:
            return list(zip(sent.messages, sent.tokens, strict=True))
        places = {entry.position: place for place, entry in enumerate(sent.log.entries)}
        found = [places.get(entry.position) for entry in self.log.entries]
        return [(None, 0) if at is None else (sent.messages[at], sent.tokens[at]) for at in found]


def trimmed_history(arrived: Arrived, cut: Cut | None, start: int = 0) -> TrimmedHistory:
    """Return what `cut` leaves of a log that is given from position `start` on."""
    gaps = cut.gaps if cut is not None else ()
    log = arrived.without(gaps)
    changes = tuple(log.placed(cut.changes)) if cut is not None else ()
    summary = cut.summary if cut is not None else None
    if summary is not None and summary.until <= start:
        summary = None  # it stands for what the client left out itself
    hidden = log.hidden
    if hidden:
        changed = {change.position for change in changes}
        unchanged = (place for place in hidden if place not in changed and not log.decided[place])
        hidden = {place: hidden[place] for place in unchanged}
    if not changes:
        return TrimmedHistory(
            log=log,
            messages=log.messages,
            tokens=log.tokens,
            changes=(),
            summary=summary,
            hidden=hidden,
            gaps=gaps,
        )
    messages, tokens = overlay(log.messages, log.tokens, changes)
    return TrimmedHistory(
        log=log, messages=messages, tokens=tokens, changes=changes, summary=summary, hidden=hidden, gaps=gaps
    )


def _types(changes: Iterable[Change]) -> tuple[str, ...]:
    return tuple([change.edit for change in changes]) if changes else ()
