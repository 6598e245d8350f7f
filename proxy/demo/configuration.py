"""The configuration file of the demonstration: its policy, its store, its upstream."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Final

import orjson

STORE: Final = "demo.db"
"""Name of the SQLite file."""
CONFIG: Final = "config.yaml"
"""Name of the configuration file."""


def policies() -> str:
    """Return the `policies` section, with its comments."""
    return (files("proxy.demo") / "data" / "policies.yaml").read_text(encoding="utf-8")


def configuration(folder: Path, base_url: str) -> str:
    """Return the file: the store in `folder`, the upstream at `base_url`. JSON strings are YAML strings."""
    url = orjson.dumps(f"sqlite+aiosqlite:///{folder.resolve() / STORE}").decode()
    return (
        "# Written by `palimpsest demo --keep`. Its upstream ended with the demonstration.\n"
        f"store: {{url: {url}}}\n"
        f"upstream: {{base_url: {orjson.dumps(base_url).decode()}}}\n"
        f"{policies()}"
    )
