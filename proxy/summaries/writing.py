"""One summary, from its span to its text: the model is asked, what it says is judged, code adds what it took.

    facts by code -> transcript, in parts that the model can read -> ask, judge, ask once more with the reason
    -> the next part with what was made of those before it -> text

It does not read the store, nor write to it, and decides neither when a summary is made nor from where.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread
from msgspec import Struct

from proxy.dialects.chat.message import ChatMessage
from proxy.dialects.chat.overflow import Overflow
from proxy.dialects.jsontext import is_object
from proxy.models import ModelFacts, cost
from proxy.store import SummaryStatus, sanitize
from proxy.summaries.facts import Facts, facts_of
from proxy.summaries.gates import Verdict, judge, missing
from proxy.summaries.prompt import prompt_of
from proxy.summaries.source import Source
from proxy.summaries.span import Span
from proxy.summaries.state import State
from proxy.summaries.summarizer import Answer, NoAnswer, Summarizer, Target
from proxy.summaries.text import compose
from proxy.summaries.transcript import parts
from proxy.summaries.work import Work
from proxy.tokens import MESSAGE_TOKENS, TokenCounter
from proxy.trimming import Language

TRIES: Final = 2
"""How often a part is asked for: once more where the first answer is refused."""
UNKNOWN_WINDOW: Final = 60_000
"""Tokens of a transcript that are sent at once to a model of whose context window nothing is known."""
_LONGEST_PART: Final = 120_000
"""Tokens of a transcript that are sent at once at most: of more a model overlooks most."""
_SHARE: Final = 0.7
"""How much of a window a part of the transcript may take: other counts, and what stands around it."""
_LEAST_PART: Final = 1_000
_SHORTER: Final = 3
"""How often it is tried with shorter parts, where the model finds them too long."""

FactsOf = Callable[[str, str], ModelFacts]
"""Tells what is known of a model at an address."""
Result = TypeVar("Result")


class Spending(Struct, kw_only=True):
    """What all tries took together."""

    tries: int = 0
    usage: dict[str, Any] | None = None
    """Every number that was reported, added up; None where nothing was."""
    cost: float | None = None
    """Dollars; None where no price is known."""

    def add(self, usage: Mapping[str, Any] | None, spent: float | None) -> None:
        """Add one try."""
        self.tries += 1
        if usage is not None:
            self.usage = _sum(self.usage or {}, usage)
        if spent is not None:
            self.cost = (self.cost or 0.0) + spent


class Written(Struct, frozen=True, kw_only=True):
    """What came of it."""

    status: SummaryStatus
    reason: str
    """Why it is not ready; empty where it is."""
    model: str
    """The model that wrote it, or would have."""
    spending: Spending
    text: str = ""
    """With its heading, as it is sent."""
    tokens: int = 0
    """Tokens of what is sent of it."""
    state: Mapping[str, Any] = {}
    """What the next one needs of it."""


class _Ground(Struct, frozen=True, kw_only=True):
    """What code knows before a model is asked."""

    facts: Facts
    """Of all that the summary covers."""
    source: Source
    language: Language
    previous: str
    """What the model wrote the last time."""
    tokens: int
    """Tokens of what the summary takes the place of: of the messages, and of the summary before it."""


class _Refused(Exception):
    """What the model wrote cannot be used; the text says why."""


class Writer:
    """Writes summaries, several at a time. One for the life of the process."""

    def __init__(self, summarizer: Summarizer, counter: TokenCounter, facts: FactsOf) -> None:
        """Ask `summarizer`; count with `counter`; `facts` tells windows and prices of models."""
        self._summarizer = summarizer
        self._counter = counter
        self._facts = facts
        self._thread = anyio.CapacityLimiter(1)
        """One at a time: they would only take turns, and requests are served beside them."""

    async def write(self, span: Span, work: Work, target: Target) -> Written:
        """Write the summary of a span, or say why there is none. Raises nothing of its own."""
        spending = Spending()
        ended = partial(Written, model=target.model, spending=spending)
        try:
            ground = await self._aside(lambda: self._ground(span, work))
            told, model = await self._told(span, ground, work, target, spending)
            text, tokens = await self._aside(lambda: self._text(told, ground, work))
        except NoAnswer as why:
            return ended(status=SummaryStatus.FAILED, reason=why.reason)
        except _Refused as why:
            return ended(status=SummaryStatus.REFUSED, reason=str(why))
        state = State(facts=ground.facts, told=told).model_dump(mode="json")
        return Written(
            status=SummaryStatus.READY,
            reason="",
            model=model,
            spending=spending,
            text=text,
            tokens=tokens,
            state=state,
        )

    async def _told(
        self, span: Span, ground: _Ground, work: Work, target: Target, spending: Spending
    ) -> tuple[str, str]:
        """Return what the model makes of the span, and the model; in shorter parts where it says so."""
        limit = self._limit(target)
        for _ in range(_SHORTER):
            try:
                return await self._folded(span, ground, work, target, spending, limit)
            except NoAnswer as why:
                if why.overflow is None:
                    raise
                limit = _shorter(limit, why.overflow)
                if limit < _LEAST_PART:
                    raise
        raise NoAnswer("the summarizer found the request too long, however short it was")

    async def _folded(
        self, span: Span, ground: _Ground, work: Work, target: Target, spending: Spending, limit: int
    ) -> tuple[str, str]:
        """Give the model one part after the other, each with what it made of those before."""
        count = partial(self._counter.text, model=target.model)
        transcript = await self._aside(lambda: parts(span.messages, limit, count))
        told, model = ground.previous, target.model
        for part in transcript:
            refused = ""
            for _ in range(TRIES):
                prompt = partial(
                    prompt_of,
                    part,
                    previous=told,
                    language=ground.language,
                    custom=work.edit.prompt,
                    max_tokens=min(work.edit.max_tokens, work.wanted.room),
                    refused=refused,
                )
                answer = await self._summarizer.ask(target, await self._aside(prompt))
                spending.add(answer.usage, self._cost(answer, target))
                verdict = await self._aside(partial(self._verdict, answer, ground, work))
                if verdict.ok:
                    told, model = verdict.text, answer.model
                    break
                refused = verdict.reason
            else:
                raise _Refused(refused)
        return told, model

    async def goes_on(self, span: Span, work: Work) -> bool:
        """Tell whether the summary before the span is good enough to go on from."""
        predecessor = span.predecessor
        if predecessor is None:
            return True
        if predecessor.generation >= work.edit.max_generations:
            return False
        return await self._aside(lambda: _is_sound(predecessor.text, state_of(span)))

    def _ground(self, span: Span, work: Work) -> _Ground:
        """Take from the messages what code takes. Slow."""
        state = state_of(span)
        facts, previous, before = facts_of(span.messages), "", 0
        if state is not None and span.predecessor is not None:
            facts, previous = state.facts.and_then(facts), state.told
            before = span.predecessor.tokens - span.predecessor.covered_tokens
        return _Ground(
            facts=facts,
            source=Source.of(span.messages, previous, state.facts if state is not None else None),
            language=facts.language if work.edit.language == "auto" else work.edit.language,
            previous=previous,
            tokens=span.tokens + before,
        )

    def _verdict(self, answer: Answer, ground: _Ground, work: Work) -> Verdict:
        """Judge one answer: how it ended, then what it says."""
        if answer.calls:
            return Verdict(ok=False, reason="it called a tool instead of writing", text="")
        if answer.finish == "length":
            return Verdict(ok=False, reason="it was cut off at the summarizer's limit of length", text="")
        if answer.finish == "content_filter":
            return Verdict(ok=False, reason="the summarizer's provider filtered it", text="")
        return judge(
            sanitize(answer.text),
            ground.source,
            room=work.wanted.room,
            replaced=ground.tokens,
            count=partial(self._counter.text, model=work.model),
            language=ground.language,
        )

    def _text(self, told: str, ground: _Ground, work: Work) -> tuple[str, int]:
        """Return the text as it is sent, and its tokens."""
        composed = partial(
            compose,
            heading=work.edit.heading,
            language=ground.language,
            room=work.wanted.room - MESSAGE_TOKENS,
            max_tokens=work.edit.max_tokens,
            count=partial(self._counter.text, model=work.model),
            hint=work.hint,
        )
        text = composed(told, ground.facts)
        if text == composed("", Facts(messages=ground.facts.messages)):
            raise _Refused(f"nothing but its heading fits within {work.wanted.room} tokens")
        text = sanitize(text)  # as it is stored, so that every worker sends the same bytes
        tokens = self._counter.message(ChatMessage.of({"role": "system", "content": text}), work.model)
        if tokens >= ground.tokens:
            raise _Refused(f"it would have {tokens} tokens, and what it replaces {ground.tokens}")
        return text, tokens

    def _limit(self, target: Target) -> int:
        """Return how many tokens of a transcript are sent at once."""
        window = self._facts(target.model, target.destination.base_url).context_window
        return UNKNOWN_WINDOW if window is None else min(int(window * _SHARE), _LONGEST_PART)

    def _cost(self, answer: Answer, target: Target) -> float | None:
        return cost(answer.usage, self._facts(target.model, target.destination.base_url).dollars)

    async def _aside(self, work: Callable[[], Result]) -> Result:
        """Do pure work that takes long, in a thread: the event loop serves requests."""
        return await anyio.to_thread.run_sync(work, limiter=self._thread)


def state_of(span: Span) -> State | None:
    """Return what the summary before the span hands on; None where there is none, or it cannot be read.

    (One that an older version made, for instance.)
    """
    if span.predecessor is None:
        return None
    try:
        return State.model_validate(span.predecessor.state)
    except ValueError:
        return None


def _is_sound(text: str, state: State | None) -> bool:
    """Tell whether a summary can be read, and says what it should."""
    return state is not None and not missing(text, state.facts)


def _shorter(limit: int, overflow: Overflow) -> int:
    """Return how many tokens of a transcript to send to a model that found `limit` of them too many."""
    least = limit // 2
    return least if overflow.window is None else min(least, int(overflow.window * _SHARE))


def _sum(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Add up the numbers of two usages, however deep; of anything else the newer one stays."""
    added = dict(one)
    for name, value in other.items():
        before = added.get(name)
        if is_object(value):
            added[name] = _sum(before if is_object(before) else {}, value)
        elif _is_number(value) and _is_number(before):
            added[name] = before + value
        else:
            added[name] = value
    return added


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
