"""Bodies, answers, routes and imports that are nearly right.

Whatever comes, nothing fails by accident: no 500, no traceback, no request without an end, nothing left pending.
Each test makes a fixed number of cases; `make attack` lets each of them run for ten minutes with cases that no
run had before. A failure names its case, as `PALIMPSEST_ATTACK_CASE` takes it to make that case alone again.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from random import Random
from typing import Any, Final
from urllib.parse import quote

import httpx
import orjson
import pytest

from tests.hostile.mutation import as_json, mutated, mutated_bytes
from tests.support.raw_socket import RawClient
from tests.support.served import Served, config_file
from tests.support.stores import empty_store

SECONDS: Final = float(os.environ.get("PALIMPSEST_ATTACK_SECONDS", "0"))  # noqa: TID251 - a setting of the tests
CASE: Final = os.environ.get("PALIMPSEST_ATTACK_CASE", "")  # noqa: TID251 - a setting of the tests
_CASES: Final = 250
_PATIENCE: Final = 30.0  # seconds for one answer
_RECENT: Final = 50  # sessions that are looked at after a run
_TOOL: Final = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
_CALL: Final = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "b"]}'}}
_RESULT: Final = "\n".join(f"line {number}: value-{number * 7}" for number in range(200))
TALK: Final[list[dict[str, Any]]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "看一下这个文件"}, {"type": "text", "text": "please"}]},
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": _RESULT},
    {"role": "assistant", "content": "done", "reasoning_content": "hm", "refusal": None},
    {"role": "user", "content": "go on", "name": "anne"},
]
BODIES: Final[tuple[dict[str, Any], ...]] = (
    {"model": "echo", "messages": TALK, "tools": [_TOOL], "tool_choice": "auto"},
    {"model": "echo", "messages": TALK, "stream": True, "stream_options": {"include_usage": True}},
    {"model": "echo", "messages": TALK[-1:], "n": 2, "metadata": {"a": "b"}, "temperature": 0.5},
)
HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
POLICY: Final = {
    "trigger": {"messages": 3},
    "target": {"tokens": 100},
    "on_arrival": [{"type": "compact_tool_output", "over_tokens": 50}],
    "edits": [{"type": "clear_tool_results", "keep": 0}, {"type": "drop_oldest"}],
}


def cases(kind: str) -> Iterator[tuple[str, Random]]:
    """Yield (name, its chance) of each case."""
    if CASE:
        yield CASE, Random(CASE)  # noqa: S311 - a case that can be made again
        return
    run = f"{time.time_ns():x}" if SECONDS else "fixed"
    ends, number = time.monotonic() + SECONDS, 0
    while time.monotonic() < ends if SECONDS else number < _CASES:
        yield (name := f"{kind}-{run}-{number}"), Random(name)  # noqa: S311 - likewise
        number += 1


@contextmanager
def naming(case: str) -> Iterator[None]:
    """Name the case in which the connection broke."""
    try:
        yield
    except httpx.HTTPError as why:
        raise AssertionError(case) from why


class Faulty:
    """An upstream that answers each request with the bytes that a test has put down."""

    def __init__(self) -> None:
        self.answer = b""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.base_url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                with connection, suppress(OSError, ValueError):
                    connection.settimeout(_PATIENCE)
                    data = b""
                    while b"\r\n\r\n" not in data:
                        data += connection.recv(65_536)
                    head, _, body = data.partition(b"\r\n\r\n")
                    length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
                    while len(body) < length:
                        body += connection.recv(65_536)
                    connection.sendall(self.answer)

    def close(self) -> None:
        """Serve no more."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(_PATIENCE)


class Attacked:
    """A proxy in a process of its own, and what must be true of it after each case and at the end."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self.client = httpx.Client(base_url=served.url, trust_env=False, timeout=_PATIENCE)
        self._seen = 0  # letters of its log that were looked at
        self.port = int(served.url.rpartition(":")[2])

    def check(self, case: str, answer: httpx.Response) -> None:
        """Look at one answer."""
        assert answer.status_code != 500, (case, answer.text[:500])
        if answer.status_code >= 400:
            assert "error" in answer.json(), (case, answer.text[:500])

    def settled(self) -> None:
        """Look at what all the cases left behind."""
        _, found, told = self._served.log[self._seen :].partition("Traceback")
        self._seen = len(self._served.log)
        assert not found, told[:3000]
        assert self.client.get("/readyz").status_code == 200
        for row in self.client.get("/sessions", params={"limit": _RECENT}).json()["data"]:
            place = f"/sessions/{quote(row['id'], safe='')}"
            for view in ("messages", "export"):
                with naming(place):
                    assert self.client.get(f"{place}/{view}").status_code == 200, row
            states = [each["status"] for each in self.client.get(place + "/exchanges").json()["data"]]
            assert "pending" not in states, row


@pytest.fixture(scope="module")
def faulty(_direct: None) -> Iterator[Faulty]:
    upstream = Faulty()
    yield upstream
    upstream.close()


@pytest.fixture(scope="module")
def proxy(faulty: Faulty, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    folder = tmp_path_factory.mktemp("fuzz")
    config = config_file(folder, faulty, empty_store(folder / "p.db"), policies={"default": POLICY})
    with Served(config) as served:
        found = Attacked(served.wait())
        with found.client:
            yield found


@pytest.fixture(autouse=True)
def _fine(faulty: Faulty) -> None:
    """Let the upstream answer as it should, until a test says otherwise."""
    body = orjson.dumps(reply(stream=False)[0])
    faulty.answer = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def test_bodies(proxy: Attacked) -> None:
    for case, random in cases("body"):
        body = as_json(random, mutated(random, random.choice(BODIES)))
        headers = {"content-type": "application/json"}
        if random.random() < 0.7:
            headers["x-session-id"] = f"s{random.randrange(10)}"
        if random.random() < 0.2:
            headers["x-session-mode"] = random.choice(("append", "full", "auto", "other"))
        proxy.check(case, proxy.client.post("/v1/chat/completions", content=body, headers=headers))
    proxy.settled()


def reply(*, stream: bool) -> list[dict[str, Any]]:
    """Return an answer of the provider, or its events."""
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    head = {"id": "chatcmpl-1", "model": "m", "created": 1}
    message = {"role": "assistant", "content": "fine", "tool_calls": [_CALL]}
    if not stream:
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return [head | {"object": "chat.completion", "choices": [choice], "usage": usage}]
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"content": "fi"},
        {"content": "ne 好"},
        {"tool_calls": [{"index": 0, **_CALL}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
        {},
    ]
    chunk = head | {"object": "chat.completion.chunk"}
    events: list[dict[str, Any]] = [
        chunk | {"choices": [{"index": 0, "delta": each, "finish_reason": None}]} for each in deltas
    ]
    events[-1]["choices"][0]["finish_reason"] = "tool_calls"
    return [*events, chunk | {"choices": [], "usage": usage}]


def answer_of(random: Random, *, stream: bool) -> bytes:
    """Return what an upstream writes that is not quite itself."""
    parts = mutated(random, reply(stream=stream), times=random.choice((0, 1, 2)))
    kind = b"application/json"
    if stream:
        events = parts if isinstance(parts, list) else [parts]
        if random.random() < 0.2:
            random.shuffle(events)
        end = random.choice((b"\n\n", b"\n\n", b"\r\n\r\n", b"\r\r"))
        body = b"".join(b"data: " + as_json(random, event).replace(b"\n", b" ") + end for event in events)
        body += random.choice((b"data: [DONE]" + end, b"", b": end" + end, b"event: error" + end))
        kind = random.choice((b"text/event-stream", b"text/event-stream; charset=utf-8", kind))
    else:
        whole = parts[0] if isinstance(parts, list) and parts else parts
        body = as_json(random, whole)
    if random.random() < 0.3:
        body = mutated_bytes(random, body)
    lines = [b"HTTP/1.1 200 OK", b"Content-Type: " + kind, b"Connection: close"]
    if random.random() < 0.7:
        lines.append(b"Content-Length: %d" % (len(body) + random.choice((0, 0, 0, 5))))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def test_answers(faulty: Faulty, proxy: Attacked) -> None:
    for case, random in cases("answer"):
        stream = random.random() < 0.6
        faulty.answer = answer_of(random, stream=stream)
        headers = {"x-session-id": f"s{random.randrange(10)}"}
        body = {"model": "m", "messages": [{"role": "user", "content": case}], "stream": stream}
        with naming(case):
            answer = proxy.client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code != 500, (case, answer.text[:500])
    proxy.settled()


_PATHS: Final = (
    "/sessions",
    "/sessions/s1",
    "/sessions/s1/messages",
    "/sessions/s1/context",
    "/sessions/s1/refs/0123456789abcdef",
    "/sessions/s1/export",
    "/sessions/s1/exchanges",
    "/sessions/s1/fork",
    "/sessions/s1/compact",
    "/exchanges/exc_0",
    "/readyz",
    "/tokens/cache",
    "/v1/models",
    "/v1/chat/completions",
)
_QUERIES: Final = ("limit", "after", "tenant", "branch", "meta", "channel", "policy", "lines", "grep", "as", "at", "x")
_WORDS: Final = ("1", "-1", "1000", "true", "a-b", "1-2", "(", "[a-z", "%00", "%ff", "%F0%9F%98%80", "..", "s1", "é")
_METHODS: Final = ("GET", "GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS", "PATCH", "TRACE", "BREW")


def test_routes(proxy: Attacked) -> None:
    for case, random in cases("route"):
        path = random.choice(_PATHS)
        if random.random() < 0.5:
            query = [f"{random.choice(_QUERIES)}={random.choice(_WORDS)}" for _ in range(random.randrange(1, 4))]
            path += "?" + "&".join(query)
        line = path.encode()
        if random.random() < 0.5:
            line = mutated_bytes(random, line)
        method = random.choice(_METHODS).encode()
        body = as_json(random, mutated(random, {"as": "b", "at": "c"})) if random.random() < 0.4 else b""
        head = [method + b" " + line + b" HTTP/1.1", b"Host: localhost", b"Connection: close"]
        if body:
            head += [b"Content-Type: application/json", b"Content-Length: %d" % len(body)]
        with RawClient(proxy.port) as client:
            client.socket.settimeout(_PATIENCE)
            with suppress(OSError):
                client.socket.sendall(b"\r\n".join([*head, b"", body]))
            status, _, said = client.answer()
        assert status != 500, (case, said[:500])
        assert status, case
    proxy.settled()


def test_imports(proxy: Attacked) -> None:
    body = {"model": "echo", "messages": TALK}
    proxy.check("first", proxy.client.post("/v1/chat/completions", json=body, headers={"x-session-id": "source"}))
    lines = [orjson.loads(line) for line in proxy.client.get("/sessions/source/export").text.splitlines()]
    for case, random in cases("import"):
        changed = mutated(random, lines)
        changed = changed if isinstance(changed, list) else [changed]
        data = b"\n".join(as_json(random, each).replace(b"\n", b" ") for each in changed)
        answer = proxy.client.post(
            "/sessions/import", params={"as": case}, content=data, headers={"content-type": "application/x-ndjson"}
        )
        proxy.check(case, answer)
        if answer.status_code == 201:
            for view in ("export", "context", "messages", "exchanges"):
                with naming(case):
                    proxy.check(case, proxy.client.get(f"/sessions/{case}/{view}"))
            proxy.client.delete(f"/sessions/{case}")
    proxy.settled()
