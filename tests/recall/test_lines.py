from __future__ import annotations

import pytest

from proxy.errors import InvalidRequest
from proxy.recall.lines import chosen, pattern_of, span_of

TEXT = "red\nblue\n蓝\nred"


@pytest.mark.parametrize(
    ("lines", "grep", "numbers"),
    [
        (None, None, [1, 2, 3, 4]),
        ("2-3", None, [2, 3]),
        ("4-999999999", None, [4]),
        ("5-9", None, []),
        (None, "red$", [1, 4]),
        ("2-9", "red", [4]),
        (None, "蓝|b", [2, 3]),
        (None, "", [1, 2, 3, 4]),
        (None, "x", []),
    ],
)
def test_lines_are_chosen(lines: str | None, grep: str | None, numbers: list[int]) -> None:
    span = slice(None) if lines is None else span_of(lines)
    found = chosen(TEXT, span, None if grep is None else pattern_of(grep))
    assert [number for number, _ in found] == numbers
    assert [line for _, line in found] == [TEXT.split("\n")[number - 1] for number in numbers]


@pytest.mark.parametrize("lines", ["", "1", "a-b", "0-1", "3-2", "-1-2", "1-2-3", "1-" + "9" * 5000, "١-٣"])
def test_lines_that_are_none(lines: str) -> None:
    with pytest.raises(InvalidRequest, match="lines=10-20") as raised:
        span_of(lines)
    assert raised.value.param == "lines"


@pytest.mark.parametrize("grep", ["(", "a{1000}{1000}", r"(?=x)", r"\1"])
def test_a_pattern_that_is_none(grep: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidRequest, match="RE2 knows: ") as raised:
        pattern_of(grep)
    assert raised.value.param == "grep"
    assert "b'" not in raised.value.message
    assert capfd.readouterr().err == ""
