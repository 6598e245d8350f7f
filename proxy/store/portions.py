"""Long requests, written in portions, so that others write between them. And long sessions, deleted so.

A text is named by its content, and a node by all that comes before it too: what is stored of a long request early says
nothing yet. The exchange's row makes its texts count, and the head its nodes, in a last transaction. Whoever is killed
before that leaves what the same request finds there when it is sent again, and what goes with the session.
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
"""Messages of one transaction: each writes anew the pages of the indexes that it adds to, here and there."""
PORTION_BYTES: Final = 250_000
"""Of their texts: the transaction ends with the message that goes beyond."""
_ALONE: Final = 4
"""So many times as much where nobody else waits for the transaction: PostgreSQL waits for the disk at each COMMIT."""
_ROW_BYTES: Final = 1_000
"""Bytes of text that take as long to write as a row does."""

TextRow: TypeAlias = dict[str, Any]
"""A row of `bodies` with its text packed."""
Stored = TypeVar("Stored")


AT_FIRST: Final = 8  # rows of the first portion that is read of many
_MOST_READ: Final = 512  # rows of a further one
_READ_BYTES: Final = 1_000_000
"""Of their texts: the next portion has fewer rows after one beyond four times that, and more after one below it."""


def next_count(count: int, size: int) -> int:
    """Return how many rows to read after `count` of them, whose texts had `size` bytes."""
    if size < _READ_BYTES:
        return min(2 * count, _MOST_READ)
    return count if size <= 4 * _READ_BYTES else max(1, count // 4)


def size_of(item: Exchange) -> int:
    """Return about how many bytes an exchange writes, with its rows."""
    texts = [len(body.message.raw) for body in item.messages]
    if isinstance(item, Opening):
        texts += [len(item.tools or b""), *(len(message.raw) for message in item.instructions or ())]
    else:
        texts += [len(reply.body.message.raw) for reply in item.replies]
    return sum(texts) + _ROW_BYTES * len(texts)


# ------------------------------------------------------------------------------------------------------ begin


async def begin_long(database: Database, opening: Opening) -> None:
    """Store a request with its new messages; see `exchanges.begin`."""
    key = session_key(opening.tenant, opening.session, opening.dialect)
    rows = await asyncio.to_thread(packed_rows, key, opening.messages)
    made_at: int | None = None
    for some in portions_of(rows, lambda row: len(row["text"]), in_order=database.in_order):
        made_at = await database.write(partial(_keep_texts, opening=opening, rows=some, made_at=made_at), durable=False)
        if made_at is None:
            break
    await database.write(partial(_begin, opening=opening, made_at=made_at), durable=False)


def packed_rows(key: str, messages: Iterable[Body]) -> list[TextRow]:
    """Return the rows of messages' texts, each once, in the order of their names.

    In that order those of a transaction lie side by side in the index; and all that insert do so in one order.
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
    """Give texts, or their rows, in portions; `size_of` tells the bytes of one. `in_order`: as a `Database` is."""
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
    """Store some texts; return when the session was made. None: it is not the one that was made at `made_at`."""
    key = rows[0]["session"]
    if made_at is None:
        open_sessions(connection, [opening])
    session = locked_session(connection, key)
    if session is None or made_at not in {None, session.created_at}:
        return None
    insert_many_new(connection, BODIES, rows)
    return session.created_at


def _begin(connection: StoreConnection, opening: Opening, made_at: int | None) -> None:
    """Store the exchange itself, and its texts too, if the session has been deleted since `made_at`."""
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
    """The messages of a request as nodes in a row."""

    new_nodes: list[tuple[str, str, tree.NewNode]]  # (parent, node, new_node)
    contents: list[bytes]
    places: dict[str, tree.NodePlace]  # where the base stands, and those nodes that are stored

    @property
    def names(self) -> list[str]:
        return [name for _, name, _ in self.new_nodes]


async def settle_long(database: Database, settlement: Settlement) -> Settled | None:
    """Store how an exchange ended, as `exchanges.write_exchanges` does.

    None: nothing says where its messages go, or the exchange is not under way. Then that has to do it.
    """
    # An append goes to where the session stands when it ends.
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
        # The next ones are made meanwhile.
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
    """Return how many of the nodes are stored; None where their base is not."""
    names, base = line.names, settlement.base
    stored = known_prefix(names, partial(tree.depths_of, connection, key))
    last = names[stored - 1] if stored else base
    found = {ROOT: tree.root_of(settlement.tenant)} | tree.places_of(connection, key, [last])
    if last not in found:
        return None
    # Of those before the last one nothing but names and depths is used.
    above = found[last].depth - stored
    line.places = {name: replace(found[last], node=name, depth=above + at) for at, name in enumerate(names[:stored], 1)}
    line.places[last] = found[last]
    return stored


def _node_rows(
    key: str, settlement: Settlement, line: _Line, count: int, start: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of a portion of the nodes, and those of what upstream's replies among them are known by."""
    stop = start + count
    nodes = tree.node_rows(key, line.new_nodes[start:stop], line.places, line.contents[start:stop])
    witness = Witness(tenant=settlement.tenant, dialect=settlement.dialect)
    brought = [line.new_nodes[at] for at in settlement.relayed if start <= at < stop]
    evidence = evidence_rows(key, witness, [(name, new_node.body.message) for _, name, new_node in brought])
    return nodes, evidence


def _keep_nodes(
    connection: StoreConnection, key: str, exchange: str, nodes: list[dict[str, Any]], evidence: list[dict[str, Any]]
) -> bool:
    """Store some nodes, if the exchange is still under way: it goes with its session."""
    locked_session(connection, key)
    if connection.execute(_IS_UNDER_WAY, {"key": key, "exchange": exchange}).one_or_none() is None:
        return False
    insert_many_new(connection, NODES, nodes)
    insert_evidence(connection, evidence)
    return True


# ----------------------------------------------------------------------------------------------------- delete

_DELETED: Final = 500  # rows of one transaction: they take some 10 ms
_SESSIONS: Final = 10  # of one transaction; most have few rows


async def delete_sessions(database: Database, keys: Sequence[str], *, begins: bool = True) -> int:
    """Delete sessions with everything they have; return how many there were.

    One of many rows is deleted in portions. From the first on it is not there any more: whoever is to write to it
    first deletes what is left. Unless this `begins`, what is left of them is deleted, and one made anew stays.
    """
    number, left = 0, list(keys) if begins or database.in_order else []
    while left:
        some = left[:_SESSIONS]
        if not database.in_order:  # there nobody waits for it
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
