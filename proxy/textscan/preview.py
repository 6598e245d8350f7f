"""Previews of JSON documents: long lists and long texts are cut, their gist stays.

Flags, counts, totals, ids and cursors stay. Of a long list the first and last items stay, with those in between that
report an error or differ from the others; a mark gives the number of omitted items. The list `k` is renamed
`k_preview`, and its object gets `"compressed": true`. Everything that is kept is verbatim.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Literal

from msgspec import Struct

from proxy.textscan.document import JsonValue, Members, Number, is_items, is_members
from proxy.textscan.plaintext import FULL_OUTPUT, alarming_lines, has_alarm, omission_mark, without_blobs

COMPRESSED: Final = "compressed"
PREVIEW: Final = "_preview"
ELLIPSIS: Final = "…"  # member that gives the number of omitted ones

_FEWEST_SCALARS: Final = 10  # a list of up to so many scalars is short
_MEMBERS: Final = 40  # an object with more members is a map and is cut like a list
_FIELDS: Final = 8  # fields that are kept of an item, beside those of `_TELLING`
_ALARMS: Final = 10
_OUTLIERS: Final = 5
_SLACK: Final = 30  # a text that is longer by less is not cut
_LINES: Final = 5  # lines with alarm words that are kept of the rest of a text
_SHORT: Final = 200  # a longer text may hold an alarm word by chance
_FEW_VALUES: Final = 8
_FEW_LETTERS: Final = 40  # a status has few distinct values, of few letters
_LARGEST: Final = 5000  # lists longer than this are not searched for outliers
_RARE: Final = 20  # a value is rare if at most one in so many items has it

_TELLING: Final = re.compile(
    r"(?:^|_)(?:id|ids|uuid|key|ref|name|title|status|state|success|ok|error|errors|message|code|type|kind|count"
    r"|total|size|length|cursor|next|page|url|path|price|amount|date|time)$|(?:Id|Count|Total|Token|Cursor|Url|Name)$"
)
"""Members that describe an object or say how to continue."""
_KEY_FIELDS: Final = re.compile(r"^(?:id|uuid|key|name|title|status|state|error)$|_id$|Id$")
"""Members that identify an item and give its state."""
_FEWEST_FIELDS: Final = 2  # fields that are kept of an item without key fields
_VERDICT: Final = re.compile(
    r"^(?:is_?)?(?:error|errors|exception|failure|failed|fault|warning|warnings)$", re.IGNORECASE
)
_LONGEST_TELLING: Final = 16  # no name that tells of trouble is longer
_STATUS: Final = frozenset({"status", "code", "status_code", "statuscode"})
_HTTP_ERROR: Final = re.compile("[45][0-9]{2}")
_SUCCESS: Final = frozenset({"ok", "success", "succeeded", "successful", "passed", "valid"})
_NOTHING: Final = frozenset({"", "0", "none", "null", "false", "no"})


class _Preview(Struct, kw_only=True):
    """One pass over one document."""

    keep: int  # items at each end of a list
    longest: int  # characters of a text
    asked: frozenset[str] | None = None  # keep key fields and fields with these names; None: the most telling ones
    lost: bool = False  # whether anything was omitted

    def value(self, value: JsonValue) -> JsonValue:
        if is_members(value):
            return self.members(value)
        if is_items(value):
            return self.items(value)
        if isinstance(value, str) and not isinstance(value, Number):
            return self.text(value)
        return value

    def members(self, members: Members) -> Members:
        names = {name for name, _ in members}
        chosen = self._chosen_members(members)
        made: list[tuple[str, JsonValue]] = []
        renamed = False
        for place in sorted(chosen):
            name, value = members[place]
            preview = f"{name}{PREVIEW}"
            if is_items(value) and self.is_long(value) and preview not in names:
                name, renamed = preview, True
            made.append((name, self.value(value)))
        if len(chosen) < len(members):
            made.append(self._left_out(len(members) - len(chosen), "members"))
        if renamed and COMPRESSED not in names:
            made.append((COMPRESSED, True))
        return tuple(made)

    def _chosen_members(self, members: Members) -> set[int]:
        """Return the indexes of the members that are kept: some of a map, all of any other object."""
        if len(members) <= max(_MEMBERS, 2 * self.keep):
            return set(range(len(members)))
        chosen = {*range(self.keep), *range(len(members) - self.keep, len(members))}
        scalars = [
            place
            for place, (name, value) in enumerate(members)
            if not isinstance(value, (tuple, list)) and _TELLING.search(name)
        ]
        wrong = _troubled([(member,) for member in members])
        return chosen | set(scalars[:_MEMBERS]) | set(wrong[:_ALARMS])

    def is_long(self, items: Sequence[JsonValue]) -> bool:
        """Tell whether a list is to be cut."""
        if len(items) <= 2 * self.keep + 1:
            return False
        # A few scalars are short; the same number of records is not.
        return len(items) > _FEWEST_SCALARS or any(isinstance(item, (tuple, list)) for item in items)

    def items(self, items: Sequence[JsonValue]) -> list[JsonValue]:
        if not self.is_long(items):
            return [self.item(item) for item in items]
        self.lost = True
        ends = {*range(self.keep), *range(len(items) - self.keep, len(items))}
        wrong = [place for place in _troubled([_shallow(item) for item in items]) if place not in ends]
        unlike = [place for place in _outliers(items) if place not in ends]
        chosen = ends | set(wrong[:_ALARMS]) | set(unlike[:_OUTLIERS])
        untold = len([place for place in wrong if place not in chosen])
        made: list[JsonValue] = []
        last = -1
        for place in [*sorted(chosen), len(items)]:
            count = place - last - 1
            last = place
            if count:
                made.append(omission_mark(str(count)))
            if place < len(items):
                made.append(self.item(items[place]))
        if untold:
            made.append(f"{ELLIPSIS} ({untold} of those omitted tell of errors)")
        return made

    def item(self, item: JsonValue) -> JsonValue:
        """Return the preview of a list's item: its most telling fields."""
        if is_members(item) and self.asked is not None:
            return self._key_fields(item, self.asked)
        if not is_members(item) or len(item) <= _FIELDS + 2:
            return self.value(item)
        telling = {place for place, (name, _) in enumerate(item) if _TELLING.search(name)}
        others = [place for place in range(len(item)) if place not in telling]
        scalars = [place for place in others if not isinstance(item[place][1], (tuple, list))]
        chosen = set(sorted(telling)[: 2 * _FIELDS]) | set(scalars[: max(0, _FIELDS - len(telling))])
        shown = self.members(tuple([item[place] for place in sorted(chosen)]))
        if len(chosen) == len(item):
            return shown
        return (*shown, self._left_out(len(item) - len(chosen), "fields"))

    def _key_fields(self, item: Members, asked: frozenset[str]) -> JsonValue:
        key = [place for place, (name, _) in enumerate(item) if _KEY_FIELDS.search(name) or name.lower() in asked]
        scalars = [place for place, (_, value) in enumerate(item) if not isinstance(value, (tuple, list))]
        chosen = key or scalars[:_FEWEST_FIELDS] or [0]
        shown = self.members(tuple([item[place] for place in chosen if place < len(item)]))
        return shown if len(chosen) >= len(item) else (*shown, self._left_out(len(item) - len(chosen), "fields"))

    def _left_out(self, count: int, what: str) -> tuple[str, JsonValue]:
        self.lost = True
        return ELLIPSIS, f"({count} {what} omitted)"

    def text(self, text: str) -> str:
        """Return the preview of a text: its beginning, and its lines with alarm words."""
        if len(text) <= self.longest + _SLACK:
            return text
        self.lost = True
        text = without_blobs(text)
        if len(text) <= self.longest + _SLACK:
            return text
        head, rest = text[: self.longest], text[self.longest :]
        told = [line for line in rest.split("\n")[1:] if len(line) <= _SHORT and has_alarm(line)][:_LINES]
        left = len(rest) - sum(map(len, told))
        return "\n".join([head + omission_mark(f"{left} characters"), *told])


def preview(
    value: JsonValue, keep: int, longest: int, ref: str | None = None, *, asked: frozenset[str] | None = None
) -> JsonValue | None:
    """Return the preview of a document; None if nothing would be omitted.

    A long list keeps `keep` items at each end, a long text `longest` characters. `ref` names the full output. With
    `asked`, items keep only their key fields and the fields with these names (in lower case).
    """
    cutting = _Preview(keep=keep, longest=longest, asked=asked)
    if is_items(value):
        made: JsonValue = (("items" + PREVIEW, cutting.items(value)),)
    else:
        made = cutting.members(value)
        if any(name in {COMPRESSED, FULL_OUTPUT} for name, _ in value):
            made = (("output" + PREVIEW, made),)
    if not cutting.lost:
        return None
    if not any(name == COMPRESSED for name, _ in made):
        made = (*made, (COMPRESSED, True))
    return made if ref is None else (*made, (FULL_OUTPUT, ref))


def _shallow(item: JsonValue) -> Members:
    """Return the members of an item and those of the objects in it; of a text the text."""
    if is_members(item):
        return item + tuple([member for _, held in item if is_members(held) for member in held])
    return (("", item),) if isinstance(item, str) else ()


def _troubled(items: Sequence[Members]) -> list[int]:
    """Return the indexes of the objects that tell of trouble, by a member or by an alarm word in a short text."""
    # All texts are searched at once, those of an object on one line.
    texts = ["\0".join([v for _, v in each if isinstance(v, str) and len(v) <= _SHORT]) for each in items]
    told = set(alarming_lines("\n".join([text.replace("\n", "\0") if "\n" in text else text for text in texts])))
    return [place for place, members in enumerate(items) if place in told or _has_verdict(members)]


def _has_verdict(members: Members) -> bool:
    """Tell whether a member says that something failed: `"ok": false`, `"error": "…"`, `"status": 500`."""
    for name, value in members:
        meaning = _meaning(name) if len(name) <= _LONGEST_TELLING else ""  # a long name must not be remembered
        if not meaning:
            continue
        if value is False:
            if meaning == "success":
                return True
        elif meaning == "failure":
            # Not null and not empty.
            if value not in (None, [], ()) and (isinstance(value, (tuple, list)) or str(value).lower() not in _NOTHING):
                return True
        elif meaning == "status" and isinstance(value, Number) and _HTTP_ERROR.fullmatch(value):
            return True
    return False


@lru_cache(maxsize=4096)
def _meaning(name: str) -> Literal["success", "failure", "status", ""]:
    """Return what a member of this name tells."""
    if _VERDICT.search(name):
        return "failure"
    lower = name.lower()
    return "success" if lower in _SUCCESS else "status" if lower in _STATUS else ""


def _outliers(items: Sequence[JsonValue]) -> list[int]:
    """Return the indexes of items with unusual keys, or with a rare value in a field of few distinct values."""
    if not _RARE // 2 <= len(items) <= _LARGEST or not all(map(is_members, items)):
        return []
    records = [dict(item) for item in items]
    rare = max(1, len(items) // _RARE)
    shapes = Counter(frozenset(fields) for fields in records)
    found: set[int] = set()
    if shapes.most_common(1)[0][1] * 5 >= len(items) * 4:
        found.update(place for place, fields in enumerate(records) if shapes[frozenset(fields)] <= rare)
    for name in records[0]:
        if not all(name in fields for fields in records):
            continue
        # Compare booleans and short texts only.
        values = [
            value if isinstance(value, bool) or (isinstance(value, str) and len(value) <= _FEW_LETTERS) else None
            for value in (fields[name] for fields in records)
        ]
        counts = Counter(values)
        if 1 < len(counts) <= min(_FEW_VALUES, len(items) // 4):
            found.update(place for place, value in enumerate(values) if counts[value] <= rare)
    return sorted(found)
