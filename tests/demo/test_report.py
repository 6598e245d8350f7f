import io
import json

import pytest
from msgspec.structs import replace
from rich.console import Console

from proxy.demo import as_data, show
from tests.demo.measured import FIRST, SECOND, outcome, run


def shown(terminal: bool, width: int = 80) -> str:
    out = io.StringIO()
    show(outcome(), Console(file=out, force_terminal=terminal, width=width, color_system=None), ["Look there."])
    return out.getvalue()


def test_plain_text_is_aligned_in_lines_of_at_most_82_characters() -> None:
    lines = shown(terminal=False).splitlines()
    header = next(line for line in lines if line.startswith("turn"))
    first, second = lines[lines.index(header) + 1 :][:2]
    assert header.split()[:6] == ["turn", "requests", "messages", "tokens", "sent", "on"]
    assert first.split() == ["1", "1", "2", "1,000", "2", "1,000", "0%", "2"]
    assert second.split() == ["2", "1", "4", "3,000", "2", "2,000", "75%", "4", "D", "moved"]
    assert header.index("cut") == second.index("moved")
    assert lines[-1] == "Look there."
    assert max(map(len, lines)) <= 82


@pytest.mark.parametrize(
    "words",
    [
        "(D drop_oldest)",
        "above 2,500 tokens, down to 1,500",
        "25.0 %",
        "ok     requests refused by the upstream: 0 of 4",
    ],
)
def test_the_report_contains(words: str) -> None:
    assert words in shown(terminal=False)


def test_a_terminal_of_80_columns_gets_tables_whole() -> None:
    text = shown(terminal=True)
    assert "─" in text
    assert "…" not in text
    assert "X-Context-Policy: off" in text


def test_a_failed_check_is_marked() -> None:
    out = io.StringIO()
    show(outcome(refused=1), Console(file=out), [])
    assert "FAILED requests refused" in out.getvalue()


def test_a_turn_of_several_requests_is_one_line() -> None:
    out = io.StringIO()
    steps = (FIRST, replace(SECOND, turn=1), replace(SECOND, turn=2, moved=False))
    show(outcome(trimmed=run(*steps)), Console(file=out), [])
    rows = [line.split() for line in out.getvalue().splitlines() if line.startswith("   ")]
    assert [row[:2] for row in rows if row[0].isdigit()] == [["1", "2"], ["2", "1"]]


def test_json_holds_every_figure() -> None:
    data = json.loads(json.dumps(as_data(outcome())))
    assert data["holds"] is True
    assert [named["policy"] for named in data["runs"]] == ["default", "off"]
    assert data["runs"][0]["saved_percent"] == 25.0
    assert data["runs"][0]["steps"][1]["edits"] == ["drop_oldest"]
