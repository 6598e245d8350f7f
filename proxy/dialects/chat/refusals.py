"""Why a request cannot be read, in the words that OpenAI uses, with what to do about it.

It makes errors and raises none. It does not know what a request is for.
"""

from __future__ import annotations

import json
from typing import Any, Final

import orjson

from proxy.dialects.shapes import is_array, is_object
from proxy.errors import InvalidRequest

_KINDS: Final = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    type(None): "null",
}

_NOT_UTF8: Final = "not valid UTF-8"
"""What orjson says of bytes in another encoding."""


def missing(param: str, advice: str) -> InvalidRequest:
    """Return the error for a field that must be there and is not."""
    return InvalidRequest(
        f"Missing required parameter: '{param}'. {advice}", param=param, code="missing_required_parameter"
    )


def wrong_type(param: str, expected: str, value: Any) -> InvalidRequest:
    """Return the error for a JSON value of the wrong type; `expected` says what may stand there."""
    return InvalidRequest(
        f"Invalid type for '{param}': expected {expected}, but got {_KINDS[type(value)]} instead.",
        param=param,
        code="invalid_type",
    )


def empty_messages() -> InvalidRequest:
    """Return the error for a request that says nothing."""
    return InvalidRequest(
        "Invalid 'messages': empty array. Expected an array with minimum length 1, but got an empty array "
        "instead.",
        param="messages",
        code="empty_array",
    )


def empty_model() -> InvalidRequest:
    """Return the error for a model without a name."""
    return InvalidRequest(
        "Invalid 'model': empty string. Name a model, or leave the field out.",
        param="model",
        code="empty_string",
    )


def control_characters(param: str) -> InvalidRequest:
    """Return the error for a name with characters that no name can have."""
    return InvalidRequest(
        f"Invalid '{param}': it holds control characters. Send the name alone.",
        param=param,
        code="invalid_value",
    )


def too_deep(param: str | None, levels: int | None = None) -> InvalidRequest:
    """Return the error for JSON with too many levels; `levels` is how many may be."""
    where = f"'{param}'" if param is not None else "The request"
    limit = f" Send at most {levels} levels." if levels is not None else " Send it with fewer levels."
    return InvalidRequest(f"{where} is nested too deeply.{limit}", param=param, code="invalid_json")


def unreadable_value(param: str, why: orjson.JSONDecodeError) -> InvalidRequest:
    """Return the error for a value that is JSON by its grammar and still cannot be read (1e999)."""
    advice = " Send the body as JSON encoded in UTF-8." if _NOT_UTF8 in why.msg else ""
    return InvalidRequest(f"'{param}' cannot be read: {why.msg}.{advice}", param=param, code="invalid_json")


def unreadable(body: bytes) -> InvalidRequest:
    """Return the error for a body that was refused: it finds out why.

    Slow where it must be; it serves requests that fail.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as why:
        if _NOT_UTF8 in why.msg:
            return InvalidRequest(
                "We could not parse the JSON body of your request: it is not UTF-8. "
                "Send the body as JSON encoded in UTF-8.",
                code="invalid_json",
            )
        if "depth" in why.msg:
            return too_deep(None)
        if "surrogate" in why.msg:
            return _lone_surrogate(body, why)
        return _no_json(why)
    if is_object(value):  # some hundred levels, which are too many for one reader and not for the other
        return too_deep(None)
    return InvalidRequest(
        f"Invalid body: expected a JSON object, but got {_KINDS[type(value)]} instead.", code="invalid_type"
    )


def _no_json(why: orjson.JSONDecodeError) -> InvalidRequest:
    return InvalidRequest(
        f"We could not parse the JSON body of your request: {why}. "
        "(HINT: This likely means you aren't using your HTTP library correctly. "
        "Send one JSON object, encoded in UTF-8.)",
        code="invalid_json",
    )


def _lone_surrogate(body: bytes, why: orjson.JSONDecodeError) -> InvalidRequest:
    """Return the error for half of a character, naming the message that holds it."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):  # it is wrong in other ways too
        return _no_json(why)
    param = _place_of_surrogate(value)
    where = f"'{param}'" if param is not None else "The body"
    return InvalidRequest(
        f"{where} holds a lone surrogate, the half of a character that UTF-16 writes in two "
        "(such as an emoji cut in the middle). Remove it, or replace it by U+FFFD: cut texts between "
        "characters, not between UTF-16 units.",
        param=param,
        code="invalid_json",
    )


def _place_of_surrogate(value: Any) -> str | None:
    """Return the message, else the field, that holds a lone surrogate; None where it is a field's name."""
    fields: dict[str, Any] = value if is_object(value) else {}
    for name, field in fields.items():
        if name == "messages" and is_array(field):
            for position, message in enumerate(field):
                if _holds_surrogate(message):
                    return f"messages[{position}]"
        elif _holds_surrogate(field):
            return None if _holds_surrogate(name) else name
    return None


def _holds_surrogate(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False
