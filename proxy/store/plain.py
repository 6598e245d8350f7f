"""Which texts a database can hold: no NUL (PostgreSQL refuses it), and nothing that is no Unicode.

JSON texts never hold a NUL, since JSON writes it as an escape. Ids, names and models can.
"""

from __future__ import annotations

import re
from typing import Final

from proxy.errors import InvalidRequest

_UNSTORABLE: Final = re.compile("[\x00\ud800-\udfff]")


def is_plain(text: str) -> bool:
    """Tell whether every database can hold `text`. What it cannot hold, it does not hold: look no further."""
    return _UNSTORABLE.search(text) is None


def require_plain(**texts: str | None) -> None:
    """Refuse a request that names something by a text that cannot be stored.

    Raises:
        InvalidRequest: one of `texts` cannot be; it is named.
    """
    for name, text in texts.items():
        if text is not None and not is_plain(text):
            raise InvalidRequest(
                f"{name} holds a NUL or half of a surrogate pair, which cannot be stored: send it without.",
                param=name,
            )


def sanitize(text: str) -> str:
    """Return `text` with U+FFFD in place of what cannot be stored."""
    return text if is_plain(text) else "".join(c if is_plain(c) else "\ufffd" for c in text)
