"""What an append goes on from: the stored messages before it, which it does not send itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from proxy.conversation import ROOT, Arrival, ResultsPlace, place_of_results
from proxy.errors import Conflict
from proxy.store.cuts import cut_places, newest_cut, standing_at
from proxy.store.database import Connection
from proxy.store.recollection import DELETED, HistoryQuery, HistorySnapshot, allow
from proxy.store.records import NodeRow, SessionRow, StandingCut
from proxy.store.texts import instructions_of
from proxy.store.tree import depths_of, own_of, path_to, rows_of

_CUTS: Final = 3
"""Newest cuts that are tried before a branch is read whole: others may have been made on other branches."""


def of_append(
    connection: Connection, session: SessionRow, question: HistoryQuery, arrival: Arrival, most: int | None
) -> HistorySnapshot:
    """Read what an append goes on from."""
    key, depth = session.key, session.messages
    if not arrival.at_head:
        depth = depths_of(connection, key, [arrival.base]).get(arrival.base, 0)
    rows, cut = _standing(connection, key, question, arrival.base, depth, most)
    moved: Sequence[NodeRow] = ()
    place = _place(rows, question) if arrival.at_head else None
    if place is not None:
        if place.stop < len(rows) and cut is not None and rows[place.block].depth <= cut.cut.position:
            # What the cut dropped was said since, too.
            allow(depth, most)
            rows = _whole(connection, key, arrival.base)
            place = _place(rows, question) or place
        arrival, base, depth, moved = _at_their_calls(arrival, rows, place, len(question.messages))
        if base != session.head:
            rows, cut = _standing(connection, key, question, base, depth, most)
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


def _place(rows: Sequence[NodeRow], question: HistoryQuery) -> ResultsPlace | None:
    return place_of_results([row.message for row in rows], question.messages, own_of(rows, question.agent))


def _at_their_calls(
    arrival: Arrival, rows: Sequence[NodeRow], place: ResultsPlace, count: int
) -> tuple[Arrival, str, int, Sequence[NodeRow]]:
    """Return where `count` messages go whose place among `rows` is this.

    Returns:
        Their arrival; the node up to which the branch stays as it is, and its depth; what follows that in
        another order than it is stored in, before they come.
    """
    arrival = replace(arrival, at_head=False)
    if place.repeated is not None:
        base = rows[place.repeated - 1]
        beside = len(rows) > place.repeated + count + 1  # more than the reply to them
        return replace(arrival, base=base.node, beside=beside), base.node, base.depth, ()
    base = rows[place.stop - 1]
    arrival = replace(arrival, base=base.node)  # it is stored: the name that it will have is not, yet
    if place.since == len(rows):
        return arrival, base.node, base.depth, ()
    block = rows[place.block]
    moved = [*rows[place.since :], *rows[place.block : place.stop]]
    return arrival, block.parent, block.depth - 1, moved


def _at(row: NodeRow, depth: int) -> NodeRow:
    """Return a message as it will stand at another depth, under its old name."""
    decided = row.arrival
    if decided is not None:
        decided = tuple([replace(change, position=depth - 1) for change in decided])
    return replace(row, depth=depth, arrival=decided)


def _standing(
    connection: Connection, key: str, question: HistoryQuery, base: str, depth: int, most: int | None
) -> tuple[Sequence[NodeRow], StandingCut | None]:
    """Return the stored messages that a view of the branch is made of, and its newest cut.

    Those that the cut dropped are left out, unless the question wants them all: what is read grows with what
    is sent, not with what is stored.
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
