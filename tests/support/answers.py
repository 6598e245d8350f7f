"""How the stand-in provider answers: as JSON or events, whole or broken.

The same request always gets the same bytes.
"""

from __future__ import annotations

import gzip
import re
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import anyio
import orjson

from tests.support.api_rules import Refused
from tests.support.summarizing import summary_of
from tests.support.tongues import CHAT, SEALED, Tongue

Headers = Sequence[tuple[bytes, bytes]]
Message = MutableMapping[str, Any]
Scripts = dict[str, deque[dict[str, Any]]]

CREATED = 1_700_000_000
DONE = b"data: [DONE]\n\n"


def options_of(model: Any) -> dict[str, str]:
    """Return the options in a model's name: `long:9+fault:drop` is {long: 9, fault: drop}."""
    parts = (part.partition(":") for part in model.split("+")) if isinstance(model, str) else ()
    return {key: value for key, _, value in parts}


def error_body(message: str, kind: str = "invalid_request_error") -> bytes:
    """Return an error in OpenAI's shape."""
    return orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": None}})


def reply_to(body: dict[str, Any], does: dict[str, str], scripts: Scripts) -> dict[str, Any]:
    """Return the assistant message that answers a request."""
    messages = body["messages"]
    asked = next((_text(m.get("content")) for m in reversed(messages) if m.get("role") == "user"), "")
    message: dict[str, Any] = {"role": "assistant", "content": f"echo: {asked}", "refusal": None, "annotations": []}
    if "say" in does:
        message["content"] = does["say"]
    if "long" in does:
        message["content"] = " ".join(f"word{i}" for i in range(int(does["long"])))
    if "script" in does:
        queue = scripts.get(does["script"])
        if not queue:
            raise Refused(f"script {does['script']} is empty", status=409)
        message = {"refusal": None, "annotations": [], **queue.popleft()}
    names = [name for part in ("tool", "tools") if part in does for name in does[part].split(",")]
    if names and messages[-1].get("role") != "tool":
        message["content"] = None
        message["tool_calls"] = [
            {
                "id": f"call_{len(messages)}_{place}",
                "type": "function",
                "function": {"name": name, "arguments": orjson.dumps({"q": asked}).decode()},
            }
            for place, name in enumerate(names)
        ]
    if "summary" in does:
        message |= summary_of(body, does["summary"])
    if "reason" in does:
        message["reasoning_content"] = "thinking about it"
    return message


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content or ""


OVERFLOWS: dict[str, tuple[int, dict[str, Any]]] = {
    "openai": (
        400,
        {
            "message": "This model's maximum context length is {window} tokens. However, your messages "
            "resulted in {asked} tokens. Please reduce the length of the messages.",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        },
    ),
    "vllm": (
        400,
        {
            "message": "This model's maximum context length is {window} tokens. However, your request has "
            "{asked} input tokens. Please reduce the length of the input messages.",
            "type": "BadRequestError",
            "code": 400,
        },
    ),
    "stopped": (  # a server that stops counting at the limit
        400,
        {
            "message": "This model's maximum context length is {window} tokens. However, you requested 0 "
            "output tokens and your prompt contains at least {more} input tokens.",
            "type": "BadRequestError",
        },
    ),
    "anthropic": (
        400,
        {"type": "invalid_request_error", "message": "prompt is too long: {asked} tokens > {window} maximum"},
    ),
    "llama.cpp": (
        400,
        {
            "message": "the request exceeds the available context size. try increasing the context size",
            "type": "exceed_context_size_error",
            "n_ctx": "{window}",
            "n_prompt_tokens": "{asked}",
        },
    ),
    "wrapped": (
        500,
        {
            "message": "ContextWindowExceededError: prompt is too long: {asked} tokens > {window} maximum",
            "type": "server_error",
        },
    ),
    "silent": (
        413,
        {
            "message": "Your input exceeds the context window of this model. Please adjust your input.",
            "code": "context_length_exceeded",
        },
    ),
}
"""Status and error for a request that is too long, by provider."""


def overflow_body(whose: str, window: int, asked: int) -> tuple[int, bytes]:
    """Return the status and body that refuse a request of `asked` tokens."""
    status, error = OVERFLOWS[whose]
    numbers = {"window": window, "asked": asked, "more": window + 1}
    told = {name: value.format(**numbers) if isinstance(value, str) else value for name, value in error.items()}
    told |= {name: int(told[name]) for name in ("n_ctx", "n_prompt_tokens") if name in told}
    return status, orjson.dumps({"error": told})


def tokens_of(body: dict[str, Any], does: dict[str, str]) -> int:
    """Return the tokens of a request: a quarter of its bytes, multiplied by the option `times`."""
    said = len(orjson.dumps(body["messages"])) + (len(orjson.dumps(body["tools"])) if "tools" in body else 0)
    return int(said // 4 * float(does.get("times", "1")))


def usage_of(body: dict[str, Any]) -> dict[str, Any]:
    """Return usage figures that depend only on the request."""
    does = options_of(body["model"])
    prompt = tokens_of(body, does)
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": 7, "total_tokens": prompt + 7}
    return usage if "discreet" in does else usage | {"prompt_tokens_details": {"cached_tokens": 0}}


def choice_of(message: dict[str, Any], index: int) -> dict[str, Any]:
    """Return the message of choice `index`; each choice has a different text."""
    return (
        message
        if index == 0 or not message.get("content")
        else {**message, "content": f"{message['content']} ({index})"}
    )


def deltas_of(message: dict[str, Any], does: Mapping[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the deltas of a streamed message; those of parallel calls alternate.

    `does` may set the order: see `order` and `names` in `tests.support.upstream`.
    """
    does = does or {}
    yield {"role": "assistant", "content": None if message.get("content") is None else "", "refusal": None}
    if message.get("reasoning_details"):
        yield {"reasoning_details": message["reasoning_details"]}
    said = [
        {field: piece}
        for field in ("reasoning_content", "content")
        for piece in re.findall(r"\S+\s*|\s+", message.get(field) or "")
    ]
    called = list(_call_deltas(message.get("tool_calls") or [], does.get("names", "whole")))
    order = does.get("order", "text-first")
    if order == "calls-first":
        yield from called + said
    elif order == "between":  # the text comes between a call's name and its arguments
        half = len(called) // 2
        yield from called[:half] + said + called[half:]
    else:
        yield from said + called


def _call_deltas(calls: list[dict[str, Any]], names: str) -> Iterator[dict[str, Any]]:
    for index, call in enumerate(calls):
        name, identity = call["function"]["name"], {"id": call["id"], "type": "function"}
        heads = [{"name": name, "arguments": ""}]
        if names == "pieces":
            heads = [{"name": piece, "arguments": ""} for piece in re.findall(r".{1,3}", name)]
        elif names == "late":
            heads = [{"arguments": ""}, {"name": name}]
        for place, head in enumerate(heads):
            yield {"tool_calls": [{"index": index, **(identity if place == 0 else {}), "function": head}]}
    pieces = [re.findall(r".{1,7}", call["function"]["arguments"], re.DOTALL) for call in calls]
    for row in range(max(map(len, pieces), default=0)):
        for index, parts in enumerate(pieces):
            if row < len(parts):
                yield {"tool_calls": [{"index": index, "function": {"arguments": parts[row]}}]}


class Answering:
    """Sends the answer to the client of the stand-in."""

    def __init__(
        self,
        send: Callable[[Message], Awaitable[None]],
        receive: Callable[[], Awaitable[Message]],
        gate: threading.Event,
    ) -> None:
        self._send = send
        self._receive = receive
        self._gate = gate
        self.done = False
        """Whether the answer ended normally."""

    async def begin(self, status: int, headers: Headers) -> None:
        """Send the status and the headers."""
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def write(self, data: bytes) -> None:
        """Send a piece of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self) -> None:
        """End the body."""
        self.done = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send an answer in one piece."""
        await self.begin(status, [*headers, (b"content-length", b"%d" % len(body))])
        self.done = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def abort(self, *, flushed: bool = False) -> None:
        """Break the connection; with `flushed`, send what was written first."""
        transport = self._receive.__self__.transport  # type: ignore[attr-defined]  # uvicorn's own: ASGI has no word for it
        if flushed:
            transport.close()
        else:
            transport.abort()
        await anyio.sleep_forever()  # until the server notices and cancels this task

    async def wait_for_gate(self) -> None:
        """Wait until the test opens the gate."""
        while not self._gate.is_set():  # noqa: ASYNC110 - a test's thread sets it, and cannot set anyio's
            await anyio.sleep(0.005)

    async def completion(
        self,
        body: dict[str, Any],
        does: dict[str, str],
        scripts: Scripts,
        json_headers: Headers,
        event_headers: Headers,
        *,
        tongue: Tongue = CHAT,
        seal: str = "",
    ) -> None:
        """Answer a chat completion in the API of the request; `seal` is the seal of its reasoning."""
        await anyio.sleep(int(does.get("delay", "0")) / 1000)
        if "hold" in does:
            await self.wait_for_gate()
        message = reply_to(body, does, scripts)
        if tongue.name != "chat":
            usage, message = usage_of(body), message | ({SEALED: [seal]} if seal else {})
            if body.get("stream"):
                await self.begin(200, event_headers)
                await self._stream(tongue.events(body, message, usage), does)
            else:
                await self.whole(200, json_headers, orjson.dumps(tongue.answer(body, message, usage)))
            return
        if seal:
            message["reasoning_details"] = [{"type": "reasoning.encrypted", "data": seal, "id": "rs_1", "index": 0}]
        ready = does.get("finish") or ("tool_calls" if message.get("tool_calls") else "stop")
        fixed = {"id": "chatcmpl-test", "created": CREATED, "model": body["model"], "system_fingerprint": "fp_test"}
        choices = range(body.get("n") or 1)
        if body.get("stream"):
            await self.begin(200, event_headers)
            await self._stream(_Events(body, message, fixed, ready, does), does)
            return
        answer = {
            **fixed,
            "object": "chat.completion",
            "choices": [
                {"index": i, "message": choice_of(message, i), "logprobs": None, "finish_reason": ready}
                for i in choices
            ],
            "usage": usage_of(body),
        }
        data = orjson.dumps(answer, option=orjson.OPT_INDENT_2)
        if "gzip" in does:
            json_headers, data = [*json_headers, (b"content-encoding", b"gzip")], gzip.compress(data, mtime=0)
        await self.whole(200, json_headers, data)

    async def _stream(self, events: Iterable[bytes], does: dict[str, str]) -> None:
        raw = list(events)
        fault, pause = does.get("fault", ""), int(does.get("chunkdelay", "0")) / 1000
        for place, event in enumerate(raw):
            if place == len(raw) // 2:
                if "gate" in does:
                    await self.wait_for_gate()
                if fault == "drop":
                    await self.abort(flushed=True)
                elif fault == "stall":
                    await anyio.sleep_forever()
                elif fault == "error-event":
                    await self.write(b"data: " + error_body("The server had an error", "server_error") + b"\n\n")
                    break
                elif fault == "bad-event":
                    await self.write(b"data: {not json\n\n")
            for piece in (event[i : i + 1] for i in range(len(event))) if fault == "split-utf8" else (event,):
                await self.write(piece)
            if pause:
                await anyio.sleep(pause)
        await self.finish()


class _Events:
    """The events of a streamed answer, each with its bytes."""

    def __init__(
        self, body: dict[str, Any], message: dict[str, Any], fixed: dict[str, Any], ready: str, does: dict[str, str]
    ) -> None:
        self._body = body
        self._message = message
        self._base = {**fixed, "object": "chat.completion.chunk"}
        self._ready = ready
        self._does = does
        self._fault = does.get("fault", "")
        self._usage = bool((body.get("stream_options") or {}).get("include_usage"))

    def __iter__(self) -> Iterator[bytes]:
        if self._fault == "empty-choices":
            yield self._event({**self._base, "choices": [], "prompt_filter_results": []})
        if self._fault == "crlf":
            yield b": keep-alive\r\n\r\n"
            yield b"event: message\r\nid: 1\r\n" + self._chunk({}, 0)
        for index in range(self._body.get("n") or 1):
            for delta in deltas_of(choice_of(self._message, index), self._does):
                yield self._chunk(delta, index)
            yield self._chunk({}, index, self._ready)
        if self._usage:
            for _ in range(2 if self._fault == "dup-usage" else 1):
                yield self._event({**self._base, "choices": [], "usage": usage_of(self._body)})
        if self._fault != "no-done":
            yield self._ended(DONE)

    def _chunk(self, delta: dict[str, Any], index: int, reason: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self._event({**self._base, "choices": [choice]} | ({"usage": None} if self._usage else {}))

    def _event(self, data: dict[str, Any]) -> bytes:
        return self._ended(b"data: " + orjson.dumps(data) + b"\n\n")

    def _ended(self, event: bytes) -> bytes:
        return event.replace(b"\n\n", b"\r\n\r\n") if self._fault == "crlf" else event
