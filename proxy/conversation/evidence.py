"""Evidence: recognises a relayed reply that a client sends back without a session id.

    place  the reply behind the same history, at any length
    id     a random id: of a tool call, or one that the provider gave the reply
    text   the reply's text, at any place, without the reasoning before it. Only a long text is conclusive alone. If a
           reply has calls only, without random ids, the calls count as its text. They are never conclusive alone,
           because many replies make the same calls

A piece of evidence is a number: a hash of one of these with the tenant and the dialect. Tenants never share evidence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Final, Literal, TypeAlias

import orjson
from msgspec import Struct
from msgspec.structs import replace

from proxy.dialects import Message, answer_of, is_random

TELLING: Final = 24  # characters of the shortest text that is conclusive alone
EvidenceKind: TypeAlias = Literal["place", "id", "text"]

_IN_WORDS: Final = "\nCalling tools:"  # how smolagents introduces calls written as text
_COUNTED: Final = re.compile(r"[A-Za-z]+[0-9]+")
_CALL_ID: Final = re.compile(r"\b(?:call_|toolu_|chatcmpl-tool-)[0-9A-Za-z-]{8,}")


class Evidence(Struct, frozen=True, kw_only=True):
    """One piece of evidence."""

    piece: int  # its name, a signed 64-bit number
    kind: EvidenceKind
    tells: bool = True  # whether it may identify a session alone


class Witness(Struct, frozen=True, kw_only=True):
    """The tenant and dialect that evidence belongs to. Other tenants and dialects name the same facts differently."""

    tenant: str
    dialect: str

    def place(self, node: str) -> Evidence:
        """Return the evidence that a message stands at this node."""
        return self._evidence("place", node)

    def of(self, message: Message, node: str) -> Iterator[Evidence]:
        """Yield all evidence that a reply, or the result of a call, gives at its node."""
        if message.role == "assistant":
            yield self.place(node)
        yield from self.marks(message)

    def marks(self, message: Message) -> Iterator[Evidence]:
        """Yield the evidence that does not depend on the message's place."""
        names = [name for name in message.ids if is_unique(name)]
        for name in names:
            yield self._evidence("id", _plain(name))
        if message.role == "assistant":
            text = _spoken(message)
            if text:
                yield self._evidence("text", text, tells=len(text) >= TELLING)
            elif not names and (text := said(message)):
                yield self._evidence("text", text, tells=False)

    def earlier(self, message: Message) -> Iterator[Evidence]:
        """Yield the evidence of ids as older versions stored it."""
        for name in message.ids:
            if is_unique(name) and name != _plain(name):
                yield self._evidence("id", name)

    def told(self, message: Message) -> Iterator[Evidence]:
        """Yield evidence of earlier replies that a client may have merged into this reply.

        A client may join several texts to one reply, or write calls as text, with their ids, after the reply's own
        text.
        """
        if message.role != "assistant":
            return
        texts = message.texts if len(message.texts) > 1 else message.text.split(_IN_WORDS, 1)[:-1]
        for text in map(squeezed, map(answer_of, texts)):
            if len(text) >= TELLING:
                yield self._evidence("text", text)
        for name in dict.fromkeys(_CALL_ID.findall(message.text)):
            if is_unique(name):
                yield replace(self._evidence("id", _plain(name)), kind="text")

    def _evidence(self, kind: EvidenceKind, value: str, *, tells: bool = True) -> Evidence:
        named = f"{self.tenant}\x00{self.dialect}\x00{kind}\x00{value}".encode("utf-8", "surrogatepass")
        digest = blake2b(named, digest_size=8, person=b"palimpsest-evid").digest()
        return Evidence(piece=int.from_bytes(digest, "big", signed=True), kind=kind, tells=tells)


def is_unique(name: str) -> bool:
    """Tell whether no other conversation has this id.

    A word and a number is not unique: OpenClaw makes "functionsexec12" of "functions.exec:12".
    """
    return is_random(name) and _COUNTED.fullmatch(name) is None


def _plain(name: str) -> str:
    """Return the letters and digits of an id. OpenClaw leaves out the others."""
    return "".join(filter(str.isalnum, name))


def said(message: Message) -> str:
    """Return what a user or the model says, with white space normalised.

    A reply without text returns its calls. A tool result returns only the user's text beside it. Other roles return "".
    """
    if message.role == "assistant":
        calls = message.calls
        return _spoken(message) or "\n".join([f"{call.name} {_rewritten(call.arguments)}" for call in calls])
    if message.is_result:
        return squeezed(message.beside)
    return squeezed(message.text) if message.role == "user" else ""


def _spoken(message: Message) -> str:
    """Return the text of a reply, with white space normalised. A JSON object is serialized in one fixed form."""
    text = answer_of(message.text)
    return _rewritten(text) if text.lstrip()[:1] == "{" else squeezed(text)


def _rewritten(text: str) -> str:
    """Return JSON serialized with sorted keys, and any other text with white space normalised.

    Clients that re-serialize JSON change its spacing and key order.
    """
    try:
        return orjson.dumps(orjson.loads(text), option=orjson.OPT_SORT_KEYS).decode()
    except (ValueError, TypeError):  # free text, or nested too deeply
        return squeezed(text)


def continues(messages: Sequence[Message], branch: Iterable[Message], *, from_root: bool, silent: bool = False) -> bool:
    """Tell whether a branch ends with these messages, allowing for what clients change.

    `branch` runs from its end to its root. A client may have removed a reminder from a question, left out messages of
    the user that stand behind another one, left out calls, or cleared results. The messages match if their replies have
    `TELLING` characters together. With two replies or more the questions count too, if all short texts match word for
    word; one reply is not enough for that, because many users ask the same question. Otherwise the branch must consist
    of these messages alone, and short ones must match word for word.

    `from_root`: `branch` is the whole branch. `silent`: the model said nothing but calls, which the client left out.
    """
    stored = ((each, words) for each in branch if (words := said(each)))
    there = next(stored, None)
    replies = spoken = asked = 0  # number of replies, their characters, and the questions' characters
    same = exact = more = False  # `more`: the messages extend beyond the branch
    for message in reversed(messages):
        text = said(message)
        if not text:
            continue
        while there is not None and not _is_same(there, message, text):
            older = next(stored, None)
            in_a_row = older is not None and same and there[0].role == older[0].role == "user"
            if not in_a_row and not (there[0].calls and (silent or same)):
                return False
            there = older
        if there is None:
            more = True
            break
        exact = (there[1] == text or len(text) >= TELLING) and (exact or not same)
        same = True
        if message.role == "assistant":
            replies, spoken = replies + 1, spoken + len(text)
        else:
            asked += len(text)
        there = next(stored, None)
    if from_root and more:
        return False
    return spoken + (asked if exact and replies > 1 else 0) >= TELLING or (from_root and exact and there is None)


def _is_same(stored: tuple[Message, str], message: Message, text: str) -> bool:
    before, there = stored
    by_model = message.role == "assistant"
    if (before.role == "assistant") is not by_model:
        return False
    return there == text or (not by_model and is_longer(there, text))


def is_longer(text: str, part: str) -> bool:
    """Tell whether `text` is longer than `part` and begins or ends with it, at a word boundary."""
    if not part or len(text) <= len(part):
        return False
    return (text.startswith(part) and _parts_words(part[-1], text[len(part)])) or (
        text.endswith(part) and _parts_words(text[-len(part) - 1], part[0])
    )


def _parts_words(before: str, after: str) -> bool:
    return not (before.isalnum() and after.isalnum())


def squeezed(text: str, window: int = 65_536) -> str:
    """Return a text with each run of white space replaced by one space, and none at its ends.

    Scanned in windows: the list of a long text's words would take ten times as much memory as the text.
    """
    parts: list[str] = []
    in_word = False  # whether the last window ended inside a word
    for start in range(0, len(text), window):
        piece = text[start : start + window]
        words = " ".join(piece.split())
        if words:
            if parts and not (in_word and not piece[0].isspace()):
                parts.append(" ")
            parts.append(words)
        in_word = not piece[-1].isspace()
    return "".join(parts)
