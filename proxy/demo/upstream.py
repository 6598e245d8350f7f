"""A provider for practice: `POST /v1/chat/completions` answers by a script, `GET /v1/models` names a model.

Every account (the API key it is called with) plays the script from its beginning. A request that a
real provider would refuse is refused and moves nothing on. What was received is kept in a log.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import orjson

from proxy.demo.answers import completion, events
from proxy.demo.cache import PrefixCache, Segment
from proxy.demo.refusals import Refused, check
from proxy.dialects import JsonObject, Message
from proxy.dialects.chat.message import ChatMessage

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MODEL: Final = "gpt-4o"
"""The model of the recording, and the only one there is."""


class Counter(Protocol):
    """Counts tokens."""

    def message(self, message: Message, model: str) -> int:
        """Return the tokens of a message."""
        ...

    def json(self, raw: bytes, model: str) -> int:
        """Return the tokens of a JSON text."""
        ...


class QuarterOfBytes:
    """Four bytes are a token: enough where nothing depends on the tokenizer."""

    def message(self, message: Message, model: str) -> int:  # noqa: ARG002 - every model counts alike
        """Return the tokens of a message."""
        return -(-len(message.raw) // 4)

    def json(self, raw: bytes, model: str) -> int:  # noqa: ARG002 - every model counts alike
        """Return the tokens of a JSON text."""
        return -(-len(raw) // 4)


@dataclass(frozen=True, slots=True)
class Received:
    """One request as it arrived, and what came of it."""

    account: str
    """The API key that it came with."""
    body: bytes
    messages: tuple[JsonObject, ...]
    """Empty where it was refused."""
    tokens: int = 0
    """Tokens of the prompt: tools and messages."""
    cached: int = 0
    """How many of them the prompt cache held."""
    refusal: str | None = None
    """Why it was refused; None where it was answered."""


class PracticeUpstream:
    """An ASGI application that plays a provider."""

    def __init__(self, script: Sequence[JsonObject], counter: Counter | None = None) -> None:
        """Answer with the assistant messages of `script`, one after the other."""
        self._script = tuple(script)
        self._counter = counter if counter is not None else QuarterOfBytes()
        self._cache = PrefixCache()
        self.log: list[Received] = []
        """Every request for a completion, in order of arrival."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI call of type `http`."""
        body = await _body_of(receive)
        asked = (scope["method"], scope["path"])
        if asked == ("POST", "/v1/chat/completions"):
            await self._complete(_account(scope), body, send)
        elif asked == ("GET", "/v1/models"):
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "practice"}
            await _respond(send, 200, orjson.dumps({"object": "list", "data": [model]}))
        else:
            unknown = Refused(f"Unknown request URL: {asked[0]} {asked[1]}.", None, "unknown_url")
            await _respond(send, 404, orjson.dumps(unknown.body))

    def answered(self, account: str) -> list[Received]:
        """Return the requests of `account` that were answered."""
        return [received for received in self.log if received.account == account and received.refusal is None]

    def tokens_of(self, request: JsonObject) -> int:
        """Return the prompt tokens of a request, as they are counted here."""
        return sum(segment.tokens for segment in self._prompt(request))

    async def _complete(self, account: str, body: bytes, send: Send) -> None:
        """Answer a request with the next reply, or refuse it."""
        number = len(self.answered(account))
        try:
            request = check(_parsed(body))
            if number >= len(self._script):
                raise Refused("The script of this practice upstream is at its end.", None, "script_ended")
        except Refused as why:
            self.log.append(Received(account=account, body=body, messages=(), refusal=str(why)))
            await _respond(send, 400, orjson.dumps(why.body))
            return
        reply, model = self._script[number], request["model"]
        prompt = self._prompt(request)
        tokens = sum(segment.tokens for segment in prompt)
        cached = self._cache.read(account, model, prompt)
        self.log.append(
            Received(
                account=account, body=body, messages=tuple(request["messages"]), tokens=tokens, cached=cached
            )
        )
        usage = _usage(tokens, cached, self._counter.message(ChatMessage.of(reply), model))
        if not request.get("stream"):
            await _respond(send, 200, completion(number, model, reply, usage))
            return
        options: JsonObject = request.get("stream_options") or {}
        wants_usage = bool(options.get("include_usage"))
        await _start(send, 200, b"text/event-stream; charset=utf-8")
        for event in events(number, model, reply, usage if wants_usage else None):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _prompt(self, request: JsonObject) -> list[Segment]:
        """Return what the model reads, in the order in which it is cached: tools, then messages."""
        model = request["model"]
        prompt: list[Segment] = []
        if tools := request.get("tools"):
            raw = orjson.dumps(tools)
            prompt.append(Segment(text=raw, tokens=self._counter.json(raw, model)))
        for data in request["messages"]:
            message = ChatMessage.of(data)
            prompt.append(Segment(text=message.raw, tokens=self._counter.message(message, model)))
        return prompt


def _usage(prompt: int, cached: int, reply: int) -> JsonObject:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": reply,
        "total_tokens": prompt + reply,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _parsed(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None  # `check` says what is wrong with it


def _account(scope: Scope) -> str:
    """Return the API key; empty where there is none."""
    value = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    return str(value.decode("latin-1")).removeprefix("Bearer ")


async def _body_of(receive: Receive) -> bytes:
    parts: list[bytes] = []
    more = True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


async def _start(send: Send, status: int, kind: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})


async def _respond(send: Send, status: int, body: bytes) -> None:
    await _start(send, status, b"application/json")
    await send({"type": "http.response.body", "body": body, "more_body": False})
