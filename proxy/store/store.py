"""The store's public interface. Most methods run one unit of work, defined in the modules beside this one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from typing import Any, Final, Self

from proxy.conversation import ROOT
from proxy.dialects import JsonObject, Message
from proxy.errors import InvalidRequest, NotFound, StoreUnavailable
from proxy.store import cuts, exchanges, history, rollups, search, summaries, tree
from proxy.store.archive import export_session, fork_session, load_session, read_records
from proxy.store.circuit import FROZEN, SLOW_SECONDS, Circuit
from proxy.store.database import Database, Result, SqliteFile, Tasks, Unit, Unopened, address_of
from proxy.store.evidence import Inferred, UnnamedRequest, infer
from proxy.store.exchanges import FirstTools
from proxy.store.history import Branches, Lineage, lineage_of, recall
from proxy.store.masking import Masker, is_withheld
from proxy.store.migrate import MOST_BYTES, current, make_search_index, probe, require_current, upgrade
from proxy.store.packing import is_plain, require_plain, sanitize
from proxy.store.portions import (
    AT_FIRST,
    PORTION_BYTES,
    Packing,
    begin_long,
    delete_sessions,
    next_count,
    packed_rows,
    settle_long,
)
from proxy.store.records import (
    Body,
    BranchRow,
    Cursor,
    Exchange,
    ExchangeRow,
    HistoryQuery,
    HistorySnapshot,
    InstructionsRow,
    NodeRow,
    Opening,
    SessionRow,
    Settled,
    Settlement,
    StandingCut,
    SummaryRow,
    TooLong,
    session_key,
)
from proxy.store.rollups import Group, StatsQuery, StatsRow
from proxy.store.search import FoundTexts
from proxy.store.sessions import (
    BeingRemoved,
    ListedSession,
    SessionListQuery,
    list_sessions,
    page_of_sessions,
    removed_sessions,
    session_of,
    sessions_named,
    sessions_of,
    sessions_to_delete,
)
from proxy.store.spool import Spool
from proxy.store.sqlite import SqliteDatabase, create_file, empty_log, is_locked_out
from proxy.store.tree import hidden_at, make_secret, secret_of
from proxy.store.writer import WriterProcess, open_database
from proxy.trimming import Cut, Hidden, Summary

_LAST_SECONDS: Final = 2.0  # how long a store that cannot be used may take to close
_RETURN_SECONDS: Final = 2.0  # how long callers wait while the spool is being emptied
_AWAY: Final = "The store cannot be used. It is away."
_HEALTH_SECONDS: Final = 1.0  # how long a probe's result holds
_RETURNS: Final = "The store cannot be used yet. What was asked while it was away is being stored: try again soon."
_INDEX_SECONDS: Final = 0.5  # how long a search may spend on indexing recent messages
_FEW: Final = 64  # messages that are read or written within a millisecond
_STORED_SECONDS: Final = 20.0
"""How long an exchange may wait to be stored. A store that answers other requests may still fail to store this one, for
example while another transaction locks its session."""
_HELD: Final = (
    f"The store cannot be used. It did not store an exchange within {_STORED_SECONDS:g} s: look for a transaction "
    "that stands still, or a slow disk."
)
_LONG: Final = 256  # most messages per transaction: it blocks other writers for some 10 ms


class Store:
    """Persistent storage of sessions. Any number of stores, in any number of processes, may share one database.

    Every method raises `StoreUnavailable` if the database cannot be used. Writes complete even if the caller is
    cancelled. `key` is a session's internal name (`records.session_key`). A look-up by a name that cannot be stored
    finds nothing.
    """

    def __init__(
        self,
        database: Database,
        url: str = "",
        spool: Spool | None = None,
        *,
        migrate: bool = False,
        direct: bool = False,
    ) -> None:
        """Use a database that is open already; most callers use `Store.open` instead.

        With a `url`, a database that failed is reopened. While a record waits in `spool`, the circuit is open.
        `direct` bypasses the circuit.
        """
        self._database = database
        self._writer: WriterProcess | None = None
        self._start = self._start_here  # submits an exchange for writing
        self._url = url
        self._migrate = migrate
        self._direct = direct
        self._renewing: asyncio.Task[None] | None = None
        self.spool: Final = spool
        self.circuit: Final = Circuit(self._probe, lambda: self._database.is_busy)
        self._branches = Branches()
        self.masker: Masker | None = None  # masks secrets before they are stored
        self.searches_index = False  # whether a full-text index is wanted
        self._has_index = False  # whether its tables are known to exist
        self._has_deleted = False  # whether SQLite's write-ahead log may hold deleted data
        self._tasks = Tasks()
        self._closed = False

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        migrate: bool = True,
        spool: Spool | None = None,
        bare: bool = False,
        away: StoreUnavailable | None = None,
    ) -> Store:
        """Open the database at `url`. With `migrate`, its tables are migrated; without, `ready` checks them.

        `bare` means that the database existed before and may be unavailable now. If so, the store opens with an open
        circuit instead of raising. Pass `away`, the reason found earlier, to skip the attempt to connect.

        Raises `ConfigurationError` if `url` does not name a supported database.
        """
        address = address_of(url)
        try:
            if away is not None and bare:
                raise away
            if migrate:
                await upgrade(url, most=MOST_BYTES)
            elif isinstance(address, SqliteFile) and not bare:
                await asyncio.to_thread(create_file, address.path)
            return cls(await open_database(address), url, spool)
        except StoreUnavailable as why:
            if not bare:
                raise
            store = cls(Unopened(why), url, spool, migrate=migrate)
            store.circuit.open(why)
            return store

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def use(self, writer: WriterProcess) -> None:
        """Write exchanges in a separate process from now on."""
        await writer.open(self._start_here)
        self._writer, self._start = writer, writer.start

    async def close(self) -> None:
        """Finish submitted writes and close the database."""
        self._closed = True
        with suppress(StoreUnavailable):
            await self.forget_deleted()
        await self.circuit.close()
        if self.circuit.down is None:
            await self._tasks.close()
            await self._let_go()
        else:  # whatever must not be lost waits in the spool
            try:
                async with asyncio.timeout(_LAST_SECONDS):
                    await asyncio.gather(self._tasks.close(), self._let_go())
            except TimeoutError:
                if self._writer is not None:
                    self._writer.kill()  # it may be waiting for a lock

    async def _let_go(self) -> None:
        if self._writer is not None:
            await self._writer.close()
        await self._database.close()

    async def health(self) -> StoreUnavailable | None:
        """Return why the store cannot be used, or None if it can. Takes at most a second; at most a second old."""
        found = self.circuit.down
        if found is None:
            found = await self.circuit.health(_HEALTH_SECONDS)
        if found is not None and self.circuit.down is None and not self._closed:
            self._tasks.follow(self.circuit.suspect())
        return found

    def direct(self) -> Store:
        """Return a store on the same database that works even while the circuit is open. It need not be closed."""
        return Store(self._database, direct=True)

    async def ready(self) -> None:
        """Check that the database answers and that its tables are those of this version; raise otherwise."""
        require_current(await self._read(current))

    async def renew(self) -> None:
        """Reopen the database. This abandons calls that hang, and connections to a file that was replaced."""
        if not self._url:
            return
        if self._migrate:
            await upgrade(self._url)
            self._migrate = False
        opened = await open_database(address_of(self._url))
        old, self._database = self._database, opened
        if self._writer is not None:
            self._writer.renew()
        self._branches = Branches()
        self._has_index = False
        self._tasks.follow(old.close())

    async def _probe(self) -> None:
        if isinstance(self._database, Unopened):
            if self._renewing is None or self._renewing.done():
                self._renewing = self._tasks.start(self.renew())
            await asyncio.shield(self._renewing)
        writer = self._writer
        written = 0 if writer is None else writer.written
        try:
            await self._database.probe(probe, same=self.circuit.down is None)
        except StoreUnavailable as why:
            if writer is None or not is_locked_out(why):
                raise
            # The writer process may hang while it holds the lock. A probe has no time to find out.
            self._tasks.follow(writer.require_alive())
            if writer.written == written and not await writer.is_busy():  # the lock is not the writer's
                raise
        if writer is not None:
            await writer.require_alive()

    async def _guarded(self, ask: Callable[[], Awaitable[Result]], seconds: float | None = None) -> Result:
        """Call `ask` under the circuit breaker, with a timeout of `seconds`.

        Raises `StoreUnavailable` if the circuit is open, or when it opens during the call. While the spool is being
        emptied, waits a moment for the circuit to close first.
        """
        if self._direct:
            return await ask()
        circuit, loop = self.circuit, asyncio.get_running_loop()
        if self.spool is not None and self.spool.flag[0] and circuit.down is None and not self._closed:
            circuit.returns = True
            circuit.open(StoreUnavailable(_RETURNS))
        if circuit.down is not None and not (circuit.returns and await circuit.closes(_RETURN_SECONDS)):
            raise StoreUnavailable(circuit.reason(_AWAY))
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                circuit.waiting[limit] = loop.time()
                if not circuit.watched:
                    circuit.watched = True
                    loop.call_later(SLOW_SECONDS, circuit.watch)
                try:
                    return await ask()
                finally:
                    del circuit.waiting[limit]
        except TimeoutError as why:
            failure = StoreUnavailable(circuit.reason(FROZEN if seconds is None else _HELD))
            if not self._closed:
                circuit.open(failure)
            raise failure from why
        except StoreUnavailable as why:
            if not self._closed:
                circuit.open(why)
            raise

    async def _read(self, unit: Unit[Result], *, short: bool = False) -> Result:
        return await self._guarded(lambda: self._database.read(unit, short=short))

    async def _write(self, unit: Unit[Result], *, again: bool = True) -> Result:
        return await self._guarded(lambda: self._database.write(unit, again=again))

    async def secret(self, name: str) -> bytes:
        """Return 32 random bytes. The first call with a name makes them; later calls return the same."""
        found = await self._read(partial(secret_of, name=name))
        if found is not None:
            return found
        return await self._write(partial(make_secret, name=name))

    # ---------------------------------------------------------------------------------- sessions

    async def session(self, tenant: str, session: str) -> SessionRow | None:
        """Return a session by its owner and its id: that of Chat Completions, or else of the first dialect by name."""
        found = await self.session_at(session_key(tenant, session))
        return found or next(iter(await self.find(session, tenant)), None)

    async def session_at(self, key: str) -> SessionRow | None:
        """Return a session by its internal name."""
        return await self._read(partial(session_of, key=key))

    async def sessions(
        self, tenant: str | None, *, limit: int, after: str | None = None
    ) -> tuple[list[SessionRow], str | None]:
        """Return up to `limit` sessions of a tenant (None: of all), most recently used first, and the next cursor.

        Raises `InvalidRequest` if `after` is not a cursor.
        """
        if not _are_plain(tenant):
            return [], None
        query = SessionListQuery(tenant=tenant, limit=limit, after=after)
        return await self._read(partial(page_of_sessions, query=query))

    async def find(self, session: str, tenant: str | None = None, dialect: str | None = None) -> list[SessionRow]:
        """Return the sessions with this id, of all tenants and dialects unless one is named.

        Among the sessions of one tenant, that of Chat Completions comes first.
        """
        if not is_plain(session):
            return []
        rows = await self._read(partial(sessions_named, session=session))
        return [row for row in rows if tenant in {None, row.tenant} and dialect in {None, row.dialect}]

    async def delete(self, key: str) -> bool:
        """Permanently delete a session with all its data; return whether it existed."""
        return bool(await self._delete([key]))

    async def delete_named(self, tenant: str, session: str, dialect: str | None = None) -> list[str]:
        """Delete a tenant's sessions with this id, in all dialects unless one is named; return their internal names."""
        keys = [row.key for row in await self.find(session, tenant, dialect)]
        await self._delete(keys)
        return keys

    async def _delete(self, keys: Sequence[str]) -> int:
        """Delete sessions; return how many there were."""
        if self.spool is not None and self.spool.flag[0]:
            gone = frozenset(keys)
            await asyncio.to_thread(self.spool.drop, lambda key, _: key in gone)
        try:
            return await self._guarded(lambda: asyncio.shield(self._tasks.start(delete_sessions(self._database, keys))))
        finally:
            self._has_deleted = self._has_deleted or bool(keys)

    async def finish_removals(self) -> None:
        """Delete the remaining rows of sessions whose deletion or import was interrupted."""
        await self._finish(await self._read(partial(removed_sessions, at=int(time.time() * 1000))))

    async def _finish(self, keys: Sequence[str]) -> None:
        """Delete the remaining rows of these sessions. A session that was created again meanwhile stays."""
        self._has_deleted = self._has_deleted or bool(keys)
        work = partial(delete_sessions, self._database, keys, begins=False)
        await self._guarded(lambda: asyncio.shield(self._tasks.start(work())))

    async def forget_deleted(self) -> None:
        """Remove deleted data from SQLite's write-ahead log too. If the log is in use, the next call tries again."""
        address = address_of(self._url) if self._has_deleted and self.circuit.down is None else None
        if isinstance(address, SqliteFile):
            self._has_deleted, is_empty = False, False
            try:
                is_empty = await asyncio.to_thread(empty_log, address.path)
            finally:
                self._has_deleted = self._has_deleted or not is_empty

    def export(self, key: str) -> AsyncIterator[JsonObject]:
        """Yield the records of a session as JSON objects; see `archive`.

        Raises `NotFound` if the session does not exist.
        """
        return export_session(self._database, key)

    async def load(self, tenant: str, session: str, records: Iterable[Mapping[str, Any]]) -> SessionRow:
        """Create a session from the records of an export; see `archive`.

        Raises `Conflict` if a session with this id exists, and `InvalidRequest` if a record is wrong. The message names
        the line.
        """
        archive = await asyncio.to_thread(read_records, records)
        loading = self._tasks.start(load_session(self._database, tenant, session, archive))
        return await self._guarded(lambda: asyncio.shield(loading))

    async def fork(self, tenant: str, source_key: str, node: str, as_id: str) -> SessionRow:
        """Create a session with the history of another one up to `node`.

        A long history takes many writes. All of them complete even if the caller is cancelled.

        Raises `NotFound` if the tenant has no such session or the session has no such node, `Conflict` if a session
        with this id exists or the new one is deleted while it is made, and `InvalidRequest` if the id cannot be stored.
        """
        return await asyncio.shield(self._tasks.start(fork_session(self._database, tenant, source_key, node, as_id)))

    # --------------------------------------------------------------------------------- histories

    async def recall(self, question: HistoryQuery) -> HistorySnapshot:
        """Return what is known about the conversation that a request belongs to; see `history.recall`."""
        unit = partial(recall, question=question, branches=self._branches)
        try:
            if self._database.blocks:
                with suppress(TooLong):
                    return await self._read(partial(unit, most=_FEW), short=True)
                return await self._read(unit)
            return await self._read(unit, short=True)
        except BeingRemoved:
            await self._finish([session_key(question.tenant, question.session, question.dialect)])
            return await self.recall(question)

    async def infer(self, request: UnnamedRequest) -> Inferred:
        """Return the session that a request without an id belongs to, or why none was found; see `evidence`."""
        if not is_plain(request.tenant):
            return Inferred()
        return await self._read(partial(infer, request=request), short=True)

    async def provider_place(self, tenant: str, dialect: str, name: str) -> tree.ProviderPlace | None:
        """Return the session and the reply that came with a provider's id; None if the tenant did not get it here."""
        if not is_plain(tenant):
            return None
        unit = partial(tree.provider_place, tenant=tenant, dialect=dialect, name=name)
        return await self._read(unit, short=True)

    async def foreign_ids(self, tenant: str, dialect: str, names: Collection[str]) -> list[str]:
        """Return those of a provider's ids that the tenant did not get here."""
        if not is_plain(tenant):
            return list(names)
        return await self._read(partial(tree.foreign_ids, tenant=tenant, dialect=dialect, names=names))

    async def replies_with(self, tenant: str, dialect: str, names: Collection[str]) -> list[NodeRow]:
        """Return the tenant's replies that came with any of these ids of a provider."""
        if not is_plain(tenant):
            return []
        return await self._read(partial(tree.replies_with, tenant=tenant, dialect=dialect, names=names))

    async def keep_provider_ids(
        self, tenant: str, session: str, dialect: str, names: Collection[str], node: str
    ) -> None:
        """Record that these ids of a provider came with the reply at a node of a session."""
        key = session_key(tenant, session, dialect)
        unit = partial(tree.keep_provider_ids, key=key, tenant=tenant, dialect=dialect, names=names, node=node)
        await self._write(unit)

    async def path(self, key: str, node: str, *, below: int = 0) -> list[NodeRow]:
        """Return the branch that ends at `node`, oldest first; empty if it is not stored.

        With `below`, only `node` and its ancestors deeper than that.
        """
        if not node or not is_plain(node):
            return []
        return await self._read(partial(tree.path_to, key=key, node=node, below=below))

    async def portions(self, key: str, nodes: Sequence[str]) -> AsyncIterator[list[NodeRow]]:
        """Yield the rows of these nodes of a branch in portions, oldest first.

        Raises `NotFound` if the session is deleted meanwhile.
        """
        start, count = 0, AT_FIRST
        while some := nodes[start : start + count]:
            rows = await self._read(partial(tree.rows_of, key=key, nodes=some))
            if len(rows) < len(some):
                raise NotFound("The session was deleted while it was read.")
            yield rows
            start, count = start + count, next_count(count, sum([len(row.message.raw) for row in rows]))

    async def lineage(self, key: str, ends: Collection[str]) -> Lineage:
        """Return the branches that end at these nodes, without their texts; see `history.Lineage`."""
        asked = list(filter(is_plain, ends))
        return await self._read(partial(lineage_of, key=key, ends=asked)) if asked else Lineage()

    async def branches(self, key: str) -> list[BranchRow]:
        """Return the leaves of the tree, newest first."""
        return await self._read(partial(tree.leaves, key=key))

    async def instructions(self, key: str, version: str | None = None) -> InstructionsRow | None:
        """Return a version of the instructions. If `version` is None, return the newest that was answered."""
        if version is not None and not is_plain(version):
            return None
        return await self._read(partial(tree.instructions_of, key=key, version=version))

    async def cut(self, key: str, nodes: Collection[str], policy: str, agent: str | None) -> StandingCut | None:
        """Return the newest cut (the greatest position) of a policy and an agent at any of these nodes."""
        if not nodes or not _are_plain(policy, agent):
            return None
        return await self._read(partial(cuts.newest_cut, key=key, branch=nodes, policy=policy, agent=agent))

    async def cut_at(self, key: str, node: str, policy: str, agent: str | None) -> Cut | None:
        """Return the cut that was made at exactly this node."""
        if not _are_plain(node, policy, agent):
            return None
        unit = partial(cuts.standing_at, key=key, node=node, policy=policy, agent=agent)
        found = await self._read(unit)
        return None if found is None else found.cut

    async def summaries(self, key: str, head: str, policy: str, agent: str | None) -> list[tuple[Summary, int]]:
        """Return the summaries of the branch that ends at `head`, as `history.summaries_of` does."""
        if not head or not _are_plain(head, policy, agent):
            return []
        return await self._read(partial(history.summaries_of, key=key, head=head, policy=policy, agent=agent))

    # --------------------------------------------------------------------------------- summaries

    async def keep_summary(self, key: str, row: SummaryRow, policy: str | None = "") -> bool:
        """Store a summary by a model, or the attempt at one, and book its cost; see `summaries.keep_summary`.

        `policy` names the policy that asked for it, for the statistics. None means that it is counted there already.
        """
        if self.masker is not None:
            row = self.masker.summary(row)
        return await self._write(partial(summaries.keep_summary, key=key, row=row, policy=policy))

    async def summary_rows(self, key: str) -> list[SummaryRow]:
        """Return all summaries by a model that were tried for the session, newest first."""
        return await self._read(partial(summaries.summary_rows, key=key))

    async def ready_summary(
        self, key: str, nodes: Collection[str], recipe: str
    ) -> tuple[SummaryRow | None, SummaryRow | None]:
        """Return the ready summary of a recipe that covers most of a branch, and the newest attempt; None if none.

        A summary belongs to the branch if its `node` or its `tip` is among `nodes`.
        """
        if not nodes or not is_plain(recipe):
            return None, None
        return await self._read(partial(summaries.ready_summary_on, key=key, branch=nodes, recipe=recipe))

    async def hidden(self, session: SessionRow, nodes: Collection[str]) -> dict[str, Hidden]:
        """Return what was hidden from the client, by node, for those of `nodes` that have something hidden."""
        if not session.hidden or not nodes:
            return {}
        return await self._read(partial(hidden_at, key=session.key, nodes=nodes, total=session.hidden))

    async def lease(self, key: str, name: str, holder: str, at: int, until: int) -> bool:
        """Take the lease `name` of a session at the time `at`, until `until`; return whether `holder` has it now.

        A lease that has expired by `at` is free. Its holder may extend it. Returns False if the session does not exist.
        """
        return await self._write(partial(summaries.take_lease, key=key, name=name, holder=holder, at=at, until=until))

    async def release(self, key: str, name: str, holder: str) -> None:
        """Release a lease. Does nothing if another holder has it."""
        await self._write(partial(summaries.release_lease, key=key, name=name, holder=holder))

    # ------------------------------------------------------------------------------------ search

    async def index_texts(self, seconds: float) -> bool:
        """Index messages for at most `seconds`; return whether all stored messages are indexed."""
        if not self._has_index:
            await make_search_index(self._url)
            self._has_index = True
        until = time.monotonic() + seconds
        while sessions := await self._read(search.due):
            for key, state in sessions:
                is_whole, after = False, ROOT
                while not is_whole:
                    if time.monotonic() > until:
                        return False
                    rows = await self._read(partial(search.missing, key=key, after=after))
                    terms = await asyncio.to_thread(_terms_of, rows)
                    is_whole, after = len(rows) < search.AT_ONCE, max((row.node for row in rows), default=after)
                    indexed = state if is_whole else None
                    await self._write(partial(search.add, key=key, terms=terms, state=indexed))
        while await self._write(search.purge):
            self._has_deleted = True
            if time.monotonic() > until:
                break
        return True

    async def find_texts(self, words: Sequence[str], tenant: str | None) -> list[FoundTexts] | None:
        """Return the messages that may hold all of these words; None if the index cannot tell."""
        dialect = "sqlite" if isinstance(self._database, SqliteDatabase) else "postgresql"
        asked = search.question_of(words, dialect)
        if asked is None or not _are_plain(asked, tenant) or not await self.index_texts(_INDEX_SECONDS):
            return None
        return await self._read(partial(search.find, asked=asked, tenant=tenant))

    # ------------------------------------------------------------------------------------- texts

    async def body(self, key: str, prefix: str) -> tuple[str, Message] | None:
        """Return name and message of the text whose name begins with `prefix`, 8 to 40 hexadecimal digits.

        None if there is no such text, or more than one.
        """
        return await self._read(partial(tree.message_of, key=key, prefix=prefix))

    async def tools(self, key: str, body: str) -> bytes | None:
        """Return the JSON text of the tools with this name (`ExchangeRow.tools`)."""
        if not is_plain(body):
            return None
        return await self._read(partial(tree.tools_of, key=key, body=body))

    async def first_tools(self, key: str) -> FirstTools | None:
        """Return the tools of the session's first request that had any; None if no such request was settled."""
        return await self._read(partial(exchanges.first_tools, key=key))

    # --------------------------------------------------------------------------------- exchanges

    def pack(self, key: str, messages: Sequence[Body]) -> Packing | None:
        """Begin to pack the messages of a long request, for `begin`. None if `begin` packs them itself."""
        if self.masker is not None or not is_long(messages):
            return None
        return self._tasks.start(asyncio.to_thread(packed_rows, key, messages))

    def begin(self, opening: Opening, packing: Packing | None = None) -> asyncio.Future[None]:
        """Store a request with its new messages. Idempotent. The future completes when they are stored.

        `packing` is the result of `pack`.
        """
        named = ("session", "tenant", "exchange", "model", "agent", "policy")
        try:
            require_plain(**{name: getattr(opening, name) for name in named})
        except InvalidRequest as why:
            return _refused(why)
        if self.circuit.down is not None:
            return _refused(StoreUnavailable(self.circuit.down.message))
        if self.masker is not None:
            opening = self.masker.opening(opening)
        if is_long(opening.messages):
            future: asyncio.Future[None] = self._tasks.start(begin_long(self._database, opening, packing))
        else:
            future = self._start(opening)
        future.add_done_callback(_noticed)  # the failure may be reported another way, by `settle`
        return future

    async def began(self, future: asyncio.Future[None]) -> None:
        """Wait for the future that `begin` returned."""
        if not future.done() or future.exception() is not None:  # the store is usually faster than the upstream
            await self._guarded(lambda: asyncio.shield(future), _STORED_SECONDS)

    async def settle(self, settlement: Settlement, began: asyncio.Future[None] | None = None) -> Settled:
        """Store how an exchange ended, all of it or nothing. Idempotent: a second call returns the first one's result.

        The result is empty if the session was deleted meanwhile. `began` is the future of `begin` if that may not be
        done yet. If possible, beginning and end then share one transaction.
        """
        return await self._guarded(lambda: self._settle(settlement, began), _STORED_SECONDS)

    async def _settle(self, settlement: Settlement, began: asyncio.Future[None] | None) -> Settled:
        # A long beginning takes several writes, so wait for it. If the beginning failed, raise, so that both are stored
        # later: an end without its beginning would only be counted, as if the session had been deleted.
        if began is not None and (isinstance(began, asyncio.Task) or began.done()):
            await asyncio.shield(began)
        if self.masker is not None:
            settlement = self.masker.settlement(settlement)
        if is_long(settlement.messages):
            long = await asyncio.shield(self._tasks.start(settle_long(self._database, settlement)))
            if long is not None:
                return long
        settled: Settled = await self._start(settlement)
        if began is not None:
            await asyncio.shield(began)
        self._remember(settlement, settled)
        return settled

    def _remember(self, settlement: Settlement, settled: Settled) -> None:
        """Cache the messages that an exchange added to its branch, so that the next request need not read them.

        If some of the nodes existed before, nothing is cached: their stored texts may differ from these.
        """
        if not settled.are_new or len(settled.replies) != 1:
            return
        key = session_key(settlement.tenant, settlement.session, settlement.dialect)
        arrivals = settlement.arrivals[: len(settlement.messages)]
        asked = zip(settled.nodes, zip_longest(settlement.messages, arrivals), strict=True)
        stored = [(node, body, arrival) for node, (body, arrival) in asked]
        self._branches.extend(key, settlement.base, [*stored, (settled.replies[0], settlement.replies[0].body, None)])

    def _start_here(self, exchange: Exchange) -> asyncio.Future[Any]:
        return self._database.start(exchange)

    async def interrupt_pending(self, at: int, marks: Collection[str] | None = None) -> int:
        """Settle pending exchanges of a process that ended as interrupted; return how many; see `exchanges`.

        If the process is alive after all (another worker, another host), its own settlement still counts.
        """
        return await self._write(partial(exchanges.interrupt_pending, at=at, marks=marks))

    async def exchange(self, exchange_id: str) -> ExchangeRow | None:
        """Return an exchange by its id, of any tenant."""
        if not is_plain(exchange_id):
            return None
        return await self._read(partial(exchanges.exchange_of, exchange=exchange_id))

    async def exchange_with(self, tenant: str, dialect: str, response: str) -> ExchangeRow | None:
        """Return the tenant's exchange with this response id of the provider; see `exchanges`."""
        if not _are_plain(tenant, response):
            return None
        return await self._read(partial(exchanges.exchange_with, tenant=tenant, dialect=dialect, response=response))

    async def unfinished(self, tenant: str, dialect: str, response: str) -> ExchangeRow | None:
        """Return the tenant's exchange that waits for this response of the provider; see `exchanges.unfinished`."""
        if not _are_plain(tenant, response):
            return None
        unit = partial(exchanges.unfinished, tenant=tenant, dialect=dialect, response=response)
        return await self._read(unit)

    async def exchanges(
        self, key: str, *, limit: int, after: str | None = None
    ) -> tuple[list[ExchangeRow], str | None]:
        """Return up to `limit` exchanges of a session, newest first, and the next cursor.

        Raises `InvalidRequest` if `after` is not a cursor.
        """
        cursor = None if after is None else Cursor.read(after)
        return await self._read(partial(exchanges.exchanges_page, key=key, limit=limit, after=cursor))

    # -------------------------------------------------------------------------------- statistics

    async def stats_by(self, query: StatsQuery, groups: Sequence[Group]) -> dict[Group, list[StatsRow]]:
        """Return the sums by each of several groupings; see `rollups`."""
        if not _are_plain(query.tenant, query.policy, query.model):
            return {name: [] for name in groups}
        return await self._read(partial(rollups.stats_by, query=query, groups=groups))

    async def stats_and_total(self, query: StatsQuery) -> tuple[list[StatsRow], StatsRow]:
        """Return the sums of each group, and the total."""
        if not _are_plain(query.tenant, query.policy, query.model):
            return [], StatsRow(group="total", tenant=query.tenant, sessions=0, sums=dict.fromkeys(rollups.SUMS, 0))
        return await self._read(partial(rollups.stats_and_total, query=query))

    async def fold(self, now: int) -> bool:
        """Fold a batch of sums; return False if none are left. `now` is in milliseconds since 1970. See `rollups`."""
        return await self._write(partial(rollups.fold, now=now // rollups.HOUR))

    async def listed(self, query: SessionListQuery) -> tuple[list[ListedSession], str | None]:
        """Return a page of sessions in the query's order, and the cursor of the next page; see `sessions`."""
        if not _are_plain(query.tenant, query.model, query.key, query.name, query.agent):
            return [], None
        return await self._read(partial(list_sessions, query=query))

    async def forms(self, key: str, exchange: str) -> dict[str, Message]:
        """Return, by node, the differing texts in which clients sent messages back, up to an exchange."""
        return await self._read(partial(tree.forms_of, key=key, exchange=exchange))

    async def sweep(self, *, before: int | None, most: int | None) -> int:
        """Delete a batch of sessions last used before `before`, or in excess of `most` sessions; return how many."""
        keys = await self._read(partial(sessions_to_delete, before=before, most=most))
        return await self._delete(keys)

    async def erase(self, tenant: str) -> int:
        """Delete all data of a tenant, statistics included; return how many sessions there were."""
        number = 0
        last: str | None = None
        # One pass in order of names. Otherwise a tenant that keeps sending requests would keep this going forever.
        while keys := await self._read(partial(sessions_of, tenant=tenant, after=last)):
            number += await self._delete(keys)
            last = keys[-1]
        await self._write(partial(rollups.forget_tenant, tenant=tenant))
        return number

    async def spent(self, tenant: str, since: int) -> float:
        """Return the dollars that a tenant spent since a time (milliseconds since 1970), rounded down to the hour."""
        return await self._read(partial(rollups.spent, tenant=tenant, since=since))

    async def spend(self, tenant: str, key: str, at: int, dollars: float) -> None:
        """Add dollars that were spent with a named key; `at` is in milliseconds since 1970."""
        unit = partial(rollups.spend, tenant=tenant, key=key, at=at, dollars=dollars)
        await self._write(unit, again=False)  # a retry might add it twice

    async def spent_with(self, key: str, since: int) -> float:
        """Return the dollars that were spent with keys of this name since a time, rounded down to the day."""
        return await self._read(partial(rollups.spent_with, key=key, since=since))


def is_long(messages: Sequence[Body]) -> bool:
    """Tell whether these messages are too many or too large for one transaction."""
    size = 0
    for body in messages:
        size += len(body.message.raw)
    return len(messages) > _LONG or size > PORTION_BYTES


def _refused(why: Exception) -> asyncio.Future[None]:
    """Return a future that has already failed."""
    refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    refused.set_exception(why)
    refused.exception()  # marks it as retrieved: callers need not ask for it
    return refused


def _terms_of(rows: Iterable[NodeRow]) -> list[tuple[str, str]]:
    texts = {row.node: "" if is_withheld(row.message) else sanitize(row.message.readable()) for row in rows}
    return [(node, search.terms_of(text)) for node, text in texts.items()]


def _noticed(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


def _are_plain(*names: str | None) -> bool:
    return all(name is None or is_plain(name) for name in names)
