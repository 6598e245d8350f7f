"""What a call of `recall_context` asks for, read from arguments that may be anything.

A model may leave out what it does not use, or send an empty string for it. What is wrong is said in words
that it can act on. Whether what is asked for is there is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson
from msgspec import Struct

from proxy.dialects.jsontext import is_array, is_object
from proxy.errors import InvalidRequest

ALLOWED: Final = (
    'Give recall_context a JSON object with either "ref" (such as "ref_0123456789abcdef", as it stands in '
    'the conversation; beside it "lines", such as "10-20", or "grep", a regular expression), or "query" '
    "(words, names or ids to look for)."
)


class Asked(Struct, frozen=True, kw_only=True):
    """Either `ref` or `query` is given, and what is not given is empty."""

    ref: str
    query: str
    lines: str
    """`a-b`, or what was given instead."""
    grep: str


def read_asked(arguments: str) -> Asked:
    """Read the arguments of a call.

    Raises:
        InvalidRequest: they are no JSON object with texts, or not with one of `ref` and `query`; it says so.
    """
    try:
        data = orjson.loads(arguments)
    except orjson.JSONDecodeError as why:
        raise InvalidRequest(f"The arguments are not valid JSON. {ALLOWED}") from why
    if not is_object(data):
        raise InvalidRequest(f"The arguments are no JSON object. {ALLOWED}")
    asked = Asked(
        ref=_text(data, "ref").strip(),
        query=_text(data, "query").strip(),
        lines=_lines(data),
        grep=_text(data, "grep"),
    )
    if bool(asked.ref) == bool(asked.query):
        given = 'Both "ref" and "query" were given' if asked.ref else 'Neither "ref" nor "query" was given'
        raise InvalidRequest(f"{given}. {ALLOWED}")
    return asked


def _text(data: Mapping[str, Any], name: str) -> str:
    value = data.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f'"{name}" must be a string. {ALLOWED}')
    return value or ""


def _lines(data: Mapping[str, Any]) -> str:
    """Return the lines that are asked for as `a-b`; one number is one line, two are first and last."""
    value = data.get("lines")
    numbers = value if is_array(value) else [value]
    if 1 <= len(numbers) <= 2 and all(type(number) is int for number in numbers):
        return f"{numbers[0]}-{numbers[-1]}"
    text = "".join(_text(data, "lines").split())
    return f"{text}-{text}" if text.isdecimal() else text
