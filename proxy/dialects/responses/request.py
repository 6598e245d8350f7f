"""Parses a Responses request and composes the body that goes upstream."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, cast

import msgspec
from msgspec.structs import replace

from proxy.dialects import (
    INSTRUCTION_ROLES,
    OWN_FIELDS,
    Facts,
    JsonObject,
    KnownMessages,
    Message,
    Request,
    answer_of,
    body_id,
    hash_of,
)
from proxy.dialects.bodies import (
    are_messages_tools,
    common_fields,
    drop_members,
    missing,
    unreadable,
    value_of,
    with_changes,
    wrong_type,
)
from proxy.dialects.jsontext import ITEMS, RawFields, as_text, is_object, write
from proxy.dialects.responses.canonical import canonical
from proxy.dialects.responses.items import (
    INSTRUCTIONS,
    TURN,
    Item,
    Placed,
    is_by_model,
    is_call,
    kind_of,
    role_of,
    turn_of,
)
from proxy.errors import InvalidRequest

STATE_FIELDS: Final = ("previous_response_id", "conversation")
"""Fields that name a state at the provider. A request with one of them sends only what is new."""
LATER: Final = "made in the background: its output is stored once the client fetches it"
"""The receipt's note about a request whose reply comes later."""
_LISTED: Final = "input"
_KNOWN: Final = KnownMessages()
"""A cache of facts that depend on a text alone."""


def parse_responses_request(body: bytes, before: Request | None = None, kept: int = 0) -> Request:
    """Read a request; see `RequestSide.parse`."""
    del before, kept  # not supported: `Request.ends` is empty
    try:
        fields = RawFields(body)
        given = fields.get(_LISTED, b"null")
        items = ITEMS.decode(given) if given.startswith(b"[") else []
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as why:
        raise unreadable(body, _LISTED) from why
    values = {name: value_of(name, text) for name, text in fields.without(_LISTED).items()}
    messages = tuple(_entries(_input(fields, given, items, values)))
    lead = next((at for at, each in enumerate(messages) if each.role not in INSTRUCTION_ROLES), len(messages))
    instructions = messages[:lead]
    told = values.pop("instructions", None)
    if told is not None and not isinstance(told, str):
        raise wrong_type("instructions", "a string", told)
    if told:
        raw = b'{"type":"%b","role":"system","content":%b}' % (INSTRUCTIONS.encode(), fields["instructions"])
        instructions = (_with_facts(raw), *instructions)
    return _request(body, fields, values, instructions, messages[lead:])


def _input(fields: RawFields, given: bytes, items: Sequence[msgspec.Raw], values: Mapping[str, Any]) -> list[bytes]:
    """Return the texts of the request's items, after checking `input`. A string is a user's message."""
    if given.startswith(b'"'):
        value_of(_LISTED, given)
        return [b'{"type":"message","role":"user","content":%b}' % given]
    if given != b"null" and not given.startswith(b"["):
        value = value_of(_LISTED, given)
        raise wrong_type(_LISTED, "one of a string or array of input items", value)
    if not items and not any(values.get(name) for name in (*STATE_FIELDS, "prompt")):
        if given != b"null":
            raise InvalidRequest(
                "Invalid 'input': empty array. Expected an array with minimum length 1, but got an empty one instead.",
                param=_LISTED,
                code="empty_array",
            )
        if "messages" in fields:
            told = "system" in fields or "anthropic_version" in fields or are_messages_tools(values.get("tools"))
            path = "/v1/messages" if told else "/v1/chat/completions"
            raise missing(_LISTED, f"A request with `messages` belongs to {path}.")
        raise missing(_LISTED, "Send a string, or an array of at least one item.")
    return list(map(bytes, items))


def _entries(raws: Sequence[bytes]) -> list[Item]:
    entries: list[Item] = []
    turn: list[bytes] = []
    for at, raw in enumerate(raws):
        known = _KNOWN.recall([raw])[0]
        role = known.role if known is not None else None
        if role is None:
            item = value_of(f"{_LISTED}[{at}]", raw)
            _check(item, f"{_LISTED}[{at}]")
            if is_by_model(item):
                role = "assistant"
                _KNOWN.put(raw, Facts(raw=raw, role=role, has_own_fields=False, has_calls=False))
        if role == "assistant":
            turn.append(raw)
            continue
        if turn:
            entries.append(_with_facts(turn_of(turn)))
            turn = []
        entries.append(_with_facts(raw))
    return [*entries, _with_facts(turn_of(turn))] if turn else entries


def _check(item: Any, param: str) -> None:
    if not is_object(item):
        raise wrong_type(param, "an object", item)
    for name in ("type", "role"):
        if item.get(name) is not None and not isinstance(item[name], str):
            raise wrong_type(f"{param}.{name}", "a string", item[name])
    if not kind_of(item):
        raise missing(f"{param}.type", "Give each item a type, or a role.")
    if kind_of(item) in {TURN, INSTRUCTIONS}:  # forms of the proxy's own
        raise InvalidRequest(f"Invalid value: '{item['type']}'.", param=f"{param}.type", code="invalid_value")
    content = item.get("content")
    if isinstance(content, (bool, int, float)):
        raise wrong_type(f"{param}.content", "a string, or an array of content parts", content)


def _with_facts(raw: bytes) -> Item:
    """Return the entry with this text and its facts. A known text is not read again."""
    facts, data = _KNOWN.recall([raw])[0], None
    if facts is None:
        entry = Item(raw)
        data = entry.data
        items = entry.items
        facts = Facts(
            raw=raw,
            role=role_of(data),
            has_own_fields=any(not item.keys().isdisjoint(OWN_FIELDS) for item in items),
            has_calls=any(map(is_call, items)),
            content=hash_of(canonical(entry)),
            body=body_id(raw),
            reshaped=entry.is_turn and answer_of(entry.text).lstrip().startswith("{"),
        )
        _KNOWN.put(raw, facts)
    return Item(facts.raw, data, facts)


def _request(
    body: bytes, fields: RawFields, values: dict[str, Any], instructions: tuple[Item, ...], messages: tuple[Item, ...]
) -> Request:
    common = common_fields(body, fields, values)
    limit, state = values.get("max_output_tokens"), _state_of(values)
    turns = [item for message in messages if message.role == "assistant" for item in message.items]
    references = _ids([item for item in turns if _is_kept(item)])
    return Request(
        **common,
        instructions=instructions,
        messages=messages,
        wants_usage=True,  # usage is always included
        reply_tokens=limit if type(limit) is int and limit > 0 else None,
        replies=tuple([at for at, each in enumerate(messages) if each.role == "assistant"]),
        has_own_fields=any([each.facts is None or each.facts.has_own_fields for each in (*instructions, *messages)]),
        untouched=bool(state),
        state=state,
        conversation="" if values.get(STATE_FIELDS[0]) else state,
        references=(state, *references) if state else references,
        notes=(LATER,) if values.get("background") is True and not common["stream"] else (),
        pointers=_ids([item for item in turns if kind_of(item) == "item_reference"]),
    )


def resolved(request: Request, replies: Sequence[Message]) -> Request:
    """Return a request with its references replaced by the items of these replies that they name.

    It is placed and trimmed as if the client had sent the items. If nothing changes, the client's own bytes are sent.
    """
    items = [each for reply in cast("Sequence[Item]", replies) for each in zip(reply.items, reply.raws, strict=True)]
    held = {name: raw for item, raw in items if isinstance(name := item.get("id"), str)}

    def item_of(each: Placed) -> bytes:
        name = each.item.get("id")
        return held.get(name, each.raw) if each.kind == "item_reference" and isinstance(name, str) else each.raw

    messages: list[Message] = []
    for each in cast("Sequence[Item]", request.messages):
        made = each.keeping(item_of) if each.role == "assistant" else each
        messages.append(each if made is each else _with_facts(made.raw))
    return replace(request, messages=tuple(messages))


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
    del add_usage  # usage is always included
    changes: dict[str, bytes | None] = {}  # new texts; None removes the field
    lead = request.instructions if instructions is None else instructions
    sent = tuple(
        [message.without_own_fields() for message in (*lead, *(request.messages if messages is None else messages))]
    )
    if sent != (*request.instructions, *request.messages):
        told = [message for message in sent if message.is_field]
        if told != [message for message in request.instructions if message.is_field]:
            changes["instructions"] = write("\n\n".join([message.text for message in told])) if told else None
        listed = [message for message in sent if not message.is_field]
        if request.parameters.get("store") is False:
            listed = [kept for message in listed if (kept := _without_unkept(message)) is not None]
        if listed != [message for message in (*request.instructions, *request.messages) if not message.is_field]:
            changes[_LISTED] = b"[%b]" % b",".join([raw for message in listed for raw in message.listed])
    drop_members(changes, request, drop_fields, but=(_LISTED, "instructions"))
    if cache_key is not None and "prompt_cache_key" not in request.fields:
        changes["prompt_cache_key"] = msgspec.json.encode(cache_key)
    return with_changes(request, changes, tools)


def _without_unkept(message: Message) -> Message | None:
    """Return an entry in a form for a provider that keeps nothing: reasoning needs its encrypted content.

    Stored entries may come from requests that the provider did keep.
    """
    if not isinstance(message, Item) or message.role != "assistant":
        return message
    unkept = any(kind_of(item) == "reasoning" and not item.get("encrypted_content") for item in message.items)
    return message.without_reasoning() if unkept else message


def _state_of(values: Mapping[str, Any]) -> str:
    """Return the id of the state that a request continues; "" if there is none."""
    previous, conversation = (values.get(name) for name in STATE_FIELDS)
    return as_text(previous or (conversation.get("id") if is_object(conversation) else conversation))


def _ids(items: Sequence[JsonObject]) -> tuple[str, ...]:
    return tuple([name for item in items if isinstance(name := item.get("id"), str)])


def _is_kept(item: JsonObject) -> bool:
    """Tell whether an item depends on what the provider keeps: a reference, or reasoning without encrypted content."""
    return kind_of(item) == "item_reference" or (kind_of(item) == "reasoning" and not item.get("encrypted_content"))
