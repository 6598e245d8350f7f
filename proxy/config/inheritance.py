"""`extends`: what a policy takes over of another one, before either is read as a policy.

    policies:
      base:  {trigger: {tokens: 50000}, target: {tokens: 30000}, edits: [{type: drop_oldest}]}
      anne:  {extends: base, match: {tenants: [anne]}, target: {tokens: 20000}}

Everything is taken over but `match`: mappings are merged key by key, lists are replaced, `null` takes a
key away. Chains are followed. A name means a policy of the file, or else a built-in one; within a
policy of the same name it always means the built-in one. Nothing here knows what a policy does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Final, TypeAlias, cast

from proxy.config.layers import laid_over
from proxy.trimming import Policy

KEY: Final = "extends"
"""The key that names the policy to take over."""

_OWN: Final = frozenset({"match", KEY})
"""What is never taken over."""

Written: TypeAlias = Mapping[str, Any]
"""Policies by name, as they are written: mappings, `Policy` objects, or whatever was put there by mistake."""


def extended(policies: Written, built_in: Mapping[str, Policy]) -> dict[str, Any]:
    """Return the policies, each laid over what it extends; one that names no policy stays as it is."""
    return {name: _merged(name, policies, built_in) for name in policies}


def problems(policies: Written, built_in: Mapping[str, Policy]) -> Iterator[tuple[str, str]]:
    """Yield (name of the policy, what is wrong) for each `extends` that leads nowhere, or in a circle."""
    for name in policies:
        wanted = _wanted(policies[name])
        if wanted is None:
            continue
        known = [*(other for other in policies if other != name), *built_in]
        line = ancestry(name, policies)
        if wanted not in known:
            choices = list(dict.fromkeys(known))
            near = get_close_matches(wanted, choices, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            itself = "a policy cannot extend itself" if wanted == name else f"unknown policy {wanted!r}"
            yield name, f"{itself}; there are: {', '.join(choices)}{meant}"
        elif line and _parent(line[-1], policies) == name:
            yield name, f"a policy cannot extend itself: {' -> '.join((name, *line, name))}"


def ancestry(name: str, policies: Written) -> list[str]:
    """Return the policies of the file that the policy extends, nearest first; a circle is followed once."""
    line = [name]
    while (parent := _parent(line[-1], policies)) is not None and parent not in line:
        line.append(parent)
    return line[1:]


def _parent(name: str, policies: Written) -> str | None:
    """Return the policy of the file that the policy extends."""
    wanted = _wanted(policies[name])
    return wanted if wanted in policies and wanted != name else None


def _wanted(policy: Any) -> str | None:
    """Return the name that `extends` holds. A `Policy` object is whole already: it takes over nothing."""
    if not isinstance(policy, Mapping):
        return None
    wanted = cast("Mapping[str, Any]", policy).get(KEY)
    return wanted if isinstance(wanted, str) else None


def _merged(name: str, policies: Written, built_in: Mapping[str, Policy]) -> Any:
    line = [name, *ancestry(name, policies)]
    first = _wanted(policies[line[-1]])
    if len(line) == 1 and first is None:
        return policies[name]
    merged = _taken(built_in[first]) if first is not None and first in built_in else {}
    for each in reversed(line):
        written = policies[each]
        if isinstance(written, Policy):
            written = _taken(written)
        if not isinstance(written, Mapping):  # said of that policy itself
            continue
        own = cast("Mapping[str, Any]", written)
        merged = laid_over(merged, own if each == name else _without_own(own))
    return merged


def _taken(policy: Policy) -> dict[str, Any]:
    """Return of a policy what others take over, as it could be written."""
    return _without_own(policy.model_dump())


def _without_own(policy: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in policy.items() if key not in _OWN}
