"""What a terminal shows: escapes, progress bars and blanks go, everything that is read stays."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.textscan.whitespace import tidied


@pytest.mark.parametrize(
    ("text", "tidy"),
    [
        pytest.param("\x1b[1;31mred\x1b[0m and \x1b[2Kplain", "red and plain", id="colours and movements"),
        pytest.param("\x1b]0;a title\x07text \x1b(B", "text", id="titles and character sets"),
        pytest.param(
            "\x1b]8;;http://a.b\x1b\\link", "\x1b]8;;http://a.b\x1b\\link", id="a link holds an address"
        ),
        pytest.param("\x1b[ \x1b]0;never ends", "\x1b[ \x1b]0;never ends", id="escapes that do not end"),
        pytest.param("a  \t\r\nb \n", "a\nb\n", id="blanks at line ends"),
        pytest.param("a\n \n\n\t\n\nb\n\nc", "a\n\nb\n\nc", id="runs of empty lines"),
        pytest.param("a" + " " * 100 + "b" + " " * 20 + "c", "a b" + " " * 20 + "c", id="very wide gaps"),
        pytest.param("  0%|   | 0/9\r 50%|█▌ | 5/9\r100%|███| 9/9\n", "100%|███| 9/9\n", id="a progress bar"),
        pytest.param("1.5 MB/s eta 3s\r22.5 kB/s eta 11s", "22.5 kB/s eta 11s", id="units change too"),
        pytest.param("⠋ wait\r⠙ wait\rdone", "⠙ wait\rdone", id="a spinner"),
        pytest.param(
            "one line\rsecond line\rthe third", "one line\rsecond line\rthe third", id="other line ends"
        ),
        pytest.param("10%\rfailed: no space\r20%", "10%\rfailed: no space\r20%", id="a word between"),
        pytest.param("a\r\r\rb", "a\rb", id="nothing between"),
    ],
)
def test_what_goes(text: str, tidy: str) -> None:
    assert tidied(text) == tidy
    assert tidied(tidy) == tidy


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet=st.sampled_from("ab1%\r\n \t#\x1b[m]0;8")))
def test_no_letter_is_lost(text: str) -> None:
    tidy = tidied(text)
    if "\x1b" not in text and "\r" not in text:
        assert tidy.split() == text.split()
    assert tidied(text) == tidy


@pytest.mark.parametrize(
    "text",
    [
        "\x1b[" * 150_000, "\x1b]0;" * 300_000, " " * 300_000, ("x" + " " * 79) * 12_500, "\n" * 300_000,
        "\r" * 300_000, "50%\r" * 100_000, "x\r" * 150_000,
        "\x1b[0" + "0" * 300_000, "1M" * 150_000 + "\r",
    ],
)  # fmt: skip
def test_hostile_texts(text: str) -> None:
    assert len(tidied(text)) <= len(text)
