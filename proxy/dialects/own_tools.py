"""What all dialects share of the proxy's own tools: how they are offered, and how a round that calls them ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from msgspec import Struct

from proxy.dialects.base import Request, ToolDefinition, ToolOffer

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
    request: Request,
    own: Sequence[ToolDefinition],
    theirs: Sequence[Any],
    taken: Collection[Any],
    define: Callable[[ToolDefinition], bytes],
) -> ToolOffer:
    """Return the tools to send: the client's, whose bytes stay, then the proxy's `own`.

    None of the own where that would be too many tools, and none whose name is `taken` by one of `theirs`, the parsed
    tools of the request. `define` returns the text of one.
    """
    added = [tool for tool in own if tool.name not in taken]
    if not added or len(theirs) + len(added) > MOST_TOOLS:
        return ToolOffer(names=(), tools=request.tools)
    ours, names = b",".join(map(define, added)), tuple([tool.name for tool in added])
    if not theirs or request.tools is None:
        return ToolOffer(names=names, tools=b"[%b]" % ours)
    end = request.tools.rindex(b"]")
    return ToolOffer(names=names, tools=b"%b,%b%b" % (request.tools[:end], ours, request.tools[end:]))


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
