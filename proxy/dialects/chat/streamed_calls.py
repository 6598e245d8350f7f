"""The tool calls of a stream while their names come, and whether they are of the proxy's own tools.

    its call     a delta belongs to, by the rules of `wire.deltas`: by its `index`, or its id, or to the last
    its name     comes by the rules of `wire.tool_name`
    known        a name is, once it cannot become one of the proxy's, or arguments came after it

What becomes of a call is not decided here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from proxy.dialects import JsonObject
from proxy.dialects.chat.tool_name import ToolName
from proxy.dialects.shapes import is_array, is_object


@dataclass(slots=True, eq=False)
class StreamedCall:
    """One tool call as far as it has come."""

    id: Any = ""
    name: ToolName = field(default_factory=ToolName)
    own: bool | None = None
    """Whether it is of a tool of the proxy's; None while that is not known."""
    shown: bool = False
    """Whether the client saw its beginning; noted by who shows it."""
    index: int | None = None
    """The `index` by which the client knows it, noted likewise; None: upstream's, if it has one."""


class StreamedCalls:
    """The tool calls of one stream, found by the rules of `wire.deltas`."""

    __slots__ = ("_by_index", "_last", "_names", "begun")

    def __init__(self, names: Collection[str]) -> None:
        """Begin with no calls; `names` are the proxy's tools."""
        self._names = names
        self._by_index: dict[int, StreamedCall] = {}
        self._last: StreamedCall | None = None
        self.begun: list[StreamedCall] = []
        """All calls, in the order in which they began."""

    def learn(self, items: Any) -> list[tuple[JsonObject, StreamedCall]]:
        """Read the deltas of one chunk; return each with its call."""
        return [(item, self._learn(item)) for item in items if is_object(item)] if is_array(items) else []

    def decide(self) -> None:
        """Take every name for whole."""
        for call in self.begun:
            self._decide(call)

    @property
    def undecided(self) -> bool:
        """Whether any name is not known yet."""
        return any(call.own is None for call in self.begun)

    @property
    def any_own(self) -> bool:
        """Whether any call is known to be of the proxy's tools."""
        return any(call.own for call in self.begun)

    def _learn(self, item: JsonObject) -> StreamedCall:
        function, custom = item.get("function"), item.get("custom")
        inner: JsonObject = function if is_object(function) else custom if is_object(custom) else {}
        identity = item.get("id")
        begins = is_object(function) and bool(inner.get("name"))
        self._last = call = self._call(item.get("index"), identity, named=begins)
        if not call.id and identity:
            call.id = identity
        call.name.learn(inner)
        if call.own is None and call.name.value:
            self._judge(call)
        return call

    def _judge(self, call: StreamedCall) -> None:
        known = call.name.value
        if not isinstance(known, str) or not any(name.startswith(known) for name in self._names):
            call.own = False
        elif call.name.whole:
            call.own = known in self._names

    def _call(self, index: Any, identity: Any, *, named: bool) -> StreamedCall:
        if isinstance(index, int):
            call = self._by_index.get(index)
            another = named and identity and call is not None and call.id and identity != call.id
            if call is not None and another and call.name.value:
                self._decide(call)
                call = None
            if call is None:
                call = self._by_index[index] = self._begin()
            return call
        if self._last is not None and not identity:
            return self._last
        known = [call for call in self.begun if identity and call.id == identity]
        return known[0] if known else self._begin()

    def _decide(self, call: StreamedCall) -> None:
        if call.own is None:
            call.own = call.name.value in self._names

    def _begin(self) -> StreamedCall:
        self.begun.append(StreamedCall())
        return self.begun[-1]
