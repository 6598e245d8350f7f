"""`check` and `schema`. What `check` says of each mistake: tests/e2e/test_command_line.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands.conftest import Run

POLICIES = "policies:\n  lean: {trigger: {tokens: 9}, edits: [{type: keep_tool_calls}]}\n  größer: {}\n"


def test_check_names_the_policies(run: Run, config: Path) -> None:
    assert "only the built-in one" in run("check")[1]
    config.write_text(POLICIES)
    code, out, errors = run("check")
    assert (code, errors) == (0, "")
    assert "lean, größer" in out
    code, out, _ = run("check", "--json")
    assert (code, json.loads(out)) == (0, {"valid": True, "policies": ["lean", "größer"]})


def test_check_opens_nothing(run: Run, config: Path) -> None:
    run("check")
    assert [file.name for file in config.parent.iterdir()] == ["config.yaml"]


def test_check_reads_the_environment_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALIMPSEST_SERVER__PORT", "eighty")
    code, out, errors = run("check")
    assert (code, out) == (2, "")
    assert "PALIMPSEST_SERVER__PORT" in errors


def test_check_without_a_file_checks_the_defaults(run: Run, config: Path) -> None:
    config.unlink()
    assert run("check")[0] == 0


def test_a_folder_is_no_file(run: Run, config: Path) -> None:
    code, _, errors = run("check", "--config", config.parent)
    assert code == 2
    assert "Traceback" not in errors


def test_the_schema_knows_every_edit(run: Run) -> None:
    code, out, errors = run("schema")
    assert (code, errors) == (0, "")
    for edit in ("keep_tool_calls", "truncate_tool_output", "drop_oldest"):
        assert f'"{edit}"' in out
