"""Request bodies and upstream answers that are small as bytes but large as objects."""

from __future__ import annotations

import asyncio
import gzip
import socket
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import orjson
import pytest

from proxy.config import ServerSettings
from proxy.pipeline import inspection
from proxy.server import limits
from proxy.store import tree
from proxy.upstream import client as upstream_client
from tests.e2e.conftest import Serve
from tests.hostile.conftest import Answering
from tests.support.raw_socket import RawClient, chat, request, seconds_of, sent
from tests.support.served import Served, peak, resident
from tests.support.server import Proxy
from tests.support.upstream import Upstream
from tests.support.waiting import until

MEGABYTE = 1_048_576
TINY = b'{"role":"user","content":"a"}'
REPLY = orjson.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "fine"}, "finish_reason": "stop"}],
    }
)


def body_of(messages: bytes, more: bytes = b"") -> bytes:
    return b'{"model":"echo","messages":[' + messages + b"]" + more + b"}"


def many(count: int) -> bytes:
    return b",".join([TINY] * count)


@pytest.mark.parametrize(
    ("body", "code", "setting"),
    [
        (lambda: body_of(many(1_500_000)), "too_many_messages", "server.max_messages"),
        (lambda: body_of(b"1," * 15_000_000 + b"1"), "too_many_messages", "server.max_messages"),
        (
            lambda: body_of(TINY, b',"metadata":{"a":[' + b"[]," * 10_000_000 + b"1]}"),
            "too_many_values",
            "server.max_json_values",
        ),
        (lambda: body_of(TINY, b',"metadata":' + b"[" * 30_000_000), "too_many_values", "server.max_json_values"),
    ],
    ids=["messages", "items", "values", "levels"],
)
def test_millions_of_values_are_refused_before_objects_exist(
    served: Served, body: Callable[[], bytes], code: str, setting: str
) -> None:
    asked = chat(body())
    port = int(served.url.rsplit(":", 1)[1])
    before, most = resident(served.process.pid), 0
    found: list[tuple[int, dict[str, str], bytes]] = []
    attack = threading.Thread(target=lambda: found.append(sent(port, asked)))
    attack.start()
    while attack.is_alive():
        most = max(most, resident(served.process.pid))
        seconds_of(port)  # others are served meanwhile; `tests.hostile.measure` measures how long they wait
        time.sleep(0.01)
    status, _, answer = found[0]
    error = orjson.loads(answer)["error"]
    assert (status, error["code"]) == (400, code)
    assert setting in error["message"]
    assert most - before < 250 * MEGABYTE


def test_an_import_has_the_same_limits(serve: Serve) -> None:
    proxy = serve(server={"max_messages": 100, "max_json_values": 1_000})
    for lines, setting in ((b"{}\n" * 200, "max_messages"), (b'{"id":"a","b":[' + b"[]," * 2_000 + b"1]}", "max_json")):
        answer = proxy.client.post("/sessions/import", content=lines)
        assert (answer.status_code, setting in answer.text) == (400, True)


def test_a_long_text_full_of_commas_and_brackets_is_no_attack(serve: Serve) -> None:
    proxy = serve(server={"max_messages": 10, "max_json_values": 100})
    answer = proxy.chat(None, ',[{"\\' * 50_000)
    assert answer.status_code == 200
    assert proxy.chat(None, [{"role": "user", "content": "a"}] * 11).status_code == 400


def test_many_large_bodies_at_once_take_no_more_than_the_budget(served: Served) -> None:
    before = resident(served.process.pid)
    part = chat(b"a" * (4 * MEGABYTE)).replace(b"Content-Length: 4", b"Content-Length: 5")
    with ExitStack() as stack:
        clients = [stack.enter_context(RawClient(int(served.url.rsplit(":", 1)[1]))) for _ in range(40)]
        for client in clients:
            with suppress(OSError):
                client.socket.sendall(part)
        until(lambda: sum(client.has_answer() for client in clients) >= 15, "all but twenty are refused")
        assert resident(served.process.pid) - before < 200 * MEGABYTE


@pytest.fixture(scope="module")
def narrow(serve: Serve) -> Proxy:
    return serve(server={"max_memory": 8 * MEGABYTE})


def test_bodies_share_a_budget_and_beyond_it_nothing_waits(narrow: Proxy, upstream: Upstream) -> None:
    large = orjson.dumps({"model": "hold", "messages": [{"role": "user", "content": "a" * 500_000}]})
    with ExitStack() as stack:
        first = stack.enter_context(RawClient(narrow.port))
        first.socket.sendall(chat(large))
        until(lambda: bool(upstream.log), "the first body is at the provider, which holds its answer")
        status, headers, body = sent(narrow.port, chat(large.replace(b"hold", b"echo") + b" " * 200_000))
        assert (status, headers["retry-after"], orjson.loads(body)["error"]["code"]) == (503, "1", "overloaded")
        assert narrow.chat(None, "a").status_code == 200
        upstream.gate.set()
        assert first.answer()[0] == 200
    assert sent(narrow.port, chat(large.replace(b"hold", b"echo")))[0] == 200


def test_a_body_that_no_budget_holds_is_refused_for_good(narrow: Proxy) -> None:
    answer = narrow.chat(None, "a" * 2_000_000)
    assert (answer.status_code, "server.max_memory" in answer.text) == (413, True)


def test_the_stored_messages_that_an_append_goes_on_from_count_too(
    narrow: Proxy, upstream: Upstream, session: str
) -> None:
    append = {"x-session-mode": "append"}
    assert narrow.chat(session, "a" * 500_000, "say:ok", headers=append).status_code == 200
    answer = narrow.chat(session, "a" * 400_000, headers=append)
    assert (answer.status_code, "stored messages" in answer.text) == (413, True)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(narrow.chat, session, "a", "hold", headers=append)
        until(lambda: upstream.open == 1, "the provider holds its answer")
        answer = narrow.chat(session, "b", headers=append)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        upstream.gate.set()
        assert first.result().status_code == 200
    assert narrow.chat(session, "b", headers=append).status_code == 200


def test_a_session_that_is_planned_counts_and_one_that_is_read_is_read_in_pieces(
    narrow: Proxy, upstream: Upstream, session: str
) -> None:
    for number in range(11):
        said = f"{number} " + "a" * 60_000
        assert narrow.chat(session, said, "say:ok", headers={"x-session-mode": "append"}).status_code == 200
    shown = narrow.client.get(f"/sessions/{session}/messages")
    assert [len(message["content"]) > 60_000 for message in shown.json()["data"]] == [True, False] * 11
    with ThreadPoolExecutor() as pool:
        first = pool.submit(narrow.chat, None, "a" * 400_000, "hold")
        until(lambda: upstream.open == 1, "the provider holds its answer")
        for path in ("context", "compact"):
            answer = narrow.client.request("POST" if path == "compact" else "GET", f"/sessions/{session}/{path}")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert narrow.client.get(f"/sessions/{session}/messages").content == shown.content
        upstream.gate.set()
        assert first.result().status_code == 200
    assert narrow.client.get(f"/sessions/{session}/context").status_code == 200


def test_what_a_whole_session_is_read_for_counts(narrow: Proxy, upstream: Upstream, session: str) -> None:
    said = ["a" * 60_000 + f" {number}" for number in range(5)]
    append = {"x-session-mode": "append"}
    exchange = [narrow.chat(session, each, "say:ok", headers=append).headers["x-exchange-id"] for each in said][-1]
    lead = [{"role": "system", "content": "s" * 230_000}, {"role": "user", "content": "u" * 230_000}]
    assert narrow.chat(f"{session}-lead", lead, "say:ok").status_code == 200
    lines = [orjson.loads(line) for line in narrow.client.get(f"/sessions/{session}-lead/export").iter_lines()]
    ref = next(line["body"] for line in lines if line["record"] == "body" and "uuu" in str(line["data"]))[:16]
    node = narrow.get(f"/sessions/{session}")["head"]
    paths = (
        f"/exchanges/{exchange}/view",
        f"/exchanges/{exchange}/view?diff=true",
        f"/sessions/{session}-lead",
        f"/sessions/{session}-lead/refs/ref_{ref}",
        f"/ui/sessions/{session}",
        f"/ui/sessions/{session}-lead.json",
        f"/ui/sessions/{session}/messages/{node}?exchange={exchange}",
        f"/ui/policies/lab.json?session={session}&policy=off",
    )
    with ThreadPoolExecutor() as pool:
        first = pool.submit(narrow.chat, None, "a" * 630_000, "hold")
        until(lambda: upstream.open == 1, "the provider holds its answer")
        answers = [narrow.client.get(path) for path in paths]
        assert [(answer.status_code, "no memory left" in answer.text) for answer in answers] == [(503, True)] * 8
        upstream.gate.set()
        assert first.result().status_code == 200
    assert [narrow.client.get(path).status_code for path in paths] == [200] * 8


def test_an_answer_counts_until_its_client_has_read_it(serve: Serve, session: str) -> None:
    proxy = serve(server={"max_memory": 160 * MEGABYTE})
    assert proxy.chat(session, "a" * (12 * MEGABYTE), "say:ok").status_code == 200
    context = f"/sessions/{session}/context"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", proxy.port))
        client.sendall(f"GET {context} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert client.recv(1) == b"H"
        assert proxy.client.get(context).status_code == 503
    until(lambda: proxy.client.get(context).status_code == 200, "the client that left counts no more")


def test_what_takes_more_than_there_is_says_what_to_do(serve: Serve, session: str) -> None:
    drops = {"trigger": {"every_request": True}, "target": {"tokens": 100}, "edits": [{"type": "drop_oldest"}]}
    proxy = serve(server={"max_memory": 8 * MEGABYTE}, policies={"default": drops})
    append = {"x-session-mode": "append"}
    said = [f"{number} " + "a" * 200_000 for number in range(5)]
    answers = [proxy.chat(session, each, "say:ok", headers=append) for each in said]
    assert {answer.status_code for answer in answers} == {200}
    view, page = f"/exchanges/{answers[-1].headers['x-exchange-id']}/view", f"/ui/sessions/{session}"
    for path in (view, page, f"/ui/policies/lab?session={session}&policy=off", f"/sessions/{session}/context"):
        answer = proxy.client.get(path)
        assert (answer.status_code, "server.max_memory" in answer.text) == (413, True)
    off = {"x-context-policy": "off"}
    answer = proxy.chat(session, "go on", headers=append | off)
    assert (answer.status_code, "send the newest messages" in answer.text) == (413, True)
    newest = proxy.get(f"/sessions/{session}/messages")["data"][-2:]
    answer = proxy.chat(session, [*newest, {"role": "user", "content": "go on"}], headers=off)
    assert (answer.status_code, answer.headers["x-context-kind"]) == (200, "windowed")


def test_no_session_is_searched_as_a_whole_or_where_others_wait(
    serve: Serve, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, threads = serve(), set[str]()
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    said = [
        {"role": "user", "content": "needle " + "a" * 300_000},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "needle " + "b" * 300_000},
    ]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    assert proxy.chat(session, said, "say:ok", tools=tools).status_code == 200
    match = inspection._match

    def noted(*given: Any) -> Any:
        threads.add(threading.current_thread().name)
        return match(*given)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(inspection, "_match", noted)
    monkeypatch.setattr(tree, "path_to", refuse)  # it reads a branch at once
    found = proxy.get("/search", q="needle")
    assert [each["role"] for each in found["data"]] == ["tool", "user"]
    assert (found["searched"]["messages"], proxy.get("/ui/cache.json")["tools"][0]["calls"]) == (4, 1)
    assert threads
    assert all("AnyIO" in name for name in threads)


def test_a_client_that_leaves_gives_its_memory_back(narrow: Proxy) -> None:
    for _ in range(8):
        with RawClient(narrow.port) as client:
            client.socket.sendall(chat(b"x" * 500_000).replace(b"Content-Length: 5", b"Content-Length: 55"))
    until(lambda: narrow.chat(None, "a" * 800_000).status_code == 200, "the memory is free again")


@pytest.mark.parametrize(
    ("memory", "workers", "room"),
    [(512 * MEGABYTE, 1, 1), (4096 * MEGABYTE, 1, 2), (4096 * MEGABYTE, 4, 1), (2**50, 1, 16)],
)
def test_what_a_process_remembers_grows_with_the_memory_that_it_may_take(memory: int, workers: int, room: int) -> None:
    assert limits.room_of(ServerSettings(max_memory=memory, workers=workers)) == room


@pytest.mark.anyio
async def test_memory_is_given_back_soon_but_not_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(limits, "_GIVE_BACK_SECONDS", 0.01)
    monkeypatch.setattr(limits, "_GIVE_BACK_PAUSE", 1e9)  # longer than any machine has run
    budget = limits.MemoryBudget(ServerSettings(), given.append)

    async def are_given(times: int) -> None:
        async with asyncio.timeout(60):
            while len(given) < times:  # noqa: ASYNC110 - a function of C is called
                await asyncio.sleep(0.01)

    for number in range(10):
        budget.give_back()
        await are_given(1)
        await asyncio.sleep(0.02)
        assert len(given) == 1, number
    monkeypatch.setattr(limits, "_GIVE_BACK_PAUSE", 0.0)
    monkeypatch.setattr(budget, "_gives_back", False)
    budget.give_back()
    await are_given(2)
    assert len(given) == 2


# ------------------------------------------------------------------------------- the upstream's answers


JSON = b"Content-Type: application/json\r\n"
EVENTS = b"Content-Type: text/event-stream\r\n"
Asked = Callable[..., tuple[int, bytes]]


@pytest.fixture(scope="module")
def asked(answering: Answering, served: Served) -> Asked:
    """Return status and body of a completion whose upstream answers with these bytes."""
    before = resident(served.process.pid)

    def ask(head: bytes, *pieces: bytes, stream: bool = False) -> tuple[int, bytes]:
        answering.head, answering.pieces = head, list(pieces)
        body = {"model": "m", "stream": stream, "messages": [{"role": "user", "content": "a"}]}
        answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=20, trust_env=False)
        assert peak(served.process.pid) - before < 250 * MEGABYTE
        return answer.status_code, answer.content

    return ask


def test_an_answer_that_is_too_long_is_a_502(asked: Asked) -> None:
    status, body = asked(JSON, *[b" " * MEGABYTE] * 66)
    assert (status, orjson.loads(body)["error"]["code"]) == (502, "upstream_too_large")


def test_an_answer_of_too_many_values_is_a_502(asked: Asked) -> None:
    status, body = asked(JSON, b'{"choices":[' + b"[]," * 3_000_000 + b"1]}")
    assert (status, orjson.loads(body)["error"]["code"]) == (502, "upstream_too_large")


def test_a_compressed_bomb_is_a_502(asked: Asked) -> None:
    bomb = gzip.compress(b" " * (200 * MEGABYTE), 1)
    status, body = asked(JSON + b"Content-Encoding: gzip\r\n", bomb)
    assert (status, orjson.loads(body)["error"]["code"]) == (502, "upstream_too_large")


def test_an_endless_event_ends_in_an_error_event(asked: Asked) -> None:
    status, body = asked(EVENTS, b"data: ", *[b"a" * MEGABYTE] * 20, stream=True)
    assert status == 200
    assert b"upstream_too_large" in body
    assert len(body) < 10_000


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(
    ("encoding", "encoded"),
    [
        (b"gzip", gzip.compress(REPLY)),
        (b"gzip", gzip.compress(REPLY[:20]) + gzip.compress(REPLY[20:])),
        (b"gzip", gzip.compress(REPLY) + b"\0" * 20),
        (b"deflate", zlib.compress(REPLY)),
        (b"deflate", raw_deflate(REPLY)),
    ],
    ids=["gzip", "members", "padding", "deflate", "raw deflate"],
)
@pytest.mark.parametrize("size", [1, 10_000])
def test_an_encoded_answer_is_read_whole(asked: Asked, encoding: bytes, encoded: bytes, size: int) -> None:
    pieces = [encoded[at : at + size] for at in range(0, len(encoded), size)]
    assert asked(JSON + b"Content-Encoding: " + encoding + b"\r\n", *pieces) == (200, REPLY)


@pytest.mark.parametrize(
    "encoded",
    [gzip.compress(REPLY)[:-9], gzip.compress(REPLY)[:5], b"\x1f\x8b" + b"a" * 99],
    ids=["without its end", "half a header", "no gzip"],
)
def test_an_encoded_answer_that_breaks_off_is_a_502(asked: Asked, encoded: bytes) -> None:
    status, body = asked(JSON + b"Content-Encoding: gzip\r\n", encoded)
    assert (status, orjson.loads(body)["error"]["code"]) == (502, "upstream_unreachable")


def test_a_compressed_stream_of_events_is_read_in_bounded_pieces() -> None:
    inflater = upstream_client.Inflater(b"gzip")
    inflater.feed(gzip.compress(b"a" * (8 * MEGABYTE)))
    sizes: list[int] = []
    while piece := inflater.take():
        sizes.append(len(piece))
    assert (sum(sizes), max(sizes) <= MEGABYTE, inflater.complete) == (8 * MEGABYTE, True, True)


def test_a_compressed_request_has_the_limits_of_any_other(narrow: Proxy) -> None:
    bodies = {gzip.compress(body_of(TINY)): 200, body_of(TINY): 400, gzip.compress(bytes(128 * MEGABYTE)): 413}
    for body, status in bodies.items():
        assert sent(narrow.port, chat(body, b"Content-Encoding: gzip"))[0] == status
    assert sent(narrow.port, request(b"GET", b"/healthz"))[0] == 200
