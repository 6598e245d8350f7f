"""Serves the example configurations unchanged, except for the provider, the store and token counting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from proxy.config import Settings, load
from tests.support.server import Proxy
from tests.support.stores import empty_store
from tests.support.upstream import Upstream

FOLDER = Path(__file__).parents[2] / "examples" / "policies"
FILES = sorted(FOLDER.glob("*.yaml"))


def example_settings(name: str, upstream: Upstream, folder: Path, **sections: Any) -> Settings:
    """Return the settings of an example, with `sections` overriding the file as on the command line.

    Tokens are estimated and not calibrated to the usage that the stand-in provider reports.
    """
    overrides: dict[str, Any] = {
        "upstream": {"base_url": upstream.base_url, "anthropic_base_url": upstream.base_url},
        "store": {"url": empty_store(folder / "palimpsest.db")},
        "tokens": {"method": "estimate", "calibrate": False},
        **sections,
    }
    return load(FOLDER / f"{name}.yaml", overrides)


def serving(name: str, upstream: Upstream, folder: Path, **sections: Any) -> Proxy:
    """Return a proxy with these settings, as a context manager that is not entered yet."""
    return Proxy(example_settings(name, upstream, folder, **sections))
