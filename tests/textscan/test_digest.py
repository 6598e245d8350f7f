"""The values of a text that a later step is most likely to need."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.textscan import Mentions, digest_of, words_of
from proxy.textscan.digest import (
    HEAD,
    TAIL,
    Candidate,
    chance_of,
    ends_of,
    features_of,
    read_once,
    readable,
    reading_of,
)
from proxy.textscan.scan import occurs

# ------------------------------------------------------------------------------------------ digest

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
        {"path": "src/K77.c", "remark": "this is about K77, and goes on until it is prose and no name any more"}
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
    "text", ["catch (error) { x: 1 }", "throw new TypeError: x", "w " * 40 + "error: far", "isError: far,"]
)
def test_what_only_speaks_of_errors_is_no_error_line(text: str) -> None:
    assert not any(word in digest_of(text, 300) for word in ("catch", "throw", ": far"))


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
def test_no_value_is_cut_in_two_where_a_long_text_is_cut(line: str, whole: str, inside: int, end: str) -> None:
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
    ["id: ", "A17", "src/x.py", "\n", " ", '"two words"', '"', "{", "}", "多字节", "Error: ", "\\n", "=", ",", "12.5"]
)
WHOLE = st.sampled_from(
    ['{"k": ["v1", 20]}', "<p>", "</p>", "function ", "buildDir", "https://a.example/q?x=1", "\x1b[0m", "\x00"]
)


@settings(max_examples=100)
@given(text=st.lists(PIECES | WHOLE | st.text(max_size=8), max_size=40).map("".join), budget=st.integers(0, 200))
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
        "far from the beginning of its line, " * 2 + "error: " * 100_000,
        "a:" + " " * 500_000 + "b",
        "<style" * 150_000 + "</p>" * 9,
    ],
    ids=lambda text: text[:6].encode("unicode_escape").decode(),
)
def test_texts_made_to_be_slow_are_read_as_well(text: str) -> None:
    assert len(digest_of(text, 300)) <= 300


# -------------------------------------------------------------------------------------- candidates


def found(text: str) -> dict[str, Candidate]:
    return {candidate.text: candidate for candidate in reading_of(text).candidates}


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


def test_a_text_in_a_document_says_what_it_says_by_itself() -> None:
    printed = "$ make\nOutput: /tmp/build\nmain.c:12: error: expected ';'\nexport class MainParser\n"
    document = json.dumps({"output": printed, "metadata": {"exit_code": 77}})

    alone, inside = digest_of(printed, 400), digest_of(document, 400)

    assert alone == "main.c:12: error: expected ';'; Output=/tmp/build \"export class MainParser\""
    assert inside == alone.replace("Output", "exit_code=77 Output")
    assert digest_of(f"\n {document}", 400) == inside


def test_lines_may_end_as_on_windows() -> None:
    lines = "name: parse_args\npath: src/main.c\nexport class MainParser\n"
    assert digest_of(lines.replace("\n", "\r\n"), 200) == digest_of(lines, 200)


def test_what_only_begins_like_a_document_is_text() -> None:
    values = found('{"id": "A17", "price": 120, "broken')
    assert values["A17"].label == "id"
    assert values["120"].label == "price"


@pytest.mark.parametrize("text", ["[]", " [ ]", "{}", "", "   ", "[1, 2, true, null]"])
def test_where_nothing_may_be_kept_there_is_nothing(text: str) -> None:
    assert not reading_of(text).candidates


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


def test_where_lines_give_one_value_their_keys_are_kept_with_the_colon() -> None:
    fields = """type Theme = {
  accent: Color,
  border: Color;
  muted: Color,
  'dim': Color,
  size: Width,
  dim = Color
}"""
    values = found(f"{fields}\n")
    assert {"accent:", "border:", "muted:"} <= values.keys()
    assert not {"dim:", "size:"} & values.keys()  # a quotation mark follows on the one; the other has its own value
    assert "accent:" not in found("accent: Color\n" * 5 + "border: Color")
    assert digest_of(f"{fields}\n", 100, words_of("accent border: Color Width")) == "accent:,muted:"


@pytest.mark.parametrize(
    ("more", "less"),
    [
        ({"user_id": "alpha"}, {"remark": "alpha"}),
        ({"remark": "alpha"}, {"description": "alpha"}),
        ({"day": "2026-01-02"}, {"day": "10:30"}),
        ({"day": "2026-01-02"}, {"day": "2026-01-02T10:30:00Z"}),
        ({"remark": 12.25}, {"remark": 12.254}),
        ({"remark": "two words"}, {"remark": "one"}),
    ],
)
def test_worth(more: dict[str, str | float], less: dict[str, str | float]) -> None:
    most = [max(each.worth for each in reading_of(json.dumps(text)).candidates) for text in (more, less)]
    assert most[0] > most[1]


def test_a_long_cjk_run_in_prose_is_worth_little() -> None:
    values = found("我们 很长很长名字 路线")
    assert values["路线"].worth > values["很长很长名字"].worth


@pytest.mark.parametrize(
    "leaf", ["string", "(optional words)", "many words " * 7 + "end", "x" * 121, "7"], ids=lambda leaf: leaf[:9]
)
def test_what_need_not_be_kept(leaf: str) -> None:
    assert not reading_of(json.dumps({"key": int(leaf) if leaf.isdigit() else leaf})).candidates


def test_what_stands_there_often_comes_first_and_keeps_its_first_key() -> None:
    text = json.dumps([{"a": "K11"}, {"b": "K22"}, {"c": "K22"}, {"a": "K33"}])
    values = found(text)
    assert [each.text for each in reading_of(text).candidates] == ["K22", "K11", "K33"]
    assert values["K22"].times == 2
    assert values["K22"].label == "b"


def test_a_name_is_defined_with_the_words_that_say_so() -> None:
    values = found("xclass Aa_1 {}\nexport default abstract class Bb_2 {}\nclass def Cc_3\nstruct Dd_4;")
    assert sorted(name for name in values if " " in name) == ["export default abstract class Bb_2", "struct Dd_4"]
    assert "Aa_1" in values


def test_of_a_long_document_the_first_and_the_last_values_are_candidates() -> None:
    values = found(json.dumps([f"K{number}" for number in range(10_000)]))
    assert len(values) < 4000
    assert {"K0", "K1000", "K9999"} <= values.keys()
    assert "K5000" not in values


# ---------------------------------------------------------------------------------------- readable

PAGE = '<a href="https://a.example/b">Home</a><p>One &amp; two</p>' + "<li>x</li>" * 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain text", "plain text"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        (r"{\"id\": \"A1\"}\n\"b\"", '{"id": "A1"}\n"b"'),
        (r"https:\/\/a.example\t next", "https://a.example  next"),
        (r"a\u2728b", "a\u2728b"),
        (r'{"name": "Jos\u00e9", "city": "M\\u00fcnchen"', '{"name": "José", "city": "München"'),
        (r"\ud83d\ude00 and \ud83d\u0000.", "\U0001f600 and   ."),
        (r"x1b is \x1b[0m in a program", r"x1b is \x1b[0m in a program"),
        ("a < b </i>", "a < b </i>"),
        ("a/b.go-9-x-1\na/b.go:10:y\na/b.go-11-\n--", "a/b.go:9:x-1\na/b.go:10:y\na/b.go:11:\n--"),
        ("logs/a.log-9-x\nb.go-1-x\nb.go-2-x", "logs/a.log-9-x\nb.go-1-x\nb.go-2-x"),
        ("     9→func a()\n    10→\n\t11→// b→c", "     9 func a()\n    10 \n\t11 // b→c"),
    ],
)
def test_wrapping_is_taken_off(text: str, expected: str) -> None:
    assert readable(text) == expected


def test_of_a_page_stays_what_a_reader_sees_or_may_follow() -> None:
    words = readable("<style>p {color: red}</style>" + PAGE + "<script>let x = 1</script>").split()
    assert words == ["https://a.example/b", "Home", "One", "two", "x", "x", "x", "x"]


def test_what_is_never_closed_stays() -> None:
    assert "let" in readable(PAGE + "<script>let").split()


def test_of_a_long_text_stay_the_ends() -> None:
    text = "a" * HEAD + "b" * 10 + "c" * TAIL
    assert ends_of(text) == "a" * HEAD + "…\n…" + "c" * TAIL
    assert ends_of(text[: HEAD + TAIL]) == text[: HEAD + TAIL]


def test_a_long_text_is_cut_between_lines_or_else_between_words_and_says_so() -> None:
    word = "word-17 "
    assert ends_of(word * 10_000) == f"{(word * (HEAD // 8))[:-1]}…\n…{word * (TAIL // 8)}"
    line = "a line-17\n"
    assert ends_of(line * 10_000).split("\n") == ["a line-17"] * ((HEAD + TAIL) // 10) + [""]


@pytest.mark.parametrize(
    "text",
    [
        r"log C:\temp\run-42.log ok",
        r'path="C:\temp\run-42.log", text="a\b"',
        r"C:\Program Files\nodejs\node-18.exe",
        r'{"path": "C:\\temp\\run-42.log", "broken',
        'File "C:\\temp\\new\\run-1.py", line 3\nValueError: x',
    ],
)
def test_a_windows_path_stays(text: str) -> None:
    assert readable(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"src\new\run-42.log: done", "src……: done"),
        (r'"\\nas01\temp\run-42.log"', '"………"'),
        (r"Plan B:\nDo K77\nThen go", "Plan B:… go"),
        (r"Plan B:\nDo", "Plan B:…"),
        (r'{"path": "C:\new\run-42.log", "text": "a\nb\n"', '{"path": "C:…", "text": "a\nb\n"'),
        (r'{"text": "see \"src\\new\" and\n"', '{"text": "see "src…" and\n"'),
        (r"one\nK77", "one…"),
    ],
)
def test_where_it_may_be_a_path_or_an_escape_neither_is_said(text: str, expected: str) -> None:
    assert readable(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r'{"text": "one\nK77\n", "broken', '{"text": "one\nK77\n", "broken'),
        (r"Result(text='one\nK77\tK78\n')", "Result(text='one\nK77 K78\n')"),
        (r'{"a": "{\"t\": \"one\\nK77\\n\"}\nK88\n", "x', '{"a": "{"t": "one\nK77\n"}\nK88\n", "x'),
        (r"{\"text\": \"one\nK77\n\"", '{"text": "one\nK77\n"'),
    ],
)
def test_escapes_between_words_are_undone_where_the_text_is_escaped(text: str, expected: str) -> None:
    assert readable(text) == expected


def test_a_backslash_that_no_escape_has_says_that_a_text_is_not_escaped() -> None:
    assert readable(r'{"text": "one\nK77\n", "re": "\d+"') == '{"text": "one…\n", "re": "\\d+"'


def test_what_was_said_again_is_kept_where_others_are_not_worth_their_characters() -> None:
    mentions = Mentions()
    mentions.add("assistant", "I look", ['{"id": "K88"}'])
    mentions.add("tool", "K77 K88 K99", ())
    mentions.add("assistant", "once more", ['{"id": "see\\nK88"}'])
    mentions.add("user", "and K77?", ())
    assert (mentions.messages["K88"], mentions.agent["K88"], mentions.user) == (3, 2, {"and", "K77?"})
    assert digest_of("K77 K88 K99", 300, mentions=mentions, least=0.015) == "K88"
    assert digest_of("K77 K88 K99", 300, mentions=mentions) == "K77,K88,K99"


@pytest.mark.parametrize("is_argument", [False, True])
def test_the_chance_of_a_value_is_that_of_its_features(is_argument: bool) -> None:
    text = json.dumps(
        {"order_id": "HAT136", "path": "src/main.c", "note": "two words", "port": 8080, "ports": [8080, 8081]}
    )
    said = Mentions()
    said.add("user", "order HAT136", [])
    said.add("assistant", "I read src/main.c", ['{"path": "src/main.c"}'])
    candidates = reading_of(text, is_argument=is_argument).candidates
    digests = [
        digest_of(text, 1000, mentions=said, least=share * limit, is_argument=is_argument)
        for candidate in candidates
        for share in [chance_of(features_of(candidate, said, is_argument=is_argument)) / (len(candidate.text) + 2)]
        for limit in (0.9999, 1.0001)
    ]
    for at, candidate in enumerate(candidates):
        assert candidate.text in digests[2 * at]
        assert candidate.text not in digests[2 * at + 1]


def test_a_very_long_text_is_not_remembered() -> None:
    before = read_once.cache_info().currsize
    text = "id=HAT136 " + "words and words " * 10_000
    assert "HAT136" in digest_of(text, 100)
    assert read_once.cache_info().currsize == before
