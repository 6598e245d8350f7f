"""The text of a message that is nothing but text."""

from __future__ import annotations

from proxy.dialects.chat.messages import Message, text_of
from proxy.dialects.shapes import is_array, is_object


def plain_text(message: Message) -> str | None:
    """Return the text of a message's content, "" where it has none; None where it holds anything but text."""
    content = message.data.get("content")
    if is_array(content) and not all(is_object(part) and part.get("type") == "text" for part in content):
        return None
    return text_of(content)
