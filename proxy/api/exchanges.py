"""The receipts: what was asked, what was sent instead and why, and how it ended."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import unquote

from fastapi import APIRouter, Response

from proxy.api.deps import After, Asking, FoundSession, Limit, OpenServices, Services, json_response
from proxy.api.sessions import timestamp
from proxy.errors import NotFound
from proxy.exchange.receipt import expanded, gap_lines, plan_lines
from proxy.store.records import ExchangeRow

_UNSETTLED: Final[dict[str, Any]] = {
    "messages_before": None,
    "messages_sent": None,
    "edits": [],
    "warnings": [],
    "usage": None,
    "finish_reasons": [],
    "upstream_model": None,
    "upstream_status": None,
    "error": None,
    "timings": {},
}
"""What a receipt holds that nobody settled."""

router = APIRouter(tags=["exchanges"])


@router.get("/sessions/{session}/exchanges")
async def list_exchanges(
    found: FoundSession, services: OpenServices, limit: Limit = 50, after: After = None
) -> Response:
    """Return the session's exchanges, the newest first."""
    rows, cursor = await services.store.exchanges(found.key, limit=limit, after=after)
    past = _Past(services)
    return json_response({"data": [await receipt(row, services, past) for row in rows], "next": cursor})


@router.get("/exchanges/{exchange}")
async def show_exchange(exchange: str, services: OpenServices, caller: Asking) -> Response:
    """Return one exchange."""
    row = await services.store.exchange(unquote(exchange))
    if row is None or not (caller.admin or caller.tenant == row.tenant):
        raise NotFound(f"There is no exchange {unquote(exchange)!r}.", param="exchange")
    return json_response(await receipt(row, services, _Past(services)))


class _Past:
    """The branches that exchanges went on from: the newest one's is read, and holds most of the others."""

    def __init__(self, services: Services) -> None:
        self._store = services.store
        self._branch: list[str] = []
        self._tokens: list[int] = []
        self._places: dict[str, int] = {}

    async def before(self, row: ExchangeRow) -> tuple[list[str], list[int]]:
        """Return the nodes of the branch that the exchange went on from, oldest first, and their tokens."""
        if row.base not in self._places:
            path = await self._store.path(row.session_key, row.base)
            self._branch = [node.node for node in path]
            self._tokens = [node.tokens for node in path]
            self._places = {node: place for place, node in enumerate(self._branch)}
        stop = self._places.get(row.base, -1) + 1
        return self._branch[:stop], self._tokens[:stop]


async def receipt(row: ExchangeRow, services: Services, past: _Past) -> dict[str, Any]:
    """Return an exchange for a reader, each change of its plan with the node that it is about."""
    stored = _UNSETTLED | dict(row.receipt)
    cut = stored.pop("cut", None)
    before, tokens = await past.before(row)
    nodes = [*before, *row.nodes]
    lines = gap_lines(stored.pop("gaps", ()), before, tokens)
    lines += expanded(stored.pop("plan", ()), nodes)
    if cut is not None and cut["moved"]:
        cut = cut | {"node": row.cut_node}
    elif cut is not None:  # an earlier exchange moved it: what it does to the view is kept with it
        standing = await services.store.cut_at(row.session_key, cut["node"], row.policy, row.agent)
        lines += plan_lines(standing.changes, nodes) if standing is not None else []
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
        "cost": None,
        **stored,
    }
