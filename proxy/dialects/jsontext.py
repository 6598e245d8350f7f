"""Untrusted JSON: parsed leniently, written whatever it holds, changed without parsing.

The fast parser is stricter than clients are, so `read` and `write` fall back to slower ways. `RawFields` and
`with_field` work on the text of an object, so that whatever is not changed keeps its bytes. `excess_of` counts the
values in the bytes of a text before they become objects, because objects take up to a hundred times as much memory
as the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, Literal, TypeAlias, TypeGuard

import msgspec
import orjson

FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])  # splits an object into the JSON texts of its fields
ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])  # splits an array into the JSON texts of its items

_SAFE_DIGITS: Final = 19  # whole numbers with fewer characters fit into 64 bits
_LARGEST_PLAIN: Final = 10**300  # Python refuses to print integers above some thousand digits with `str`
_KEY: Final = re.compile(rb'[\s,]*"(?:[^"\\]|\\.)*"\s*:\s*')  # the text in an object between two values
_MOST_LEVELS: Final = 1024  # nesting that `read` accepts, the same as orjson
_LEVELS: Final = 200  # nesting that `sound` keeps; orjson reads 1,024 levels and writes 254


def is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    """Tell whether a parsed JSON value is an object."""
    return isinstance(value, dict)


def is_array(value: Any) -> TypeGuard[list[Any]]:
    """Tell whether a parsed JSON value is an array."""
    return isinstance(value, list)


def as_object(value: Any) -> dict[str, Any]:
    """Return a parsed JSON value if it is an object, else an empty object."""
    return value if is_object(value) else {}


def as_array(value: Any) -> list[Any]:
    """Return a parsed JSON value if it is an array, else an empty array."""
    return value if is_array(value) else []


def as_text(value: Any) -> str:
    """Return a parsed JSON value if it is a string, else an empty string."""
    return value if isinstance(value, str) else ""


def read(text: bytes) -> Any:
    """Return the value of a JSON text, read as leniently as possible. Raises ValueError if it is not JSON.

    Bytes that are not UTF-8 become U+FFFD, as in clients: some servers cut a character across two events.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    try:
        try:
            value = json.loads(text)
        except UnicodeDecodeError:
            value = json.loads(text.decode(errors="replace"))
    except RecursionError as why:
        raise ValueError("nested too deeply") from why
    if text.count(b"[") + text.count(b"{") > _MOST_LEVELS and _is_deep(value):
        raise ValueError("nested too deeply")
    return value


def _is_deep(value: Any) -> bool:
    """Tell whether a value is nested too deeply. Python's parser accepts 1,000 or 10,000 levels, by its version."""
    level = [value]
    for _ in range(_MOST_LEVELS):
        level = [held for each in level if is_array(each) for held in each] + [
            held for each in level if is_object(each) for held in each.values()
        ]
        if not level:
            return False
    return True


def parsed(text: bytes | None) -> Any:
    """Return the value of a JSON text, read like `read`; None if there is no text or it is not JSON."""
    try:
        return None if text is None else read(text)
    except ValueError:
        return None


def is_object_text(text: Any) -> bool:
    """Tell whether a value is the text of a JSON object, as the arguments of a call must be."""
    try:
        return is_object(orjson.loads(text))
    except orjson.JSONDecodeError:  # also raised for a value that is not a text
        return False


def mended(value: Any) -> Any:
    """Return the value in a form that every JSON parser accepts.

    Two adjacent halves of a surrogate pair become one character, a lone half becomes U+FFFD. A number that JSON does
    not have (NaN) becomes null, and an integer beyond 64 bits a float.
    """
    text = json.dumps(value, ensure_ascii=False)
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return json.loads(
        whole,
        parse_constant=lambda _: None,
        parse_int=lambda digits: int(digits) if len(digits) < _SAFE_DIGITS else float(digits),
    )


def sound(value: Any) -> Any:
    """Return the value itself if every parser accepts it, else its `mended` form, with null below `_LEVELS` levels."""
    try:
        orjson.dumps(value)
    except TypeError:  # orjson raises this for every value that it refuses
        return mended(_shallow(value, _LEVELS))
    return value


def _shallow(value: Any, levels: int) -> Any:
    if is_object(value):
        return {name: _shallow(each, levels - 1) for name, each in value.items()} if levels else None
    if is_array(value):
        return [_shallow(each, levels - 1) for each in value] if levels else None
    return value


def added(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the sum of two usages: numbers are added, objects merged, of other values the last one counts.

    Neither argument is modified. None stands for a usage that was not reported.
    """
    if one is None or other is None:
        known = other if one is None else one
        return None if known is None else dict(known)
    total = dict(one)
    for name, value in other.items():
        known = total.get(name)
        if is_object(known) and is_object(value):
            total[name] = added(known, value)
        elif type(known) in {int, float} and type(value) in {int, float}:
            total[name] = known + value
        elif value is not None or known is None:
            total[name] = value
    return total


class _Token(str):
    """A piece of finished JSON text in the stack of values to write."""

    __slots__ = ()


def write(value: Any, *, sort_keys: bool = False) -> bytes:
    """Return compact JSON text (UTF-8) of parsed JSON.

    Equal values give equal texts, and different values different texts. With `sort_keys` the order of keys does not
    matter. Lone surrogates, which UTF-8 cannot hold, are written as escapes, and NaN as null or NaN.
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort_keys else 0)
    except TypeError:  # orjson raises this for every value that it refuses
        return _write_anything(value, sort_keys=sort_keys)


def _write_anything(value: Any, *, sort_keys: bool) -> bytes:
    """Do the same without recursion and without limits, but much slower."""
    written: list[str] = []
    waiting: list[Any] = [value]  # a stack: the next value is the last one
    while waiting:
        item = waiting.pop()
        if isinstance(item, _Token):
            written.append(item)
        elif is_object(item):
            written.append("{")
            waiting.append(_Token("}"))
            names = sorted(item) if sort_keys else list(item)
            for position in range(len(names) - 1, -1, -1):
                name = names[position]
                waiting += (item[name], _Token(f"{',' if position else ''}{json.dumps(name)}:"))
        elif is_array(item):
            written.append("[")
            waiting.append(_Token("]"))
            for position in range(len(item) - 1, -1, -1):
                waiting += (item[position], _Token("," if position else ""))
        elif isinstance(item, int) and abs(item) > _LARGEST_PLAIN:
            written.append(str(Decimal(item)))
        else:
            written.append(json.dumps(item))
    return "".join(written).encode()


class RawFields(Mapping[str, bytes]):
    """The fields of an object in order, each as its JSON text. A view of the body; access to a field copies it."""

    __slots__ = ("_spans",)

    def __init__(self, text: bytes | dict[str, msgspec.Raw]) -> None:
        """Parse an object, or take its fields if they are already split.

        Raises msgspec.DecodeError if it is not an object, and RecursionError at many hundred levels.
        """
        self._spans = FIELDS.decode(text) if isinstance(text, bytes) else text

    def __getitem__(self, name: str) -> bytes:
        return bytes(self._spans[name])

    def without(self, name: str) -> dict[str, bytes]:
        """Return the texts of all fields but one."""
        return {each: bytes(text) for each, text in self._spans.items() if each != name}

    def span(self, name: str) -> memoryview | None:
        """Return the text of a field without copying it; None if there is no such field."""
        found = self._spans.get(name)
        return None if found is None else memoryview(found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)


def without_fields(text: bytes, names: Collection[str]) -> bytes:
    """Return an object without these fields; the very same text if it has none of them."""
    fields = FIELDS.decode(text)
    if fields.keys().isdisjoint(names):
        return text
    return msgspec.json.encode({name: raw for name, raw in fields.items() if name not in names})


def with_value(text: bytes, name: str, value: Any) -> bytes:
    """Return an object with one field set to a value. Other fields keep their bytes."""
    return msgspec.json.encode(FIELDS.decode(text) | {name: msgspec.Raw(write(value))})


def members_of(text: bytes | None) -> dict[str, msgspec.Raw]:
    """Return the members of an object; an empty dict for anything else."""
    return FIELDS.decode(text) if text is not None and text.startswith(b"{") else {}


def without_member(text: bytes, path: Sequence[str]) -> bytes | None:
    """Return an object without the member at `path`; None if nothing is left of it."""
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
    """Return an object with one field set, and no other byte changed.

    `fields` are the fields of `text`, at least one. `value` is JSON text. A new field is appended.
    """
    if name not in fields:
        end = text.rindex(b"}")
        return b"%b,%b:%b%b" % (text[:end], orjson.dumps(name), value, text[end:])
    wanted = {known: value if known == name else old for known, old in fields.items()}
    at = text.index(b"{") + 1
    for known, old in fields.items():
        key = _KEY.match(text, at)
        if key is None:
            break
        at = key.end() + len(old)
        if known == name:
            changed = text[: key.end()] + value + text[at:]
            try:
                if RawFields(changed) == wanted:
                    return changed
            except msgspec.DecodeError:
                pass
    # A name occurs twice in the text, so the lengths of the values do not tell where the others are.
    return emitted(wanted)


def with_break(content: bytes, at: int, name: str, mark: bytes) -> bytes | None:
    """Return a content with a cache mark after `at` characters of its text; None if no mark can stand there.

    The text part is split at that place, and its own mark stays with the first half. Both halves together say the same.
    """
    is_list = content.lstrip().startswith(b"[")
    raws = list(map(bytes, ITEMS.decode(content))) if is_list else [b'{"type":"text","text":%b}' % content]
    made: list[bytes] = []
    for place, raw in enumerate(raws):
        part = read(raw)
        text = part.get("text") if is_object(part) else None
        if not isinstance(text, str) or at > len(text):
            at -= len(text) if isinstance(text, str) else 0
            made.append(raw)
            continue
        fields = RawFields(raw)
        if not text[:at].strip() or (text[at:] and not text[at:].strip()):
            return None
        head = with_field(raw, fields, "text", write(text[:at]))
        made.append(with_field(head, RawFields(head), name, mark))
        if text[at:]:
            rest = with_field(raw, fields, "text", write(text[at:]))
            made.append(without_fields(rest, (name,)))
        return b"[%b]" % b",".join([*made, *raws[place + 1 :]])
    return None


def emitted(fields: Mapping[str, bytes | None]) -> bytes:
    """Return an object of these fields in order, each given as its JSON text. None omits the field."""
    return msgspec.json.encode({name: msgspec.Raw(text) for name, text in fields.items() if text is not None})


# ---------------------------------------------------------------------------------------------- how much a text holds

Excess: TypeAlias = Literal["values", "items"]

_WINDOW: Final = 262_144  # bytes that are scanned in one step
_NOT_BACKSLASH: Final = re.compile(rb"[^\\]")
_BACKSLASH: Final = 0x5C
_COMMA: Final = 0x2C
_STRUCTURE: Final = b'",[]{}'
_OTHER: Final = bytes(set(range(256)) - set(_STRUCTURE))
_FIELD_DEPTH: Final = 2  # depth of the items of a field of the body, such as its messages


def count_of(text: bytes, sign: bytes) -> int:
    """Count a byte in a text. Scanned in windows, so that other threads get their turn."""
    return sum([text.count(sign, start, start + _WINDOW) for start in range(0, len(text), _WINDOW)])


def excess_of(text: bytes, max_values: int, max_items: int) -> Excess | None:
    """Return what a JSON text has too many of: values in total, or items in one field. None if it has neither.

    Stops at the first excess. An empty array or object counts as two values. For a text that is not JSON the result
    means nothing.
    """
    commas = count_of(text, b",")
    few = len(text) <= max_values  # each value takes at least one byte
    if commas < max_items and (few or 1 + commas + count_of(text, b"[") + count_of(text, b"{") <= max_values):
        return None  # an upper bound, because strings hold some of these characters too
    values, depth, items = 1, 0, 0
    inside = 0  # 1 if the next byte is inside a string
    start = 0
    while start < len(text):
        end = min(start + _WINDOW, len(text))
        if text[end - 1] == _BACKSLASH and (escaped := _NOT_BACKSLASH.search(text, end)) is not None:
            end = escaped.end()  # so that no escape is cut in two
        window = text[start:end].replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHER)
        pieces = window.split(b'"')
        structure = b"".join(pieces[inside::2])
        inside ^= (len(pieces) - 1) & 1
        start = end
        values += structure.count(b",") + structure.count(b"[") + structure.count(b"{")
        if values > max_values:
            return "values"
        if commas >= max_items:
            for sign in structure:
                if sign == _COMMA:
                    items += depth == _FIELD_DEPTH
                elif sign in b"[{":
                    depth += 1
                    items = 1 if depth == _FIELD_DEPTH else items
                else:
                    depth -= 1
                if items > max_items:
                    return "items"
    return None
