"""Which policy serves a request: the one that the client names, else the first that matches.

It knows tenants, models and names; what a policy does is not its business.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from proxy.errors import InvalidRequest
from proxy.trimming import Policy

OFF: Final = "off"
"""What `X-Context-Policy` says to bypass trimming. No policy is named so."""

BUILT_IN: Final = Policy.model_validate(
    {
        "trigger": {"cost": "auto", "ratio": 0.9},
        "keep": {"rounds": 1, "spans": 3, "first_user": True},
        "edits": [
            {"type": "clear_tool_results", "keep": 5, "digest_chars": 600, "clear_inputs": True},
            {"type": "drop_oldest", "target": {"ratio": 0.6}, "when": {"ratio": 0.9}},
        ],
    }
)
"""The policy for what no other one matches.

What it does must be safe unseen. It leaves every request alone until trimming pays, by the model's prices,
and can only cost a few per cent extra, whatever comes. Then old tool output is cleared, and long arguments of
old calls: of each a digest stays with what later turns are likely to need. Nothing else goes unless the
context window is nearly full.
"""

BUILT_IN_NAME: Final = "built-in"
"""What the built-in policy is always called. No policy of the file is named so."""

BUILT_INS: Final[Mapping[str, Policy]] = MappingProxyType({"default": BUILT_IN, BUILT_IN_NAME: BUILT_IN})
"""The names by which `extends` knows the built-in policy."""


class Policies:
    """The policies in force in this process: exchanged as a whole when the configuration is read again."""

    def __init__(self, current: Mapping[str, Policy]) -> None:
        """Begin with those of the settings."""
        self.current: Mapping[str, Policy] = current
        """By name, in the order in which they are tried."""
        self._known = (current, with_built_in(current))
        """Those that were in force when somebody last asked, and with the built-in one."""

    def select(self, tenant: str, model: str, name: str | None = None) -> tuple[str, Policy]:
        """Return name and policy for a request, as `select_policy` does."""
        current, known = self._known
        if current is not self.current:
            current, known = self._known = (self.current, with_built_in(self.current))
        return _selected(known, tenant, model, name)


def with_built_in(policies: Mapping[str, Policy]) -> dict[str, Policy]:
    """Return the policies in order, and the built-in one after them unless one matches every request.

    It is called `default`, or `built-in` where a policy of that name matches only some requests.
    """
    if any("*" in policy.match.models and "*" in policy.match.tenants for policy in policies.values()):
        return dict(policies)
    return {**policies, BUILT_IN_NAME if "default" in policies else "default": BUILT_IN}


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
    return _selected(with_built_in(policies), tenant, model, name)


def _selected(known: Mapping[str, Policy], tenant: str, model: str, name: str | None) -> tuple[str, Policy]:
    """Return what `select_policy` does; the built-in one is among `known`."""
    if name is not None:
        if name not in known:
            raise InvalidRequest(
                f"There is no policy named {name!r}. Use one of {', '.join(known)}; '{OFF}' trims nothing.",
                param="X-Context-Policy",
                code="unknown_policy",
            )
        return name, known[name]
    return next((key, policy) for key, policy in known.items() if policy.match.covers(tenant, model))
