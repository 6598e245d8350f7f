"""The body of a completion with a few fields of its one reply changed, and every other byte as it came.

A body that only the widest reading takes for JSON (`wire.reader`) is written anew. It does not know why
anything is changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any, Final

import msgspec
from msgspec import Struct

from proxy.dialects import JsonObject
from proxy.dialects.fields import RawFields, emitted, with_field
from proxy.dialects.reader import read
from proxy.dialects.shapes import is_array
from proxy.dialects.writer import write

_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_KEY: Final = re.compile(rb'[\s,]*"(?:[^"\\]|\\.)*"\s*:\s*')
"""What stands in an object between two values."""
_COMMA: Final = re.compile(rb"\s*,")

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
        return _set(text, "tool_calls", msgspec.json.encode(kept)) if kept else _without(text, "tool_calls")

    def choice(text: bytes) -> bytes:
        text = _set(text, "message", message(RawFields(text)["message"]))
        return (
            text if change.finish_reason is None else _set(text, "finish_reason", write(change.finish_reason))
        )

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


def _without(text: bytes, name: str) -> bytes:
    """Return an object without one of its fields."""
    fields = RawFields(text)
    left = {known: value for known, value in fields.items() if known != name}
    at = text.index(b"{") + 1
    for known, value in fields.items():
        key = _KEY.match(text, at)
        if key is None:
            break
        end = key.end() + len(value)
        if known == name:
            comma = _COMMA.match(text, end)
            if b"," not in key[0].partition(b'"')[0] and comma is not None:
                end = comma.end()
            changed = text[:at] + text[end:]
            if _says(changed, left):
                return changed
        at = end
    # A field stands there twice: the places of the others cannot be told from their lengths.
    return emitted(left)


def _says(text: bytes, fields: dict[str, bytes]) -> bool:
    try:
        return RawFields(text) == fields
    except msgspec.DecodeError:
        return False


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
