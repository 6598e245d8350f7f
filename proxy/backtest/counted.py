"""A history made ready for replaying: its messages as they are sent, each counted once.

It counts, and knows no policy, no cache and no price.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Final

from proxy.backtest.cache import Segment
from proxy.backtest.histories import History
from proxy.backtest.recall import References
from proxy.conversation import body_of
from proxy.dialects import Message
from proxy.dialects.chat.canonical import canonical
from proxy.tokens import TokenCounter
from proxy.trimming import Entry

_MARKS: Final = (b'"cache_control"', b'"prompt_cache_breakpoint"')
"""Explicit cache marks, as fields of messages or of their parts."""
_REF_DIGITS: Final = 16


class Counted:
    """One history, its counts, and the parts of prompts that its messages are."""

    def __init__(self, history: History, counter: TokenCounter, model: str = "") -> None:
        """Count all of it with `counter`, as for `model` where the history names none."""
        self.history: Final = history
        self.model: Final = history.model or model
        """The model that is asked; empty where nobody knows."""
        self._counter = counter
        self._segments: dict[bytes, Segment] = {}
        self._marked: set[bytes] = set()
        self.instructions: Final = tuple([message.without_own_fields() for message in history.instructions])
        self.entries: Final = tuple(
            [self._entry(position, message) for position, message in enumerate(history.messages)]
        )
        """The log; nothing was decided on arrival yet."""
        self.messages: Final = tuple([entry.message for entry in self.entries])
        """The log as it is sent when nothing is trimmed."""
        self.tools: Final = self._tools()
        self.fixed_tokens: Final = sum([part.tokens for part in self.tools]) + sum(
            [self.count(message) for message in self.instructions]
        )
        """Tokens of instructions and tools."""

    def count(self, message: Message) -> int:
        """Return the tokens of any message."""
        return self.segment(message).tokens

    def segment(self, message: Message) -> Segment:
        """Return a message as a part of a prompt. Cache marks are no part of what is compared."""
        found = self._segments.get(message.raw)
        if found is None:
            text = message.raw
            if any(mark in text for mark in _MARKS):
                self._marked.add(text)
                text = canonical(message.data)
            found = self._segments[message.raw] = Segment(
                text=text, tokens=self._counter.message(message, self.model)
            )
        return found

    def is_marked(self, message: Message) -> bool:
        """Tell whether a message carries an explicit cache mark."""
        self.segment(message)
        return message.raw in self._marked

    def prompt(self, messages: Sequence[Message]) -> list[Segment]:
        """Return what a model reads, in the order in which it is cached: tools, then messages."""
        return [*self.tools, *map(self.segment, messages)]

    def marks(self, messages: Sequence[Message], beside: Iterable[int] = ()) -> set[int]:
        """Return after which parts of the prompt of these messages an explicit cache mark stands.

        These are the client's own, and those at the places `beside`.
        """
        ahead = len(self.tools)
        found = {place + ahead for place in beside}
        if self._marked:
            found.update(place + ahead for place, message in enumerate(messages) if self.is_marked(message))
        return found

    def reply_tokens(self, position: int) -> int:
        """Return the tokens that a model wrote for the reply at `position`, its reasoning included."""
        message = self.messages[position]
        tokens = self.count(message)
        for name in ("reasoning_content", "reasoning"):
            thought = message.data.get(name)
            if isinstance(thought, str) and thought:
                return tokens + self._counter.text(thought, self.model)
        return tokens

    def agent(self, position: int) -> str | None:
        """Return the agent that asked for the reply at `position`, where the message says so."""
        return self.entries[position].agent if position < len(self.entries) else None

    @cached_property
    def references(self) -> References:
        """What the history's tool calls used; found out when it is first asked for."""
        tools = (self.history.tools or b"").decode()
        return References(self.instructions, self.messages, tools=tools)

    def _tools(self) -> tuple[Segment, ...]:
        raw = self.history.tools
        return () if raw is None else (Segment(text=raw, tokens=self._counter.json(raw, self.model)),)

    def _entry(self, position: int, message: Message) -> Entry:
        sent = message.without_own_fields()
        own = message.data if message.own_fields else {}
        agent = own.get("agent")
        return Entry(
            message=sent,
            tokens=self.count(sent),
            ref=f"ref_{body_of(message)[:_REF_DIGITS]}",
            position=position,
            agent=agent if isinstance(agent, str) else None,
            is_internal=own.get("is_internal") is True,
        )
