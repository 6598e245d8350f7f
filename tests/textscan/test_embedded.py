"""Where documents stand in a text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.textscan.document import write
from proxy.textscan.embedded import Embedded, pieces

RECORD = {"name": "a record of some length", "numbers": [1, 2, 3], "text": "it's “so”"}
LINE = json.dumps(RECORD)
PRETTY = json.dumps(RECORD, indent=2)
COMPACT = json.dumps(RECORD, separators=(",", ":"), ensure_ascii=False)
PYTHON = repr(json.dumps(RECORD, indent=2, ensure_ascii=False))


def told(text: str) -> list[str]:
    """Return the pieces of a text: a document as `<compact>`."""
    found = pieces(text)
    assert "".join(piece if isinstance(piece, str) else piece.source for piece in found) == text
    return [piece if isinstance(piece, str) else f"<{write(piece.value)}>" for piece in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(f" {PRETTY}\n", [f"<{COMPACT}>"], id="the whole text"),
        pytest.param(f"{LINE}\n\n{LINE}\n", [f"<[{COMPACT},{COMPACT}]>"], id="a document on each line"),
        pytest.param(f"Result:\n{PRETTY}\nend", ["Result:\n", f"<{COMPACT}>", "\nend"], id="between lines"),
        pytest.param(f"Result: {LINE}\nend", ["Result: ", f"<{COMPACT}>", "\nend"], id="after a colon"),
        pytest.param(f"```json\n{PRETTY}\n```", ["```json\n", f"<{COMPACT}>", "\n```"], id="in a fence"),
        pytest.param(
            f"a\n{LINE}\n{PRETTY}",
            ["a\n", f"<{COMPACT}>", "\n", f"<{COMPACT}>"],
            id="two of them, to the end",
        ),
        pytest.param(f"text={PYTHON})", ["text=", f"<{COMPACT}>", ")"], id="as Python writes a string"),
        pytest.param(
            'text="{\\"a\\": \\"' + "\\x41\\u4e2d\\U0001f600" * 10 + '\\"}" end',
            ["text=", '<{"a":"' + "A中😀" * 10 + '"}>', " end"],
            id="as Python writes characters",
        ),
    ],
)
def test_documents_are_found(text: str, expected: list[str]) -> None:
    assert told(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("some words", id="words"),
        pytest.param('see: {"a": 1}\nor {}', id="too small"),
        pytest.param('see\n{\n"a": 1}\nso', id="too small over lines"),
        pytest.param(f"{LINE} and more", id="something after it"),
        pytest.param(f"see\n{PRETTY} and more", id="something after it in its last line"),
        pytest.param(f"see\n{PRETTY[:-1]}\n", id="it does not end"),
        pytest.param(
            f"{LINE}\n{LINE[:-1]}", id="a last line that is broken, after one that is none either"[:40]
        ),
        pytest.param("text='{" + "a" * 80 + "'", id="a string that is no document"),
        pytest.param("text='" + "a line of words " * 20 + "'", id="a text of one line"),
        pytest.param("text='short\\n' other='" + "a" * 80, id="a short text of two lines"),
        pytest.param("x\ntext='" + "a line\\n" * 90 + "'", id="a text in one of several lines"),
        pytest.param('text=\'{"a": "' + "\\q" * 40 + "\"}'", id="an escape that Python does not write"),
        pytest.param('text=\'{"a": "' + "\\U00110000" * 10 + "\"}'", id="a character that there is not"),
        pytest.param("text='{" + "a" * 80, id="a string that does not end"),
        pytest.param(': {"a ' * 30, id="many beginnings in one line"),
        pytest.param('{"a":\n' * 3000, id="many beginnings over lines"),
        pytest.param("[" + "1," * 100_000 + "1]", id="little but commas"),
    ],
)
def test_what_cannot_be_delimited_is_text(text: str) -> None:
    found = told(text)
    if text.startswith(LINE) and "\n" in text:
        assert found == [f"<{COMPACT}>", text[len(LINE) :]]
    else:
        assert found == [text]


def test_a_long_text_in_quotes_is_found_where_all_is_one_line() -> None:
    before, found, after = pieces("meta=None text='" + "it\\'s a line\\n" * 30 + "', more='x'\n")
    assert (before, after) == ("meta=None text=", ", more='x'\n")
    assert isinstance(found, Embedded)
    assert found.value == "it's a line\n" * 30


def test_what_was_a_line_each_is_told() -> None:
    (found,) = pieces(f"{LINE}\n{LINE}")
    assert isinstance(found, Embedded)
    assert found.is_lines


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from([LINE, PRETTY, "{", "[", '"', ": ", "\n", "x", f"={PYTHON}", "='", "\\", "="]))
)
def test_the_pieces_are_the_text(parts: list[str]) -> None:
    told("".join(parts))
