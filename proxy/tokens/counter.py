"""Tokens of texts, messages and JSON as a model would count them.

What a message costs beside its text is a rule of thumb, since providers do not publish theirs. It
knows nothing of policies and stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final

import orjson

from proxy.config import TokenMethod
from proxy.conversation import body_of
from proxy.dialects import JsonObject, Message
from proxy.dialects.jsontext import is_array, is_object
from proxy.tokens.cache import Cached, CountCache
from proxy.tokens.calibration import Calibration
from proxy.tokens.estimate import estimate
from proxy.tokens.vocabulary import EncodingName, Vocabulary, encoding_of

MESSAGE_TOKENS: Final = 4
"""Tokens of a message beside its text: its role and what divides it from the next."""
MEDIA_TOKENS: Final = 765
"""Tokens of an image (as of one of 1024 x 1024), sound or file, whatever its size: its bytes are no text."""
LOW_DETAIL_TOKENS: Final = 85
"""Tokens of an image that is sent with `detail: low`."""

_MEDIA: Final = frozenset(
    {"image", "image_url", "input_image", "audio_url", "input_audio", "video_url", "file", "input_file"}
)
"""Types of parts that hold bytes (base64, a `data:` URL) or an address instead of text."""

_PLAIN: Final = frozenset({"role", "content"})
"""Fields of a message that has nothing beside its content."""

_CACHE_BYTES: Final = 32 * 1024 * 1024
_JSON_CACHE_BYTES: Final = 1024 * 1024
_DIGEST_BYTES: Final = 16


class TokenCounter:
    """Counts tokens and remembers what it counted. One for the process; may be used by several threads."""

    def __init__(self, method: TokenMethod = "tiktoken", *, cache_bytes: int = _CACHE_BYTES) -> None:
        """Build nothing yet: see `warm`.

        Args:
            method: `tiktoken` counts with a vocabulary, `estimate` by classes of characters.
            cache_bytes: how much the counts of messages may take, about.
        """
        self.method: Final = method
        self.calibration: Final = Calibration()
        """What upstreams count beside these counts, which it does not change. `clear` leaves it alone."""
        self._vocabularies: dict[EncodingName, Vocabulary] = {
            name: Vocabulary(name) for name in ("o200k_base", "cl100k_base")
        }
        self._messages = CountCache(cache_bytes)
        self._json = CountCache(_JSON_CACHE_BYTES)

    def warm(self) -> None:
        """Build the vocabularies (0.5 s): to be called in a thread, so that no request waits for them."""
        if self.method == "tiktoken":
            for vocabulary in self._vocabularies.values():
                vocabulary.build()

    def text(self, text: str, model: str) -> int:
        """Return the tokens of `text` for `model`; an unknown model is taken for one of OpenAI's newest."""
        return self._count(text, encoding_of(model))

    def message(self, message: Message, model: str) -> int:
        """Return the tokens of `message` for `model`: its text, name and calls, and `MESSAGE_TOKENS`.

        Reasoning is not counted, since it is seldom sent, nor are ids. The count is remembered by the
        message's bytes.
        """
        key: tuple[EncodingName, str] = (encoding_of(model), body_of(message))
        count = self._messages.get(key)
        return self._new_count(key, message) if count is None else count

    def messages(self, messages: Sequence[Message], model: str) -> list[int]:
        """Return the tokens of each of `messages`: as `message` does, and faster for many."""
        if len(messages) == 1:  # what a turn brings, as a rule
            return [self.message(messages[0], model)]
        encoding = encoding_of(model)
        keys: list[tuple[EncodingName, str]] = [(encoding, body_of(message)) for message in messages]
        counts = self._messages.get_all(keys)
        return [
            self._new_count(keys[place], messages[place]) if count is None else count
            for place, count in enumerate(counts)
        ]

    def json(self, raw: bytes, model: str) -> int:
        """Return the tokens of a JSON text for `model`, such as a request's tools; it is remembered too."""
        encoding = encoding_of(model)
        key = (encoding, blake2b(raw, digest_size=_DIGEST_BYTES).digest())
        known = self._json.get(key)
        if known is None:
            known = self._count(raw.decode("utf-8", "replace"), encoding)
            self._json.put(key, known)
        return known

    @property
    def cached(self) -> Cached:
        """How many messages are remembered, and their tokens."""
        return self._messages.cached

    def clear(self) -> None:
        """Forget every count."""
        self._messages.clear()
        self._json.clear()

    def _new_count(self, key: tuple[EncodingName, str], message: Message) -> int:
        count = self._count_message(message, key[0])
        self._messages.put(key, count)
        return count

    def _count(self, text: str, encoding: EncodingName) -> int:
        if self.method == "estimate":
            return estimate(text, encoding)
        return self._vocabularies[encoding].count(text)

    def _count_message(self, message: Message, encoding: EncodingName) -> int:
        data = message.data
        tokens = MESSAGE_TOKENS + self._count_content(data.get("content"), encoding)
        if data.keys() <= _PLAIN:  # nearly always
            return tokens
        texts = [data.get("name"), data.get("refusal")]
        for call in message.calls:
            texts += [call.name, call.arguments]
        return tokens + sum([self._count(text, encoding) for text in texts if isinstance(text, str) and text])

    def _count_content(self, content: Any, encoding: EncodingName) -> int:
        if isinstance(content, str):
            return self._count(content, encoding)
        if content is None:
            return 0
        if is_array(content):
            return sum(self._count_part(part, encoding) for part in content)
        return self._count(orjson.dumps(content).decode(), encoding)

    def _count_part(self, part: Any, encoding: EncodingName) -> int:
        kind = part.get("type") if is_object(part) else None
        if isinstance(kind, str) and kind in _MEDIA:
            return LOW_DETAIL_TOKENS if _is_low_detail(part) else MEDIA_TOKENS
        if kind == "text" and isinstance(part.get("text"), str):
            return self._count(part["text"], encoding)
        return self._count(orjson.dumps(part).decode(), encoding)


def _is_low_detail(part: JsonObject) -> bool:
    image = part.get("image_url")
    return (image if is_object(image) else part).get("detail") == "low"
