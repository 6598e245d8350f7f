"""Stubs: what stands in the place of a result and of a call's arguments."""

from __future__ import annotations

import json

import pytest

from proxy.trimming.edits.clear_tool_results import digest_in, shorter_arguments, shorter_text, stub_of


@pytest.mark.parametrize(
    ("tool", "arguments", "digest", "expected"),
    [
        ("read", '{"path": "a.c"}', "main", '[cleared: read {"path": "a.c"}; 42 tokens; ref=r1; main]'),
        ("read", "{}", "", "[cleared: read; 42 tokens; ref=r1]"),
        ("", "", "", "[cleared: a tool; 42 tokens; ref=r1]"),
        ("two\nlines", '{"a":\n  1}', "", '[cleared: two lines {"a": 1}; 42 tokens; ref=r1]'),
    ],
)
def test_a_stub_and_the_digest_in_it(tool: str, arguments: str, digest: str, expected: str) -> None:
    stub = stub_of(tool, arguments, 42, "r1", digest)
    assert stub == expected
    assert digest_in(stub, "r1") == digest


@pytest.mark.parametrize("arguments", ["x" * 81, " " * 400 + "x", "x " * 200])
def test_long_arguments_are_cut_and_say_so(arguments: str) -> None:
    said = stub_of("t", arguments, 1, "r", "").removeprefix("[cleared: t ").removesuffix("; 1 tokens; ref=r]")
    assert said.endswith("…")
    assert len(said) <= 80


def test_arguments_stay_json_and_keep_what_is_short() -> None:
    document = {
        "path": "src/a.c",
        "line": 12345678901234567890,
        "x": 1.5,
        "text": "see buildDir in K77. " * 9,
    }
    shorter = json.loads(shorter_arguments(json.dumps(document), 60, frozenset()))
    assert {**shorter, "text": document["text"]} == document
    assert shorter["text"] == "[cleared: 189 characters; K77 buildDir]".replace(
        "K77 buildDir", "buildDir,K77"
    )


def test_long_lists_and_deep_documents_are_cut() -> None:
    document = {"rows": list(range(25)), "few": [1], "deep": json.loads("[" * 40 + "]" * 40)}
    shorter = json.loads(shorter_arguments(json.dumps(document), 0, frozenset()))
    assert shorter["rows"] == [*range(10), "[cleared: 15 more]"]
    assert shorter["few"] == [1]
    assert "[cleared]" in json.dumps(shorter["deep"])


@pytest.mark.parametrize(
    "arguments", ["[" * 100_000, "no json " * 20, json.dumps(["x"] * 99), '{"a": "' + "x" * 99]
)
def test_what_is_no_json_object_becomes_one(arguments: str) -> None:
    assert list(json.loads(shorter_arguments(arguments, 0, frozenset()))) == ["cleared"]


@pytest.mark.parametrize(
    "arguments",
    ["", "no json", "[1, 2]", '{"a": NaN}', '{ "a" : 1.10 }', "[" * 20, json.dumps({"a": ["x"] * 12})],
)
def test_what_would_not_get_shorter_stays(arguments: str) -> None:
    assert shorter_arguments(arguments, 0, frozenset()) == arguments


def test_what_stays_of_arguments_is_as_it_was_written() -> None:
    kept = r'"a":1e400,"b":1.10,"c":12345678901234567.25,"k":1,"k":2,"half":"abc\ud83d","n":NaN,"z":null'
    shorter = shorter_arguments("{" + kept + ',"text":"' + "x y " * 50 + '"}', 0, frozenset())
    assert shorter == "{" + kept + ',"text":"[cleared: 200 characters]"}'


def test_half_an_emoji_in_a_digest_stays_an_escape() -> None:
    shorter = shorter_arguments(r'{"text":"Error: K77\ud83d; %s"}' % ("see x " * 50), 90, frozenset())
    assert "\\ud83d" in shorter
    shorter.encode()


def test_a_short_text_stays() -> None:
    assert shorter_text("short", 60, frozenset()) == "short"
    assert shorter_text("x" * 81, 60, frozenset()) == "[cleared: 81 characters]"
