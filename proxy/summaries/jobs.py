"""Makes summaries, in the background or while a caller waits. A lease lets only one worker make a given summary.

    take the lease -> read the branch -> ready or refused by now? -> ask, check, render -> store

Every failure ends in a `SummaryAttempt` with a reason. It never fails a request.
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
from itertools import accumulate
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread
from msgspec import Struct
from msgspec.structs import replace

from proxy.conversation import ROOT
from proxy.dialects import Message
from proxy.dialects.jsontext import added
from proxy.errors import NoAnswer, PalimpsestError, StoreUnavailable
from proxy.models import ModelFacts, cost
from proxy.store import Store, SummaryRow, SummaryStatus, sanitize
from proxy.summaries.prompt import Part, parts, prompt_of
from proxy.summaries.render import Content, CoveredFacts, Limits, SummaryState, facts_of, render, user_texts
from proxy.summaries.summarizer import Caller, ModelAnswer, Summarizer, SummarizerTarget
from proxy.summaries.validate import CoveredText, bare, language_of, refusal
from proxy.telemetry import Meters
from proxy.tokens import MESSAGE_TOKENS, TokenCounter
from proxy.trimming import Language, Summarize, SummaryRequest

_LOG: Final = logging.getLogger("palimpsest.summaries")
_CUT_OFF: Final = frozenset({"length", "max_tokens"})  # finish reasons of answers that were cut off
_AT_ONCE: Final = 16  # concurrent summaries of one process; each holds messages and a connection
_QUOTED: Final = re.compile(r"(?::| \().*", re.DOTALL)
"""The part of a reason that quotes the narrative. Receipts show it, logs do not."""
GRACE: Final = 2.0  # seconds that shutdown waits for running summaries

NOT_YET: Final = "the summary is still being made"
_ELSEWHERE: Final = "another process is making the summary"
_GONE: Final = "the branch is not there any more"
_PAUSED: Final = "the summarizer failed repeatedly and is paused"
_CLOSING: Final = "the proxy is being closed"
_FAULT: Final = "making a summary failed by a fault of the proxy's own"

TRIES: Final = 2  # requests for each part of a transcript; the second one after a refused answer
UNKNOWN_WINDOW: Final = 60_000  # tokens of a part of the transcript if the model's context window is unknown
_LONGEST_PART: Final = 120_000  # maximum tokens of a part: models overlook most of a longer transcript
_SHARE: Final = 0.7  # part of a context window that the transcript may take
_LEAST_PART: Final = 1_000  # tokens below which parts are not shortened further
_SHORTER: Final = 3  # attempts, each with shorter parts, if the model finds them too long
_OWN_SHARE: Final = 0.25  # part of a summary's room for the user's own messages, unless the policy sets it
_SHORT_ONES: Final = 2  # with short messages, the user's own messages may have so many times that share
_PORTION: Final = 2_000  # messages that are read from the store at once
KEPT_LATER: Final = "it was made, and is kept once the store can be used"
_FIRST_WAIT: Final = 0.05  # seconds of the first wait for another worker's lease; each wait is twice as long
_LONGEST_WAIT: Final = 0.5  # seconds of the longest one
_DEEPEST: Final = 2**31 - 1

UsedBy = Callable[[str, str | None, int, float], None]
"""Records the tokens and dollars that a tenant, and its key, used."""
Start = Callable[[Coroutine[Any, Any, "SummaryAttempt"]], "asyncio.Task[SummaryAttempt]"]
"""Runs a coroutine in a task that no request can cancel (`Background.start`)."""
FactsOf = Callable[[str, str], ModelFacts]  # returns the facts about a model at a base URL
CountAll = Callable[[Sequence[Message]], list[int]]  # counts the tokens of each message
Later = Callable[[Callable[[Store], Awaitable[None]]], None]
"""Runs work with the store as soon as the store can be used."""
Result = TypeVar("Result")


class Given(Struct, frozen=True, kw_only=True):
    """Messages of a branch with their nodes, stored or not. They reach at least to the last message to be covered."""

    messages: tuple[Message, ...]
    nodes: tuple[str, ...]
    base: str = ROOT  # the stored node that they follow


class Work(Struct, frozen=True, kw_only=True):
    """One summary to be made."""

    key: str  # the session's internal name
    session: str  # the session's id, for the log
    tip: str  # a node at or after the last message to be covered; stored, unless `given` is set
    wanted: SummaryRequest
    edit: Summarize
    model: str  # the model that the session's requests name, and that will read the summary
    caller: Caller
    policy: str = ""  # the name of the policy with the edit, for the statistics
    asked: bool = False  # whether it was explicitly requested: then an earlier refusal does not count
    has_target: bool = True  # whether the policy has a target; if not, `max_tokens` limits the user's words too
    exchange: str | None = None  # the exchange that started it
    attempt: SummaryRow | None = None  # the newest attempt on this branch, if known
    given: Given | None = None  # the newest messages, or all; the rest is read from the store


class SummaryAttempt(Struct, frozen=True, kw_only=True):
    """The outcome of making a summary."""

    row: SummaryRow | None  # the summary, or a stored attempt without one; None if nothing was stored
    reason: str = ""  # why there is no summary, for the receipt; empty if there is one


# ------------------------------------------------------------------------------------ reading the branch


class Stretch(Struct, frozen=True, kw_only=True):
    """The messages that a summary covers beyond those of its predecessor."""

    start: int  # position of the first of `messages`
    messages: tuple[Message, ...]
    nodes: tuple[str, ...]
    tokens: int  # tokens of the branch up to the last of `messages`
    earlier: tuple[str, ...]  # the user's words in the messages before `start`, oldest first
    predecessor: SummaryRow | None  # the summary of the messages before `start`; None if `start` is 0

    @property
    def stop(self) -> int:
        """Position after the last message."""
        return self.start + len(self.messages)


class BranchState(Struct, frozen=True, kw_only=True):
    """The stored state of a branch that is to be summarized."""

    newest: SummaryRow | None  # the ready summary that covers most
    attempt: SummaryRow | None  # the newest attempt, with any outcome
    stretch: Stretch | None  # the messages to be covered; None if `newest` covers them or the branch is too short


class _BranchMessage(Struct, frozen=True, kw_only=True):
    position: int
    node: str
    message: Message
    total: int  # tokens of the branch up to this message


async def read_branch(store: Store, work: Work, count: CountAll) -> BranchState:
    """Read the branch from its end to its root. Of messages that a predecessor covers, keep only the user's words."""
    stop, nodes = work.wanted.stop, set[str]()
    rows = [row for row in await store.summary_rows(work.key) if row.recipe == work.edit.recipe]
    ready = {row.node: row for row in rows if row.status is SummaryStatus.READY}
    newest: SummaryRow | None = None
    begin = 0
    covered: list[_BranchMessage] = []
    earlier: list[str] = []
    async for portion in _portions(store, work, count):
        before: list[Message] = []
        for each in reversed(portion):
            nodes.add(each.node)
            if newest is None and each.node in ready:
                newest = ready[each.node]
                # If this does not hold, the summary is made from all messages again.
                if newest.generation < work.edit.max_generations and SummaryState.read(newest.state) is not None:
                    begin = newest.until
            if each.position < begin:
                before.append(each.message)
            elif each.position < stop:
                covered.append(each)
        earlier += await anyio.to_thread.run_sync(user_texts, before)
    attempt = next((row for row in rows if row.node in nodes or row.tip in nodes), None)
    if begin >= stop or len(covered) < stop - begin or (newest is not None and newest.until >= stop):
        return BranchState(newest=newest, attempt=attempt, stretch=None)
    stretch = Stretch(
        start=begin,
        messages=tuple([each.message for each in reversed(covered)]),
        nodes=tuple([each.node for each in reversed(covered)]),
        tokens=covered[0].total,
        earlier=tuple(reversed(earlier)),
        predecessor=newest if begin else None,
    )
    return BranchState(newest=newest, attempt=attempt, stretch=stretch)


async def _portions(store: Store, work: Work, count: CountAll) -> AsyncIterator[list[_BranchMessage]]:
    """Yield the messages of the branch in portions, the newest portion first, each oldest first."""
    given = work.given
    node, depth, total = work.tip if given is None else given.base, 0, 0
    if node != ROOT:
        end = await store.path(work.key, node, below=_DEEPEST)
        if not end:
            return
        depth, total = end[-1].depth, end[-1].tokens_total
    if given is not None:
        totals = accumulate(count(given.messages), initial=total)
        next(totals)  # skip the total before the first message
        brought = enumerate(zip(given.nodes, given.messages, totals, strict=True), depth)
        yield [
            _BranchMessage(position=at, node=name, message=message, total=so_far)
            for at, (name, message, so_far) in brought
        ]
    while depth > 0:
        rows = await store.path(work.key, node, below=max(0, depth - _PORTION))
        if not rows:
            return
        yield [
            _BranchMessage(position=row.depth - 1, node=row.node, message=row.message, total=row.tokens_total)
            for row in rows
        ]
        node, depth = rows[0].parent, rows[0].depth - 1


# ------------------------------------------------------------------------------------ writing one summary


class Spending(Struct, kw_only=True):
    """The usage of all requests for one summary together."""

    tries: int = 0  # number of requests
    usage: dict[str, Any] | None = None  # the sum of the reported numbers; None if none were reported
    cost: float | None = None  # dollars; None if no price is known

    def add(self, usage: Mapping[str, Any] | None, spent: float | None) -> None:
        """Add one request."""
        self.tries += 1
        self.usage = added(self.usage, usage)
        if spent is not None:
            self.cost = (self.cost or 0.0) + spent


class _Ground(Struct, frozen=True, kw_only=True):
    """The inputs that code takes from the messages before the model is asked."""

    facts: CoveredFacts  # facts about all messages that the summary covers
    own: Sequence[str]  # the user's words in them
    source: CoveredText
    language: Language
    previous: str  # the narrative of the predecessor; empty without one
    tokens: int  # tokens that the summary replaces: the new messages and the predecessor


class _RefusedAnswer(PalimpsestError):
    """The model's answer cannot be used; the message says why."""


class Writer:
    """Writes summaries, several at a time. One instance per process."""

    def __init__(
        self, summarizer: Summarizer, counter: TokenCounter, facts: FactsOf, clock: Callable[[], float] = time.time
    ) -> None:
        """Store the dependencies. `facts` gives context windows and prices of models."""
        self._summarizer = summarizer
        self._counter = counter
        self._facts = facts
        self._clock = clock
        self._thread = anyio.CapacityLimiter(1)  # slow work runs in one thread, so that requests keep theirs

    async def write(self, stretch: Stretch, work: Work, target: SummarizerTarget) -> SummaryRow:
        """Write the summary of a stretch and log the outcome without content. A row without text holds the reason."""
        started, spending, predecessor = time.monotonic(), Spending(), stretch.predecessor
        outcome: dict[str, Any] = {"reason": "", "model": target.model, "text": "", "tokens": 0, "state": {}}
        try:
            ground = await self._in_thread(lambda: self._ground(stretch, work))
            narrative, model = await self._narrative(stretch, ground, work, target, spending)
            text, tokens = await self._in_thread(lambda: self._render(narrative, ground, stretch, work))
            state = SummaryState(facts=ground.facts, told=narrative).write()
            outcome |= {"status": SummaryStatus.READY, "model": model, "text": text, "tokens": tokens, "state": state}
        except NoAnswer as why:
            outcome |= {"status": SummaryStatus.FAILED, "reason": why.message}
        except _RefusedAnswer as why:
            outcome |= {"status": SummaryStatus.REFUSED, "reason": why.message}
        row = SummaryRow(
            id=f"sum_{secrets.token_hex(12)}",
            node=stretch.nodes[-1],
            tip=work.tip,
            recipe=work.edit.recipe,
            until=stretch.stop,
            generation=1 if predecessor is None else predecessor.generation + 1,
            covered_messages=stretch.stop,
            covered_tokens=stretch.tokens,
            predecessor=None if predecessor is None else predecessor.id,
            asked=work.asked,
            usage=spending.usage,
            cost=spending.cost,
            exchange=work.exchange,
            created_at=int(self._clock() * 1000),
            **outcome,
        )
        line = {
            "session": work.session,
            "status": row.status.value,
            "reason": _QUOTED.sub("", row.reason) if row.status is SummaryStatus.REFUSED else row.reason,
            "model": row.model,
            "messages": row.covered_messages,
            "tokens": f"{row.covered_tokens}->{row.tokens}" if row.text else row.covered_tokens,
            "generation": row.generation,
            "tries": spending.tries,
            "ms": round((time.monotonic() - started) * 1000),
            "cost": row.cost,
        }
        _LOG.info("summary", extra={"fields": line})
        return row

    def _ground(self, stretch: Stretch, work: Work) -> _Ground:
        predecessor = stretch.predecessor
        state = None if predecessor is None else SummaryState.read(predecessor.state)
        facts, previous, tokens = facts_of(stretch.messages), "", stretch.tokens
        if state is not None and predecessor is not None:
            facts, previous = state.facts.and_then(facts), state.told
            tokens += predecessor.tokens - predecessor.covered_tokens
        earlier = CoveredFacts() if state is None else state.facts
        source = CoveredText(
            stretch.messages,
            before=[*stretch.earlier, previous] if previous else stretch.earlier,
            names=[name.text for name in earlier.names],
            messages_before=earlier.messages,
        )
        language = work.edit.language
        return _Ground(
            facts=facts,
            own=[*stretch.earlier, *user_texts(stretch.messages)],
            source=source,
            language=language_of(source.scripts) if language == "auto" else language,
            previous=previous,
            tokens=tokens,
        )

    async def _narrative(
        self, stretch: Stretch, ground: _Ground, work: Work, target: SummarizerTarget, spending: Spending
    ) -> tuple[str, str]:
        """Return the narrative and the model that wrote it. Retry with shorter parts if they are too long for it."""
        window = self._model(target).context_window
        limit = UNKNOWN_WINDOW if window is None else min(int(window * _SHARE), _LONGEST_PART)
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
        """Send the parts one after another, each with the narrative of the parts before it."""
        narrative, model = ground.previous, target.model
        for part in transcript:
            refused = ""
            for _ in range(TRIES):
                prompt = partial(
                    prompt_of,
                    part,
                    previous=narrative,
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
                    narrative, model = text, answer.model
                    break
            else:
                raise _RefusedAnswer(refused)
        return narrative, model

    def _refusal(self, answer: ModelAnswer, text: str, ground: _Ground, work: Work) -> str:
        """Return why an answer cannot be used; empty if it can."""
        if answer.calls:
            return "it called a tool instead of writing"
        if answer.finish in _CUT_OFF:
            return "it was cut off at the summarizer's limit of length"
        if answer.finish == "content_filter":
            return "the summarizer's provider filtered it"
        tokens = self._counter.text(text, work.model)
        return refusal(text, ground.source, tokens=tokens, replaced=ground.tokens, language=ground.language)

    def _render(self, narrative: str, ground: _Ground, stretch: Stretch, work: Work) -> tuple[str, int]:
        edit, room = work.edit, work.wanted.room
        own = short = edit.verbatim_user_tokens
        if own is None or short is None:
            own = int(_OWN_SHARE * room)
            own = own if work.has_target else min(own, edit.max_tokens)
            short = _SHORT_ONES * own
        text = render(
            Content(
                heading=edit.heading, own=ground.own, facts=ground.facts, narrative=narrative, language=ground.language
            ),
            Limits(room=room - MESSAGE_TOKENS, own=own, own_short=short, narrative=edit.max_tokens),
            partial(self._counter.text, model=work.model),
        )
        if not text:
            raise _RefusedAnswer(f"nothing but its heading fits within {room} tokens")
        text = sanitize(text)  # the same as the store does, so that every worker sends the same bytes
        tokens = self._counter.message(stretch.messages[0].dialect.spoken("system", text), work.model)
        if tokens >= ground.tokens:
            raise _RefusedAnswer(f"it would have {tokens} tokens, and what it replaces {ground.tokens}")
        return text, tokens

    def _model(self, target: SummarizerTarget) -> ModelFacts:
        return self._facts(target.model, target.destination.base_url)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        """Run slow, pure work in the writer's thread."""
        return await anyio.to_thread.run_sync(work, limiter=self._thread)


# ------------------------------------------------------------------------------------ the lease


class Terms(Struct, frozen=True, kw_only=True):
    """The timing of leases. They are short and renewed, so that the lease of a dead worker expires soon."""

    seconds: float = 15.0  # lifetime of a lease unless it is renewed
    renewed_after: float = 5.0  # seconds between renewals
    clock: Callable[[], float] = time.time  # wall clock, since workers on several hosts compare times


@asynccontextmanager
async def held(
    store: Store, key: str, name: str, holder: str, terms: Terms, *, patience: float = 0.0
) -> AsyncGenerator[bool]:
    """Hold a session's lease during the block; wait up to `patience` seconds for it. Yield whether it was obtained."""

    async def take() -> bool:
        now = terms.clock()
        return await store.lease(key, name, holder, int(now * 1000), int((now + terms.seconds) * 1000))

    async def renew() -> None:
        while True:  # even if the lease expired meanwhile: the store keeps only one summary
            await asyncio.sleep(terms.renewed_after)
            with suppress(StoreUnavailable):
                await take()

    ends, wait = time.monotonic() + patience, _FIRST_WAIT
    while not await take():
        left = ends - time.monotonic()
        if left <= 0:
            yield False
            return
        await asyncio.sleep(min(wait, left))
        wait = min(2 * wait, _LONGEST_WAIT)
    try:
        async with asyncio.TaskGroup() as group:
            renewing = group.create_task(renew())
            yield True
            renewing.cancel()
    finally:
        with suppress(StoreUnavailable):  # the lease then expires by itself
            await store.release(key, name, holder)


# ------------------------------------------------------------------------------------ scheduling


class Summaries:
    """Makes summaries. One instance per process.

    Shutdown awaits `aclose` before it waits for background tasks.
    """

    def __init__(  # noqa: PLR0913 - dependencies and three limits
        self,
        store: Store,
        summarizer: Summarizer,
        counter: TokenCounter,
        facts: FactsOf,
        start: Start,
        *,
        counts: Meters | None = None,
        later: Later | None = None,
        terms: Terms | None = None,
        grace: float = GRACE,
        at_once: int = _AT_ONCE,
    ) -> None:
        """Store the dependencies and limits: at most `at_once` concurrent summaries; `aclose` waits `grace` seconds.

        Without `later`, a summary that cannot be stored is lost.
        """
        self._store = store
        self._later = later
        self._summarizer = summarizer
        self._count = counter
        self._start = start
        self._counts = Meters() if counts is None else counts
        self.used_by: UsedBy | None = None
        self._terms = Terms() if terms is None else terms
        self._writer = Writer(summarizer, counter, facts, self._terms.clock)
        self._grace = grace
        self._running: dict[tuple[str, str], asyncio.Task[SummaryAttempt]] = {}  # by session and recipe
        self._slots = asyncio.Semaphore(at_once)
        self._closing = False

    def begin(self, work: Work) -> None:
        """Make a summary in the background, unless one is being made already or a refusal still holds."""
        if (work.key, work.edit.recipe) in self._running or self._reason_not_to(work):
            return
        self._start_task(work, 0.0)

    def none_begins(self, model: str, caller: Caller) -> str:
        """Return why no summary can be started now for sessions with `model`; empty if one can."""
        if self._closing:
            return _CLOSING
        return _PAUSED if self._summarizer.pause(self._summarizer.target(model, caller)) > 0 else ""

    async def make(self, work: Work, patience: float | None = None) -> SummaryAttempt:
        """Make a summary and wait up to `patience` seconds for it, by default the time limit of one answer.

        If it takes longer, it continues in the background.
        """
        if patience is None:
            patience = self._summarizer.settings.timeout
        ends = time.monotonic() + patience
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while (other := self._running.get((work.key, work.edit.recipe))) is not None:
                    await asyncio.wait({other})
                reason = self._reason_not_to(work)
                if reason:
                    return SummaryAttempt(row=work.attempt if reason == _refusal(work) else None, reason=reason)
                return await asyncio.shield(self._start_task(work, ends - time.monotonic()))
        return SummaryAttempt(row=None, reason=NOT_YET)

    async def aclose(self) -> None:
        """Start no more summaries, wait for the running ones, and cancel those that do not end in time."""
        self._closing = True
        running = set(self._running.values())
        if running:
            _, late = await asyncio.wait(running, timeout=self._grace)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    def _reason_not_to(self, work: Work) -> str:
        return self.none_begins(work.model, work.caller) or _refusal(work)

    def _start_task(self, work: Work, patience: float) -> asyncio.Task[SummaryAttempt]:
        name = work.key, work.edit.recipe
        task = self._running[name] = self._start(self._attempt(work, patience))
        # A callback, because a task that is cancelled at once never runs its coroutine, not even `finally`.
        task.add_done_callback(lambda _: self._running.pop(name, None))
        return task

    async def _attempt(self, work: Work, patience: float) -> SummaryAttempt:
        async with self._slots:
            if reason := self.none_begins(work.model, work.caller):  # it may have failed while this waited
                return SummaryAttempt(row=None, reason=reason)
            return await _without_raising(work, self._make_leased(work, patience))

    async def _make_leased(self, work: Work, patience: float) -> SummaryAttempt:
        holder = f"sum_{secrets.token_hex(8)}"
        recipe = work.edit.recipe
        async with held(self._store, work.key, recipe, holder, self._terms, patience=patience) as obtained:
            if not obtained:
                return SummaryAttempt(row=None, reason=_ELSEWHERE)
            return await _without_raising(work, self._make_now(work))  # the task group of `held` would wrap errors

    async def _make_now(self, work: Work) -> SummaryAttempt:
        count = partial(self._count.messages, model=work.model)
        known = await read_branch(self._store, work, count)
        if known.newest is not None and known.newest.until >= work.wanted.stop:
            return SummaryAttempt(row=known.newest)
        if reason := _refusal(replace(work, attempt=known.attempt)):
            return SummaryAttempt(row=known.attempt, reason=reason)
        stretch = known.stretch
        if stretch is None:
            return SummaryAttempt(row=None, reason=_GONE)
        if known.newest is not None and _is_nearly_reached(known.newest, stretch, work):
            return SummaryAttempt(row=known.newest)
        born = await _created_at(self._store, work)
        row = await self._writer.write(stretch, work, self._summarizer.target(work.model, work.caller))
        self._counts.add("palimpsest_summaries", row.status.value)
        self._counts.add("palimpsest_dollars", "summaries", amount=row.cost or 0.0)
        if self.used_by is not None and row.cost is not None:
            self.used_by(work.caller.tenant, work.caller.key, 0, row.cost)
        try:
            # The session may have been deleted meanwhile, and a new one may have the same name.
            if await _created_at(self._store, work) != born:
                return SummaryAttempt(row=None, reason=_GONE)
            is_kept = await self._store.keep_summary(work.key, row, work.policy)
        except StoreUnavailable:
            if self._later is None:
                raise
            masker = self._store.masker
            row = row if masker is None else masker.summary(row)
            self._later(partial(_keep, work, row, born))  # the summary was paid for, so it is not thrown away
            return SummaryAttempt(row=None, reason=row.reason or KEPT_LATER)
        if not is_kept and row.status is SummaryStatus.READY:
            # The lease expired and another worker was faster, or the session is gone.
            faster = (await read_branch(self._store, work, count)).newest
            return SummaryAttempt(row=faster if faster is not None and faster.until >= row.until else row)
        return SummaryAttempt(row=row, reason=row.reason)


async def _created_at(store: Store, work: Work) -> int | None:
    session = await store.session_at(work.key)
    return None if session is None else session.created_at


async def _keep(work: Work, row: SummaryRow, born: int | None, store: Store) -> None:
    """Store a summary that was made while the store was unavailable, unless its session was deleted."""
    if await _created_at(store, work) == born:
        await store.keep_summary(work.key, row, work.policy)


async def _without_raising(work: Work, making: Awaitable[SummaryAttempt]) -> SummaryAttempt:
    """Return the attempt. An error becomes its reason, so that it fails no request."""
    try:
        return await making
    except PalimpsestError as why:
        _LOG.warning("no summary", extra={"fields": {"session": work.session, "reason": why.message}})
        return SummaryAttempt(row=None, reason=why.message)
    except Exception:  # noqa: BLE001 - logged here
        _LOG.exception(_FAULT)
        return SummaryAttempt(row=None, reason=_FAULT)


def _refusal(work: Work) -> str:
    """Return the reason of a newest attempt that was refused if few messages were added since; else empty."""
    newest = work.attempt
    if work.asked or newest is None or newest.status is not SummaryStatus.REFUSED:
        return ""
    grown = work.wanted.stop - newest.until
    return newest.reason if grown < max(1, work.edit.min_new_messages) else ""


def _is_nearly_reached(newest: SummaryRow, stretch: Stretch, work: Work) -> bool:
    """Tell whether a summary that became ready meanwhile leaves too little for this one to add."""
    added = stretch.tokens - newest.covered_tokens
    few = stretch.stop - newest.until < work.edit.min_new_messages or added <= work.edit.growth_ratio * newest.tokens
    return few and not work.asked
