"""Every test runs in an empty folder, without environment variables of Palimpsest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def clean_folder_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):  # noqa: TID251 - the tests must not depend on who runs them
        if name.upper().startswith("PALIMPSEST_"):
            monkeypatch.delenv(name)
