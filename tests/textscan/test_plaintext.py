"""Plain text in a shorter form: terminals, bytes, logs, marks."""

from __future__ import annotations

import json
from base64 import b64encode, encodebytes
from hashlib import sha512
from textwrap import wrap
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.textscan.document import read_json, write_json
from proxy.textscan.plaintext import (
    UNDER,
    alarming_lines,
    condense_log,
    ending_mark,
    fold_lines,
    group_lines,
    has_alarm,
    head_and_tail,
    names_ref,
    omission_mark,
    page_text,
    strip_noise,
    weight,
    without_blobs,
)
from proxy.textscan.table import as_table
from proxy.tokens import TokenCounter

# -------------------------------------------------------------------------------------- whitespace


@pytest.mark.parametrize(
    ("text", "tidy"),
    [
        pytest.param("\x1b[1;31mred\x1b[0m and \x1b[2Kplain", "red and plain", id="colours and movements"),
        pytest.param("\x1b]0;a title\x07text \x1b(B", "text", id="titles and character sets"),
        pytest.param("\x1b]8;;http://a.b\x1b\\link", "\x1b]8;;http://a.b\x1b\\link", id="a link holds an address"),
        pytest.param("\x1b[ \x1b]0;never ends", "\x1b[ \x1b]0;never ends", id="escapes that do not end"),
        pytest.param("a  \t\r\nb \n", "a\nb\n", id="blanks at line ends"),
        pytest.param("a\n \n\n\t\n\nb\n\nc", "a\n\nb\n\nc", id="runs of empty lines"),
        pytest.param("a" + " " * 100 + "b" + " " * 20 + "c", "a b" + " " * 20 + "c", id="very wide gaps"),
        pytest.param("  0%|   | 0/9\r 50%|█▌ | 5/9\r100%|███| 9/9\n", "100%|███| 9/9\n", id="a progress bar"),
        pytest.param("1.5 MB/s eta 3s\r22.5 kB/s eta 11s", "22.5 kB/s eta 11s", id="units change too"),
        pytest.param("⠋ wait\r⠙ wait\rdone", "⠙ wait\rdone", id="a spinner"),
        pytest.param("one line\rsecond line\rthe third", "one line\rsecond line\rthe third", id="other line ends"),
        pytest.param(
            "day,n\r1/2/2024,1\r2/2/2024,2", "day,n\r1/2/2024,1\r2/2/2024,2", id="a table with other line ends"
        ),
        pytest.param("1.2/9.5 MB\r9.5/9.5 MB\n", "9.5/9.5 MB\n", id="parts of a whole"),
        pytest.param("10%\rfailed: no space\r20%", "10%\rfailed: no space\r20%", id="a word between"),
        pytest.param("a\r\r\rb", "a\rb", id="nothing between"),
    ],
)
def test_what_goes(text: str, tidy: str) -> None:
    assert strip_noise(text) == tidy
    assert strip_noise(tidy) == tidy


@settings(max_examples=60)
@given(st.text(alphabet=st.sampled_from("ab1%\r\n \t#\x1b[m]0;8")))
def test_no_letter_is_lost(text: str) -> None:
    tidy = strip_noise(text)
    if "\x1b" not in text and "\r" not in text:
        assert tidy.split() == text.split()
    assert strip_noise(text) == tidy


@pytest.mark.parametrize(
    "text",
    [
        "\x1b[" * 150_000, "\x1b]0;" * 300_000, " " * 300_000, ("x" + " " * 79) * 12_500, "\n" * 300_000,
        "\r" * 300_000, "50%\r" * 100_000, "x\r" * 150_000,
        "\x1b[0" + "0" * 300_000, "1M" * 150_000 + "\r",
    ],
)  # fmt: skip
def test_hostile_texts(text: str) -> None:
    assert len(strip_noise(text)) <= len(text)


# -------------------------------------------------------------------------------------------- blob

BYTES = b"".join(sha512(bytes([number])).digest() for number in range(20))
BASE64 = b64encode(BYTES).decode()
LINES = encodebytes(BYTES).decode().rstrip("\n")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param(
            f'src="data:image/png;base64,{BASE64}" alt="x"',
            f'src="data:image/png;base64,… ({len(BASE64)} characters of base64 omitted)" alt="x"',
            id="base64",
        ),
        pytest.param(f"a\n{LINES}\nb", f"a\n… ({len(LINES)} characters of base64 omitted)\nb", id="base64 in lines"),
        pytest.param(BYTES.hex(), f"… ({len(BYTES.hex())} characters of hexadecimal omitted)", id="hexadecimal"),
    ],
)
def test_bytes_are_left_out(text: str, shown: str) -> None:
    assert without_blobs(text) == shown
    assert without_blobs(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("short", id="a short text"),
        pytest.param(BASE64[:150] + " " * 100, id="short bytes"),
        pytest.param("x" * 10_000, id="one letter"),
        pytest.param("0" * 10_000, id="zeros"),
        pytest.param("/usr/share/Some_Long_Path" * 20, id="a path"),
        pytest.param("\n".join(["ALongWordThatIsNoBytesAtAll" * 3] * 5), id="words in lines"),
        pytest.param("-" * 1_000_000, id="a rule"),
        pytest.param("word " * 200_000, id="words"),
        pytest.param("A1b" * 1_000_000 + "!", id="three characters"),
    ],
)
def test_words_stay(text: str) -> None:
    assert without_blobs(text) == text


def test_many_lines_of_bytes_are_one() -> None:
    text = "\n".join(wrap(BASE64.rstrip("=") * 700, 76))
    assert without_blobs(text) == f"… ({len(text)} characters of base64 omitted)"


def test_a_long_attachment_of_a_mail_takes_time_in_proportion() -> None:
    bytes_in_lines = "\r\n".join(wrap(BASE64.rstrip("=") * 700, 76))
    start = process_time()
    shown = without_blobs(f"{bytes_in_lines}==\r\n--boundary--\r\n")
    assert shown == f"… ({len(bytes_in_lines) + 2} characters of base64 omitted)\r\n--boundary--\r\n"
    assert process_time() - start < 5


# --------------------------------------------------------------------------------------------- log


def lines(text: str, start: int, stop: int) -> list[str]:
    return [text.replace("%", str(number)) for number in range(start, stop)]


TRACE = ["Traceback (most recent call last):", '  File "a1.py", line 3', "    run(1)", "ValueError: 3"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(
            ["start", *lines("12:00:% INFO request % done", 10, 40), "end"],
            [
                "start",
                *lines("12:00:% INFO request % done", 10, 12),
                "… (26 lines omitted: 26 x #:#:# INFO request # done)",
                *lines("12:00:% INFO request % done", 38, 40),
                "end",
            ],
            id="a run of one kind",
        ),
        pytest.param(
            [*lines("step % of some work", 0, 9), *TRACE, *lines("step % of some work", 9, 20)],
            [
                *lines("step % of some work", 0, 2),
                "… (7 lines omitted: 7 x step # of some work)",
                *TRACE,
                "… (9 lines omitted: 9 x step # of some work)",
                *lines("step % of some work", 18, 20),
            ],
            id="a trace stays whole",
        ),
        pytest.param(
            [
                *lines("item %", 0, 8), "item 8 failed", "    at item 9", "    at item 10",
                *lines("item %", 11, 20),
            ],
            [
                *lines("item %", 0, 2), "… (6 lines omitted: 6 x item #)", "item 8 failed", "    at item 9",
                "    at item 10", "… (7 lines omitted: 7 x item #)", *lines("item %", 18, 20),
            ],
            id="what is indented below an error belongs to it",
        ),
        pytest.param(
            ["waiting"] * 20 + ["", "", "", ""],
            ["waiting", "… (18 lines omitted: 18 x waiting)", "waiting", "", "", "", ""],
            id="the same line again and again",
        ),
        pytest.param(
            [f"kind {chr(97 + number % 4)}{number} of { 'ABCD'[number % 4] * 70}" for number in range(40)],
            None,
            id="several kinds by turns",
        ),
    ],
)  # fmt: skip
def test_what_is_counted(before: list[str], after: list[str] | None) -> None:
    shown = condense_log("\n".join(before), 2).split("\n")
    if after is not None:
        assert shown == after
        return
    assert [line for line in shown if not line.startswith("…")] == before[:8] + before[-8:]
    (mark,) = [line for line in shown if line.startswith("…")]
    assert mark.startswith("… (24 lines omitted: 6 x kind # of AAAA")
    assert mark.count(" x ") == 3


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("a\nb", id="few lines"),
        pytest.param("\n".join(f"{word} = {word}" for word in "abcdefghijklmnop"), id="lines that differ in words"),
        pytest.param("\n".join(lines("item %", 0, 6)), id="too few of a kind for a mark"),
        pytest.param("\n".join(f"item {at}\n{chr(97 + at)}" for at in range(20)), id="one of a kind at a time"),
        pytest.param("\n".join(lines("error %", 0, 50)), id="every line tells of an error"),
        pytest.param("\n".join(lines("第%步失败", 0, 50)), id="in Chinese as well"),
        pytest.param("\n".join(["}", "return x"] * 30), id="lines without numbers by turns"),
        pytest.param("\n" * 1000, id="empty lines"),
    ],
)
def test_what_stays(text: str) -> None:
    assert condense_log(text, 2) == text


@settings(max_examples=60)
@given(
    st.lists(
        st.sampled_from(["a 1", "a 2", "a 33", "b 1 x", "b 2 x", "error 1", "  at 1", "  at 2", "same", ""]),
        max_size=60,
    ),
    st.integers(1, 3),
)  # fmt: skip
def test_what_is_shown_is_verbatim_and_in_order_and_the_rest_is_counted(given_lines: list[str], keep: int) -> None:
    shown = condense_log("\n".join(given_lines), keep).split("\n")
    rest = iter(given_lines)
    count = 0
    for line in shown:
        if line.startswith("… ("):
            omitted = int(line.removeprefix("… (").split(" ")[0])
            skipped = [next(rest) for _ in range(omitted)]
            assert not any(map(has_alarm, skipped))
            count += omitted
        else:
            assert next(rest, "") == line
            count += 1
    assert count == max(len(given_lines), 1)


@pytest.mark.parametrize(
    "text",
    ["a1 " * 300_000, "a" * 1_000_000, "x = 1\n" * 150_000, "_1" * 500_000, "\n".join(lines("row %", 0, 100_000))],
    ids=["words", "one word", "short lines", "numbers", "a hundred thousand lines"],
)
def test_hostile_logs_take_linear_time(text: str) -> None:
    assert len(condense_log(text, 2)) <= len(text)


# ------------------------------------------------------------------------------------------- alarm


@pytest.mark.parametrize(
    "text",
    [
        "ERROR: disk full", "Warning: old", "Traceback (most recent call last):", "ValueError: x",
        "java.lang.NullPointerException",
        "Permission denied", "connection timed out", "request timeout", "permission 權限錯誤",
        "Segmentation fault", "404 Not Found", "panic: runtime", "KILLED", "操作失败", "发生错误",
        "警告：磁盘", "连接超时", "it FAILED",
    ],
)  # fmt: skip
def test_what_tells_of_something_gone_wrong(text: str) -> None:
    assert has_alarm(text)


@pytest.mark.parametrize("text", ["", "all is well", "200 OK", "已完成", "成功", "x" * 1_000_000])
def test_what_does_not(text: str) -> None:
    assert not has_alarm(text)


_SAID = st.sampled_from(
    ["Error", "timed out", "time", "out", "错误", "错", "误", "İ", "Σ", "é", "\ud83d", " ", "\r", "\n"]
)


@settings(max_examples=100)
@given(st.lists(_SAID, max_size=20).map("".join))
def test_which_lines_tell_of_something_gone_wrong(text: str) -> None:
    assert list(alarming_lines(text)) == [number for number, line in enumerate(text.split("\n")) if has_alarm(line)]


# -------------------------------------------------------------------------------------------- mark


def test_what_a_mark_says() -> None:
    assert omission_mark("15") == "… (15 omitted)"
    assert omission_mark("3 lines", "2 x a #") == "… (3 lines omitted: 2 x a #)"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (f"some lines\n{ending_mark('node_1')}", True),
        ('{"compressed":true,"full_output":"node_1"}', True),
        ("[... 1 line (5 bytes) omitted of 2 (9 bytes); full output: node_1 ...]\nend", True),
        (ending_mark("node_12"), False),
        ('{"full_output":"node_12"}', False),
        ("node_1", False),
    ],
)
def test_which_texts_name_their_original(text: str, names: bool) -> None:
    assert names_ref(text, "node_1") == names


# ------------------------------------------------------------------------------------------ weight

RECORDS = [{"number": n, "city": f"City {n}", "price": n * 1.25, "open": n % 3 == 0} for n in range(40)]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [("", 0), ("words and 12345", 4), ('{"a": [1]}', 6), ("中文 字", 2), ("a\n\n\n  b", 3), (" " * 100_000, 0)],
)
def test_what_a_text_weighs(text: str, pieces: int) -> None:
    assert weight(text) == pieces


@pytest.mark.parametrize("indent", [None, 2])
def test_a_table_weighs_what_it_costs(indent: int | None) -> None:
    text = json.dumps(RECORDS, indent=indent)
    table = write_json(as_table(read_json(text)) or [])
    counter = TokenCounter()
    estimate = counter.text(text, "gpt-4o") * weight(table) / weight(text)
    assert estimate == pytest.approx(counter.text(table, "gpt-4o"), rel=0.15)


# ----------------------------------------------------------------------- lists, diffs, traces of calls


def ungrouped(text: str) -> str:
    """Return the text that `grouped` had."""
    if not text.startswith(UNDER) and f"\n{UNDER}" not in text:
        return text
    shared, lines = "", list[str]()
    for line in text.split("\n"):
        if line.startswith(UNDER):
            shared = line.removeprefix(UNDER)
        else:
            lines.append(shared + line)
    return "\n".join(lines)


GREP = "\n".join(
    f"src/server/{name}.py:{line}:    return {name}_{line}" for name in ("app", "auth") for line in range(9)
)
LISTING = ".:\ntotal 8\n" + "\n".join(f"-rw-r--r-- 1 me staff {size:6} Jan  1 12:00 f{size}.py" for size in range(9))


@pytest.mark.parametrize("text", [GREP, LISTING, f"no match\n{GREP}\n--\nlast"])
def test_what_lines_of_a_list_share_is_said_once(text: str) -> None:
    short = group_lines(text)
    assert len(short) < 0.9 * len(text)
    assert ungrouped(short) == text


@pytest.mark.parametrize("text", ["", "a\nb", GREP[:100], f"{UNDER}x\n{GREP}", "a:1:\nb:1:\n" * 20])
def test_what_is_no_list_or_looks_like_a_grouped_one_stays(text: str) -> None:
    assert group_lines(text) == text


@settings(max_examples=100)
@given(st.lists(st.sampled_from(["a.py:1:x", "a.py:2:", "b/c.py:7:== y", "== z", "", "-rw-r--r-- 1 a b 3 x", "w"])))
def test_a_grouped_list_is_read_back(lines: list[str]) -> None:
    text = "\n".join(lines)
    short = group_lines(text)
    assert short == text or ungrouped(short) == text


DIFF = """diff --git a/x.py b/x.py
--- a/x.py
+++ b/x.py
@@ -1,11 +1,11 @@ def first():
 one
 two
 three
 four
 five
-six
+6
 seven

 nine
 ten
 eleven
\\ No newline at end of file
no more of the diff"""


def test_the_middle_of_context_is_left_out_of_a_diff() -> None:
    assert fold_lines(DIFF).split("\n") == [
        "diff --git a/x.py b/x.py",
        "--- a/x.py",
        "+++ b/x.py",
        "@@ -1,11 +1,11 @@ def first():",
        " one",
        "… (3 lines of context omitted)",
        " five",
        "-six",
        "+6",
        " seven",
        "… (3 lines of context omitted)",
        " eleven",
        "\\ No newline at end of file",
        "no more of the diff",
    ]


def test_frames_of_libraries_are_left_out_of_a_trace() -> None:
    python = 'Traceback (most recent call last):\n  File "app.py", line 3, in main\n    run()\n'
    python += '  File "/v/lib/python3.11/site-packages/x/y.py", line 9, in f\n    g()\n' * 4 + "ValueError: no"
    assert fold_lines(python).split("\n")[1:] == [
        '  File "app.py", line 3, in main',
        "    run()",
        "… (8 lines of libraries omitted)",
        "ValueError: no",
    ]
    java = (
        "E: x\n\tat com.mine.A.b(A.java:1)\n"
        + "\tat org.springframework.C.d(C.java:2)\n" * 5
        + "\tat com.mine.E.f(E.java)"
    )
    assert "… (5 lines of libraries omitted)" in fold_lines(java)
    assert fold_lines(java).count("com.mine") == 2


def test_steps_of_an_installer_are_lines_of_one_kind() -> None:
    log = "\n".join(f"Collecting package{at}\n  Downloading p-{at}.whl (12 kB)" for at in range(40))
    short = condense_log(f"{log}\nERROR: no space\nSuccessfully installed p-1", 2)
    assert len(short) < len(log) / 3
    assert short.endswith("ERROR: no space\nSuccessfully installed p-1")


def test_a_menu_that_stands_on_a_page_twice_is_shown_once() -> None:
    menu = "".join(f"<li><a href='/{name}'>{name}</a></li>" for name in ("Home", "Shop", "Help"))
    page = page_text(f"<html><body><ul>{menu}</ul><p>Text</p><ul>{menu}</ul></body></html>")
    assert page.count("Shop") == 2  # its address and its name
    assert page.endswith("Text\n… (3 lines omitted: as above)")


def test_a_tag_that_never_ends_takes_time_in_proportion() -> None:
    start = process_time()
    page = f"<html><p>Text</p><{'a' * 200_000}"
    assert page_text(page) == f"Text\n<{'a' * 200_000}"
    assert process_time() - start < 5


@pytest.mark.parametrize(
    "text",
    [
        *("a.py:1:" * 150_000, "a.py:1:\n" * 100_000, "@@ -1 +1 @@\n" + " x\n" * 300_000, "    at x\n" * 100_000),
        *("-rw-r--r-- 1 a b 3 x\n" * 50_000, "<a href=x>y</a>\n" * 50_000, "Collecting x1\n" * 100_000),
    ],
)
def test_lists_and_diffs_take_time_in_proportion(text: str) -> None:
    start = process_time()
    group_lines(text)
    fold_lines(text)
    condense_log(text, 2)
    assert process_time() - start < 5


def test_the_ends_of_a_long_text_stand_around_a_mark_and_errors() -> None:
    assert head_and_tail("short", 5) == "short"
    text = "\n".join(
        [*(f"line {at} of many" for at in range(50)), "fatal: gone", *(f"line {at}" for at in range(50, 99))]
    )
    left = head_and_tail(text, 200)
    head, mark, told, tail = left.split("… (")[0], "characters omitted)", "fatal: gone", left[-20:]
    assert text.startswith(head.rstrip())
    assert text.endswith(tail.lstrip())
    assert mark in left
    assert told in left
    assert len(left) < 260
    assert head_and_tail("x" * 100, 10) == "xxxxx\n… (90 characters omitted)\nxxxxx"
    assert head_and_tail("x" * 100, 0) == "… (100 characters omitted)"
