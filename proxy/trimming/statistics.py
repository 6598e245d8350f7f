"""Statistics of a part of a conversation: counts and quotes, made by code without a model.

The statistics of two parts add up to those of both, so a summary grows without reading its beginning again.
Their size is bounded: they keep the first and the newest requests, and the most frequent tools and values.
Quotes are verbatim, or cut and marked with `…`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, TypeAlias

from msgspec import Struct
from pydantic import BaseModel

from proxy.dialects import Message, Span
from proxy.textscan import beginning_of, identifiers

Language: TypeAlias = Literal["en", "zh"]

_READ: Final = 20_000  # characters of a message that are searched for values
_REQUEST: Final = 200  # characters of a request that are kept
_REPLY: Final = 600  # characters of a reply that are kept
_FIRST_REQUESTS: Final = 10
_NEWEST_REQUESTS: Final = 30
_VALUES: Final = 100
_TOOLS: Final = 100
_OFTEN: Final = 2  # a value in fewer messages is not shown, unless it was an argument of a call

_HAN: Final = re.compile("[\u3400-\u9fff]")
_KANA: Final = re.compile("[\u3040-\u30ff\uac00-\ud7af]")
_WORD: Final = re.compile("[^\\W\\d_\u3400-\u9fff]+")
_CHINESE_SHARE: Final = 0.3  # if Chinese characters are a larger part of all words, the language is Chinese

_FAILED: Final = re.compile(
    r"[\s\[(<#*!>-]{0,20}(?:(?i:error|exception|fatal|failed|failure|traceback)\b|错误|失败|异常|出错)"
    r'|[\s\S]{0,400}?"(?i:error|errors|exception)"\s{0,4}:(?!\s{0,4}(?:null|false|0|""|\[\s{0,4}\]|\{\s{0,4}\}))'
    r'|[\s\S]{0,400}?"(?:success|ok)"\s{0,4}:\s{0,4}false\b'
    r'|[\s\S]{0,400}?"(?:is_error|isError)"\s{0,4}:\s{0,4}true\b'
)
"""The beginning of a tool result that reports a failed call."""


class ToolUse(BaseModel, frozen=True):
    """How often a tool was called."""

    name: str
    calls: int = 0
    errors: int = 0  # number of these calls whose result reports a failure


class UserRequest(BaseModel, frozen=True):
    """A user's request."""

    number: int  # its number among the requests, from 1
    text: str  # its first line, cut


class Seen(BaseModel, frozen=True):
    """A value that messages contained."""

    text: str
    times: int  # number of messages with it; a message whose call has it as an argument counts twice


class Detail(Struct, frozen=True, kw_only=True):
    """A level of detail: how much is shown."""

    requests: int
    request: int  # characters of one of them
    tools: int
    values: int
    reply: int  # characters of the last reply


DETAILS: Final = (
    Detail(requests=40, request=200, tools=100, values=40, reply=600),
    Detail(requests=24, request=160, tools=40, values=25, reply=400),
    Detail(requests=12, request=120, tools=20, values=12, reply=240),
    Detail(requests=6, request=80, tools=12, values=6, reply=160),
    Detail(requests=3, request=60, tools=8, values=0, reply=80),
    Detail(requests=0, request=0, tools=5, values=0, reply=0),
    Detail(requests=0, request=0, tools=0, values=0, reply=0),
)
"""All levels, from everything that is kept down to the first line alone."""


class Statistics(BaseModel, frozen=True):
    """Statistics of a part of a conversation. Their JSON form is stored, and the next statistics are added to it."""

    rounds: int = 0
    roles: Mapping[str, int] = {}  # number of messages by role
    tools: tuple[ToolUse, ...] = ()  # in the order of their first calls
    requests: tuple[UserRequest, ...] = ()
    requested: int = 0  # total number of requests, including those not kept
    values: tuple[Seen, ...] = ()  # in the order in which they were first seen
    reply: str = ""  # the newest reply of the assistant, cut
    han: int = 0  # Chinese characters in messages of user and assistant, without Japanese and Korean ones
    words: int = 0  # words in other scripts

    @property
    def messages(self) -> int:
        """The number of messages."""
        return sum(self.roles.values())

    @property
    def language(self) -> Language:
        """The language that user and assistant speak."""
        return "zh" if self.han > _CHINESE_SHARE * (self.han + self.words) else "en"

    def and_then(self, other: Statistics) -> Statistics:
        """Return the statistics of both parts; `other` is the later part."""
        roles, calls, errors = Counter(self.roles), Counter[str](), Counter[str]()
        roles.update(other.roles)
        for use in self.tools + other.tools:
            calls[use.name] += use.calls
            errors[use.name] += use.errors
        values = Counter[str]()
        for each in self.values + other.values:
            values[each.text] += each.times
        later = [UserRequest(number=self.requested + each.number, text=each.text) for each in other.requests]
        return Statistics(
            rounds=self.rounds + other.rounds,
            roles=dict(roles),
            tools=_tools_of(calls, errors),
            requests=_first_and_newest([*self.requests, *later], _FIRST_REQUESTS, _NEWEST_REQUESTS),
            requested=self.requested + other.requested,
            values=_values_of(values),
            reply=other.reply or self.reply,
            han=self.han + other.han,
            words=self.words + other.words,
        )

    def text(self, language: Language, detail: Detail) -> str:
        """Return the statistics as text, one line for each kind of fact."""
        words, comma = _WORDS[language], _WORDS[language]["comma"]
        names = _ROLES.get(language, {})
        roles = [words["role"].format(role=names.get(role, role), count=count) for role, count in self.roles.items()]
        period = words["period"].format(self.rounds) if self.rounds else ""
        lines = [words["messages"].format(period, self.messages, comma.join(roles))]
        tools = [
            words["tool"].format(use.name, use.calls) + (words["failed"].format(use.errors) if use.errors else "")
            for use in self.tools[: detail.tools]
        ]
        if tools:
            left = len(self.tools) - len(tools)
            lines.append(words["tools"].format(comma.join(tools), words["more_tools"].format(left) if left else ""))
        first = detail.requests // 3  # a third of the shown requests are the first ones, the rest the newest
        requests = _first_and_newest(self.requests, first, detail.requests - first)
        if requests:
            lines.append(words["requests"].format(shown=len(requests), all=self.requested))
            lines += [f"{each.number}. {_cut(each.text, detail.request)}" for each in requests]
        # The most frequent values first, plain names after all others.
        often = [each for each in self.values if each.times >= _OFTEN]
        values = sorted(often, key=lambda each: (_is_plain(each.text), -each.times))[: detail.values]
        if values:
            lines.append(words["values"].format(comma.join(each.text for each in values)))
        if self.reply and detail.reply:
            lines.append(words["reply"].format(_cut(self.reply, detail.reply)))
        return "\n".join(lines)


def statistics_of(messages: Sequence[Message], spans: Iterable[Span], rounds: int) -> Statistics:
    """Return the statistics of the messages in these spans, which make up `rounds` rounds."""
    roles, calls, errors, values = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    requests: list[UserRequest] = []
    reply = ""
    han = words = 0
    for span in spans:
        names = {call.id: call.name for each in messages[span.start : span.stop] for call in each.calls if call.id}
        for message in messages[span.start : span.stop]:
            text = message.text
            roles[message.role] += 1
            seen = dict.fromkeys(identifiers(beginning_of(text, _READ)), 1)
            for call in message.calls:
                seen |= dict.fromkeys(identifiers(beginning_of(call.arguments, _READ)), _OFTEN)
                calls[call.name] += 1
            values.update(seen)
            for result in message.results:
                if _FAILED.match(result.text):
                    name = names.get(result.answers or "", result.name)
                    calls[name] += 0
                    errors[name] += 1
            if message.role == "user":
                line, _, more = text.strip().partition("\n")
                near = line[: _REQUEST * 4]
                request = _cut(" ".join(near.split()), _REQUEST, more=bool(more) or len(near) < len(line))
                requests.append(UserRequest(number=len(requests) + 1, text=request))
            elif message.role != "assistant":
                continue
            elif text.strip():
                near = text[: _REPLY * 4]
                reply = _cut(" ".join(near.split()), _REPLY, more=len(near) < len(text))
            near = text[:_READ]
            # An estimate: Han characters beside kana or hangul are Japanese or Korean, not Chinese.
            han += max(0, len(_HAN.findall(near)) - 2 * len(_KANA.findall(near)))
            words += len(_WORD.findall(near))
    return Statistics(
        rounds=rounds,
        roles=dict(roles),
        tools=_tools_of(calls, errors),
        requests=_first_and_newest(requests, _FIRST_REQUESTS, _NEWEST_REQUESTS),
        requested=len(requests),
        values=_values_of(values),
        reply=reply,
        han=han,
        words=words,
    )


def _tools_of(calls: Mapping[str, int], errors: Mapping[str, int]) -> tuple[ToolUse, ...]:
    most = set(sorted(calls, key=lambda name: -calls[name])[:_TOOLS])
    return tuple(ToolUse(name=name, calls=calls[name], errors=errors[name]) for name in calls if name in most)


def _values_of(seen: Mapping[str, int]) -> tuple[Seen, ...]:
    """Return the values. If there are more than `_VALUES`, the most frequent and then the newest are kept."""
    newest = list(seen)[::-1]
    most = set(sorted(newest, key=lambda text: (_is_plain(text), -seen[text]))[:_VALUES])
    return tuple(Seen(text=text, times=times) for text, times in seen.items() if text in most)


def _first_and_newest(requests: Sequence[UserRequest], first: int, newest: int) -> tuple[UserRequest, ...]:
    if len(requests) <= first + newest:
        return tuple(requests)
    return (*requests[:first], *requests[len(requests) - newest :])


def _cut(text: str, characters: int, *, more: bool = False) -> str:
    """Return the beginning of a text; if something was cut, or there is `more`, it ends with `…`."""
    if len(text) > characters:
        return text[: characters - 1].rstrip("…") + "…"
    return text + "…" if more else text


def _is_plain(value: str) -> bool:
    """Tell whether a value is a name made of letters only (`one_way`, `isError`). Such names are the least telling."""
    return value.replace("_", "").isalpha()


# The templates of the lines in each language.
_WORDS: Final[Mapping[Language, Mapping[str, str]]] = {
    "en": {
        "period": "Rounds 1-{}: ",
        "messages": "{}{} messages ({}).",
        "role": "{count} {role}",
        "comma": ", ",
        "tool": "{} ×{}",
        "failed": " ({} failed)",
        "tools": "Tool calls: {}{}.",
        "more_tools": ", {} more tools",
        "requests": "Requests of the user ({shown} of {all}):",
        "values": "Named most: {}",
        "reply": "Last reply: {}",
    },
    "zh": {
        "period": "第 1-{} 轮：",
        "messages": "{}共 {} 条消息（{}）。",
        "role": "{role} {count}",
        "comma": "，",
        "tool": "{}×{}",
        "failed": "（失败 {}）",
        "tools": "工具调用：{}{}。",
        "more_tools": "，另有 {} 种",
        "requests": "用户请求（{all} 条中的 {shown} 条）：",
        "values": "多次出现：{}",
        "reply": "最后回复：{}",
    },
}
_ROLES: Final[Mapping[str, Mapping[str, str]]] = {
    "zh": {"user": "用户", "assistant": "助手", "tool": "工具", "system": "系统"}
}
