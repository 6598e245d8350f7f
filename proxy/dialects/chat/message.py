"""A Chat Completions message: reads its JSON, and rewrites it field by field."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

import msgspec

from proxy.dialects.base import (
    Attachment,
    Call,
    Countable,
    Dialect,
    JsonObject,
    Message,
    ReasoningMode,
    Ties,
    one_line,
    sized,
    written,
)
from proxy.dialects.jsontext import (
    FIELDS,
    ITEMS,
    as_array,
    as_object,
    as_text,
    is_array,
    is_object,
    is_object_text,
    write,
)

RESULT_ROLES: Final = frozenset({"tool", "function"})
"""Roles of the messages that carry the result of a tool; `function` is the deprecated form."""

_EMPTY_PARTS: Final = [{"type": "text", "text": ""}]
_IMAGES: Final = frozenset({"image_url", "input_image", "image"})
_MEDIA: Final = _IMAGES | {"audio_url", "input_audio", "video_url", "file", "input_file"}
"""Types of parts that hold binary data (base64, a `data:` URL) or a URL instead of text."""
_PLAIN: Final = frozenset({"role", "content"})  # the fields of a message that has nothing beside its content

_MOST_IDS: Final = 16  # maximum call ids that are cached for one text; a text with more is read again
_RESPONSE_ONLY: Final = ("refusal", "annotations", "audio", "function_call", "tool_calls", "content")
"""Fields that a reply may carry as null or empty, but a request only with a value."""
_SENT_BACK_BESIDE_CALLS: Final = ("reasoning_content", "reasoning")
"""Reasoning that providers want back beside tool calls, and refuse or ignore elsewhere."""
_REASONING: Final = (*_SENT_BACK_BESIDE_CALLS, "reasoning_details", "thinking_blocks")

_BOUND: Final = ("reasoning_details", "thinking_blocks")
"""Signed or encrypted reasoning: providers accept it only if everything before it is unchanged. Plain text is not."""

_SCHEME: Final = 16  # a URL has its scheme within so many characters; anything else is base64
_HELD: Final = ("url", "data", "file_data", "file_id")  # members in which a part may hold its data or address


class ChatTies(Ties, frozen=True, kw_only=True):
    """What a message's span, and the rules of the API, depend on."""

    answers: str | None = None  # the id of the call that a tool result answers
    legacy_call: bool = False  # whether an assistant message holds a `function_call`
    names_calls: bool = False  # whether an assistant message has any `tool_calls` other than null
    has_content: bool = False  # whether an assistant message has anything under `content`, `refusal` or `audio`


class ChatMessage(Message):
    """One message of the Chat Completions API."""

    __slots__ = ()

    dialect: ClassVar[Dialect]

    # ------------------------------------------------------------------------------------- reading

    @property
    def role(self) -> str:
        if self.facts is not None:
            return self.facts.role
        role = self.data.get("role")
        return role if isinstance(role, str) else ""

    @property
    def text(self) -> str:
        return text_of(self.data.get("content"))

    @property
    def texts(self) -> tuple[str, ...]:
        content = self.data.get("content")
        return tuple([text_of([part]) for part in content]) if is_array(content) else (text_of(content),)

    @property
    def plain_text(self) -> str | None:
        content = self.data.get("content")
        if is_array(content) and not all(is_object(part) and part.get("type") == "text" for part in content):
            return None
        return text_of(content)

    def _read_calls(self) -> Iterator[Call]:
        # The items of `tool_calls` in order, then the `function_call`, if any.
        if self.role != "assistant":
            return
        yield from map(_call, as_array(self.data.get("tool_calls")))
        if is_object(function := self.data.get("function_call")):
            name, arguments = _called(function, "arguments")
            yield Call(id="", name=name, arguments=arguments, legacy=True)

    @property
    def ties(self) -> ChatTies:
        """Its relations to other messages, cached with the facts about its text."""
        if self._ties is None:
            facts = self.facts
            known: ChatTies | None = facts.ties if facts is not None else None
            self._ties = made = known or _ties(self)
            if facts is not None and known is None and len(made.ids) <= _MOST_IDS:
                facts.ties = made
        ties: ChatTies = self._ties
        return ties

    @property
    def is_result(self) -> bool:
        return self.role in RESULT_ROLES

    @property
    def answers(self) -> str | None:
        return self.ties.answers

    def answers_call(self, call: Call) -> bool:
        return self.role == "function" if call.legacy else super().answers_call(call)

    @property
    def has_content(self) -> bool:
        content = self.data.get("content")
        if content == _EMPTY_PARTS or (isinstance(content, str) and not content.strip()):
            content = None
        return bool(content or self.data.get("refusal") or self.data.get("audio"))

    @property
    def has_reasoning(self) -> bool:
        return self.role == "assistant" and any(self.data.get(name) for name in _REASONING)

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        parts = enumerate(as_array(self.data.get("content")))
        return tuple([_attachment(at, part) for at, part in parts if _holds_no_text(part)])

    @property
    def display_text(self) -> str:
        said = [self.text, self.data.get("refusal"), as_object(self.data.get("audio")).get("transcript")]
        said += [as_object(part).get("refusal") for part in as_array(self.data.get("content"))]
        return "\n".join([text for text in said if isinstance(text, str) and text])

    def all_texts(self) -> Iterator[str]:
        yield from super().all_texts()
        for name in ("name", "agent", "refusal"):
            if value := self.data.get(name):
                yield str(value)

    def countable(self) -> Countable:
        data = self.data
        content = data.get("content")
        texts: list[str] = []
        media = small_images = 0
        reasoning = ""
        if isinstance(content, str):
            texts.append(content)
        elif is_array(content):
            media, small_images = _count_media(content, texts)
        elif content is not None:
            texts.append(write(content).decode())
        if not data.keys() <= _PLAIN:
            beside = [data.get("name"), data.get("refusal")]
            for call in self.calls:
                beside += [call.name, call.arguments]
            texts += [text for text in beside if isinstance(text, str) and text]
            for name in _SENT_BACK_BESIDE_CALLS:
                thought = data.get(name)
                if not reasoning and isinstance(thought, str):
                    reasoning = thought
        return Countable(texts=tuple(texts), media=media, small_images=small_images, reasoning=reasoning)

    def readable(self) -> str:
        text = self.display_text
        lines = [text] if text else []
        for at, part in enumerate(as_array(self.data.get("content"))):
            if not is_object(part):
                lines.append(f"[{write(part).decode()}]")
            elif not isinstance(part.get("refusal"), str) and _holds_no_text(part):
                lines.append(_attachment(at, part).line)
        lines += self._call_lines()
        return "\n".join(lines)

    # ------------------------------------------------------------------------------------ rewriting

    def with_texts(self, texts: Sequence[str | None]) -> ChatMessage:
        content = self.data.get("content")
        if not is_array(content):
            return self.replacing("content", texts[0])
        parts = [
            {**part, "text": text} if text_of([part]) else part
            for part, text in zip(content, texts, strict=True)
            if text is not None
        ]
        return self.replacing("content", parts)

    def with_appended(self, text: str) -> ChatMessage:
        content = self.data.get("content")
        if is_array(content):
            return self.replacing("content", [*content, {"type": "text", "text": text}])
        return self.replacing("content", f"{content}\n\n{text}" if isinstance(content, str) else text)

    def with_calls(self, kept: Collection[int]) -> ChatMessage:
        # If no calls are left, the field is removed: providers refuse an empty array.
        fields = FIELDS.decode(self.raw)
        number = len(as_array(self.data.get("tool_calls")))
        if number:
            left = [raw for at, raw in enumerate(ITEMS.decode(fields["tool_calls"])) if at in kept]
            if left:
                fields["tool_calls"] = msgspec.Raw(msgspec.json.encode(left))
            else:
                del fields["tool_calls"]
        if number not in kept:
            fields.pop("function_call", None)
        return ChatMessage(msgspec.json.encode(fields))

    def with_arguments(self, arguments: Sequence[str]) -> ChatMessage:
        message, items = self, self.data.get("tool_calls")
        if is_array(items):
            changed = [_with_arguments(item, text) for item, text in zip(items, arguments, strict=False)]
            message = message.replacing("tool_calls", changed)
        function = self.data.get("function_call")
        if is_object(function) and isinstance(function.get("arguments"), str):
            message = message.replacing("function_call", {**function, "arguments": arguments[-1]})
        return message

    def with_ids(self, names: Sequence[str]) -> ChatMessage:
        """Return it with new ids in its `tool_calls`, one for each."""
        named = zip(self.data["tool_calls"], names, strict=True)
        return self.replacing("tool_calls", [{**item, "id": name} for item, name in named])

    def with_notes(self, notes: Mapping[int, str]) -> ChatMessage:
        content = list(self.data["content"])
        for place, note in notes.items():
            content[place] = {"type": "text", "text": note}
        return self.replacing("content", content)

    def without_unfinished_calls(self) -> ChatMessage:
        changed = without_unfinished_calls(self.data)
        return self if changed is self.data else ChatMessage.of(changed)

    def as_request(self, reasoning: ReasoningMode, *, partial: bool) -> ChatMessage:
        # `auto` keeps reasoning beside tool calls, and in the forms that exist only to be sent back.
        data = self.data
        changed: JsonObject = without_unfinished_calls(data) if partial else data
        dropped: set[str] = {name for name in _RESPONSE_ONLY if name in changed and not changed[name]}
        has_calls = bool(changed.get("tool_calls"))
        if "content" in dropped and (changed["content"] == "" or has_calls or changed.get("function_call")):
            dropped.discard("content")  # the API itself returns an empty string, or null beside calls
        if "annotations" in changed:
            dropped.add("annotations")
        if reasoning == "drop":
            dropped.update(name for name in _REASONING if name in changed)
        elif reasoning == "auto" and not has_calls:
            dropped.update(name for name in _SENT_BACK_BESIDE_CALLS if name in changed)
        calls, audio = as_array(changed.get("tool_calls")), as_object(changed.get("audio"))
        if (completed := [_completed(call) for call in calls]) != calls:
            changed = {**changed, "tool_calls": completed}
        if len(audio) > 1 and "id" in audio:
            changed = {**changed, "audio": {"id": audio["id"]}}
        if changed is data:
            return self.without(*dropped) if dropped else self
        return ChatMessage.of({name: value for name, value in changed.items() if name not in dropped})

    def without_reasoning(self) -> ChatMessage:
        may_be_bound = self.role == "assistant" and any(b'"%b"' % name.encode() in self.raw for name in _BOUND)
        return self.without(*_BOUND) if may_be_bound else self


def _completed(call: Any) -> Any:
    """Return a call of a function with the fields that some servers leave out and requests need."""
    function = as_object(call).get("function")
    if not is_object(function):
        return call
    function = function if function.get("arguments") is not None else {**function, "arguments": "{}"}
    return {**call, "type": call.get("type") or "function", "function": function}


def _count_media(parts: Sequence[Any], texts: list[str]) -> tuple[int, int]:
    """Return the number of media parts and of images in low detail. Append the text of the other parts to `texts`."""
    media = small_images = 0
    for part in parts:
        kind = as_text(as_object(part).get("type"))
        if kind in _MEDIA:
            image = part.get("image_url")
            small = (image if is_object(image) else part).get("detail") == "low"
            small_images += small
            media += not small
        elif kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            text, held = written(part)
            texts.append(text)
            media += held
    return media, small_images


def text_of(content: Any) -> str:
    """Return the text of a `content` value: a string itself, or the `text` parts of a list joined."""
    if isinstance(content, str):
        return content
    return "".join([as_text(as_object(part).get("text")) for part in as_array(content)])


def has_calls(data: JsonObject) -> bool:
    """Tell whether the parsed JSON of a message may hold calls."""
    return bool(data.get("tool_calls")) or is_object(data.get("function_call"))


def without_unfinished_calls(message: JsonObject) -> JsonObject:
    """Return an interrupted reply without its incomplete calls; the same object if there are none.

    A call is complete if it has an id, a name, and arguments that are a JSON object. Nothing marks the end of a custom
    call's free text, so a custom call is complete only if another call follows it.
    """
    calls, function = message.get("tool_calls"), message.get("function_call")
    dropped: set[str] = set()
    kept: list[Any] = []
    if is_array(calls):
        kept = [call for i, call in enumerate(calls) if _is_whole(call, is_last=i == len(calls) - 1)]
        if not kept:
            dropped.add("tool_calls")
    if function is not None and not _is_whole_function(function):
        dropped.add("function_call")
    if not dropped and (not is_array(calls) or len(kept) == len(calls)):
        return message
    changed = {"tool_calls": kept} if kept else {}
    return {name: changed.get(name, value) for name, value in message.items() if name not in dropped}


def _is_whole(call: Any, *, is_last: bool) -> bool:
    if not is_object(call) or not call.get("id"):
        return False
    if call.get("type") == "custom":
        return bool(as_object(call.get("custom")).get("name")) and not is_last
    return _is_whole_function(call.get("function"))


def _is_whole_function(function: Any) -> bool:
    arguments = as_object(function).get("arguments")
    return bool(as_object(function).get("name")) and (is_object(arguments) or is_object_text(arguments))


def _ties(message: ChatMessage) -> ChatTies:
    """Read the ties of a message, whatever it holds."""
    role = message.role
    if role == "tool":
        answered = message.data.get("tool_call_id")
        return ChatTies(role=role, answers=answered if isinstance(answered, str) else None)
    if role != "assistant":
        return ChatTies(role=role)
    data = message.data
    ids = tuple([call.id for call in message.calls if not call.legacy])
    legacy_call = is_object(data.get("function_call"))
    followers = [*(["tool"] if ids else []), *(["function"] if legacy_call else [])]
    return ChatTies(
        role=role,
        ids=ids,
        followers=frozenset(followers),
        legacy_call=legacy_call,
        names_calls=data.get("tool_calls") is not None,
        has_content=data.get("content") not in (None, []) or bool(data.get("refusal") or data.get("audio")),
    )


def _call(item: Any) -> Call:
    """Read one item of `tool_calls`, whatever it is. Missing values become empty strings."""
    call = as_object(item)
    custom = call.get("type") == "custom"
    kind, argument = ("custom", "input") if custom else ("function", "arguments")
    name, arguments = _called(as_object(call.get(kind)), argument)
    return Call(id=as_text(call.get("id")), name=name, arguments=arguments, custom=custom)


def _called(inner: JsonObject, argument: str) -> tuple[str, str]:
    arguments = inner.get(argument)
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else write(arguments).decode()
    return as_text(inner.get("name")), arguments


def _with_arguments(item: Any, text: str) -> Any:
    """Return an item of `tool_calls` with new arguments. An item without arguments stays."""
    for kind, argument in (("function", "arguments"), ("custom", "input")):
        called = as_object(as_object(item).get(kind))
        if isinstance(called.get(argument), str):
            return {**item, kind: {**called, argument: text}}
    return item


def _holds_no_text(part: Any) -> bool:
    if not is_object(part):
        return False
    return part.get("type") != "text" and not isinstance(part.get("text"), str) and "refusal" not in part


def _attachment(place: int, part: JsonObject) -> Attachment:
    named = one_line(as_text(part.get("type")) or "part")
    inner: Any = part.get(named) or part.get("source") or part
    return Attachment(place=place, kind=named, is_image=named in _IMAGES, description=_described(inner))


def _described(inner: Any) -> str:
    """Describe an image, a file or a sound: its type and size, or its URL."""
    about = as_object(inner)
    kind: Any = about.get("media_type") or about.get("format") or about.get("filename")
    held: Any = next((about[name] for name in _HELD if isinstance(about.get(name), str)), inner)
    if not isinstance(held, str):
        return "no address"
    head, _, data = held.partition(",")
    if head.startswith("data:"):
        kind, held = head.removeprefix("data:").partition(";")[0], data
    elif "://" in head[:_SCHEME]:
        return one_line(held)
    return sized(kind, held)
