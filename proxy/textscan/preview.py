"""A document with its long lists and long texts cut, so that what it tells can still be told.

Flags, counts, totals, ids and cursors stay. Of a long list the first and the last items stay, and between
them those that tell of something gone wrong or are unlike the others; a mark says how many are not shown. The
list `k` is then `k_preview`, and its object has `"compressed": true`. What is shown is verbatim.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from proxy.textscan.document import JsonValue, Members, Number, is_items, is_members
from proxy.textscan.plaintext import FULL_OUTPUT, alarms, omitted, without_blobs

COMPRESSED: Final = "compressed"
PREVIEW: Final = "_preview"
ELLIPSIS: Final = "…"  # name of the member that tells how many others are not shown

_FEWEST_SCALARS: Final = 10  # a list of so many scalars or fewer is short
_MEMBERS: Final = 40  # an object of more is a map, of which the first and the last members are shown
_FIELDS: Final = 8  # fields of an item that are shown, those of `_TELLING` not counted
_ALARMS: Final = 10
_OUTLIERS: Final = 5
_SLACK: Final = 30  # a text that is longer by so little is not worth a mark
_LINES: Final = 5  # lines telling of something gone wrong that are shown of a text beyond its beginning
_SHORT: Final = 200  # characters of a text that can be a status or a message; in a longer one any word may stand
_FEW_VALUES: Final = 8
_FEW_LETTERS: Final = 40  # what holds a status has few values, of few letters
_LARGEST: Final = 5000  # items of the longest list in which items unlike the others are looked for
_RARE: Final = 20  # what one in so many items has is rare

_TELLING: Final = re.compile(
    r"(?:^|_)(?:id|ids|uuid|key|ref|name|title|status|state|success|ok|error|errors|message|code|type|kind|count"
    r"|total|size|length|cursor|next|page|url|path|price|amount|date|time)$|(?:Id|Count|Total|Token|Cursor|Url|Name)$"
)
"""Names of members that tell what an object is, or how to go on."""
_KEY_FIELDS: Final = re.compile(r"^(?:id|uuid|key|name|title|status|state|error)$|_id$|Id$")
"""Names of members that say which item it is, and how it stands."""
_FEWEST_FIELDS: Final = 2  # fields of an item that are shown where none has such a name
_VERDICT: Final = re.compile(
    r"^(?:is_?)?(?:error|errors|exception|failure|failed|fault|warning|warnings)$", re.IGNORECASE
)
_HTTP_ERROR: Final = re.compile("[45][0-9]{2}")
_SUCCESS: Final = frozenset({"ok", "success", "succeeded", "successful", "passed", "valid"})
_NOTHING: Final = frozenset({"", "0", "none", "null", "false", "no"})


class _Preview(Struct, kw_only=True):
    """One cutting of one document."""

    keep: int  # items at each end of a list
    longest: int  # characters of a text
    asked: frozenset[str] | None = None  # items show their key fields and these, no others; None: fields that tell most
    lost: bool = False  # whether anything is not shown

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
        """Return which members of an object are shown: of a map some, of any other all."""
        if len(members) <= max(_MEMBERS, 2 * self.keep):
            return set(range(len(members)))
        chosen = {*range(self.keep), *range(len(members) - self.keep, len(members))}
        scalars = [
            place
            for place, (name, value) in enumerate(members)
            if not isinstance(value, (tuple, list)) and _TELLING.search(name)
        ]
        wrong = [place for place, member in enumerate(members) if _tells_of_trouble((member,))]
        return chosen | set(scalars[:_MEMBERS]) | set(wrong[:_ALARMS])

    def is_long(self, items: Sequence[JsonValue]) -> bool:
        """Tell whether a list is to be cut."""
        if len(items) <= 2 * self.keep + 1:
            return False
        # Few short scalars are read as one thing; as records they would be many.
        return len(items) > _FEWEST_SCALARS or any(isinstance(item, (tuple, list)) for item in items)

    def items(self, items: Sequence[JsonValue]) -> list[JsonValue]:
        if not self.is_long(items):
            return [self.item(item) for item in items]
        self.lost = True
        ends = {*range(self.keep), *range(len(items) - self.keep, len(items))}
        wrong = [place for place, item in enumerate(items) if place not in ends and _is_trouble(item)]
        unlike = [place for place in _outliers(items) if place not in ends]
        chosen = ends | set(wrong[:_ALARMS]) | set(unlike[:_OUTLIERS])
        untold = len([place for place in wrong if place not in chosen])
        made: list[JsonValue] = []
        last = -1
        for place in [*sorted(chosen), len(items)]:
            count = place - last - 1
            last = place
            if count:
                made.append(omitted(str(count)))
            if place < len(items):
                made.append(self.item(items[place]))
        if untold:
            made.append(f"{ELLIPSIS} ({untold} of those omitted tell of errors)")
        return made

    def item(self, item: JsonValue) -> JsonValue:
        """Return an item of a list as it is shown: without what it has beside the fields that tell most."""
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
        """Return a text as it is shown: its beginning, and what it says of errors."""
        if len(text) <= self.longest + _SLACK:
            return text
        self.lost = True
        text = without_blobs(text)
        if len(text) <= self.longest + _SLACK:
            return text
        head, rest = text[: self.longest], text[self.longest :]
        told = [line for line in rest.split("\n")[1:] if len(line) <= _SHORT and alarms(line)][:_LINES]
        left = len(rest) - sum(map(len, told))
        return "\n".join([head + omitted(f"{left} characters"), *told])


def preview(
    value: JsonValue, keep: int, longest: int, ref: str | None = None, *, asked: frozenset[str] | None = None
) -> JsonValue | None:
    """Return a document as it is shown; None where nothing of it is left out.

    Of a long list `keep` items stay at each end, of a long text `longest` characters. `ref` is named in it. With
    `asked`, items show only the fields that say which they are, and those of these names (in small letters).
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


def _is_trouble(item: JsonValue) -> bool:
    if is_members(item) and item:
        inner = [member for _, held in item if is_members(held) for member in held]
        return _tells_of_trouble(item) or _tells_of_trouble(inner)
    return isinstance(item, str) and len(item) <= _SHORT and alarms(item)


def _tells_of_trouble(members: Sequence[tuple[str, JsonValue]]) -> bool:
    for name, value in members:
        if value is False and name.lower() in _SUCCESS:
            return True
        if value is None or value is False or value in ([], ()):
            continue
        if _VERDICT.search(name) and (isinstance(value, (tuple, list)) or str(value).lower() not in _NOTHING):
            return True
        if isinstance(value, Number):
            if name.lower() in {"status", "code", "status_code", "statuscode"} and _HTTP_ERROR.fullmatch(value):
                return True
        elif isinstance(value, str) and len(value) <= _SHORT and alarms(value):
            return True
    return False


def _outliers(items: Sequence[JsonValue]) -> list[int]:
    """Return which items have other keys than nearly all, or a value that is rare where few values occur."""
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
        # Truth values and short texts are compared.
        values = [
            value if isinstance(value, bool) or (isinstance(value, str) and len(value) <= _FEW_LETTERS) else None
            for value in (fields[name] for fields in records)
        ]
        counts = Counter(values)
        if 1 < len(counts) <= min(_FEW_VALUES, len(items) // 4):
            found.update(place for place, value in enumerate(values) if counts[value] <= rare)
    return sorted(found)
