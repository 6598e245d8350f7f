"""Atoms: the small pieces of a text that a later step needs verbatim, and where they occur.

An atom is what cannot be said in other words: an id, a path, an address, a date, a number, a quoted
string, a leaf of a JSON document, a term in Chinese, Japanese or Korean. Ordinary words are none.
Atoms of a tool call's arguments tell what the model needed; values of a tool's output are what it may
need. Whether a text still holds an atom is judged at word boundaries, so that 136 is not found in 1360.

Each function takes time that grows with the length of the text and no faster, whatever the text is:
nothing here looks further back or forth than a fixed number of characters. It knows no policy, no message and
no tool, and no language's grammar beyond a few words that mean nothing alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain, islice
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from proxy.wire.shapes import is_array, is_object

Kind: TypeAlias = Literal["url", "email", "path", "date", "number", "id", "quoted", "cjk", "text"]
"""How a value looks. `id` is an identifier of any sort (HAT136, user_id, buildDir, v1.2.3, a hash),
`date` a date or a time of day, `path` also a file name, `quoted` a string between quotation marks,
`cjk` a term in CJK characters, `text` the words of a JSON leaf that have no other shape."""

Key: TypeAlias = "str | int"
"""One step of the way to a JSON leaf: a name or a position."""

SHORTEST: Final = 2
"""Characters of the shortest atom."""
LONGEST: Final = 200
"""Characters of the longest one: what is longer is prose or a document, and its own atoms count."""
MOST: Final = 400
"""Atoms of one call at most: of a whole file that is written, the first ones stand for the others."""
NEAR: Final = 120
"""Characters around an occurrence in which words still name it."""
_VALUES: Final = 5000
_DENSEST: Final = 16
"""So many values of a text are told, and one more for each so many of its characters."""
_HEAD: Final = 150_000
_TAIL: Final = 50_000
"""Characters of the beginning and of the end of a longer text that are read."""
_DUST: Final = 100_000
"""Characters of JSON that is read even where it is little but brackets and commas."""
SMALLEST_NUMBER: Final = 10
"""Numbers below are everywhere: finding one again says nothing."""

_CJK: Final = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_CJK_CHARACTER: Final = re.compile(f"[{_CJK}]")
_CJK_TERM: Final = re.compile(f"[{_CJK}]+")
_CJK_EMPTY: Final = re.compile(
    "[的了是在和与及或对把被为从到将等这那有个也就都而且其于以之请您我你他她它们吗呢吧]"
)
"""Characters that join terms and belong to none: a run is divided at them, for want of a dictionary."""
_CJK_LONGEST: Final = 12
"""A longer run is a sentence without punctuation, not a term."""

_TRIVIA: Final = frozenset(
    "true false null none nil undefined yes no on off ok n/a na nan auto default all any "  # noqa: SIM905 - readable
    "True False None NULL TRUE FALSE N/A NaN OK e.g i.e etc a.m p.m vs utf-8 UTF-8".split()
)
"""What has the shape of an atom and means nothing alone."""
_EMPTY_WORDS: Final = frozenset(
    "the and for with from that this are was were has have had not but you your our "  # noqa: SIM905 - readable
    "their its his her all any can will would should could may might been being into onto than then there "
    "these those which while when what where who whom how why also just only very more most some such each "
    "other about after before over under between through please true false null none here out off per via "
    "use used using of to in is it on by as at an or be we if no do so my up he me us am go".split()
)
"""Words that name nothing: they label no value."""

_BREAKS: Final = r"""\s"'`<>()\[\]{},;|*“”‘’，。、；：？！（）《》【】「」…·\\"""
"""Characters, inside of a class, that no piece holds, unless it is quoted."""
_SPACES: Final = _BREAKS.replace("\"'`", "")
"""The same without quotation marks."""
_PIECES: Final = re.compile(
    # Ordinary words are passed over here: most of a text is these, and nothing is to be done about them.
    rf"(?:(?:[A-Za-z]?[a-z]*+|[^\W\d_A-Za-z{_CJK}]++)[.:!?]*+[{_SPACES}]++|\"{{2,}}+|'{{2,}}+|`{{2,}}+)*+"
    r'((?<!\w)"[^"\n]{2,200}+"(?!\w)'
    r"|(?<!\w)'[^'\n]{2,200}+'(?!\w)"
    r"|(?<!\w)`[^`\n]{2,200}+`(?!\w)"
    rf"|[{_CJK}]++"
    rf"|[^{_BREAKS}{_CJK}]++"
    r"|.)?+",
    re.DOTALL,
)
"""What comes next that may be a value: a quoted string, a run of CJK characters, any other run without space.

It matches everywhere and gives nothing back, so that each character is passed once; but a quotation mark that
is not closed costs what stands before the next one.
"""
_RUNS: Final = re.compile(rf"[{_CJK}]++|[^{_BREAKS}{_CJK}]++")
_BORDERS: Final = (re.compile(r"\s"), re.compile(rf"[{_BREAKS}]"))
"""Where a text may be cut: rather at white space."""
_PLAIN: Final = re.compile(r"[A-Za-z]?[a-z]*+[.:!?]*+")
_QUOTES: Final = frozenset("\"'`")
_PADDING: Final = " \t\\"
"""What may stand between a quotation mark and the quoted string: a backslash, in JSON inside of JSON."""
_JOINTS: Final = re.compile(r"[=:&]+")
_JOINING: Final = frozenset(":=")
_EDGES_OF_PATHS: Final = ".:!?=&@$^+"
_EDGES: Final = _EDGES_OF_PATHS + "#~/-"
"""Punctuation that may stand beside a piece and is none of it."""
_RUN_LONGEST: Final = 2 * LONGEST
"""A longer run without space is encoded data, not a name with its value."""
_SEEN: Final = 48
"""Characters of a piece of which it is not remembered what is in it."""
_SEEN_MOST: Final = 4096
_OPENING: Final = frozenset("{[")
_NESTED: Final = 3
"""How many times JSON inside of JSON is opened."""
_STEPS: Final = 32
"""Steps of a way that are kept."""

_HALF: Final = re.compile("[\ud800-\udfff]")
_HALF_ESCAPED: Final = re.compile(r"\\u[dD][89a-fA-F]")
"""Half of an emoji, which no text that is sent can hold, and the escape that may stand for one in JSON."""

_DIGIT: Final = re.compile(r"\d")
_LETTER: Final = re.compile(r"[^\W\d_]")
_SPACE: Final = re.compile(r"\s")
_TELLING: Final = re.compile(r"[^\W_]")
_INNER_CAPITAL: Final = re.compile(r"[a-z][A-Z]")
_NUMBER: Final = re.compile(r"[-+$€£¥]?\d[\d,]*+(?:\.\d+)?(?:%|[a-zA-Z]{1,3})?")
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
_STEPPED: Final = frozenset({"path", "url"})
_STEP: Final = re.compile(r"[^/?&=#:]+")
"""A step of a path or a URL."""
_DOTTED: Final = re.compile(r"\w{2,}(?:\.\w{2,})+")
_WORDS_AND_SLASH: Final = re.compile(r"[A-Za-z]+/[A-Za-z]+")
_GROUPED: Final = 6
"""Characters of the shortest number in groups (555-0199) that identifies something."""

CHUNKS: Final = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")
"""The chunks that atoms are made of, with what is no letter, digit or underscore between: wherever an atom
stands at word boundaries, its chunks are chunks of the text (but for the letter of an escape before it)."""
_WORD: Final = re.compile(rf"[{_CJK}]{{2,}}|[^\W\d_{_CJK}][^\W\d{_CJK}]+")
_KEY: Final = re.compile(r"""([^\W\d][\w-]{1,60}+)\\?["'`]?\s{0,2}[:=](?!//)""")
_LABELS: Final = re.compile(r"[^\W\d][\w-]*+")
_NAMES: Final = re.compile(r"[^\W_]|[:=\n]")
_BETWEEN: Final = frozenset({" ", ",", ", ", "\t", "', '", '", "'})
"""What most often stands between two values of a row."""
_LABEL_REACH: Final = 60
"""Characters before a value in which its label is looked for."""
_ROW: Final = 8
"""Characters between two values of one row, at most: they have one label."""
_WORD_ESCAPES: Final = frozenset("nrt")
"""Letters that, after a backslash, stand for the end of a line or a tab in text that was written as JSON."""


class Value(NamedTuple):
    """A piece of a text that a later step may need verbatim."""

    text: str
    """The piece, verbatim (of a JSON document: the leaf as it reads, not as it was escaped)."""
    kind: Kind
    label: str
    """What names it: the last key of its way, or the key or word before it on its line; may be empty."""
    path: tuple[Key, ...] = ()
    """The way to the leaf that it is or that it stands in; empty where the text is no JSON."""


# What typeshed has of `tuple.__new__` is of tuples of anything.
_made: Final[Callable[..., Any]] = tuple.__new__  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
_value: Final[Callable[[tuple[str, Kind, str, tuple[Key, ...]]], Value]] = partial(_made, Value)
"""Make a value of its fields, as `Value(*fields)` does, in half of the time."""


class Leaf(NamedTuple):
    """A string or a number of a JSON document."""

    path: tuple[Key, ...]
    """The way to it."""
    key: str
    """The last name on the way; empty where there is none."""
    text: str
    """The string as it reads, or the number as it is written."""
    is_number: bool


_leaf: Final[Callable[[tuple[tuple[Key, ...], str, str, bool]], Leaf]] = partial(_made, Leaf)


def atoms_of_arguments(arguments: str) -> tuple[str, ...]:
    """Return the atoms of a call's arguments, JSON or free text, each once, in order of appearance.

    They are leaves of one line (2 to 200 characters), what has the shape of a path, an address, an
    identifier, a date or a number of at least 10 inside of longer ones, quoted strings, CJK terms. The
    steps of a path or a URL that have a shape are atoms too: a listing shows the name of a file alone.
    """
    found: dict[str, None] = {}
    for piece in filter(_is_atom, _with_steps(values_of(arguments))):
        found[piece] = None
        if len(found) == MOST:
            break
    return tuple(found)


def _with_steps(values: Iterable[Value]) -> Iterator[str]:
    """Yield each value, and after a path or a URL those of its steps that have a shape."""
    for value in values:
        yield value.text
        if value.kind in _STEPPED:
            yield from filter(_shape, _STEP.findall(value.text))


def find(atom: str, text: str) -> Iterator[int]:
    """Yield where `atom` begins in `text`, at word boundaries; an empty atom is nowhere."""
    start = text.find(atom) if atom else -1
    while start >= 0:
        if stands_alone(text, start, start + len(atom)):
            yield start
        start = text.find(atom, start + 1)


def occurs(atom: str, text: str) -> bool:
    """Tell whether `text` holds `atom` at word boundaries."""
    return next(find(atom, text), None) is not None


def stands_alone(text: str, start: int, stop: int) -> bool:
    r"""Tell whether text[start:stop], which must not be empty, begins and ends at word boundaries.

    Its neighbours are no letters, digits or underscores; between CJK characters, and between one and
    anything else, there is always a boundary. A digit does not end at a decimal point with a digit behind
    it. A letter that belongs to an escape (`\n`, in text that is JSON inside of JSON) is no neighbour.
    """
    if start:
        before, first = text[start - 1], text[start]
        second = text[start - 2] if start > 1 else ""
        if before == "." and first.isdigit() and second.isdigit():
            return False
        if (
            (before.isalnum() or before == "_")
            and not (before in _WORD_ESCAPES and second == "\\")
            and not _CJK_CHARACTER.match(before)
            and not _CJK_CHARACTER.match(first)
        ):
            return False
    if stop < len(text):
        last, after = text[stop - 1], text[stop]
        if after == "." and last.isdigit() and text[stop + 1 : stop + 2].isdigit():
            return False
        if (
            (after.isalnum() or after == "_")
            and not _CJK_CHARACTER.match(after)
            and not _CJK_CHARACTER.match(last)
        ):
            return False
    return True


def labels_of(text: str, start: int, stop: int) -> frozenset[str]:
    """Return the words that name what stands at text[start:stop], in small letters.

    They are the keys (words before a colon or an equals sign) within 120 characters of it; where there are
    none, the words of its line within that distance. Of CJK text they are its terms.
    """
    before, after = text[max(0, start - NEAR) : start], text[stop : stop + NEAR]
    keys = words_of(" ".join([*_KEY.findall(before), *_KEY.findall(after)]))
    if keys:
        return keys
    return words_of(before.rpartition("\n")[2]) | words_of(after.partition("\n")[0])


def words_near(text: str, start: int, stop: int) -> frozenset[str]:
    """Return all words within 120 characters of text[start:stop] that may name something, small letters."""
    return words_of(text[max(0, start - NEAR) : start]) | words_of(text[stop : stop + NEAR])


def words_of(text: str) -> frozenset[str]:
    """Return the words of a short text that may name something, in small letters, CJK terms among them."""
    words: set[str] = set()
    for word in _WORD.findall(text):
        if _CJK_CHARACTER.match(word):
            words.update(_terms(word))
        else:
            words.add(word.lower())
    return frozenset(words - _EMPTY_WORDS)


def values_of(text: str, naming: Container[Kind] | None = None) -> Iterator[Value]:
    """Yield the values of any text in the order of its own: the leaves of JSON, or what has a value's shape.

    Of a JSON document each number and each string comes with its way; a string of more than one word is
    followed by what has a shape inside of it, and one that is JSON by its own leaves. Truth values and nulls
    are none. The same value comes as often as it stands there. What holds half an emoji (a lone surrogate) is
    no value.

    So that no text takes long, not all of every text is read. Of a text (or of a string inside of JSON) of
    more than 200,000 characters the first 150,000 and the last 50,000 are; JSON of more than 100,000 that is
    little but brackets and commas is a text like any other; and no more than 5000 values come, with one more
    for each 16 characters.

    Args:
        text: Any text.
        naming: The kinds of which the labels are wanted, where the text is no JSON: those of others may be
            empty, and it takes less time. None: all.
    """
    values = _values_of(text, "", (), _NESTED, naming)
    if _may_hold_half(text):
        values = _without_halves(values)
    return islice(values, _VALUES + len(text) // _DENSEST)


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


def _values_of(
    text: str, label: str, path: tuple[Key, ...], nested: int, naming: Container[Kind] | None
) -> Iterator[Value]:
    """Return the values of a text that may be JSON, `nested` times inside of JSON."""
    document = _document(text) if nested and not _is_dust(text) else None
    if document is None:
        return _values_of_text(text, label, path, naming)
    return _values_of_document(document, label, path, nested, naming)


def _values_of_document(
    document: Any, label: str, path: tuple[Key, ...], nested: int, naming: Container[Kind] | None
) -> Iterator[Value]:
    """Yield the leaves of a document, and the values inside of the longer ones."""
    for way, key, leaf, is_number in _walk(document):
        named, where = key or label, path + way
        if is_number:
            yield _value((leaf, "number", named, where))
            continue
        stripped = leaf.strip()
        if stripped[:1] in _OPENING:
            yield from _values_of(stripped, named, where, nested - 1, naming)
            continue
        kind = kind_of(stripped)
        if stripped and len(stripped) <= LONGEST and "\n" not in stripped and _TELLING.search(stripped):
            yield _value((stripped, kind or "text", named, where))
        if kind is None and not _PLAIN.fullmatch(stripped):
            yield from _values_of_text(leaf, named, where, naming)


def kind_of(piece: str) -> Kind | None:
    """Return what a piece of text without surrounding space has the shape of; None for ordinary words."""
    if not SHORTEST <= len(piece) <= LONGEST:
        return None
    if _SPACE.search(piece):
        return "date" if _DATE.fullmatch(piece) else None
    if not piece.isascii() and _CJK_CHARACTER.search(piece):
        term = len(piece) <= _CJK_LONGEST and _CJK_TERM.fullmatch(piece) and not _CJK_EMPTY.search(piece)
        return "cjk" if term else None
    return _shape(piece)


class _Number(str):
    """A number of a JSON document, as it is written there."""

    __slots__ = ()


def leaves_of(text: str) -> Iterator[Leaf] | None:
    """Return strings and numbers of a JSON object or array in its order; None where the text is none."""
    document = _document(text)
    return None if document is None else _walk(document)


def _document(text: str) -> Any:
    """Return the JSON object or array that the text is, its numbers verbatim; None where it is none."""
    if text.lstrip()[:1] not in _OPENING:
        return None
    try:
        return json.loads(text, parse_int=_Number, parse_float=_Number, parse_constant=_nothing)
    except (ValueError, RecursionError):
        return None


def _nothing(_: str) -> None:
    """Stand for NaN and the infinities, which are no numbers to look for."""


def _walk(document: Any) -> Iterator[Leaf]:
    """Yield the leaves of a document; of a very long way the first steps and the last."""
    stack: list[tuple[tuple[Key, ...], str, Iterator[tuple[Key, Any]]]] = [((), "", _items(document))]
    while stack:
        path, name, items = stack[-1]
        for key, item in items:
            if isinstance(item, str):
                named = key if isinstance(key, str) else name
                yield _leaf(((*path, key), named, item, type(item) is _Number))
            elif is_object(item) or is_array(item):
                stack.append(((*path, key)[:_STEPS], key if isinstance(key, str) else name, _items(item)))
                break
        else:
            stack.pop()


def _items(container: Any) -> Iterator[tuple[Key, Any]]:
    """Return what an object or an array holds, by key or position."""
    if is_object(container):
        return iter(container.items())
    items: list[Any] = container
    return enumerate(items)


def _is_dust(text: str) -> bool:
    """Tell whether a long text is little but brackets and commas."""
    return len(text) > _DUST and sum(map(text.count, ",:[{")) * 3 > len(text)


def _values_of_text(
    text: str, label: str, path: tuple[Key, ...], naming: Container[Kind] | None
) -> Iterator[Value]:
    """Yield what has a value's shape in a text, with the key or word before it on its line."""
    row = last = looked = -1
    known = label
    for match in _pieces(text):
        piece = match[1]
        if piece is None:
            continue
        found = _in_piece_seen(piece) if len(piece) < _SEEN else _in_piece(piece)
        if not found:
            continue
        start, stop = match.span(1)
        if found[0][1] == "quoted":
            if text[stop : stop + 1] in _JOINING:
                continue  # a key, of which only a shape counts
        elif start and text[start - 1] == "<" and piece[0] not in _QUOTES and "://" not in piece:
            continue  # the name of a tag
        if last < 0 or _is_new_row(text, last, start):
            row = start
        last = stop
        for value, kind, own in found:
            if not own and row != looked and (naming is None or kind in naming):
                known, looked = _label(text, row) or label, row
            yield _value((value, kind, own or (known if looked == row else ""), path))


def _pieces(text: str) -> Iterable[re.Match[str]]:
    """Return what may be values: of a long text those of its beginning and its end, none of them cut."""
    end = len(text)
    if end <= _HEAD + _TAIL:
        return _PIECES.finditer(text)
    head, tail = _PIECES.finditer(text, 0, _HEAD), _PIECES.finditer(text, end - _TAIL)
    whole = (match for match in head if match.end() < _HEAD)
    return chain(whole, (match for match in tail if match.start(1) > end - _TAIL))


def _is_new_row(text: str, last: int, start: int) -> bool:
    """Tell whether what begins at `start` has another label than the value that ends at `last`."""
    between = text[last:start]
    return between not in _BETWEEN and (start - last > _ROW or _NAMES.search(between) is not None)


_Found: TypeAlias = "tuple[str, Kind, str]"
"""A value, its kind, and its label where the piece itself holds one."""


def _in_quoted(inner: str) -> Sequence[_Found]:
    """Return a quoted string, then what has a shape inside of it, where it has none itself."""
    if len(inner) < SHORTEST or inner in _TRIVIA:
        return ()
    is_plain = inner.isalnum() and inner.isascii()
    if not is_plain and not _TELLING.search(inner):
        return ()
    kind = _shape(inner) if is_plain else kind_of(inner)
    if kind is not None:
        return ((inner, kind, ""),)
    quoted: _Found = (inner, "quoted", "")
    if _PLAIN.fullmatch(inner):
        return (quoted,)
    return (quoted, *(each for run in _RUNS.findall(inner) for each in _in_run(run)))


def _in_run(run: str) -> Sequence[_Found]:
    """Return the values of a run of characters without space; of `name=value` and `file:12` each side."""
    if run.isalpha() and run.isascii():
        if run.islower():
            return ()
        return ((run, "id", ""),) if _INNER_CAPITAL.search(run) and len(run) <= LONGEST else ()
    if _CJK_CHARACTER.match(run):
        return [(term, "cjk", "") for term in _terms(run)]
    piece = run.strip(_EDGES if "/" not in run else _EDGES_OF_PATHS)
    kind = _shape(piece)
    if kind is not None:
        return ((piece, kind, ""),)
    if len(piece) > _RUN_LONGEST or not _JOINTS.search(piece):
        return ()
    found: list[_Found] = []
    before = ""
    for part in _JOINTS.split(piece):
        bare = part.strip(_EDGES_OF_PATHS)
        kind = _shape(bare)
        if kind is not None:
            found.append((bare, kind, before))
        before = bare
    return found


def _in_piece(piece: str) -> Sequence[_Found]:
    """Return the values of a quoted string or of a run."""
    if piece[0] in _QUOTES:
        return _in_quoted(piece[1:-1].strip(_PADDING))
    return _in_run(piece)


_in_piece_seen: Final = lru_cache(_SEEN_MOST)(_in_piece)
"""The outputs of one session say the same names again and again."""


def _label(text: str, start: int) -> str:
    """Return the key before a place on its line, else the word before it; empty where there is neither."""
    line = text[max(0, start - _LABEL_REACH) : start].rpartition("\n")[2]
    key = max(line.rfind(":"), line.rfind("="))
    found: list[str] = _LABELS.findall(line, 0, key if key > 0 else len(line))
    return found[-1] if found else ""


def _shape(piece: str) -> Kind | None:
    """Return the shape of a run of characters without space and CJK; None for ordinary words."""
    if not SHORTEST <= len(piece) <= LONGEST or piece in _TRIVIA:
        return None
    if piece.isalnum() and piece.isascii():
        # What most are; with a digit first it may still be a number with its unit.
        if piece.isalpha():
            return "id" if _INNER_CAPITAL.search(piece) else None
        if piece.isdigit():
            return "number"
        return "id" if piece[0].isalpha() else _shape_of_mixed(piece)
    return _shape_of_mixed(piece)


def _shape_of_mixed(piece: str) -> Kind | None:
    """Return the shape of a run that is not long, and not only of ASCII letters or of ASCII digits."""
    if piece.isalpha():
        return "id" if _INNER_CAPITAL.search(piece) else None
    digits = _DIGIT.search(piece) is not None
    if digits and _NUMBER.fullmatch(piece):
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
        return "id" if "_" in piece.strip("_") or _INNER_CAPITAL.search(piece) else None
    # With letters, with a mark before it (#1042), or long enough for a number in groups (555-0199).
    named = piece[0] in "#@" or _LETTER.search(piece) is not None
    return "id" if named or ("-" in piece and len(piece) >= _GROUPED) else None


def _address(piece: str) -> Kind | None:
    """Return the shape of a run with one of the marks that addresses have; None where it is none."""
    if _URL.fullmatch(piece):
        return "url"
    if _EMAIL.fullmatch(piece):
        return "email"
    if "/" in piece and not _JOINTS.search(piece):
        return None if _WORDS_AND_SLASH.fullmatch(piece) or not _TELLING.search(piece) else "path"
    bare = piece.strip("@")
    return "id" if bare.isidentifier() and piece[0] == "@" else None


def _terms(run: str) -> Iterator[str]:
    """Yield the terms of a run of CJK characters: what lies between joining ones."""
    for term in _CJK_EMPTY.split(run):
        if SHORTEST <= len(term) <= _CJK_LONGEST:
            yield term


def _is_atom(piece: str) -> bool:
    """Tell whether a value, or a step of one, is an atom: long enough, short enough, and not everywhere."""
    if not SHORTEST <= len(piece) <= LONGEST or piece in _TRIVIA:
        return False
    return not _NUMBER.fullmatch(piece) or _size(piece) >= SMALLEST_NUMBER


def _size(number: str) -> float:
    """Return the size of what has the shape of a number, its sign and unit aside."""
    digits = "".join(character for character in number if character.isdigit() or character == ".")
    return float(digits or 0)
