"""What of a chat message costs tokens. `tests/tokens/test_counter.py` has the counts."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.dialects import Countable
from proxy.dialects.chat.message import ChatMessage

URL = "data:image/png;base64,iVBORw0KGgo"
PDF = {"type": "base64", "data": "JVBERi0x"}


@pytest.mark.parametrize(
    ("data", "countable"),
    [
        ({"role": "user", "content": "Hi"}, Countable(texts=("Hi",))),
        ({"role": "assistant", "content": None}, Countable(texts=())),
        ({"role": "user", "content": {"a": 1}}, Countable(texts=('{"a":1}',))),
        (
            {"role": "user", "content": [{"type": "text", "text": "Hi"}, "you", {"type": "text"}]},
            Countable(texts=("Hi", '"you"', '{"type":"text"}')),
        ),
        (
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": URL}},
                    {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
                    {"type": "input_image", "image_url": URL, "detail": "low"},
                    {"type": "file", "file": {"file_data": URL}},
                ],
            },
            Countable(texts=(), media=2, small_images=2),
        ),
        (
            {
                "role": "assistant",
                "content": "",
                "name": "alice",
                "refusal": None,
                "reasoning_content": "a long thought",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            Countable(texts=("", "alice", "f", "{}"), reasoning="a long thought"),
        ),
        (
            {"role": "assistant", "content": "", "reasoning_content": "first", "reasoning": "second"},
            Countable(texts=("",), reasoning="first"),
        ),
        (
            {"role": "assistant", "content": "", "reasoning_content": None, "reasoning": "second"},
            Countable(texts=("",), reasoning="second"),
        ),
        (
            {
                "role": "user",
                "content": [{"type": "input_video", "video_url": {"url": URL}}, {"type": "pdf", "source": PDF}],
            },
            Countable(
                texts=(
                    '{"type":"input_video","video_url":{"url":""}}',
                    '{"type":"pdf","source":{"type":"base64","data":""}}',
                ),
                media=2,
            ),
        ),
        ({"role": "user", "content": "Hi", "name": 3, "refusal": ["no"]}, Countable(texts=("Hi",))),
    ],
)
def test_countable_texts_and_media(data: dict[str, Any], countable: Countable) -> None:
    assert ChatMessage.of(data).countable() == countable
