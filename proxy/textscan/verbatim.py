'''Strings that JSON would fill with escapes, as they are between triple quotes.

    {"path": "a.txt", "text": """first line
    a "second" one"""}

As in Python: between such quotes a backslash is one where an `r` stands before them, and without it there is
none. What could not be told apart, or would not be seen, stays as JSON has it. It does not know where a
string stands.
'''

from __future__ import annotations

import re
from json.encoder import encode_basestring
from typing import Final

from proxy.textscan.document import quoted

FEWEST: Final = 4
"""Escapes from which on it pays: the quotation marks cost as much."""

_QUOTES: Final = '"""'
_UNSAFE: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\u0085\u2028\u2029]")
"""What a reader would not see as it is: a carriage return, escapes of a terminal, half of an emoji."""


def spelled(text: str) -> str:
    """Return a string as it is between triple quotes, or as JSON where that costs no more."""
    escaped = encode_basestring(text)
    if len(escaped) - len(text) - 2 < FEWEST:
        return escaped if escaped.isascii() else quoted(text)
    if _QUOTES in text or text.startswith('"') or text.endswith(('"', "\\")) or _UNSAFE.search(text):
        return quoted(text)
    prefix = "r" if "\\" in text else ""
    return f"{prefix}{_QUOTES}{text}{_QUOTES}"
