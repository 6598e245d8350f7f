"""What a part of a conversation comes to, in numbers and in its own words: made by code, no model is asked.

Statistics of two parts, one after the other, add up to those of both, so that a summary grows without its
beginning being read again. They are kept within a fixed size: of requests the first ones and the newest stay,
of tools and values those that were seen most; what went is forgotten. Nothing is put in other
words: what is shown is verbatim, or cut with a mark.

It does not know which part of a conversation it is given, nor why.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, TypeAlias

from msgspec import Struct
from pydantic import BaseModel

from proxy.dialects import Message, Span
from proxy.textscan import beginning_of, identifiers

Language: TypeAlias = Literal["en", "zh"]

_READ: Final = 20_000  # characters of a message in which values are looked for
_REQUEST: Final = 200  # characters of a request that are kept
_REPLY: Final = 600  # characters of a reply that are kept
_FIRST_REQUESTS: Final = 10
_NEWEST_REQUESTS: Final = 30
_VALUES: Final = 100
_TOOLS: Final = 100
_OFTEN: Final = 2  # a value that stands in fewer messages is not shown, unless it was the argument of a call

_HAN: Final = re.compile("[\u3400-\u9fff]")
_KANA: Final = re.compile("[\u3040-\u30ff\uac00-\ud7af]")
_WORD: Final = re.compile("[^\\W\\d_\u3400-\u9fff]+")
_CHINESE_SHARE: Final = 0.3
"""Chinese characters, of these and words of other writing, from which on a conversation counts as Chinese."""

_FAILED: Final = re.compile(
    r"[\s\[(<#*!>-]{0,20}(?:(?i:error|exception|fatal|failed|failure|traceback)\b|错误|失败|异常|出错)"
    r'|[\s\S]{0,400}?"(?i:error|errors|exception)"\s{0,4}:(?!\s{0,4}(?:null|false|0|""|\[\s{0,4}\]|\{\s{0,4}\}))'
    r'|[\s\S]{0,400}?"(?:success|ok)"\s{0,4}:\s{0,4}false\b'
    r'|[\s\S]{0,400}?"(?:is_error|isError)"\s{0,4}:\s{0,4}true\b'
)
"""How a tool result begins that says that the call failed."""


class ToolUse(BaseModel, frozen=True):
    """How often a tool was called."""

    name: str
    calls: int = 0
    errors: int = 0  # of these calls, those whose result says that it failed


class UserRequest(BaseModel, frozen=True):
    """What a user asked."""

    number: int  # its place among the requests, from 1
    text: str  # its first line, cut


class Seen(BaseModel, frozen=True):
    """A value that stood in messages."""

    text: str
    times: int  # messages in which it stood; as the argument of a call it counts twice


class Detail(Struct, frozen=True, kw_only=True):
    """How much is shown."""

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
"""From all that is kept down to the first line."""


class Statistics(BaseModel, frozen=True):
    """Of a part of a conversation; its JSON form is what the next ones are made from."""

    rounds: int = 0
    roles: Mapping[str, int] = {}  # messages of each role
    tools: tuple[ToolUse, ...] = ()  # in the order of their first calls
    requests: tuple[UserRequest, ...] = ()
    requested: int = 0  # how many requests there were, those included that are not kept
    values: tuple[Seen, ...] = ()  # in the order in which they were first seen
    reply: str = ""  # the newest reply of the assistant, cut
    han: int = 0  # chinese characters of what user and assistant said, where it is not Japanese or Korean
    words: int = 0  # words in other writing

    @property
    def messages(self) -> int:
        """How many there were."""
        return sum(self.roles.values())

    @property
    def language(self) -> Language:
        """The language that user and assistant speak."""
        return "zh" if self.han > _CHINESE_SHARE * (self.han + self.words) else "en"

    def and_then(self, other: Statistics) -> Statistics:
        """Return the statistics of both parts, `other` being the later one."""
        roles = dict(self.roles)
        for role, count in other.roles.items():
            roles[role] = roles.get(role, 0) + count
        requests = list(self.requests)
        requests += [UserRequest(number=self.requested + each.number, text=each.text) for each in other.requests]
        return Statistics(
            rounds=self.rounds + other.rounds,
            roles=roles,
            tools=_tools_of(_added((use.name, (use.calls, use.errors)) for use in self.tools + other.tools)),
            requests=_first_and_newest(requests, _FIRST_REQUESTS, _NEWEST_REQUESTS),
            requested=self.requested + other.requested,
            values=_values_of(_times((each.text, each.times) for each in self.values + other.values)),
            reply=other.reply or self.reply,
            han=self.han + other.han,
            words=self.words + other.words,
        )

    def text(self, language: Language, detail: Detail) -> str:
        """Return them as text, a line for each kind of thing."""
        return "\n".join(_lines(self, _WORDS[language], detail))


def statistics_of(messages: Sequence[Message], spans: Iterable[Span], rounds: int) -> Statistics:
    """Return the statistics of the messages of these spans, which hold so many rounds."""
    roles: dict[str, int] = {}
    uses: list[tuple[str, tuple[int, int]]] = []
    requests: list[UserRequest] = []
    values: list[tuple[str, int]] = []
    reply = ""
    han = words = 0
    for span in spans:
        names = {call.id: call.name for call in messages[span.start].calls if call.id}
        for message in messages[span.start : span.stop]:
            roles[message.role] = roles.get(message.role, 0) + 1
            text = message.text
            uses += _uses(message, text, names)
            values += _seen(message, text)
            if message.role == "user":
                requests.append(UserRequest(number=len(requests) + 1, text=_first_line(text)))
            elif message.role != "assistant":
                continue
            elif text.strip():
                reply = _on_one_line(text)
            han, words = han + _chinese_characters(text[:_READ]), words + len(_WORD.findall(text[:_READ]))
    return Statistics(
        rounds=rounds,
        roles=roles,
        tools=_tools_of(_added(uses)),
        requests=_first_and_newest(requests, _FIRST_REQUESTS, _NEWEST_REQUESTS),
        requested=len(requests),
        values=_values_of(_times(values)),
        reply=reply,
        han=han,
        words=words,
    )


def _uses(message: Message, text: str, names: Mapping[str, str]) -> list[tuple[str, tuple[int, int]]]:
    """Return the calls of a message by tool, as (calls, errors), or the failure that it tells of."""
    if message.is_result:
        called = names.get(message.answers or "", message.name)
        return [(called, (0, 1))] if _FAILED.match(text) else []
    return [(call.name, (1, 0)) for call in message.calls]


def _seen(message: Message, text: str) -> Iterable[tuple[str, int]]:
    """Return the values of a message that name something, each once."""
    found = dict.fromkeys(identifiers(beginning_of(text, _READ)), 1)
    for call in message.calls:
        found |= dict.fromkeys(identifiers(beginning_of(call.arguments, _READ)), _OFTEN)
    return found.items()


def _added(uses: Iterable[tuple[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    """Return calls and errors added up by tool, the tools in their order."""
    found: dict[str, tuple[int, int]] = {}
    for name, (calls, errors) in uses:
        known = found.get(name, (0, 0))
        found[name] = known[0] + calls, known[1] + errors
    return found


def _times(values: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return how often each value was seen, in the order of their first times."""
    found: dict[str, int] = {}
    for text, times in values:
        found[text] = found.get(text, 0) + times
    return found


def _tools_of(uses: Mapping[str, tuple[int, int]]) -> tuple[ToolUse, ...]:
    """Return the tools; of very many those that were called most."""
    most = set(sorted(uses, key=lambda name: -uses[name][0])[:_TOOLS])
    return tuple(
        ToolUse(name=name, calls=calls, errors=errors) for name, (calls, errors) in uses.items() if name in most
    )


def _values_of(seen: Mapping[str, int]) -> tuple[Seen, ...]:
    """Return the values; of very many those that were seen most, and of these the newest."""
    newest = list(seen)
    newest.reverse()
    most = set(sorted(newest, key=lambda text: (_is_plain(text), -seen[text]))[:_VALUES])
    return tuple(Seen(text=text, times=times) for text, times in seen.items() if text in most)


def _chinese_characters(text: str) -> int:
    """Return how many Chinese characters a text has that are not those of Japanese or Korean, about."""
    return max(0, len(_HAN.findall(text)) - 2 * len(_KANA.findall(text)))


def _first_and_newest(requests: Sequence[UserRequest], first: int, newest: int) -> tuple[UserRequest, ...]:
    """Return the first and the newest of the requests."""
    if len(requests) <= first + newest:
        return tuple(requests)
    return (*requests[:first], *requests[len(requests) - newest :])


def _first_line(text: str) -> str:
    """Return the first line of a text that says anything, cut, with a mark where there is more."""
    line, _, more = text.strip().partition("\n")
    near = line[: _REQUEST * 4]
    return _cut(" ".join(near.split()), _REQUEST, more=bool(more) or len(near) < len(line))


def _on_one_line(text: str) -> str:
    """Return the beginning of a text without line ends, cut."""
    near = text[: _REPLY * 4]
    return _cut(" ".join(near.split()), _REPLY, more=len(near) < len(text))


def _cut(text: str, characters: int, *, more: bool = False) -> str:
    """Return the beginning of a text, with a mark where it is not all of it."""
    if len(text) > characters:
        return text[: characters - 1].rstrip("…") + "…"
    return text + "…" if more else text


def _most(statistics: Statistics, detail: Detail) -> list[Seen]:
    """Return the values that are shown: those that tell least last, before that those seen most first."""
    often = [each for each in statistics.values if each.times >= _OFTEN]
    return sorted(often, key=lambda each: (_is_plain(each.text), -each.times))[: detail.values]


def _is_plain(value: str) -> bool:
    """Tell whether a value is a name made of words (`one_way`, `isError`), which tells least."""
    return value.replace("_", "").isalpha()


def _shown(statistics: Statistics, detail: Detail) -> list[UserRequest]:
    """Return the requests that are shown: of many a third from the beginning."""
    return list(_first_and_newest(statistics.requests, detail.requests // 3, detail.requests - detail.requests // 3))


class _Wording(Struct, frozen=True, kw_only=True):
    """What the lines say in a language, with places for what is counted and quoted."""

    period: str
    messages: str
    role: str
    comma: str
    tool: str
    failed: str
    tools: str
    more_tools: str
    requests: str
    values: str
    reply: str
    roles: Mapping[str, str]  # roles whose name is another one


_WORDS: Final[Mapping[Language, _Wording]] = {
    "en": _Wording(
        period="Rounds 1-{}: ",
        messages="{}{} messages ({}).",
        role="{count} {role}",
        comma=", ",
        tool="{} ×{}",
        failed=" ({} failed)",
        tools="Tool calls: {}{}.",
        more_tools=", {} more tools",
        requests="Requests of the user ({shown} of {all}):",
        values="Named most: {}",
        reply="Last reply: {}",
        roles={},
    ),
    "zh": _Wording(
        period="第 1-{} 轮：",
        messages="{}共 {} 条消息（{}）。",
        role="{role} {count}",
        comma="，",
        tool="{}×{}",
        failed="（失败 {}）",
        tools="工具调用：{}{}。",
        more_tools="，另有 {} 种",
        requests="用户请求（{all} 条中的 {shown} 条）：",
        values="多次出现：{}",
        reply="最后回复：{}",
        roles={"user": "用户", "assistant": "助手", "tool": "工具", "system": "系统"},
    ),
}


def _lines(statistics: Statistics, words: _Wording, detail: Detail) -> list[str]:
    """Return the lines in the language of these words."""
    roles = words.comma.join(
        words.role.format(role=words.roles.get(role, role), count=count) for role, count in statistics.roles.items()
    )
    period = words.period.format(statistics.rounds) if statistics.rounds else ""
    lines = [words.messages.format(period, statistics.messages, roles)]
    tools = [
        words.tool.format(use.name, use.calls) + (words.failed.format(use.errors) if use.errors else "")
        for use in statistics.tools[: detail.tools]
    ]
    if tools:
        left = len(statistics.tools) - len(tools)
        more = words.more_tools.format(left) if left else ""
        lines.append(words.tools.format(words.comma.join(tools), more))
    requests = _shown(statistics, detail)
    if requests:
        lines.append(words.requests.format(shown=len(requests), all=statistics.requested))
        lines += [f"{each.number}. {_cut(each.text, detail.request)}" for each in requests]
    values = _most(statistics, detail)
    if values:
        lines.append(words.values.format(words.comma.join(each.text for each in values)))
    if statistics.reply and detail.reply:
        lines.append(words.reply.format(_cut(statistics.reply, detail.reply)))
    return lines
