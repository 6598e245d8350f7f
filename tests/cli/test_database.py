"""`upgrade` and `downgrade`: the tables of the store."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from tests.cli.conftest import Run


def tables(config: Path) -> set[str]:
    connection = sqlite3.connect(config.with_name("sessions.db"))
    try:
        return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    finally:
        connection.close()


def test_up_and_down_and_up(run: Run, config: Path) -> None:
    for _ in range(2):
        code, out, errors = run("upgrade")
        assert (code, bool(out), errors) == (0, True, "")
        assert "sessions" in tables(config)
    code, out, errors = run("downgrade", "-1")  # one step: the tables of the last revision but one
    assert (code, bool(out), errors) == (0, True, "")
    assert "sessions" in tables(config)
    code, out, errors = run("downgrade", "base")
    assert (code, bool(out), errors) == (0, True, "")
    assert "sessions" not in tables(config)
    assert run("upgrade", "0001")[0] == 0
    assert run("sessions", "list", "--json")[:2] == (0, "[]\n")


@pytest.mark.parametrize("command", ["upgrade", "downgrade"])
def test_a_revision_that_is_none(run: Run, config: Path, command: str) -> None:
    run("upgrade")
    code, out, errors = run(command, "nonsense")
    assert (code, out) == (1, "")
    assert "nonsense" in errors
    assert "Traceback" not in errors
    assert "sessions" in tables(config)


@pytest.mark.parametrize(
    "arguments", [["downgrade"], ["downgrade", "--confg", "x", "base"], ["upgrade", "--nonsense"]]
)
def test_used_wrongly(run: Run, config: Path, arguments: list[str]) -> None:
    code, out, errors = run(*arguments)
    assert (code, out) == (2, "")
    assert errors
    assert not config.with_name("sessions.db").exists()


@pytest.mark.parametrize("arguments", [["upgrade"], ["downgrade", "base"], ["sessions", "list"]])
def test_tables_of_a_newer_version_are_left_alone(run: Run, config: Path, arguments: list[str]) -> None:
    run("upgrade")
    before = tables(config)
    connection = sqlite3.connect(config.with_name("sessions.db"))
    with connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    code, out, errors = run(*arguments)
    assert (code, out) == (1, "")
    assert "9999" in errors
    assert "newer version" in errors
    assert tables(config) == before


def test_what_is_no_database(run: Run, config: Path) -> None:
    file = config.with_name("sessions.db")
    file.write_bytes(b"nothing of the kind" * 100)
    code, out, errors = run("upgrade")
    assert (code, out) == (1, "")
    assert "store.url" in errors
    assert file.read_bytes() == b"nothing of the kind" * 100
