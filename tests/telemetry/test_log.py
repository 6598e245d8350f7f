"""The format of log lines."""

from __future__ import annotations

import io
import json
import logging
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import pytest

from proxy.telemetry.log import FieldFormatter, LineHandler, log_exchange, set_up_logging


def _line(style: Literal["text", "json"], *, broken: bool = False, **fields: Any) -> str:
    why = None
    if broken:
        try:
            raise ValueError("no")
        except ValueError:
            why = sys.exc_info()
    record = logging.LogRecord("palimpsest.x", logging.INFO, "f", 1, "done %d", (1,), why)
    record.fields = fields
    return FieldFormatter(style).format(record)


def test_text_is_one_line_of_pairs() -> None:
    line = _line("text", session="a b", edits="", saved=1.5, name="x=y")
    assert line.endswith('info    done 1 session="a b" edits=- saved=1.5 name="x=y"')


def test_json_is_one_object() -> None:
    line = json.loads(_line("json", session="会话", tokens=3))
    assert (line["message"], line["session"], line["tokens"], line["level"]) == ("done 1", "会话", 3, "info")


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="the zone cannot be changed here")
def test_times_are_utc_wherever_the_proxy_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC-9")
        time.tzset()
        before = datetime.now(UTC)
        told = [json.loads(_line("json"))["time"], _line("text").split()[0]]
        after = datetime.now(UTC)
    time.tzset()
    assert [each[-1] for each in told] == ["Z", "Z"]
    for each in told:
        assert before - timedelta(milliseconds=1) <= datetime.fromisoformat(each) <= after


def test_an_error_brings_its_trace() -> None:
    assert "ValueError: no" in _line("text", broken=True)
    assert "ValueError: no" in json.loads(_line("json", broken=True))["trace"]


@pytest.fixture
def _root() -> Iterator[None]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


@pytest.mark.usefixtures("_root")
def test_only_our_own_lines_come_below_warnings() -> None:
    set_up_logging("json", "debug")
    assert logging.getLogger("palimpsest.exchange").isEnabledFor(logging.DEBUG)
    assert not logging.getLogger("aiohttp").isEnabledFor(logging.INFO)
    assert isinstance(logging.getLogger().handlers[0].formatter, FieldFormatter)


def _record(text: str, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("palimpsest.x", level, "f", 1, text, (), None)


def test_the_line_of_an_exchange_is_one_that_was_logged_with_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("palimpsest.x")
    with caplog.at_level(logging.INFO, logger.name):
        logger.info("exchange", extra={"fields": {"tokens": 3}})
        log_exchange(logger, {"tokens": 3})
    logged, shorter = caplog.records
    assert FieldFormatter("text").format(shorter)[24:] == FieldFormatter("text").format(logged)[24:]
    assert (shorter.name, shorter.levelno, shorter.getMessage()) == (logger.name, logging.INFO, "exchange")
    with caplog.at_level(logging.WARNING, logger.name):
        log_exchange(logger, {})
    assert caplog.records == [logged, shorter]


def test_a_line_is_written_at_once() -> None:
    handler = LineHandler(stream := io.StringIO())
    handler.handle(_record("one"))
    assert stream.getvalue() == "one\n"


def test_nothing_fails_for_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = LineHandler(stream := io.StringIO())
    stream.close()
    handler.handle(_record("one"))
    broken = logging.LogRecord("palimpsest.x", logging.INFO, "f", 1, "%d", ("x",), None)
    told = list[logging.LogRecord]()
    monkeypatch.setattr(handler, "handleError", told.append)
    handler.handle(broken)
    assert told == [broken]


@pytest.mark.parametrize("style", ["text", "json"])
def test_nothing_in_a_line_pretends_to_be_another_line(style: Literal["text", "json"]) -> None:
    odd = "a\nb\r\x1b[31m\x85\u2028\u2029\u202e\x9b\ud800 é 好"
    record = logging.LogRecord("palimpsest", logging.ERROR, "", 0, "said %s", (odd,), None)
    record.fields = {"session": odd}
    line = FieldFormatter(style).format(record)
    assert len(line.splitlines()) == 1
    assert all(character.isprintable() for character in line)
    assert "é 好" in line
    assert "\\u2028" in line
    if style == "json":
        assert json.loads(line)["session"] == odd
