from __future__ import annotations

from typing import Any

import pytest

from proxy.dialects.chat.message import ChatMessage
from proxy.server.display import shown

CALLS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("message", "sender", "text"),
    [
        ({"role": "user", "content": "hello"}, "user", "hello"),
        ({"role": "user", "content": "hello", "name": "anne"}, "anne", "hello"),
        ({"role": "user", "content": "hello", "agent": "planner"}, "planner", "hello"),
        ({"role": "assistant", "content": "hi"}, "writer", "hi"),
        ({"role": "assistant", "content": "hi", "agent": "coder"}, "coder", "hi"),
        ({"role": "user", "content": "<Agent: Scout> [调用工具 grep]"}, "Scout", "[调用工具 grep]"),
        ({"role": "user", "content": "<Scout> [调用工具 grep]"}, "Scout", "[调用工具 grep]"),
        ({"role": "user", "content": "<Agent: Scout> found it</Agent: Scout>"}, "Scout", "found it"),
        ({"role": "user", "content": "<智能体：侦察员>\n找到了</智能体：侦察员>\n"}, "侦察员", "找到了"),
        ({"role": "user", "content": "<Agent: Scout> a</b>"}, "Scout", "a</b>"),
        ({"role": "user", "content": "<div> what is this?"}, "user", "<div> what is this?"),
        (
            {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image_url"}]},
            "user",
            "see",
        ),
        ({"role": "assistant", "content": "I look.", "tool_calls": CALLS}, "writer", "I look."),
    ],
)
def test_people_are_shown_clean_text_and_who_said_it(message: dict[str, Any], sender: str, text: str) -> None:
    assert shown(ChatMessage.of(message), "writer") == (sender, text)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "secret", "is_internal": True},
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "c", "content": "output"},
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "  "},
        {"role": "user", "content": "<Agent: Scout> </Agent: Scout>"},
    ],
)
def test_what_is_for_models_is_not_shown(message: dict[str, Any]) -> None:
    assert shown(ChatMessage.of(message)) is None


def test_a_million_spaces_take_no_time() -> None:
    """It goes on in one pass: with going back and forth it would take minutes."""
    for text in ("<a:" + " " * 10**6, " " * 10**6 + "<a", "<" + "a" * 10**6):
        assert shown(ChatMessage.of({"role": "user", "content": text})) == ("user", text)
