"""What can be done to a session beside asking in it: sum it up now, or go on from it in another one."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from proxy.errors import InvalidRequest
from proxy.pipeline import compact, session_view, valid_id
from proxy.server.connection import bounded
from proxy.server.deps import CallerDependency, FoundSession, OpenServices, json_response
from proxy.server.sessions import summary_of, summary_told
from proxy.summaries import Caller

router = APIRouter(tags=["sessions"])

_TRIES: Final = 3
"""Answers of the summarizer that are waited for: one may be refused, and a long history takes several."""
_MOST_BYTES: Final = 65_536


class Fork(BaseModel):
    """The body that asks for a fork."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    as_id: Annotated[str, Field(alias="as", min_length=1)]
    """The new session's id."""
    at: Annotated[str, Field(min_length=1)] | None = None
    """The node up to which the history is shared; without one, where the session stands."""


@router.post("/sessions/{session}/compact")
async def compact_session(
    request: Request,
    found: FoundSession,
    services: OpenServices,
    caller: CallerDependency,
    policy: Annotated[str | None, Query(description="Name of the policy whose settings are taken.")] = None,
) -> Response:
    """Sum up now what may be summed up; the next request uses it."""
    now = await session_view(found, policy, services.policies, services.means)
    if now.policy is None:
        raise InvalidRequest("Nothing is summed up under 'off'. Name a policy.", param="policy")
    # The administrator's key is none of a provider's.
    sent = [(name, value) for name, value in request.scope["headers"] if not caller.admin]
    row = await compact(
        found,
        now,
        now.policy,
        Caller(tenant=found.tenant, headers=tuple(sent)),
        services.means,
        patience=_TRIES * services.settings.summarizer.timeout,
    )
    if row is None:
        return json_response({"summary": None, "reason": "there is nothing to sum up yet"})
    return json_response(summary_told(row), 201)


@router.post("/sessions/{session}/fork")
async def fork_session(request: Request, found: FoundSession, services: OpenServices) -> Response:
    """Make a session that shares the history of this one up to a node."""
    announced = request.headers.get("content-length", "").encode("latin-1")
    body = await bounded(request.stream(), announced, _MOST_BYTES)
    try:
        fork = Fork.model_validate_json(body)
    except ValidationError as why:
        first = why.errors(include_url=False)[0]
        param = ".".join(map(str, first["loc"])) or None
        raise InvalidRequest(
            f'{param or "The body"}: {first["msg"]}. Send {{"as": "NEW-ID", "at": "NODE"}}; without "at" it '
            "is where the session stands.",
            param=param,
        ) from why
    name = valid_id(fork.as_id, "as")
    row = await services.store.fork(found.tenant, found.key, fork.at or found.head, name)
    return json_response(summary_of(row, services.settings.finish.tools), 201)
