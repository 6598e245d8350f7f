"""A YAML file with the line of each of its values.

It refuses what YAML accepts silently: a key that is given twice, and a bare `on` or `no` as a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias, cast

import yaml
from yaml.parser import ParserError
from yaml.reader import ReaderError
from yaml.scanner import ScannerError

from proxy.errors import ConfigurationError

Location: TypeAlias = tuple[str | int, ...]
"""The path to a value: keys of mappings and positions in lists."""

_DATE: Final = "tag:yaml.org,2002:timestamp"
_READ_AS: Final = {
    "tag:yaml.org,2002:bool": "a boolean",
    "tag:yaml.org,2002:int": "a number",
    "tag:yaml.org,2002:float": "a number",
    "tag:yaml.org,2002:null": "nothing",
    _DATE: "a date",
}
_CURES: Final = {
    "'\\t'": "a tab: YAML is indented with spaces only",
    "block end": "this does not fit the lines before it: check the indentation",
    "undefined alias": "*NAME repeats a value marked by &NAME, and there is none; put other text in quotes",
    "tag handle": "!NAME is an unknown tag; put other text in quotes",
    "constructor for the tag": "!NAME is an unknown tag; put other text in quotes",
    "another document": "--- begins a second document; the file holds one only",
    "mapping values are not allowed": "a colon is not allowed here; put text with ': ' in quotes",
    "but got '{'": 'a brace is not allowed here; inside of {…} and […], put "${NAME}" in quotes',
}
"""What to do about the most common mistakes, by a part of YAML's own message."""
_QUOTING_NOTHING: Final = (ParserError, ScannerError)
"""Errors whose messages quote only single characters of the file."""
_TEXT: Final = "tag:yaml.org,2002:str"
_MERGE: Final = "tag:yaml.org,2002:merge"


class Document:
    """A YAML file: `data` is its content, `line(location)` the line of a value."""

    def __init__(self, name: str, root: yaml.Node | None, data: dict[str, Any]) -> None:
        """Wrap a parsed file; use `parse`."""
        self.name = name
        self.data = data
        self._root = root

    @classmethod
    def parse(cls, content: bytes, name: str) -> Document:
        """Parse `content`. Messages call the file `name`.

        Raises:
            ConfigurationError: it is not a YAML mapping with text as keys.
        """
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as why:
            line = content.count(b"\n", 0, why.start) + 1
            raise ConfigurationError(f"{name}:{line}: not UTF-8 text: save the file as UTF-8") from why
        try:
            loader = yaml.SafeLoader(text)
            try:
                root = loader.get_single_node()
                problems = list(_misread(root)) if root is not None else []
                if problems:
                    raise ConfigurationError("\n".join(f"{name}:{line}: {what}" for line, what in problems))
                data = _content(loader, root) if root is not None else None
            finally:
                loader.dispose()
        except (ReaderError, yaml.MarkedYAMLError) as why:
            # The original message quotes the line, which may hold a key. It must not be printed.
            raise ConfigurationError(f"{name}{_syntax_problem(why, text)}") from None
        except (ValueError, KeyError, TypeError):
            raise ConfigurationError(f"{name}: a value does not fit the tag (!!…) before it") from None
        except RecursionError as why:
            raise ConfigurationError(f"{name}: the nesting is too deep") from why
        if data is None:
            return cls(name, None, {})
        if not isinstance(data, dict):
            raise ConfigurationError(
                f"{name}:1: the file must be a mapping of sections (server:, upstream:, policies:, …), "
                f"not {'a list' if isinstance(data, list) else 'a single value'}"
            )
        return cls(name, root, cast("dict[str, Any]", data))

    def line(self, location: Location) -> int:
        """Return the line, from 1, of the value at `location`, or of the nearest value around it."""
        node, line = self._root, 1
        for step in location:
            if isinstance(node, yaml.MappingNode):
                # The pairs of a merge key (`<<`) come first, and the mapping's own keys win.
                found = next((pair for pair in reversed(node.value) if pair[0].value == step), None)
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
                found = (node.value[step], node.value[step])
            else:
                found = None
            if found is None:
                break
            line = found[0].start_mark.line + 1
            node = found[1]
        return line


def _content(loader: yaml.SafeLoader, root: yaml.Node) -> object:
    # The stub leaves the types out.
    construct = cast("Callable[[yaml.Node], object]", loader.construct_document)
    return construct(root)


def _misread(root: yaml.Node) -> Iterator[tuple[int, str]]:
    """Yield line and problem of keys and dates that YAML reads otherwise than their writer meant."""
    found: list[tuple[int, str]] = []
    waiting, seen = [root], {id(root)}
    while waiting:
        node = waiting.pop()
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            found += _problems_of_mapping(node)
            children = [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            children = list(node.value)
        elif node.tag == _DATE:
            found.append((node.start_mark.line + 1, "YAML reads this as a date: put it in quotes"))
        for child in children:  # anchors may form a circle
            if id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    yield from sorted(found)


def _problems_of_mapping(mapping: yaml.MappingNode) -> Iterator[tuple[int, str]]:
    first: dict[str, yaml.Node] = {}
    for key, _ in mapping.value:
        line = key.start_mark.line + 1
        if key.tag == _MERGE:
            continue
        if not isinstance(key, yaml.ScalarNode):
            yield line, "a key must be text, not a list or a mapping"
        elif key.tag != _TEXT:
            read_as = _READ_AS.get(key.tag, "something other than text")
            yield line, f"YAML reads the key {key.value or '~'!r} as {read_as}: put it in quotes"
        elif (earlier := first.setdefault(key.value, key)) is not key:
            at = earlier.start_mark.line + 1
            yield line, f"the key {key.value!r} is given twice, first in line {at}"


def _syntax_problem(why: ReaderError | yaml.MarkedYAMLError, text: str) -> str:
    """Return `:line: problem`, without values of the file: one of them may be a key."""
    if isinstance(why, ReaderError):
        line = text.count("\n", 0, why.position) + 1
        return f":{line}: a control character, or one that YAML does not allow"
    mark = why.problem_mark or why.context_mark
    problem = why.problem or why.context or ""
    cures = (cure for words, cure in _CURES.items() if words in problem)
    problem = next(cures, problem if isinstance(why, _QUOTING_NOTHING) else "this is not YAML")
    return f":{mark.line + 1 if mark is not None else 1}: {problem}"
