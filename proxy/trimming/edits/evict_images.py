"""`evict_images`: only the newest images are sent; in the place of each older one stands what it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal

from proxy.dialects.chat.messages import Message
from proxy.dialects.shapes import is_array, is_object
from proxy.trimming.draft import Draft
from proxy.trimming.edits.edit import BaseEdit
from proxy.trimming.plan import Change
from proxy.trimming.section import Natural

_IMAGES: Final = frozenset({"image_url", "input_image", "image"})
"""Types of parts that hold an image."""
_TOLD: Final = 200
"""Characters of an image's address that are told at most."""
_SCHEME: Final = 16
"""Characters in which an address has its scheme; what has none is the image itself, as base64."""


class EvictImages(BaseEdit, frozen=True):
    """Older images of user messages and tool results become a text: type, size, ref. Their order stays.

    All images of the view are counted, from the newest back; those in protected messages stay and count.
    """

    type: Literal["evict_images"] = "evict_images"
    """Which strategy this is."""
    keep: Natural = 2
    """So many images stay, the newest ones."""

    def apply(self, draft: Draft) -> Iterator[Change]:
        """Replace the images of each message that are beyond the newest, from the newest message back."""
        left = self.keep
        for position in reversed(range(len(draft.messages))):
            message = draft.messages[position]
            images = _images(message) if message is not None else []
            if message is None or not images:
                continue
            going = images[: max(0, len(images) - left)]
            left = max(0, left - len(images))
            if going and position not in draft.protected and message.role != "assistant":
                reason = f"{len(going)} of {len(images)} images not among the newest {self.keep}"
                without = _without(message, frozenset(going), draft.entries[position].ref)
                yield draft.replacing(position, self.type, reason, without)


def _images(message: Message) -> list[int]:
    """Return the places of the images among a message's parts."""
    content = message.data.get("content")
    if not is_array(content):
        return []
    return [place for place, part in enumerate(content) if is_object(part) and _is_image(part.get("type"))]


def _is_image(kind: Any) -> bool:
    return isinstance(kind, str) and kind in _IMAGES


def _without(message: Message, going: frozenset[int], ref: str) -> Message:
    """Return the message with texts in the place of these parts."""
    content = list(message.data["content"])
    for place in going:
        content[place] = {"type": "text", "text": f"[image omitted: {_described(content[place])}; ref={ref}]"}
    return message.replacing("content", content)


def _described(part: dict[str, Any]) -> str:
    """Return what is known of an image: its type and size, or its address."""
    held: Any = part.get(part["type"]) or part.get("source")
    kind: Any = None
    if is_object(held):
        kind, held = held.get("media_type"), held.get("url") or held.get("data")
    if not isinstance(held, str):
        return "no address"
    head, _, data = held.partition(",")
    if head.startswith("data:"):
        kind, held = head.removeprefix("data:").partition(";")[0], data
    elif "://" in head[:_SCHEME]:
        return held if len(held) <= _TOLD else f"{held[:_TOLD]}…"
    return f"{kind if isinstance(kind, str) and kind else 'unknown type'}, {_bytes(held)} bytes"


def _bytes(base64: str) -> int:
    """Return how many bytes a base64 text stands for."""
    return len(base64.rstrip("=")) * 3 // 4
