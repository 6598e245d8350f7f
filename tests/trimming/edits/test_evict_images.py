"""`evict_images`: what stands in the place of an image, and what holds of it on any history."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.dialects.responses.items import Item
from proxy.trimming.edits.evict_images import EvictImages
from tests.trimming.edits.held import check, draft_of, outcome, recorded
from tests.trimming.histories import TRIED, valid

PNG = "data:image/png;base64,aGVsbG8="


def image(url: Any = PNG) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def said(*parts: Any, role: str = "user") -> Message:
    return ChatMessage.of({"role": role, "content": list(parts)})


def test_the_newest_images_stay_and_the_order_of_the_parts() -> None:
    log = [
        said(text("look"), image(), text("and"), image()),
        said(image(), text("last")),
        ChatMessage.of({"role": "user", "content": "now?"}),
    ]
    after = check(EvictImages(), draft_of(log))
    first = after.messages[0]
    assert first is not None
    assert first.data["content"] == [
        text("look"),
        text("[image omitted: image/png, 5 bytes; ref=ref_0]"),
        text("and"),
        image(),
    ]
    assert after.messages[1:] == tuple(log[1:])
    (change,) = outcome(EvictImages(), draft_of(log))[0]
    assert change.reason == "1 of 2 images not among the newest 2"


def test_protected_images_stay_and_count() -> None:
    log = [said(image()), said(image()), said(image(), text("what is it?"))]
    after = check(EvictImages(keep=1), draft_of(log))
    assert [_images(message) for message in after.messages] == [0, 0, 1]
    again = check(EvictImages(keep=0), draft_of(log, {"rounds": 0, "first_user": True}))
    assert [_images(message) for message in again.messages] == [1, 0, 1]


def _images(message: Message | None) -> int:
    assert message is not None
    return sum(part["type"] == "image_url" for part in message.data["content"])


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (image("https://example.org/a.png"), "https://example.org/a.png"),
        (image("https://example.org/" + "a" * 300), "https://example.org/" + "a" * 180 + "…"),
        (image("data:;base64,aGVsbG8="), "unknown type, 5 bytes"),
        (image("data:image/gif"), "image/gif, 0 bytes"),
        (image(None), "no address"),
        ({"type": "image_url"}, "no address"),
        ({"type": "input_image", "input_image": "aGVsbG8="}, "unknown type, 5 bytes"),
        (
            {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": "aGVsbG8="}},
            "image/jpeg, 5 bytes",
        ),
    ],
)
def test_what_is_told_of_an_image(part: dict[str, Any], words: str) -> None:
    log = [said(part), ChatMessage.of({"role": "user", "content": "now?"})]
    after = check(EvictImages(keep=0), draft_of(log))
    assert after.messages[0] == said(text(f"[image omitted: {words}; ref=ref_0]"))


def test_what_is_no_image_stays() -> None:
    log = [
        said("odd", {"type": "input_audio", "input_audio": {"data": "aGVsbG8="}}, {"type": ["image_url"]}),
        said(image(), role="assistant"),
        ChatMessage.of({"role": "user", "content": "now?"}),
    ]
    check(EvictImages(keep=0), draft_of(log))
    assert outcome(EvictImages(keep=0), draft_of(log)) == ([], None)


def test_in_a_recorded_session_an_image_becomes_a_line() -> None:
    session = recorded("pydantic-images")
    draft = draft_of([*session, ChatMessage.of({"role": "user", "content": "and now?"})])
    before = [message for message in session if b'"image_url"' in message.raw]
    after = check(EvictImages(keep=0), draft)
    changed = [message for message in after.messages if message not in draft.messages and message is not None]
    assert len(changed) == len(before) == 1
    assert len(before[0].raw) > 100_000
    assert len(changed[0].raw) < 1_000
    assert "[image omitted: image/" in changed[0].text


PICTURES = st.integers(0, 3).map(lambda number: [said(text("see"), *[image()] * number)])


@TRIED
@given(st.lists(st.one_of(valid(), PICTURES), max_size=6), st.integers(0, 4), st.integers(0, 2))
def test_it_is_safe_on_any_history(parts: list[list[Message]], keep: int, kept: int) -> None:
    log = [message for part in parts for message in part]
    draft = draft_of(log, {"rounds": kept, "spans": 2})
    after = check(EvictImages(keep=keep), draft)
    places = [place for place, message in enumerate(log) for _ in range(message.raw.count(b'"image_url":{'))]
    left = [
        place
        for place, message in enumerate(after.messages)
        if message is not None
        for _ in range(message.raw.count(b'"image_url":{'))
    ]
    newest = places[max(0, len(places) - keep) :]
    assert left == [
        place for number, place in enumerate(places) if place in draft.protected or number >= len(places) - len(newest)
    ]


def test_a_screenshot_that_answers_a_call_stays() -> None:
    screen = {"type": "computer_screenshot", "image_url": PNG}
    shown = [Item.of({"type": "computer_call_output", "call_id": f"c{at}", "output": screen}) for at in range(3)]
    assert [part.is_image for part in shown[0].attachments] == [True]
    assert list(EvictImages(keep=1).apply(draft_of(shown))) == []
