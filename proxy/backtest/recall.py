"""Future-reference recall: of the values that a session's tool calls really used, which would still be sent.

At each tool call of a history, the atoms of its arguments that occur in the full context before it are
*grounded*: the model may have read them there. Recall is the share of these that the view still holds.
Strata by where an atom last occurred before the call:

    pinned      in the instructions or in the latest user message: what no policy trims
    near        else, in one of the last six messages
    far         else; here trimming decides
    tool_only   far, and every occurrence stood in a tool result: nobody ever repeated it

An atom is *bound* where the view holds it within 120 characters of a word that named it in the full
context, so that a bag of ids does not win.

Presence is necessary, not sufficient: a model that is shown a value may still miss it, and one that is not
shown it may find it again with a tool. Whoever prints a figure of this module prints that beside it.

It knows messages and texts; it knows no policy, no engine and no price.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Final

from proxy.dialects import Message
from proxy.textscan import CHUNKS, atoms_of_arguments, labels_of, leaves_of, stands_alone, words_near

NEAR_MESSAGES: Final = 6
"""Messages before a call that count as near."""
CAVEAT: Final = "presence is necessary, not sufficient"
"""What stands beside every figure of recall."""

_ESCAPE: Final = re.compile(r"\\u([0-9a-fA-F]{4})")
_OCCURRENCES: Final = 8
"""Occurrences of one atom in one message whose surroundings are read: thousands teach no more."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How many grounded values of one stratum are present, and how many calls are whole. They add up."""

    grounded: int = 0
    """Values that calls used and that stood in the full context before them, counted for each call."""
    present: int = 0
    """Of these, those that the view holds."""
    bound_possible: int = 0
    """Of the grounded ones, those that something named in the full context."""
    bound: int = 0
    """Of these, those that the view holds near a word that named them."""
    calls: int = 0
    """Calls with such values."""
    whole: int = 0
    """Of these, those of which the view holds every one."""

    def __add__(self, other: Counts) -> Counts:
        """Return the sums."""
        return Counts(
            grounded=self.grounded + other.grounded,
            present=self.present + other.present,
            bound_possible=self.bound_possible + other.bound_possible,
            bound=self.bound + other.bound,
            calls=self.calls + other.calls,
            whole=self.whole + other.whole,
        )

    @property
    def recall(self) -> float | None:
        """The share of grounded values that are present; None where there are none."""
        return self.present / self.grounded if self.grounded else None

    @property
    def bound_recall(self) -> float | None:
        """The share of values with a name that are present near it; None where there are none."""
        return self.bound / self.bound_possible if self.bound_possible else None

    @property
    def whole_calls(self) -> float | None:
        """The share of calls of which every value is present; None where there are none."""
        return self.whole / self.calls if self.calls else None


@dataclass(frozen=True, slots=True)
class RecallCounts:
    """Counts by where values last occurred before their call. Add them up with `+`."""

    every: Counts = Counts()
    """All of them: pinned, near and far."""
    pinned: Counts = Counts()
    near: Counts = Counts()
    far: Counts = Counts()
    """Neither; `tool_only` among them."""
    tool_only: Counts = Counts()
    """Far, and never but in tool results."""

    def __add__(self, other: RecallCounts) -> RecallCounts:
        """Return the sums, stratum by stratum."""
        return RecallCounts(
            **{
                stratum.name: getattr(self, stratum.name) + getattr(other, stratum.name)
                for stratum in fields(self)
            }
        )


@dataclass(frozen=True, slots=True)
class Reference:
    """A grounded value of one call."""

    atom: int
    """Its number in the history."""
    strata: tuple[str, ...]
    """Names of the fields of `RecallCounts` that count it."""
    labels: frozenset[str]
    """The words that named it in the full context before the call."""


class References:
    """What the tool calls of one history used, and in which of its messages that stands.

    Messages are told apart by their texts. A text that was seen once is never searched again, so judging a
    view costs look-ups: of each message in it, and of each value that the call used.
    """

    __slots__ = ("_always", "_calls", "_fixed", "_index", "_places", "atoms", "messages")

    atoms: tuple[str, ...]
    """Every atom of the arguments of the history's calls, by number."""
    messages: tuple[Message, ...]
    """The history, instructions not among it."""

    def __init__(
        self, instructions: Sequence[Message], messages: Sequence[Message], *, tools: str = ""
    ) -> None:
        """Read a history: `instructions` and `tools` (JSON) go with every request, and are pinned."""
        self.messages = tuple(messages)
        used = [[atoms_of_arguments(each) for each in arguments_of(message)] for message in messages]
        self.atoms = tuple(dict.fromkeys(atom for calls in used for atoms in calls for atom in atoms))
        numbers = {atom: number for number, atom in enumerate(self.atoms)}
        self._index = _Index(self.atoms)
        read = self._index.number_of
        self._always = self._index.number_of_text(tools)
        self._fixed = frozenset([self._always, *map(read, instructions)])
        walk = _Walk(self._index, self._fixed)
        self._calls: dict[int, tuple[tuple[Reference, ...], ...]] = {}
        self._places: dict[int, list[int]] = {}
        for position, message in enumerate(messages):
            self._places.setdefault(read(message), []).append(position)
            if used[position]:
                self._calls[position] = tuple(
                    tuple(walk.references([numbers[atom] for atom in atoms])) for atoms in used[position]
                )
            walk.pass_by(message)

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of the assistant messages with calls: what `judge` is asked about."""
        return tuple(self._calls)

    def references(self, position: int) -> tuple[tuple[Reference, ...], ...]:
        """Return what the calls of the message at `position` used, call by call; empty where it has none."""
        return self._calls.get(position, ())

    def holders(self, atom: int) -> Iterator[int]:
        """Yield the positions of the messages of the history that hold an atom, in no order."""
        for number in self._index.holders[atom]:
            yield from self._places.get(number, ())

    def judge(self, position: int, view: Iterable[Message]) -> RecallCounts:
        """Count what `view` holds of what the calls of the message at `position` used.

        Args:
            position: That of an assistant message in the history; one without calls counts nothing.
            view: All that was sent to ask for it, instructions and summaries included.
        """
        calls = self._calls.get(position, ())
        if not any(calls):
            return RecallCounts()
        sent = frozenset(map(self._index.number_of, view)) | {self._always}
        total = RecallCounts()
        for call in calls:
            total += self._judge(call, sent)
        return total

    def _judge(self, call: Sequence[Reference], sent: frozenset[int]) -> RecallCounts:
        """Count one call."""
        tally: dict[str, list[int]] = {}
        for reference in call:
            holding = self._index.holders[reference.atom] & sent
            present = bool(holding)
            bound = present and any(
                self._index.is_bound(reference.atom, number, reference.labels) for number in holding
            )
            for stratum in reference.strata:
                counted = tally.setdefault(stratum, [0, 0, 0, 0])
                counted[0] += 1
                counted[1] += present
                counted[2] += bool(reference.labels)
                counted[3] += bound
        return RecallCounts(
            **{
                stratum: Counts(
                    grounded=grounded,
                    present=present,
                    bound_possible=possible,
                    bound=bound,
                    calls=1,
                    whole=int(present == grounded),
                )
                for stratum, (grounded, present, possible, bound) in tally.items()
            }
        )


class _Walk:
    """What of the atoms has occurred, at one point of a history."""

    def __init__(self, index: _Index, fixed: Iterable[int]) -> None:
        self._index = index
        self._position = 0
        self._last: dict[int, int] = {}
        self._spoken: set[int] = set()
        self._labels: dict[int, frozenset[str]] = {}
        self._pinned: set[int] = set()
        self._asked: frozenset[int] = frozenset()
        for number in fixed:
            self._pinned.update(index.atoms_in(number))
            self._name(number)

    def pass_by(self, message: Message) -> None:
        """Go on to behind `message`, the next one."""
        number = self._index.number_of(message)
        atoms = self._index.atoms_in(number)
        for atom in atoms:
            self._last[atom] = self._position
        if not message.is_result:
            self._spoken.update(atoms)
        if message.role == "user":
            self._asked = frozenset(atoms)
        self._name(number)
        self._position += 1

    def references(self, atoms: Iterable[int]) -> Iterator[Reference]:
        """Yield those of a call's atoms that are grounded here."""
        for atom in atoms:
            strata = self._strata(atom)
            if strata:
                yield Reference(atom=atom, strata=strata, labels=self._labels.get(atom, frozenset()))

    def _strata(self, atom: int) -> tuple[str, ...]:
        """Return the strata of an atom of a call here; none where it has not occurred."""
        if atom in self._pinned or atom in self._asked:
            return ("every", "pinned")
        last = self._last.get(atom)
        if last is None:
            return ()
        if last >= self._position - NEAR_MESSAGES:
            return ("every", "near")
        return ("every", "far") if atom in self._spoken else ("every", "far", "tool_only")

    def _name(self, number: int) -> None:
        """Learn the words that name what a message holds."""
        for atom in self._index.atoms_in(number):
            known = self._labels.get(atom, frozenset())
            new = self._index.labels(atom, number)
            if not new <= known:
                self._labels[atom] = known | new


class _Index:
    """Which texts hold which of a fixed set of atoms. Every text is searched once, in time linear in it."""

    def __init__(self, atoms: Sequence[str]) -> None:
        self._atoms = atoms
        self._numbers: dict[Message, int] = {}
        self._texts: list[str] = []
        self._places: list[dict[int, list[int]]] = []
        self._bound: dict[tuple[int, int], frozenset[str]] = {}
        self.holders: list[set[int]] = [set() for _ in atoms]
        # An atom is looked up by its longest chunk, which stands in the text as a whole wherever it does.
        self._by_chunk: dict[str, list[tuple[int, int]]] = {}
        for number, atom in enumerate(atoms):
            chunk = max(CHUNKS.finditer(atom), key=_length)  # every atom holds a letter or a digit
            self._by_chunk.setdefault(chunk.group(), []).append((chunk.start(), number))

    def number_of(self, message: Message) -> int:
        """Return the number of a message; search it if its text is new."""
        number = self._numbers.get(message)
        if number is None:
            number = self._numbers[message] = self.number_of_text(readable(message))
        return number

    def number_of_text(self, text: str) -> int:
        """Search a new text and return its number."""
        number, places = len(self._texts), self._search(text)
        self._texts.append(text)
        self._places.append(places)
        for atom in places:
            self.holders[atom].add(number)
        return number

    def atoms_in(self, number: int) -> Iterable[int]:
        """Return the atoms that a message holds."""
        return self._places[number]

    def labels(self, atom: int, number: int) -> frozenset[str]:
        """Return the words that name an atom in a message that holds it."""
        text, size = self._texts[number], len(self._atoms[atom])
        return frozenset[str]().union(
            *(labels_of(text, start, start + size) for start in self._places[number][atom])
        )

    def is_bound(self, atom: int, number: int, labels: frozenset[str]) -> bool:
        """Tell whether a message that holds an atom has one of the words near it."""
        key = (atom, number)
        near = self._bound.get(key)
        if near is None:
            text, size = self._texts[number], len(self._atoms[atom])
            near = self._bound[key] = frozenset[str]().union(
                *(words_near(text, start, start + size) for start in self._places[number][atom])
            )
        return not near.isdisjoint(labels)

    def _search(self, text: str) -> dict[int, list[int]]:
        """Return the atoms that a text holds, each with the first places at which it stands."""
        found: dict[int, list[int]] = {}
        for match in CHUNKS.finditer(text):
            start, chunk = match.start(), match.group()
            self._look(text, start, self._by_chunk.get(chunk), found)
            if chunk[0] in "nrt" and text[start - 1 : start] == "\\":
                # It may begin with the letter of an escape: `\nname`.
                self._look(text, start + 1, self._by_chunk.get(chunk[1:]), found)
        return found

    def _look(
        self, text: str, start: int, candidates: Sequence[tuple[int, int]] | None, found: dict[int, list[int]]
    ) -> None:
        """Note which of the candidates, as (place of their chunk, atom), stand around a chunk of the text."""
        for offset, number in candidates or ():
            places = found.get(number)
            if places is not None and len(places) == _OCCURRENCES:
                continue
            atom, begin = self._atoms[number], start - offset
            if begin >= 0 and text.startswith(atom, begin) and stands_alone(text, begin, begin + len(atom)):
                found.setdefault(number, []).append(begin)


def _length(match: re.Match[str]) -> int:
    return match.end() - match.start()


def arguments_of(message: Message) -> tuple[str, ...]:
    """Return the arguments of each call of a message, that of the older form among them."""
    return tuple([call.arguments for call in message.calls])


def readable(message: Message) -> str:
    """Return what a model reads of a message: its text, its calls' arguments one leaf a line, no escapes."""
    parts = [message.text, *(_unfolded(arguments) for arguments in arguments_of(message))]
    return "\n".join(_ESCAPE.sub(_character, part) if "\\u" in part else part for part in parts)


def _unfolded(arguments: str) -> str:
    """Return arguments with each leaf of their JSON on a line, behind its key; else as they are."""
    leaves = leaves_of(arguments)
    if leaves is None:
        return arguments
    return "\n".join(f"{leaf.key}: {leaf.text}" for leaf in leaves)


def _character(match: re.Match[str]) -> str:
    """Return the character that an escape stands for; a half of a pair as it is written."""
    code = int(match.group(1), 16)
    return match.group() if 0xD800 <= code <= 0xDFFF else chr(code)
