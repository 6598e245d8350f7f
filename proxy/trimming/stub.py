"""What stands in the place of what was cleared: the stub of a tool result, shorter arguments of a call.

    [cleared: read_file {"path":"src/main.c"}; 4210 tokens; ref=9f3a; main,parse_args,EXIT_CODE=12]

What a stub repeats is verbatim (white space aside) or ends with `…`. It knows texts, not messages.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from proxy.textscan import JsonValue, Number, digest_of, is_items, is_members, read, write

_NAME: Final = 100
"""Characters of a tool's name that are repeated."""
_ARGUMENTS: Final = 80
"""Characters of a call's arguments that are repeated."""
_STRING: Final = 80
"""Characters of a string among arguments that stays as it is."""
_ITEMS: Final = 10
"""Items of a list among arguments that stay."""
_LEVELS: Final = 32
"""Levels of arguments that are looked into."""


def stub_of(tool: str, arguments: str, tokens: int, ref: str, digest: str) -> str:
    """Return the stub of a result of `tool`, called with `arguments`, that cost so many tokens."""
    named = _cut(tool, _NAME) or "a tool"
    called = _cut(arguments, _ARGUMENTS)
    said = f"{named} {called}" if called not in ("", "{}") else named
    return f"[cleared: {said}; {tokens} tokens; {_reference(ref)}{f'; {digest}' if digest else ''}]"


def digest_in(stub: str, ref: str) -> str:
    """Return the digest of a stub that names `ref`; empty where it has none."""
    return stub.partition(f"{_reference(ref)}; ")[2].removesuffix("]")


def shorter_arguments(arguments: str, budget: int, known: Collection[str]) -> str:
    """Return a call's arguments, JSON like before, each long string with a digest of `budget` characters.

    Names, numbers and short strings stay as they are written, and so do arguments that would not get shorter.
    What is no JSON object becomes one that holds its digest.
    """
    document = read(arguments)
    if not is_members(document):
        shorter = write((("cleared", shorter_text(arguments, budget, known)),))
    else:
        cleared = _shorter(document, budget, known, _LEVELS)
        if cleared == document:
            return arguments
        shorter = write(cleared)
    return shorter if len(shorter) < len(arguments) else arguments


def shorter_text(text: str, budget: int, known: Collection[str]) -> str:
    """Return a text, or in the place of a long one its length and a digest of at most `budget` characters."""
    if len(text) <= _STRING:
        return text
    digest = digest_of(text, budget, known)
    return f"[cleared: {len(text)} characters{f'; {digest}' if digest else ''}]"


def _shorter(value: JsonValue, budget: int, known: Collection[str], levels: int) -> JsonValue:
    """Return a value of a document with its long strings and lists cleared."""
    if isinstance(value, str) and not isinstance(value, Number):
        return shorter_text(value, budget, known)
    if not levels and (is_members(value) or is_items(value)):
        return "[cleared]"
    if is_members(value):
        return tuple([(name, _shorter(member, budget, known, levels - 1)) for name, member in value])
    if is_items(value):
        kept = [_shorter(item, budget, known, levels - 1) for item in value[:_ITEMS]]
        more = len(value) - len(kept)
        return [*kept, f"[cleared: {more} more]"] if more else kept
    return value


def _reference(ref: str) -> str:
    return f"ref={ref}"


def _cut(text: str, most: int) -> str:
    """Return a text on one line, cut where it is longer than `most` characters."""
    line = " ".join(text[: 4 * most].split())
    return line if len(line) <= most and len(text) <= 4 * most else f"{line[: most - 1]}…"
