"""Parses a Chat Completions request and composes the body that goes upstream."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec

from proxy.dialects import (
    INSTRUCTION_ROLES,
    LONG_BODY,
    OWN_FIELDS,
    Facts,
    JoinedTexts,
    JsonObject,
    KnownMessages,
    Message,
    Request,
    answer_of,
    body_id,
    hash_of,
)
from proxy.dialects.bodies import common_fields, drop_members, missing, split, value_of, with_changes, wrong_type
from proxy.dialects.chat.canonical import canonical, has_random_calls
from proxy.dialects.chat.message import ChatMessage, has_calls
from proxy.dialects.jsontext import FIELDS, ITEMS, RawFields, is_object, members_of, with_field
from proxy.errors import InvalidRequest

_KNOWN: Final = KnownMessages()
"""A cache of facts that depend on a message's text alone."""
_MESSAGES: Final = re.compile(rb'(?<!\\)"messages"\s*:\s*')  # in valid JSON: the key of a field, at any level
_CONTENT: Final = "a string, an array of content parts, or null"


def parse_chat_request(body: bytes, before: Request | None = None, kept: int = 0) -> Request:
    """Read a request; see `RequestSide.parse`."""
    if before is not None and kept > len(before.instructions):
        try:
            resumed = _resumed(body, before, kept)
        except (InvalidRequest, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            resumed = None  # parsing the whole body reports what is wrong
        if resumed is not None:
            return resumed
    fields, items = split(
        body,
        elsewhere="A request with `input` belongs to /v1/responses.",
        empty="Expected an array with minimum length 1, but got an empty array instead.",
    )
    values = {name: value_of(name, text) for name, text in fields.without("messages").items()}
    facts, messages = _messages(items)
    lead = 0
    while lead < len(facts) and facts[lead].role in INSTRUCTION_ROLES:
        lead += 1
    return _request(
        body,
        fields,
        values,
        instructions=messages[:lead],
        messages=messages[lead:],
        replies=tuple([at - lead for at in range(lead, len(facts)) if facts[at].role == "assistant"]),
        has_own_fields=any([each.has_own_fields for each in facts]),
        ends=_ends(body, fields, messages) if len(body) >= LONG_BODY else (),
        joined=JoinedTexts() if len(body) >= LONG_BODY else None,
    )


def _request(body: bytes, fields: RawFields, values: dict[str, Any], **of_messages: Any) -> Request:
    """Return the request. `values` are the parsed fields without the messages, `of_messages` what the messages give."""
    if "system" in values and "max_tokens" in values:
        raise InvalidRequest("A request with `system` belongs to /v1/messages.", param="system", code="wrong_endpoint")
    common = common_fields(body, fields, values)
    common["has_tools"] = common["has_tools"] or bool(values.get("functions"))
    return Request(
        **common,
        wants_usage=_wants_usage(values.get("stream_options")),
        reply_tokens=_reply_tokens(values),
        **of_messages,
    )


def compose(
    request: Request,
    *,
    instructions: Sequence[Message] | None = None,
    messages: Sequence[Message] | None = None,
    add_usage: bool = False,
    drop_fields: Collection[str] = (),
    cache_key: str | None = None,
    cache_newest: bool = False,  # noqa: ARG001 - providers of this API find the newest message themselves
    tools: bytes | None = None,
) -> bytes:
    """Return the body to send; see `RequestSide.compose`."""
    changes: dict[str, bytes | None] = {}  # new texts; None removes the field
    given = (*request.instructions, *request.messages)
    asked = (
        *(request.instructions if instructions is None else instructions),
        *(request.messages if messages is None else messages),
    )
    if request.has_own_fields or asked != given:
        sent, listed = (request.joined or JoinedTexts()).sent(asked)
        if sent != given:
            changes["messages"] = b"[%b]" % listed
    drop_members(changes, request, drop_fields, but=("messages",))
    if add_usage and request.wants_usage is None:
        options = members_of(request.fields.get("stream_options"))
        changes["stream_options"] = msgspec.json.encode(options | {"include_usage": msgspec.Raw(b"true")})
    if cache_key is not None and "prompt_cache_key" not in request.fields:
        changes["prompt_cache_key"] = msgspec.json.encode(cache_key)
    added = changes.get("stream_options")
    if added is not None and len(changes) == 1 and tools in {None, request.fields.get("tools")}:
        return with_field(request.raw, request.fields, "stream_options", added)
    return with_changes(request, changes, tools)


def _ends(body: bytes, fields: RawFields, messages: Sequence[Message]) -> tuple[int, ...]:
    """Return where the array of messages begins and where each message ends; empty if that is hard to find."""
    text = fields["messages"]
    for found in _MESSAGES.finditer(body):
        at = found.end()
        if not body.startswith(text, at):
            continue
        try:
            RawFields(body[:at] + b"0}")
        except msgspec.DecodeError:  # it lies in another field
            continue
        return (at, *_ends_after(body, at, messages))
    return ()


def _ends_after(body: bytes, at: int, messages: Sequence[Message]) -> tuple[int, ...]:
    """Return where each of these consecutive messages ends. The first one begins after the offset `at`."""
    ends: list[int] = []
    for message in messages:
        at = body.index(b"{", at) + len(message.raw)  # between two objects are only white space and a comma
        ends.append(at)
    return tuple(ends)


def _resumed(body: bytes, before: Request, kept: int) -> Request | None:
    """Parse a request that shares its bytes with an earlier one, up to the end of its first `kept` messages.

    None if another `messages` field follows the first.
    """
    start, end, lead = before.ends[0], before.ends[kept], len(before.instructions)
    opening = b'{"messages":'
    rest = b"%b[{}%b" % (opening, body[end:])  # an empty object replaces the known messages
    array = RawFields(rest)["messages"]
    after = FIELDS.decode(b"%b[]%b" % (opening, rest[len(opening) + len(array) :]))
    if not rest.startswith(array, len(opening)) or bytes(after["messages"]) != b"[]":
        return None
    stop = end + len(array) - len(b"[{}")
    after["messages"] = msgspec.Raw(memoryview(body)[start:stop])
    fields = RawFields(FIELDS.decode(body[:start] + b"0}") | after)
    facts, new = _messages(ITEMS.decode(array)[1:])
    values = {name: value_of(name, text) for name, text in fields.without("messages").items()}
    known = before.messages[: kept - lead]
    first = len(known)
    replies = before.replies[: bisect_left(before.replies, first)]
    return _request(
        body,
        fields,
        values,
        instructions=before.instructions,
        messages=known + new,
        replies=replies + tuple([at for at, each in enumerate(facts, first) if each.role == "assistant"]),
        has_own_fields=any([each.has_own_fields for each in facts])
        or (before.has_own_fields and any(message.own_fields for message in (*before.instructions, *known))),
        ends=before.ends[: kept + 1] + _ends_after(body, end, new),
        joined=before.joined,
        kept=kept,
    )


def _messages(items: Sequence[msgspec.Raw]) -> tuple[list[Facts], tuple[ChatMessage, ...]]:
    return _KNOWN.messages(list(map(bytes, items)), ChatMessage, lambda at, text: _message(f"messages[{at}]", text))


def _message(param: str, raw: bytes) -> tuple[Facts, JsonObject]:
    data = value_of(param, raw)
    if not is_object(data):
        raise wrong_type(param, "an object", data)
    if "role" not in data:
        raise missing(f"{param}.role", "Give each message a role, such as 'user'.")
    if not isinstance(data["role"], str):
        raise wrong_type(f"{param}.role", "a string", data["role"])
    content = data.get("content")
    if isinstance(content, (bool, int, float)):
        raise wrong_type(f"{param}.content", _CONTENT, content)
    own = not data.keys().isdisjoint(OWN_FIELDS)
    calls, is_reply = has_calls(data), data["role"] == "assistant"
    facts = Facts(
        raw=raw,
        role=data["role"],
        has_own_fields=own,
        has_calls=calls,
        content=hash_of(canonical(data)),
        body=body_id(raw),
        # True if one of its earlier forms may differ. Guessed from the text, because making the forms would cost time.
        reshaped=type(content) is list
        or "__" in "".join(data)
        or (is_reply and type(content) is str and (content[:1] == "{" or content != answer_of(content).strip()))
        or (calls and bool(content) and has_random_calls(data)),
    )
    return facts, data


def _wants_usage(options: Any) -> bool | None:
    """Return what `stream_options` says about usage. Values of the wrong type are left for the upstream to refuse."""
    if options is None:
        return None
    wants = options.get("include_usage") if is_object(options) else False
    return None if wants is None else bool(wants)


def _reply_tokens(values: Mapping[str, Any]) -> int | None:
    """Return the limit of the reply's tokens, by its newer or older name; None if neither is a positive integer."""
    for name in ("max_completion_tokens", "max_tokens"):
        limit = values.get(name)
        if type(limit) is int and limit > 0:
            return limit
    return None
