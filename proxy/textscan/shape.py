"""How a piece of a text looks: an id, a path, an address, a date, a number, a term, or ordinary words.

It looks at the piece alone, in time that grows with its length and no faster. It knows no language's grammar,
and not where the piece stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, Literal, TypeAlias

Kind: TypeAlias = Literal["url", "email", "path", "date", "number", "id", "quoted", "cjk", "text"]
"""How a value looks. `id` is an identifier of any sort (HAT136, user_id, buildDir, v1.2.3, a hash),
`date` a date or a time of day, `path` also a file name, `quoted` a string between quotation marks,
`cjk` a term in CJK characters, `text` the words of a JSON leaf that have no other shape."""

SHORTEST: Final = 2
"""Characters of the shortest value."""
LONGEST: Final = 200
"""Characters of the longest one: what is longer is prose or a document, and its own values count."""
CJK: Final = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
"""CJK characters, inside of a class."""

CJK_CHARACTER: Final = re.compile(f"[{CJK}]")
_CJK_TERM: Final = re.compile(f"[{CJK}]+")
_CJK_EMPTY: Final = re.compile(
    "[的了是在和与及或对把被为从到将等这那有个也就都而且其于以之请您我你他她它们吗呢吧]"
)
"""Characters that join terms and belong to none: a run is divided at them, for want of a dictionary."""
_CJK_LONGEST: Final = 12
"""A longer run is a sentence without punctuation, not a term."""

TRIVIA: Final = frozenset(
    "true false null none nil undefined yes no on off ok n/a na nan auto default all any "  # noqa: SIM905 - readable
    "True False None NULL TRUE FALSE N/A NaN OK e.g i.e etc a.m p.m vs utf-8 UTF-8".split()
)
"""What has the shape of an atom and means nothing alone."""

TELLING: Final = re.compile(r"[^\W_]")
"""What a piece must hold to say anything."""
JOINTS: Final = re.compile(r"[=:&]+")
"""What stands between a name and its value."""

_DIGIT: Final = re.compile(r"\d")
_LETTER: Final = re.compile(r"[^\W\d_]")
_SPACE: Final = re.compile(r"\s")
INNER_CAPITAL: Final = re.compile(r"[a-z][A-Z]")
NUMBER: Final = re.compile(r"[-+$€£¥]?\d[\d,]*+(?:\.\d+)?(?:%|[a-zA-Z]{1,3})?")
_DATE: Final = re.compile(
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}(?:[T ]\d{1,2}:\d{2}\S{0,20})?|\d{1,2}[-/.]\d{1,2}[-/.]\d{4}"
    r"|\d{1,2}:\d{2}(?::\d{2})?(?:\.\d+)?(?:[ap]m)?|\d{4}-\d{2}"
)
_ADDRESS_MARKS: Final = frozenset(":=@/")
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{1,15}://.+")
_EMAIL: Final = re.compile(r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,5}")
_FILE_NAME: Final = re.compile(
    r"[\w@+-][\w.@+-]+\.(?:[A-Za-z][A-Za-z0-9]{0,3}|ipynb|sqlite|swift)|[\w@+-]\.[A-Za-z]"
)
_DOTTED: Final = re.compile(r"\w{2,}(?:\.\w{2,})+")
_WORDS_AND_SLASH: Final = re.compile(r"[A-Za-z]+/[A-Za-z]+")
_GROUPED: Final = 6
"""Characters of the shortest number in groups (555-0199) that identifies something."""


def kind_of(piece: str) -> Kind | None:
    """Return what a piece of text without surrounding space has the shape of; None for ordinary words."""
    if not SHORTEST <= len(piece) <= LONGEST:
        return None
    if _SPACE.search(piece):
        return "date" if _DATE.fullmatch(piece) else None
    if not piece.isascii() and CJK_CHARACTER.search(piece):
        term = len(piece) <= _CJK_LONGEST and _CJK_TERM.fullmatch(piece) and not _CJK_EMPTY.search(piece)
        return "cjk" if term else None
    return shape_of(piece)


def shape_of(piece: str) -> Kind | None:
    """Return the shape of a run of characters without space and CJK; None for ordinary words."""
    if not SHORTEST <= len(piece) <= LONGEST or piece in TRIVIA:
        return None
    if piece.isalnum() and piece.isascii():
        # What most are; with a digit first it may still be a number with its unit.
        if piece.isalpha():
            return "id" if INNER_CAPITAL.search(piece) else None
        if piece.isdigit():
            return "number"
        return "id" if piece[0].isalpha() else _shape_of_mixed(piece)
    return _shape_of_mixed(piece)


def _shape_of_mixed(piece: str) -> Kind | None:
    """Return the shape of a run that is not long, and not only of ASCII letters or of ASCII digits."""
    if piece.isalpha():
        return "id" if INNER_CAPITAL.search(piece) else None
    digits = _DIGIT.search(piece) is not None
    if digits and NUMBER.fullmatch(piece):
        return "number"
    if digits and _DATE.fullmatch(piece):
        return "date"
    if not _ADDRESS_MARKS.isdisjoint(piece):
        return _address(piece)
    if "." in piece:
        if _FILE_NAME.fullmatch(piece):
            return "path"
        if _DOTTED.fullmatch(piece):
            return "id"
    if not digits:
        return "id" if "_" in piece.strip("_") or INNER_CAPITAL.search(piece) else None
    # With letters, with a mark before it (#1042), or long enough for a number in groups (555-0199).
    named = piece[0] in "#@" or _LETTER.search(piece) is not None
    return "id" if named or ("-" in piece and len(piece) >= _GROUPED) else None


def _address(piece: str) -> Kind | None:
    """Return the shape of a run with one of the marks that addresses have; None where it is none."""
    if _URL.fullmatch(piece):
        return "url"
    if _EMAIL.fullmatch(piece):
        return "email"
    if "/" in piece and not JOINTS.search(piece):
        return None if _WORDS_AND_SLASH.fullmatch(piece) or not TELLING.search(piece) else "path"
    bare = piece.strip("@")
    return "id" if bare.isidentifier() and piece[0] == "@" else None


def terms_of(run: str) -> Iterator[str]:
    """Yield the terms of a run of CJK characters: what lies between joining ones."""
    for term in _CJK_EMPTY.split(run):
        if SHORTEST <= len(term) <= _CJK_LONGEST:
            yield term
