"""The exchanges API: receipts of what was asked, what was sent and why, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final
from urllib.parse import unquote

from fastapi import APIRouter, Query, Response
from msgspec import Struct

from proxy.conversation import ROOT
from proxy.errors import NotFound
from proxy.pipeline import compute, expanded, gap_lines, plan_lines, timestamp
from proxy.pipeline.inspection import exchange_view, view_document
from proxy.server.dependencies import (
    AUTHENTICATED,
    After,
    CallerDependency,
    FoundSession,
    Limit,
    OpenServices,
    json_response,
)
from proxy.store import ExchangeRow, Lineage, Store
from proxy.trimming import Change

_UNSETTLED: Final[dict[str, Any]] = {
    **dict.fromkeys(("messages_before", "messages_sent", "calibration", "summary", "usage", "summarizer")),
    **dict.fromkeys(("upstream_model", "upstream_status", "error", "cost", "cost_saved", "cache_miss", "cost_missed")),
    **{name: [] for name in ("edits", "warnings", "finish_reasons", "own_calls")},
    "finished": False,
    "timings": {},
}
"""What a receipt holds that nobody settled."""

_LINE_BYTES: Final = 256  # about what a line of a plan is long

router = APIRouter(tags=["exchanges"], dependencies=AUTHENTICATED)


@router.get("/sessions/{session}/exchanges")
async def list_exchanges(
    found: FoundSession, services: OpenServices, limit: Limit = 50, after: After = None
) -> Response:
    """Return the session's exchanges, the newest first."""
    rows, cursor = await services.app.store.exchanges(found.key, limit=limit, after=after)
    past = await past_of(rows, services.app.store)
    return await compute(
        past.lines * _LINE_BYTES, lambda: json_response({"data": [receipt(row, past) for row in rows], "next": cursor})
    )


@router.get("/exchanges/{exchange}")
async def show_exchange(exchange: str, services: OpenServices, caller: CallerDependency) -> Response:
    """Return one exchange."""
    row = await services.app.store.exchange(unquote(exchange))
    if row is None or not (caller.admin or caller.tenant == row.tenant):
        raise NotFound(f"There is no exchange {unquote(exchange)!r}.", param="exchange")
    past = await past_of([row], services.app.store)
    return await compute(past.lines * _LINE_BYTES, lambda: json_response(receipt(row, past)))


@router.get("/exchanges/{exchange}/view")
async def show_view(
    exchange: str,
    services: OpenServices,
    caller: CallerDependency,
    diff: Annotated[bool, Query(description="With each message of the history beside what was sent of it.")] = False,
) -> Response:
    """Return what was sent upstream."""
    row = await services.app.store.exchange(unquote(exchange))
    session = await services.app.store.session_at(row.session_key) if row is not None else None
    if row is None or session is None or not (caller.admin or caller.tenant == row.tenant):
        raise NotFound(f"There is no exchange {unquote(exchange)!r}.", param="exchange")
    view = await exchange_view(row, session, services.app)
    size = sum([len(entry.message.raw) for entry in view.entries])
    return await compute(size, lambda: json_response(view_document(row, view, diff=diff)))


class Past(Struct, frozen=True, kw_only=True):
    """What receipts of one session speak of and do not hold themselves."""

    standing: Mapping[str, tuple[Change, ...]]
    """By exchange, what the cut that it found does to the messages that are sent."""
    lineage: Lineage  # the branches that they went on from, where something is said of messages there
    lines: int


async def past_of(rows: Sequence[ExchangeRow], store: Store) -> Past:
    """Return what `receipt` needs beside these exchanges, which are of one session."""
    cuts: dict[tuple[str, str, str | None], tuple[Change, ...]] = {}
    standing: dict[str, tuple[Change, ...]] = {}
    ends: set[str] = set()
    lines = 0
    for row in rows:
        cut = row.receipt.get("cut")
        node = None if cut is None else row.cut_node if cut["moved"] else cut["node"]
        if cut is not None and node is not None:
            place = (node, row.policy, row.agent)
            if place not in cuts:
                found = await store.cut_at(row.session_key, *place)
                cuts[place] = found.changes if found is not None else ()
            standing[row.id] = _of_earlier_moves(cuts[place], row.receipt) if cut["moved"] else cuts[place]
        told = len(row.receipt.get("gaps", ())) + len(standing.get(row.id, ()))
        told += sum(len(run["before"]) for run in row.receipt.get("plan", ()))
        if told and row.base != ROOT:
            ends.add(row.base)
        lines += told
    return Past(
        standing=standing, lineage=await store.lineage(rows[0].session_key, ends) if rows else Lineage(), lines=lines
    )


def _of_earlier_moves(changes: tuple[Change, ...], receipt: Mapping[str, Any]) -> tuple[Change, ...]:
    """Return those changes of a cut that were there before the exchange that moved it."""
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


def receipt(row: ExchangeRow, past: Past) -> dict[str, Any]:
    """Return an exchange for a reader, each line of its plan with the node that it is about.

    What this exchange decided is told message by message, and so is what is sent in another form; what
    earlier ones dropped is one line for each gap. So a receipt is as long as what is sent, or was until then.
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

    lines = gap_lines(stored.pop("gaps", ()), node_at, lambda start, stop: past.lineage.tokens(row.base, start, stop))
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
