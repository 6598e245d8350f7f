"""Broadcasts: messages in which another agent says that it called a tool, and the digest of many of them.

    <Type: AgentName> [调用工具 ToolName]                                           one call
    <Type: AgentName> [早期工具调用摘要: ToolA×5, ToolB×3, 共 8 次]</Type: AgentName>   many, summed up

The type may be missing. Both exist in English too. What a broadcast looks like is up to patterns with named
groups; a digest looks as it does here, so that it can be read again and added to. Which messages are summed
up is not known here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain
from typing import Final

from msgspec import Struct

from proxy.trimming.regex import checked, group_names, named_groups

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
"""Patterns by the name that stands for them, each with type and without."""

_GROUPS: Final = frozenset({"type", "agent", "tool"})
_IDEOGRAPH: Final = re.compile("[\u3400-\u9fff]")
_DIGEST: Final = re.compile(
    r"<([^<>\n]{1,410})> \[(?:(早期工具调用摘要)|Earlier tool calls): (.+), "
    r"(?:共 ([0-9]{1,9}) 次|([0-9]{1,9}) in all)\]</\1>"
)
_COUNT: Final = re.compile("[0-9]{1,9}")
_NAME: Final = 200
"""Characters of a name that are told at most."""


class Broadcast(Struct, frozen=True, kw_only=True):
    """One call of another agent's, as it told of it."""

    speaker: str
    """Type and name of the agent, as a digest shows them; the name alone where there is no type."""
    tool: str
    chinese: bool
    """Whether it is told in Chinese."""


class Digest(Struct, frozen=True, kw_only=True):
    """Many calls of one agent, counted by tool."""

    speaker: str
    tools: Mapping[str, int]
    """How often each tool was called, in the order of its first call."""
    chinese: bool

    @property
    def text(self) -> str:
        """The message that tells of them."""
        tools = ", ".join(f"{tool}×{calls}" for tool, calls in self.tools.items())
        calls = sum(self.tools.values())
        told = (
            f"早期工具调用摘要: {tools}, 共 {calls} 次"
            if self.chinese
            else f"Earlier tool calls: {tools}, {calls} in all"
        )
        return f"<{self.speaker}> [{told}]</{self.speaker}>"


def checked_pattern(regex: str) -> str:
    """Return a pattern that tells which tool was called, or the name of one that is built in.

    Raises:
        ValueError: RE2 does not take it, or its named groups are not those that are known.
    """
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


def broadcast_of(text: str, patterns: tuple[str, ...], agent: str | None) -> Broadcast | None:
    """Return the call that a message tells of, by the first pattern that fits; None where it tells of none.

    `agent` is who the message says it is from, for patterns that do not say it.
    """
    for pattern in chain.from_iterable(BUILT_IN.get(name, (name,)) for name in patterns):
        groups = named_groups(pattern, text)
        if groups is None:
            continue
        tool, name = _name(groups.get("tool", "")), _name(groups.get("agent", "") or agent or "")
        if not (tool and name):
            continue
        kind = _name(groups.get("type", ""))
        speaker = f"{kind}: {name}" if kind else name
        return Broadcast(speaker=speaker, tool=tool, chinese=_IDEOGRAPH.search(pattern) is not None)
    return None


def broadcast_digest(text: str) -> Digest | None:
    """Return the digest that a text is; None where it is none."""
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


def _name(found: str) -> str:
    """Return a name as a digest can hold it: on one line, without what divides a digest."""
    plain = " ".join(found.split()).replace("×", "x").replace(", ", " ")
    return re.sub("[<>]", "", plain)[:_NAME].strip()
