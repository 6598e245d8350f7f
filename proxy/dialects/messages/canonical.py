"""The canonical form of a message of the Messages API, by which a resent message is recognised. It is never sent.

It leaves out exactly what clients change without changing the meaning:

    system       the header in which Claude Code names its version and a digest of the first question
    everywhere   key order and cache marks. null, "", [], {} and a missing field are the same. A string content is one
                 text block
    texts        all fields of a text block except the text
    calls        `caller`. The input if the id is random (Claude Code fills in defaults, and removes the folder and
                 white space). Otherwise numbers in the input are as in JavaScript
    results      a string content is one text block; `is_error: false` is ignored
    replies      how the text is split into blocks, their order relative to the calls, and white space at the ends.
                 A text that is a JSON object is compared as JSON. Items that the provider ran itself are ignored if
                 text or calls remain, thinking (also as `<think>…</think>` before the text) if anything else remains,
                 and text beside calls if all the calls have random ids

Stored nodes keep the names that they got from an earlier form: `canonical` with `loosely=False`, or `first_canonical`.
"""

from __future__ import annotations

from typing import Any, Final

from proxy.dialects import OWN_FIELDS, JsonObject, is_random
from proxy.dialects.chat.canonical import answer_form, arguments_form
from proxy.dialects.jsontext import is_array, is_object, write
from proxy.dialects.messages.message import HEADER, MARK, THINKING, UNFINISHED, blocks_of, is_call

_DROPPED: Final = frozenset({MARK, UNFINISHED, "caller"})
_OF_MESSAGES: Final = frozenset({"role", "content", *OWN_FIELDS, MARK})


def canonical(data: JsonObject, *, loosely: bool = True) -> bytes:
    """Return the canonical form of a message, given as its parsed JSON object: JSON with sorted keys. Never raises.

    `loosely=False` gives the previous form: it includes the header, the input of all calls, and text beside any calls,
    and compares a JSON object in a reply as text.
    """
    role, content = data.get("role"), data.get("content")
    if isinstance(content, str) or is_array(content) or content is None:
        blocks = [told for block in blocks_of(data) if (told := _block(block)) is not None]
        if loosely and role == "system" and blocks and _is_text(blocks[0]) and blocks[0]["text"].startswith(HEADER):
            del blocks[0]
        content = _reply(blocks, loosely=loosely) if role == "assistant" else blocks
    return _form(data, content)


def first_canonical(data: JsonObject) -> bytes:
    """Return the form of the first versions.

    Each text block of a reply counted separately. Items that the provider ran counted too, and so did reasoning before
    the text.
    """
    role, content = data.get("role"), data.get("content")
    if isinstance(content, str) or is_array(content) or content is None:
        blocks = [told for block in blocks_of(data) if (told := _block(block)) is not None]
        if role == "assistant":
            texts = [block["text"].strip() if _is_text(block) else "" for block in blocks]
            blocks = [{**block, "text": text} if text else block for block, text in zip(blocks, texts, strict=True)]
            blocks = [block for block, text in zip(blocks, texts, strict=True) if text or not _is_text(block)]
        thought = [block for block in blocks if _is_thinking(block)]
        content = [block for block in blocks if not _is_thinking(block)] or thought
    return _form(data, content)


def _form(data: JsonObject, content: Any) -> bytes:
    form: dict[str, Any] = {"role": data.get("role"), "content": content}
    form |= {key: value for key, value in data.items() if key not in _OF_MESSAGES and not _is_empty(value)}
    return b"messages:" + write(form, sort_keys=True)


def _reply(blocks: list[Any], *, loosely: bool) -> list[Any]:
    """Return the blocks of a reply that count, given the forms of all its blocks."""
    said = "".join([block["text"] for block in blocks if _is_text(block)])
    text, calls = answer_form(said, loosely=loosely), [block for block in blocks if is_call(block)]
    is_told = loosely and bool(calls) and all(is_random(str(call.get("id"))) for call in calls)
    calls = [_call(call) for call in calls] if loosely else calls
    if text and not is_told:
        return [{"type": "text", "text": text}, *calls]
    others = [block for block in blocks if not (_is_text(block) or _is_thinking(block))]
    thoughts = [{"type": "text", "text": said.strip()}] if said.strip() else []
    return calls or others or thoughts or [block for block in blocks if _is_thinking(block)]


def _call(block: JsonObject) -> JsonObject:
    """Return the part of a call's form that counts: without the input if the id is random."""
    told = is_random(str(block.get("id")))
    return {name: value for name, value in block.items() if name != "input"} if told else block


def _block(block: Any) -> Any:
    """Return the form of a content block; None if it is an empty text."""
    if not is_object(block):
        return block
    kind, text = block.get("type"), block.get("text")
    if kind == "text" and isinstance(text, str):
        return {"type": "text", "text": text} if text else None
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


def _is_text(block: Any) -> bool:
    return is_object(block) and block.get("type") == "text" and isinstance(block.get("text"), str)


def _is_thinking(block: Any) -> bool:
    return is_object(block) and block.get("type") in THINKING


def _is_empty(value: Any) -> bool:
    """Tell whether a value means the same as a missing field. 0 does not."""
    return not value and type(value) not in {int, float}
