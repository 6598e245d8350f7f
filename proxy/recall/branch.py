"""What one request may read again: the branch of its session that it goes on with."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from proxy.dialects import Message
from proxy.trimming import Entry


class Branch(Struct, frozen=True, kw_only=True):
    """The stored messages up to a node, and those that come with the request and are no nodes yet."""

    key: str
    """The session's internal name; nothing of any other is read."""
    tip: str
    """The last stored node of the branch; `ROOT` where there is none."""
    depth: int
    """How many messages lead to it, itself included."""
    fresh: tuple[Message, ...] = ()
    """The messages after it, as they arrived."""
    whole: frozenset[int] = frozenset()
    """Positions of the messages that the model was sent as they are: there is no need to find these."""

    @property
    def messages(self) -> int:
        """How many messages it has."""
        return self.depth + len(self.fresh)


def sent_whole(entries: Iterable[Entry], view: Iterable[Message]) -> frozenset[int]:
    """Return the positions of those entries that stand as they are in the view that was made of them."""
    # By what they are, not by what they say: a view has the very messages that were not changed.
    sent = set(map(id, view))
    return frozenset([entry.position for entry in entries if id(entry.message) in sent])
