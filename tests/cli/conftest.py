"""Fixtures for tests of commands: a configuration with its own store, and a function that runs commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command import run_command

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(f"store: {{url: 'sqlite:///{tmp_path / 'sessions.db'}'}}\ntokens: {{method: estimate}}\n")
    return file


@pytest.fixture
def run(config: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Run a command on that configuration; return exit code, output and errors."""

    def command(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.chdir(config.parent)
        return run_command(monkeypatch, capfdbinary, *arguments)

    return command
