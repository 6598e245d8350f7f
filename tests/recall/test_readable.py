from __future__ import annotations

from typing import Any

import pytest

from proxy.dialects.chat.message import ChatMessage
from proxy.recall.readable import described

CALL = {"id": "c", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
TEXT = {"type": "text", "text": "look"}
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
        (
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            "[call of f: {}]",
        ),
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
            [TEXT, {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}],
            "look\n[image_url: https://example.org/a.png; only text can be shown here]",
        ),
        (
            [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, TEXT],
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
def test_what_is_no_text_is_named(parts: list[Any], text: str) -> None:
    assert ChatMessage.of({"role": "user", "content": parts}).readable() == text


@pytest.mark.parametrize(
    ("message", "tool", "words"),
    [
        ({"role": "user", "content": "a"}, "", "what the user said"),
        (
            {"role": "assistant", "content": "a", "agent": "Planner\n"},
            "",
            "what the assistant said (agent Planner)",
        ),
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
