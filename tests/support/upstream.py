"""A strict stand-in for an OpenAI-compatible provider, served by uvicorn on a real port.

The request's `model` selects the behaviour, in parts joined by `+`. Unknown parts are ignored, so
that a test can make its model names unique:

    echo               answers "echo: <last user text>" (the default)
    say:TEXT           answers TEXT
    long:N             answers N words
    tool:NAME          calls NAME, and answers in text after its result
    tools:A,B          calls A and B in one message
    script:ID          answers the next message that `load` queued under ID; one with `fault` is a fault instead
    order:HOW          streams `calls-first`, or the text `between` the names of calls and their arguments
    names:HOW          streams the names of calls in `pieces`, or `late`, after their ids
    summary:KIND       writes a good or bad summary if one is asked for; `sum-delay:MS` and the like
                       apply to such requests only: see `summarizing.py`
    finish:REASON      sets the finish reason
    reason             puts `reasoning_content` before the content
    prefix:HOW         seals reasoning, and checks what comes back behind a changed prefix: `drop` leaves it out and
                       counts it in the log, `400` refuses it
    delay:MS           waits before it answers; chunkdelay:MS waits after each event
    hold               waits before it answers until `gate` is set
    gate               waits in the middle of a stream until `gate` is set
    strict:RULE        refuses an order of roles: one-system (a system message anywhere but first), or
                       alternate (two user messages in a row); both with a comma
    needs:TEXT         refuses a request that does not contain this text; status:N sets the status
    quotes             refuses `metadata`, and repeats the client's value in the error
    plain[:STATUS]     refuses `stream_options` with 422, and a request's `cache_control`
    vague              refuses a request's `cache_control` without naming it
    lenient            accepts unknown fields and roles
    ctx:N              accepts N tokens at most, and refuses more with the error of `words:WHOSE` (see OVERFLOWS)
    times:X            counts X times as many tokens; discreet does not report cached tokens
    gzip               compresses every answer
    fault:KIND         429 | 429-once | 500 | hang | html | bad-json | no-content
                       drop-before (no answer at all)
                       drop | stall | error-event (in the middle of a stream) | no-done | crlf |
                       split-utf8 (byte by byte) | empty-choices | dup-usage | bad-event

Ids and times are fixed: the same request always gets the same bytes, so that tests can compare what came
through the proxy with what was sent. It answers in the three APIs of `tongues.py`. On other paths
it is a mirror: see `mirror.py`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Self

import anyio
import orjson
import uvicorn

from tests.support.answers import Answering, error_body, options_of, overflow_body, tokens_of
from tests.support.api_rules import Refused, check
from tests.support.listening import Listening
from tests.support.mirror import reflect
from tests.support.received import Received
from tests.support.summarizing import parts_for
from tests.support.tongues import BY_PATH, MESSAGES, SEALED, Seals

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

ALWAYS = [(b"x-request-id", b"req_test"), (b"openai-processing-ms", b"1")]
JSON = [(b"content-type", b"application/json"), *ALWAYS]
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), *ALWAYS]


class Upstream:
    """The stand-in's state. The test's thread reads it, the server's thread writes it."""

    def __init__(self) -> None:
        self.log: list[Received] = []
        """Every request, in the order of arrival."""
        self.gate = threading.Event()
        """When set, answers that wait at a gate continue."""
        self.open = 0
        """Requests under way."""
        self.left = 0
        """Requests whose client disconnected before their end."""
        self.uploaded = 0
        """Bytes of request bodies received so far, including incomplete bodies."""
        self.scripts: dict[str, deque[dict[str, Any]]] = {}
        self._seen: set[str] = set()
        self._listening: Listening | None = None

    def load(self, script: str, messages: list[dict[str, Any]]) -> None:
        """Queue assistant messages for `script:ID`."""
        self.scripts[script] = deque(messages)

    def forget(self) -> None:
        """Reset the state."""
        self.log.clear()
        self._seen.clear()
        self.gate.clear()
        self.left = self.uploaded = 0

    @property
    def last(self) -> Received:
        """The newest request."""
        return self.log[-1]

    @property
    def base_url(self) -> str:
        """The value of `upstream.base_url` for this stand-in."""
        assert self._listening is not None
        return f"{self._listening.url}/v1"

    @property
    def port(self) -> int:
        """The TCP port that it listens on."""
        assert self._listening is not None
        return self._listening.port

    def __enter__(self) -> Self:
        config = uvicorn.Config(
            self, ws="none", lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1
        )
        self._listening = Listening(config).__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        assert self._listening is not None
        self.gate.set()
        self._listening.__exit__(*problem)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, and stop when its client leaves."""
        self.open += 1
        try:
            received = Received(scope)
            self.log.append(received)
            async for piece in received.pieces(receive):
                self.uploaded += len(piece)
            answering = Answering(send, receive, self.gate)
            async with anyio.create_task_group() as group:
                group.start_soon(_leave, receive, group.cancel_scope)
                await self._serve(received, answering)
                group.cancel_scope.cancel()
            self.left += not answering.done
        finally:
            self.open -= 1

    async def _serve(self, received: Received, out: Answering) -> None:
        tongue = BY_PATH.get(received.path)
        if tongue is None or received.method != "POST":
            await reflect(received, out)
            return
        try:
            body = received.json
        except orjson.JSONDecodeError:
            await out.whole(400, JSON, error_body("We could not parse the JSON body of your request."))
            return
        does: dict[str, str] = {}
        try:
            body = tongue.chat_body(body) if isinstance(body, dict) and tongue.listed in body else body
            does = parts_for(body, options_of(body.get("model") if isinstance(body, dict) else None))
            does = self._scripted(does)
            if "quotes" in does and "metadata" in body:
                raise Refused(f"Invalid metadata: {body['metadata']}", "metadata")
            if "plain" in does and "cache_control" in received.json:
                raise Refused("cache_control: Extra inputs are not permitted", status=int(does["plain"] or 400))
            if "vague" in does and "cache_control" in received.json:
                raise Refused("Extra inputs are not permitted")
            if does.get("needs", "").encode() not in orjson.dumps(body["messages"]):
                raise Refused("Something is missing.", "messages", status=int(does.get("status", 400)))
            seal = self._seal(received, body, does)
            check(body, plain="plain" in does, lenient="lenient" in does, strict=does.get("strict", ""))
            if await self._overflow(body, does, out) or await self._fault(does.get("fault", ""), body, out):
                return
            await out.completion(body, does, self.scripts, JSON, EVENTS, tongue=tongue, seal=seal)
        except Refused as why:
            received.refused = str(why)
            told = {"type": "error", **why.body} if tongue is MESSAGES else why.body
            await out.whole(why.status, JSON, orjson.dumps(told))

    @staticmethod
    def _seal(received: Received, body: dict[str, Any], does: dict[str, str]) -> str:
        """Check the reasoning that came back; return the seal of the new reasoning, or "" if there is none."""
        if "prefix" not in does:  # then nothing is sealed
            return ""
        seals = Seals(body)
        received.dropped_reasoning, received.kept_reasoning = seals.dropped, seals.kept
        if seals.dropped and does["prefix"] == "400":
            raise Refused("The encrypted content could not be verified: the conversation before it has changed.")
        for message in body["messages"]:
            message.pop(SEALED, None)
        return seals.seal(len(body["messages"])) if "reason" in does else ""

    def _scripted(self, does: dict[str, str]) -> dict[str, str]:
        """Return the options, with the fault of the script's next message if it is one."""
        queue = self.scripts.get(does.get("script", ""))
        return {**does, "fault": queue.popleft()["fault"]} if queue and "fault" in queue[0] else does

    async def _overflow(self, body: dict[str, Any], does: dict[str, str], out: Answering) -> bool:
        """Refuse a request that is too long; return whether it was."""
        asked = tokens_of(body, does)
        if "ctx" not in does or asked <= int(does["ctx"]):
            return False
        status, data = overflow_body(does.get("words", "openai"), int(does["ctx"]), asked)
        await out.whole(status, JSON, data)
        return True

    async def _fault(self, kind: str, body: dict[str, Any], out: Answering) -> bool:
        """Produce the fault instead of an answer; return whether the request is finished."""
        if kind == "429-once" and body["model"] not in self._seen:
            self._seen.add(body["model"])
            kind = "429"
        if kind == "429":
            limits = [
                (b"retry-after", b"0.01"),
                (b"x-ratelimit-remaining-requests", b"0"),
                (b"x-should-retry", b"true"),
            ]
            await out.whole(429, [*JSON, *limits], error_body("Rate limit reached", "requests"))
        elif kind == "500":
            await out.whole(500, JSON, error_body("The server had an error.", "server_error"))
        elif kind == "html":
            await out.whole(502, [(b"content-type", b"text/html")], b"<html><h1>502 Bad Gateway</h1></html>")
        elif kind == "bad-json":
            await out.whole(200, JSON, b'{"id": "chatcmpl-1", "choices": [')
        elif kind == "no-content":
            await out.begin(204, [])
            await out.finish()
        elif kind == "hang":
            await anyio.sleep_forever()
        elif kind == "drop-before":
            await out.abort()
        else:
            return False
        return True


async def _leave(receive: Receive, scope: anyio.CancelScope) -> None:
    """Cancel the answer when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
