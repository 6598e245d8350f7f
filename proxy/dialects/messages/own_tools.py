"""The proxy's own tools: offered beside the client's, and their calls taken out of what the client is shown.

Their definitions are constant bytes after the client's own tools, in one order, and whether they are offered follows
from the request alone: the beginning of every request stays what it was. Nothing is required.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, Final

import orjson
from msgspec import Struct

from proxy.dialects import JsonObject, Message, OwnCalls, Request, ToolDefinition, ToolOffer
from proxy.dialects.jsontext import is_array, is_object, is_one_of, read, write
from proxy.dialects.messages.message import THINKING, UNFINISHED, MessagesMessage, is_call
from proxy.dialects.messages.reply import usage_of
from proxy.dialects.own_tools import BodyFilter, RoundEnding, offer, schema_of

CUT_OFF: Final = ("max_tokens", "model_context_window_exceeded", "refusal")
"""Values of `stop_reason` that may have cut a call in two."""
ENDED: Final = "end_turn"
_LEAVES_ROOM: Final = (None, "auto", "any")  # types of `tool_choice` with which the model may call any tool


def leaves_room(request: Request) -> bool:
    """Tell whether a request may get tools: not one that chooses a tool itself or none, and not a thread.

    The provider would hold them for requests of the thread that do not pass through here whole.
    """
    choice = request.parameters.get("tool_choice")
    if is_object(request.parameters.get("thread")):
        return False
    return (choice.get("type") if is_object(choice) else choice) in _LEAVES_ROOM


def add_tools(tools: bytes | None, own: Sequence[ToolDefinition]) -> ToolOffer:
    """Return the client's tools with these behind them."""
    return offer(tools, own, lambda tool, _: _definition(tool))


@lru_cache
def _definition(tool: ToolDefinition) -> bytes:
    """Return the JSON text of a tool."""
    return orjson.dumps({"name": tool.name, "description": tool.description, "input_schema": schema_of(tool)})


# ------------------------------------------------------------------------------------- the calls


class MessagesRound(Struct, frozen=True, kw_only=True):
    """One answer of the upstream's, with the calls of the proxy's tools told apart."""

    content: list[Any] = []  # its blocks
    finish: str = ""  # why it ended
    usage: JsonObject | None = None  # in the API's own form
    names: Collection[str] = frozenset()  # the proxy's tools

    @property
    def cut(self) -> bool:
        """Whether it may have been cut off."""
        return self.finish in CUT_OFF

    @property
    def shown(self) -> list[Any]:
        """Its blocks without calls of the proxy's tools."""
        return [block for block in self.content if not self._is_own(block)]

    @property
    def says(self) -> bool:
        """Whether it has anything to read."""
        return reply_of(self.content).has_content

    @property
    def last(self) -> Message:
        """What it says to the client."""
        return reply_of(self.shown)

    @property
    def calls(self) -> OwnCalls:
        """Its calls, told apart, and the round as it can be sent back."""
        kept: list[Any] = []
        broken = False
        for block in self.content:
            if not self._is_own(block):
                kept.append(block)
            elif UNFINISHED in block or not block.get("id") or (self.cut and block is self.content[-1]):
                broken = True
            else:
                kept.append({**block, "input": block["input"] if is_object(block.get("input")) else {}})
        message = reply_of(kept)
        own = tuple([call for call in message.calls if call.name in self.names])
        return OwnCalls(message=message, own=own, broken=broken, others=len(message.calls) > len(own))

    def _is_own(self, block: Any) -> bool:
        return is_call(block) and is_one_of(block.get("name"), self.names)


def reply_of(content: Sequence[Any]) -> MessagesMessage:
    """Return a reply with these blocks as it is stored."""
    return MessagesMessage.as_stored({"role": "assistant", "content": content})


class MessagesBodyFilter(BodyFilter[MessagesRound]):
    """One reply on its way to the client, made of bodies that each hold one round of it."""

    _whole = ENDED
    _as_chat = staticmethod(usage_of)

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._said: list[Any] = []  # the blocks of the rounds that the client is not shown
        self._data: JsonObject = {}
        self._round = MessagesRound()
        self.last = self._round.last

    @property
    def _has_said(self) -> bool:
        return any(not (is_object(block) and block.get("type") in THINKING) for block in self._said)

    def _read(self, body: bytes) -> bool:
        self._data, self._round, self.last = {}, MessagesRound(names=self._names), reply_of([])
        try:
            data = read(body)
        except ValueError:
            return False
        if is_object(data) and is_array(content := data.get("content")):
            finish, usage = data.get("stop_reason"), data.get("usage")
            self._data = data
            self._round = MessagesRound(
                content=content,
                finish=finish if isinstance(finish, str) else "",
                usage=usage if is_object(usage) else None,
                names=self._names,
            )
        self.last = self._round.last
        return bool(self._round.content)

    def _begin(self) -> None:
        self._said += self._round.shown
        self._round = MessagesRound(names=self._names)

    def _shown(self, how: RoundEnding) -> bytes:
        """Return the reply in the body of its last round."""
        said = [*self._round.shown, *([{"type": "text", "text": how.text}] if how.text else [])]
        self.last = reply_of(said)
        usage = self._spent
        shown = self._data | {"content": [*self._said, *said], "stop_reason": how.finish}
        return write(shown | ({"usage": usage} if usage is not None else {}))
