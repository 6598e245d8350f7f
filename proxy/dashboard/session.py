"""The page of one session: the conversation beside what one request sent of it.

What was sent is the data of `GET /exchanges/{id}/view`. A page shows a window of the messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from msgspec import Struct

from proxy.dashboard.render import Page
from proxy.dashboard.text import CLIPPED, WHOLE, clip, difference
from proxy.dialects import Message, dialect_named
from proxy.errors import InvalidRequest, NotFound
from proxy.pipeline import AppServices, compute, session_document, summary_document, timestamp
from proxy.pipeline.context import Charge
from proxy.pipeline.history import size_of
from proxy.pipeline.inspection import SentView, cut_of, exchange_view, past_of, receipt_document
from proxy.store import (
    BranchRow,
    ExchangeRow,
    InstructionsRow,
    Lineage,
    NodeRow,
    SessionListQuery,
    SessionRow,
    Store,
    SummaryRow,
)
from proxy.trimming import Summary

WINDOW: Final = 50  # messages on a page
_MOST_REQUESTS: Final = 5_000  # of a session, the newest ones are read
_MOST_POINTS: Final = 600  # most points of a chart
_NEAR: Final = 4
_MOST_BRANCHES: Final = 100
_MOST_REPLIES: Final = 20  # most replies to one request that are shown
_AT_ONCE: Final = 1_000
_SENT: Final = {"state": "sent", "edit": None, "reason": None, "sent": None}
_UNSTORED: Final = {"node": None, "agent": None, "partial": False, "created_at": None}
"""Fields of a message that is not stored as a node, because its request failed."""


class SessionData(Struct, frozen=True, kw_only=True):
    """The data of the page."""

    session: SessionRow
    cost_saved: float | None
    requests: Sequence[dict[str, Any]]  # oldest first
    answered: Mapping[str, Mapping[str, Any]]  # the requests by the nodes of their replies
    chosen: ExchangeRow | None
    place: int  # number of the chosen request; 0 without one
    receipt: Mapping[str, Any]
    view: SentView | None  # what the chosen request sent, and from which messages
    rows: Mapping[int, NodeRow]  # the stored messages of the window, by position
    start: int  # position of the first message of the window
    total: int  # messages of the branch up to the request
    replies: tuple[NodeRow, ...]
    summary: Summary | None  # the summary that was sent in place of the beginning
    instructions: InstructionsRow | None
    summaries: tuple[SummaryRow, ...]
    branches: Sequence[tuple[BranchRow, int]]  # each with the number of messages that it shares with the head's branch
    window: int | None  # the model's context window in tokens

    @property
    def size(self) -> int:
        """Bytes of the shown messages."""
        shown = () if self.view is None else self.view.entries[self.start : self.start + WINDOW]
        lead = () if self.instructions is None else self.instructions.messages
        return size_of([*(entry.message for entry in shown), *lead, *(row.message for row in self.replies)])


async def read_requests(store: Store, session: SessionRow) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return the requests of a session, oldest first, and a mapping from the nodes of replies to their requests."""
    rows: list[ExchangeRow] = []
    after: str | None = None
    while len(rows) < _MOST_REQUESTS:
        page, after = await store.exchanges(session.key, limit=_AT_ONCE, after=after)
        rows += page
        if after is None:
            break
    rows.reverse()
    requests = [_request(number, row) for number, row in enumerate(rows, start=1)]
    answered = {node: told for told, row in zip(requests, rows, strict=True) for node in row.replies}
    return requests, answered


def _request(number: int, row: ExchangeRow) -> dict[str, Any]:
    """Return one request of a session for the slider and the chart. Numbers start at 1."""
    told = row.receipt
    cut = told.get("cut")
    same = ("kind", "policy", "model", "agent", "tokens_before", "tokens_sent")
    return {
        "number": number,
        "id": row.id,
        "created_at": row.created_at,
        "status": row.status.value,
        **{name: getattr(row, name) for name in same},
        "tokens_cached": _cached(told.get("usage")),
        "cost": told.get("cost"),
        "trimmed": bool(cut and cut["moved"]) and "observed" not in told,
        "warnings": len(told.get("warnings", ())),
    }


def _cached(usage: Any) -> int | None:
    """Return the tokens that the provider reports as read from its cache, in the usage format of either API."""
    if not isinstance(usage, Mapping):
        return None
    told = cast("Mapping[str, Any]", usage)
    given = told.get("prompt_tokens_details")
    details: Mapping[str, Any] = cast("Mapping[str, Any]", given) if isinstance(given, Mapping) else {}
    found = details.get("cached_tokens", told.get("cache_read_input_tokens"))
    return found if isinstance(found, int) else None


async def read_session(
    services: AppServices,
    session: SessionRow,
    charge: Charge,
    *,
    request: int | None,
    exchange: str | None,
    start: int | None,
) -> SessionData:
    """Read the data of the page. `charge` is called as in `exchange_view`.

    The view is that of the request with the number `request` or the id `exchange`, else of the newest. `start` is the
    position of the first shown message; without it, the last messages are shown.
    """
    store = services.store
    listed, _ = await store.listed(SessionListQuery(key=session.key))
    requests, answered = await read_requests(store, session)
    place = _place(requests, request, exchange)
    chosen = await store.exchange(requests[place - 1]["id"]) if place else None
    told: Mapping[str, Any] = {}
    view, summary, tip = None, None, session.head
    if chosen is not None:
        past = await past_of([chosen], store)
        told = await compute(past.size, receipt_document, chosen, past)
        view = await exchange_view(chosen, session, services, charge)
        summary = cut.summary if (cut := await cut_of(chosen, store)) is not None else None
        tip = chosen.nodes[-1] if chosen.nodes else chosen.base
    lineage = await store.lineage(session.key, [tip]) if tip else Lineage()
    depth = lineage.depth(tip)
    total = depth if view is None else len(view.entries)
    start = max(0, total - WINDOW) if start is None else min(start, max(0, total - 1))
    last = lineage.node_at(tip, min(start + WINDOW, depth) - 1)
    rows = await store.path(session.key, last, below=start) if last is not None else []
    replies: list[NodeRow] = []
    if chosen is not None:
        for node in chosen.replies[:_MOST_REPLIES]:
            replies += await store.path(session.key, node, below=depth)
    instructions = await store.instructions(session.key, chosen.instructions if chosen is not None else None)
    if instructions is not None:
        charge(size_of(instructions.messages), len(instructions.messages))
    dialect = dialect_named(session.dialect)
    window = services.knowledge.facts(session.model, dialect).context_window if session.model else None
    return SessionData(
        session=session,
        cost_saved=listed[0].cost_saved if listed else None,
        requests=requests,
        answered=answered,
        chosen=chosen,
        place=place,
        receipt=told,
        view=view,
        rows={row.depth - 1: row for row in rows},
        start=start,
        total=total,
        replies=tuple(replies),
        summary=summary,
        instructions=instructions,
        summaries=tuple(await store.summary_rows(session.key)) if session.summaries else (),
        branches=await read_branches(store, session),
        window=window,
    )


def _place(requests: Sequence[Mapping[str, Any]], request: int | None, exchange: str | None) -> int:
    if exchange is not None:
        found = next((each["number"] for each in requests if each["id"] == exchange), None)
        if found is None:
            raise NotFound(f"There is no exchange {exchange!r} in this session.", param="exchange")
        return cast("int", found)
    if request is None or not requests:
        return len(requests)
    if not 1 <= request <= len(requests):
        raise InvalidRequest(f"request must be 1 to {len(requests)}: the session has so many.", param="request")
    return request


async def read_branches(store: Store, session: SessionRow) -> Sequence[tuple[BranchRow, int]]:
    """Return the branches of a session, the current one first, then the newest."""
    leaves = (await store.branches(session.key))[:_MOST_BRANCHES]
    if [leaf.head for leaf in leaves] in ([], [session.head]):
        return [(leaf, leaf.depth) for leaf in leaves]
    lineage = await store.lineage(session.key, [session.head, *(leaf.head for leaf in leaves)])
    found = [(leaf, lineage.common(leaf.head, lineage, session.head)) for leaf in leaves]
    return sorted(found, key=lambda each: each[0].head != session.head)


# ------------------------------------------------------------------------------------------------------- the page


def session_page(found: SessionData) -> Page:
    """Return the page of a session."""
    shown = [_message(found, place) for place in range(found.start, min(found.start + WINDOW, found.total))]
    chosen = None
    if found.chosen is not None:
        told = {name: value for name, value in found.receipt.items() if name not in {"plan", "nodes", "replies"}}
        chosen = told | {"number": found.place, "tokens_cached": found.requests[found.place - 1]["tokens_cached"]}
    data = {
        "session": session_document(found.session, cost_saved=found.cost_saved) | {"model": found.session.model},
        "requests": [each | {"created_at": timestamp(each["created_at"])} for each in found.requests],
        "chosen": chosen,
        "runs": _runs(found.view.fates if found.view is not None else ["sent"] * found.total),
        "messages": shown,
        "window": {"start": found.start, "stop": found.start + len(shown), "total": found.total, "size": WINDOW},
        "replies": [_said(row) for row in found.replies],
        "instructions": None
        if found.instructions is None
        else {
            "tokens": found.instructions.tokens,
            "messages": [_clipped(message) for message in found.instructions.messages],
        },
        "summary": None
        if found.summary is None
        else {"text": found.summary.text, "until": found.summary.until, "tokens": found.summary.tokens}
        | {"covered_tokens": found.summary.covered_tokens, "covered_messages": found.summary.covered_messages},
        "summaries": [summary_document(row, row.created_at) | {"status": row.status.value} for row in found.summaries],
        "branches": _branches(found),
        "agents": sorted({each["agent"] for each in found.requests if each["agent"]}),
        "chart": _chart(found.requests, found.window),
    }
    columns = ("position", "node", "role", "agent", "state", "edit", "reason", "tokens", "tokens_sent", "text")
    return Page(template="session.html", title=found.session.id, data=data, columns=columns, rows=shown)


def _said(row: NodeRow) -> dict[str, Any]:
    """Return a stored message for display."""
    return {
        "position": row.depth - 1,
        "node": row.node,
        "role": row.message.role,
        "agent": row.agent,
        "tokens": row.tokens,
        "partial": row.partial,
        "created_at": timestamp(row.created_at),
        **_clipped(row.message),
    }


def _clipped(message: Message, most: int = CLIPPED) -> dict[str, Any]:
    text = message.readable()
    shown = clip(text, most)
    return {"role": message.role, "text": shown, "more": len(text) - len(shown)}


def _message(found: SessionData, place: int) -> dict[str, Any]:
    """Return one message of the window, with what was sent of it."""
    row, view = found.rows.get(place), found.view
    if view is None or place >= len(view.entries):
        return {**(_said(row) if row is not None else {}), **_SENT, "tokens_sent": row.tokens if row is not None else 0}
    entry, fate, change = view.entries[place], view.fates[place], view.changes.get(place)
    sent = change.message if change is not None else None
    said = _said(row) if row is not None else _UNSTORED | {"position": place}
    return {
        **said,
        **_clipped(entry.message),
        "tokens": entry.tokens,
        "state": fate,
        "edit": view.edits[place] or None,
        "reason": view.reasons[place] or None,
        "tokens_sent": entry.tokens if fate == "sent" else change.tokens_after if change is not None else 0,
        "sent": None if sent is None else _clipped(sent),
    }


def _branches(found: SessionData) -> list[dict[str, Any]]:
    """Return the branches, each with the request that led to its end and the agent of that request."""
    told: list[dict[str, Any]] = []
    for leaf, shared in found.branches:
        request = found.answered.get(leaf.head, {})
        told.append(
            {
                "head": leaf.head,
                "depth": leaf.depth,
                "shared": shared,
                "updated_at": timestamp(leaf.updated_at),
                "current": leaf.head == found.session.head,
                "agent": request.get("agent"),
                "request": request.get("number"),
            }
        )
    return told


def _runs(fates: Sequence[str]) -> list[dict[str, Any]]:
    """Return runs of adjacent messages with the same state, from first to last."""
    runs: list[dict[str, Any]] = []
    for place, state in enumerate(fates):
        if runs and runs[-1]["state"] == state:
            runs[-1]["stop"] = place + 1
        else:
            runs.append({"state": state, "start": place, "stop": place + 1})
    return runs


def _chart(requests: Sequence[Mapping[str, Any]], window: int | None) -> dict[str, Any]:
    """Return the chart of tokens per request, thinned to about `_MOST_POINTS`. Trims are listed separately."""
    step = max(1, -(-len(requests) // _MOST_POINTS))
    shown = [each for each in requests if step == 1 or each["number"] % step == 0 or each["number"] == len(requests)]
    series: list[dict[str, Any]] = [
        {"label": "before", "values": [each["tokens_before"] for each in shown]},
        {"label": "sent", "values": [each["tokens_sent"] for each in shown], "fill": True},
        {"label": "cached", "values": [each["tokens_cached"] for each in shown], "fill": True},
    ]
    most = max([each["tokens_before"] for each in shown], default=0)
    if window is not None and most > window / _NEAR:  # otherwise this line would flatten the others
        series.append({"label": "what the model takes", "values": [window] * len(shown), "colour": 6, "dash": True})
    return {
        "x": [each["number"] for each in shown],
        "series": series,
        "trims": [each["number"] for each in requests if each["trimmed"]][:_MOST_POINTS],
        "window": window,
        "thinned": step > 1,
    }


# ----------------------------------------------------------------------------------------------------- one message


async def read_message(
    services: AppServices, session: SessionRow, node: str, exchange: str | None, charge: Charge
) -> tuple[NodeRow, Message | None]:
    """Return a message, and the message that a request sent in its place, if that differs (else None).

    `charge` is called as in `exchange_view`.
    """
    store = services.store
    lineage = await store.lineage(session.key, [node])
    rows = await store.path(session.key, node, below=lineage.depth(node) - 1) if node in lineage else []
    if not rows:
        raise NotFound(f"There is no message {node!r} in this session.", param="node")
    row = rows[-1]
    charge(len(row.message.raw), 1)
    if exchange is None:
        return row, None
    asked = await store.exchange(exchange)
    if asked is None or asked.session_key != session.key:
        raise NotFound(f"There is no exchange {exchange!r} in this session.", param="exchange")
    change = (await exchange_view(asked, session, services, charge)).changes.get(row.depth - 1)
    return row, None if change is None else change.message


def message_page(session: SessionRow, row: NodeRow, sent: Message | None, exchange: str | None) -> Page:
    """Return the page of one message, up to `WHOLE` characters, and its difference from what was sent instead."""
    most = WHOLE if sent is None else WHOLE // 2
    said, there = _said(row) | _clipped(row.message, most), None if sent is None else clip(sent.readable(), most)
    data: dict[str, Any] = {
        "session": {"id": session.id, "tenant": session.tenant, "dialect": session.dialect},
        "message": said,
        "exchange": exchange,
        "sent": there,
        "pieces": [],
    }
    if there is not None:
        pieces = difference(said["text"], there)
        data["pieces"] = [{"kind": piece.kind, "text": piece.text} for piece in pieces]
    columns = ("position", "role", "tokens", "text")
    return Page(template="message.html", title=f"Message {row.depth}", data=data, columns=columns, rows=[said])
