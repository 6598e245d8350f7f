"""The spool: a file of records that wait for the store. Appended durably, read in order, dropped once stored.

All processes that share a store's spool append to one file, so their records have one order. The layout:

    4,096 bytes   header: the first byte is 1 while a record waits; then a magic name, and how far records were stored
    records       state, lengths, checksum, key, content; a zero byte ends them

The file is longer than its records. Space is allocated before it is needed, so that a full disk shows before the
provider is asked and paid. Some space is allocated from the start, for exchanges in progress when the disk gets full.
A process that is killed while it appends leaves half a record at the end. The next append or read drops it.

Every process maps the header, so it sees at no cost whether a record waits (`flag`).
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import re
import struct
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final
from weakref import WeakSet

from msgspec import Struct

from proxy.errors import StoreUnavailable
from proxy.store.database import SqliteFile, address_of

_LOG: Final = logging.getLogger("palimpsest.spool")

_PAGE: Final = 4_096
_NAME: Final = b"PALIMPSEST SPOOL 1\n"
_STATE: Final = struct.Struct("<QQ")  # how often the file was emptied; offset of the first record that is not stored
_STATE_AT: Final = 32
_NUMBERS: Final = 1 << 64
_SECRETS_AT: Final = 64
_SECRETS: Final = struct.Struct("<8sH")  # checksum and length of the secrets, which follow
_RECORD: Final = struct.Struct("<BBHI8s")  # state, unused, length of the key, length of the content, checksum
_BEGINNING: Final = re.compile(rb"\x01\x00[\x01-\x80]\x00", re.DOTALL)
"""The beginning of a waiting record, whose key has 1 to 128 bytes."""
_WAITS: Final = 1
_DROPPED: Final = 2
_ROOM: Final = 1_048_576  # the file grows by at least so many bytes
MOST_AT_ONCE: Final = 64  # most records of one read
_MOST_BYTES_AT_ONCE: Final = 16_777_216


class SpooledRecord(Struct, frozen=True, kw_only=True):
    """A waiting record."""

    key: str  # internal name of its session
    content: bytes
    after: int  # offset of the next record


class Room(Struct, kw_only=True, eq=False, weakref=True):
    """Space reserved for a record. It is released when this object is garbage collected."""

    size: int  # bytes


class _Waiting(Struct, kw_only=True):
    """A record in the queue to be appended."""

    key: str
    content: bytes
    error: OSError | None = None


class Spool:
    """The spool of one store. Any number of processes may open it."""

    def __init__(self, folder: Path, name: str, most: int) -> None:
        """Use the file `name` in `folder`. It accepts no new exchange beyond `most` bytes."""
        self._path = folder / f"{name}.spool"
        self._turn_path = folder / f"{name}.replay"
        self._most = most
        self._file = -1
        self._opened_file = (0, 0)  # device and inode, which identify the file
        self._emptied: int = 0  # how often the file had been emptied when `_end` was found
        self._end = _PAGE
        self._size = _PAGE  # last known size of the file
        self._rooms: WeakSet[Room] = WeakSet()
        self._waiting: list[_Waiting] = []
        self._thread = ThreadPoolExecutor(1, "palimpsest-spool")
        self._using = threading.RLock()
        self._turn = threading.Lock()
        self.flag: mmap.mmap | bytearray = bytearray(1)
        """Its first byte is not zero while a record of any process waits."""

    # --------------------------------------------------------------------------- for the event loop

    async def reserve(self, size: int) -> Room:
        """Reserve space for a record before upstream is asked; raises `StoreUnavailable` if there is none."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._reserve, size)

    async def append(self, key: str, content: bytes) -> None:
        """Append a record. It is durable when this returns. Raises `StoreUnavailable` if that fails."""
        waiting = _Waiting(key=key, content=content)
        self._waiting.append(waiting)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._write_waiting)
        if waiting.error is not None:
            raise _unwritable(self._path, waiting.error) from waiting.error

    # ------------------------------------------------------------------------------------ the file

    def open(self) -> None:
        """Open or create the file; raises `StoreUnavailable`."""
        with self._opened(), self._locked():
            self._find_end()
            self._keep_room()

    def close(self) -> None:
        """Close the file."""
        self._thread.shutdown()
        with self._using:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    @property
    def usable(self) -> bool:
        """Whether the file is open."""
        return self._file >= 0

    @property
    def secrets(self) -> bytes:
        """The secrets stored by `keep_secrets`; empty if there are none."""
        if len(self.flag) < _PAGE:
            return b""
        checksum, length = _SECRETS.unpack_from(self.flag, _SECRETS_AT)
        start = _SECRETS_AT + _SECRETS.size
        kept = bytes(self.flag[start : start + length])
        return kept if length and _checksum(b"", kept) == checksum else b""

    def keep_secrets(self, secrets: bytes) -> None:
        """Store the secrets that a process needs to serve if the store is away when it starts."""
        if len(self.flag) < _PAGE or self.secrets == secrets:
            return
        with self._using, self._locked():
            os.pwrite(self._file, secrets, _SECRETS_AT + _SECRETS.size)
            os.pwrite(self._file, _SECRETS.pack(_checksum(b"", secrets), len(secrets)), _SECRETS_AT)
            os.fsync(self._file)

    @contextmanager
    def turn(self) -> Generator[bool]:
        """Try to get the lock for storing the waiting records, without waiting; yield whether that succeeded."""
        if not self._turn.acquire(blocking=False):
            yield False
            return
        try:
            file = self._open_turn()
            try:
                yield _lock(file, wait=False)
            finally:
                os.close(file)  # that unlocks it
        finally:
            self._turn.release()

    def read(self) -> list[SpooledRecord]:
        """Return the first waiting records. If there are none, erase the file and shrink it."""
        with self._opened(), self._locked():
            self._find_end()
            found: list[SpooledRecord] = []
            size = 0
            for _, state, key, content, after in self._records(self._stored_until(), self._end):
                if state == _WAITS and content is not None:
                    found.append(SpooledRecord(key=key, content=content, after=after))
                    size += len(content)
                    if len(found) == MOST_AT_ONCE or size > _MOST_BYTES_AT_ONCE:
                        break
            if not found:
                emptied = (_STATE.unpack_from(self.flag, _STATE_AT)[0] + 1) % _NUMBERS
                # The other processes see the new number, and start over.
                os.pwrite(self._file, _STATE.pack(emptied, _PAGE), _STATE_AT)
                os.ftruncate(self._file, _PAGE)
                self._set_flag(0)
                self._emptied, self._end, self._size = emptied, _PAGE, _PAGE
                self._keep_room()
            return found

    def stored(self, after: int) -> None:
        """Record that every record before the offset `after` is stored."""
        with self._opened(), self._locked():
            emptied, _ = _STATE.unpack_from(self.flag, _STATE_AT)
            os.pwrite(self._file, _STATE.pack(emptied, after), _STATE_AT)

    def set_aside(self, record: SpooledRecord) -> Path:
        """Append a record that the store rejects to a separate file; return its path."""
        path = self._path.with_suffix(".rejected")
        # A buffered file writes all of it or raises: a disk that is nearly full may take a part.
        with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab") as file:
            file.write(_framed(record.key.encode(), record.content))
            file.flush()
            os.fsync(file.fileno())
        return path

    def drop(self, is_meant: Callable[[str, bytes | None], bool]) -> int:
        """Erase the waiting records for which `is_meant` returns true; return how many.

        `is_meant` gets the key and the content, which is None if the record is damaged.
        """
        if not self._path.exists():
            return 0
        erased = 0
        with self._opened(), self._locked():
            self._find_end()
            for start, state, found, content, after in list(self._records(self._stored_until(), self._end)):
                if state == _WAITS and is_meant(found, content):
                    # The state first, so that a record that was half erased never counts as damaged.
                    os.pwrite(self._file, bytes([_DROPPED]), start)
                    os.fsync(self._file)
                    length = len(content or b"")
                    os.pwrite(self._file, bytes(length), after - length)
                    erased += 1
            if erased:
                os.fsync(self._file)
        return erased

    # ----------------------------------------------------------------------------------- internal

    def _open(self) -> None:
        if self._file >= 0:
            with suppress(FileNotFoundError):
                if _identity(self._path.stat()) == self._opened_file:
                    return
            if self.flag[0]:
                _LOG.error(
                    "the spool was deleted or replaced, or mounted anew: what waits is in its old file: %s", self._path
                )
            os.close(self._file)
            self._file = -1
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            _lock(file)
            if os.fstat(file).st_size < _PAGE:
                os.pwrite(file, (b"\0" + _NAME).ljust(_STATE_AT, b"\0") + _STATE.pack(0, _PAGE) + bytes(_PAGE), 0)
                os.ftruncate(file, _PAGE)
                os.fsync(file)
                _sync_folder(self._path.parent)
            flag = mmap.mmap(file, _PAGE)
            if flag[1 : 1 + len(_NAME)] != _NAME:
                raise OSError(None, "it is no spool")
            _unlock(file)
        except OSError:
            os.close(file)
            raise
        self._file, self.flag, self._opened_file = file, flag, _identity(os.fstat(file))
        self._emptied, self._end, self._size = -1, _PAGE, 0

    def _open_turn(self) -> int:
        try:
            return os.open(self._turn_path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as why:
            raise _unwritable(self._turn_path, why) from why

    @contextmanager
    def _opened(self) -> Generator[None]:
        """Open the file if it is not open, or was replaced."""
        with self._using:
            try:
                self._open()
                yield
            except OSError as why:
                raise _unwritable(self._path, why) from why

    @contextmanager
    def _locked(self) -> Generator[None]:
        """Hold the file's lock, which excludes all other processes."""
        _lock(self._file)
        try:
            yield
        finally:
            _unlock(self._file)

    def _set_flag(self, waits: int) -> None:
        """Write the flag that tells whether a record waits.

        Not through the mapping: there an error (a file system that has become read-only) would kill the process.
        """
        os.pwrite(self._file, bytes([waits]), 0)

    def _stored_until(self) -> int:
        until: int = _STATE.unpack_from(self.flag, _STATE_AT)[1]
        return until if _PAGE <= until <= os.fstat(self._file).st_size else _PAGE  # otherwise the header is damaged

    def _find_end(self) -> None:
        """Find the end of the records, including those of other processes; drop an incomplete record there."""
        emptied, _ = _STATE.unpack_from(self.flag, _STATE_AT)
        size = os.fstat(self._file).st_size
        filled = self._end
        if emptied != self._emptied:
            self._emptied, self._end = emptied, self._stored_until()
            filled = size  # not scanned yet
        end: int = max([after for *_, after in self._records(self._end, filled)], default=self._end)
        torn = os.pread(self._file, _RECORD.size, end)
        if any(torn):
            _LOG.warning("the end of the spool was half a record, which is dropped: %s", self._path)
            os.ftruncate(self._file, end)
            size = end
        self._end, self._size = end, size
        if end > self._stored_until() and not self.flag[0]:
            self._set_flag(1)

    def _records(self, start: int, filled: int) -> Iterator[tuple[int, int, str, bytes | None, int]]:
        """Yield (start, state, key, content, end) of each record from `start` on, up to the last complete one.

        Bytes in front of a complete record that are not a record are damage: yielded without content. Zeros before the
        offset `filled` may be damage too; zeros after it are free space.
        """
        while True:
            found = self._record(start)
            if found is None or found[2] is None:
                whole = self._next_whole(start, filled)
                if whole is None:  # the end, or an incomplete record
                    return
                _LOG.error("a part of the spool is damaged and left out: %s from %d to %d", self._path, start, whole)
                found = _DROPPED, "", None, whole
            state, key, content, after = found
            yield start, state, key, content, after
            start = after

    def _next_whole(self, start: int, filled: int) -> int | None:
        """Return the offset of the next waiting record after the damage at `start`, or None; see `_records`."""
        if start >= filled and not os.pread(self._file, _PAGE, start).strip(b"\0"):
            return None
        size = os.fstat(self._file).st_size
        with mmap.mmap(self._file, size, access=mmap.ACCESS_READ) as whole:
            for found in _BEGINNING.finditer(whole, start + 1):
                record = self._record(found.start())
                if record is not None and record[2] is not None:
                    return found.start()
        return None

    def _record(self, start: int) -> tuple[int, str, bytes | None, int] | None:
        """Return (state, key, content, end) of the record at `start`, or None if there is none.

        If the checksum of a waiting record is wrong, its key is empty and its content None.
        """
        head = os.pread(self._file, _RECORD.size, start)
        if len(head) < _RECORD.size:
            return None
        state, _, key_length, length, checksum = _RECORD.unpack(head)
        if state not in {_WAITS, _DROPPED}:
            return None
        after = start + _RECORD.size + key_length + length
        if after > os.fstat(self._file).st_size:
            return None
        text = os.pread(self._file, key_length + length, start + _RECORD.size)
        key, content = text[:key_length], text[key_length:]
        if state == _WAITS and _checksum(key, content) != checksum:
            return state, "", None, after
        return state, key.decode("ascii", "replace"), content, after

    def _reserve(self, size: int) -> Room:
        with self._opened(), self._locked():
            self._find_end()
            needed = self._end + sum([room.size for room in list(self._rooms)]) + size
            if needed > self._most:
                raise StoreUnavailable(
                    "The store cannot be used, and the spool of what waits for it is full: bring the store back, "
                    "or raise store.spool_max_bytes."
                )
            self._grow(needed)
            room = Room(size=size)
            self._rooms.add(room)
            return room

    def _grow(self, needed: int) -> None:
        """Make the file at least `needed` bytes long."""
        if needed <= self._size:
            return
        size = needed + _ROOM
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._file, 0, size)
        else:
            os.ftruncate(self._file, size)
        self._size = size

    def _keep_room(self) -> None:
        with suppress(OSError):  # without it, only exchanges in progress when the disk gets full are lost
            self._grow(self._end + 1)

    def _write_waiting(self) -> None:
        """Append all queued records. Afterwards each is durable, or has its `error` set."""
        waiting, self._waiting = self._waiting, []
        if not waiting:  # an earlier call appended them
            return
        try:
            with self._using:
                self._open()
                with self._locked():
                    self._find_end()
                    self._append(waiting)
        except OSError as why:
            for each in waiting:
                each.error = why

    def _append(self, waiting: list[_Waiting]) -> None:
        text = b"".join([_framed(each.key.encode(), each.content) for each in waiting])
        start = self._end
        try:
            written = 0
            while written < len(text):
                written += os.pwrite(self._file, text[written:], start + written)
            os.fsync(self._file)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, start)  # nothing of it was acknowledged
            self._size = start
            raise
        self._end = start + len(text)
        self._size = max(self._size, self._end)
        self._set_flag(1)


def waiting_beside(folder: Path, name: str) -> list[Path]:
    """Return the other spools in the folder with waiting records: those of other stores, or of other URLs."""
    found: list[Path] = []
    for path in sorted(folder.glob("*.spool")):
        with suppress(OSError), path.open("rb") as file:
            if path.stem != name and file.read(1 + len(_NAME)) == b"\1" + _NAME:
                found.append(path)
    return found


def spool_name(url: str) -> str:
    """Return the name of a store's spool. Different spellings of a URL give the same name."""
    address = address_of(url)
    if isinstance(address, SqliteFile):
        name = str(address.path.absolute())
    else:
        name = address.url.set(drivername="postgresql", password=None).render_as_string()
    return blake2b(name.encode(), digest_size=8).hexdigest()


def _framed(key: bytes, content: bytes) -> bytes:
    return _RECORD.pack(_WAITS, 0, len(key), len(content), _checksum(key, content)) + key + content


def _checksum(key: bytes, content: bytes) -> bytes:
    check = blake2b(key, digest_size=8)
    check.update(content)
    return check.digest()


def _lock(file: int, *, wait: bool = True) -> bool:
    """Lock `file` against other processes; return False if another one has the lock and `wait` is false."""
    if sys.platform != "win32":  # on Windows, a single process serves
        import fcntl  # noqa: PLC0415 - not available on Windows

        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
    return True


def _unlock(file: int) -> None:
    if sys.platform != "win32":
        import fcntl  # noqa: PLC0415 - not available on Windows

        fcntl.flock(file, fcntl.LOCK_UN)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def _unwritable(path: Path, why: OSError) -> StoreUnavailable:
    return StoreUnavailable(
        f"The store cannot be used, and its spool {str(path)!r} cannot be written: {why.strerror or why}. "
        "Bring the store back, or name another folder in store.spool."
    )
