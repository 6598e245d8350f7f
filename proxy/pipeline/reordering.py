"""The order of roles that upstreams insist on, as far as they said so: learnt from a refusal, once it helped.

It keeps nothing of any request, and what it learnt as long as the process lives. It does not ask anybody.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

from proxy.dialects.chat.roles import Shape

MOST: Final = 1024
"""Models that are remembered: their names come from clients."""

SAID: Final[Mapping[Shape, str]] = {
    "alternate": "upstream wants the roles to alternate: neighbouring user messages were put together",
    "one_system": "upstream wants one system message: later ones were put at its end",
}
"""What is said of a request whose roles were put in another order."""


class Orders:
    """What models insist on, by address and name. One for the life of the process."""

    def __init__(self, most: int = MOST) -> None:
        """Know nothing; remember `most` models at most."""
        self._most = most
        self._known: OrderedDict[tuple[str, str], frozenset[Shape]] = OrderedDict()

    def of(self, base_url: str, model: str) -> frozenset[Shape]:
        """Return what the model insists on, as far as that is known."""
        return self._known.get((base_url, model), frozenset())

    def learn(self, base_url: str, model: str, shapes: frozenset[Shape]) -> None:
        """Remember in which order a request went through that had been refused in its own."""
        name = (base_url, model)
        self._known[name] = self.of(base_url, model) | shapes
        self._known.move_to_end(name)
        if len(self._known) > self._most:
            self._known.popitem(last=False)
