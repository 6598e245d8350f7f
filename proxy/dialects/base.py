"""The dialect seam: all that other rooms may ask of an API, in three parts.

    messages   `Message` and the methods of `Dialect`: reading, rewriting, the rules that they keep
    requests   `Dialect.requests`: a body is read, and the body that goes upstream is made
    replies    `Dialect.replies`: what an answer says, and how the proxy's own tools and errors look in it

An entry of a conversation keeps its native JSON, which no other room looks into. Each API has one folder beside
this file (`chat/` for Chat Completions) and one line in `DIALECTS`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cache
from hashlib import blake2b
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Protocol, Self, TypeAlias, TypeVar, cast

import msgspec
import orjson
from msgspec import Struct

from proxy.dialects.generations import Generations, SharedRoom
from proxy.dialects.jsontext import as_object, as_text, members_of, mended, with_value, without_fields, write
from proxy.dialects.sse import Event
from proxy.errors import PalimpsestError

if TYPE_CHECKING:  # it imports this module
    from proxy.dialects.own_tools import BodyFilter, StreamFilter

Made = TypeVar("Made")

JsonObject: TypeAlias = dict[str, Any]
SpokenRole: TypeAlias = Literal["system", "user", "assistant"]
ReadMessage: TypeAlias = "Callable[[int, bytes], tuple[Facts, JsonObject]]"
"""Reads a message at a position of a request."""
ReasoningMode: TypeAlias = Literal["auto", "keep", "drop"]
"""What of a reply's reasoning is sent back: all, none, or (`auto`) what providers want back."""

DIALECTS: Final[dict[str, str]] = {
    "chat": "proxy.dialects.chat",
    "responses": "proxy.dialects.responses",
    "messages": "proxy.dialects.messages",
}
"""Every dialect by its name, with the module that holds it as `DIALECT`."""
INSTRUCTION_ROLES: Final = frozenset({"system", "developer"})
"""Roles of the messages that lead a request and instruct the model."""
REPAIRED: Final = "repaired: "  # how each note of a repair begins
OWN_FIELDS: Final = ("agent", "is_internal")  # fields of a message that are ours: stored, and never sent upstream


_THOUGHTS: Final = re.compile(r"(?:\s*<(think|thinking|thought)>.*?</\1>)+", re.DOTALL)
"""How a reply begins that holds the reasoning of an open model as text."""
_URL_OF_BYTES: Final = re.compile(rb'"data:(?<!\\"data:)[^",]*;base64,[^"]*"')  # a whole value, no part of a text
_RUN: Final = re.compile(r"[0-9A-Za-z]{8,}")  # what may be the random part of an id
_DIGITS: Final = 12  # digits of the shortest random number
_SOURCE: Final = b'"type":"base64"'  # what the text of a source of bytes holds
_BYTES: Final = re.compile(rb'"data":"[^"\\]+"')  # where it holds them
_SHOWN: Final = 200  # characters of a name or an address that are shown at most
_OF_THE_CLIENT: Final = ("function", "custom")  # types of tools that the client runs
LONG_BODY: Final = 16 * 1024
"""Bytes of the shortest request body that is worth comparing with the one before; shorter ones are read as fast."""


class Call(Struct, frozen=True, kw_only=True):
    """One tool call."""

    id: str  # the id that its result names; empty where it has none
    name: str  # name of the tool; empty where it is missing
    arguments: str  # the arguments as text: JSON for a function, free text for a custom tool
    custom: bool = False  # whether its arguments are free text
    legacy: bool = False  # whether it has the deprecated form `function_call`, whose result has no id


class ToolDefinition(Struct, frozen=True, kw_only=True):
    """A tool that the proxy offers itself. All of its parameters are texts, and none is required."""

    name: str
    description: str
    parameters: tuple[tuple[str, str], ...]
    """Name and description of each; `{unset}` in it stands for how it is not given."""


class Attachment(Struct, frozen=True, kw_only=True):
    """A content part that holds no text: an image, a sound, a file."""

    place: int  # its index among the content parts
    kind: str  # the part's type, such as `image_url`
    is_image: bool
    description: str  # its media type and size, or its address

    @property
    def line(self) -> str:
        """How a text for a reader tells of it."""
        return f"[{self.kind}: {self.description}; only text can be shown here]"


class Countable(Struct, frozen=True, kw_only=True):
    """What of a message costs tokens."""

    texts: tuple[str, ...]  # each text that the model reads; they are counted one by one
    media: int = 0  # number of images, sounds and files, whose bytes are no text
    small_images: int = 0  # number of images that are sent in low detail; they are not among `media`
    reasoning: str = ""  # the reasoning of a reply. It costs output, and seldom input, since it is seldom sent back.


class Span(Struct, frozen=True, kw_only=True):
    """The smallest run of messages that can be removed without breaking the protocol."""

    start: int  # position of its first message
    stop: int  # position after its last message
    round: int  # number of the round that it lies in: user messages up to and with it


class Ties(Struct, frozen=True, kw_only=True):
    """What ties a message to those beside it: enough for its span. A dialect adds what its rules need."""

    role: str
    ids: tuple[str, ...] = ()  # the ids of its calls that results name, in order; "" for one that has none
    followers: frozenset[str] = frozenset()  # roles of the results that belong to it where they directly follow


def spans_of(ties: Sequence[Ties]) -> tuple[Span, ...]:
    """Return the spans of messages with these ties, in a row.

    Ids are not asked, since real sessions use one again later: all results directly after a message with calls belong
    to its span, whatever they answer.
    """
    found: list[Span] = []
    position = number = 0
    while position < len(ties):
        start, first = position, ties[position]
        position += 1
        number += first.role == "user"
        while position < len(ties) and ties[position].role in first.followers:
            position += 1
        found.append(Span(start=start, stop=position, round=number))
    return tuple(found)


def joined_spans(spans: Sequence[Span], hosted: Sequence[tuple[Collection[str], Collection[str]]]) -> tuple[Span, ...]:
    """Return spans, those put together over which something goes on that the provider runs.

    A program of the provider's may call the client's tools: it begins in one reply, and ends in a later one. `hosted`
    has, for each message, the ids of what it leaves running, and of what it is a part of.
    """
    if not any(begun for begun, _ in hosted):
        return tuple(spans)
    joined: list[Span] = []
    running: dict[str, int] = {}  # where in `joined` it began
    for span in spans:
        messages = range(span.start, span.stop)
        begins = [running[name] for at in messages for name in hosted[at][1] if name in running]
        joined.append(span)
        if begins:
            first = min(begins)
            joined[first:] = [Span(start=joined[first].start, stop=span.stop, round=span.round)]
            running = {name: min(place, first) for name, place in running.items()}
        running |= {name: len(joined) - 1 for at in messages for name in hosted[at][0]}
    return tuple(joined)


class Repaired(Struct, frozen=True, kw_only=True):
    """Messages that keep the rules of their API."""

    messages: tuple[Message, ...]
    notes: tuple[str, ...]  # what was repaired: at most one line for each kind of problem, with its count
    sources: tuple[int | None, ...]
    """For each message its position before the repair where it is the very same; None where it was made."""


def is_random(name: str) -> bool:
    """Tell whether an id looks as if nobody else had it: "call_1" and "functions.look:0" do not.

    Providers that count, or put the tool's name into the id, give the same ids in every conversation.
    """
    for run in _RUN.findall(name):
        digits = sum(map(str.isdigit, run))
        has_both_cases = run.lower() != run != run.upper()
        if digits >= _DIGITS or (digits < len(run) and digits >= (1 if has_both_cases else 2)):
            return True
    return False


def answer_of(text: str) -> str:
    """Return what a reply says behind the reasoning that it begins with, as `<think>…</think>`. Clients take that out.

    Where a template opens it, the reply only closes it, on a line of its own.
    """
    if "</th" not in text:
        return text
    if (thoughts := _THOUGHTS.match(text)) is not None:
        return text[thoughts.end() :]
    before, closed, after = text.partition("\n</think>")
    return after if closed and "<think>" not in before and after[:1] in {"", "\n"} else text


def one_line(text: str, most: int = _SHOWN) -> str:
    """Return a name that others gave on one line, cut where it is longer than so many characters."""
    line = " ".join(text[: 2 * most].split())
    return line if len(line) <= most else f"{line[:most]}…"


def sized(kind: Any, held: str, size: int | None = None) -> str:
    """Return the type and size of bytes: `image/png, 512 bytes`. They are `held` as base64, or `size` is given."""
    known = one_line(kind) if isinstance(kind, str) and kind else "unknown type"
    return f"{known}, {len(held.rstrip('=')) * 3 // 4 if size is None else size} bytes"


def written(value: Any) -> tuple[str, int]:
    """Return the JSON text of what is not read field by field, without the images and files in it; and their number.

    Those are bytes in base64: in a `data:` URL, or in a source `{"type": "base64", "data": ...}`.
    """
    raw, media = write(value), 0
    if b"base64" in raw:
        raw, media = _URL_OF_BYTES.subn(b'""', raw)
        if _SOURCE in raw:
            raw, sources = _BYTES.subn(b'"data":""', raw)
            media += sources
    return raw.decode(), media


def hash_of(canonical: bytes) -> bytes:
    """Return the content hash, 20 bytes, of a message with this canonical form."""
    return blake2b(canonical, digest_size=20, person=b"palimpsest-text").digest()


def body_id(raw: bytes) -> str:
    """Return the id of a text, 40 hexadecimal digits: equal texts have equal ids, wherever they stand."""
    return blake2b(raw, digest_size=20, person=b"palimpsest-body").hexdigest()


class Facts(Struct, kw_only=True, eq=False):
    """What follows from one message text alone; shared by every message with it. None: not asked for yet."""

    raw: bytes
    role: str
    has_own_fields: bool
    has_calls: bool
    content: bytes | None = None  # the content hash: see `conversation.content_hash`
    body: str | None = None  # the body id: see `conversation.body_of`
    step: tuple[str, str] | None = None  # the node of its last known parent, and its own node there
    reshaped: bool = False  # whether an earlier version may have given it another canonical form
    ties: Any = None  # what the dialect remembers of it for pairing calls with results


class Message(ABC):
    """One entry of a conversation: `raw` is its JSON text, and all else is read from that text.

    Two messages are equal when their texts are. Whatever changes a message returns another one.
    """

    __slots__ = ("_calls", "_data", "_ties", "facts", "raw")

    dialect: ClassVar[Dialect]

    raw: bytes  # the JSON text, UTF-8, unknown fields and key order included
    facts: Facts | None  # what is remembered of the text; None where nothing is

    def __init__(self, raw: bytes, data: JsonObject | None = None, facts: Facts | None = None) -> None:
        """Wrap `raw`, the text of a JSON object; `data` is the same, parsed, where it is known."""
        self.raw = raw
        self._data = data
        self.facts = facts
        self._calls: tuple[Call, ...] | None = None
        self._ties: Any = None  # `facts.ties`, or what would be there

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Self:
        """Return the message with the content of `data`, as compact JSON in its key order."""
        return cls(write(dict(data)))

    @classmethod
    def as_stored(cls, data: Mapping[str, Any]) -> Self:
        """Return the message with the content of `data`; what no parser would take again is mended."""
        made = cls.of(data)
        try:
            made.data  # noqa: B018 - it is parsed here, or never
        except orjson.JSONDecodeError:
            return cls.of(mended(data))
        return made

    @property
    def data(self) -> JsonObject:
        """The parsed object. Only the dialects and the HTTP layer read it; nobody writes to it."""
        data = self._data
        if data is None:
            data = self._data = orjson.loads(self.raw)
        return data

    def forget(self) -> None:
        """Drop the parsed object; it is parsed again when it is asked for."""
        self._data = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and other.raw == self.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.raw[:80]!r})"

    @property
    def items(self) -> list[JsonObject]:
        """What the API lists for it, parsed: itself, where it does not stand for several."""
        return [self.data]

    @property
    def own_fields(self) -> tuple[str, ...]:
        """Which of `OWN_FIELDS` it has."""
        facts = self.facts
        has_any = facts.has_own_fields if facts is not None else not self.data.keys().isdisjoint(OWN_FIELDS)
        return tuple([name for name in OWN_FIELDS if name in self.data]) if has_any else ()

    @property
    def agent(self) -> str | None:
        """The agent that the message says it is from; None where it names none."""
        found = [as_text(item.get("agent")) for item in self.items] if self.own_fields else []
        return next(filter(None, found), None)

    @property
    def is_internal(self) -> bool:
        """Whether it is marked `is_internal`: for models alone."""
        return bool(self.own_fields) and any([item.get("is_internal") is True for item in self.items])

    def without_own_fields(self) -> Self:
        """Return the message as it may go upstream; the very same message where it has no field of ours."""
        names = self.own_fields
        return self.without(*names) if names else self

    def without(self, *names: str) -> Self:
        """Return the message without these fields; the very same message where it has none of them."""
        if self.data.keys().isdisjoint(names):
            return self
        return type(self)(without_fields(self.raw, names))

    def replacing(self, name: str, value: Any) -> Self:
        """Return the message with field `name` set to `value` (JSON data); other fields keep their bytes."""
        return type(self)(with_value(self.raw, name, value))

    # ------------------------------------------------------------------------------------- reading

    @property
    def listed(self) -> tuple[bytes, ...]:
        """The JSON texts that the API lists for it: its own, where it does not stand for several."""
        return (self.raw,)

    @property
    def is_field(self) -> bool:
        """Whether it stands for a field of the request, and is none of its entries."""
        return False

    @property
    def parted(self) -> Sequence[tuple[Message, Message]]:
        """The message as two, at each place where a reply may begin that went on with it: see `Item.parted`."""
        return ()

    def continued(self, reply: Message) -> Message | None:
        """Return a reply to a request that ended with this one, an assistant's, as clients send both back: as one.

        None where they are told apart all the same: see `parted`.
        """
        return reply.with_text(self.text + reply.text)

    @property
    def is_lasting(self) -> bool:
        """Whether it counts for all that follows, and is never trimmed.

        It stands for what came before, which the provider has summed up; or it changes what tools there are.
        """
        return False

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
    def name(self) -> str:
        """The name that the message gives itself (a participant's, or a tool's on a result); "" without."""
        return as_text(self.data.get("name"))

    @property
    def calls(self) -> tuple[Call, ...]:
        """The tool calls in order; empty for every message that is not an assistant's."""
        if self._calls is None:
            has_none = self.facts is not None and not self.facts.has_calls
            self._calls = () if has_none else tuple(self._read_calls())
        return self._calls

    @abstractmethod
    def _read_calls(self) -> Iterable[Call]: ...

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids by which its provider knows it: those of its calls, or of the calls that it answers."""
        return self.answered or tuple([call.id for call in self.calls if call.id])

    @property
    def is_plain(self) -> bool:
        """Whether it holds nothing but text, calls for the client and reasoning.

        A result that is marked as failed is not plain: its text does not say so.
        """
        return self.plain_text is not None

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
        return bool(call.id) and call.id in self.answered

    @property
    def answered(self) -> tuple[str, ...]:
        """The ids of all calls that it answers; in most APIs a message holds one result."""
        answers = self.answers
        return () if answers is None else (answers,)

    @property
    def result_count(self) -> int:
        """How many results it carries."""
        return int(self.is_result)

    @property
    def results(self) -> tuple[Message, ...]:
        """Each of its results as a message of its own; the very message where it is nothing but one result."""
        return (self,) if self.is_result else ()

    def with_results(self, results: Sequence[Message | None]) -> Message | None:
        """Return it with these in the place of its `results`, None leaving one out; None where nothing is left."""
        return results[0]

    @property
    def beside(self) -> str:
        """The text that a user says in the same message as the results."""
        return ""

    @property
    @abstractmethod
    def has_content(self) -> bool:
        """Whether an assistant message says anything beside its calls that can be sent back."""

    @property
    def has_reasoning(self) -> bool:
        """Whether it holds reasoning that a change of what stands before it may make invalid."""
        return self.without_reasoning() is not self

    @property
    def begins_turn(self) -> bool:
        """Whether a user speaks."""
        return self.role == "user" and (not self.is_result or bool(self.beside))

    @property
    @abstractmethod
    def attachments(self) -> tuple[Attachment, ...]:
        """The content parts that hold no text, in order."""

    @property
    @abstractmethod
    def display_text(self) -> str:
        """What a person reads or hears of it: its text, what stands apart as paragraphs, a refusal, a transcript."""

    def all_texts(self) -> Iterator[str]:
        """Yield every text in it that somebody wrote: content, calls, arguments; a dialect adds names and a refusal."""
        yield self.text
        for call in self.calls:
            yield call.name
            yield call.arguments

    @abstractmethod
    def countable(self) -> Countable:
        """Return what of it costs tokens."""

    @abstractmethod
    def readable(self) -> str:
        """Return what it says as text for a reader: its own text first, then a line for each other thing."""

    def _call_lines(self) -> list[str]:
        return [f"[call of {one_line(call.name)}: {call.arguments}]" for call in self.calls]

    # ------------------------------------------------------------------------------------ rewriting

    def with_text(self, text: str) -> Message:
        """Return it with `text` as its whole content."""
        return self.replacing("content", text)

    def with_content_of(self, other: Message) -> Message:
        """Return it with the whole content of another message of its dialect."""
        return self.replacing("content", other.data.get("content"))

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

    def with_paired_reasoning(self) -> Message:
        """Return it without reasoning that nothing of it follows, where that is refused."""
        return self

    def behind_rounds(self, rounds: Sequence[Message]) -> Message:
        """Return a reply without what the client was shown of `rounds`, which are sent before it and hold it, too."""
        del rounds
        return self

    def without_reasoning(self) -> Message | None:
        """Return it without reasoning that is valid only behind the very entries that it was made behind.

        The very same message where it has none; None where nothing is left of it.
        """
        return self


_FACTS_ENTRY_BYTES: Final = 1000  # what one entry takes beside its text, about
_FACTS_ROOM: Final = SharedRoom(24 * 1024 * 1024)  # bytes in one process, for all dialects


class KnownMessages(Generations[bytes, Facts]):
    """What is known of the messages of one dialect, by their texts: a text that was read before is not read again."""

    def __init__(self) -> None:
        super().__init__(_FACTS_ROOM, lambda facts: len(facts.raw) + _FACTS_ENTRY_BYTES)

    def messages(
        self, texts: Sequence[bytes], make: Callable[[bytes, JsonObject | None, Facts | None], Made], read: ReadMessage
    ) -> tuple[list[Facts], tuple[Made, ...]]:
        """Return the messages, and what is known of each; `read` reads a text that is new, at its position."""
        known: list[Facts] = []
        new: dict[bytes, Facts] = {}
        messages: list[Made] = []
        for text, remembered in zip(texts, self.recall(texts), strict=True):
            facts, data = remembered or new.get(text), None
            if facts is None:
                facts, data = read(len(known), text)
                new[text] = facts
            known.append(facts)
            messages.append(make(facts.raw, data, facts))
        for text, facts in new.items():
            self.put(text, facts)
        return known, tuple(messages)


# ------------------------------------------------------------------------------------------ requests

RoleOrder: TypeAlias = Literal["alternate", "one_system"]  # an order of roles that some servers insist on
MarkKind: TypeAlias = Literal["openai", "anthropic"]  # whose cache marks they are
_NUMBER: Final = b"-0123456789"


class JoinedTexts:
    """The messages that were sent last, and their texts in a row: a beginning that is the same is not joined again."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: tuple[tuple[Message, ...], tuple[Message, ...], bytes] = ((), (), b"")

    def sent(self, messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], bytes]:
        """Return the messages without fields of ours, and their texts with commas between them."""
        asked, sent, text = self._last
        count = min(len(asked), len(messages))
        while count and messages[count - 1] != asked[count - 1]:
            count -= 1
        if messages[:count] != asked[:count]:
            count = 0
        text = text[: len(text) - sum([len(message.raw) + 1 for message in sent[count:]])] if count else b""
        sent = sent[:count]
        new = tuple(
            [
                message
                if (facts := message.facts) is not None and not facts.has_own_fields
                # Nothing is known of a message that comes from the store.
                else message.without_own_fields()
                for message in messages[count:]
            ]
        )
        sent += new
        text = b",".join([text, *[message.raw for message in new]] if count else [message.raw for message in new])
        self._last = (messages, sent, text)
        return sent, text

    @property
    def size(self) -> int:
        """Bytes of the texts that are kept."""
        return len(self._last[2])


class Request(Struct, frozen=True, kw_only=True):
    """A request that was understood as far as it must be. Every text in it can be parsed again."""

    raw: bytes  # the client's body
    fields: Mapping[str, bytes]  # its top-level fields in order, each as its JSON text; the messages are one of them
    instructions: tuple[Message, ...]  # the system and developer messages that lead
    messages: tuple[Message, ...]  # all the others in order, our own fields included
    model: str  # empty where the client named none
    stream: bool
    has_tools: bool  # whether it offers tools, at least one; Chat Completions' old `functions` count
    tools: bytes | None  # the JSON text of its tools; None where it offers none, or `functions`
    wants_usage: bool | None  # whether it asks for the usage of a stream; None where it says nothing about it
    reply_tokens: int | None = None  # how many tokens the reply may have at most; None where it says nothing about it
    replies: tuple[int, ...] = ()  # positions of the assistant messages in `messages`
    parameters: Mapping[str, Any] = {}  # the values of all fields but messages and tools
    has_own_fields: bool = True  # whether any message has, or may have, fields that are ours
    ends: tuple[int, ...] = ()
    """Places in `raw`: where the array of messages begins, then where each of them ends. Empty: they are not known,
    or the body is shorter than `LONG_BODY`."""
    joined: JoinedTexts | None = None  # what was sent of the request before it, where that is known
    kept: int = 0  # how many messages, instructions among them, are the very objects of the request before
    untouched: bool = False  # whether it goes upstream as it is: the provider holds what it goes on from
    state: str = ""  # the id of what the provider holds, a response, conversation or thread, from which it goes on
    conversation: str = ""  # that id where it is a conversation's: each of its replies comes with it
    keeps_reply: bool = True  # whether the provider may keep the reply, for later requests to name
    references: tuple[str, ...] = ()  # ids of all that it names and the provider holds, `state` among them
    pointers: tuple[str, ...] = ()  # those of them that stand in the place of items of replies
    keeps_loop: bool = False  # whether the reasoning of a tool loop that is under way must be sent back
    binds_loop: bool = False  # whether that may also be refused behind anything else than it was made behind
    notes: tuple[str, ...] = ()  # what of it the proxy leaves to the provider, in words for the receipt

    @property
    def new_bytes(self) -> int:
        """How many bytes of the body had to be parsed."""
        return len(self.raw) - (self.ends[self.kept] if self.kept else 0)

    @property
    def known(self) -> int:
        """How many of `messages`, from the first on, are the very objects of the request before."""
        return max(0, self.kept - len(self.instructions))

    def common(self, body: bytes) -> int:
        """Return how many of its messages, instructions among them, end within the bytes that `body` begins with."""
        low, high = 0, len(self.ends) - 1
        text, at = memoryview(self.raw), 0
        while low < high:
            middle = (low + high + 1) // 2
            end = self.ends[middle]
            if body.startswith(text[at:end], at):
                low, at = middle, end
            else:
                high = middle - 1
        return low

    def field(self, path: str) -> str | None:
        """Return the string, or the number as it is written, at a dotted path of the body; None without one."""
        first, *rest = path.split(".")
        text = self.fields.get(first)
        for name in rest:
            members = members_of(text)
            text = bytes(members[name]) if name in members else None
        if text is None:
            return None
        if text[:1] in _NUMBER:
            return text.decode()
        return cast("str", orjson.loads(text)) if text.startswith(b'"') else None


class ToolOffer(Struct, frozen=True, kw_only=True):
    """The tools of a request with the proxy's own."""

    names: tuple[str, ...]  # those of the proxy's own; empty where the request leaves no room for them
    tools: bytes | None  # the JSON text of all of them; None where there are none


class Overflow(Struct, frozen=True, kw_only=True):
    """A request that was larger than the model's context window, as the error tells it."""

    window: int | None  # tokens that the model takes; of some providers, without the reply
    asked: int | None  # tokens of the input, as the upstream counted them
    reply: int | None  # tokens that were asked for the reply, where the error counts them in


def _unchanged(messages: Sequence[Message], *_: Any) -> tuple[Message, ...]:
    return tuple(messages)


class RequestSide(Struct, frozen=True, kw_only=True):
    """A dialect's requests: pure functions. An API that knows no marks, or insists on no order, leaves those out."""

    path: str  # where they are sent, after the upstream's base address
    headers: tuple[tuple[bytes, bytes], ...] = ()  # what a request of the proxy's own must say beside its body
    parse: Callable[..., Request]
    """Reads a body. Fields, roles, parts and items that are not known here pass as they are.

    `InvalidRequest`: it is no JSON object in UTF-8, nests over `MAX_LEVELS`, has a field of the wrong type, or is a
    request of another API. `before` may be a request whose body has the same bytes up to the end of its first `kept`
    messages (`Request.ends`): these are not read again.
    """
    compose: Callable[..., bytes]
    """Makes the body to send of a request: the client's bytes, with nothing else changed than what is asked for.

    By name, each as the client sent it where it is not given: instructions, messages, drop_fields, tools; and where
    the client says nothing about these: add_usage, cache_key, cache_newest. Our own fields never go out.
    """
    leaves_room: Callable[[Request], bool]
    """Tells whether a request leaves room for the proxy's own tools: the model may call any, and gives one reply."""
    add_tools: Callable[[bytes | None, Sequence[ToolDefinition]], ToolOffer]
    """Adds the proxy's own tools to the JSON text of the client's, whose bytes stay."""
    tool_name: Callable[[JsonObject], Any] = lambda tool: tool.get("name")
    """Finds the name of a declared tool."""
    decides_caching: Callable[[Mapping[str, bytes]], bool]
    """Tells whether a client says in the fields of its request what is to be cached."""
    marked: Callable[[Sequence[Message], Collection[int], MarkKind], tuple[Message, ...]] = _unchanged
    """Puts cache marks at the ends of the messages at these places."""
    broken: Callable[[Sequence[Message], int, int, MarkKind], tuple[Message, ...]] = _unchanged
    """Puts a cache mark into the message at a place, after so many characters of its text, if there is room for one."""
    overflow_of: Callable[[int, bytes], Overflow | None]
    """Reads status and body of an error: None where it is no overflow of the context window."""
    demanded_order: Callable[[int, bytes], RoleOrder | None] = lambda _status, _body: None
    """Reads status and body of an error: the order of roles that it asks for."""
    reordered: Callable[[Sequence[Message], RoleOrder], tuple[Message, ...]] = _unchanged
    """Puts messages in such an order."""
    refuses_usage: Callable[[bytes], bool] = lambda _: False
    """Tells whether the body of an error speaks of the option that `add_usage` adds."""
    refuses_caching: Callable[[bytes], bool] = lambda _: False
    """Tells whether the body of an error speaks of the option that `cache_newest` adds."""
    state_fields: tuple[str, ...] = ()  # fields that name a state which the provider holds, and the proxy can expand
    unknown_state: str = "not_found"  # the code of the error for what the provider holds for somebody else
    resolved: Callable[[Request, Sequence[Message]], Request] | None = None
    """Puts items of these replies in the place of the `pointers` to them. None: the API has no such thing."""
    opening_error: Callable[[bytes], bytes | None] | None = None
    """Reads how a stream begins: the body of the error that it begins with, "" where it begins with none, None where
    that is not told yet. None in the function's place: an error is told by the status."""

    def offer_tools(self, request: Request, own: Sequence[ToolDefinition]) -> ToolOffer:
        """Return the tools to send: the client's, then the proxy's own, where the request leaves room for them."""
        if not self.leaves_room(request):
            return ToolOffer(names=(), tools=request.tools)
        return self.add_tools(request.tools, own)

    def declared(self, tools: bytes) -> list[tuple[str | None, msgspec.Raw]]:
        """Return name and text of each tool in this JSON list; the name is None where the provider runs it itself.

        Raises `msgspec.DecodeError` where it is no list.
        """
        return [
            (self._name_of(msgspec.json.decode(text)), text)
            for text in msgspec.json.decode(tools, type=list[msgspec.Raw])
        ]

    def _name_of(self, tool: Any) -> str | None:
        found = as_object(tool)
        name = self.tool_name(found) if found.get("type", "custom") in _OF_THE_CLIENT else None
        return name if isinstance(name, str) else None


# ------------------------------------------------------------------------------------------- replies


def begun_under(name: str) -> str:
    """Return what is kept beside the id of a response whose reply went on in another one: see `Replies.ids`."""
    return f"begun:{name}"


class Replies(Struct, frozen=True, kw_only=True):
    """What an answer of the upstream's says, as far as it has come."""

    messages: tuple[Message, ...]  # the replies, one for each choice, as they are stored
    finish_reasons: tuple[str | None, ...]  # why each ended; None where it broke off, or nothing was said about it
    usage: JsonObject | None  # in the form of Chat Completions, which receipts and prices read
    model: str | None  # the model that answered, as it calls itself
    error: str | None  # what the error says, where it is one
    ids: tuple[str, ...] = ()
    """Ids under which the provider keeps the reply and parts of it. A streamed reply of several rounds began under the
    id of the first, which clients may name, too: it is among them, also as `begun_under` has it."""
    kept: bool = True  # whether it does; it may say that it keeps nothing
    later: bool = False  # whether the provider is not done with the reply, which can be fetched then
    cancelled: bool = False  # whether the provider was told to stop


class StreamReader(Protocol):
    """Reads one streamed answer, event by event, and never fails: what cannot be understood is left out."""

    @property
    def replies(self) -> Replies: ...  # what has come so far

    @property
    def failed(self) -> bool: ...  # whether an error was reported

    def take(self, event: Event) -> bool: ...  # reads the next event; tells whether it is there for its usage alone


class OwnCalls(Struct, frozen=True, kw_only=True):
    """The calls of one round of a reply, told apart."""

    message: Message  # the round as it can be sent back, without the proxy's calls that broke off
    own: tuple[Call, ...]  # the calls that the proxy answers, in order
    broken: bool = False  # whether a call of the proxy's tools broke off: it cannot be answered
    others: bool  # whether it calls anything that the client answers


class ReplySide(Struct, frozen=True, kw_only=True):
    """A dialect's replies: pure functions, and what reads one reply."""

    read: Callable[[bytes], Replies]  # reads an answer in one piece; raises ValueError where it is no JSON
    reader: Callable[[], StreamReader]
    ends: tuple[bytes, ...]  # the data, or the names, of the events that end a stream
    body_filter: Callable[[Collection[str]], BodyFilter[Any]]  # begins with the names of the proxy's tools
    stream_filter: Callable[[Collection[str], bool], StreamFilter[Any]]
    """Begins with these names, and whether usage is kept from the client, which did not ask for it."""
    repeat: Callable[..., tuple[bytes, bytes]]
    """Makes an answer of a stored reply (by name: exchange, created, model, stream, usage): content type and body."""
    calling: str  # the finish reason of a reply that calls tools
    error_words: Callable[[bytes], str | None]
    """Returns what the body of an error says; None where it is none of this API's."""
    error_body: Callable[[PalimpsestError], bytes]  # returns an error of the proxy's in the API's shape
    error_event: Callable[[bytes], bytes]  # returns the event that ends a broken stream with the body of an error
    repeat_id: Callable[[str], str] | None = None
    """Returns the id that `repeat` gives an exchange's answer, where a later request may go on from it."""


NO_RESULT: Final = "[no result was recorded for this call]"  # what stands in for a result that was never recorded


class RulesWalk:
    """One reading of messages by the rules of an API: what stays and is put in, in order, and what is wrong."""

    def __init__(self, messages: Sequence[Message] = ()) -> None:
        self.messages: list[Message] = list(messages)
        self.sources: list[int | None] = list(range(len(messages)))
        """See `Repaired.sources`."""
        self.problems: list[tuple[int, StrEnum]] = []
        """Positions, and what is wrong with the message there. The value says it, and reads on as a note."""

    def keep(self, source: int | None, message: Message) -> None:
        """Let a message stand next."""
        self.messages.append(message)
        self.sources.append(source)


class Dialect(ABC):
    """One API: its rules for messages, its requests and its replies."""

    name: ClassVar[str]  # its name in `DIALECTS`, such as `chat`
    requests: ClassVar[RequestSide]
    replies: ClassVar[ReplySide]
    message: ClassVar[type[Message]]
    """Returns the message with this JSON text."""
    repairs_blocks_alone: ClassVar[bool] = False
    """Whether messages that need no repair need none behind others that need none, if they begin with no result."""

    @abstractmethod
    def spoken(self, role: SpokenRole, text: str) -> Message:
        """Return a message that the proxy makes: `text`, said in this role."""

    @abstractmethod
    def result(self, call: str, text: str) -> Message:
        """Return a tool result that the proxy makes for the call with this id."""

    def question(self, model: str, instructions: str, text: str) -> bytes:
        """Return the body of a request of the proxy's own: instructions and one user message, nothing else."""
        told = (self.spoken("system", instructions).raw, self.spoken("user", text).raw)
        return b'{"model":%b,"messages":[%b]}' % (write(model), b",".join(told))

    @abstractmethod
    def canonical(self, message: Message) -> bytes:
        """Return the form by which a message is recognised when it comes back. Never sent, never raises."""

    def earlier_canonicals(self, message: Message) -> Sequence[bytes]:  # noqa: ARG002 - most dialects have had one form
        """Return the forms that older versions gave it, the newest first: nodes may still have their names by these.

        All messages of a dialect have as many.
        """
        return ()

    @abstractmethod
    def spans(self, messages: Sequence[Message]) -> tuple[Span, ...]:
        """Return the spans of messages in order; together they cover every position once."""

    @abstractmethod
    def walk(self, messages: Sequence[Message]) -> RulesWalk:
        """Read messages by the API's rules; what keeps them stays the very same object."""

    cures: ClassVar[Mapping[StrEnum, str]] = {}
    """How a problem is cured where that is not by leaving out."""

    def problems(self, messages: Sequence[Message]) -> list[str]:
        """Return what breaks the API's rules, in words with positions; empty where nothing does."""
        return [f"message {position}: {problem}" for position, problem in self.walk(messages).problems]

    def repair(self, messages: Sequence[Message]) -> Repaired:
        """Return the messages as a provider takes them."""
        walk = self.walk(messages)
        found = Counter([problem for _, problem in walk.problems])
        notes = [
            f"{REPAIRED}{found[kind]} x {kind}, {self.cures.get(kind, 'left out')}"
            for kind in (type(walk.problems[0][1]) if found else ())
            if found[kind]
        ]
        return Repaired(messages=tuple(walk.messages), notes=tuple(notes), sources=tuple(walk.sources))


@cache
def dialect_named(name: str) -> Dialect:
    """Return a dialect of `DIALECTS`. The import at run time keeps the other rooms free of its folder."""
    dialect: Dialect = import_module(DIALECTS[name]).DIALECT
    return dialect
