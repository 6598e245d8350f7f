"""Persistent storage: sessions, message trees, exchanges, cuts. One code base for SQLite and PostgreSQL.

    store       the interface for the other rooms; start here
    records     the inputs and outputs, as plain data
    history     reads what is known about a conversation when a request comes in, in one read
    evidence    finds the session of a request without an id
    exchanges   begins and settles exchanges, in one transaction each
    portions    writes long requests in portions, so that other writes get their turn
    sessions    creates, lists and deletes sessions
    tree        the rows of a session: nodes, texts, instructions, and what was hidden from clients
    cuts        the trim boundaries of branches; changes and cuts as text
    summaries   summaries by a model, and the leases of their workers
    rollups     sums over exchanges, for statistics and budgets
    masking     masks secrets before they are stored
    search      the full-text index of messages
    archive     export, import, fork
    schema      the tables
    migrate     creates the tables and migrates them
    convert     moves sessions from the tables of the old layout
    packing     packs values for the tables
    database    the interface of a database: units of work, compiled statements, URLs, errors
    circuit     the circuit breaker of the store; probes the database while it is unavailable
    spool       a file of records that wait while the store is unavailable
    sqlite      one writer thread with group commit, and readers
    postgres    a pool of connections
    writer      a process beside the server that writes exchanges
    functions   writes exchanges with PostgreSQL functions, many in one statement

The rules:

- Nothing is overwritten. Nodes, texts, instructions, hidden rounds and summaries are append-only; triggers enforce it.
- A unit of work is one transaction.
- A write to a session locks the session's row in `sessions` first.
"""

from __future__ import annotations

from proxy.store.database import SqliteFile, address_of
from proxy.store.evidence import Doubt, Inferred, UnnamedRequest
from proxy.store.history import Branches, Lineage, recall
from proxy.store.masking import CONTENT, MARK, Masker, Withholder, is_withheld, require_content
from proxy.store.migrate import downgrade, upgrade
from proxy.store.packing import sanitize
from proxy.store.portions import AT_FIRST, Packing
from proxy.store.records import (
    FAILURES,
    Body,
    BranchRow,
    Cursor,
    ExchangeFigures,
    ExchangeRow,
    HistoryQuery,
    HistorySnapshot,
    InstructionsRow,
    Kept,
    Mark,
    NodeRow,
    Opening,
    ProviderState,
    Reply,
    SessionRow,
    Settled,
    Settlement,
    Source,
    StandingCut,
    Status,
    SummaryRow,
    SummaryStatus,
    session_key,
)
from proxy.store.rollups import HOUR, HOURLY, Group, StatsQuery, StatsRow
from proxy.store.schema import METADATA, SUMS
from proxy.store.search import FoundTexts
from proxy.store.sessions import ListedSession, SessionListQuery, Sort
from proxy.store.spool import Room, Spool, SpooledRecord, spool_name, waiting_beside
from proxy.store.store import Store
from proxy.store.writer import CAN_FORK, WriterProcess, fork_writer, set_up_process
