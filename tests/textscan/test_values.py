"""Which values a text of any kind holds, and what names each."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.textscan.values import (
    Labels,
    Value,
    beginning_of,
    end_of,
    values_of,
    values_of_document,
    values_of_text,
)

_TEXTS = st.text(alphabet="ab1_./-:京東 \n\\n\"',", max_size=40)


def test_json_inside_of_json_is_opened() -> None:
    inner = json.dumps({"order": "W99", "paid": 310})

    assert values_of(json.dumps({"body": inner})) == [
        Value(text="W99", kind="id", label="order", is_leaf=True),
        Value(text="310", kind="number", label="paid", is_leaf=True),
    ]


def test_json_nested_too_often_is_read_as_text() -> None:
    document = json.dumps({"id": "A1"})
    for _ in range(4):
        document = json.dumps([document])

    assert "A1" in [value.text for value in values_of(document)]


def test_values_of_text_carry_the_key_before_them_or_the_word() -> None:
    text = "Order W-1200: total=45.10, items: K12, K13; K14\nnear Gate B22\n"
    text += "'seat': '14C' \"notes\": \"aisle\" 12A"

    assert [(value.text, value.kind, value.label) for value in values_of(text)] == [
        ("W-1200", "id", "Order"),
        ("45.10", "number", "total"),
        ("K12", "id", "items"),
        ("K13", "id", "items"),
        ("K14", "id", "items"),
        ("B22", "id", "Gate"),
        ("14C", "number", "seat"),
        ("aisle", "quoted", "notes"),
        ("12A", "number", "notes"),
    ]


def test_a_key_that_is_an_identifier_is_a_value_itself() -> None:
    text = '"lineHeight": "tall", "plain": \'x\' "--" "true"'
    found = [value.text for value in values_of(text)]

    assert found == ["lineHeight", "tall"]


def test_the_name_of_a_tag_is_no_value_but_a_link_between_angles_is() -> None:
    found = [value.text for value in values_of("<h1>Total</h1> <https://example.org/x>")]

    assert found == ["https://example.org/x"]


def test_encoded_data_is_no_value() -> None:
    assert values_of("data " + "QUJD=" * 200 + " end") == []


def test_a_value_without_anything_before_it_has_no_label() -> None:
    assert values_of("A12 B7") == [
        Value(text="A12", kind="id", label=""),
        Value(text="B7", kind="id", label=""),
    ]


@given(_TEXTS)
def test_every_value_of_a_text_stands_in_it(text: str) -> None:
    for value in values_of(text):
        assert value.text in text


_HARD = {
    "spaces": " ",
    "one letter": "a",
    "quotation marks": '"',
    "quotes that open and never close": "'a ",
    "digits": "1",
    "dots": "a.",
    "colons": "a:",
    "at signs": "a@",
    "slashes": "/",
    "underscores": "_",
    "opening brackets": "[",
    "escapes": "\\n",
    "assignments": "a=b&",
    "angle brackets": "<a ",
    "cjk": "在北京外卖市场",
    "letters of another script": "Привет мир ",
}


def test_of_a_very_long_text_the_ends_are_read_and_no_value_is_cut() -> None:
    ids = [f"HAT{number}" for number in range(40_000)]

    found = [value.text for value in values_of(" ".join(ids))]

    gap = next(place for place, value in enumerate(found) if value != ids[place])
    assert found == ids[:gap] + ids[gap - len(found) :]
    assert 140_000 < len(" ".join(ids[:gap])) < 150_000
    assert 40_000 < len(" ".join(ids[gap - len(found) :])) < 50_000


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (r'{"name": "abc\ud83d", "id": "Z-\uDE001", "note": "see K77 \ud83d now", "n": 12}', ["K77", "12"]),
        (r'{"na\ud83dme": "K77", "x": "K78"}', ["K77", "K78"]),
        (r'{"inner": "{\"id\": \"K77\ud83d\", \"key\": \"K78\"}"}', ["K78"]),
        ("K77\ud83d K78 \ud83d", ["K78"]),
        (r'{"name": "abc \ud83d\ude00", "id": "K77"}', ["abc \U0001f600", "K77"]),
    ],
)
def test_what_holds_half_an_emoji_is_no_value(text: str, values: list[str]) -> None:
    found = values_of(text)
    assert [value.text for value in found] == values
    for value in found:
        f"{value.text} {value.label}".encode()


@pytest.mark.parametrize(
    ("text", "beginning", "end"),
    [
        ("K1 K2", "K1 K2", "K1 K2"),
        ("HAT136 " * 40, " ".join(["HAT136"] * 14), "HAT136 " * 14),
        ("HAT136,HAT137\n" * 20, "HAT136,HAT137\n" * 6 + "HAT136,HAT137", "HAT136,HAT137\n" * 7),
        ("HAT136," * 40, ",".join(["HAT136"] * 14), "HAT136," * 14),
        ("x" * 300, "x" * 100, "x" * 100),
    ],
)
def test_the_ends_of_a_text_hold_no_value_that_is_cut(text: str, beginning: str, end: str) -> None:
    assert beginning_of(text, 100) == beginning
    assert end_of(text, 100) == end


def test_of_a_text_that_is_little_but_values_not_all_are_told() -> None:
    numbers = [str(number) for number in range(10, 30_000)]
    text = json.dumps([int(number) for number in numbers])

    found = [value.text for value in values_of(text)]

    assert found == numbers[: 5000 + len(text) // 16]
    assert len(found) < len(numbers)


@pytest.mark.parametrize("labels", ["all", "none"])
def test_of_a_plain_text_that_is_little_but_values_not_all_are_told(labels: Labels) -> None:
    ids = [f"a{number}" for number in range(10, 30_000)]
    text = " ".join(ids)
    assert [value.text for value in values_of(text, labels)] == ids[: 5000 + len(text) // 16]


def test_a_long_document_that_is_little_but_brackets_is_a_text() -> None:
    assert values_of("[" + "[1,2]," * 20_000 + "[1, 12]]") == [Value(text="12", kind="number", label="")]
    assert Value(text="12", kind="number", label="", is_leaf=True) in values_of(
        "[" + "[1,2]," * 200 + "[1, 12]]"
    )


def test_labels_are_looked_for_where_they_are_wanted() -> None:
    text = "total: 42, HAT136\nowner: user_7"
    assert [value.label for value in values_of(text)] == ["total", "total", "owner"]
    assert [value.label for value in values_of(text, "numbers")] == ["total", "", ""]
    assert [value.label for value in values_of(text, "none")] == ["", "", ""]


@pytest.mark.parametrize("unit", _HARD.values(), ids=_HARD)
def test_a_long_text_of_any_kind_is_read_to_its_end(unit: str) -> None:
    # Were the time quadratic in the length of the text, this would take hours.
    text = unit * (300_000 // len(unit))

    found = {value.text for value in values_of(text + " HAT136")}

    assert found <= {"HAT136", "北京外卖市场"}
    assert "HAT136" in found


@given(_TEXTS, st.sampled_from(["all", "numbers", "none"]))
def test_a_text_that_is_no_document_has_the_same_values_whoever_looks(text: str, labels: Labels) -> None:
    assert values_of_text(text, labels) == values_of(text, labels)
    assert values_of_document(text, labels) == []
    assert [value[:2] for value in values_of(text, labels)] == [value[:2] for value in values_of(text)]


def test_the_values_of_a_document_are_told_of_documents_alone() -> None:
    text = json.dumps({"id": "K77", "note": "see K78 and K79, at 12"})
    assert values_of_document(text) == values_of(text)
    assert [value.is_leaf for value in values_of(text)] == [True, True, False, False, False]
    assert [value.label for value in values_of(text, "numbers")] == ["id", "note", "", "", "at"]
    assert values_of_document("[" + "[1,2]," * 20_000 + "[1, 12]]") == []


def test_of_a_leaf_that_is_no_value_the_first_one_inside_stands_for_it() -> None:
    text = json.dumps({"note": "first line\nowner: K78 and K79", "more": "second\nK80"})
    assert values_of(text, "numbers") == [
        Value(text="K78", kind="id", label="owner", is_leaf=True),
        Value(text="K79", kind="id", label=""),
        Value(text="K80", kind="id", label="more", is_leaf=True),
    ]
