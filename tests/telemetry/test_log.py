"""The format of log lines."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from proxy.telemetry.log import FieldFormatter, log_exchange, set_up_logging


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


@pytest.mark.usefixtures("_root")
def test_a_broken_line_does_not_fail_its_caller(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("text", "info")
    logging.getLogger("palimpsest.x").info("%d", "x")
    assert "Logging error" in capsys.readouterr().err
