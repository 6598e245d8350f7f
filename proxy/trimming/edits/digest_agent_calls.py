"""`digest_agent_calls`: replaces other agents' older messages about tool calls with one count for each agent.

    <Type: AgentName> [调用工具 ToolName]                                           a broadcast: one call
    <Type: AgentName> [早期工具调用摘要: ToolA×5, ToolB×3, 共 8 次]</Type: AgentName>   a digest of many

The type may be missing. Both exist in English too. Broadcasts are recognized by patterns with named groups. Digests
always have the form above, so that a later trim can parse them and add to them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Struct
from pydantic import AfterValidator, Field, field_validator

from proxy.trimming.draft import Draft
from proxy.trimming.edits.edit import BaseEdit
from proxy.trimming.model import Change
from proxy.trimming.settings import Natural, checked, group_names, named_groups

_HEAD: Final = r"^\s*<(?P<type>[^<>:：\n]{1,100})[:：]\s*(?P<agent>[^<>\n]{1,100})>\s*"
_HEAD_WITHOUT_TYPE: Final = r"^\s*<(?P<agent>[^<>:：\n]{1,100})>\s*"
_CHINESE: Final = r"\[调用工具\s*[:：]?\s*"
_ENGLISH: Final = (
    r"\[(?i:(?:calls?|called|calling|uses?|used|using|invokes?|invoked|invoking)\s+(?:the\s+)?(?:tool|function)"
    r"|tool\s+call)\b\s*:?\s*"
)
_TOOL: Final = r"(?P<tool>[^\[\](){}\n]{1,200}?)\s*[\](){}]"

BUILT_IN: Final[Mapping[str, tuple[str, ...]]] = {
    "chinese": (_HEAD + _CHINESE + _TOOL, _HEAD_WITHOUT_TYPE + _CHINESE + _TOOL),
    "english": (_HEAD + _ENGLISH + _TOOL, _HEAD_WITHOUT_TYPE + _ENGLISH + _TOOL),
}
"""The built-in patterns by name, each with and without a type."""

_GROUPS: Final = frozenset({"type", "agent", "tool"})
_IDEOGRAPH: Final = re.compile("[\u3400-\u9fff]")
_DIGEST: Final = re.compile(
    r"<([^<>\n]{1,410})> \[(?:(早期工具调用摘要)|Earlier tool calls): (.+), "
    r"(?:共 ([0-9]{1,9}) 次|([0-9]{1,9}) in all)\]</\1>"
)
_COUNT: Final = re.compile("[0-9]{1,9}")
_NAME: Final = 200  # maximum characters of a name in a digest


def checked_pattern(regex: str) -> str:
    """Return a pattern that has a group `tool`, or the name of a built-in one; raise `ValueError` for any other."""
    if regex in BUILT_IN:
        return regex
    names = group_names(checked(regex))
    if "tool" not in names:
        built_in = ", ".join(BUILT_IN)
        raise ValueError(
            "it must have a group (?P<tool>...), and may have (?P<agent>...) and (?P<type>...); "
            f"or else be one of {built_in}"
        )
    if names - _GROUPS:
        unknown = ", ".join(sorted(names - _GROUPS))
        raise ValueError(f"unknown group {unknown}; allowed here: type, agent, tool")
    return regex


CallPattern: TypeAlias = Annotated[str, Field(min_length=1), AfterValidator(checked_pattern)]
"""A pattern in RE2's syntax with the named group `tool`, or the name of a built-in one."""

_COLON: Final = re.compile("[:：]")


class _AgentCalls(Struct, kw_only=True):
    """One agent's messages about its calls."""

    chinese: bool  # whether the first of them is in Chinese
    calls: list[tuple[int, str]] = []  # (place, tool) of each broadcast
    digests: list[tuple[int, Digest]] = []  # (place, digest) of digests that earlier trims made


class DigestAgentCalls(BaseEdit, frozen=True):
    """Replaces other agents' older messages about tool calls with counts, one message per agent.

    The count is a user message in the place of the first one that it replaces. The newest messages of each agent stay.
    `X-Agent-Name` names the agent that sends the request; messages about its own calls stay. A later trim adds to the
    existing count.
    """

    type: Literal["digest_agent_calls"] = "digest_agent_calls"
    """Name of the edit."""
    keep: Natural = 5
    """Number of newest messages to keep of each agent. With 0, nothing changes."""
    patterns: tuple[CallPattern, ...] = ("chinese", "english")
    """What such a message looks like. `chinese` matches `<Type: AgentName> [调用工具 ToolName]`. `english` matches
    `<Type: AgentName> [calls tool ToolName]` and the like. Both also match without a type. Any other value is a pattern
    in RE2 syntax with the group `(?P<tool>...)`. The optional group `(?P<agent>...)` names the agent; without it, the
    message's field `agent` does. The optional group `(?P<type>...)` names the agent's type. The first pattern that
    matches is used."""

    @field_validator("patterns")
    @classmethod
    def _says_what(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        if not patterns:
            raise ValueError("name at least one pattern; keep: 0 switches the edit off")
        return patterns

    def apply(self, draft: Draft) -> Iterator[Change]:
        """Replace the messages before the newest `keep`, agent by agent."""
        if not self.keep:
            return
        for speaker, group in self._groups(draft).items():
            older = [each for each in group.calls[: -self.keep] if each[0] not in draft.protected]
            if not older:
                continue
            counted: list[tuple[int, Mapping[str, int]]] = [(at, digest.tools) for at, digest in group.digests]
            counted += [(at, {tool: 1}) for at, tool in older]
            counted.sort(key=lambda each: each[0])
            tools = Counter[str]()
            for _, calls in counted:
                tools.update(calls)
            text = Digest(speaker=speaker, tools=tools, chinese=group.chinese).text
            reason = f"not among the newest {self.keep} messages of {speaker} about tool calls"
            place, *others = [at for at, _ in counted]
            digest = draft.entries[place].message.dialect.spoken("user", text)
            yield draft.replacing(place, self.type, reason, digest)
            for position in others:
                yield draft.removing(position, self.type, reason)

    def _groups(self, draft: Draft) -> dict[str, _AgentCalls]:
        groups: dict[str, _AgentCalls] = {}
        for span in draft.spans:
            position, message = span.start, draft.messages[span.start]
            if message is None or span.stop - span.start > 1 or message.calls:
                continue
            if message.role not in {"user", "assistant"}:
                continue
            text, said_by = message.plain_text or "", draft.entries[position].agent
            told = broadcast_digest(text) or broadcast_of(text, self.patterns, said_by)
            if told is None or _is_own(told.speaker, said_by, draft.agent):
                continue
            group = groups.setdefault(told.speaker, _AgentCalls(chinese=told.chinese))
            if isinstance(told, Broadcast):
                group.calls.append((position, told.tool))
            elif position not in draft.protected:
                group.digests.append((position, told))
        return groups


def _is_own(speaker: str, said_by: str | None, asking: str | None) -> bool:
    """Tell whether the speaker is the requesting agent, by the message's field or by name, with or without type."""
    if asking is None:
        return False
    own = ": ".join(part.strip() for part in _COLON.split(asking, maxsplit=1))
    return asking == said_by or speaker in {own, own.partition(": ")[2]} or own == speaker.partition(": ")[2]


class Broadcast(Struct, frozen=True, kw_only=True):
    """A message of another agent about one call."""

    speaker: str  # type and name of the agent as in a digest; the name alone if there is no type
    tool: str
    chinese: bool  # whether the message is in Chinese


class Digest(Struct, frozen=True, kw_only=True):
    """Many calls of one agent, counted by tool."""

    speaker: str
    tools: Mapping[str, int]  # number of calls by tool, in the order of the first calls
    chinese: bool

    @property
    def text(self) -> str:
        """The text of the digest's message."""
        tools = ", ".join(f"{tool}×{calls}" for tool, calls in self.tools.items())
        calls = sum(self.tools.values())
        chinese, english = f"早期工具调用摘要: {tools}, 共 {calls} 次", f"Earlier tool calls: {tools}, {calls} in all"
        told = chinese if self.chinese else english
        return f"<{self.speaker}> [{told}]</{self.speaker}>"


def broadcast_of(text: str, patterns: tuple[str, ...], agent: str | None) -> Broadcast | None:
    """Return the broadcast that a message of `agent` is, by the first pattern that matches; None if none does."""
    for pattern in chain.from_iterable(BUILT_IN.get(name, (name,)) for name in patterns):
        groups = named_groups(pattern, text)
        if groups is None:
            continue
        tool, name = _plain_name(groups.get("tool", "")), _plain_name(groups.get("agent", "") or agent or "")
        if not (tool and name):
            continue
        kind = _plain_name(groups.get("type", ""))
        speaker = f"{kind}: {name}" if kind else name
        return Broadcast(speaker=speaker, tool=tool, chinese=_IDEOGRAPH.search(pattern) is not None)
    return None


def broadcast_digest(text: str) -> Digest | None:
    """Parse a digest; return None if the text is none."""
    found = _DIGEST.fullmatch(text)
    if found is None:
        return None
    speaker, chinese, listed, total, other_total = found.groups()
    tools: dict[str, int] = {}
    for item in listed.split(", "):
        tool, _, calls = item.rpartition("×")
        if not tool or _COUNT.fullmatch(calls) is None:
            return None
        tools[tool] = tools.get(tool, 0) + int(calls)
    if sum(tools.values()) != int(total or other_total):
        return None
    return Digest(speaker=speaker, tools=tools, chinese=chinese is not None)


def _plain_name(found: str) -> str:
    """Return a name in a form safe for a digest: on one line, without the separators of a digest."""
    plain = " ".join(re.sub("[<>]", "", found).split())
    return plain.replace("×", "x").replace(", ", " ")[:_NAME].strip()
