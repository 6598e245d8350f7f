"""A process beside the server that writes exchanges, so that the server need not.

    server   Opening, Settlement  ->   writer   opens the database as the server does, and writes what waits
             futures              <-            results and errors, after the COMMIT

To make the rows of a small request and to have them written takes a third of what the request takes, and one
interpreter runs one thread at a time. So a server that has a processor to spare is forked once, before it serves. The
two talk over a socket pair, in frames: four bytes with a length, and MessagePack. Exchanges are written in the order of
submission.

If the writer ends before the server (killed, no memory), the server itself writes what was not answered, and all that
follows: to begin or to settle an exchange twice changes nothing. If the server ends first, the writer finishes what it
was given, and ends.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from socket import socket, socketpair
from typing import Any, Final, TypeAlias, cast

from msgspec import Raw, Struct
from msgspec.msgpack import Decoder, Encoder

from proxy import errors
from proxy.dialects import Facts, Message, dialect_named
from proxy.errors import InternalError, PalimpsestError
from proxy.store.database import Address, Database, SqliteFile, Tasks, address_of, closed, tell
from proxy.store.records import Exchange, Opening, Settled, Settlement
from proxy.store.sqlite import BATCH, SqliteDatabase

_LOG: Final = logging.getLogger("palimpsest.store")

CAN_FORK: Final = hasattr(os, "fork") and sys.platform != "darwin"
"""Whether a process can be forked safely. macOS's own libraries do not bear it."""
_BATCH: Final = 8
"""Exchanges of one transaction at most on SQLite. With 32, all clients wait for one COMMIT while the server has nothing
to do: .65 of the throughput (case small-64-json)."""
_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")
"""What a container may use of the processors: microseconds in so many."""
_LENGTH: Final = 4  # bytes of a frame's length
_SILENT_SECONDS: Final = 2.0  # an exchange that has waited this long is a reason to ask whether the writer is alive,
_PING_SECONDS: Final = 0.3  # which it tells within this time, or else when it is asked again
_END_SECONDS: Final = 20.0  # how long it may take to end: another process may have the database's lock
_COLLECT_AFTER: Final = (10_000, 20, 20)
"""Thresholds of the garbage collector: a request with thousands of messages makes tens of thousands of
objects, and no cycles."""
_SWITCH_SECONDS: Final = 0.000_05
"""How long a thread may keep the interpreter's lock (GIL) while another one wants it. A short request takes it some
thirty times: at Python's own 5 ms it took 150 ms longer beside the first request of a long session. It is this short
because the count begins anew whenever the other thread releases the lock itself, which counting tokens does often."""

WriteHere: TypeAlias = Callable[[Exchange], asyncio.Future[Any]]
"""Has an exchange written by the process that calls it. Raises `StoreUnavailable` where it cannot be."""
LoopFactory: TypeAlias = Callable[[], asyncio.AbstractEventLoop]


async def open_database(address: Address, *, batch: int = BATCH) -> Database:
    """Open the database at `address`; on SQLite a transaction has at most `batch` writes."""
    if not isinstance(address, SqliteFile):
        from proxy.store.postgres import PostgresDatabase  # noqa: PLC0415 - SQLAlchemy's ORM comes with it

        return PostgresDatabase(address)
    return await asyncio.to_thread(SqliteDatabase, address.path, batch)


class _Given(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An exchange on its way to the writer."""

    number: int
    begins: bool = False  # whether `exchange` is an `Opening`, not a `Settlement`
    exchange: Raw


class _Order(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the server sends."""

    exchanges: list[_Given] = []
    renew: bool = False  # whether the database is to be opened anew for what follows
    asks: bool = False  # whether an answer is wanted at once


class _Written(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of an exchange."""

    number: int
    settled: Settled | None = None
    error: str = ""  # the class of an error; empty where there was none
    message: str = ""  # its message


class _Answer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the writer sends."""

    written: list[_Written] = []
    is_busy: bool = False  # as `Database.is_busy` has it; told only where the server asks


class _Unanswered(Struct, frozen=True, kw_only=True):
    """An exchange that the writer was given."""

    exchange: Exchange
    future: asyncio.Future[Any]
    since: float  # by the event loop's clock


_FACTS: Final = ("role", "has_own_fields", "has_calls", "content", "body", "reshaped")
"""What goes along of what is known of a message."""
_facts_of: Final = attrgetter(*_FACTS)


def _encoded(value: Any) -> Any:
    """Return a message as its dialect, its text, and what is known of that: the other process need not find it out."""
    if not isinstance(value, Message):
        raise NotImplementedError(f"a {type(value).__name__} does not go to another process")
    facts = value.facts and _facts_of(value.facts)
    return (value.dialect.name, value.raw, facts)


def _decoded(kind: type, value: Any) -> Any:
    if kind is not Message:
        raise NotImplementedError(f"a {kind.__name__} does not come from another process")
    dialect, raw, facts = value
    message = dialect_named(dialect).message(raw)
    if facts is not None:
        message.facts = Facts(raw=raw, **dict(zip(_FACTS, facts, strict=True)))
    return message


_ENCODER: Final = Encoder(enc_hook=_encoded)
_ORDERS: Final = Decoder(_Order)
_OPENINGS: Final = Decoder(Opening, dec_hook=_decoded)
_SETTLEMENTS: Final = Decoder(Settlement, dec_hook=_decoded)
_ANSWERS: Final = Decoder(_Answer)


def _exchange_of(given: _Given) -> Exchange:
    return (_OPENINGS if given.begins else _SETTLEMENTS).decode(given.exchange)


class _Frames(asyncio.Protocol):
    """One end of the socket: whole frames go out and come in."""

    def __init__(self, received: Callable[[bytes], None], lost: Callable[[], None]) -> None:
        """Call `received` with each frame that comes, and `lost` once no more can come."""
        self._received = received
        self._lost = lost
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def send(self, frame: bytes) -> None:
        """Send a frame; nothing happens where the other end is gone."""
        if self._transport is not None:
            self._transport.writelines((len(frame).to_bytes(_LENGTH, "big"), frame))

    def data_received(self, data: bytes) -> None:
        """Take what came, which may be a part of a frame, or several."""
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _LENGTH:
            begin = start + _LENGTH
            end = begin + int.from_bytes(buffer[start:begin], "big")
            if len(buffer) < end:
                break
            start = end
            self._received(bytes(buffer[begin:end]))
        del buffer[:start]

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - why does not matter
        """Tell that the other end is gone."""
        self._transport = None
        self._lost()

    def close(self) -> None:
        """Send what waits, then close."""
        if self._transport is not None:
            self._transport.close()


# ------------------------------------------------------------------------------------------------ the server's side


class WriterProcess:
    """The writer, as the server sees it."""

    def __init__(self, pid: int, end: socket) -> None:
        """Know the process, and this end of the socket; `fork_writer` is the usual way."""
        self.pid: Final = pid
        self._end = end
        self._has_ended = False
        self._is_gone = False  # whether another process may have its id
        self._frames: _Frames | None = None  # None before `open`, and once the writer is given nothing more
        self._write_here: WriteHere | None = None
        self._number = 0
        self._unanswered: dict[int, _Unanswered] = {}  # by number, in the order of submission
        self._outbox: list[_Given] = []  # what was submitted in this turn of the event loop
        self._heard = asyncio.Event()  # something came, or nothing more will
        self._is_busy = False  # as the writer told last
        self.written = 0  # exchanges that it has written

    @property
    def works(self) -> bool:
        """Whether exchanges can be given to it."""
        return self._frames is not None

    async def open(self, write_here: WriteHere) -> None:
        """Begin to talk. What the writer does not answer before it ends, and what follows, is given to `write_here`."""
        self._write_here = write_here
        frames = self._frames = _Frames(self._on_answer, self._on_lost)
        await asyncio.get_running_loop().create_unix_connection(lambda: frames, sock=self._end)

    def start(self, exchange: Exchange) -> asyncio.Future[Any]:
        """Have an exchange written, with all others that are submitted in this turn of the event loop.

        `open` was called before.
        """
        if self._frames is None and self._write_here is not None:
            return self._write_here(exchange)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        try:
            encoded = Raw(_ENCODER.encode(exchange))
        except Exception as why:  # noqa: BLE001 - as a write that fails
            future.set_exception(why)
            return future
        self._number += 1
        self._unanswered[self._number] = _Unanswered(exchange=exchange, future=future, since=loop.time())
        if not self._outbox:
            loop.call_soon(self._send)
        self._outbox.append(_Given(number=self._number, begins=isinstance(exchange, Opening), exchange=encoded))
        return future

    def renew(self) -> None:
        """Have the database opened anew for what is submitted from now on."""
        self._send()
        if self._frames is not None:
            self._frames.send(_ENCODER.encode(_Order(renew=True)))

    async def is_busy(self) -> bool:
        """Tell whether the writer is at work: it has written something meanwhile, or is in a long transaction."""
        written, self._is_busy = self.written, False
        await self._hears()
        return self._is_busy or self.written > written

    async def require_alive(self) -> None:
        """Kill a writer that neither writes nor says why: this process writes for it then."""
        first = next(iter(self._unanswered.values()), None)
        if first is None or asyncio.get_running_loop().time() - first.since < _SILENT_SECONDS:
            return
        # Silence counts the second time, since a busy machine is slow too.
        if self._frames is not None and not await self._hears() and not await self._hears():
            os.kill(self.pid, signal.SIGKILL)  # the end of the stream follows

    async def _hears(self) -> bool:
        """Ask the writer for an answer; return whether something came in time, be it the end of the stream."""
        if self._frames is not None:
            self._heard.clear()
            self._frames.send(_ENCODER.encode(_Order(asks=True)))
            try:
                async with asyncio.timeout(_PING_SECONDS):
                    await self._heard.wait()
            except TimeoutError:
                return False
        return True

    async def close(self) -> None:
        """Wait for what was submitted, then for the end of the process."""
        self._send()
        while self._unanswered and self._frames is not None:
            self._heard.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_SILENT_SECONDS):
                    await self._heard.wait()
            await self.require_alive()
        frames, self._frames = self._frames, None
        if frames is not None:
            frames.close()
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """Wait until the process has ended, and kill it if that takes long. Blocks."""
        self._end.close()
        if self._has_ended:
            return
        self._has_ended = True
        killer = threading.Timer(_END_SECONDS, os.kill, (self.pid, signal.SIGKILL))
        killer.daemon = True
        killer.start()
        try:
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        finally:
            self._is_gone = True
            killer.cancel()

    def kill(self) -> None:
        """End the process at once; what it has not written is not stored."""
        frames, self._frames = self._frames, None
        if frames is not None:
            frames.close()
        if not self._is_gone:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _send(self) -> None:
        outbox, self._outbox = self._outbox, []
        if outbox and self._frames is not None:
            self._frames.send(_ENCODER.encode(_Order(exchanges=outbox)))

    def _on_answer(self, frame: bytes) -> None:
        answer = _ANSWERS.decode(frame)
        for written in answer.written:
            error = getattr(errors, written.error)(written.message) if written.error else None
            tell(self._unanswered.pop(written.number).future, written.settled, error)
            self.written += error is None
        self._is_busy = self._is_busy or answer.is_busy
        self._heard.set()

    def _on_lost(self) -> None:
        """Write here what the writer did not answer."""
        if self._frames is None:
            return  # it was told to end
        _LOG.error("the process that writes exchanges (%s) has ended: this one writes them from now on", self.pid)
        self._frames, self._outbox = None, []
        unanswered, self._unanswered = self._unanswered, {}
        for each in unanswered.values():
            self._hand_over(each)
        self._heard.set()
        asyncio.get_running_loop().run_in_executor(None, self.end)  # so that no zombie is left

    def _hand_over(self, unanswered: _Unanswered) -> None:
        def pass_on(written: asyncio.Future[Any]) -> None:
            error = closed() if written.cancelled() else written.exception()
            tell(unanswered.future, None if error is not None else written.result(), error)

        if self._write_here is not None:
            try:
                self._write_here(unanswered.exchange).add_done_callback(pass_on)
            except Exception as why:  # noqa: BLE001 - it belongs to who submitted the exchange
                tell(unanswered.future, None, why)


# ------------------------------------------------------------------------------------------------ the writer's side


def fork_writer(
    url: str, leave: Collection[socket] = (), loop_factory: LoopFactory | None = None
) -> WriterProcess | None:
    """Start the process for the database at `url`; None where that is not safe, or there is no room for it.

    The caller has one thread, no event loop and no connections. The process closes its copies of the sockets in
    `leave`.
    """
    if not CAN_FORK or _processors() < 2 or threading.active_count() > 1:
        return None
    here, there = socketpair()
    gc.collect()
    gc.freeze()  # a collection writes to each object that it looks at, and a page that is written to is shared no more
    try:
        pid = os.fork()
    except OSError as why:  # the system has no room for a process just now
        _LOG.warning("no process writes exchanges beside this one: %s", why.strerror or why)
        here.close()
        there.close()
        return None
    if pid:
        there.close()
        return WriterProcess(pid, here)
    try:
        for each in (here, *leave):
            each.close()
        run_writer(url, there, loop_factory)
    except BaseException:  # noqa: BLE001 - what the server does at its end is not this process's to do
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _processors() -> int:
    """Return how many processors this process may use."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no container, or one that may use them all: its quota is `max`
        quota, period = _QUOTA.read_text("ascii").split()
        count = min(count, int(quota) // int(period))
    return count


def set_up_process() -> None:
    """Set the interpreter up for requests, in a server and in its writer."""
    gc.set_threshold(*_COLLECT_AFTER)
    sys.setswitchinterval(_SWITCH_SECONDS)


def run_writer(url: str, end: socket, loop_factory: LoopFactory | None = None) -> None:
    """Write what comes from a server until it closes its end. It takes the whole process."""
    # A terminal, or a service manager, sends its signals to both. The writer ends after the server.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    set_up_process()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(_Writer(address_of(url)).run(end))


class _Writer:
    """What the process does."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._frames = _Frames(self._on_frame, lambda: self._queue.put_nowait(None))
        self._queue: asyncio.Queue[_Order | None] = asyncio.Queue()
        self._outbox: list[_Written] = []
        self._database: Database | None = None
        self._closing = Tasks()

    async def run(self, end: socket) -> None:
        """Write what comes until the server closes its end."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self._frames, sock=end)
        while (order := await self._queue.get()) is not None:
            if order.renew:
                await self._let_go()
            await self._write(order.exchanges)
        await self._let_go()
        await self._closing.close()

    def _on_frame(self, frame: bytes) -> None:
        order = _ORDERS.decode(frame)
        if order.asks:
            busy = self._database is not None and self._database.is_busy
            self._frames.send(_ENCODER.encode(_Answer(is_busy=busy)))
        else:
            self._queue.put_nowait(order)

    async def _write(self, exchanges: Sequence[_Given]) -> None:
        for given in exchanges:
            try:
                if self._database is None:
                    self._database = await open_database(self._address, batch=_BATCH)
                future = self._database.start(_exchange_of(given))
            except Exception as why:  # noqa: BLE001 - it belongs to who submitted the exchange
                self._answer(_failed(given.number, why))
            else:
                future.add_done_callback(partial(self._on_done, given.number))

    def _on_done(self, number: int, future: asyncio.Future[Any]) -> None:
        error = closed() if future.cancelled() else future.exception()
        self._answer(_Written(number=number, settled=future.result()) if error is None else _failed(number, error))

    def _answer(self, written: _Written) -> None:
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._send)
        self._outbox.append(written)

    def _send(self) -> None:
        outbox, self._outbox = self._outbox, []
        self._frames.send(_ENCODER.encode(_Answer(written=outbox)))

    async def _let_go(self) -> None:
        """Close the database once what it was given is written. What hangs there is not waited for."""
        database, self._database = self._database, None
        if database is not None:
            await asyncio.wait({self._closing.follow(database.close())}, timeout=_SILENT_SECONDS)


def _failed(number: int, why: BaseException) -> _Written:
    if isinstance(why, PalimpsestError):
        return _Written(number=number, error=type(why).__name__, message=why.message)
    _LOG.error("an exchange could not be written", exc_info=why)
    # A client hears nothing of the database: what failed may hold other clients' exchanges too.
    told = "An exchange could not be written. The proxy's log has the details; please report it."
    return _Written(number=number, error=InternalError.__name__, message=told)
