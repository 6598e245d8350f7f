"""Finds the values of a text: what a later step may need verbatim, such as ids, paths, dates, numbers and names.

A value is a piece with the shape of one, a quoted string, or a leaf of a JSON document. Ordinary words are not values.
Every function runs in linear time: none looks ahead further than a fixed number of characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Final, Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from proxy.textscan.document import OPENING, JsonValue, is_mostly_brackets, read_json, read_json_ends, walk

Kind: TypeAlias = Literal["url", "email", "path", "date", "number", "id", "quoted", "cjk", "text"]
"""How a value looks. `id` is an identifier of any sort (HAT136, user_id, buildDir, v1.2.3, a hash),
`date` a date or a time of day, `path` also a file name, `quoted` a string between quotation marks,
`cjk` a term in CJK characters, `text` the words of a JSON leaf that have no other shape."""

IDENTIFYING: Final[frozenset[Kind]] = frozenset({"url", "email", "path", "id"})  # kinds of values that name something

SHORTEST: Final = 2  # characters of the shortest value
LONGEST: Final = 200  # characters of the longest one: what is longer is prose or a document, and its own values count
CJK: Final = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"  # CJK characters, inside of a class

CJK_CHARACTER: Final = re.compile(f"[{CJK}]")
_CJK_TERM: Final = re.compile(f"[{CJK}]+")
_CJK_EMPTY: Final = re.compile("[的了是在和与及或对把被为从到将等这那有个也就都而且其于以之请您我你他她它们吗呢吧]")
"""Characters that join terms. Without a dictionary, a run of CJK characters is split at them."""
_CJK_LONGEST: Final = 12  # a longer run is a sentence without punctuation, not a term

TRIVIA: Final = frozenset(
    "true false null none nil undefined yes no on off ok n/a na nan auto default all any "  # noqa: SIM905 - readable
    "True False None NULL TRUE FALSE N/A NaN OK e.g i.e etc a.m p.m vs utf-8 UTF-8".split()
)
"""These look like values and mean nothing by themselves."""

TELLING: Final = re.compile(r"[^\W_]")  # a piece without a letter or a digit says nothing
JOINTS: Final = re.compile(r"[=:&]+")  # separates a name from its value

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
_FILE_NAME: Final = re.compile(r"[\w@+-][\w.@+-]+\.(?:[A-Za-z][A-Za-z0-9]{0,3}|ipynb|sqlite|swift)|[\w@+-]\.[A-Za-z]")
_DOTTED: Final = re.compile(r"\w{2,}(?:\.\w{2,})+")
_WORDS_AND_SLASH: Final = re.compile(r"[A-Za-z]+/[A-Za-z]+")
_GROUPED: Final = 6  # characters of the shortest number in groups (555-0199) that identifies something


def kind_of(piece: str) -> Kind | None:
    """Return the kind of a piece of text without surrounding space; None for ordinary words."""
    if not SHORTEST <= len(piece) <= LONGEST:
        return None
    if _SPACE.search(piece):
        return "date" if _DATE.fullmatch(piece) else None
    if not piece.isascii() and CJK_CHARACTER.search(piece):
        term = len(piece) <= _CJK_LONGEST and _CJK_TERM.fullmatch(piece) and not _CJK_EMPTY.search(piece)
        return "cjk" if term else None
    return shape_of(piece)


def shape_of(piece: str) -> Kind | None:
    """Return the kind of a run of characters without spaces and CJK characters; None for ordinary words."""
    if not SHORTEST <= len(piece) <= LONGEST or piece in TRIVIA:
        return None
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
        return "id" if "_" in piece.rstrip("_") or INNER_CAPITAL.search(piece) else None
    # An id has letters, a mark in front (#1042), or enough characters for a number in groups (555-0199).
    named = piece[0] in "#@" or _LETTER.search(piece) is not None
    return "id" if named or ("-" in piece and len(piece) >= _GROUPED) else None


def _address(piece: str) -> Kind | None:
    """Return the kind of a run that holds a character typical of addresses; None if it is not an address."""
    if _URL.fullmatch(piece):
        return "url"
    if _EMAIL.fullmatch(piece):
        return "email"
    if "/" in piece and not JOINTS.search(piece):
        return None if _WORDS_AND_SLASH.fullmatch(piece) or not TELLING.search(piece) else "path"
    bare = piece.strip("@")
    return "id" if bare.isidentifier() and piece[0] == "@" else None


def terms_of(run: str) -> Iterator[str]:
    """Yield the terms of a run of CJK characters: the parts between joining characters."""
    for term in _CJK_EMPTY.split(run):
        if SHORTEST <= len(term) <= _CJK_LONGEST:
            yield term


_VALUES: Final = 5000
_DENSEST: Final = 16  # a text may give `_VALUES`, and one more for each so many characters
_HEAD: Final = 150_000  # characters read at the beginning of a long text
_TAIL: Final = 50_000  # characters read at its end
_BREAKS: Final = r"""\s"'`<>()\[\]{},;|*“”‘’，。、；：？！（）《》【】「」…·\\"""
"""Characters (for use in a regex class) that separate pieces; only a quoted piece may hold them."""
_SPACES: Final = _BREAKS.replace("\"'`", "")  # the same without quotation marks
_PIECES: Final = re.compile(
    # Skip ordinary words: most of a text consists of them.
    rf"(?:(?:[A-Za-z]?[a-z]*+|[^\W\d_A-Za-z{CJK}]++)[.:!?]*+[{_SPACES}]++|\"{{2,}}+|'{{2,}}+|`{{2,}}+)*+"
    r'((?<!\w)"[^"\n]{2,200}+"(?!\w)'
    r"|(?<!\w)'[^'\n]{2,200}+'(?!\w)"
    r"|(?<!\w)`[^`\n]{2,200}+`(?!\w)"
    rf"|[{CJK}]++"
    rf"|[^{_BREAKS}{CJK}]++"
    r"|.)?+",
    re.DOTALL,
)
"""The next piece that may be a value: a quoted string, a run of CJK characters, or any other run without spaces.

It matches at every position and never backtracks, so each character is read once. The exception is an unclosed
quotation mark: the text up to the next one is read twice.
"""
_RUNS: Final = re.compile(rf"[{CJK}]++|[^{_BREAKS}{CJK}]++")
_BORDERS: Final = (re.compile(r"\s"), re.compile(rf"[{_BREAKS}]"))  # where a text may be cut, the preferred place first
_PLAIN: Final = re.compile(r"[A-Za-z]?[a-z]*+[.:!?]*+")
_QUOTING: Final = "\"'`"
_QUOTES: Final = frozenset(_QUOTING)
_PADDING: Final = " \t\\"  # allowed between a quotation mark and its string (JSON inside of JSON)
_JOINING: Final = frozenset(":=")
_EDGES_OF_PATHS: Final = ".:!?=&@$^+"
_EDGES: Final = _EDGES_OF_PATHS + "#~/-"  # punctuation beside a piece that does not belong to it
_RUN_LONGEST: Final = 2 * LONGEST  # a longer run without spaces is encoded data, not a name with its value
_SEEN: Final = 48  # a piece of this length or more is not cached
_SEEN_MOST: Final = 16_384
_LINES: Final = 3  # line breaks that make a string a text
_NESTED: Final = 3  # levels of JSON inside of JSON that are read
_HALF: Final = re.compile("[\ud800-\udfff]")
_HALF_ESCAPED: Final = re.compile(r"\\u[dD][89a-fA-F]")  # the escape of half an emoji

_LABELS: Final = re.compile(r"[^\W\d][\w-]*+")
_NAMES: Final = re.compile(r"[^\W_]|[:=\n]")
_BETWEEN: Final = frozenset({" ", ",", ", ", "\t", "', '", '", "'})  # common separators of the values of a row
_LABEL_REACH: Final = 60  # a label is looked for in so many characters before its value
_ROW: Final = 8  # at most so many characters separate two values of a row; a row shares one label


Labels: TypeAlias = Literal["all", "numbers", "none"]  # which values get a label: the key or word before them


class Value(Struct, frozen=True, gc=False, kw_only=True):
    """A piece of a text that a later step may need verbatim."""

    text: str  # the piece, verbatim (a JSON leaf: unescaped)
    kind: Kind
    label: str = ""  # the key or word before it; may be empty
    is_leaf: bool = False  # whether it is the first value of a JSON leaf, usually the leaf itself


def values_of(text: str, labels: Labels = "all") -> list[Value]:
    """Return the values of a text in their order: the leaves of a JSON document, or the pieces that look like values.

    Each number and string of a JSON document has its key as label. After a string of several words come the values
    inside of it; after a string that is JSON, its leaves. A value that occurs twice is returned twice. A piece with a
    lone surrogate (half an emoji) is not a value. `labels` says which values outside of JSON get a label.

    Limits: of a text or a JSON string longer than 200,000 characters the first 150,000 and the last 50,000 are read.
    JSON longer than 100,000 characters that is mostly brackets and commas is read as plain text. At most 5000 values
    are returned, plus one for each 16 characters.
    """
    reading = _Reading(text, labels)
    reading.add(text, "", _NESTED)
    return reading.taken()


def identifiers(text: str) -> list[str]:
    """Return the ids, paths and addresses of a text. The same one may be returned several times."""
    return [value.text for value in values_of(text, "none") if value.kind in IDENTIFYING]


def values_of_text(text: str, labels: Labels = "all") -> list[Value]:
    """Return the values of a text that is known not to be a JSON document."""
    reading = _Reading(text, labels)
    reading.add_text(text, "")
    return reading.taken()


def values_of_document(
    text: str, labels: Labels = "all", ends: tuple[int, int] | None = None
) -> tuple[list[Value], list[str]]:
    """Return the values of a JSON document and the texts in it; empty lists for anything else.

    A text is a string of several lines, such as a program's output. Its values are not included.
    `ends` are two numbers of bytes: of a longer document only that much is read at its beginning and its end.
    """
    if is_mostly_brackets(text):
        return [], []
    document = _read(text, ends)
    if document is None:
        return [], []
    texts: list[str] = []
    reading = _Reading(text, labels, texts, ends)
    reading.add_document(document, "", _NESTED)
    return reading.taken(), texts


def is_text(leaf: str) -> bool:
    """Tell whether a string in a JSON document is a text of several lines."""
    return leaf.count("\n") >= _LINES


def _read(text: str, ends: tuple[int, int] | None) -> JsonValue:
    """Return the parsed document, or both `ends` of it; None if the text is not one."""
    return read_json(text) if ends is None else read_json_ends(text, *ends)


class _Reading:
    """One pass over one text, and the values found so far."""

    def __init__(
        self, text: str, labels: Labels, texts: list[str] | None = None, ends: tuple[int, int] | None = None
    ) -> None:
        """Begin to read `text`; `labels` says which values get one.

        The texts of a document are appended to `texts`. Of a long document inside of a string both `ends` are read.
        """
        self._texts = texts
        self._ends = ends
        self._labels = labels
        self._most = _VALUES + len(text) // _DENSEST
        # Whether the text, or the JSON that it is, may hold a lone surrogate.
        self._may_hold_half = ("\\u" in text and _HALF_ESCAPED.search(text) is not None) or (
            not text.isascii() and _HALF.search(text) is not None
        )
        self._values: list[Value] = []

    def taken(self) -> list[Value]:
        """Return what was found."""
        values = list(_without_halves(self._values)) if self._may_hold_half else self._values
        return values[: self._most] if len(values) > self._most else values

    def add(self, text: str, label: str, nested: int, *, is_leaf: bool = False) -> None:
        """Add the values of a text that may be JSON. `nested` is how many more levels of JSON may be opened."""
        document = _read(text, self._ends) if nested and not is_mostly_brackets(text) else None
        if document is None:
            self.add_text(text, label, is_leaf=is_leaf)
        else:
            self.add_document(document, label, nested)

    def add_document(self, document: Any, label: str, nested: int) -> None:
        """Add the leaves of a document, and the values inside of longer leaves."""
        values, most = self._values, self._most
        for leaf in walk(document):
            if len(values) >= most:
                return
            named = leaf.key or label
            if leaf.is_number:
                values.append(Value(text=leaf.text, kind="number", label=named, is_leaf=True))
                continue
            stripped = leaf.text.strip()
            if stripped.startswith(OPENING):
                self.add(stripped, named, nested - 1, is_leaf=True)
                continue
            kind, holds = _leaf_seen(stripped) if len(stripped) < _SEEN else _in_leaf(stripped)
            if kind is not None:
                values.append(Value(text=stripped, kind=kind, label=named, is_leaf=True))
            if holds:
                self.add_text(leaf.text, named, is_leaf=kind is None)

    def add_text(self, text: str, label: str, *, is_leaf: bool = False) -> None:  # noqa: C901  one loop: a call for each piece costs a third of its time
        """Add the values of plain text. Each is labelled with the key or word before it on its line, else with `label`.

        With `is_leaf` the text is a JSON leaf, and its first value is marked as such.
        """
        if self._texts is not None and is_text(text):
            self._texts.append(text)
            return
        most, values = self._most, self._values
        is_named, only_numbers = self._labels != "none", self._labels == "numbers"
        has_tags = "<" in text
        matches: list[re.Match[str]] = []
        row = looked = -1
        known = ""
        for match in _pieces(text):
            piece = match[1]
            if piece is None:
                continue
            found, is_quoted, has_number = _in_piece_seen(piece) if len(piece) < _SEEN else _in_piece(piece)
            if not found:
                continue
            if is_quoted:
                if text[match.end(1) : match.end(1) + 1] in _JOINING:
                    continue  # a key, of which only a shape counts
            elif has_tags and _names_tag(text, match):
                continue
            if is_leaf:
                first = found[0]
                named = first.label or _label(text, match.start(1)) or label
                values.append(Value(text=first.text, kind=first.kind, label=named, is_leaf=True))
                found, is_leaf = found[1:], False
            if is_named:
                matches.append(match)
            if not is_named or (only_numbers and not has_number):
                values += found
            else:
                begins = _row(text, matches, looked, row)
                looked = len(matches) - 1
                if begins != row:
                    row, known = begins, _label(text, begins) or label
                values += [each if each.label else Value(text=each.text, kind=each.kind, label=known) for each in found]
            if len(values) >= most:
                return


def _without_halves(values: Iterable[Value]) -> Iterator[Value]:
    """Yield the values without a lone surrogate; a label with one is dropped."""
    for value in values:
        if not _HALF.search(value.text):
            yield replace(value, label="") if _HALF.search(value.label) else value


def _pieces(text: str) -> Iterable[re.Match[str]]:
    """Return the pieces that may be values. A long text is read at its beginning and its end; no piece is cut."""
    end = len(text)
    if end <= _HEAD + _TAIL:
        return _PIECES.finditer(text)
    head, tail = _PIECES.finditer(text, 0, _HEAD), _PIECES.finditer(text, end - _TAIL)
    whole = (match for match in head if match.end() < _HEAD)
    return chain(whole, (match for match in tail if match.start(1) > end - _TAIL))


def _names_tag(text: str, match: re.Match[str]) -> bool:
    """Tell whether a piece without quotation marks is the name of a tag."""
    start, piece = match.start(1), match[1]
    return text[start - 1 : start] == "<" and piece[0] not in _QUOTES and "://" not in piece


def _row(text: str, matches: Sequence[re.Match[str]], last: int, row: int) -> int:
    """Return the start of the row that holds the newest value.

    `last` is the index of a value whose row begins at `row`; negative if there is none.
    """
    place, first = len(matches) - 1, max(last, 0)
    while place > first and not _is_new_row(text, matches[place - 1].end(1), matches[place].start(1)):
        place -= 1
    return row if place == last else matches[place].start(1)


def _is_new_row(text: str, last: int, start: int) -> bool:
    """Tell whether the value at `start` needs another label than the value that ends at `last`."""
    between = text[last:start]
    return between not in _BETWEEN and (start - last > _ROW or _NAMES.search(between) is not None)


def _in_leaf(stripped: str) -> tuple[Kind | None, bool]:
    """Return the kind of a leaf (None: not a value), and whether it may hold further values."""
    kind = kind_of(stripped)
    is_value = bool(stripped) and len(stripped) <= LONGEST and "\n" not in stripped
    told = (kind or "text") if is_value and TELLING.search(stripped) else None
    return told, kind is None and _PLAIN.fullmatch(stripped) is None


_leaf_seen: Final = lru_cache(_SEEN_MOST)(_in_leaf)


def _in_quoted(inner: str) -> tuple[Value, ...]:
    """Return a quoted string as a value; if it has no kind of its own, the values inside of it too."""
    if len(inner) < SHORTEST or inner in TRIVIA or not TELLING.search(inner):
        return ()
    kind = kind_of(inner)
    if kind is not None:
        return (Value(text=inner, kind=kind),)
    quoted = Value(text=inner, kind="quoted")
    if _PLAIN.fullmatch(inner):
        return (quoted,)
    return (quoted, *(each for run in _RUNS.findall(inner) for each in _in_run(run)))


def _in_run(run: str) -> tuple[Value, ...]:
    """Return the values of a run without spaces; `name=value` and `file:12` give both sides."""
    if run.isalpha() and run.isascii():
        return (Value(text=run, kind="id"),) if INNER_CAPITAL.search(run) and len(run) <= LONGEST else ()
    if CJK_CHARACTER.match(run):
        return tuple([Value(text=term, kind="cjk") for term in terms_of(run)])
    piece = run.strip(_EDGES if "/" not in run else _EDGES_OF_PATHS)
    kind = shape_of(piece)
    if kind is not None:
        return (Value(text=piece, kind=kind),)
    if len(piece) > _RUN_LONGEST or not JOINTS.search(piece):
        return ()
    found: list[Value] = []
    before = ""
    for part in JOINTS.split(piece):
        bare = part.strip(_EDGES_OF_PATHS)
        kind = shape_of(bare)
        if kind is not None:
            found.append(Value(text=bare, kind=kind, label=before))
        before = bare
    return tuple(found)


def _in_piece(piece: str) -> tuple[tuple[Value, ...], bool, bool]:
    """Return the values of a piece, whether it is a quoted string, and whether it holds a number without a label."""
    values = _in_quoted(piece[1:-1].strip(_PADDING)) if piece[0] in _QUOTES else _in_run(piece)
    if not values:
        return values, False, False
    has_number = any(value.kind == "number" and not value.label for value in values)
    return values, values[0].kind == "quoted", has_number


_in_piece_seen: Final = lru_cache(_SEEN_MOST)(_in_piece)
"""The outputs of one session repeat the same names."""


def _label(text: str, start: int) -> str:
    """Return the key before a position on its line, else the word before it; empty if there is neither."""
    line = text[max(0, start - _LABEL_REACH) : start].rpartition("\n")[2]
    key = max(line.rfind(":"), line.rfind("="))
    before = line[:key] if key > 0 else line
    word = before.rpartition(" ")[2].strip(_QUOTING)
    if word.isascii() and word.isidentifier():  # usually
        return word
    found: list[str] = _LABELS.findall(before)
    return found[-1] if found else ""


def beginning_of(text: str, most: int) -> str:
    """Return at most `most` characters of the beginning of a text, without cutting a value in two.

    The cut is at the end of a line if possible, else at white space, else between two pieces.
    """
    if len(text) <= most:
        return text
    near = text[max(0, most - _RUN_LONGEST) : most + 1]
    ends = (near.rfind("\n"), *(max((found.start() for found in each.finditer(near)), default=-1) for each in _BORDERS))
    border = next((end for end in ends if end >= 0), len(near) - 1)
    return text[: most + 1 - len(near) + border]


def end_of(text: str, most: int) -> str:
    """Return at most `most` characters of the end of a text, cut like `beginning_of`."""
    if len(text) <= most:
        return text
    start = len(text) - most - 1
    near = text[start : start + 1 + _RUN_LONGEST]
    line = near.find("\n")
    found = (each.search(near) for each in _BORDERS)
    border = line if line >= 0 else next((each.start() for each in found if each), 0)
    return text[start + border + 1 :]


MOST: Final = 400  # atoms of one call; for a whole file that is written, the first ones suffice
NEAR: Final = 120  # words within so many characters of an occurrence may name it
SMALLEST_NUMBER: Final = 10  # smaller numbers are everywhere: finding one again proves nothing

_EMPTY_WORDS: Final = frozenset(
    "the and for with from that this are was were has have had not but you your our "  # noqa: SIM905 - readable
    "their its his her all any can will would should could may might been being into onto than then there "
    "these those which while when what where who whom how why also just only very more most some such each "
    "other about after before over under between through please true false null none here out off per via "
    "use used using of to in is it on by as at an or be we if no do so my up he me us am go".split()
)
"""Words that cannot be labels."""

_STEPPED: Final = frozenset({"path", "url"})
_STEP: Final = re.compile(r"[^/?&=#:]+")  # a step of a path or a URL
CHUNKS: Final = re.compile(rf"[{CJK}]|[^\W{CJK}]+")
"""The chunks of an atom: runs of letters, digits and underscores, and single CJK characters. Wherever an atom occurs at
word boundaries, its chunks are chunks of the text. (The letter of an escape in front of it is the exception.)"""
_WORD: Final = re.compile(rf"[{CJK}]{{2,}}|[^\W\d_{CJK}][^\W\d{CJK}]+")
_KEY: Final = re.compile(r"""([^\W\d][\w-]{1,60}+)\\?["'`]?\s{0,2}[:=](?!//)""")
_WORD_ESCAPES: Final = frozenset("nrt")  # after a backslash these letters mean white space


def atoms_of_arguments(arguments: str) -> tuple[str, ...]:
    """Return the atoms of a call's arguments (JSON or free text), each once, in order of appearance.

    Atoms are JSON leaves of one line (2 to 200 characters) and the values of texts. The steps of a path or URL count
    too, since a directory listing shows only the name of a file. Numbers below 10 do not count.
    """
    found: dict[str, None] = {}
    for piece in filter(_is_atom, _with_steps(values_of(arguments, "none"))):
        found[piece] = None
        if len(found) == MOST:
            break
    return tuple(found)


def _with_steps(values: Iterable[Value]) -> Iterator[str]:
    """Yield each value; after a path or URL also those of its steps that are values."""
    for value in values:
        yield value.text
        if value.kind in _STEPPED:
            yield from filter(shape_of, _STEP.findall(value.text))


def find(atom: str, text: str) -> Iterator[int]:
    """Yield each position where `atom` occurs in `text` at word boundaries; none for an empty atom."""
    start = text.find(atom) if atom else -1
    while start >= 0:
        if stands_alone(text, start, start + len(atom)):
            yield start
        start = text.find(atom, start + 1)


def occurs(atom: str, text: str) -> bool:
    """Tell whether `atom` occurs in `text` at word boundaries."""
    return next(find(atom, text), None) is not None


def stands_alone(text: str, start: int, stop: int) -> bool:
    """Tell whether text[start:stop], which must not be empty, begins and ends at word boundaries.

    Its neighbours must not be letters, digits or underscores. CJK characters and the letter of an escape are allowed.
    Between a digit and a decimal point that a digit follows there is no boundary.
    """
    if start:
        before, first = text[start - 1], text[start]
        second = text[start - 2] if start > 1 else ""
        if before == "." and first.isdigit() and second.isdigit():
            return False
        if (
            (before.isalnum() or before == "_")
            and not (before in _WORD_ESCAPES and second == "\\")
            and not CJK_CHARACTER.match(before)
            and not CJK_CHARACTER.match(first)
        ):
            return False
    if stop < len(text):
        last, after = text[stop - 1], text[stop]
        if after == "." and last.isdigit() and text[stop + 1 : stop + 2].isdigit():
            return False
        if (after.isalnum() or after == "_") and not CJK_CHARACTER.match(after) and not CJK_CHARACTER.match(last):
            return False
    return True


def labels_of(text: str, start: int, stop: int) -> frozenset[str]:
    """Return the words that name text[start:stop], in lower case.

    They are the keys (words before a colon or an equals sign) within 120 characters. Without keys, they are the words
    of its line within that distance.
    """
    before, after = text[max(0, start - NEAR) : start], text[stop : stop + NEAR]
    keys = naming_words(" ".join([*_KEY.findall(before), *_KEY.findall(after)]))
    if keys:
        return keys
    return naming_words(before.rpartition("\n")[2]) | naming_words(after.partition("\n")[0])


def words_near(text: str, start: int, stop: int) -> frozenset[str]:
    """Return all words within 120 characters of text[start:stop] that may name it, in lower case."""
    return naming_words(text[max(0, start - NEAR) : start]) | naming_words(text[stop : stop + NEAR])


def naming_words(text: str) -> frozenset[str]:
    """Return the words and CJK terms of a short text that may name something, in lower case."""
    words: set[str] = set()
    for word in _WORD.findall(text):
        if CJK_CHARACTER.match(word):
            words.update(terms_of(word))
        else:
            words.add(word.lower())
    return frozenset(words - _EMPTY_WORDS)


def _is_atom(piece: str) -> bool:
    """Tell whether a value or a step of one is an atom: of fitting length, and not found everywhere."""
    if not SHORTEST <= len(piece) <= LONGEST or piece in TRIVIA:
        return False
    if not NUMBER.fullmatch(piece):
        return True
    digits = "".join(character for character in piece if character.isdigit() or character == ".")
    return float(digits or 0) >= SMALLEST_NUMBER
