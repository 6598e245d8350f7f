"""The transcript: messages as text that a model can sum up, in one part or several, fenced.

Each message stands under a line that names its role. These lines, and the tags around it all, carry a token
that is made from the messages themselves and stands nowhere in them: so nothing that was said can pass for
a line of the transcript's own, or for its end. What tools gave is cut to its beginning and its end, the
more the less room there is; what user and assistant said is cut only where it is very long. Reasoning and
media are left out.

It does not know what the transcript is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

from proxy.dialects import Message

_TOKEN: Final = 8
"""Hexadecimal digits of a token."""


class _Detail(NamedTuple):
    """How many characters are shown of what."""

    said: int
    """Of what user and assistant said."""
    called: int
    """Of a call's arguments."""
    given: int
    """Of a tool's result."""


_DETAILS: Final = (
    _Detail(said=16_000, called=4_000, given=6_000),
    _Detail(said=8_000, called=1_500, given=2_000),
    _Detail(said=4_000, called=600, given=800),
    _Detail(said=2_000, called=300, given=300),
)
"""From the most: each is taken where the one before it does not fit."""
_HEAD: Final = 2 / 3
"""Part of what is shown that is its beginning."""
_CHARACTERS: Final = 8
"""So many characters never make less than one token, in any text but runs of one character."""


class Part(NamedTuple):
    """A transcript, or a part of one."""

    text: str
    token: str
    """What its lines carry; it stands nowhere in what was said."""

    @property
    def opening(self) -> str:
        """The tag before it."""
        return f"<transcript-{self.token}>"

    @property
    def closing(self) -> str:
        """The tag after it."""
        return f"</transcript-{self.token}>"

    @property
    def fenced(self) -> str:
        """The text between its tags."""
        return f"{self.opening}\n{self.text}\n{self.closing}"


def parts(messages: Sequence[Message], limit: int, count: Callable[[str], int]) -> tuple[Part, ...]:
    """Return the transcript of messages, in as few parts as it takes for each to have at most `limit` tokens.

    Args:
        messages: In their order; none: no part.
        limit: Tokens of a part; a single message that has more even when it is cut is cut further.
        count: Counts the tokens of a text.
    """
    token = token_of(message.raw.decode("utf-8", "replace") for message in messages)
    shown: list[str] = []
    sizes: list[int] = []
    for detail in _DETAILS:
        shown = [_shown(message, token, detail) for message in messages]
        if sum(map(len, shown)) > limit * _CHARACTERS and detail is not _DETAILS[-1]:
            continue
        sizes = [count(text) + 1 for text in shown]
        if sum(sizes) <= limit:
            break
    found: list[str] = []
    whole: list[str] = []
    size = 0
    for text, tokens in zip(shown, sizes, strict=True):
        if whole and size + tokens > limit:
            found.append("\n".join(whole))
            whole, size = [], 0
        whole.append(_within(text, tokens, limit))
        size += tokens
    if whole:
        found.append("\n".join(whole))
    return tuple(Part(text=text, token=token) for text in found)


def token_of(texts: Iterator[str] | Sequence[str]) -> str:
    """Return a token that is made from texts and stands in none of them."""
    read = list(texts)
    digest = blake2b(digest_size=_TOKEN // 2)
    for text in read:
        digest.update(text.encode("utf-8", "replace") + b"\0")
    while any(digest.hexdigest() in text for text in read):
        digest.update(b"again")
    return digest.hexdigest()


def _shown(message: Message, token: str, detail: _Detail) -> str:
    """Return a message as it stands in the transcript."""
    name = message.agent or message.name
    who = " ".join([message.role or "message", *([name.strip()] if name.strip() else [])])
    lines = [f"[{token} {' '.join(who.split())[:120]}]"]
    text = message.text.strip()
    if text:
        lines.append(_cut(text, detail.given if message.is_result else detail.said))
    lines += [f"[{token} {attachment.kind[:40]}]" for attachment in message.attachments]
    lines += [
        f"[{token} calls {call.name}] {_cut(call.arguments.strip(), detail.called)}" for call in message.calls
    ]
    return "\n".join(lines)


def _within(text: str, tokens: int, limit: int) -> str:
    """Return a text, or of one that has too many tokens so much that it has not."""
    return text if tokens <= limit else _cut(text, max(len(text) * limit // (2 * tokens), 1))


def _cut(text: str, most: int) -> str:
    """Return a text, or of a longer one its beginning and its end, with a mark between."""
    if len(text) <= most:
        return text
    head = int(most * _HEAD)
    tail = most - head
    return f"{text[:head]}\n[… {len(text) - most} characters left out …]\n{text[len(text) - tail :]}"
