"""A second dialect with quite another JSON shape. It shows what the rest of the house may ask of a message.

    {"who": "rules", "says": ["Be brief."]}                                   instructions
    {"who": "human", "says": ["Look at this.", {"picture": "cat.png"}]}       a user message
    {"who": "bot", "says": [], "asks": [{"key": "a", "tool": "look", "with": {"at": 1}}]}
    {"who": "result", "key": "a", "tool": "look", "says": ["a cat"]}          what a tool gave

`says` may be one text instead of a list. Each entry of `asks` is followed by one result with its `key`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, cast

import orjson

from proxy.dialects import (
    Attachment,
    Call,
    Countable,
    Dialect,
    JsonObject,
    Message,
    ReasoningMode,
    Repaired,
    Span,
    SpokenRole,
)

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

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(
            [Call(id=ask["key"], name=ask["tool"], arguments=orjson.dumps(ask["with"]).decode()) for ask in self._asks]
        )

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

    def all_texts(self) -> Iterator[str]:
        yield self.text
        for call in self.calls:
            yield call.name
            yield call.arguments

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


class ToyDialect(Dialect):
    """The toy API."""

    name: ClassVar[str] = "toy"

    def message(self, raw: bytes) -> ToyMessage:
        return ToyMessage(raw)

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

    def problems(self, messages: Sequence[Message]) -> list[str]:
        return list(self.repair(messages).notes)

    def repair(self, messages: Sequence[Message]) -> Repaired:
        """Put in a text for each result that is missing; leave out each result that answers nothing."""
        kept: list[Message] = []
        sources: list[int | None] = []
        missing = orphans = 0
        for span in self.spans(messages):
            waiting = [call.id for call in messages[span.start].calls]
            for position in range(span.start, span.stop):
                message = messages[position]
                if message.is_result and message.answers not in waiting:
                    orphans += 1
                    continue
                if message.is_result and message.answers is not None:
                    waiting.remove(message.answers)
                kept.append(message)
                sources.append(position)
            missing += len(waiting)
            kept += [self.result(key, NO_RESULT) for key in waiting]
            sources += [None] * len(waiting)
        notes = [f"{missing} x result put in"] if missing else []
        notes += [f"{orphans} x result left out"] if orphans else []
        return Repaired(messages=tuple(kept), notes=tuple(notes), sources=tuple(sources))


TOY: Final = ToyDialect()
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
