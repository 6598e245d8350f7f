"""The provider behind the proxy: routes, credentials, sending, time limits, errors.

    client        where a request goes, sending it, the answer read chunk by chunk
    connections   aiohttp's session, set up to send requests unchanged

aiohttp's errors become this project's in `client`.
"""

from __future__ import annotations

from proxy.upstream.client import (
    HELD_BYTES,
    MAX_REPLY_VALUES,
    READABLE,
    Answer,
    Destination,
    Inflater,
    Upstream,
    check_values,
    too_large,
)
from proxy.upstream.connections import trusting
