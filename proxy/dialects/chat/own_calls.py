"""Calls of the proxy's own tools in a reply: told from the client's, and taken out of what it is shown."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final

import msgspec
import orjson
from msgspec import Struct, structs

from proxy.dialects import Call, JsonObject
from proxy.dialects.chat.message import ChatMessage, without_unfinished_calls
from proxy.dialects.jsontext import RawFields, emitted, is_array, is_object, read, with_field, without_field, write

CUT_OFF: Final = frozenset({"length", "content_filter"})
"""Values of `finish_reason` that may have cut a call in two."""
STOPPED: Final = (
    "(No answer was written: this reply took as many steps as it may. "
    "Please ask again, perhaps for one thing at a time.)"
)
"""What a reply says that would end with calls of the proxy's tools, when upstream may not be asked again."""
BROKE_OFF: Final = "(No answer was written: the reply was cut off before it came to that. Please ask again.)"
"""What a reply says that was cut off in a call of the proxy's tools, and says nothing beside it."""
SAID_NOTHING: Final = "(No answer was written: the model ended its reply without one. Please ask again.)"
"""What a reply says whose calls were answered, and of which nothing came then."""


class Parted(Struct, frozen=True, kw_only=True):
    """The calls of one reply, told apart; places are those in `tool_calls`."""

    own: tuple[int, ...]
    """Calls that the proxy answers."""
    broken: tuple[int, ...]
    """Calls of the proxy's tools that broke off: they cannot be answered."""
    others: bool
    """Whether the reply calls anything that the client answers, in whichever form."""


def parted(message: JsonObject, names: Collection[str], finish_reason: str | None) -> Parted:
    """Tell the calls of a reply apart by the names of the proxy's tools.

    Arguments that are not JSON are an answer's affair, unless the reply was cut off.
    """
    items = _items(message)
    own: list[int] = []
    broken: list[int] = []
    for place, call in enumerate(_calls(items)):
        if call.name in names:
            cut = finish_reason in CUT_OFF and not without_unfinished_calls({"tool_calls": [items[place]]})
            (broken if cut else own).append(place)
    others = len(own) + len(broken) < len(items) or bool(message.get("function_call"))
    return Parted(own=tuple(own), broken=tuple(broken), others=others)


def without_own(message: JsonObject, names: Collection[str]) -> JsonObject:
    """Return a reply without its calls of the proxy's tools; the same object where it has none."""
    items = _items(message)
    kept = [item for item, call in zip(items, _calls(items), strict=True) if call.name not in names]
    if len(kept) == len(items):
        return message
    changed = {**message, "tool_calls": kept}
    if not kept:
        del changed["tool_calls"]
    return changed


class Ending(Struct, frozen=True, kw_only=True):
    """How one round of a reply ends for the client."""

    again: bool
    """Not at all: another round follows, and the client is not told of this end."""
    text: str
    """What is said at its end that the model did not say; empty as a rule."""
    finish: str
    """Its `finish_reason`."""


def ending(
    message: JsonObject, names: Collection[str], finish: str, *, later: bool, said: bool, may_ask: bool
) -> Ending:
    """Decide how a round ends.

    Args:
        message: all that the round says.
        names: the proxy's tools.
        finish: its `finish_reason`, as upstream gives it.
        later: whether rounds came before it.
        said: whether the client has any text from those.
        may_ask: whether upstream may be asked once more.
    """
    calls = parted(message, names, finish)
    if calls.others:
        return Ending(again=False, text="", finish=finish)
    if not calls.own and not calls.broken:
        empty = later and not said and not says_something(message) and finish not in CUT_OFF
        return Ending(again=False, text=SAID_NOTHING if empty else "", finish=finish)
    if may_ask and not calls.broken:
        return Ending(again=True, text="", finish="")
    text = BROKE_OFF if calls.broken else STOPPED
    if says_something(message):
        text = ""
    return Ending(again=False, text=text, finish=finish if finish in CUT_OFF else "stop")


def says_something(message: JsonObject) -> bool:
    """Tell whether a reply has anything to read or to hear."""
    content = message.get("content")
    if isinstance(content, str):
        content = content.strip()
    return bool(content or message.get("refusal") or message.get("audio"))


def answerable(message: JsonObject, calls: Parted) -> tuple[JsonObject, tuple[Call, ...]]:
    """Return a reply as it can be sent back, and those of its calls that the proxy answers, in order.

    Those that broke off are left out. Of the proxy's own calls each gets what a request needs: an id that no
    other call of the block has, a type, and arguments that are a JSON object (`{}` for what is none: some
    providers refuse it). The calls that are returned have the arguments as they came.
    """
    items = _items(message)
    names = [call.id for call in _calls(items)]
    kept: list[Any] = []
    answered: list[Call] = []
    for place, (item, call) in enumerate(zip(items, _calls(items), strict=True)):
        if place in calls.broken:
            continue
        if place in calls.own:
            if not call.id or names.count(call.id) > 1:
                names[place] = _unused(place, names)
            named = structs.replace(call, id=names[place])
            answered.append(named)
            item = _complete(item, named)  # noqa: PLW2901 - what is kept of it
        kept.append(item)
    return {**message, "tool_calls": kept}, tuple(answered)


def _items(message: JsonObject) -> list[Any]:
    items = message.get("tool_calls")
    return items if is_array(items) else []


def _calls(items: list[Any]) -> tuple[Call, ...]:
    return ChatMessage(b"", {"role": "assistant", "tool_calls": items}).calls


def _unused(place: int, names: Collection[str]) -> str:
    """Return an id that no call of the block has."""
    name = f"call_{place}"
    while name in names:
        name += "_"
    return name


def _complete(item: JsonObject, call: Call) -> JsonObject:
    """Return a call with everything that a request's call has; its `index` is a stream's."""
    rest = {name: value for name, value in item.items() if name != "index"}
    if item.get("type") == "custom":
        return {**rest, "id": call.id}
    arguments = call.arguments if _is_json_object(call.arguments) else "{}"
    return {**rest, "id": call.id, "type": "function", "function": {**item["function"], "arguments": arguments}}


def _is_json_object(text: str) -> bool:
    try:
        return is_object(orjson.loads(text))
    except orjson.JSONDecodeError:
        return False


BLANK_LINE: Final = "\n\n"


def gap(before: Any, after: Any) -> str:
    """Return what keeps the text `after` apart from the content `before`: a blank line, or nothing.

    Nothing where either has white space there, has no text there, or `after` comes in parts, which stand
    apart by themselves.
    """
    end = _end(before)
    if not end or not isinstance(after, str) or not after:
        return ""
    return "" if end[-1].isspace() or after[0].isspace() else BLANK_LINE


def _end(content: Any) -> str:
    """Return the text that a content ends in; empty where it ends in something else."""
    if is_array(content) and content:
        content = content[-1]
        content = content.get("text") if is_object(content) else None
    return content if isinstance(content, str) else ""


def added(one: JsonObject | None, other: JsonObject | None) -> JsonObject | None:
    """Return both together: numbers added, objects member by member, of all else the last word.

    Neither is written to. None stands for a usage that was not reported.
    """
    if one is None or other is None:
        return other if one is None else one
    total = dict(one)
    for name, value in other.items():
        known = total.get(name)
        if is_object(known) and is_object(value):
            total[name] = added(known, value)
        elif _is_number(known) and _is_number(value):
            total[name] = known + value
        elif value is not None or known is None:
            total[name] = value
    return total


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])

Edit = Callable[[bytes], bytes]


class Correction(Struct, frozen=True, kw_only=True):
    """What is to be changed; what is None stays as it is."""

    content: Any = None
    """The content of the reply."""
    calls: Collection[int] | None = None
    """Places of the tool calls that stay; with none left the field goes."""
    finish_reason: str | None = None
    usage: JsonObject | None = None


def corrected(body: bytes, change: Correction) -> bytes:
    """Return a completion's body with its only reply changed.

    Args:
        body: JSON text of a completion with one choice, which holds a message.
        change: what is changed.
    """
    try:
        return _on_text(body, change)
    except (msgspec.DecodeError, RecursionError):
        return _anew(body, change)


def _on_text(body: bytes, change: Correction) -> bytes:
    def message(text: bytes) -> bytes:
        if change.content is not None:
            text = _set(text, "content", write(change.content))
        if change.calls is None or "tool_calls" not in (fields := RawFields(text)):
            return text
        kept = [raw for place, raw in enumerate(_ITEMS.decode(fields["tool_calls"])) if place in change.calls]
        return _set(text, "tool_calls", msgspec.json.encode(kept)) if kept else without_field(text, "tool_calls")

    def choice(text: bytes) -> bytes:
        text = _set(text, "message", message(RawFields(text)["message"]))
        return text if change.finish_reason is None else _set(text, "finish_reason", write(change.finish_reason))

    choices = RawFields(body)["choices"]
    body = _set(body, "choices", _only_item(choices, choice))
    return body if change.usage is None else _set(body, "usage", write(change.usage))


def _set(text: bytes, name: str, value: bytes) -> bytes:
    fields = RawFields(text)
    return with_field(text, fields, name, value) if fields else emitted({name: value})


def _only_item(text: bytes, edit: Edit) -> bytes:
    """Return an array of one item with that changed."""
    item = bytes(_ITEMS.decode(text)[0])
    start = text.index(item)
    return text[:start] + edit(item) + text[start + len(item) :]


def _anew(body: bytes, change: Correction) -> bytes:
    data = read(body)
    choice = data["choices"][0]
    message = choice["message"]
    if change.content is not None:
        message["content"] = change.content
    calls = message.get("tool_calls")
    if change.calls is not None and is_array(calls):
        message["tool_calls"] = [call for place, call in enumerate(calls) if place in change.calls]
        if not message["tool_calls"]:
            del message["tool_calls"]
    if change.finish_reason is not None:
        choice["finish_reason"] = change.finish_reason
    if change.usage is not None:
        data["usage"] = change.usage
    return write(data)
