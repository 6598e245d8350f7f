"""Which values of a text may be kept, under which label, and which of two is worth more."""

from __future__ import annotations

import json

import pytest

from proxy.textscan.candidates import Candidate, candidates_of


def found(text: str) -> dict[str, Candidate]:
    return {candidate.text: candidate for candidate in candidates_of(text)}


def test_leaves_of_a_document_stand_under_their_keys() -> None:
    values = found(json.dumps({"id": "A17", "price": 120, "items": [{"name": "Ana"}, {"name": "Bo Li"}]}))
    assert {text: each.label for text, each in values.items()} == {
        "A17": "id",
        "120": "price",
        "Ana": "name",
        "Bo Li": "name",
    }


def test_what_stands_inside_of_a_leaf_stands_under_no_key() -> None:
    values = found(json.dumps({"note": "please look at src/main.c and at the other file beside it, " * 2}))
    assert values["src/main.c"].label == ""


def test_what_only_begins_like_a_document_is_text() -> None:
    values = found('{"id": "A17", "price": 120, "broken')
    assert values["A17"].label == "id"
    assert values["120"].label == "price"


@pytest.mark.parametrize("text", ["[]", " [ ]", "{}", "", "   ", "[1, 2, true, null]"])
def test_where_nothing_may_be_kept_there_is_nothing(text: str) -> None:
    assert not candidates_of(text)


def test_keys_of_lines_and_of_braces() -> None:
    text = """- server: alpha-two
  tool_name: draw_chart,
"quoted": "first second",
x = "a" + "b"
call: run(1)
z: 1
rows [{'city': 'Oslo', 'count': 45, 'q': "w"}]"""
    labels = {text: each.label for text, each in found(text).items()}
    assert labels["alpha-two"] == "server"
    assert labels["draw_chart"] == "tool_name"
    assert labels["first second"] == "quoted"
    assert labels["Oslo"] == "city"
    assert labels["45"] == "count"
    assert not {"run(1)", "1", "w"} & set(labels)


def test_what_a_program_defines_stands_with_the_words_that_define_it() -> None:
    values = found("export function drawChart(a) {\n  buildAxis(a)\n}\nclass ChartView {}\n")
    assert values["export function drawChart"].worth > values["buildAxis"].worth
    assert "class ChartView" in values


@pytest.mark.parametrize(
    ("more", "less"),
    [
        ({"user_id": "alpha"}, {"remark": "alpha"}),
        ({"remark": "alpha"}, {"description": "alpha"}),
        ({"day": "2026-01-02"}, {"day": "10:30"}),
        ({"remark": "two words"}, {"remark": "one"}),
    ],
)
def test_worth(more: dict[str, str], less: dict[str, str]) -> None:
    most = [max(each.worth for each in candidates_of(json.dumps(text))) for text in (more, less)]
    assert most[0] > most[1]


def test_a_long_cjk_run_in_prose_is_worth_little() -> None:
    values = found("我们 很长很长名字 路线")
    assert values["路线"].worth > values["很长很长名字"].worth


@pytest.mark.parametrize(
    "leaf",
    ["string", "(optional words)", "many words " * 7 + "end", "x" * 121, "7"],
    ids=lambda leaf: leaf[:9],
)
def test_what_need_not_be_kept(leaf: str) -> None:
    assert not candidates_of(json.dumps({"key": int(leaf) if leaf.isdigit() else leaf}))


def test_what_stands_there_often_comes_first_and_keeps_its_first_key() -> None:
    text = json.dumps([{"a": "K11"}, {"b": "K22"}, {"c": "K22"}, {"a": "K33"}])
    values = found(text)
    assert [each.text for each in candidates_of(text)] == ["K22", "K11", "K33"]
    assert values["K22"].times == 2
    assert values["K22"].label == "b"


def test_a_name_is_defined_with_the_words_that_say_so() -> None:
    values = found("xclass Aa_1 {}\nexport default abstract class Bb_2 {}\nclass def Cc_3\nstruct Dd_4;")
    assert sorted(name for name in values if " " in name) == [
        "export default abstract class Bb_2",
        "struct Dd_4",
    ]
    assert "Aa_1" in values


def test_of_a_long_document_the_first_and_the_last_values_are_candidates() -> None:
    values = found(json.dumps([f"K{number}" for number in range(10_000)]))
    assert len(values) < 4000
    assert {"K0", "K1000", "K9999"} <= values.keys()
    assert "K5000" not in values
