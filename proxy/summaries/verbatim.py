"""What code takes from a conversation by itself: the user's own messages, and identifiers that recur.

The user's messages are taken from the stored log every time, so no summary can lose or reword them.
Identifiers are counted once and carried from summary to summary (`CoveredFacts`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from proxy.dialects import Message
from proxy.textscan import CJK, Kind, occurs, values_of
from proxy.trimming import BUILT_IN, broadcast_digest, broadcast_of

SHORT: Final = 40
"""Tokens of the longest message that is kept whole before any other; longer ones are first cut to this."""
_LEAST_COST: Final = 2
"""Tokens that a message takes at least, with its line end."""
_HEAD: Final = 2 / 3
"""Part of a shortened message that is its beginning."""
_GAP: Final = " […] "
"""Stands in a shortened message for what was left out."""
_CHARACTERS: Final = 12
"""More characters than these to a token are unusual: such a text is not counted as a whole."""
_START_CHARACTERS: Final = 6
_LEAST: Final = 8
"""Characters below which nothing is left to shorten."""
_JOINED: Final = re.compile(rf"[^\s{CJK}]{{2}}")
"""Two characters between which no text is cut, if it can be helped."""
_PATTERNS: Final = tuple(BUILT_IN)
_USERS: Final = frozenset({"user", "human", "用户"})
"""Names in the field `agent` that mean the user."""
_OPERATOR: Final = frozenset({"system", "developer"})

_KEPT: Final = 600
"""Identifiers that are carried on."""
_SHOWN: Final = 200
"""Identifiers that a summary shows at most: each is paid for with every request."""
_SHOWN_WORDS: Final = 60
"""Of these, names that are made of words (`parse_args`)."""
_OFTEN: Final = 4
"""Messages from which on it does not matter in how many more an identifier stands."""
_NAMING: Final[frozenset[Kind]] = frozenset({"url", "email", "path", "id"})
_LONG_NUMBER: Final = re.compile(r"\d{5,}")
"""A number that is no amount but the name of something."""
_QUANTITY: Final = re.compile(r"\d{1,3}-[A-Za-z]+(?:-[a-z]+)*")
"""A number with a word (24-hour) names nothing."""
_CERTAIN: Final = re.compile(r"[\d/@]")
"""What an identifier holds that is not just a name made of words."""

Count = Callable[[str], int]
"""Counts the tokens of a text."""


# ------------------------------------------------------------------------------------ the user's words


def user_text(message: Message) -> str:
    """Return what the user, or the operator inside the log, said in a message; empty for all others.

    Messages of other agents (the field `agent`, and broadcasts of their tool calls) are not the user's.
    """
    role = message.role
    if role in _OPERATOR:
        text = message.text.strip()
        return f"({role}) {text}" if text else ""
    if role != "user":
        return ""
    agent = message.agent
    if agent is not None and agent.strip().casefold() not in _USERS:
        return ""
    text = message.text.strip()
    is_report = broadcast_of(text, _PATTERNS, None) is not None or broadcast_digest(text) is not None
    return "" if is_report else text


def own_words(texts: Sequence[str], budget: int, most_short: int, count: Count) -> list[str]:
    """Return what is shown of the user's messages, oldest first, each text once.

    Short messages come before the middles of long ones: a constraint is mostly short, and a long message is
    mostly pasted. In this order, as far as there is room:

    1. the first message, which states the task, by head and tail where it is long
    2. messages of up to 40 tokens, whole, newest first
    3. longer ones in 40 tokens each, by head and tail, newest first
    4. more of the longer ones: of the first message, then newest first

    Args:
        texts: The user's messages, oldest first.
        budget: Tokens for all of them.
        most_short: Tokens that the short ones may take; more than `budget` where nobody set a limit.
        count: Counts the tokens of a text.
    """
    newest = list(dict.fromkeys([text for text in reversed(texts) if text]))
    if not newest:
        return []
    most = max(budget, most_short) // _LEAST_COST  # more cannot fit: they need not be counted
    newest = newest if len(newest) <= most + 1 else [*newest[: max(0, most)], newest[-1]]
    shown = _ShownWords(newest, count)
    long = [len(text) > SHORT * _CHARACTERS or count(text) > SHORT for text in newest]
    places, first = range(len(newest)), len(newest) - 1
    shown.show(first, SHORT, budget)
    for place in places:
        if not long[place]:
            shown.show(place, SHORT, most_short)
    for place in places:
        if long[place]:
            shown.show(place, SHORT, budget)
    for place in (first, *places):
        if long[place] and place in shown.forms:
            shown.show(place, budget - shown.spent + count(shown.forms[place]), budget)
    return [shown.forms[place] for place in reversed(places) if place in shown.forms]


class _ShownWords:
    """The user's messages that are shown, and in which form."""

    def __init__(self, newest: Sequence[str], count: Count) -> None:
        self._newest = newest
        self._count = count
        self.forms: dict[int, str] = {}
        """By the message's place among `newest`."""
        self.spent = 0

    def show(self, place: int, most: int, room: int) -> None:
        """Show a message in up to `most` tokens, unless all shown together would have more than `room`."""
        if self.spent >= room:
            return
        form, before = shortened(self._newest[place], most, self._count), self.forms.get(place, "")
        cost = self._cost(form) - (self._cost(before) if before else 0)
        if len(form) > len(before) and self.spent + cost <= room:
            self.forms[place] = form
            self.spent += cost

    def _cost(self, form: str) -> int:
        return self._count(item(form)) + 1


def item(text: str) -> str:
    """Return a text as an item of a list; further lines are indented."""
    return "- " + text.replace("\n", "\n  ")


def shortened(text: str, most: int, count: Count) -> str:
    """Return a text, or of one with more than `most` tokens its head and its tail with a mark between.

    No word or identifier is cut in two. Empty where next to nothing would be left.
    """
    if len(text) <= most * _CHARACTERS and count(text) <= most:
        return text
    size = min(len(text) - 1, most * _START_CHARACTERS)
    while size >= _LEAST:
        shorter = _ends(text, size)
        tokens = count(shorter)
        if tokens <= most:
            return shorter
        size = min(size - 1, int(size * most / tokens))
    return ""


def _ends(text: str, size: int) -> str:
    """Return the beginning and the end of a text, about `size` characters of it."""
    head = cut = int(size * _HEAD)
    tail = start = len(text) - (size - head)
    while cut > head // 2 and _JOINED.fullmatch(text[cut - 1 : cut + 1]):
        cut -= 1
    while start < len(text) - (len(text) - tail) // 2 and _JOINED.fullmatch(text[start - 1 : start + 1]):
        start += 1
    head = cut if cut > head // 2 else head
    tail = start if start < len(text) - (len(text) - tail) // 2 else tail
    return f"{text[:head].rstrip()}{_GAP}{text[tail:].lstrip()}"


# ------------------------------------------------------------------------------------ identifiers


class Name(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An identifier: an id, a path, an address, a long number."""

    text: str
    times: int = 1
    """Messages in which it stands."""
    said: bool = False
    """Whether the user said it."""


class CoveredFacts(Struct, frozen=True, kw_only=True):
    """What is known of the messages that a summary covers. CoveredFacts of two parts in a row add up."""

    messages: int = 0
    names: tuple[Name, ...] = ()
    """In the order of their newest mention."""

    def and_then(self, newer: CoveredFacts) -> CoveredFacts:
        """Return the facts of both parts, `newer` being the later one."""
        return CoveredFacts(messages=self.messages + newer.messages, names=_merged((*self.names, *newer.names)))


class SummaryState(Struct, frozen=True, kw_only=True):
    """What one summary hands to the next. It is stored as JSON; unknown members are ignored."""

    facts: CoveredFacts
    told: str
    """What the model wrote."""

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> SummaryState | None:
        """Return the state of a stored summary; None where it cannot be read."""
        try:
            return msgspec.convert(stored, cls)
        except msgspec.ValidationError:
            return None

    def write(self) -> dict[str, Any]:
        """Return it as JSON data."""
        written: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return written


def facts_of(messages: Iterable[Message]) -> CoveredFacts:
    """Return the facts of messages."""
    names: list[Name] = []
    number = 0
    for message in messages:
        number += 1
        found: dict[str, bool] = {}
        said = bool(user_text(message))
        found.update((each, said) for each in identifiers_in(message.text))
        for call in message.calls:
            found.update((each, False) for each in identifiers_in(call.arguments))
        names += [Name(text=text, said=by_user) for text, by_user in found.items()]
    return CoveredFacts(messages=number, names=_merged(names))


def identifiers_in(text: str) -> Iterator[str]:
    """Yield the identifiers of a text, at least once each."""
    for value in values_of(text, "none"):
        named = value.kind in _NAMING and not _QUANTITY.fullmatch(value.text)
        if named or (value.kind == "number" and _LONG_NUMBER.fullmatch(value.text)):
            yield value.text


def shown_names(facts: CoveredFacts, room: int, known: str, count: Count) -> list[str]:
    """Return the identifiers that matter most, as many as there is room for; none that stands in `known`.

    Those that recur or that the user said; first those of the user, then those with a digit or a path.
    """
    shown: list[str] = []
    words = 0
    for name in _ranked(facts.names):
        cost = count(name.text) + 1
        if len(shown) == _SHOWN or cost > room:
            break
        is_word = _CERTAIN.search(name.text) is None
        if not (name.times > 1 or name.said) or words + is_word > _SHOWN_WORDS or occurs(name.text, known):
            continue
        shown.append(name.text)
        words += is_word
        room -= cost
    return shown


def _merged(names: Iterable[Name]) -> tuple[Name, ...]:
    """Return names, each once, where it was last mentioned; of very many those that matter most."""
    found: dict[str, Name] = {}
    for name in names:
        known = found.pop(name.text, None)
        if known is not None:
            times, said = known.times + name.times, known.said or name.said
            name = Name(text=name.text, times=times, said=said)  # noqa: PLW2901 - the same name, added up
        found[name.text] = name
    if len(found) > _KEPT:
        kept = {name.text for name in _ranked(found.values())[:_KEPT]}
        return tuple(name for name in found.values() if name.text in kept)
    return tuple(found.values())


def _ranked(names: Iterable[Name]) -> list[Name]:
    """Return names, those that matter most first; of such as matter alike the newest."""
    newest = list(names)
    newest.reverse()
    return sorted(newest, key=_rank)


def _rank(name: Name) -> tuple[bool, bool, bool, int]:
    """Return what is smaller the more a name matters."""
    recurs, certain = name.times > 1, _CERTAIN.search(name.text) is not None
    return not (recurs or name.said), not certain, not name.said, -min(name.times, _OFTEN)
