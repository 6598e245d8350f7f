"""The canonical form of an entry: the bytes by which a resent entry is recognised. It is never sent.

It leaves out what clients change without changing the meaning:

    everywhere     ids of items, `status`, key order and cache marks. null, "", [], {} and a missing field are the same
    content        a single text part is the same as its text; other fields of a text part are ignored
    role           `developer` is `system`
    turns          how texts are split into parts and messages, white space around them, and the order of texts and
                   calls are ignored. Arguments, and a text that is a JSON object, are compared as JSON. Reasoning (also
                   as `<think>…</think>` before the text), items that the provider ran itself, and references are
                   ignored if text or calls remain

Stored nodes keep the names that they got from an earlier form: `canonical` with `loosely=False`.
"""

from __future__ import annotations

from typing import Any, Final

from proxy.dialects.base import OWN_FIELDS, Call, JsonObject
from proxy.dialects.chat.canonical import CACHE_MARKS, answer_form, arguments_form
from proxy.dialects.jsontext import is_array, is_object, write
from proxy.dialects.responses.items import TURN, Item, kind_of

_DROPPED: Final = frozenset({"id", "status", "phase", "caller", "namespace", "created_by", *OWN_FIELDS, *CACHE_MARKS})
_EMPTY: Final[tuple[Any, ...]] = (None, "", [], {})
_TEXTS: Final = ("input_text", "output_text", "text")


def canonical(entry: Item, *, loosely: bool = True) -> bytes:
    """Return the canonical form: JSON with sorted keys. Equal bytes mean the same entry. Never raises.

    `loosely=False` gives the previous form, which compares a JSON object in a turn as text.
    """
    data = entry.data
    if data.get("type") == TURN:
        return write(_turn(entry, loosely=loosely), sort_keys=True)
    return write(_item(data), sort_keys=True)


def _item(item: JsonObject) -> JsonObject:
    kind = kind_of(item)
    form = {
        name: _content(value) if name in {"content", "output"} else value
        for name, value in item.items()
        if name not in _DROPPED and value not in _EMPTY
    }
    form["type"] = kind
    if kind == "item_reference":
        form["id"] = item.get("id")
    if form.get("role") == "developer":
        form["role"] = "system"
    return {name: value for name, value in form.items() if value not in _EMPTY}


def _content(value: Any) -> Any:
    """Return the form of a content. A single text part becomes its text; several parts stay separate."""
    if not is_array(value):
        return value
    parts = [_part(part) for part in value]
    return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else parts


def _part(part: Any) -> Any:
    if not is_object(part):
        return part
    if part.get("type") in _TEXTS and isinstance(part.get("text"), str):
        return part["text"]
    return {name: value for name, value in part.items() if name not in CACHE_MARKS and value not in _EMPTY}


def _turn(entry: Item, *, loosely: bool) -> JsonObject:
    refusals = [
        part["refusal"]
        for slot in entry.slots
        if is_object(part := slot.value) and isinstance(part.get("refusal"), str)
    ]
    form: JsonObject = {
        "text": answer_form(entry.text, loosely=loosely),
        "refusals": refusals,
        "calls": [_call(call) for call in entry.calls],
    }
    form = {name: value for name, value in form.items() if value not in _EMPTY}
    if not form:
        form["items"] = [_item(item) for item in entry.items]
    return {"type": TURN, **form}


def _call(call: Call) -> list[Any]:
    return [call.id, call.name, call.arguments if call.custom else arguments_form(call.arguments)]
