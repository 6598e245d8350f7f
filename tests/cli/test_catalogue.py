from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import proxy
from proxy.__main__ import app
from proxy.cli.catalogue import Catalogue

ROOT = Path(__file__).parents[2]
COMMANDS = ["serve", "check", "schema", "demo", "upgrade", "downgrade", "sessions", "backtest"]
HEAVY = {"aiohttp", "alembic", "fastapi", "httpx", "proxy.server.app", "rich", "uvicorn"}
LOADED = """
import sys
from proxy.__main__ import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print(*sys.modules)
"""


def test_the_help_shows_every_command_and_what_it_is_for() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"})
    assert shown.exit_code == 0
    lines = [line.strip(" │\n") for line in shown.output.splitlines()]
    assert [line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in COMMANDS] == COMMANDS
    assert all(len(line.split()) > 2 for line in lines if line.partition(" ")[0] in COMMANDS)


def test_each_command_has_its_own_name_and_is_made_once() -> None:
    commands = Catalogue().commands
    assert len(commands) == len(COMMANDS)
    assert [commands[name].name for name in commands] == COMMANDS
    assert all(commands[name] is commands[name] for name in commands)
    assert "nonsense" not in commands


def test_a_command_that_is_mistyped_is_guessed() -> None:
    shown = CliRunner().invoke(app, ["chek"], env={"COLUMNS": "120"})
    assert shown.exit_code == 2
    assert "check" in shown.output


def test_the_version() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"palimpsest {proxy.__version__}\n")


@pytest.mark.parametrize(
    "arguments", [["--version"], ["check", "--config", "config.example.yaml"], ["schema"]]
)
def test_what_serving_stands_on_is_not_imported_for_less(arguments: list[str]) -> None:
    command = [sys.executable, "-c", LOADED, *arguments]
    told = subprocess.check_output(command, cwd=ROOT, text=True)  # noqa: S603 - our own
    loaded = set(told.splitlines()[-1].split())
    assert "proxy.cli.catalogue" in loaded
    assert not HEAVY & loaded
