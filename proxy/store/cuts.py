"""Cuts: where the views of a branch were trimmed up to, by policy and agent; and how changes are stored.

Changes and cuts are text: exact, and small even where a hundred thousand messages were dropped. The text is a JSON
object, each member left out where it is empty:

    why    [[edit, reason], …]: each pair once
    drop   [[why, rank, [[start, [tokens_before, …]], …]], …]: what is not sent, in runs of positions
    put    [[position, rank, why, tokens_before, tokens_after, text], …]: every other change, with the
           text of the message that is sent instead (null where there is none)

and of a cut also

    gaps   [[why, start, stop, tokens, tool_calls], …]: runs of messages that are not sent any more
    kept   [node, …]: the messages before the cut that lie in no gap, by position; left out where it is not
           known, as in cuts that were stored before there were gaps: all they dropped is under `drop`
    summary, account
           the summary that stands in the place of some gaps, and what input had cost
    stale  [[start, stop], …]: where reasoning is left out

`why` is a place in the first list. `rank` counts the changes of one position, so that their order is kept.
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
    """The JSON object of the module's docstring."""

    why: list[tuple[str, str]] = []
    drop: list[_Drop] = []
    put: list[_Put] = []

    def reason(self, place: int) -> tuple[str, str]:
        """Return edit and reason by their place in the list."""
        if not 0 <= place < len(self.why):
            raise ValueError("the changes name a reason that they do not list")
        return self.why[place]


class _CutText(_Changes, omit_defaults=True, forbid_unknown_fields=True):
    """The same of a cut."""

    gaps: list[_Gap] = []
    kept: list[str] | None = None
    summary: Summary | None = None
    account: Account | None = None
    stale: list[_StaleRange] = []


class Decided(Struct, frozen=True, kw_only=True):
    """What a cut does."""

    changes: tuple[Change, ...] = ()
    gaps: tuple[Gap, ...] = ()
    kept: tuple[str, ...] | None = None  # the nodes before it that lie in no gap; None where it is not known
    summary: Summary | None = None
    account: Account | None = None
    stale: tuple[StaleRange, ...] = ()


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(_Changes)
_CUT_DECODER: Final = msgspec.json.Decoder(_CutText)
_EMPTY: Final = "{}"


def encode_changes(changes: Collection[Change]) -> str:
    """Return `changes` as text. It is read back by position, the order for each position kept."""
    if not changes:
        return _EMPTY
    why: _Why = {}
    drop, put = _rows_of(changes, why)
    return _ENCODER.encode(_Changes(why=list(why), drop=drop, put=put)).decode()


def decode_changes(text: str, dialect: Dialect) -> tuple[Change, ...]:
    """Return the changes that `text` was made from, by position; raises ValueError where it is no such text."""
    return () if text == _EMPTY else _changes_in(_DECODER.decode(text), dialect)


def encode_cut(decided: Decided) -> str:
    """Return what a cut does as text. Half an emoji in a summary is read back as U+FFFD: no text holds it."""
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
    """Return what `text` was made from; raises ValueError where it is no such text."""
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
    """Return JSON data as text; half an emoji in it is read back as U+FFFD."""
    try:
        return _ENCODER.encode(data).decode()
    except UnicodeEncodeError:
        return _ENCODER.encode(mended(dict(data))).decode()


def _rows_of(changes: Iterable[Change], why: _Why) -> tuple[list[_Drop], list[_Put]]:
    """Return changes as rows; reasons that are new are added to `why`."""
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
    """Return the changes that a text holds, by position and rank."""
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


# --------------------------------------------------------------------------------- cuts that were read lately

MOST_LETTERS: Final = 16 * 1024 * 1024
"""Letters of all the texts that a process remembers on a small machine, with what is counted beside them. With what
they say, and what is read of that, these are some 80 MB, or 140 MB where the texts are Chinese. The cut of a session
with 2,000 messages has 400,000."""
_ENTRY_LETTERS: Final = 500  # what an entry takes beside its text, in letters
_ITEM_LETTERS: Final = 30
"""What a change or a gap takes beside its part of the text: 150 to 200 bytes, where it often has four."""


class DecodedCuts:
    """What texts of cuts say, bounded in size: the least recently used go first. Any thread may use it."""

    def __init__(self, most: int = MOST_LETTERS) -> None:
        """Begin empty, to hold texts of at most so many letters, about."""
        self._held: Final = Generations[Hashable, _Read](most, lambda read: read.size)

    def read(self, place: Hashable, packed: bytes, dialect: Dialect, text: Callable[[], str]) -> Decided:
        """Return what a `text` says, which was found `packed` at a `place`: there it is looked for first."""
        (found,) = self._held.recall((place,))
        if found is None or found.packed != packed:
            said = text()
            decided = decode_cut(said, dialect)
            size = len(said) + _ITEM_LETTERS * (len(decided.changes) + len(decided.gaps)) + _ENTRY_LETTERS
            found = _Read(packed=packed, decided=decided, size=size)
            self._held.put(place, found)
        return found.decided


class _Read(Struct, frozen=True, kw_only=True):
    """A cut that was read."""

    packed: bytes
    decided: Decided
    size: int


# ------------------------------------------------------------------------------------------------------- rows

_DECODED: Final = DecodedCuts()  # a memo of what follows from texts alone
_AT_ONCE: Final = 64  # cuts looked at in one question. The first nearly always holds the one wanted.

_OF_CUT: Final = ("position", "policy", "version", "tokens", "messages", "tool_calls")
"""What a cut and its row have in common."""
_DECIDED: Final = ("changes", "gaps", "summary", "account", "stale")
"""What a cut has of `Decided`."""
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
"""A cut is stored as what differs from the one before it; each that many-th as a whole, which takes as much as the
hundred after it. To read that many takes some 10 ms."""
_LAST_TEXTS: Final = Generations[tuple[bytes, ...], str](MOST_LETTERS, lambda said: 2 * len(said) + _ENTRY_LETTERS)
"""What chains say that were read or made lately: the next cut is packed against it."""


def _chain() -> Select[*tuple[Any, ...]]:
    """Read a cut and those that it is packed against, the one that is stored as a whole first."""
    columns = (CUTS.c.changes, CUTS.c.base)
    first = select(*columns, literal(0).label("step")).where(*matching(CUTS, "node", "policy", "agent"))
    chain = first.cte("chain", recursive=True)
    before = select(*columns, chain.c.step + 1).where(*matching(CUTS, "policy", "agent"), CUTS.c.node == chain.c.base)
    chain = chain.union_all(before.where(chain.c.step < _CHAIN_LENGTH))
    return select(chain.c.changes).order_by(chain.c.step.desc())


CHAIN: Final = _chain()
"""Reads what a cut is packed against, itself last."""


def cut_places(
    connection: StoreConnection, key: str, policy: str, agent: str | None, depth: int, most: int
) -> list[tuple[int, str]]:
    """Return (position, node) of up to `most` cuts of the session at `depth` at most, the greatest first."""
    asked = {"key": key, "policy": policy, "agent": agent or "", "depth": depth, "most": most}
    return [(row.position, row.node) for row in connection.execute(_PLACES_WITHIN, asked)]


def newest_cut(
    connection: StoreConnection, key: str, branch: Collection[str], policy: str, agent: str | None
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


def cut_row(connection: StoreConnection, key: str, node: str, policy: str, agent: str | None) -> Row | None:
    """Return the row of the cut that was made at exactly this node."""
    asked = {"key": key, "node": node, "policy": policy, "agent": agent or ""}
    return connection.execute(_ONE, asked).one_or_none()


def changes_of(connection: StoreConnection, key: str, row: Row) -> str:
    """Return the changes of a row of `CUTS`, as text."""
    if row.base is None:
        return unpack(row.changes)
    asked = {"key": key, "node": row.base, "policy": row.policy, "agent": row.agent}
    return unpack(row.changes, _last_of(tuple([packed for (packed,) in connection.execute(CHAIN, asked)])))


def _last_of(chain: tuple[bytes, ...]) -> str | None:
    """Return the text of the last one of a chain."""
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
    """Return changes as a cut's row has them, with its `base`; `follows` is the node of the cut before."""
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
    """Return the cut that was made at exactly this node, with the nodes that it kept."""
    row = cut_row(connection, key, node, policy, agent)
    if row is None:
        return None
    place, text = (key, row.node, row.policy, row.agent), partial(changes_of, connection, key, row)
    return standing_cut(row, _DECODED.read(place, row.changes, dialect_of(key), text))


def standing_cut(row: Any, decided: Decided) -> StandingCut:
    """Return the cut of a row, or of a record with the names of its columns."""
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
    """Keep a cut; one that is there already stays.

    Where its `kept` is None, whoever reads it must read the whole branch. `follows` is the node of the cut before it on
    the branch.
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
