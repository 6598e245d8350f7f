from __future__ import annotations

from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.recall.branch import Branch, sent_whole
from proxy.trimming import Entry


def message(text: str) -> Message:
    return ChatMessage.of({"role": "user", "content": text})


def test_it_has_the_stored_messages_and_the_new_ones() -> None:
    assert Branch(key="k", tip="n", depth=7, fresh=(message("a"),)).messages == 8


def test_what_stands_in_the_view_as_it_is() -> None:
    entries = [
        Entry(message=message(text), tokens=1, ref="ref", position=at)
        for at, text in ((3, "a"), (4, "b"), (9, "c"))
    ]
    view = [entries[0].message, message("stub of b"), entries[2].message]
    assert sent_whole(entries, view) == {3, 9}
