"""Documents: what is read is written again with every value as it was, and what is none is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.textscan.document import DEEPEST, UnreadableError, read, read_at, write


class Verbatim(str):
    """A number, as it was written."""

    __slots__ = ()


def verbatim(text: str) -> Any:
    """Return what a text says, digits, order and duplicates included."""
    return json.loads(text, object_pairs_hook=tuple, parse_float=Verbatim, parse_int=Verbatim)


def rewritten(text: str) -> str:
    """Return a document as it is written after it was read."""
    document = read(text)
    assert document is not None
    return write(document)


@pytest.mark.parametrize(
    ("text", "compact"),
    [
        pytest.param('{"a": 1.10, "b": 1e5}', '{"a":1.10,"b":1e5}', id="digits stay"),
        pytest.param(
            "[12345678901234567890123, -0, 0.0]", "[12345678901234567890123,-0,0.0]", id="long and zero"
        ),
        pytest.param('{"b": 1, "a": 2, "b": 3}', '{"b":1,"a":2,"b":3}', id="order and duplicates stay"),
        pytest.param('["\\u4e2d\\/\\n\\"\\u0007"]', '["中/\\n\\"\\u0007"]', id="only needless escapes go"),
        pytest.param('["\\ud83d\\ude00 \\ud83d"]', '["😀 \\ud83d"]', id="half a pair stays an escape"),
        pytest.param("[NaN, Infinity, -Infinity]", "[NaN,Infinity,-Infinity]", id="what only Python writes"),
        pytest.param(" \r\n\t{ } \n", "{}", id="an empty object"),
        pytest.param("[ [ ], true, false, null ]", "[[],true,false,null]", id="every other value"),
        pytest.param("[" + "1" * 10_000 + "]", "[" + "1" * 10_000 + "]", id="more digits than Python reads"),
    ],
)
def test_a_document_is_written_as_it_was(text: str, compact: str) -> None:
    assert rewritten(text) == compact
    assert verbatim(compact) == verbatim(text) or "NaN" in text


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param('"text"', id="a scalar"),
        pytest.param('{"a": 1', id="broken"),
        pytest.param("{} {}", id="two"),
        pytest.param('["a\nb"]', id="a line end in a string"),
        pytest.param("[" * 200 + "]" * 200, id="too deep"),
        pytest.param('{"a":' * 200 + "1" + "}" * 200, id="objects too deep"),
        pytest.param("[" * 100_000 + "]" * 100_000, id="far too deep"),
    ],
)
def test_what_is_no_document(text: str) -> None:
    assert read(text) is None


def test_the_deepest_document() -> None:
    text = "[" * DEEPEST + "[]" + "]" * DEEPEST
    assert rewritten(text) == text
    assert read(f"[{text}]") == read(f"[{text}]")
    assert read("[" * (DEEPEST + 2) + "1" + "]" * (DEEPEST + 2)) is None


def test_how_far_reading_came() -> None:
    assert read_at('x [1, {"a": 2}] y', 2) == ([*read("[1]"), *read('[{"a": 2}]')], 15)  # type: ignore[misc]
    with pytest.raises(UnreadableError) as raised:
        read_at("[1, 2; 3]", 0)
    assert raised.value.reached == 5


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=30,
)


@settings(deadline=None, max_examples=60)
@given(st.lists(JSON) | st.dictionaries(st.text(), JSON), st.sampled_from([None, 2]), st.booleans())
def test_any_document_keeps_its_values(value: Any, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    compact = rewritten(text)
    assert verbatim(compact) == verbatim(text)
    assert compact == json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert rewritten(compact) == compact
