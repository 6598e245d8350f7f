"""The canonical form of a message: the bytes by which a resent message is recognised.

It exists for identity only and is never sent. Clients change messages when they send them back. The form leaves out
exactly what they change without changing the meaning:

    everywhere        key order. null, "", [], {} and a missing field are the same (in the message, a content part and
                      a call, but not inside arguments). Cache marks are ignored
    role              `developer` is `system`
    content           text parts are joined to one text; other fields of a text part are ignored
    calls             arguments are compared as JSON, with numbers as in JavaScript; `index` and thought signatures
                      are ignored
    tool results      `name` is ignored
    private fields    names that begin with `__` are ignored: a resumed Copilot CLI adds one to each result
    replies           white space around the text is ignored. A text that is a JSON object is compared as JSON (DSPy
                      writes it anew). Reasoning and the like (as fields, as parts, or as `<think>…</think>` before
                      the text) and fields that clients add (`name`, parsed output of SDKs) are ignored if content or
                      calls remain. Text beside calls is ignored if all the calls have random ids (CrewAI and Semantic
                      Kernel drop it)

Stored nodes keep the names that they got from an earlier form: `canonical` with `loosely=False`, or `first_canonical`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from proxy.dialects import OWN_FIELDS, answer_of, is_random
from proxy.dialects.jsontext import is_array, is_object, write

CACHE_MARKS: Final = frozenset({"cache_control", "prompt_cache_breakpoint"})
"""Fields of messages, parts and calls that tell a provider what to cache. Clients move them every turn."""

_OF_SDKS: Final = ("parsed", "provider_specific_fields")
"""Fields that SDKs add to a reply and send back: OpenAI's `parse()`, LiteLLM."""

_REASONING: Final = ("reasoning", "reasoning_content", "reasoning_details", "thinking_blocks")
REPLY_FIELDS: Final = frozenset(
    {"refusal", "annotations", "audio", *_REASONING, "extra_content", *_OF_SDKS, *OWN_FIELDS}
)
"""Fields that may appear or vanish when a reply is sent back. They count only if the reply holds nothing else."""

_DROPPED_OF_CALLS: Final = CACHE_MARKS | {"index", "extra_content", *_OF_SDKS}
_EMPTY: Final[tuple[Any, ...]] = (None, "", [], {})
_PLAIN: Final = frozenset({"role", "content"})
_SUBSTANCE: Final = ("content", "tool_calls", "function_call")
_REASONING_PARTS: Final = frozenset({"thinking", "redacted_thinking", "reasoning"})
_MAX_DEPTH: Final = 100
"""Levels of arguments that are compared as JSON. A constant, so that the form depends on nothing else."""
_EXACT: Final = 2**53  # JavaScript rounds larger integers


class _TooDeep(Exception):
    """Raised for arguments with more than `_MAX_DEPTH` levels."""


def canonical(data: Mapping[str, Any], *, loosely: bool = True, private: bool = False) -> bytes:
    """Return the canonical form of a message, given as its parsed JSON object: JSON with sorted keys.

    Equal bytes mean the same message. Never raises, whatever the JSON values are. Two arguments give earlier forms.
    `private=True` includes private fields. `loosely=False` also includes text beside any calls, and compares a JSON
    object in a reply as text.
    """
    role, content = data.get("role"), data.get("content")
    if type(content) is str and content and type(role) is str and role:
        # A shortcut for most messages, which hold nothing else that counts: the same bytes as below, much faster.
        for key, value in data.items():
            if key not in _PLAIN and value not in _EMPTY:
                break
        else:
            said = answer_form(content, loosely=loosely) if role == "assistant" else content
            if said:
                return write({"content": said, "role": "system" if role == "developer" else role})
    form, reply = _fields(data, role, private=private or not loosely)
    if "content" in form:
        said, beside = _content(content, is_reply=role == "assistant", loosely=loosely)
        reply |= beside
        form["content"] = said
        is_beside = loosely and isinstance(said, str) and role == "assistant" and has_random_calls(data)
        if is_beside or _is_empty(said):
            del form["content"]
    return _form(form, reply)


def has_random_calls(data: Mapping[str, Any]) -> bool:
    """Tell whether a message holds calls, and all of them have random ids."""
    calls = data.get("tool_calls")
    return (
        is_array(calls)
        and bool(calls)
        and all(is_object(call) and isinstance(name := call.get("id"), str) and is_random(name) for call in calls)
    )


def first_canonical(data: Mapping[str, Any]) -> bytes:
    """Return the form of the first versions.

    Content with several text parts, or with a text part that has further fields, was not compared as text. White space
    around a reply's text counted, and so did its reasoning (as parts or before the text), text beside any calls, the
    spelling of a JSON object, and private fields.
    """
    form, reply = _fields(data, data.get("role"), private=True)
    if "content" in form:
        form["content"] = _earlier_content(form["content"])
        if _is_empty(form["content"]):
            del form["content"]
    return _form(form, reply)


def _fields(data: Mapping[str, Any], role: Any, *, private: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the forms of a message's fields, with the content unchanged, and separately those of `REPLY_FIELDS`."""
    form: dict[str, Any] = {}
    reply: dict[str, Any] = {}
    for key, value in data.items():
        if value is None or key in CACHE_MARKS or (key == "name" and role == "tool"):
            continue
        if not private and key.startswith("__"):
            continue
        kept = _field(key, value)
        if not _is_empty(kept):
            comes_and_goes = key in REPLY_FIELDS or (key == "name" and role == "assistant")
            (reply if comes_and_goes else form)[key] = kept
    return form, reply


def _form(form: dict[str, Any], reply: dict[str, Any]) -> bytes:
    """Return the form of a message. The fields in `reply` count only if the message has no substance."""
    if reply and not any(key in form for key in _SUBSTANCE):
        form |= reply
    return write(form, sort_keys=True)


def _field(key: str, value: Any) -> Any:
    """Return the form of one field of the message, except the content."""
    if key == "tool_calls":
        return [_call(item) for item in value] if is_array(value) else value
    if key == "function_call":
        return _function(value)
    if key == "audio" and is_object(value) and value.get("id"):
        return {"id": value["id"]}  # clients send back only the id of a spoken reply, not the sound
    return "system" if key == "role" and value == "developer" else value


def _is_empty(value: Any) -> bool:
    """Tell whether the value means the same as a missing field. 0 and false do not."""
    return not value and (value is None or isinstance(value, (str, list, dict)))


def _content(value: Any, *, is_reply: bool, loosely: bool) -> tuple[Any, dict[str, Any]]:
    """Return the form of a content, and for a reply the fields that replace its reasoning and refusal parts.

    If all parts are text, the form is one text.
    """
    if isinstance(value, str):
        return _text(value, is_reply=is_reply, loosely=loosely)
    if not is_array(value):
        return _part(value), {}
    beside: dict[str, Any] = {}
    parts: list[Any] = []
    texts: list[str] = []
    for item in value:
        part = _part(item)
        kind = part.get("type") if is_object(part) else None
        if kind == "text" and isinstance(text := part.get("text", ""), str):
            texts.append(text)
            part = {"type": "text", "text": text} if text else {"type": "text"}
        elif is_reply and kind == "refusal":
            if (refusal := part.get("refusal")) is not None:
                beside["refusal"] = refusal
            continue
        elif is_reply and isinstance(kind, str) and kind in _REASONING_PARTS:
            beside.setdefault("reasoning", []).append(part)
            continue
        parts.append(part)
    if len(texts) < len(parts):
        return parts, beside
    text, thoughts = _text("".join(texts), is_reply=is_reply, loosely=loosely)
    return text, beside | thoughts


def _text(text: str, *, is_reply: bool, loosely: bool) -> tuple[str, dict[str, Any]]:
    """Return the form of a text, and for a reply that is nothing but reasoning a field that replaces the text."""
    if not is_reply:
        return text, {}
    answer = answer_form(text, loosely=loosely)
    return answer, {"thoughts": text.strip()} if not answer and text.strip() else {}


def answer_form(text: str, *, loosely: bool = True) -> str:
    """Return the text of a reply without its reasoning. `loosely`: normalise it if it is a JSON object."""
    answer = answer_of(text).strip()
    form = arguments_form(answer) if loosely and answer.startswith("{") else None
    return write(form, sort_keys=True).decode() if is_object(form) else answer


def _earlier_content(value: Any) -> Any:
    if not is_array(value):
        return _part(value)
    parts = [_part(item) for item in value]
    if len(parts) == 1 and is_object(parts[0]) and parts[0].get("type") == "text":
        text = parts[0].get("text", "")
        if isinstance(text, str) and parts[0].keys() <= {"type", "text"}:
            return text
    return parts


def _part(item: Any) -> Any:
    """Return the form of a content part: its fields, and the fields of the object that its type names."""
    if not is_object(item):
        return item
    form = _object(item)
    kind = form.get("type")
    if isinstance(kind, str) and is_object(payload := form.get(kind)):
        form[kind] = _object(payload)  # as in {"type": "image_url", "image_url": {...}}
    return form


def _object(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in CACHE_MARKS and not _is_empty(value)}


def _call(item: Any) -> Any:
    """Return the form of a tool call. The type `function` may be left out."""
    if not is_object(item):
        return item
    form: dict[str, Any] = {}
    for key, value in item.items():
        if key in _DROPPED_OF_CALLS or (key == "type" and value == "function" and "function" in item):
            continue
        kept = _function(value) if key == "function" else value
        if key == "custom" and is_object(value):
            kept = _object(value)
        if not _is_empty(kept):
            form[key] = kept
    return form


def _function(value: Any) -> Any:
    """Return the form of a called function. Missing arguments, "" and {} are the same."""
    if not is_object(value):
        return value
    form = _object(value)
    form.pop("parsed_arguments", None)  # OpenAI's `parse()` adds the arguments a second time
    if "arguments" in form:
        form["arguments"] = arguments = arguments_form(form["arguments"])
        if arguments == {}:
            del form["arguments"]
    return form


def arguments_form(value: Any) -> Any:
    """Return arguments parsed, if they are a JSON object or array; otherwise unchanged, so that text stays a string."""
    try:
        parsed = orjson.loads(value) if isinstance(value, str) else value
        if isinstance(value, str) and not is_object(parsed) and not is_array(parsed):
            return value
        return _plain(parsed, _MAX_DEPTH)
    except (orjson.JSONDecodeError, OverflowError, _TooDeep):
        return value


def _plain(value: Any, levels: int) -> Any:
    """Return a JSON value with numbers as in JavaScript: 1.0 is 1, and long integers are rounded."""
    if levels < 0:
        raise _TooDeep
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        is_rounded = value.is_integer() if isinstance(value, float) else abs(value) > _EXACT
        return int(float(value)) if is_rounded else value
    if is_object(value):
        return {key: _plain(item, levels - 1) for key, item in value.items()}
    if is_array(value):
        return [_plain(item, levels - 1) for item in value]
    return value
