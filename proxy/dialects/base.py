"""The dialect seam: all that other rooms may ask of a message, whichever API it belongs to.

An entry of a conversation keeps its native JSON. Conversation, trimming, store, summaries and recall know it as
a `Message` and never look into the JSON. Each API has one folder beside this file (`chat/` for Chat
Completions) with one subclass of `Message` and of `Dialect`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from importlib import import_module
from typing import Any, ClassVar, Final, Literal, Self, TypeAlias

import msgspec
import orjson
from msgspec import Struct

from proxy.dialects.jsontext import FIELDS, write

JsonObject: TypeAlias = dict[str, Any]
SpokenRole: TypeAlias = Literal["system", "user", "assistant"]
ReasoningMode: TypeAlias = Literal["auto", "keep", "drop"]
"""What of a reply's reasoning is sent back: all, none, or (`auto`) what providers want back."""

OWN_FIELDS: Final = ("agent", "is_internal")
"""Fields of a message that are ours: stored, and never sent upstream."""


class Call(Struct, frozen=True, kw_only=True):
    """One tool call."""

    id: str
    """The id that its result names; empty where it has none."""
    name: str
    """Name of the tool; empty where it is missing."""
    arguments: str
    """The arguments as text: JSON for a function, free text for a custom tool."""
    custom: bool = False
    """Whether its arguments are free text."""
    legacy: bool = False
    """Whether it has the deprecated form `function_call`, whose result has no id."""


class ToolDefinition(Struct, frozen=True, kw_only=True):
    """A tool that the proxy offers itself. All of its parameters are texts, and none is required."""

    name: str
    description: str
    parameters: tuple[tuple[str, str], ...]
    """Name and description of each; `{unset}` in it stands for how it is not given."""


class Attachment(Struct, frozen=True, kw_only=True):
    """A content part that holds no text: an image, a sound, a file."""

    place: int
    """Its index among the content parts."""
    kind: str
    """The part's type, such as `image_url`."""
    is_image: bool
    description: str
    """Its media type and size, or its address."""


class Countable(Struct, frozen=True, kw_only=True):
    """What of a message costs tokens."""

    texts: tuple[str, ...]
    """Each text that the model reads; they are counted one by one."""
    media: int = 0
    """Number of images, sounds and files, whose bytes are no text."""
    small_images: int = 0
    """Number of images that are sent in low detail; they are not among `media`."""
    reasoning: str = ""
    """The reasoning of a reply. It costs output, and seldom input, since it is seldom sent back."""


class Span(Struct, frozen=True, kw_only=True):
    """The smallest run of messages that can be removed without breaking the protocol."""

    start: int
    """Position of its first message."""
    stop: int
    """Position after its last message."""
    round: int
    """Number of the round that it lies in: user messages up to and with it."""


class Repaired(Struct, frozen=True, kw_only=True):
    """Messages that keep the rules of their API."""

    messages: tuple[Message, ...]
    notes: tuple[str, ...]
    """What was repaired: at most one line for each kind of problem, with its count."""
    sources: tuple[int | None, ...]
    """For each message its position before the repair where it is the very same; None where it was made."""


def hash_of(canonical: bytes) -> bytes:
    """Return the content hash, 20 bytes, of a message with this canonical form."""
    return blake2b(canonical, digest_size=20, person=b"palimpsest-text").digest()


def body_id(raw: bytes) -> str:
    """Return the id of a text, 40 hexadecimal digits: equal texts have equal ids, wherever they stand."""
    return blake2b(raw, digest_size=20, person=b"palimpsest-body").hexdigest()


class Facts:
    """What follows from one message text alone; shared by every message with it. None: not asked for yet."""

    __slots__ = ("body", "content", "has_calls", "has_own_fields", "raw", "role", "step", "ties")

    raw: Final[bytes]
    role: Final[str]
    has_own_fields: Final[bool]
    has_calls: Final[bool]
    content: bytes | None
    """The content hash: see `conversation.content_hash`."""
    body: str | None
    """The body id: see `conversation.body_of`."""
    step: tuple[str, str] | None
    """The node of its last known parent, and its own node there."""
    ties: Any
    """What the dialect remembers of it for pairing calls with results."""

    def __init__(self, raw: bytes, role: str, *, has_own_fields: bool, has_calls: bool) -> None:
        self.raw = raw
        self.role = role
        self.has_own_fields = has_own_fields
        self.has_calls = has_calls
        self.content = None
        self.body = None
        self.step = None
        self.ties = None


class Message(ABC):
    """One entry of a conversation: `raw` is its JSON text, and all else is read from that text.

    Two messages are equal when their texts are. Whatever changes a message returns another one.
    """

    __slots__ = ("_data", "facts", "raw")

    dialect: ClassVar[Dialect]

    raw: bytes
    """The JSON text, UTF-8, unknown fields and key order included."""
    facts: Facts | None
    """What is remembered of the text; None where nothing is."""

    def __init__(self, raw: bytes, data: JsonObject | None = None, facts: Facts | None = None) -> None:
        """Wrap `raw`, the text of a JSON object; `data` is the same, parsed, where it is known."""
        self.raw = raw
        self._data = data
        self.facts = facts

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Self:
        """Return the message with the content of `data`, as compact JSON in its key order."""
        return cls(write(dict(data)))

    @property
    def data(self) -> JsonObject:
        """The parsed object. Only the dialects and the HTTP layer read it; nobody writes to it."""
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
        return f"{type(self).__name__}({self.raw[:80]!r})"

    @property
    def own_fields(self) -> tuple[str, ...]:
        """Which of `OWN_FIELDS` it has."""
        if self.facts is not None and not self.facts.has_own_fields:
            return ()
        return tuple([name for name in OWN_FIELDS if name in self.data])

    @property
    def agent(self) -> str | None:
        """The agent that the message says it is from; None where it names none."""
        if not self.own_fields:
            return None
        agent = self.data.get("agent")
        return agent if isinstance(agent, str) and agent else None

    @property
    def is_internal(self) -> bool:
        """Whether it is marked `is_internal`: for models alone."""
        return bool(self.own_fields) and self.data.get("is_internal") is True

    def without_own_fields(self) -> Self:
        """Return the message as it may go upstream; the very same message where it has no field of ours."""
        names = self.own_fields
        return self.without(*names) if names else self

    def without(self, *names: str) -> Self:
        """Return the message without these fields; the very same message where it has none of them."""
        if not any(name in self.data for name in names):
            return self
        fields = {key: raw for key, raw in FIELDS.decode(self.raw).items() if key not in names}
        return type(self)(msgspec.json.encode(fields))

    def replacing(self, name: str, value: Any) -> Self:
        """Return the message with field `name` set to `value` (JSON data); other fields keep their bytes."""
        fields = FIELDS.decode(self.raw)
        fields[name] = msgspec.Raw(write(value))
        return type(self)(msgspec.json.encode(fields))

    # ------------------------------------------------------------------------------------- reading

    @property
    @abstractmethod
    def role(self) -> str:
        """`system`, `developer`, `user`, `assistant`, `tool`, `function`, or the API's own; "" for none."""

    @property
    @abstractmethod
    def text(self) -> str:
        """All text of the content put together; calls and reasoning are not among it."""

    @property
    @abstractmethod
    def texts(self) -> tuple[str, ...]:
        """The text of each content part in order, "" for a part that holds none; one for a plain string."""

    @property
    @abstractmethod
    def plain_text(self) -> str | None:
        """The text where the content is nothing but text; None where it holds anything else."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that the message gives itself (a participant's, or a tool's on a result); "" without."""

    @property
    @abstractmethod
    def calls(self) -> tuple[Call, ...]:
        """The tool calls in order; empty for every message that is not an assistant's."""

    @property
    @abstractmethod
    def is_result(self) -> bool:
        """Whether it carries what a tool gave."""

    @property
    @abstractmethod
    def answers(self) -> str | None:
        """The id of the call that a result answers; None for other messages and where it is missing."""

    def answers_call(self, call: Call) -> bool:
        """Tell whether it is the result of `call`, which stands in the same span."""
        return bool(call.id) and self.answers == call.id

    @property
    @abstractmethod
    def has_content(self) -> bool:
        """Whether an assistant message says anything beside its calls that can be sent back."""

    @property
    @abstractmethod
    def attachments(self) -> tuple[Attachment, ...]:
        """The content parts that hold no text, in order."""

    @abstractmethod
    def all_texts(self) -> Iterator[str]:
        """Yield every text in it that somebody wrote: content, calls, arguments, names, a refusal."""

    @abstractmethod
    def countable(self) -> Countable:
        """Return what of it costs tokens."""

    @abstractmethod
    def readable(self) -> str:
        """Return what it says as text for a reader: its own text first, then a line for each other thing."""

    # ------------------------------------------------------------------------------------ rewriting

    @abstractmethod
    def with_text(self, text: str) -> Message:
        """Return it with `text` as its whole content."""

    @abstractmethod
    def with_texts(self, texts: Sequence[str | None]) -> Message:
        """Return it with a new text for each of `texts`; None removes the part, others keep their fields."""

    @abstractmethod
    def with_appended(self, text: str) -> Message:
        """Return it with `text` after its content, as a paragraph or a part of its own."""

    @abstractmethod
    def with_calls(self, kept: Collection[int]) -> Message:
        """Return it with only the calls at these places of `calls`, each with its bytes."""

    @abstractmethod
    def with_arguments(self, arguments: Sequence[str]) -> Message:
        """Return it with these arguments, one for each of `calls`."""

    @abstractmethod
    def with_notes(self, notes: Mapping[int, str]) -> Message:
        """Return it with texts in the place of the content parts at these places (`Attachment.place`)."""

    @abstractmethod
    def without_unfinished_calls(self) -> Message:
        """Return a reply that broke off without the calls that are not whole."""

    @abstractmethod
    def as_request(self, reasoning: ReasoningMode, *, partial: bool) -> Message:
        """Return a reply in the form in which a request carries it; `partial`: it broke off."""


class Dialect(ABC):
    """One API's rules for messages."""

    name: ClassVar[str]
    """The name of its folder, such as `chat`."""

    @abstractmethod
    def message(self, raw: bytes) -> Message:
        """Return the message with this JSON text."""

    @abstractmethod
    def spoken(self, role: SpokenRole, text: str) -> Message:
        """Return a message that the proxy makes: `text`, said in this role."""

    @abstractmethod
    def result(self, call: str, text: str) -> Message:
        """Return a tool result that the proxy makes for the call with this id."""

    @abstractmethod
    def canonical(self, message: Message) -> bytes:
        """Return the form by which a message is recognised when it comes back. Never sent, never raises."""

    @abstractmethod
    def spans(self, messages: Sequence[Message]) -> tuple[Span, ...]:
        """Return the spans of messages in order; together they cover every position once."""

    @abstractmethod
    def problems(self, messages: Sequence[Message]) -> list[str]:
        """Return what breaks the API's rules, in words with positions; empty where nothing does."""

    @abstractmethod
    def repair(self, messages: Sequence[Message]) -> Repaired:
        """Return the messages as a provider takes them; what keeps the rules stays the very same object."""


@cache
def dialect_named(name: str) -> Dialect:
    """Return the dialect in the folder of this name. The import at run time keeps the store free of dialects."""
    dialect: Dialect = import_module(f"proxy.dialects.{name}").DIALECT
    return dialect
