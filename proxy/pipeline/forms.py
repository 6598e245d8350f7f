"""Stored messages in other words than those stored: which of them the store has not been offered yet.

Clients write replies in their own way when they send them back, and send them back at every turn. A form is
stored once; offering it again at every turn would make each request as long as the history.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from proxy.conversation import body_of
from proxy.dialects import Message
from proxy.store import Mark

FORMS: Final = 100_000
"""How many are remembered in one process at most: some 40 MB."""

_Key: TypeAlias = tuple[str, str]


class Variants:
    """What was offered, forgotten in the order of its coming: that costs an offer that changes nothing."""

    def __init__(self, most: int = FORMS) -> None:
        """Remember `most` at most."""
        self._half: Final = max(most // 2, 1)
        self._young: set[_Key] = set()
        self._old: set[_Key] = set()

    def new(
        self, session: str, messages: Sequence[Message], marks: Sequence[Mark]
    ) -> Iterator[tuple[str, Message]]:
        """Yield (node, form) for each message whose text is not the one stored, once for each form.

        `session` is the session's internal name; `marks` belong to the first of the messages.
        """
        for message, mark in zip(messages, marks, strict=False):
            body = body_of(message)
            if body != mark.body and self._is_new((session + mark.node, body)):
                yield mark.node, message

    def _is_new(self, key: _Key) -> bool:
        if key in self._young or key in self._old:
            return False
        if len(self._young) >= self._half:
            self._old, self._young = self._young, set()
        self._young.add(key)
        return True
