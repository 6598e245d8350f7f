"""Which calls of a reply are of tools that the proxy answers, and the reply as it is sent back with them.

Everybody else's calls are left as they are. What the tools do, and who answers, is not known here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import orjson
from msgspec import Struct, structs

from proxy.dialects import Call, JsonObject
from proxy.dialects.chat.message import ChatMessage, without_unfinished_calls
from proxy.dialects.shapes import is_array, is_object

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
    return {
        **rest,
        "id": call.id,
        "type": "function",
        "function": {**item["function"], "arguments": arguments},
    }


def _is_json_object(text: str) -> bool:
    try:
        return is_object(orjson.loads(text))
    except orjson.JSONDecodeError:
        return False
