"""Policies by name: the built-in policy, the choice of a policy for a request, and `extends`.

    policies:
      base:  {trigger: {tokens: 50000}, target: {tokens: 30000}, edits: [{type: drop_oldest}]}
      anne:  {extends: base, match: {tenants: [anne]}, target: {tokens: 20000}}

`extends` inherits everything except `match`: mappings are merged key by key, lists are replaced, `null` removes a key.
Chains are followed. A name refers to a policy of the file, else to the built-in one. If a policy extends its own name,
that refers to the built-in one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Final, TypeAlias, cast

from proxy.config.problems import did_you_mean
from proxy.errors import InvalidRequest
from proxy.trimming import Policy

OFF: Final = "off"  # the value of `X-Context-Policy` that switches trimming off. No policy has this name.

BUILT_IN: Final = Policy.model_validate(
    {
        "trigger": {"cost": "auto", "ratio": 0.9},
        "trim_at": "any",  # an agent may work for hours on one user message, so a new one is not waited for
        "keep": {"rounds": 1, "spans": 5, "first_user": True},
        "edits": [
            {
                "type": "clear_tool_results",
                "keep": 12,
                "keep_share": 0.03,
                "digest_chars": 800,
                "clear_inputs": True,
                "clear_texts": True,
                "fold_calls": True,
            },
            {"type": "compact_tool_output", "methods": ["minify", "table"], "spare_files": True},
            {"type": "drop_oldest", "target": {"ratio": 0.6}, "when": {"ratio": 0.9}},
        ],
    }
)
"""The policy for requests that no other policy matches.

It changes no request until trimming saves money at the model's prices, and costs at most a few per cent extra. Then it
replaces old tool output, and long parts of the agent's own old calls and texts, with digests. It folds runs of old
calls into lines after the first one, and compacts newer output without loss. It drops messages only when the context
window is nearly full.
"""

BUILT_IN_NAME: Final = "built-in"

BUILT_INS: Final[Mapping[str, Policy]] = MappingProxyType({"default": BUILT_IN, BUILT_IN_NAME: BUILT_IN})
"""The names of the built-in policy for `extends`."""


class Policies:
    """The policies in force in this process. A reload replaces all of them at once."""

    def __init__(self, current: Mapping[str, Policy]) -> None:
        self.current = current

    @property
    def current(self) -> Mapping[str, Policy]:
        """The policies of the settings by name, in matching order."""
        return self._current

    @current.setter
    def current(self, policies: Mapping[str, Policy]) -> None:
        self._current, self._known = policies, with_built_in(policies)
        name, policy = next(iter(self._known.items()))
        self.has_shares = any(each.share < 1 for each in self._known.values())
        self._only = (name, policy) if matches_all(policy) else None  # fast path: usually the first matches all

    def select(self, tenant: str, model: str, name: str | None = None, session: str = "") -> tuple[str, Policy]:
        """Return name and policy for a request: the policy that the client names, else the first match.

        `name` is the value of `X-Context-Policy`; the caller handles `OFF`. `session` decides whether the session
        belongs to the `share` of a policy. Raises `InvalidRequest` if there is no policy with this name.
        """
        if name is None:
            order = self._known.items()
            return self._only or next(
                (key, policy)
                for key, policy in order
                if policy.match.covers(tenant, model) and is_of_share(key, policy.share, f"{tenant}\n{session}")
            )
        known = {**self._known, BUILT_IN_NAME: BUILT_IN}
        if name not in known:
            # Do not list policies that serve other tenants only: their names may reveal those tenants.
            listed = [each for each, policy in known.items() if policy.match.covers_tenant(tenant)]
            raise InvalidRequest(
                f"There is no policy named {name!r}. Use one of {', '.join(listed)}; '{OFF}' trims nothing.",
                param="X-Context-Policy",
                code="unknown_policy",
            )
        return name, known[name]


def matches_all(policy: Policy) -> bool:
    """Tell whether a policy matches every request."""
    return policy.share >= 1 and "*" in policy.match.models and "*" in policy.match.tenants


def is_of_share(name: str, share: float, session: str) -> bool:
    """Tell whether a session belongs to the share of a policy. The result is always the same for a session."""
    if share >= 1:
        return True
    digest = blake2b(f"{name}\n{session}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) < share * 2**64


def with_built_in(policies: Mapping[str, Policy]) -> dict[str, Policy]:
    """Return the policies in order, followed by the built-in one unless one of them matches every request.

    The built-in policy is called `default`, or `built-in` if the file already has a `default`.
    """
    if any(map(matches_all, policies.values())):
        return dict(policies)
    return {**policies, BUILT_IN_NAME if "default" in policies else "default": BUILT_IN}


def unreachable(policies: Mapping[str, Policy]) -> Iterator[tuple[str, str]]:
    """Yield each policy whose `match` is never tried, and the policy before it that matches every request.

    A policy without `match` is left out, because it is meant to be named in a header or extended.
    """
    catch_all: str | None = None
    for name, policy in policies.items():
        if catch_all is None:
            catch_all = name if matches_all(policy) else None
        elif "match" in policy.model_fields_set:
            yield name, catch_all


KEY: Final = "extends"

_OWN: Final = frozenset({"match", KEY})

Written: TypeAlias = Mapping[str, Any]
"""Policies by name, before validation: mappings or `Policy` objects, or anything else if they are invalid."""


def laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return both merged; `above` wins. Mappings are merged key by key, other values and lists are replaced."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        if isinstance(under, Mapping) and isinstance(value, Mapping):
            merged[key] = laid_over(cast("Mapping[str, Any]", under), cast("Mapping[str, Any]", value))
        else:
            merged[key] = value
    return merged


def problems(policies: Written) -> Iterator[tuple[str, str]]:
    """Yield (name of the policy, problem) for each `extends` with an unknown name or in a cycle."""
    for name in policies:
        base = _base(policies[name])
        if base is None:
            continue
        known = list(dict.fromkeys([*(other for other in policies if other != name), *BUILT_INS]))
        line = ancestry(name, policies)
        if base not in known:
            problem = "a policy cannot extend itself" if base == name else f"unknown policy {base!r}"
            yield name, f"{problem}; there are: {', '.join(known)}{did_you_mean(base, known)}"
        elif line and _parent(line[-1], policies) == name:
            yield name, f"a policy cannot extend itself: {' -> '.join((name, *line, name))}"


def ancestry(name: str, policies: Written) -> list[str]:
    """Return the policies of the file that the policy extends, nearest first. A cycle is followed once."""
    line = [name]
    while (parent := _parent(line[-1], policies)) is not None and parent not in line:
        line.append(parent)
    return line[1:]


def _parent(name: str, policies: Written) -> str | None:
    base = _base(policies[name])
    return base if base in policies and base != name else None


def _base(policy: Any) -> str | None:
    """Return the name under `extends`, or None. A `Policy` object is already complete and inherits nothing."""
    base = cast("Mapping[str, Any]", policy).get(KEY) if isinstance(policy, Mapping) else None
    return base if isinstance(base, str) else None


def extended(name: str, policies: Written) -> Any:
    """Return the policy merged over the policies that it extends."""
    line = [name, *ancestry(name, policies)]
    first = _base(policies[line[-1]])
    if first is None and len(line) == 1:
        return policies[name]
    merged = _inherited(BUILT_INS.get(first or ""))
    for each in reversed(line):
        merged = laid_over(merged, policies[each] if each == name else _inherited(policies[each]))
    # `match` and `extends` are not inherited, so a null there removes nothing and is kept for validation.
    return {**_without_nulls(merged), **{key: merged[key] for key in _OWN if key in merged}}


def _without_nulls(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without those that are null, so that their defaults apply."""
    return {
        key: _without_nulls(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else value
        for key, value in settings.items()
        if value is not None
    }


def _inherited(policy: Any) -> dict[str, Any]:
    """Return the settings that others inherit. An invalid policy gives none; it is reported as its own mistake."""
    if isinstance(policy, Policy):
        policy = policy.model_dump()
    elif not isinstance(policy, Mapping):
        return {}
    return {key: value for key, value in cast("Mapping[str, Any]", policy).items() if key not in _OWN}
