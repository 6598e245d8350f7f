"""Whether an error says that a request is larger than the model's context window, and by how much.

Every provider and every model server says it in other words, and gateways wrap the words of others. What is
read, in this order:

    the error's own texts   `message`, `detail`, `code`, `type` and the like, however deep they are wrapped;
                            nothing else of a body, since some bodies repeat the request
    what it is not          limits by the minute or by the day speak of tokens too
    what it is              the wordings in `_SIGNS`
    the numbers             the window, the input and the reply, where the words name them

A reply that alone is as large as the window is another error: no trimming helps there. So is a body
of too many bytes, or a picture of too many pixels. It does not know what is done about an overflow.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any, Final

from msgspec import Struct

from proxy.dialects import JsonObject
from proxy.dialects.jsontext import is_array, is_object, read

_STATUSES: Final = frozenset({400, 413, 422, 500})
"""Statuses that come with it: 413 and 422 of some servers, 500 of gateways that wrap the real one."""

_SAYING: Final = ("message", "msg", "detail", "description", "title", "reason", "code", "type", "status")
_HOLDING: Final = ("error", "errors", "details", "cause", "metadata", "raw", "innererror", "baseresp")
_OF_OTHERS: Final = ("errormessage", "errormsg", "errortype", "errorcode", "statusmsg", "originalmessage")
_TEXT_FIELDS: Final = frozenset({*_SAYING, *_HOLDING, *_OF_OTHERS})
"""Fields, in lower case and without `_`, in which an error says what it is, or which hold such a field."""
_NUMBERS: Final = ("n_ctx", "n_prompt_tokens")
"""llama.cpp's names for the window and the input."""
_MOST_VALUES: Final = 100
"""Values of a body that are looked at; an error has a handful."""
_HALF_OF_TEXT: Final = 4096
"""Characters of each end of a text that are read: what is wrapped stands at one of them."""

_ESCAPE: Final = re.compile(r"\\+u00([2-7][0-9a-f])")
"""An ASCII character in JSON text that was put into a string of JSON, as Go writes `>`."""

_OTHER_LIMIT: Final = re.compile(
    r"rate[ _-]?limit|(?<![a-z])per[ _-]?(?:sec|min|hour|day|month)|\b[rt]p[mdh]\b|too many requests"
    r"|throttl|quota|please wait|try again (?:in|later)"
)
"""Limits on what is sent in some time, and on what was paid for."""

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
)
"""What is only said of an input that is too long. The last is an older vLLM's, which takes the input from the
window and calls what is left `max_tokens`."""

_NUMBER: Final = r"(\d{1,3}(?:,\d{3}){1,3}|\d{1,12})(?!\d)"
_ANY: Final = r"\d[\d,]{0,14}"


def _patterns(*written: str) -> tuple[re.Pattern[str], ...]:
    """Compile patterns in which `#` is the number that is looked for and `@` any other."""
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
"""The first that is found counts, here and below."""
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
)
"""A lower bound ("at least 5000 input tokens") is no count, and is not among these."""
_REPLY: Final = _patterns(
    r"# (?:tokens )?(?:in|for) the (?:completion|output)",
    r"requested # output tokens",
    r"plus # '?max_tokens",
    r"tokens['`]? is too large: #",
    r"and # `max_new_tokens`",
    r"@ \+ # >",
    r"max_\w{0,16}tokens['`]?(?: of| is|:|=)? ?\(?#",
)
_TOTAL: Final = _patterns(r"requested (?:about |a total of )?# tokens")
"""Input and reply together; the input alone where no reply is named."""


class Overflow(Struct, frozen=True, kw_only=True):
    """A request that was larger than the model's context window, as the error tells it."""

    window: int | None
    """Tokens that the model takes; of some providers, without the reply."""
    asked: int | None
    """Tokens of the input, as the upstream counted them."""
    reply: int | None
    """Tokens that were asked for the reply, where the error counts them in."""


def overflow_of(status: int, body: bytes) -> Overflow | None:
    """Return what an error answer says of an overflow; None where it is another error.

    Takes time in proportion to the body, whatever it is, and never raises.
    """
    return _judged(_value(body)) if status in _STATUSES else None


def words_of(body: bytes) -> list[str]:
    """Return what an error answer says, in its own fields: each text in lower case and on one line."""
    return _texts(_value(body))[0]


def _value(body: bytes) -> Any:
    """Return the body as JSON, or as text where it is none."""
    try:
        return read(body)
    except ValueError:
        ends = body if len(body) <= 2 * _HALF_OF_TEXT else body[:_HALF_OF_TEXT] + b" " + body[-_HALF_OF_TEXT:]
        return ends.decode("utf-8", "replace")


def _judged(value: Any) -> Overflow | None:
    texts, numbers = _texts(value)
    if any(_OTHER_LIMIT.search(text) for text in texts) or not any(_SIGNS.search(text) for text in texts):
        return None
    window = numbers.get("n_ctx") or _first(_WINDOW, texts)
    reply = _first(_REPLY, texts)
    if window is not None and reply is not None and reply >= window:
        return None
    asked = numbers.get("n_prompt_tokens") or _first(_INPUT, texts)
    if asked is None and (total := _first(_TOTAL, texts)) is not None:
        asked = total - (reply or 0)
    # One too many is what servers say that stop counting there (vLLM).
    if asked is not None and (asked <= 0 or (window is not None and asked == window - (reply or 0) + 1)):
        asked = None
    return Overflow(window=window or None, asked=asked, reply=reply)


def _texts(value: Any) -> tuple[list[str], JsonObject]:
    """Return what the error's fields say, as `_plain` makes it, and the numbers that llama.cpp names."""
    texts: list[str] = []
    numbers: JsonObject = {}
    waiting = deque([value])  # what lies deeper comes later
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
            numbers |= {name: item[name] for name in _NUMBERS if _is_count(item.get(name))}
    return texts, numbers


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _plain(text: str) -> str:
    """Return the two ends of a text in lower case, on one line, without what escaping has made of it."""
    if len(text) > 2 * _HALF_OF_TEXT:
        text = f"{text[:_HALF_OF_TEXT]} {text[-_HALF_OF_TEXT:]}"
    unescaped = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), text.lower())
    return " ".join(unescaped.replace("\\'", "'").replace("’", "'").split())


def _first(patterns: tuple[re.Pattern[str], ...], texts: list[str]) -> int | None:
    """Return the number that the first pattern to fit finds."""
    for pattern in patterns:
        for text in texts:
            if (match := pattern.search(text)) is not None:
                return int(match[1].replace(",", ""))
    return None
