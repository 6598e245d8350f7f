"""A dialect with a very different JSON shape. It shows what the rest of the proxy may require of a dialect.

    {"who": "rules", "says": ["Be brief."]}                                   instructions
    {"who": "human", "says": ["Look at this.", {"picture": "cat.png"}]}       a user message
    {"who": "bot", "says": [], "asks": [{"key": "a", "tool": "look", "with": {"at": 1}}]}
    {"who": "result", "key": "a", "tool": "look", "says": ["a cat"]}          a tool result

`says` may be one text instead of a list. Each entry of `asks` is followed by one result with its `key`.

    {"model": "m", "talk": [...], "flow": true, "tools": ["look"]}            a request; `flow` asks for a stream
    {"said": {"who": "bot", ...}, "why": "done", "spent": {"in": 9, "out": 2}}        an answer
    event: piece / data: {"add": "text"}, event: over / data: {"why": ..., "spent": ...}    the same as a stream
    {"wrong": "too big: 900 of 800"}                                          an error

The proxy's own tools are offered only if the answer is not a stream.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any, ClassVar, Final, cast

import orjson
from msgspec import Struct

from proxy.dialects import (
    INSTRUCTION_ROLES,
    Attachment,
    Call,
    Countable,
    Dialect,
    JsonObject,
    Message,
    Overflow,
    OwnCalls,
    ReasoningMode,
    Replies,
    ReplySide,
    Request,
    RequestSide,
    Span,
    SpokenRole,
    ToolDefinition,
    ToolOffer,
)
from proxy.dialects.base import RulesWalk
from proxy.dialects.jsontext import ITEMS, RawFields, emitted
from proxy.dialects.own_tools import BodyFilter, RoundEnding, StreamFilter
from proxy.dialects.sse import Event
from proxy.errors import InvalidRequest, PalimpsestError

NO_RESULT: Final = "(nothing came back)"
_ROLES: Final = {"rules": "system", "human": "user", "bot": "assistant", "result": "tool"}
_WHO: Final = {role: who for who, role in _ROLES.items()}


class ToyMessage(Message):
    """One entry of a toy conversation."""

    __slots__ = ()

    dialect: ClassVar[Dialect]

    @property
    def _says(self) -> list[Any]:
        says = self.data.get("says", [])
        return says if isinstance(says, list) else [says]

    @property
    def _asks(self) -> list[JsonObject]:
        return cast("list[JsonObject]", self.data.get("asks", []))

    # reading

    @property
    def role(self) -> str:
        return _ROLES.get(self.data.get("who", ""), "")

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple([part if isinstance(part, str) else "" for part in self._says])

    @property
    def plain_text(self) -> str | None:
        return None if self.attachments else self.text

    @property
    def name(self) -> str:
        return str(self.data.get("tool", ""))

    def _read_calls(self) -> list[Call]:
        return [
            Call(id=ask["key"], name=ask["tool"], arguments=orjson.dumps(ask["with"]).decode()) for ask in self._asks
        ]

    @property
    def is_result(self) -> bool:
        return self.role == "tool"

    @property
    def answers(self) -> str | None:
        return self.data.get("key") if self.is_result else None

    @property
    def has_content(self) -> bool:
        return bool(self.text or self.attachments)

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        return tuple(
            [
                Attachment(place=place, kind="picture", is_image=True, description=part["picture"])
                for place, part in enumerate(self._says)
                if not isinstance(part, str)
            ]
        )

    @property
    def display_text(self) -> str:
        return self.text

    def countable(self) -> Countable:
        return Countable(texts=tuple(text for text in self.all_texts() if text), media=len(self.attachments))

    def readable(self) -> str:
        lines = [self.text] if self.text else []
        lines += [f"[picture: {each.description}]" for each in self.attachments]
        lines += [f"[call of {call.name}: {call.arguments}]" for call in self.calls]
        return "\n".join(lines)

    # rewriting

    def with_text(self, text: str) -> ToyMessage:
        return self.replacing("says", [text])

    def with_content_of(self, other: Message) -> ToyMessage:
        return self.replacing("says", other.data.get("says", []))

    def with_texts(self, texts: Sequence[str | None]) -> ToyMessage:
        pairs = zip(self._says, texts, strict=True)
        says = [text if isinstance(part, str) else part for part, text in pairs if text is not None]
        return self.replacing("says", says)

    def with_appended(self, text: str) -> ToyMessage:
        return self.replacing("says", [*self._says, text])

    def with_calls(self, kept: Collection[int]) -> ToyMessage:
        return self.replacing("asks", [ask for place, ask in enumerate(self._asks) if place in kept])

    def with_arguments(self, arguments: Sequence[str]) -> ToyMessage:
        pairs = zip(self._asks, arguments, strict=True)
        return self.replacing("asks", [{**ask, "with": orjson.loads(text)} for ask, text in pairs])

    def with_notes(self, notes: Mapping[int, str]) -> ToyMessage:
        return self.replacing("says", [notes.get(place, part) for place, part in enumerate(self._says)])

    def without_unfinished_calls(self) -> ToyMessage:
        return self

    def as_request(self, reasoning: ReasoningMode, *, partial: bool) -> ToyMessage:
        del partial
        return self.without("thinks") if reasoning == "drop" else self


# requests


def _parse(body: bytes) -> Request:
    try:
        fields = RawFields(body)
        messages = tuple([ToyMessage(bytes(raw)) for raw in ITEMS.decode(fields["talk"])])
    except (ValueError, KeyError) as why:
        raise InvalidRequest("This is no talk.", param="talk") from why
    values = {name: orjson.loads(text) for name, text in fields.items() if name != "talk"}
    tools = values.pop("tools", [])
    lead = next((at for at, each in enumerate(messages) if each.role not in INSTRUCTION_ROLES), len(messages))
    return Request(
        raw=body,
        fields=fields,
        instructions=messages[:lead],
        messages=messages[lead:],
        model=values.get("model", ""),
        stream=values.get("flow", False),
        has_tools=bool(tools),
        tools=fields["tools"] if tools else None,
        wants_usage=True,
        replies=tuple([at for at, each in enumerate(messages[lead:]) if each.role == "assistant"]),
        parameters=values,
    )


def _compose(
    request: Request,
    *,
    instructions: Sequence[Message] | None = None,
    messages: Sequence[Message] | None = None,
    add_usage: bool = False,
    drop_fields: Collection[str] = (),
    cache_key: str | None = None,
    cache_newest: bool = False,
    tools: bytes | None = None,
) -> bytes:
    del add_usage, drop_fields, cache_key
    said = (
        *(request.instructions if instructions is None else instructions),
        *(request.messages if messages is None else messages),
    )
    sent = tuple([message.without_own_fields() for message in said])
    changes: dict[str, bytes | None] = {}
    if sent != (*request.instructions, *request.messages):
        changes["talk"] = b"[%b]" % b",".join([message.raw for message in sent])
    if tools is not None and tools != request.tools:
        changes["tools"] = tools
    return emitted({**request.fields, **changes}) if changes else request.raw


def _add_tools(tools: bytes | None, own: Sequence[ToolDefinition]) -> ToolOffer:
    names = tuple([tool.name for tool in own])
    return ToolOffer(names=names, tools=orjson.dumps([*orjson.loads(tools or b"[]"), *names]))


def _overflow_of(status: int, body: bytes) -> Overflow | None:
    found = re.search(rb"too big: (\d+) of (\d+)", body) if status == 400 else None
    return None if found is None else Overflow(window=int(found[2]), asked=int(found[1]), reply=None)


def _decides_caching(fields: Mapping[str, bytes]) -> bool:
    return "caching" in fields


def _refuses_usage(body: bytes) -> bool:
    return b"spent" in body


# replies


def _usage_in(data: JsonObject) -> JsonObject | None:
    spent = data.get("spent")
    return None if spent is None else {"prompt_tokens": spent["in"], "completion_tokens": spent["out"]}


def _read(body: bytes) -> Replies:
    data = orjson.loads(body)
    said = data.get("said")
    return Replies(
        messages=() if said is None else (ToyMessage.of(said),),
        finish_reasons=() if said is None else (data["why"],),
        usage=_usage_in(data),
        model=data.get("model"),
        error=data.get("wrong"),
    )


class _Reader:
    """One streamed answer."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._why: str | None = None
        self._usage: JsonObject | None = None
        self._error: str | None = None

    @property
    def replies(self) -> Replies:
        messages = (bot("".join(self._texts)),) if self._texts else ()
        reasons = (self._why,) if self._texts else ()
        return Replies(messages=messages, finish_reasons=reasons, usage=self._usage, model=None, error=self._error)

    @property
    def failed(self) -> bool:
        return self._error is not None

    def take(self, event: Event) -> bool:
        data = orjson.loads(event.data or b"{}")
        if "add" in data:
            self._texts.append(data["add"])
        self._why, self._error = data.get("why", self._why), data.get("wrong", self._error)
        self._usage = _usage_in(data) or self._usage
        return False


class _ToyRound(Struct, frozen=True, kw_only=True):
    """One answer."""

    names: Collection[str]
    replies: Replies
    says: bool = True
    cut: bool = False
    finish: str = ""

    @property
    def message(self) -> Message:
        return self.replies.messages[0] if self.replies.messages else bot()

    @property
    def usage(self) -> JsonObject | None:
        return self.replies.usage

    @property
    def calls(self) -> OwnCalls:
        own = tuple([call for call in self.message.calls if call.name in self.names])
        return OwnCalls(message=self.message, own=own, others=len(own) < len(self.message.calls))


class _BodyFilter(BodyFilter[_ToyRound]):
    """One reply that is not streamed, with its rounds."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._said: list[str] = []
        self._round = _ToyRound(names=names, replies=_read(b"{}"))

    @property
    def _has_said(self) -> bool:
        return bool(self._said)

    def _begin(self) -> None:
        self._said.append(self._round.message.text)
        self._round = _ToyRound(names=self._names, replies=_read(b"{}"))

    def _read(self, body: bytes) -> bool:
        self._body = body
        self._round = _ToyRound(names=self._names, replies=_read(body))
        theirs = [at for at, call in enumerate(self._round.message.calls) if call.name not in self._names]
        self.last = self._round.message.with_calls(theirs)
        return True

    def _shown(self, how: RoundEnding) -> bytes:
        said = self.last.with_text("".join([*self._said, self.last.text, how.text]))
        return emitted({**RawFields(self._body), "said": said.raw})


def _stream_filter(names: Collection[str], hides_usage: bool) -> StreamFilter[Any]:
    raise AssertionError((names, hides_usage))  # no tools are offered in a stream


def _answer(said: Message, why: str) -> bytes:
    return orjson.dumps({"said": said.data, "why": why, "spent": {"in": 0, "out": 0}})


def _repeat(
    reply: Message, *, exchange: str, created: int, model: str, stream: bool, usage: bool
) -> tuple[bytes, bytes]:
    del exchange, created, model, stream, usage
    return b"application/json", _answer(reply, why="asks")


def _error_words(body: bytes) -> str | None:
    return cast("str | None", orjson.loads(body).get("wrong"))


def _error_body(error: PalimpsestError) -> bytes:
    return orjson.dumps({"wrong": error.message})


def _error_event(body: bytes) -> bytes:
    return b"event: broken\ndata: %b\n\n" % body


class ToyProblem(StrEnum):
    """What can be wrong with an entry."""

    MISSING = "missing result"
    ORPHAN = "result of nothing"


class ToyDialect(Dialect):
    """The toy API."""

    name: ClassVar[str] = "toy"
    message: ClassVar[type[Message]] = ToyMessage
    cures: ClassVar[Mapping[StrEnum, str]] = {ToyProblem.MISSING: "put in"}
    requests: ClassVar[RequestSide] = RequestSide(
        path="/talk",
        parse=_parse,
        compose=_compose,
        leaves_room=lambda request: not request.stream,
        add_tools=_add_tools,
        decides_caching=_decides_caching,
        overflow_of=_overflow_of,
        refuses_usage=_refuses_usage,
    )
    replies: ClassVar[ReplySide] = ReplySide(
        read=_read,
        reader=_Reader,
        ends=(b"over",),
        body_filter=_BodyFilter,
        stream_filter=_stream_filter,
        repeat=_repeat,
        calling="asks",
        error_words=_error_words,
        error_body=_error_body,
        error_event=_error_event,
    )

    def spoken(self, role: SpokenRole, text: str) -> ToyMessage:
        return ToyMessage.of({"who": _WHO[role], "says": [text]})

    def result(self, call: str, text: str) -> ToyMessage:
        return ToyMessage.of({"who": "result", "key": call, "says": [text]})

    def canonical(self, message: Message) -> bytes:
        data = message.data
        says = data.get("says", [])
        form = {**data, "says": says if isinstance(says, list) else [says]}
        for name in ("agent", "is_internal", "thinks"):
            form.pop(name, None)
        return b"toy:" + orjson.dumps(form, option=orjson.OPT_SORT_KEYS)

    def spans(self, messages: Sequence[Message]) -> tuple[Span, ...]:
        spans: list[Span] = []
        position = number = 0
        while position < len(messages):
            start = position
            position += 1
            number += messages[start].role == "user"
            while messages[start].calls and position < len(messages) and messages[position].is_result:
                position += 1
            spans.append(Span(start=start, stop=position, round=number))
        return tuple(spans)

    def walk(self, messages: Sequence[Message]) -> RulesWalk:
        """Insert a text for each missing result; drop each result without a call."""
        walk = RulesWalk()
        for span in self.spans(messages):
            waiting = [call.id for call in messages[span.start].calls]
            for position in range(span.start, span.stop):
                message = messages[position]
                if message.is_result and message.answers not in waiting:
                    walk.problems.append((position, ToyProblem.ORPHAN))
                    continue
                if message.is_result and message.answers is not None:
                    waiting.remove(message.answers)
                walk.keep(position, message)
            for key in waiting:
                walk.problems.append((span.start, ToyProblem.MISSING))
                walk.keep(None, self.result(key, NO_RESULT))
        return walk


DIALECT: Final = ToyDialect()
TOY: Final = DIALECT
ToyMessage.dialect = TOY


def rules(text: str) -> ToyMessage:
    return TOY.spoken("system", text)


def human(text: str, **fields: Any) -> ToyMessage:
    return ToyMessage.of({"who": "human", "says": [text], **fields})


def bot(text: str = "", **asks: tuple[str, Any]) -> ToyMessage:
    """Return a reply; `asks` are (tool, arguments) by key."""
    made = [{"key": key, "tool": tool, "with": arguments} for key, (tool, arguments) in asks.items()]
    return ToyMessage.of({"who": "bot", "says": [text] if text else [], **({"asks": made} if made else {})})


def result(key: str, text: str, tool: str = "look") -> ToyMessage:
    return ToyMessage.of({"who": "result", "key": key, "tool": tool, "says": [text]})
