"""Where the messages of an exchange go when it settles, by what the log says at that moment.

Nothing comes between calls and their results, and nothing that was said is lost from the branch of the head:
where others spoke since the calls that a request answers, the log goes on without the block of the calls with
what they said, then comes the block with all its results, and then the reply.

The same results sent again have one place too, and the head does not leave what came after them.

The same request twice at once has one place, that of the one that is answered first: neither may have known
of the other when it was planned, and nobody wants the question twice in the log. The replies are siblings.
It writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import orjson
from sqlalchemy import bindparam, or_, select

from proxy.conversation import ROOT, content_hash, node_id, place_of_results
from proxy.store.database import Connection, Row
from proxy.store.records import NodeRow, SessionRow, Settlement, Status
from proxy.store.schema import EXCHANGES
from proxy.store.standing import State
from proxy.store.tree import depths_of, own_of, path_to

_NEAR: Final = 64
"""Messages among which the call of a tool result is looked for, from the head upwards."""
_APPENDING: Final = frozenset({"first", "append"})
_LATELY: Final = 60_000
"""Milliseconds before a request came within which its twin was answered, if without its knowledge: hosts'
clocks differ, and a reply has its time before it is stored."""

_TWINS: Final = (
    select(
        EXCHANGES.c.base, EXCHANGES.c.replies, EXCHANGES.c.status, EXCHANGES.c.created_at, EXCHANGES.c.id
    ).where(
        EXCHANGES.c.session == bindparam("key"),
        EXCHANGES.c.digest == bindparam("digest"),
        or_(
            EXCHANGES.c.settled_at > bindparam("since", type_=EXCHANGES.c.settled_at.type),
            EXCHANGES.c.base == bindparam("there", type_=EXCHANGES.c.base.type),
        ),
        EXCHANGES.c.agent.is_not_distinct_from(bindparam("agent", type_=EXCHANGES.c.agent.type)),
        EXCHANGES.c.kind.in_(sorted(_APPENDING)),
        EXCHANGES.c.replies != "[]",
    )
    # In no order: for the sake of one, SQLite would rather read every exchange of the session.
)


class Placement(NamedTuple):
    """Where the messages of a request go."""

    base: str
    """The node under which they go, or what is carried along before them."""
    carried: Sequence[NodeRow] = ()
    """What comes to stand before them once more, in its new order."""
    beside: bool = False
    """Whether the head stays where it is."""


def placement_of(
    connection: Connection, session: SessionRow, state: State, settlement: Settlement
) -> tuple[Placement, bool]:
    """Return where the messages of an answered request go, and whether the head goes to its reply."""
    spot, moves_head = Placement(base=settlement.base), settlement.moves_head
    # Where the head has not moved since it was planned, nothing that was answered meanwhile can be a twin.
    twins = _twins(connection, session, state, settlement) if session.head != spot.base else []
    if twins:
        spot = Placement(base=twins[0].base)
        moves_head = moves_head and _takes_over(session.head, twins, state, settlement)
    elif settlement.at_head or _is_judged_again(connection, session, settlement):
        spot = _place(connection, session, settlement)
        moves_head = moves_head and not spot.beside
    return spot, moves_head


def spot_of_results(
    connection: Connection, session: SessionRow, settlement: Settlement
) -> tuple[str, dict[bytes, str]]:
    """Return the node under which what came to a finished task goes, and results that stand there already.

    These are nodes by the hash of what they say.
    """
    messages = [body.message for body in settlement.messages]
    near = _last(connection, session, _NEAR)
    place = place_of_results([row.message for row in near], messages, own_of(near, settlement.agent))
    if place is None:
        return (session.head if settlement.at_head else settlement.base), {}
    results = near[place.block + 1 : place.stop]
    return near[place.stop - 1].node, {content_hash(row.message): row.node for row in results}


def _twins(connection: Connection, session: SessionRow, state: State, settlement: Settlement) -> list[Row]:
    """Return the appends that said the same and were answered before this one knew of them, of one place.

    It knew of those whose replies come before the place for which it was planned: "continue" may come eight
    times. Of several places, the one nearest to that counts.
    """
    if settlement.kind not in _APPENDING:
        return []
    asked = {
        "key": session.key,
        "digest": state.digest,
        "since": state.created_at - _LATELY,
        # One that was told where to go repeats what was answered there, however long ago.
        "there": None if settlement.at_head else settlement.base,
        "agent": settlement.agent,
    }
    found = connection.execute(_TWINS, asked).all()
    bases = {row.base for row in found}
    if settlement.base in bases or not bases:
        nearest = settlement.base
    else:
        depths = depths_of(connection, session.key, [settlement.base, *bases])
        planned = depths.get(settlement.base, 0)
        unknown = [base for base in bases if depths.get(base, 0) > planned]
        nearest = min(unknown, key=lambda base: depths[base], default=settlement.base)
    return [row for row in found if row.base == nearest]


def _is_judged_again(connection: Connection, session: SessionRow, settlement: Settlement) -> bool:
    """Tell whether the place of an append that was told where to go is judged by the head of this moment.

    Results always are. Anything else was to go where another one is: if it finds nothing of that there, it is
    no repetition of what was answered, and goes alone, for its twin is still pending or failed.
    """
    if settlement.kind != "append" or not settlement.messages or session.head == settlement.base:
        return False
    mine = node_id(settlement.base, settlement.messages[0].message)
    there = depths_of(connection, session.key, [settlement.base, mine])
    is_new = mine not in there or bool(settlement.messages[0].message.answers)
    return is_new and (settlement.base == ROOT or settlement.base in there)


def _takes_over(head: str, twins: Sequence[Row], state: State, settlement: Settlement) -> bool:
    """Tell whether the head goes from a twin's reply to this one's.

    It stays where anything came after. Else a whole reply goes before one that broke off, and the answer to
    what was sent last before the others: whoever sends again waits for that.
    """
    mine = (settlement.status is Status.COMPLETE, state.created_at, settlement.exchange)
    return any(
        mine > (row.status == Status.COMPLETE.value, row.created_at, row.id)
        for row in twins
        if head in orjson.loads(row.replies)
    )


def _place(connection: Connection, session: SessionRow, settlement: Settlement) -> Placement:
    """Return where an append goes by the head of this moment."""
    messages = [body.message for body in settlement.messages]
    if not messages or not messages[0].answers:
        return Placement(base=session.head)
    for near in _nearer_first(connection, session, settlement):
        place = place_of_results([row.message for row in near], messages, own_of(near, settlement.agent))
        if place is None:
            continue
        if place.repeated is not None:
            came_after = len(near) - place.repeated - len(messages) > 1  # more than the reply to them
            return Placement(base=near[place.repeated - 1].node, beside=came_after)
        if place.since == len(near):
            return Placement(base=near[place.stop - 1].node)
        carried = [*near[place.since :], *near[place.block : place.stop]]
        return Placement(base=near[place.block].parent, carried=carried)
    if settlement.at_head:
        return Placement(base=session.head)
    return Placement(base=settlement.base, beside=True)  # the session went back to where the calls are not


def _nearer_first(
    connection: Connection, session: SessionRow, settlement: Settlement
) -> Iterator[list[NodeRow]]:
    """Give the ends of the branch of the head in which the calls of results are looked for."""
    head = _last(connection, session, 1)  # nearly always they are its calls
    if settlement.agent in {None, *(row.agent for row in head)}:
        yield head
    most = _NEAR
    if not settlement.at_head:  # their place was known when they were planned, however far up it was
        depth = depths_of(connection, session.key, [settlement.base]).get(settlement.base, session.messages)
        most += max(session.messages - depth, 0)
    yield _last(connection, session, most)


def _last(connection: Connection, session: SessionRow, most: int) -> list[NodeRow]:
    """Return the last messages on the branch of the head, oldest first."""
    return path_to(connection, session.key, session.head, below=session.messages - most)
