"""Shared by all dialects: offering the proxy's own tools, and ending a round that calls them.

The definitions are constant bytes after the client's own tools, always in the same order. The request alone decides
whether they are offered. So requests keep a stable prefix. No parameter is required.

A reply may take several rounds. A round that calls only the proxy's tools is followed by another round, and the client
sees one reply. Whatever cannot be read, or is no part of a reply, is relayed unchanged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

import orjson
from msgspec import Struct

from proxy.dialects.base import JsonObject, Message, OwnCalls, StreamReader, ToolDefinition, ToolOffer
from proxy.dialects.jsontext import added, is_object
from proxy.dialects.sse import Event

MOST_TOOLS: Final = 128  # maximum tools of a request; providers refuse more
STOPPED: Final = (
    "(No answer was written: this reply took as many steps as it may. "
    "Please ask again, perhaps for one thing at a time.)"
)
"""The text of a reply that would end in calls of the proxy's tools when upstream may not be asked again."""
BROKE_OFF: Final = "(No answer was written: the reply was cut off before it came to that. Please ask again.)"
"""The text of a reply that was cut off in a call of the proxy's tools, and has no other text."""
SAID_NOTHING: Final = "(No answer was written: the model ended its reply without one. Please ask again.)"
"""The text of a reply whose calls were answered, but which then ended without any text."""


def offer(
    tools: bytes | None,
    own: Sequence[ToolDefinition],
    define: Callable[[ToolDefinition, bool], bytes],
    *,
    name_of: Callable[[JsonObject], Any] = lambda tool: tool.get("name"),
    function_of: Callable[[JsonObject], Any] = lambda _: None,
) -> ToolOffer:
    """Return the tools to send: the client's `tools` (JSON text), which keep their bytes, then the proxy's `own`.

    A tool of the proxy's is left out if the client has one with that name. All are left out if there would be too many
    tools. `name_of` returns the name of a client's tool (any JSON). `define` returns the text of a tool of the proxy's,
    strict if all of the client's functions (found by `function_of`) are strict: some providers refuse to mix them.
    """
    theirs: list[Any] = orjson.loads(tools) if tools is not None else []
    taken = [name_of(tool) for tool in theirs if is_object(tool)]
    added = [tool for tool in own if tool.name not in taken]
    if not added or len(theirs) + len(added) > MOST_TOOLS:
        return ToolOffer(names=(), tools=tools)
    functions = [found for tool in theirs if is_object(tool) and is_object(found := function_of(tool))]
    strict = bool(functions) and all(function.get("strict") is True for function in functions)
    ours, names = b",".join([define(tool, strict) for tool in added]), tuple([tool.name for tool in added])
    if not theirs or tools is None:
        return ToolOffer(names=names, tools=b"[%b]" % ours)
    end = tools.rindex(b"]")
    return ToolOffer(names=names, tools=b"%b,%b%b" % (tools[:end], ours, tools[end:]))


def schema_of(tool: ToolDefinition, *, strict: bool = False) -> JsonObject:
    """Return the JSON Schema of a tool's parameters. A strict schema requires every property."""
    unset = "Empty" if strict else "Leave out"
    properties = {name: {"type": "string", "description": told.format(unset=unset)} for name, told in tool.parameters}
    required = {"required": list(properties)} if strict else {}
    return {"type": "object", "properties": properties, **required, "additionalProperties": False}


class RoundEnding(Struct, frozen=True, kw_only=True):
    """How one round of a reply ends for the client."""

    again: bool = False  # not at all: another round follows, and the client does not see this end
    text: str = ""  # text to add at its end, which the model did not write
    finish: str  # why it ends, in the API's term


def unused_id(place: int, taken: Container[str]) -> str:
    """Return an id for the call at this place that no other call of the round has."""
    name = f"call_{place}"
    while name in taken:
        name += "_"
    return name


class ReplyRound(Protocol):
    """One answer of the upstream, with the calls of the proxy's tools separated from the others."""

    @property
    def calls(self) -> OwnCalls: ...  # its calls, and the round as it can be sent back

    @property
    def says(self) -> bool: ...  # whether it has anything to read or hear

    @property
    def finish(self) -> str: ...  # why it ended, in the API's term

    @property
    def cut(self) -> bool: ...  # whether that reason may have cut it off

    @property
    def usage(self) -> JsonObject | None: ...  # in the API's own form


def round_ending(current: ReplyRound, whole: str, *, later: bool, said: bool, may_ask: bool) -> RoundEnding:
    """Decide how a round ends for the client. `whole` is the API's term for the end of a reply without calls.

    `later`: this is not the first round. `said`: the client has text from earlier rounds. `may_ask`: upstream may be
    asked again.
    """
    calls = current.calls
    if calls.others:
        return RoundEnding(finish=current.finish)
    if not calls.own and not calls.broken:
        empty = later and not said and not current.says and not current.cut
        return RoundEnding(text=SAID_NOTHING if empty else "", finish=current.finish)
    if may_ask and not calls.broken:
        return RoundEnding(again=True, finish="")
    text = "" if current.says else BROKE_OFF if calls.broken else STOPPED
    return RoundEnding(text=text, finish=current.finish if current.cut else whole)


ReadRound = TypeVar("ReadRound", bound=ReplyRound)
Reader = TypeVar("Reader", bound=StreamReader)


class ToolFilter(ABC):
    """A reply, of one or more rounds, from which calls of the proxy's tools are removed before the client sees it."""

    _whole = ""  # the API's term for the end of a reply without calls

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self.rounds = 0  # how many rounds came before this one
        self.again = False  # whether another round is to follow, because this one calls only the proxy's tools
        self._may_ask = True
        self._usage_before: JsonObject | None = None  # the usage of earlier rounds

    @abstractmethod
    def _current(self) -> ReplyRound:
        """Return this round as far as it has arrived."""

    @abstractmethod
    def _begin(self) -> None:
        """Replace this round by a new one."""

    @abstractmethod
    def give_up(self) -> bytes:
        """End a reply after which no other round can follow. Return the bytes for the client."""

    @property
    def calls(self) -> OwnCalls:
        """The calls of this round."""
        return self._current().calls

    @property
    def _spent(self) -> JsonObject | None:
        """The usage of all rounds together, in the API's own form."""
        return added(self._usage_before, self._current().usage)

    @property
    def usage(self) -> JsonObject | None:
        """The usage of all rounds together, in the form of Chat Completions."""
        return self._as_chat(self._spent)

    @staticmethod
    def _as_chat(usage: JsonObject | None) -> JsonObject | None:
        return usage

    def _ending(self, *, said: bool) -> RoundEnding:
        """Decide how this round ends for the client. `said`: the client has text from earlier rounds."""
        later, may_ask = self.rounds > 0, self._may_ask
        how = round_ending(self._current(), self._whole, later=later, said=said, may_ask=may_ask)
        self.again = how.again
        return how

    def next(self, *, may_ask: bool) -> None:
        """Begin another round. `may_ask`: one more may follow it."""
        self._usage_before = self._spent
        self.rounds += 1
        self._may_ask, self.again = may_ask, False
        self._begin()


class BodyFilter(ToolFilter, Generic[ReadRound]):
    """A reply whose rounds each arrive as one body."""

    last: Message  # what this round says to the client
    _round: ReadRound

    def _current(self) -> ReadRound:
        return self._round

    def take(self, body: bytes) -> bytes:
        """Read the next round. Return the body for the client; empty if another round follows."""
        if not self._read(body):
            return body
        calls = self._round.calls
        if not (self.rounds or calls.own or calls.broken):
            return body
        how = self._ending(said=self._has_said)
        return b"" if how.again else self._shown(how)

    def give_up(self) -> bytes:
        self.next(may_ask=False)
        return self._shown(RoundEnding(text=STOPPED, finish=self._whole))

    @property
    @abstractmethod
    def _has_said(self) -> bool:
        """Whether earlier rounds had anything that the client will see."""

    @abstractmethod
    def _read(self, body: bytes) -> bool:
        """Read a round. Return whether the body holds a reply."""

    @abstractmethod
    def _shown(self, how: RoundEnding) -> bytes:
        """Return the body of a reply that ends with this round."""


class StreamFilter(ToolFilter, Generic[Reader]):
    """A reply whose rounds each arrive as a stream."""

    reply: Reader  # the reply as the client sees it, but without the usage of all rounds
    said = False  # whether the client has been shown anything beyond empty beginnings
    ended = False  # whether this round has ended

    @property
    @abstractmethod
    def last(self) -> Message:
        """What this round says to the client."""

    @property
    @abstractmethod
    def hides(self) -> bool:
        """Whether anything was, or currently is, withheld from the client."""

    @abstractmethod
    def take(self, event: Event) -> bytes:
        """Read the next event. Return the bytes to show now, including events that were waiting."""

    def end(self, event: Event | None = None) -> bytes:  # noqa: ARG002 - most events that end a stream say nothing else
        """Read the event that ends the round's stream, or its close. Return the bytes to show before that event."""
        return b""

    def closing(self, tail: bytes) -> bytes:
        """Return the ending event and all bytes after it in the form for the client."""
        return tail
