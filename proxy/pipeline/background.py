"""Work that outlives the request that began it, such as settling.

A request can be cancelled at any await, because the client left or the server stops. Work that must finish anyway runs
here, in a task of its own. The server waits for it before it closes the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, ParamSpec, Protocol, TypeVar

import anyio.to_thread

Result = TypeVar("Result")
Given = ParamSpec("Given")

OFF_LOOP_BYTES: Final = 256 * 1024
"""Work from this size on runs in a thread, because it would block the event loop for milliseconds.

Smaller work takes less time than the switch to a thread.
"""
COMPUTING: Final = 3
"""Number of threads for such work. They compete with the event loop, so more threads would slow it down."""
COUNTING: Final = 16  # counting the tokens of a text takes this many times longer than parsing it
TRIMMING: Final = 2  # trimming a text may take this many times longer than parsing it

STOPPED: Final = "the proxy stopped"  # message of the cancellation when the process stops while a client still waits

_LOG: Final = logging.getLogger("palimpsest.background")


class Stoppable(Protocol):
    """The client of a request. `stopping` is set before the task is cancelled because the process stops."""

    stopping: bool


class Background:
    """The tasks that are running. One for the life of the process."""

    def __init__(self) -> None:
        """Start with no tasks."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self.requests: dict[asyncio.Task[Any], Stoppable] = {}
        """The requests that are being served, by task."""

    def start(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Run `work` in a task that no request can cancel."""
        task = asyncio.create_task(work)  # noqa: TID251 - the only place: it keeps the reference, and `drain` waits for it
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def finish(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` and return its result. It runs to its end even if the caller is cancelled."""
        return await asyncio.shield(self.start(work))

    def _done(self, task: asyncio.Task[Any]) -> None:
        """Drop the reference. Log an error, because the request that began the task may be gone."""
        self._tasks.discard(task)
        if not task.cancelled() and (why := task.exception()) is not None:
            _LOG.error("background work failed: %s", why)

    def stop_requests(self) -> None:
        """Cancel every request, and tell its client that the process stops."""
        for task, client in self.requests.items():
            client.stopping = True
            task.cancel(STOPPED)

    async def drain(self) -> None:
        """Wait until every task is done. Errors are left to the callers."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)


async def compute(size: int, work: Callable[Given, Result], *given: Given.args, **named: Given.kwargs) -> Result:
    """Return `work(*given)`. Runs it in a thread if it takes long.

    `work` must be pure. It takes about as long as parsing `size` bytes of JSON.
    """
    if size < OFF_LOOP_BYTES:
        return work(*given, **named)
    return await anyio.to_thread.run_sync(partial(work, *given, **named))
