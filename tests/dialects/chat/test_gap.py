from __future__ import annotations

from typing import Any

import pytest

from proxy.dialects.chat.own_calls import BLANK_LINE, gap


def part(text: Any) -> dict[str, Any]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize("before", ["Let me look.", [part("?"), part("Let me look.")]])
def test_texts_that_would_run_into_each_other_are_kept_apart(before: Any) -> None:
    assert gap(before, "It is blue.") == BLANK_LINE


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("One. ", "Two."),
        ("One.", " Two."),
        ("One.\n", "\nTwo."),
        ("One.", "\u00a0Two."),
        ([part("One. ")], "Two."),
        ("", "Two."),
        (None, "Two."),
        ([], "Two."),
        (["odd"], "Two."),
        ([part(None)], "Two."),
        ([{"type": "image_url", "image_url": {"url": "x"}}], "Two."),
        ("One.", ""),
        ("One.", None),
        ("One.", [part("Two.")]),
    ],
)
def test_nothing_stands_where_nothing_runs_together(before: Any, after: Any) -> None:
    assert gap(before, after) == ""
