"""What of a text may be kept, and what that is worth.

Which values later steps use is a property of the kind of thing, not of any tool: ids, codes and names are
used again, descriptions are not; what stands alone under a key is used more than a word of prose; what a
program defines is used more than what it calls. The numbers below say how much more. They were set by hand
on real sessions, and a little more or less of any one changes little.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from math import log
from typing import Final

from proxy.trimming.atoms import Kind, Value, kind_of, values_of
from proxy.trimming.digest.readable import CUT, HEAD, TAIL, ends_of, readable

_WORTH: Final[Mapping[Kind, float]] = {
    "email": 9,
    "path": 7,
    "date": 6,
    "id": 5,
    "url": 4,
    "quoted": 3.5,
    "text": 4,
    "number": 1.5,
    "cjk": 1,
}
"""What a value is worth by its shape, where nothing else is known of it."""
_DEFINED: Final = 11
"""What a name is worth that a program defines."""
_NUMBER_UNDER_KEY: Final = 3.5
_TERM: Final = 6
"""What a CJK term is worth that stands alone, or is short."""
_TERM_LETTERS: Final = 4
_ONE_WORD: Final = 3
"""What a leaf of one ordinary word is worth."""
_TIME_OF_DAY: Final = 1.5
_WHOLE: Final = 1.3
"""By how much more a value is worth that is all that stands under its key."""
_NAMES: Final = 1.5
"""By how much more one under a key that says it names something."""
_TELLS: Final = 0.35
"""By how much less one under a key that says it describes something."""
_AGAIN: Final = 0.4
"""By how much more one that stands there again and again, for each factor e."""

_LONGEST: Final = 120
_LONGEST_WORDS: Final = 60
"""Characters of a string of several words: a longer one is prose."""
_MOST_WORDS: Final = 4
_DENSE: Final = 12
"""Of a long document so many values are read as if each had so many characters."""
_SHORTEST: Final = 2
"""Characters of a value, digits of a number."""

_NAMING: Final = re.compile(
    r"(?:^|[_\b-])(?:ids?|keys?|codes?|number|no|num|names?|title|url|uri|link|path|file|sha|hash|ref|token"
    r"|email|phone|address|ip|port|host|date|dob|day|prices?|amount|total|cost|balance|version|tool|server"
    r"|symbol|user|account|order)$|[a-z](?:Id|Ids|Key|Name|Code|Number|Path|Url)$|name$|_id|errors?$|message$",
    re.IGNORECASE,
)
_TELLING: Final = re.compile(
    r"created|updated|modified|timestamp|description|snippet|icon|logo|image|avatar|class|style|meta|annotation"
    r"|color|width|height|size|font|background|padding|margin",
    re.IGNORECASE,
)
_OF_WORDS: Final = frozenset({"text", "quoted"})
_NUMBERS: Final[frozenset[Kind]] = frozenset({"number"})
"""The kinds that are told with the word before them."""
_IDLE: Final = frozenset(
    {"string", "number", "integer", "object", "boolean", "array", "content", "text", "type"}
    | {"true", "false", "null", "none", "None", "True", "False"}
)
"""Leaves that say what something is, in every tool's output."""
_DEFINES: Final = re.compile(
    r"(?<![\w$])((?:(?:export|default|public|private|static|abstract|async|pub)[ ]){0,3}"
    r"(?:class|interface|function|def|fn|func|struct|enum|trait|impl)[ ]([A-Za-z_$][\w$]{1,80}+))"
)
_DEFINED_LONGEST: Final = 36
"""Characters of the longest words before a name that is defined."""
_MAYBE_DEFINED: Final = re.compile(
    # Spaces are few: each is asked for the last two letters before it, then for the word.
    r"[ ](?<=[cefinopsu][cefmnlst][ ])(?:(?<=class[ ])|(?<=interface[ ])|(?<=function[ ])|(?<=def[ ])"
    r"|(?<=fn[ ])|(?<=func[ ])|(?<=struct[ ])|(?<=enum[ ])|(?<=trait[ ])|(?<=impl[ ]))[A-Za-z_$][\w$]{1,80}+"
)
"""Where `_DEFINES` may have found a name, in a fifth of its time."""
_LINE: Final = re.compile(
    r"""^[ \t{\[(,>-]*+["'`]?([^\W\d][\w-]{0,40}+)[ ]{0,9}["'`]?[ ]{0,9}[:=](?![:=/\\])"""
    r"[ ]{0,9}([^\s{\[(][^\n]{0,80}+)$",
    re.MULTILINE,
)
"""A line that gives a key and its value."""
_INLINE: Final = re.compile(
    r"""["']([^\W\d][\w -]{0,40}+)["']\s{0,4}:\s{0,4}"""
    r"""(?:"([^"\n]{1,60}+)"|'([^'\n]{1,60}+)'|([\w.+-]{1,40}+))(?=\s{0,4}[,}\]\n])"""
)
"""A key and its value inside of braces, where the whole is no JSON document."""
_ENDING: Final = " ,;)}]"
_QUOTES: Final = "\"'`"
_QUOTE: Final = re.compile("[\"'`]")
_PROGRAM: Final = re.compile(r"[=(){}<>;\"'`]|  ")
_WORDS: Final = re.compile(r"[\w-]+")
_DIGIT: Final = re.compile(r"\d")


@dataclass(slots=True)
class Candidate:
    """A value that may be kept."""

    text: str
    """The value, verbatim."""
    label: str
    """The key that it stands under; empty where it stands under none."""
    worth: float
    place: int
    """Its place among the candidates of the text."""
    times: int = 1
    """How often it stands there."""

    @property
    def density(self) -> float:
        """What it is worth for each character that it costs."""
        often = 1 + _AGAIN * log(self.times) if self.times > 1 else 1
        return self.worth * often / (len(self.text) + 2)

    def rank(self) -> tuple[float, int]:
        """Return what sorts the best first; of equally good ones the earlier."""
        return -self.density, self.place


def candidates_of(text: str) -> list[Candidate]:
    """Return what may be kept of a text, each value once, in its order."""
    found: dict[str, Candidate] = {}
    for value, label, worth in _in_document(text) or _in_text(readable(ends_of(text))):
        held = found.get(value)
        if held is None:
            found[value] = Candidate(value, label, worth, len(found))
            continue
        held.times += 1
        held.label = held.label or label
        held.worth = max(held.worth, worth)
    return list(found.values())


_Found = tuple[str, str, float]
"""A value, its label and its worth."""


def _in_document(text: str) -> list[_Found]:
    """Return the values of a JSON document; of anything else none."""
    if text[:1] not in "{[" and text.lstrip()[:1] not in ("{", "["):
        return []
    found: list[_Found] = []
    last: tuple[object, ...] = ()
    for value in _values_of_ends(text):
        if not value.path:
            return []
        # The first value of a way is the leaf itself; what follows stands inside of it.
        whole, last = value.path != last, value.path
        worth = _worth(value.text, value.kind, value.label if whole else None)
        if worth:
            found.append((value.text, value.label if whole or value.kind == "number" else "", worth))
    return found


def _values_of_ends(text: str) -> Iterator[Value]:
    """Return the values of a document; of a long one, like `ends_of`, the first and the last."""
    values = values_of(text)
    if len(text) <= HEAD + TAIL:
        return values
    first = list(islice(values, HEAD // _DENSE))
    return chain(first, deque(values, TAIL // _DENSE))


def _in_text(text: str) -> list[_Found]:
    """Return the values of any other text, then the words that stand alone under a key."""
    found: list[_Found] = []
    keys = _keys(text)
    defined = _defined(text)
    for value, kind, label, _ in values_of(text, _NUMBERS):
        if CUT in value:
            continue
        if value in defined:
            found.append((defined[value], "", _DEFINED))
            continue
        key = keys.get(value)
        worth = _worth(value, kind, key)
        if worth:
            found.append((value, key or (label if kind == "number" else ""), worth))
    for word, key in keys.items():
        if kind_of(word) is None and len(word.split()) <= _MOST_WORDS and not _PROGRAM.search(word):
            worth = _worth(word, "text", key)
            if worth:
                found.append((word, key, worth))
    return found


def _defined(text: str) -> dict[str, str]:
    """Return for each name that is defined the words that say so, the name among them."""
    defined: dict[str, str] = {}
    end = 0
    for maybe in _MAYBE_DEFINED.finditer(text):
        found = _DEFINES.search(text, max(end, maybe.start() - _DEFINED_LONGEST), maybe.end())
        if found is not None:
            defined[found[2]] = found[1]
            end = found.end()
    return defined


def _keys(text: str) -> dict[str, str]:
    """Return for each value that is all that stands under a key, on a line or in braces, that key."""
    keys: dict[str, str] = {}
    for key, rest in _LINE.findall(text):
        value = rest.rstrip(_ENDING).strip(_QUOTES).strip()
        if _SHORTEST <= len(value) <= _LONGEST_WORDS and not _QUOTE.search(value) and CUT not in value:
            keys.setdefault(value, key)
    for key, double, single, bare in _INLINE.findall(text):
        value = (double or single or bare).strip()
        if len(value) >= _SHORTEST and CUT not in value:
            keys.setdefault(value, key)
    return keys


@lru_cache(maxsize=4096)
def _factor(key: str) -> float:
    """Return by how much more a value is worth for what its key says of it."""
    if _TELLING.search(key):
        return _TELLS
    return _NAMES if _NAMING.search(key) else 1


def _worth(text: str, kind: Kind, key: str | None) -> float:
    """Return what a value is worth; 0 where it need not be kept. `key` is what it is all of, if anything."""
    if len(text) > _LONGEST or text in _IDLE:
        return 0
    whole = key is not None
    if kind in _OF_WORDS:
        worth = _worth_of_words(text, kind, whole=whole)
    elif kind == "number":
        digits = len(text) if text.isdecimal() else len(_DIGIT.findall(text))
        worth = 0 if digits < _SHORTEST else _NUMBER_UNDER_KEY if whole else _WORTH[kind]
    elif kind == "cjk":
        worth = _TERM if whole or len(text) <= _TERM_LETTERS else _WORTH[kind]
    else:
        is_time = kind == "date" and ":" in text and "-" not in text
        worth = (_TIME_OF_DAY if is_time else _WORTH[kind]) * (_WHOLE if whole else 1)
    return worth * _factor(key) if key is not None else worth


def _worth_of_words(text: str, kind: Kind, *, whole: bool) -> float:
    """Return what a string of words is worth: one in brackets is a remark, a long one is prose."""
    if len(text) > _LONGEST_WORDS or text[0] == "(":
        return 0
    if _WORDS.fullmatch(text):
        return _ONE_WORD
    return _WORTH["text" if whole else kind]
