"""The text of an answer: refs, lines, pages, messages, search results."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.conversation import body_id
from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.errors import InvalidRequest
from proxy.recall.render import (
    LONGEST,
    MOST_SHOWN,
    NOTHING_MORE,
    QUOTED,
    Findings,
    Pages,
    chosen,
    copied,
    counted,
    described,
    findings,
    name_in,
    original,
    pattern_of,
    ref_of,
    span_of,
)
from proxy.recall.search import search

ALL = slice(None)
BODY = body_id(b"{}")


def test_a_ref_is_the_beginning_of_a_body_id() -> None:
    ref = ref_of(BODY)
    assert ref == f"ref_{BODY[:16]}"
    assert name_in(ref) == BODY[:16]
    assert name_in(BODY) == BODY
    assert name_in(BODY[:12]) == BODY[:12]


@pytest.mark.parametrize(
    "ref", ["", "ref_", "ref_123", "REF_" + "0" * 16, "ref_" + "g" * 16, "0" * 41, f"ref={'0' * 16}", "..", "%00"]
)
def test_text_that_is_no_ref(ref: str) -> None:
    assert name_in(ref) is None


@pytest.mark.parametrize(
    "written",
    [
        "ref_0123456789abcdef",
        " ref_0123456789abcdef\n",
        "ref=ref_0123456789abcdef;",
        "ref: ref_0123456789abcdef",
        "[ref_0123456789abcdef]",
        '"REF_0123456789ABCDEF"',
        "`ref_0123456789abcdef`.",
    ],
)
def test_a_ref_is_recognised_as_a_model_copies_it(written: str) -> None:
    assert copied(written) == "ref_0123456789abcdef"


def test_a_very_long_text_is_no_ref() -> None:
    assert name_in(copied("f" * 100_000)) is None


# ------------------------------------------------------------------------------------ lines


TEXT = "red\nblue\n蓝\nred"


@pytest.mark.parametrize(
    ("lines", "grep", "numbers"),
    [
        (None, None, [1, 2, 3, 4]),
        ("2-3", None, [2, 3]),
        ("4-999999999", None, [4]),
        ("5-9", None, []),
        (None, "red$", [1, 4]),
        ("2-9", "red", [4]),
        (None, "蓝|b", [2, 3]),
        (None, "", [1, 2, 3, 4]),
        (None, "x", []),
    ],
)
def test_lines_are_chosen(lines: str | None, grep: str | None, numbers: list[int]) -> None:
    span = slice(None) if lines is None else span_of(lines)
    found = chosen(TEXT, span, None if grep is None else pattern_of(grep))
    assert [number for number, _ in found] == numbers
    assert [line for _, line in found] == [TEXT.split("\n")[number - 1] for number in numbers]


@pytest.mark.parametrize("lines", ["", "1", "a-b", "0-1", "3-2", "-1-2", "1-2-3", "1-" + "9" * 5000, "١-٣"])
def test_an_invalid_range_of_lines(lines: str) -> None:
    with pytest.raises(InvalidRequest, match="lines=10-20") as raised:
        span_of(lines)
    assert raised.value.param == "lines"


@pytest.mark.parametrize("grep", ["(", "a{1000}{1000}", r"(?=x)", r"\1"])
def test_an_invalid_pattern(grep: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidRequest, match="RE2 regular expression: ") as raised:
        pattern_of(grep)
    assert raised.value.param == "grep"
    assert "b'" not in raised.value.message
    assert capfd.readouterr().err == ""


# ------------------------------------------------------------------------------------ pages


LONG_LINE = "x" * (2 * LONGEST) + "needle" + "y" * 10
"""A line that counts as three."""


def test_a_text_has_its_lines() -> None:
    pages = Pages("one\n\nthree\n")
    assert [pages.from_to(slice(at, at + 1), 0)[2] for at in range(len(pages))] == ["one", "", "three", ""]
    assert [pages.number_at(place) for place in (0, 2, 3, 4, 5, 9)] == [1, 1, 1, 2, 3, 3]
    assert pages.from_to(ALL, 100) == (1, 4, "one\n\nthree\n")
    assert pages.from_to(slice(1, 3), 100) == (2, 3, "\nthree")
    assert pages.from_to(slice(3, 99), 100) == (4, 4, "")
    assert pages.from_to(slice(7, 9), 100) == (5, 4, "")
    assert len(Pages("")) == 1


def test_a_long_line_counts_as_several_and_is_shown_as_it_is() -> None:
    pages = Pages(f"first\n{LONG_LINE}\nlast")
    assert len(pages) == 5
    assert pages.from_to(slice(1, 4), 10 * LONGEST) == (2, 4, LONG_LINE)
    assert pages.from_to(slice(3, 5), 100)[2] == f"needle{'y' * 10}\nlast"


def test_a_page_has_as_many_lines_as_fit() -> None:
    pages = Pages("\n".join(["12345"] * 10))
    assert pages.from_to(ALL, 17) == (1, 3, "12345\n12345\n12345")
    assert pages.from_to(ALL, 16) == (1, 2, "12345\n12345")
    assert pages.from_to(ALL, 0) == (1, 1, "12345")
    assert pages.from_to(slice(8, 10), 17) == (9, 10, "12345\n12345")


@given(st.text("ab\n", max_size=200), st.integers(1, 40))
def test_all_pages_together_are_the_whole_text(text: str, room: int) -> None:
    text *= 100  # with lines longer than what counts as one
    pages = Pages(text)
    parts, first, end = [], 1, 0
    while first <= len(pages):
        number, last, part = pages.from_to(slice(first - 1, None), room * 100)
        assert number == first <= last
        parts.append(part)
        first, end = last + 1, end + len(part)
        if text[end : end + 1] == "\n":
            parts.append("\n")
            end += 1
    assert "".join(parts) == text


def test_matching_lines_are_found() -> None:
    pages = Pages("red\nblue\nred")
    assert list(pages.found(pattern_of("red"), ALL)) == [(1, "red"), (3, "red")]
    assert list(pages.found(pattern_of("red"), slice(1, 3))) == [(3, "red")]
    assert list(pages.found(pattern_of("x"), ALL)) == []
    assert list(pages.found(pattern_of("^$"), ALL)) == []
    assert list(Pages("\n").found(pattern_of("^$"), ALL)) == [(1, ""), (2, "")]


def test_of_a_long_line_the_part_around_a_match_is_shown() -> None:
    pages = Pages(f"needle\n{LONG_LINE}")
    assert list(pages.found(pattern_of("needle"), ALL)) == [(1, "needle"), (4, f"…{'x' * 150}needle{'y' * 10}")]
    assert list(pages.found(pattern_of("needle"), slice(1, 3))) == []
    assert len(list(pages.found(pattern_of("needle"), slice(3, 4)))) == 1
    assert len(list(pages.found(pattern_of("x"), ALL))) == 3  # of one line only the first ones
    assert [number for number, _ in pages.found(pattern_of("x|y"), slice(2, 3))] == [3, 3, 3]
    assert [number for number, _ in pages.found(pattern_of("n|y"), slice(3, 4))] == [4, 4, 4]


def test_a_part_of_a_line_shows_that_it_is_one() -> None:
    pages = Pages(f"before\n{LONG_LINE}\nafter")
    assert pages.near(2, 3) == "before"
    assert pages.near(7, 8) == "x" * 151 + "…"
    assert pages.near(7 + len(LONG_LINE), 7 + len(LONG_LINE)) == f"…{LONG_LINE[-150:]}"
    assert pages.near(2_000, 2_001) == f"…{'x' * 301}…"
    assert len(pages.near(7, 7 + len(LONG_LINE))) < 600


# ------------------------------------------------------------------------------------ messages


CALL = {"id": "c", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
PART = {"type": "text", "text": "look"}
PNG = "data:image/png;base64," + "A" * 40


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "user", "content": "hi\nthere"}, "hi\nthere"),
        ({"role": "user", "content": "hi", "agent": "A", "is_internal": True}, "hi"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, '[call of read: {"path": "a"}]'),
        (
            {"role": "assistant", "content": "I look.", "tool_calls": [CALL, CALL]},
            'I look.\n[call of read: {"path": "a"}]\n[call of read: {"path": "a"}]',
        ),
        ({"role": "assistant", "content": None, "refusal": "I cannot."}, "I cannot."),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}, "[call of f: {}]"),
        ({"role": "user", "content": None}, ""),
        ({"role": "user"}, ""),
    ],
)
def test_a_message_is_readable(message: dict[str, Any], text: str) -> None:
    assert ChatMessage.of(message).readable() == text


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (
            [{"type": "image_url", "image_url": {"url": PNG}}],
            "[image_url: image/png, 30 bytes; only text can be shown here]",
        ),
        (
            [PART, {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}],
            "look\n[image_url: https://example.org/a.png; only text can be shown here]",
        ),
        (
            [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, PART],
            "look\n[input_audio: wav, 3 bytes; only text can be shown here]",
        ),
        (
            [{"type": "image", "source": {"media_type": "image/gif", "data": "AAAA"}}],
            "[image: image/gif, 3 bytes; only text can be shown here]",
        ),
        (
            [{"type": "file", "file": {"file_data": "AAAA"}}],
            "[file: unknown type, 3 bytes; only text can be shown here]",
        ),
        (
            [{"type": "input_image", "input_image": "AAAA"}],
            "[input_image: unknown type, 3 bytes; only text can be shown here]",
        ),
        ([{"type": "video"}], "[video: no address; only text can be shown here]"),
        ([{}, "bare"], '[part: no address; only text can be shown here]\n["bare"]'),
    ],
)
def test_media_is_described(parts: list[Any], text: str) -> None:
    assert ChatMessage.of({"role": "user", "content": parts}).readable() == text


@pytest.mark.parametrize(
    ("message", "tool", "words"),
    [
        ({"role": "user", "content": "a"}, "", "what the user said"),
        ({"role": "assistant", "content": "a", "agent": "Planner\n"}, "", "what the assistant said (agent Planner)"),
        ({"role": "tool", "content": "a"}, "", "the result of a tool"),
        ({"role": "tool", "content": "a"}, "read", "the result of the tool read"),
        ({"role": "tool", "content": "a", "name": "list"}, "", "the result of the tool list"),
        ({"role": "tool", "content": "a", "name": "n" * 900}, "", f"the result of the tool {'n' * 200}…"),
        ({"role": "critic", "content": "a"}, "", "a message of critic"),
        ({"role": "", "content": "a"}, "", "a message"),
        ({"role": "user", "content": "a", "agent": 7}, "", "what the user said"),
    ],
)
def test_a_message_is_described(message: dict[str, Any], tool: str, words: str) -> None:
    assert described(ChatMessage.of(message), tool) == words


# ------------------------------------------------------------------------------------ answers


REF = "ref_0123456789abcdef"


def result(text: Any, **fields: Any) -> Message:
    return ChatMessage.of({"role": "tool", "tool_call_id": "c1", "content": text, **fields})


def test_an_original_stands_whole_between_marks_that_name_it() -> None:
    text = "a\n>>> ref_ffffffffffffffff\nb"
    told = original(REF, result(text, agent="A", is_internal=True), ALL, None)
    head, rest = told.split("\n", 1)
    assert head == f"[{REF}: the result of a tool (agent A), 3 lines. {QUOTED}]"
    assert rest == f"<<< {REF}\n{text}\n>>> {REF}"
    assert "is_internal" not in told


def test_some_lines_of_an_original() -> None:
    told = original(REF, result("a\nb\nc\nd"), slice(1, 3), None)
    assert ", lines 2-3 of 4. " in told
    assert told.endswith(f"<<< {REF}\nb\nc\n>>> {REF}")
    assert original(REF, result("a"), slice(4, 9), None) == f"{REF} has 1 line: there are none from 5 on."


def test_a_long_original_is_read_page_after_page() -> None:
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


def test_lines_that_fit_are_shown_without_a_note() -> None:
    text = "\n".join("x" * 90 for _ in range(1_000))
    assert "more line" not in original(REF, result(text), slice(10, 200), None)
    told = original(REF, result(text), slice(36, 900), None)
    assert f'[601 more lines. For the next ones, call recall_context with ref {REF} and lines "300-900"' in told


def test_an_image_is_described() -> None:
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


def test_the_count_of_matches_is_bounded() -> None:
    assert ", 5000 matches and more in 6000 lines. " in original(
        REF, result("\n".join(["x"] * 6_000)), ALL, pattern_of("x")
    )


CALL = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
CALLS = ChatMessage.of({"role": "assistant", "content": None, "tool_calls": [CALL]})


def told_of(messages: list[Message], query: str, *notes: str, all_messages: int | None = None) -> str:
    refs = [f"ref_{number:016x}" for number in range(len(messages))]
    return findings(notes, search(messages, query, 8), messages, refs, (all_messages or len(messages)) - len(messages))


def test_a_search_result_has_its_ref_and_its_place() -> None:
    messages = [CALLS, result("nothing"), CALLS, result("one\ntulip"), result("no call", tool_call_id="c9")]
    assert told_of(messages, "tulip").split("\n") == [
        "[1 message, the best first. For all of one, call recall_context with its ref. " + QUOTED + "]",
        "",
        "1. ref_0000000000000003: the result of the tool read, message 4",
        "  2| tulip",
    ]
    assert "the result of a tool, message 5" in told_of(messages, "no call")


def test_the_answer_says_if_only_the_newest_messages_were_searched() -> None:
    told = told_of([result("tulip")], "tulip", "A note.", all_messages=9)
    assert "message 9\n" in told
    assert told.endswith("[A note. Only the newest 1 of 9 messages were searched.]")


@pytest.mark.parametrize(
    ("left_out", "words"),
    [
        (0, "Nothing in this conversation matches."),
        (1, "1 matching message is already in your context in full."),
        (2, "2 matching messages are already in your context in full."),
    ],
)
def test_an_empty_search_result(left_out: int, words: str) -> None:
    told = findings([], Findings(passages=(), left_out=left_out), [], [], 0)
    assert words in told
    assert told.endswith(NOTHING_MORE)


def test_a_call_is_looked_up_near_its_result() -> None:
    messages = [CALLS, *[ChatMessage.of({"role": "user", "content": "a"})] * 300, result("tulip")]
    assert "the result of a tool, message 302" in told_of(messages, "tulip")


def test_things_are_counted() -> None:
    assert (counted(1, "line"), counted(2, "match", "es"), counted(0, "line")) == ("1 line", "2 matches", "0 lines")
