"""Shared by all dialects: reading a request's body, its errors, and changing its fields."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec
import orjson

from proxy.dialects.base import Request
from proxy.dialects.jsontext import ITEMS, RawFields, as_array, as_object, emitted, is_array, is_object, without_member
from proxy.errors import InvalidRequest

MAX_LEVELS: Final = 200
"""Maximum nesting of one message or one field. Every reader and writer here supports more."""

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_LONGEST_MODEL: Final = 2048
"""Maximum characters of a model's name: as long as an ARN. Clients choose the name, and caches and counters use it."""


def split(body: bytes, *, elsewhere: str, empty: str) -> tuple[RawFields, list[msgspec.Raw]]:
    """Return the top-level fields, and the texts of the `messages`.

    `elsewhere` is the advice for a body with `input`, `empty` the advice for an empty list of messages.
    """
    try:
        fields = RawFields(body)
        messages = fields.span("messages")
        if messages is None:
            raise missing("messages", elsewhere if "input" in fields else "Send an array of at least one message.")
        if bytes(messages[:1]) != b"[":
            raise wrong_type("messages", "an array of objects", value_of("messages", bytes(messages)))
        items = ITEMS.decode(messages)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as why:
        raise unreadable(body, "messages") from why
    if not items:
        raise InvalidRequest(f"Invalid 'messages': empty array. {empty}", param="messages", code="empty_array")
    return fields, items


def common_fields(body: bytes, fields: RawFields, values: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Request` that all dialects read in the same way, after checking them.

    `values` holds the parsed fields. The tools, which are long, are removed from it.
    """
    tools, stream = values.pop("tools", None), values.get("stream")
    if tools is not None and not is_array(tools):
        raise wrong_type("tools", "an array of objects", tools)
    if stream is not None and not isinstance(stream, bool):
        raise wrong_type("stream", "a boolean or null", stream)
    return {
        "raw": body,
        "fields": fields,
        "model": _model_of(values),
        "stream": bool(stream),
        "has_tools": bool(tools),
        "tools": fields["tools"] if tools else None,
        "parameters": values,
    }


def are_messages_tools(tools: Any) -> bool:
    """Tell whether any tool is declared in the format of the Messages API."""
    return any([is_object(tool) and "input_schema" in tool and "function" not in tool for tool in as_array(tools)])


def drop_members(
    changes: dict[str, bytes | None], request: Request, paths: Collection[str], but: Collection[str]
) -> None:
    """Remove members of fields, named by dotted paths ("metadata.session_id").

    `changes` maps field names to their new texts and is updated. Objects that become empty are removed too. Fields
    of `but` stay.
    """
    for path in paths:
        name, *rest = path.split(".")
        text = changes.get(name, request.fields.get(name))
        if name not in but and text is not None and (left := without_member(text, rest)) != text:
            changes[name] = left


def with_changes(request: Request, changes: dict[str, bytes | None], tools: bytes | None) -> bytes:
    """Return the request's body with these changes. None removes a field. `tools`, if given, replaces the tools.

    Without a change it is the client's own body.
    """
    if tools is not None and tools != request.fields.get("tools"):
        changes["tools"] = tools
    if not changes:
        return request.raw
    every = dict.fromkeys([*request.fields, *changes])
    return emitted({name: changes[name] if name in changes else request.fields[name] for name in every})


def value_of(param: str, text: bytes) -> Any:
    """Return the value of a JSON text. Raises `InvalidRequest` if it cannot be read or is nested too deeply."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as why:  # valid by the grammar of JSON, such as 1e999
        advice = " Send the body as JSON encoded in UTF-8." if _NOT_UTF8 in why.msg else ""
        raise InvalidRequest(f"'{param}' cannot be read: {why.msg}.{advice}", param=param, code="invalid_json") from why
    # Length and number of brackets clear nearly all texts. The number is an upper bound: strings hold brackets too.
    may_be_deep = len(text) > 2 * MAX_LEVELS and text.count(b"[") + text.count(b"{") > MAX_LEVELS
    if may_be_deep and _levels(value) > MAX_LEVELS:
        raise _too_deep(param)
    return value


def _levels(value: Any) -> int:
    """Return the depth of nested objects and arrays; 1 for one that holds none, 0 for any other value."""
    levels, level = 0, [value] if is_object(value) or is_array(value) else []
    while level:
        below: list[Any] = []
        for item in level:
            below.extend(item.values() if is_object(item) else item)
        level = [item for item in below if is_object(item) or is_array(item)]
        levels += 1
    return levels


def _model_of(values: Mapping[str, Any]) -> str:
    """Return the model that a request names; "" if it names none."""
    model = values.get("model", "")
    if not isinstance(model, str):
        raise wrong_type("model", "a string", model)
    if _CONTROL.search(model):
        raise InvalidRequest(
            "Invalid 'model': it holds control characters. Send the name alone.", param="model", code="invalid_value"
        )
    if len(model) > _LONGEST_MODEL:
        raise InvalidRequest(
            f"Invalid 'model': it is longer than {_LONGEST_MODEL} characters. Send the name alone.",
            param="model",
            code="string_above_max_length",
        )
    if not model and "model" in values:
        raise InvalidRequest(
            "Invalid 'model': empty string. Name a model, or leave the field out.", param="model", code="empty_string"
        )
    return model


_KINDS: Final = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    type(None): "null",
}

_NOT_UTF8: Final = "not valid UTF-8"  # orjson's message for bytes in another encoding


def missing(param: str, advice: str) -> InvalidRequest:
    """Return the error for a required field that is missing."""
    return InvalidRequest(
        f"Missing required parameter: '{param}'. {advice}", param=param, code="missing_required_parameter"
    )


def wrong_type(param: str, expected: str, value: Any) -> InvalidRequest:
    """Return the error for a JSON value of the wrong type. `expected` names the types that are allowed."""
    return InvalidRequest(
        f"Invalid type for '{param}': expected {expected}, but got {_KINDS[type(value)]} instead.",
        param=param,
        code="invalid_type",
    )


def _too_deep(param: str | None) -> InvalidRequest:
    """Return the error for JSON that is nested too deeply, in a field or in the request as a whole."""
    said = "The request is nested too deeply. Send it with fewer levels."
    if param is not None:
        said = f"'{param}' is nested too deeply. Send at most {MAX_LEVELS} levels."
    return InvalidRequest(said, param=param, code="invalid_json")


def unreadable(body: bytes, listed: str) -> InvalidRequest:
    """Find out why a body was refused, however slowly, and return the error. `listed` is the field of its entries."""
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
            return _too_deep(None)
        if "surrogate" in why.msg:
            return _lone_surrogate(body, why, listed)
        return _no_json(why)
    if is_object(value):  # deeper than msgspec reads, but not too deep for orjson
        return _too_deep(None)
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


def _lone_surrogate(body: bytes, why: orjson.JSONDecodeError, listed: str) -> InvalidRequest:
    """Return the error for half of a surrogate pair, naming the message that holds it."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):  # something else is wrong too
        return _no_json(why)
    param: str | None = None  # stays None if the name of a field holds it
    for name, field in as_object(fields).items():
        if name == listed and is_array(field):
            param = next((f"{listed}[{at}]" for at, each in enumerate(field) if _holds_surrogate(each)), None)
        elif _holds_surrogate(field) and not _holds_surrogate(name):
            param = name
        if param is not None:
            break
    where = f"'{param}'" if param is not None else "The body"
    return InvalidRequest(
        f"{where} holds a lone surrogate, the half of a character that UTF-16 writes in two "
        "(such as an emoji cut in the middle). Remove it, or replace it by U+FFFD: cut texts between "
        "characters, not between UTF-16 units.",
        param=param,
        code="invalid_json",
    )


def _holds_surrogate(value: Any) -> bool:
    return _SURROGATE.search(json.dumps(value, ensure_ascii=False)) is not None
