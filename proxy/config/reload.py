"""Reads the configuration again when its file changes, or on SIGHUP, while the process serves.

What can change while serving is told by who makes it change (`Takes`); whatever else differs is named in the
log as in need of a restart. A file with mistakes is refused with the lines of `check`, and so is one
that is gone or empty: what was read before stays. Environment and command line still go first.

Whether the file is another one is seen by its inode, its size and its times, twice in a second, through
whatever links lead to it: an editor replaces the file, and Kubernetes a link. To be told by the system
would mean to watch the folder, and to hear of each page that a database beside it writes. What it holds is
looked at every few seconds all the same. It works in threads; the event loop waits for none of it. It
knows no policy and no log.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

import anyio
import anyio.to_thread
from anyio.abc import TaskStatus
from pydantic import BaseModel

from proxy.config.load import Loaded
from proxy.config.model import Settings
from proxy.errors import ConfigurationError

Takes: TypeAlias = Mapping[str, Callable[[Settings], None]]
"""By setting (`policies`, `telemetry.log_level`): what puts a new value of it into force."""

_Stamp: TypeAlias = tuple[int, ...]
"""Device, inode, size and times of a file."""

GLANCE_SECONDS: Final = 0.5
"""How often it is asked whether the file is another one."""
LOOK_SECONDS: Final = 5.0
"""How often it is read even if it seems to be the same."""
_SETTLE_SECONDS: Final = 0.1
"""For so long a changed file must stay the same before it is read: a writer may be in the middle of it."""

_LOG: Final = logging.getLogger("palimpsest.configuration")


class Reload:
    """Follows the file that the settings came from. One for the life of the process."""

    def __init__(self, loaded: Loaded, takes: Takes) -> None:
        """Follow what `loaded` was read from; `takes` puts into force what can change."""
        self._source = loaded.source
        self._settings = loaded.settings
        """What is in force."""
        self._accepted = loaded.content
        """What the file held when it was last accepted."""
        self._seen: bytes | str | None = loaded.content
        """What the file held when it was last looked at; a text: why that could not be had."""
        self._takes = takes
        self._turn = anyio.Lock()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Take what changed since the settings were read; then follow the file until the block ends."""
        await self.look()
        async with anyio.create_task_group() as group:
            group.start_soon(self._follow_file)
            group.start_soon(self._follow_clock)
            if hears_hangup():
                await group.start(self._follow_signal)
            try:
                yield
            finally:
                group.cancel_scope.cancel()

    async def look(self, *, asked: bool = False) -> None:
        """Read the configuration if the file is another one than last time, or if `asked` to."""
        async with self._turn:
            try:
                seen = await anyio.to_thread.run_sync(self._sight)
                if seen == self._seen and not asked:
                    return
                self._seen = await self._settled(seen)
                await self._read(self._seen)
            except Exception:  # the old settings serve on, whatever it was  # noqa: BLE001
                _LOG.exception("the configuration could not be read again, by a fault of the proxy's own")

    # ---------------------------------------------------------------------------------- following

    async def _follow_file(self) -> None:
        known: _Stamp | None = ()  # what no file has: the first glance is a look
        while True:
            stamp = await anyio.to_thread.run_sync(_stamp_of, self._source.file)
            if stamp != known:
                known = stamp
                await self.look()
            await anyio.sleep(GLANCE_SECONDS)

    async def _follow_clock(self) -> None:
        while True:
            await anyio.sleep(LOOK_SECONDS)
            await self.look()

    async def _follow_signal(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        with anyio.open_signal_receiver(signal.SIGHUP) as hangups:
            task_status.started()
            async for _ in hangups:
                await self.look(asked=True)

    # ------------------------------------------------------------------------------------ reading

    def _sight(self) -> bytes | str | None:
        """Return what the file holds; a text where that cannot be had, None where there need not be one."""
        try:
            return self._source.content()
        except ConfigurationError as why:
            return why.message

    async def _settled(self, seen: bytes | str | None) -> bytes | str | None:
        """Return what the file holds once it stays the same for a moment."""
        while True:
            await anyio.sleep(_SETTLE_SECONDS)
            again = await anyio.to_thread.run_sync(self._sight)
            if again == seen:
                return again
            seen = again

    async def _read(self, seen: bytes | str | None) -> None:
        name = self._source.file
        if isinstance(seen, str):
            _refuse(seen)
        elif self._accepted is not None and seen is None:
            _refuse(f"{name}: there is no such file any more")
        elif self._accepted and not (seen or b"").strip():
            _refuse(f"{name}: the file is empty")
        else:
            try:
                loaded = await anyio.to_thread.run_sync(self._source.parse, seen)
            except ConfigurationError as why:
                _refuse(why.message)
            else:
                self._accepted = seen
                self._take(loaded)

    def _take(self, loaded: Loaded) -> None:
        """Put into force what can change, and say what cannot."""
        for line in loaded.doubts:
            _LOG.warning("%s", line)
        changed = _differing(self._settings, loaded.settings)
        for name in changed:
            if name in self._takes:
                self._takes[name](loaded.settings)
                self._settings = _with(self._settings, name, loaded.settings)
        taken = [name for name in changed if name in self._takes]
        _LOG.info("configuration read again; changed: %s", ", ".join(taken) or "nothing")
        if rest := [name for name in changed if name not in self._takes]:
            _LOG.warning("changed in the configuration, and needs a restart: %s", ", ".join(rest))


def _stamp_of(file: Path) -> _Stamp | None:
    """Return what is another one when the file is; None where there is none."""
    try:
        found = file.stat()
    except (OSError, ValueError):
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _refuse(lines: str) -> None:
    for line in lines.splitlines():
        _LOG.error("configuration refused: %s", line)
    _LOG.error("the configuration that was read before stays in force")


def _differing(before: Settings, after: Settings) -> list[str]:
    """Return the settings that differ: `server.port`, or the section where it has no settings of its own."""
    names: list[str] = []
    for section in Settings.model_fields:
        old, new = getattr(before, section), getattr(after, section)
        if isinstance(old, BaseModel):
            keys = type(old).model_fields
            names += [f"{section}.{key}" for key in keys if _other(getattr(old, key), getattr(new, key))]
        elif _other(old, new):
            names.append(section)
    return names


def _other(old: Any, new: Any) -> bool:
    """Tell whether two values differ; of policies the order counts too."""
    return bool(old != new) or (isinstance(old, dict) and [*old] != [*new])


def _with(settings: Settings, name: str, other: Settings) -> Settings:
    """Return the settings with the one of this name from `other`."""
    section, _, key = name.partition(".")
    value = getattr(other, section)
    if key:
        value = getattr(settings, section).model_copy(update={key: getattr(value, key)})
    return settings.model_copy(update={section: value})


def hears_hangup() -> bool:
    """Tell whether SIGHUP means to read again.

    Not where the system has none, nor in another thread than the main one; and on a terminal it says that the
    terminal is gone, and ends the process as ever.
    """
    return (
        hasattr(signal, "SIGHUP")
        and threading.current_thread() is threading.main_thread()
        and not os.isatty(0)
    )
