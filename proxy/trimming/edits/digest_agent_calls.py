"""`digest_agent_calls`: what other agents told of their older tool calls becomes one count for each agent."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import AfterValidator, Field, field_validator

from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.trimming.broadcasts import Broadcast, Digest, broadcast_digest, broadcast_of, checked_pattern
from proxy.trimming.draft import Draft
from proxy.trimming.edits.edit import BaseEdit
from proxy.trimming.plan import Change
from proxy.trimming.section import Natural

CallPattern: TypeAlias = Annotated[str, Field(min_length=1), AfterValidator(checked_pattern)]
"""A pattern in RE2's syntax with the named group `tool`, or the name of one that is built in."""

_COLON: Final = re.compile("[:：]")


@dataclass(slots=True)
class _Group:
    """What one agent told of its calls."""

    chinese: bool
    """Whether the first of it is in Chinese."""
    calls: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """Position and tool of each message that stands whole."""
    digests: list[tuple[int, Digest]] = field(default_factory=list[tuple[int, Digest]])
    """Those that an earlier move made, with their positions."""


class DigestAgentCalls(BaseEdit, frozen=True):
    """Of each other agent's messages about tool calls the newest stay; the older ones become one, a count.

    It is a user message in the place of the first of them. Who asks is told by `X-Agent-Name`; messages about
    its own calls stay. What a later move adds is counted into the message that stands already.
    """

    type: Literal["digest_agent_calls"] = "digest_agent_calls"
    """Which strategy this is."""
    keep: Natural = 5
    """So many of each agent's messages stay, the newest ones; with 0 nothing is changed."""
    patterns: tuple[CallPattern, ...] = ("chinese", "english")
    """What such a message looks like: `chinese` stands for `<Type: AgentName> [调用工具 ToolName]`, `english`
    for `<Type: AgentName> [calls tool ToolName]` and the like, both without a type too; or else a pattern in
    RE2's syntax with the group `(?P<tool>...)`, where `(?P<agent>...)` names the agent (without it the field
    `agent` of the message does) and `(?P<type>...)` its type. The first that fits is taken."""

    @field_validator("patterns")
    @classmethod
    def _says_what(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        """Refuse a list of nothing."""
        if not patterns:
            raise ValueError("name at least one pattern; keep: 0 switches the edit off")
        return patterns

    def apply(self, draft: Draft) -> Iterator[Change]:
        """Replace what is older than the newest `keep`, agent by agent."""
        if not self.keep:
            return
        for speaker, group in self._groups(draft).items():
            older = [each for each in group.calls[: -self.keep] if each[0] not in draft.protected]
            if not older:
                continue
            tools: dict[str, int] = {}
            counted = [(at, digest.tools) for at, digest in group.digests]
            counted += [(at, {tool: 1}) for at, tool in older]
            counted.sort(key=lambda each: each[0])
            for _, calls in counted:
                for tool, number in calls.items():
                    tools[tool] = tools.get(tool, 0) + number
            digest = ChatMessage.of(
                {"role": "user", "content": Digest(speaker=speaker, tools=tools, chinese=group.chinese).text}
            )
            reason = f"not among the newest {self.keep} messages of {speaker} about tool calls"
            place, *others = [at for at, _ in counted]
            yield draft.replacing(place, self.type, reason, digest)
            for position in others:
                yield draft.removing(position, self.type, reason)

    def _groups(self, draft: Draft) -> dict[str, _Group]:
        """Return what each other agent told, by agent, in the order of their first messages."""
        groups: dict[str, _Group] = {}
        for span in draft.spans:
            position, message = span.start, draft.messages[span.start]
            if message is None or span.stop - span.start > 1 or not _is_said(message):
                continue
            text, said_by = message.plain_text or "", draft.entries[position].agent
            told = broadcast_digest(text) or broadcast_of(text, self.patterns, said_by)
            if told is None or _is_own(told.speaker, said_by, draft.agent):
                continue
            group = groups.setdefault(told.speaker, _Group(chinese=told.chinese))
            if isinstance(told, Broadcast):
                group.calls.append((position, told.tool))
            elif position not in draft.protected:
                group.digests.append((position, told))
        return groups


def _is_own(speaker: str, said_by: str | None, asking: str | None) -> bool:
    """Tell whether it was the agent that asks: by the message's field or its name, with type or without."""
    if asking is None:
        return False
    own = ": ".join(part.strip() for part in _COLON.split(asking, maxsplit=1))
    return asking == said_by or own == speaker or own == _name(speaker) or _name(own) == speaker


def _name(speaker: str) -> str:
    """Return the name of an agent without its type; "" where it has none."""
    return speaker.partition(": ")[2]


def _is_said(message: Message) -> bool:
    """Tell whether a user or an assistant says it and does nothing else."""
    return message.role in {"user", "assistant"} and not message.calls
