"""The source of a summary: which identifiers, numbers and texts stand in it, however they are written."""

from __future__ import annotations

import json

import pytest

from proxy.dialects.chat.message import ChatMessage
from proxy.summaries.facts import Facts, Said
from proxy.summaries.failures import Failure
from proxy.summaries.names import Name
from proxy.summaries.source import Source, plain, scaled_in
from proxy.summaries.values import Value
from tests.trimming.notation import messages

CALL = {
    "id": "a",
    "type": "function",
    "function": {
        "name": "open_file",
        "arguments": json.dumps({"path": "C:\\data\\log.txt", "说": "中文-77"}),
    },
}
LOG = [
    *messages(
        ["user Look at /srv/app/src/main.py and at HAT 136, on 2024-05-07, for $1,234.50 or 3万 or 20k"]
    ),
    ChatMessage.of({"role": "assistant", "content": None, "tool_calls": [CALL]}),
    *messages(['tool a {"row": "say \\"x-1\\"", "ratio": 0.25}', "assistant | run()"]),
]
SOURCE = Source.of(LOG)


@pytest.mark.parametrize(
    "identifier",
    [
        "/srv/app/src/main.py",
        "MAIN.py",
        "src/main.py",
        "main.py/app",
        "HAT136",
        "hat-136",
        "open_file",
        "x-1",
        "run",
    ],
)
def test_identifiers_that_stand_there(identifier: str) -> None:
    assert SOURCE.has(identifier)


def test_what_the_user_said() -> None:
    assert SOURCE.said("look at  /srv/app/src/main.py\nand at hat 136")
    assert SOURCE.said("or 20K.")
    assert not SOURCE.said("run()")


def test_arguments_count_as_they_read_not_as_they_were_escaped() -> None:
    assert SOURCE.has("C:\\data\\log.txt")
    assert SOURCE.has("中文-77")


@pytest.mark.parametrize(
    "identifier", ["HAT137", "/srv/other/main.py", "https://srv/app", "open_files", "bob@example.com", "//"]
)
def test_identifiers_that_do_not(identifier: str) -> None:
    assert SOURCE.has(identifier) is (identifier == "//")  # of nothing but marks there is nothing to lack


@pytest.mark.parametrize(
    "number",
    ["1234.5", "1,234.50", "2024", "05", "7", "30000", "20000", "136", "25", "4", "77", "0.25"],
)
def test_numbers_that_stand_there(number: str) -> None:
    assert SOURCE.has_number(number)


@pytest.mark.parametrize("number", ["1234", "1235", "12", "2025", "30001", "0.26", "1.25"])
def test_numbers_that_do_not(number: str) -> None:
    assert not SOURCE.has_number(number)


def test_scaled_numbers() -> None:
    assert list(scaled_in("3k of 2.5M, 3百万, 1,000千 and 5 kg, 4b2")) == [
        ("3000", "3k"),
        ("2500000", "2.5M"),
        ("3000000", "3百万"),
        ("1000000", "1,000千"),
        ("4000000000", "4b"),
    ]


def test_what_came_before_counts_too() -> None:
    facts = Facts(
        messages=38,
        rules=(Said(text="Never touch rule-1.", strength=2),),
        requests=(Said(text="What of ask-2?", strength=0),),
        names=(Name(text="name-3"),),
        values=(Value(name="limit", text="450", said=True),),
        failures=(Failure(tool="t", text="error err-4"),),
    )
    source = Source.of(LOG, "It was about old-5.", facts)
    for identifier in ("rule-1", "ask-2", "name-3", "err-4", "old-5"):
        assert source.has(identifier)
        assert not SOURCE.has(identifier)
    assert source.has_number("450")
    assert source.has_number("42")  # messages in all
    assert "never touch rule-1." in source.own
    assert "look at" in source.own
    assert "open_file" not in source.own


def test_what_user_and_assistant_speak() -> None:
    log = messages(["user 你好", "assistant 你好，请问", "tool a the and of the end"])
    assert Source.of(log).spoken.script == "Chinese"
    assert Source.of(log, "and the rest of it is long").spoken.script == "Latin"
    assert Source.of(messages(["tool a the and of the end"])).spoken.script == "Latin"
    assert Source.of([]).spoken.size == 0


def test_texts_are_compared_without_case_and_width() -> None:
    assert plain("ＡＢ１２ Cd") == "ab12 cd"
    assert plain("Straße") == "straße"
    assert SOURCE.has_text("LOOK at")
    assert not SOURCE.has_text("look away")
    assert {"look", "srv", "open_file"} & SOURCE.words == {"look", "srv"}
