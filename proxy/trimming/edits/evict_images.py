"""`evict_images`: only the newest images are sent; each older one is replaced with a short description."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from proxy.trimming.draft import Draft
from proxy.trimming.edits.edit import BaseEdit
from proxy.trimming.model import Change
from proxy.trimming.settings import Natural


class EvictImages(BaseEdit, frozen=True):
    """Replaces older images in user messages and tool results with a text: type, size, ref. The order of parts stays.

    All images of the view are counted, newest first. Images in protected messages stay, but count. So do screenshots
    that answer a `computer_call`, because no text is allowed there.
    """

    type: Literal["evict_images"] = "evict_images"
    """Name of the edit."""
    keep: Natural = 2
    """Number of newest images to keep."""

    def apply(self, draft: Draft) -> Iterator[Change]:
        """Replace all images but the newest, going from the newest message back."""
        left = self.keep
        for position in reversed(range(len(draft.messages))):
            message = draft.messages[position]
            images = [part for part in message.attachments if part.is_image] if message is not None else []
            if message is None or not images:
                continue
            going = images[: max(0, len(images) - left)]
            left = max(0, left - len(images))
            if going and position not in draft.protected and message.role != "assistant":
                reason = f"{len(going)} of {len(images)} images not among the newest {self.keep}"
                ref = draft.entries[position].ref
                notes = {image.place: f"[image omitted: {image.description}; ref={ref}]" for image in going}
                noted = message.with_notes(notes)
                if noted is not message:
                    yield draft.replacing(position, self.type, reason, noted)
