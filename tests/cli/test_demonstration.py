import json
import shlex
import tempfile
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

from proxy.__main__ import app
from proxy.cli import demonstration
from proxy.cli.demonstration import QUESTIONS
from proxy.config import load
from proxy.demo import DemoOutcome
from tests.demo.measured import outcome
from tests.support.served import SECONDS, Served

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept") / "new"


@pytest.fixture(scope="module")
def shown(kept: Path) -> Result:
    """What the real demonstration prints."""
    return CliRunner().invoke(app, ["demo", "--keep", str(kept)])


def test_the_demo_succeeds(shown: Result) -> None:
    assert shown.exit_code == 0, shown.output
    assert "FAILED" not in shown.output


def test_the_readme_shows_the_output(shown: Result) -> None:
    printed = shown.output.partition("\nLook deeper")[0].splitlines()
    _, begins, rest = README.read_text("utf-8").partition(printed[0])
    quoted = (begins + rest.partition("\n```")[0]).splitlines()
    left_out = quoted.index(" ...")  # some of the first turns
    assert quoted[:left_out] == printed[:left_out]
    assert quoted[left_out + 1 :] == printed[left_out + 1 - len(quoted) :]


def test_the_suggested_command_works(shown: Result, kept: Path) -> None:
    command = next(line for line in shown.output.splitlines() if line.startswith("Look deeper: "))
    looked = CliRunner().invoke(app, [*command.split()[3:], "--json"])
    assert looked.exit_code == 0, looked.output
    session = json.loads(looked.output)
    assert (session["id"], session["messages"], len(session["data"])) == ("demo", 60, 60)
    assert command.endswith(str(kept / "config.yaml"))


def test_a_folder_with_a_store_is_refused(shown: Result, kept: Path) -> None:
    before = (kept / "demo.db").read_bytes()
    again = CliRunner().invoke(app, ["demo", "--keep", str(kept)])
    assert "exists already" in str(again.exception)
    assert (kept / "demo.db").read_bytes() == before


def played(monkeypatch: pytest.MonkeyPatch, result: DemoOutcome, *arguments: str) -> Result:
    monkeypatch.setattr(demonstration, "rehearse", lambda *_: result)
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: "/new")
    return CliRunner().invoke(app, ["demo", *arguments])


def test_a_failed_check_is_exit_1(monkeypatch: pytest.MonkeyPatch) -> None:
    assert played(monkeypatch, outcome()).exit_code == 0
    failed = played(monkeypatch, outcome(refused=1))
    assert failed.exit_code == 1
    assert "FAILED requests refused by the upstream: 1 of 5" in failed.output


def test_json_output(monkeypatch: pytest.MonkeyPatch) -> None:
    data = json.loads(played(monkeypatch, outcome(), "--json").output)
    assert (data["holds"], data["kept"]) == (True, "/new")


def test_without_keep_the_store_is_in_a_new_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cd /new" in played(monkeypatch, outcome()).output


ANSWERS = {
    "what did I save this week?": "saved $",
    "which sessions are biggest?": "\ndemo ",
    "what did the model see at request 17?": "dropped    user",
    "search my history": "demo (default)",
    "what did each policy serve?": "\ndefault ",
    "which metrics can I scrape?": "palimpsest_requests_total",
}


@pytest.mark.parametrize(("question", "command"), QUESTIONS)
def test_what_operators_ask_is_answered(
    shown: Result, kept: Path, monkeypatch: pytest.MonkeyPatch, question: str, command: str
) -> None:
    line = next(line for line in shown.output.splitlines() if line.endswith(f"# {question}"))
    assert line.startswith(f"  {command}  ")
    monkeypatch.chdir(kept)
    words = shlex.split(command)
    if words[0] != "palimpsest":
        name, _, value = words[0].partition("=")
        monkeypatch.setenv(name, value)
        settings = load(None)
        share = settings.policies["default"].share
        assert (settings.retention.days, len(settings.budgets), share) in {(30, 0, 1), (None, 1, 1), (None, 0, 0.1)}
        assert words[1:] == ["palimpsest", "serve"]
    elif words[1] == "serve,":
        with Served(kept / "config.yaml", "--port", "0").wait() as served:
            answer = httpx.get(served.url + httpx.URL(words[-1]).path, trust_env=False, timeout=SECONDS)
            assert ANSWERS[question] in answer.text
            page = httpx.get(f"{served.url}/ui/sessions/demo?request=17", trust_env=False, timeout=SECONDS)
            assert page.status_code == 200
    else:
        looked = CliRunner().invoke(app, words[1:])
        assert looked.exit_code == 0, looked.output
        assert ANSWERS[question] in looked.output
