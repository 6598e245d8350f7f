"""The tools of the proxy's own: what the model is told of them, when they are offered, how a call is read.

A model may leave out what it does not use, or send an empty string for it. What is wrong with a call is said
in words that it can act on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson
from msgspec import Struct

from proxy.config import VirtualToolSettings
from proxy.dialects import ToolDefinition
from proxy.dialects.jsontext import is_array, is_object
from proxy.errors import InvalidRequest

RECALL: Final = "recall_context"
COMPRESS: Final = "compress_chat_history"
ALLOWED: Final = (
    'Give recall_context a JSON object with either "ref" (such as "ref_0123456789abcdef", as it stands in '
    'the conversation; beside it "lines", such as "10-20", or "grep", a regular expression), or "query" '
    "(words, names or ids to look for)."
)
_RECALL: Final = ToolDefinition(
    name=RECALL,
    description=(
        "Read again what was shortened or left out of this conversation. Give either `ref`, to get the "
        "original of something that is marked with a ref, or `query`, to search the whole conversation; "
        "the answer has excerpts with their refs."
    ),
    parameters=(
        ("ref", "A ref as it stands in the conversation, such as ref_0123456789abcdef. {unset} to search."),
        ("query", "Words, names or ids to look for. {unset} where you give a ref."),
        ("lines", "With a ref: only these lines, such as 10-20. {unset} for all."),
        ("grep", "With a ref: only lines that match this regular expression (RE2). {unset} for all."),
    ),
)
_COMPRESS: Final = ToolDefinition(
    name=COMPRESS,
    description=(
        "Ask for the older part of this conversation to be replaced by a summary. Call it when much lies "
        "behind that is not needed word for word any more, such as at the end of a part of the task. It "
        "takes effect with a later request."
    ),
    parameters=(("reason", "Why now, in a few words."),),
)


def offered(
    settings: VirtualToolSettings, *, has_tools: bool, stateless: bool = False, off: bool = False
) -> tuple[ToolDefinition, ...]:
    """Return the tools to offer with a request, where it leaves room for them.

    None where nothing is stored (`stateless`) or trimmed (`off`), or where the client offers no tools (unless
    the settings say so).
    """
    recall, compress = settings.recall_context, settings.compress_chat_history
    if not (recall or compress) or stateless or off or not (has_tools or not settings.only_with_tools):
        return ()
    return ((_RECALL,) if recall else ()) + ((_COMPRESS,) if compress else ())


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
        ref=_text(data, "ref").strip(), query=_text(data, "query").strip(), lines=_lines(data), grep=_text(data, "grep")
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
