"""Parses a Messages request and composes the body that goes upstream.

The system prompt, a string or blocks, is read as one instruction: {"role": "system", "content": …}.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from proxy.dialects import OWN_FIELDS, Facts, JsonObject, KnownMessages, Message, Request, body_id, hash_of
from proxy.dialects.bodies import common_fields, drop_members, missing, split, value_of, with_changes, wrong_type
from proxy.dialects.jsontext import RawFields, as_array, as_object, as_text, is_array, is_object, write
from proxy.dialects.messages.cache_marks import EPHEMERAL, MOST_MARKS, marks_beside, marks_in
from proxy.dialects.messages.canonical import canonical, first_canonical
from proxy.dialects.messages.message import MARK, MessagesMessage, blocks_of, is_call, role_of
from proxy.errors import InvalidRequest

MANAGED: Final = "context_management is left to the provider: what it edits there is not in the plan"
"""The receipt's note about a request that also makes the provider trim."""

_KNOWN: Final = KnownMessages()
"""A cache of facts that depend on a message's text alone."""
_ELSEWHERE: Final = "This is a body for {}: send it there. At /v1/messages the Messages API of Anthropic is spoken."
_OF_CHAT: Final = frozenset({"developer", "tool", "function"})  # roles of Chat Completions that this API does not have

_UNBOUND: Final = re.compile(r"claude-(?:3|[a-z]+-4)\b")
"""Names of older models, which accept their thinking after any history."""


def parse_messages_request(body: bytes, before: Request | None = None, kept: int = 0) -> Request:  # noqa: ARG001 - read whole
    """Read a request; see `RequestSide.parse`."""
    elsewhere = _ELSEWHERE.format("/v1/responses")
    fields, items = split(body, elsewhere=elsewhere, empty="Send at least one message.")
    values = {name: value_of(name, text) for name, text in fields.without("messages").items()}
    facts, messages = _messages(items)
    _refuse_other_apis(values, messages)
    common = common_fields(body, fields, values)
    limit = values["max_tokens"]
    if type(limit) is not int:
        raise wrong_type("max_tokens", "an integer", limit)
    system, thread = values.pop("system", None), values.get("thread")
    # The reply that a message thread continues. The provider holds the thread's system prompt, tools and messages.
    state = as_text(as_object(thread).get("previous_message_id"))
    if not (system is None or isinstance(system, str) or is_array(system)):
        raise wrong_type("system", "a string, or an array of text blocks", system)
    return Request(
        **common,
        instructions=(MessagesMessage(b'{"role":"system","content":%b}' % fields["system"]),) if system else (),
        messages=messages,
        wants_usage=True,  # usage is always included
        reply_tokens=limit if limit > 0 else None,
        replies=tuple([at for at, each in enumerate(facts) if each.role == "assistant"]),
        has_own_fields=any([each.has_own_fields for each in facts]),
        # The older way to enable thinking. With it, a reply in the middle of a tool loop begins with thinking.
        keeps_loop=as_object(values.get("thinking")).get("type") == "enabled",
        binds_loop=_UNBOUND.search(common["model"]) is None,
        untouched=bool(state) or as_object(thread).get("type") == "continue",
        state=state,
        references=(state,) if state else (),
        keeps_reply=is_object(thread),
        notes=(MANAGED,) if _manages(values.get("context_management")) else (),
    )


def _manages(asked: Any) -> bool:
    """Tell whether the provider is asked to edit anything. Claude Code always sends an edit that keeps all thinking."""
    edits = as_object(asked).get("edits")
    return bool(asked) and not (is_array(edits) and all(as_object(each).get("keep") == "all" for each in edits))


def compose(
    request: Request,
    *,
    instructions: Sequence[Message] | None = None,
    messages: Sequence[Message] | None = None,
    add_usage: bool = False,  # noqa: ARG001 - usage is always included
    drop_fields: Collection[str] = (),
    cache_key: str | None = None,  # noqa: ARG001 - the API has none
    cache_newest: bool = False,
    tools: bytes | None = None,
) -> bytes:
    """Return the body to send; see `RequestSide.compose`.

    If messages change, leading system messages are moved to the system prompt, and the client's cache marks are
    restored, up to the maximum of the API. `cache_newest` lets the provider mark the newest message, if the client
    marks nothing and the history has a reply. The messages themselves then stay unchanged.
    """
    changes: dict[str, bytes | None] = {}  # new texts; None removes the field
    lead = request.instructions if instructions is None else tuple(instructions)
    sent = request.messages if messages is None else tuple(messages)
    if request.has_own_fields or messages is not None:
        sent = tuple([message.without_own_fields() for message in sent])
    if sent != request.messages:
        while sent and sent[0].role == "system":
            lead, sent = (*lead, sent[0]), sent[1:]
        sent = _remarked(request, sent, lead)
        changes["messages"] = b"[%b]" % b",".join([message.raw for message in sent])
    if cache_newest and _leaves_marks(request, (*lead, *sent)):
        changes[MARK] = EPHEMERAL
    if lead != request.instructions:
        changes["system"] = _system_of(lead)
    drop_members(changes, request, drop_fields, but=("messages",))
    return with_changes(request, changes, tools)


def _remarked(request: Request, sent: Sequence[Message], lead: Sequence[Message]) -> tuple[Message, ...]:
    """Return changed messages with the client's cache marks restored where rewriting removed them.

    Stored messages carry marks of earlier requests. If there are more marks than the API accepts, the oldest
    are removed first. Messages that are exactly as the client sent them lose theirs last.
    """
    own = [message for message in cast("Sequence[MessagesMessage]", request.messages) if message.has_marks]
    moved = {answered: mark for message in own if (mark := message.mark()) for answered in message.answered[:1]}
    last = own[-1].mark() if own and own[-1] is request.messages[-1] else None
    marked = list(cast("Sequence[MessagesMessage]", sent))
    counts = [0] * len(marked)
    for place, message in enumerate(marked):
        if message.has_marks:
            counts[place] = marks_in(message.data)
            continue
        mark = moved.get(message.answered[0]) if moved and message.answered else None
        if mark is None and place == len(sent) - 1:
            mark = last
        if mark is not None and (new := message.with_mark(mark)) is not None:
            marked[place], counts[place] = new, 1
    excess = sum(counts) + marks_beside(request.fields) + sum(marks_in(each.data) for each in lead) - MOST_MARKS
    if excess > 0:
        texts = {message.raw for message in own}
        places = [place for place, count in enumerate(counts) if count]
        for place in sorted(places, key=lambda place: marked[place].raw in texts):
            if excess > 0:
                marked[place] = marked[place].without_marks()
                excess -= counts[place]
    return tuple(marked)


def _leaves_marks(request: Request, sent: Sequence[Message]) -> bool:
    """Tell whether the client marks nothing, the messages hold a reply, and one more mark fits."""
    own = cast("Sequence[MessagesMessage]", (*request.instructions, *request.messages))
    if marks_beside(request.fields) or any(message.has_marks for message in own):
        return False
    counts = [marks_in(message.data) for message in cast("Sequence[MessagesMessage]", sent) if message.has_marks]
    return sum(counts) < MOST_MARKS and any(message.role == "assistant" for message in sent)


def _system_of(instructions: Sequence[Message]) -> bytes:
    """Return the system prompt for these instructions: one keeps its text, several are joined."""
    if len(instructions) == 1:
        return RawFields(instructions[0].raw)["content"]
    contents: list[Any] = [message.data.get("content") for message in instructions]
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return write("\n\n".join(texts))
    return write([block for message in instructions for block in blocks_of(message.data)])


def _messages(items: Sequence[msgspec.Raw]) -> tuple[list[Facts], tuple[MessagesMessage, ...]]:
    return _KNOWN.messages(list(map(bytes, items)), MessagesMessage, lambda at, text: _message(f"messages[{at}]", text))


def _message(param: str, raw: bytes) -> tuple[Facts, JsonObject]:
    data = value_of(param, raw)
    if not is_object(data):
        raise wrong_type(param, "an object", data)
    if as_text(data.get("role")) in _OF_CHAT or data.get("tool_calls"):
        raise _of_chat()
    for name in ("role", "content"):
        if name not in data:
            raise missing(f"{param}.{name}", "Give each message a role and a content.")
    if not isinstance(data["role"], str):
        raise wrong_type(f"{param}.role", "a string", data["role"])
    content = data["content"]
    if not (isinstance(content, str) or is_array(content)):
        raise wrong_type(f"{param}.content", "a string, or an array of content blocks", content)
    for place, block in enumerate(as_array(content)):
        if not is_object(block):
            raise wrong_type(f"{param}.content[{place}]", "an object", block)
    form = canonical(data)
    facts = Facts(
        raw=raw,
        role=role_of(data),
        has_own_fields=not data.keys().isdisjoint(OWN_FIELDS),
        has_calls=any(map(is_call, blocks_of(data))),
        content=hash_of(form),
        body=body_id(raw),
        reshaped=data["role"] == "assistant" and form != first_canonical(data),
    )
    return facts, data


def _of_chat() -> InvalidRequest:
    return InvalidRequest(_ELSEWHERE.format("/v1/chat/completions"), code="wrong_endpoint")


def _refuse_other_apis(values: Mapping[str, Any], messages: Sequence[Message]) -> None:
    """Raise `InvalidRequest` for a request of Chat Completions."""
    functions = any("function" in as_object(tool) for tool in as_array(values.get("tools")))
    if functions or messages[0].role == "system":
        raise _of_chat()
    if "max_tokens" not in values:
        advice = "Say how long the reply may be. A request for a chat completion belongs to /v1/chat/completions."
        raise missing("max_tokens", advice)
