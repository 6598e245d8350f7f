"""What all dialects share of the proxy's own tools: how they are offered, and how a round that calls them ends.

Their definitions are constant bytes after the client's own tools, in one order, and whether they are offered follows
from the request alone: the beginning of every request stays what it was. Nothing is required.

A reply may take several rounds: one that calls nothing but the proxy's tools is followed by another one, and the client
sees one reply. What cannot be read, and what says nothing of a reply, is shown as it came.
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

MOST_TOOLS: Final = 128  # tools that a request may offer; with more it is refused
STOPPED: Final = (
    "(No answer was written: this reply took as many steps as it may. "
    "Please ask again, perhaps for one thing at a time.)"
)
"""What a reply says that would end with calls of the proxy's tools, when upstream may not be asked again."""
BROKE_OFF: Final = "(No answer was written: the reply was cut off before it came to that. Please ask again.)"
"""What a reply says that was cut off in a call of the proxy's tools, and says nothing beside it."""
SAID_NOTHING: Final = "(No answer was written: the model ended its reply without one. Please ask again.)"
"""What a reply says whose calls were answered, and of which nothing came then."""


def offer(
    tools: bytes | None,
    own: Sequence[ToolDefinition],
    define: Callable[[ToolDefinition, bool], bytes],
    *,
    name_of: Callable[[JsonObject], Any] = lambda tool: tool.get("name"),
    function_of: Callable[[JsonObject], Any] = lambda _: None,
) -> ToolOffer:
    """Return the tools to send: the client's `tools` (JSON), whose bytes stay, then the proxy's `own`.

    None of the own where that would be too many tools, and none whose name one of the client's has: `name_of` returns
    that of one, which may be any JSON. `define` returns the text of a tool; it is to be strict where all functions of
    the client's are, which `function_of` finds in its tools: some providers take strict functions only beside others.
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
    """Return the JSON Schema of a tool's parameters; a strict one requires every property."""
    unset = "Empty" if strict else "Leave out"
    properties = {name: {"type": "string", "description": told.format(unset=unset)} for name, told in tool.parameters}
    required = {"required": list(properties)} if strict else {}
    return {"type": "object", "properties": properties, **required, "additionalProperties": False}


class RoundEnding(Struct, frozen=True, kw_only=True):
    """How one round of a reply ends for the client."""

    again: bool = False  # not at all: another round follows, and the client is not told of this end
    text: str = ""  # what is said at its end that the model did not say
    finish: str  # why it ends, in the API's word


def unused_id(place: int, taken: Container[str]) -> str:
    """Return an id for the call at this place that no other call of the round has."""
    name = f"call_{place}"
    while name in taken:
        name += "_"
    return name


class ReplyRound(Protocol):
    """One answer of the upstream's, with the calls of the proxy's tools told apart."""

    @property
    def calls(self) -> OwnCalls: ...  # its calls, and the round as it can be sent back

    @property
    def says(self) -> bool: ...  # whether it has anything to read or to hear

    @property
    def finish(self) -> str: ...  # why it ended, in the API's word

    @property
    def cut(self) -> bool: ...  # whether that may have cut it off

    @property
    def usage(self) -> JsonObject | None: ...  # in the API's own form


def round_ending(current: ReplyRound, whole: str, *, later: bool, said: bool, may_ask: bool) -> RoundEnding:
    """Decide how a round ends for the client; `whole` is the API's word for the end of a reply that calls nothing.

    `later`: rounds came before it; `said`: the client has text from those; `may_ask`: upstream may be asked again.
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
    """One reply whose calls of the proxy's tools are kept from the client. It may take several rounds."""

    _whole = ""  # the API's word for the end of a reply that calls nothing

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self.rounds = 0  # how many rounds came before this one
        self.again = False  # whether another round is to follow: this one calls the proxy's tools and nothing else
        self._may_ask = True
        self._usage_before: JsonObject | None = None  # that of the rounds before

    @abstractmethod
    def _current(self) -> ReplyRound:
        """Return this round as far as it has come."""

    @abstractmethod
    def _begin(self) -> None:
        """Put another round in the place of this one."""

    @abstractmethod
    def give_up(self) -> bytes:
        """End a reply that no other round can follow; return what the client is shown."""

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
        """Decide how this round ends for the client; `said`: it has text from the rounds before."""
        later, may_ask = self.rounds > 0, self._may_ask
        how = round_ending(self._current(), self._whole, later=later, said=said, may_ask=may_ask)
        self.again = how.again
        return how

    def next(self, *, may_ask: bool) -> None:
        """Begin another round; `may_ask`: one more may follow that."""
        self._usage_before = self._spent
        self.rounds += 1
        self._may_ask, self.again = may_ask, False
        self._begin()


class BodyFilter(ToolFilter, Generic[ReadRound]):
    """A reply whose rounds each come in one piece."""

    last: Message  # what this round says to the client
    _round: ReadRound

    def _current(self) -> ReadRound:
        return self._round

    def take(self, body: bytes) -> bytes:
        """Read the next round; return the body to show if it is the last."""
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
        """Whether the rounds before said anything to the client."""

    @abstractmethod
    def _read(self, body: bytes) -> bool:
        """Read a round; tell whether the body holds a reply."""

    @abstractmethod
    def _shown(self, how: RoundEnding) -> bytes:
        """Return the body of a reply that ends with this round."""


class StreamFilter(ToolFilter, Generic[Reader]):
    """A reply whose rounds each come as a stream."""

    reply: Reader  # the reply as the client has it; its usage is not that of all rounds
    said = False  # whether the client was shown anything but empty beginnings
    ended = False  # whether this round came to its end

    @property
    @abstractmethod
    def last(self) -> Message:
        """What this round says to the client."""

    @property
    @abstractmethod
    def hides(self) -> bool:
        """Whether anything was kept from the client, or is being kept for now."""

    @abstractmethod
    def take(self, event: Event) -> bytes:
        """Read the next event; return what is shown now, of what waited too."""

    def end(self, event: Event | None = None) -> bytes:  # noqa: ARG002 - most events that end a stream say nothing else
        """Read the event that ends the round's stream, or its close; return what is still shown before it."""
        return b""

    def closing(self, tail: bytes) -> bytes:
        """Return that event, and what came after it, as the client is shown it."""
        return tail
