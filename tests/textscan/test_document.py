"""JSON that is read and written, found in texts, and its leaves."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.textscan import document
from proxy.textscan.document import (
    DEEPEST,
    Embedded,
    Leaf,
    leaves_of,
    read_json,
    read_json_at,
    read_json_ends,
    split_documents,
    string_literal,
    write_json,
    write_json_lines,
)

# ---------------------------------------------------------------------------------------- document


class Verbatim(str):
    """A number, as it was written."""

    __slots__ = ()


def verbatim(text: str) -> Any:
    """Return what a text says, digits, order and duplicates included."""
    return json.loads(text, object_pairs_hook=tuple, parse_float=Verbatim, parse_int=Verbatim)


def rewritten(text: str) -> str:
    """Return a document as it is written after it was read."""
    document = read_json(text)
    assert document is not None
    return write_json(document)


@pytest.mark.parametrize(
    ("text", "compact"),
    [
        pytest.param('{"a": 1.10, "b": 1e5}', '{"a":1.10,"b":1e5}', id="digits stay"),
        pytest.param("[12345678901234567890123, -0, 0.0]", "[12345678901234567890123,-0,0.0]", id="long and zero"),
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
    assert read_json(text) is None


def test_documents_are_written_on_a_line_each() -> None:
    values = [read_json('{"a": 1}'), read_json('{"a": [2]}')]
    assert None not in values
    assert write_json_lines(values) == '{"a":1}\n{"a":[2]}'


def test_the_deepest_document() -> None:
    text = "[" * DEEPEST + "[]" + "]" * DEEPEST
    assert rewritten(text) == text
    assert read_json(f"[{text}]") == read_json(f"[{text}]")
    assert read_json("[" * (DEEPEST + 2) + "1" + "]" * (DEEPEST + 2)) is None


def test_a_document_is_rewritten_with_its_numbers_as_they_were() -> None:
    assert rewritten('{"a": [1.10, 1e5, NaN], "b": "x"}') == '{"a":[1.10,1e5,NaN],"b":"x"}'


RECORDS = [{"id": f"A-{at:02}", "n": at} for at in range(40)]


@pytest.mark.parametrize(
    ("text", "head", "tail", "left"),
    [
        pytest.param("[1, 2, 3]", 5, 5, "[1,2,3]", id="short enough"),
        pytest.param("[11, 22, 33, 44, 55]", 4, 2, "[11,22,33,44,55]", id="items on the border are whole"),
        pytest.param("[11, 22, 33, 44, 55, 66]", 4, 2, "[11,22,33,55,66]", id="both ends of items"),
        pytest.param('{"a": 1.10, "b": [2], "c": "3", "d": 4}', 4, 1, '{"a":1.10,"b":[2],"c":"3","d":4}', id="members"),
        pytest.param('{"a": [11, 22, 33, 44, 55, 66]}', 4, 2, '{"a":[11,22,33,55,66]}', id="of one that is too long"),
        pytest.param('["first", "a longer one"]', 0, 0, '["first","a longer one"]', id="texts are whole"),
        pytest.param("[[], {}, [], {}, 7]", 0, 1, "[[],{},7]", id="empty ones"),
        pytest.param("[1, NaN, 2]", 1, 1, "[1,NaN,2]", id="what only Python reads is read whole"),
        pytest.param('["\\ud83d", 1, 2, 3]', 1, 1, '["\\ud83d",1,2,3]', id="half a pair, too"),
        pytest.param(f"[{' ' * 2000}1, 2, 3]", 1, 1, "[1,2,3]", id="many blanks"),
    ],
)
def test_of_a_long_document_both_ends_are_read(text: str, head: int, tail: int, left: str) -> None:
    document = read_json_ends(text, head, tail)
    assert document is not None
    assert write_json(document) == left


def test_both_ends_of_records_are_as_they_are_written() -> None:
    text = json.dumps({"of": "all", "records": RECORDS, "next": None}, indent=2)
    document = read_json_ends(text, 200, 100)
    assert document is not None
    left = json.loads(write_json(document))
    assert left["of"] == "all"
    assert left["records"][:3] == RECORDS[:3]
    assert left["records"][-1] == RECORDS[-1]
    assert 4 <= len(left["records"]) <= 8
    assert left["next"] is None


@pytest.mark.parametrize("text", ["words and words", "[1, 2, 3", '{"a": 1}}', "\ud83d", '["\ud83d", 1', "[" * 5000])
def test_the_ends_of_what_is_no_document(text: str) -> None:
    assert read_json_ends(text, 1, 1) is None


def test_ends_that_are_too_deep() -> None:
    assert read_json_ends("[" * (DEEPEST + 2) + "]" * (DEEPEST + 2), 1, 1) is None
    assert read_json_ends("[" * 3000 + "]" * 3000, 1, 1) is None
    long = '"%s"' % ("a" * 1000)
    nested = "[" * (DEEPEST + 2) + long + "]" * (DEEPEST + 2)
    assert read_json_ends(nested, 1, 1) is None


@pytest.mark.parametrize(
    ("source", "shown"), [('{"a": "b"}', '"b"'), ('{"a": "é"}', '"é"'), (r'{"a": "\n\n\n\n!"}', '"""\n\n\n\n!"""')]
)
def test_strings_are_spelled_as_their_document_needs_it(source: str, shown: str) -> None:
    assert string_literal(json.loads(source)["a"]) == shown


def test_how_far_reading_came() -> None:
    assert read_json_at('x [1, {"a": 2}] y', 2) == ([*read_json("[1]"), *read_json('[{"a": 2}]')], 15)  # type: ignore[misc]
    assert read_json_at("[1, 2; 3]", 0) == (None, 5)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=30,
)


@settings(max_examples=60)
@given(st.lists(JSON) | st.dictionaries(st.text(), JSON), st.sampled_from([None, 2]), st.booleans())
def test_any_document_keeps_its_values(value: Any, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    compact = rewritten(text)
    assert verbatim(compact) == verbatim(text)
    assert compact == json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert rewritten(compact) == compact


# ---------------------------------------------------------------------------------------- verbatim

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
    assert string_literal(text) == shown


@given(st.text(st.sampled_from("ab \"'\\\n\tré京\x1b"), max_size=40))
def test_python_reads_it_as_it_was_and_it_is_not_longer(text: str) -> None:
    shown = string_literal(text)
    read = ast.literal_eval(shown) if shown.startswith(("r", '"""')) else json.loads(shown)
    assert read == text
    assert len(shown) <= len(json.dumps(text, ensure_ascii=False)) + 1


# ---------------------------------------------------------------------------------------- embedded

RECORD = {"name": "a record of some length", "numbers": [1, 2, 3], "text": "it's “so”"}
LINE = json.dumps(RECORD)
PRETTY = json.dumps(RECORD, indent=2)
COMPACT = json.dumps(RECORD, separators=(",", ":"), ensure_ascii=False)
PYTHON = repr(json.dumps(RECORD, indent=2, ensure_ascii=False))


def told(text: str) -> list[str]:
    """Return the pieces of a text: a document as `<compact>`."""
    found = split_documents(text)
    assert "".join(piece if isinstance(piece, str) else piece.source for piece in found) == text
    return [piece if isinstance(piece, str) else f"<{write_json(piece.value)}>" for piece in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(f" {PRETTY}\n", [f"<{COMPACT}>"], id="the whole text"),
        pytest.param(f"{LINE}\n\n{LINE}\n", [f"<[{COMPACT},{COMPACT}]>"], id="a document on each line"),
        pytest.param(f"Result:\n{PRETTY}\nend", ["Result:\n", f"<{COMPACT}>", "\nend"], id="between lines"),
        pytest.param(f"Result: {LINE}\nend", ["Result: ", f"<{COMPACT}>", "\nend"], id="after a colon"),
        pytest.param(f"```json\n{PRETTY}\n```", ["```json\n", f"<{COMPACT}>", "\n```"], id="in a fence"),
        pytest.param(
            f"a\n{LINE}\n{PRETTY}", ["a\n", f"<{COMPACT}>", "\n", f"<{COMPACT}>"], id="two of them, to the end"
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
        pytest.param(f"{LINE}\n{LINE[:-1]}", id="a last line that is broken, after one that is none either"[:40]),
        pytest.param("text='{" + "a" * 80 + "'", id="a string that is no document"),
        pytest.param("text='" + "a line of words " * 20 + "'", id="a text of one line"),
        pytest.param("text='short\\n' other='" + "a" * 80, id="a short text of two lines"),
        pytest.param("x\ntext='" + "a line\\n" * 90 + "'", id="a text in one of several lines"),
        pytest.param('text=\'{"a": "' + "\\q" * 40 + "\"}'", id="an escape that Python does not write"),
        pytest.param('text=\'{"a": "' + "\\U00110000" * 10 + "\"}'", id="a character that there is not"),
        pytest.param("text='{" + "a" * 30 + "\\n'", id="a short string with an escape"),
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
    before, found, after = split_documents("meta=None text='" + "it\\'s a line\\n" * 30 + "', more='x'\n")
    assert (before, after) == ("meta=None text=", ", more='x'\n")
    assert isinstance(found, Embedded)
    assert found.value == "it's a line\n" * 30


def test_what_was_a_line_each_is_told() -> None:
    (found,) = split_documents(f"{LINE}\n{LINE}")
    assert isinstance(found, Embedded)
    assert found.is_lines


@settings(max_examples=60)
@given(st.lists(st.sampled_from([LINE, PRETTY, "{", "[", '"', ": ", "\n", "x", f"={PYTHON}", "='", "\\", "="])))
def test_the_pieces_are_the_text(parts: list[str]) -> None:
    told("".join(parts))


@pytest.mark.parametrize("line", ["[]", "{}", "[[]]", '{"a":1}'])
def test_a_million_tiny_documents_on_a_line_each_are_a_text(line: str) -> None:
    few, many = "\n".join([line] * 1000), "\n".join([line] * 60_000)
    (found,) = split_documents(few)
    assert isinstance(found, Embedded)
    assert found.is_lines
    assert split_documents(many) == [many]


@pytest.mark.parametrize("brief", ["=''", '=""', "='a, b'", "='{}'", r"='it\'s'", r'="\\\"\\"', "='" + "x" * 57 + "'"])
def test_strings_too_short_for_a_document_are_passed_over(brief: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    literal = document._LITERAL

    class Counted:
        def match(self, text: str, start: int) -> re.Match[str] | None:
            looked.append(text[start : start + 60])
            return literal.match(text, start)

    monkeypatch.setattr(document, "_LITERAL", Counted())
    assert told(f"{brief} " * 500 + f"={PYTHON}") == [f"{brief} " * 500 + "=", f"<{COMPACT}>"]
    assert len(looked) == 1


# ------------------------------------------------------------------------------------------ leaves

JSON_LEAVES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=20,
)


def test_the_leaves_of_a_document_come_with_their_keys() -> None:
    found = leaves_of('{"a": [1, {"b": "x"}, []], "c": {}, "d": null, "e": "y"}')

    assert found == [
        Leaf(key="a", text="1", is_number=True),
        Leaf(key="b", text="x", is_number=False),
        Leaf(key="e", text="y", is_number=False),
    ]
    assert leaves_of("free text") is None


def test_a_leaf_deep_down_has_the_last_key_on_its_way() -> None:
    found = leaves_of('{"k":' + "[" * 60 + '"x"' + "]" * 60 + "}")
    assert found == [Leaf(key="k", text="x", is_number=False)]
    assert leaves_of('{"k":{"":["x"]}}') == [Leaf(key="", text="x", is_number=False)]


def test_numbers_stay_as_they_are_written() -> None:
    leaves = leaves_of("[1.50, 1e3, -0]") or []
    assert [leaf.text for leaf in leaves] == ["1.50", "1e3", "-0"]
    assert leaves_of("[NaN, Infinity, 1]") == [Leaf(key="", text="1", is_number=True)]


@pytest.mark.parametrize("text", ["", "3", '"text"', "null", "{", "[1,]", "[007]", "plain {text}", "[" * 100_000])
def test_what_is_no_document_has_no_leaves(text: str) -> None:
    assert read_json(text) is None
    assert leaves_of(text) is None


def test_one_that_is_too_deep_is_none() -> None:
    assert leaves_of("[" * 100_000 + "]" * 100_000) is None


@given(JSON_LEAVES)
def test_every_string_of_any_document_is_there(document: object) -> None:
    def strings(value: object) -> list[str]:
        if isinstance(value, str):
            return [value]
        if isinstance(value, dict):
            return [text for each in value.values() for text in strings(each)]
        return [text for each in value for text in strings(each)] if isinstance(value, list) else []

    leaves = leaves_of(json.dumps(document)) or []
    wanted = strings(document) if isinstance(document, (dict, list)) else []
    assert [leaf.text for leaf in leaves if not leaf.is_number] == wanted
