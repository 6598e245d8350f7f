"""Formats values for people: numbers, times, untrusted texts, and the difference of two texts. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from difflib import SequenceMatcher
from typing import Any, Final
from urllib.parse import quote

from markupsafe import escape
from msgspec import Struct

CLIPPED: Final = 1_200  # most characters of a text in a list
WHOLE: Final = 200_000  # most characters of a text on its own page
NOTHING: Final = "–"
_LOW_CHARACTERS: Final = 250
_LOW_LINES: Final = 7
_ROOM: Final = 3  # bytes allowed per character on a page; an escaped character takes up to nine

_UNSEEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
"""Invisible characters, and characters that change the text direction. Joiners are allowed, since scripts need them."""
_PIECES: Final = re.compile(r"\n|[^\S\n]+|\w+|[^\w\s]")
_COMPARED: Final = 3_000  # with more differing pieces, the difference is one removal and one addition
_ALIKE: Final = 0.4  # with a lower similarity, the difference is one removal and one addition
_STEPS: Final = ((1e9, "B"), (1e6, "M"), (1e3, "k"))


def visible(text: str) -> str:
    """Return a text with every control character made visible: ESC as ␛, U+202E as [U+202E]."""
    return _UNSEEN.sub(_shown, text)


def _shown(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    return f"[U+{code:04X}]"


def clip(text: str, most: int = CLIPPED) -> str:
    """Return the beginning of a text: at most `most` characters, fewer if they take many bytes on a page."""
    shown, room = text[:most], _ROOM * most
    while (size := _size(shown)) > room:
        shown = shown[: len(shown) * room // size]
    return shown


def _size(text: str) -> int:
    return len(escape(visible(text)).encode())


def is_tall(text: str) -> bool:
    """Tell whether a text may not fit its box on a page, which then scrolls and must be focusable."""
    return len(visible(text)) > _LOW_CHARACTERS or text.count("\n") > _LOW_LINES


def returned(text: str) -> str:
    """Return a name for a form field. A name with invisible characters is percent-encoded."""
    return text if visible(text) == text else quote(text, safe="", errors="surrogatepass")


def number(value: float | None) -> str:
    """Return a whole number with separators: 1,234,567."""
    return NOTHING if value is None else f"{round(value):,}".replace("-", "\u2212")


def short(value: float | None) -> str:
    """Return a large number in short form: 1.23 M."""
    if value is None:
        return NOTHING
    for size, unit in _STEPS:
        if abs(value) >= size:
            return f"{value / size:.3g}\u202f{unit}".replace("-", "\u2212")
    return number(value)


def dollars(value: float | None) -> str:
    """Return an amount with the significant digits: $12.30, $0.0042, −$1.50."""
    if value is None:
        return NOTHING
    size = abs(value)
    if size == 0:
        shown = "0.00"
    elif size >= 1:
        shown = f"{size:,.2f}"
    elif size >= 0.01:
        shown = f"{size:.3f}"
    else:
        shown = f"{size:.2g}" if size >= 0.0001 else f"{size:.6f}"
    return f"{chr(0x2212) if value < 0 else ''}${shown}"


def percent(part: float | None, whole: float | None) -> str:
    """Return a share in per cent: 12.3 %."""
    if part is None or not whole:
        return NOTHING
    return f"{100 * part / whole:.1f}\u202f%".replace("-", "\u2212")


def milliseconds(value: float | None) -> str:
    """Return a time span: 12.3 ms, 4.56 s."""
    if value is None:
        return NOTHING
    return f"{value / 1000:.3g}\u202fs" if value >= 1000 else f"{value:.3g}\u202fms"


def when(moment: Any) -> str:
    """Return a time (milliseconds since 1970, or ISO 8601) as `2026-11-01 10:00:00` in UTC."""
    if moment is None:
        return NOTHING
    at = datetime.fromtimestamp(moment / 1000, UTC) if isinstance(moment, int | float) else _read(str(moment))
    return f"{at:%Y-%m-%d %H:%M:%S}"


def hour(moment: Any) -> str:
    """Return a time to the minute."""
    return when(moment)[:16]


def _read(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


class Piece(Struct, frozen=True, kw_only=True):
    """A part of a difference: in both texts (`same`), only in the first (`gone`), or only in the second (`new`)."""

    kind: str
    text: str


def difference(before: str, after: str) -> list[Piece]:
    """Return the difference of two texts. If they have little in common, it is one removal and one addition."""
    one, other = _PIECES.findall(before), _PIECES.findall(after)
    start = _alike(one, other)
    stop = _alike(one[start:][::-1], other[start:][::-1])
    middle, made = one[start : len(one) - stop], other[start : len(other) - stop]
    found = [Piece(kind="same", text="".join(one[:start]))]
    steps: Sequence[tuple[str, int, int, int, int]] = [("replace", 0, len(middle), 0, len(made))]
    if len(middle) <= _COMPARED and len(made) <= _COMPARED:
        matcher = SequenceMatcher(None, middle, made, autojunk=True)
        steps = matcher.get_opcodes() if matcher.ratio() > _ALIKE else steps
    for kind, a, b, c, d in steps:
        if kind == "equal":
            found.append(Piece(kind="same", text="".join(middle[a:b])))
        else:
            found += [Piece(kind="gone", text="".join(middle[a:b])), Piece(kind="new", text="".join(made[c:d]))]
    found.append(Piece(kind="same", text="".join(one[len(one) - stop :])))
    return [piece for piece in found if piece.text]


def _alike(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the length of the common prefix of two lists."""
    most = min(len(one), len(other))
    return next((place for place in range(most) if one[place] != other[place]), most)
