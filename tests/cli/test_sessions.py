"""`sessions …`, `upgrade` and `downgrade` on a store with several tenants."""

from __future__ import annotations

import asyncio
import io
import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from proxy.conversation import ROOT
from proxy.store import ExchangeFigures, Store
from tests.cli.conftest import Run
from tests.support.stores import empty_store
from tests.support.talk import Talk, body

CALL = {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}


@pytest.fixture(autouse=True)
def filled(config: Path) -> None:
    """Two tenants with a session of the same name, and one with an odd one."""

    async def fill() -> None:
        store = await Store.open(empty_store(config.with_name("sessions.db")))
        for tenant in ("anne", "bert"):
            await Talk(store=store, tenant=tenant, session="shared").say(f"{tenant} asks", f"{tenant} hears")
        odd = Talk(store=store, tenant="anne", session="会话/100%")
        asked = body("user", "[bold]look[/bold]\n  twice " + "x" * 300)
        exchange = await odd.begin(asked)
        called = (body("assistant", "", content=None, tool_calls=[CALL]),)
        await odd.settle(exchange, asked, replies=called, settled_at=3_000)
        await store.close()

    asyncio.run(fill())


def listed(run: Run, *arguments: str) -> list[tuple[str, str]]:
    code, out, _ = run("sessions", "list", "--json", *arguments)
    assert code == 0
    return [(row["tenant"], row["id"]) for row in json.loads(out)]


def test_list_of_all_tenants_or_of_one(run: Run) -> None:
    everything = listed(run)
    assert everything[0] == ("anne", "会话/100%")
    assert sorted(everything) == [("anne", "shared"), ("anne", "会话/100%"), ("bert", "shared")]
    assert listed(run, "--tenant", "bert") == [("bert", "shared")]
    assert listed(run, "--tenant", "carl") == []
    assert listed(run, "--limit", "1") == everything[:1]
    code, out, _ = run("sessions", "list")
    assert code == 0
    assert "bert" in out
    assert "messages" in out


def test_a_limit_of_0_is_refused(run: Run) -> None:
    code, _, errors = run("sessions", "list", "--limit", "0")
    assert code == 2
    assert "--limit" in errors


@pytest.mark.parametrize("command", ["show", "export", "delete"])
def test_an_id_of_two_tenants_needs_the_tenant(run: Run, command: str) -> None:
    before = listed(run)
    code, out, errors = run("sessions", command, "shared")
    assert (code, out) == (2, "")
    assert "--tenant: anne, bert" in errors
    for arguments in (["none"], ["shared", "--tenant", "carl"]):
        code, out, errors = run("sessions", command, *arguments)
        assert (code, out) == (2, "")
        assert "no session" in errors
    assert listed(run) == before


def test_of_one_id_in_two_dialects_one_is_named_and_all_are_deleted(run: Run, config: Path) -> None:
    async def fill() -> None:
        store = await Store.open(empty_store(config.with_name("sessions.db")))
        for dialect in ("responses", "chat"):
            asked = body("user", dialect)
            talk = Talk(store=store, tenant="anne", session="twice")
            exchange = await talk.begin(asked, dialect=dialect)
            await talk.settle(exchange, asked, replies=(body("assistant", "ok"),), dialect=dialect)
        await store.close()

    asyncio.run(fill())
    rows = [line.split() for line in run("sessions", "list")[1].splitlines()]
    assert sorted(row[2] for row in rows if row[0] == "twice") == ["chat", "responses"]
    assert "chat" in run("sessions", "show", "twice")[1]
    code, out, _ = run("sessions", "show", "twice", "--dialect", "responses")
    assert (code, "responses" in out) == (0, True)
    code, _, errors = run("sessions", "show", "twice", "--dialect", "prose")
    assert (code, "chat or responses or messages" in errors) == (2, True)
    assert run("sessions", "delete", "twice", "--yes")[0] == 0
    assert ("anne", "twice") not in listed(run)


def test_show_says_what_a_session_saved(run: Run, config: Path) -> None:
    async def fill() -> None:
        store = await Store.open(empty_store(config.with_name("sessions.db")))
        figures = ExchangeFigures(model="gpt-4o", policy="default", priced=1, cost=0.5, cost_saved=0.25)
        await Talk(store=store, session="dear").say("asks", "hears", figures=figures)
        await store.close()

    asyncio.run(fill())
    assert json.loads(run("sessions", "show", "dear", "--json")[1])["cost_saved"] == 0.25


def test_show_prints_the_messages(run: Run) -> None:
    code, out, _ = run("sessions", "show", "shared", "--tenant", "bert", "--json")
    shown = json.loads(out)
    assert (code, shown["tenant"]) == (0, "bert")
    assert [message["content"] for message in shown["data"]] == ["bert asks", "bert hears"]
    code, out, _ = run("sessions", "show", "shared", "--tenant", "bert")
    assert code == 0
    assert "bert hears" in out
    assert "anne" not in out


def test_exchanges_are_numbered_and_have_the_ids_that_exchange_show_takes(run: Run) -> None:
    code, out, _ = run("sessions", "exchanges", "会话/100%")
    (line,) = out.splitlines()[1:]
    number, exchange, _, _, status, *_ = line.split()
    assert (code, number, status) == (0, "1", "complete")
    code, out, _ = run("sessions", "exchanges", "会话/100%", "--json")
    assert (code, [row["id"] for row in json.loads(out)]) == (0, [exchange])
    code, out, _ = run("exchange", "show", exchange)
    assert (code, out.startswith(f"{exchange} of 会话/100%")) == (0, True)
    assert run("exchange", "show", "会话/100%", "--request", "1")[1] == out
    code, _, errors = run("exchange", "show", "会话/100%", "--request", "2")
    assert (code, "must be 1 to 1" in errors) == (2, True)
    run("sessions", "fork", "会话/100%", "--as", "unasked")
    code, _, errors = run("exchange", "show", "unasked", "--request", "1")
    assert (code, "'unasked' has no requests" in errors) == (2, True)


def test_show_takes_a_branch(run: Run, config: Path) -> None:
    async def branch_off() -> str:
        store = await Store.open(empty_store(config.with_name("sessions.db")))
        row = await store.session("anne", "shared")
        assert row is not None
        other = Talk(store=store, tenant="anne", session="shared")
        await other.say("anne asks again", "anne hears more", base=ROOT, at_head=False)
        await store.close()
        return row.head

    old = asyncio.run(branch_off())
    code, out, _ = run("sessions", "show", "shared", "--tenant", "anne", "--branch", old)
    assert (code, "anne hears" in out, "again" in out) == (0, True, False)
    assert f"--branch {old}: 2 messages" in out
    assert "again" in run("sessions", "show", "shared", "--tenant", "anne")[1]
    code, _, errors = run("sessions", "show", "shared", "--tenant", "anne", "--branch", "none")
    assert (code, "no node 'none'" in errors) == (2, True)


def test_show_keeps_a_message_on_a_line_and_its_brackets(run: Run) -> None:
    code, out, _ = run("sessions", "show", "会话/100%")
    head, asked, called = out.rstrip("\n").split("\n")
    assert (code, head.startswith("会话/100% (anne): 2 messages")) == (0, True)
    assert "[bold]look[/bold] twice xxx" in asked
    assert asked.endswith("x…")
    assert called.endswith("-> look_up")


def test_an_export_is_read_from_standard_input(run: Run, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = config.with_name("out.jsonl")
    run("sessions", "export", "shared", "--tenant", "anne", "--out", file)
    with file.open("rb") as given:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(given))
        code, out, _ = run("sessions", "import", "-", "--as", "piped")
    assert (code, out) == (0, "piped (default): 2 messages\n")


def test_a_session_moves_to_another_tenant(run: Run, config: Path) -> None:
    file = config.with_name("out.jsonl")
    assert run("sessions", "export", "shared", "--tenant", "anne", "--out", file)[0] == 0
    code, _, errors = run("sessions", "import", file, "--tenant", "bert")
    assert code == 2
    assert "already" in errors
    code, out, _ = run("sessions", "import", file, "--tenant", "bert", "--as", "hers")
    assert (code, out) == (0, "hers (bert): 2 messages\n")
    for wrong in ("", " anne", "a\nb"):
        code, _, errors = run("sessions", "import", file, "--tenant", wrong, "--as", "its")
        assert (code, "cannot be: a name has at least one character" in errors) == (2, True)
    code, out, _ = run("sessions", "import", file)
    assert (code, out) == (0, "shared (default): 2 messages\n")
    code, out, _ = run("sessions", "delete", "shared", "--tenant", "anne")
    assert (code, "deleted" in out) == (0, True)
    assert sorted(listed(run)) == [("anne", "会话/100%"), ("bert", "hers"), ("bert", "shared"), ("default", "shared")]


@pytest.mark.parametrize(
    ("options", "typed", "code", "deleted"), [([], "n\n", 1, False), ([], "y\n", 0, True), (["--yes"], "", 0, True)]
)
def test_delete_asks_on_a_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch, options: list[str], typed: str, code: int, deleted: bool
) -> None:
    terminal = io.StringIO(typed)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    before = listed(run)
    found, out, _ = run("sessions", "delete", "shared", "--tenant", "anne", *options)
    assert found == code
    assert ("shared (anne): 2 messages" in out) == (not options)
    assert (("anne", "shared") not in listed(run)) == deleted
    assert len(listed(run)) == len(before) - deleted


def test_what_is_deleted_leaves_the_files_while_others_have_them_open(run: Run, config: Path) -> None:
    file = config.with_name("sessions.db")

    def is_there() -> bool:
        return any("会话/100%".encode() in each.read_bytes() for each in file.parent.glob(f"{file.name}*"))

    with closing(sqlite3.connect(file)) as other:
        other.execute("SELECT * FROM sessions").fetchall()
        assert is_there()
        assert run("sessions", "delete", "会话/100%", "--yes")[0] == 0
        assert not is_there()


def test_export_writes_the_same_to_standard_output(run: Run, config: Path) -> None:
    file = config.with_name("out.jsonl")
    assert run("sessions", "export", "会话/100%", "--out", file)[0] == 0
    assert run("sessions", "export", "会话/100%")[:2] == (0, file.read_text("utf-8"))


def test_export_to_a_file_that_cannot_be_written(run: Run, config: Path) -> None:
    for out in (config.parent / "none" / "out.jsonl", config.parent):
        code, told, errors = run("sessions", "export", "会话/100%", "--out", out)
        assert (code, told) == (2, "")
        assert "cannot be written" in errors
        assert "Traceback" not in errors


def test_a_failed_export_leaves_the_file_alone(run: Run, config: Path) -> None:
    file = config.with_name("out.jsonl")
    file.write_text("precious")
    assert run("sessions", "export", "none", "--out", file)[0] == 2
    assert file.read_text() == "precious"


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "nothing to import"), (b"{}\n{", "Line 2"), (b"\xff", "Line 1"), (b"[]", "Line 1"), (b"{}", "name")],
)
def test_import_of_a_file_that_is_no_export(run: Run, config: Path, content: bytes, said: str) -> None:
    file = config.with_name("in.jsonl")
    file.write_bytes(content)
    code, out, errors = run("sessions", "import", file)
    assert (code, out) == (2, "")
    assert said in errors


def test_import_with_an_invalid_name(run: Run, config: Path) -> None:
    file = config.with_name("out.jsonl")
    run("sessions", "export", "会话/100%", "--out", file)
    for given in (["--as", "a\nb"], ["--as", "x" * 513], ["--tenant", "\udc80", "--as", "y"]):
        code, out, errors = run("sessions", "import", file, *given)
        assert (code, out) == (2, ""), given
        assert errors
    assert run("sessions", "import", config.with_name("none.jsonl"))[0] == 2
    code, _, errors = run("sessions", "fork", "会话/100%", "--as", "")
    assert (code, "is empty" in errors) == (2, True)


def test_an_unreadable_store_is_exit_1(run: Run, config: Path) -> None:
    config.write_text("store: {url: 'sqlite:////no/such/folder/s.db'}\n")
    for arguments in (["list"], ["show", "x"], ["delete", "x"]):
        code, out, errors = run("sessions", *arguments)
        assert (code, out) == (1, "")
        assert "Traceback" not in errors


def test_list_has_the_figures_of_each_session(run: Run) -> None:
    rows: list[dict[str, Any]] = json.loads(run("sessions", "list", "--json")[1])
    assert {row["messages"] for row in rows} == {2}
    assert {row["rounds"] for row in rows} == {1}
    assert {row["tokens_sent"] for row in rows} == {60}
    assert {row["tokens_saved"] for row in rows} == {40}


def test_statistics_count_requests_whose_cost_is_not_known(run: Run) -> None:
    assert "The cost of 3 requests is not known." in run("stats")[1]
    assert "The cost of 1 request is not known." in run("stats", "--session", "会话/100%")[1]


def test_no_store_is_migrated(run: Run, config: Path) -> None:
    """An older proxy may be serving it."""
    assert run("downgrade", "-1")[0] == 0
    file = config.with_name("sessions.db")

    def revision() -> Any:
        with closing(sqlite3.connect(file)) as store:
            return store.execute("SELECT version_num FROM alembic_version").fetchone()

    before = revision()
    for words in (["sessions", "list"], ["sessions", "delete", "shared", "--tenant", "anne"], ["stats"]):
        code, _, errors = run(*words)
        assert (code, "palimpsest upgrade" in errors) == (1, True)
    assert revision() == before
    run("upgrade")
    assert len(listed(run)) == 3


@pytest.mark.parametrize("words", [["list"], ["show", "x"], ["export", "x"], ["delete", "x"]])
def test_no_store_is_created(run: Run, config: Path, words: list[str]) -> None:
    elsewhere = config.with_name("elsewhere.yaml")
    elsewhere.write_text(f"store: {{url: 'sqlite:///{config.with_name('none.db')}'}}\n")
    code, out, errors = run("sessions", *words, "--config", elsewhere)
    assert (code, out) == (1, "")
    assert "There is no file" in errors
    assert not config.with_name("none.db").exists()


def test_ids_are_never_cut_and_every_column_is_there(run: Run, config: Path) -> None:
    long = "agent-" + "x" * 300
    file = config.with_name("out.jsonl")
    assert run("sessions", "export", "会话/100%", "--out", file)[0] == 0
    assert run("sessions", "import", file, "--tenant", "a-tenant-with-a-long-name", "--as", long)[0] == 0
    code, out, _ = run("sessions", "list")
    head, *rows = out.splitlines()
    assert (code, len(rows)) == (0, 4)
    assert head.split("  ")[0] == "session"
    assert all(name in head for name in ("tenant", "messages", "rounds", "tokens", "sent", "saved", "last used"))
    assert any(row.startswith(f"{long}  a-tenant-with-a-long-name  ") for row in rows)
    assert any(row.startswith("会话/100%  ") for row in rows)
    assert all(re.search(r"\d\d:\d\d:\d\d", row) for row in rows)


def test_a_list_without_sessions_has_the_head_only(run: Run) -> None:
    code, out, _ = run("sessions", "list", "--tenant", "nobody")
    assert (code, out.split()) == (
        0,
        [
            "session",
            *["tenant", "dialect", "messages", "rounds", "tokens", "sent", "saved"],
            *["paid", "$", "saved", "$", "last", "used"],
        ],
    )
