"""Exchanges as PostgreSQL's own functions take them: those of many callers in one statement.

What an exchange comes to is computed here, as if its base were the root of a tree, by the code that writes it anywhere
else (`begin`, `ExchangeEnd`), over a connection that keeps the rows and reads nothing. The functions, which migrations
make, lock the sessions, check what was taken for granted, add where the base stands, and return what they wrote. What
cannot be computed without reading, and what does not hold, is left to `write_exchanges`.
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
"""Takes the arguments of `beginnings`; gives the ids of the exchanges that were begun."""
SETTLE: Final = "SELECT exchange, stands_at FROM palimpsest_settle($1::text[], $2::bytea[])"
"""Takes what `settle_arguments` returns; gives the ids of the exchanges that were settled, and where their sessions
stand."""

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
"""What a row of a wave has of several tables."""

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
"""What is added to what a session has."""


class _NeedsToRead(Exception):
    """The exchange depends on more than its rows can say."""


class CutChain(Struct, frozen=True, kw_only=True):
    """How a cut is stored: itself last, before it those that it is packed against."""

    packed: tuple[bytes, ...]
    exchange: str  # that stored it: by it the very same cut is known again


class _RowKeeper:
    """A connection that keeps the rows that are inserted, by table. All that it can read are cuts in `chains`."""

    dialect: SqlDialect = postgresql.dialect()  # type: ignore[no-untyped-call]

    def __init__(self, chains: Generations[_CutPlace, CutChain] | None = None) -> None:
        self.rows: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
        self.chain: CutChain | None = None
        """The one that was read."""
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
_ENTRY_BYTES: Final = 500  # what a reply or a cut takes beside its text


class StoredTexts:
    """Instructions and tools that were stored lately, by session: nearly every request brings the same again.

    And replies, by session and node: the next request has most of them in another form. And cuts: the next one is
    packed against them. It may be wrong where a session was deleted: the functions look whether they are there.
    """

    def __init__(self) -> None:
        """Remember nothing yet."""
        self.instructions: Final = FIFOCache[str, str | None](_REMEMBERED)
        self.tools: Final = FIFOCache[str, str | None](_REMEMBERED)
        self._replies: Final = Generations[tuple[str, str], Message](
            _REPLY_BYTES, lambda message: len(message.raw) + _ENTRY_BYTES
        )

        self.cuts: Final = Generations[_CutPlace, CutChain](
            _CUT_BYTES, lambda chain: sum(map(len, chain.packed)) + _ENTRY_BYTES
        )

    def keep_cut(self, end: PlainEnd) -> None:
        """Remember the cut of an exchange that was settled, at both places where the function may have put it."""
        if end.cut is not None:
            chain, place, base = end.cut
            self.cuts.put(place, chain)
            if self.cuts.recall([base]) == [None]:
                self.cuts.put(base, chain)

    def keep(self, opening: Mapping[str, Any]) -> None:
        """Remember those of an exchange that was begun."""
        for names, name in ((self.instructions, opening["instructions"]), (self.tools, opening["tools"])):
            if name is not None:
                names[opening["session"]] = name

    def keep_replies(self, settlement: Settlement, settled: Settled) -> None:
        """Remember the replies of an exchange that was settled."""
        key = session_key(settlement.tenant, settlement.session, settlement.dialect)
        for node, reply in zip(settled.replies, settlement.replies, strict=False):
            self._replies.put((key, node), reply.body.message)

    def replies_of(self, openings: Iterable[Opening]) -> dict[tuple[str, str], Message]:
        """Return those of the replies that these requests have in other forms."""
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
    """Return the arguments of `BEGIN`, and the rows of these exchanges by id; texts that are `stored` are left out."""
    keeper = _RowKeeper()
    new, replies = new_sessions(openings), stored.replies_of(openings)
    said = {place: reply.raw.decode() for place, reply in replies.items()}
    begin(keeper, openings, stored.instructions, stored.tools, said)
    rows = keeper.rows
    made = [{name: row[name] for name in ("session", "tenant", "id", "dialect", "created_at")} for row in new.values()]
    texts: list[str | None] = [_text(sorted(made, key=itemgetter("session")), _ENCODERS["sessions"])]
    # In one order, so that two that insert the same do not wait for each other.
    for table, order in (("instructions", _VERSIONS), ("bodies", _BODIES)):
        texts.append(_text(sorted(rows[table], key=order), _ENCODERS[table]) if rows[table] else None)
    # What forms are packed against.
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
    """Return the ids of the exchanges that `BEGIN` gave."""
    return {decode_exchange(row[0]) for row in rows}


# ----------------------------------------------------------------------------------------------------- settle


class PlainEnd(Struct, frozen=True, kw_only=True):
    """How an exchange ended, computed without reading."""

    row: dict[str, Any]  # of a wave
    settled: Settled  # as it is if the row is accepted, but for the head
    cut: tuple[CutChain, _CutPlace, _CutPlace] | None = None  # with its place at the last message, and at the base


class _End(ExchangeEnd):
    """Keeps the cut's row at the last message. The function knows whether it belongs there or at the base."""

    @staticmethod
    def _lies_before(position: int, line: Sequence[tree.NodePlace]) -> bool:  # noqa: ARG004
        return False


def plain_end(settlement: Settlement, stored: StoredTexts | None = None) -> PlainEnd | None:
    """Return how an exchange ended, where that depends on no more than the function checks; else None.

    A cut that follows another one needs that in what is `stored`.

    That is: the exchange is not settled, it brought these messages, its base is there and the first message not yet,
    and, where that matters, the session stands at the base.
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
    """Return what one call is to settle: a wave has one exchange of a session at most.

    Left out is what would not be accepted: what follows the head of a session that another one is to move.
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
    """Return the arguments of `SETTLE`; a wave has one exchange of a session at most."""
    keys = {cast("str", end.row["session"]): None for wave in waves for end in wave}
    return [_text([end.row for end in wave], _OF_AN_END) for wave in waves], list(map(encode_session, keys))


def settled_at(rows: Iterable[Sequence[Any]]) -> dict[str, str]:
    """Return where the sessions stand, by the ids of the exchanges that `SETTLE` gave."""
    return {decode_exchange(row[0]): decode_name(row[1]) for row in rows}


def _text(rows: Iterable[Mapping[str, Any]], encoders: _Encoders) -> str:
    return orjson.dumps([_encoded(row, encoders) for row in rows]).decode()


def _column_names(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of an INSERT … SELECT by the names of its columns."""
    return {name.removeprefix("new_"): value for name, value in row.items()}


def _encoded(row: Mapping[str, Any], encoders: _Encoders) -> dict[str, Any]:
    """Return a row as JSON has it: bytes as PostgreSQL reads them."""
    encoded = dict(row)
    for name, value in row.items():
        encode = encoders.get(name)
        stored = value if encode is None or value is None else encode(value)
        encoded[name] = "\\x" + stored.hex() if isinstance(stored, bytes) else stored
    return encoded
