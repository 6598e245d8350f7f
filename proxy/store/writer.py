"""A separate process that writes exchanges, to take that work off the server.

    server   Opening, Settlement  ->   writer   opens the database as the server does, and writes
             futures              <-            results and errors, after the COMMIT

Making and writing the rows of a small request takes a third of the request's time, and an interpreter runs one thread
at a time. So a server with a processor to spare forks a writer once, before it serves. The two processes talk over a
socket pair, in frames: four bytes with the length, then MessagePack. Exchanges are written in the order of submission.

If the writer ends before the server (killed, out of memory), the server writes the unanswered exchanges itself, and all
later ones. That is safe, because beginning and settling an exchange are idempotent. If the server ends first, the
writer finishes its queue and exits.
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
"""Whether a process can be forked safely. The system libraries of macOS do not support it."""
_BATCH: Final = 8
"""Most exchanges of one transaction on SQLite. With 32, all clients wait for one COMMIT while the server is idle, which
gives .65 of the throughput (case small-64-json)."""
_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")
"""The CPU quota of a container: microseconds of processor time in each period of so many microseconds."""
_LENGTH: Final = 4  # bytes of a frame's length
_SILENT_SECONDS: Final = 2.0  # if an exchange has waited this long, the writer is pinged
_PING_SECONDS: Final = 0.3  # timeout of a ping; after two timeouts in a row the writer counts as dead
_END_SECONDS: Final = 20.0  # how long the writer may take to exit: another process may have the database's lock
_COLLECT_AFTER: Final = (10_000, 20, 20)
"""Thresholds of the garbage collector. A request with thousands of messages makes tens of thousands of objects, but no
cycles."""
_SWITCH_SECONDS: Final = 0.000_05
"""Switch interval: how long a thread may keep the GIL while another one wants it. A short request takes the GIL some
thirty times. With Python's default of 5 ms, it took 150 ms longer next to the first request of a long session. The
interval must be this short because it restarts whenever the other thread releases the GIL itself, as counting tokens
often does."""

WriteHere: TypeAlias = Callable[[Exchange], asyncio.Future[Any]]
"""Writes an exchange in the server process itself. Raises `StoreUnavailable` if the store cannot be used."""
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
    begins: bool = False  # whether `exchange` is an `Opening`; otherwise it is a `Settlement`
    exchange: Raw


class _Order(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message from the server."""

    exchanges: list[_Given] = []
    renew: bool = False  # whether to reopen the database, before these exchanges
    asks: bool = False  # a ping: answer at once


class _Written(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of an exchange."""

    number: int
    settled: Settled | None = None
    error: str = ""  # class name of the error; empty if there was none
    message: str = ""  # message of the error


class _Answer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message from the writer."""

    written: list[_Written] = []
    is_busy: bool = False  # `Database.is_busy`; set only in the answer to a ping


class _Unanswered(Struct, frozen=True, kw_only=True):
    """An exchange that was submitted, but not answered yet."""

    exchange: Exchange
    future: asyncio.Future[Any]
    since: float  # by the event loop's clock


_FACTS: Final = ("role", "has_own_fields", "has_calls", "content", "body", "reshaped")
"""The facts about a message that are sent with it."""
_facts_of: Final = attrgetter(*_FACTS)


def _encoded(value: Any) -> Any:
    """Encode a message as (dialect, text, facts). The facts save the other process from computing them again."""
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
    """Sends and receives whole frames at one end of the socket."""

    def __init__(self, received: Callable[[bytes], None], lost: Callable[[], None]) -> None:
        """Call `received` with each frame, and `lost` once the connection has ended."""
        self._received = received
        self._lost = lost
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def send(self, frame: bytes) -> None:
        """Send a frame. Does nothing if the other end is closed."""
        if self._transport is not None:
            self._transport.writelines((len(frame).to_bytes(_LENGTH, "big"), frame))

    def data_received(self, data: bytes) -> None:
        """Buffer the data, and pass on each complete frame."""
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

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the reason does not matter
        """Report that the other end is closed."""
        self._transport = None
        self._lost()

    def close(self) -> None:
        """Send the buffered data, then close."""
        if self._transport is not None:
            self._transport.close()


# ------------------------------------------------------------------------------------------------ the server's side


class WriterProcess:
    """The server's handle to the writer process."""

    def __init__(self, pid: int, end: socket) -> None:
        """Wrap the process `pid` and the server's end of the socket. Usually made by `fork_writer`."""
        self.pid: Final = pid
        self._end = end
        self._has_ended = False
        self._is_gone = False  # whether the process was reaped, so that its id may be reused
        self._frames: _Frames | None = None  # None before `open`, and once nothing more is sent to the writer
        self._write_here: WriteHere | None = None
        self._number = 0
        self._unanswered: dict[int, _Unanswered] = {}  # by number, in the order of submission
        self._outbox: list[_Given] = []  # submitted in this iteration of the event loop
        self._heard = asyncio.Event()  # an answer came, or the connection has ended
        self._is_busy = False  # as of the last ping
        self.written = 0  # number of exchanges that it has written

    @property
    def works(self) -> bool:
        """Whether exchanges can be sent to it."""
        return self._frames is not None

    async def open(self, write_here: WriteHere) -> None:
        """Connect. If the writer ends, `write_here` gets the unanswered exchanges and all later ones."""
        self._write_here = write_here
        frames = self._frames = _Frames(self._on_answer, self._on_lost)
        await asyncio.get_running_loop().create_unix_connection(lambda: frames, sock=self._end)

    def start(self, exchange: Exchange) -> asyncio.Future[Any]:
        """Submit an exchange. Those of one iteration of the event loop are sent together. Requires `open`."""
        if self._frames is None and self._write_here is not None:
            return self._write_here(exchange)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        try:
            encoded = Raw(_ENCODER.encode(exchange))
        except Exception as why:  # noqa: BLE001 - reported like a write that fails
            future.set_exception(why)
            return future
        self._number += 1
        self._unanswered[self._number] = _Unanswered(exchange=exchange, future=future, since=loop.time())
        if not self._outbox:
            loop.call_soon(self._send)
        self._outbox.append(_Given(number=self._number, begins=isinstance(exchange, Opening), exchange=encoded))
        return future

    def renew(self) -> None:
        """Reopen the database for the exchanges that are submitted from now on."""
        self._send()
        if self._frames is not None:
            self._frames.send(_ENCODER.encode(_Order(renew=True)))

    async def is_busy(self) -> bool:
        """Ping the writer; tell whether it wrote something meanwhile, or is in a long transaction."""
        written, self._is_busy = self.written, False
        await self._hears()
        return self._is_busy or self.written > written

    async def require_alive(self) -> None:
        """Kill a writer that neither writes nor answers pings. This process then writes in its place."""
        first = next(iter(self._unanswered.values()), None)
        if first is None or asyncio.get_running_loop().time() - first.since < _SILENT_SECONDS:
            return
        # It takes two unanswered pings, because a busy machine is slow too.
        if self._frames is not None and not await self._hears() and not await self._hears():
            os.kill(self.pid, signal.SIGKILL)  # the end of the stream follows

    async def _hears(self) -> bool:
        """Ping the writer; return whether an answer or the end of the stream came in time."""
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
        """Wait for all submitted exchanges, then for the end of the process."""
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
        """Wait for the process to end; kill it after `_END_SECONDS`. Blocks."""
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
        """Kill the process at once. Exchanges that it has not written are lost."""
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
        """Write the unanswered exchanges in this process."""
        if self._frames is None:
            return  # it was closed or killed on purpose
        _LOG.error("the process that writes exchanges (%s) has ended: this one writes them from now on", self.pid)
        self._frames, self._outbox = None, []
        unanswered, self._unanswered = self._unanswered, {}
        for each in unanswered.values():
            self._hand_over(each)
        self._heard.set()
        asyncio.get_running_loop().run_in_executor(None, self.end)  # reap the process

    def _hand_over(self, unanswered: _Unanswered) -> None:
        def pass_on(written: asyncio.Future[Any]) -> None:
            error = closed() if written.cancelled() else written.exception()
            tell(unanswered.future, None if error is not None else written.result(), error)

        if self._write_here is not None:
            try:
                self._write_here(unanswered.exchange).add_done_callback(pass_on)
            except Exception as why:  # noqa: BLE001 - passed to the caller that submitted the exchange
                tell(unanswered.future, None, why)


# ------------------------------------------------------------------------------------------------ the writer's side


def fork_writer(
    url: str, leave: Collection[socket] = (), loop_factory: LoopFactory | None = None
) -> WriterProcess | None:
    """Fork a writer for the database at `url`. Return None if forking is unsafe or fails, or no processor is spare.

    The caller must have one thread, no event loop and no connections. The writer closes its copies of the sockets in
    `leave`.
    """
    if not CAN_FORK or _processors() < 2 or threading.active_count() > 1:
        return None
    here, there = socketpair()
    gc.collect()
    gc.freeze()  # a collection writes to each object that it visits, which would end the sharing of memory pages
    try:
        pid = os.fork()
    except OSError as why:  # the system cannot start another process now
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
    except BaseException:  # noqa: BLE001 - the server's clean-up must not run in this process
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _processors() -> int:
    """Return how many processors this process may use."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # not a container, or one without a quota (`max`)
        quota, period = _QUOTA.read_text("ascii").split()
        count = min(count, int(quota) // int(period))
    return count


def set_up_process() -> None:
    """Set the garbage collector and the switch interval, in a server and in its writer."""
    gc.set_threshold(*_COLLECT_AFTER)
    sys.setswitchinterval(_SWITCH_SECONDS)


def run_writer(url: str, end: socket, loop_factory: LoopFactory | None = None) -> None:
    """Write the exchanges that a server sends until it closes its end. Takes over the whole process."""
    # A terminal or a service manager sends its signals to both processes, but the writer must end after the server.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    set_up_process()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(_Writer(address_of(url)).run(end))


class _Writer:
    """The main loop of the writer process."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._frames = _Frames(self._on_frame, lambda: self._queue.put_nowait(None))
        self._queue: asyncio.Queue[_Order | None] = asyncio.Queue()
        self._outbox: list[_Written] = []
        self._database: Database | None = None
        self._closing = Tasks()

    async def run(self, end: socket) -> None:
        """Write the exchanges that arrive until the server closes its end."""
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
            except Exception as why:  # noqa: BLE001 - passed to the caller that submitted the exchange
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
        """Close the database once its writes are done. After `_SILENT_SECONDS`, closing goes on in the background."""
        database, self._database = self._database, None
        if database is not None:
            await asyncio.wait({self._closing.follow(database.close())}, timeout=_SILENT_SECONDS)


def _failed(number: int, why: BaseException) -> _Written:
    if isinstance(why, PalimpsestError):
        return _Written(number=number, error=type(why).__name__, message=why.message)
    _LOG.error("an exchange could not be written", exc_info=why)
    # The client gets no details of the database error, which may quote other clients' exchanges.
    told = "An exchange could not be written. The proxy's log has the details; please report it."
    return _Written(number=number, error=InternalError.__name__, message=told)
