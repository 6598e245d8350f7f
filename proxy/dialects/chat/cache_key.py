"""The name under which a provider's cache finds a session's requests again (`prompt_cache_key`).

It tells a provider nothing of the session but that its requests belong together. It does not know where it
is sent.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import Final

from proxy.dialects.writer import write

_LETTERS: Final = 32
"""OpenAI takes 64 at most; so many do not meet by chance."""


def cache_key(secret: bytes, tenant: str, session: str) -> str:
    """Return a session's key, 32 hexadecimal digits: always the same for the same three arguments.

    Args:
        secret: of this installation, so that nobody else can tell which session a key is of.
        tenant: whose session it is.
        session: its id.
    """
    return hmac.new(secret, write([tenant, session]), sha256).hexdigest()[:_LETTERS]
