"""Blobs: bytes written as text go, long words stay."""

from __future__ import annotations

from base64 import b64encode, encodebytes
from hashlib import sha512
from textwrap import wrap

import pytest

from proxy.textscan.blob import without_blobs

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
        pytest.param(
            f"a\n{LINES}\nb", f"a\n… ({len(LINES)} characters of base64 omitted)\nb", id="base64 in lines"
        ),
        pytest.param(
            BYTES.hex(), f"… ({len(BYTES.hex())} characters of hexadecimal omitted)", id="hexadecimal"
        ),
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
