"""The small commands: help, version, check, schema, upgrade, downgrade; and what each one imports."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import proxy
from proxy.__main__ import app
from proxy.cli.commands import LazyGroup, spelled_out
from proxy.config import BUILT_IN, load
from proxy.store.migrate import REVISION
from proxy.trimming import Policy
from tests.cli.conftest import Run

ROOT = Path(__file__).parents[2]
COMMANDS = [
    *("serve", "check", "schema", "demo", "upgrade", "downgrade"),
    *("sessions", "stats", "exchange", "key", "doctor", "backtest"),
]
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


def test_the_help_shows_every_command_with_a_description() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"})
    assert shown.exit_code == 0
    lines = [line.strip(" │\n") for line in shown.output.splitlines()]
    assert [line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in COMMANDS] == COMMANDS
    assert all(len(line.split()) > 2 for line in lines if line.partition(" ")[0] in COMMANDS)


def test_each_command_has_its_name_and_is_made_once() -> None:
    group = LazyGroup()
    context = typer.Context(group)
    assert group.list_commands(context) == COMMANDS
    assert [group.get_command(context, name).name for name in COMMANDS] == COMMANDS
    assert all(group.get_command(context, name) is group.get_command(context, name) for name in COMMANDS)
    assert group.get_command(context, "nonsense") is None


def test_a_mistyped_command_gets_a_suggestion() -> None:
    shown = CliRunner().invoke(app, ["chek"], env={"COLUMNS": "120"})
    assert shown.exit_code == 2
    assert "check" in shown.output


def test_version() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"palimpsest {proxy.__version__}\n")


@pytest.mark.parametrize("arguments", [["--version"], ["check", "--config", "config.example.yaml"], ["schema"]])
def test_light_commands_do_not_import_the_server(arguments: list[str]) -> None:
    command = [sys.executable, "-c", LOADED, *arguments]
    told = subprocess.check_output(command, cwd=ROOT, text=True)  # noqa: S603 - our own
    loaded = set(told.splitlines()[-1].split())
    assert "proxy.cli.commands" in loaded
    assert not HEAVY & loaded


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("", ""),
        ("--file a", "--file a"),
        ("--file a b c", "--file a --file b --file c"),
        ("--file a --policy x y --json", "--file a --policy x --policy y --json"),
        ("--file=a b", "--file=a --file b"),
        ("--file a --config c --policy x", "--file a --config c --policy x"),
        ("--json a", "--json a"),
        ("--config c d", "--config c d"),
        ("--file", "--file"),
    ],
)
def test_the_option_is_repeated_before_each_value(written: str, meant: str) -> None:
    assert list(spelled_out(written.split(), {"--file", "--policy"})) == meant.split()


POLICIES = """\
policies:
  lean: {trigger: {tokens: 9}, edits: [{type: keep_tool_calls}]}
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


def test_check_shows_each_policy_with_everything_it_extends(run: Run, config: Path) -> None:
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


def test_check_shows_that_a_policy_only_observes_and_what_else_is_unusual(run: Run, config: Path) -> None:
    config.write_text(
        "policies:\n"
        "  tried: {mode: observe, share: 0.1, agents: merge, trim_at: any, tools: {remove: [bash, web]}}\n"
        "  default: {extends: tried, share: 1.0}\n"
    )
    tried, default, *_ = run("check")[1].split("\n\n")[1:]
    assert tried.splitlines()[2:] == [
        "  mode:       observe",
        "  share:      0.1",
        "  trim_at:    any",
        "  agents:     merge",
        "  tools:      without bash, web",
        "  edits:      none: every message is sent",
    ]
    assert "  mode:       observe" in default
    assert "share" not in default


def test_check_json_has_the_merged_policies(run: Run, config: Path) -> None:
    config.write_text(EXTENDED)
    merged = json.loads(run("check", "--json")[1])["merged"]
    assert list(merged) == ["anne", "base", "default"]
    anne = merged["anne"]
    version = anne.pop("version")
    assert Policy.model_validate(anne) == load(config).policies["anne"]
    assert version == Policy.model_validate(anne).version
    assert anne["target"] == {"tokens": 20}


def test_check_warns_of_settings_without_effect_and_succeeds(run: Run, config: Path) -> None:
    config.write_text(EXTENDED.replace("keep_tool_calls}, {type: drop_oldest", "drop_oldest}, {type: keep_tool_calls"))
    code, _, errors = run("check")
    assert code == 0
    assert errors.startswith("warning: config.yaml:12: policies.base.edits[0]: drop_oldest goes on")
    assert errors.count("warning") == 1
    assert len(json.loads(run("check", "--json")[1])["warnings"]) == 1


def test_check_creates_no_file(run: Run, config: Path) -> None:
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


def test_check_refuses_a_folder(run: Run, config: Path) -> None:
    code, _, errors = run("check", "--config", config.parent)
    assert code == 2
    assert "Traceback" not in errors


def test_the_schema_knows_every_edit(run: Run) -> None:
    code, out, errors = run("schema")
    assert (code, errors) == (0, "")
    for edit in ("keep_tool_calls", "truncate_tool_output", "drop_oldest"):
        assert f'"{edit}"' in out


def tables(config: Path) -> set[str]:
    connection = sqlite3.connect(config.with_name("sessions.db"))
    try:
        return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    finally:
        connection.close()


def test_upgrade_downgrade_and_upgrade_again(run: Run, config: Path) -> None:
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
    assert run("upgrade")[0] == 0
    assert run("sessions", "list", "--json")[:2] == (0, "[]\n")


@pytest.mark.parametrize("command", ["upgrade", "downgrade"])
def test_an_unknown_revision_is_refused(run: Run, config: Path, command: str) -> None:
    run("upgrade")
    code, out, errors = run(command, "nonsense")
    assert (code, out) == (1, "")
    assert "nonsense" in errors
    assert "Traceback" not in errors
    assert "sessions" in tables(config)


@pytest.mark.parametrize("arguments", [["downgrade"], ["downgrade", "--confg", "x", "base"], ["upgrade", "--nonsense"]])
def test_wrong_usage_of_upgrade_and_downgrade(run: Run, config: Path, arguments: list[str]) -> None:
    code, out, errors = run(*arguments)
    assert (code, out) == (2, "")
    assert errors
    assert not config.with_name("sessions.db").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["upgrade"], f"run its `palimpsest downgrade {REVISION}`"),
        (["downgrade", "base"], "newer version"),
        (["sessions", "list"], f"Start that version, or run its `palimpsest downgrade {REVISION}`"),
    ],
)
def test_tables_of_a_newer_version_are_left_alone(run: Run, config: Path, arguments: list[str], said: str) -> None:
    run("upgrade")
    before = tables(config)
    connection = sqlite3.connect(config.with_name("sessions.db"))
    with connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    code, out, errors = run(*arguments)
    assert (code, out) == (1, "")
    assert "9999" in errors
    assert said in errors
    assert tables(config) == before


def test_a_file_that_is_no_database_is_left_alone(run: Run, config: Path) -> None:
    file = config.with_name("sessions.db")
    file.write_bytes(b"nothing of the kind" * 100)
    code, out, errors = run("upgrade")
    assert (code, out) == (1, "")
    assert "store.url" in errors
    assert file.read_bytes() == b"nothing of the kind" * 100


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_output_that_cannot_be_written_is_a_failure_with_a_message() -> None:
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "proxy", "schema"]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, check=False)  # noqa: S603 - our own
    assert (done.returncode, done.stderr) == (1, b"The output cannot be written: No space left on device.\n")
