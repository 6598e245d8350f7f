"""The provider behind the proxy: how it is reached, and nothing of what is said to it.

    transport   one HTTP request, exact to the byte (httpx's interface on aiohttp)
    client      the configured upstream: routes, credentials, time limits

Errors of the HTTP client become this project's own here.
"""
