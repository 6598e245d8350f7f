"""All that is known of a conversation when a request comes in, read in one unit.

So a request waits for one reading. Where it belongs `history.reconcile` decides; what is read then is what
its kind needs: the texts for an append, which has none itself, and for a client that resends only what was
noted about its messages. Nodes never change: what other requests write meanwhile, where a database lets a
unit see it, changes nothing here, unless the session is deleted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import orjson
from sqlalchemy import bindparam, select

from proxy.errors import Conflict
from proxy.history.nodes import ROOT, content_key
from proxy.history.reconcile import Arrival, Incoming, Kind, Last, Log, Manner, Mode, reconcile
from proxy.history.results import place_of_results
from proxy.store.branches import Branches
from proxy.store.connection import Connection, Row
from proxy.store.cuts import cut_places, newest_cut, standing_at
from proxy.store.records import Mark, NodeRow, SessionRow, StandingCut, Status, session_key
from proxy.store.schema import EXCHANGES
from proxy.store.sessions import session_of
from proxy.store.texts import instructions_of
from proxy.store.tree import depths_of, marks_to, parents_of, path_to, rows_of
from proxy.wire.messages import Message

_DELETED: Final = "The session was deleted while this request was on its way. Send it again."
_PLACES: Final = 16
"""Places at which a history without its beginning is looked for: "ok" may stand at a thousand."""

_FAILED: Final = frozenset({Status.FAILED.value, Status.CANCELLED.value, Status.INTERRUPTED.value})
"""How exchanges end without a reply."""

_CUTS: Final = 3
"""Newest cuts that are tried before a branch is read whole: others may have been made on other branches."""

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


@dataclass(frozen=True, slots=True)
class Question:
    """A request, as far as what is read depends on it."""

    tenant: str
    session: str
    incoming: Incoming
    messages: Sequence[Message]
    """Its messages, instructions not among them."""
    policy: str | None
    """Name of the policy whose cut is wanted; None where there can be none."""
    agent: str | None
    idempotency: str | None = None
    """Hash of the client's key for this request; None where it gave none."""
    whole: bool = False
    """Whether the messages that a cut dropped are wanted too."""
    instructed: bool = False
    """Whether it brings instructions of its own."""


@dataclass(frozen=True, slots=True)
class Recollection:
    """What is known of the conversation."""

    arrival: Arrival
    start: int = 0
    """Position in its branch of the first message that the request speaks of."""
    depth: int = 0
    """Number of messages of the branch that its new messages follow."""
    marks: Sequence[Mark] = ()
    """What was noted about the messages that the client sends again, oldest first."""
    rows: Sequence[NodeRow] = ()
    """The stored messages that an append goes on from, oldest first."""
    cut: StandingCut | None = None
    """The newest cut of the branch."""
    instructions: tuple[Message, ...] = field(default=())
    """The newest stored instructions, for an append that brings none."""
    updated_at: int | None = None
    """When the session's last exchange ended; None where there is no session yet."""
    scale: float | None = None
    """How many tokens the upstream counts for one that is counted here, by the model last asked."""
    model: str | None = None
    """The model that was last asked."""


class TooLong(Exception):
    """More messages are to be read than were allowed."""


def recall(
    connection: Connection, question: Question, branches: Branches, *, most: int | None = None
) -> Recollection:
    """Read what is known of the conversation that a request belongs to, and where it belongs.

    What `branches` knows is not read again; it gets to know what was read.

    Raises:
        Conflict: the session was deleted meanwhile, where the database shows that.
        TooLong: more than `most` messages would have to be read.
    """
    key = session_key(question.tenant, question.session)
    session = session_of(connection, key)
    if session is None:
        return Recollection(reconcile(question.incoming, Log(_Nothing())))
    incoming, last = _repeated(connection, key, question)
    log = Log(
        stored=_Tree(connection, key, len(question.messages), most),
        head=session.head,
        depth=session.messages,
        arrival=session.arrival,
        last=last,
        manner=None if session.model is None else Manner(session.instructions, session.tools, session.model),
    )
    arrival = reconcile(incoming, log)
    if not arrival.composed:
        found = _of_resend(connection, session, question, arrival, branches, most)
    else:
        found = _of_append(connection, session, question, arrival, most)
    return replace(found, updated_at=session.updated_at, scale=session.scale, model=session.model)


def _repeated(connection: Connection, key: str, question: Question) -> tuple[Incoming, Last | None]:
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
        row.digest,
        row.kind,
        row.base,
        complete=status is Status.COMPLETE,
        pending=status is Status.PENDING,
        replies=tuple(orjson.loads(row.replies)),
        manner=Manner(row.instructions, row.tools, row.model),
    )


def _of_resend(
    connection: Connection,
    session: SessionRow,
    question: Question,
    arrival: Arrival,
    branches: Branches,
    most: int | None,
) -> Recollection:
    """Read what was noted about the messages that the client sends again."""
    if not arrival.fresh:
        return Recollection(arrival)
    key, depth = session.key, arrival.fresh
    if arrival.kind is Kind.WINDOWED:
        depth = depths_of(connection, key, [arrival.base]).get(arrival.base, 0)
    start = depth - arrival.fresh
    if start:
        _allow(arrival.fresh, most)
        marks = tuple(marks_to(connection, key, arrival.base, below=start))
    else:
        names = question.incoming.names[: arrival.fresh]
        marks = branches.beginning(key, session.created_at, names)
        if len(marks) < arrival.fresh:
            _allow(arrival.fresh - len(marks), most)
            marks += tuple(marks_to(connection, key, arrival.base, below=len(marks)))
            branches.keep(key, session.created_at, marks)
    if len(marks) != arrival.fresh:
        raise Conflict(_DELETED)
    cut = None
    if question.policy is not None:
        nodes = [mark.node for mark in marks]
        cut = newest_cut(connection, key, nodes, question.policy, question.agent)
    return Recollection(arrival, start, depth, marks=marks, cut=cut)


def _of_append(
    connection: Connection, session: SessionRow, question: Question, arrival: Arrival, most: int | None
) -> Recollection:
    """Read what an append goes on from."""
    key, depth = session.key, session.messages
    if not arrival.at_head:
        depth = depths_of(connection, key, [arrival.base]).get(arrival.base, 0)
    rows, cut = _standing(connection, key, question, arrival.base, depth, most)
    if arrival.at_head:
        place = place_of_results([row.message for row in rows], question.messages)
        if place is not None:
            base = rows[place - 1]
            arrival = replace(arrival, base=base.node, at_head=False)
            if place < len(rows):
                depth = base.depth
                rows, cut = _standing(connection, key, question, base.node, depth, most)
    found = None if question.instructed else instructions_of(connection, key, None)
    return Recollection(
        arrival,
        depth=depth,  # not that of the last row: the cut may have dropped the very base
        rows=rows,
        cut=cut,
        instructions=found.messages if found is not None else (),
    )


def _standing(
    connection: Connection, key: str, question: Question, base: str, depth: int, most: int | None
) -> tuple[Sequence[NodeRow], StandingCut | None]:
    """Return the stored messages that a view of the branch is made of, and its newest cut.

    Those that the cut dropped are left out, unless the question wants them all: what is read grows with what
    is sent, not with what is stored.
    """
    if base == ROOT:
        return (), None
    policy, agent = question.policy, question.agent
    if policy is None:
        _allow(depth, most)
        return _whole(connection, key, base), None
    if not question.whole:
        for position, node in cut_places(connection, key, policy, agent, depth, _CUTS):
            _allow(depth - position, most)
            after = path_to(connection, key, base, below=position) if position < depth else []
            if (after[0].parent if after else base) != node:
                continue  # it was made on another branch
            cut = standing_at(connection, key, node, policy, agent)
            if cut is None or cut.kept is None:
                break
            _allow(len(after) + len(cut.kept), most)
            kept = rows_of(connection, key, cut.kept)
            if len(kept) != len(cut.kept):
                raise Conflict(_DELETED)
            return [*kept, *after], cut
    _allow(depth, most)
    rows = _whole(connection, key, base)
    return rows, newest_cut(connection, key, [row.node for row in rows], policy, agent)


def _whole(connection: Connection, key: str, base: str) -> Sequence[NodeRow]:
    """Return the whole branch, which is not empty."""
    rows = path_to(connection, key, base)
    if not rows:
        raise Conflict(_DELETED)
    return rows


def _allow(messages: int, most: int | None) -> None:
    if most is not None and messages > most:
        raise TooLong


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
        _allow(self._length, self._most)  # at each place the request has other names, which must be made
        return parents_of(self._connection, self._key, content_key(content), depth, _PLACES)


class _Nothing:
    """The tree of a session that is not there."""

    def depths(self, names: Sequence[str]) -> Mapping[str, int]:  # noqa: ARG002 - the answer is always the same
        """Return nothing."""
        return {}

    def parents(self, content: bytes, depth: int) -> Sequence[str]:  # noqa: ARG002 - the same
        """Return nothing."""
        return ()
