"""The proxy's own tools: offered beside the client's, and their calls taken out of what the client is shown.

Their definitions are constant bytes after the client's own tools, in one order, and whether they are offered
follows from the request alone: the beginning of every request stays what it was. Nothing is required. Among
strict functions the schemas are as strict mode wants them: every property required, none beside them, no
unions of types; an empty string then stands for what is not given.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, Final

import orjson
from msgspec import Struct, structs

from proxy.dialects import Call, JsonObject, OwnCalls, Request, ToolDefinition, ToolOffer
from proxy.dialects.chat.completion import read_completion
from proxy.dialects.chat.message import ChatMessage, without_unfinished_calls
from proxy.dialects.jsontext import is_array, is_object, is_object_text, read, sound, write
from proxy.dialects.own_tools import BodyFilter, RoundEnding, offer, schema_of, unused_id

# ------------------------------------------------------------------------------------- the offer

_LEAVES_ROOM: Final[dict[str, tuple[Any, ...]]] = {
    "tool_choice": (None, "auto", "required"),
    "n": (None, 1),
    "functions": (None, []),
    "function_call": (None,),
}
"""Fields of a request, and what they say where the model may call any tool, and is asked for one reply."""


def leaves_room(request: Request) -> bool:
    """Tell whether a request may get tools.

    Not one that chooses a tool itself or none, wants several choices, or speaks of `functions`.
    """
    asked = {name: request.fields.get(name) for name in _LEAVES_ROOM}
    return all((None if text is None else orjson.loads(text)) in _LEAVES_ROOM[name] for name, text in asked.items())


def add_tools(tools: bytes | None, own: Sequence[ToolDefinition]) -> ToolOffer:
    """Return the client's tools with these behind them; strict ones beside strict functions alone."""
    return offer(tools, own, _definition, name_of=tool_name, function_of=lambda tool: tool.get("function"))


@lru_cache
def _definition(tool: ToolDefinition, strict: bool) -> bytes:
    """Return the JSON text of a tool."""
    function: JsonObject = {"name": tool.name, "description": tool.description}
    function["parameters"] = schema_of(tool, strict=strict)
    if strict:
        function["strict"] = True
    return orjson.dumps({"type": "function", "function": function})


def tool_name(tool: JsonObject) -> Any:
    """Return the name of a tool of the client's, whatever kind it is; None where it has none."""
    inner = next((tool[kind] for kind in ("function", "custom") if is_object(tool.get(kind))), tool)
    return inner.get("name")


# ------------------------------------------------------------------------------------- the calls

CUT_OFF: Final = ("length", "content_filter")  # values of `finish_reason` that may have cut a call in two
BLANK_LINE: Final = "\n\n"


def without_own(message: JsonObject, names: Collection[str]) -> JsonObject:
    """Return a reply without its calls of the proxy's tools; the same object where it has none."""
    items, calls = _calls(message)
    kept = [item for item, call in zip(items, calls, strict=True) if call.name not in names]
    if len(kept) == len(items):
        return message
    changed = {**message, "tool_calls": kept}
    if not kept:
        del changed["tool_calls"]
    return changed


def says_something(message: JsonObject) -> bool:
    """Tell whether a reply has anything to read or to hear."""
    content = message.get("content")
    if isinstance(content, str):
        content = content.strip()
    return bool(content or message.get("refusal") or message.get("audio"))


class CalledRound(Struct, frozen=True, kw_only=True):
    """One answer of the upstream's, with the calls of the proxy's tools told apart."""

    names: Collection[str]  # the proxy's tools
    message: JsonObject = {}  # all that it says, whoever is meant; empty where it says nothing
    finish: str = ""  # why it ended
    usage: JsonObject | None = None

    @property
    def calls(self) -> OwnCalls:
        """Its calls, and the round as it can be sent back.

        Of the proxy's own calls each gets what a request needs: an id that no other call of the block has, a type, and
        arguments that are a JSON object (`{}` for what is none: some providers refuse it). `OwnCalls.own` has the
        arguments as they came. Those that are not JSON count as broken only where the reply was cut off.
        """
        items, found = _calls(self.message)
        ids = [call.id for call in found]
        kept: list[Any] = []
        own: list[Call] = []
        broken, others = False, bool(self.message.get("function_call"))
        for place, (item, call) in enumerate(zip(items, found, strict=True)):
            if call.name not in self.names:
                others = True
                kept.append(item)
            elif self.cut and not without_unfinished_calls({"tool_calls": [item]}):
                broken = True
            else:
                if not call.id or ids.count(call.id) > 1:
                    ids[place] = unused_id(place, ids)
                own.append(structs.replace(call, id=ids[place]))
                kept.append(_complete(item, own[-1]))
        sent = reply_of({**self.message, "tool_calls": kept})
        return OwnCalls(message=sent, own=tuple(own), broken=broken, others=others)

    @property
    def says(self) -> bool:
        """Whether it has anything to read or to hear."""
        return says_something(self.message)

    @property
    def cut(self) -> bool:
        """Whether it may have been cut off."""
        return self.finish in CUT_OFF


def reply_of(message: JsonObject) -> ChatMessage:
    """Return a reply as it is stored."""
    return ChatMessage.as_stored({**message, "role": "assistant"})


def _calls(message: JsonObject) -> tuple[list[Any], tuple[Call, ...]]:
    """Return the `tool_calls` of a reply as they stand there, and each as a call."""
    items = message.get("tool_calls")
    if not is_array(items):
        return [], ()
    return items, ChatMessage(b"", {"role": "assistant", "tool_calls": items}).calls


def _complete(item: JsonObject, call: Call) -> JsonObject:
    """Return a call with everything that a request's call has; its `index` is a stream's."""
    rest = {name: value for name, value in item.items() if name != "index"}
    if call.custom:
        return {**rest, "id": call.id}
    arguments = call.arguments if is_object_text(call.arguments) else "{}"
    return {**rest, "id": call.id, "type": "function", "function": {**item["function"], "arguments": arguments}}


def gap(before: Any, after: Any) -> str:
    """Return what keeps the text `after` apart from the content `before`: a blank line, or nothing.

    Nothing where either has white space there, has no text there, or `after` comes in parts, which stand
    apart by themselves.
    """
    if is_array(before) and before:
        before = before[-1].get("text") if is_object(before[-1]) else None
    if not before or not isinstance(before, str) or not after or not isinstance(after, str):
        return ""
    return "" if before[-1].isspace() or after[0].isspace() else BLANK_LINE


# -------------------------------------------------------------------------------- bodies on their way


class ToolBodyFilter(BodyFilter[CalledRound]):
    """One reply on its way to the client, made of bodies that each hold one round of it."""

    _whole = "stop"

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._said: list[Any] = []  # the contents of the rounds that the client is not shown
        self._body = b""
        self._finish = ""  # why the last body's reply ended
        self._round = CalledRound(names=names)
        self.last = reply_of({})

    @property
    def _has_said(self) -> bool:
        return any(says_something({"content": content}) for content in self._said)

    def _read(self, body: bytes) -> bool:
        self._body, self._finish, self.last = body, "", reply_of({})
        self._round = CalledRound(names=self._names)
        try:
            data = read(body)
        except ValueError:
            return False
        found = read_completion(data)
        choices = data.get("choices") if is_object(data) else None
        message: JsonObject = {}
        if is_array(choices) and len(choices) == 1 and found.choices:
            message, self._finish = found.choices[0].message, found.choices[0].finish_reason or ""
        self._round = CalledRound(names=self._names, message=message, finish=self._finish, usage=found.usage)
        self.last = reply_of(message)
        return bool(message)

    def _begin(self) -> None:
        self._said.append(self._round.message.get("content"))
        self._round = CalledRound(names=self._names)

    def _shown(self, how: RoundEnding) -> bytes:
        """Return the reply in the body of its last round."""
        last = without_own(self._round.message, self._names)
        if how.text:
            last = {**last, "content": _joined([last.get("content"), how.text])}
        self.last = reply_of(last)
        data = read(self._body)
        choice = data["choices"][0]
        message = choice["message"] = without_own(choice["message"], self._names)
        content = _joined([*self._said, last.get("content")])
        if content != message.get("content"):
            message["content"] = content
        if how.finish != self._finish:
            choice["finish_reason"] = how.finish
        if self.rounds and self.usage is not None:
            data["usage"] = self.usage
        return write(sound(data))


def _joined(contents: Sequence[Any]) -> Any:
    """Return several contents as one: text, or parts where one has parts; the last where all are empty.

    Texts that would run into each other are kept apart.
    """
    said: list[Any] = []
    for content in contents:
        if content:
            between = gap(said[-1], content) if said else ""
            said.append(between + content if between else content)
    if all(isinstance(content, str) for content in said):
        return "".join(said) if said else contents[-1]
    parts: list[Any] = []
    for content in said:
        parts += content if is_array(content) else [{"type": "text", "text": content}]
    return parts
