"""Everything that is kept: sessions, trees of messages, exchanges, cuts. One code for SQLite and PostgreSQL.

    store       what the floors above use: read it first
    records     what goes in and comes out, as plain data
    opening     how an exchange begins
    settling    how it ends: one transaction
    spot        where its messages go then
    standing    how session and exchange stand at that moment
    recall      what is known when a request comes in: one reading
    appending   what of it an append goes on from
    recollection
                what is asked and told there, as plain data
    branches    what is remembered of branches that are resent
    decoded     what is remembered of cuts that were read
    sessions, tree, texts, cuts, exchanges, secret
                units of work on the tables of that name
    lineage     names and sizes along the branches that receipts speak of
    summaries, hidden, leases
                the same, for what stands beside the messages: summaries by a model, rounds that the
                client was not shown, who alone may make something just now
    calls       which tools the newest reply calls
    archive     a session as records, to take away
    loading     a session from such records
    reading     these records, checked
    fork        a session from another one's history
    schema      the tables
    encoding    changes as text
    cursor, plain, amounts
                places in a list; texts and numbers that can be stored
    database    what the store needs of a database: units of work, read or written
    connection  what a unit sees of it: a connection, and rows
    sqlite      one writer with group commit, and readers
    jobs        units that wait for it, and who is told what came of them
    sqlite_file the file, made and connected to
    statements  SQLAlchemy's statements on a connection of `sqlite3`
    holding     the same, where the rows of several units are written together
    postgres    a pool of connections
    address     what a URL says
    failures    which errors mean that the database cannot be used
    migrate     making the tables, and bringing them up to date

The rules: nothing is overwritten (nodes, texts, instructions, hidden rounds and summaries are append-only,
and triggers see to it); a unit of work is one transaction; whoever writes to a session locks its row in
`sessions` first.
"""

from __future__ import annotations

from proxy.store.branches import Branches
from proxy.store.database import SqliteFile, address_of
from proxy.store.encoding import decode_cut, encode_cut
from proxy.store.lineage import Lineage
from proxy.store.migrate import downgrade, upgrade
from proxy.store.plain import sanitize
from proxy.store.recall import recall
from proxy.store.recollection import HistoryQuery, HistorySnapshot
from proxy.store.records import (
    Body,
    ExchangeRow,
    Kept,
    Mark,
    NodeRow,
    Opening,
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
from proxy.store.schema import METADATA
from proxy.store.store import Store

__all__ = [
    "METADATA",
    "Body",
    "Branches",
    "ExchangeRow",
    "HistoryQuery",
    "HistorySnapshot",
    "Kept",
    "Lineage",
    "Mark",
    "NodeRow",
    "Opening",
    "Reply",
    "SessionRow",
    "Settled",
    "Settlement",
    "Source",
    "SqliteFile",
    "StandingCut",
    "Status",
    "Store",
    "SummaryRow",
    "SummaryStatus",
    "address_of",
    "decode_cut",
    "downgrade",
    "encode_cut",
    "recall",
    "sanitize",
    "session_key",
    "upgrade",
]
