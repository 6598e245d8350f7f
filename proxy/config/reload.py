"""Reloads the configuration while the process serves: when its file changes, or on SIGHUP.

The caller passes a function for each setting that may change (`Takes`). Other changes are logged as needing a restart.
An invalid, empty or deleted file is refused with the same lines as `check` prints, and the current settings stay in
force.

The content is compared, not times or inodes. That works with every editor, file system and replaced link, and the file
is small. A thread polls the file; the event loop only hears of changes.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, TypeAlias

import anyio
import anyio.to_thread
from anyio.abc import TaskStatus
from pydantic import BaseModel

from proxy.config.settings import Settings
from proxy.config.source import Loaded
from proxy.errors import ConfigurationError

Takes: TypeAlias = Mapping[str, Callable[[Settings], None]]
"""By setting (`policies`, `telemetry.log_level`): the function that applies its new value."""

LOOK_SECONDS: Final = 0.5  # interval of polling the file
_SETTLE_SECONDS: Final = 0.1  # a changed file is read once it is stable for this long, so that writers can finish

_MOST_BYTES: Final = 1_048_576  # largest file that is shared; unused pages take no memory
_LENGTH_BYTES: Final = 8

_LOG: Final = logging.getLogger("palimpsest.configuration")
_AUDIT: Final = logging.getLogger("palimpsest.audit")


class AcceptedFile:
    """The last accepted content of the file, for a worker that starts while the file is invalid.

    It is in shared memory: processes that are forked after this share it.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _MOST_BYTES)

    def keep(self, content: bytes) -> None:
        """Store the content, replacing the previous one."""
        size = len(content) if len(content) <= _MOST_BYTES - _LENGTH_BYTES else 0
        self._memory[:_LENGTH_BYTES] = bytes(_LENGTH_BYTES)
        self._memory[_LENGTH_BYTES : _LENGTH_BYTES + size] = content[:size]
        self._memory[:_LENGTH_BYTES] = size.to_bytes(_LENGTH_BYTES)

    def content(self) -> bytes:
        """Return the stored content, or `b""`."""
        size = int.from_bytes(self._memory[:_LENGTH_BYTES])
        return self._memory[_LENGTH_BYTES : _LENGTH_BYTES + size]


class Reload:
    """Watches the settings file. One per process."""

    def __init__(self, loaded: Loaded, takes: Takes, shared: AcceptedFile | None = None) -> None:
        """Start with the settings of `loaded`. Accepted content is also stored in `shared`, for other workers."""
        self._source = loaded.source
        self._shared = shared
        self.settings = loaded.settings
        """The settings in force."""
        self._accepted = loaded.content  # the last accepted content of the file
        self._seen: bytes | str | None = loaded.content  # at the last look; a `str` is the error if it was unreadable
        self._takes = takes
        self._turn = anyio.Lock()
        self._ended = threading.Event()

    @asynccontextmanager
    async def running(self, *, again: bool = False) -> AsyncGenerator[None]:
        """Apply changes since the settings were read, then watch the file until the block ends.

        `again` says that they were read long ago, so that files they refer to, such as the file of a key, may have
        changed too: everything is read again. If the file is refused now, the settings of the other workers apply, so
        that a removed key stays removed.
        """
        accepted = await self.look(asked=again)
        if again and not accepted and self._shared is not None and (content := self._shared.content()):
            try:
                await self._read(content)
            except Exception:  # the old settings stay in force  # noqa: BLE001
                _LOG.exception("the configuration could not be read again: a mistake of the proxy's own")
        async with anyio.create_task_group() as group:
            group.start_soon(self._follow_file)
            if hears_hangup():
                await group.start(self._follow_signal)
            try:
                yield
            finally:
                self._ended.set()
                group.cancel_scope.cancel()

    async def look(self, *, asked: bool = False) -> bool:
        """Read the configuration if the file has changed since the last look, or in any case if `asked`.

        Returns False if the file was refused.
        """
        async with self._turn:
            try:
                seen = await anyio.to_thread.run_sync(self._sight)
                if seen == self._seen and not asked:
                    return True
                self._seen = await self._settled(seen)
                return await self._read(self._seen)
            except Exception:  # the old settings stay in force  # noqa: BLE001
                _LOG.exception("the configuration could not be read again: a mistake of the proxy's own")
                return False

    async def _follow_file(self) -> None:
        changed, loop = asyncio.Event(), asyncio.get_running_loop()
        # A daemon thread, so that the process does not wait for it if it has to end at once.
        threading.Thread(target=self._watch, args=(changed, loop), daemon=True, name="palimpsest-config").start()
        while True:
            await changed.wait()
            changed.clear()
            await self.look()

    def _watch(self, changed: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
        """Poll the file until the block ends. Set `changed` whenever it differs from the last look."""
        while not self._ended.wait(LOOK_SECONDS):
            with suppress(RuntimeError):  # raised if the loop is closed
                if not self._is_as_seen():
                    loop.call_soon_threadsafe(changed.set)

    def _is_as_seen(self) -> bool:
        try:
            return self._sight() == self._seen
        except Exception:  # noqa: BLE001 - `look` will raise and log it too
            return False

    async def _follow_signal(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        with anyio.open_signal_receiver(signal.SIGHUP) as hangups:
            task_status.started()
            async for _ in hangups:
                await self.look(asked=True)

    def _sight(self) -> bytes | str | None:
        """Return the content of the file, an error message (`str`) if it is unreadable, or None without a file."""
        try:
            return self._source.content()
        except ConfigurationError as why:
            return why.message

    async def _settled(self, seen: bytes | str | None) -> bytes | str | None:
        """Return the content of the file once it is stable for `_SETTLE_SECONDS`."""
        while True:
            await anyio.sleep(_SETTLE_SECONDS)
            again = await anyio.to_thread.run_sync(self._sight)
            if again == seen:
                return again
            seen = again

    async def _read(self, seen: bytes | str | None) -> bool:
        """Parse and apply the result of `_sight`. Returns False if it was refused."""
        name = self._source.file
        if isinstance(seen, str):
            _refuse(seen)
        elif self._accepted is not None and seen is None:
            _refuse(f"{name}: the file does not exist any more")
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
                if self._shared is not None and seen is not None:
                    self._shared.keep(seen)
                return True
        return False

    def _take(self, loaded: Loaded) -> None:
        for line in loaded.warnings:
            _LOG.warning("%s", line)
        changed = _differing(self.settings, loaded.settings)
        taken = [name for name in changed if name in self._takes]
        for name in taken:
            self._takes[name](loaded.settings)
            section, _, key = name.partition(".")
            value = getattr(loaded.settings, section)
            if key:
                value = getattr(self.settings, section).model_copy(update={key: getattr(value, key)})
            self.settings = self.settings.model_copy(update={section: value})
        _AUDIT.info("configuration read again; changed: %s", ", ".join(taken) or "nothing")
        if rest := [name for name in changed if name not in self._takes]:
            _LOG.warning("changed in the configuration, and needs a restart: %s", ", ".join(rest))


def _refuse(lines: str) -> None:
    for line in lines.splitlines():
        _LOG.error("configuration refused: %s", line)
    _LOG.error("the previous configuration stays in force")


def _differing(before: Settings, after: Settings) -> list[str]:
    """Return the names of the settings that differ: `server.port`, or a whole section that is a list or mapping."""
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
    """Tell whether two values differ. The order of policies counts."""
    return bool(old != new) or (isinstance(old, dict) and [*old] != [*new])


def hears_hangup() -> bool:
    """Tell whether SIGHUP makes this process read its configuration again.

    It does in the main thread. When started from a terminal, SIGHUP keeps its default meaning.
    """
    return hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread() and not os.isatty(0)
