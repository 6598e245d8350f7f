"""The baseline: a proxy that only forwards chat completions, as one would write it in an hour.

    python -m benchmarks.passthrough --upstream URL --port N --via transport|client

It is FastAPI with one route, httpx on aiohttp's connections, and uvicorn with uvloop and httptools, in one
process: the libraries of Palimpsest without Palimpsest. `transport` calls httpx-aiohttp's transport directly,
which is faster; `client` uses `httpx.AsyncClient`, as most people do. It checks, stores and counts nothing and
handles no errors.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from httpx_aiohttp import AiohttpTransport

Ask = Callable[[httpx.Request], Awaitable[httpx.Response]]

_LIMITS: Final = httpx.Limits(max_connections=1000, max_keepalive_connections=1000, keepalive_expiry=60)
_TIMEOUT: Final = {"connect": 10.0, "read": 600.0, "write": 600.0, "pool": 10.0}
_STAYS: Final = frozenset({"host", "content-length", "connection", "transfer-encoding", "keep-alive"})
"""Headers that belong to one connection."""


def passthrough(upstream: str, via: str) -> FastAPI:
    """Return the application; `via` is `transport` or `client`."""
    app = FastAPI()
    url = httpx.URL(upstream + "/chat/completions")
    transport = AiohttpTransport(limits=_LIMITS)
    client = httpx.AsyncClient(transport=transport, timeout=httpx.Timeout(**_TIMEOUT), trust_env=False)

    async def directly(request: httpx.Request) -> httpx.Response:
        return await transport.handle_async_request(request)

    async def by_client(request: httpx.Request) -> httpx.Response:
        return await client.send(request, stream=True)

    ask: Ask = directly if via == "transport" else by_client

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> StreamingResponse:
        headers = [(name, value) for name, value in request.headers.items() if name not in _STAYS]
        answer = await ask(
            httpx.Request("POST", url, headers=headers, content=await request.body(), extensions={"timeout": _TIMEOUT})
        )
        kept = {name: value for name, value in answer.headers.items() if name not in _STAYS}
        if "content-length" in answer.headers:
            kept["content-length"] = answer.headers["content-length"]
        return StreamingResponse(_pieces(answer, via), answer.status_code, kept)

    return app


async def _pieces(answer: httpx.Response, via: str) -> AsyncIterator[bytes]:
    """Yield the body as it arrives."""
    try:
        if via == "client":
            async for piece in answer.aiter_raw():
                yield piece
        elif isinstance(answer.stream, httpx.AsyncByteStream):  # what a transport returns according to its contract
            async for piece in answer.stream:
                yield piece
    finally:
        await answer.aclose()


def main() -> None:
    """Serve until told to stop."""
    words = argparse.ArgumentParser()
    words.add_argument("--upstream", required=True)
    words.add_argument("--port", type=int, required=True)
    words.add_argument("--via", choices=("transport", "client"), required=True)
    given = words.parse_args()
    uvicorn.run(
        passthrough(given.upstream, given.via),
        port=given.port,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
