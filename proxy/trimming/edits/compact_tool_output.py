"""`compact_tool_output`: shortens tool output, first without loss.

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
    as_table,
    condense_log,
    ending_mark,
    fold_lines,
    group_lines,
    head_and_tail,
    is_markup,
    lines_as_table,
    names_ref,
    omission_mark,
    page_text,
    preview,
    split_documents,
    string_literal,
    strip_noise,
    values_of,
    weight,
    without_blobs,
    write_json,
    write_json_lines,
)
from proxy.trimming.draft import answered_by
from proxy.trimming.edits.edit import Shortened, ToolOutputEdit
from proxy.trimming.model import Entry
from proxy.trimming.settings import Natural, Positive

Method: TypeAlias = Literal["minify", "table", "preview", "log", "noise"]

_MEDIA_BYTES_PER_TOKEN: Final = 3  # for results with attachments, whose token count is not that of the text

_HOPELESS: Final = 50  # a table hardly ever shortens records by a greater factor

_NEAR: Final = 1.4  # bytes predict tokens within this factor; closer to the limit the weight decides
_SURE: Final = 0.85  # a strict cut aims at this part of the limit, since tokens are estimated
_SHORT_TEXT: Final = 80  # characters of a text inside JSON, at the second attempt of a strict cut
_SMALLER: Final = 0.8  # each further cut leaves this part of the previous one,
_LEAST_ROOM: Final = 8  # down to so many characters
_SHORT_PART: Final = 80  # each part may have so many characters before other parts are left out
_NAME: Final = re.compile(r"\w+")
_BLANK: Final = re.compile(r"[\[{,:]\s")  # white space that our own JSON never has
_REMEMBERED: Final = 20_000  # shorter forms of results up to so many bytes are cached
_LARGE: Final = 200_000  # the weight of a larger result is not computed: it is far from the limit


class CompactToolOutput(ToolOutputEdit, frozen=True):
    """Shortens tool output above a limit, in a way that fits its kind.

    Lossless methods come first: JSON without whitespace and escapes, records as a table, lines of `grep -n` and `ls -l`
    under shared headings, text without terminal escapes and blanks. If the result is still above the limit, lossy
    methods follow: they cut lists and long texts in JSON, count repeated log lines, fold the context of diffs and the
    library frames of stack traces, turn HTML into text, and leave out encoded bytes. A mark states what was left out
    and names the ref of the full output. Each text part of a result is shortened separately. Parts that are not text
    stay unchanged, and so does text that would not get shorter.
    """

    type: Literal["compact_tool_output"] = "compact_tool_output"
    """Name of the edit."""
    over_tokens: Natural = 200
    """Only results with more tokens are shortened. Lossy methods run only until a result is within this limit."""
    keep_items: Positive = 2
    """Items to keep at each end of a long list, and lines to keep at each end of lines of one kind."""
    max_string: Positive = 200
    """Maximum characters of a text inside JSON. A longer text is cut to its beginning."""
    methods: tuple[Method, ...] = ("minify", "table", "preview", "log", "noise")
    """The allowed methods. The one that loses least is tried first, whatever their order here."""

    strict: bool = False
    """Whether to cut a result that is still above the limit until it is within. First, items of lists are reduced to
    the fields that name them and those that the call asks for. Then fewer items and less text stay. At last, the
    longest parts are cut to their beginning and their end; of very many parts, only the first and the last ones
    stay."""
    spare_files: bool = False
    """Whether results of calls that name a file stay unchanged at a trim, because agents edit files by their exact
    text."""

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
                # It was compacted before: start from the original, so that the counts in marks are right.
                return self._compacted(entry.message, entry, size, asked)
            again = self._compacted(entry.message, entry, _size(entry.message.text), asked)
            if again is not None and again.message == message:
                return None
        return self._compacted(message, entry, size, asked)

    def _compacted(self, message: Message, entry: Entry, size: int, asked: str) -> Shortened | None:
        """Return `message` in a shorter form; None if that is not below `size` bytes."""
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
        """Return the shorter texts of a result (None for a text that is dropped), and the methods used.

        A byte has `per_byte` tokens. `ref` names the result. `asked` are the arguments of its call.
        """
        original = _Original(texts, per_byte)
        forms = [_CompactForm(text, self, original.per_byte) for text in original.texts]
        for step in (_CompactForm.tidy, _CompactForm.clean, _CompactForm.cut):
            if original.is_over(self.over_tokens, forms):
                for form in forms:
                    form.take(step, ref)
        if self.strict:
            self._fit(forms, original, ref, frozenset(_NAME.findall(asked.lower())))
        # Drop parts that became blank: some providers refuse them.
        made = [
            None if form.is_left_out or (form.text != own and not form.text.strip()) else form.text
            for own, form in zip(original.texts, forms, strict=True)
        ]
        if not "".join(filter(None, made)).strip():
            # Only blanks are left. Some providers refuse an empty result, and it would not say that there was output.
            made = [ending_mark(ref), *original.texts[1:]]
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
            made = _ends_of(texts, room, len(ending_mark(ref)) + 1)
            # Omissions of several parts get one mark, at the last of them.
            last = max([*made, *(at for at, form in enumerate(forms) if form.is_marked)], default=None)
            for at, form in enumerate(forms):
                form.put(made.get(at, form.unmarked), ref if at == last else None, is_cut=at in made)
            if room < _LEAST_ROOM:
                return
            room *= _SMALLER


_shorter_once: Final = lru_cache(maxsize=256)(CompactToolOutput.shorter)
"""Cached, because each request that considers a trim shortens the same recent results."""


def _ends_of(texts: Sequence[str], room: float, spare: int) -> dict[int, str | None]:
    """Return by index the new text (None: dropped) of each text that must change so that about `room` characters stay.

    The longest texts are cut. If there are too many texts, those at both ends stay. Each change saves more than `spare`
    characters.
    """
    places = [at for at, text in enumerate(texts) if text]
    inwards = list(chain.from_iterable(zip(places, reversed(places), strict=True)))[: len(places)]
    sizes = accumulate(min(len(texts[at]), _SHORT_PART) for at in inwards)
    count = max(bisect_right(list(sizes), room), 1)
    made: dict[int, str | None] = {}
    longest = _longest([len(texts[at]) for at in inwards[:count]], room)
    for at in inwards[:count]:
        if len(texts[at]) > longest:
            cut = head_and_tail(texts[at], longest)
            if len(cut) + spare < len(texts[at]):
                made[at] = cut
    left_out = sorted(inwards[count:])
    mark = omission_mark(f"{len(left_out)} part{'s' if len(left_out) > 1 else ''}")
    if len(mark) + spare < sum(len(texts[at]) for at in left_out):
        made |= {at: mark if at == left_out[-1] else None for at in left_out}
    return made


def _longest(sizes: Sequence[int], room: float) -> int:
    """Return the size to which the largest must be cut so that the sum of all is `room`."""
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
    """The original of a result, from which the tokens of its shorter form are estimated."""

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
        """Return an upper estimate of the forms' tokens, by bytes and by weight."""
        return max(self._by_size(forms), self._by_weight(forms))

    def _by_size(self, forms: Sequence[_CompactForm]) -> float:
        return self.tokens * sum(form.size for form in forms) / max(self.size, 1)

    def _by_weight(self, forms: Sequence[_CompactForm]) -> float:
        return self.tokens * sum(form.weight for form in forms) / self._weight


class _CompactForm:
    """One text of a result, and the steps that shorten it."""

    _weight: int | None  # of the current text; None until it is needed

    def __init__(self, text: str, edit: CompactToolOutput, per_byte: float) -> None:
        """Begin with `text`, which has `per_byte` tokens a byte. `edit` gives the allowed methods."""
        self._per_byte = per_byte
        self._set(text)
        self.used: list[str] = []  # the methods that shortened it, in order
        self._edit = edit
        self._is_markup = is_markup(text)
        looks = not self._is_markup and not {"minify", "table", "preview"}.isdisjoint(edit.methods)
        self._pieces: list[str | Embedded] = split_documents(text) if looks else [text]
        self._shown = [piece if isinstance(piece, str) else piece.source for piece in self._pieces]
        """The current text of each piece."""

        self.is_marked = False  # whether the last line must say that something was left out
        self.is_left_out = False  # whether the whole part is dropped

    @property
    def unmarked(self) -> str:
        """The text after the steps so far, without the mark at its end."""
        return "".join(self._shown)

    @property
    def weight(self) -> int:
        """The weight of the text, computed once."""
        if self._weight is None:
            self._weight = weight(self.text)
        return self._weight

    def take(self, step: Callable[[_CompactForm, str], None], ref: str) -> None:
        """Take a step, but undo it if the text does not get shorter."""
        shown, used, is_marked = list(self._shown), list(self.used), self.is_marked
        step(self, ref)
        text = self.unmarked
        if self.is_marked:
            text = f"{text.rstrip()}\n{ending_mark(ref)}"
        if _size(text) < self.size:
            self._set(text)
        else:
            self._shown, self.used, self.is_marked = shown, used, is_marked

    def tidy(self, _: str) -> None:
        """Apply the lossless methods."""
        for place, piece in enumerate(self._pieces):
            if isinstance(piece, Embedded):
                self._tidy_document(place, piece)
                continue
            if "noise" in self._edit.methods:
                self._offer(place, "noise", strip_noise(piece))
            if len(self._pieces) == 1 and "table" in self._edit.methods:
                self._offer(place, "table", group_lines(self._shown[place]))

    def clean(self, _: str) -> None:
        """Leave out encoded bytes and markup, outside of documents."""
        if "noise" not in self._edit.methods:
            return
        for place, piece in enumerate(self._pieces):
            if isinstance(piece, str) or isinstance(piece.value, str):
                text = page_text(self._shown[place]) if self._is_markup else self._shown[place]
                self.is_marked |= self._offer(place, "noise", without_blobs(text))

    def cut(self, ref: str) -> None:
        """Cut documents and condense lines."""
        for place, piece in enumerate(self._pieces):
            if isinstance(piece, str) or isinstance(piece.value, str):
                if "log" in self._edit.methods:
                    text = condense_log(fold_lines(self._shown[place]), self._edit.keep_items)
                    self.is_marked |= self._offer(place, "log", text)
            else:
                self._cut_document(place, piece, ref, self._edit.keep_items, self._edit.max_string)

    def reduce(self, ref: str, *, keep: int, longest: int, asked: frozenset[str]) -> None:
        """Cut documents to the fields that identify their items."""
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
            table = as_table(made) if "table" in self._edit.methods else None
            self.is_marked |= self._offer(place, "preview", write_json(made if table is None else table)) and not alone

    def put(self, text: str | None, ref: str | None, *, is_cut: bool) -> None:
        """Replace the text, with a mark at its end if `ref` is given; None drops the part."""
        if is_cut:
            self._use("preview")
        self.is_left_out = text is None
        self._set(text or "" if ref is None else f"{(text or '').rstrip()}\n{ending_mark(ref)}")

    def _set(self, text: str) -> None:
        self.text = text
        self.size = _size(text)
        self._weight = None

    def _tidy_document(self, place: int, piece: Embedded) -> None:
        if isinstance(piece.value, str):
            if "minify" in self._edit.methods:
                self._offer(place, "minify", string_literal(piece.value))
            return
        if "table" in self._edit.methods and not self._is_hopeless(piece):
            table = lines_as_table(piece.value) if piece.is_lines else as_table(piece.value, piece.source)
            if table is not None:
                if "minify" in self._edit.methods and _BLANK.search(piece.source):
                    self._use("minify")
                self._offer(place, "table", write_json(table, string_literal))
                return
        if "minify" in self._edit.methods:
            minified = write_json_lines(piece.value) if piece.is_lines else write_json(piece.value, string_literal)
            self._offer(place, "minify", minified)

    def _is_hopeless(self, piece: Embedded) -> bool:
        """Tell whether a document is so far over the limit that a lossy cut is certain."""
        return "preview" in self._edit.methods and (
            len(piece.source) * self._per_byte > _HOPELESS * self._edit.over_tokens
        )

    def _offer(self, place: int, method: Method, text: str) -> bool:
        """Replace a piece if `text` is shorter; tell whether it was."""
        if len(text) >= len(self._shown[place]):
            return False
        self._shown[place] = text
        self._use(method)
        return True

    def _use(self, method: Method) -> None:
        if method not in self.used:
            self.used.append(method)


def _tokens_per_byte(entry: Entry) -> float:
    """Return the estimated tokens per byte of the result, at most one."""
    size = _size(entry.message.text)
    if not size:
        return 0.0
    if entry.message.attachments:
        return 1 / _MEDIA_BYTES_PER_TOKEN
    return min(entry.tokens / size, 1.0)


def _size(text: str) -> int:
    """Return the UTF-8 size of a text in bytes. Requests with lone surrogates were refused before."""
    return len(text) if text.isascii() else len(text.encode())
