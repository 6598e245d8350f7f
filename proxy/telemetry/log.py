"""Log lines: text for people, JSON for machines. No message text is ever logged."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from contextlib import nullcontext
from typing import Any, Final, Literal, TextIO

_JSON: Final = json.JSONEncoder(ensure_ascii=False, default=str)
_WORD: Final = re.compile(r'[^\s"=]+')


class FieldFormatter(logging.Formatter):
    """Writes a record with its `extra={"fields": {...}}`, as `key=value` pairs or as one JSON object."""

    def __init__(self, style: Literal["text", "json"]) -> None:
        """Write in `style`."""
        super().__init__()
        self._as_json = style == "json"
        self._second = (-1, "")
        """The last second that was written, since 1970 and in words."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields: dict[str, Any] = getattr(record, "fields", {})
        second = int(record.created)
        if second != self._second[0]:  # what takes longest about a line changes once in a second
            self._second = (second, self.formatTime(record, "%Y-%m-%dT%H:%M:%S"))
        moment = f"{self._second[1]}.{int(record.msecs):03d}"
        trace = self.formatException(record.exc_info) if record.exc_info else None
        if self._as_json:
            line = {"time": moment, "level": record.levelname.lower(), "logger": record.name}
            line |= {"message": record.getMessage()} | fields | ({"trace": trace} if trace else {})
            return _JSON.encode(line)
        pairs = "".join([f" {key}={_shown(value)}" for key, value in fields.items()])
        line_text = f"{moment} {record.levelname.lower():<7} {record.getMessage()}{pairs}"
        return f"{line_text}\n{trace}" if trace else line_text


class LineHandler(logging.Handler):
    """Writes lines, those of one turn of an event loop by one call: each call costs more than its line.

    Warnings, and lines from where no event loop runs, are written at once, and with them what waits.
    """

    def __init__(self, stream: TextIO) -> None:
        """Write to `stream`."""
        super().__init__()
        self._stream = stream
        self._lines: list[str] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        """The one that will see to what waits."""

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line."""
        try:
            self._lines.append(self.format(record))
        except Exception:  # noqa: BLE001 - as every handler does: what is logged must not fail for that
            self.handleError(record)
            return
        if record.levelno < logging.WARNING:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                pass
            else:
                if loop is not self._loop:
                    self._loop = loop
                    loop.call_soon(self._flush_of, loop)
                return
        self.flush()

    def flush(self) -> None:
        """Write what waits."""
        with self.lock or nullcontext():
            if self._lines:
                lines, self._lines = "\n".join(self._lines), []
                try:
                    self._stream.write(lines + "\n")
                    self._stream.flush()
                except (OSError, ValueError):  # nobody reads them any more
                    pass

    def close(self) -> None:
        """Write what waits, and be used no more."""
        self.flush()
        super().close()

    def _flush_of(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is loop:
            self._loop = None
        self.flush()


def log_exchange(logger: logging.Logger, fields: dict[str, Any]) -> None:
    """Log the line of one exchange: `logger.info("exchange", extra={"fields": fields})`, in fewer steps.

    It is the one line that each request costs. Every other one is logged as usual.
    """
    if logger.isEnabledFor(logging.INFO):
        record = logging.LogRecord(logger.name, logging.INFO, "", 0, "exchange", (), None)
        record.fields = fields
        logger.handle(record)


def set_up_logging(style: Literal["text", "json"], level: str) -> None:
    """Send the log of this process to standard error."""
    # What no line says need not be found out: where it is logged takes longer than writing it.
    logging._srcfile = None  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - as the logging HOWTO has it
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = LineHandler(sys.stderr)
    handler.setFormatter(FieldFormatter(style))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    set_level(level)


def set_level(level: str) -> None:
    """Log what is at least as important as `level`."""
    logging.getLogger("palimpsest").setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(level.upper())


def _shown(value: Any) -> str:
    """Return a value for a text line: one word, or quoted."""
    if type(value) is int or type(value) is float:  # most of them
        return str(value)
    text = "-" if value is None or value == "" else str(value)
    return text if text.isalnum() or _WORD.fullmatch(text) else _JSON.encode(text)
