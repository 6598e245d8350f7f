"""Future-reference recall: which of the values that a session's tool calls really used would still be sent.

An atom (value) of a tool call's arguments is *grounded* if it occurs in the full context before the call: the model
may have read it there. Recall is the share of grounded atoms that the view still holds. Atoms are counted by where
they last occurred before the call:

    pinned      in the instructions or in the latest user message, which no policy trims
    near        otherwise, in one of the last six messages
    far         otherwise; these are the values that trimming decides about
    tool_only   far, and never outside tool results
    key         far, and the whole value of an argument: a path, an id, a name

*Chance* counts values of other sessions' calls that a view holds. It is the baseline for judging the other figures.

An atom is *bound* if the view holds it within 120 characters of a word that named it in the full context. This way a
mere heap of ids gains nothing. Recall is only an estimate: a model may miss a value that it is shown, and may find
one again that it is not shown.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import asdict, replace

from proxy.backtest.cost import Summable
from proxy.dialects import Message
from proxy.textscan import CHUNKS, atoms_of_arguments, labels_of, leaves_of, stands_alone, words_near

_NEAR_MESSAGES: Final = 6
CAVEAT: Final = "presence is necessary, not sufficient"

_ESCAPE: Final = re.compile(r"\\u([0-9a-fA-F]{4})")
_OCCURRENCES: Final = 8  # maximum occurrences of one atom in one message that are recorded


class Counts(Summable, frozen=True, kw_only=True):
    """Counts of one stratum: grounded values, those present in the view, and complete calls."""

    grounded: int = 0  # values that calls used and that were in the full context before them
    present: int = 0  # grounded values that the view holds
    bound_possible: int = 0  # grounded values that a word named in the full context
    bound: int = 0  # values that the view holds near a word that named them
    calls: int = 0  # calls with grounded values
    whole: int = 0  # calls with all their grounded values in the view
    shares: float = 0.0  # the sum, over calls, of the share of grounded values that are present

    @property
    def recall(self) -> float | None:
        """The share of grounded values that are present."""
        return self.present / self.grounded if self.grounded else None

    @property
    def bound_recall(self) -> float | None:
        """The share of named values that are present near their name."""
        return self.bound / self.bound_possible if self.bound_possible else None

    @property
    def mean_of_calls(self) -> float | None:
        """The share of grounded values that are present, as the mean over calls."""
        return self.shares / self.calls if self.calls else None

    @property
    def whole_calls(self) -> float | None:
        """The share of calls with all their values present."""
        return self.whole / self.calls if self.calls else None

    def as_data(self) -> dict[str, int | float | None]:
        """Return the counts and the shares."""
        return {
            **{name: value for name, value in asdict(self).items() if name != "shares"},
            "recall": self.recall,
            "bound_recall": self.bound_recall,
            "whole_calls": self.whole_calls,
            "mean_of_calls": self.mean_of_calls,
        }


class RecallCounts(Summable, frozen=True, kw_only=True):
    """Counts by where values last occurred before their call."""

    every: Counts = Counts()  # all values: pinned, near and far
    pinned: Counts = Counts()
    near: Counts = Counts()
    far: Counts = Counts()  # this includes `tool_only`
    tool_only: Counts = Counts()
    key: Counts = Counts()  # part of `far`
    chance: Counts = Counts()  # values of other sessions; a view should hold none


class Reference(Struct, frozen=True, kw_only=True):
    """A grounded value of one call."""

    atom: int
    strata: tuple[str, ...]  # the fields of `RecallCounts` that count it
    labels: frozenset[str]  # the words that named it before the call


class References:
    """The values that the tool calls of one history used, and the messages that hold them."""

    def __init__(
        self,
        instructions: Sequence[Message],
        messages: Sequence[Message],
        *,
        tools: str = "",
        strangers: Iterable[str] = (),
    ) -> None:
        """Read a history. `instructions` and `tools` (JSON) are part of every request, so they are pinned.

        `strangers` are values of other sessions.
        """
        self.messages = tuple(messages)
        used = [[atoms_of_arguments(call.arguments) for call in message.calls] for message in messages]
        own = dict.fromkeys(atom for calls in used for atoms in calls for atom in atoms)
        others = [atom for atom in dict.fromkeys(strangers) if atom not in own]
        self.atoms = (*own, *others)
        """All atoms, by number: those of the history's calls, then the strangers."""
        numbers = {atom: number for number, atom in enumerate(self.atoms)}
        self._index = _Index(self.atoms)
        read = self._index.number_of
        self._always = self._index.number_of_text(tools)
        reader = _Reader(self._index, {self._always, *map(read, instructions)})
        self._strangers = range(len(own), len(self.atoms))
        self._calls: dict[int, tuple[tuple[Reference, ...], ...]] = {}
        self._places: dict[int, list[int]] = {}
        for position, message in enumerate(messages):
            self._places.setdefault(read(message), []).append(position)
            if used[position]:
                self._calls[position] = tuple(
                    tuple(reader.references([numbers[atom] for atom in atoms], whole_arguments(call.arguments)))
                    for atoms, call in zip(used[position], message.calls, strict=True)
                )
            reader.read(message)

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of the assistant messages with calls."""
        return tuple(self._calls)

    def references(self, position: int) -> tuple[tuple[Reference, ...], ...]:
        """Return the values that the message at `position` used, call by call."""
        return self._calls.get(position, ())

    def holders(self, atom: int) -> Iterator[int]:
        """Yield the positions of the messages that hold an atom, in no particular order."""
        for number in self._index.holders[atom]:
            yield from self._places.get(number, ())

    def judge(self, position: int, view: Iterable[Message]) -> RecallCounts:
        """Count the values of the calls at `position` that `view` holds; `view` is the whole request before them."""
        calls = self._calls.get(position, ())
        if not any(calls):
            return RecallCounts()
        sent = {self._always, *map(self._index.number_of, view)}
        found = sum([self._judge(call, sent) for call in calls], RecallCounts())
        if found.far.calls and self._strangers:
            held = sum(not self._index.holders[atom].isdisjoint(sent) for atom in self._strangers)
            found += RecallCounts(chance=Counts(grounded=len(self._strangers), present=held))
        return found

    def _judge(self, call: Sequence[Reference], sent: set[int]) -> RecallCounts:
        tally: dict[str, Counts] = {}
        for reference in call:
            holding = self._index.holders[reference.atom] & sent
            bound = any(self._index.is_bound(reference.atom, number, reference.labels) for number in holding)
            one = Counts(grounded=1, present=bool(holding), bound_possible=bool(reference.labels), bound=bound)
            for stratum in reference.strata:
                tally[stratum] = tally.get(stratum, Counts()) + one
        return RecallCounts(
            **{
                stratum: replace(
                    counts,
                    calls=1,
                    whole=int(counts.present == counts.grounded),
                    shares=counts.present / counts.grounded,
                )
                for stratum, counts in tally.items()
            }
        )


class _Reader:
    """Reads a history message by message and tracks which atoms occurred so far."""

    def __init__(self, index: _Index, fixed: Iterable[int]) -> None:
        self._index = index
        self._position = 0
        self._last: dict[int, int] = {}
        self._spoken: set[int] = set()
        self._labels: dict[int, frozenset[str]] = {}
        self._pinned: set[int] = set()
        self._asked: frozenset[int] = frozenset()
        for number in fixed:
            self._pinned.update(index.places[number])
            self._name(number)

    def read(self, message: Message) -> None:
        """Read the next message."""
        number = self._index.number_of(message)
        atoms = self._index.places[number]
        for atom in atoms:
            self._last[atom] = self._position
        if not message.is_result:
            self._spoken.update(atoms)
        if message.role == "user":
            self._asked = frozenset(atoms)
        self._name(number)
        self._position += 1

    def references(self, atoms: Iterable[int], whole: Collection[str]) -> Iterator[Reference]:
        """Yield the grounded atoms of a call as references. Atoms in `whole` are the whole value of an argument."""
        for atom in atoms:
            last = self._last.get(atom)
            if atom in self._pinned or atom in self._asked:
                strata: tuple[str, ...] = ("every", "pinned")
            elif last is None:
                continue
            elif last >= self._position - _NEAR_MESSAGES:
                strata = ("every", "near")
            else:
                strata = ("every", "far") if atom in self._spoken else ("every", "far", "tool_only")
                strata += ("key",) if self._index.atoms[atom] in whole else ()
            yield Reference(atom=atom, strata=strata, labels=self._labels.get(atom, frozenset()))

    def _name(self, number: int) -> None:
        for atom in self._index.places[number]:
            self._labels[atom] = self._labels.get(atom, frozenset()) | self._index.labels(atom, number)


class _Index:
    """Finds the texts that hold each of a fixed set of atoms. Each text is searched once, in linear time."""

    def __init__(self, atoms: Sequence[str]) -> None:
        self.atoms = atoms
        self._numbers: dict[Message, int] = {}
        self._texts: list[str] = []
        self.places: list[dict[int, list[int]]] = []
        """By the number of a text, the atoms that it holds, each with its offsets."""
        self._bound: dict[tuple[int, int], frozenset[str]] = {}
        self.holders: list[set[int]] = [set() for _ in atoms]
        # An atom is found by its longest chunk, which is a chunk of the text wherever the atom occurs.
        self._by_chunk: dict[str, list[tuple[int, int]]] = {}
        for number, atom in enumerate(atoms):
            chunk = max(CHUNKS.finditer(atom), key=lambda match: len(match.group()))
            self._by_chunk.setdefault(chunk.group(), []).append((chunk.start(), number))

    def number_of(self, message: Message) -> int:
        """Return the number of a message; a new message is searched first."""
        number = self._numbers.get(message)
        if number is None:
            number = self._numbers[message] = self.number_of_text(readable(message))
        return number

    def number_of_text(self, text: str) -> int:
        """Search a new text and return its number."""
        number, places = len(self._texts), self._search(text)
        self._texts.append(text)
        self.places.append(places)
        for atom in places:
            self.holders[atom].add(number)
        return number

    def labels(self, atom: int, number: int) -> frozenset[str]:
        """Return the words that name an atom in a message that holds it."""
        text, size = self._texts[number], len(self.atoms[atom])
        return frozenset[str]().union(*(labels_of(text, start, start + size) for start in self.places[number][atom]))

    def is_bound(self, atom: int, number: int, labels: frozenset[str]) -> bool:
        """Tell whether one of the words is near an atom in a message that holds it."""
        key = (atom, number)
        near = self._bound.get(key)
        if near is None:
            text, size = self._texts[number], len(self.atoms[atom])
            near = self._bound[key] = frozenset[str]().union(
                *(words_near(text, start, start + size) for start in self.places[number][atom])
            )
        return not near.isdisjoint(labels)

    def _search(self, text: str) -> dict[int, list[int]]:
        """Return the atoms in a text, each with its first offsets."""
        found: dict[int, list[int]] = {}
        for match in CHUNKS.finditer(text):
            start, chunk = match.start(), match.group()
            self._look(text, start, self._by_chunk.get(chunk), found)
            if chunk[0] in "nrt" and text[start - 1 : start] == "\\":
                # The first letter may belong to an escape: `\nname`.
                self._look(text, start + 1, self._by_chunk.get(chunk[1:]), found)
        return found

    def _look(
        self, text: str, start: int, candidates: Sequence[tuple[int, int]] | None, found: dict[int, list[int]]
    ) -> None:
        """Record the candidates, given as (offset of the chunk in the atom, atom), that occur around this chunk."""
        for offset, number in candidates or ():
            places = found.get(number)
            if places is not None and len(places) == _OCCURRENCES:
                continue
            atom, begin = self.atoms[number], start - offset
            if begin >= 0 and text.startswith(atom, begin) and stands_alone(text, begin, begin + len(atom)):
                found.setdefault(number, []).append(begin)


def whole_arguments(arguments: str) -> frozenset[str]:
    """Return the leaf values of JSON arguments."""
    return frozenset(leaf.text for leaf in leaves_of(arguments) or ())


def readable(message: Message) -> str:
    """Return what a model reads in a message: its text and each value of its calls' arguments, unescaped."""
    parts = [message.text, *(_unfolded(call.arguments) for call in message.calls)]
    return "\n".join(_ESCAPE.sub(_character, part) if "\\u" in part else part for part in parts)


def _unfolded(arguments: str) -> str:
    """Return the leaves of JSON arguments as lines `key: text`; other arguments as they are."""
    leaves = leaves_of(arguments)
    if leaves is None:
        return arguments
    return "\n".join(f"{leaf.key}: {leaf.text}" for leaf in leaves)


def _character(match: re.Match[str]) -> str:
    """Return the character of an escape; a surrogate stays as written."""
    code = int(match.group(1), 16)
    return match.group() if 0xD800 <= code <= 0xDFFF else chr(code)
