"""`truncate_tool_output`: cuts tool output above a limit of lines or bytes, and marks the cut.

Only a line feed ends a line. All sizes and offsets are in bytes of UTF-8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from proxy.dialects import Message
from proxy.trimming.edits.edit import Shortened, ToolOutputEdit
from proxy.trimming.model import Entry
from proxy.trimming.settings import Positive


class TruncateToolOutput(ToolOutputEdit, frozen=True):
    """Cuts long tool output at line ends. The beginning, the end or both stay; a mark replaces what was cut.

    The mark states how much was omitted, of how much, and the ref under which the whole output can be read. Only the
    mark may exceed the limits. A line longer than the limit is cut inside, between two characters. Output that would
    not get shorter stays unchanged. The limits apply to the text of all parts of a result together. Parts that are not
    text stay unchanged.
    """

    type: Literal["truncate_tool_output"] = "truncate_tool_output"
    """Name of the edit."""
    max_lines: Positive = 2000
    """Maximum lines to send."""
    max_bytes: Positive = 51200
    """Maximum bytes to send, in UTF-8."""
    direction: Literal["head", "tail", "head_tail"] = "head_tail"
    """What to keep. `head`: the beginning. `tail`: the end. `head_tail`: both, with half of the limits for each."""

    def shorten(self, message: Message, entry: Entry, asked: str = "") -> Shortened | None:  # noqa: ARG002
        """Return the result cut to the limits; None if it is within them or would not get shorter."""
        text = message.text.encode()
        if _lines(text) <= self.max_lines and len(text) <= self.max_bytes:
            return None
        size = len(text)
        marked = _around_mark(text, entry.ref)
        if marked is not None:
            head, tail = marked  # the `+ 1` below: one line feed belongs to the mark
            if _lines(head) + _lines(tail) <= self.max_lines and len(head) + len(tail) <= self.max_bytes + 1:
                return None
            # It was cut to wider limits before. Cut the original, so that the mark counts everything omitted.
            message, text = entry.message, entry.message.text.encode()
        return self._cut(message, text, entry.ref, size)

    def _cut(self, message: Message, text: bytes, ref: str, size: int) -> Shortened | None:
        """Return `message`, whose text is `text`, cut to the limits; None if the result is not below `size` bytes."""
        tail_lines, tail_bytes = {
            "head": (0, 0),
            "tail": (self.max_lines, self.max_bytes),
            "head_tail": (self.max_lines // 2, self.max_bytes // 2),
        }[self.direction]
        head = _head(text, self.max_lines - tail_lines, self.max_bytes - tail_bytes)
        tail = _tail(text, tail_lines, tail_bytes)
        lines, omitted = _lines(text), _lines(text[head:tail])
        # Put the mark on a line of its own.
        before, after = "\n" if head and text[head - 1 : head] != b"\n" else "", "\n" if tail < len(text) else ""
        words = f"{omitted} line{'s' if omitted > 1 else ''} ({tail - head} bytes) omitted"
        mark = f"{before}[... {words} of {lines} ({len(text)} bytes){_ending(ref)}{after}".encode()
        kept = head + len(text) - tail
        if kept + len(mark) >= size:
            return None
        reason = f"{lines} lines, {len(text)} bytes: {kept} bytes kept ({self.direction})"
        return Shortened(message=message.with_texts(_texts(message.texts, text, head, tail, mark)), reason=reason)


def _lines(text: bytes) -> int:
    """Return the number of lines. A last line without a line feed counts."""
    return text.count(b"\n") + (1 if text and not text.endswith(b"\n") else 0)


def _head(text: bytes, lines: int, size: int) -> int:
    """Return the end offset of the longest beginning within so many lines and bytes, on a line end if possible."""
    stop = 0
    for _ in range(lines):
        stop = text.find(b"\n", stop) + 1
        if stop == 0 or stop > size:
            stop = len(text) if stop == 0 else stop
            break
    if stop <= size:
        return stop
    line = text.rfind(b"\n", 0, size) + 1
    end = text.find(b"\n", size) + 1 or len(text)
    return _at_character(text, size, -1) if end - line > size else line


def _tail(text: bytes, lines: int, size: int) -> int:
    """Return the start offset of the longest ending within so many lines and bytes, on a line start if possible."""
    least, start = len(text) - size, len(text)
    end = len(text) - 1 if text.endswith(b"\n") else len(text)
    for _ in range(lines):
        end = text.rfind(b"\n", 0, end)
        start = end + 1
        if start <= least or end < 0:
            break
    if start >= least:
        return start
    line = text.rfind(b"\n", 0, least) + 1
    following = text.find(b"\n", least - 1) + 1 or len(text)
    return _at_character(text, least, 1) if following - line > size else following


def _at_character(text: bytes, offset: int, step: int) -> int:
    """Return the nearest offset in direction `step` that is not inside a character."""
    while 0 < offset < len(text) and text[offset] & 0xC0 == 0x80:
        offset += step
    return offset


def _ending(ref: str) -> str:
    """Return the end of a mark that names `ref`. It identifies an earlier cut."""
    return f"; full output: {ref} ...]"


def _around_mark(text: bytes, ref: str) -> tuple[bytes, bytes] | None:
    """Return the text before and after the mark of an earlier cut; None if there is none."""
    ending = _ending(ref).encode()
    found = text.find(ending)
    line = text.rfind(b"\n", 0, max(found, 0)) + 1
    if found < 0 or not text.startswith(b"[... ", line):
        return None
    return text[:line], text[found + len(ending) :].removeprefix(b"\n")


def _texts(texts: Sequence[str], text: bytes, head: int, tail: int, mark: bytes) -> list[str | None]:
    """Return the parts of `text` with the mark in place of `head` to `tail`; None for a part that was cut completely.

    None too for a part of which only white space is left, since some providers refuse such parts.
    """
    kept: list[str | None] = []
    start = 0
    for own in texts:
        stop = start + len(own.encode())
        if own:
            middle = mark if start <= head < stop else b""
            left = text[start : max(start, min(head, stop))] + middle + text[min(stop, max(tail, start)) : stop]
            text_left = left.decode()
            kept.append(text_left if text_left.strip() or text_left == own else None)
        else:
            kept.append(own)
        start = stop
    return kept
