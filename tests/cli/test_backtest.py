"""`backtest …` on files and on a store: what it prints, what it refuses, and that it changes nothing."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from proxy.store import Store
from tests.backtest.histories import agent
from tests.cli.conftest import Run
from tests.support.stores import empty_store
from tests.support.talk import Talk

POLICIES = """
policies:
  mine:
    match: {models: ["small*"]}
    trigger: {tokens: 3000}
    target: {tokens: 1500}
    keep: {spans: 1}
    edits: [{type: drop_oldest}]
  default:
    trigger: {ratio: 0.5}
    edits: [{type: truncate_tool_output, max_bytes: 100}]
models:
  - match: ["priced"]
    context_window: 3000
    prices: {input: 10, cached_read: 1, output: 50}
  - {match: ["window"], context_window: 100000}
"""


@pytest.fixture
def file(config: Path) -> Path:
    config.write_text(config.read_text() + POLICIES)
    path = config.with_name("long.json")
    path.write_text(json.dumps({"id": "long", "messages": agent(12)}))
    return path


def data(run: Run, *arguments: str | Path) -> dict[str, Any]:
    code, out, errors = run("backtest", *arguments, "--json")
    assert (code, errors) == (0, "")
    read: dict[str, Any] = json.loads(out)
    return read


def names(found: dict[str, Any]) -> list[str]:
    return [each["name"] for each in found["strategies"]]


def test_the_serving_policy_is_compared_with_all_baselines(run: Run, file: Path) -> None:
    found = data(run, "--file", file)
    assert names(found) == [
        *("baseline:none", "baseline:last", "baseline:slide", "baseline:mask", "baseline:clear"),
        *("baseline:middle", "baseline:oracle", "default"),
    ]
    assert [each["name"] for each in found["prices"]] == [
        *("read 0.5", "read 0.25", "read 0.1", "read 0.1, write 1.25", "read 0.05, write 1.25")
    ]
    assert names(data(run, "--file", file, "--model", "small-1"))[-1] == "mine"


def test_policies_and_baselines_by_name(run: Run, file: Path) -> None:
    named = ["--policy", "mine", "--policy", "built-in", "--policy", "baseline:last=5"]
    assert names(data(run, "--file", file, *named)) == ["baseline:none", "baseline:last=5", "mine", "built-in"]
    alone = data(run, "--file", file, "--policy", "mine", "--no-baselines", "--no-recall")
    assert names(alone) == ["baseline:none", "mine"]
    mine = next(each for each in alone["totals"] if (each["strategy"], each["prices"]) == ("mine", "read 0.1"))
    assert mine["moves"] >= 1
    assert mine["tokens_sent"] < mine["tokens_untrimmed"]
    assert mine["largest_request"] <= 3000
    assert mine["recall"] is None
    assert "baseline:oracle" not in names(data(run, "--file", file, "--no-recall"))
    assert names(data(run, "--file", file, "--policy", "off"))[0] == "baseline:none"


def test_options_take_several_values_in_a_row(run: Run, file: Path) -> None:
    found = data(run, "--file", file, file, "--policy", "mine", "baseline:mask", "--no-recall")
    assert names(found) == ["baseline:none", "baseline:mask", "mine"]
    assert {each["session"] for each in found["sessions"]} == {"long", "long (2)"}
    code, _, errors = run("backtest", file)
    assert (code, "unexpected extra argument" in errors) == (2, True)


def test_prices_and_window_of_a_model(run: Run, file: Path) -> None:
    found = data(run, "--file", file, "--model", "priced", "--prices", "priced", "--no-baselines")
    assert found["prices"][0]["dollars"] == {
        "input": 10.0,
        "cached_read": 1.0,
        "cache_write": 10.0,
        "output": 50.0,
        "steps": [],
    }
    none, default = found["totals"]
    dollars = none["tokens_read"] * 1 + (none["tokens_written"] + none["tokens_uncached"]) * 10
    assert none["input_dollars"] == pytest.approx(dollars / 1e6)
    assert none["output_dollars"] == pytest.approx(none["tokens_output"] * 50 / 1e6)
    assert default["moves"] >= 1  # half of the window is passed
    both = data(run, "--file", file, "--prices", "priced", "--prices", "classes", "--dollars", "3")
    assert [each["dollars"]["input"] for each in both["prices"]] == [10.0, 3, 3, 3, 3, 3]


def test_printed_tables(run: Run, file: Path) -> None:
    code, out, _ = run("backtest", "--file", file)
    assert code == 0
    assert out.partition("\n")[2].startswith("1 session")
    for words in ("What was sent", "Dollars for input", "Presence is necessary, not sufficient", "context window"):
        assert words in out
    assert "Each session" not in out
    assert "Each session at read 0.1" in run("backtest", "--file", file, "--file", file)[1]


def test_the_cheapest_policy_that_keeps_enough_is_printed_as_yaml(run: Run, file: Path, config: Path) -> None:
    found = data(run, "--file", file, "--suggest")
    costs = [each["ratio"] for each in found["tried"]]
    assert costs == sorted(costs)
    assert len(costs) == 10
    assert (found["prices"], found["bound"]) == ("read 0.1", 0.97)
    code, out, _ = run("backtest", "--file", file, "--suggest", "--prices", "priced", "--bound", "0.5")
    assert code == 0
    assert "cost at priced" in out
    assert "of the far values kept" in out
    config.write_text(out[out.index("policies:") :])
    assert run("check", "--config", config)[0] == 0


def test_where_no_policy_keeps_enough_none_is_suggested(run: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.backtest.suggest._recall", lambda _: 0.5)
    assert data(run, "--file", file, "--suggest")["suggestion"] is None
    assert "None keeps 0.97 of the far values" in run("backtest", "--file", file, "--suggest")[1]


def test_packed_files_are_read(run: Run, file: Path) -> None:
    packed = file.with_name("packed") / "long.json.gz"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress(file.read_bytes()))
    for given in (packed, packed.parent):
        found = data(run, "--file", given, "--policy", "baseline:none")
        assert {each["session"] for each in found["sessions"]} == {"long"}
    packed.write_bytes(b"no such thing")
    code, _, errors = run("backtest", "--file", packed)
    assert code == 2
    assert "cannot be read: Not a gzipped file" in errors
    spoilt = bytearray(gzip.compress(file.read_bytes()))
    spoilt[10:14] = b"\xff" * 4
    packed.write_bytes(spoilt)
    code, _, errors = run("backtest", "--file", packed)
    assert code == 2
    assert "cannot be read: Error -3" in errors


def test_without_a_request_nothing_is_suggested(run: Run, file: Path) -> None:
    file.write_text(json.dumps([{"role": "assistant", "content": "Hello"}]))
    code, _, errors = run("backtest", "--file", file, "--suggest")
    assert code == 2
    assert "these sessions hold no request" in errors


def test_the_html_report(run: Run, file: Path) -> None:
    hostile = file.with_name("hostile.json")
    hostile.write_text(json.dumps({"id": "<script>alert(1)</script>", "messages": agent(3)}))
    out = file.with_name("out.html")
    assert run("backtest", "--file", file, "--file", hostile, "--report", out)[0] == 0
    text = out.read_text("utf-8")
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert len(re.findall("Each session at", text)) == 5
    code, _, errors = run("backtest", "--file", file, "--report", file.with_name("none") / "out.html")
    assert (code, "cannot be written" in errors) == (2, True)


def test_synthetic_agents(run: Run, config: Path) -> None:
    found = data(run, "--synthetic", "--policy", "baseline:clear", "--no-recall")
    assert {each["session"] for each in found["sessions"]} == {"synthetic", "synthetic-noisy"}
    assert {each["requests"] for each in found["sessions"]} == {101}


def test_stored_sessions_are_read_and_left_alone(run: Run, file: Path, config: Path) -> None:
    database = config.with_name("sessions.db")

    async def fill() -> None:
        store = await Store.open(empty_store(database))
        for tenant in ("anne", "bert"):
            talk = Talk(store=store, tenant=tenant, session="shared")
            await talk.say(f"{tenant} asks", f"{tenant} hears")
            await talk.say("more", "so")
        await Talk(store=store, tenant="anne", session="empty").begin()
        await store.close()

    asyncio.run(fill())
    before = database.read_bytes()
    found = data(run, "--session", "shared", "--tenant", "anne", "--file", file)
    assert {each["session"] for each in found["sessions"]} == {"shared", "long"}
    assert next(each for each in found["sessions"] if each["session"] == "shared")["requests"] == 2
    assert database.read_bytes() == before
    code, _, errors = run("backtest", "--session", "shared")
    assert (code, "--tenant: anne, bert" in errors) == (2, True)
    code, _, errors = run("backtest", "--session", "nobody")
    assert (code, "no session 'nobody'" in errors) == (2, True)
    code, _, errors = run("backtest", "--session", "empty")
    assert (code, "no messages" in errors) == (2, True)


def test_the_store_is_neither_created_nor_migrated(run: Run, config: Path) -> None:
    code, _, errors = run("backtest", "--session", "any")
    assert (code, "There is no file" in errors) == (1, True)
    database = config.with_name("sessions.db")
    assert not database.exists()
    database.touch()
    code, _, errors = run("backtest", "--session", "any")
    assert (code, "palimpsest upgrade" in errors) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--file"),
        (["--file", "none.json"], "none.json"),
        (["--file", "long.json", "--policy", "nobody"], "There is no policy named 'nobody'. There are mine"),
        (["--file", "long.json", "--policy", "baseline:nine"], "baseline:last=NUMBER"),
        (["--file", "long.json", "--prices", "nobody-knows"], "prices of 'nobody-knows'"),
        (["--file", "long.json", "--dollars", "-1"], "--dollars"),
        (["--file", "config.yaml"], "neither JSON nor JSON Lines"),
    ],
)
def test_wrong_usage_of_backtest(run: Run, file: Path, arguments: list[str], said: str) -> None:
    assert file.exists()
    code, out, errors = run("backtest", *arguments)
    assert (code, out) == (2, "")
    assert said in errors


def test_a_session_that_asked_nothing_is_named(run: Run, config: Path) -> None:
    config.with_name("mute.json").write_text(json.dumps([{"role": "assistant", "content": "welcome"}]))
    code, out, _ = run("backtest", "--file", "mute.json")
    assert code == 0
    assert "'mute' has no requests." in out


def test_a_terminal_gets_a_progress_bar(run: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")  # no bar is drawn on a dumb one
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    code, out, _ = run("backtest", "--file", file)
    assert code == 0
    assert "replaying" in out
