"""The replies that a completion holds, whether it came as one body or as a stream of chunks.

It reads whatever a provider sends and never fails: what cannot be understood is not there. It
does not judge whether a reply is worth keeping, and never writes to what it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from proxy.dialects import JsonObject
from proxy.dialects.chat.deltas import Deltas
from proxy.dialects.shapes import is_array, is_object
from proxy.dialects.writer import write


class ReplyChoice(Struct, frozen=True, kw_only=True):
    """One of the replies that were asked for."""

    index: int
    """Its place among the choices, from 0."""
    message: JsonObject
    """The reply as a message. Of a body: as it stands there. Of a stream: what the deltas amount to."""
    finish_reason: str | None
    """Why it ended; None where it broke off, or nothing was said about it."""


class Completion(Struct, frozen=True, kw_only=True):
    """What one body says."""

    choices: tuple[ReplyChoice, ...]
    """By index."""
    usage: JsonObject | None
    id: str | None
    model: str | None
    """The model that answered, as it calls itself."""
    error: JsonObject | None
    """The error object, where it is an error."""


def read_completion(body: Any) -> Completion:
    """Return what the parsed JSON body of a completion says. Messages are the very objects of the body."""
    if not is_object(body):
        return Completion(choices=(), usage=None, id=None, model=None, error=None)
    choices: list[ReplyChoice] = []
    for position, item in enumerate(_objects(body.get("choices"))):
        message = item.get("message")
        if is_object(message):
            choices.append(
                ReplyChoice(
                    index=_index(item, position), message=message, finish_reason=_name(item, "finish_reason")
                )
            )
    if len(choices) > 1:
        choices.sort(key=lambda choice: choice.index)
    return Completion(
        choices=tuple(choices),
        usage=_usage(body),
        id=_name(body, "id"),
        model=_name(body, "model"),
        error=_error(body),
    )


class CompletionAccumulator:
    """Folds the chunks of one stream into replies."""

    __slots__ = ("_choices", "error", "id", "model", "usage")

    usage: JsonObject | None
    """The last usage that was reported."""
    id: str | None
    model: str | None
    """The model that answers, as it calls itself."""
    error: JsonObject | None
    """The first error that was reported in the stream."""

    def __init__(self) -> None:
        self.usage = self.id = self.model = self.error = None
        self._choices: dict[int, _Choice] = {}

    def add(self, chunk: Any) -> bool:
        """Take the next chunk, the parsed data of one event, whatever it is; tell if it is `usage_only`."""
        if not is_object(chunk):
            return False
        if self.id is None:
            self.id = _name(chunk, "id")
        if self.model is None:
            self.model = _name(chunk, "model")
        if chunk.get("usage"):
            self.usage = _usage(chunk) or self.usage
        if self.error is None:
            self.error = _error(chunk)
        choices = chunk.get("choices")
        if not choices:
            return usage_only(chunk)
        position = 0
        for item in choices if is_array(choices) else ():
            if is_object(item):
                self._add(item, position)
                position += 1
        return False

    def _add(self, item: JsonObject, position: int) -> None:
        """Take what a chunk says of one choice."""
        index = item.get("index")
        if not isinstance(index, int):
            index = position
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = _Choice()
        # Some providers answer a stream with one chunk that holds a whole message.
        delta = item["delta"] if "delta" in item else item.get("message")
        if delta and is_object(delta):
            choice.deltas.add(delta)
        if item.get("finish_reason"):
            choice.finish_reason = _name(item, "finish_reason") or choice.finish_reason

    def choices(self) -> tuple[ReplyChoice, ...]:
        """Return the replies as far as they have come, by index."""
        return tuple(
            ReplyChoice(index=index, message=choice.deltas.message(), finish_reason=choice.finish_reason)
            for index, choice in sorted(self._choices.items())
        )

    @property
    def finished(self) -> bool:
        """Whether there is a choice, and every choice said why it ended."""
        return bool(self._choices) and all(choice.finish_reason for choice in self._choices.values())


class _Choice:
    """One choice as far as it has come."""

    __slots__ = ("deltas", "finish_reason")

    def __init__(self) -> None:
        self.deltas = Deltas()
        self.finish_reason: str | None = None


def usage_only(chunk: Any) -> bool:
    """Tell whether a chunk is there for its usage alone (`stream_options.include_usage`)."""
    return is_object(chunk) and chunk.get("usage") is not None and chunk.get("choices") == []


def _objects(value: Any) -> Sequence[JsonObject]:
    return [item for item in value if is_object(item)] if is_array(value) else ()


def _index(item: JsonObject, position: int) -> int:
    index = item.get("index")
    return index if isinstance(index, int) else position


def _name(item: JsonObject, name: str) -> str | None:
    value = item.get(name)
    return value if isinstance(value, str) and value else None


def _usage(item: JsonObject) -> JsonObject | None:
    usage = item.get("usage")
    return usage if is_object(usage) else None


def _error(item: JsonObject) -> JsonObject | None:
    """Return the error that an object reports, in whichever of the forms that providers use."""
    error = item.get("error")
    if is_object(error):
        return error or {"message": "unknown error"}
    if error:
        return {"message": error if isinstance(error, str) else write(error).decode()}
    return item if item.get("object") == "error" else None
