"""`deduplicate_results`: a tool result that says what an earlier one says points back to it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import ClassVar, Final, Literal

from msgspec import Struct

from proxy.dialects import Message
from proxy.trimming.draft import Draft, Result
from proxy.trimming.edits.edit import BaseEdit
from proxy.trimming.model import Change, Entry

_POINTER: Final = re.compile(
    r"\[same output as the earlier one of .{0,200}: (?P<size>\d{1,12}) characters; ref=(?P<ref>\S{1,200})\]"
)
_NAME: Final = 100  # characters of a tool's name that are told at most


class _WholeResult(Struct, frozen=True, kw_only=True):
    """A tool result that stands whole."""

    position: int
    tool: str
    ref: str
    size: int  # characters of its text


class DeduplicateResults(BaseEdit, frozen=True):
    """Of tool results with the same text the oldest stays; each newer one becomes a pointer to it.

    The pointer names the tool, the size and the ref. It stands only where it costs fewer tokens, and only as
    long as the older result stands whole in the view: if that is cut, cleared or dropped, the newer one is
    put back. White space at the end of a text does not count. A tool's own words are never a pointer, however
    much they look like one.
    """

    piecemeal: ClassVar[bool] = True

    type: Literal["deduplicate_results"] = "deduplicate_results"
    """Which strategy this is."""

    def apply(self, draft: Draft) -> Iterator[Change]:
        """Put pointers in the place of results that an earlier one repeats."""
        whole: dict[tuple[str, str | None], _WholeResult] = {}
        for result in draft.results():
            position, message, tool = result.place, result.message, result.tool
            text = _text(message)
            if not text or self._pointer(draft, position, message) is not None:
                continue
            entry = draft.entries[position]
            # Two outputs that differ may have become the same: they are not told to be.
            key = (text, _text(entry.message))
            older = whole.get(key)
            if older is not None and position not in draft.protected:
                change = self._pointing(draft, position, message, older)
                if change.freed > 0:
                    yield change
                    continue
            whole[key] = _WholeResult(position=position, tool=tool, ref=entry.ref, size=len(text))

    def afterwards(self, draft: Draft) -> Iterator[Change]:
        """Put back each result whose older copy does not stand whole any more; later copies point to that."""
        whole: dict[str, list[tuple[int, int]]] = defaultdict(list)
        pointers: list[tuple[Result, re.Match[str]]] = []
        for result in draft.results():
            found = self._pointer(draft, result.place, result.message)
            if found is not None:
                pointers.append((result, found))
            elif text := _text(result.message):
                whole[draft.entries[result.place].ref].append((result.place, len(text)))
        back: dict[str, _WholeResult] = {}
        for result, found in pointers:
            position, size = result.place, int(found["size"])
            stands = any(at < position and held == size for at, held in whole[found["ref"]])
            if stands or position in draft.protected:
                continue
            entry = draft.entries[position]
            first = _first_sent(entry)
            text = _text(first) or ""
            if (older := back.get(text)) is not None:
                yield self._pointing(draft, position, result.message, older)
            else:
                back[text] = _WholeResult(position=position, tool=result.tool, ref=entry.ref, size=len(text))
                reason = "the earlier result that it pointed to does not stand whole any more"
                yield draft.replacing(position, self.type, reason, first)

    def _pointer(self, draft: Draft, position: int, message: Message) -> re.Match[str] | None:
        """Return what a pointer says; None for what this edit did not make, or has put back."""
        if not draft.made_by or self.type not in draft.made_by[position]:
            return None
        if message == _first_sent(draft.entries[position]):
            return None
        return _POINTER.fullmatch(_text(message) or "")

    def _pointing(self, draft: Draft, position: int, message: Message, older: _WholeResult) -> Change:
        name = " ".join(older.tool.split())[:_NAME] or "a tool"
        pointer = f"[same output as the earlier one of {name}: {older.size} characters; ref={older.ref}]"
        reason = "an earlier result says the same"
        return draft.replacing(position, self.type, reason, message.with_text(pointer))


def _text(message: Message) -> str | None:
    """Return the text of a result without white space at its end; None where it holds anything but text."""
    text = message.plain_text
    return text.rstrip() if text is not None else None


def _first_sent(entry: Entry) -> Message:
    """Return a result as it was when it was first sent, as far as that is recorded."""
    arrived = entry.arrival[-1].message if entry.arrival else None
    return arrived or entry.message
