"""What is taken off a text before values are looked for, and what stays of a long one."""

from __future__ import annotations

import pytest

from proxy.textscan.readable import HEAD, TAIL, ends_of, readable

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
