"""Arguments for the PostgreSQL functions that write the exchanges of many callers in one statement.

The rows of an exchange are computed here as if its base were the root of a tree. This uses the same code as everywhere
else (`begin`, `ExchangeEnd`), on a connection that records the rows and reads nothing. The functions, which migrations
create, lock the sessions, check the assumptions, add the position of the base, and return what they wrote.
Exchanges that cannot be computed without reading, or whose assumptions do not hold, are left to `write_exchanges`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, TypeAlias, cast

import orjson
from cachetools import FIFOCache
from msgspec import Struct
from sqlalchemy import Executable, Insert
from sqlalchemy.dialects import postgresql

from proxy.conversation import APPENDING, body_of, node_id
from proxy.dialects import Message
from proxy.dialects.generations import Generations
from proxy.store import tree
from proxy.store.cuts import CHAIN
from proxy.store.database import NO_ROWS, FetchedRows, Parameters, Rows, SqlDialect
from proxy.store.exchanges import ExchangeEnd, ExchangeState, begin
from proxy.store.packing import (
    decode_exchange,
    decode_name,
    encode_exchange,
    encode_name,
    encode_names,
    encode_session,
    encoder_of,
)
from proxy.store.records import Opening, SessionRow, Settled, Settlement, Status, session_key
from proxy.store.rollups import counted
from proxy.store.schema import BODIES, CUTS, EVIDENCE, INSTRUCTIONS, NODES, PENDING, SESSIONS
from proxy.store.sessions import new_sessions

BEGIN: Final = "SELECT palimpsest_begin($1::text, $2::text, $3::text, $4::text, $5::text, $6::bytea[]) AS exchange"
"""Takes the arguments from `beginnings`; returns the ids of the exchanges that were begun."""
SETTLE: Final = "SELECT exchange, stands_at FROM palimpsest_settle($1::text[], $2::bytea[])"
"""Takes the arguments from `settle_arguments`; returns the ids of the exchanges that were settled, and the heads of
their sessions."""

_ENCODERS: Final = {
    table.name: {column.name: encode for column in table.columns if (encode := encoder_of(column.type)) is not None}
    for table in (SESSIONS, INSTRUCTIONS, BODIES, NODES, CUTS, PENDING, EVIDENCE)
}
_OF_A_FORM: Final[dict[str, Callable[[str], bytes]]] = {
    **dict.fromkeys(("node", "said"), encode_name),
    "session": encode_session,
    "exchange": encode_exchange,
}
_OF_AN_END: Final[dict[str, Callable[[str], bytes]]] = {
    **dict.fromkeys(("base", "head", "instructions", "tools", "cut_node", "first_node"), encode_name),
    **dict.fromkeys(("nodes", "replies", "asked"), encode_names),
    "session": encode_session,
    "id": encode_exchange,
    "cut_follows": encode_exchange,
    "receipt": _ENCODERS["pending"]["receipt"],
}
"""Encoders for a row of a wave, which has columns of several tables."""

_VERSIONS: Final = itemgetter("session", "version")
_BODIES: Final = itemgetter("session", "body")


_Encoders: TypeAlias = Mapping[str, Callable[[str], bytes]]
_CutPlace: TypeAlias = tuple[str, ...]
_CUT_PLACE: Final = ("key", "node", "policy", "agent")


_NOWHERE: Final[dict[str, Any]] = {
    **dict.fromkeys(("created_at", "updated_at", "messages", "rounds", "tokens", "requests"), 0),
    **dict.fromkeys(("tokens_sent", "tokens_saved"), 0),
    "instructions": None,
    "arrival": None,
}
"""Empty values for the columns of a session. What is computed from them is added to the stored values."""


class _NeedsToRead(Exception):
    """The exchange cannot be computed without reading from the database."""


class CutChain(Struct, frozen=True, kw_only=True):
    """A stored cut and those that it is packed against, itself last."""

    packed: tuple[bytes, ...]
    exchange: str  # the exchange that stored it, which identifies exactly this cut


class _RowKeeper:
    """A connection that records inserted rows by table. It can read nothing but the cuts in `chains`."""

    dialect: SqlDialect = postgresql.dialect()  # type: ignore[no-untyped-call]

    def __init__(self, chains: Generations[_CutPlace, CutChain] | None = None) -> None:
        self.rows: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
        self.chain: CutChain | None = None
        """The chain that was read, if any."""
        self._chains = chains

    def execute(self, statement: Executable, parameters: Parameters | None = None, /) -> Rows:
        if statement is CHAIN and self._chains is not None:
            asked = cast("Mapping[str, str]", parameters)
            (self.chain,) = self._chains.recall([tuple([asked[name] for name in _CUT_PLACE])])
            if self.chain is None:
                raise _NeedsToRead
            return FetchedRows([(packed,) for packed in self.chain.packed], tuple)
        if not isinstance(statement, Insert) or parameters is None:
            raise _NeedsToRead
        self.rows[statement.table.name] += [parameters] if isinstance(parameters, Mapping) else parameters
        return NO_ROWS


# ------------------------------------------------------------------------------------------------------ begin

_REMEMBERED: Final = 10_000
_REPLY_BYTES: Final = 4_000_000
_CUT_BYTES: Final = 8_000_000
_ENTRY_BYTES: Final = 500  # overhead of a reply or a cut in addition to its text


class StoredTexts:
    """Caches of recently stored texts.

    Instructions and tools, by session: nearly every request brings the same ones again. Replies, by session and node:
    the next request brings most of them back in another form. Cuts: the next cut is packed against them.

    An entry may be stale after its session was deleted, so the functions check that the texts are stored.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self.instructions: Final = FIFOCache[str, str | None](_REMEMBERED)
        self.tools: Final = FIFOCache[str, str | None](_REMEMBERED)
        self._replies: Final = Generations[tuple[str, str], Message](
            _REPLY_BYTES, lambda message: len(message.raw) + _ENTRY_BYTES
        )

        self.cuts: Final = Generations[_CutPlace, CutChain](
            _CUT_BYTES, lambda chain: sum(map(len, chain.packed)) + _ENTRY_BYTES
        )

    def keep_cut(self, end: PlainEnd) -> None:
        """Cache the cut of a settled exchange, at both places where the function may have stored it."""
        if end.cut is not None:
            chain, place, base = end.cut
            self.cuts.put(place, chain)
            if self.cuts.recall([base]) == [None]:
                self.cuts.put(base, chain)

    def keep(self, opening: Mapping[str, Any]) -> None:
        """Cache the instructions and tools of a begun exchange."""
        for names, name in ((self.instructions, opening["instructions"]), (self.tools, opening["tools"])):
            if name is not None:
                names[opening["session"]] = name

    def keep_replies(self, settlement: Settlement, settled: Settled) -> None:
        """Cache the replies of a settled exchange."""
        key = session_key(settlement.tenant, settlement.session, settlement.dialect)
        for node, reply in zip(settled.replies, settlement.replies, strict=False):
            self._replies.put((key, node), reply.body.message)

    def replies_of(self, openings: Iterable[Opening]) -> dict[tuple[str, str], Message]:
        """Return the cached replies among those that these requests bring back in other forms."""
        wanted = [
            (session_key(opening.tenant, opening.session, opening.dialect), node)
            for opening in openings
            for node, _ in opening.forms
        ]
        found = self._replies.recall(wanted)
        return {place: reply for place, reply in zip(wanted, found, strict=True) if reply is not None}


def beginnings(
    openings: Sequence[Opening], stored: StoredTexts
) -> tuple[tuple[Any, ...], dict[str, Mapping[str, Any]]]:
    """Return the arguments of `BEGIN`, and the rows of these exchanges by id. Omits texts that `stored` has."""
    keeper = _RowKeeper()
    new, replies = new_sessions(openings), stored.replies_of(openings)
    said = {place: reply.raw.decode() for place, reply in replies.items()}
    begin(keeper, openings, stored.instructions, stored.tools, said)
    rows = keeper.rows
    made = [{name: row[name] for name in ("session", "tenant", "id", "dialect", "created_at")} for row in new.values()]
    texts: list[str | None] = [_text(sorted(made, key=itemgetter("session")), _ENCODERS["sessions"])]
    # In a fixed order, so that two transactions that insert the same rows cannot deadlock.
    for table, order in (("instructions", _VERSIONS), ("bodies", _BODIES)):
        texts.append(_text(sorted(rows[table], key=order), _ENCODERS[table]) if rows[table] else None)
    # The replies that forms are packed against.
    taken = [
        {"session": key, "node": node, "exchange": opening.exchange, "said": body_of(replies[key, node])}
        for opening in openings
        for key in (session_key(opening.tenant, opening.session, opening.dialect),)
        for node, _ in opening.forms
        if (key, node) in replies
    ]
    texts.append(_text(taken, _OF_A_FORM) if taken else None)
    opened = list(map(_column_names, rows["pending"]))
    texts.append(_text(opened, _ENCODERS["pending"]))
    return (*texts, list(map(encode_session, new))), {row["id"]: row for row in opened}


def begun(rows: Iterable[Sequence[Any]]) -> set[str]:
    """Return the ids of the exchanges from the rows that `BEGIN` returned."""
    return {decode_exchange(row[0]) for row in rows}


# ----------------------------------------------------------------------------------------------------- settle


class PlainEnd(Struct, frozen=True, kw_only=True):
    """The end of an exchange, computed without reading."""

    row: dict[str, Any]  # its row in a wave
    settled: Settled  # the result if the function accepts the row; only the head is not final
    cut: tuple[CutChain, _CutPlace, _CutPlace] | None = None  # with its place at the last message, and at the base


class _End(ExchangeEnd):
    """Places the cut at the last message. The function decides whether it belongs there or at the base."""

    @staticmethod
    def _lies_before(position: int, line: Sequence[tree.NodePlace]) -> bool:  # noqa: ARG004
        return False


def plain_end(settlement: Settlement, stored: StoredTexts | None = None) -> PlainEnd | None:
    """Return the end of an exchange if it depends only on what the function checks; otherwise None.

    The function checks that the exchange is not settled, that it brought these messages, that its base is stored and
    its first message is not, and, if it matters, that the session's head is the base.

    A cut that follows another one needs that one in `stored`.
    """
    key = session_key(settlement.tenant, settlement.session, settlement.dialect)
    keeper = _RowKeeper(None if stored is None else stored.cuts)
    if settlement.finished or (settlement.replies and not settlement.messages):
        return None
    texts = [body_of(body.message) for body in settlement.messages]
    state = ExchangeState(
        status=Status.PENDING,
        created_at=0,
        digest="",
        nodes="[]",
        replies="[]",
        messages=orjson.dumps(texts).decode(),
        instructions=None,
        model="",
        tools=None,
    )
    session = SessionRow(key=key, tenant=settlement.tenant, id=settlement.session, head=settlement.base, **_NOWHERE)
    base = tree.NodePlace(node=settlement.base, depth=0, round=0, tokens_total=0, recorded=settlement.tenant)
    end = _End(keeper, settlement, session, state, base)
    try:
        settled = end.write()
    except _NeedsToRead:
        return None
    row = end.session_row | end.exchange_row | {"session": key, "id": settlement.exchange, "base": settlement.base}
    row["answered"] = bool(settlement.replies)
    row["figures"] = counted(settlement, key, end.exchange_row["status"])
    kept: tuple[CutChain, _CutPlace, _CutPlace] | None = None
    if settlement.replies:
        cuts = keeper.rows["cuts"]
        if cuts:
            before = keeper.chain if cuts[0]["base"] is not None else None
            row["cut_follows"] = None if before is None else before.exchange
            packed = (*(() if before is None else before.packed), cuts[0]["changes"])
            place = (key, cuts[0]["node"], cuts[0]["policy"], cuts[0]["agent"])
            chain = CutChain(packed=packed, exchange=settlement.exchange)
            kept = (chain, place, (key, settlement.base, *place[2:]))
        row |= {
            "follows_head": settlement.at_head or settlement.kind in APPENDING,
            "first_node": node_id(settlement.base, settlement.messages[0].message),
            "asked": state.messages,
            "new_bodies": [_encoded(each, _ENCODERS["bodies"]) for each in sorted(keeper.rows["bodies"], key=_BODIES)],
            "new_nodes": [_encoded(each, _ENCODERS["nodes"]) for each in keeper.rows["nodes"]],
            "cut": _encoded(cuts[0], _ENCODERS["cuts"]) if cuts else None,
            "evidence": [_encoded(_column_names(each), _ENCODERS["evidence"]) for each in keeper.rows["evidence"]],
        }
    return PlainEnd(row=row, settled=settled, cut=kept)


def waves_of(ends: Sequence[PlainEnd]) -> list[list[PlainEnd]]:
    """Group the exchanges that one call settles into waves. A wave has at most one exchange of each session.

    Leaves out exchanges that the function would not accept: those that follow the head of a session that an earlier
    one of them moves.
    """
    waves: list[list[PlainEnd]] = []
    counts: Counter[str] = Counter()
    moved: set[str] = set()
    for end in ends:
        key = end.row["session"]
        if key in moved and end.row.get("follows_head"):
            continue
        if "head" in end.row:
            moved.add(key)
        if counts[key] == len(waves):
            waves.append([])
        waves[counts[key]].append(end)
        counts[key] += 1
    return waves


def settle_arguments(waves: Sequence[Sequence[PlainEnd]]) -> tuple[Any, ...]:
    """Return the arguments of `SETTLE`. A wave has at most one exchange of each session."""
    keys = {cast("str", end.row["session"]): None for wave in waves for end in wave}
    return [_text([end.row for end in wave], _OF_AN_END) for wave in waves], list(map(encode_session, keys))


def settled_at(rows: Iterable[Sequence[Any]]) -> dict[str, str]:
    """Return the heads of the sessions by exchange id, from the rows that `SETTLE` returned."""
    return {decode_exchange(row[0]): decode_name(row[1]) for row in rows}


def _text(rows: Iterable[Mapping[str, Any]], encoders: _Encoders) -> str:
    return orjson.dumps([_encoded(row, encoders) for row in rows]).decode()


def _column_names(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of an INSERT … SELECT by column name, without the prefix `new_`."""
    return {name.removeprefix("new_"): value for name, value in row.items()}


def _encoded(row: Mapping[str, Any], encoders: _Encoders) -> dict[str, Any]:
    """Return a row for JSON, with bytes in PostgreSQL's hex format."""
    encoded = dict(row)
    for name, value in row.items():
        encode = encoders.get(name)
        stored = value if encode is None or value is None else encode(value)
        encoded[name] = "\\x" + stored.hex() if isinstance(stored, bytes) else stored
    return encoded
