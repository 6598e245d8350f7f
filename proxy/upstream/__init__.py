"""The provider behind the proxy: how it is reached, and nothing of what is said to it.

    channel     one connection, and one HTTP/1.1 request after the other on it
    direct      completions: a whole body straight to its server, over connections that are kept
    transport   any other HTTP request, exact to the byte (httpx's interface on aiohttp)
    client      the configured upstream: routes, credentials, time limits

Errors of the HTTP client become this project's own here.
"""

from __future__ import annotations

from proxy.upstream.client import Answer, Destination, Upstream

__all__ = ["Answer", "Destination", "Upstream"]
