"""The canonical form of a message of the Messages API, by which it is recognised when it comes back. Never sent.

What clients change without meaning anything by it is left out, and nothing else:

    everywhere   key order; null, "", [], {} and a missing field; cache marks; a content that is a string is one text
    texts        whatever else a block of text holds; white space at the ends of a reply
    calls        `caller`; numbers in the input are as JavaScript has them
    results      a content that is a string is one text; `is_error: false`
    replies      thinking (also as `<think>…</think>` before a text), which does not count where anything else is there
"""

from __future__ import annotations

from typing import Any, Final

from proxy.dialects import OWN_FIELDS, JsonObject, answer_of
from proxy.dialects.chat.canonical import arguments_form
from proxy.dialects.jsontext import is_array, is_object, write
from proxy.dialects.messages.message import MARK, THINKING, UNFINISHED, blocks_of

_EMPTY: Final[tuple[Any, ...]] = (None, "", [], {}, False)
_DROPPED: Final = frozenset({MARK, UNFINISHED, "caller"})
_OF_MESSAGES: Final = frozenset({"role", "content", *OWN_FIELDS, MARK})


def canonical(data: JsonObject) -> bytes:
    """Return the canonical form of a message, given as its parsed JSON object: JSON with sorted keys. Never raises."""
    role, content = data.get("role"), data.get("content")
    if isinstance(content, str) or is_array(content) or content is None:
        is_reply = role == "assistant"
        said = [told for block in blocks_of(data) if (told := _block(block, is_reply=is_reply)) is not None]
        thought = [block for block in said if _is_thinking(block)]
        content = [block for block in said if not _is_thinking(block)] or thought
    form: dict[str, Any] = {"role": role, "content": content}
    form |= {key: value for key, value in data.items() if key not in _OF_MESSAGES and not _is_empty(value)}
    return b"messages:" + write(form, sort_keys=True)


def _block(block: Any, *, is_reply: bool = False) -> Any:
    """Return the form of a content block; None where it says nothing."""
    if not is_object(block):
        return block
    kind, text = block.get("type"), block.get("text")
    if kind == "text" and isinstance(text, str):
        answer = answer_of(text).strip() if is_reply else text
        if answer:
            return {"type": "text", "text": answer}
        return {"type": THINKING[0], "text": text.strip()} if text.strip() else None
    if kind == "tool_result":
        return _result(block)
    kept = {name: value for name, value in block.items() if name not in _DROPPED and not _is_empty(value)}
    return arguments_form(kept) if kind == "tool_use" else kept


def _result(block: JsonObject) -> JsonObject:
    form = {name: value for name, value in block.items() if name not in _DROPPED and not _is_empty(value)}
    content = form.get("content")
    if isinstance(content, str):
        form["content"] = [{"type": "text", "text": content}]
    elif is_array(content):
        form["content"] = [part for part in map(_block, content) if part is not None]
    return form


def _is_thinking(block: Any) -> bool:
    return is_object(block) and block.get("type") in THINKING


def _is_empty(value: Any) -> bool:
    """Tell whether a value says as little as a missing field; 0 says something."""
    return not value and type(value) is not int and type(value) is not float and value in _EMPTY
