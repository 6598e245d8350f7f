"""Values: the pieces of a text that a later step may need verbatim, each with what names it.

A value is what has the shape of one (`shape`), a quoted string, or a leaf of a JSON document. Ordinary words
are none.

Each function takes time that grows with the length of the text and no faster, whatever the text is:
nothing here looks further back or forth than a fixed number of characters. It knows no policy, no message and
no tool.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from proxy.textscan.leaves import OPENING, document_in, walk
from proxy.textscan.shape import (
    CJK,
    CJK_CHARACTER,
    INNER_CAPITAL,
    JOINTS,
    LONGEST,
    SHORTEST,
    TELLING,
    TRIVIA,
    Kind,
    kind_of,
    shape_of,
    terms_of,
)

_VALUES: Final = 5000
_DENSEST: Final = 16
"""So many values of a text are told, and one more for each so many of its characters."""
_HEAD: Final = 150_000
_TAIL: Final = 50_000
"""Characters of the beginning and of the end of a longer text that are read."""
_DUST: Final = 100_000
"""Characters of JSON that is read even where it is little but brackets and commas."""
_BREAKS: Final = r"""\s"'`<>()\[\]{},;|*“”‘’，。、；：？！（）《》【】「」…·\\"""
"""Characters, inside of a class, that no piece holds, unless it is quoted."""
_SPACES: Final = _BREAKS.replace("\"'`", "")
"""The same without quotation marks."""
_PIECES: Final = re.compile(
    # Ordinary words are passed over here: most of a text is these, and nothing is to be done about them.
    rf"(?:(?:[A-Za-z]?[a-z]*+|[^\W\d_A-Za-z{CJK}]++)[.:!?]*+[{_SPACES}]++|\"{{2,}}+|'{{2,}}+|`{{2,}}+)*+"
    r'((?<!\w)"[^"\n]{2,200}+"(?!\w)'
    r"|(?<!\w)'[^'\n]{2,200}+'(?!\w)"
    r"|(?<!\w)`[^`\n]{2,200}+`(?!\w)"
    rf"|[{CJK}]++"
    rf"|[^{_BREAKS}{CJK}]++"
    r"|.)?+",
    re.DOTALL,
)
"""What comes next that may be a value: a quoted string, a run of CJK characters, any other run without space.

It matches everywhere and gives nothing back, so that each character is passed once; but a quotation mark that
is not closed costs what stands before the next one.
"""
_RUNS: Final = re.compile(rf"[{CJK}]++|[^{_BREAKS}{CJK}]++")
_BORDERS: Final = (re.compile(r"\s"), re.compile(rf"[{_BREAKS}]"))
"""Where a text may be cut: rather at white space."""
_PLAIN: Final = re.compile(r"[A-Za-z]?[a-z]*+[.:!?]*+")
_QUOTES: Final = frozenset("\"'`")
_PADDING: Final = " \t\\"
"""What may stand between a quotation mark and the quoted string: a backslash, in JSON inside of JSON."""
_JOINING: Final = frozenset(":=")
_EDGES_OF_PATHS: Final = ".:!?=&@$^+"
_EDGES: Final = _EDGES_OF_PATHS + "#~/-"
"""Punctuation that may stand beside a piece and is none of it."""
_RUN_LONGEST: Final = 2 * LONGEST
"""A longer run without space is encoded data, not a name with its value."""
_SEEN: Final = 48
"""Characters of a piece of which it is not remembered what is in it."""
_SEEN_MOST: Final = 16_384
_NESTED: Final = 3
"""How many times JSON inside of JSON is opened."""
_HALF: Final = re.compile("[\ud800-\udfff]")
_HALF_ESCAPED: Final = re.compile(r"\\u[dD][89a-fA-F]")
"""Half of an emoji, which no text that is sent can hold, and the escape that may stand for one in JSON."""

_LABELS: Final = re.compile(r"[^\W\d][\w-]*+")
_NAMES: Final = re.compile(r"[^\W_]|[:=\n]")
_BETWEEN: Final = frozenset({" ", ",", ", ", "\t", "', '", '", "'})
"""What most often stands between two values of a row."""
_LABEL_REACH: Final = 60
"""Characters before a value in which its label is looked for."""
_ROW: Final = 8
"""Characters between two values of one row, at most: they have one label."""


Labels: TypeAlias = Literal["all", "numbers", "none"]
"""Which values are told with the key or word before them: to look for it takes time."""


class Value(NamedTuple):
    """A piece of a text that a later step may need verbatim."""

    text: str
    """The piece, verbatim (of a JSON document: the leaf as it reads, not as it was escaped)."""
    kind: Kind
    label: str
    """What names it: the key that it stands under, or the key or word before it on its line; may be empty."""
    is_leaf: bool = False
    """Whether it is the first value of a leaf of a JSON document, most often the leaf itself."""


# What typeshed has of `tuple.__new__` is of tuples of anything.
_made: Final[Callable[..., Any]] = tuple.__new__  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
_value: Final[Callable[[tuple[str, Kind, str, bool]], Value]] = partial(_made, Value)
"""Make a value of its fields, as `Value(*fields)` does, in half of the time."""


def values_of(text: str, labels: Labels = "all") -> list[Value]:
    """Return the values of any text in the order of its own: the leaves of JSON, or what has a value's shape.

    Of a JSON document each number and each string comes with its key; a string of more than one word is
    followed by what has a shape inside of it, and one that is JSON by its own leaves. Truth values and nulls
    are none. The same value comes as often as it stands there. What holds half an emoji (a lone surrogate) is
    no value.

    So that no text takes long, not all of every text is read. Of a text (or of a string inside of JSON) of
    more than 200,000 characters the first 150,000 and the last 50,000 are; JSON of more than 100,000 that is
    little but brackets and commas is a text like any other; and no more than 5000 values come, with one more
    for each 16 characters.

    Args:
        text: Any text.
        labels: Which values get a label, where the label is not a key of JSON.
    """
    reading = _Reading(text, labels)
    reading.add(text, "", _NESTED)
    return reading.taken()


def values_of_text(text: str, labels: Labels = "all") -> list[Value]:
    """Return what `values_of` does of a text that is no JSON document; nobody looks whether it is."""
    reading = _Reading(text, labels)
    reading.add_text(text, "")
    return reading.taken()


def values_of_document(text: str, labels: Labels = "all") -> list[Value]:
    """Return what `values_of` does of a JSON document; nothing for any other text."""
    document = None if _is_dust(text) else document_in(text)
    if document is None:
        return []
    reading = _Reading(text, labels)
    reading.add_document(document, "", _NESTED)
    return reading.taken()


class _Reading:
    """One reading of one text: what was found so far."""

    def __init__(self, text: str, labels: Labels) -> None:
        """Begin to read `text`; `labels` says which values get one."""
        self._labels = labels
        self._most = _VALUES + len(text) // _DENSEST
        self._may_hold_half = _may_hold_half(text)
        self._values: list[Value] = []

    def taken(self) -> list[Value]:
        """Return what was found."""
        values = list(_without_halves(self._values)) if self._may_hold_half else self._values
        return values[: self._most] if len(values) > self._most else values

    def add(self, text: str, label: str, nested: int) -> None:
        """Add the values of a text that may be JSON, `nested` times inside of JSON."""
        document = document_in(text) if nested and not _is_dust(text) else None
        if document is None:
            self.add_text(text, label)
        else:
            self.add_document(document, label, nested)

    def add_document(self, document: Any, label: str, nested: int) -> None:
        """Add the leaves of a document, and the values inside of the longer ones."""
        values, most = self._values, self._most
        for key, leaf, is_number in walk(document):
            if len(values) >= most:
                return
            named = key or label
            if is_number:
                values.append(_value((leaf, "number", named, True)))
                continue
            stripped = leaf.strip()
            if stripped[:1] in OPENING:
                self._add_nested(stripped, named, nested)
                continue
            kind, holds = _leaf_seen(stripped) if len(stripped) < _SEEN else _in_leaf(stripped)
            if kind is not None:
                values.append(_value((stripped, kind, named, True)))
            if holds:
                self.add_text(leaf, named, is_leaf=kind is None)

    def _add_nested(self, text: str, label: str, nested: int) -> None:
        """Add the values of a leaf that may be a document itself."""
        document = document_in(text) if nested > 1 and not _is_dust(text) else None
        if document is None:
            self.add_text(text, label, is_leaf=True)
        else:
            self.add_document(document, label, nested - 1)

    def add_text(self, text: str, label: str, *, is_leaf: bool = False) -> None:  # noqa: C901  one loop: a call for each piece costs a third of its time
        """Add what has a value's shape in a text, with the key or word before it on its line.

        Args:
            text: The text.
            label: What names a value that nothing on its line does.
            is_leaf: Whether the first value stands for the leaf that the text is.
        """
        most, values = self._most, self._values
        is_named, only_numbers = self._labels != "none", self._labels == "numbers"
        starts: list[int] = []
        stops: list[int] = []
        row = looked = -1
        known = ""
        for match in _pieces(text):
            piece = match[1]
            if piece is None:
                continue
            found, is_quoted, has_number = _in_piece_seen(piece) if len(piece) < _SEEN else _in_piece(piece)
            if not found:
                continue
            start, stop = match.span(1)
            if is_quoted:
                if text[stop : stop + 1] in _JOINING:
                    continue  # a key, of which only a shape counts
            elif text[start - 1 : start] == "<" and piece[0] not in _QUOTES and "://" not in piece:
                continue  # the name of a tag
            if is_leaf:
                first = found[0]
                named = first.label or _label(text, start) or label
                values.append(_value((first.text, first.kind, named, True)))
                found, is_leaf = found[1:], False
            if is_named:
                starts.append(start)
                stops.append(stop)
            if not is_named or (only_numbers and not has_number):
                values += found
            else:
                begins = _row(text, starts, stops, looked, row)
                looked = len(starts) - 1
                if begins != row:
                    row, known = begins, _label(text, begins) or label
                values += [_with_label(value, known) for value in found]
            if len(values) >= most:
                return


def _with_label(value: Value, label: str) -> Value:
    """Return the value, under this label where it has none of its own."""
    return value if value.label else _value((value.text, value.kind, label, False))


def _may_hold_half(text: str) -> bool:
    """Tell whether a text, or the JSON that it is, may hold a lone surrogate."""
    if "\\u" in text and _HALF_ESCAPED.search(text) is not None:
        return True
    return not text.isascii() and _HALF.search(text) is not None


def _without_halves(values: Iterable[Value]) -> Iterator[Value]:
    """Yield the values without a lone surrogate; a label with one names nothing."""
    for value in values:
        if not _HALF.search(value.text):
            yield value._replace(label="") if _HALF.search(value.label) else value


def _is_dust(text: str) -> bool:
    """Tell whether a long text is little but brackets and commas."""
    return len(text) > _DUST and sum(map(text.count, ",:[{")) * 3 > len(text)


def _pieces(text: str) -> Iterable[re.Match[str]]:
    """Return what may be values: of a long text those of its beginning and its end, none of them cut."""
    end = len(text)
    if end <= _HEAD + _TAIL:
        return _PIECES.finditer(text)
    head, tail = _PIECES.finditer(text, 0, _HEAD), _PIECES.finditer(text, end - _TAIL)
    whole = (match for match in head if match.end() < _HEAD)
    return chain(whole, (match for match in tail if match.start(1) > end - _TAIL))


def _row(text: str, starts: Sequence[int], stops: Sequence[int], last: int, row: int) -> int:
    """Return where the row begins in which the newest of some values stands.

    Args:
        text: The text.
        starts: Where each value begins.
        stops: Where each ends.
        last: Place of a value of which the row is known; less than 0 where there is none.
        row: Where that begins.
    """
    place, first = len(starts) - 1, max(last, 0)
    while place > first and not _is_new_row(text, stops[place - 1], starts[place]):
        place -= 1
    return row if place == last else starts[place]


def _is_new_row(text: str, last: int, start: int) -> bool:
    """Tell whether what begins at `start` has another label than the value that ends at `last`."""
    between = text[last:start]
    return between not in _BETWEEN and (start - last > _ROW or _NAMES.search(between) is not None)


def _in_leaf(stripped: str) -> tuple[Kind | None, bool]:
    """Return what a leaf without surrounding space is, and whether there is more inside of it.

    A leaf without a kind is no value.
    """
    kind = kind_of(stripped)
    is_value = bool(stripped) and len(stripped) <= LONGEST and "\n" not in stripped
    told = (kind or "text") if is_value and TELLING.search(stripped) else None
    return told, kind is None and _PLAIN.fullmatch(stripped) is None


_leaf_seen: Final = lru_cache(_SEEN_MOST)(_in_leaf)


def _in_quoted(inner: str) -> tuple[Value, ...]:
    """Return a quoted string, then what has a shape inside of it, where it has none itself."""
    if len(inner) < SHORTEST or inner in TRIVIA:
        return ()
    is_plain = inner.isalnum() and inner.isascii()
    if not is_plain and not TELLING.search(inner):
        return ()
    kind = shape_of(inner) if is_plain else kind_of(inner)
    if kind is not None:
        return (_value((inner, kind, "", False)),)
    quoted = _value((inner, "quoted", "", False))
    if _PLAIN.fullmatch(inner):
        return (quoted,)
    return (quoted, *(each for run in _RUNS.findall(inner) for each in _in_run(run)))


def _in_run(run: str) -> tuple[Value, ...]:
    """Return the values of a run of characters without space; of `name=value` and `file:12` each side."""
    if run.isalpha() and run.isascii():
        if run.islower():
            return ()
        return (_value((run, "id", "", False)),) if INNER_CAPITAL.search(run) and len(run) <= LONGEST else ()
    if CJK_CHARACTER.match(run):
        return tuple([_value((term, "cjk", "", False)) for term in terms_of(run)])
    piece = run.strip(_EDGES if "/" not in run else _EDGES_OF_PATHS)
    kind = shape_of(piece)
    if kind is not None:
        return (_value((piece, kind, "", False)),)
    if len(piece) > _RUN_LONGEST or not JOINTS.search(piece):
        return ()
    found: list[Value] = []
    before = ""
    for part in JOINTS.split(piece):
        bare = part.strip(_EDGES_OF_PATHS)
        kind = shape_of(bare)
        if kind is not None:
            found.append(_value((bare, kind, before, False)))
        before = bare
    return tuple(found)


def _in_piece(piece: str) -> tuple[tuple[Value, ...], bool, bool]:
    """Return the values of a quoted string or of a run.

    Returns:
        The values; whether the first one is a quoted string without a shape; whether there is a number among
        them, without a label.
    """
    values = _in_quoted(piece[1:-1].strip(_PADDING)) if piece[0] in _QUOTES else _in_run(piece)
    if not values:
        return values, False, False
    has_number = any(value.kind == "number" and not value.label for value in values)
    return values, values[0].kind == "quoted", has_number


_in_piece_seen: Final = lru_cache(_SEEN_MOST)(_in_piece)
"""The outputs of one session say the same names again and again."""


def _label(text: str, start: int) -> str:
    """Return the key before a place on its line, else the word before it; empty where there is neither."""
    line = text[max(0, start - _LABEL_REACH) : start].rpartition("\n")[2]
    key = max(line.rfind(":"), line.rfind("="))
    found: list[str] = _LABELS.findall(line, 0, key if key > 0 else len(line))
    return found[-1] if found else ""


def beginning_of(text: str, most: int) -> str:
    """Return the beginning of a text, at most so many characters, in which no value is cut in two.

    It ends with a line or, where the line is long, at white space; where there is none either, before what
    ends a piece.
    """
    if len(text) <= most:
        return text
    near = text[max(0, most - _RUN_LONGEST) : most + 1]
    ends = (
        near.rfind("\n"),
        *(max((found.start() for found in each.finditer(near)), default=-1) for each in _BORDERS),
    )
    border = next((end for end in ends if end >= 0), len(near) - 1)
    return text[: most + 1 - len(near) + border]


def end_of(text: str, most: int) -> str:
    """Return the end of a text, as `beginning_of` does its beginning."""
    if len(text) <= most:
        return text
    start = len(text) - most - 1
    near = text[start : start + 1 + _RUN_LONGEST]
    line = near.find("\n")
    found = (each.search(near) for each in _BORDERS)
    border = line if line >= 0 else next((each.start() for each in found if each), 0)
    return text[start + border + 1 :]
