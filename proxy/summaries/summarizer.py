"""The model that writes summaries: the target, the request, the answer, and the breaker.

Each request is one Chat Completions request with a time limit. A session in the Messages API is summarized by its own
provider in that API, unless the summarizer has an address or a key of its own. Content is neither logged nor part of
an error.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Hashable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, Final

from cachetools import LRUCache
from msgspec import Struct

from proxy import __version__
from proxy.config import SummarizerSettings
from proxy.dialects import Dialect, answer_of, dialect_named
from proxy.dialects.jsontext import is_object, read
from proxy.errors import NoAnswer, UpstreamBusy, UpstreamError, UpstreamTimeout
from proxy.summaries.prompt import Prompt
from proxy.upstream import Answer, Destination, Upstream

_LONGEST_ANSWER: Final = 4 * 1024 * 1024  # bytes of the longest answer that is read
_LONGEST_WAIT: Final = 20.0  # seconds; a longer `Retry-After` is not waited for
_CHAT: Final = dialect_named("chat")  # the dialect of a summarizer with an address or a key of its own
_NATIVE: Final = frozenset({"messages"})  # dialects whose providers may not support Chat Completions
_BUSY: Final = frozenset({429, 503, 529})  # statuses of a summarizer that is busy
_OWN_HEADERS: Final = (
    (b"content-type", b"application/json"),
    (b"accept", b"application/json"),
    (b"accept-encoding", b"identity"),
    (b"user-agent", b"palimpsest/" + __version__.encode()),
)
_FORWARDED: Final = frozenset(
    {
        *(b"authorization", b"api-key", b"x-api-key", b"x-goog-api-key", b"x-auth-token"),
        *(b"openai-organization", b"openai-project", b"http-referer", b"x-title"),
    }
)
"""Headers that identify the client and are forwarded; its other headers belong to its own request."""
_THINK: Final = "<think>"  # begins the reasoning that some servers send before the text
_CODE: Final = re.compile(r"[A-Za-z0-9_.-]{1,60}")
FAILURES: Final = 3  # consecutive failures that open the breaker
PAUSE: Final = 30.0  # seconds of the first pause
LONGEST_PAUSE: Final = 600.0  # seconds
_TARGETS: Final = 1024  # targets that the breaker remembers; limited, since clients choose the model names in them


class Caller(Struct, frozen=True, kw_only=True):
    """The client on whose behalf a summary is made, for a summarizer without a key of its own."""

    tenant: str
    key: str | None = None  # the name of the key that it used, if it has one
    headers: tuple[tuple[bytes, bytes], ...] = ()  # `_FORWARDED` ones are sent only to where its own requests go
    query: bytes = b""  # query string of the client's request; some providers require it with each request
    dialect: str = "chat"  # the dialect of the session

    def __repr__(self) -> str:
        return f"Caller(tenant={self.tenant!r})"


class SummarizerTarget(Struct, frozen=True, kw_only=True):
    """The model that writes a summary, and how to reach it."""

    model: str
    destination: Destination
    path: str
    headers: tuple[tuple[bytes, bytes], ...]
    dialect: Dialect = _CHAT  # the dialect of the request
    name: Hashable  # the breaker's key

    def __repr__(self) -> str:
        return f"SummarizerTarget(model={self.model!r})"


class ModelAnswer(Struct, frozen=True, kw_only=True):
    """The summarizer's answer."""

    text: str  # without reasoning; may be empty
    finish: str | None  # the finish reason (`stop`, `length`, …), if there is one
    calls: bool  # whether it calls tools although none were offered
    usage: Mapping[str, Any] | None
    model: str  # the model's name in the answer


class _BreakerState(Struct, kw_only=True):
    failures: int = 0  # consecutive failures
    pauses: int = 0  # consecutive pauses
    until: float = 0.0  # the end of the pause, by the breaker's clock
    trying: bool = False  # whether the one request after a pause is in flight


class Breaker:
    """Stops requests to a target after repeated failures.

    closed      all requests pass; consecutive failures are counted
    open        no request passes until the pause is over; each further pause is twice as long
    half open   one request passes: its success closes the breaker, its failure opens it again
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._states: LRUCache[Hashable, _BreakerState] = LRUCache(_TARGETS)

    def pause(self, name: Hashable) -> float:
        """Return for how many seconds no request may pass; 0 if one may pass now."""
        state = self._states.get(name)
        if state is None:
            return 0.0
        left = state.until - self._clock()
        return left if left > 0 else PAUSE * state.trying

    def admits(self, name: Hashable) -> bool:
        """Tell whether a request may pass. Its outcome must be reported afterwards."""
        if self.pause(name) > 0:
            return False
        state = self._states.get(name)
        if state is not None and state.pauses:
            state.trying = True
        return True

    def succeeded(self, name: Hashable) -> None:
        """Close the breaker."""
        self._states.pop(name, None)

    def failed(self, name: Hashable, wait: float | None = None) -> None:
        """Count a failure. `wait` is the `Retry-After` in seconds; it starts a pause at once."""
        state = self._states.setdefault(name, _BreakerState())
        state.failures += 1
        pause = 0.0
        if state.trying or state.failures >= FAILURES:
            pause = min(PAUSE * 2**state.pauses, LONGEST_PAUSE)
            state.pauses, state.failures, state.trying = state.pauses + 1, 0, False
        if wait is not None:
            pause = max(pause, min(wait, LONGEST_PAUSE))
        state.until = max(state.until, self._clock() + pause)

    def abandoned(self, name: Hashable) -> None:
        """Report that an admitted request was cancelled: it counts neither as success nor as failure."""
        if name in self._states:
            self._states[name].trying = False


class Summarizer:
    """Sends requests to the model that writes summaries. One instance per process."""

    def __init__(self, settings: SummarizerSettings, upstream: Upstream, breaker: Breaker | None = None) -> None:
        self.settings = settings
        self._upstream = upstream
        self._breaker = Breaker() if breaker is None else breaker

    def target(self, model: str, caller: Caller) -> SummarizerTarget:
        """Return the target for a session whose requests name `model`.

        The client's own key is sent only to where its own requests go with this key.
        """
        settings = self.settings
        asking, model = model, settings.model or model
        key = settings.api_key.get_secret_value() if settings.api_key is not None else None
        own = settings.base_url is not None or key is not None
        dialect = dialect_named(caller.dialect) if caller.dialect in _NATIVE and not own else _CHAT
        destination = self._upstream.destination(model, dialect.name)
        if own:
            destination = Destination(
                base_url=settings.base_url or destination.base_url,
                authorization=None if key is None else f"Bearer {key}".encode(),
                forwards_credentials=False,
            )
        asked = self._upstream.destination(asking, caller.dialect)
        # A client's key for one provider must not be sent to another.
        forwards = destination.forwards_credentials and (dialect is not _CHAT or caller.dialect not in _NATIVE)
        headers = [pair for pair in caller.headers if forwards and pair[0].lower() in _FORWARDED]
        # Some providers require the query with each request (Azure's `api-version`). It may contain a key too.
        forwards_query = destination.forwards_query and asked.forwards_query
        query = f"?{caller.query.decode('latin-1')}" if forwards_query and caller.query else ""
        return SummarizerTarget(
            model=model,
            destination=destination,
            path=f"{dialect.requests.path}{query}",
            headers=(*headers, *_OWN_HEADERS, *dialect.requests.headers),
            dialect=dialect,
            # One client with a refused key must not open the breaker for the others.
            name=(destination.base_url, model, caller.tenant if forwards else None),
        )

    def pause(self, target: SummarizerTarget) -> float:
        """Return for how many seconds the breaker is open; 0 if a request may be sent."""
        return self._breaker.pause(target.name)

    async def ask(self, target: SummarizerTarget, prompt: Prompt) -> ModelAnswer:
        """Return the whole answer; raise `NoAnswer` if there is none or the breaker is open."""
        name = target.name
        if not self._breaker.admits(name):
            raise NoAnswer("the summarizer failed repeatedly and is paused")
        try:
            answer = await self._ask_in_time(target, prompt)
        except NoAnswer as why:
            if why.too_long:
                self._breaker.succeeded(name)  # the target works, and the next request may be shorter
            else:
                self._breaker.failed(name, why.wait)
            raise
        except BaseException:  # mostly cancellation
            self._breaker.abandoned(name)
            raise
        self._breaker.succeeded(name)
        return answer

    async def _ask_in_time(self, target: SummarizerTarget, prompt: Prompt) -> ModelAnswer:
        """Ask within the time limit. Retry once if the summarizer is busy and names a short wait."""
        seconds = self.settings.timeout
        ends = time.monotonic() + seconds
        try:
            async with asyncio.timeout(seconds):
                try:
                    return await self._ask_once(target, prompt)
                except NoAnswer as why:
                    wait = why.wait
                    if wait is None or wait > min(_LONGEST_WAIT, ends - time.monotonic()):
                        raise
                await asyncio.sleep(wait)
                return await self._ask_once(target, prompt)
        except TimeoutError as why:
            raise NoAnswer(f"the summarizer did not answer within {seconds:g} s") from why

    async def _ask_once(self, target: SummarizerTarget, prompt: Prompt) -> ModelAnswer:
        body = target.dialect.question(target.model, prompt.system, prompt.user)
        try:
            response = await self._upstream.ask(target.destination, "POST", target.path, target.headers, body)
            try:
                return await _read_answer(response, target)
            finally:
                await response.aclose()
        except UpstreamTimeout as why:
            raise NoAnswer("the summarizer did not answer in time") from why
        except UpstreamBusy as why:
            raise NoAnswer("all connections to the upstream are in use") from why
        except UpstreamError as why:
            raise NoAnswer("the summarizer cannot be reached, or the connection broke") from why


async def _read_answer(response: Answer, target: SummarizerTarget) -> ModelAnswer:
    """Read an answer; raise `NoAnswer` if it is an error or not a completion."""
    body = bytearray()
    async for part in response.chunks(plain=response.readable):
        body += part
        if len(body) > _LONGEST_ANSWER:
            raise NoAnswer("the summarizer's answer is too long to be a summary")
    try:
        data = read(bytes(body))
    except ValueError:
        data = None
    error = _code_in(data)
    status = response.status
    if not 200 <= status < 300:
        overflow = target.dialect.requests.overflow_of(status, bytes(body))
        if overflow is not None:
            raise NoAnswer("the summarizer found the request too long", too_long=True, window=overflow.window)
        wait = _wait_of(response) if status in _BUSY else None
        raise NoAnswer(f"the summarizer answered {status}{error}", wait=wait)
    if data is None:
        raise NoAnswer("the summarizer's answer is not JSON")
    found = target.dialect.replies.read(bytes(body))
    if not found.messages:
        what = "is not a completion" if found.error is None else f"is an error{error}"
        raise NoAnswer(f"the summarizer's answer {what}")
    reply = found.messages[0]
    said = answer_of(reply.text).strip()
    return ModelAnswer(
        text="" if said.startswith(_THINK) else said,  # unclosed reasoning is not a summary
        finish=found.finish_reasons[0],
        calls=bool(reply.calls),
        usage=found.usage,
        model=found.model or target.model,
    )


def _code_in(data: Any) -> str:
    """Return an error's code in brackets if it is one word. Its message is not used: it may hold a part of a key."""
    error = data.get("error") if is_object(data) else None
    codes = [error.get("code"), error.get("type")] if is_object(error) else []
    return next((f" ({code})" for code in codes if isinstance(code, str) and _CODE.fullmatch(code)), "")


def _wait_of(response: Answer) -> float | None:
    """Return the seconds of `retry-after-ms`, or of `Retry-After` (RFC 9110, section 10.2.3); None without either."""
    value = ""
    for name, unit in ((b"retry-after-ms", 1000.0), (b"retry-after", 1.0)):
        value = (response.header(name) or b"").strip().decode("latin-1")
        if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{0,9})?", value):
            return float(value) / unit
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
