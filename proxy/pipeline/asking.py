"""How a request asks, beside what it says: what its headers tell."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

from msgspec import Struct

from proxy.conversation import Mode
from proxy.dialects import headers
from proxy.dialects.chat.request import ChatRequest
from proxy.errors import InvalidRequest
from proxy.pipeline.identity import header_of
from proxy.trimming import Policy

_RETRY_COUNT: Final = "x-stainless-retry-count"
_IDEMPOTENCY_KEY: Final = "idempotency-key"
_POSITIVE: Final = re.compile("0*[1-9][0-9]*")


class RequestContext(Struct, frozen=True, kw_only=True):
    """How a request asks."""

    tenant: str
    mode: Mode = Mode.AUTO
    retried: bool = False
    """Whether it announces itself as a retry."""
    idempotency: str | None = None
    """Hash of its `Idempotency-Key`; None where it has none."""
    agent: str | None = None
    """Who asks, where several agents share a session."""
    policy: str | None = None
    """Name of the policy whose cut is wanted; None where there can be none."""
    recipe: str | None = None
    """Recipe of the summaries that the policy may use; None where there can be none."""
    whole: bool = False
    """Whether the messages that the cut dropped are wanted too."""


def context_of(
    tenant: str, sent: Mapping[bytes, bytes], request: ChatRequest, name: str, policy: Policy | None
) -> RequestContext:
    """Return how a request asks; `sent` are the `first_values` of its headers.

    Raises:
        InvalidRequest: a header of ours is none that is known, or is no text.
    """
    return RequestContext(
        tenant=tenant,
        mode=_mode_of(sent),
        retried=_announces_retry(sent),
        idempotency=_idempotency_of(sent),
        agent=header_of(sent, headers.AGENT_NAME) or _speaker(request),
        policy=name if policy is not None else None,
        recipe=policy.summarizing.recipe if policy is not None else None,
    )


def _speaker(request: ChatRequest) -> str | None:
    """Return the agent that the newest message says it is from; None where it says nothing."""
    last = request.messages[-1] if request.messages else None
    if last is None or not last.own_fields:
        return None
    agent = last.data.get("agent")
    return agent if isinstance(agent, str) and agent else None


def _mode_of(sent: Mapping[bytes, bytes]) -> Mode:
    value = header_of(sent, headers.SESSION_MODE)
    if value is None:
        return Mode.AUTO
    try:
        return Mode(value.strip().lower())
    except ValueError as why:
        raise InvalidRequest(
            f"X-Session-Mode is {value!r}. It can be: auto, append, full.", param="X-Session-Mode"
        ) from why


def _announces_retry(sent: Mapping[bytes, bytes]) -> bool:
    value = header_of(sent, _RETRY_COUNT)
    return value is not None and _POSITIVE.fullmatch(value.strip()) is not None


def _idempotency_of(sent: Mapping[bytes, bytes]) -> str | None:
    """Return a hash of the key by which the client marks all sendings of one request; None without one."""
    value = header_of(sent, _IDEMPOTENCY_KEY)
    return None if value is None else blake2b(value.encode(), digest_size=16).hexdigest()
