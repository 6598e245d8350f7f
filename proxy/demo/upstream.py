"""A practice provider: `POST /v1/chat/completions` answers by a script.

Every account (the API key of the request) plays the script from its beginning. A request that a real provider
would refuse is refused and does not advance the script. Each account and model has a prompt cache by OpenAI's
rule for automatic caching, except that it never forgets.

The refusals are written from the API's behaviour, on purpose without the proxy's own rules: what those overlook
is found here.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Final, cast

import orjson
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from proxy.backtest import CacheRule, PromptCache, Segment
from proxy.dialects import JsonObject
from proxy.dialects.chat import CHAT
from proxy.tokens import TokenCounter

MODEL: Final = "gpt-4o"
"""The model of the recording, and the only one there is."""
_CREATED: Final = 1715785200
"""A fixed moment, so that two runs answer with the same bytes."""
_WORD: Final = re.compile(r"\s*\S+\s*")
_PIECE: Final = 24
"""Characters of a tool call's arguments in one event."""


class Received(Struct, frozen=True, kw_only=True):
    """One request as it arrived, and how it was answered."""

    account: str
    """The API key that it came with."""
    body: bytes
    messages: tuple[JsonObject, ...] = ()
    """Empty where it was refused."""
    refusal: str | None = None


class PracticeUpstream:
    """An ASGI application that plays a provider."""

    def __init__(self, script: Sequence[JsonObject], counter: TokenCounter) -> None:
        """Answer with the assistant messages of `script`, one after the other."""
        self._script = tuple(script)
        self._counter = counter
        self._caches: dict[tuple[str, str], PromptCache] = {}
        """By account and model."""
        self.log: list[Received] = []
        """Every request for a completion, in order of arrival."""

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
        """Return the prompt tokens of a request, as they are counted here."""
        return sum(segment.tokens for segment in self._prompt(request))

    def _complete(self, account: str, body: bytes) -> Response:
        """Answer a request with the next reply, or refuse it."""
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
        if not request.get("stream"):
            return Response(completion(number, model, reply, usage), media_type="application/json")
        options: JsonObject = request.get("stream_options") or {}
        told = usage if options.get("include_usage") else None
        return StreamingResponse(_one_by_one(events(number, model, reply, told)), media_type="text/event-stream")

    def _prompt(self, request: JsonObject) -> list[Segment]:
        """Return what the model reads, in the order in which it is cached: tools, then messages."""
        model = request["model"]
        tools = [orjson.dumps(request["tools"])] if request.get("tools") else []
        messages = [CHAT.message(orjson.dumps(data)) for data in request["messages"]]
        return [
            *(Segment(text=raw, tokens=self._counter.json(raw, model)) for raw in tools),
            *(Segment(text=each.raw, tokens=self._counter.message(each, model)) for each in messages),
        ]


async def _one_by_one(stream: Iterator[bytes]) -> AsyncIterator[bytes]:
    for event in stream:
        yield event


# ------------------------------------------------------------------------------------------- refusals


class Refused(Exception):
    """The request is refused; `body` is that of a 400 in OpenAI's form."""

    def __init__(self, message: str, param: str | None, code: str | None = None) -> None:
        super().__init__(message)
        error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
        self.body: JsonObject = {"error": error}


def check_request(raw: bytes) -> JsonObject:
    """Return the parsed body of a request; raise `Refused` if a provider would refuse it."""
    try:
        request = orjson.loads(raw)
    except orjson.JSONDecodeError:
        request = None
    if not isinstance(request, dict):
        raise Refused("We could not parse the JSON body of your request.", None)
    body: JsonObject = cast("JsonObject", request)
    if not isinstance(body.get("model"), str):
        raise Refused("you must provide a model parameter", None)
    if not isinstance(body.get("messages"), list):
        raise Refused("Missing required parameter: 'messages'.", "messages", "missing_required_parameter")
    _check_not_empty(body["messages"], "messages")
    if "tools" in body:
        _check_not_empty(body["tools"], "tools")
    _check_calls(body["messages"])
    return body


def _check_not_empty(value: Any, name: str) -> None:
    if value == []:
        expected = "Expected an array with minimum length 1, but got an empty array instead."
        raise Refused(f"Invalid '{name}': empty array. {expected}", name, "empty_array")


def _check_calls(messages: list[Any]) -> None:
    """Check that the results of calls follow the calls at once, and that no result is without a call."""
    open_calls: list[str] = []
    for position, item in enumerate(messages):
        if not isinstance(item, dict):
            raise Refused("Invalid type: expected an object.", f"messages[{position}]", "invalid_type")
        message = cast("JsonObject", item)
        role = message.get("role")
        if role == "tool":
            if message.get("tool_call_id") not in open_calls:
                raise Refused(
                    "Invalid parameter: messages with role 'tool' must be a response to a preceeding message "
                    "with 'tool_calls'.",
                    f"messages.[{position}].role",
                )
            open_calls.remove(message["tool_call_id"])
            continue
        _check_answered(open_calls, position)
        if role not in {"system", "developer", "user", "assistant"}:
            raise Refused(f"Invalid value: {role!r}.", f"messages[{position}].role", "invalid_value")
        if "tool_calls" in message:
            _check_not_empty(message["tool_calls"], f"messages[{position}].tool_calls")
            open_calls = [str(call.get("id")) for call in message["tool_calls"] or ()]
    _check_answered(open_calls, len(messages))


def _check_answered(open_calls: list[str], position: int) -> None:
    if open_calls:
        raise Refused(
            "An assistant message with 'tool_calls' must be followed by tool messages responding to "
            f"each 'tool_call_id'. The following tool_call_ids did not have response "
            f"messages: {', '.join(open_calls)}",
            f"messages.[{position}].role",
        )


# -------------------------------------------------------------------------------------------- replies


def completion(number: int, model: str, reply: JsonObject, usage: JsonObject) -> bytes:
    """Return the reply as a chat completion."""
    choice = {"index": 0, "message": reply, "logprobs": None, "finish_reason": _finish_reason(reply)}
    return orjson.dumps(_envelope(number, model, "chat.completion") | {"choices": [choice], "usage": usage})


def events(number: int, model: str, reply: JsonObject, usage: JsonObject | None) -> Iterator[bytes]:
    """Yield the reply as events, its text word by word. With `usage`, the field is null in all but the last."""
    envelope = _envelope(number, model, "chat.completion.chunk")

    def event(choices: list[JsonObject], told: JsonObject | None = None) -> bytes:
        chunk = envelope | {"choices": choices} | ({} if usage is None else {"usage": told})
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    for delta in _deltas(reply):
        yield event([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}])
    yield event([{"index": 0, "delta": {}, "logprobs": None, "finish_reason": _finish_reason(reply)}])
    if usage is not None:
        yield event([], usage)
    yield b"data: [DONE]\n\n"


def _deltas(reply: JsonObject) -> Iterator[JsonObject]:
    text = reply.get("content")
    yield {"role": "assistant", "content": "" if text else None}
    for word in _WORD.findall(text or ""):
        yield {"content": word}
    for index, call in enumerate(reply.get("tool_calls") or ()):
        function, arguments = call["function"], call["function"]["arguments"]
        head = {"name": function["name"], "arguments": ""}
        yield {"tool_calls": [{"index": index, "id": call["id"], "type": call["type"], "function": head}]}
        for start in range(0, len(arguments), _PIECE):
            piece = {"arguments": arguments[start : start + _PIECE]}
            yield {"tool_calls": [{"index": index, "function": piece}]}


def _envelope(number: int, model: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-practice-{number}", "object": kind, "created": _CREATED, "model": model}


def _finish_reason(reply: JsonObject) -> str:
    return "tool_calls" if reply.get("tool_calls") else "stop"
