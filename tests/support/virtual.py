"""Relaying without HTTP: an upstream with a list of answers, the proxy's own tools, and a client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import anyio
import anyio.lowlevel
import orjson
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from proxy.dialects import Call, Message
from proxy.dialects.chat import CHAT
from proxy.dialects.chat.message import ChatMessage
from proxy.dialects.sse import EventDecoder
from proxy.errors import PalimpsestError
from proxy.pipeline import Background
from proxy.pipeline.own_tools import Rounds, WholeRelay, virtual_relay
from proxy.pipeline.relay import Answered, StreamRelay
from tests.support.api_rules import check
from tests.support.replies import USAGE, body_of, events_of

OWN = frozenset({"recall_context", "compress_chat_history"})
USER = {"role": "user", "content": "hi"}
NEVER = 1000.0
"""An interval that never passes during a test."""


class Answer:
    """An answer of upstream: a body in pieces, optionally followed by a fault."""

    def __init__(
        self, body: bytes, *, size: int = 1 << 20, status: int = 200, fault: PalimpsestError | None = None
    ) -> None:
        self.pieces = [body[at : at + size] for at in range(0, len(body), size)]
        self.status, self.fault, self.readable, self.closed = status, fault, True, False
        self._chunks = self._said()
        self.ended = False
        """Whether the reader knows that the body is complete."""
        self.gate: anyio.Event | None = None
        """The event that it waits for before its last piece."""
        self.tells = True
        """Whether the last piece says that it is the last; otherwise the reader must wait for the end."""
        self.at_end: Callable[[], None] = lambda: None
        """Called when the reader waits for the end after the last piece."""

    async def chunk(self, *, plain: bool = False) -> bytes:
        assert plain is self.readable
        return await anext(self._chunks, b"")

    async def _said(self) -> AsyncIterator[bytes]:
        for place, piece in enumerate(self.pieces):
            if self.gate is not None and place == len(self.pieces) - 1:
                await self.gate.wait()
            self.ended = place == len(self.pieces) - 1 and self.fault is None and self.tells
            yield piece
        self.at_end()
        if self.fault is not None:
            raise self.fault

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self._said()])

    async def aclose(self) -> None:
        self.closed = True

    async def discard(self) -> None:
        await self.aclose()


class World:
    """An upstream with a list of answers, the proxy's tools, and a client."""

    def __init__(self, *answers: Answer | PalimpsestError) -> None:
        self.first, self.rest = answers[0], list(answers[1:])
        self.relay: StreamRelay | WholeRelay
        self.asked: list[list[dict[str, Any]]] = []
        """The messages added to the view, for each further request to upstream."""
        self.calls: list[Call] = []
        self.answering: anyio.Event | None = None
        """The event that the tools wait for."""
        self.slow = ""
        """The id of a call that gets no answer."""
        self.status, self.headers, self.got, self.ended = 0, list[tuple[bytes, bytes]](), b"", False
        self.answered: Answered | None = None
        self.seen_at_settling = b""

    # the proxy's tools

    async def answer(self, call: Call) -> str:
        self.calls.append(call)
        if self.answering is not None:
            await self.answering.wait()
        if call.id == self.slow:
            await anyio.sleep_forever()
        return f"found for {call.id}"

    # upstream

    async def ask_again(self, messages: Sequence[Message]) -> Any:
        self.asked.append([message.data for message in messages])
        check({"model": "m", "messages": [USER, *self.asked[-1]]}, plain=False, lenient=False)
        answer = self.rest.pop(0)
        if isinstance(answer, PalimpsestError):
            raise answer
        return answer

    # the client

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        assert not self.status
        self.status, self.headers = status, list(headers)

    async def write(self, data: bytes) -> None:
        assert self.status
        assert not self.ended
        self.got += data

    async def end(self, data: bytes = b"") -> None:
        await self.write(data)
        self.ended = True

    async def fail(self, error: PalimpsestError, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        raise AssertionError((error, headers))

    async def settle(self, answered: Answered) -> None:
        assert self.answered is None
        self.answered, self.seen_at_settling = answered, self.got

    # for tests

    def open(self, *, stream: bool, hides_usage: bool = False, interval: float = NEVER) -> StreamRelay | WholeRelay:
        first: Any = self.first
        self.relay = virtual_relay(
            first,
            self,
            lambda answer: [(b"x-status", b"%d" % answer.status)],
            Rounds(
                CHAT, OWN, self.answer, self.ask_again, lambda said, partial: said.as_request("auto", partial=partial)
            ),
            stream=stream,
            hides_usage=hides_usage,
            start=Background().start,
            interval=interval,
        )
        return self.relay

    async def run(self, *, stream: bool = True, hides_usage: bool = False) -> Answered:
        await self.open(stream=stream, hides_usage=hides_usage).run(self.settle)
        return self.settled()

    def settled(self) -> Answered:
        assert self.answered is not None
        return self.answered

    def next_view(self) -> list[dict[str, Any]]:
        """Return the messages of the next request, in which every call of the client has a result."""
        answered = self.settled()
        [(reply, partial)] = answered.replies
        view: list[Message] = [ChatMessage.of(USER)]
        sent = reply.as_request("auto", partial=partial)
        if answered.hidden is not None:
            view += [*answered.hidden.before, answered.hidden.reply or sent, *answered.hidden.after]
        else:
            view.append(sent)
        data = [message.data for message in view]
        data += [{"role": "tool", "tool_call_id": call.id, "content": "fine"} for call in reply.calls]
        check({"model": "m", "messages": data}, plain=False, lenient=False)
        return data


async def until_true(true: Callable[[], object]) -> None:
    """Yield to other tasks until `true()` holds."""
    with anyio.fail_after(10):
        while not true():
            await anyio.lowlevel.checkpoint()


def streams(rounds: Sequence[str], size: int = 1 << 20, **how: Any) -> list[Answer]:
    return [Answer(events_of(line, number=place, **how), size=size) for place, line in enumerate(rounds)]


def bodies(rounds: Sequence[str]) -> list[Answer]:
    return [Answer(body_of(line, number=place)) for place, line in enumerate(rounds)]


def chunks_of(got: bytes) -> list[dict[str, Any]]:
    events = EventDecoder().feed(got)
    return [orjson.loads(event.data) for event in events if event.data and not event.is_done]


def by_sdk(got: bytes) -> Any:
    """Return the reply as OpenAI's SDK assembles it."""
    state = ChatCompletionStreamState()
    for chunk in chunks_of(got):
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    return state.current_completion_snapshot


def times(number: int) -> dict[str, Any]:
    """Return the total usage of this many rounds."""
    details = {name: value * number for name, value in USAGE["prompt_tokens_details"].items()}  # type: ignore[attr-defined]  # it is an object
    return {
        name: details if isinstance(value, dict) else value * number  # type: ignore[operator]  # the others are numbers
        for name, value in USAGE.items()
    }
