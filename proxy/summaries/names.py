"""Names: identifiers that a conversation works with, and what was last done to each.

An identifier is an id, a path, an address, a hash, a ticket's number: what cannot be said in other words.
It counts by the messages in which it stands, and more where the user said it or a call was given it; and by
how much it looks like one: a ticket's number comes before a variable's name. Names of two parts of a
conversation, one after the other, add up to those of both; of very many those stay that matter most.

It does not know what a summary is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final

from pydantic import BaseModel

from proxy.summaries.wholes import wholes_in
from proxy.textscan import INNER_CAPITAL, Kind, Value, values_of

_MOST: Final = 800
"""Names that are kept."""
_RECURS: Final = 2
_NAMING: Final[frozenset[Kind]] = frozenset({"url", "email", "path", "id"})
_LONG_NUMBER: Final = re.compile(r"\d{5,}")
"""A number that is no amount but the name of something."""
_COMPOUND: Final = re.compile(r"\d{1,3}-[A-Za-z]+(?:-[a-z]+)*")
"""A number with a word (24-hour): it names nothing."""
_CODE: Final = re.compile(r"[A-Z]{5,12}")
"""A code made of capitals alone: a name where a call was given it, and else a word that is shouted."""

_CERTAIN, _LIKELY, _WORDS, _JUNK = range(4)
"""How much something looks like an identifier: the less, the more. `_WORDS` are names made of words, such as
programs have; `_JUNK` is what has the shape of one and identifies nothing."""
_REMEMBERED: Final = 8192
_OFTEN: Final = 4
"""Messages from which on it does not matter in how many more a name stands: a file that is read again and
again says all of its names as often."""
_ESCAPE: Final = re.compile(
    r"(?:\\?(?:x1b|u001b|033|e))?\[?(?:\d{1,3};)*\d{0,3}[A-HJKSTfm]|(?:x1b|u001b|033).*|[ux][0-9a-fA-F]{2,4}"
    r"|(?:\d{1,3};)*\d{1,3}m[a-z]*",
    re.IGNORECASE,
)
"""What is left of the commands of a terminal (x1b[31m), and characters that were written as escapes."""
_OF_TRADE: Final = re.compile(
    r"(?:utf|iso|int|uint|float|double|sha|es|ecma)-?\d{1,4}|x(?:86|64|86_64)|h26[45]"
    r"|(?:md|base|ipv|http|oauth|web|python|py|mp|win|crc|bf|fp)\d{1,2}|i18n|l10n|a11y|k8s|s3|ec2|e2e|b2b|p2p|[a-z]{1,2}\d{1,2}|\d{1,3}(?:st|nd|rd|th|d|x|k)",
    re.IGNORECASE,
)
"""Words of the trade that hold a digit, and what is too short to identify anything."""
_ROUND: Final = re.compile(r"\d+000")
_COLOUR: Final = re.compile(r"#?([0-9a-f]{2})\1\1|#(?=[\da-f]*[a-f])[0-9a-f]{3,8}", re.IGNORECASE)
_PROGRAM: Final = re.compile(r"[$%{}()\"'!?<>^*~↑↓→←]")
"""Marks of programs and of what they print, but for those of addresses and of paths."""
_OBJECT: Final = re.compile(
    r"(?:this|self|cls|super|process|window|document|console|props|state|Math|Object|Array|String|Number|JSON"
    r"|Promise|np|pd|os|sys|re|args|kwargs|ctx|req|res|event|module|exports|logger|log)\..+"
)
"""A member of what every program has."""
_MEMBER: Final = re.compile(r"[A-Za-z_$][\w$]*(?:\.[A-Za-z_$][\w$]*){1,2}")
"""A member of something in a program (a.b): where it has no digit, and is no name of a file."""
_FILE: Final = re.compile(
    r".*\.(?:txt|md|rst|log|csv|tsv|json|jsonl|ya?ml|toml|ini|cfg|conf|env|lock|xml|html?|css|scss|svg|png|jpe?g"
    r"|gif|webp|pdf|docx?|xlsx?|pptx?|odt|zip|tar|gz|tgz|bz2|xz|7z|db|sqlite|sql|parquet|avro|orc|ipynb|py|pyi"
    r"|js|jsx|mjs|cjs|ts|tsx|vue|go|rs|java|kt|scala|c|h|cc|cpp|hpp|cs|rb|php|pl|sh|bash|zsh|ps1|bat|swift|m|r"
    r"|R|lua|dart|ex|exs|hs|clj|pony|tf|proto|graphql|mp[34]|wav|mov|pem|key|crt|cer|whl|jar|so|dll|exe|bin|iso"
    r"|deb|rpm|apk|service|socket|timer|com|org|net|io|dev|internal|local|lan|gov|edu|app|cn|de|uk|eu|jp|fr)"
)
"""How names of files and of hosts end."""
_PACKAGE: Final = re.compile(r"(?:com|org|net|io|dev|edu|gov|cn|de)(?:\.\w+){2,}|[a-z_]+(?:\.\w+){3,}")
_NUMBERED: Final = re.compile(r"[A-Za-z]*[a-z]\d{1,2}|[a-z]+(?:_[a-z]+)*_\d|\d{1,3}[a-z]{2,}")
"""A word with a number (arg10, step_2), as variables are named."""
_DIGITS: Final = 3
"""Digits of an identifier that is certainly one."""


class Name(BaseModel, frozen=True):
    """An identifier."""

    text: str
    times: int = 1
    """Messages in which it stands."""
    said: bool = False
    """Whether the user said it."""
    called: bool = False
    """Whether a call was given it."""
    state: str = ""
    """The last tool that was given it and what came of that ("edit_file ok"); empty where none was."""

    @property
    def recurs(self) -> bool:
        """Whether it stands in more than one message."""
        return self.times >= _RECURS

    @property
    def is_asked(self) -> bool:
        """Whether the user said it or a call was given it."""
        return self.said or self.called

    @property
    def has_failed(self) -> bool:
        """Whether what was last done to it failed."""
        return self.state.endswith(" failed")

    def and_then(self, newer: Name) -> Name:
        """Return what is known of the same identifier from both parts."""
        return Name(
            text=self.text,
            times=self.times + newer.times,
            said=self.said or newer.said,
            called=self.called or newer.called,
            state=newer.state or self.state,
        )


def names_in(text: str) -> Iterator[str]:
    """Yield the identifiers of a text, at least once each."""
    for value in values_of(text, "none"):
        if _is_name(value):
            yield value.text
    yield from wholes_in(text)


def names_given(arguments: str) -> Iterator[str]:
    """Yield the identifiers of a call's arguments, at least once each."""
    for value in values_of(arguments, "none"):
        if _is_name(value) or (value.kind == "text" and _CODE.fullmatch(value.text)):
            yield value.text
    yield from wholes_in(arguments)


def _is_name(value: Value) -> bool:
    """Tell whether a value names something."""
    if value.kind == "number":
        return _LONG_NUMBER.fullmatch(value.text) is not None
    return value.kind in _NAMING and not _COMPOUND.fullmatch(value.text)


def merged(names: Iterable[Name]) -> tuple[Name, ...]:
    """Return the names, each once, in the order of their newest mention; of many those that matter most."""
    found: dict[str, Name] = {}
    for name in names:
        known = found.pop(name.text, None)
        found[name.text] = name if known is None else known.and_then(name)
    if len(found) <= _MOST:
        return tuple(found.values())
    kept = {name.text for name in ranked(found.values())[:_MOST]}
    return tuple(name for name in found.values() if name.text in kept)


def ranked(names: Iterable[Name]) -> list[Name]:
    """Return names, those that matter most first; of such as matter alike the newest.

    First those that recur and look like identifiers: of these the ones that the user said, those that a call
    was given, then those that are certainly identifiers. Then what the user said once, names made of words
    that recur, what a call was given once, and all others; what identifies nothing comes last.
    """
    newest = list(names)
    newest.reverse()
    return sorted(newest, key=_rank)


def tier(name: Name) -> int:
    """Return 1 for a name that recurs and looks like an identifier, 2 for one worth room that is left over.

    0 is one that is not worth it: what stands once in some output, and what identifies nothing.
    """
    grade = _grade(name.text)
    if grade <= _LIKELY:
        return 1 if name.recurs else 2 if name.is_asked else 0
    return 2 if name.recurs and (grade == _WORDS or name.said) else 0


def _rank(name: Name) -> tuple[int, bool, int, int]:
    """Return what is smaller the more a name matters."""
    grade = _grade(name.text)
    if grade == _JUNK:
        group = 9 if name.recurs and name.said else 10
    elif name.recurs and grade == _WORDS:
        group = 4 if name.is_asked else 5
    elif name.recurs:
        group = 0 if name.is_asked else 1 + grade
    elif grade == _WORDS:
        group = 7 if name.is_asked else 8
    else:
        group = 3 if name.said else 6 if name.called else 7
    return group, not name.said, grade, -min(name.times, _OFTEN)


@lru_cache(_REMEMBERED)
def _grade(text: str) -> int:
    """Return how much a name looks like an identifier: the less, the more."""
    digits = sum(map(str.isdigit, text))
    if _ESCAPE.fullmatch(text) or _OF_TRADE.fullmatch(text) or _OBJECT.fullmatch(text):
        return _JUNK
    if _COLOUR.fullmatch(text):
        return _WORDS
    if _PROGRAM.search(text.lstrip("~")) and "://" not in text:
        return _WORDS if text.endswith("()") else _JUNK
    if text.isdigit():
        return _JUNK if _ROUND.fullmatch(text) else _CERTAIN if digits > 2 * _DIGITS else _LIKELY
    if not any(map(str.isalpha, text)):
        return _CERTAIN if digits >= _DIGITS else _JUNK
    bare = text.strip("/@.")
    if not digits:
        if _PACKAGE.fullmatch(bare) or _CODE.fullmatch(bare) or "://" in text:
            return _LIKELY
        if _MEMBER.fullmatch(bare) and "/" not in text:
            return _LIKELY if _FILE.fullmatch(bare) else _WORDS if "_" in bare else _JUNK
        return _LIKELY if not bare.replace("_", "").isalpha() and not text.startswith("@") else _WORDS
    if _NUMBERED.fullmatch(bare):
        return _WORDS
    mixed = any(map(str.isupper, bare)) and not INNER_CAPITAL.search(bare)
    return _CERTAIN if digits >= _DIGITS or mixed else _LIKELY
