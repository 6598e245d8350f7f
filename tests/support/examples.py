"""The example configurations, served as they are: only provider, store and counting are the test's own."""

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
    """Return the settings of an example, as the command line would lay `sections` over the file.

    Tokens are estimated, and not scaled to what the stand-in provider says that it counted.
    """
    overrides: dict[str, Any] = {
        "upstream": {"base_url": upstream.base_url, "anthropic_base_url": upstream.base_url},
        "store": {"url": empty_store(folder / "palimpsest.db")},
        "tokens": {"method": "estimate", "calibrate": False},
        **sections,
    }
    return load(FOLDER / f"{name}.yaml", overrides)


def serving(name: str, upstream: Upstream, folder: Path, **sections: Any) -> Proxy:
    """Return a proxy with these settings, to be entered."""
    return Proxy(example_settings(name, upstream, folder, **sections))
