"""Which policy serves a request: the one that the client names, else the first that matches.

It knows tenants, models and names; what a policy does is not its business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from proxy.errors import InvalidRequest
from proxy.trimming.policy import Policy

OFF: Final = "off"
"""What `X-Context-Policy` says to bypass trimming. No policy is named so."""

BUILT_IN: Final = Policy()
"""The policy for what no other one matches: it sends everything."""


def with_built_in(policies: Mapping[str, Policy]) -> dict[str, Policy]:
    """Return the policies in order, and the built-in one after them unless one matches every request.

    It is called `default`, or `built-in` where a policy of that name matches only some requests.
    """
    if any("*" in policy.match.models and "*" in policy.match.tenants for policy in policies.values()):
        return dict(policies)
    return {**policies, "built-in" if "default" in policies else "default": BUILT_IN}


def select_policy(
    policies: Mapping[str, Policy], tenant: str, model: str, name: str | None = None
) -> tuple[str, Policy]:
    """Return name and policy for a request.

    Args:
        policies: those of the settings, in order.
        tenant: whose request it is.
        model: the model it asks for; empty where it names none.
        name: what `X-Context-Policy` says, decoded; None without it. `OFF` is no policy: who bypasses
            trimming does not ask.

    Raises:
        InvalidRequest: there is no policy of that name.
    """
    known = with_built_in(policies)
    if name is not None:
        if name not in known:
            raise InvalidRequest(
                f"There is no policy named {name!r}. Use one of {', '.join(known)}; '{OFF}' trims nothing.",
                param="X-Context-Policy",
                code="unknown_policy",
            )
        return name, known[name]
    return next((key, policy) for key, policy in known.items() if policy.match.covers(tenant, model))
