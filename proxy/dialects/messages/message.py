"""A message of Anthropic's Messages API: reads its JSON, and rewrites it block by block.

A user message may hold several tool results, with text and images beside them. Then its role is `tool`, because it
belongs to the calls before it. `results` has each result as a message of its own, and `beside` has the user's text.

Thinking is not part of a message's text. Server tools (`server_tool_use` and their results) stay unchanged: the
provider ran them, and the client does not answer them. Rewriting a message removes its cache marks, because clients
move them every turn. `compose` restores the client's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count, groupby
from typing import Any, ClassVar, Final

import msgspec
import orjson

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
from proxy.dialects.cache_marks import marked_at
from proxy.dialects.jsontext import FIELDS, ITEMS, as_object, as_text, is_array, is_object, without_fields, write

THINKING: Final = ("thinking", "redacted_thinking")
MARK: Final = "cache_control"
HEADER: Final = "x-anthropic-"  # the beginning of a first system block that is a header, not a part of the prompt
UNFINISHED: Final = "partial_json"
"""The proxy's own field of a stored incomplete call: its input so far. It is never sent."""

_MARKS: Final = (b"cache_control", rb"\u00")  # one is in JSON text with a mark: its name, or an escaped ASCII character
_RESULTS: Final = frozenset({"tool"})  # the role of the results of an assistant's calls
_MEDIA: Final = ("image", "document", "container_upload")
_HOSTED: Final = ("server_tool_use", "mcp_tool_use")  # calls of tools that the provider runs
_LASTING: Final = frozenset({"compaction", "tool_addition", "tool_removal"})
_LASTING_MARKS: Final = (b'"compaction"', b'"tool_addition"', b'"tool_removal"')  # in the text of such blocks
_SEALED: Final = ("encrypted_content", "signature")  # fields of a compaction whose values are unique
_MOST_IDS: Final = 16  # maximum ids that are cached for one text; a text with more is read again


class BlockTies(Ties, frozen=True, kw_only=True):
    """What a message's span, and the rules of the API, depend on."""

    answers: tuple[str, ...] = ()  # ids of the calls that its results answer, in order; "" for a result without one
    leads: bool = True  # whether its results come before all other content
    alone: bool = True  # whether a message with results holds nothing else
    empty: bool = False  # whether it has no content at all
    begun: tuple[str, ...] = ()  # ids of its calls of the provider's tools that have no result in it
    parts: tuple[str, ...] = ()  # ids of earlier ones that it continues, by their results or calls that they made


class MessagesMessage(Message):
    """One message of the Messages API, or the system prompt in the form of a message."""

    __slots__ = ()

    dialect: ClassVar[Dialect]

    # ------------------------------------------------------------------------------------- reading

    @property
    def role(self) -> str:
        return self.facts.role if self.facts is not None else role_of(self.data)

    @property
    def blocks(self) -> list[Any]:
        """Its content blocks. A string content counts as one text block."""
        return blocks_of(self.data)

    @property
    def text(self) -> str:
        blocks = self.blocks
        groups = [_text_of_result(block) for block in blocks if _is_result(block)]
        return "\n\n".join(filter(None, [*groups, "".join(map(_text_of, blocks))]))

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple([_text_of_result(part) if _is_result(part) else _text_of(part) for part in self._parts])

    @property
    def plain_text(self) -> str | None:
        return self.text if all(map(_is_text, self._parts)) else None

    @property
    def is_plain(self) -> bool:
        result = self._only_result
        if result is not None:
            return self.plain_text is not None and not result.get("is_error")
        return all(_is_text(block) or is_call(block) or _kind(block) in THINKING for block in self.blocks)

    @property
    def name(self) -> str:
        return ""

    def _read_calls(self) -> list[Call]:
        return [_call(block) for block in self.blocks if is_call(block)] if self.role == "assistant" else []

    @property
    def ties(self) -> BlockTies:
        """Its relations to other messages, cached with the facts about its text."""
        if self._ties is None:
            facts = self.facts
            known: BlockTies | None = facts.ties if facts is not None else None
            self._ties = made = known or _ties(self.data)
            if facts is not None and known is None and len(made.ids) + len(made.answers) <= _MOST_IDS:
                facts.ties = made
        ties: BlockTies = self._ties
        return ties

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of its calls, or of those it answers. Also a compaction's content, which may come back alone."""
        if not self.is_lasting:
            return super().ids
        held = [block.get(name) for block in self.blocks if _kind(block) == "compaction" for name in _SEALED]
        return super().ids + tuple(filter(None, _texts(held)))

    @property
    def is_result(self) -> bool:
        return self.role == "tool"

    @property
    def answers(self) -> str | None:
        return next(iter(self.answered), None)

    @property
    def answered(self) -> tuple[str, ...]:
        return tuple(filter(None, self.ties.answers))

    @property
    def result_count(self) -> int:
        return len(self.ties.answers)

    @property
    def results(self) -> tuple[Message, ...]:
        if self._only_result is not None:
            return (self,)
        results = [raw for raw, block in self._pairs() if _is_result(block)]
        return tuple([MessagesMessage(b'{"role":"user","content":[%b]}' % raw) for raw in results])

    @property
    def beside(self) -> str:
        return "".join(_text_of(block) for block in self.blocks) if self.is_result else ""

    @property
    def has_content(self) -> bool:
        return any(_says(block) for block in self.blocks)

    @property
    def is_lasting(self) -> bool:
        return any(kind in self.raw for kind in _LASTING_MARKS) and any(
            _kind(block) in _LASTING for block in self.blocks
        )

    @property
    def has_marks(self) -> bool:
        """Whether it may hold a cache mark."""
        return any(piece in self.raw for piece in _MARKS)

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        return tuple([_attachment(place, leaf) for place, leaf in enumerate(_leaves(self.blocks)) if _is_media(leaf)])

    @property
    def display_text(self) -> str:
        blocks = self.blocks
        # Consecutive text blocks are one text, which citations have split.
        said = ["".join(map(_text_of, row)) for is_text, row in groupby(blocks, _is_text) if is_text]
        results = [_text_of_result(block) for block in blocks if _is_result(block)]
        return "\n\n".join(filter(None, results + said))

    def all_texts(self) -> Iterator[str]:
        yield from super().all_texts()
        if agent := self.data.get("agent"):
            yield str(agent)

    def countable(self) -> Countable:
        texts: list[str] = []
        media = 0
        for leaf in _unfolded(self.blocks):
            if not is_object(leaf):
                texts.append(write(leaf).decode())
            elif _is_media(leaf):
                media += 1
            elif is_call(leaf):
                call = _call(leaf)
                texts += [call.name, call.arguments]
            elif _kind(leaf) == "thinking":
                texts.append(str(leaf.get("thinking", "")))
            elif _is_text(leaf):
                texts.append(leaf["text"])
            elif _kind(leaf) != "redacted_thinking":
                text, held = written(_unmarked(leaf))
                texts.append(text)
                media += held
        return Countable(texts=tuple(filter(None, texts)), media=media)

    def readable(self) -> str:
        text = self.display_text
        lines = [text] if text else []
        for place, leaf in enumerate(_leaves(self.blocks)):
            if not is_object(leaf):
                lines.append(f"[{write(leaf).decode()}]")
            elif _is_media(leaf):
                parts = _parts_of_document(leaf)
                lines += [_attachment(place, leaf).line] if parts is None else filter(None, map(_text_of, parts))
            elif not (_is_text(leaf) or is_call(leaf) or _is_result(leaf) or _kind(leaf) in THINKING):
                lines.append(f"[{written(leaf)[0]}]")
        lines += self._call_lines()
        return "\n".join(lines)

    # ------------------------------------------------------------------------------------ rewriting

    def with_text(self, text: str) -> MessagesMessage:
        said = write({"type": "text", "text": text})
        if self.is_result:
            return self._edited(lambda block: {**block, "content": text} if _is_result(block) else block)
        if self.role != "assistant":
            return self.replacing("content", text)
        pairs = list(self._pairs())
        thought = [raw for raw, block in pairs if _kind(block) in THINKING]
        return self._of_blocks([*thought, *([said] if text else []), *[raw for raw, block in pairs if is_call(block)]])

    def with_texts(self, texts: Sequence[str | None]) -> MessagesMessage:
        result = self._only_result
        if result is None and isinstance(self.data.get("content"), str):
            return self.replacing("content", texts[0])
        if result is not None and not is_array(result.get("content")):
            return self._edited(lambda block: {**block, "content": texts[0]})
        if result is not None:
            made = [
                _with_text(part, text) for part, text in zip(_parts_of(result), texts, strict=True) if text is not None
            ]
            return self._edited(lambda block: {**block, "content": made})
        pairs = zip(self.blocks, texts, strict=True)
        return self._of_blocks([write(_unmarked(_with_text(block, text))) for block, text in pairs if text is not None])

    def with_appended(self, text: str) -> MessagesMessage:
        content = self.data.get("content")
        if is_array(content):
            return self.replacing("content", [*content, {"type": "text", "text": text}])
        return self.replacing("content", f"{content}\n\n{text}" if content and isinstance(content, str) else text)

    def with_calls(self, kept: Collection[int]) -> MessagesMessage:
        number = count()  # counts the calls
        return self._of_blocks([raw for raw, block in self._pairs() if not is_call(block) or next(number) in kept])

    def with_arguments(self, arguments: Sequence[str]) -> MessagesMessage:
        waiting = iter(arguments)
        return self._edited(lambda block: {**block, "input": _input_of(next(waiting))} if is_call(block) else block)

    def with_notes(self, notes: Mapping[int, str]) -> MessagesMessage:
        place = count()  # counts the leaves

        def noted(leaf: Any) -> Any:
            note = notes.get(next(place))
            return leaf if note is None else {"type": "text", "text": note}

        made = [
            {**block, "content": [noted(part) for part in block["content"]]} if _holds_parts(block) else noted(block)
            for block in self.blocks
        ]
        return self._of_blocks([write(_unmarked(block)) for block in made])

    def with_results(self, results: Sequence[Message | None]) -> MessagesMessage | None:
        waiting = iter(results)
        left: list[bytes] = []
        for raw, block in self._pairs():
            if not _is_result(block):
                left.append(raw)
            elif (result := next(waiting)) is not None:
                left += map(bytes, ITEMS.decode(FIELDS.decode(result.raw)["content"]))
        return self._of_blocks(left) if left else None

    def without_unfinished_calls(self) -> MessagesMessage:
        pairs = list(self._pairs())
        whole = [raw for raw, block in pairs if not (is_object(block) and UNFINISHED in block)]
        return self if len(whole) == len(pairs) else self._of_blocks(whole)

    def as_request(self, reasoning: ReasoningMode, *, partial: bool) -> MessagesMessage:
        # Thinking that broke off has no signature, and the API refuses it. A call whose input was cut off at the token
        # limit may have a result.
        pairs = list(self._pairs())
        made = [_as_input(raw, block, reasoning, partial=partial) for raw, block in pairs]
        return self if made == [raw for raw, _ in pairs] else self._of_blocks([raw for raw in made if raw is not None])

    def without_reasoning(self) -> MessagesMessage | None:
        if self.role != "assistant" or b"thinking" not in self.raw:
            return self
        pairs = list(self._pairs())
        left = [raw for raw, block in pairs if _kind(block) not in THINKING]
        if len(left) == len(pairs):
            return self
        return self._of_blocks(left) if left else None

    def without_marks(self) -> MessagesMessage:
        """Return it without cache marks; the very same object if it has none."""
        return self._edited(lambda block: block) if self.has_marks else self

    def mark(self) -> bytes | None:
        """Return the last cache mark on its blocks, as JSON text; None if it has none."""
        found = [mark for block in self.blocks if (mark := as_object(block).get(MARK)) is not None]
        return write(found[-1]) if found and self.has_marks else None

    def with_mark(self, mark: bytes) -> MessagesMessage | None:
        return marked_at(self, MARK, mark, _takes_mark)

    # -------------------------------------------------------------------------------------- helpers

    @property
    def _parts(self) -> list[Any]:
        """Its blocks, or the parts of its result if it is nothing but one result."""
        result = self._only_result
        return self.blocks if result is None else _parts_of(result)

    @property
    def _only_result(self) -> JsonObject | None:
        """The result of a message that is nothing but one result, else None."""
        blocks = self.blocks
        return blocks[0] if len(blocks) == 1 and _is_result(blocks[0]) and self.role == "tool" else None

    def _pairs(self) -> Iterator[tuple[bytes, Any]]:
        """Yield each block as text and parsed."""
        content = self.data.get("content")
        if not is_array(content):
            yield from [(write(block), block) for block in self.blocks]
        else:
            yield from zip(map(bytes, ITEMS.decode(FIELDS.decode(self.raw)["content"])), content, strict=True)

    def _edited(self, edit: Callable[[JsonObject], JsonObject]) -> MessagesMessage:
        """Return it with each block replaced by `edit`'s result. Unchanged blocks keep their bytes, but no marks."""
        left: list[bytes] = []
        for raw, block in self._pairs():
            made = edit(block) if is_object(block) else block
            left.append(raw if made is block else write(made))
        return self._of_blocks(left)

    def _of_blocks(self, raws: Sequence[bytes]) -> MessagesMessage:
        """Return it with these blocks, given as texts, and without cache marks."""
        fields = FIELDS.decode(self.raw)
        fields["content"] = msgspec.Raw(b"[%b]" % b",".join([_unmarked_text(raw) for raw in raws]))
        return MessagesMessage(msgspec.json.encode(fields))


# --------------------------------------------------------------------------------- parts of messages


def blocks_of(data: JsonObject) -> list[Any]:
    """Return the content blocks of a message. A string content counts as one text block."""
    content = data.get("content")
    if is_array(content):
        return content
    return [] if content is None or content == "" else [{"type": "text", "text": content}]


def role_of(data: JsonObject) -> str:
    """Return the role of a message: `tool` for a user message that holds results."""
    role = as_text(data.get("role"))
    return "tool" if role == "user" and any(map(_is_result, blocks_of(data))) else role


def is_call(block: Any) -> bool:
    """Tell whether a block is a call for the client."""
    return _kind(block) == "tool_use"


def _kind(block: Any) -> str:
    return as_text(as_object(block).get("type"))


def _is_result(block: Any) -> bool:
    return _kind(block) == "tool_result"


def _is_text(block: Any) -> bool:
    return _kind(block) == "text" and isinstance(block.get("text"), str)


def _is_media(leaf: Any) -> bool:
    return _kind(leaf) in _MEDIA


def _holds_parts(block: Any) -> bool:
    return _is_result(block) and is_array(block.get("content"))


def _parts_of(result: JsonObject) -> list[Any]:
    """Return the parts of a result's content. A string content counts as one text part."""
    content = result.get("content")
    return content if is_array(content) else [{"type": "text", "text": as_text(content)}]


def _leaves(blocks: Sequence[Any]) -> Iterator[Any]:
    """Yield the blocks, with each result replaced by its parts."""
    for block in blocks:
        yield from _parts_of(block) if _is_result(block) else [block]


def _parts_of_document(leaf: Any) -> list[Any] | None:
    """Return the parts of a document that consists of text; None for any other block."""
    source = as_object(leaf.get("source")) if _kind(leaf) == "document" else {}
    if source.get("type") not in ("text", "content"):
        return None
    content = source.get("data" if source["type"] == "text" else "content")
    parts = content if is_array(content) else [{"type": "text", "text": content}]
    about = [{"type": "text", "text": leaf.get(name)} for name in ("title", "context")]
    return [*filter(_is_text, about), *parts]


def _unfolded(blocks: Sequence[Any]) -> Iterator[Any]:
    """Yield the leaves, with each document that consists of text replaced by its parts."""
    for leaf in _leaves(blocks):
        parts = _parts_of_document(leaf)
        yield from [leaf] if parts is None else parts


def _text_of(block: Any) -> str:
    return as_text(block.get("text")) if _kind(block) == "text" else ""


def _text_of_result(result: JsonObject) -> str:
    return "".join(map(_text_of, _parts_of(result)))


def _says(block: Any) -> bool:
    """Tell whether a block of a reply is content other than calls, thinking and blank text."""
    if _is_text(block):
        return bool(_text_of(block).strip())
    return not is_call(block) and _kind(block) not in THINKING


def _as_input(raw: bytes, block: Any, reasoning: ReasoningMode, *, partial: bool) -> bytes | None:
    """Return the text of a stored reply's block in the form that requests use; None if a request cannot hold it."""
    if _kind(block) in THINKING:
        return raw if reasoning != "drop" and (block.get("signature") or block.get("data")) else None
    if is_object(block) and UNFINISHED in block:
        return None if partial or not is_call(block) else without_fields(raw, (UNFINISHED,))
    return None if _is_text(block) and not _text_of(block).strip() else raw


def _takes_mark(block: Any) -> bool:
    if _is_text(block):
        return bool(_text_of(block).strip())
    return _kind(block) in {"tool_result", "tool_use", "image", "document", "search_result"}


def _with_text(part: Any, text: str) -> Any:
    """Return a part with another text. A part without text stays. The text becomes the whole content of a result."""
    if _is_result(part):
        return {**part, "content": text}
    before = _text_of(part)
    if not before or text == before:
        return part
    # Citations refer to the old text.
    return {name: value for name, value in part.items() if name != "citations"} | {"text": text}


def _input_of(text: str) -> JsonObject:
    """Return the input of a call, given its text."""
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        found = None
    return found if is_object(found) else {"cleared": text}


def _unmarked_text(raw: bytes) -> bytes:
    """Return the text of a block without its cache marks; the very same bytes if it has none."""
    if not any(piece in raw for piece in _MARKS):
        return raw
    block = orjson.loads(raw)
    clean = _unmarked(block)
    return raw if clean == block else write(clean)


def _unmarked(block: Any) -> Any:
    """Return a block without its cache marks and those of its parts."""
    if not is_object(block):
        return block
    clean = {name: value for name, value in block.items() if name != MARK}
    if _holds_parts(clean):
        clean["content"] = [_unmarked(part) for part in clean["content"]]
    return clean


def _call(block: JsonObject) -> Call:
    given = block.get("input")
    arguments = as_text(given) if given is None or isinstance(given, str) else write(given).decode()
    return Call(id=as_text(block.get("id")), name=as_text(block.get("name")), arguments=arguments)


def _ties(data: JsonObject) -> BlockTies:
    role, blocks = role_of(data), blocks_of(data)
    if role == "tool":
        answers: list[str] = []
        leads, alone = True, True
        for block in blocks:
            if _is_result(block):
                answers.append(as_text(block.get("tool_use_id")))
                leads = leads and alone
            else:
                alone = False
        return BlockTies(role=role, answers=tuple(answers), leads=leads, alone=alone)
    if role != "assistant":
        return BlockTies(role=role, empty=not blocks)
    ids = tuple([_call(block).id for block in blocks if is_call(block)])
    begun = _texts([block.get("id") for block in blocks if _kind(block) in _HOSTED])
    ended = [block.get("tool_use_id") for block in blocks if _kind(block).endswith("_tool_result")]
    callers = [as_object(as_object(block).get("caller")).get("tool_id") for block in blocks]
    return BlockTies(
        role=role,
        ids=ids,
        followers=_RESULTS if ids else frozenset(),
        empty=not blocks,
        begun=tuple([name for name in begun if name not in ended]),
        parts=tuple([name for name in _texts([*ended, *callers]) if name not in begun]),
    )


def _texts(values: Iterable[Any]) -> list[str]:
    return [value for value in values if isinstance(value, str)]


def _attachment(place: int, leaf: JsonObject) -> Attachment:
    kind = one_line(leaf["type"])
    return Attachment(place=place, kind=kind, is_image=kind == "image", description=_described(leaf))


def _described(leaf: JsonObject) -> str:
    """Describe an image or a document: its type and size, or its URL."""
    found = leaf.get("source")
    source: JsonObject = found if is_object(found) else leaf
    for name in ("url", "file_id"):
        if isinstance(source.get(name), str):
            return one_line(source[name])
    kind, held = source.get("media_type"), source.get("data")
    if not isinstance(held, str):
        return "no address"
    return sized(kind, held, None if source.get("type") == "base64" else len(held))
