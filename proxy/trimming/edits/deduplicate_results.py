"""`deduplicate_results`: replaces a tool result that repeats an earlier one with a pointer to it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import ClassVar, Final, Literal

from proxy.dialects import Message
from proxy.trimming.draft import Draft, Result
from proxy.trimming.edits.edit import BaseEdit
from proxy.trimming.model import Change

_POINTER: Final = re.compile(
    r"\[same output as the earlier one of .{0,200}: (?P<size>\d{1,12}) characters; ref=(?P<ref>\S{1,200})\]"
)
_SAME: Final = "an earlier result says the same"
_GONE: Final = "the earlier result that it pointed to does not stand whole any more"
_NAME: Final = 100  # maximum characters of a tool's name in a pointer


class DeduplicateResults(BaseEdit, frozen=True):
    """Replaces repeated tool results with pointers. Of results with the same text, the oldest stays.

    The pointer names the tool, the size and the ref. It is used only if it costs fewer tokens, and only while the older
    result is complete in the view. If the older one is cut, cleared or dropped, the newer one is put back. Whitespace
    at the end of a text is ignored. A tool's own output is never taken for a pointer, even if it looks like one.
    """

    piecemeal: ClassVar[bool] = True

    type: Literal["deduplicate_results"] = "deduplicate_results"
    """Name of the edit."""

    def apply(self, draft: Draft) -> Iterator[Change]:
        """Replace results that repeat an earlier one with pointers."""
        whole: dict[tuple[str, str | None], Result] = {}
        pointers: dict[int, dict[int, Message]] = defaultdict(dict)  # by place and index of the result
        for result in draft.results():
            text = _text(result.message)
            if not text or self._pointer(draft, result) is not None:
                continue
            # Two different outputs may have become equal by trimming: the original is part of the key.
            key = (text, _text(result.original))
            older = whole.get(key)
            if older is not None and result.place not in draft.protected:
                pointer = _pointing(result, older, text)
                if draft.count(pointer) < draft.count(result.message):
                    pointers[result.place][result.index] = pointer
                    continue
            whole[key] = result
        for place, made in pointers.items():
            yield draft.replacing_results(place, self.type, _SAME, made)

    def afterwards(self, draft: Draft) -> Iterator[Change]:
        """Put back each result whose older copy is no longer complete in the view; later copies point to it instead."""
        whole: dict[str, list[tuple[tuple[int, int], int]]] = defaultdict(list)
        pointers: list[tuple[Result, re.Match[str]]] = []
        for result in draft.results():
            found = self._pointer(draft, result)
            if found is not None:
                pointers.append((result, found))
            elif text := _text(result.message):
                whole[result.ref].append(((result.place, result.index), len(text)))
        back: dict[str, Result] = {}
        changed: dict[int, dict[int, Message]] = defaultdict(dict)  # by place and index of the result
        for result, found in pointers:
            place, size = (result.place, result.index), int(found["size"])
            stands = any(at < place and held == size for at, held in whole[found["ref"]])
            if stands or result.place in draft.protected:
                continue
            first = _first_sent(draft, result)
            text = _text(first) or ""
            older = back.setdefault(text, result)
            changed[result.place][result.index] = first if older is result else _pointing(result, older, text)
        for at, made in changed.items():
            yield draft.replacing_results(at, self.type, _GONE, made)

    def _pointer(self, draft: Draft, result: Result) -> re.Match[str] | None:
        """Return the parsed pointer; None if this edit did not make the text or has put the result back."""
        if not draft.made_by or self.type not in draft.made_by[result.place]:
            return None
        if result.message == _first_sent(draft, result):
            return None
        return _POINTER.fullmatch(_text(result.message) or "")


def _pointing(result: Result, older: Result, text: str) -> Message:
    """Return the pointer from a result to an older one with this text."""
    name = " ".join(older.tool.split())[:_NAME] or "a tool"
    return result.message.with_text(
        f"[same output as the earlier one of {name}: {len(text)} characters; ref={older.ref}]"
    )


def _text(message: Message) -> str | None:
    """Return the text of a result without trailing white space; None if it holds anything but text."""
    text = message.plain_text
    return text.rstrip() if text is not None else None


def _first_sent(draft: Draft, result: Result) -> Message:
    """Return a result as it was first sent, after `on_arrival`, or the original if nothing is recorded."""
    arrival = draft.entries[result.place].arrival
    arrived = arrival[-1].message if arrival else None
    results = arrived.results if arrived is not None else ()
    return next((each for each in results if each.answers == result.message.answers), result.original)
