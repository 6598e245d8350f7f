"""A clearer that knows the future: it clears every tool result of which nothing is ever used again.

It loses nothing that a later call uses, so its recall is 1, and nobody misses what it clears. A sparing one
clears more: of a value that stands in several messages it needs the newest alone, and of one that stands in
what no policy trims none. What sends still less keeps parts of results, as a digest does. They stand in the
table of a backtest as bounds; nobody can build them.

It knows a history and what its calls used; it knows no policy, no engine and no price.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from proxy.backtest.recall import References
from proxy.dialects import Message

PLACEHOLDER: Final = "[cleared]"
"""What stands in the place of a cleared result."""


class Clairvoyant:
    """The views of one history in which the tool results that are still needed stand whole, and no others."""

    def __init__(self, references: References, *, sparing: bool = False) -> None:
        """Take the history that `references` were read from.

        `sparing`: a result is needed only for what is neither pinned nor in a newer message before the call.
        """
        self._messages = references.messages
        self._cleared = [_cleared(message) for message in references.messages]
        self._needed = [-1] * len(references.messages)
        """For each message the position of the last call that needs it."""
        for position in references.positions:
            for call in references.references(position):
                for reference in call:
                    holders = [each for each in references.holders(reference.atom) if each < position]
                    if sparing:
                        holders = [] if "pinned" in reference.strata else [max(holders)]
                    for holder in holders:
                        self._needed[holder] = position

    def view(self, position: int) -> Sequence[Message]:
        """Return what is sent to ask for the message at `position`, instructions not among it.

        Of the messages before it these stand whole: all that are no tool results, the results that have not
        been sent yet (those after the last reply), and each result that a call at `position` or after it
        needs. Of the others a placeholder stands.
        """
        fresh = position
        while fresh > 0 and self._messages[fresh - 1].role != "assistant":
            fresh -= 1
        return [
            self._messages[place]
            if place >= fresh or self._needed[place] >= position
            else self._cleared[place]
            for place in range(position)
        ]


def _cleared(message: Message) -> Message:
    """Return the message without what it says, where it is a tool result that a placeholder makes shorter."""
    if not message.is_result or len(message.text) <= len(PLACEHOLDER):
        return message
    return message.replacing("content", PLACEHOLDER)
