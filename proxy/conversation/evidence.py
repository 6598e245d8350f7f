"""Evidence: what a reply that the proxy relayed is known by when a client that names no session sends it back.

    place  the reply behind the same history, however short it is
    id     a random id of a tool call, or one that the provider gave the reply
    text   the text of the reply, wherever it stands, without reasoning before it; only a long one tells anything
           alone. Calls without a random id are the text of a reply that says nothing else, and tell nothing alone:
           many call the same

A piece of evidence is a number, made of one of these, the tenant and the dialect: no tenant meets another's.
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

TELLING: Final = 24  # characters of the shortest text that tells something alone
EvidenceKind: TypeAlias = Literal["place", "id", "text"]

_IN_WORDS: Final = "\nCalling tools:"  # how smolagents begins calls in words
_CALL_ID: Final = re.compile(r"\b(?:call_|toolu_|chatcmpl-tool-)[0-9A-Za-z-]{8,}")


class Evidence(Struct, frozen=True, kw_only=True):
    """One piece of evidence."""

    piece: int  # its name, a number of 64 bits with a sign
    kind: EvidenceKind
    tells: bool = True  # whether it may tell a session alone


class Witness(Struct, frozen=True, kw_only=True):
    """On whose behalf evidence is given or asked for: pieces of others have other names."""

    tenant: str
    dialect: str

    def place(self, node: str) -> Evidence:
        """Return the evidence that a message stands at this node."""
        return self._evidence("place", node)

    def of(self, message: Message, node: str) -> Iterator[Evidence]:
        """Give every piece of evidence that a reply, or the result of a call, is at its node."""
        if message.role == "assistant":
            yield self.place(node)
        yield from self.marks(message)

    def marks(self, message: Message) -> Iterator[Evidence]:
        """Give the pieces that do not depend on the place."""
        names = [name for name in message.ids if is_random(name)]
        for name in names:
            yield self._evidence("id", name)
        if message.role == "assistant":
            text = _spoken(message)
            if text:
                yield self._evidence("text", text, tells=len(text) >= TELLING)
            elif not names and (text := said(message)):
                yield self._evidence("text", text, tells=False)

    def told(self, message: Message) -> Iterator[Evidence]:
        """Give what the text of a reply tells of earlier replies that a client may have put into it.

        These are several texts as one reply, and calls in words, with their ids, behind what was said.
        """
        if message.role != "assistant":
            return
        texts = message.texts if len(message.texts) > 1 else message.text.split(_IN_WORDS, 1)[:-1]
        for text in map(squeezed, map(answer_of, texts)):
            if len(text) >= TELLING:
                yield self._evidence("text", text)
        for name in dict.fromkeys(_CALL_ID.findall(message.text)):
            if is_random(name):
                yield replace(self._evidence("id", name), kind="text")

    def _evidence(self, kind: EvidenceKind, value: str, *, tells: bool = True) -> Evidence:
        named = f"{self.tenant}\x00{self.dialect}\x00{kind}\x00{value}".encode("utf-8", "surrogatepass")
        digest = blake2b(named, digest_size=8, person=b"palimpsest-evid").digest()
        return Evidence(piece=int.from_bytes(digest, "big", signed=True), kind=kind, tells=tells)


def said(message: Message) -> str:
    """Return what a user or the model says, but for white space; calls where it is nothing else, and "" for results."""
    if message.role == "assistant":
        calls = message.calls
        return _spoken(message) or "\n".join([f"{call.name} {_rewritten(call.arguments)}" for call in calls])
    if message.is_result:
        return squeezed(message.beside)
    return squeezed(message.text) if message.role == "user" else ""


def _spoken(message: Message) -> str:
    """Return the text of a reply, but for white space; an object however it is written."""
    text = answer_of(message.text)
    return _rewritten(text) if text.lstrip()[:1] == "{" else squeezed(text)


def _rewritten(text: str) -> str:
    """Return JSON as clients that write it anew leave it, and any other text but for white space."""
    try:
        return orjson.dumps(orjson.loads(text), option=orjson.OPT_SORT_KEYS).decode()
    except (ValueError, TypeError):  # free text, or nested too deeply
        return squeezed(text)


def continues(messages: Sequence[Message], branch: Iterable[Message], *, from_root: bool, silent: bool = False) -> bool:
    """Tell whether a branch ends with these messages as a client may send them; it is given from its end to its root.

    A reminder may have been taken off a question, calls left out, results cleared. Short replies tell enough together,
    and two of them with their questions: one question many may ask. Otherwise the branch has to be these messages
    alone, short ones word for word. `from_root`: it is given whole. `silent`: all that the model said were calls, left
    out.
    """
    stored = ((message, text) for message in branch if (text := said(message)))
    there = next(stored, None)
    replies = spoken = asked = 0  # how many, and characters of them and of the questions
    same = exact = more = False  # `more`: the messages go beyond the branch
    for message in reversed(messages):
        text = said(message)
        if not text:
            continue
        while there is not None and not _is_same(there, message, text):
            if not there[0].calls or not (silent or same):
                return False
            there = next(stored, None)
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
    """Tell whether a text begins or ends with another one, and not in the middle of a word."""
    if not part or len(text) <= len(part):
        return False
    return (text.startswith(part) and _parts_words(part[-1], text[len(part)])) or (
        text.endswith(part) and _parts_words(text[-len(part) - 1], part[0])
    )


def _parts_words(before: str, after: str) -> bool:
    return not (before.isalnum() and after.isalnum())


def squeezed(text: str, window: int = 65_536) -> str:
    """Return a text with one space wherever it has white space, and none at its ends.

    It is looked at in windows: the words of a long text would take ten times as much memory as the text.
    """
    parts: list[str] = []
    in_word = False  # whether a word goes on in the next window
    for start in range(0, len(text), window):
        piece = text[start : start + window]
        words = " ".join(piece.split())
        if words:
            if parts and not (in_word and not piece[0].isspace()):
                parts.append(" ")
            parts.append(words)
        in_word = not piece[-1].isspace()
    return "".join(parts)
