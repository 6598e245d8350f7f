"""Bodies, answers, routes and imports that are almost valid.

None of them causes an accidental failure: no 500, no traceback, no request without an end, nothing left pending.
Each test runs a fixed number of cases, alternating between the databases; `make attack` runs each test for ten
minutes with new cases. A failure names its case; set `PALIMPSEST_ATTACK_CASE` to that name to run only this case.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from random import Random
from typing import Any, Final
from urllib.parse import quote

import httpx
import orjson
import pytest

from tests.hostile.mutation import as_json, mutated, mutated_bytes
from tests.hostile.seeds import CHAT, DIALECTS, Seeds
from tests.support import postgres
from tests.support.raw_socket import RawClient
from tests.support.served import Served, config_file
from tests.support.stores import empty_store

SECONDS: Final = float(os.environ.get("PALIMPSEST_ATTACK_SECONDS", "0"))  # noqa: TID251 - a setting of the tests
CASE: Final = os.environ.get("PALIMPSEST_ATTACK_CASE", "")  # noqa: TID251 - a setting of the tests
_CASES: Final = 60
DATABASES: Final = ("sqlite", "postgres")
_PATIENCE: Final = 30.0  # seconds for one answer
_RECENT: Final = 50  # sessions that are checked after a run
HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
POLICY: Final = {
    "trigger": {"messages": 3},
    "target": {"tokens": 100},
    "on_arrival": [{"type": "compact_tool_output", "over_tokens": 50}],
    "edits": [{"type": "clear_tool_results", "keep": 0}, {"type": "drop_oldest"}],
}

VIRTUAL_TOOLS: Final = {"recall_context": True, "compress_chat_history": True}
"""Offered if the request offers tools."""
_NAMES: Final = (b'"f"', b'"recall_context"', b'"compress_chat_history"')


def cases(kind: str, proxy: Attacked) -> Iterator[tuple[str, Random]]:
    """Yield the name of each case of this proxy, and a `Random` seeded with it."""
    if CASE:
        yield CASE, Random(CASE)  # noqa: S311 - a case that can be made again
        return
    run = f"{time.time_ns():x}" if SECONDS else "fixed"
    ends, number = time.monotonic() + SECONDS, proxy.number
    while time.monotonic() < ends if SECONDS else number < _CASES:
        yield (name := f"{kind}-{run}-{number}"), Random(name)  # noqa: S311 - likewise
        number += len(DATABASES)


@contextmanager
def naming(case: str) -> Iterator[None]:
    """Name the case in which the connection broke."""
    try:
        yield
    except httpx.HTTPError as why:
        raise AssertionError(case) from why


def any_dialect(random: Random) -> Seeds:
    """Return the seeds of one dialect."""
    return random.choice(tuple(DIALECTS.values()))


class Faulty:
    """An upstream that answers each request with the bytes that a test has set."""

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
        """Stop serving."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(_PATIENCE)


class Attacked:
    """A proxy in its own process, with checks after each case and at the end."""

    def __init__(self, served: Served, number: int) -> None:
        self._served = served
        self.number = number
        """The place of its database among `DATABASES`: of the first cases, which it takes."""
        self.client = httpx.Client(base_url=served.url, trust_env=False, timeout=_PATIENCE)
        self._seen = 0  # characters of its log that were checked
        self.port = int(served.url.rpartition(":")[2])

    def check(self, case: str, answer: httpx.Response) -> None:
        """Check one answer."""
        assert answer.status_code != 500, (case, answer.text[:500], self.traceback)
        if answer.status_code >= 400:
            assert "error" in answer.json(), (case, answer.text[:500])

    @property
    def traceback(self) -> str:
        """The newest error in its log, if any."""
        return self._served.log.rpartition("Traceback")[2][-3000:]

    def settled(self) -> None:
        """Check what all cases left behind."""
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


@pytest.fixture(scope="module", params=DATABASES)
def proxy(
    request: pytest.FixtureRequest, faulty: Faulty, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Attacked]:
    folder = tmp_path_factory.mktemp("fuzz")
    with ExitStack() as stack:
        if request.param == "sqlite":
            store = empty_store(folder / "p.db")
        else:
            server, like = (request.getfixturevalue(name) for name in ("postgres_server", "postgres_template"))
            store = stack.enter_context(postgres.database(server, like))
        config = config_file(folder, faulty, store, policies={"default": POLICY}, virtual_tools=VIRTUAL_TOOLS)
        served = stack.enter_context(Served(config))
        found = Attacked(served.wait(), DATABASES.index(request.param))
        stack.enter_context(found.client)
        yield found


@pytest.fixture(autouse=True)
def _fine(faulty: Faulty) -> None:
    """Make the upstream answer normally, until a test sets another answer."""
    body = orjson.dumps(CHAT.answer)
    faulty.answer = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def test_bodies(proxy: Attacked) -> None:
    for case, random in cases("body", proxy):
        seeds = any_dialect(random)
        body = as_json(random, mutated(random, random.choice(seeds.bodies)))
        headers = {"content-type": "application/json"}
        if random.random() < 0.7:
            headers["x-session-id"] = f"s{random.randrange(10)}"
        if random.random() < 0.2:
            headers["x-session-mode"] = random.choice(("append", "full", "auto", "other"))
        proxy.check(case, proxy.client.post(seeds.path, content=body, headers=headers))
    proxy.settled()


def answer_of(random: Random, seeds: Seeds, *, stream: bool) -> bytes:
    """Return a damaged answer of an upstream."""
    kind, times = b"application/json", random.choice((0, 1, 2))
    if stream:
        changed = mutated(random, [data for _, data in seeds.events], times)
        datas: list[Any] = changed if isinstance(changed, list) else [changed]
        names = [data["type"] if isinstance(data, dict) and "type" in data else "" for data in datas]
        events = [
            (name.encode("utf-8", "replace").decode() if isinstance(name, str) else "", data)
            for name, data in zip(names, datas, strict=True)
        ]
        if random.random() < 0.2:
            random.shuffle(events)
        end = random.choice((b"\n\n", b"\n\n", b"\r\n\r\n", b"\r\r"))
        lines = [(name, as_json(random, data).replace(b"\n", b" ")) for name, data in events]
        body = seeds.streamed(lines, end)
        body += random.choice((b"", b"", b": end" + end, b"event: error" + end, b"data: [DONE]" + end))
        kind = random.choice((b"text/event-stream", b"text/event-stream; charset=utf-8", kind))
    else:
        body = as_json(random, mutated(random, seeds.answer, times))
    # The proxy answers a call of its own tool, and then gets the same answer again.
    body = body.replace(_NAMES[0], random.choice(_NAMES))
    if random.random() < 0.3:
        body = mutated_bytes(random, body)
    head = [b"HTTP/1.1 200 OK", b"Content-Type: " + kind, b"Connection: close", b"X-Request-Id: req_1"]
    if random.random() < 0.7:
        head.append(b"Content-Length: %d" % (len(body) + random.choice((0, 0, 0, 5))))
    whole = b"\r\n".join(head)
    if random.random() < 0.2:
        whole = mutated_bytes(random, whole)
    return whole + b"\r\n\r\n" + body


def test_answers(faulty: Faulty, proxy: Attacked) -> None:
    for case, random in cases("answer", proxy):
        stream, seeds = random.random() < 0.6, any_dialect(random)
        faulty.answer = answer_of(random, seeds, stream=stream)
        headers = {"x-session-id": f"s{random.randrange(10)}"}
        body = seeds.body([{"role": "user", "content": case}], {**random.choice(seeds.more), "stream": stream})
        with naming(case):
            answer = proxy.client.post(seeds.path, json=body, headers=headers)
        assert answer.status_code != 500, (case, answer.text[:500], proxy.traceback)
        assert b"internal_error" not in answer.content, (case, answer.content[-500:], proxy.traceback)
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
    "/v1/responses",
    "/v1/responses/resp_1",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/stats",
    "/search",
    "/ui/sessions",
    "/ui/sessions/s1.json",
    "/ui/cache.csv",
    "/metrics",
    "/openai/deployments/m/chat/completions",
    "/tenants/nobody",
)
_QUERIES: Final = (
    "limit",
    "after",
    "tenant",
    "branch",
    "meta",
    "channel",
    "policy",
    "lines",
    "grep",
    "as",
    "at",
    "x",
    "since",
    "group",
    "q",
)
_WORDS: Final = ("1", "-1", "1000", "true", "a-b", "1-2", "(", "[a-z", "%00", "%ff", "%F0%9F%98%80", "..", "s1", "é")
_METHODS: Final = ("GET", "GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS", "PATCH", "TRACE", "BREW")


def test_routes(proxy: Attacked) -> None:
    for case, random in cases("route", proxy):
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


@pytest.fixture(scope="module")
def known_queries(proxy: Attacked) -> list[str]:
    """Beginnings of URLs, each with a parameter that the route knows: any other one is refused before it is read."""
    every = [f"{path}?{name}=" for path in _PATHS for name in _QUERIES]
    found = [query for query in every if "Unknown query parameter" not in proxy.client.get(query + "x").text]
    assert len(_PATHS) < len(found) < len(every)
    return found


def test_a_query_may_hold_what_no_database_can(proxy: Attacked, known_queries: list[str]) -> None:
    for query in known_queries:
        for word in ("%00", "%ed%a0%80", "1.%00"):
            answer = proxy.client.get(query + word)
            assert answer.status_code != 500, (query + word, proxy.traceback)
    proxy.settled()


def test_imports(proxy: Attacked) -> None:
    exports: list[list[Any]] = []
    for name, seeds in DIALECTS.items():
        body = seeds.body(seeds.talks[0], {})
        proxy.check("first", proxy.client.post(seeds.path, json=body, headers={"x-session-id": f"source-{name}"}))
        told = proxy.client.get(f"/sessions/source-{name}/export")
        exports.append([orjson.loads(line) for line in told.content.split(b"\n") if line])
    for case, random in cases("import", proxy):
        changed = mutated(random, random.choice(exports))
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
