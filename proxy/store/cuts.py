"""Cuts: the trim boundaries of branches, by policy and agent. Also encodes changes for storage.

Changes and cuts are stored as text. It is exact, and small even if a hundred thousand messages were dropped. The text
is a JSON object. Empty members are left out:

    why    [[edit, reason], …]: each pair once
    drop   [[why, rank, [[start, [tokens_before, …]], …]], …]: dropped messages, in runs of positions
    put    [[position, rank, why, tokens_before, tokens_after, text], …]: every other change, with the
           text of the message that is sent instead (null if there is none)

A cut also has:

    gaps   [[why, start, stop, tokens, tool_calls], …]: runs of messages that are no longer sent
    kept   [node, …]: the messages before the cut that lie in no gap, by position. Left out if not known,
           as in cuts from before gaps existed; these list all dropped messages under `drop`
    summary, account
           the summary that takes the place of some gaps, and what input had cost
    stale  [[start, stop], …]: where reasoning is left out

`why` in the other lists is an index into the first list. `rank` numbers the changes of one position, to keep their
order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import Select, bindparam, literal, select, tuple_

from proxy.dialects import Dialect
from proxy.dialects.generations import Generations
from proxy.dialects.jsontext import mended
from proxy.store.database import Row, StoreConnection
from proxy.store.packing import RECORDS, is_against, pack, pack_against, unpack
from proxy.store.records import StandingCut, dialect_of
from proxy.store.schema import CUTS, insert_new, matching
from proxy.trimming import Account, Change, Cut, Gap, StaleRange, Summary

# -------------------------------------------------------------------------------------- changes and cuts as text

_Run: TypeAlias = tuple[int, list[int]]
_Drop: TypeAlias = tuple[int, int, list[_Run]]
_Put: TypeAlias = tuple[int, int, int, int, int, str | None]
_Gap: TypeAlias = tuple[int, int, int, int, int]
_StaleRange: TypeAlias = tuple[int, int]
_Why: TypeAlias = dict[tuple[str, str], int]


class _Changes(Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """The JSON object described in the module's docstring."""

    why: list[tuple[str, str]] = []
    drop: list[_Drop] = []
    put: list[_Put] = []

    def reason(self, place: int) -> tuple[str, str]:
        """Return edit and reason by their index in `why`; raises ValueError if it has no such index."""
        if not 0 <= place < len(self.why):
            raise ValueError("the changes name a reason that they do not list")
        return self.why[place]


class _CutText(_Changes, omit_defaults=True, forbid_unknown_fields=True):
    """The JSON object of a cut."""

    gaps: list[_Gap] = []
    kept: list[str] | None = None
    summary: Summary | None = None
    account: Account | None = None
    stale: list[_StaleRange] = []


class Decided(Struct, frozen=True, kw_only=True):
    """What a cut changes and leaves out."""

    changes: tuple[Change, ...] = ()
    gaps: tuple[Gap, ...] = ()
    kept: tuple[str, ...] | None = None  # the nodes before the cut that lie in no gap; None if not known
    summary: Summary | None = None
    account: Account | None = None
    stale: tuple[StaleRange, ...] = ()


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(_Changes)
_CUT_DECODER: Final = msgspec.json.Decoder(_CutText)
_EMPTY: Final = "{}"


def encode_changes(changes: Collection[Change]) -> str:
    """Encode `changes` as text. Decoding returns them by position; changes of one position keep their order."""
    if not changes:
        return _EMPTY
    why: _Why = {}
    drop, put = _rows_of(changes, why)
    return _ENCODER.encode(_Changes(why=list(why), drop=drop, put=put)).decode()


def decode_changes(text: str, dialect: Dialect) -> tuple[Change, ...]:
    """Decode the changes in `text`, by position; raises ValueError if the text is not valid."""
    return () if text == _EMPTY else _changes_in(_DECODER.decode(text), dialect)


def encode_cut(decided: Decided) -> str:
    """Encode what a cut does as text. A lone surrogate in a summary is decoded as U+FFFD: UTF-8 cannot hold it."""
    why: _Why = {}
    gaps = [
        (why.setdefault((gap.edit, gap.reason), len(why)), gap.start, gap.stop, gap.tokens, gap.tool_calls)
        for gap in decided.gaps
    ]
    drop, put = _rows_of(decided.changes, why)
    summary = decided.summary
    cut = _CutText(
        why=list(why),
        drop=drop,
        put=put,
        gaps=gaps,
        kept=None if decided.kept is None else list(decided.kept),
        summary=summary,
        account=decided.account,
        stale=[(each.start, each.stop) for each in decided.stale],
    )
    try:
        return _ENCODER.encode(cut).decode()
    except UnicodeEncodeError:
        if summary is None:
            raise
        cut.summary = replace(summary, text=mended(summary.text), state=mended(summary.state))
        return _ENCODER.encode(cut).decode()


def decode_cut(text: str, dialect: Dialect) -> Decided:
    """Decode what a cut does; raises ValueError if `text` is not valid."""
    read = _CUT_DECODER.decode(text)
    gaps: list[Gap] = []
    for place, start, stop, tokens, tool_calls in read.gaps:
        edit, reason = read.reason(place)
        gaps.append(Gap(start=start, stop=stop, edit=edit, reason=reason, tokens=tokens, tool_calls=tool_calls))
    return Decided(
        changes=_changes_in(read, dialect),
        gaps=tuple(gaps),
        kept=None if read.kept is None else tuple(read.kept),
        summary=read.summary,
        account=read.account,
        stale=tuple([StaleRange(start=start, stop=stop) for start, stop in read.stale]),
    )


def encode_data(data: Mapping[str, Any]) -> str:
    """Encode JSON data as text. A lone surrogate in it is decoded as U+FFFD."""
    try:
        return _ENCODER.encode(data).decode()
    except UnicodeEncodeError:
        return _ENCODER.encode(mended(dict(data))).decode()


def _rows_of(changes: Iterable[Change], why: _Why) -> tuple[list[_Drop], list[_Put]]:
    """Return changes as the lists `drop` and `put`. New reasons are added to `why`."""
    dropped: dict[tuple[int, int], list[_Run]] = {}
    put: list[_Put] = []
    ranks: Counter[int] = Counter()
    for change in sorted(changes, key=lambda change: change.position):
        rank = ranks[change.position]
        ranks[change.position] += 1
        reason = why.setdefault((change.edit, change.reason), len(why))
        if change.message is None and change.tokens_after == 0:
            runs = dropped.setdefault((reason, rank), [])
            if runs and change.position == runs[-1][0] + len(runs[-1][1]):
                runs[-1][1].append(change.tokens_before)
            else:
                runs.append((change.position, [change.tokens_before]))
        else:
            raw = None if change.message is None else change.message.raw.decode()
            put.append((change.position, rank, reason, change.tokens_before, change.tokens_after, raw))
    return [(reason, rank, runs) for (reason, rank), runs in dropped.items()], put


def _changes_in(read: _Changes, dialect: Dialect) -> tuple[Change, ...]:
    """Return the changes in a decoded text, by position and rank."""
    ranked: list[tuple[int, Change]] = []

    def add(rank: int, place: int, position: int, before: int, after: int, raw: str | None) -> None:
        edit, reason = read.reason(place)
        message = None if raw is None else dialect.message(raw.encode())
        change = Change(
            position=position, edit=edit, reason=reason, message=message, tokens_before=before, tokens_after=after
        )
        ranked.append((rank, change))

    for place, rank, runs in read.drop:
        for start, run in runs:
            for position, tokens in enumerate(run, start):
                add(rank, place, position, tokens, 0, None)
    for position, rank, place, before, after, raw in read.put:
        add(rank, place, position, before, after, raw)
    ranked.sort(key=lambda item: (item[1].position, item[0]))
    return tuple([change for _, change in ranked])


# ----------------------------------------------------------------------------------- cache of decoded cuts

MOST_LETTERS: Final = 16 * 1024 * 1024
"""Size of the cache on a small machine, in characters: all cached texts, plus an allowance for each entry and item.
With the decoded objects this takes some 80 MB of memory, or 140 MB if the texts are Chinese. The cut of a session with
2,000 messages has 400,000 characters."""
_ENTRY_LETTERS: Final = 500  # allowance for a cache entry beside its text, in characters
_ITEM_LETTERS: Final = 30
"""Allowance for a change or a gap beside its part of the text. It takes 150 to 200 bytes of memory; a character often
takes four."""


class DecodedCuts:
    """A cache of decoded cuts, bounded in size. Evicts the least recently used. Thread-safe."""

    def __init__(self, most: int = MOST_LETTERS) -> None:
        """Create an empty cache for texts of about `most` characters."""
        self._held: Final = Generations[Hashable, _Read](most, lambda read: read.size)

    def read(self, place: Hashable, packed: bytes, dialect: Dialect, text: Callable[[], str]) -> Decided:
        """Return the decoded cut at `place`, from the cache if its `packed` bytes are the same; else decode `text`."""
        (found,) = self._held.recall((place,))
        if found is None or found.packed != packed:
            said = text()
            decided = decode_cut(said, dialect)
            size = len(said) + _ITEM_LETTERS * (len(decided.changes) + len(decided.gaps)) + _ENTRY_LETTERS
            found = _Read(packed=packed, decided=decided, size=size)
            self._held.put(place, found)
        return found.decided


class _Read(Struct, frozen=True, kw_only=True):
    """A cache entry: a decoded cut."""

    packed: bytes
    decided: Decided
    size: int


# ------------------------------------------------------------------------------------------------------- rows

_DECODED: Final = DecodedCuts()  # a pure memo: entries depend on the texts alone
_AT_ONCE: Final = 64  # cuts per query. The first query nearly always finds the one wanted.

_OF_CUT: Final = ("position", "policy", "version", "tokens", "messages", "tool_calls")
"""Fields of a cut that are columns of its row, too."""
_DECIDED: Final = ("changes", "gaps", "summary", "account", "stale")
"""Fields of a cut that come from `Decided`."""
_PLACES: Final = (
    select(CUTS.c.position, CUTS.c.node)
    .where(*matching(CUTS, "policy", "agent"))
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
_ONE: Final = select(CUTS).where(*matching(CUTS, "node", "policy", "agent"))

_CHAIN_LENGTH: Final = 128
"""Most cuts in a chain. A cut is stored as the difference from the one before it; after so many, the next one is stored
as a whole, which takes as much space as the hundred after it. Reading a full chain takes some 10 ms."""
_LAST_TEXTS: Final = Generations[tuple[bytes, ...], str](MOST_LETTERS, lambda said: 2 * len(said) + _ENTRY_LETTERS)
"""A cache of the last texts of chains: the next cut is packed against them."""


def _chain() -> Select[*tuple[Any, ...]]:
    """Return the query for a cut and the chain that it is packed against, beginning with the one stored as a whole."""
    columns = (CUTS.c.changes, CUTS.c.base)
    first = select(*columns, literal(0).label("step")).where(*matching(CUTS, "node", "policy", "agent"))
    chain = first.cte("chain", recursive=True)
    before = select(*columns, chain.c.step + 1).where(*matching(CUTS, "policy", "agent"), CUTS.c.node == chain.c.base)
    chain = chain.union_all(before.where(chain.c.step < _CHAIN_LENGTH))
    return select(chain.c.changes).order_by(chain.c.step.desc())


CHAIN: Final = _chain()
"""Reads the chain that a cut is packed against, ending with the cut itself."""


def cut_places(
    connection: StoreConnection, key: str, policy: str, agent: str | None, depth: int, most: int
) -> list[tuple[int, str]]:
    """Return (position, node) of up to `most` cuts at positions up to `depth`, greatest first."""
    asked = {"key": key, "policy": policy, "agent": agent or "", "depth": depth, "most": most}
    return [(row.position, row.node) for row in connection.execute(_PLACES_WITHIN, asked)]


def newest_cut(
    connection: StoreConnection, key: str, branch: Collection[str], policy: str, agent: str | None
) -> StandingCut | None:
    """Return the cut with the greatest position among those at the nodes in `branch`; None if there is none."""
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


def cut_row(connection: StoreConnection, key: str, node: str, policy: str, agent: str | None) -> Row | None:
    """Return the row of the cut at exactly this node; None if there is none."""
    asked = {"key": key, "node": node, "policy": policy, "agent": agent or ""}
    return connection.execute(_ONE, asked).one_or_none()


def changes_of(connection: StoreConnection, key: str, row: Row) -> str:
    """Return the changes of a row of `CUTS`, as text."""
    if row.base is None:
        return unpack(row.changes)
    asked = {"key": key, "node": row.base, "policy": row.policy, "agent": row.agent}
    return unpack(row.changes, _last_of(tuple([packed for (packed,) in connection.execute(CHAIN, asked)])))


def _last_of(chain: tuple[bytes, ...]) -> str | None:
    """Return the text of the last cut in a chain; None if the chain is empty."""
    (text,) = _LAST_TEXTS.recall([chain])
    if text is None and chain:
        for packed in chain:
            text = unpack(packed, text)
        if text is not None:
            _LAST_TEXTS.put(chain, text)
    return text


def pack_changes(
    connection: StoreConnection, key: str, policy: str, agent: str, changes: str, follows: str | None
) -> tuple[bytes, str | None]:
    """Pack changes for a cut's row; return them and the row's `base`. `follows` is the node of the previous cut."""
    if follows is None:
        return pack(changes, RECORDS), None
    asked = {"key": key, "node": follows, "policy": policy, "agent": agent}
    chain = tuple([packed for (packed,) in connection.execute(CHAIN, asked)])
    before = _last_of(chain) if len(chain) < _CHAIN_LENGTH else None
    packed = pack(changes, RECORDS) if before is None else pack_against(before, changes, RECORDS)
    if not is_against(packed):
        return packed, None
    _LAST_TEXTS.put((*chain, packed), changes)
    return packed, follows


def standing_at(connection: StoreConnection, key: str, node: str, policy: str, agent: str | None) -> StandingCut | None:
    """Return the cut at exactly this node, with the nodes that it keeps; None if there is none."""
    row = cut_row(connection, key, node, policy, agent)
    if row is None:
        return None
    place, text = (key, row.node, row.policy, row.agent), partial(changes_of, connection, key, row)
    return standing_cut(row, _DECODED.read(place, row.changes, dialect_of(key), text))


def standing_cut(row: Any, decided: Decided) -> StandingCut:
    """Return the cut of a row, or of a record with the same names."""
    told = {name: getattr(decided, name) for name in _DECIDED}
    cut = Cut(**{name: getattr(row, name) for name in _OF_CUT}, **told)
    return StandingCut(cut=cut, node=row.node, kept=decided.kept)


def keep_cut(
    connection: StoreConnection,
    key: str,
    standing: StandingCut,
    agent: str | None,
    *,
    exchange: str | None,
    at: int,
    follows: str | None = None,
) -> None:
    """Store a cut, unless there is one at its node already.

    If its `kept` is None, readers must read the whole branch. `follows` is the node of the previous cut on the branch.
    """
    cut, node = standing.cut, standing.node
    changes = encode_cut(Decided(kept=standing.kept, **{name: getattr(cut, name) for name in _DECIDED}))
    packed, base = pack_changes(connection, key, cut.policy, agent or "", changes, None if follows == node else follows)
    row = {name: getattr(cut, name) for name in _OF_CUT} | {
        "session": key,
        "node": node,
        "agent": agent or "",
        "exchange": exchange,
        "created_at": at,
        "changes": packed,
        "base": base,
    }
    insert_new(connection, CUTS, [row])
