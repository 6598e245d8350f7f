"""The dialect interface: everything that other rooms may ask of an API, in three parts.

    messages   `Message` and the methods of `Dialect`: read and rewrite messages, check and repair the protocol
    requests   `Dialect.requests`: parse a request, compose the body that goes upstream
    replies    `Dialect.replies`: read an answer, filter calls of the proxy's own tools, format the proxy's errors

An entry of a conversation keeps its native JSON. No other room looks into it. Each API has a folder beside this file
(`chat/` for Chat Completions) and one line in `DIALECTS`.
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

if TYPE_CHECKING:  # own_tools imports this module
    from proxy.dialects.own_tools import BodyFilter, StreamFilter

Made = TypeVar("Made")

JsonObject: TypeAlias = dict[str, Any]
SpokenRole: TypeAlias = Literal["system", "user", "assistant"]
ReadMessage: TypeAlias = "Callable[[int, bytes], tuple[Facts, JsonObject]]"
"""Reads a message at a position of a request."""
ReasoningMode: TypeAlias = Literal["auto", "keep", "drop"]
"""How much of a reply's reasoning is sent back: all, none, or (`auto`) the part that providers want back."""

DIALECTS: Final[dict[str, str]] = {
    "chat": "proxy.dialects.chat",
    "responses": "proxy.dialects.responses",
    "messages": "proxy.dialects.messages",
}
"""Each dialect's name and the module that holds it as `DIALECT`."""
INSTRUCTION_ROLES: Final = frozenset({"system", "developer"})
"""Roles of the messages that stand at the beginning of a request and instruct the model."""
REPAIRED: Final = "repaired: "  # the prefix of each repair note
OWN_FIELDS: Final = ("agent", "is_internal")  # the proxy's own fields of a message: stored, never sent upstream


_THOUGHTS: Final = re.compile(r"(?:\s*<(think|thinking|thought)>.*?</\1>)+", re.DOTALL)
"""Reasoning of an open model as text at the beginning of a reply."""
_URL_OF_BYTES: Final = re.compile(rb'"data:(?<!\\"data:)[^",]*;base64,[^"]*"')  # a whole JSON value, not part of a text
_RUN: Final = re.compile(r"[0-9A-Za-z]{8,}")  # may be the random part of an id
_DIGITS: Final = 12  # digits of the shortest run that counts as random by its digits alone
_SOURCE: Final = b'"type":"base64"'  # marks an object that holds base64 data
_BYTES: Final = re.compile(rb'"data":"[^"\\]+"')  # the base64 data in such an object
_SHOWN: Final = 200  # maximum characters of a name or an address in a description
_OF_THE_CLIENT: Final = ("function", "custom")  # types of tools that the client runs
LONG_BODY: Final = 16 * 1024
"""Bytes of the shortest request body that is compared with the previous one. Shorter ones parse just as fast."""


class Call(Struct, frozen=True, kw_only=True):
    """One tool call."""

    id: str  # the id that its result names; empty if it has none
    name: str  # name of the tool; empty if missing
    arguments: str  # the arguments as text: JSON for a function, free text for a custom tool
    custom: bool = False  # whether its arguments are free text
    legacy: bool = False  # whether it is a deprecated `function_call`, whose result has no id


class ToolDefinition(Struct, frozen=True, kw_only=True):
    """A tool that the proxy itself offers. All parameters are strings, and none is required."""

    name: str
    description: str
    parameters: tuple[tuple[str, str], ...]
    """Name and description of each parameter. `{unset}` in a description becomes the words for leaving it unset."""


class Attachment(Struct, frozen=True, kw_only=True):
    """A content part without text: an image, a sound, a file."""

    place: int  # its index among the content parts
    kind: str  # the part's type, such as `image_url`
    is_image: bool
    description: str  # its media type and size, or its URL

    @property
    def line(self) -> str:
        """The line that stands for it in a text for a reader."""
        return f"[{self.kind}: {self.description}; only text can be shown here]"


class Countable(Struct, frozen=True, kw_only=True):
    """The parts of a message that cost tokens."""

    texts: tuple[str, ...]  # each text that the model reads; each is counted separately
    media: int = 0  # number of images, sounds and files; their bytes are not text
    small_images: int = 0  # number of images sent in low detail; not included in `media`
    reasoning: str = ""  # the reasoning of a reply. Costs output tokens, seldom input tokens: it is seldom sent back.


class Span(Struct, frozen=True, kw_only=True):
    """The smallest run of messages that can be removed without breaking the protocol."""

    start: int  # position of its first message
    stop: int  # position after its last message
    round: int  # number of its round: counts the user messages up to and including this span


class Ties(Struct, frozen=True, kw_only=True):
    """What a message's span depends on: its role, calls and expected results. Dialects add what their rules need."""

    role: str
    ids: tuple[str, ...] = ()  # ids of its calls, in order; "" for a call without an id
    followers: frozenset[str] = frozenset()  # roles of the results that belong to it if they directly follow


def spans_of(ties: Sequence[Ties]) -> tuple[Span, ...]:
    """Return the spans of consecutive messages, given their ties.

    All results directly after a message with calls belong to its span, whichever call they answer. Ids are ignored,
    because real sessions reuse them later.
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
    """Return the spans, merging those across which a program of the provider's runs.

    Example: a program that the provider runs begins in one reply, calls the client's tools, and ends in a later reply.
    `hosted` holds two collections of ids for each message: programs it leaves running, and programs it is a part of.
    """
    if not any(begun for begun, _ in hosted):
        return tuple(spans)
    joined: list[Span] = []
    running: dict[str, int] = {}  # index in `joined` of the span where each program began
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
    """Messages after a repair; they follow the rules of their API."""

    messages: tuple[Message, ...]
    notes: tuple[str, ...]  # one line for each kind of problem that was repaired, with its count
    sources: tuple[int | None, ...]
    """For each message its position before the repair if it is the very same object; None if the repair made it."""


def is_random(name: str) -> bool:
    """Tell whether an id looks random, that is unique: "call_1" and "functions.look:0" do not.

    Some providers count their calls or put the tool's name into the id. Their ids repeat in every conversation.
    """
    for run in _RUN.findall(name):
        digits = sum(map(str.isdigit, run))
        has_both_cases = run.lower() != run != run.upper()
        if digits >= _DIGITS or (digits < len(run) and digits >= (1 if has_both_cases else 2)):
            return True
    return False


def answer_of(text: str) -> str:
    """Return a reply's text without the reasoning at its beginning (`<think>…</think>`), which clients remove.

    If the chat template already opened the reasoning, the reply only closes it: `</think>` on a line of its own.
    """
    if "</th" not in text:
        return text
    if (thoughts := _THOUGHTS.match(text)) is not None:
        return text[thoughts.end() :]
    before, closed, after = text.partition("\n</think>")
    return after if closed and "<think>" not in before and after[:1] in {"", "\n"} else text


def one_line(text: str, most: int = _SHOWN) -> str:
    """Return a name that a client or provider chose on one line, cut to `most` characters."""
    line = " ".join(text[: 2 * most].split())
    return line if len(line) <= most else f"{line[:most]}…"


def sized(kind: Any, held: str, size: int | None = None) -> str:
    """Return type and size of binary data: `image/png, 512 bytes`. Without `size`, `held` (base64) gives it."""
    known = one_line(kind) if isinstance(kind, str) and kind else "unknown type"
    return f"{known}, {len(held.rstrip('=')) * 3 // 4 if size is None else size} bytes"


def written(value: Any) -> tuple[str, int]:
    """Return a value as JSON text with its images and files cut out, and their number.

    Images and files are base64 data in a `data:` URL or in a source `{"type": "base64", "data": ...}`. Used for values
    that are not read field by field.
    """
    raw, media = write(value), 0
    if b"base64" in raw:
        raw, media = _URL_OF_BYTES.subn(b'""', raw)
        if _SOURCE in raw:
            raw, sources = _BYTES.subn(b'"data":""', raw)
            media += sources
    return raw.decode(), media


def hash_of(canonical: bytes) -> bytes:
    """Return the content hash (20 bytes) of a message, given its canonical form."""
    return blake2b(canonical, digest_size=20, person=b"palimpsest-text").digest()


def body_id(raw: bytes) -> str:
    """Return the id of a text, 40 hexadecimal digits. Equal texts have equal ids everywhere."""
    return blake2b(raw, digest_size=20, person=b"palimpsest-body").hexdigest()


class Facts(Struct, kw_only=True, eq=False):
    """Facts derived from one message text alone, shared by all messages with that text. None: not computed yet."""

    raw: bytes
    role: str
    has_own_fields: bool
    has_calls: bool
    content: bytes | None = None  # the content hash: see `conversation.content_hash`
    body: str | None = None  # the body id: see `conversation.body_of`
    step: tuple[str, str] | None = None  # the last known parent node, and this message's own node below it
    reshaped: bool = False  # whether an earlier version may have given it a different canonical form
    ties: Any = None  # the dialect's cached `Ties`


class Message(ABC):
    """One entry of a conversation. `raw` is its JSON text; everything else is read from that text.

    Messages are immutable: methods that change one return a new message. Two messages are equal if their texts are.
    """

    __slots__ = ("_calls", "_data", "_ties", "facts", "raw")

    dialect: ClassVar[Dialect]

    raw: bytes  # the JSON text in UTF-8, including unknown fields and key order
    facts: Facts | None  # cached facts about the text; None if there are none

    def __init__(self, raw: bytes, data: JsonObject | None = None, facts: Facts | None = None) -> None:
        """Wrap `raw`, the text of a JSON object. `data` is the same object parsed, if already known."""
        self.raw = raw
        self._data = data
        self.facts = facts
        self._calls: tuple[Call, ...] | None = None
        self._ties: Any = None  # `facts.ties`, or a private copy if it is not stored there

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Self:
        """Return the message with the content of `data`, as compact JSON in its key order."""
        return cls(write(dict(data)))

    @classmethod
    def as_stored(cls, data: Mapping[str, Any]) -> Self:
        """Return the message with the content of `data`. Values that no parser would accept again are mended."""
        made = cls.of(data)
        try:
            made.data  # noqa: B018 - parses the text, to see whether that works
        except orjson.JSONDecodeError:
            return cls.of(mended(data))
        return made

    @property
    def data(self) -> JsonObject:
        """The parsed object. Only the dialects and the HTTP layer read it; it must not be modified."""
        data = self._data
        if data is None:
            data = self._data = orjson.loads(self.raw)
        return data

    def forget(self) -> None:
        """Drop the parsed object. The next access to `data` parses it again."""
        self._data = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and other.raw == self.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.raw[:80]!r})"

    @property
    def items(self) -> list[JsonObject]:
        """The API's entries that it stands for, parsed; for most messages itself alone."""
        return [self.data]

    @property
    def own_fields(self) -> tuple[str, ...]:
        """The fields of `OWN_FIELDS` that it has."""
        facts = self.facts
        has_any = facts.has_own_fields if facts is not None else not self.data.keys().isdisjoint(OWN_FIELDS)
        return tuple([name for name in OWN_FIELDS if name in self.data]) if has_any else ()

    @property
    def agent(self) -> str | None:
        """The agent that the message names as its author, or None."""
        found = [as_text(item.get("agent")) for item in self.items] if self.own_fields else []
        return next(filter(None, found), None)

    @property
    def is_internal(self) -> bool:
        """Whether it is marked `is_internal`: meant for models alone."""
        return bool(self.own_fields) and any([item.get("is_internal") is True for item in self.items])

    def without_own_fields(self) -> Self:
        """Return the message as it may go upstream; the very same object if it has none of the proxy's fields."""
        names = self.own_fields
        return self.without(*names) if names else self

    def without(self, *names: str) -> Self:
        """Return the message without these fields; the very same object if it has none of them."""
        if self.data.keys().isdisjoint(names):
            return self
        return type(self)(without_fields(self.raw, names))

    def replacing(self, name: str, value: Any) -> Self:
        """Return the message with field `name` set to `value` (JSON data); other fields keep their bytes."""
        return type(self)(with_value(self.raw, name, value))

    # ------------------------------------------------------------------------------------- reading

    @property
    def listed(self) -> tuple[bytes, ...]:
        """The JSON texts of the API's entries that it stands for; for most messages its own text alone."""
        return (self.raw,)

    @property
    def is_field(self) -> bool:
        """Whether it stands for a field of the request instead of an entry in the list of messages."""
        return False

    @property
    def parted(self) -> Sequence[tuple[Message, Message]]:
        """The message split in two, once for each place where a continuing reply may begin. See `Item.parted`."""
        return ()

    def continued(self, reply: Message) -> Message | None:
        """Return this assistant message and the reply that continued it as the one message that clients send back.

        None if `parted` can still separate the two.
        """
        return reply.with_text(self.text + reply.text)

    @property
    def is_lasting(self) -> bool:
        """Whether it affects everything after it, and so is never trimmed.

        Examples: a provider's own summary of what came before, or a change of the available tools.
        """
        return False

    @property
    @abstractmethod
    def role(self) -> str:
        """`system`, `developer`, `user`, `assistant`, `tool`, `function`, or another role of the API; "" for none."""

    @property
    @abstractmethod
    def text(self) -> str:
        """The text of the whole content, joined, without calls and reasoning."""

    @property
    @abstractmethod
    def texts(self) -> tuple[str, ...]:
        """The text of each content part in order, "" for a part without text. A plain string is one part."""

    @property
    @abstractmethod
    def plain_text(self) -> str | None:
        """The text if the content is nothing but text, else None."""

    @property
    def name(self) -> str:
        """The message's own `name` (a participant's, or the tool's on a result); "" if it has none."""
        return as_text(self.data.get("name"))

    @property
    def calls(self) -> tuple[Call, ...]:
        """The tool calls in order; empty for every message that is not the assistant's."""
        if self._calls is None:
            has_none = self.facts is not None and not self.facts.has_calls
            self._calls = () if has_none else tuple(self._read_calls())
        return self._calls

    @abstractmethod
    def _read_calls(self) -> Iterable[Call]: ...

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids by which the provider knows it: those of its calls, or of the calls that it answers."""
        return self.answered or tuple([call.id for call in self.calls if call.id])

    @property
    def is_plain(self) -> bool:
        """Whether it holds nothing but text, calls for the client, and reasoning.

        A result that is marked as failed is not plain, because its text does not show the failure.
        """
        return self.plain_text is not None

    @property
    @abstractmethod
    def is_result(self) -> bool:
        """Whether it carries the result of a tool."""

    @property
    @abstractmethod
    def answers(self) -> str | None:
        """The id of the call that a result answers; None for other messages, or if the id is missing."""

    def answers_call(self, call: Call) -> bool:
        """Tell whether it is the result of `call`, a call of the same span."""
        return bool(call.id) and call.id in self.answered

    @property
    def answered(self) -> tuple[str, ...]:
        """The ids of all calls that it answers. In most APIs a message holds one result."""
        answers = self.answers
        return () if answers is None else (answers,)

    @property
    def result_count(self) -> int:
        """The number of results that it carries."""
        return int(self.is_result)

    @property
    def results(self) -> tuple[Message, ...]:
        """Each of its results as a message of its own; the very same object if it is nothing but one result."""
        return (self,) if self.is_result else ()

    def with_results(self, results: Sequence[Message | None]) -> Message | None:
        """Return it with these as its `results`. None in the list removes a result. Return None if nothing is left."""
        return results[0]

    @property
    def beside(self) -> str:
        """The user's own text in a message that also holds results."""
        return ""

    @property
    @abstractmethod
    def has_content(self) -> bool:
        """Whether an assistant message holds anything beside its calls that can be sent back."""

    @property
    def has_reasoning(self) -> bool:
        """Whether it holds reasoning that becomes invalid if something before it changes."""
        return self.without_reasoning() is not self

    @property
    def begins_turn(self) -> bool:
        """Whether a user speaks in it, so that a turn begins."""
        return self.role == "user" and (not self.is_result or bool(self.beside))

    @property
    @abstractmethod
    def attachments(self) -> tuple[Attachment, ...]:
        """The content parts without text, in order."""

    @property
    @abstractmethod
    def display_text(self) -> str:
        """What a person reads or hears: the text (separate parts as paragraphs), a refusal, a transcript."""

    def all_texts(self) -> Iterator[str]:
        """Yield every text in it: the content, and names and arguments of calls. Dialects add names and a refusal."""
        yield self.text
        for call in self.calls:
            yield call.name
            yield call.arguments

    @abstractmethod
    def countable(self) -> Countable:
        """Return the parts of it that cost tokens."""

    @abstractmethod
    def readable(self) -> str:
        """Return it as text for a reader: its own text first, then a line for each other part."""

    def _call_lines(self) -> list[str]:
        return [f"[call of {one_line(call.name)}: {call.arguments}]" for call in self.calls]

    # ------------------------------------------------------------------------------------ rewriting

    def with_text(self, text: str) -> Message:
        """Return it with `text` as the whole content."""
        return self.replacing("content", text)

    def with_content_of(self, other: Message) -> Message:
        """Return it with the whole content of another message of the same dialect."""
        return self.replacing("content", other.data.get("content"))

    @abstractmethod
    def with_texts(self, texts: Sequence[str | None]) -> Message:
        """Return it with a new text for each of `texts`. None removes the part. Other fields of the parts stay."""

    @abstractmethod
    def with_appended(self, text: str) -> Message:
        """Return it with `text` after its content, as a separate paragraph or part."""

    @abstractmethod
    def with_calls(self, kept: Collection[int]) -> Message:
        """Return it with only the calls at these indexes of `calls`. Each keeps its bytes."""

    @abstractmethod
    def with_arguments(self, arguments: Sequence[str]) -> Message:
        """Return it with new arguments, one for each of `calls`."""

    @abstractmethod
    def with_notes(self, notes: Mapping[int, str]) -> Message:
        """Return it with texts instead of the content parts at these places (`Attachment.place`)."""

    @abstractmethod
    def without_unfinished_calls(self) -> Message:
        """Return an interrupted reply without its incomplete calls."""

    @abstractmethod
    def as_request(self, reasoning: ReasoningMode, *, partial: bool) -> Message:
        """Return a reply in the form that requests use. `partial` says that it was interrupted."""

    def with_paired_reasoning(self) -> Message:
        """Return it without reasoning that is followed by no other part of it, if the API refuses that."""
        return self

    def behind_rounds(self, rounds: Sequence[Message]) -> Message:
        """Return a reply without the parts that `rounds` already hold. The rounds are sent before it."""
        del rounds
        return self

    def without_reasoning(self) -> Message | None:
        """Return it without reasoning that is valid only if everything before it is unchanged.

        The very same object if it has none; None if nothing else is left.
        """
        return self


_FACTS_ENTRY_BYTES: Final = 1000  # approximate size of an entry, without its text
_FACTS_ROOM: Final = SharedRoom(24 * 1024 * 1024)  # bytes in one process, for all dialects


class KnownMessages(Generations[bytes, Facts]):
    """A cache of facts about the messages of one dialect, by their texts. A known text is not read again."""

    def __init__(self) -> None:
        super().__init__(_FACTS_ROOM, lambda facts: len(facts.raw) + _FACTS_ENTRY_BYTES)

    def messages(
        self, texts: Sequence[bytes], make: Callable[[bytes, JsonObject | None, Facts | None], Made], read: ReadMessage
    ) -> tuple[list[Facts], tuple[Made, ...]]:
        """Return the facts and the messages of these texts. `read` reads a text that is new, given its position."""
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

RoleOrder: TypeAlias = Literal["alternate", "one_system"]  # an order of roles that some servers require
MarkKind: TypeAlias = Literal["openai", "anthropic"]  # whose format of cache marks is used
_NUMBER: Final = b"-0123456789"


class JoinedTexts:
    """The messages that were sent last, and their texts joined. A common prefix is not joined again."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: tuple[tuple[Message, ...], tuple[Message, ...], bytes] = ((), (), b"")

    def sent(self, messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], bytes]:
        """Return the messages without the proxy's own fields, and their texts joined by commas."""
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
                # A message from the store has no facts.
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
        """Bytes of the joined text that is kept."""
        return len(self._last[2])


class Request(Struct, frozen=True, kw_only=True):
    """A parsed request, read only as far as the proxy needs. Every text in it can be parsed again."""

    raw: bytes  # the client's body
    fields: Mapping[str, bytes]  # all top-level fields in order, each as JSON text, including the messages
    instructions: tuple[Message, ...]  # the leading system and developer messages
    messages: tuple[Message, ...]  # all other messages in order, including the proxy's own fields
    model: str  # empty if the client named none
    stream: bool
    has_tools: bool  # whether it offers at least one tool; Chat Completions' old `functions` count
    tools: bytes | None  # the JSON text of its tools; None if it offers none, or offers `functions`
    wants_usage: bool | None  # whether it asks for the usage of a stream; None if it does not say
    reply_tokens: int | None = None  # maximum tokens of the reply; None if it does not say
    replies: tuple[int, ...] = ()  # positions of the assistant messages in `messages`
    parameters: Mapping[str, Any] = {}  # the parsed values of all fields except messages and tools
    has_own_fields: bool = True  # whether any message has, or may have, the proxy's own fields
    ends: tuple[int, ...] = ()
    """Offsets in `raw`: the beginning of the array of messages, then the end of each message. Empty if unknown, or if
    the body is shorter than `LONG_BODY`."""
    joined: JoinedTexts | None = None  # what was sent for the previous request, if known
    kept: int = 0  # how many messages, including instructions, are the very objects of the previous request
    untouched: bool = False  # whether it goes upstream unchanged, because the provider holds the state it continues
    state: str = ""  # the id of the state at the provider that it continues: a response, conversation or thread
    conversation: str = ""  # the same id if it is a conversation's; each of its replies reports it
    keeps_reply: bool = True  # whether the provider may keep the reply, for later requests to name
    references: tuple[str, ...] = ()  # ids of everything it names that the provider holds, including `state`
    pointers: tuple[str, ...] = ()  # the ids among them that stand in place of items of replies
    keeps_loop: bool = False  # whether the reasoning of an unfinished tool loop must be sent back
    binds_loop: bool = False  # whether that reasoning may also be refused if anything before it has changed
    notes: tuple[str, ...] = ()  # parts of it that the proxy leaves to the provider, as notes for the receipt

    @property
    def new_bytes(self) -> int:
        """The number of bytes of the body that had to be parsed."""
        return len(self.raw) - (self.ends[self.kept] if self.kept else 0)

    @property
    def known(self) -> int:
        """How many of `messages`, from the first on, are the very objects of the previous request."""
        return max(0, self.kept - len(self.instructions))

    def common(self, body: bytes) -> int:
        """Return how many of its messages, including instructions, lie within the common prefix with `body`."""
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
        """Return a string, or a number as written, at a dotted path of the body; None if there is none."""
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
    """The tools to send: the client's and the proxy's own."""

    names: tuple[str, ...]  # names of the proxy's own tools; empty if the request leaves no room for them
    tools: bytes | None  # the JSON text of all tools; None if there are none


class Overflow(Struct, frozen=True, kw_only=True):
    """A request that exceeds the model's context window, as the upstream's error reports it."""

    window: int | None  # tokens that the model takes; some providers count it without the reply
    asked: int | None  # tokens of the input, as the upstream counted them
    reply: int | None  # tokens requested for the reply, if the error includes them


def _unchanged(messages: Sequence[Message], *_: Any) -> tuple[Message, ...]:
    return tuple(messages)


class RequestSide(Struct, frozen=True, kw_only=True):
    """A dialect's requests: pure functions. An API without cache marks or a required order keeps their defaults."""

    path: str  # where requests are sent, relative to the upstream's base address
    headers: tuple[tuple[bytes, bytes], ...] = ()  # headers that a request of the proxy's own needs
    parse: Callable[..., Request]
    """Parses a body. Unknown fields, roles, parts and items pass unchanged.

    Raises `InvalidRequest` if the body is not a JSON object in UTF-8, is nested deeper than `MAX_LEVELS`, has a field
    of the wrong type, or is a request of another API. `before` may be an earlier request whose body has the same bytes
    up to the end of its first `kept` messages (`Request.ends`). These are not read again.
    """
    compose: Callable[..., bytes]
    """Composes the body to send: the client's bytes with only the requested changes.

    Keyword arguments: instructions, messages, drop_fields, tools. Each defaults to what the client sent. add_usage,
    cache_key and cache_newest apply only if the client does not set these itself. The proxy's own fields never go out.
    """
    leaves_room: Callable[[Request], bool]
    """Tells whether the proxy may add its tools: the model may call any tool, and gives one reply."""
    add_tools: Callable[[bytes | None, Sequence[ToolDefinition]], ToolOffer]
    """Adds the proxy's own tools to the client's, given as JSON text. The client's tools keep their bytes."""
    tool_name: Callable[[JsonObject], Any] = lambda tool: tool.get("name")
    """Returns the name of a declared tool."""
    decides_caching: Callable[[Mapping[str, bytes]], bool]
    """Tells whether the client decides about caching itself, given the fields of its request."""
    marked: Callable[[Sequence[Message], Collection[int], MarkKind], tuple[Message, ...]] = _unchanged
    """Puts a cache mark at the end of each of the messages at these positions."""
    broken: Callable[[Sequence[Message], int, int, MarkKind], tuple[Message, ...]] = _unchanged
    """Puts a cache mark into the message at a position, after that many characters of its text, if there is room."""
    overflow_of: Callable[[int, bytes], Overflow | None]
    """Reads the status and body of an error. Returns None if it is no overflow of the context window."""
    demanded_order: Callable[[int, bytes], RoleOrder | None] = lambda _status, _body: None
    """Reads the status and body of an error. Returns the order of roles that it demands, if any."""
    reordered: Callable[[Sequence[Message], RoleOrder], tuple[Message, ...]] = _unchanged
    """Puts messages into such an order."""
    refuses_usage: Callable[[bytes], bool] = lambda _: False
    """Tells whether the body of an error mentions the option that `add_usage` adds."""
    refuses_caching: Callable[[bytes], bool] = lambda _: False
    """Tells whether the body of an error mentions the option that `cache_newest` adds."""
    state_fields: tuple[str, ...] = ()  # fields that name a state at the provider which the proxy can expand
    unknown_state: str = "not_found"  # error code if the provider holds that state for another tenant
    resolved: Callable[[Request, Sequence[Message]], Request] | None = None
    """Replaces the `pointers` of a request by the items of these replies. None if the API has no pointers."""
    opening_error: Callable[[bytes], bytes | None] | None = None
    """Reads the beginning of a stream. Returns the body of the error it begins with, empty bytes if it begins with no
    error, or None if that is still open. The field itself is None if the status alone tells an error."""

    def offer_tools(self, request: Request, own: Sequence[ToolDefinition]) -> ToolOffer:
        """Return the tools to send: the client's, then the proxy's own if the request leaves room for them."""
        if not self.leaves_room(request):
            return ToolOffer(names=(), tools=request.tools)
        return self.add_tools(request.tools, own)

    def declared(self, tools: bytes) -> list[tuple[str | None, msgspec.Raw]]:
        """Return name and text of each tool in this JSON list. The name is None if the provider runs the tool itself.

        Raises `msgspec.DecodeError` if it is not a list.
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
    """Return the extra id that is kept for a response whose reply continued in another one. See `Replies.ids`."""
    return f"begun:{name}"


class Replies(Struct, frozen=True, kw_only=True):
    """The content of an upstream answer, as far as it has arrived."""

    messages: tuple[Message, ...]  # the replies, one for each choice, in stored form
    finish_reasons: tuple[str | None, ...]  # why each ended; None if it was interrupted, or gave no reason
    usage: JsonObject | None  # in the format of Chat Completions, which receipts and prices read
    model: str | None  # the answering model, as it names itself
    error: str | None  # the message of the error, if it is one
    ids: tuple[str, ...] = ()
    """Ids under which the provider keeps the reply and its parts. A streamed reply of several rounds began under the id
    of its first round, which clients may name too. So that id is included, also in the form of `begun_under`."""
    kept: bool = True  # whether the provider keeps it; it may report that it does not
    later: bool = False  # whether the provider is still working on the reply, which can be fetched later
    cancelled: bool = False  # whether the provider was told to stop


class StreamReader(Protocol):
    """Reads one streamed answer, event by event. Never raises: it skips what it cannot understand."""

    @property
    def replies(self) -> Replies: ...  # what has arrived so far

    @property
    def failed(self) -> bool: ...  # whether an error was reported

    def take(self, event: Event) -> bool: ...  # reads the next event; returns whether it only reports usage


class OwnCalls(Struct, frozen=True, kw_only=True):
    """The calls of one round of a reply, divided by who answers them."""

    message: Message  # the round as it can be sent back, without the proxy's incomplete calls
    own: tuple[Call, ...]  # the calls that the proxy answers, in order
    broken: bool = False  # whether a call of the proxy's tools is incomplete, so that it cannot be answered
    others: bool  # whether it has any call that the client answers


class ReplySide(Struct, frozen=True, kw_only=True):
    """A dialect's replies: pure functions, and classes that read or filter one reply."""

    read: Callable[[bytes], Replies]  # reads a complete answer; raises ValueError if it is not JSON
    reader: Callable[[], StreamReader]
    ends: tuple[bytes, ...]  # data, or names, of the events that end a stream
    body_filter: Callable[[Collection[str]], BodyFilter[Any]]  # constructed with the names of the proxy's tools
    stream_filter: Callable[[Collection[str], bool], StreamFilter[Any]]
    """Constructed with these names, and whether to hide usage from a client that did not ask for it."""
    repeat: Callable[..., tuple[bytes, bytes]]
    """Builds an answer from a stored reply. Keyword arguments: exchange, created, model, stream, usage. Returns the
    content type and the body."""
    calling: str  # the finish reason of a reply that calls tools
    error_words: Callable[[bytes], str | None]
    """Returns the message in the body of an error; None if it is no error of this API."""
    error_body: Callable[[PalimpsestError], bytes]  # formats an error of the proxy's in the API's shape
    error_event: Callable[[bytes], bytes]  # returns the event that ends a broken stream with this error body
    repeat_id: Callable[[str], str] | None = None
    """Returns the id that `repeat` gives the answer of an exchange, if later requests may continue from it."""


NO_RESULT: Final = "[no result was recorded for this call]"  # stands in for a result that was never recorded


class RulesWalk:
    """The result of checking messages against an API's rules: the repaired messages in order, and the problems."""

    def __init__(self, messages: Sequence[Message] = ()) -> None:
        self.messages: list[Message] = list(messages)
        self.sources: list[int | None] = list(range(len(messages)))
        """See `Repaired.sources`."""
        self.problems: list[tuple[int, StrEnum]] = []
        """The position of each problem, and its kind. The kind's value is its description, also used in notes."""

    def keep(self, source: int | None, message: Message) -> None:
        """Append the next message of the result."""
        self.messages.append(message)
        self.sources.append(source)


class Dialect(ABC):
    """One API: its rules for messages, its requests and its replies."""

    name: ClassVar[str]  # its name in `DIALECTS`, such as `chat`
    requests: ClassVar[RequestSide]
    replies: ClassVar[ReplySide]
    message: ClassVar[type[Message]]
    """The class of its messages. It is called with a JSON text."""
    repairs_blocks_alone: ClassVar[bool] = False
    """Whether sound messages that begin with no result stay sound behind other sound messages."""

    @abstractmethod
    def spoken(self, role: SpokenRole, text: str) -> Message:
        """Return a message of the proxy's own: `text` in this role."""

    @abstractmethod
    def result(self, call: str, text: str) -> Message:
        """Return a tool result of the proxy's own for the call with this id."""

    def question(self, model: str, instructions: str, text: str) -> bytes:
        """Return the body of a request of the proxy's own: instructions and one user message."""
        told = (self.spoken("system", instructions).raw, self.spoken("user", text).raw)
        return b'{"model":%b,"messages":[%b]}' % (write(model), b",".join(told))

    @abstractmethod
    def canonical(self, message: Message) -> bytes:
        """Return the canonical form, by which a resent message is recognised. It is never sent. Never raises."""

    def earlier_canonicals(self, message: Message) -> Sequence[bytes]:  # noqa: ARG002 - most dialects have had one form
        """Return the forms of older versions, newest first. Stored nodes may still be named by them.

        Every message of a dialect has the same number of them.
        """
        return ()

    @abstractmethod
    def spans(self, messages: Sequence[Message]) -> tuple[Span, ...]:
        """Return the spans of messages in order. Together they cover every position once."""

    @abstractmethod
    def walk(self, messages: Sequence[Message]) -> RulesWalk:
        """Check messages against the API's rules. Valid messages stay the very same objects."""

    cures: ClassVar[Mapping[StrEnum, str]] = {}
    """How each problem is repaired, unless it is by leaving something out."""

    def problems(self, messages: Sequence[Message]) -> list[str]:
        """Return all violations of the API's rules as text with positions; empty if there are none."""
        return [f"message {position}: {problem}" for position, problem in self.walk(messages).problems]

    def repair(self, messages: Sequence[Message]) -> Repaired:
        """Return the messages in a form that the provider accepts."""
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
    """Return a dialect of `DIALECTS`. Importing at run time keeps other rooms independent of its folder."""
    dialect: Dialect = import_module(DIALECTS[name]).DIALECT
    return dialect
