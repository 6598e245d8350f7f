"""The canonical form of a message: the bytes by which the same message is recognised when it comes back.

It exists for identity alone and is never sent. Clients change messages when they send them back;
what they change without meaning anything by it is left out here, and nothing else:

    everywhere        key order; null, "", [], {} and a missing field are one (at the level of the
                      message, of a content part, of a call; never inside arguments); marks for caches
    role              `developer` is `system`
    content           parts of text are their text, put together; what else a part of text has does not count
    calls             arguments count as JSON, not as text, and their numbers as JavaScript has them; `index` and
                      thought signatures do not count
    tool results      `name` does not count
    private fields    those that begin with `__` do not count: a resumed Copilot CLI puts one beside each result
    replies           white space around the text does not count; a text that is a JSON object counts as JSON (DSPy
                      writes it anew); reasoning and the like (as fields, as parts or as `<think>…</think>` before
                      the text), and what clients add to them (`name`, what SDKs have parsed), do not count where
                      content or calls remain; nor does text beside calls that random ids tell (CrewAI and Semantic
                      Kernel leave it out)

Nodes that are stored keep the names that they got by an earlier form: `canonical` with `loosely=False`, or
`first_canonical`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from proxy.dialects import OWN_FIELDS, answer_of, is_random
from proxy.dialects.jsontext import is_array, is_object, write

CACHE_MARKS: Final = frozenset({"cache_control", "prompt_cache_breakpoint"})
"""Fields of messages, parts and calls that tell a provider what to cache; clients move them every turn."""

_OF_SDKS: Final = ("parsed", "provider_specific_fields")
"""What SDKs put beside a reply of their own, and send back: OpenAI's `parse()`, LiteLLM."""

_REASONING: Final = ("reasoning", "reasoning_content", "reasoning_details", "thinking_blocks")
REPLY_FIELDS: Final = frozenset(
    {"refusal", "annotations", "audio", *_REASONING, "extra_content", *_OF_SDKS, *OWN_FIELDS}
)
"""Fields that come and go between a reply and its return. A reply that holds nothing else is told by them."""

_DROPPED_OF_CALLS: Final = CACHE_MARKS | {"index", "extra_content", *_OF_SDKS}
_EMPTY: Final[tuple[Any, ...]] = (None, "", [], {})
_PLAIN: Final = frozenset({"role", "content"})
_SUBSTANCE: Final = ("content", "tool_calls", "function_call")
_REASONING_PARTS: Final = frozenset({"thinking", "redacted_thinking", "reasoning"})
_MAX_DEPTH: Final = 100
"""Levels of arguments that are compared as JSON; a fixed number, so that the form depends on nothing else."""
_EXACT: Final = 2**53  # JavaScript rounds integers above it to floats


class _TooDeep(Exception):
    """Arguments with more than `_MAX_DEPTH` levels."""


def canonical(data: Mapping[str, Any], *, loosely: bool = True) -> bytes:
    """Return the canonical form of a message, given as its parsed JSON object: JSON with sorted keys.

    Equal bytes mean the same message. Never raises, whatever JSON values stand in whatever place. Without `loosely`,
    as it was before, text beside any calls counts, and so do how an object is written and private fields.
    """
    role, content = data.get("role"), data.get("content")
    if type(content) is str and content and type(role) is str and role:
        # Most messages: nothing else that counts. The same bytes as below, in a fraction of the time.
        for key, value in data.items():
            if key not in _PLAIN and value not in _EMPTY:
                break
        else:
            said = _answer(content, loosely=loosely) if role == "assistant" else content
            if said:
                return write({"content": said, "role": "system" if role == "developer" else role})
    form, reply = _fields(data, role, loosely=loosely)
    if "content" in form:
        said, beside = _content(content, is_reply=role == "assistant", loosely=loosely)
        reply |= beside
        form["content"] = said
        is_beside = loosely and isinstance(said, str) and role == "assistant" and has_random_calls(data)
        if is_beside or _is_empty(said):
            del form["content"]
    return _form(form, reply)


def has_random_calls(data: Mapping[str, Any]) -> bool:
    """Tell whether a message holds calls, and the ids of all of them are random."""
    calls = data.get("tool_calls")
    return (
        is_array(calls)
        and bool(calls)
        and all(is_object(call) and isinstance(name := call.get("id"), str) and is_random(name) for call in calls)
    )


def first_canonical(data: Mapping[str, Any]) -> bytes:
    """Return the form that messages had in the first versions.

    Several parts of text, and a part of text that had more than that, were no text; white space around the text
    of a reply counted, and so did its parts of reasoning, reasoning before its text, text beside any calls, how an
    object is written, and private fields.
    """
    form, reply = _fields(data, data.get("role"), loosely=False)
    if "content" in form:
        form["content"] = _earlier_content(form["content"])
        if _is_empty(form["content"]):
            del form["content"]
    return _form(form, reply)


def _fields(data: Mapping[str, Any], role: Any, *, loosely: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the forms of the fields of a message, the content as it is, and apart those that come and go."""
    form: dict[str, Any] = {}
    reply: dict[str, Any] = {}
    for key, value in data.items():
        if value is None or key in CACHE_MARKS or (key == "name" and role == "tool"):
            continue
        if loosely and key.startswith("__"):
            continue
        kept = _field(key, value)
        if not _is_empty(kept):
            comes_and_goes = key in REPLY_FIELDS or (key == "name" and role == "assistant")
            (reply if comes_and_goes else form)[key] = kept
    return form, reply


def _form(form: dict[str, Any], reply: dict[str, Any]) -> bytes:
    """Return the form of a message; what comes and goes counts only where it has nothing else."""
    if reply and not any(key in form for key in _SUBSTANCE):
        form |= reply
    return write(form, sort_keys=True)


def _field(key: str, value: Any) -> Any:
    """Return the form of one field of the message, of its content excepted."""
    if key == "tool_calls":
        return [_call(item) for item in value] if is_array(value) else value
    if key == "function_call":
        return _function(value)
    if key == "audio" and is_object(value) and value.get("id"):
        return {"id": value["id"]}  # a client names a spoken reply by it, and sends no sound back
    return "system" if key == "role" and value == "developer" else value


def _is_empty(value: Any) -> bool:
    """Tell whether the value says as little as a missing field; 0 and false say something."""
    return not value and (value is None or isinstance(value, (str, list, dict)))


def _content(value: Any, *, is_reply: bool, loosely: bool) -> tuple[Any, dict[str, Any]]:
    """Return the form of a content, and of a reply the fields that its parts of reasoning and refusal stand for.

    Parts of text alone are one text.
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
    """Return the form of a text, and of a reply that is nothing but reasoning the field that this stands for."""
    if not is_reply:
        return text, {}
    answer = _answer(text, loosely=loosely)
    return answer, {"thoughts": text.strip()} if not answer and text.strip() else {}


def _answer(text: str, *, loosely: bool) -> str:
    """Return what a reply says; loosely, an object however it is written."""
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
    """Return the form of a content part: its fields, and those of the object that its type names."""
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
    """Return the form of a tool call. A call of a function need not say that it is one."""
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
    """Return the form of a called function; no arguments, "" and {} are one."""
    if not is_object(value):
        return value
    form = _object(value)
    form.pop("parsed_arguments", None)  # OpenAI's `parse()`: the arguments once more
    if "arguments" in form:
        form["arguments"] = arguments = arguments_form(form["arguments"])
        if arguments == {}:
            del form["arguments"]
    return form


def arguments_form(value: Any) -> Any:
    """Return arguments as JSON where they are an object or an array, else as they are: text stays a string."""
    try:
        parsed = orjson.loads(value) if isinstance(value, str) else value
        if isinstance(value, str) and not is_object(parsed) and not is_array(parsed):
            return value
        return _plain(parsed, _MAX_DEPTH)
    except (orjson.JSONDecodeError, OverflowError, _TooDeep):
        return value


def _plain(value: Any, levels: int) -> Any:
    """Return a JSON value with numbers as JavaScript has them: 1.0 is 1, and long integers are rounded."""
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
