"""The format of log lines: text for people, JSON for machines. No message text is ever logged."""

from __future__ import annotations

import json
import logging
import re
import sys
from typing import Any, Final, Literal

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
            return json.dumps(line, ensure_ascii=False, default=str)
        pairs = "".join(f" {key}={_shown(value)}" for key, value in fields.items())
        line_text = f"{moment} {record.levelname.lower():<7} {record.getMessage()}{pairs}"
        return f"{line_text}\n{trace}" if trace else line_text


def set_up_logging(style: Literal["text", "json"], level: str) -> None:
    """Send the log of this process to standard error."""
    # What no line says need not be found out: where it is logged takes longer than writing it.
    logging._srcfile = None  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - as the logging HOWTO has it
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler(sys.stderr)
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
    text = "-" if value is None or value == "" else str(value)
    return text if text.isalnum() or _WORD.fullmatch(text) else json.dumps(text, ensure_ascii=False)
