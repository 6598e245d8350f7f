"""A request for a chat completion beside its bytes, and the body that goes upstream.

What nobody looks at is never parsed into something else: an unknown field, a new parameter, the
order of keys and the writing of numbers come through as they came in. If nothing is changed, the
client's own bytes are the body. It does not know why something is changed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, cast

import msgspec
import orjson
from msgspec import Struct

from proxy.dialects import OWN_FIELDS, Facts, JsonObject, Message
from proxy.dialects.chat import refusals
from proxy.dialects.chat.message import INSTRUCTION_ROLES, ChatMessage, FactsByText
from proxy.dialects.fields import RawFields, emitted, members_of, with_field, without_member
from proxy.dialects.shapes import is_array, is_object

MAX_LEVELS: Final = 200
"""Levels of JSON that one message, or one field, may have; every reader and writer here takes more."""

_KNOWN: Final = FactsByText()
"""A memo of what follows from texts alone."""
_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_NUMBER: Final = b"-0123456789"
_CONTENT: Final = "a string, an array of content parts, or null"


class ChatRequest(Struct, frozen=True, kw_only=True):
    """A request that was understood as far as it must be. Every text in it can be parsed again."""

    raw: bytes
    """The client's body."""
    fields: Mapping[str, bytes]
    """Its top-level fields in order, each as its JSON text; `messages` is one of them."""
    instructions: tuple[Message, ...]
    """The system and developer messages that lead."""
    messages: tuple[Message, ...]
    """All the others in order, our own fields included."""
    model: str
    """Empty where the client named none."""
    stream: bool
    has_tools: bool
    """Whether it offers tools, at least one."""
    tools: bytes | None
    """The JSON text of `tools`; None where it offers none."""
    wants_usage: bool | None
    """What it says in `stream_options.include_usage`; None where it says nothing about it."""
    reply_tokens: int | None = None
    """How many tokens the reply may have at most; None where it says nothing about it."""
    has_own_fields: bool = True
    """Whether any message has, or may have, fields that are ours."""


def parse_chat_request(body: bytes) -> ChatRequest:
    """Read a request. Fields, roles and content parts that are not known here pass as they are.

    Raises:
        InvalidRequest: it is no JSON object in UTF-8, nests over `MAX_LEVELS`, or a field that the
            proxy must read has the wrong type. `param` names the place.
    """
    fields, items = _split(body)
    values = {name: _value(name, text) for name, text in fields.without("messages").items()}
    facts, messages = _messages(items)
    lead = 0
    while lead < len(facts) and facts[lead].role in INSTRUCTION_ROLES:
        lead += 1
    tools = values.get("tools")
    if tools is not None and not is_array(tools):
        raise refusals.wrong_type("tools", "an array of objects", tools)
    return ChatRequest(
        raw=body,
        fields=fields,
        instructions=messages[:lead],
        messages=messages[lead:],
        model=_model(values),
        stream=_stream(values),
        has_tools=bool(tools),
        tools=fields["tools"] if tools else None,
        wants_usage=_wants_usage(values.get("stream_options")),
        reply_tokens=_reply_tokens(values),
        has_own_fields=any(each.has_own_fields for each in facts),
    )


def compose(
    request: ChatRequest,
    *,
    instructions: Sequence[Message] | None = None,
    messages: Sequence[Message] | None = None,
    add_usage: bool = False,
    drop_fields: Collection[str] = (),
    cache_key: str | None = None,
    tools: bytes | None = None,
) -> bytes:
    """Return the body to send: the client's bytes, with nothing else changed than what is asked for.

    Fields of messages that are ours never go out. If that and the arguments change nothing, the
    body is `request.raw` itself.

    Args:
        request: what the client sent.
        instructions: what is sent for its instructions; None: these.
        messages: what is sent for its messages; None: these.
        add_usage: ask for the usage of a stream, where the client says nothing about it.
        drop_fields: dotted paths of members to leave out ("metadata.session_id"), and of objects
            that are empty without them.
        cache_key: what to set `prompt_cache_key` to, where the client says nothing about it.
        tools: the JSON text of the tools to offer; None: those of the request.
    """
    changes: dict[str, bytes | None] = {}  # new texts; None: the field goes
    if request.has_own_fields or instructions is not None or messages is not None:
        asked = (
            *(request.instructions if instructions is None else instructions),
            *(request.messages if messages is None else messages),
        )
        sent = tuple([message.without_own_fields() for message in asked])
        if sent != (*request.instructions, *request.messages):
            changes["messages"] = b"[%b]" % b",".join([message.raw for message in sent])
    for path in drop_fields:
        _drop(request.fields, changes, path.split("."))
    if add_usage and request.wants_usage is None:
        changes["stream_options"] = _asking_for_usage(request.fields.get("stream_options"))
    if cache_key is not None and "prompt_cache_key" not in request.fields:
        changes["prompt_cache_key"] = msgspec.json.encode(cache_key)
    if tools is not None and tools != request.fields.get("tools"):
        changes["tools"] = tools
    if not changes:
        return request.raw
    if changes.keys() == {"stream_options"} and (options := changes["stream_options"]) is not None:
        return with_field(request.raw, request.fields, "stream_options", options)
    return emitted({**request.fields, **changes})


def read_field(request: ChatRequest, path: str) -> str | None:
    """Return the string, or the number as it is written, at a dotted path of the body; None without one."""
    first, *rest = path.split(".")
    text = request.fields.get(first)
    for name in rest:
        members = members_of(text)
        text = bytes(members[name]) if name in members else None
    if text is None:
        return None
    if text[:1] in _NUMBER:
        return text.decode()
    return cast("str", orjson.loads(text)) if text.startswith(b'"') else None


def _split(body: bytes) -> tuple[RawFields, list[msgspec.Raw]]:
    """Return the top-level fields, and the texts of the messages."""
    try:
        fields = RawFields(body)
        messages = fields.span("messages")
        if messages is None:
            raise refusals.missing("messages", "Send an array of at least one message.")
        if bytes(messages[:1]) != b"[":
            raise refusals.wrong_type("messages", "an array of objects", _value("messages", bytes(messages)))
        items = _ITEMS.decode(messages)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as why:
        raise refusals.unreadable(body) from why
    if not items:
        raise refusals.empty_messages()
    return fields, items


def _value(param: str, text: bytes) -> Any:
    """Return the value of a JSON text that is not nested too deeply."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as why:
        raise refusals.unreadable_value(param, why) from why
    # Length and number of brackets find nearly all texts to be shallow; brackets may stand in strings too.
    may_be_deep = len(text) > 2 * MAX_LEVELS and text.count(b"[") + text.count(b"{") > MAX_LEVELS
    if may_be_deep and _levels(value) > MAX_LEVELS:
        raise refusals.too_deep(param, MAX_LEVELS)
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


def _messages(items: Sequence[msgspec.Raw]) -> tuple[list[Facts], tuple[Message, ...]]:
    """Read the messages, and what is known of each; a text that was read before is not read again."""
    texts = list(map(bytes, items))
    known: list[Facts] = []
    new: list[Facts] = []
    messages: list[Message] = []
    for text, facts in zip(texts, _KNOWN.recall(texts), strict=True):
        data = None
        if facts is None:
            facts, data = _message(f"messages[{len(known)}]", text)  # noqa: PLW2901 - what was not known of it
            new.append(facts)
        known.append(facts)
        messages.append(ChatMessage(facts.raw, data, facts))
    if new:
        _KNOWN.keep(new)
    return known, tuple(messages)


def _message(param: str, raw: bytes) -> tuple[Facts, JsonObject]:
    """Read one message."""
    data = _value(param, raw)
    if not is_object(data):
        raise refusals.wrong_type(param, "an object", data)
    if "role" not in data:
        raise refusals.missing(f"{param}.role", "Give each message a role, such as 'user'.")
    if not isinstance(data["role"], str):
        raise refusals.wrong_type(f"{param}.role", "a string", data["role"])
    content = data.get("content")
    if isinstance(content, (bool, int, float)):
        raise refusals.wrong_type(f"{param}.content", _CONTENT, content)
    own = not data.keys().isdisjoint(OWN_FIELDS)
    return Facts(raw, data["role"], has_own_fields=own, has_calls=bool(data.get("tool_calls"))), data


def _model(values: Mapping[str, Any]) -> str:
    model = values.get("model", "")
    if not isinstance(model, str):
        raise refusals.wrong_type("model", "a string", model)
    if _CONTROL.search(model):
        raise refusals.control_characters("model")
    if not model and "model" in values:
        raise refusals.empty_model()
    return model


def _stream(values: Mapping[str, Any]) -> bool:
    stream = values.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise refusals.wrong_type("stream", "a boolean or null", stream)
    return bool(stream)


def _wants_usage(options: Any) -> bool | None:
    """Return what `stream_options` says of the usage; what is of the wrong type is upstream's to refuse."""
    if options is None:
        return None
    wants = options.get("include_usage") if is_object(options) else False
    return None if wants is None else bool(wants)


def _reply_tokens(values: Mapping[str, Any]) -> int | None:
    """Return the limit of the reply, by its newer name or its older one; None where it is no such number."""
    for name in ("max_completion_tokens", "max_tokens"):
        limit = values.get(name)
        if type(limit) is int and limit > 0:
            return limit
    return None


def _drop(fields: Mapping[str, bytes], changes: dict[str, bytes | None], path: Sequence[str]) -> None:
    """Note in `changes` what dropping the member at `path` does to the field that it stands in."""
    name = path[0]
    text = changes.get(name, fields.get(name))
    if name == "messages" or text is None:
        return
    left = without_member(text, path[1:])
    if left != text:
        changes[name] = left


def _asking_for_usage(options: bytes | None) -> bytes:
    """Return the `stream_options` that ask for the usage and keep what else was said."""
    return msgspec.json.encode(members_of(options) | {"include_usage": msgspec.Raw(b"true")})
