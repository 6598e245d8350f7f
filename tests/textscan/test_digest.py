"""The digest: what it keeps, how it shows it, its limit, and texts made to be slow."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.textscan import digest_of, words_of
from proxy.textscan.atoms import occurs
from proxy.textscan.readable import HEAD, TAIL

FLIGHTS = json.dumps(
    [{"flight_number": f"HAT{100 + at}", "date": f"2024-05-{at + 10}", "price": 200 + at} for at in range(5)]
)


def test_values_of_one_label_stand_side_by_side() -> None:
    assert digest_of(FLIGHTS, 300) == (
        "flight_number=HAT100,HAT101,HAT102,HAT103,HAT104 "
        "date=2024-05-10,2024-05-11,2024-05-12,2024-05-13,2024-05-14 price=200,201,202,203,204"
    )


def test_where_there_is_less_room_the_best_values_stay() -> None:
    assert digest_of(FLIGHTS, 40) == "flight_number=HAT100,HAT101,HAT102"


def test_what_stands_elsewhere_is_not_said_again() -> None:
    known = words_of('look at HAT100 and "HAT102", from 2024-05-10; src/HAT104.c')
    assert digest_of(FLIGHTS, 60, known) == "price=200,201,202,203,204 flight_number=HAT101,HAT103"


def test_words_have_parts_and_no_edges() -> None:
    words = words_of(r"{\"path\": \"src/main.c\"}: see.")
    assert {"path", "src/main.c", "src", "main", "c", "see"} <= words


def test_a_string_is_known_if_its_words_are() -> None:
    text = json.dumps({"name": "Ana Silva", "id": "K7"})
    assert digest_of(text, 100, {"Ana", "Silva"}) == "id=K7"
    assert digest_of(text, 100, {"Ana"}) == 'name="Ana Silva" id=K7'


def test_what_stands_inside_of_a_chosen_value_is_not_said_again() -> None:
    text = json.dumps(
        {
            "path": "src/K77.c",
            "remark": "this is about K77, and goes on until it is prose and no name any more",
        }
    )
    assert digest_of(text, 100) == "path=src/K77.c"


def test_a_label_is_said_again_before_it_is_far_away() -> None:
    text = json.dumps([{"id": f"key-{at:04d}"} for at in range(40)])
    rows = digest_of(text, 300).split()
    assert len(rows) > 2
    assert all(row.startswith("id=") and len(row) <= 110 for row in rows)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("all well\nValueError: no such thing\nmore", "ValueError: no such thing"),
        ("src/a.c:12: error: expected ';'\n", "src/a.c:12: error: expected ';'"),
        ("make: *** [all] Error 1\n  FAILED: tests", "FAILED: tests"),
    ],
)
def test_the_first_error_line_stays_verbatim(text: str, line: str) -> None:
    digest = digest_of(text, 300)
    assert digest == line or digest.startswith(f"{line}; ")


def test_a_long_error_line_is_cut_and_says_so() -> None:
    digest = digest_of("Error: " + "word " * 100, 100)
    assert digest.startswith("Error: word")
    assert digest.endswith("word…")
    assert 45 < len(digest) <= 50
    assert len(digest_of("Error:" + "x" * 100, 100)) == 50


@pytest.mark.parametrize(
    "text", ["catch (error) { x: 1 }", "throw new TypeError: x", "w " * 40 + "error: far"]
)
def test_what_only_speaks_of_errors_is_no_error_line(text: str) -> None:
    assert not any(word in digest_of(text, 300) for word in ("catch", "throw", "far"))


@pytest.mark.parametrize("text", ["", "nothing to keep in here", "[]"])
def test_where_there_is_nothing_to_keep_it_is_empty(text: str) -> None:
    assert digest_of(text, 300) == ""


def test_without_a_budget_it_is_empty() -> None:
    assert digest_of(FLIGHTS, 0) == ""


@pytest.mark.parametrize("budget", range(1, 8))
def test_where_there_is_no_room_for_an_error_line_there_is_none(budget: int) -> None:
    assert digest_of("Error: ", budget) == ""


@pytest.mark.parametrize("inside", range(1, 20))
@pytest.mark.parametrize(
    ("line", "whole"),
    [
        ("account_balance: 98765432", "98765432"),
        ("see /srv/data/build-20260101.tar.gz", "/srv/data/build-20260101.tar.gz"),
        ("Error: no account 98765432 there", "Error: no account 98765432 there"),
    ],
)
@pytest.mark.parametrize("end", ["\n", " "])
def test_no_value_is_cut_in_two_where_a_long_text_is_cut(
    line: str, whole: str, inside: int, end: str
) -> None:
    filler = f"lorem ipsum dolor{end}" * 6000
    head = filler[: HEAD - len(line) + inside - 1].rstrip()
    tail = filler[: TAIL - len(line) + inside - 1].lstrip()
    for text in (f"{head}{end}{line}{end}{filler}", f"{filler}{end}{line}{end}{tail}"):
        digest = digest_of(text, 300)
        for value in re.split(r"[ ,;=]+", digest.replace(whole, "")):
            assert (
                not value
                or value.endswith("…")
                or value in {"Error", "Error:", "no", "account", "there", "account_balance", "98765432"}
            )


def test_what_a_windows_path_is_made_of_stays_whole() -> None:
    text = "Saved to C:\\reports\\nightly\\totals.xlsx and C:\\temp\\run-42.log; see src\\tmp\\new-7.c"
    assert digest_of(text, 300) == "totals.xlsx,run-42.log"


def test_escapes_of_broken_json_are_undone_and_never_cut_a_value() -> None:
    text = '{"customer": "Jos\\u00e9", "city": "M\\u00fcnchen-24", "id": "A-77"'
    assert digest_of(text, 300) == "customer=José city=München-24 A-77"


def test_what_is_left_out_is_under_no_key() -> None:
    assert digest_of('{"path": "src\\new\\run-42.log", "to": "x\\nK99", "K77"', 300) == "K77"


PIECES = st.sampled_from(
    [
        "id: ",
        "A17",
        "src/x.py",
        "\n",
        " ",
        '"two words"',
        '"',
        "{",
        "}",
        "多字节",
        "Error: ",
        "\\n",
        "=",
        ",",
        "12.5",
    ]
)
WHOLE = st.sampled_from(
    [
        '{"k": ["v1", 20]}',
        "<p>",
        "</p>",
        "function ",
        "buildDir",
        "https://a.example/q?x=1",
        "\x1b[0m",
        "\x00",
    ]
)


@settings(max_examples=150)
@given(
    text=st.lists(PIECES | WHOLE | st.text(max_size=8), max_size=40).map("".join), budget=st.integers(0, 200)
)
def test_it_keeps_its_limit_and_is_always_the_same(text: str, budget: int) -> None:
    digest = digest_of(text, budget)
    assert len(digest) <= budget
    assert digest_of(text, budget) == digest


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("ABCDEF"), st.integers(100, 999)), min_size=1, max_size=20))
def test_every_value_that_is_shown_stands_in_the_text(rows: list[tuple[str, int]]) -> None:
    text = "\n".join(f"row {at} key={letter}{number}; other" for at, (letter, number) in enumerate(rows))
    for group in digest_of(text, 120).split():
        assert all(occurs(value, text) for value in group.rpartition("=")[2].split(","))


@pytest.mark.parametrize(
    "text",
    [
        " " * 1_000_000,
        "a" * 1_000_000,
        '"' * 1_000_000,
        "{" * 1_000_000,
        "\\" * 1_000_000,
        "<" * 500_000 + "</" * 10,
        "key: " * 200_000,
        "Error" * 200_000,
        "a:" + " " * 500_000 + "b",
        "<style" * 150_000 + "</p>" * 9,
    ],
    ids=lambda text: text[:6].encode("unicode_escape").decode(),
)
def test_texts_made_to_be_slow_are_read_as_well(text: str) -> None:
    assert len(digest_of(text, 300)) <= 300
