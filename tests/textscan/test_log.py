"""Logs: lines that differ only in numbers are counted, what tells of trouble stays, in order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.textscan.alarm import alarms
from proxy.textscan.log import condensed


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
    shown = condensed("\n".join(before), 2).split("\n")
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
        pytest.param(
            "\n".join(f"{word} = {word}" for word in "abcdefghijklmnop"), id="lines that differ in words"
        ),
        pytest.param("\n".join(lines("item %", 0, 6)), id="too few of a kind for a mark"),
        pytest.param("\n".join(lines("error %", 0, 50)), id="every line tells of an error"),
        pytest.param("\n".join(lines("第%步失败", 0, 50)), id="in Chinese as well"),
        pytest.param("\n".join(["}", "return x"] * 30), id="lines without numbers by turns"),
        pytest.param("\n" * 1000, id="empty lines"),
    ],
)
def test_what_stays(text: str) -> None:
    assert condensed(text, 2) == text


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.sampled_from(["a 1", "a 2", "a 33", "b 1 x", "b 2 x", "error 1", "  at 1", "  at 2", "same", ""]),
        max_size=60,
    ),
    st.integers(1, 3),
)  # fmt: skip
def test_what_is_shown_is_verbatim_and_in_order_and_the_rest_is_counted(
    given_lines: list[str], keep: int
) -> None:
    shown = condensed("\n".join(given_lines), keep).split("\n")
    rest = iter(given_lines)
    count = 0
    for line in shown:
        if line.startswith("… ("):
            omitted = int(line.removeprefix("… (").split(" ")[0])
            skipped = [next(rest) for _ in range(omitted)]
            assert not any(map(alarms, skipped))
            count += omitted
        else:
            assert next(rest, "") == line
            count += 1
    assert count == max(len(given_lines), 1)


@pytest.mark.parametrize(
    "text",
    [
        "a1 " * 300_000,
        "a" * 1_000_000,
        "x = 1\n" * 150_000,
        "_1" * 500_000,
        "\n".join(lines("row %", 0, 100_000)),
    ],
    ids=["words", "one word", "short lines", "numbers", "a hundred thousand lines"],
)
def test_hostile_texts(text: str) -> None:
    assert len(condensed(text, 2)) <= len(text)
