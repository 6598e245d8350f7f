"""`check` and `schema`. What `check` says of each mistake: tests/e2e/test_command_line.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from proxy.config import BUILT_IN, load
from proxy.trimming import Policy
from tests.cli.conftest import Run

POLICIES = """\
policies:
  lean: {match: {models: [a]}, trigger: {tokens: 9}, edits: [{type: keep_tool_calls}]}
  größer: {}
"""


def test_check_names_the_policies(run: Run, config: Path) -> None:
    assert "only the built-in one" in run("check")[1]
    config.write_text(POLICIES)
    code, out, errors = run("check")
    assert (code, errors) == (0, "")
    assert "lean, größer" in out
    code, out, _ = run("check", "--json")
    told = json.loads(out)
    assert (code, told["valid"], told["policies"], told["warnings"]) == (0, True, ["lean", "größer"], [])


EXTENDED = """\
policies:
  anne:
    extends: base
    match: {tenants: [anne]}
    target: {tokens: 20}
  base:
    match: {models: ["gpt-*"]}
    trigger: {tokens: 50}
    target: {tokens: 30}
    pin: [{regex: never}]
    on_arrival: [{type: truncate_tool_output}]
    edits: [{type: keep_tool_calls}, {type: drop_oldest}]
"""


def test_check_shows_what_each_policy_is_with_what_it_extends(run: Run, config: Path) -> None:
    config.write_text(EXTENDED)
    policies = load(config).policies
    code, out, errors = run("check")
    assert (code, errors) == (0, "")
    assert out.splitlines()[1:] == [
        "",
        f"anne  [{policies['anne'].version}]",
        "  extends:    base",
        "  match:      models *; tenants anne",
        "  trigger:    tokens: 50",
        "  target:     tokens: 20",
        "  keep:       rounds: 1, spans: 4, first_user: false",
        "  pin:        never",
        "  on_arrival: truncate_tool_output",
        "  edits:      keep_tool_calls, drop_oldest",
        "",
        f"base  [{policies['base'].version}]",
        "  match:      models gpt-*; tenants *",
        "  trigger:    tokens: 50",
        "  target:     tokens: 30",
        "  keep:       rounds: 1, spans: 4, first_user: false",
        "  pin:        never",
        "  on_arrival: truncate_tool_output",
        "  edits:      keep_tool_calls, drop_oldest",
        "",
        f"default (built in)  [{BUILT_IN.version}]",
        *out.splitlines()[22:],
    ]


def test_check_gives_a_script_the_merged_policies(run: Run, config: Path) -> None:
    config.write_text(EXTENDED)
    merged = json.loads(run("check", "--json")[1])["merged"]
    assert list(merged) == ["anne", "base", "default"]
    anne = merged["anne"]
    version = anne.pop("version")
    assert Policy.model_validate(anne) == load(config).policies["anne"]
    assert version == Policy.model_validate(anne).version
    assert anne["target"] == {"tokens": 20}


def test_check_warns_of_what_does_nothing_and_is_content(run: Run, config: Path) -> None:
    config.write_text(
        EXTENDED.replace("keep_tool_calls}, {type: drop_oldest", "drop_oldest}, {type: keep_tool_calls")
    )
    code, _, errors = run("check")
    assert code == 0
    assert errors.startswith("warning: config.yaml:12: policies.base.edits[0]: drop_oldest goes on")
    assert errors.count("warning") == 1
    assert len(json.loads(run("check", "--json")[1])["warnings"]) == 1


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
