"""Writes long requests and deletes long sessions in portions, so that other writes can run in between.

Texts are named by their content, and nodes by their content and history, so storing some of them early changes nothing
yet. The last transaction makes them count: it stores the exchange's row, which refers to the texts, or the head, which
refers to the nodes. If a process is killed before that, a retry of the request finds the stored parts, and deleting the
session deletes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import bindparam, select

from proxy.conversation import ROOT, Witness, fingerprints, known_prefix
from proxy.store import search, sessions, tree
from proxy.store.database import Database, GatheringConnection, StoreConnection
from proxy.store.evidence import evidence_rows, insert_evidence
from proxy.store.exchanges import asked_nodes, begin, settle_placed, write_exchanges
from proxy.store.packing import TEXTS, pack_all
from proxy.store.records import Body, Exchange, Opening, Settled, Settlement, session_key
from proxy.store.schema import BODIES, NODES, PENDING, insert_many_new, matching
from proxy.store.sessions import delete_several, locked_session, open_sessions, remove_several

_ROWS: Final = 512
"""Most messages of one transaction. Each transaction rewrites the index pages that its rows are scattered over."""
PORTION_BYTES: Final = 250_000
"""Bytes of texts in one transaction: it ends with the message that exceeds them."""
_ALONE: Final = 4
"""Factor for both limits on PostgreSQL. No other write waits for the transaction there, and each COMMIT waits for the
disk."""
_ROW_BYTES: Final = 1_000
"""Writing a row takes as long as writing so many bytes of text."""

TextRow: TypeAlias = dict[str, Any]
"""A row of `bodies`, with its text packed."""
Packing: TypeAlias = asyncio.Future[list[TextRow]]
"""The packed texts of a request, once they are ready."""
Stored = TypeVar("Stored")


AT_FIRST: Final = 8  # rows of the first portion when many rows are read
_MOST_READ: Final = 512  # most rows of a later portion
_READ_BYTES: Final = 1_000_000
"""After a portion with fewer bytes of texts than this, the next one has more rows; after one with more than four times
as many, fewer."""


def next_count(count: int, size: int) -> int:
    """Return how many rows to read next, after `count` rows whose texts had `size` bytes."""
    if size < _READ_BYTES:
        return min(2 * count, _MOST_READ)
    return count if size <= 4 * _READ_BYTES else max(1, count // 4)


def size_of(item: Exchange) -> int:
    """Return about how many bytes writing an exchange costs, including its rows."""
    texts = [len(body.message.raw) for body in item.messages]
    if isinstance(item, Opening):
        texts += [len(item.tools or b""), *(len(message.raw) for message in item.instructions or ())]
    else:
        texts += [len(reply.body.message.raw) for reply in item.replies]
    return sum(texts) + _ROW_BYTES * len(texts)


# ------------------------------------------------------------------------------------------------------ begin


async def begin_long(database: Database, opening: Opening, packing: Packing | None = None) -> None:
    """Store a long request with its new messages; see `exchanges.begin`. `packing` gives their packed rows."""
    key = session_key(opening.tenant, opening.session, opening.dialect)
    rows = await (packing or asyncio.to_thread(packed_rows, key, opening.messages))
    made_at: int | None = None
    for some in portions_of(rows, lambda row: len(row["text"]), in_order=database.in_order):
        made_at = await database.write(partial(_keep_texts, opening=opening, rows=some, made_at=made_at), durable=False)
        if made_at is None:
            break
    await database.write(partial(_begin, opening=opening, made_at=made_at), durable=False)


def packed_rows(key: str, messages: Iterable[Body]) -> list[TextRow]:
    """Return the rows of messages' texts, each once, sorted by name.

    Sorted, the rows of a transaction are adjacent in the index, and concurrent inserts cannot deadlock.
    """
    bodies = sorted(tree.named_bodies(messages).items())
    packed = pack_all([body.message.raw for _, body in bodies], TEXTS)
    return [
        {"session": key, "body": name, "tokens": body.tokens, "text": text}
        for (name, body), text in zip(bodies, packed, strict=True)
    ]


def portions_of(
    items: Iterable[Stored], size_of: Callable[[Stored], int], *, in_order: bool = True
) -> Iterator[list[Stored]]:
    """Split texts, or their rows, into portions. `size_of` returns the bytes of one; `in_order` as in `Database`."""
    times = 1 if in_order else _ALONE
    some: list[Stored] = []
    size = 0
    for item in items:
        some.append(item)
        size += size_of(item)
        if len(some) == times * _ROWS or size > times * PORTION_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def _keep_texts(connection: StoreConnection, opening: Opening, rows: list[TextRow], made_at: int | None) -> int | None:
    """Store some texts; return when the session was created, or None if it is not the one created at `made_at`."""
    key = rows[0]["session"]
    if made_at is None:
        open_sessions(connection, [opening])
    session = locked_session(connection, key)
    if session is None or made_at not in {None, session.created_at}:
        return None
    insert_many_new(connection, BODIES, rows)
    return session.created_at


def _begin(connection: StoreConnection, opening: Opening, made_at: int | None) -> None:
    """Store the exchange's row. If the session was deleted since `made_at`, store its texts again too."""
    session = locked_session(connection, session_key(opening.tenant, opening.session, opening.dialect))
    if session is None or session.created_at != made_at:
        write_exchanges(connection, [opening])
        return
    gathered = GatheringConnection(connection)
    newest = {session.key: session.instructions}
    begin(gathered, [opening], newest, said=tree.said_before(gathered, [opening]), bodies=False)
    gathered.flush()


# ----------------------------------------------------------------------------------------------------- settle

_IS_UNDER_WAY: Final = select(PENDING.c.id).where(*matching(PENDING), PENDING.c.id == bindparam("exchange"))


class _Line(Struct, kw_only=True):
    """The messages of a request as a line of nodes."""

    new_nodes: list[tuple[str, str, tree.NewNode]]  # (parent, node, new_node)
    contents: list[bytes]
    places: dict[str, tree.NodePlace]  # of the base, and of the stored nodes

    @property
    def names(self) -> list[str]:
        return [name for _, name, _ in self.new_nodes]


async def settle_long(database: Database, settlement: Settlement) -> Settled | None:
    """Settle a long exchange, as `exchanges.write_exchanges` does.

    Returns None if the place of its messages is not known in advance, or the exchange is not in progress. Then the
    caller must use `write_exchanges`.
    """
    # An append attaches to the session's head at the time when it is settled.
    if not settlement.replies or settlement.carried or settlement.kind == "append":
        return None
    key = session_key(settlement.tenant, settlement.session, settlement.dialect)
    line = await asyncio.to_thread(_line_of, settlement)
    names = line.names
    stored = await database.read(partial(_look_up, key=key, settlement=settlement, line=line))
    if stored is None:
        return None
    count = _ROWS if database.in_order else _ALONE * _ROWS
    made = partial(_node_rows, key, settlement, line, count)
    rows = await asyncio.to_thread(made, stored)
    for start in range(stored, len(names), count):
        nodes, evidence = rows
        unit = partial(_keep_nodes, key=key, exchange=settlement.exchange, nodes=nodes, evidence=evidence)
        # The next rows are made while these are written.
        kept, rows = await asyncio.gather(database.write(unit, durable=False), asyncio.to_thread(made, start + count))
        if not kept:
            return None
    places = [line.places[name] for name in names]
    return await database.write(partial(settle_placed, settlement=settlement, line=places))


def _line_of(settlement: Settlement) -> _Line:
    names, contents = fingerprints(settlement.base, [body.message for body in settlement.messages])
    parents = [settlement.base, *names]
    return _Line(
        new_nodes=list(zip(parents, names, asked_nodes(settlement), strict=False)), contents=contents, places={}
    )


def _look_up(connection: StoreConnection, key: str, settlement: Settlement, line: _Line) -> int | None:
    """Return how many of the nodes are stored, or None if their base is not."""
    names, base = line.names, settlement.base
    stored = known_prefix(names, partial(tree.depths_of, connection, key))
    last = names[stored - 1] if stored else base
    found = {ROOT: tree.root_of(settlement.tenant)} | tree.places_of(connection, key, [last])
    if last not in found:
        return None
    # Of the nodes before the last one, only names and depths are used.
    above = found[last].depth - stored
    line.places = {name: replace(found[last], node=name, depth=above + at) for at, name in enumerate(names[:stored], 1)}
    line.places[last] = found[last]
    return stored


def _node_rows(
    key: str, settlement: Settlement, line: _Line, count: int, start: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of a portion of the nodes, and the evidence rows of upstream's replies among them."""
    stop = start + count
    nodes = tree.node_rows(key, line.new_nodes[start:stop], line.places, line.contents[start:stop])
    witness = Witness(tenant=settlement.tenant, dialect=settlement.dialect)
    brought = [line.new_nodes[at] for at in settlement.relayed if start <= at < stop]
    evidence = evidence_rows(key, witness, [(name, new_node.body.message) for _, name, new_node in brought])
    return nodes, evidence


def _keep_nodes(
    connection: StoreConnection, key: str, exchange: str, nodes: list[dict[str, Any]], evidence: list[dict[str, Any]]
) -> bool:
    """Store some nodes if the exchange is still in progress; return whether it is. It is deleted with its session."""
    locked_session(connection, key)
    if connection.execute(_IS_UNDER_WAY, {"key": key, "exchange": exchange}).one_or_none() is None:
        return False
    insert_many_new(connection, NODES, nodes)
    insert_evidence(connection, evidence)
    return True


# ----------------------------------------------------------------------------------------------------- delete

_DELETED: Final = 500  # most rows of one transaction, which takes some 10 ms
_SESSIONS: Final = 10  # most sessions of one transaction; most have few rows


async def delete_sessions(database: Database, keys: Sequence[str], *, begins: bool = True) -> int:
    """Delete sessions with all their rows; return how many existed.

    On SQLite, a session with many rows is deleted in portions. After the first one it no longer exists: a later write
    to it first deletes the remaining rows. Without `begins`, only the remains of deleted sessions are deleted; sessions
    that were created again stay.
    """
    number, left = 0, list(keys) if begins or database.in_order else []
    while left:
        some = left[:_SESSIONS]
        if not database.in_order:  # PostgreSQL: no other write waits for this one
            number += await database.write(partial(delete_several, keys=some))
            del left[:_SESSIONS]
            continue
        done = await database.write(partial(remove_several, keys=some, most=_DELETED // _SESSIONS, begins=begins))
        number += sum(each is not None for each in done)
        key, whole = some[len(done) - 1], done[-1]
        while whole is False and await database.write(partial(search.remove_some, key=key)):
            pass
        while whole is False:
            whole = await database.write(partial(sessions.remove_some, key=key, most=_DELETED, begins=False))
        del left[: len(done)]
    return number
