"""Making summaries: in the background or waited for; among all workers one makes a given summary.

    take the lease -> is one there by now, or was it refused? -> read the branch -> ask, check, render -> keep

Whatever goes wrong ends in an `Attempt` that says so, and never fails a request.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread
from msgspec import Struct, field
from msgspec.structs import replace

from proxy.dialects import Message
from proxy.dialects.jsontext import is_object
from proxy.errors import PalimpsestError, StoreUnavailable
from proxy.models import ModelFacts, cost
from proxy.store import Store, SummaryRow, SummaryStatus, sanitize
from proxy.summaries.prompt import Part, parts, prompt_of
from proxy.summaries.render import Content, Limits, render
from proxy.summaries.summarizer import Caller, ModelAnswer, NoAnswer, Summarizer, SummarizerTarget
from proxy.summaries.validate import CoveredText, bare, language_of, refusal
from proxy.summaries.verbatim import CoveredFacts, SummaryState, facts_of, user_text
from proxy.tokens import MESSAGE_TOKENS, TokenCounter
from proxy.trimming import Language, Summarize, SummaryRequest

_LOG: Final = logging.getLogger("palimpsest.summaries")
_AT_ONCE: Final = 16
"""Summaries that one process makes at the same time: each holds messages and a connection to the upstream."""
_QUOTED: Final = re.compile(r"(?::| \().*", re.DOTALL)
"""The part of a reason that quotes the narrative: receipts have it, logs do not."""
GRACE: Final = 2.0
"""Seconds for which the end of the process waits for summaries that are being made."""

NOT_YET: Final = "the summary is still being made"
_ELSEWHERE: Final = "another process is making the summary"
_GONE: Final = "the branch is not there any more"
_ALONE: Final = "the summarizer failed repeatedly and is paused"
_CLOSING: Final = "the proxy is being closed"
_FAULT: Final = "making a summary failed by a fault of the proxy's own"

TRIES: Final = 2
"""How often a part is asked for: once more where the first answer is refused."""
UNKNOWN_WINDOW: Final = 60_000
"""Tokens of a transcript that are sent at once to a model of unknown context window."""
_LONGEST_PART: Final = 120_000
"""Tokens of a transcript that are sent at once at most: of more a model overlooks most."""
_SHARE: Final = 0.7
"""How much of a window a part of the transcript may take: other counts, and what stands around it."""
_LEAST_PART: Final = 1_000
_SHORTER: Final = 3
"""How often shorter parts are tried where the model finds them too long."""
_OWN_SHARE: Final = 0.25
"""Part of a summary's room that the user's own messages have, where the policy does not say."""
_SHORT_ONES: Final = 2
"""How often that share short messages may take, where the policy does not say."""
_PORTION: Final = 2_000
"""Messages that are read from the store at once."""
_DEEPEST: Final = 2**31 - 1

Start = Callable[[Coroutine[Any, Any, "Attempt"]], "asyncio.Task[Attempt]"]
"""Runs something in a task that no request can cancel, and keeps it (`Background.start`)."""
FactsOf = Callable[[str, str], ModelFacts]
"""Tells what is known of a model at an address."""
CountAll = Callable[[Sequence[Message]], list[int]]
"""Counts the tokens of each message."""
Result = TypeVar("Result")


class Given(Struct, frozen=True, kw_only=True):
    """The beginning of a branch, where whoever wants the summary has it whole."""

    messages: tuple[Message, ...]
    """The untouched messages from the oldest on, at least up to what is to be covered."""
    nodes: tuple[str, ...]
    """For each of them the name that it has, or will have."""

    def __repr__(self) -> str:
        """Show no message."""
        return f"Given({len(self.messages)} messages)"


class Work(Struct, frozen=True, kw_only=True):
    """One summary that is wanted."""

    key: str
    """The session's internal name."""
    session: str
    """The session's id, for the log."""
    tip: str
    """The end of the branch: a node at or after the last message to be covered, stored unless `given` is."""
    wanted: SummaryRequest
    edit: Summarize
    model: str
    """The model that the session's requests ask for: it will read the summary."""
    caller: Caller
    asked: bool = False
    """Whether somebody asked for it: then an earlier refusal is no reason not to try."""
    has_target: bool = True
    """Whether the policy says how far to trim; without a target the room says nothing about size."""
    exchange: str | None = None
    """The exchange that began it."""
    attempt: SummaryRow | None = None
    """The newest attempt on this branch, where it is known: what was refused is not tried again at once."""
    given: Given | None = None
    """The messages; None: they are read from the store."""
    hint: str = ""
    """How the reader of the summary can read more, in words that are sent with it; empty where it cannot."""


class Attempt(Struct, frozen=True, kw_only=True):
    """What came of it."""

    row: SummaryRow | None
    """The summary, or an attempt that was kept with its reason; None where none was made."""
    reason: str = ""
    """Why there is no summary, in words for a receipt; empty where there is one."""


# ------------------------------------------------------------------------------------ reading the branch


class Stretch(Struct, frozen=True, kw_only=True):
    """The messages that a summary covers anew, and what is known of those before them."""

    start: int
    """Position of the first of `messages`."""
    messages: tuple[Message, ...]
    nodes: tuple[str, ...]
    """Their names."""
    tokens: int
    """Tokens of all messages of the branch up to the last of these."""
    earlier: tuple[str, ...]
    """What the user said in the messages before `start`, oldest first."""
    predecessor: SummaryRow | None
    """The summary that covers just what lies before `start`; None where `start` is 0."""

    @property
    def stop(self) -> int:
        """Position after the last message."""
        return self.start + len(self.messages)


class BranchState(Struct, frozen=True, kw_only=True):
    """What is known of a branch that is to be summed up."""

    newest: SummaryRow | None
    """The ready summary that covers most."""
    attempt: SummaryRow | None
    """The newest attempt of any outcome."""
    stretch: Stretch | None
    """What is to be summed up; None where `newest` covers it, or the branch is not that long (any more)."""


class _Portion(Struct, frozen=True, kw_only=True):
    """Messages of a branch in a row."""

    start: int
    messages: Sequence[Message]
    nodes: Sequence[str]
    totals: Sequence[int]
    """Tokens of all messages up to each."""


async def read_branch(store: Store, work: Work, count: CountAll) -> BranchState:
    """Return what is known of the branch, and what a summary up to `work.wanted.stop` is made of.

    The whole branch is read, from its end. Of what the last summary covers only the user's words are kept.

    Raises:
        StoreUnavailable: it cannot be read.
    """
    stop, names = work.wanted.stop, set[str]()
    rows = [row for row in await store.summary_rows(work.key) if row.recipe == work.edit.recipe]
    ready = {row.node: row for row in rows if row.status is SummaryStatus.READY}
    newest: SummaryRow | None = None
    begin = tokens = 0
    taken: list[tuple[str, Message]] = []
    earlier: list[str] = []
    async for portion in _portions(store, work, count):
        names.update(portion.nodes)
        places = range(portion.start, portion.start + len(portion.nodes))
        if newest is None:
            newest = next((ready[node] for node in reversed(portion.nodes) if node in ready), None)
            if newest is not None and goes_on_from(newest, work):
                begin = newest.until
        if stop - 1 in places:
            tokens = portion.totals[stop - 1 - portion.start]
        kept = range(max(begin, portion.start), min(stop, places.stop))
        at = slice(kept.start - portion.start, max(kept.stop, kept.start) - portion.start)
        taken = [*zip(portion.nodes[at], portion.messages[at], strict=True), *taken]
        before = portion.messages[: max(0, min(begin, stop) - portion.start)]
        earlier = [*await anyio.to_thread.run_sync(partial(_user_texts, before)), *earlier]
    attempt = next((row for row in rows if row.node in names or row.tip in names), None)
    if begin >= stop or len(taken) < stop - begin or (newest is not None and newest.until >= stop):
        return BranchState(newest=newest, attempt=attempt, stretch=None)
    stretch = Stretch(
        start=begin,
        messages=tuple([message for _, message in taken]),
        nodes=tuple([node for node, _ in taken]),
        tokens=tokens,
        earlier=tuple(earlier),
        predecessor=newest if begin else None,
    )
    return BranchState(newest=newest, attempt=attempt, stretch=stretch)


def goes_on_from(row: SummaryRow, work: Work) -> bool:
    """Tell whether the next summary is made from this one; else it is made from all messages again."""
    return row.generation < work.edit.max_generations and SummaryState.read(row.state) is not None


async def _portions(store: Store, work: Work, count: CountAll) -> AsyncIterator[_Portion]:
    """Give the messages of the branch, the newest portion first."""
    if work.given is not None:
        totals: list[int] = []
        for tokens in count(work.given.messages):
            totals.append(tokens + (totals[-1] if totals else 0))
        yield _Portion(start=0, messages=work.given.messages, nodes=work.given.nodes, totals=totals)
        return
    end = await store.path(work.key, work.tip, below=_DEEPEST)
    node, depth = work.tip, end[-1].depth if end else 0
    while depth > 0:
        rows = await store.path(work.key, node, below=max(0, depth - _PORTION))
        if not rows:
            return
        yield _Portion(
            start=rows[0].depth - 1,
            messages=[row.message for row in rows],
            nodes=[row.node for row in rows],
            totals=[row.tokens_total for row in rows],
        )
        node, depth = rows[0].parent, rows[0].depth - 1


def _user_texts(messages: Sequence[Message]) -> list[str]:
    return list(filter(None, map(user_text, messages)))


# ------------------------------------------------------------------------------------ writing one summary


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
    """What came of writing a summary."""

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
    state: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the next one needs of it."""


class _Ground(Struct, frozen=True, kw_only=True):
    """What code knows before a model is asked."""

    facts: CoveredFacts
    """Of all that the summary covers."""
    own: Sequence[str]
    """All that the user said in it."""
    source: CoveredText
    language: Language
    previous: str
    """What the model wrote the last time."""
    tokens: int
    """Tokens of what the summary replaces: the messages, and the summary before it."""


class _RefusedAnswer(Exception):
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

    async def write(self, stretch: Stretch, work: Work, target: SummarizerTarget) -> Written:
        """Write the summary of a stretch, or say why there is none. Raises nothing of its own."""
        spending = Spending()
        ended = partial(Written, model=target.model, spending=spending)
        try:
            ground = await self._in_thread(lambda: self._ground(stretch, work))
            told, model = await self._narrative(stretch, ground, work, target, spending)
            text, tokens = await self._in_thread(lambda: self._render(told, ground, stretch, work))
        except NoAnswer as why:
            return ended(status=SummaryStatus.FAILED, reason=why.reason)
        except _RefusedAnswer as why:
            return ended(status=SummaryStatus.REFUSED, reason=str(why))
        return Written(
            status=SummaryStatus.READY,
            reason="",
            model=model,
            spending=spending,
            text=text,
            tokens=tokens,
            state=SummaryState(facts=ground.facts, told=told).write(),
        )

    def _ground(self, stretch: Stretch, work: Work) -> _Ground:
        """Take from the messages what code takes. Slow."""
        predecessor = stretch.predecessor
        state = None if predecessor is None else SummaryState.read(predecessor.state)
        facts, previous, tokens = facts_of(stretch.messages), "", stretch.tokens
        if state is not None and predecessor is not None:
            facts, previous = state.facts.and_then(facts), state.told
            tokens += predecessor.tokens - predecessor.covered_tokens
        before = [*stretch.earlier, *filter(None, [previous])]
        source = CoveredText(stretch.messages, before, None if state is None else state.facts)
        language = work.edit.language
        return _Ground(
            facts=facts,
            own=[*stretch.earlier, *_user_texts(stretch.messages)],
            source=source,
            language=language_of(source.scripts) if language == "auto" else language,
            previous=previous,
            tokens=tokens,
        )

    async def _narrative(
        self, stretch: Stretch, ground: _Ground, work: Work, target: SummarizerTarget, spending: Spending
    ) -> tuple[str, str]:
        """Return what the model makes of the stretch, and the model; in shorter parts where it says so."""
        limit = self._limit(target)
        count = partial(self._counter.text, model=target.model)
        for _ in range(_SHORTER):
            transcript = await self._in_thread(partial(parts, stretch.messages, limit, count))
            try:
                return await self._ask_parts(transcript, ground, work, target, spending)
            except NoAnswer as why:
                if not why.too_long:
                    raise
                limit = limit // 2 if why.window is None else min(limit // 2, int(why.window * _SHARE))
                if limit < _LEAST_PART:
                    raise
        raise NoAnswer("the summarizer found the request too long, however short it was")

    async def _ask_parts(
        self, transcript: Sequence[Part], ground: _Ground, work: Work, target: SummarizerTarget, spending: Spending
    ) -> tuple[str, str]:
        """Give the model one part after the other, each with what it made of those before."""
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
                answer = await self._summarizer.ask(target, await self._in_thread(prompt))
                spending.add(answer.usage, cost(answer.usage, self._model(target).dollars))
                text = bare(sanitize(answer.text))
                refused = await self._in_thread(partial(self._refusal, answer, text, ground, work))
                if not refused:
                    told, model = text, answer.model
                    break
            else:
                raise _RefusedAnswer(refused)
        return told, model

    def _refusal(self, answer: ModelAnswer, text: str, ground: _Ground, work: Work) -> str:
        """Return why an answer cannot be used; empty where it can."""
        if answer.calls:
            return "it called a tool instead of writing"
        if answer.finish == "length":
            return "it was cut off at the summarizer's limit of length"
        if answer.finish == "content_filter":
            return "the summarizer's provider filtered it"
        tokens = self._counter.text(text, work.model)
        return refusal(text, ground.source, tokens=tokens, replaced=ground.tokens, language=ground.language)

    def _render(self, told: str, ground: _Ground, stretch: Stretch, work: Work) -> tuple[str, int]:
        """Return the text as it is sent, and its tokens."""
        edit, room = work.edit, work.wanted.room
        own = short = edit.verbatim_user_tokens
        if own is None or short is None:
            own = int(_OWN_SHARE * room)
            own = own if work.has_target else min(own, edit.max_tokens)
            short = _SHORT_ONES * own
        text = render(
            Content(
                heading=edit.heading,
                hint=work.hint,
                own=ground.own,
                facts=ground.facts,
                told=told,
                language=ground.language,
            ),
            Limits(room=room - MESSAGE_TOKENS, own=own, own_short=short, told=edit.max_tokens),
            partial(self._counter.text, model=work.model),
        )
        if not text:
            raise _RefusedAnswer(f"nothing but its heading fits within {room} tokens")
        text = sanitize(text)  # as it is stored, so that every worker sends the same bytes
        tokens = self._counter.message(stretch.messages[0].dialect.spoken("system", text), work.model)
        if tokens >= ground.tokens:
            raise _RefusedAnswer(f"it would have {tokens} tokens, and what it replaces {ground.tokens}")
        return text, tokens

    def _limit(self, target: SummarizerTarget) -> int:
        """Return how many tokens of a transcript are sent at once."""
        window = self._model(target).context_window
        return UNKNOWN_WINDOW if window is None else min(int(window * _SHARE), _LONGEST_PART)

    def _model(self, target: SummarizerTarget) -> ModelFacts:
        return self._facts(target.model, target.destination.base_url)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        """Do pure work that takes long in a thread: the event loop serves requests."""
        return await anyio.to_thread.run_sync(work, limiter=self._thread)


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


# ------------------------------------------------------------------------------------ the lease


class Terms(Struct, frozen=True, kw_only=True):
    """For how long leases are taken: short, and renewed, so that a dead worker's is free soon."""

    seconds: float = 15.0
    """How long a lease holds that nobody renews."""
    renewed_after: float = 5.0
    """Seconds after which a lease is renewed, again and again."""
    first_wait: float = 0.05
    longest_wait: float = 0.5
    """Seconds between two looks at a lease of somebody else's."""
    clock: Callable[[], float] = time.time
    """Seconds since 1970: workers on several hosts compare it."""


@asynccontextmanager
async def held(
    store: Store, key: str, name: str, holder: str, terms: Terms, *, patience: float = 0.0
) -> AsyncGenerator[bool]:
    """Hold the lease `name` of a session while the block runs; yield whether it could be had.

    A lease of another `holder` is waited for `patience` seconds. Raises `StoreUnavailable`.
    """

    async def take() -> bool:
        now = terms.clock()
        return await store.lease(key, name, holder, int(now * 1000), int((now + terms.seconds) * 1000))

    async def renew() -> None:
        """Renew it until cancelled. If it ended meanwhile, go on: the store keeps only one summary."""
        while True:
            await asyncio.sleep(terms.renewed_after)
            with suppress(StoreUnavailable):
                await take()

    ends, wait = time.monotonic() + patience, terms.first_wait
    while not await take():
        left = ends - time.monotonic()
        if left <= 0:
            yield False
            return
        await asyncio.sleep(min(wait, left))
        wait = min(2 * wait, terms.longest_wait)
    try:
        async with asyncio.TaskGroup() as group:
            renewing = group.create_task(renew())
            yield True
            renewing.cancel()
    finally:
        with suppress(StoreUnavailable):  # it ends by itself
            await store.release(key, name, holder)


# ------------------------------------------------------------------------------------ scheduling


class Summaries:
    """Makes summaries by a model. One for the life of the process.

    Whoever ends the process waits for `aclose` before it waits for the tasks that were started.
    """

    def __init__(
        self,
        store: Store,
        summarizer: Summarizer,
        counter: TokenCounter,
        facts: FactsOf,
        start: Start,
        *,
        terms: Terms | None = None,
        grace: float = GRACE,
        at_once: int = _AT_ONCE,
    ) -> None:
        """Make at most `at_once` at the same time; `grace`: seconds for which `aclose` waits."""
        self._store = store
        self._summarizer = summarizer
        self._count = counter
        self._writer = Writer(summarizer, counter, facts)
        self._start = start
        self._terms = Terms() if terms is None else terms
        self._grace = grace
        self._running: dict[tuple[str, str], asyncio.Task[Attempt]] = {}
        """What is being made here, by session and recipe."""
        self._places = asyncio.Semaphore(at_once)
        self._closing = False

    def begin(self, work: Work) -> None:
        """Make a summary in the background, unless one is being made or a refusal still holds."""
        if _name(work) in self._running or self._reason_not_to(work):
            return
        self._start_task(work, 0.0)

    def none_begins(self, model: str, caller: Caller) -> str:
        """Return why no summary is started now for sessions of a `model`; empty where one may be."""
        if self._closing:
            return _CLOSING
        return _ALONE if self._is_left_alone(model, caller) else ""

    async def make(self, work: Work, patience: float | None = None) -> Attempt:
        """Make a summary and wait for it; it goes on in the background where that takes too long.

        Args:
            work: what is wanted.
            patience: seconds to wait; None: as long as one answer of the summarizer may take.
        """
        if patience is None:
            patience = self._summarizer.settings.timeout
        ends = time.monotonic() + patience
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while (other := self._running.get(_name(work))) is not None:
                    await asyncio.wait({other})
                reason = self._reason_not_to(work)
                if reason:
                    return Attempt(row=work.attempt if reason == _refusal(work) else None, reason=reason)
                return await asyncio.shield(self._start_task(work, ends - time.monotonic()))
        return Attempt(row=None, reason=NOT_YET)

    async def aclose(self) -> None:
        """Start nothing more; cancel what is not done within the grace."""
        self._closing = True
        running = set(self._running.values())
        if running:
            _, late = await asyncio.wait(running, timeout=self._grace)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    def _reason_not_to(self, work: Work) -> str:
        """Return why a summary is not started; empty where it may be."""
        return self.none_begins(work.model, work.caller) or _refusal(work)

    def _start_task(self, work: Work, patience: float) -> asyncio.Task[Attempt]:
        name = _name(work)
        task = self._running[name] = self._start(self._attempt(work, patience))
        # Not at the end of the coroutine: one that is cancelled at once never begins.
        task.add_done_callback(lambda _: self._running.pop(name, None))
        return task

    async def _attempt(self, work: Work, patience: float) -> Attempt:
        """Make it, if nobody else does."""
        async with self._places:
            if self._is_left_alone(work.model, work.caller):  # those before it may have failed meanwhile
                return Attempt(row=None, reason=_ALONE)
            return await _without_raising(work, self._make_leased(work, patience))

    def _is_left_alone(self, model: str, caller: Caller) -> bool:
        return self._summarizer.pause(self._summarizer.target(model, caller)) > 0

    async def _make_leased(self, work: Work, patience: float) -> Attempt:
        holder = f"sum_{secrets.token_hex(8)}"
        recipe = work.edit.recipe
        async with held(self._store, work.key, recipe, holder, self._terms, patience=patience) as obtained:
            # What goes wrong in there must not end as one of the errors of a group of tasks.
            return (
                await _without_raising(work, self._make_now(work)) if obtained else Attempt(row=None, reason=_ELSEWHERE)
            )

    async def _make_now(self, work: Work) -> Attempt:
        """Make it: nobody else does now."""
        count = partial(self._count.messages, model=work.model)
        known = await read_branch(self._store, work, count)
        if known.newest is not None and known.newest.until >= work.wanted.stop:
            return Attempt(row=known.newest)
        if reason := _refusal(replace(work, attempt=known.attempt)):
            return Attempt(row=known.attempt, reason=reason)
        stretch = known.stretch
        if stretch is None:
            return Attempt(row=None, reason=_GONE)
        if known.newest is not None and _is_nearly_reached(known.newest, stretch, work):
            return Attempt(row=known.newest)
        started, born = time.monotonic(), await self._created_at(work)
        written = await self._writer.write(stretch, work, self._summarizer.target(work.model, work.caller))
        row = _row(stretch, work, written, int(self._terms.clock() * 1000))
        _LOG.info("summary", extra={"fields": _line(row, work, written, time.monotonic() - started)})
        if await self._created_at(work) != born:  # what was deleted must not come back in another one of its name
            return Attempt(row=None, reason=_GONE)
        if not await self._store.keep_summary(work.key, row) and row.status is SummaryStatus.READY:
            # Somebody was faster (the lease had ended meanwhile), or the session is gone.
            faster = (await read_branch(self._store, work, count)).newest
            return Attempt(row=faster if faster is not None and faster.until >= row.until else row)
        return Attempt(row=row, reason=row.reason)

    async def _created_at(self, work: Work) -> int | None:
        """Return when the session was made; None where there is none."""
        session = await self._store.session(work.caller.tenant, work.session)
        return None if session is None else session.created_at


async def _without_raising(work: Work, making: Awaitable[Attempt]) -> Attempt:
    """Return the attempt; an error becomes its reason."""
    try:
        return await making
    except PalimpsestError as why:
        _LOG.warning("no summary", extra={"fields": {"session": work.session, "reason": why.message}})
        return Attempt(row=None, reason=why.message)
    except Exception:  # noqa: BLE001 - the outermost place: no request may fail by it
        _LOG.exception(_FAULT)
        return Attempt(row=None, reason=_FAULT)


def _name(work: Work) -> tuple[str, str]:
    return work.key, work.edit.recipe


def _refusal(work: Work) -> str:
    """Return why the newest attempt was refused, where that still holds: little was added since."""
    newest = work.attempt
    if work.asked or newest is None or newest.status is not SummaryStatus.REFUSED:
        return ""
    grown = work.wanted.stop - newest.until
    return newest.reason if grown < max(1, work.edit.min_new_messages) else ""


def _is_nearly_reached(newest: SummaryRow, stretch: Stretch, work: Work) -> bool:
    """Tell whether a summary that became ready since this one was planned leaves too little for it."""
    if work.asked:
        return False
    added = stretch.tokens - newest.covered_tokens
    return stretch.stop - newest.until < work.edit.min_new_messages or (added <= work.edit.growth_ratio * newest.tokens)


def _row(stretch: Stretch, work: Work, written: Written, now: int) -> SummaryRow:
    predecessor = stretch.predecessor
    return SummaryRow(
        id=f"sum_{secrets.token_hex(12)}",
        node=stretch.nodes[-1],
        tip=work.tip,
        recipe=work.edit.recipe,
        until=stretch.stop,
        generation=1 if predecessor is None else predecessor.generation + 1,
        status=written.status,
        reason=written.reason,
        model=written.model,
        text=written.text,
        state=written.state,
        tokens=written.tokens,
        covered_messages=stretch.stop,
        covered_tokens=stretch.tokens,
        predecessor=None if predecessor is None else predecessor.id,
        asked=work.asked,
        usage=written.spending.usage,
        cost=written.spending.cost,
        exchange=work.exchange,
        created_at=now,
    )


def _line(row: SummaryRow, work: Work, written: Written, seconds: float) -> dict[str, Any]:
    """Return the fields of the log line: nothing that was said."""
    return {
        "session": work.session,
        "status": row.status.value,
        "reason": _QUOTED.sub("", row.reason) if row.status is SummaryStatus.REFUSED else row.reason,
        "model": row.model,
        "messages": row.covered_messages,
        "tokens": f"{row.covered_tokens}->{row.tokens}" if row.text else row.covered_tokens,
        "generation": row.generation,
        "tries": written.spending.tries,
        "ms": round(seconds * 1000),
        "cost": row.cost,
    }
