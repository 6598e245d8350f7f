"""What all dialects share of the proxy's own tools: how they are offered, and how a round that calls them ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import orjson
from msgspec import Struct

from proxy.dialects.base import JsonObject, ToolDefinition, ToolOffer
from proxy.dialects.jsontext import is_object

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


class RoundCalls(Struct, frozen=True, kw_only=True):
    """What one round of a reply calls and says."""

    own: bool  # whether it calls tools of the proxy's
    broken: bool  # whether a call of them broke off
    others: bool  # whether it calls anything that the client answers
    says: bool  # whether it has anything to read or to hear
    cut: bool  # whether it may have been cut off
    finish: str  # why it ended, in the API's word
    whole: str  # the API's word for the end of a reply that calls nothing

    def ending(self, *, later: bool, said: bool, may_ask: bool) -> RoundEnding:
        """Decide how the round ends.

        `later`: rounds came before it; `said`: the client has text from those; `may_ask`: upstream may be asked again.
        """
        if self.others:
            return RoundEnding(finish=self.finish)
        if not self.own and not self.broken:
            empty = later and not said and not self.says and not self.cut
            return RoundEnding(text=SAID_NOTHING if empty else "", finish=self.finish)
        if may_ask and not self.broken:
            return RoundEnding(again=True, finish="")
        text = "" if self.says else BROKE_OFF if self.broken else STOPPED
        return RoundEnding(text=text, finish=self.finish if self.cut else self.whole)
