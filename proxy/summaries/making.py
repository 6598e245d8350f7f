"""Making summaries: in the background or waited for, one at a time of a recipe for each session.

Among all workers one makes it.

    take the lease -> look whether it is there by now, or was refused -> read the log -> write -> keep

Whatever goes wrong ends in an `Attempt` that says so, and in no request. It decides neither when a summary is
wanted nor what becomes of it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from proxy.errors import PalimpsestError
from proxy.store import Store, SummaryRow, SummaryStatus
from proxy.summaries.lease import Terms, held
from proxy.summaries.span import Span, found, from_the_beginning
from proxy.summaries.summarizer import Caller, Summarizer
from proxy.summaries.work import Attempt, Work
from proxy.summaries.writing import FactsOf, Writer, Written
from proxy.tokens import TokenCounter

_LOG: Final = logging.getLogger("palimpsest.summaries")
_AT_ONCE: Final = 16
"""Summaries that one process makes at the same time: each holds a log, and a connection to the upstream."""
_QUOTED: Final = re.compile(r"(?::| \().*", re.DOTALL)
"""What a reason for refusing quotes of what was written: receipts have it, logs do not."""
GRACE: Final = 2.0
"""Seconds for which the end of the process waits for summaries that are being made."""

NOT_YET: Final = "the summary is still being made"
_ELSEWHERE: Final = "another process is making the summary"
_GONE: Final = "the branch is not there any more"
_ALONE: Final = "the summarizer is left alone for a while after failures"
_CLOSING: Final = "the proxy is being closed"
_FAULT: Final = "making a summary failed by a fault of the proxy's own"

Start = Callable[[Coroutine[Any, Any, Attempt]], "asyncio.Task[Attempt]"]
"""Runs something in a task that no request can cancel, and keeps it (`Background.start`)."""


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
        """Put together what it takes.

        Args:
            store: where logs and summaries are.
            summarizer: the model that writes.
            counter: counts tokens.
            facts: tells what is known of a model at an address.
            start: runs a task.
            terms: how leases are taken.
            grace: seconds for which `aclose` waits.
            at_once: how many are made at the same time at most.
        """
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
        """Make a summary in the background, unless one is being made, or it is known to be of no use."""
        if _name(work) in self._running or self._reason_not_to(work):
            return
        self._run(work, 0.0)

    def none_begins(self, model: str, caller: Caller) -> str:
        """Return in words why no summary is begun now for sessions of a `model`; empty where one may be."""
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
                return await asyncio.shield(self._run(work, ends - time.monotonic()))
        return Attempt(row=None, reason=NOT_YET)

    async def aclose(self) -> None:
        """Begin nothing more; give up what is not done within the grace."""
        self._closing = True
        running = set(self._running.values())
        if running:
            _, late = await asyncio.wait(running, timeout=self._grace)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    def _reason_not_to(self, work: Work) -> str:
        """Return why it is of no use to begin; empty where it may be of some."""
        return self.none_begins(work.model, work.caller) or _refusal(work)

    def _run(self, work: Work, patience: float) -> asyncio.Task[Attempt]:
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
            return await _said(work, self._leased(work, patience))

    def _is_left_alone(self, model: str, caller: Caller) -> bool:
        return self._summarizer.pause(self._summarizer.target(model, caller)) > 0

    async def _leased(self, work: Work, patience: float) -> Attempt:
        holder = f"sum_{secrets.token_hex(8)}"
        recipe = work.edit.recipe
        async with held(self._store, work.key, recipe, holder, self._terms, patience=patience) as obtained:
            # What goes wrong in there must not end as one of the errors of a group of tasks.
            return await _said(work, self._made(work)) if obtained else Attempt(row=None, reason=_ELSEWHERE)

    async def _made(self, work: Work) -> Attempt:
        """Make it: nobody else does now."""
        count = partial(self._count.messages, model=work.model)
        known = await found(self._store, work, count)
        if known.reached is not None:
            return Attempt(row=known.reached)
        newest = replace(work, attempt=known.attempt)
        if reason := _refusal(newest):
            return Attempt(row=known.attempt, reason=reason)
        span = known.span
        if span is not None and _is_nearly_reached(span, work):
            return Attempt(row=span.predecessor)
        if span is not None and not await self._writer.goes_on(span, work):
            span = await from_the_beginning(self._store, work, count)
        if span is None:
            return Attempt(row=None, reason=_GONE)
        started, born = time.monotonic(), await self._born(work)
        written = await self._writer.write(span, work, self._summarizer.target(work.model, work.caller))
        row = _row(span, work, written, int(self._terms.clock() * 1000))
        _LOG.info("summary", extra={"fields": _line(row, work, written, time.monotonic() - started)})
        if await self._born(work) != born:  # what was deleted must not come back in another one of its name
            return Attempt(row=None, reason=_GONE)
        if not await self._store.keep_summary(work.key, row) and row.status is SummaryStatus.READY:
            # Somebody was faster (the lease had ended meanwhile), or the session is gone.
            return Attempt(row=(await found(self._store, work, count)).reached or row)
        return Attempt(row=row, reason=row.reason)

    async def _born(self, work: Work) -> int | None:
        """Return when the session was made; None where there is none."""
        session = await self._store.session(work.caller.tenant, work.session)
        return None if session is None else session.created_at


async def _said(work: Work, making: Awaitable[Attempt]) -> Attempt:
    """Return what comes of it; whatever goes wrong is said and not raised."""
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


def _is_nearly_reached(span: Span, work: Work) -> bool:
    """Tell whether the summary that is there by now leaves too little for another one.

    Whoever wanted one may have planned before that was ready.
    """
    predecessor = span.predecessor
    if work.asked or predecessor is None:
        return False
    if len(span.messages) < work.edit.min_new_messages:
        return True
    return span.tokens - predecessor.covered_tokens <= work.edit.growth_ratio * predecessor.tokens


def _row(span: Span, work: Work, written: Written, now: int) -> SummaryRow:
    predecessor = span.predecessor
    return SummaryRow(
        id=f"sum_{secrets.token_hex(12)}",
        node=span.nodes[-1],
        tip=work.tip,
        recipe=work.edit.recipe,
        until=span.stop,
        generation=1 if predecessor is None else predecessor.generation + 1,
        status=written.status,
        reason=written.reason,
        model=written.model,
        text=written.text,
        state=written.state,
        tokens=written.tokens,
        covered_messages=span.stop,
        covered_tokens=span.tokens,
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
