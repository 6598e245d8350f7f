"""Reads what an upstream's error demands: a shorter request, or another order of roles.

Every provider and model server words its errors differently, and gateways wrap the errors of others. Only the error's
own texts are read (`message`, `detail`, `code`, `type` and the like, at any depth), because some bodies repeat the
request.

Overflow of the context window: rate limits mention tokens too and are told apart. A reply that alone is as large as the
window is not an overflow, because trimming cannot help. Neither is a body with too many bytes, or an image with too
many pixels.

Orders of roles that some servers require:

    one_system   one system message, and it comes first (templates of Qwen)
    alternate    users and assistants take turns, after at most one system message (templates of Mistral,
                 Gemma; DeepSeek's reasoner, Anthropic, Perplexity)

The API itself has no such rule, so messages are reordered only after a server has refused the original order.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from proxy.dialects import INSTRUCTION_ROLES, JsonObject, Message, Overflow, RoleOrder
from proxy.dialects.jsontext import is_array, is_object, read

# ------------------------------------------------------------------------- overflow of the window

_STATUSES: Final = frozenset({400, 413, 422, 500})
"""Statuses of overflow errors: some servers use 413 and 422, and gateways 500 around the real error."""

_SAYING: Final = ("message", "msg", "detail", "description", "title", "reason", "code", "type", "status")
_HOLDING: Final = ("error", "errors", "details", "cause", "metadata", "raw", "innererror", "baseresp")
_OF_OTHERS: Final = ("errormessage", "errormsg", "errortype", "errorcode", "statusmsg", "originalmessage")
_TEXT_FIELDS: Final = frozenset({*_SAYING, *_HOLDING, *_OF_OTHERS})
"""Fields, in lower case and without `_`, that describe an error or contain such a field."""
_NUMBERS: Final = ("n_ctx", "n_prompt_tokens")  # llama.cpp's names for the window and the input
_MOST_VALUES: Final = 100  # maximum values that are read in a body; an error has a handful
_HALF_OF_TEXT: Final = 4096  # characters that are read at each end of a text; a wrapped error stands at one of them

_ESCAPE: Final = re.compile(r"\\+u00([2-7][0-9a-f])")
"""An escaped ASCII character in JSON text inside a JSON string. Go escapes `>` like this."""

_OTHER_LIMIT: Final = re.compile(
    r"rate[ _-]?limit|(?<![a-z])per[ _-]?(?:sec|min|hour|day|month)|\b[rt]p[mdh]\b|too many requests"
    r"|throttl|quota|please wait|try again (?:in|later)"
)
"""Signs of other limits: rate limits and paid quotas."""

_SIGNS: Final = re.compile(
    r"context[ _](?:length|window|limit|size)(?: (?:was|is|has been))?[ _](?:exceed|overflow)"
    r"|contextwindowexceed|exceed_context_size|model_max_prompt_tokens_exceeded"
    r"|max(?:imum)? (?:context|prompt|model) (?:length|size|window)"
    r"|exceed(?:s|ed)? (?:[\w'`]+ ){0,4}context (?:length|window|limit|size)"
    r"|(?:longer|larger|greater) than (?:[\w'`]+ ){0,4}context (?:length|window|limit|size)"
    r"|context window exceeds limit|context (?:length|window|size) (?:is|of) only"
    r"|but (?:[\w'`]+ ){0,4}context (?:length|window|size) is"
    r"|(?:prompt|inputs?|conversation|messages)(?: tokens)?(?: is| are)? too long"
    r"|prompt exceeds max(?:imum)? length|too large for model with"
    r"|input tokens? (?:count )?(?:\(\d{1,12}\) )?(?:exceeds?|is \d{1,12} but)|max(?:imum)? input token limit"
    r"|too many (?:input |prompt )?tokens|exceeded model token limit|exceeds the model's max of"
    r"|prompt token count of \d{1,12} exceeds"
    r"|input length (?:\(?\d{1,12}(?: tokens)?\)? )?exceeds the max|range of input length"
    r"|`inputs` (?:tokens \+|must have less)"
    r"|reduce the length of (?:the |your )?(?:input )?(?:messages|prompt|inputs?)\b"
    r"|max_tokens must be at least 1, got -"
    r"|prompt_tokens\b[^.]{0,40} (?:less than|exceeds?|greater than)[^.]{0,40}max_seq_len"
    r"|max_total_tokens\b[^.]{0,80}max_seq_len"
    r"|tokens in request more than max tokens|exceeds? max message tokens"
    r"|prompt ?超长|输入[^。，,;；]{0,20}超长|超[过出][^。，,;；]{0,12}(?:上下文|输入|最大)(?:长度|窗口)"
)
"""Phrases used only for an input that is too long. `max_tokens must be at least 1` is an older vLLM's: it subtracts the
input from the window and calls the rest `max_tokens`."""

_NUMBER: Final = r"(\d{1,3}(?:,\d{3}){1,3}|\d{1,12})(?!\d)"
_ANY: Final = r"\d[\d,]{0,14}"


def _patterns(*written: str) -> tuple[re.Pattern[str], ...]:
    """Compile patterns in which `#` stands for the number to find and `@` for any other number."""
    return tuple(re.compile(text.replace("#", _NUMBER).replace("@", _ANY)) for text in written)


_WINDOW: Final = _patterns(
    r"> # maximum",
    r"@ \+ @ > #",
    r"with # maximum context length",
    r"(?:context|model|allowed|allowed input|max(?:imum)? prompt) (?:length|window|size)(?: of| is|:)?"
    r"(?: only)? \(?#",
    r"max(?:imum)? (?:number of )?(?:input )?tokens(?: allowed)?:? \(?#",
    r"limit(?: of| is|:) #",
    r"must be <= #",
    r"less than # tokens",
    r"length should be \[\d{1,12}, ?#",
    r"n_ctx\D{1,5}#",
    r"supports up to #",
    r"cannot exceed #",
    r"max of #",
    r"max_(?:seq|model)_len\D{1,3}#",
)
"""The first pattern that matches counts. The same is true of the lists below."""
_INPUT: Final = _patterns(
    r"contains # (?:input )?tokens",
    r"(?:has|passed|prompt is) # (?:input )?tokens",
    r"# tokens from the input",
    r"(?:input|request|requested tokens) \(#(?: tokens)?\)",
    r"input length \(?#",
    r"\(length #\)",
    r"given: #",
    r"too long: #",
    r"limit: # \+ @ >",
    r"token count(?: of| is|:)? \(?#",
    r"requested: #",
    r"current length is #",
    r"resulted in #",
    r"requested # tokens in the messages",
    r"received #",
    r"n_prompt_tokens\D{1,5}#",
    r"(?<![a-z_])prompt_tokens \(#\)",
)
"""A lower bound ("at least 5000 input tokens") is not a count, so it is not in this list."""
_REPLY: Final = _patterns(
    r"# (?:tokens )?(?:in|for) the (?:completion|output)",
    r"requested # output tokens",
    r"plus # '?max_tokens",
    r"tokens['`]? is too large: #",
    r"and # `max_new_tokens`",
    r"@ \+ # >",
    r"max_(?!total_)\w{0,16}tokens['`]?(?: of| is|:|=)? ?\(?#",
)
_TOTAL: Final = _patterns(r"requested (?:about |a total of )?# tokens", r"max_total_tokens\D{1,3}#")
"""Input and reply together; only the input if the error names no reply."""


def overflow_of(status: int, body: bytes) -> Overflow | None:
    """Return the overflow that an error answer reports; None if it is another error.

    Runs in linear time for any body, and never raises.
    """
    if status not in _STATUSES:
        return None
    texts, numbers = _said(body)
    if any(_OTHER_LIMIT.search(text) for text in texts) or not any(_SIGNS.search(text) for text in texts):
        return None
    window = numbers.get("n_ctx") or _first(_WINDOW, texts)
    reply = _first(_REPLY, texts)
    if window is not None and reply is not None and reply >= window:
        return None
    asked = numbers.get("n_prompt_tokens") or _first(_INPUT, texts)
    if asked is None and (total := _first(_TOTAL, texts)) is not None:
        asked = total - (reply or 0)
    # A server that stops counting at the limit (vLLM) reports one token too many. That is no count.
    if asked is not None and (asked <= 0 or (window is not None and asked == window - (reply or 0) + 1)):
        asked = None
    return Overflow(window=window or None, asked=asked, reply=reply)


def _said(body: bytes) -> tuple[list[str], JsonObject]:
    """Return the texts of the error's fields in `_plain` form, and llama.cpp's numbers."""
    try:
        value: Any = read(body)
    except ValueError:
        ends = body if len(body) <= 2 * _HALF_OF_TEXT else body[:_HALF_OF_TEXT] + b" " + body[-_HALF_OF_TEXT:]
        value = ends.decode("utf-8", "replace")
    texts: list[str] = []
    numbers: JsonObject = {}
    waiting = deque([value])  # breadth first: deeper values come later
    for _ in range(_MOST_VALUES):
        if not waiting:
            break
        item = waiting.popleft()
        if isinstance(item, str):
            texts.append(_plain(item))
        elif is_array(item):
            waiting += item[:_MOST_VALUES]
        elif is_object(item):
            waiting += [inner for name, inner in item.items() if name.lower().replace("_", "") in _TEXT_FIELDS]
            numbers |= {name: item[name] for name in _NUMBERS if type(item.get(name)) is int and item[name] > 0}
    return texts, numbers


def _plain(text: str) -> str:
    """Return the two ends of a text on one line, in lower case, with escapes undone."""
    if len(text) > 2 * _HALF_OF_TEXT:
        text = f"{text[:_HALF_OF_TEXT]} {text[-_HALF_OF_TEXT:]}"
    unescaped = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), text.lower())
    return " ".join(unescaped.replace("\\'", "'").replace("’", "'").split())


def _first(patterns: tuple[re.Pattern[str], ...], texts: list[str]) -> int | None:
    """Return the number found by the first pattern that matches any text; None if none does."""
    for pattern in patterns:
        for text in texts:
            if (match := pattern.search(text)) is not None:
                return int(match[1].replace(",", ""))
    return None


def refuses_usage(body: bytes) -> bool:
    """Tell whether an error answer mentions the option that requests the usage of a stream."""
    return b"stream_options" in body or b"include_usage" in body


# ------------------------------------------------------------------------------ orders of roles

_ROLE_STATUSES: Final = frozenset({400, 422, 500})
"""Statuses of such a refusal: servers that report a template's error as their own use 500."""

_ALTERNATE: Final = re.compile(
    r"roles (?:must|should|need to) (?:alternate|be alternating)"
    r"|(?:must|should|requests) alternate (?:with|between) \W?(?:user|assistant)"
    r"|(?:successive|consecutive) (?:user|assistant)\b"
    r"|multiple \W{0,2}(?:user|assistant)\W{0,2} (?:roles|messages) in a row"
    r"|unexpected role \W?(user|assistant)\W? after role \W?\1\b"
)
_ONE_SYSTEM: Final = re.compile(
    r"system (?:message|prompt|role)s? (?:must|should|can only|may only|has to|needs to) (?:be|come|appear) "
    r"(?:at the (?:beginning|start)|(?:the )?(?:very )?first)"
    r"|system messages? (?:is|are) only (?:allowed|supported|valid) "
    r"(?:at the (?:beginning|start)|(?:as )?(?:the )?first)"
    r"|unexpected role \W?(?:system|developer)\W? after role"
    r"|(?:only|at most|more than|exactly) one system (?:message|prompt)"
    r"|(?:multiple|several) system (?:messages|prompts)"
)


def demanded_order(status: int, body: bytes) -> RoleOrder | None:
    """Return the order that an error answer demands; None for any other error. Never raises."""
    if status not in _ROLE_STATUSES:
        return None
    said, _ = _said(body)
    if any(_ONE_SYSTEM.search(text) for text in said):
        return "one_system"
    return "alternate" if any(_ALTERNATE.search(text) for text in said) else None


def reordered(messages: Sequence[Message], order: RoleOrder) -> tuple[Message, ...]:
    """Return messages in the order that a server demands.

    For `alternate` the system messages are merged too: a second one also breaks the turns, and the error of a template
    does not tell which it was.
    """
    one = one_system(messages)
    return merged_users(one) if order == "alternate" else one


def merged_users(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages with adjacent user messages merged; texts are joined by a blank line."""
    merged: list[Message] = []
    for message in messages:
        if merged and message.role == "user" == merged[-1].role:
            merged[-1] = _together([merged[-1], message])
        else:
            merged.append(message)
    return tuple(merged)


def one_system(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages with all instructions merged, in order, into one message at the beginning."""
    instructions = [message for message in messages if message.role in INSTRUCTION_ROLES]
    if not instructions:
        return tuple(messages)
    others = [message for message in messages if message.role not in INSTRUCTION_ROLES]
    return (_together(instructions), *others)


def _together(messages: Sequence[Message]) -> Message:
    """Return the first message with the contents of all of them; the very same object if it is the only one."""
    first, *more = messages
    if not more:
        return first
    contents = [each.data.get("content") for each in messages]
    if all(isinstance(each, str) for each in contents):
        return first.replacing("content", "\n\n".join(filter(None, contents)))
    parts: list[Any] = []
    for each in contents:
        if is_array(each):
            parts += each
        elif isinstance(each, str) and each:
            parts.append({"type": "text", "text": each})
    return first.replacing("content", parts)
