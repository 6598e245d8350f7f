"""`compact_tool_output`: tool output said in less, first without losing anything.

The tokens of a shorter form are estimated from those of the original: by bytes, and near the limit by weight.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from itertools import accumulate, chain
from typing import Final, Literal, TypeAlias

from proxy.dialects import Call, Message
from proxy.textscan import (
    Embedded,
    condensed,
    ending,
    ends,
    folded,
    grouped,
    is_markup,
    names_ref,
    omitted,
    pieces,
    preview,
    shown,
    spelled,
    tabulated,
    tabulated_lines,
    tidied,
    values_of,
    weight,
    without_blobs,
    write,
    write_lines,
)
from proxy.trimming.draft import answered_by
from proxy.trimming.edits.edit import Shortened, ToolOutputEdit
from proxy.trimming.model import Entry
from proxy.trimming.settings import Natural, Positive

Method: TypeAlias = Literal["minify", "table", "preview", "log", "noise"]

_MEDIA_BYTES_PER_TOKEN: Final = 3  # of a result with more than text, whose count tells nothing of the text

_HOPELESS: Final = 50  # a table of records has hardly ever less than this part of their size

_NEAR: Final = 1.4  # bytes tell tokens within this factor; nearer to the limit the weight is asked
_SURE: Final = 0.85  # part of the limit to which a strict cut goes: tokens are estimated
_SHORT_TEXT: Final = 80  # characters of a text inside JSON, where more is too much
_SMALLER: Final = 0.8  # each next cut leaves this part of the one before,
_LEAST_ROOM: Final = 8  # down to so many characters
_SHORT_PART: Final = 80  # characters that each part of many may have before others are left out for it
_NAME: Final = re.compile(r"\w+")
_BLANK: Final = re.compile(r"[\[{,:]\s")  # white space that a document has and none that is written here
_REMEMBERED: Final = 20_000  # bytes of the largest result whose shorter form is remembered
_LARGE: Final = 200_000  # bytes of a result of which the weight is not asked: it is far from the limit


class CompactToolOutput(ToolOutputEdit, frozen=True):
    """Tool output over a limit is put in a shorter form that fits its kind.

    First what loses nothing: JSON without white space and escapes, records as a table, lines of `grep -n` and
    `ls -l` under what they share, text without terminal escapes and blanks. Only where that is still over the limit,
    what loses something and says so: lists and long texts of JSON cut, lines of a log counted, the context of diffs
    and library frames of traces folded, HTML as text, bytes written as text left out. A mark names
    the ref under which the whole output can be read. Each text part of a result is put in form by itself;
    parts that are no text stay, and so does what would not get shorter.
    """

    type: Literal["compact_tool_output"] = "compact_tool_output"
    """Which strategy this is."""
    over_tokens: Natural = 200
    """Only results of more tokens, and nothing is lost once a result is within it."""
    keep_items: Positive = 2
    """So many items at each end of a long list, and lines at each end of those of one kind."""
    max_string: Positive = 200
    """Characters of a text inside JSON; of a longer one its beginning is shown."""
    methods: tuple[Method, ...] = ("minify", "table", "preview", "log", "noise")
    """What may be done, what loses less first: their order here does not matter."""

    strict: bool = False
    """Whether a result that is still over the limit is cut until it is within: items of lists to the fields that name
    them and those that the call asks for, then fewer items and less text, at last its longest parts to their beginning
    and their end; of very many parts the first and the last ones stay."""
    spare_files: bool = False
    """At a trim, results of calls that name a file stay as they are: agents edit files by their exact text."""

    @property
    def without_effect(self) -> Mapping[str, str]:
        """An empty list of methods."""
        return {} if self.methods or self.strict else {"methods": "without a method nothing is shortened"}

    def spares(self, message: Message, calls: Mapping[str, Call]) -> bool:
        """Tell whether one of the results is perhaps that of a file, and these stay."""
        return self.spare_files and any(_names_file(answered_by(each, calls)) for each in message.results)

    def shorten(self, message: Message, entry: Entry, asked: str = "") -> Shortened | None:
        """Return the result in a shorter form; None where it is short enough or has none."""
        size = _size(message.text)
        if message != entry.message:
            if names_ref(message.text, entry.ref):
                # Something was left out of it before: the original is taken, so that numbers tell of all of it.
                return self._compacted(entry.message, entry, size, asked)
            again = self._compacted(entry.message, entry, _size(entry.message.text), asked)
            if again is not None and again.message == message:
                return None
        return self._compacted(message, entry, size, asked)

    def _compacted(self, message: Message, entry: Entry, size: int, asked: str) -> Shortened | None:
        """Return `message` in a shorter form; None where that has `size` bytes or more."""
        texts, per_byte = message.texts, _tokens_per_byte(entry)
        given = sum(map(_size, texts))
        if given * per_byte <= self.over_tokens:
            return None
        shorter = _shorter_once if given <= _REMEMBERED else CompactToolOutput.shorter
        made, used = shorter(self, texts, per_byte, entry.ref, asked if self.strict else "")
        after = _size("".join(filter(None, made)))
        if after >= size:
            return None
        reason = f"{', '.join(used)}: {given} bytes become {after}"
        return Shortened(message=message.with_texts(made), reason=reason)

    def shorter(
        self, texts: Sequence[str], per_byte: float, ref: str, asked: str
    ) -> tuple[Sequence[str | None], Sequence[str]]:
        """Return the texts of a result in a shorter form, None for one that goes, and the methods that made it so.

        A byte of them has `per_byte` tokens; `ref` names the result, `asked` are the arguments of its call.
        """
        original = _Original(texts, per_byte)
        forms = [_CompactForm(text, self, original.per_byte) for text in original.texts]
        for step in (_CompactForm.tidy, _CompactForm.clean, _CompactForm.cut):
            if original.is_over(self.over_tokens, forms):
                for form in forms:
                    form.take(step, ref)
        if self.strict:
            self._fit(forms, original, ref, frozenset(_NAME.findall(asked.lower())))
        # A part of which only blanks are left goes: some refuse it.
        made = [
            None if form.is_left_out or (form.text != own and not form.text.strip()) else form.text
            for own, form in zip(original.texts, forms, strict=True)
        ]
        if not "".join(filter(None, made)).strip():
            # Nothing but blanks and noise: an empty result would say nothing of it, and some refuse one.
            made = [ending(ref), *original.texts[1:]]
        return tuple(made), tuple(dict.fromkeys(name for form in forms for name in form.used))

    def _fit(self, forms: Sequence[_CompactForm], original: _Original, ref: str, asked: frozenset[str]) -> None:
        """Cut the forms of a result until all of them together are within the limit."""
        limit = self.over_tokens * _SURE
        for keep, longest in (
            (self.keep_items, self.max_string),
            (self.keep_items, _SHORT_TEXT),
            (1, _SHORT_TEXT // 2),
        ):
            if original.most_tokens(forms) <= limit:
                return
            for form in forms:
                form.take(partial(_CompactForm.reduce, keep=keep, longest=longest, asked=asked), ref)
        texts = [form.unmarked for form in forms]
        room = limit / max(original.most_tokens(forms), 1) * sum(map(len, texts))
        while original.most_tokens(forms) > limit:
            made = _ends_of(texts, room, len(ending(ref)) + 1)
            # What is left out of several parts is told once, where the last of it was.
            last = max([*made, *(at for at, form in enumerate(forms) if form.is_marked)], default=None)
            for at, form in enumerate(forms):
                form.put(made.get(at, form.unmarked), ref if at == last else None, is_cut=at in made)
            if room < _LEAST_ROOM:
                return
            room *= _SMALLER


_shorter_once: Final = lru_cache(maxsize=256)(CompactToolOutput.shorter)
"""Newer results come again at each request that a trim is tried out at."""


def _ends_of(texts: Sequence[str], room: float, spare: int) -> dict[int, str | None]:
    """Return by place what is to stand there so that about `room` characters are left of all; None for nothing.

    The longest are cut. Of more texts than there is room for, those at both ends stay. Each change makes a text
    shorter by more than `spare` characters.
    """
    places = [at for at, text in enumerate(texts) if text]
    inwards = list(chain.from_iterable(zip(places, reversed(places), strict=True)))[: len(places)]
    sizes = accumulate(min(len(texts[at]), _SHORT_PART) for at in inwards)
    count = max(bisect_right(list(sizes), room), 1)
    made: dict[int, str | None] = {}
    longest = _longest([len(texts[at]) for at in inwards[:count]], room)
    for at in inwards[:count]:
        if len(texts[at]) > longest:
            cut = ends(texts[at], longest)
            if len(cut) + spare < len(texts[at]):
                made[at] = cut
    left_out = sorted(inwards[count:])
    mark = omitted(f"{len(left_out)} part{'s' if len(left_out) > 1 else ''}")
    if len(mark) + spare < sum(len(texts[at]) for at in left_out):
        made |= {at: mark if at == left_out[-1] else None for at in left_out}
    return made


def _longest(sizes: Sequence[int], room: float) -> int:
    """Return to which size the largest must be cut so that all of them together have the size `room`."""
    longest = 0.0
    for place, size in enumerate(sorted(sizes)):
        longest = max(room, 0) / (len(sizes) - place)
        if size > longest:
            break
        room -= size
    return int(longest)


def _names_file(call: Call | None) -> bool:
    return call is not None and any(value.kind == "path" for value in values_of(call.arguments, "none"))


class _Original:
    """A result before it is put in a shorter form: by its tokens those of the form are estimated."""

    def __init__(self, texts: Sequence[str], per_byte: float) -> None:
        self.texts = texts
        self.per_byte = per_byte
        self.size = sum(map(_size, texts))
        self.tokens = self.size * per_byte

    @cached_property
    def _weight(self) -> int:
        return max(sum(map(weight, self.texts)), 1)

    def is_over(self, limit: int, forms: Sequence[_CompactForm]) -> bool:
        """Tell whether the forms have more tokens than `limit`."""
        estimate = self._by_size(forms)
        if self.size > _LARGE or not limit <= estimate * _NEAR <= limit * _NEAR**2:
            return estimate > limit
        return self._by_weight(forms) > limit

    def most_tokens(self, forms: Sequence[_CompactForm]) -> float:
        """Return how many tokens the forms may have, by their bytes and by their weight."""
        return max(self._by_size(forms), self._by_weight(forms))

    def _by_size(self, forms: Sequence[_CompactForm]) -> float:
        return self.tokens * sum(form.size for form in forms) / max(self.size, 1)

    def _by_weight(self, forms: Sequence[_CompactForm]) -> float:
        return self.tokens * sum(form.weight for form in forms) / self._weight


class _CompactForm:
    """One text on its way to a shorter form."""

    _weight: int | None  # of the text as it is now; None until somebody asks

    def __init__(self, text: str, edit: CompactToolOutput, per_byte: float) -> None:
        """Begin with `text`, of `per_byte` tokens a byte; what may be done with it is what `edit` says."""
        self._per_byte = per_byte
        self._set(text)
        self.used: list[str] = []  # the methods that made it shorter, in order
        self._edit = edit
        self._is_markup = is_markup(text)
        looks = not self._is_markup and not {"minify", "table", "preview"}.isdisjoint(edit.methods)
        self._pieces: list[str | Embedded] = pieces(text) if looks else [text]
        self._shown = [piece if isinstance(piece, str) else piece.source for piece in self._pieces]
        """Each of the pieces as it stands now."""

        self.is_marked = False  # whether a line at the end must say that something was left out
        self.is_left_out = False  # whether nothing of it stays, not even its part of the content

    @property
    def unmarked(self) -> str:
        """The text as its steps left it, without the line at the end."""
        return "".join(self._shown)

    @property
    def weight(self) -> int:
        """The weight of the text; it is taken once."""
        if self._weight is None:
            self._weight = weight(self.text)
        return self._weight

    def take(self, step: Callable[[_CompactForm, str], None], ref: str) -> None:
        """Take a step, unless the text would not get shorter by it."""
        shown, used, is_marked = list(self._shown), list(self.used), self.is_marked
        step(self, ref)
        text = self.unmarked
        if self.is_marked:
            text = f"{text.rstrip()}\n{ending(ref)}"
        if _size(text) < self.size:
            self._set(text)
        else:
            self._shown, self.used, self.is_marked = shown, used, is_marked

    def tidy(self, _: str) -> None:
        """Do what loses nothing."""
        for place, piece in enumerate(self._pieces):
            if isinstance(piece, Embedded):
                self._tidy_document(place, piece)
                continue
            if "noise" in self._edit.methods:
                self._offer(place, "noise", tidied(piece))
            if len(self._pieces) == 1 and "table" in self._edit.methods:
                self._offer(place, "table", grouped(self._shown[place]))

    def clean(self, _: str) -> None:
        """Leave out what no model reads, outside of documents."""
        if "noise" not in self._edit.methods:
            return
        for place, piece in enumerate(self._pieces):
            if isinstance(piece, str) or isinstance(piece.value, str):
                text = shown(self._shown[place]) if self._is_markup else self._shown[place]
                self.is_marked |= self._offer(place, "noise", without_blobs(text))

    def cut(self, ref: str) -> None:
        """Cut documents and count lines."""
        for place, piece in enumerate(self._pieces):
            if isinstance(piece, str) or isinstance(piece.value, str):
                if "log" in self._edit.methods:
                    text = condensed(folded(self._shown[place]), self._edit.keep_items)
                    self.is_marked |= self._offer(place, "log", text)
            else:
                self._cut_document(place, piece, ref, self._edit.keep_items, self._edit.max_string)

    def reduce(self, ref: str, *, keep: int, longest: int, asked: frozenset[str]) -> None:
        """Cut documents to what says which items there are."""
        for place, piece in enumerate(self._pieces):
            if not (isinstance(piece, str) or isinstance(piece.value, str)):
                self._cut_document(place, piece, ref, keep, longest, asked)

    def _cut_document(
        self, place: int, piece: Embedded, ref: str, keep: int, longest: int, asked: frozenset[str] | None = None
    ) -> None:
        if "preview" not in self._edit.methods:
            return
        alone = len(self._pieces) == 1
        made = preview(piece.value, keep, longest, ref if alone else None, asked=asked)
        if made is not None:
            table = tabulated(made) if "table" in self._edit.methods else None
            self.is_marked |= self._offer(place, "preview", write(made if table is None else table)) and not alone

    def put(self, text: str | None, ref: str | None, *, is_cut: bool) -> None:
        """Put `text` in its place, and a line at the end where a ref is given; None leaves it out."""
        if is_cut:
            self._use("preview")
        self.is_left_out = text is None
        self._set(text or "" if ref is None else f"{(text or '').rstrip()}\n{ending(ref)}")

    def _set(self, text: str) -> None:
        self.text = text
        self.size = _size(text)
        self._weight = None

    def _tidy_document(self, place: int, piece: Embedded) -> None:
        if isinstance(piece.value, str):
            if "minify" in self._edit.methods:
                self._offer(place, "minify", spelled(piece.value))
            return
        if "table" in self._edit.methods and not self._is_hopeless(piece):
            table = tabulated_lines(piece.value) if piece.is_lines else tabulated(piece.value, piece.source)
            if table is not None:
                if "minify" in self._edit.methods and _BLANK.search(piece.source):
                    self._use("minify")
                self._offer(place, "table", write(table, spelled))
                return
        if "minify" in self._edit.methods:
            minified = write_lines(piece.value) if piece.is_lines else write(piece.value, spelled)
            self._offer(place, "minify", minified)

    def _is_hopeless(self, piece: Embedded) -> bool:
        """Tell whether a document is so far over the limit that it will be cut in any case."""
        return "preview" in self._edit.methods and (
            len(piece.source) * self._per_byte > _HOPELESS * self._edit.over_tokens
        )

    def _offer(self, place: int, method: Method, text: str) -> bool:
        """Put `text` in the place of a piece where it is shorter; tell whether it is."""
        if len(text) >= len(self._shown[place]):
            return False
        self._shown[place] = text
        self._use(method)
        return True

    def _use(self, method: Method) -> None:
        if method not in self.used:
            self.used.append(method)


def _tokens_per_byte(entry: Entry) -> float:
    """Return about how many tokens a byte of the result has: never more than one."""
    size = _size(entry.message.text)
    if not size:
        return 0.0
    if entry.message.attachments:
        return 1 / _MEDIA_BYTES_PER_TOKEN
    return min(entry.tokens / size, 1.0)


def _size(text: str) -> int:
    """Return the bytes of a text in UTF-8; a request with half a surrogate pair comes not as far as here."""
    return len(text) if text.isascii() else len(text.encode())
