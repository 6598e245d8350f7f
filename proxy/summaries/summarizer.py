"""The model that writes summaries: which one it is, how it is asked, and what can go wrong with that.

One request of Chat Completions and one answer, whole and within a time limit. What was said is neither logged
nor part of an error. After repeated failures the breaker opens and the model is not asked for a while.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, Final

from msgspec import Struct

from proxy import __version__
from proxy.config import SummarizerSettings
from proxy.dialects.chat import CHAT
from proxy.dialects.chat.completion import read_completion
from proxy.dialects.chat.message import text_of
from proxy.dialects.chat.refusals import overflow_of
from proxy.dialects.jsontext import is_object, read, write
from proxy.errors import UpstreamBusy, UpstreamError, UpstreamTimeout
from proxy.summaries.prompt import Prompt
from proxy.upstream import Destination, Upstream
from proxy.upstream.client import Answer as Response

_LONGEST_ANSWER: Final = 4 * 1024 * 1024
"""Bytes of an answer that are read; more is no summary."""
_LONGEST_WAIT: Final = 20.0
"""Seconds after which a summarizer that is busy is asked once more, where it names no more than these."""
_TOO_MANY: Final = 429
_BUSY: Final = frozenset({_TOO_MANY, 503, 529})
"""Statuses that say: later."""
_OWN: Final = (
    (b"content-type", b"application/json"),
    (b"accept", b"application/json"),
    (b"accept-encoding", b"identity"),
    (b"user-agent", b"palimpsest/" + __version__.encode()),
)
_CALLERS: Final = frozenset(
    {
        *(b"authorization", b"api-key", b"x-api-key", b"x-goog-api-key", b"x-auth-token"),
        *(b"openai-organization", b"openai-project", b"http-referer", b"x-title"),
    }
)
"""Headers that say on whose behalf is asked; the others of a client's belong to its own request."""
_THOUGHT: Final = re.compile(r"\A\s*<think>.*?</think>\s*", re.DOTALL)
"""How some model servers send reasoning: in the text, before it."""
_CODE: Final = re.compile(r"[A-Za-z0-9_.-]{1,60}")
FAILURES: Final = 3
"""Failures in a row that open it."""
PAUSE: Final = 30.0
"""Seconds of the first pause."""
LONGEST_PAUSE: Final = 600.0
_NAMES: Final = 1024
"""Names that are remembered: they hold names of models, which come from clients."""


class Caller(Struct, frozen=True, kw_only=True):
    """On whose behalf a summary is made: for a summarizer that has no key of its own."""

    tenant: str
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """The headers of the client's own request. They hold its key; only what says who it is goes along, and
    only to where its requests go."""
    query: bytes = b""
    """The query string of the client's own request; some providers want one with each."""

    def __repr__(self) -> str:
        """Show no key."""
        return f"Caller(tenant={self.tenant!r})"


class SummarizerTarget(Struct, frozen=True, kw_only=True):
    """Whom to ask."""

    model: str
    destination: Destination
    path: str
    headers: tuple[tuple[bytes, bytes], ...]
    name: Hashable
    """What its failures are counted under."""

    def __repr__(self) -> str:
        """Show no key."""
        return f"SummarizerTarget(model={self.model!r})"


class ModelAnswer(Struct, frozen=True, kw_only=True):
    """What the model answered."""

    text: str
    """Without reasoning; empty where there is none."""
    finish: str | None
    """Why it ended (`stop`, `length`, …); None where nothing was said about it."""
    calls: bool
    """Whether it calls tools, though it was offered none."""
    usage: Mapping[str, Any] | None
    model: str
    """The model that answered, as it calls itself."""


class NoAnswer(Exception):
    """There is no answer that could be judged; the text says why, and nothing of what was sent."""

    def __init__(
        self, reason: str, *, wait: float | None = None, too_long: bool = False, window: int | None = None
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait = wait
        """Seconds for which it asked not to be asked again (`Retry-After`)."""
        self.too_long = too_long
        """Whether the request was too long for it."""
        self.window = window
        """Tokens that it takes, where it said so."""


class _BreakerState:
    """How it stands with one name."""

    __slots__ = ("failures", "pauses", "tried", "until")

    def __init__(self) -> None:
        self.failures = 0
        """In a row."""
        self.pauses = 0
        """In a row."""
        self.until = 0.0
        """When the pause ends, or ended."""
        self.tried = False
        """Whether the one that is let through after a pause is under way."""


class Breaker:
    """Tells whether somebody may be asked: after repeated failures it opens, with a state for each name.

    closed      everything is let through; failures in a row are counted
    open        nothing is let through until the pause is over; each further pause is twice as long
    half open   one is let through: its success closes the breaker, its failure opens it again
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin closed for every name; `clock` gives seconds."""
        self._clock = clock
        self._states: OrderedDict[Hashable, _BreakerState] = OrderedDict()

    def pause(self, name: Hashable) -> float:
        """Return for how many seconds nobody is let through; 0 where `admits` would let somebody."""
        state = self._states.get(name)
        if state is None:
            return 0.0
        left = state.until - self._clock()
        if left > 0:
            return left
        return PAUSE if state.tried else 0.0

    def admits(self, name: Hashable) -> bool:
        """Tell whether one may go through now; afterwards it is told how that went, or that it did not."""
        if self.pause(name) > 0:
            return False
        state = self._states.get(name)
        if state is not None and state.pauses:
            state.tried = True
        return True

    def succeeded(self, name: Hashable) -> None:
        """Close it."""
        self._states.pop(name, None)

    def failed(self, name: Hashable, wait: float | None = None) -> None:
        """Count a failure. `wait`: seconds of its `Retry-After`; they hold at once."""
        state = self._states.setdefault(name, _BreakerState())
        self._states.move_to_end(name)
        while len(self._states) > _NAMES:
            self._states.popitem(last=False)
        state.failures += 1
        pause = 0.0
        if state.tried or state.failures >= FAILURES:
            pause = min(PAUSE * 2**state.pauses, LONGEST_PAUSE)
            state.pauses, state.failures, state.tried = state.pauses + 1, 0, False
        if wait is not None:
            pause = max(pause, min(wait, LONGEST_PAUSE))
        state.until = max(state.until, self._clock() + pause)

    def abandoned(self, name: Hashable) -> None:
        """Take back that somebody was let through: nothing was learnt."""
        state = self._states.get(name)
        if state is not None:
            state.tried = False


class Summarizer:
    """Asks the model that writes summaries. One for the life of the process."""

    def __init__(self, settings: SummarizerSettings, upstream: Upstream, breaker: Breaker | None = None) -> None:
        """Ask through `upstream`, which has the connections."""
        self.settings = settings
        self._upstream = upstream
        self._breaker = Breaker() if breaker is None else breaker

    def target(self, model: str, caller: Caller) -> SummarizerTarget:
        """Return whom to ask for a summary of a session whose requests ask for `model`.

        The client's own key goes only where its own requests go with it.
        """
        settings = self.settings
        asking, model = model, settings.model or model
        key = settings.api_key.get_secret_value() if settings.api_key is not None else None
        usual = self._upstream.destination(model)
        if settings.base_url is not None or key is not None:
            bearer = None if key is None else f"Bearer {key}".encode()
            usual = Destination(
                base_url=settings.base_url or usual.base_url, authorization=bearer, forwards_credentials=False
            )
        forwards = usual.forwards_credentials
        headers = [pair for pair in caller.headers if forwards and pair[0].lower() in _CALLERS]
        # Some providers want one with each request (Azure's `api-version`). It may hold a key, too.
        known = usual.forwards_query and self._upstream.destination(asking).forwards_query
        query = f"?{caller.query.decode('latin-1')}" if known and caller.query else ""
        return SummarizerTarget(
            model=model,
            destination=usual,
            path=f"/chat/completions{query}",
            headers=(*headers, *_OWN),
            # A client whose key is refused must not keep others from their summaries.
            name=(usual.base_url, model, caller.tenant if forwards else None),
        )

    def pause(self, target: SummarizerTarget) -> float:
        """Return for how many seconds the breaker is open; 0 where the model may be asked."""
        return self._breaker.pause(target.name)

    async def ask(self, target: SummarizerTarget, prompt: Prompt) -> ModelAnswer:
        """Ask, and return the answer once all of it is here.

        Raises:
            NoAnswer: it cannot be reached, refused, did not answer in time, or in no form that can be read;
                or the breaker is open.
        """
        name = target.name
        if not self._breaker.admits(name):
            raise NoAnswer("the summarizer failed repeatedly and is paused")
        try:
            answer = await self._ask_in_time(target, prompt)
        except NoAnswer as why:
            if why.too_long:
                self._breaker.succeeded(name)  # it is there, and the next request may be shorter
            else:
                self._breaker.failed(name, why.wait)
            raise
        except BaseException:  # cancelled, above all
            self._breaker.abandoned(name)
            raise
        self._breaker.succeeded(name)
        return answer

    async def _ask_in_time(self, target: SummarizerTarget, prompt: Prompt) -> ModelAnswer:
        """Ask within the time limit, and once more where it is busy for a moment."""
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
        body = b'{"model":%b,"messages":[%b]}' % (
            write(target.model),
            b",".join([CHAT.spoken("system", prompt.system).raw, CHAT.spoken("user", prompt.user).raw]),
        )
        try:
            response = await self._upstream.ask(target.destination, "POST", target.path, target.headers, body)
            try:
                return _answer_of(response.status, await _read(response), response, target.model)
            finally:
                await response.aclose()
        except UpstreamTimeout as why:
            raise NoAnswer("the summarizer did not answer in time") from why
        except UpstreamBusy as why:
            raise NoAnswer("all connections to the upstream are in use") from why
        except UpstreamError as why:
            raise NoAnswer("the summarizer cannot be reached, or the connection broke") from why


async def _read(response: Response) -> bytes:
    """Return the body; raises `NoAnswer` where it is endless."""
    parts: list[bytes] = []
    size = 0
    async for part in response.chunks(plain=response.readable):
        parts.append(part)
        size += len(part)
        if size > _LONGEST_ANSWER:
            raise NoAnswer("the summarizer's answer is too long to be a summary")
    return b"".join(parts)


def _answer_of(status: int, body: bytes, response: Response, model: str) -> ModelAnswer:
    """Read an answer.

    Raises:
        NoAnswer: it is a refusal, or no completion.
    """
    if not 200 <= status < 300:
        overflow = overflow_of(status, body)
        if overflow is not None:
            raise NoAnswer("the summarizer found the request too long", too_long=True, window=overflow.window)
        wait = _wait_of(response) if status in _BUSY else None
        raise NoAnswer(f"the summarizer answered {status}{_code_in(body)}", wait=wait)
    try:
        data = read(body)
    except ValueError as why:
        raise NoAnswer("the summarizer's answer is no JSON") from why
    completion = read_completion(data)
    if completion.error is not None and not completion.choices:
        raise NoAnswer(f"the summarizer answered with an error{_code_in(body)}")
    if not completion.choices:
        raise NoAnswer("the summarizer's answer is no completion")
    choice = completion.choices[0]
    return ModelAnswer(
        text=_THOUGHT.sub("", text_of(choice.message.get("content"))).strip(),
        finish=choice.finish_reason,
        calls=bool(choice.message.get("tool_calls") or choice.message.get("function_call")),
        usage=completion.usage,
        model=completion.model or model,
    )


def _code_in(body: bytes) -> str:
    """Return the code of an error in brackets, where it is one word. Its text may hold a part of a key."""
    try:
        data = read(body)
    except ValueError:
        return ""
    error = data.get("error") if is_object(data) else None
    if not is_object(error):
        return ""
    for name in ("code", "type"):
        said = error.get(name)
        if isinstance(said, str) and _CODE.fullmatch(said):
            return f" ({said})"
    return ""


def _wait_of(response: Response) -> float | None:
    """Return the seconds of `Retry-After` (RFC 9110, section 10.2.3), or of its form in milliseconds."""
    for name, unit in ((b"retry-after-ms", 1000.0), (b"retry-after", 1.0)):
        said = (response.header(name) or b"").strip().decode("latin-1")
        if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{0,9})?", said):
            return float(said) / unit
        if name == b"retry-after" and said:
            try:
                return max(0.0, parsedate_to_datetime(said).timestamp() - time.time())
            except ValueError:
                return None
    return None
