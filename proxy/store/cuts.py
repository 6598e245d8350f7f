"""Cuts: where the views of a branch were trimmed up to, by policy and agent."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any, Final

from msgspec import Struct
from sqlalchemy import bindparam, select, tuple_

from proxy.dialects.generations import Generations
from proxy.store.database import Connection, Row
from proxy.store.encoding import Decided, decode_cut, encode_cut
from proxy.store.records import StandingCut
from proxy.store.schema import CUTS, insert_new
from proxy.store.tree import lineage_of
from proxy.trimming import Cut, Summary

# --------------------------------------------------------------------------------- cuts that were read lately

MOST_LETTERS: Final = 8 * 1024 * 1024
"""Letters of all the texts that are remembered in one process at most, with what is counted beside them. With what they
say, and what is read of that, these are some 40 MB, or 70 MB where the texts are Chinese."""
_ENTRY_LETTERS: Final = 500
"""What an entry takes beside its text, in letters."""
_ITEM_LETTERS: Final = 30
"""What a change or a gap takes beside its part of the text: 150 to 200 bytes, where it often has four."""


class _Read(Struct, frozen=True, kw_only=True):
    """A text, and what it says."""

    text: str
    decided: Decided


class DecodedCuts:
    """What texts of cuts say, bounded in size: what was not asked for the longest goes first.

    Any thread may use it.
    """

    def __init__(self, most: int = MOST_LETTERS) -> None:
        """Begin empty, to hold texts of at most so many letters, about."""
        self._held: Final = Generations[Hashable, _Read](most, _size_of)

    def read(self, place: Hashable, text: str) -> Decided:
        """Return what a text says, which was found at a `place`: there it is looked for first."""
        (found,) = self._held.recall((place,))
        if found is None or found.text != text:
            found = _Read(text=text, decided=decode_cut(text))
            self._held.put(place, found)
        return found.decided


def _size_of(read: _Read) -> int:
    items = len(read.decided.changes) + len(read.decided.gaps)
    return len(read.text) + _ITEM_LETTERS * items + _ENTRY_LETTERS


# ------------------------------------------------------------------------------------------------------- rows

_DECODED: Final = DecodedCuts()
"""A memo of what follows from texts alone."""
_AT_ONCE: Final = 64
"""Cuts looked at in one question. The first nearly always holds the one wanted."""

_PLACES: Final = (
    select(CUTS.c.position, CUTS.c.node)
    .where(CUTS.c.session == bindparam("key"), CUTS.c.policy == bindparam("policy"), CUTS.c.agent == bindparam("agent"))
    .order_by(CUTS.c.position.desc(), CUTS.c.node.desc())
    .limit(_AT_ONCE)
)
_PLACES_WITHIN: Final = _PLACES.where(CUTS.c.position <= bindparam("depth", type_=CUTS.c.position.type)).limit(
    bindparam("most", type_=CUTS.c.position.type)
)
_NEXT_PLACES: Final = _PLACES.where(
    tuple_(CUTS.c.position, CUTS.c.node)
    < tuple_(bindparam("position", type_=CUTS.c.position.type), bindparam("node", type_=CUTS.c.node.type))
)
_ONE: Final = select(CUTS).where(
    CUTS.c.session == bindparam("key"),
    CUTS.c.node == bindparam("node"),
    CUTS.c.policy == bindparam("policy"),
    CUTS.c.agent == bindparam("agent"),
)


def cut_places(
    connection: Connection, key: str, policy: str, agent: str | None, depth: int, most: int
) -> list[tuple[int, str]]:
    """Return (position, node) of up to `most` cuts of the session at `depth` at most, the greatest first."""
    asked = {"key": key, "policy": policy, "agent": agent or "", "depth": depth, "most": most}
    return [(row.position, row.node) for row in connection.execute(_PLACES_WITHIN, asked)]


def newest_cut(
    connection: Connection, key: str, branch: Collection[str], policy: str, agent: str | None
) -> StandingCut | None:
    """Return the cut with the greatest position among those made at one of the nodes in `branch`."""
    asked: dict[str, Any] = {"key": key, "policy": policy, "agent": agent or ""}
    nodes = frozenset(branch)
    found = connection.execute(_PLACES, asked).all()
    while found:
        for row in found:
            if row.node in nodes:
                return standing_at(connection, key, row.node, policy, agent)
        last = found[-1]
        found = connection.execute(_NEXT_PLACES, asked | {"position": last.position, "node": last.node}).all()
    return None


def cut_at(connection: Connection, key: str, node: str, policy: str, agent: str | None) -> Cut | None:
    """Return the cut that was made at exactly this node."""
    found = standing_at(connection, key, node, policy, agent)
    return None if found is None else found.cut


def standing_at(connection: Connection, key: str, node: str, policy: str, agent: str | None) -> StandingCut | None:
    """Return the cut that was made at exactly this node, with the nodes that it kept."""
    asked = {"key": key, "node": node, "policy": policy, "agent": agent or ""}
    row = connection.execute(_ONE, asked).one_or_none()
    return None if row is None else _standing(row)


def summaries_of(
    connection: Connection, key: str, head: str, policy: str, agent: str | None
) -> list[tuple[Summary, int]]:
    """Return the summaries that newest cuts of the branch hold, the newest first, each with when it was made.

    That is in milliseconds since 1970. A summary that several cuts hold was made with the oldest of them.
    """
    found: list[tuple[Summary, int]] = []
    places = connection.execute(_PLACES, {"key": key, "policy": policy, "agent": agent or ""}).all()
    if not places:
        return found
    branch = lineage_of(connection, key, [head])
    for place in places:
        asked = {"key": key, "node": place.node, "policy": policy, "agent": agent or ""}
        row = connection.execute(_ONE, asked).one_or_none() if place.node in branch else None
        if row is None:
            continue
        summary = decode_cut(row.changes).summary
        if summary is None:
            break  # none was made before that
        if found and found[-1][0] == summary:
            found.pop()
        found.append((summary, row.created_at))
    return found


def keep_cut(
    connection: Connection,
    key: str,
    node: str,
    agent: str | None,
    cut: Cut,
    *,
    exchange: str | None,
    at: int,
    kept: Sequence[str] | None = None,
) -> None:
    """Keep `cut` at `node`; one that is there already stays.

    `kept` are the nodes before the cut that lie in none of its gaps, by position; None where they are not known:
    whoever reads the cut then must read the whole branch.
    """
    row = {
        "session": key,
        "node": node,
        "policy": cut.policy,
        "agent": agent or "",
        "version": cut.version,
        "position": cut.position,
        "tokens": cut.tokens,
        "messages": cut.messages,
        "tool_calls": cut.tool_calls,
        "exchange": exchange,
        "created_at": at,
        "changes": encode_cut(cut.changes, cut.gaps, kept, cut.summary, cut.account),
    }
    insert_new(connection, CUTS, [row])


def _standing(row: Row) -> StandingCut:
    place = (row.session, row.node, row.policy, row.agent)
    decided = _DECODED.read(place, row.changes)
    cut = Cut(
        position=row.position,
        policy=row.policy,
        version=row.version,
        changes=decided.changes,
        tokens=row.tokens,
        messages=row.messages,
        tool_calls=row.tool_calls,
        gaps=decided.gaps,
        summary=decided.summary,
        account=decided.account,
    )
    return StandingCut(cut=cut, node=row.node, kept=decided.kept)
