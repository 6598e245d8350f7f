"""Chat Completions as a dialect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from proxy.dialects.base import Dialect, Message, Repaired, Span, SpokenRole
from proxy.dialects.chat import protocol
from proxy.dialects.chat.canonical import canonical
from proxy.dialects.chat.message import ChatMessage


class ChatDialect(Dialect):
    """The Chat Completions API."""

    name: ClassVar[str] = "chat"

    def message(self, raw: bytes) -> ChatMessage:
        return ChatMessage(raw)

    def spoken(self, role: SpokenRole, text: str) -> ChatMessage:
        return ChatMessage.of({"role": role, "content": text})

    def result(self, call: str, text: str) -> ChatMessage:
        return ChatMessage.of({"role": "tool", "tool_call_id": call, "content": text})

    def canonical(self, message: Message) -> bytes:
        return canonical(message.data)

    def spans(self, messages: Sequence[Message]) -> tuple[Span, ...]:
        return protocol.spans(messages)

    def problems(self, messages: Sequence[Message]) -> list[str]:
        return protocol.problems(messages)

    def repair(self, messages: Sequence[Message]) -> Repaired:
        return protocol.repair(messages)


CHAT: Final = ChatDialect()
ChatMessage.dialect = CHAT
