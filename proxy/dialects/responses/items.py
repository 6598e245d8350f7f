"""One entry of a Responses conversation: a single item, or everything that the model wrote in a row.

    {"type": "message", "role": "user", "content": …}         an item, as it arrived
    {"type": "function_call_output", "call_id": …}            a tool result
    {"type": "turn", "items": [reasoning, message, calls …]}  one turn of the model: its items, each with its bytes
    {"type": "instructions", "role": "system", "content": …}  the field `instructions` of a request

A model's turn is one entry because its items belong together: a reasoning item may not stand without the item after
it, and parallel calls are answered together. The last two forms are the proxy's own. They never go upstream.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, TypeGuard

from msgspec import Struct

from proxy.dialects.base import (
    OWN_FIELDS,
    Attachment,
    Call,
    Countable,
    Dialect,
    Facts,
    JsonObject,
    Message,
    ReasoningMode,
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
    with_value,
    without_fields,
    write,
)

_APPROVAL: Final = "mcp_approval_request"
TURN: Final = "turn"
INSTRUCTIONS: Final = "instructions"
CALLS: Final = {
    "function_call": "function_call_output",
    "custom_tool_call": "custom_tool_call_output",
    "computer_call": "computer_call_output",
    "local_shell_call": "local_shell_call_output",
    "shell_call": "shell_call_output",
    "apply_patch_call": "apply_patch_call_output",
    "tool_search_call": "tool_search_output",
    _APPROVAL: "mcp_approval_response",
}
"""Calls that the client may answer, with the type of the result. `is_call` excludes those that the provider answers."""
RESULTS: Final = frozenset(CALLS.values())
_FIXED: Final = frozenset({"computer_call_output", "tool_search_output", "mcp_approval_response"})
"""Results whose output cannot be replaced by a text."""
_MORE_THAN_TEXT: Final = _FIXED | {"shell_call_output", "apply_patch_call_output"}
"""Results that hold more than a text. Those of a command or a patch have a field for how it ended."""
_IMAGE: Final = "image_generation_call"  # its `result` is an image in base64
_HOSTED: Final = frozenset(
    {
        *("file_search_call", "web_search_call", "code_interpreter_call", _IMAGE, "mcp_call"),
        *("mcp_list_tools", "tool_search_call", "tool_search_output", "program", "program_output"),
    }
)
"""Items that the provider runs itself; they hold call and result."""
_COMPACTIONS: Final = frozenset({"compaction", "compaction_summary"})
_NAMED: Final = _COMPACTIONS | {"message", "item_reference"}  # items that are recognised by their ids
_LASTING: Final = _COMPACTIONS | {"additional_tools", "configuration_update"}
_LASTING_MARKS: Final = (b'"compaction', b'"additional_tools"', b'"configuration_update"')  # in the text of such items
MODEL_MADE: Final = frozenset({*CALLS, *_HOSTED, *_COMPACTIONS, "reasoning", "item_reference"})
_OF_CLIENTS: Final = frozenset({"additional_tools", "configuration_update", "compaction_trigger"})
"""Items that the client adds, possibly with an id."""
_NAMED_BY: Final = ("call_id", "approval_request_id")  # fields in which a result names the call that it answers
_REPLIED: Final = 4  # maximum items of a reply that is looked for at the end of a turn
_ARGUMENTS: Final = {"function_call": "arguments", "custom_tool_call": "input"}
_UNTOLD: Final = ("type", "id", "call_id", "status", "encrypted_content")
"""Fields of an item that are not shown to a reader."""
_TEXTS: Final = ("input_text", "output_text", "text")
_STREAMS: Final = ("stdout", "stderr")  # the output of a shell command
_GIVEN: Final = ("action", "actions", "operation")  # the fields for the arguments of a call whose tool has no name
_IMAGES: Final = ("input_image", "computer_screenshot")
_HELD: Final = ("image_url", "file_url", "file_id", "filename", "file_data")  # may hold a part's data or its address


def kind_of(item: JsonObject) -> str:
    """Return the type of an item. Messages and references may leave it out."""
    kind = item.get("type")
    if isinstance(kind, str):
        return kind
    return "message" if "role" in item else "item_reference" if item.keys() == {"id"} else ""


def is_by_model(item: JsonObject) -> bool:
    """Tell whether the model wrote an item. A reference usually names an item that it wrote.

    An item of an unknown type counts as the model's if it has an id, and no output as results have.
    """
    kind = kind_of(item)
    if kind == "message":
        return item.get("role") == "assistant"
    if kind in RESULTS:
        return not is_output(item)
    if kind in _OF_CLIENTS:
        return item.get("role") == "assistant"
    return kind in MODEL_MADE or ("id" in item and "output" not in item)


def is_call(item: JsonObject) -> bool:
    """Tell whether an item is a call for the client. A tool search is the provider's unless the item says otherwise."""
    kind = kind_of(item)
    return kind in CALLS and (kind != "tool_search_call" or item.get("execution") == "client")


def is_output(item: JsonObject) -> bool:
    """Tell whether an item is the client's answer to a call.

    The provider answers tool searches, and shell commands in its own containers. Its shell outputs have an id.
    """
    kind = kind_of(item)
    if kind == "tool_search_output":
        return item.get("execution") == "client"
    return kind in RESULTS and (kind != "shell_call_output" or not item.get("id"))


def call_id_of(item: JsonObject) -> str:
    """Return the id by which a call is answered, or the id that a result answers; "" if there is none."""
    name = item.get("id") if kind_of(item) == _APPROVAL else None
    for field in _NAMED_BY if name is None else ():
        name = name or item.get(field)
    if kind_of(item) == "local_shell_call_output":  # SDKs put the call's id into `id`
        name = name or item.get("id")
    return as_text(name)


def turn_of(raws: Iterable[bytes]) -> bytes:
    """Return the text of a turn with these items."""
    return b'{"type":"turn","items":[%b]}' % b",".join(raws)


class _Slot(Struct, frozen=True, kw_only=True):
    """Where a text, or another value in its place, stands: a content part, or a whole content that is a string."""

    item: int  # index of the item in the entry
    field: str
    part: int | None  # index among the content parts; None if the content is a string
    value: Any  # the part, or the string


class Placed(Struct, frozen=True, kw_only=True):
    """One item of an entry."""

    at: int
    raw: bytes
    item: JsonObject

    @property
    def kind(self) -> str:
        return kind_of(self.item)


class Item(Message):
    """One entry of a Responses conversation."""

    __slots__ = ("_placed_calls", "_slots")

    dialect: ClassVar[Dialect]

    def __init__(self, raw: bytes, data: JsonObject | None = None, facts: Facts | None = None) -> None:
        super().__init__(raw, data, facts)
        self._slots: tuple[_Slot, ...] | None = None
        self._placed_calls: tuple[tuple[int, Call], ...] | None = None

    @property
    def kind(self) -> str:
        """The type of the item; `TURN` for a turn of the model."""
        return kind_of(self.data)

    @property
    def is_turn(self) -> bool:
        return self.role == "assistant" and self.kind == TURN

    @property
    def items(self) -> list[JsonObject]:
        data = self.data
        if data.get("type") != TURN:
            return [data]
        return [each for each in as_array(data.get("items")) if is_object(each)]

    @property
    def raws(self) -> list[bytes]:
        if self.data.get("type") != TURN:
            return [self.raw]
        items = FIELDS.decode(self.raw)["items"] if self.items else b"[]"
        return [text for each in ITEMS.decode(items) if (text := bytes(each)).startswith(b"{")]

    @property
    def listed(self) -> tuple[bytes, ...]:
        return (without_fields(self.raw, ("type",)),) if self.kind == INSTRUCTIONS else tuple(self.raws)

    @property
    def parted(self) -> Sequence[tuple[Item, Item]]:
        """The turn split in two at each place where its last items may be a reply that continued it.

        Example: a request ends with a text of the model. The client then sends the text and the reply back as one turn.
        """
        raws = self.raws if len(self.texts) > 1 and self.data.get("type") == TURN else []
        return [(Item(turn_of(raws[:at])), Item(turn_of(raws[at:]))) for at in range(1, len(raws))[-_REPLIED:]]

    @property
    def programs(self) -> tuple[Collection[str], Collection[str]]:
        """Ids of the provider's programs that it begins without ending them, and of those that it is a part of."""
        if b'"program' not in self.raw:
            return (), ()
        begun = [item.get("call_id") for item in self.items if kind_of(item) == "program"]
        ended = [item.get("call_id") for item in self.items if kind_of(item) == "program_output"]
        callers = [as_object(item.get("caller")).get("caller_id") for item in self.items]
        return [name for name in _texts(begun) if name not in ended], _texts([*ended, *callers])

    def continued(self, reply: Message) -> Message | None:
        del reply  # `parted` finds it
        return None

    @property
    def is_field(self) -> bool:
        return self.kind == INSTRUCTIONS

    @property
    def is_lasting(self) -> bool:
        return any(kind in self.raw for kind in _LASTING_MARKS) and any(
            kind_of(each) in _LASTING for each in self.items
        )

    def keeping(self, changed: Callable[[Placed], bytes | None]) -> Item:
        """Return it with each item's text replaced by what `changed` returns. None removes the item from a turn."""
        placed = [
            Placed(at=at, raw=raw, item=item) for at, (raw, item) in enumerate(zip(self.raws, self.items, strict=True))
        ]
        raws = [text for text in map(changed, placed) if text is not None]
        made = turn_of(raws) if self.data.get("type") == TURN else (raws or [self.raw])[0]
        return self if made == self.raw else Item(made)

    def without(self, *names: str) -> Item:
        return self.keeping(lambda each: without_fields(each.raw, names))

    # ------------------------------------------------------------------------------------- reading

    @property
    def own_fields(self) -> tuple[str, ...]:
        if self.facts is not None and not self.facts.has_own_fields:
            return ()
        return tuple([name for name in OWN_FIELDS if any(name in item for item in self.items)])

    @property
    def role(self) -> str:
        return self.facts.role if self.facts is not None else role_of(self.data)

    @property
    def slots(self) -> tuple[_Slot, ...]:
        """Where its texts stand, in order."""
        if self._slots is None:
            self._slots = tuple(_slots(self.items, of_turn=self.data.get("type") == TURN))
        return self._slots

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple([_text_in(slot.value) for slot in self.slots]) or ("",)

    @property
    def plain_text(self) -> str | None:
        return self.text if all(_is_text(slot.value) for slot in self.slots) else None

    @property
    def is_plain(self) -> bool:
        told = ({self.kind} if self.is_result else {"message", "reasoning"}) - _MORE_THAN_TEXT
        others = (item for item in self.items if not is_call(item) and kind_of(item) not in told)
        return self.plain_text is not None and not any(others)

    @property
    def placed_calls(self) -> tuple[tuple[int, Call], ...]:
        """The calls for the client, each with the index of its item."""
        if self._placed_calls is None:
            self._placed_calls = tuple(_calls(self.items))
        return self._placed_calls

    def _read_calls(self) -> list[Call]:
        return [call for _, call in self.placed_calls]

    @property
    def is_result(self) -> bool:
        return self.role == "tool"

    @property
    def answers(self) -> str | None:
        return (call_id_of(self.data) or None) if self.is_result else None

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of its calls, messages and references, or of the call that it answers.

        Also the content of a compaction: after one, a client may send nothing else that passed through here.
        """
        named = [item.get("id") for item in self.items if kind_of(item) in _NAMED]
        if self.is_lasting:
            named += [item.get("encrypted_content") for item in self.items if kind_of(item) in _COMPACTIONS]
        return super().ids + tuple(_texts(named))

    @property
    def has_content(self) -> bool:
        return any(_says(item) for item in self.items)

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        return tuple([_attachment(at, slot.value) for at, slot in enumerate(self.slots) if _is_attachment(slot.value)])

    @property
    def display_text(self) -> str:
        said: dict[tuple[int, int], list[str]] = {}  # the parts of a message are one text; a refusal is separate
        for at, slot in enumerate(self.slots):
            refusals = _refusals([slot])
            place = (slot.item, at if refusals else -1)
            said.setdefault(place, []).append(refusals[0] if refusals else _text_in(slot.value))
        return "\n\n".join(filter(None, map("".join, said.values())))

    def all_texts(self) -> Iterator[str]:
        yield from super().all_texts()
        for item in self.items:
            for name in ("name", "agent"):
                if item.get(name) and kind_of(item) not in CALLS:
                    yield str(item[name])
        yield from _refusals(self.slots)

    def countable(self) -> Countable:
        texts: list[str] = []
        reasoning: list[str] = []
        media = small = 0
        for slot in self.slots:
            if _is_attachment(slot.value):
                low = is_object(slot.value) and slot.value.get("detail") == "low"
                small, media = small + low, media + (not low)
            else:
                texts.append(_text_in(slot.value) or ("" if _is_text(slot.value) else write(slot.value).decode()))
        items = self.items
        for at, call in self.placed_calls:  # an approval request holds the call to approve in its own fields
            texts += [write(items[at]).decode()] if kind_of(items[at]) == _APPROVAL else [call.name, call.arguments]
        for item in self._closed():
            text, held = _written(item)
            texts.append(text)
            media += held
        for item in items:
            if kind_of(item) == "reasoning":
                reasoning += _summary(item)
        return Countable(
            texts=tuple([text for text in texts if text]),
            media=media,
            small_images=small,
            reasoning="\n".join(reasoning),
        )

    def readable(self) -> str:
        text = self.display_text
        lines = [text] if text else []
        lines += [each.line for each in self.attachments]
        lines += self._call_lines()
        lines += map(_line_of, self._closed())
        return "\n".join(lines)

    def _call_lines(self) -> list[str]:
        pairs = zip(self.placed_calls, super()._call_lines(), strict=True)
        items = self.items
        return [_line_of(items[at]) if kind_of(items[at]) == _APPROVAL else line for (at, _), line in pairs]

    def _closed(self) -> Iterator[JsonObject]:
        """Yield the items that are not read field by field. They are counted and shown as JSON."""
        answered = {at for at, _ in self.placed_calls}
        of_turn = self.data.get("type") == TURN
        for at, item in enumerate(self.items):
            kind = kind_of(item)
            if kind in RESULTS:
                closed = of_turn or (kind in _FIXED and item.get("output") is None)
            else:
                closed = at not in answered if kind in CALLS else kind not in _KNOWN_SHAPES
            if closed:
                yield item

    # ------------------------------------------------------------------------------------ rewriting

    def with_text(self, text: str) -> Item:
        if not self.is_turn:
            return self._saying(text)
        said = _message(text)
        places = [at for at, item in enumerate(self.items) if kind_of(item) == "message"]
        if not places:
            after = max([at + 1 for at, item in enumerate(self.items) if kind_of(item) == "reasoning"], default=0)
            raws = self.raws
            return Item(turn_of([*raws[:after], said, *raws[after:]]))
        return self.keeping(lambda each: said if each.at == places[0] else None if each.at in places else each.raw)

    def _saying(self, text: str) -> Item:
        """Return a single item with another text, or unchanged if it cannot hold one. How commands ended stays too."""
        kind, output = self.kind, self.data.get("output")
        if kind in _FIXED:
            return self
        if kind != "shell_call_output" or not is_array(output):
            return self.replacing(_field_of(self.data), text)
        texts = [text, *[""] * (len(output) - 1)]
        return self.replacing("output", [_with_text(part, said) for part, said in zip(output, texts, strict=False)])

    def with_content_of(self, other: Message) -> Item:
        if self.is_turn and isinstance(other, Item):
            said = [raw for raw, item in zip(other.raws, other.items, strict=True) if kind_of(item) == "message"]
            rest = [raw for raw, item in zip(self.raws, self.items, strict=True) if kind_of(item) != "message"]
            return Item(turn_of([*said, *rest]))
        return self.replacing(_field_of(self.data), other.data.get(_field_of(other.data)))

    def with_texts(self, texts: Sequence[str | None]) -> Item:
        slots = self.slots
        if not slots:
            return self if texts[0] is None else self.with_text(texts[0])
        new: dict[int, Any] = {}
        for place, (slot, text) in enumerate(zip(slots, texts, strict=True)):
            if text is None:
                new[place] = _with_text(slot.value, "") if _is_of_shell(slot.value) else None
            elif slot.part is None:
                new[place] = text
            elif (before := _text_in(slot.value)) and text != before:
                new[place] = _with_text(slot.value, text)
        return self._with_slots(new)

    def with_appended(self, text: str) -> Item:
        field = _field_of(self.data)
        content = self.data.get(field)
        if self.is_turn:
            return Item(turn_of([*self.raws, _message(text)]))
        if is_array(content):
            return self.replacing(field, [*content, {"type": _part_type(self.role), "text": text}])
        return self.replacing(field, f"{content}\n\n{text}" if isinstance(content, str) and content else text)

    def with_calls(self, kept: Collection[int]) -> Item:
        gone = {at for number, (at, _) in enumerate(self.placed_calls) if number not in kept}
        return self.keeping(lambda each: None if each.at in gone else each.raw).with_paired_reasoning()

    def with_arguments(self, arguments: Sequence[str]) -> Item:
        new = {at: text for (at, _), text in zip(self.placed_calls, arguments, strict=False)}

        def changed(each: Placed) -> bytes:
            field = _ARGUMENTS.get(each.kind)
            if each.at not in new or field is None or each.item.get(field) == new[each.at]:
                return each.raw
            return with_value(each.raw, field, new[each.at])

        return self.keeping(changed)

    def with_notes(self, notes: Mapping[int, str]) -> Item:
        if self.kind in _FIXED:
            return self
        kind = _part_type(self.role)
        return self._with_slots({place: {"type": kind, "text": note} for place, note in notes.items()})

    def without_unfinished_calls(self) -> Item:
        whole = self.keeping(lambda each: each.raw if is_whole(each.item) else None)
        return whole.with_paired_reasoning()

    def as_request(self, reasoning: ReasoningMode, *, partial: bool) -> Item:
        made = self.without_unfinished_calls() if partial else self
        if reasoning == "drop":
            made = made.without_reasoning() or made.with_text("")
        return made.keeping(_as_input)

    def without_reasoning(self) -> Item | None:
        """Return a turn without its reasoning items and what depends on them.

        An item after a reasoning item may be sent with its id only if the reasoning is sent too. Items that the
        provider ran itself cannot be sent without an id, so they are removed as well.
        """
        if self.facts is not None and self.facts.role != "assistant":
            return self
        items = self.items
        first = next((at for at, item in enumerate(items) if kind_of(item) == "reasoning"), None)
        if first is None:
            return self

        def changed(each: Placed) -> bytes | None:
            if each.at < first or each.kind in {"item_reference", _APPROVAL}:
                return each.raw
            if each.kind == "reasoning" or (each.kind in _HOSTED and not is_call(each.item)):
                return None
            return without_fields(each.raw, ("id",))

        made = self.keeping(changed)
        return made if made.items else None

    def behind_rounds(self, rounds: Sequence[Message]) -> Item:
        held: set[str] = set()
        for each in rounds:
            if isinstance(each, Item) and each.is_turn:
                held.update(*map(_marks, each.items))
        made = self.keeping(lambda each: each.raw if held.isdisjoint(_marks(each.item)) else None)
        return made.with_paired_reasoning() if made is not self and made.items else self

    def with_paired_reasoning(self) -> Item:
        """Return it without reasoning items that are not followed by another of its items: the API refuses them."""
        items = self.items
        following = [kind_of(item) for item in items[1:]] + ["reasoning"]

        def paired(each: Placed) -> bytes | None:
            return None if each.kind == following[each.at] == "reasoning" else each.raw

        return self.keeping(paired) if any(kind_of(item) == "reasoning" for item in items) else self

    def _with_slots(self, new: Mapping[int, Any]) -> Item:
        """Return it with new values at these indexes of `slots`. None removes a part."""
        by_item: dict[int, dict[int, Any]] = {}
        for place, slot in enumerate(self.slots):
            if place in new:
                by_item.setdefault(slot.item, {})[-1 if slot.part is None else slot.part] = new[place]
        fields = {slot.item: slot.field for slot in self.slots}

        def changed(each: Placed) -> bytes:
            parts, field = by_item.get(each.at), fields.get(each.at, "")
            if parts is None:
                return each.raw
            if -1 in parts:
                return with_value(each.raw, field, "" if parts[-1] is None else parts[-1])
            left = [parts.get(place, part) for place, part in enumerate(each.item[field])]
            return with_value(each.raw, field, [part for part in left if part is not None])

        return self.keeping(changed)


_KNOWN_SHAPES: Final = frozenset({"message", INSTRUCTIONS, "reasoning", *CALLS, *RESULTS})
"""Types of items whose text is read field by field. Others are counted as JSON."""


def role_of(data: JsonObject) -> str:
    """Return the role of an entry: `tool` for a result, "" if it has no role."""
    kind = kind_of(data)
    if kind == TURN:
        return "assistant"
    if is_output(data):
        return "tool"
    role = data.get("role")
    return role if kind in {"message", INSTRUCTIONS} and isinstance(role, str) else ""


def _field_of(data: JsonObject) -> str:
    return "output" if kind_of(data) in RESULTS else "content"


def _message(text: str) -> bytes:
    return write({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]})


def _part_type(role: str) -> str:
    return "output_text" if role == "assistant" else "input_text"


def _slots(items: Sequence[JsonObject], *, of_turn: bool) -> Iterator[_Slot]:
    for at, item in enumerate(items):
        kind = kind_of(item)
        if (of_turn or kind not in RESULTS) and kind not in {"message", INSTRUCTIONS}:
            continue
        field = _field_of(item)
        content = item.get(field)
        if is_array(content):
            for place, part in enumerate(content):
                yield _Slot(item=at, field=field, part=place, value=part)
        elif content is not None:
            yield _Slot(item=at, field=field, part=None, value=content)


def _text_in(value: Any) -> str:
    if isinstance(value, str):
        return value
    if _is_of_shell(value):
        return "".join([as_text(value.get(name)) for name in _STREAMS])
    return as_text(value.get("text")) if _is_text(value) else ""


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (is_object(value) and value.get("type") in _TEXTS) or _is_of_shell(value)


def _is_of_shell(value: Any) -> TypeGuard[JsonObject]:
    """Tell whether a part is the output of a shell command."""
    return is_object(value) and "type" not in value and any(name in value for name in _STREAMS)


def _with_text(part: Any, text: str) -> Any:
    if _is_of_shell(part):
        return part | {"stdout": text, "stderr": ""}
    # The positions in annotations would not fit the new text.
    changed: JsonObject = {"text": text} | ({"annotations": []} if "annotations" in part else {})
    return {**part, **changed} if is_object(part) else text


def _is_attachment(value: Any) -> bool:
    return is_object(value) and not _is_text(value) and "refusal" not in value


def _refusals(slots: Iterable[_Slot]) -> list[str]:
    return _texts([as_object(slot.value).get("refusal") for slot in slots])


def _texts(values: Iterable[Any]) -> list[str]:
    return [value for value in values if isinstance(value, str) and value]


def _summary(item: JsonObject) -> list[str]:
    """Return the texts of a reasoning item: its summary, and for open models the reasoning itself."""
    parts = [part for name in ("summary", "content") for part in as_array(item.get(name))]
    return [text for part in parts if isinstance(text := as_object(part).get("text"), str)]


def _says(item: JsonObject) -> bool:
    """Tell whether an item holds anything other than calls and reasoning."""
    kind = kind_of(item)
    if kind == "message":
        content = item.get("content")
        parts = content if is_array(content) else [content]
        return any(_text_in(part).strip() or (is_object(part) and not _is_text(part)) for part in parts)
    return kind != "reasoning" and not is_call(item)


def _calls(items: Sequence[JsonObject]) -> Iterator[tuple[int, Call]]:
    hosted = {call_id_of(item) for item in items if kind_of(item) in RESULTS}  # calls that the provider answered
    for at, item in enumerate(items):
        kind = kind_of(item)
        if not is_call(item) or (hosted and call_id_of(item) in hosted):
            continue
        field = _ARGUMENTS.get(kind)
        name = item.get("name") if field is not None else kind
        given = (field,) if field is not None else ("arguments",) if kind == "tool_search_call" else _GIVEN
        arguments = next((item[each] for each in given if item.get(each) is not None), None)
        if not isinstance(arguments, str):
            arguments = "" if arguments is None else write(arguments).decode()
        custom = kind == "custom_tool_call"
        yield at, Call(id=call_id_of(item), name=as_text(name), arguments=arguments, custom=custom)


def _marks(item: JsonObject) -> list[str]:
    """Return values that probably no other item of the model has. There may be none: some clients leave ids out."""
    return _texts([item.get("id"), item.get("encrypted_content")])


def is_whole(item: JsonObject) -> bool:
    """Tell whether an item of an interrupted reply is complete enough to be sent back."""
    kind = kind_of(item)
    if not is_call(item):
        return True
    if not call_id_of(item) or item.get("status") in ("in_progress", "incomplete"):
        return False
    return kind != "function_call" or (bool(item.get("name")) and is_object_text(item.get("arguments")))


def _as_input(each: Placed) -> bytes:
    """Return a reply's item in the form that requests use: reasoning has no status there, and no null fields."""
    if each.kind != "reasoning":
        return each.raw
    return without_fields(each.raw, [name for name, value in each.item.items() if value is None or name == "status"])


def _written(item: JsonObject) -> tuple[str, int]:
    """Return the JSON text of an item without its images, and their number. For items not read field by field."""
    if kind_of(item) == _IMAGE and isinstance(item.get("result"), str):
        text, held = written({**item, "result": ""})
        return text, held + 1
    return written(item)


def _line_of(item: JsonObject) -> str:
    """Return the line that stands for such an item in a text for a reader: its type and its fields other than ids."""
    kind = kind_of(item)
    untold = (*_UNTOLD, "result") if kind == _IMAGE else _UNTOLD
    left = {name: value for name, value in item.items() if name not in untold and value is not None}
    return f"[{kind}: {written(left)[0]}]" if left else f"[{kind}]"


def _attachment(place: int, part: JsonObject) -> Attachment:
    named = one_line(as_text(part.get("type")) or "part")
    held = next((part[name] for name in _HELD if part.get(name)), None)
    return Attachment(place=place, kind=named, is_image=named in _IMAGES, description=_described(held))


def _described(held: Any) -> str:
    """Describe an image or a file: its type and size, or its URL."""
    if not isinstance(held, str):
        return "no address"
    head, comma, data = held.partition(",")
    if head.startswith("data:") and comma:
        return sized(head.removeprefix("data:").partition(";")[0], data)
    return one_line(held)
