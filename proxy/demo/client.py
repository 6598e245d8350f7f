"""The two ends around the proxy: a client that works as an SDK does, and a server for ASGI applications.

The client resends the whole history with every request and reads the stream. It does not use the proxy's own
stream reader, so an error there is seen here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, Self

import httpx
import orjson
import uvicorn
from msgspec import Struct

from proxy.dialects import JsonObject
from proxy.errors import PalimpsestError

_START_SECONDS: Final = 30.0


class DemoReply(Struct, frozen=True, kw_only=True):
    """What the client got."""

    headers: Mapping[str, str]
    """The response headers, names in lower case."""
    message: JsonObject
    """The reply, put together from the stream."""
    usage: JsonObject
    """What the provider says it read and wrote."""


class IncompleteReply(PalimpsestError):
    """The request was not answered whole; the text says what came instead."""


class DemoClient:
    """A program that talks to a provider at `base_url`, with one API key and one set of headers."""

    def __init__(self, base_url: str, api_key: str, headers: Mapping[str, str]) -> None:
        """Connect to nothing yet."""
        self._http = httpx.Client(
            base_url=base_url,
            headers={"authorization": f"Bearer {api_key}", **headers},
            timeout=30.0,
            trust_env=False,  # a proxy of the environment has no business between two servers of this machine
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ask(self, body: bytes) -> DemoReply:
        """Send a request (`request_body`) and return the reply once the stream has ended.

        Raises:
            IncompleteReply: there was no whole reply.
        """
        kind = {"content-type": "application/json"}
        with self._http.stream("POST", "/chat/completions", content=body, headers=kind) as response:
            if response.status_code != 200:
                raise IncompleteReply(f"HTTP {response.status_code}: {response.read().decode(errors='replace')}")
            chunks = list(_chunks(response.iter_lines()))
        usage: JsonObject = {}
        for chunk in chunks:
            usage = chunk.get("usage") or usage
        return DemoReply(headers=dict(response.headers), message=_message_of(chunks), usage=usage)

    def get(self, path: str) -> Any:
        """Return what the proxy says at `path`, outside the provider's API."""
        response = self._http.get(httpx.URL(self._http.base_url).copy_with(path=path))
        response.raise_for_status()
        return orjson.loads(response.content)


def request_body(model: str, messages: Sequence[JsonObject], tools: Sequence[JsonObject]) -> bytes:
    """Return a request for a streamed reply with its usage, as JSON text."""
    body: dict[str, Any] = {"model": model, "messages": list(messages)}
    if tools:
        body["tools"] = list(tools)
    return orjson.dumps(body | {"stream": True, "stream_options": {"include_usage": True}})


def _chunks(lines: Iterable[str]) -> Iterator[JsonObject]:
    """Yield the events' data up to `[DONE]`."""
    for line in lines:
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            chunk: JsonObject = orjson.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise IncompleteReply(f"an error in the stream: {chunk['error']}")
            yield chunk
    raise IncompleteReply("the stream ended without [DONE]")


def _message_of(chunks: Iterable[JsonObject]) -> JsonObject:
    """Put the first choice together."""
    text: str | None = None
    calls: dict[int, JsonObject] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("content") is not None:
                text = (text or "") + delta["content"]
            for piece in delta.get("tool_calls") or ():
                if piece["index"] not in calls:
                    calls[piece["index"]] = {name: piece[name] for name in ("id", "type", "function")}
                else:
                    call = calls[piece["index"]]["function"]
                    call["arguments"] += piece["function"]["arguments"]
    message: JsonObject = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message


def plain_config(application: Any) -> uvicorn.Config:
    """Return uvicorn's settings for an application without start-up and shutdown."""
    return uvicorn.Config(application, lifespan="off", ws="none", log_config=None, access_log=False)


@contextmanager
def serving(config: uvicorn.Config) -> Generator[str]:
    """Serve on a free port of this machine and yield the address: `http://127.0.0.1:PORT`.

    The server has a thread and an event loop of its own, as in a process of its own: no server waits for
    another one, and signals stay with the main thread.

    Raises:
        PalimpsestError: the server did not start.
    """
    config.host, config.port = "127.0.0.1", 0
    server = uvicorn.Server(config)
    thread = threading.Thread(target=_run, args=(server,), name="demo-server", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{_port(server, thread)}"
    finally:
        server.should_exit = True
        thread.join()


def _run(server: uvicorn.Server) -> None:
    """Serve until told to stop. When its start fails, uvicorn exits; here that ends the thread only."""
    with suppress(SystemExit):
        server.run()


def _port(server: uvicorn.Server, thread: threading.Thread) -> int:
    """Wait until the server listens and return its port."""
    deadline = time.monotonic() + _START_SECONDS
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise PalimpsestError("A server of the demonstration did not start; what it logged says why.")
        time.sleep(0.01)
    port: int = server.servers[0].sockets[0].getsockname()[1]
    return port
