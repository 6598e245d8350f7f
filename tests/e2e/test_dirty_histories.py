"""Histories that no client should send are relayed unchanged, or repaired with a warning. The proxy never fails.

There are two providers: a strict one, whose refusals must come through, and one that accepts everything,
as some do. What the second one received is checked against the rules of the first, which are written
independently of the package under test.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from proxy.dialects.bodies import MAX_LEVELS
from tests.e2e.conftest import Serve
from tests.support.answers import Answering, options_of
from tests.support.api_rules import Refused, check
from tests.support.received import Received
from tests.support.server import Proxy, settings_for
from tests.support.upstream import EVENTS, JSON, Upstream

Message = dict[str, Any]

DATA = Path(__file__).parents[1] / "data" / "dirty"
FILES = {path.stem: json.loads(path.read_text("utf-8"))["messages"] for path in sorted(DATA.glob("*.json"))}


def user(text: str = "go on") -> Message:
    return {"role": "user", "content": text}


def said(text: str = "well") -> Message:
    return {"role": "assistant", "content": text}


def calling(*ids: Any, **fields: Any) -> Message:
    calls = [{"id": each, "type": "function", "function": {"name": "find", "arguments": "{}"}} for each in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls, **fields}


def with_call(call: Any) -> list[Message]:
    return [user(), {"role": "assistant", "content": None, "tool_calls": call}, result("a"), user()]


def result(call: Any, content: Any = "found") -> Message:
    return {"role": "tool", "tool_call_id": call, "content": content}


def nested(levels: int) -> Any:
    value: Any = "deep"
    for _ in range(levels):
        value = [value]
    return value


BROKEN: dict[str, list[Message]] = {
    "a result that was never recorded": [user(), calling("a"), user()],
    "one of two results never recorded": [user(), calling("a", "b"), result("a"), user()],
    "no result at the end": [user(), calling("a", "b"), user("?"), calling("c")],
    "a result without a call": [user(), result("a"), user()],
    "a result first": [result("a"), user()],
    "a result after the next message": [user(), calling("a"), user("?"), result("a"), user()],
    "a result before its call": [user(), result("a"), calling("a"), user()],
    "the result of another block": [user(), calling("a"), result("b"), user()],
    "two results for one call": [user(), calling("a"), result("a"), result("a", "again"), user()],
    "two calls with one id": [user(), calling("a", "a"), result("a"), user()],
    "two calls and two results with one id": [user(), calling("a", "a"), result("a"), result("a"), user()],
    "calls with empty ids": [user(), calling("", ""), result(""), result(""), user()],
    "a call with an id that is null": [user(), calling(None), result(None), user()],
    "a result that names no call": [user(), calling("a"), {"role": "tool", "content": "r"}, user()],
    "a result that names a number": [user(), calling("a"), result(7), user()],
    "no calls in an array": [user(), said() | {"tool_calls": []}, user()],
    "no calls and no content": [user(), {"role": "assistant", "content": None, "tool_calls": []}, user()],
    "neither calls nor content": [user(), {"role": "assistant"}, user()],
    "only a result": [result("a")],
    "calls without ids": with_call([{"type": "function", "function": {"name": "f", "arguments": "{}"}}]),
    "calls that are no objects": with_call([None, 1, "call", []]),
    "an empty call": with_call([{}]),
    "calls that are text": with_call("find()"),
    "calls that are an object": with_call({"id": "a"}),
}
"""Messages that break the rules about calls and results: a provider refuses them."""

LET_THROUGH = ("a call with an id that is null",)
"""Broken messages that the strict stand-in accepts: it compares ids without checking their type."""

ODD: dict[str, list[Message]] = {
    "results out of order": [user(), calling("a", "b"), result("b"), result("a"), user()],
    "ids used again": [user(), calling("a"), result("a"), calling("a"), result("a"), user()],
    "an assistant first": [said(), user()],
    "only an assistant": [said()],
    "two assistants in a row": [user(), said("one"), said("two"), user()],
    "no user": [calling("a"), result("a")],
    "instructions in the middle": [user(), {"role": "system", "content": "stop"}, user()],
    "only instructions": [{"role": "system", "content": "stop"}],
    "content that is null": [{"role": "user", "content": None}, user()],
    "content that is missing": [{"role": "user"}, user()],
    "content that is an object": [{"role": "user", "content": {"text": "hi", "n": [1, None]}}, user()],
    "content that is empty": [{"role": "user", "content": []}, {"role": "user", "content": ""}, user()],
    "parts of any kind": [{"role": "user", "content": [1, None, "x", [], {}, {"type": 5}]}, user()],
    "text that is none": [{"role": "user", "content": [{"type": "text", "text": None}]}, user()],
    "an image that is a number": [{"role": "user", "content": [{"type": "image_url", "image_url": 5}]}, user()],
    "a result that is an object": [user(), calling("a"), result("a", {"rows": [1, 2]}), user()],
    "a result of parts": [user(), calling("a"), result("a", [{"type": "text", "text": "x" * 500}]), user()],
    "a role that is unknown": [{"role": "critic", "content": "hm"}, user()],
    "a role that is empty": [{"role": "", "content": "hm"}, user()],
    "a role in capitals": [{"role": "Assistant", "content": "hm"}, {"role": "USER", "content": "hm"}, user()],
    "names of any type": [user() | {"name": 5}, said() | {"name": ["x"]}, user()],
    "our own fields of any type": [user() | {"agent": {"x": 1}, "is_internal": "yes"}, user()],
    "arguments that are no text": with_call(
        [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    ),
    "a function that is null": with_call([{"id": "a", "type": "function", "function": None}]),
    "a name that is a number": with_call([{"id": "a", "function": {"name": 7, "arguments": 8}}]),
    "characters that are none": [user("\x00\x01\x7f\x9f\u200b\ufeff\ufffe\uffff\u2028\U0010ffff"), user()],
    "numbers that few can hold": [user() | {"n": 10**30, "f": 1e308, "z": -0.0}, user()],
    "as deep as it may be": [user() | {"x": nested(MAX_LEVELS - 1)}, user()],
    "a field whose name is odd": [user() | {"": 1, "\x00": 2, "a.b": 3, "\U0001f600": 4}, user()],
}
"""Odd messages that break no rule about calls and results."""

CASES = BROKEN | ODD | FILES

FEWER = BROKEN | {"everything odd": [message for messages in ODD.values() for message in messages]} | FILES
"""The same messages in fewer histories, for tests in which each history takes longer."""

LONG: dict[str, list[Message]] = {
    "ten thousand tiny messages": [user("x") if place % 2 == 0 else said("y") for place in range(10_001)],
    "a text of megabytes": [user("\u4f60\u597d \U0001f600" * 300_000), user()],
    "a result of megabytes": [user(), calling("a"), result("a", "line of the log\n" * 200_000), user()],
    "hundreds of calls at once": [
        user(),
        calling(*(f"c{place}" for place in range(500))),
        *(result(f"c{place}") for place in range(0, 500, 2)),
        user(),
    ],
}

MARK = [
    *(user("look here"), calling("here"), result("here"), said("found")),
    *(user("look there"), calling("there"), result("there", "line\n" * 12_000), said("found")),
]
"""Two clean rounds, one with an output so large that every policy of these tests trims it."""

POLICIES: dict[str, Any] = {
    "drop": {"trigger": {"tokens": 15_000}, "target": {"tokens": 14_000}, "edits": [{"type": "drop_oldest"}]},
    "calls": {
        "trigger": {"every_request": True},
        "keep": {"rounds": 0, "spans": 0},
        "edits": [{"type": "keep_tool_calls", "last": 1, "scope": "all"}],
    },
    "truncate": {"on_arrival": [{"type": "truncate_tool_output", "max_lines": 3, "max_bytes": 300}]},
    "hard": {
        "trigger": {"messages": 1},
        "target": {"tokens": 1},
        "keep": {"rounds": 0, "spans": 0},
        "on_arrival": [{"type": "truncate_tool_output", "max_lines": 1, "max_bytes": 20}],
        "edits": [{"type": "keep_tool_calls", "last": 0}, {"type": "drop_oldest"}],
    },
}


class Taking(Upstream):
    """A provider that accepts everything."""

    async def _serve(self, received: Received, out: Answering) -> None:
        body = received.json
        body = body | {"messages": [user("asked")]}  # it ignores what it was asked
        await out.completion(body, options_of(body["model"]), self.scripts, JSON, EVENTS)


@pytest.fixture(scope="module")
def taking(_direct: None) -> Iterator[Taking]:
    with Taking() as provider:
        yield provider


@pytest.fixture(scope="module")
def strictly(serve: Serve) -> Proxy:
    """A proxy in front of the strict provider. It trims nothing."""
    return serve()


@pytest.fixture(scope="module")
def proxy(taking: Taking, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """A proxy in front of the provider that accepts everything. It trims if a request names a policy."""
    none = {"untrimmed": {"match": {"models": ["*"]}, "edits": []}}
    sections = {"policies": none | POLICIES}
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("store")
        yield stack.enter_context(Proxy(settings_for(taking, folder, sections)))


_numbers = count()


@pytest.fixture
def session() -> str:
    """A unique session id from a counter: the names of these cases are unsuitable."""
    return f"dirty-{next(_numbers)}"


def broken(messages: list[Message]) -> bool:
    """Tell whether a provider refuses it that checks only the rules about calls and results."""
    try:
        if any(_says_nothing(message) for message in messages):
            return True
        if not all(call["id"] and isinstance(call["id"], str) for call in _calls(messages)):
            return True
        check({"model": "echo", "messages": messages}, plain=False, lenient=True)
    except Refused:
        return True
    except (KeyError, TypeError, AttributeError):
        return True  # the stand-in cannot even parse it
    return False


def _says_nothing(message: Message) -> bool:
    has_calls = message.get("tool_calls") or message.get("function_call")
    empty = message.get("tool_calls") == [] or message.get("content") in (None, [])
    return message["role"] == "assistant" and empty and not has_calls


def _calls(messages: list[Message]) -> Iterator[Message]:
    for message in messages:
        if message["role"] == "assistant":
            yield from message.get("tool_calls") or ()


def body_of(messages: list[Message], **given: Any) -> bytes:
    """Return a body with unusual JSON formatting."""
    return json.dumps({"messages": messages, "model": "echo", **given}, indent=1).encode()


def send(proxy: Proxy, session: str, messages: list[Message], **headers: str) -> httpx.Response:
    return proxy.client.post(
        "/v1/chat/completions", content=body_of(messages), headers={"x-session-id": session, **headers}
    )


REPLY: Message = {"role": "assistant", "content": "echo: asked", "refusal": None, "annotations": []}
"""The answer of the provider that accepts everything."""


def heard(messages: list[Message]) -> list[Message]:
    """Return the messages that are part of the history: all except leading instructions."""
    lead = next(
        (place for place, each in enumerate(messages) if each["role"] not in {"system", "developer"}), len(messages)
    )
    return messages[lead:]


def readable(proxy: Proxy, session: str, messages: list[Message]) -> None:
    """Read the session through every route, export and import it, and check that it stays the same."""
    assert proxy.messages(session) == messages
    shown = proxy.get(f"/sessions/{session}")
    assert (shown["id"], shown["messages"]) == (session, len(messages))
    assert session in [row["id"] for row in proxy.get("/sessions", limit=1000)["data"]]
    rows = proxy.get(f"/sessions/{session}/messages", meta="true")["data"]
    assert [row["message"] for row in rows] == messages
    for branch in shown["branches"]:
        proxy.get(f"/sessions/{session}/messages", branch=branch["head"])
    receipts = proxy.exchanges(session)
    assert [proxy.get(f"/exchanges/{row['id']}")["id"] for row in receipts] == [row["id"] for row in receipts]
    contexts = {name: context(proxy, session, name) for name in ("off", "hard")}
    assert not any(broken(messages) for messages in contexts.values())
    exported = proxy.client.get(f"/sessions/{session}/export")
    assert exported.status_code == 200
    copy = f"{session}-copy"
    stored = proxy.client.post(f"/sessions/import?as={copy}", content=exported.content)
    assert stored.status_code < 300, stored.text
    assert proxy.messages(copy) == messages
    assert {name: context(proxy, copy, name) for name in contexts} == contexts


def context(proxy: Proxy, session: str, policy: str) -> list[Message]:
    """Return the view that would be sent for the session now."""
    messages: list[Message] = proxy.get(f"/sessions/{session}/context", policy=policy)["messages"]
    return messages


def as_it_was(received: Received, messages: list[Message]) -> bool:
    """Tell whether these messages arrived byte for byte, except for the proxy's own fields."""
    own = ("agent", "is_internal")
    if any(name in message for message in messages for name in own):
        told = [{name: value for name, value in each.items() if name not in own} for each in messages]
        return bool(json.loads(received.body)["messages"] == told)
    return received.body == body_of(messages)


def warned(answer: httpx.Response) -> bool:
    """Tell whether the response says that something was repaired."""
    return "repaired: " in answer.headers.get("x-context-warning", "")


# --------------------------------------------------------------------------------- nothing trimmed


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_is_the_providers_own(strictly: Proxy, upstream: Upstream, session: str, name: str) -> None:
    answer = send(strictly, session, CASES[name])
    assert as_it_was(upstream.last, CASES[name])
    told = httpx.post(f"{upstream.base_url}/chat/completions", content=upstream.last.body, trust_env=False)
    assert (answer.status_code, answer.content) == (told.status_code, told.content)
    assert not warned(answer)
    if name in BROKEN and name not in LET_THROUGH:
        assert told.status_code >= 400
    if told.status_code >= 400:
        assert strictly.messages(session) == []
        (row,) = strictly.exchanges(session)
        assert (row["status"], row["upstream_status"]) == ("failed", told.status_code)
    # The session continues, without the refused messages.
    assert send(strictly, session, [user("clean")]).status_code == 200
    assert strictly.messages(session)[-2:] == [user("clean"), strictly.messages(session)[-1]]


@pytest.mark.parametrize("name", CASES)
def test_it_is_sent_as_it_is(proxy: Proxy, taking: Taking, session: str, name: str) -> None:
    answer = send(proxy, session, CASES[name])
    assert answer.status_code == 200, answer.text
    assert not warned(answer)
    assert as_it_was(taking.last, CASES[name])
    assert proxy.messages(session) == [*heard(CASES[name]), REPLY]


@pytest.mark.parametrize("name", FEWER)
def test_it_can_be_read(proxy: Proxy, taking: Taking, session: str, name: str) -> None:
    messages = FEWER[name]
    for sent in (messages, [*messages, REPLY, user("more")]):
        answer = send(proxy, session, sent)
        assert answer.status_code == 200, answer.text
        assert not warned(answer)
        assert as_it_was(taking.last, sent)
    assert [row["kind"] for row in proxy.exchanges(session)][1:] in (["resend"], ["foreign"])
    readable(proxy, session, [*heard(messages), REPLY, user("more"), REPLY])


# ------------------------------------------------------------------------------------- trimmed


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FEWER)
def test_what_is_trimmed_is_repaired(proxy: Proxy, taking: Taking, session: str, name: str, policy: str) -> None:
    log = [*MARK, *FEWER[name]]
    spared = policy == "truncate" or (policy == "drop" and FEWER[name][0]["role"] == "user")
    said_so: list[bool] = []
    for number in range(2):
        answer = send(proxy, session, log, **{"x-context-policy": policy})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-context-edits"]
        sent = taking.last.messages
        assert not broken(sent), sent
        assert len(sent) == int(answer.headers["x-context-messages-sent"])
        said_so.append(warned(answer))
        if spared:  # only the clean part before it is trimmed
            assert warned(answer) == broken(log)
        log += [REPLY, user(f"more {number}")]
    assert repairs(proxy, session) == said_so


@pytest.mark.parametrize("name", FEWER)
def test_what_is_put_together_is_repaired(proxy: Proxy, taking: Taking, session: str, name: str) -> None:
    assert send(proxy, session, FEWER[name]).status_code == 200
    log = [*heard(FEWER[name]), REPLY]
    dirty = broken(log)
    said_so = [False]
    for policy in ("off", "untrimmed", *POLICIES):
        new = user(f"more under {policy}")
        headers = {"x-context-policy": policy, "x-session-mode": "append"}
        answer = send(proxy, session, [new], **headers)
        assert answer.status_code == 200, answer.text
        log += [new, REPLY]
        sent = taking.last.messages
        assert not broken(sent), sent
        assert sent[-1] == new
        said_so.append(warned(answer))
        if policy in {"off", "untrimmed"}:
            assert warned(answer) == dirty
    assert repairs(proxy, session) == said_so
    assert proxy.messages(session) == log


def repairs(proxy: Proxy, session: str) -> list[bool]:
    """Tell for each receipt whether it says that something was repaired."""
    return [any(warning.startswith("repaired: ") for warning in row["warnings"]) for row in proxy.exchanges(session)]


@pytest.mark.parametrize("name", LONG)
def test_what_is_long(proxy: Proxy, taking: Taking, session: str, name: str) -> None:
    messages = LONG[name]
    assert send(proxy, session, messages).status_code == 200
    assert as_it_was(taking.last, messages)
    new = user("more")
    answer = send(proxy, session, [new], **{"x-context-policy": "hard", "x-session-mode": "append"})
    assert answer.status_code == 200
    sent = taking.last.messages
    assert not broken(sent)
    assert sent[-1] == new
    assert len(sent) < 10
    assert proxy.messages(session) == [*messages, REPLY, new, REPLY]


# ----------------------------------------------------------------------------- what cannot be read


@pytest.mark.parametrize(
    "text",
    [
        b'"a \\ud83d b"',
        b'"\\ude00\\ud83d"',
        b'[{"type":"text","text":"\\ud800"}]',
        b'"x","tool_calls":[{"id":"\\udfff"}]',
        b'"x","\\udfff":1',
        b'"\xed\xa0\xbd"',
        b'"\xff\xfe"',
        b'"\xc0\x80"',
        b'"a\x00b"',
        b'"a\nb"',
        b'"x","n":1e999',
        b'"x","n":NaN',
        b"7",
        b"true",
        b'"x","x":' + b"[" * MAX_LEVELS + b"]" * MAX_LEVELS,
        b'"x","x":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    ],
)
@pytest.mark.parametrize("known", [False, True], ids=["new session", "known session"])
def test_what_no_message_can_hold(strictly: Proxy, upstream: Upstream, session: str, text: bytes, known: bool) -> None:
    if known:
        send(strictly, session, [user()])
    before = len(upstream.log)
    body = b'{"model":"echo","messages":[{"role":"user","content":"a"},{"role":"user","content":%b}]}' % text
    answer = strictly.client.post("/v1/chat/completions", content=body, headers={"x-session-id": session})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), error
    assert error["message"]
    assert len(upstream.log) == before
    if known:
        assert len(strictly.messages(session)) == 2
        assert len(strictly.exchanges(session)) == 1
    else:
        assert strictly.client.get(f"/sessions/{session}").status_code == 404


def test_a_field_that_stands_twice_is_sent_as_it_is(proxy: Proxy, taking: Taking, session: str) -> None:
    body = (
        b'{"model":"other","model":"echo","messages":[],"messages":'
        b'[{"role":"system","role":"user","content":"a","content":"b"}]}'
    )
    answer = proxy.client.post("/v1/chat/completions", content=body, headers={"x-session-id": session})
    assert answer.status_code == 200, answer.text
    assert taking.last.body == body
    readable(proxy, session, [user("b"), REPLY])


# ----------------------------------------------------------------------------- names of sessions


@pytest.mark.parametrize(
    "value",
    [
        b"x" * 513,
        b"x" * 10_000,
        b"\xc3\xa9" * 257,
        b"%C3%A9" * 257,
        b"a%00b",
        b"%0d%0aset-cookie:%20a",
        b"%7F",
        b"%C2%85",
        b"a\tb",
        b"\xff",
        b"%FF",
        b"%ED%A0%80",
        b"\xc0\x80",
    ],
)
def test_a_session_id_that_cannot_be_one(strictly: Proxy, upstream: Upstream, value: bytes) -> None:
    names = [row["id"] for row in strictly.get("/sessions", limit=1000)["data"]]
    answer = raw(strictly, value)
    assert answer.startswith(b"HTTP/1.1 400 ")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert (error["type"], error["param"].lower()) == ("invalid_request_error", "x-session-id")
    assert upstream.log == []
    assert [row["id"] for row in strictly.get("/sessions", limit=1000)["data"]] == names


@pytest.mark.parametrize("value", [b"a\x00b", b"a\x01b", b"a\x7fb"])
def test_a_header_that_is_none(strictly: Proxy, upstream: Upstream, value: bytes) -> None:
    assert raw(strictly, value).startswith(b"HTTP/1.1 400 ")
    assert upstream.log == []


@pytest.mark.parametrize("value", [b"", b" ", b"\t "])
def test_an_empty_session_id_is_none(strictly: Proxy, value: bytes) -> None:
    answer = raw(strictly, value)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"\r\nx-session-id: ses_" in answer


def raw(proxy: Proxy, value: bytes) -> bytes:
    """Send a session id that a client library would refuse to send; return the answer."""
    body = body_of([user()])
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
    head += b"content-type: application/json\r\nx-session-id: %b\r\ncontent-length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", proxy.port)) as connection:
        connection.sendall(head % (value, len(body)) + body)
        return b"".join(iter(lambda: connection.recv(65_536), b""))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("x" * 512, "x" * 512),
        ("%41%42", "AB"),
        ("100%", "100%"),
        ("%zz%4", "%zz%4"),
        ("%2541", "%41"),
        ("..%2F..%2Fetc", "../../etc"),
        ("%3Cb%3E'\"--", "<b>'\"--"),
        ("%F0%9F%98%80%E2%80%AE%EF%BB%BF", "\U0001f600\u202e\ufeff"),
    ],
)
def test_a_session_id_that_is_only_odd(strictly: Proxy, value: str, name: str) -> None:
    answer = strictly.client.post("/v1/chat/completions", content=body_of([user()]), headers={"x-session-id": value})
    assert answer.status_code == 200, answer.text
    assert strictly.messages(name)[0] == user()
    assert name in [row["id"] for row in strictly.get("/sessions", limit=1000)["data"]]
    # The id in the response leads to the same session.
    again = strictly.client.get(f"/sessions/{quote(name, safe='')}")
    assert again.json()["id"] == name
    back = answer.headers["x-session-id"]
    more = strictly.client.post("/v1/chat/completions", content=body_of([user("more")]), headers={"x-session-id": back})
    assert more.headers["x-session-id"] == back
    assert len(strictly.messages(name)) == 4
