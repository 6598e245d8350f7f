"""Everything that is kept: sessions, trees of messages, exchanges, cuts. One code for SQLite and PostgreSQL.

    store       what the other rooms use; start here
    records     what goes in and what comes out, as plain data
    history     what is known of a conversation when a request comes in: one read
    evidence    which session a request without an id belongs to
    exchanges   how an exchange begins and how it is settled: one transaction each
    portions    long requests, written so that others write between
    sessions    made, listed by size and cost, deleted
    tree        a session's rows: its nodes, texts, instructions, what clients were not shown
    cuts        where the views of a branch were trimmed up to; changes and cuts as text
    summaries   summaries by a model, and the leases of those who make them
    rollups     sums over exchanges, for statistics and budgets
    masking     secrets masked before they are stored
    search      the full-text index of messages
    archive     export, import, fork
    schema      the tables
    migrate     making the tables, and bringing them up to date
    convert     sessions moved from the tables of the old layout
    packing     how values are packed in the tables
    database    what a database offers: units of work; compiled statements; URLs; errors
    circuit     whether the store can be used; asks again and again while it cannot
    spool       a file of what waits until it can
    sqlite      one writer thread with group commit, and readers
    postgres    a pool of connections
    writer      a process beside the server that writes exchanges
    functions   exchanges as PostgreSQL's own functions take them, many in one statement

The rules: nothing is overwritten (nodes, texts, instructions, hidden rounds and summaries are append-only, and triggers
see to it); a unit of work is one transaction; whoever writes to a session locks its row in `sessions` first.
"""

from __future__ import annotations

from proxy.store.database import SqliteFile, address_of
from proxy.store.evidence import Doubt, Inferred, UnnamedRequest
from proxy.store.history import Branches, Lineage, recall
from proxy.store.masking import CONTENT, MARK, Masker, Withholder, is_withheld, require_content
from proxy.store.migrate import downgrade, upgrade
from proxy.store.packing import sanitize
from proxy.store.portions import AT_FIRST
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
