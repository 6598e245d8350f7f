"""Log lines as text or JSON. The text of messages is never logged."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from contextlib import suppress
from typing import Any, Final, Literal, TextIO

_JSON: Final = json.JSONEncoder(ensure_ascii=False, default=str)
_WORD: Final = re.compile(r'[^\s"=]+')
_UNSAFE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that some programs take for a line end, that control a terminal, or that change the reading order."""


class FieldFormatter(logging.Formatter):
    """Formats a record and its `extra={"fields": {...}}` as `key=value` pairs or as one JSON object."""

    def __init__(self, style: Literal["text", "json"]) -> None:
        """Format lines in `style`."""
        super().__init__()
        self.converter = time.gmtime  # log collectors read a time without a zone as UTC
        self._as_json = style == "json"
        self._second = (-1, "")  # cache of the last formatted second: number and text

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields: dict[str, Any] = getattr(record, "fields", {})
        second = int(record.created)
        if second != self._second[0]:  # formatting the time is the slowest part of a line
            self._second = (second, self.formatTime(record, "%Y-%m-%dT%H:%M:%S"))
        moment = f"{self._second[1]}.{int(record.msecs):03d}Z"
        trace = self.formatException(record.exc_info) if record.exc_info else None
        if self._as_json:
            line = {"time": moment, "level": record.levelname.lower(), "logger": record.name}
            line |= {"message": record.getMessage()} | fields | ({"trace": trace} if trace else {})
            return _escaped(_JSON.encode(line))
        parts = [moment, f"{record.levelname.lower():<7}", record.getMessage()]
        for key, value in fields.items():
            if value is None or value == "":
                text = "-"
            elif (text := str(value)).isalnum() or _WORD.fullmatch(text):
                pass
            else:
                text = _JSON.encode(text)  # quoted
            parts.append(f"{key}={text}")
        line_text = _escaped(" ".join(parts))
        if trace:
            line_text += "".join(["\n" + _escaped(line) for line in trace.split("\n")])
        return line_text


def _escaped(line: str) -> str:
    """Return a line with unsafe characters escaped, so that it cannot imitate another line."""
    return line if line.isprintable() else _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", line)


class LineHandler(logging.Handler):
    """Writes each line at once. Errors of the stream, such as a full disk, are ignored."""

    def __init__(self, stream: TextIO) -> None:
        """Write to `stream`."""
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - logging must not fail the caller; every handler does this
            self.handleError(record)
            return
        with suppress(OSError, ValueError):
            self._stream.write(line + "\n")
            self._stream.flush()


def log_exchange(logger: logging.Logger, fields: dict[str, Any]) -> None:
    """Log one exchange. Faster than `logger.info("exchange", extra={"fields": fields})`, with the same result.

    Every request logs this line. Other lines are logged the usual way.
    """
    if logger.isEnabledFor(logging.INFO):
        record = logging.LogRecord(logger.name, logging.INFO, "", 0, "exchange", (), None)
        record.fields = fields
        logger.handle(record)


def set_up_logging(style: Literal["text", "json"], level: str) -> None:
    """Send the log of this process to standard error."""
    # Skip the caller look-up; no format uses it.
    logging._srcfile = None  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - as the logging HOWTO has it
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = LineHandler(sys.stderr)
    handler.setFormatter(FieldFormatter(style))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    set_level(level)


def set_level(level: str) -> None:
    """Log records of `level` and above."""
    logging.getLogger("palimpsest").setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(level.upper())
