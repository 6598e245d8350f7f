"""JSON that a stranger wrote: parsed leniently, written whatever it holds, changed without parsing.

The fast parser is stricter than clients are, and the fast serialiser refuses what it cannot be handed safely.
`read` and `write` fall back to slower ways. `RawFields` and `with_field` work on the text of an object, so
that whatever is not touched keeps its bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, TypeGuard

import msgspec
import orjson


def is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    """Tell whether a parsed JSON value is an object."""
    return isinstance(value, dict)


def is_array(value: Any) -> TypeGuard[list[Any]]:
    """Tell whether a parsed JSON value is an array."""
    return isinstance(value, list)


_SAFE_DIGITS: Final = 19
"""Whole numbers of fewer characters fit into 64 bits."""


def read(text: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is none, by the widest reading there is.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(text)
    except RecursionError as why:
        raise ValueError("nested too deeply") from why


def mended(value: Any) -> Any:
    """Return the value as every JSON parser takes it.

    Halves of a surrogate pair that met are one character, one without its other half is U+FFFD,
    a number that JSON does not have is null, and a whole one beyond 64 bits is a float.
    """
    text = json.dumps(value, ensure_ascii=False)
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return json.loads(whole, parse_constant=lambda _: None, parse_int=_number)


def sound(value: Any) -> Any:
    """Return the value itself if every parser takes it, else as `mended` makes it."""
    try:
        orjson.dumps(value)
    except TypeError:  # as every refusal of orjson's
        return mended(value)
    return value


def _number(digits: str) -> int | float:
    """Return a whole number; as a float where it is beyond 64 bits."""
    return int(digits) if len(digits) < _SAFE_DIGITS else float(digits)


_LARGEST_PLAIN: Final = 10**300
"""Above some thousand digits Python refuses to write an integer in the plain way."""


class _Token(str):
    """A piece of JSON text that waits among values."""

    __slots__ = ()


def write(value: Any, *, sort_keys: bool = False) -> bytes:
    """Return compact JSON text (UTF-8) of `value`: dict, list, str, int, float, bool, None.

    Equal values have equal texts, and with `sort_keys` the order of keys does not count; different
    values have different texts (a NaN is no JSON value, and is written as null or NaN).
    Lone surrogates, which UTF-8 cannot hold, are written as escapes.
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort_keys else 0)
    except TypeError:  # as every refusal of orjson's
        return _write_anything(value, sort_keys=sort_keys)


def _write_anything(value: Any, *, sort_keys: bool) -> bytes:
    """Do the same without recursion and without limits, a good deal slower."""
    written: list[str] = []
    waiting: list[Any] = [value]  # the next one is the last
    while waiting:
        item = waiting.pop()
        if isinstance(item, _Token):
            written.append(item)
        elif is_object(item):
            waiting.append(_Token("}"))
            members = sorted(item.items(), key=_member_name) if sort_keys else list(item.items())
            for position in range(len(members) - 1, -1, -1):
                name, member = members[position]
                waiting.append(member)
                waiting.append(_Token(f"{',' if position else ''}{json.dumps(name)}:"))
            written.append("{")
        elif is_array(item):
            waiting.append(_Token("]"))
            for position in range(len(item) - 1, -1, -1):
                waiting.append(item[position])
                if position:
                    waiting.append(_Token(","))
            written.append("[")
        elif isinstance(item, int) and abs(item) > _LARGEST_PLAIN:
            written.append(str(Decimal(item)))
        else:
            written.append(json.dumps(item))
    return "".join(written).encode()


def _member_name(member: tuple[str, Any]) -> str:
    return member[0]


_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_KEY: Final = re.compile(rb'[\s,]*"(?:[^"\\]|\\.)*"\s*:\s*')
"""What stands in an object between two values."""
_COMMA: Final = re.compile(rb"\s*,")


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


def without_field(text: bytes, name: str) -> bytes:
    """Return an object without one of its fields and no other byte changed."""
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


def emitted(fields: Mapping[str, bytes | None]) -> bytes:
    """Return an object of these fields in order, each with its JSON text; None: without the field."""
    members = [b"%b:%b" % (orjson.dumps(name), text) for name, text in fields.items() if text is not None]
    return b"{%b}" % b",".join(members)


def _says(body: bytes, fields: Mapping[str, bytes]) -> bool:
    try:
        return RawFields(body) == fields
    except msgspec.DecodeError:
        return False
