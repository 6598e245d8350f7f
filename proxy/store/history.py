"""Reads what is known about a conversation when a request comes in, in one read per request.

`conversation.reconcile` decides where the request belongs. What is read then depends on its kind. An append needs the
texts of the messages, which it does not send. A client that resends its history has the texts; only marks are read.
Nodes never change, so concurrent writes do not affect the result, unless the session is deleted.
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
"""How many messages a process caches on a small machine (some 17 MB). Evicted ones are read from the store again."""

_MARK_BYTES: Final = 340  # memory of a mark, without the texts by which `on_arrival` replaced the message

_Branch: TypeAlias = tuple[int, tuple[Mark, ...]]
"""When the session was created, and the marks of a branch, from its root on."""
_NONE: Final[tuple[_Branch, int]] = ((0, ()), 0)


class Branches:
    """A cache of the last resent branch of each session. Evicts the least recently written. Thread-safe."""

    def __init__(self, most: int | None = None) -> None:
        """Cache up to `most` messages of all sessions together; None means a limit that fits the machine's memory.

        A message that `on_arrival` changed counts as more, because its replacement text is cached too. The newest
        branch is never evicted, however long it is.
        """
        self._most: Final = scaled(MARKS) if most is None else most
        self._branches: OrderedDict[str, tuple[_Branch, int]] = OrderedDict()  # each with its weight
        self._held = 0
        self._lock = threading.Lock()

    def beginning(self, session: str, names: Sequence[str]) -> _Branch:
        """Return when the session was created, and the cached marks of the branch `names`, from its root on."""
        made_at, known = self._branches.get(session, _NONE)[0]
        count = _common(known, names)
        return made_at, known if count == len(known) else known[:count]

    def extend(self, session: str, base: str, stored: Iterable[tuple[str, Body, tuple[Change, ...] | None]]) -> None:
        """Append messages that were stored as a chain under `base`, if the cached branch ends there.

        `stored` holds (node, body, what `on_arrival` decided) of each.
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
        """Cache a branch, from its root on. Replaces the session's previous one."""
        self._put(session, (created_at, marks), _weight_of(marks))

    def _put(self, session: str, branch: _Branch, weight: int) -> None:
        with self._lock:
            self._held += weight - self._branches.pop(session, _NONE)[1]
            self._branches[session] = branch, weight
            while self._held > self._most and len(self._branches) > 1:
                self._held -= self._branches.popitem(last=False)[1][1]


def _weight_of(marks: Sequence[Mark]) -> int:
    """Return the memory that marks take, as a number of marks without texts."""
    changes = [change for mark in marks if mark.arrival for change in mark.arrival]
    return len(marks) + sum([len(each.message.raw) for each in changes if each.message is not None]) // _MARK_BYTES


def _common(known: Sequence[Mark], names: Sequence[str]) -> int:
    """Return the length of the common prefix, by bisection: if two names agree, so do all before them."""
    most = min(len(known), len(names))
    if most and known[most - 1].node == names[most - 1]:
        return most
    return bisect_left(range(most), True, key=lambda place: known[place].node != names[place])


# ---------------------------------------------------------------------------------------- one read per request

_PLACES: Final = 16  # most places tried for a history without its beginning: an "ok" may occur a thousand times
_CUTS: Final = 3
"""Newest cuts that are tried before the whole branch is read. Some may belong to other branches."""
_FAILED: Final = frozenset({Status.FAILED.value, Status.CANCELLED.value, Status.INTERRUPTED.value})
"""Statuses of exchanges that ended without a reply."""

_ASKED_COLUMNS: Final = ("digest", "kind", "base", "status", "replies", "instructions", "tools", "model")


def _asked(*like: str, answered: bool = False) -> Select[Any]:
    """Return the query for the newest exchange with these values, settled or pending.

    With `like`, settled exchanges are limited to those in the index by digest (`REPEATABLE`).
    """
    newest: list[Select[Any]] = []
    for table in (EXCHANGES, PENDING):
        found = select(*(table.c[name] for name in (*_ASKED_COLUMNS, "id")))
        found = found.where(*matching(table, *like), *([table.c.replies != "[]"] if answered else ()))
        if like and table is EXCHANGES:
            found = found.where(text(f"({REPEATABLE})"))
        # No index has this order. With one that has, every exchange of the session might be read.
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
    """Return a subquery for a node's name, NULL if it is not stored. It is answered by an index alone."""
    return select(NODES.c.node).where(*matching(NODES), NODES.c.node == name).scalar_subquery()


_GLANCE: Final = select(
    SESSIONS,
    _stored(bindparam("last", type_=NODES.c.node.type)),
    _stored(bindparam("next", type_=NODES.c.node.type)),
    select(CUTS.c.position).where(*matching(CUTS, "policy", "agent")).limit(1).scalar_subquery(),
).where(*matching(SESSIONS))
"""Reads a session; two nodes, NULL if it does not have them; and the position of any cut of a policy and an agent."""


def recall(
    connection: StoreConnection, question: HistoryQuery, branches: Branches, *, most: int | None = None
) -> HistorySnapshot:
    """Read what is known about the conversation that a request belongs to, and decide where in it.

    `branches` is a cache: what it holds is not read again, and what is read is added. Raises `Conflict` if the session
    was deleted meanwhile, and `TooLong` if more than `most` messages would have to be read.
    """
    return HistoryReader(connection, question, branches, most).read()


class HistoryReader:
    """Reads the history for one request, and answers the questions of `reconcile` about the tree."""

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
        """Read everything that the request needs."""
        session, prefix, has_cuts = self._glance()
        if session is None and self._question.state is not None:
            arrival = Arrival(kind=Kind.PROVIDER_STATE, base=ROOT, known=0, at_head=True)
            return HistorySnapshot(arrival=arrival)
        if session is None:
            # Another worker may be starting the session just now. What it stores meanwhile does not count.
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
            # A fork had no request yet. The first one may append, with any instructions, tools and model.
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
        """Read what a request by a provider's id continues from. Messages are read only if the proxy must send some."""
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
        """Return the messages that the provider lacks: it holds a reply with unanswered calls of the proxy's tools.

        These are the results for calls made beside the client's own. If `begun`, the provider holds only the first
        round: then also that round's results, and all rounds after it.
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
        """Return the depths of those of these nodes that are stored."""
        return tree.depths_of(self._connection, self._key, names)

    def _earlier_names(self, arrival: Arrival) -> Sequence[str]:
        """Return the nodes of the request's messages if the first unknown one is stored under an older version's name.

        A new version may change the canonical form of messages, and so their names. Stored messages keep their old
        names; new messages are named after them. Returns an empty sequence if no older name is stored.
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
        """Return the parents of some stored messages with this content, nearest to `depth` first."""
        self._allow(len(self._question.messages))  # the request's names differ at each place and must be computed
        return tree.parents_of(self._connection, self._key, content_key(content), depth, _PLACES)

    def _allow(self, messages: int) -> None:
        if self._most is not None and messages > self._most:
            raise TooLong

    def _glance(self) -> tuple[SessionRow | None, int | None, bool]:
        """Check in one query that the store still holds exactly the part of this request that is in the cache.

        Returns the session, how many of the request's names are stored (None if not known), and whether there may be a
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
        """Return the request, and the earlier one that it may repeat.

        This is the newest one, except for an announced retry, which may come after other requests.
        """
        connection, key, question = self._connection, self._key, self._question
        incoming = question.incoming
        if incoming.replies and incoming.mode is not Mode.APPEND:
            return incoming, None  # its replies tell where it belongs
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
            # The failed one may have repeated a request that was answered. If so, this one repeats that, too.
            answered = connection.execute(_ANSWERED_THERE, asked | {"base": row.base}).one_or_none()
            if answered is not None:
                return replace(incoming, retried=True), _last(answered)
        last = _last(row)
        may_resend = last.complete and incoming.mode is not Mode.APPEND and last.digest in incoming.names
        if may_resend and self._say_nothing(last.replies):
            last = replace(last, complete=False)  # clients do not send empty replies back
        return incoming, last

    def _say_nothing(self, replies: Collection[str]) -> bool:
        """Tell whether the replies are empty. A reply with only sound, images or reasoning is not."""
        messages = [row.message for row in tree.rows_of(self._connection, self._key, tuple(replies))]
        return bool(messages) and all([_is_empty(message) for message in messages])

    def _of_resend(self, session: SessionRow, found: HistorySnapshot, *, has_cuts: bool) -> HistorySnapshot:
        """Read the marks of the messages that the client sends again."""
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
        """Read the messages that an append continues from."""
        connection, key, question, arrival = self._connection, self._key, self._question, found.arrival
        depth = session.messages
        if not arrival.at_head:
            depth = tree.depths_of(connection, key, [arrival.base]).get(arrival.base, 0)
        rows, cut = self._rows_and_cut(arrival.base, depth)
        moved: Sequence[NodeRow] = ()
        place = place_append(rows, question.messages, question.agent) if arrival.at_head else None
        if place is not None:
            if place.block is not None and cut is not None and place.block.depth <= cut.cut.position:
                # The cut lies after the calls, so it may have dropped messages that came after them. Read them too.
                rows = self._whole(arrival.base, depth)
                place = place_append(rows, question.messages, question.agent) or place
            # `place.end` is the message that they follow, by its current name. Its copy's name is not stored yet.
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
            depth=depth,  # not the last row's: the cut may have dropped the base itself
            rows=rows,
            carried=tuple([row.node for row in moved]),
            cut=cut,
            instructions=() if instructions is None else instructions.messages,
        )

    def _rows_and_cut(self, base: str, depth: int) -> tuple[Sequence[NodeRow], StandingCut | None]:
        """Return the stored messages for a view of the branch, and the branch's newest cut.

        Messages that the cut dropped are left out, unless the query wants the whole branch. So the work grows with what
        is sent, not with what is stored.
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
                    continue  # this cut belongs to another branch
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
        """Return the whole branch; raises `Conflict` if it is gone."""
        self._allow(depth)
        rows = tree.path_to(self._connection, self._key, base)
        if not rows:
            raise Conflict(DELETED)
        return rows

    def _with_hidden_and_summaries(self, session: SessionRow, found: HistorySnapshot) -> HistorySnapshot:
        """Read what was hidden from the client of the replies, and the summaries of the branch."""
        recipe = self._question.recipe if session.summaries else None
        if not session.hidden and recipe is None:
            return found
        nodes = [mark.node for mark in found.marks] or [row.node for row in found.rows]
        if nodes and session.hidden:
            self._allow(min(session.hidden, len(nodes)))
            found = replace(found, hidden=tree.hidden_at(self._connection, self._key, nodes, session.hidden))
        if nodes and recipe is not None:
            known = nodes[: len(nodes) - len(found.carried)]  # carried nodes are from another place
            if not found.carried:
                known.append(found.arrival.base)
            if found.cut is not None:
                known.append(found.cut.node)  # the cut may have dropped the message before it
            ready, attempt = ready_summary_on(self._connection, self._key, known, recipe)
            found = replace(found, ready_summary=ready, attempt=attempt)
        return found

    def _with_others(self, found: HistorySnapshot) -> HistorySnapshot:
        """Read what other agents said since the last turn of the requesting agent. Its client does not send that."""
        question, arrival, agent = self._question, found.arrival, self._question.agent
        if arrival.composed or agent is None:
            return found  # the view holds the messages of all agents
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
    """Return a message at another depth, under its old name."""
    decided = row.arrival
    if decided is not None:
        decided = tuple([replace(change, position=depth - 1) for change in decided])
    return replace(row, depth=depth, arrival=decided)


# ---------------------------------------------------------------------------------- branches without their texts

_SUMMARY_CUTS: Final = 64  # newest cuts that are searched for summaries
_STEP: Final = 64
"""Messages of a branch in the first read, which looks for a known one among them. Each further read takes four times as
many."""


class Lineage:
    """The branches that end at some nodes."""

    def __init__(self) -> None:
        """Begin without any branch."""
        self._parents: dict[str, str] = {}
        self._totals: dict[str, int] = {}  # by node, the tokens of the branch up to it, its own included
        self._branches: dict[str, list[str]] = {}  # by end, the nodes of branches that were requested: a cache

    def __contains__(self, node: object) -> bool:
        """Tell whether a node is on one of the branches."""
        return node in self._parents

    def depth(self, end: str) -> int:
        """Return the number of messages of the branch that ends at `end`; 0 if there is none."""
        return len(self.nodes(end))

    def nodes(self, end: str) -> Sequence[str]:
        """Return the branch that ends at `end`, oldest first; empty if there is none."""
        if end not in self._branches:
            branch: list[str] = []
            node = end
            while node in self._parents:
                branch.append(node)
                node = self._parents[node]
            self._branches[end] = branch[::-1]
        return self._branches[end]

    def node_at(self, end: str, position: int) -> str | None:
        """Return the node at a position of the branch that ends at `end`; None if the position is out of range."""
        branch = self.nodes(end)
        return branch[position] if 0 <= position < len(branch) else None

    def tokens(self, end: str, start: int, stop: int) -> int:
        """Return the tokens of the messages from `start` (inclusive) to `stop` (exclusive), on the branch to `end`."""
        return self._total(end, stop) - self._total(end, start)

    def common(self, end: str, other: Lineage, other_end: str) -> int:
        """Return the length of the common prefix of the branch to `end` and one of another lineage."""
        pairs = zip(self.nodes(end), other.nodes(other_end), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def add(self, marks: Iterable[Mark], below: str) -> None:
        """Add messages that follow the node `below`, which is known already or the root."""
        for mark in marks:
            self._parents[mark.node] = below
            self._totals[mark.node] = self._totals.get(below, 0) + mark.tokens
            below = mark.node

    def _total(self, end: str, count: int) -> int:
        """Return the tokens of the first `count` messages of the branch, or of all if it has fewer."""
        branch = self.nodes(end)
        last = min(count, len(branch)) - 1
        return self._totals[branch[last]] if last >= 0 else 0


def lineage_of(connection: StoreConnection, key: str, ends: Collection[str]) -> Lineage:
    """Return the branches that end at these nodes. Nodes that are not stored are left out."""
    found = Lineage()
    depths = tree.depths_of(connection, key, list(ends))
    # The longest first: it contains most of the others.
    for end, depth in sorted(depths.items(), key=lambda item: -item[1]):
        found.add(*_unknown(connection, key, end, depth, found))
    return found


def _unknown(connection: StoreConnection, key: str, end: str, depth: int, known: Lineage) -> tuple[list[Mark], str]:
    """Return the unknown part of a branch, oldest first, and the known node before it (or the root)."""
    parts: list[list[Mark]] = []
    below, step = end if end in known else ROOT, _STEP
    while below == ROOT and depth > 0:
        read = tree.marks_to(connection, key, end, below=max(depth - step, 0))
        # Everything before a known node is known too.
        first = bisect_left(read, True, key=lambda mark: mark.node not in known)
        below = read[first - 1].node if first else ROOT
        parts.append(read[first:] if not parts else read[first:-1])
        end, depth, step = read[0].node, max(depth - step, 0), step * 4
    return list(chain.from_iterable(reversed(parts))), below


def summaries_of(
    connection: StoreConnection, key: str, head: str, policy: str, agent: str | None
) -> list[tuple[Summary, int]]:
    """Return the summaries in the newest cuts of the branch, newest first, each with its time of creation.

    Times are in milliseconds since 1970. A summary that several cuts hold was created with the oldest of them.
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
            break  # earlier cuts have no summaries
        if found and found[-1][0] == summary:
            found.pop()
        found.append((summary, row.created_at))
    return found
