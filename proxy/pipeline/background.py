"""Work that outlives the request that began it: settling, above all.

A request can be cancelled at any await (the client left, the server stops). What must be finished
all the same runs here, in a task of its own, and the server waits for it before it closes the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

import anyio.to_thread

Result = TypeVar("Result")
Given = ParamSpec("Given")

OFF_LOOP_BYTES: Final = 256 * 1024
"""From this size on, reading a request would hold up all the others (some milliseconds): it goes to a thread.
Below it, going there takes longer than reading."""
COUNTING: Final = 16
"""How many times longer than reading a text it takes to count its tokens."""

TRIMMING: Final = 2
"""How many times longer than reading a text it may take to trim it: at a move of the cut values are read."""

_LOG: Final = logging.getLogger("palimpsest.background")


class Background:
    """The tasks that are under way. One for the life of the process."""

    def __init__(self) -> None:
        """Begin with none."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Run `work` in a task that no request can cancel."""
        task = asyncio.create_task(work)  # noqa: TID251 - the one place: it keeps the reference and waits at the end
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def finish(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` to its end even if the caller is cancelled meanwhile, and return its result."""
        return await asyncio.shield(self.start(work))

    def _done(self, task: asyncio.Task[Any]) -> None:
        """Forget the task; say what went wrong, since the request that began it may be gone."""
        self._tasks.discard(task)
        if not task.cancelled() and (why := task.exception()) is not None:
            _LOG.error("background work failed: %s", why)

    async def drain(self) -> None:
        """Wait until everything that was started is done; errors are those of their own callers."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)


async def compute(
    size: int, work: Callable[Given, Result], *given: Given.args, **named: Given.kwargs
) -> Result:
    """Return `work(*given)`: as much as reading `size` bytes, and pure; in a thread where that is long."""
    if size < OFF_LOOP_BYTES:
        return work(*given, **named)
    return await anyio.to_thread.run_sync(partial(work, *given, **named))
