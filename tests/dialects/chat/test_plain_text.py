"""The text of a message that is nothing but text."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.dialects.chat.message import ChatMessage

TEXT = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        (None, ""),
        ([], ""),
        ([TEXT, TEXT], "aa"),
        ([TEXT, {"type": "image_url", "image_url": {"url": "x"}}], None),
        (["odd"], None),
    ],
)
def test_it_is_none_where_there_is_anything_else(content: Any, text: str | None) -> None:
    assert ChatMessage.of({"role": "user", "content": content}).plain_text == text
