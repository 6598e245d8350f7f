from __future__ import annotations

import pytest

from proxy.config.problems import Location
from proxy.config.source import Document
from proxy.errors import ConfigurationError

TEXT = b"""\
server: &server
  port: 1
upstream:
  routes:
    - {models: [a, b], base_url: x}
    - models: [c]
      base_url: y
other:
  <<: *server
  host: z
"""


def repeating(level: str) -> bytes:
    """Return seven levels, each of which repeats the one before nine times: five million values."""
    levels = (f"a{n}: &a{n} {level.format(', '.join([f'*a{n - 1}'] * 9))}" for n in range(1, 8))
    return "\n".join(("a0: &a0 {k: 1}", *levels)).encode()


@pytest.mark.parametrize(
    ("location", "line"),
    [
        ((), 1),
        (("server",), 1),
        (("server", "port"), 2),
        (("upstream", "routes", 0, "models", 1), 5),
        (("upstream", "routes", 1, "models"), 6),
        (("upstream", "routes", 1, "base_url"), 7),
        (("other", "host"), 10),
        (("other", "port"), 2),
        (("upstream", "routes", 1, "missing"), 6),
        (("upstream", "routes", 9), 4),
        (("nowhere", "at", "all"), 1),
    ],
)
def test_line_of_a_value_or_of_the_nearest_value_around_it(location: Location, line: int) -> None:
    assert Document.parse(TEXT, "f").line(location) == line


def test_a_mappings_own_key_wins_over_a_merged_one() -> None:
    document = Document.parse(b"a: &a {k: 1}\nb:\n  <<: *a\n  k: 2\n", "f")
    assert document.data["b"] == {"k": 2}
    assert document.line(("b", "k")) == 4


@pytest.mark.parametrize("empty", [b"", b"# nothing\n", b"---\n", b"\xef\xbb\xbf"])
def test_an_empty_file_has_no_settings(empty: bytes) -> None:
    document = Document.parse(empty, "f")
    assert document.data == {}
    assert document.line(("server", "port")) == 1


@pytest.mark.parametrize(
    ("content", "problems"),
    [
        (b"a: 1\nb: 2\na: 3\n", ["f:3: the key 'a' is given twice, first in line 1"]),
        (b"{a: 1, a: 2}", ["f:1: the key 'a' is given twice, first in line 1"]),
        (b"x:\n  on: 1\n  no: 2\n", ["f:2: YAML reads the key 'on' as a boolean", "f:3: YAML reads the key 'no'"]),
        (b"1: a\n1.5: b\n~: c\n", ["f:1: YAML reads the key '1' as a number", "'1.5' as a number", "'~' as nothing"]),
        (b"2024-01-01: a", ["as a date"]),
        (b"a: 2024-99-99", ["f:1: YAML reads this as a date: put it in quotes"]),
        (b"? [a]\n: 1\n", ["f:1: a key must be text"]),
        (b"a:\n\tb: 1\n", ["f:2: a tab: YAML is indented with spaces only"]),
        (b"a: {b: 1\nc: 2\n", ["f:2: expected ',' or '}'"]),
        (b"a:\n  - b\n c: 1\n", ["f:3: this does not fit the lines before it: check the indentation"]),
        (b"a: {k: ${X}}", ['f:1: a brace is not allowed here; inside of {…} and […], put "${NAME}" in quotes']),
        (b"a: b: c", ["f:1: a colon is not allowed here"]),
        (b"a: *b", ["f:1: *NAME repeats"]),
        (b"a: !b c", ["f:1: !NAME is an unknown tag"]),
        (b"a: !b!c d", ["f:1: !NAME is an unknown tag"]),
        (b"a: !!int b", ["f: a value does not fit the tag"]),
        (b"a: 1\n---\nb: 2\n", ["f:2: --- begins a second document"]),
        (b"a: |\n  \x07\n", ["f:2: a control character"]),
        (b"a: 1\nb: \xff\n", ["f:2: not UTF-8 text"]),
        (b"- a\n", ["f:1: the file must be a mapping of sections", "not a list"]),
        (b"text", ["f:1: the file must be a mapping of sections", "not a single value"]),
        (b"a: 1\nb: " + b"[" * 500, ["f:2: the nesting is too deep"]),
        (b"a: 1\nb: 1:30", ["f:2: YAML reads 1:30 as minutes and seconds"]),
        (b"a: 1:30.5", ["f:1: YAML reads 1:30.5 as minutes and seconds"]),
        (repeating("[{}]"), ["f: *NAME repeats too much"]),
        (repeating("{{<<: [{}]}}"), ["f: *NAME repeats too much"]),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_unclear_yaml_is_refused_with_its_line(content: bytes, problems: list[str]) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        Document.parse(content, "f")
    for problem in problems:
        assert problem in refusal.value.message


@pytest.mark.parametrize(
    "content", [b"k: *hush-1", b"k: !hush-1 x", b"k: 'hush-1\n", b"k: hush-1: x", b"k: {hush-1: [}"]
)
def test_messages_quote_nothing_of_the_file(content: bytes) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        Document.parse(content, "f")
    assert "hush" not in refusal.value.message
    assert refusal.value.__cause__ is None


def test_a_part_may_be_repeated_for_each_of_many_policies() -> None:
    text = b"p: &p {trigger: {tokens: 50000}, edits: [{type: drop_oldest}]}\n" + b"".join(
        b"p%d: {<<: *p}\n" % n for n in range(500)
    )
    assert Document.parse(text, "f").data["p499"] == Document.parse(text, "f").data["p"]


def test_an_anchor_may_refer_to_itself() -> None:
    assert Document.parse(b"a: &a [*a]", "f").data["a"][0] is not None
