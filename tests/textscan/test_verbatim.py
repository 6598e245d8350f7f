"""Strings between triple quotes: what they look like, and that Python reads them as they were."""

from __future__ import annotations

import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.textscan.verbatim import spelled

LINES = "one\ntwo\nthree\nfour\nfive"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("one line", '"one line"', id="one line"),
        pytest.param("a\nb\nc\nd", '"a\\nb\\nc\\nd"', id="few escapes"),
        pytest.param(LINES, f'"""{LINES}"""', id="lines"),
        pytest.param('say "a", "b" and\t"c" again', '"""say "a", "b" and\t"c" again"""', id="quotes"),
        pytest.param(r"C:\a\b\c\d.txt", r'r"""C:\a\b\c\d.txt"""', id="backslashes"),
        pytest.param(LINES + '"""x', json.dumps(LINES + '"""x'), id="such quotes inside"),
        pytest.param(f'"{LINES}', json.dumps(f'"{LINES}'), id="a quote at its beginning"),
        pytest.param(f'{LINES}"', json.dumps(f'{LINES}"'), id="a quote at its end"),
        pytest.param(f"{LINES}\\", json.dumps(f"{LINES}\\"), id="a backslash at its end"),
        pytest.param(f"{LINES}\r\n", json.dumps(f"{LINES}\r\n"), id="a carriage return"),
        pytest.param(f"{LINES}\ud800", json.dumps(f"{LINES}\ud800"), id="half of an emoji"),
        pytest.param("x\ud800", '"x\\ud800"', id="half of an emoji in one line"),
        pytest.param("é – 京", '"é – 京"', id="other letters"),
    ],
)
def test_strings(text: str, shown: str) -> None:
    assert spelled(text) == shown


@given(st.text(st.sampled_from("ab \"'\\\n\tré京\x1b"), max_size=40))
def test_python_reads_it_as_it_was_and_it_is_not_longer(text: str) -> None:
    shown = spelled(text)
    read = ast.literal_eval(shown) if shown.startswith(("r", '"""')) else json.loads(shown)
    assert read == text
    assert len(shown) <= len(json.dumps(text, ensure_ascii=False)) + 1
