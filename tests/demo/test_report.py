import json

import pytest
from msgspec.structs import replace

from proxy.demo import as_data, report
from tests.demo.measured import FIRST, SECOND, outcome, run


def test_plain_text_is_aligned_in_lines_of_at_most_82_characters() -> None:
    lines = list(report(outcome()))
    header = next(line for line in lines if line.startswith("turn"))
    first, second = lines[lines.index(header) + 1 :][:2]
    assert header.split()[:6] == ["turn", "requests", "messages", "tokens", "sent", "on"]
    assert first.split() == ["1", "1", "2", "1,000", "2", "1,000", "0%", "2"]
    assert second.split() == ["2", "1", "4", "3,000", "2", "2,000", "75%", "4", "D", "moved"]
    assert header.index("cut") == second.index("moved")
    assert max(map(len, lines)) <= 82


@pytest.mark.parametrize(
    "words",
    [
        "(D drop_oldest)",
        "above 2,500 tokens, down to 1,500",
        "25.0 %",
        "gpt-4o                                0.0081   0.0056  30.8 %",
        "ok     requests refused by the upstream: 0 of 4",
    ],
)
def test_the_report_contains(words: str) -> None:
    assert words in "\n".join(report(outcome()))


def test_a_failed_check_is_marked() -> None:
    assert any(line.startswith("FAILED requests refused") for line in report(outcome(refused=1)))


def test_a_turn_of_several_requests_is_one_line() -> None:
    steps = (FIRST, replace(SECOND, turn=1), replace(SECOND, turn=2, moved=False))
    rows = [line.split() for line in report(outcome(trimmed=run(*steps))) if line.startswith("   ")]
    assert [row[:2] for row in rows if row[0].isdigit()] == [["1", "2"], ["2", "1"]]


def test_json_holds_every_figure() -> None:
    data = json.loads(json.dumps(as_data(outcome())))
    assert data["holds"] is True
    assert [named["policy"] for named in data["runs"]] == ["default", "off"]
    assert data["runs"][0]["saved_percent"] == 25.0
    assert [cost["model"] for cost in data["costs"]] == ["gpt-4o", "gpt-5.4"]
    assert data["runs"][0]["steps"][1]["edits"] == ["drop_oldest"]
