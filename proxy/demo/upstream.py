"""A practice provider: `POST /v1/chat/completions` answers from a script.

Every account (the API key of the request) plays the script from its beginning. A request that a real provider would
refuse is refused and does not advance the script. Each account and model has a prompt cache by OpenAI's rule for
automatic caching, except that entries never expire.

The checks follow the API's behaviour and deliberately do not use the proxy's own rules, so that they find its mistakes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import orjson
from msgspec import Struct
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from proxy.backtest import CacheRule, PromptCache, Segment
from proxy.dialects import JsonObject
from proxy.dialects.chat import CHAT
from proxy.tokens import TokenCounter

MODEL: Final = "gpt-4o"  # the only model: that of the recording
_CREATED: Final = 1715785200  # fixed, so that two runs answer with the same bytes


class Received(Struct, frozen=True, kw_only=True):
    """One request as it arrived, and whether it was refused."""

    account: str
    body: bytes
    messages: tuple[JsonObject, ...] = ()  # empty if the request was refused
    refusal: str | None = None  # the reason if the request was refused


class PracticeUpstream:
    """An ASGI application that plays a provider."""

    def __init__(self, script: Sequence[JsonObject], counter: TokenCounter) -> None:
        self._script = tuple(script)
        self._counter = counter
        self._caches: dict[tuple[str, str], PromptCache] = {}  # by account and model
        self.log: list[Received] = []  # all completion requests, in order of arrival

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI call of type `http`."""
        request = Request(scope, receive)
        asked = f"{request.method} {request.url.path}"
        if asked == "POST /v1/chat/completions":
            account = request.headers.get("authorization", "").removeprefix("Bearer ")
            response = self._complete(account, await request.body())
        else:
            response = JSONResponse(Refused(f"Unknown request URL: {asked}.", None, "unknown_url").body, 404)
        await response(scope, receive, send)

    def answered(self, account: str) -> list[Received]:
        """Return the requests of `account` that were answered."""
        return [received for received in self.log if received.account == account and received.refusal is None]

    def tokens_of(self, request: JsonObject) -> int:
        """Return the prompt tokens of a request by this provider's count."""
        return sum(segment.tokens for segment in self._prompt(request))

    def _complete(self, account: str, body: bytes) -> Response:
        number = len(self.answered(account))
        try:
            request = check_request(body)
            if number >= len(self._script):
                raise Refused("The script of this practice upstream is at its end.", None, "script_ended")
        except Refused as why:
            self.log.append(Received(account=account, body=body, refusal=str(why)))
            return JSONResponse(why.body, 400)
        reply, model = self._script[number], request["model"]
        prompt = self._prompt(request)
        tokens = sum(segment.tokens for segment in prompt)
        cached = self._caches.setdefault((account, model), PromptCache(CacheRule())).read(prompt).read
        self.log.append(Received(account=account, body=body, messages=tuple(request["messages"])))
        written = self._counter.message(CHAT.message(orjson.dumps(reply)), model)
        usage = {
            "prompt_tokens": tokens,
            "completion_tokens": written,
            "total_tokens": tokens + written,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        return Response(completion(number, model, reply, usage), media_type="application/json")

    def _prompt(self, request: JsonObject) -> list[Segment]:
        """Return the prompt in the order in which it is cached: tools, then messages."""
        model = request["model"]
        tools = [orjson.dumps(request["tools"])] if request.get("tools") else []
        messages = [CHAT.message(orjson.dumps(data)) for data in request["messages"]]
        return [
            *(Segment(text=raw, tokens=self._counter.json(raw, model)) for raw in tools),
            *(Segment(text=each.raw, tokens=self._counter.message(each, model)) for each in messages),
        ]


class Refused(Exception):
    """The request is refused. `body` is an error body in OpenAI's format."""

    def __init__(self, message: str, param: str | None, code: str | None = None) -> None:
        super().__init__(message)
        error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
        self.body: JsonObject = {"error": error}


class _AskedCall(BaseModel):
    id: str


class _AskedMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_call_id: str | None = None
    tool_calls: Annotated[list[_AskedCall], Field(min_length=1)] | None = None


class _AskedRequest(BaseModel):
    model: str
    messages: Annotated[list[_AskedMessage], Field(min_length=1)]
    tools: Annotated[list[Any], Field(min_length=1)] | None = None


def check_request(raw: bytes) -> JsonObject:
    """Return the parsed body of a request. Raises `Refused` if a provider would refuse it.

    Tool results must directly follow their calls, every call must have a result, and every result a call.
    """
    try:
        request = _AskedRequest.model_validate_json(raw)
    except ValidationError as why:
        first = why.errors()[0]
        raise Refused(f"Invalid request: {first['msg']}", ".".join(map(str, first["loc"]))) from why
    open_calls: list[str] = []
    for position, message in enumerate(request.messages):
        if message.role != "tool":
            _check_answered(open_calls, position)
            open_calls = [call.id for call in message.tool_calls or ()]
        elif message.tool_call_id in open_calls:
            open_calls.remove(message.tool_call_id)
        else:
            raise Refused(
                "Messages with role 'tool' must be a response to a preceding message with 'tool_calls'.",
                f"messages.{position}.role",
            )
    _check_answered(open_calls, len(request.messages))
    body: JsonObject = orjson.loads(raw)
    return body


def _check_answered(open_calls: list[str], position: int) -> None:
    if open_calls:
        raise Refused(
            f"These tool calls did not have response messages: {', '.join(open_calls)}", f"messages.{position}"
        )


def completion(number: int, model: str, reply: JsonObject, usage: JsonObject) -> bytes:
    """Return the reply as a chat completion."""
    finish = "tool_calls" if reply.get("tool_calls") else "stop"
    data: JsonObject = {"id": f"chatcmpl-practice-{number}", "object": "chat.completion", "created": _CREATED}
    data |= {"model": model, "choices": [{"index": 0, "message": reply, "logprobs": None, "finish_reason": finish}]}
    return orjson.dumps(data | {"usage": usage})
