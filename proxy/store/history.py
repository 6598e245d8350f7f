"""What is known of a conversation when a request comes in: one read per request.

Where the request belongs `conversation.reconcile` decides. What is read then is what its kind needs: the texts for an
append, which has none itself; for a client that resends its history only what was noted about its messages. Nodes never
change: what other requests write meanwhile changes nothing here, unless the session is deleted.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import orjson
from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import ColumnElement, ScalarSelect, bindparam, select

from proxy.conversation import (
    ROOT,
    Arrival,
    Incoming,
    Kind,
    Last,
    Log,
    Manner,
    Mode,
    content_key,
    place_append,
    reconcile,
)
from proxy.errors import Conflict
from proxy.store.cuts import cut_places, newest_cut, standing_at
from proxy.store.database import Connection, Row
from proxy.store.records import (
    DELETED,
    FORKED,
    HistoryQuery,
    HistorySnapshot,
    Mark,
    NodeRow,
    SessionRow,
    StandingCut,
    Status,
    allow,
    session_key,
)
from proxy.store.schema import CUTS, EXCHANGES, NODES, SESSIONS
from proxy.store.sessions import session_in, session_of
from proxy.store.summaries import prepared_on
from proxy.store.tree import depths_of, hidden_at, instructions_of, marks_to, parents_of, path_to, rows_of

# ------------------------------------------------------------------------------- branches that clients resend

MARKS: Final = 200_000
"""How many messages are remembered in one process at most: some 60 MB."""

_Branch: TypeAlias = tuple[int, tuple[Mark, ...]]
"""When the session was made, and what was noted about a branch of it, from its root on."""
_NONE: Final[_Branch] = (0, ())


class Branches:
    """The branch of each session that was resent last; those not used for the longest go first.

    Several threads may use it.
    """

    def __init__(self, most: int = MARKS) -> None:
        """Remember `most` messages at most, of all sessions together."""
        self._most: Final = most
        self._branches: OrderedDict[str, _Branch] = OrderedDict()
        self._held = 0
        self._lock = threading.Lock()

    def beginning(self, session: str, created_at: int, names: Sequence[str]) -> tuple[Mark, ...]:
        """Return what is known of the nodes `names`, a branch from its root on, as far as it is known."""
        made_at, known = self._branches.get(session, _NONE)
        return known[: _common(known, names)] if made_at == created_at else ()

    def guess(self, session: str, names: Sequence[str]) -> tuple[int, int]:
        """Return how many of the nodes `names` a session of this name had, and when that was made."""
        made_at, known = self._branches.get(session, _NONE)
        return _common(known, names), made_at

    def keep(self, session: str, created_at: int, marks: tuple[Mark, ...]) -> None:
        """Remember a branch from its root on, in the place of the session's last one."""
        if len(marks) > self._most:
            return
        with self._lock:
            self._held += len(marks) - len(self._branches.pop(session, _NONE)[1])
            self._branches[session] = (created_at, marks)
            while self._held > self._most:
                self._held -= len(self._branches.popitem(last=False)[1][1])


def _common(known: Sequence[Mark], names: Sequence[str]) -> int:
    """Return how many nodes both begin with: where names agree, so do all before them."""
    low, high = 0, min(len(known), len(names))
    if high and known[high - 1].node == names[high - 1]:
        return high
    while low < high:
        middle = (low + high) // 2
        if known[middle].node == names[middle]:
            low = middle + 1
        else:
            high = middle
    return low


_PLACES: Final = 16
"""Places at which a history without its beginning is looked for: "ok" may stand at a thousand."""

_FAILED: Final = frozenset({Status.FAILED.value, Status.CANCELLED.value, Status.INTERRUPTED.value})
"""How exchanges end without a reply."""


_ASKED: Final = (
    select(
        EXCHANGES.c.digest,
        EXCHANGES.c.kind,
        EXCHANGES.c.base,
        EXCHANGES.c.status,
        EXCHANGES.c.replies,
        EXCHANGES.c.instructions,
        EXCHANGES.c.tools,
        EXCHANGES.c.model,
    )
    .where(EXCHANGES.c.session == bindparam("key"))
    .order_by(EXCHANGES.c.created_at.desc(), EXCHANGES.c.id.desc())
    .limit(1)
)
_ASKED_THIS: Final = _ASKED.where(EXCHANGES.c.digest == bindparam("digest"))
_ANSWERED_THERE: Final = _ASKED_THIS.where(EXCHANGES.c.base == bindparam("base"), EXCHANGES.c.replies != "[]")
_ASKED_BY_KEY: Final = _ASKED_THIS.where(EXCHANGES.c.idempotency == bindparam("idempotency"))


def _stored(name: ColumnElement[str]) -> ScalarSelect[str]:
    """Return what looks whether a node is stored, NULL where it is not: an index alone tells that."""
    found = select(NODES.c.node).where(NODES.c.session == bindparam("key"), NODES.c.node == name)
    return found.scalar_subquery()


_GLANCE: Final = select(
    SESSIONS,
    _stored(bindparam("last", type_=NODES.c.node.type)),
    _stored(bindparam("next", type_=NODES.c.node.type)),
    select(CUTS.c.position)
    .where(
        CUTS.c.session == bindparam("key"),
        CUTS.c.policy == bindparam("policy", type_=CUTS.c.policy.type),
        CUTS.c.agent == bindparam("agent"),
    )
    .limit(1)
    .scalar_subquery(),
).where(SESSIONS.c.session == bindparam("key"))
"""A session; two nodes, as far as it has them; the position of any cut of a policy and an agent."""


def recall(
    connection: Connection, question: HistoryQuery, branches: Branches, *, most: int | None = None
) -> HistorySnapshot:
    """Read what is known of the conversation that a request belongs to, and where it belongs.

    What `branches` knows is not read again; it gets to know what was read.
    """
    key = session_key(question.tenant, question.session)
    seen = _seen(connection, key, question, branches)
    session = seen.session
    if session is None:
        return HistorySnapshot(arrival=reconcile(question.incoming, Log(stored=_Nothing())))
    incoming, last = _repeated(connection, key, question)
    log = Log(
        stored=_Tree(connection, key, len(question.messages), most),
        head=session.head,
        depth=session.messages,
        # Nobody has asked for a fork yet: who goes on with it may append, and may ask in any manner.
        arrival=Kind.APPEND if session.arrival == FORKED else session.arrival,
        last=last,
        manner=_manner_of(session),
        prefix=seen.prefix,
    )
    arrival = reconcile(incoming, log)
    if not arrival.composed:
        found = _of_resend(connection, session, question, arrival, branches, most, has_cuts=seen.has_cuts)
    else:
        found = of_append(connection, session, question, arrival, most)
        found = replace(found, updated_at=session.updated_at, scale=session.scale, model=session.model)
    return _with_summaries(connection, session, question, _with_hidden(connection, session, found, most))


def _manner_of(session: SessionRow) -> Manner | None:
    if session.model is None or session.arrival == FORKED:
        return None
    return Manner(instructions=session.instructions, tools=session.tools, model=session.model)


def _with_hidden(
    connection: Connection, session: SessionRow, found: HistorySnapshot, most: int | None
) -> HistorySnapshot:
    """Read what the client was not shown of the replies."""
    nodes = _nodes_of(found) if session.hidden else ()
    if not nodes:
        return found
    allow(min(session.hidden, len(nodes)), most)
    return replace(found, hidden=hidden_at(connection, session.key, nodes, session.hidden))


def _with_summaries(
    connection: Connection, session: SessionRow, question: HistoryQuery, found: HistorySnapshot
) -> HistorySnapshot:
    """Read the summaries of the branch."""
    nodes = _nodes_of(found) if session.summaries else ()
    if not nodes or question.recipe is None:
        return found
    known = [*nodes[: len(nodes) - len(found.carried)]]  # what is carried stood at another place
    if not found.carried:
        known.append(found.arrival.base)
    if found.cut is not None:
        known.append(found.cut.node)  # the message before the cut need not be sent
    ready, attempt = prepared_on(connection, session.key, known, question.recipe)
    return replace(found, prepared=ready, attempt=attempt)


def _nodes_of(found: HistorySnapshot) -> Sequence[str]:
    return [mark.node for mark in found.marks] or [row.node for row in found.rows]


class _Seen(Struct, frozen=True, kw_only=True):
    """A session, and what was seen of it at the first glance."""

    session: SessionRow | None
    prefix: int | None = None
    """How many of the request's names are stored, from the first on; None where that is not known."""
    has_cuts: bool = True
    """Whether there may be a cut of the question's policy and agent."""


def _seen(connection: Connection, key: str, question: HistoryQuery, branches: Branches) -> _Seen:
    """Look whether the log has of the request what it lately had, and no more: nearly always it has."""
    names = question.incoming.names
    count, made_at = branches.guess(key, names)
    if not count:
        return _Seen(session=session_of(connection, key))
    asked = {
        "key": key,
        "last": names[count - 1],
        "next": names[count] if count < len(names) else None,
        "policy": question.policy,
        "agent": question.agent or "",
    }
    row = connection.execute(_GLANCE, asked).one_or_none()
    if row is None:
        return _Seen(session=None)
    session, (last, following, cut) = session_in(row), row[-3:]
    if last is None or following is not None or session.created_at != made_at:
        return _Seen(session=session)
    return _Seen(session=session, prefix=count, has_cuts=cut is not None)


def _repeated(connection: Connection, key: str, question: HistoryQuery) -> tuple[Incoming, Last | None]:
    """Return the request, and the one that it may repeat: an announced retry may come after others."""
    incoming = question.incoming
    if incoming.speaks and incoming.mode is not Mode.APPEND:
        return incoming, None  # it says itself where it belongs
    asked = {"key": key, "digest": incoming.digest}
    row: Row | None = None
    if question.idempotency is not None:
        row = connection.execute(_ASKED_BY_KEY, asked | {"idempotency": question.idempotency}).one_or_none()
        if row is not None:
            incoming = replace(incoming, retried=True)
    if row is None and incoming.retried:
        row = connection.execute(_ASKED_THIS, asked).one_or_none()
    if row is None:
        row = connection.execute(_ASKED, {"key": key}).one_or_none()
    if row is None:
        return incoming, None
    if row.digest == incoming.digest and row.status in _FAILED:
        # It may itself have been the repetition of one that was answered: then so is this.
        answered = connection.execute(_ANSWERED_THERE, asked | {"base": row.base}).one_or_none()
        if answered is not None:
            return replace(incoming, retried=True), _last(answered)
    return incoming, _last(row)


def _last(row: Row) -> Last:
    status = Status(row.status)
    return Last(
        digest=row.digest,
        kind=row.kind,
        base=row.base,
        complete=status is Status.COMPLETE,
        pending=status is Status.PENDING,
        replies=tuple(orjson.loads(row.replies)),
        manner=Manner(instructions=row.instructions, tools=row.tools, model=row.model),
    )


def _of_resend(
    connection: Connection,
    session: SessionRow,
    question: HistoryQuery,
    arrival: Arrival,
    branches: Branches,
    most: int | None,
    *,
    has_cuts: bool,
) -> HistorySnapshot:
    """Read what was noted about the messages that the client sends again."""
    if not arrival.fresh:
        return _recollection(session, arrival)
    key, depth = session.key, arrival.fresh
    if arrival.kind is Kind.WINDOWED:
        depth = depths_of(connection, key, [arrival.base]).get(arrival.base, 0)
    start = depth - arrival.fresh
    if start:
        allow(arrival.fresh, most)
        marks = tuple(marks_to(connection, key, arrival.base, below=start))
    else:
        names = question.incoming.names[: arrival.fresh]
        marks = branches.beginning(key, session.created_at, names)
        if len(marks) < arrival.fresh:
            allow(arrival.fresh - len(marks), most)
            marks += tuple(marks_to(connection, key, arrival.base, below=len(marks)))
            branches.keep(key, session.created_at, marks)
    if len(marks) != arrival.fresh:
        raise Conflict(DELETED)
    cut = None
    if question.policy is not None and has_cuts:
        nodes = [mark.node for mark in marks]
        cut = newest_cut(connection, key, nodes, question.policy, question.agent)
    return _recollection(session, arrival, start, depth, marks, cut)


def _recollection(
    session: SessionRow,
    arrival: Arrival,
    start: int = 0,
    depth: int = 0,
    marks: Sequence[Mark] = (),
    cut: StandingCut | None = None,
) -> HistorySnapshot:
    return HistorySnapshot(
        arrival=arrival,
        start=start,
        depth=depth,
        marks=marks,
        cut=cut,
        updated_at=session.updated_at,
        scale=session.scale,
        model=session.model,
    )


class _Tree:
    """The tree of a session, for `reconcile` to ask."""

    def __init__(self, connection: Connection, key: str, length: int, most: int | None) -> None:
        self._connection = connection
        self._key = key
        self._length = length
        self._most = most

    def depths(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return the depth of each of these nodes that is stored."""
        return depths_of(self._connection, self._key, names)

    def parents(self, content: bytes, depth: int) -> Sequence[str]:
        """Return the parents of some stored messages with this content."""
        allow(self._length, self._most)  # at each place the request has other names, which must be made
        return parents_of(self._connection, self._key, content_key(content), depth, _PLACES)


class _Nothing:
    """The tree of a session that is not there."""

    def depths(self, names: Sequence[str]) -> Mapping[str, int]:  # noqa: ARG002 - the answer is always the same
        """Return nothing."""
        return {}

    def parents(self, content: bytes, depth: int) -> Sequence[str]:  # noqa: ARG002 - the same
        """Return nothing."""
        return ()


# -------------------------------------------------------------------------------- what an append goes on from

_CUTS: Final = 3
"""Newest cuts that are tried before a branch is read whole: others may have been made on other branches."""


def of_append(
    connection: Connection, session: SessionRow, question: HistoryQuery, arrival: Arrival, most: int | None
) -> HistorySnapshot:
    """Read what an append goes on from."""
    key, depth = session.key, session.messages
    if not arrival.at_head:
        depth = depths_of(connection, key, [arrival.base]).get(arrival.base, 0)
    rows, cut = _rows_and_cut(connection, key, question, arrival.base, depth, most)
    moved: Sequence[NodeRow] = ()
    place = place_append(rows, question.messages, question.agent) if arrival.at_head else None
    if place is not None:
        if place.block is not None and cut is not None and place.block.depth <= cut.cut.position:
            # What the cut dropped was said since, too.
            allow(depth, most)
            rows = _whole(connection, key, arrival.base)
            place = place_append(rows, question.messages, question.agent) or place
        # What they follow is stored: the name that it will have is not, yet.
        arrival = replace(arrival, base=place.end, at_head=False, beside=place.beside)
        depth, moved = place.depth, place.carried
        if place.base != session.head:
            rows, cut = _rows_and_cut(connection, key, question, place.base, depth, most)
            rows = [*rows, *(_at(row, number) for number, row in enumerate(moved, depth + 1))]
            depth += len(moved)
    found = None if question.instructed else instructions_of(connection, key, None)
    return HistorySnapshot(
        arrival=arrival,
        depth=depth,  # not that of the last row: the cut may have dropped the very base
        rows=rows,
        carried=tuple([row.node for row in moved]),
        cut=cut,
        instructions=found.messages if found is not None else (),
    )


def _at(row: NodeRow, depth: int) -> NodeRow:
    """Return a message as it will stand at another depth, under its old name."""
    decided = row.arrival
    if decided is not None:
        decided = tuple([replace(change, position=depth - 1) for change in decided])
    return replace(row, depth=depth, arrival=decided)


def _rows_and_cut(
    connection: Connection, key: str, question: HistoryQuery, base: str, depth: int, most: int | None
) -> tuple[Sequence[NodeRow], StandingCut | None]:
    """Return the stored messages that a view of the branch is made of, and its newest cut.

    Those that the cut dropped are left out, unless the question wants them all: what is read grows with what is sent,
    not with what is stored.
    """
    if base == ROOT:
        return (), None
    policy, agent = question.policy, question.agent
    if policy is None:
        allow(depth, most)
        return _whole(connection, key, base), None
    if not question.whole:
        for position, node in cut_places(connection, key, policy, agent, depth, _CUTS):
            allow(depth - position, most)
            after = path_to(connection, key, base, below=position) if position < depth else []
            if (after[0].parent if after else base) != node:
                continue  # it was made on another branch
            cut = standing_at(connection, key, node, policy, agent)
            if cut is None or cut.kept is None:
                break
            allow(len(after) + len(cut.kept), most)
            kept = rows_of(connection, key, cut.kept)
            if len(kept) != len(cut.kept):
                raise Conflict(DELETED)
            return [*kept, *after], cut
    allow(depth, most)
    rows = _whole(connection, key, base)
    return rows, newest_cut(connection, key, [row.node for row in rows], policy, agent)


def _whole(connection: Connection, key: str, base: str) -> Sequence[NodeRow]:
    """Return the whole branch, which is not empty."""
    rows = path_to(connection, key, base)
    if not rows:
        raise Conflict(DELETED)
    return rows
