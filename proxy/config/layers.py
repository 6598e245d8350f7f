"""One mapping laid over another: a source of settings over the one below it, a policy over its base.

It knows mappings and nothing of what they set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast


def laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, `above` winning: mappings are merged key by key, all else is replaced, lists too."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        if isinstance(under, Mapping) and isinstance(value, Mapping):
            merged[key] = laid_over(cast("Mapping[str, Any]", under), cast("Mapping[str, Any]", value))
        else:
            merged[key] = value
    return merged
