from __future__ import annotations

from typing import Any

import pytest

from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.recall.lines import pattern_of
from proxy.recall.search import Findings, search
from proxy.recall.telling import MOST_SHOWN, NOTHING_MORE, QUOTED, counted, findings, original

REF = "ref_0123456789abcdef"
ALL = slice(None)


def result(text: Any, **fields: Any) -> Message:
    return ChatMessage.of({"role": "tool", "tool_call_id": "c1", "content": text, **fields})


def test_an_original_stands_whole_between_marks_that_name_it() -> None:
    text = "a\n>>> ref_ffffffffffffffff\nb"
    told = original(REF, result(text, agent="A", is_internal=True), ALL, None)
    head, rest = told.split("\n", 1)
    assert head == f"[{REF}: the result of a tool (agent A), 3 lines. {QUOTED}]"
    assert rest == f"<<< {REF}\n{text}\n>>> {REF}"
    assert "is_internal" not in told


def test_some_lines_of_it() -> None:
    told = original(REF, result("a\nb\nc\nd"), slice(1, 3), None)
    assert ", lines 2-3 of 4. " in told
    assert told.endswith(f"<<< {REF}\nb\nc\n>>> {REF}")
    assert original(REF, result("a"), slice(4, 9), None) == f"{REF} has 1 line: there are none from 5 on."


def test_page_after_page_gives_all_of_a_long_one() -> None:
    text = "\n".join(f"{number} {'x' * 90}" for number in range(1_000))
    parts, span = [], ALL
    for _ in range(10):
        told = original(REF, result(text), span, None)
        assert len(told) < MOST_SHOWN + 500
        parts.append(told.partition(f"<<< {REF}\n")[2].partition(f"\n>>> {REF}")[0])
        if 'lines "' not in told:
            break
        first, _, last = told.partition('lines "')[2].partition('"')[0].partition("-")
        span = slice(int(first) - 1, int(last))
    assert "\n".join(parts) == text
    assert len(parts) == 4


def test_what_was_asked_for_is_whole_where_it_fits() -> None:
    text = "\n".join("x" * 90 for _ in range(1_000))
    assert "more line" not in original(REF, result(text), slice(10, 200), None)
    told = original(REF, result(text), slice(36, 900), None)
    assert (
        f'[601 more lines. For the next ones, call recall_context with ref {REF} and lines "300-900"' in told
    )


def test_an_image_is_named() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    told = original(REF, ChatMessage.of({"role": "user", "content": [part]}), ALL, None)
    assert "what the user said" in told
    assert "[image_url: image/png, 3 bytes; only text can be shown here]" in told


def test_matching_lines_come_with_their_numbers() -> None:
    told = original(REF, result("red\nblue\nred"), ALL, pattern_of("red"))
    assert ", 2 matches in 3 lines. " in told
    assert told.endswith(f"<<< {REF}\n1: red\n3: red\n>>> {REF}")
    assert ", 1 match in " in original(REF, result("red\nblue\nred"), slice(1, 3), pattern_of("red"))
    none = original(REF, result("red"), ALL, pattern_of("green"))
    assert none == f"Nothing matches in {REF}, which has 1 line. Try another pattern, or none."


def test_many_matching_lines_are_counted() -> None:
    told = original(REF, result("\n".join(["x" * 100] * 1_000)), ALL, pattern_of("x"))
    assert len(told) < MOST_SHOWN + 500
    shown = told.count("x" * 100)
    assert told.endswith(f"[{1_000 - shown} more matches: ask with lines, or with a narrower pattern.]")


def test_very_many_are_not() -> None:
    assert ", 5000 matches and more in 6000 lines. " in original(
        REF, result("\n".join(["x"] * 6_000)), ALL, pattern_of("x")
    )


CALL = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
CALLS = ChatMessage.of({"role": "assistant", "content": None, "tool_calls": [CALL]})


def told_of(messages: list[Message], query: str, *notes: str, all_messages: int | None = None) -> str:
    refs = [f"ref_{number:016x}" for number in range(len(messages))]
    return findings(notes, search(messages, query, 8), messages, refs, all_messages or len(messages))


def test_what_was_found_is_told_with_its_ref_and_its_place() -> None:
    messages = [CALLS, result("nothing"), CALLS, result("one\ntulip"), result("no call", tool_call_id="c9")]
    assert told_of(messages, "tulip").split("\n") == [
        "[1 message, the best first. For all of one, call recall_context with its ref. " + QUOTED + "]",
        "",
        "1. ref_0000000000000003: the result of the tool read, message 4",
        "  2| tulip",
    ]
    assert "the result of a tool, message 5" in told_of(messages, "no call")


def test_only_the_newest_may_have_been_searched() -> None:
    told = told_of([result("tulip")], "tulip", "A note.", all_messages=9)
    assert "message 9\n" in told
    assert told.endswith("[A note. Only the newest 1 of 9 messages were searched.]")


@pytest.mark.parametrize(
    ("left_out", "words"),
    [
        (0, "Nothing in this conversation matches."),
        (1, "1 message with such words stands in full before you."),
        (2, "2 messages with such words stand in full before you."),
    ],
)
def test_nothing_is_found(left_out: int, words: str) -> None:
    told = findings([], Findings(passages=(), left_out=left_out), [], [], 0)
    assert words in told
    assert told.endswith(NOTHING_MORE)


def test_a_call_is_looked_for_near_its_result() -> None:
    messages = [CALLS, *[ChatMessage.of({"role": "user", "content": "a"})] * 300, result("tulip")]
    assert "the result of a tool, message 302" in told_of(messages, "tulip")


def test_things_are_counted() -> None:
    assert (counted(1, "line"), counted(2, "match", "es"), counted(0, "line")) == (
        "1 line",
        "2 matches",
        "0 lines",
    )
