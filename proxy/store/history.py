"""What is known of a conversation when a request comes in: one read per request.

Where the request belongs `conversation.reconcile` decides. What is read then is what its kind needs: the texts for an
append, which has none itself; for a client that resends its history only what was noted about its messages. Nodes never
change: what other requests write meanwhile changes nothing here, unless the session is deleted.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, takewhile
from typing import Any, Final, TypeAlias

import orjson
from msgspec.structs import replace
from sqlalchemy import ColumnElement, ScalarSelect, Select, bindparam, select, text, union_all

from proxy.conversation import (
    ROOT,
    Arrival,
    Incoming,
    Kind,
    Last,
    Log,
    Manner,
    Mode,
    body_of,
    content_key,
    earlier_names,
    known_prefix,
    names_under,
    place_append,
    reconcile,
)
from proxy.dialects import Message
from proxy.dialects.generations import scaled
from proxy.errors import Conflict
from proxy.store import sessions, tree
from proxy.store.cuts import changes_of, cut_places, cut_row, decode_cut, newest_cut, standing_at
from proxy.store.database import Row, StoreConnection
from proxy.store.records import (
    DELETED,
    FORKED,
    LIMIT,
    Body,
    HistoryQuery,
    HistorySnapshot,
    Mark,
    NodeRow,
    ProviderState,
    SessionRow,
    StandingCut,
    Status,
    TooLong,
    dialect_of,
    session_key,
)
from proxy.store.schema import CUTS, EXCHANGES, NODES, PENDING, REPEATABLE, SESSIONS, matching
from proxy.store.summaries import ready_summary_on
from proxy.trimming import Change, Summary

# ------------------------------------------------------------------------------- branches that clients resend

MARKS: Final = 50_000
"""How many messages a process remembers on a small machine: some 17 MB. What was forgotten is read from the store."""

_MARK_BYTES: Final = 340  # what a mark takes, but for the texts that `on_arrival` put in the place of the message

_Branch: TypeAlias = tuple[int, tuple[Mark, ...]]
"""When the session was made, and what was noted about a branch of it, from its root on."""
_NONE: Final[tuple[_Branch, int]] = ((0, ()), 0)


class Branches:
    """The branch of each session that was resent last; the oldest go first. Several threads may use it."""

    def __init__(self, most: int | None = None) -> None:
        """Remember `most` messages at most, of all sessions together; None: as many as there is memory for.

        Of messages that `on_arrival` changed fewer are remembered: with each go the texts that are sent in its place.
        The newest branch is remembered however long.
        """
        self._most: Final = scaled(MARKS) if most is None else most
        self._branches: OrderedDict[str, tuple[_Branch, int]] = OrderedDict()  # each with its weight
        self._held = 0
        self._lock = threading.Lock()

    def beginning(self, session: str, names: Sequence[str]) -> _Branch:
        """Return when the session was made, and what is known of the branch `names`, from its root on."""
        made_at, known = self._branches.get(session, _NONE)[0]
        count = _common(known, names)
        return made_at, known if count == len(known) else known[:count]

    def extend(self, session: str, base: str, stored: Iterable[tuple[str, Body, tuple[Change, ...] | None]]) -> None:
        """Remember what was stored under `base`, each message under the one before, if the branch ends there.

        Each is a node, what it says, and what `on_arrival` decided about it.
        """
        (made_at, known), weight = self._branches.get(session, _NONE)
        if not known or known[-1].node != base:
            return
        marks: list[Mark] = []
        for depth, (node, body, decided) in enumerate(stored, known[-1].depth + 1):
            arrival = None if decided is None else tuple([replace(each, position=depth - 1) for each in decided])
            name = body_of(body.message)
            marks.append(Mark(node=node, depth=depth, body=name, tokens=body.tokens, arrival=arrival))
        self._put(session, (made_at, (*known, *marks)), weight + _weight_of(marks))

    def keep(self, session: str, created_at: int, marks: tuple[Mark, ...]) -> None:
        """Remember a branch from its root on, in the place of the session's last one."""
        self._put(session, (created_at, marks), _weight_of(marks))

    def _put(self, session: str, branch: _Branch, weight: int) -> None:
        with self._lock:
            self._held += weight - self._branches.pop(session, _NONE)[1]
            self._branches[session] = branch, weight
            while self._held > self._most and len(self._branches) > 1:
                self._held -= self._branches.popitem(last=False)[1][1]


def _weight_of(marks: Sequence[Mark]) -> int:
    """Return how many marks without a text take as much memory as these."""
    changes = [change for mark in marks if mark.arrival for change in mark.arrival]
    return len(marks) + sum([len(each.message.raw) for each in changes if each.message is not None]) // _MARK_BYTES


def _common(known: Sequence[Mark], names: Sequence[str]) -> int:
    """Return how many nodes both begin with: where names agree, so do all before them."""
    most = min(len(known), len(names))
    if most and known[most - 1].node == names[most - 1]:
        return most
    return bisect_left(range(most), True, key=lambda place: known[place].node != names[place])


# ---------------------------------------------------------------------------------------- one read per request

_PLACES: Final = 16  # places at which a history without its beginning is looked for: "ok" may stand at a thousand
_CUTS: Final = 3
"""Newest cuts that are tried before a branch is read whole: others may have been made on other branches."""
_FAILED: Final = frozenset({Status.FAILED.value, Status.CANCELLED.value, Status.INTERRUPTED.value})
"""How exchanges end without a reply."""

_ASKED_COLUMNS: Final = ("digest", "kind", "base", "status", "replies", "instructions", "tools", "model")


def _asked(*like: str, answered: bool = False) -> Select[Any]:
    """Return what reads the newest exchange that has these values, settled or under way.

    By a digest, settled ones are found whose repetition is told by it: an index has those.
    """
    newest: list[Select[Any]] = []
    for table in (EXCHANGES, PENDING):
        found = select(*(table.c[name] for name in (*_ASKED_COLUMNS, "id")))
        found = found.where(*matching(table, *like), *([table.c.replies != "[]"] if answered else ()))
        if like and table is EXCHANGES:
            found = found.where(text(f"({REPEATABLE})"))
        # No index has this order: by one, every exchange of the session might be read.
        newest_first = [table.c.created_at.desc()] if like else []
        found = found.order_by(*newest_first, table.c.id.desc()).limit(1)
        newest.append(select(found.subquery()))
    both = union_all(*newest).subquery()
    columns = [both.c[name] for name in _ASKED_COLUMNS]
    return select(*columns).order_by(both.c.id.desc()).limit(1)


_ASKED: Final = _asked()
_ASKED_THIS: Final = _asked("digest")
_ANSWERED_THERE: Final = _asked("digest", "base", answered=True)
_ASKED_BY_KEY: Final = _asked("digest", "idempotency")


def _stored(name: ColumnElement[str]) -> ScalarSelect[str]:
    """Return what looks whether a node is stored, NULL where it is not: an index alone tells that."""
    return select(NODES.c.node).where(*matching(NODES), NODES.c.node == name).scalar_subquery()


_GLANCE: Final = select(
    SESSIONS,
    _stored(bindparam("last", type_=NODES.c.node.type)),
    _stored(bindparam("next", type_=NODES.c.node.type)),
    select(CUTS.c.position).where(*matching(CUTS, "policy", "agent")).limit(1).scalar_subquery(),
).where(*matching(SESSIONS))
"""A session; two nodes, as far as it has them; the position of any cut of a policy and an agent."""


def recall(
    connection: StoreConnection, question: HistoryQuery, branches: Branches, *, most: int | None = None
) -> HistorySnapshot:
    """Read what is known of the conversation that a request belongs to, and where it belongs.

    What `branches` knows is not read again; it gets to know what was read. Raises `Conflict` where the database shows
    that the session was deleted meanwhile, `TooLong` where more than `most` messages would have to be read.
    """
    return HistoryReader(connection, question, branches, most).read()


class HistoryReader:
    """Reads the history for one request, and answers what `reconcile` asks of the tree."""

    def __init__(
        self, connection: StoreConnection, question: HistoryQuery, branches: Branches, most: int | None
    ) -> None:
        """Read on a connection; see `recall`."""
        self._connection = connection
        self._question = question
        self._branches = branches
        self._most = most
        self._key = session_key(question.tenant, question.session, question.dialect)

    def read(self) -> HistorySnapshot:
        """Read it all."""
        session, prefix, has_cuts = self._glance()
        if session is None and self._question.state is not None:
            arrival = Arrival(kind=Kind.PROVIDER_STATE, base=ROOT, known=0, at_head=True)
            return HistorySnapshot(arrival=arrival)
        if session is None:
            # Another worker may begin it just now: what it stores meanwhile does not count.
            return HistorySnapshot(arrival=reconcile(self._question.incoming, Log(stored=self, prefix=0)))
        question = self._question
        if question.state is not None:
            return self._of_provider_state(session, question.state)
        incoming, last = self._repeated()
        manner = None
        if session.model is not None and session.arrival != FORKED:
            manner = Manner(instructions=session.instructions, tools=session.tools, model=session.model)
        log = Log(
            stored=self,
            head=session.head,
            depth=session.messages,
            # Nobody has asked for a fork yet: who goes on with it may append, and may ask in any manner.
            arrival=Kind.APPEND if session.arrival == FORKED else session.arrival,
            last=last,
            manner=manner,
            prefix=prefix,
        )
        arrival = reconcile(incoming, log)
        names = self._earlier_names(arrival)
        if names:
            self._question = replace(self._question, incoming=replace(incoming, names=names))
            arrival = reconcile(self._question.incoming, replace(log, prefix=None))
        found = HistorySnapshot(
            arrival=arrival, names=names, updated_at=session.updated_at, scale=session.scale, model=session.model
        )
        if arrival.kind is Kind.APPEND:
            found = self._of_append(session, found)
        elif arrival.known:
            found = self._of_resend(session, found, has_cuts=has_cuts)
        found = self._with_hidden_and_summaries(session, found)
        return self._with_others(found) if question.merging else found

    def _of_provider_state(self, session: SessionRow, state: ProviderState) -> HistorySnapshot:
        """Read what a request goes on from that an id names: nothing, unless the proxy is to send something of it."""
        node = state.node if state.node and self.depths([state.node]) else None
        arrival = Arrival(
            kind=Kind.PROVIDER_STATE, base=node or session.head, known=0, at_head=node is None, expanded=state.expands
        )
        depth = self.depths([arrival.base]).get(arrival.base, 0) if arrival.base else 0
        found = HistorySnapshot(
            arrival=arrival, depth=depth, updated_at=session.updated_at, scale=session.scale, model=session.model
        )
        if not state.expands:
            is_hidden = node is not None and session.hidden
            return replace(found, owed=self._owed(arrival.base, begun=state.begun)) if is_hidden else found
        rows, cut = self._rows_and_cut(arrival.base, depth)
        instructions = tree.instructions_at(self._connection, self._key, arrival.base)
        found = replace(found, rows=rows, cut=cut, instructions=instructions)
        return self._with_hidden_and_summaries(session, found)

    def _owed(self, node: str, *, begun: bool) -> tuple[Message, ...]:
        """Return what the provider lacks of a reply whose calls of the proxy's tools it holds unanswered.

        Those are the calls beside the client's own. `begun`: those of the first round, and of all rounds after it.
        """
        hidden = tree.hidden_at(self._connection, self._key, [node], 1).get(node)
        if hidden is None:
            return ()
        if not begun or not hidden.before:
            return hidden.after
        said = hidden.reply
        if said is None:
            row = tree.rows_of(self._connection, self._key, [node])[0]
            said = row.message.as_request("auto", partial=row.partial)
        return (*hidden.before[1:], said, *hidden.after)

    def depths(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return the depth of each of these nodes that is stored."""
        return tree.depths_of(self._connection, self._key, names)

    def _earlier_names(self, arrival: Arrival) -> Sequence[str]:
        """Return the nodes of the request's messages, if older versions named the first that is not known.

        A version may change the canonical form of messages. What is stored keeps its names; what is new follows it.
        """
        messages, incoming, known = self._question.messages, self._question.incoming, arrival.known
        if arrival.kind is Kind.APPEND or known >= len(messages):
            return ()
        facts = messages[known].facts
        if facts is not None and not facts.reshaped:
            return ()
        for names in earlier_names(incoming.names[known - 1] if known else ROOT, messages[known:]):
            stored = known_prefix(names, self.depths) if names[0] != incoming.names[known] else 0
            if stored:
                there = [*incoming.names[:known], *names[:stored]]
                return [*there, *names_under(there[-1], incoming.contents[len(there) :])]
        return ()

    def parents(self, content: bytes, depth: int) -> Sequence[str]:
        """Return the parents of some stored messages with this content."""
        self._allow(len(self._question.messages))  # at each place the request has other names, which must be made
        return tree.parents_of(self._connection, self._key, content_key(content), depth, _PLACES)

    def _allow(self, messages: int) -> None:
        if self._most is not None and messages > self._most:
            raise TooLong

    def _glance(self) -> tuple[SessionRow | None, int | None, bool]:
        """Check in one query that the store still has exactly the part of this request that the process remembers.

        Returns the session, how many of the request's names are stored (None: not known), and whether there may be a
        cut of the question's policy and agent.
        """
        names = self._question.incoming.names
        made_at, known = self._branches.beginning(self._key, names)
        count = len(known)
        if not count:
            return sessions.standing_session(self._connection, self._key), None, True
        asked = {
            "key": self._key,
            "last": names[count - 1],
            "next": names[count] if count < len(names) else None,
            "policy": self._question.policy,
            "agent": self._question.agent or "",
        }
        row = self._connection.execute(_GLANCE, asked).one_or_none()
        if row is None:
            return None, None, True
        session, (last, following, cut) = sessions.session_in(row), row[-3:]
        if sessions.there(session) is None:
            raise sessions.BeingRemoved
        if last is None or following is not None or session.created_at != made_at:
            return session, None, True
        return session, count, cut is not None

    def _repeated(self) -> tuple[Incoming, Last | None]:
        """Return the request, and the one that it may repeat: an announced retry may come after others."""
        connection, key, question = self._connection, self._key, self._question
        incoming = question.incoming
        if incoming.replies and incoming.mode is not Mode.APPEND:
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
        last = _last(row)
        may_resend = last.complete and incoming.mode is not Mode.APPEND and last.digest in incoming.names
        if may_resend and self._say_nothing(last.replies):
            last = replace(last, complete=False)  # no client sends such a reply back
        return incoming, last

    def _say_nothing(self, replies: Collection[str]) -> bool:
        """Tell whether replies are empty: one of sound or images alone, or of reasoning, is not."""
        messages = [row.message for row in tree.rows_of(self._connection, self._key, tuple(replies))]
        return bool(messages) and all([_is_empty(message) for message in messages])

    def _of_resend(self, session: SessionRow, found: HistorySnapshot, *, has_cuts: bool) -> HistorySnapshot:
        """Read what was noted about the messages that the client sends again."""
        connection, key, question, arrival = self._connection, self._key, self._question, found.arrival
        depth = arrival.known
        if arrival.kind is Kind.WINDOWED:
            depth = tree.depths_of(connection, key, [arrival.base]).get(arrival.base, 0)
        start = depth - arrival.known
        if start:
            self._allow(arrival.known)
            marks = tuple(tree.marks_to(connection, key, arrival.base, below=start))
        else:
            made_at, marks = self._branches.beginning(key, question.incoming.names[: arrival.known])
            if made_at != session.created_at:
                marks = ()
            if len(marks) < arrival.known:
                self._allow(arrival.known - len(marks))
                marks += tuple(tree.marks_to(connection, key, arrival.base, below=len(marks)))
                self._branches.keep(key, session.created_at, marks)
        if len(marks) != arrival.known:
            raise Conflict(DELETED)
        cut = None
        if question.policy is not None and has_cuts:
            branch = [mark.node for mark in marks] if start else question.incoming.names[: arrival.known]
            cut = newest_cut(connection, key, branch, question.policy, question.agent)
        return replace(found, start=start, depth=depth, marks=marks, cut=cut)

    def _of_append(self, session: SessionRow, found: HistorySnapshot) -> HistorySnapshot:
        """Read what an append goes on from."""
        connection, key, question, arrival = self._connection, self._key, self._question, found.arrival
        depth = session.messages
        if not arrival.at_head:
            depth = tree.depths_of(connection, key, [arrival.base]).get(arrival.base, 0)
        rows, cut = self._rows_and_cut(arrival.base, depth)
        moved: Sequence[NodeRow] = ()
        place = place_append(rows, question.messages, question.agent) if arrival.at_head else None
        if place is not None:
            if place.block is not None and cut is not None and place.block.depth <= cut.cut.position:
                # What the cut dropped was said since, too.
                rows = self._whole(arrival.base, depth)
                place = place_append(rows, question.messages, question.agent) or place
            # What they follow is stored: the name that it will have is not, yet.
            arrival = replace(arrival, base=place.end, at_head=False, beside=place.beside)
            depth, moved = place.depth, place.carried
            if place.base != session.head:
                rows, cut = self._rows_and_cut(place.base, depth)
                rows = [*rows, *(_at(row, number) for number, row in enumerate(moved, depth + 1))]
                depth += len(moved)
        instructions = None if question.instructed else tree.instructions_of(connection, key, None)
        return replace(
            found,
            arrival=arrival,
            depth=depth,  # not that of the last row: the cut may have dropped the very base
            rows=rows,
            carried=tuple([row.node for row in moved]),
            cut=cut,
            instructions=() if instructions is None else instructions.messages,
        )

    def _rows_and_cut(self, base: str, depth: int) -> tuple[Sequence[NodeRow], StandingCut | None]:
        """Return the stored messages that a view of the branch is made of, and its newest cut.

        Those that the cut dropped are left out, unless the question wants them all: what is read grows with what is
        sent, not with what is stored.
        """
        connection, key, policy, agent = self._connection, self._key, self._question.policy, self._question.agent
        if base == ROOT:
            return (), None
        if policy is None:
            return self._whole(base, depth), None
        if not self._question.whole:
            for position, node in cut_places(connection, key, policy, agent, depth, _CUTS):
                self._allow(depth - position)
                after = tree.path_to(connection, key, base, below=position) if position < depth else []
                if (after[0].parent if after else base) != node:
                    continue  # it was made on another branch
                cut = standing_at(connection, key, node, policy, agent)
                if cut is None or cut.kept is None:
                    break
                self._allow(len(after) + len(cut.kept))
                kept = tree.rows_of(connection, key, cut.kept)
                if len(kept) != len(cut.kept):
                    raise Conflict(DELETED)
                return [*kept, *after], cut
        rows = self._whole(base, depth)
        return rows, newest_cut(connection, key, [row.node for row in rows], policy, agent)

    def _whole(self, base: str, depth: int) -> Sequence[NodeRow]:
        """Return the whole branch, which is not empty."""
        self._allow(depth)
        rows = tree.path_to(self._connection, self._key, base)
        if not rows:
            raise Conflict(DELETED)
        return rows

    def _with_hidden_and_summaries(self, session: SessionRow, found: HistorySnapshot) -> HistorySnapshot:
        """Read what the client was not shown of the replies, and the summaries of the branch."""
        recipe = self._question.recipe if session.summaries else None
        if not session.hidden and recipe is None:
            return found
        nodes = [mark.node for mark in found.marks] or [row.node for row in found.rows]
        if nodes and session.hidden:
            self._allow(min(session.hidden, len(nodes)))
            found = replace(found, hidden=tree.hidden_at(self._connection, self._key, nodes, session.hidden))
        if nodes and recipe is not None:
            known = nodes[: len(nodes) - len(found.carried)]  # what is carried stood at another place
            if not found.carried:
                known.append(found.arrival.base)
            if found.cut is not None:
                known.append(found.cut.node)  # the message before the cut need not be sent
            ready, attempt = ready_summary_on(self._connection, self._key, known, recipe)
            found = replace(found, ready_summary=ready, attempt=attempt)
        return found

    def _with_others(self, found: HistorySnapshot) -> HistorySnapshot:
        """Read what other agents said since the last turn of the one that asks; its own client does not send it."""
        question, arrival, agent = self._question, found.arrival, self._question.agent
        if arrival.composed or agent is None:
            return found  # the view holds what everybody said
        pairs = zip(question.messages[: arrival.known], found.marks, strict=False)
        turns = [mark.node for message, mark in pairs if message.begins_turn]
        others = tree.said_by_others(self._connection, self._key, agent, turns[-1] if turns else None)
        there = {mark.node for mark in found.marks}
        return replace(found, others=tuple([row for row in others if row.node not in there]))


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


def _is_empty(reply: Message) -> bool:
    dialect = reply.dialect
    return dialect.canonical(reply) == dialect.canonical(dialect.spoken("assistant", ""))


def _at(row: NodeRow, depth: int) -> NodeRow:
    """Return a message as it will stand at another depth, under its old name."""
    decided = row.arrival
    if decided is not None:
        decided = tuple([replace(change, position=depth - 1) for change in decided])
    return replace(row, depth=depth, arrival=decided)


# ---------------------------------------------------------------------------------- branches without their texts

_SUMMARY_CUTS: Final = 64  # newest cuts that are looked through for summaries
_STEP: Final = 64
"""Messages that are read of a branch until a known one is looked for among them; then four times as many."""


class Lineage:
    """The branches that end at some nodes."""

    def __init__(self) -> None:
        """Begin with none."""
        self._parents: dict[str, str] = {}
        self._totals: dict[str, int] = {}  # by node, the tokens of the branch up to it, its own included
        self._branches: dict[str, list[str]] = {}  # by end, the nodes of those that were asked for

    def __contains__(self, node: object) -> bool:
        """Tell whether a node is on one of the branches."""
        return node in self._parents

    def depth(self, end: str) -> int:
        """Return the number of messages of the branch that ends at `end`; 0 where there is none."""
        return len(self.nodes(end))

    def nodes(self, end: str) -> Sequence[str]:
        """Return the branch that ends at `end`, oldest first; empty where there is none."""
        if end not in self._branches:
            branch: list[str] = []
            node = end
            while node in self._parents:
                branch.append(node)
                node = self._parents[node]
            self._branches[end] = branch[::-1]
        return self._branches[end]

    def node_at(self, end: str, position: int) -> str | None:
        """Return the node at a position of the branch that ends at `end`; None where it has no such one."""
        branch = self.nodes(end)
        return branch[position] if 0 <= position < len(branch) else None

    def tokens(self, end: str, start: int, stop: int) -> int:
        """Return the tokens of the messages from `start` to before `stop`, on the branch to `end`."""
        return self._total(end, stop) - self._total(end, start)

    def common(self, end: str, other: Lineage, other_end: str) -> int:
        """Return how many messages the branch to `end` and one of another lineage begin with alike."""
        pairs = zip(self.nodes(end), other.nodes(other_end), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def add(self, marks: Iterable[Mark], below: str) -> None:
        """Take in messages that follow the node `below`, which is known or the root."""
        for mark in marks:
            self._parents[mark.node] = below
            self._totals[mark.node] = self._totals.get(below, 0) + mark.tokens
            below = mark.node

    def _total(self, end: str, count: int) -> int:
        """Return the tokens of the first messages, of as many as there are."""
        branch = self.nodes(end)
        last = min(count, len(branch)) - 1
        return self._totals[branch[last]] if last >= 0 else 0


def lineage_of(connection: StoreConnection, key: str, ends: Collection[str]) -> Lineage:
    """Return the branches that end at these nodes; those that are not stored are left out."""
    found = Lineage()
    depths = tree.depths_of(connection, key, list(ends))
    # The longest first: it holds most of the others.
    for end, depth in sorted(depths.items(), key=lambda item: -item[1]):
        found.add(*_unknown(connection, key, end, depth, found))
    return found


def _unknown(connection: StoreConnection, key: str, end: str, depth: int, known: Lineage) -> tuple[list[Mark], str]:
    """Return what of a branch is not known, oldest first, and the node before it that is, or the root."""
    parts: list[list[Mark]] = []
    below, step = end if end in known else ROOT, _STEP
    while below == ROOT and depth > 0:
        read = tree.marks_to(connection, key, end, below=max(depth - step, 0))
        # What comes before a known one is known too.
        first = bisect_left(read, True, key=lambda mark: mark.node not in known)
        below = read[first - 1].node if first else ROOT
        parts.append(read[first:] if not parts else read[first:-1])
        end, depth, step = read[0].node, max(depth - step, 0), step * 4
    return list(chain.from_iterable(reversed(parts))), below


def summaries_of(
    connection: StoreConnection, key: str, head: str, policy: str, agent: str | None
) -> list[tuple[Summary, int]]:
    """Return the summaries that newest cuts of the branch hold, the newest first, each with when it was made.

    That is in milliseconds since 1970. A summary that several cuts hold was made with the oldest of them.
    """
    found: list[tuple[Summary, int]] = []
    places = cut_places(connection, key, policy, agent, LIMIT - 1, _SUMMARY_CUTS)
    branch = lineage_of(connection, key, [head]) if places else Lineage()
    for _, node in places:
        row = cut_row(connection, key, node, policy, agent) if node in branch else None
        if row is None:
            continue
        summary = decode_cut(changes_of(connection, key, row), dialect_of(key)).summary
        if summary is None:
            break  # none was made before that
        if found and found[-1][0] == summary:
            found.pop()
        found.append((summary, row.created_at))
    return found
