"""Values of JSON text that a stranger wrote, where the fast parser is stricter than clients are.

It takes halves of surrogate pairs (an emoji that was cut between two events) and numbers that JSON
does not have (`-Infinity` beside a token's probability). It does not know what the values mean.
"""

from __future__ import annotations

import json
from typing import Any

import orjson


def read(text: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is none, by the widest reading there is.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(text)
    except RecursionError as why:
        raise ValueError("nested too deeply") from why


def mended(value: Any) -> Any:
    """Return the value as every JSON parser takes it.

    Halves of a surrogate pair that met are one character, one without its other half is U+FFFD,
    and a number that JSON does not have is null.
    """
    text = json.dumps(value, ensure_ascii=False)
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return json.loads(whole, parse_constant=lambda _: None)
