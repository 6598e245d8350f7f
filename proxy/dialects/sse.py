"""Splits a stream of bytes into server-sent events. Each event keeps the exact bytes it came as.

Events are separated by blank lines (WHATWG HTML, section 9.2.6). Lines end in LF, CR LF or CR. The bytes of all
events joined are the stream, whatever it holds and however it is cut:

    LF LF, CR LF CR LF   end an event at once; servers send these
    CR CR                ends it at once too; an LF right after it is the first byte of the next event
    LF CR                ends it with the next byte, which may be the LF of that line end
    a blank line alone   is an event of its own, without data
"""

from __future__ import annotations

import re
from typing import Any, Final

from msgspec import Struct

from proxy.dialects.jsontext import parsed

_BOM: Final = b"\xef\xbb\xbf"
_BLANK_LINE: Final = re.compile(rb"\n(?:\n|\r\n|\r(?=[^\n]))|\r\r")  # the end of a line and the blank line after it
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_DONE: Final = (b"[DONE]",)
_FIELD: Final = b"data: "  # the beginning of nearly every event; most events have just this line
_NEXT: Final = b"\n\n" + _FIELD
_SHORT: Final = 4096  # an unfinished event of at most this many bytes is scanned again when more arrives
_LONGEST_END: Final = 3  # maximum bytes of `_BLANK_LINE`, including the byte that it looks ahead
_CR: Final = 0x0D
_LF: Final = 0x0A


class Event(Struct, frozen=True, kw_only=True):
    """A piece of the stream up to and including a blank line."""

    raw: bytes  # its complete bytes
    data: bytes | None  # its `data` lines joined by LF; None if it has none (a comment, a blank line)
    name: str | None = None  # its `event` field; None if it has none
    complete: bool = True  # False for the rest of a stream that broke off
    is_done: bool = False  # whether it marks the end of the stream

    @property
    def value(self) -> Any:
        """Its data, parsed; None if it has none or it is not JSON."""
        return parsed(self.data)


_BLANK_LINES: Final = {raw: Event(raw=raw, data=None) for raw in (b"\n", b"\r\n", b"\r")}


class EventDecoder:
    """Splits one stream into events as its bytes arrive. However the bytes are cut, the events are the same."""

    __slots__ = ("_at_start", "_buffer", "_ended_in_cr", "_ends", "_searched")

    def __init__(self, ends: tuple[bytes, ...] = _DONE) -> None:
        """Begin a stream. `ends` are the data, or the names, of events that mark its end."""
        self._ends = ends
        self._buffer = bytearray()
        self._searched = 0  # no event ends before this offset of the buffer
        self._at_start = True  # at the start of the stream, where a byte order mark may stand
        self._ended_in_cr = False  # the last event ended in a CR that was not part of CR LF

    @property
    def waiting(self) -> int:
        """The number of bytes of an unfinished event so far."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[Event]:
        """Take the next bytes. Return the events that they complete, oldest first."""
        if self._buffer and len(self._buffer) <= _SHORT:
            data = bytes(self._buffer) + data
            self._buffer.clear()
            self._searched = 0
        if not self._buffer and not self._ended_in_cr and data.startswith(_FIELD) and b"\r" not in data:
            *texts, rest = data.split(b"\n\n")
            begun = data.count(_NEXT) + (not rest.startswith(_FIELD))
            if len(texts) == begun and data.count(b"\n") == 2 * begun:  # nothing but single lines of data
                self._buffer += rest
                ends = self._ends
                self._at_start = self._at_start and not texts
                return [Event(raw=text + b"\n\n", data=text[6:], is_done=text[6:].strip() in ends) for text in texts]
        self._buffer += data
        events: list[Event] = []
        start = 0
        while (end := self._end_of_event(start)) is not None:
            events.append(self._event(bytes(self._buffer[start:end]), complete=True))
            start = self._searched = end
        if start:
            del self._buffer[:start]
            self._searched -= start
        return events

    def flush(self) -> list[Event]:
        """Return the rest at the end of the stream: one event, usually incomplete, or none."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        self._searched = 0
        if not rest:
            return []
        # A CR that waited for its LF was a complete line end. So is an LF left over from the last event's end.
        return [self._event(rest, complete=rest in {b"\n", b"\r"} or rest.endswith(b"\n\r"))]

    def _end_of_event(self, start: int) -> int | None:
        """Return where the event that begins at `start` ends; None if its end has not arrived yet."""
        buffer = self._buffer
        first = start
        if self._ended_in_cr and buffer.startswith(b"\n", first):
            first += 1  # the rest of the previous event's line end
        if first == len(buffer):
            return None
        if buffer[first] == _LF:
            return first + 1
        if buffer[first] == _CR:
            if self._ended_in_cr:
                return first + 1
            if first + 1 == len(buffer):
                return None
            return first + 2 if buffer[first + 1] == _LF else first + 1
        found = _BLANK_LINE.search(buffer, max(first, self._searched))
        if found is None:
            self._searched = max(first, len(buffer) - _LONGEST_END)
            return None
        return found.end()

    def _event(self, raw: bytes, *, complete: bool) -> Event:
        """Parse the fields of one event, and remember how it ended."""
        text = raw
        if self._at_start:
            text = raw.removeprefix(_BOM)
            self._at_start = False
        self._ended_in_cr = raw.endswith(b"\r") and not raw.endswith(b"\n\r")
        if complete and raw in _BLANK_LINES:
            return _BLANK_LINES[raw]
        lines: list[bytes] = []
        name: str | None = None
        for line in _LINE_END.split(text):
            field, _, value = line.partition(b":")
            if field == b"data":
                lines.append(value.removeprefix(b" "))
            elif field == b"event":
                name = value.removeprefix(b" ").decode("utf-8", "replace")
        data = b"\n".join(lines) if lines else None
        is_done = data is not None and (data.strip() in self._ends or (name or "").encode() in self._ends)
        return Event(raw=raw, data=data, name=name, complete=complete, is_done=is_done)
