"""What all dialects share of a request's body: reading it, its errors, and changing fields of it."""

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
"""Levels of JSON that one message, or one field, may have; every reader and writer here takes more."""

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_LONGEST_MODEL: Final = 2048
"""Characters of a model's name. Clients choose it, and much is remembered and counted by it; an ARN has so many."""


def split(body: bytes, *, elsewhere: str, empty: str) -> tuple[RawFields, list[msgspec.Raw]]:
    """Return the top-level fields, and the texts of the `messages`.

    `elsewhere` says where a body with `input` belongs, `empty` what is wrong with no message.
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
    """Return what requests of all dialects say in the same words, for `Request`; `values` are those of its fields.

    They are checked; the tools, which are long, leave `values`.
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
    """Tell whether any tool is described as the Messages API has it."""
    return any([is_object(tool) and "input_schema" in tool and "function" not in tool for tool in as_array(tools)])


def drop_members(
    changes: dict[str, bytes | None], request: Request, paths: Collection[str], but: Collection[str]
) -> None:
    """Leave members of fields out, in `changes`, the new texts of fields by their names; fields of `but` stay.

    They are named by dotted paths ("metadata.session_id"). Objects that get empty by that go too.
    """
    for path in paths:
        name, *rest = path.split(".")
        text = changes.get(name, request.fields.get(name))
        if name not in but and text is not None and (left := without_member(text, rest)) != text:
            changes[name] = left


def with_changes(request: Request, changes: dict[str, bytes | None], tools: bytes | None) -> bytes:
    """Return a request's body with these fields changed, None leaving one out, and these tools, where they are given.

    Without a change it is the client's own.
    """
    if tools is not None and tools != request.fields.get("tools"):
        changes["tools"] = tools
    if not changes:
        return request.raw
    every = dict.fromkeys([*request.fields, *changes])
    return emitted({name: changes[name] if name in changes else request.fields[name] for name in every})


def value_of(param: str, text: bytes) -> Any:
    """Return the value of a JSON text that is not nested too deeply."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as why:  # JSON by its grammar, such as 1e999
        advice = " Send the body as JSON encoded in UTF-8." if _NOT_UTF8 in why.msg else ""
        raise InvalidRequest(f"'{param}' cannot be read: {why.msg}.{advice}", param=param, code="invalid_json") from why
    # Length and number of brackets find nearly all texts to be shallow; brackets may stand in strings too.
    may_be_deep = len(text) > 2 * MAX_LEVELS and text.count(b"[") + text.count(b"{") > MAX_LEVELS
    if may_be_deep and _levels(value) > MAX_LEVELS:
        raise _too_deep(param)
    return value


def _levels(value: Any) -> int:
    """Return how deep objects and arrays lie in each other; 1 for one that holds none."""
    levels, level = 0, [value] if is_object(value) or is_array(value) else []
    while level:
        below: list[Any] = []
        for item in level:
            below.extend(item.values() if is_object(item) else item)
        level = [item for item in below if is_object(item) or is_array(item)]
        levels += 1
    return levels


def _model_of(values: Mapping[str, Any]) -> str:
    """Return the model that a request names; "" where it names none."""
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

_NOT_UTF8: Final = "not valid UTF-8"  # what orjson says of bytes in another encoding


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


def _too_deep(param: str | None) -> InvalidRequest:
    """Return the error for JSON with too many levels: in a field, or in the request as a whole."""
    said = "The request is nested too deeply. Send it with fewer levels."
    if param is not None:
        said = f"'{param}' is nested too deeply. Send at most {MAX_LEVELS} levels."
    return InvalidRequest(said, param=param, code="invalid_json")


def unreadable(body: bytes, listed: str) -> InvalidRequest:
    """Find out why a body was refused, however slowly, and return the error; `listed` is its field of entries."""
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
    if is_object(value):  # some hundred levels, which are too many for one reader and not for the other
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
    """Return the error for half of a character, naming the message that holds it."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):  # it is wrong in other ways too
        return _no_json(why)
    param: str | None = None  # as where it is the name of a field
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
