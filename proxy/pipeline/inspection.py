"""Shows stored exchanges: their receipts, and what they sent. Searches texts in the history."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, Final

import orjson
from msgspec import Struct
from msgspec.structs import replace

from proxy.config import OFF
from proxy.conversation import ROOT, Kind
from proxy.dialects import REPAIRED, JsonObject, Message, dialect_named
from proxy.errors import InvalidRequest, NotFound
from proxy.pipeline.background import COUNTING, compute
from proxy.pipeline.context import Charge, free_of_charge
from proxy.pipeline.history import beside_hidden, read_in_portions, size_of
from proxy.pipeline.receipt import expanded, gap_lines, plan_lines, told_gaps
from proxy.pipeline.services import AppServices
from proxy.pipeline.session_view import timestamp, tools_sent
from proxy.store import CONTENT, Cursor, ExchangeRow, FoundTexts, Lineage, NodeRow, SessionRow, Store, is_withheld
from proxy.trimming import SUMMARIZE, Change, Cut, Entry, Hidden, PlanningContext, Policy, bypass, merged, plan

_COMPOSED: Final = frozenset({Kind.APPEND, Kind.PROVIDER_STATE})  # kinds that the proxy composed from the store
_NOTHING: Final = Policy()  # trims nothing more: the view of an earlier cut stays
_LEFT_OUT: Final = "the client left it out"
_SEARCH_SECONDS: Final = 1.0
_PAGE: Final = 50  # sessions per query
_LINE_BYTES: Final = 256  # approximate length of a plan's line
_AROUND: Final = 80  # characters on either side of a match

_UNSETTLED: Final[dict[str, Any]] = {
    **dict.fromkeys(("messages_before", "messages_sent", "calibration", "summary", "usage", "summarizer")),
    **dict.fromkeys(("upstream_model", "upstream_status", "error", "cost", "cost_saved", "cache_miss", "cost_missed")),
    **{name: [] for name in ("edits", "warnings", "finish_reasons", "own_calls")},
    "finished": False,
    "timings": {},
}
"""Default values for the receipt of an unsettled exchange."""


class Past(Struct, frozen=True, kw_only=True):
    """Data that receipts of one session refer to but do not hold themselves."""

    standing: Mapping[str, tuple[Change, ...]]
    """By exchange, the earlier cut's changes to messages that are sent."""
    gaps: Mapping[str, Sequence[Mapping[str, Any]]]  # by exchange, what earlier trims dropped
    lineage: Lineage  # the branches that the exchanges continued, if a receipt refers to messages there
    lines: int

    @property
    def size(self) -> int:
        """Approximate size of the receipts in bytes."""
        return self.lines * _LINE_BYTES


async def past_of(rows: Sequence[ExchangeRow], store: Store) -> Past:
    """Return what `receipt_document` needs beside these exchanges. All must belong to one session."""
    cuts: dict[tuple[str, str, str | None], Cut | None] = {}
    standing: dict[str, tuple[Change, ...]] = {}
    gaps: dict[str, Sequence[Mapping[str, Any]]] = {}
    ends: set[str] = set()
    lines = 0
    for row in rows:
        places = [(node or "", row.policy, row.agent) for node in (_cut_node(row), row.receipt.get("gaps_at"))]
        for place in places:
            if place not in cuts:
                cuts[place] = await store.cut_at(row.session_key, *place) if place[0] else None
        cut, before = map(cuts.get, places)
        if cut is not None:
            moved = row.receipt["cut"]["moved"]
            standing[row.id] = _of_earlier_moves(cut.changes, row.receipt) if moved else cut.changes
        gaps[row.id] = row.receipt.get("gaps", ()) if before is None else told_gaps(before.gaps)
        told = len(gaps[row.id]) + len(standing.get(row.id, ()))
        told += sum(len(run["before"]) for run in row.receipt.get("plan", ()))
        if told and row.base != ROOT:
            ends.add(row.base)
        lines += told
    return Past(
        standing=standing,
        gaps=gaps,
        lineage=await store.lineage(rows[0].session_key, ends) if rows else Lineage(),
        lines=lines,
    )


def _of_earlier_moves(changes: tuple[Change, ...], receipt: Mapping[str, Any]) -> tuple[Change, ...]:
    """Return the changes of a cut that are older than the exchange that moved it."""
    told = {
        (place, run["edit"], before, after)
        for run in receipt.get("plan", ())
        for place, (before, after) in enumerate(zip(run["before"], run["after"], strict=True), run["start"])
    }
    return tuple(
        change
        for change in changes
        if (change.position, change.edit, change.tokens_before, change.tokens_after) not in told
    )


def receipt_document(row: ExchangeRow, past: Past) -> dict[str, Any]:
    """Return an exchange for a reader. Each line of its plan names its node.

    What this exchange decided has one line per message, and so has each message that is sent in another form. What
    earlier exchanges dropped has one line per gap. So the receipt's length is proportional to what is sent, or was sent
    until then.
    """
    stored = _UNSETTLED | dict(row.receipt)
    cut = stored.pop("cut", None)
    if cut is not None and cut["moved"]:
        cut = cut | {"node": row.cut_node}
    depth = past.lineage.depth(row.base)

    def node_at(position: int) -> str | None:
        new = position - depth
        if new < 0:
            return past.lineage.node_at(row.base, position)
        return row.nodes[new] if new < len(row.nodes) else None

    for name in ("gaps", "gaps_at", "start"):
        stored.pop(name, None)
    lines = gap_lines(past.gaps[row.id], node_at, lambda start, stop: past.lineage.tokens(row.base, start, stop))
    lines += expanded(stored.pop("plan", ()), node_at)
    lines += plan_lines(past.standing.get(row.id, ()), node_at)
    return {
        "id": row.id,
        "session": row.session,
        "tenant": row.tenant,
        "status": row.status,
        "kind": row.kind,
        "policy": row.policy,
        "policy_version": row.policy_version or None,
        "model": row.model,
        "agent": row.agent,
        "stream": row.stream,
        "created_at": timestamp(row.created_at),
        "settled_at": timestamp(row.settled_at) if row.settled_at is not None else None,
        "base": row.base or None,
        "nodes": list(row.nodes),
        "replies": list(row.replies),
        "cut": cut,
        "plan": lines,
        "tokens_before": row.tokens_before,
        "tokens_sent": row.tokens_sent,
        **stored,
    }


class SentView(Struct, kw_only=True):
    """What an exchange sent, and the history that it was made from."""

    instructions: tuple[Message, ...]
    messages: tuple[Message, ...] = ()  # the messages after the instructions
    tools: bytes | None  # JSON
    entries: tuple[Entry, ...]  # the whole branch, with the request's new messages
    nodes: tuple[str | None, ...]  # for each entry its node; None if it never became one
    fates: list[str]  # for each entry `sent`, `shortened`, `dropped` or `summarised`
    changes: dict[int, Change] = {}  # the last change of each changed entry, by index
    edits: list[str]  # for each entry the edit that removed or changed it; empty if none did
    reasons: list[str]
    start: int = 0  # index of the first entry that the request included; the client left out those before
    incomplete: bool = False  # whether a replacement text that was sent is unknown


async def exchange_view(
    row: ExchangeRow, session: SessionRow, services: AppServices, charge: Charge = free_of_charge
) -> SentView:
    """Reconstruct what was sent, from the history, the cut of that time, and the changes on arrival.

    `charge` is called like that of a request.
    """
    store, key, dialect = services.store, row.session_key, dialect_named(session.dialect)
    rows = await read_in_portions(store, key, row.nodes[-1] if row.nodes else row.base, charge)
    nodes: list[str | None] = [each.node for each in rows]
    hidden = await store.hidden(session, [each.node for each in rows])
    forms = await store.forms(key, row.id)
    charge(size_of(forms.values()), len(forms))
    brought: list[Message] = []
    for name in () if row.nodes else row.messages:  # its messages never became nodes
        if (found := await store.body(key, name)) is not None:
            charge(len(found[1].raw), 1)
            brought.append(found[1])
            nodes.append(None)
    work = size_of([each.message for each in rows]) + size_of(forms.values()) + COUNTING * size_of(brought)
    entries = await compute(work, _entries, row, rows, hidden, forms, brought, services)
    stored = None
    if row.instructions is not None or row.kind == "append":
        stored = await store.instructions(key, row.instructions)
    lead = tuple(message.without_own_fields() for message in stored.messages) if stored is not None else ()
    charge(size_of(lead), len(lead))
    tools = await tools_sent(row, dialect, store)
    start: int = row.receipt.get("start", 0)
    spoken = len(entries) - start
    view = SentView(
        instructions=lead,
        tools=tools,
        entries=tuple(entries),
        nodes=tuple(nodes),
        fates=["dropped"] * start + ["sent"] * spoken,
        edits=[""] * len(entries),
        reasons=[_LEFT_OUT] * start + [""] * spoken,
        start=start,
    )
    cut = await cut_of(row, store)
    if cut is None and row.receipt.get(CONTENT) == "none":
        _add_told(row, view)
        view.messages = _messages_of(view)
        return view
    moved: dict[str, Any] = row.receipt.get("cut") or {}
    lost = cut is None and "observed" not in row.receipt and moved.get("moved") is True
    if lost:
        before = await store.cut(key, [node for node in nodes if node is not None], row.policy, row.agent)
        cut = None if before is None else before.cut
    known = PlanningContext(count=lambda message: services.counter.message(message, row.model), agent=row.agent)
    work = COUNTING * size_of([entry.message for entry in entries])
    await compute(work, _add_planned, row, view, cut, known)
    if lost:
        _add_lost_trim(row, view)
    return view


def _entries(
    row: ExchangeRow,
    rows: Sequence[NodeRow],
    hidden: Mapping[str, Hidden],
    forms: Mapping[str, Message],
    brought: Sequence[Message],
    services: AppServices,
) -> list[Entry]:
    """Return the messages of a request as entries, as trimming saw them. Those in `brought` never became nodes."""
    trims = row.policy != OFF and "observed" not in row.receipt
    entries = list(services.loader.branch(rows, row.model, hidden, agent=row.agent, trims=trims))
    if row.kind not in _COMPOSED:  # the client resent the replies itself, unchanged or in its own form
        for place, each in enumerate(rows):
            sent, beside = forms.get(each.node, each.message).without_own_fields(), hidden.get(each.node)
            if beside is not None:
                sent, beside = beside_hidden(sent, beside)
            entries[place] = replace(
                entries[place], message=sent, tokens=each.tokens, arrival=each.arrival, hidden=beside
            )
    for message in brought:
        sent = message.without_own_fields()
        tokens = services.counter.message(sent, row.model)
        entries.append(Entry(message=sent, tokens=tokens, ref="", position=len(entries), arrival=()))
    return entries


async def cut_of(row: ExchangeRow, store: Store) -> Cut | None:
    """Return the cut under which an exchange was sent, if any."""
    node = _cut_node(row)
    return None if node is None else await store.cut_at(row.session_key, node, row.policy, row.agent)


def _cut_node(row: ExchangeRow) -> str | None:
    told: dict[str, Any] | None = row.receipt.get("cut")
    return None if told is None else row.cut_node if told["moved"] else told["node"]


def _add_planned(row: ExchangeRow, view: SentView, cut: Cut | None, known: PlanningContext) -> None:
    """Add to `view` what was sent under a cut."""
    entries, composed = view.entries[view.start :], _is_composed(row)
    if (row.policy == OFF and not _is_held(row, view)) or "observed" in row.receipt or not entries:
        made = bypass(entries, known, composed=composed)
    else:
        as_now = None if cut is None else replace(cut, version=_NOTHING.version)
        made = plan(entries, _NOTHING, row.policy, known, as_now, composed=composed, start=view.start)
    view.messages = made.view
    if made.summary is not None and made.summary.role == "merge":
        view.instructions = merged(view.instructions, made.summary, entries[0].message.dialect)
    for gap in made.earlier:
        for place in range(gap.start, min(gap.stop, len(view.entries))):
            summed = made.summary is not None and place < made.summary.until
            view.fates[place] = "summarised" if summed else "dropped"
            view.edits[place], view.reasons[place] = gap.edit, gap.reason
    for change in made.changes:
        if change.position < len(view.entries) and view.fates[change.position] in {"sent", "shortened"}:
            _add_change(view, change, drops=change.message is None)


def _is_composed(row: ExchangeRow) -> bool:
    """Tell whether the proxy composed the request from the store. For a provider's state, a repair in it shows that."""
    repaired = any(warning.startswith(REPAIRED) for warning in row.receipt.get("warnings", ()))
    return row.kind == Kind.APPEND or (row.kind == Kind.PROVIDER_STATE and repaired)


def _is_held(row: ExchangeRow, view: SentView) -> bool:
    """Tell whether the provider held or got everything before the request's own messages, hidden rounds included."""
    own: int = row.receipt.get("messages_before") or 0
    return row.kind == Kind.PROVIDER_STATE and own < len(view.instructions) + len(view.entries)


def _add_change(view: SentView, change: Change, *, drops: bool) -> None:
    place = change.position
    view.fates[place] = "dropped" if drops else "shortened"
    view.edits[place], view.reasons[place], view.changes[place] = change.edit, change.reason, change


def _add_lost_trim(row: ExchangeRow, view: SentView) -> None:
    """Add what the trim of a failed exchange did, as far as its receipt tells. Its cut is not stored."""
    for place, change in _add_told(row, view).items():
        if change.edit == SUMMARIZE:
            view.fates[place] = "summarised"
        view.incomplete = view.incomplete or view.fates[place] != "dropped"
    view.messages = _messages_of(view)


def _add_told(row: ExchangeRow, view: SentView) -> dict[int, Change]:
    """Add the receipt's changes to `view`. Return them by index, without texts, because a receipt holds none."""
    told: dict[int, Change] = {}
    for run in row.receipt.get("plan", ()):
        for place, (before, after) in enumerate(zip(run["before"], run["after"], strict=True), run["start"]):
            if place < len(view.entries):
                change = Change(
                    position=place,
                    edit=run["edit"],
                    reason=run["reason"],
                    message=None,
                    tokens_before=before,
                    tokens_after=after,
                )
                _add_change(view, change, drops=run["action"] == "drop")
                told[place] = change
    return told


def _messages_of(view: SentView) -> tuple[Message, ...]:
    """Return the messages that were sent. If a replacement text is unknown, the original stands for it."""
    changed = {place: change.message for place, change in view.changes.items()}
    return tuple(
        [
            changed.get(place) or entry.message
            for place, (entry, fate) in enumerate(zip(view.entries, view.fates, strict=True))
            if fate in {"sent", "shortened"}
        ]
    )


def view_document(row: ExchangeRow, view: SentView, *, diff: bool) -> JsonObject:
    """Return what was sent as a JSON document. With `diff`, add each message of the history beside its sent form."""
    told: JsonObject = {
        "exchange": row.id,
        "session": row.session,
        "model": row.model,
        "policy": row.policy,
        "messages": [
            orjson.Fragment(raw) for message in (*view.instructions, *view.messages) for raw in message.listed
        ],
        "tools": None if view.tools is None else orjson.Fragment(view.tools),
        "tokens_before": row.tokens_before,
        "tokens_sent": row.tokens_sent,
    }
    if row.receipt.get(CONTENT) == "none":
        told[CONTENT] = "none"
    if view.incomplete:
        told["incomplete"] = True
    if diff:
        told["diff"] = [_compared(view, place) for place in range(len(view.entries))]
    return told


def _compared(view: SentView, place: int) -> JsonObject:
    entry, fate, change = view.entries[place], view.fates[place], view.changes.get(place)
    sent = as_listed(entry.message) if fate == "sent" else None
    if change is not None and change.message is not None:
        sent = as_listed(change.message)
    return {
        "node": view.nodes[place],
        "position": entry.position,
        "fate": fate,
        "reason": view.reasons[place] or None,
        "edit": view.edits[place] or None,
        "tokens_before": entry.tokens,
        "tokens_sent": entry.tokens if fate == "sent" else change.tokens_after if change is not None else 0,
        "original": as_listed(entry.message),
        "sent": sent,
    }


def as_listed(message: Message) -> Any:
    """Return a message as the API shows it: its JSON, or a list if it stands for several entries."""
    listed = [orjson.Fragment(raw) for raw in message.listed]
    return listed[0] if len(listed) == 1 else listed


# ------------------------------------------------------------------------------------------------------ search


async def search_texts(
    store: Store,
    query: str,
    tenant: str | None,
    *,
    limit: int = 50,
    after: str | None = None,
    seconds: float = _SEARCH_SECONDS,
) -> JsonObject:
    """Return messages that hold all words of `query`, the newest sessions first.

    Uses the index if there is one. Otherwise it scans messages for `seconds`, and reports how far it got; `next`
    continues from there.
    """
    words = query.casefold().split()
    if not words:
        raise InvalidRequest("q is empty. Name the words to look for.", param="q")
    if store.searches_index and (named := await store.find_texts(words, tenant)) is not None:
        return await _of_index(store, named, words, limit, after)
    until = time.monotonic() + seconds
    data: list[JsonObject] = []
    sessions = messages = withheld = 0
    oldest: int | None = None
    done = False
    while not done and len(data) < limit and time.monotonic() < until:
        rows, following = await store.sessions(tenant, limit=_PAGE, after=after)
        if not rows:
            after, done = None, True
            break
        for row in rows:
            found, count, without = await _found_in(store, row, words)
            data += found
            withheld += without
            sessions, messages, oldest = sessions + 1, messages + count, row.updated_at
            after = f"{row.updated_at}.{row.key}"
            if len(data) >= limit or time.monotonic() >= until:
                break
        else:
            after, done = following, following is None
    searched = {"sessions": sessions, "messages": messages, "not_stored": withheld, "complete": done}
    back_to = None if oldest is None else timestamp(oldest)
    return {"data": data, "next": None if done else after, "searched": {**searched, "back_to": back_to, "index": False}}


async def _of_index(
    store: Store, named: Sequence[FoundTexts], words: list[str], limit: int, after: str | None
) -> JsonObject:
    """Check the index's candidates: return those that hold all words, the newest sessions first."""
    last = None if after is None else Cursor.read(after)
    data: list[JsonObject] = []
    sessions = messages = 0
    place: Cursor | None = None
    done = True
    for each in named:
        if last is not None and (each.updated_at, each.key) >= (last.time, last.name):
            continue
        if len(data) >= limit:
            done = False
            break
        session = await store.session_at(each.key)
        if session is None:  # deleted meanwhile
            continue
        found: list[tuple[int, int, JsonObject]] = []  # (time stored, depth, match)
        with suppress(NotFound):  # deleted meanwhile
            async for rows in store.portions(each.key, each.nodes):
                found += await compute(_size(rows), _matches, session, rows, words)
                messages += len(rows)
        data += [match for *_, match in sorted(found, key=itemgetter(0, 1), reverse=True)]
        sessions += 1
        place = Cursor(time=each.updated_at, name=each.key)
    searched = {"sessions": sessions, "messages": messages, "not_stored": 0, "complete": done}
    back_to = None if place is None else timestamp(place.time)
    following = None if done else str(place)
    return {"data": data, "next": following, "searched": {**searched, "back_to": back_to, "index": True}}


async def _found_in(store: Store, session: SessionRow, words: list[str]) -> tuple[list[JsonObject], int, int]:
    """Search one session. Return matches (newest first), number of messages, and number of messages without a text."""
    ends = [branch.head for branch in await store.branches(session.key)]
    lineage = await store.lineage(session.key, ends)
    seen: set[str] = set()
    data: list[JsonObject] = []
    withheld = 0
    for end in ends:
        nodes = [node for node in reversed(lineage.nodes(end)) if node not in seen]
        seen.update(nodes)
        with suppress(NotFound):  # deleted meanwhile
            async for rows in store.portions(session.key, nodes):
                texts = [row for row in reversed(rows) if not is_withheld(row.message)]
                data += [match for *_, match in await compute(_size(texts), _matches, session, texts, words)]
                withheld += len(rows) - len(texts)
    return data, len(seen), withheld


def _size(rows: Iterable[NodeRow]) -> int:
    return size_of([row.message for row in rows])


def _matches(session: SessionRow, rows: Iterable[NodeRow], words: list[str]) -> list[tuple[int, int, JsonObject]]:
    """Return (time stored, depth, match) for each message that holds all words, in the order of `rows`."""
    found = [(row, _match(session, row, words)) for row in rows]
    return [(row.created_at, row.depth, match) for row, match in found if match is not None]


def _match(session: SessionRow, row: NodeRow, words: list[str]) -> JsonObject | None:
    """Return a message as a match if it holds all words; otherwise None."""
    text = row.message.readable()
    low = text.casefold()
    if not all(word in low for word in words):
        return None
    return {
        "session": session.id,
        "tenant": session.tenant,
        "dialect": session.dialect,
        "node": row.node,
        "exchange": row.exchange,
        "role": row.message.role,
        "created_at": timestamp(row.created_at),
        "snippet": snippet(text, low.find(words[0]), len(words[0])),
    }


def snippet(text: str, place: int, length: int) -> str:
    """Return the text around a match, on one line."""
    start, end = max(place - _AROUND, 0), place + length + _AROUND
    shown = " ".join(text[start:end].split())
    return f"{'…' if start else ''}{shown}{'…' if end < len(text) else ''}"
