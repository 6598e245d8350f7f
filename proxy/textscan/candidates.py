"""What of a text may be kept, and what that is worth.

Which values later steps use is a property of the kind of thing, not of any tool: ids, codes and names are
used again, descriptions are not; what stands alone under a key is used more than a word of prose; what a
program defines is used more than what it calls. The numbers below say how much more. They were set by hand
on real sessions, and a little more or less of any one changes little.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from math import log
from typing import Any, Final, NamedTuple, TypeAlias

from proxy.textscan.readable import CUT, HEAD, TAIL, ends_of, readable
from proxy.textscan.shape import Kind, kind_of
from proxy.textscan.values import Value, values_of, values_of_document, values_of_text

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
_SHORT: Final = 4000
"""Characters of a text of which many are remembered."""
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
_WORTH_ALONE: Final = frozenset({"email", "path", "id", "url"})
"""Kinds of which nothing else is asked where they stand alone."""
_OF_WORDS: Final = frozenset({"text", "quoted"})
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


class Candidate(NamedTuple):
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


# What typeshed has of `tuple.__new__` is of tuples of anything.
_made: Final[Callable[..., Any]] = tuple.__new__  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
_candidate: Final[Callable[[tuple[str, str, float, int, int]], Candidate]] = partial(_made, Candidate)
"""Make a candidate of its fields, as `Candidate(*fields)` does, in half of the time."""


def candidates_of(text: str) -> Sequence[Candidate]:
    """Return what may be kept of a text, each value once, first what is worth most for what it costs.

    Of equally good ones the earlier comes first. What was read last is remembered: a digest that is too dear
    is made again, and so are those of a move that did not pay.
    """
    return _of_short(text) if len(text) <= _SHORT else _of_long(text)


def _read(text: str) -> tuple[Candidate, ...]:
    found = _in_document(text)
    if not found:
        shown = readable(ends_of(text))
        # What is not wrapped was no document before either.
        values = values_of_text(shown, "numbers") if shown is text else values_of(shown, "numbers")
        found = _in_text(shown, values)
    candidates = tuple(found.values())
    costs = [
        -(worth * (1 + _AGAIN * log(times)) if times > 1 else worth) / (len(value) + 2)
        for value, _, worth, _, times in candidates
    ]
    return tuple([candidates[place] for place in sorted(range(len(costs)), key=costs.__getitem__)])


_kind_seen: Final = lru_cache(maxsize=4096)(kind_of)
_of_short: Final = lru_cache(maxsize=256)(_read)
_of_long: Final = lru_cache(maxsize=8)(_read)

_Found: TypeAlias = "dict[str, Candidate]"
"""Candidates by their text."""


def _add(found: _Found, value: str, label: str, worth: float, times: int) -> None:
    """Add a value that stands there so many times."""
    held = found.get(value)
    if held is None:
        found[value] = _candidate((value, label, worth, len(found), times))
    else:
        worth = max(held.worth, worth)
        found[value] = Candidate(
            text=value, label=held.label or label, worth=worth, place=held.place, times=held.times + times
        )


def _in_document(text: str) -> _Found:
    """Return the values of a JSON document; of anything else none."""
    found: _Found = {}
    if text[:1] not in "{[" and text.lstrip()[:1] not in ("{", "["):
        return found
    for (value, kind, label, is_leaf), times in Counter(_values_of_ends(text)).items():
        worth = _worth(value, kind, label if is_leaf else None)
        if worth:
            _add(found, value, label if is_leaf or kind == "number" else "", worth, times)
    return found


def _values_of_ends(text: str) -> Sequence[Value]:
    """Return the values of a document; of a long one, like `ends_of`, the first and the last."""
    values = values_of_document(text, "numbers")
    if len(text) <= HEAD + TAIL:
        return values
    first = HEAD // _DENSE
    return [*values[:first], *values[first:][-(TAIL // _DENSE) :]]


def _in_text(text: str, values: Iterable[Value]) -> _Found:
    """Return the values of any other text, then the words that stand alone under a key."""
    found: _Found = {}
    keys = _keys(text)
    defined = _defined(text)
    is_cut = CUT in text
    for (value, kind, label, _), times in Counter(values).items():
        if is_cut and CUT in value:
            continue
        if value in defined:
            _add(found, defined[value], "", _DEFINED, times)
            continue
        key = keys.get(value)
        worth = _worth(value, kind, key)
        if worth:
            _add(found, value, key or (label if kind == "number" else ""), worth, times)
    for word, key in keys.items():
        if _kind_seen(word) is None and len(word.split()) <= _MOST_WORDS and not _PROGRAM.search(word):
            worth = _worth(word, "text", key)
            if worth:
                _add(found, word, key, worth, 1)
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
    if key is None and kind in _WORTH_ALONE:
        return _WORTH[kind]
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
