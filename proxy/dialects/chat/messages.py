"""One chat message, as the JSON text it arrived as.

It knows the fields of the Chat Completions API that others must read (role, text, calls) and
how to change one field of the text and leave every other byte alone. It does not know what a
message is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import msgspec
import orjson
from msgspec import Struct

from proxy.dialects.chat.facts import MOST_IDS, Facts, Ties
from proxy.dialects.shapes import is_array, is_object
from proxy.dialects.writer import write

JsonObject: TypeAlias = dict[str, Any]

OWN_FIELDS: Final = ("agent", "is_internal")
"""Fields of a message that are ours: stored, and never sent upstream."""

INSTRUCTION_ROLES: Final = frozenset({"system", "developer"})
"""Roles of the messages that lead a request and instruct the model."""

_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])


class Call(Struct, frozen=True):
    """One tool call of an assistant message, `function` and `custom` alike."""

    id: str
    """The id that a result names; empty where the message has none (or none that is a string)."""
    name: str
    """Name of the tool; empty where it is missing."""
    arguments: str
    """The arguments as text: JSON for a function, free text for a custom tool."""


class Message:
    """One chat message: `raw` is its JSON text, and what is read of it comes from that text.

    Two messages are equal when their texts are. `data` is parsed at most once and must not be
    changed by anyone; what changes a message returns another one. So what is read of it is read once.
    """

    __slots__ = ("_calls", "_data", "_ties", "facts", "raw")

    raw: bytes
    """The JSON text, UTF-8, unknown fields and key order included."""
    facts: Facts | None
    """What is remembered of the text; None where nothing is."""

    def __init__(self, raw: bytes, data: JsonObject | None = None, facts: Facts | None = None) -> None:
        """Wrap `raw`, the text of a JSON object; `data` is the same, parsed, where it is known."""
        self.raw = raw
        self._data = data
        self._calls: tuple[Call, ...] | None = None
        self._ties: Ties | None = None
        self.facts = facts

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Message:
        """Return the message with the content of `data`, as compact JSON in its key order."""
        return cls(write(dict(data)))

    @property
    def data(self) -> JsonObject:
        """The parsed object. Shared: read it, never write to it."""
        if self._data is None:
            self._data = orjson.loads(self.raw)
        return self._data

    def __eq__(self, other: object) -> bool:
        """Tell whether the texts are the same."""
        return isinstance(other, Message) and other.raw == self.raw

    def __hash__(self) -> int:
        """Hash the text."""
        return hash(self.raw)

    def __repr__(self) -> str:
        """Show the beginning of the text."""
        return f"Message({self.raw[:80]!r})"

    @property
    def role(self) -> str:
        """The role, as it was sent; empty where it is none."""
        if self.facts is not None:
            return self.facts.role
        role = self.data.get("role")
        return role if isinstance(role, str) else ""

    @property
    def text(self) -> str:
        """The text of the content: the string, or the text of its parts put together."""
        return text_of(self.data.get("content"))

    @property
    def calls(self) -> tuple[Call, ...]:
        """The tool calls of an assistant message in order; empty for every other message."""
        if self._calls is None:
            has_none = self.role != "assistant" or (self.facts is not None and not self.facts.has_calls)
            calls = None if has_none else self.data.get("tool_calls")
            self._calls = tuple(map(_call, calls)) if is_array(calls) else ()
        return self._calls

    @property
    def ties(self) -> Ties:
        """What ties it to other messages. It is remembered with the text: a known text is not parsed."""
        ties = self._ties
        if ties is None:
            facts = self.facts
            ties = facts.ties if facts is not None else None
            if ties is None:
                ties = _ties(self)
                if facts is not None and len(ties.ids) <= MOST_IDS:
                    facts.ties = ties
            self._ties = ties
        return ties

    @property
    def answers(self) -> str | None:
        """The `tool_call_id` that a tool result answers; None for other messages and where it is missing."""
        return self.ties.answers

    @property
    def own_fields(self) -> tuple[str, ...]:
        """Which of `OWN_FIELDS` it has."""
        if self.facts is not None and not self.facts.has_own_fields:
            return ()
        return tuple([name for name in OWN_FIELDS if name in self.data])

    def without_own_fields(self) -> Message:
        """Return the message as it may go upstream; the very same message where it has no field of ours."""
        if self.facts is not None and not self.facts.has_own_fields:
            return self
        names = self.own_fields
        return self.without(*names) if names else self

    def without(self, *names: str) -> Message:
        """Return the message without these fields; the very same message where it has none of them."""
        if not any(name in self.data for name in names):
            return self
        fields = {key: raw for key, raw in _FIELDS.decode(self.raw).items() if key not in names}
        return Message(msgspec.json.encode(fields))

    def replacing(self, name: str, value: Any) -> Message:
        """Return the message with field `name` set to `value` (JSON data); other fields keep their bytes."""
        fields = _FIELDS.decode(self.raw)
        fields[name] = msgspec.Raw(write(value))
        return Message(msgspec.json.encode(fields))

    def keeping_calls(self, positions: frozenset[int]) -> Message:
        """Return the message with only the tool calls at these positions, each with its bytes.

        With none left the field goes: an empty array is refused by providers.
        """
        fields = _FIELDS.decode(self.raw)
        kept = [raw for i, raw in enumerate(_ITEMS.decode(fields["tool_calls"])) if i in positions]
        if kept:
            fields["tool_calls"] = msgspec.Raw(msgspec.json.encode(kept))
        else:
            del fields["tool_calls"]
        return Message(msgspec.json.encode(fields))


def text_of(content: Any) -> str:
    """Return the text of a `content` value: a string as it is, of a list its `text` parts put together."""
    if isinstance(content, str):
        return content
    if not is_array(content):
        return ""
    parts = (part.get("text") for part in content if is_object(part))
    return "".join(text for text in parts if isinstance(text, str))


def _ties(message: Message) -> Ties:
    """Read what ties a message to others, whatever it is."""
    role = message.role
    if role == "tool":
        answered = message.data.get("tool_call_id")
        return Ties(role, answers=answered if isinstance(answered, str) else None)
    if role != "assistant":
        return Ties(role)
    data = message.data
    return Ties(
        role,
        ids=tuple([call.id for call in message.calls]),
        calls_function=is_object(data.get("function_call")),
        names_calls=data.get("tool_calls") is not None,
        has_content=data.get("content") not in (None, []) or bool(data.get("refusal") or data.get("audio")),
    )


def _call(item: Any) -> Call:
    """Read one item of `tool_calls`, whatever it is; what is missing is empty."""
    if not is_object(item):
        return Call("", "", "")
    kind, argument = ("custom", "input") if item.get("type") == "custom" else ("function", "arguments")
    called = item.get(kind)
    inner: JsonObject = called if is_object(called) else {}
    arguments = inner.get(argument)
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else write(arguments).decode()
    identity, name = item.get("id"), inner.get("name")
    return Call(
        identity if isinstance(identity, str) else "",
        name if isinstance(name, str) else "",
        arguments,
    )
