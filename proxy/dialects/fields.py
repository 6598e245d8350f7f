"""The fields of a JSON object as text: taken out, replaced and put together without parsing them.

What is not touched keeps its bytes. It does not know what any field means.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec
import orjson

_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_KEY: Final = re.compile(rb'[\s,]*"(?:[^"\\]|\\.)*"\s*:\s*')
"""What stands in an object between two values."""


class RawFields(Mapping[str, bytes]):
    """The fields of an object in order, each as its JSON text; a view of the body that copies when asked."""

    __slots__ = ("_spans",)

    def __init__(self, text: bytes) -> None:
        """Read the JSON text of an object.

        Raises:
            msgspec.DecodeError: it is none.
            RecursionError: it has many hundred levels.
        """
        self._spans = _MEMBERS.decode(text)

    def __getitem__(self, name: str) -> bytes:
        return bytes(self._spans[name])

    def without(self, name: str) -> dict[str, bytes]:
        """Return the texts of all fields but one."""
        return {each: bytes(text) for each, text in self._spans.items() if each != name}

    def span(self, name: str) -> memoryview | None:
        """Return the text of a field without copying it; None where there is none."""
        found = self._spans.get(name)
        return None if found is None else memoryview(found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)


def members_of(text: bytes | None) -> dict[str, msgspec.Raw]:
    """Return the members of an object; of everything else, none."""
    return _MEMBERS.decode(text) if text is not None and text.startswith(b"{") else {}


def without_member(text: bytes, path: Sequence[str]) -> bytes | None:
    """Return an object without the member at `path`; None where nothing is left of it."""
    if not path:
        return None
    members = members_of(text)
    if path[0] not in members:
        return text
    inner = bytes(members[path[0]])
    left = without_member(inner, path[1:])
    if left == inner:
        return text
    if left is None:
        del members[path[0]]
    else:
        members[path[0]] = msgspec.Raw(left)
    return msgspec.json.encode(members) if members else None


def with_field(text: bytes, fields: Mapping[str, bytes], name: str, value: bytes) -> bytes:
    """Return an object with one field set and no other byte changed; a new field comes last.

    Args:
        text: an object with at least one field.
        fields: its fields, in order.
        name: the field to set.
        value: JSON text.
    """
    if name not in fields:
        end = text.rindex(b"}")
        return b"%b,%b:%b%b" % (text[:end], orjson.dumps(name), value, text[end:])
    at = text.index(b"{") + 1
    for known, old in fields.items():
        key = _KEY.match(text, at)
        if key is None:
            break
        at = key.end()
        if known == name:
            changed = text[:at] + value + text[at + len(old) :]
            if _says(changed, {**fields, name: value}):
                return changed
        at += len(old)
    # A field stands there twice: the places of the others cannot be told from their lengths.
    return emitted({**fields, name: value})


def emitted(fields: Mapping[str, bytes | None]) -> bytes:
    """Return an object of these fields in order, each with its JSON text; None: without the field."""
    members = [b"%b:%b" % (orjson.dumps(name), text) for name, text in fields.items() if text is not None]
    return b"{%b}" % b",".join(members)


def _says(body: bytes, fields: Mapping[str, bytes]) -> bool:
    try:
        return RawFields(body) == fields
    except msgspec.DecodeError:
        return False
