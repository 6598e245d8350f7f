"""The interface to a database: atomic units of work, compiled statements, store URLs, and error translation.

A unit is a plain function that takes a synchronous connection, so that the same code serves every database. It may be
run again from its beginning, so it must have no effect except on the database. Statements are SQLAlchemy Core. On
PostgreSQL the connection is SQLAlchemy's own, or the driver's for short reads; on SQLite it is a faster one of ours
(see `sqlite`).
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import namedtuple
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, TypeAlias, TypeVar
from urllib.parse import urlencode
from uuid import uuid4

from msgspec import Struct
from sqlalchemy import URL, Delete, Executable, Insert, Update, UpdateBase, make_url
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import DBAPIError, MultipleResultsFound
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.elements import BindParameter, TextClause
from sqlalchemy.sql.selectable import ReturnsRows, SelectBase

from proxy.config import CONNECT_TIMEOUT, LIBPQ_OPTIONS, POSTGRES_DRIVERS, STATEMENT_CACHE, store_url
from proxy.errors import ConfigurationError, StoreUnavailable
from proxy.store.packing import decoder_of, encoder_of
from proxy.store.records import Exchange

_LOG: Final = logging.getLogger("palimpsest.store")
_CONNECT_SECONDS: Final = 10

Row: TypeAlias = Any  # a named tuple of the columns
Parameters: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Values by name for one execution, or a sequence of them for several executions."""


class Rows(Protocol):
    """The result of a statement. It can be consumed once, by one of these methods."""

    def __iter__(self) -> Iterator[Row]: ...

    def all(self) -> Sequence[Row]:
        """Return every row."""
        ...

    def one_or_none(self) -> Row | None:
        """Return the only row, or None if there is none; raises MultipleResultsFound."""

    def scalars(self) -> Iterable[Any]:
        """Return the first value of every row."""
        ...

    def scalar_one_or_none(self) -> Any:
        """Return the first value of the only row, or None if there is no row; raises MultipleResultsFound."""


class SqlDialect(Protocol):
    """The SQL dialect of a connection."""

    name: str  # `sqlite` or `postgresql`


class StoreConnection(Protocol):
    """A connection in a transaction. Whoever opened the transaction also ends it."""

    @property
    def dialect(self) -> SqlDialect:
        """The SQL dialect of the connection."""
        ...

    def execute(self, statement: Executable, parameters: Parameters | None = None, /) -> Rows:
        """Execute a statement once, or once for each mapping of a sequence.

        Build a frequent statement once and keep it: building one costs more than executing it.
        """
        ...


Result = TypeVar("Result")
Unit: TypeAlias = Callable[[StoreConnection], Result]  # work on a connection; it never commits


@lru_cache(maxsize=256)
def _only_writes(statement: Executable) -> bool:
    return isinstance(statement, Insert | Update | Delete) and not list(statement.exported_columns)


class GatheringConnection:
    """Buffers writes, and executes all rows of one statement together: before the next read, and at `flush`.

    A statement costs more than a row: SQLite's writer releases and takes the GIL for each. The order of
    different statements may change, so callers must not depend on it.
    """

    def __init__(self, connection: StoreConnection) -> None:
        """Execute on `connection`."""
        self._connection = connection
        self._waiting: dict[tuple[Executable, tuple[str, ...]], list[Mapping[str, Any]]] = {}

    @property
    def dialect(self) -> SqlDialect:
        """The SQL dialect of the connection."""
        return self._connection.dialect

    def execute(self, statement: Executable, parameters: Parameters | None = None, /) -> Rows:
        """Execute a statement at once if it returns rows, otherwise later."""
        if parameters and _only_writes(statement):
            rows = [parameters] if isinstance(parameters, (dict, Mapping)) else parameters
            self._waiting.setdefault((statement, tuple(rows[0])), []).extend(rows)
            return NO_ROWS
        self.flush()
        return self._connection.execute(statement, parameters)

    def flush(self) -> None:
        """Execute the buffered writes."""
        waiting, self._waiting = self._waiting, {}
        for (statement, _), rows in waiting.items():
            self._connection.execute(statement, rows)


class Database(Protocol):
    """An open database. Every method raises `StoreUnavailable` if the database cannot be used."""

    blocks: ClassVar[bool]
    """Whether a `short` read runs on the caller's event loop and blocks it, so that it must be very short."""
    in_order: ClassVar[bool]  # whether writes run, and become durable, in the order of submission

    async def read(self, unit: Unit[Result], *, short: bool = False) -> Result:
        """Run a unit that only reads. A `short` one takes about a millisecond, and needs no thread."""
        ...

    async def write(self, unit: Unit[Result], *, durable: bool = True, again: bool = True) -> Result:
        """Run a unit in a transaction; return its result once it is durable.

        Submitted writes complete even if the caller is cancelled. If the unit raises, it is rolled back. Without
        `durable`, the write survives the end of the process, but a loss of power only once a later durable write has
        returned. `again`: the unit may be retried after a lost connection, although its COMMIT may have succeeded.
        """
        ...

    def start(self, exchange: Exchange) -> asyncio.Future[Any]:
        """Begin or settle an exchange, together with those of other callers. The future resolves when it is done.

        If an opening is submitted before the settlement of its exchange, it is written first. An item that fails is
        rolled back; the others are written without it.
        """
        ...

    @property
    def is_busy(self) -> bool:
        """Whether a long write of this process blocks all others, and probes too."""
        ...

    async def probe(self, unit: Unit[None], *, same: bool) -> None:
        """Run a unit that writes and reads, on a separate connection.

        `same`: the database must be the one that was opened. A file may have been deleted or restored since then.
        """

    async def close(self) -> None:
        """Finish the submitted work, and close the database."""


class Tasks:
    """Runs work that completes even if its caller is cancelled."""

    def __init__(self) -> None:
        self._under_way: set[asyncio.Task[Any]] = set()
        self._closed = False

    def start(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Run `work` in a new task; raises `StoreUnavailable` after `close`."""
        try:
            self.require_open()
        except StoreUnavailable:
            work.close()
            raise
        return self.follow(work)

    def follow(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Run a follow-up of earlier work in a new task, even after `close` was called, which waits for it too."""
        task = asyncio.create_task(work)  # noqa: TID251 - the reference is kept, and `close` waits for it
        self._under_way.add(task)
        task.add_done_callback(self._done)
        return task

    def require_open(self) -> None:
        """Raise `StoreUnavailable` after `close`."""
        if self._closed:
            raise closed()

    async def close(self) -> None:
        """Refuse new work, and wait for all running tasks."""
        self._closed = True
        while self._under_way:
            await asyncio.wait(set(self._under_way))

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # mark it as retrieved: a cancelled caller does not


def tell(future: asyncio.Future[Any], result: Any, error: BaseException | None = None) -> None:
    """Resolve the future of a write. If the caller was cancelled, log the error instead, if there is one."""
    if future.done():
        if error is not None:
            log_seldom(logging.ERROR, f"a write failed after its caller was cancelled: {error}")
    elif error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def closed() -> StoreUnavailable:
    """Return the error for use after the store was closed."""
    return StoreUnavailable("The store cannot be used. It is closed: the process stops, or has opened it anew.")


class Unopened:
    """Placeholder for a database that could not be opened yet. Every method but `close` raises."""

    blocks: ClassVar[bool] = False
    in_order: ClassVar[bool] = True
    is_busy: bool = False

    def __init__(self, why: StoreUnavailable) -> None:
        """Raise `why` at every use."""
        self._why = why

    def _raise(self, *_: Any, **__: Any) -> Any:
        raise self._why

    read = write = start = probe = _raise

    async def close(self) -> None:
        """Do nothing."""


# --------------------------------------------------------------- statements, compiled once and run by the driver
# Executing a statement through SQLAlchemy takes several times as long as the database itself does.

Values: TypeAlias = Mapping[str, Any]
MakeRow: TypeAlias = Callable[[Sequence[Any]], Any]

_named_tuple: Final[Any] = namedtuple  # noqa: PYI024 - the names of the columns are known only at run time


class FetchedRows:
    """The fetched rows of a statement. They are converted to named tuples when they are accessed."""

    __slots__ = ("_make", "_rows")

    def __init__(self, rows: Sequence[Sequence[Any]], make: MakeRow) -> None:
        """Keep `rows` as the driver returned them; `make` converts one of them on access."""
        self._rows = rows
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return map(self._make, self._rows)

    def all(self) -> list[Any]:
        """Return every row."""
        return list(map(self._make, self._rows))

    def one_or_none(self) -> Any:
        """Return the only row, or None if there is none."""
        if len(self._rows) > 1:
            raise MultipleResultsFound("Multiple rows were found when one or none was required")
        return self._make(self._rows[0]) if self._rows else None

    def scalars(self) -> list[Any]:
        """Return the first value of every row."""
        return [row[0] for row in map(self._make, self._rows)]

    def scalar_one_or_none(self) -> Any:
        """Return the first value of the only row, or None if there is no row."""
        row = self.one_or_none()
        return None if row is None else row[0]


NO_ROWS: Final = FetchedRows((), tuple)
"""The result of a statement that returns no rows."""


class CompiledStatement:
    """A statement compiled for a driver."""

    def __init__(self, statement: Executable, columns: tuple[str, ...], dialect: Dialect) -> None:
        """Compile `statement`. `columns` are those that an INSERT or UPDATE sets; empty means all."""
        if not isinstance(statement, SelectBase | UpdateBase | TextClause):
            raise TypeError(f"{type(statement).__name__} is no statement that reads or writes rows")
        self.compiler: SQLCompiler = statement.compile(dialect=dialect, column_keys=list(columns) or None)
        self.binds: Mapping[str, BindParameter[Any]] = self.compiler.binds
        self.text = self.compiler.string
        self.order = tuple(self.compiler.positiontup or ())
        """Names of the parameters, in the order of their places in `text`."""
        self.lists = frozenset(name for name, bind in self.binds.items() if bind.expanding)
        """Names of the parameters that are lists. `text` has SQLAlchemy's placeholder in their place."""
        self.fixed = {name: bind.effective_value for name, bind in self.binds.items() if not bind.required}
        """Values that are part of the statement itself."""
        self.exported = list(statement.exported_columns) if isinstance(statement, ReturnsRows) else []
        """The columns that the statement returns; empty if it does not declare them."""
        self.make: MakeRow | None = None
        """Makes a row. None before the first execution, which yields the names of the columns."""
        self.converters: list[tuple[int, Callable[[Any], Any]]] = [
            (place, decode)
            for place, column in enumerate(self.exported)
            if (decode := decoder_of(column.type)) is not None
        ]
        """(place, convert) of each column whose values the driver returns in another type; NULL is not converted."""

    def maker(self, names: Sequence[str]) -> MakeRow:
        """Return a function that makes rows with these column names, and keep it as `make`."""
        if self.exported and len(self.exported) != len(names):
            raise TypeError(f"the statement has {len(self.exported)} columns, and {len(names)} were returned")
        named: MakeRow = _named_tuple("Row", names, rename=True)._make
        converters = self.converters

        def converting(row: Sequence[Any]) -> Any:
            values = list(row)
            for place, convert in converters:
                if values[place] is not None:
                    values[place] = convert(values[place])
            return named(values)

        self.make = converting if converters else named
        return self.make

    def picker(self, order: Sequence[str]) -> Callable[[Values], Sequence[Any]]:
        """Return a function that picks the values of the parameters in `order`, encoded for the driver."""
        pick, encoders, fixed = _picker(order), self.encoders(order), self.fixed
        if not encoders and not fixed:
            return pick

        def encoding(asked: Values) -> list[Any]:
            values = list(pick({**fixed, **asked} if fixed else asked))
            for place, encode in encoders:
                value = values[place]
                if value is not None:
                    values[place] = list(map(encode, value)) if order[place] in self.lists else encode(value)
            return values

        return encoding

    def encoders(self, order: Sequence[str]) -> list[tuple[int, Callable[[str], bytes]]]:
        """Return (place, encode) for each value that must be encoded."""
        kinds = [(place, encoder_of(self.binds[name].type)) for place, name in enumerate(order)]
        return [(place, encode) for place, encode in kinds if encode is not None]


def _picker(order: Sequence[str]) -> Callable[[Values], tuple[Any, ...]]:
    if len(order) > 1:
        return itemgetter(*order)
    return (lambda asked: (asked[order[0]],)) if order else (lambda _: ())


# ----------------------------------------------------------------------------------------- the URL


class SqliteFile(Struct, frozen=True, kw_only=True):
    """A database in one file of this machine."""

    path: Path


class PostgresServer(Struct, frozen=True, kw_only=True):
    """A database on a PostgreSQL server."""

    url: URL  # with the driver that is used
    options: dict[str, Any] = {}  # arguments of the driver's `connect`


Address: TypeAlias = SqliteFile | PostgresServer


def address_of(url: str) -> Address:
    """Parse a store's URL. Its password never appears in a message.

    Behind PgBouncer or another pool that shares connections between transactions, add `?statement_cache_size=0`:
    prepared statements do not survive there.
    """
    try:
        parsed = make_url(store_url(url))
    except ValueError as why:
        raise ConfigurationError(f"store.url: {why}.") from why
    driver = POSTGRES_DRIVERS.get(parsed.drivername)
    if driver is None:
        # SQLite. Any driver name is accepted, because `sqlite3` is used in any case.
        return SqliteFile(path=Path(parsed.database or ""))
    return _asyncpg(parsed) if driver == "asyncpg" else _psycopg(parsed)


def _asyncpg(parsed: URL) -> PostgresServer:
    query: dict[str, Any] = dict(parsed.query)
    options: dict[str, Any] = {"timeout": int(query.pop(CONNECT_TIMEOUT, _CONNECT_SECONDS)) or None}
    if "sslmode" in query:
        options["ssl"] = query.pop("sslmode")  # libpq's option, in the URL of every hosted database
    if more := {name: query.pop(name) for name in sorted(LIBPQ_OPTIONS.intersection(query))}:
        options["dsn"] = f"postgresql://?{urlencode(more)}"
    if STATEMENT_CACHE in query:
        options["statement_cache_size"] = options["prepared_statement_cache_size"] = int(query.pop(STATEMENT_CACHE))
        # Another client may have just used the same server connection, so names must be unique.
        options["prepared_statement_name_func"] = lambda: f"palimpsest_{uuid4().hex}"
    return PostgresServer(url=parsed.set(drivername="postgresql+asyncpg", query=query), options=options)


def _psycopg(parsed: URL) -> PostgresServer:
    try:
        import_module("psycopg")
        conninfo: Any = import_module("psycopg.conninfo")
    except ImportError as why:
        raise ConfigurationError(
            "store.url names psycopg, which is not installed (or cannot be loaded): "
            "pip install 'palimpsest[psycopg]', or name no driver (postgresql://…) to use asyncpg."
        ) from why
    query: dict[str, Any] = dict(parsed.query)
    options: dict[str, Any] = {CONNECT_TIMEOUT: int(query.pop(CONNECT_TIMEOUT, _CONNECT_SECONDS))}
    options["client_encoding"] = query.pop("client_encoding", "utf8")  # SQL_ASCII, some servers' default, gives bytes
    if int(query.pop(STATEMENT_CACHE, 1)) == 0:
        options["prepare_threshold"] = None
    try:
        conninfo.make_conninfo(**dict.fromkeys(query, ""))
    except conninfo.e.ProgrammingError:
        raise ConfigurationError("store.url: an option behind its question mark is unknown to libpq.") from None
    return PostgresServer(url=parsed.set(drivername="postgresql+psycopg", query=query), options=options)


# -------------------------------------------------------------------------------------- the errors

_MIGRATE: Final = "Its tables are missing or old: run `palimpsest upgrade`, or set store.migrate to true."

_SQLITE: Final = {
    sqlite3.SQLITE_BUSY: "Another process holds its lock: look for one that stands still in a write.",
    sqlite3.SQLITE_LOCKED: "Another connection holds a lock: look for one that stands still in a write.",
    sqlite3.SQLITE_FULL: "The disk is full: make room.",
    sqlite3.SQLITE_IOERR: "The disk cannot be read or written: look at the system's log.",
    sqlite3.SQLITE_CANTOPEN: "The file cannot be opened: look at its folder and at who may write there.",
    sqlite3.SQLITE_READONLY: "The file or its folder cannot be written: look at who may write there.",
    sqlite3.SQLITE_PERM: "The file cannot be used by this user: look at who may write there.",
    sqlite3.SQLITE_CORRUPT: "The file is damaged: put back a copy.",
    sqlite3.SQLITE_NOTADB: "The file is no SQLite database: name another one in store.url.",
    sqlite3.SQLITE_NOMEM: "There is no memory left.",
    sqlite3.SQLITE_PROTOCOL: "Its lock could not be had: the file must be on a disk of this machine.",
}
"""By SQLite's primary result code."""

_POOLED: Final = "A pooler gives its connections to others in between: add ?statement_cache_size=0 to store.url."

_POSTGRES: Final = {
    "08": "The connection failed: look at whether the server runs and can be reached.",
    "25006": "The server is read-only (a standby?): name the primary in store.url.",
    "26000": _POOLED,
    "28": "The server refused the user: look at user and password in store.url.",
    "3D": "There is no such database: create it, or name another one in store.url.",
    "40": "The transaction met another one again and again.",
    "42501": "The user may not do this: grant it the tables. Whoever migrates them must own them and their schema.",
    "42P01": _MIGRATE,
    "42703": _MIGRATE,
    "42P05": _POOLED,
    "53": "The server has no connections, memory or disk left.",
    "53100": "The server's disk is full: make room.",
    "53200": "The server has no memory left: look at its log.",
    "53300": "The server gives no more connections: raise its max_connections, or the limit of the role or database. "
    "A process opens up to 20.",
    "55000": "The database takes no connections: look at who closed it (ALTER DATABASE … ALLOW_CONNECTIONS).",
    "55P03": "A lock could not be had in time: look for a transaction that stands still.",
    "57": "The server stops, or stopped the statement.",
    "58": "The server has trouble with its disk or system: look at its log.",
    "XX001": "The server found damaged data: look at its log.",
    "XX002": "The server found a damaged index: look at its log.",
}
"""By the beginning of PostgreSQL's SQLSTATE."""

_LATE: Final = (
    "It did not answer in time: look at whether the server can be reached, and for a transaction that stands still."
)

_TRY_AGAIN: Final = frozenset({"40001", "40P01"})


@contextmanager
def translated() -> Generator[None]:
    """Translate errors of an outage into `StoreUnavailable`; let every other error through."""
    try:
        yield
    except Exception as why:
        failure = unavailable(why)
        if failure is None:
            raise
        raise failure from why


def unavailable(error: BaseException) -> StoreUnavailable | None:
    """Return the `StoreUnavailable` for `error` and log the driver's message, or None if the error is the program's."""
    found = outage_of(error)
    if found is None:
        return None
    advice, cause = found
    log_seldom(logging.WARNING, f"the store cannot be used: {said(cause)}")
    return StoreUnavailable(f"The store cannot be used. {advice}")


def outage_of(error: BaseException) -> tuple[str, BaseException] | None:
    """Return (advice, cause) if the store cannot be used, or None if the error is the program's."""
    if isinstance(error, PoolTimeout):
        return ("Every connection to it is in use: look for slow queries, or for one that stands still.", error)
    if isinstance(error, DBAPIError):
        cause: BaseException | None = error.orig
        # XX000 without a statement: a pooler has no server. With a statement, XX000 is a fault of that statement.
        refused = error.statement is None and getattr(cause, "sqlstate", None) == "XX000"
        if error.connection_invalidated or refused:
            return (_POSTGRES["08"], cause or error)
        return None if cause is None else outage_of(cause)
    if isinstance(error, sqlite3.Error):
        return _sqlite(error)
    if isinstance(error, TimeoutError):
        return (_LATE, error)
    if isinstance(error, OSError):  # includes socket errors
        return (_POSTGRES["08"], error)
    state = getattr(error, "sqlstate", None)  # PostgreSQL
    if isinstance(state, str):
        advice = _POSTGRES.get(state) or _POSTGRES.get(state[:2])
        return None if advice is None else (advice, error)
    if _is_failed_connection(error):
        return (_POSTGRES["08"], error)
    if type(error.__cause__).__name__ == "ClientConfigurationError":  # asyncpg, which may not be installed
        return ("The driver refuses an option of store.url: the log says which.", error)
    return None


def is_worth_another_try(error: BaseException) -> bool:
    """Tell whether the server aborted the transaction only because of another one (serialization, deadlock)."""
    return isinstance(error, DBAPIError) and getattr(error.orig, "sqlstate", None) in _TRY_AGAIN


def _sqlite(error: sqlite3.Error) -> tuple[str, BaseException] | None:
    code = getattr(error, "sqlite_errorcode", None)
    if not isinstance(code, int):
        return None
    if code == sqlite3.SQLITE_ERROR and str(error).startswith(("no such table", "no such column")):
        return _MIGRATE, error
    advice = _SQLITE.get(code & 0xFF)
    return None if advice is None else (advice, error)


def _is_failed_connection(error: BaseException) -> bool:
    """Tell whether a driver reports a failed connection without a SQLSTATE.

    If psycopg cannot connect, it raises `OperationalError`. If asyncpg loses a connection, it raises `InterfaceError`
    (also raised for wrong use), or `InternalClientError` within a statement. SQLAlchemy raises errors of the same names
    while it sets up a connection. The drivers are optional, so the classes are recognised by name.
    """
    kind = type(error)
    is_driver = not {"psycopg", "asyncpg"}.isdisjoint(kind.__module__.split("."))
    return (is_driver and kind.__name__ in {"OperationalError", "InternalClientError"}) or (
        kind.__name__ == "InterfaceError" and "clos" in str(error)
    )


def said(cause: BaseException) -> str:
    """Return the driver's message in one line. It may contain host names, so it is for the log only."""
    kind = getattr(cause, "sqlite_errorname", type(cause).__name__)  # thirty codes share the text "disk I/O error"
    return f"{kind}: {str(cause).strip().partition(chr(10))[0] or 'no more is known'}"


_REPEAT_SECONDS: Final = 30.0  # an unavailable store is probed several times a second
_logged: Final[dict[str, float]] = {}
"""The time of each line that was logged in the last `_REPEAT_SECONDS`."""


def log_seldom(level: int, line: str) -> None:
    """Log a line, unless the same line was logged in the last `_REPEAT_SECONDS`."""
    now = time.monotonic()
    for other in [each for each, at in _logged.items() if now - at > _REPEAT_SECONDS]:
        del _logged[other]
    if line not in _logged:
        _logged[line] = now
        _LOG.log(level, "%s", line)
