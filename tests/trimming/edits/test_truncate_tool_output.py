"""`truncate_tool_output`: its table, its limits on any text, parts, and texts made to be slow."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects.chat.message import ChatMessage
from proxy.trimming.edits.truncate_tool_output import TruncateToolOutput
from tests.trimming.edits.golden import REF, check_output, entry, result, rows
from tests.trimming.edits.golden import shortened as cut

Direction = Literal["head", "tail", "head_tail"]
DIRECTIONS: tuple[Direction, ...] = ("head", "tail", "head_tail")


@pytest.mark.parametrize("row", rows("truncate_tool_output"), ids=lambda row: row["name"])
def test_golden(row: dict[str, Any]) -> None:
    check_output(TruncateToolOutput, row)


def without_mark(text: str) -> list[str]:
    return [line for line in text.split("\n") if not line.endswith(f"; full output: {REF} ...]")]


TEXTS = st.lists(
    st.one_of(
        st.text(max_size=20), st.sampled_from(["\n", "\n\n", "word " * 30, "多字节" * 20, "😀" * 30, "a\n" * 40])
    ),
    max_size=12,
).map("".join)
EDITS = st.builds(
    TruncateToolOutput,
    max_lines=st.integers(1, 20),
    max_bytes=st.integers(1, 300),
    direction=st.sampled_from(DIRECTIONS),
)


@given(EDITS, TEXTS)
def test_limits_hold_but_for_the_mark(edit: TruncateToolOutput, text: str) -> None:
    message = result(text)
    shortened = edit.shorten(message, entry(message))
    after = (shortened.message if shortened is not None else message).text
    kept = without_mark(after)
    if shortened is not None:
        assert len(after.encode()) < len(text.encode())
        assert sum(len(line.encode()) for line in kept) <= edit.max_bytes
        assert after.count("\n") + 1 <= edit.max_lines + 2
        beginning, _, end = after.partition("[... ")
        assert text.startswith(beginning.removesuffix("\n"))
        assert text.endswith(end.partition("...]")[2].removeprefix("\n"))
        assert message.text == text


@given(EDITS, EDITS, TEXTS)
def test_its_own_work_is_left_alone_and_cut_again_where_limits_are_narrower(
    first: TruncateToolOutput, second: TruncateToolOutput, text: str
) -> None:
    original = result(text)
    once = first.shorten(original, entry(original))
    if once is None:
        return
    assert first.shorten(once.message, entry(original)) is None
    twice = second.shorten(once.message, entry(original))
    if twice is not None:
        assert len(twice.message.text.encode()) < len(once.message.text.encode())
        alone = second.shorten(original, entry(original))
        assert alone is not None
        assert twice.message == alone.message


def test_a_mark_of_something_else_is_text_like_any_other() -> None:
    edit = TruncateToolOutput(max_lines=1, max_bytes=200, direction="head")
    text = "[... 5 lines (9 bytes) omitted of 9 (99 bytes); full output: other ...]\n" + "more\n" * 30
    after = cut(edit, text)
    assert after is not None
    assert after.text.startswith("[... 5 lines")
    assert after.text.endswith("\n[... 30 lines (150 bytes) omitted of 31 (222 bytes); full output: ref ...]")
    spoken = f"it said; full output: {REF} ...]\n" + "more\n" * 90
    assert cut(edit, spoken) is not None


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def part(text: str, **more: str) -> dict[str, str]:
    return {"type": "text", "text": text, **more}


def mark(omitted: str, of: str) -> str:
    return f"[... {omitted} omitted of {of}; full output: {REF} ...]"


@pytest.mark.parametrize(
    ("direction", "content", "after"),
    [
        pytest.param(
            "head_tail",
            [part("a" * 300, mine="x"), IMAGE, part("b" * 300)],
            [
                part("a" * 10 + "\n" + mark("1 line (580 bytes)", "1 (600 bytes)") + "\n", mine="x"),
                IMAGE,
                part("b" * 10),
            ],
            id="the limits hold for all parts together",
        ),
        pytest.param(
            "head",
            [part("a" * 20), IMAGE, part("b" * 300), part("c" * 300)],
            [part("a" * 20), IMAGE, part("\n" + mark("1 line (600 bytes)", "1 (620 bytes)"))],
            id="a text part of which nothing is left goes",
        ),
        pytest.param(
            "tail",
            [part("a" * 300), part("b" * 300), part("c" * 20), part("")],
            [part(mark("1 line (600 bytes)", "1 (620 bytes)") + "\n"), part("c" * 20), part("")],
            id="parts that were empty stay",
        ),
        pytest.param(
            "head_tail",
            [part("a" * 10), part("b" * 500), part("c" * 10), "no part"],
            [
                part("a" * 10),
                part("\n" + mark("1 line (500 bytes)", "1 (520 bytes)") + "\n"),
                part("c" * 10),
                "no part",
            ],
            id="what is no part stays",
        ),
        pytest.param(
            "tail",
            [part("a" * 300), part("b" * 30 + " "), part("c" * 19)],
            [part(mark("1 line (330 bytes)", "1 (350 bytes)") + "\n"), part("c" * 19)],
            id="of a part that is cut no blanks alone stay",
        ),
        pytest.param(
            "head",
            [part(" "), part(" " * 30 + "b" * 300)],
            [part(" "), part(" " * 19 + "\n" + mark("1 line (311 bytes)", "1 (331 bytes)"))],
            id="blanks of which nothing is cut stay",
        ),
    ],
)
def test_content_in_parts(direction: Direction, content: list[Any], after: list[Any]) -> None:
    shortened = cut(TruncateToolOutput(max_bytes=20, direction=direction), content)
    assert shortened is not None
    assert shortened.data["content"] == after
    assert cut(TruncateToolOutput(max_bytes=20, direction=direction), shortened.data["content"]) is None


def test_other_fields_keep_their_bytes() -> None:
    message = ChatMessage(b'{"tool_call_id": "a", "role":"tool", "content":"' + b"x" * 500 + b'", "n": 1.00}')
    shortened = TruncateToolOutput(max_bytes=10).shorten(message, entry(message))
    assert shortened is not None
    assert shortened.message.raw.startswith(b'{"tool_call_id":"a","role":"tool","content":"xxxxx\\n[... ')
    assert shortened.message.raw.endswith(b',"n":1.00}')


@pytest.mark.parametrize("content", [None, "", [], [IMAGE]])
def test_what_has_no_text_stays(content: Any) -> None:
    assert cut(TruncateToolOutput(max_lines=1, max_bytes=1), content) is None


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "text",
    [
        pytest.param("x" * 10_000_000, id="ten megabytes without a line end"),
        pytest.param("a line of text\n" * 100_000, id="a hundred thousand lines"),
        pytest.param(" " * 1_000_000, id="a million spaces"),
        pytest.param("\n" * 1_000_000, id="a million line ends"),
        pytest.param("[... " * 200_000, id="two hundred thousand beginnings of a mark"),
    ],
)
def test_large_texts_come_within_the_limits(direction: Direction, text: str) -> None:
    after = cut(TruncateToolOutput(direction=direction), text)
    assert after is not None
    assert len(after.text) <= 51200 + 200
