"""A second dialect takes one folder, one line in `DIALECTS` and one route: a toy API through pipeline and store."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from proxy.dialects import DIALECTS, Message, dialect_named
from proxy.server import app
from tests.support.server import Proxy, settings_for
from tests.support.toy_dialect import TOY, bot, human, result, rules
from tests.support.upstream import Upstream

LONG = "many words " * 60
POLICY = {"trigger": {"messages": 6}, "keep": {"rounds": 1}, "edits": [{"type": "clear_tool_results", "keep": 0}]}
RULES = rules("Be brief.")
TALK: list[Message] = [
    RULES,
    human("Which cats are there?"),
    bot(a=("look", {"at": "list"})),
    result("a", LONG),
    bot("There are eighty."),
    human("And dogs?"),
    bot("None."),
    human("Birds?"),
]


class ToyProvider:
    """Answers talks with what it is told to, and notes the bodies."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.answers: list[tuple[int, str, bytes]] = []
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path in {"/v1/talk", "/v1/chat/completions"}
                provider.got.append(orjson.loads(self.rfile.read(int(self.headers["content-length"]))))
                status, kind, body = provider.answers.pop(0)
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.base_url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def says(self, reply: Message, why: str = "done") -> None:
        answer = {"said": reply.data, "why": why, "spent": {"in": 100, "out": 5}}
        self.answers.append((200, "application/json", orjson.dumps(answer)))

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def toys() -> Iterator[ToyProvider]:
    provider = ToyProvider()
    yield provider
    provider.close()


@pytest.fixture
def proxy(toys: ToyProvider, upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setitem(DIALECTS, "toy", "tests.support.toy_dialect")
    assert dialect_named("toy") is TOY
    monkeypatch.setitem(app._ROUTES, b"/v1/talk", TOY)
    sections = {
        "upstream": {"base_url": toys.base_url},
        "policies": {"default": POLICY},
        "virtual_tools": {"recall_context": True},
    }
    with Proxy(settings_for(upstream, tmp_path, sections)) as proxy:
        yield proxy


def talk(
    proxy: Proxy, messages: Sequence[Message], session: str | None = "s", mode: str = "auto", **fields: Any
) -> httpx.Response:
    headers = {"x-session-mode": mode} | ({} if session is None else {"x-session-id": session})
    body = {"model": "toy-1", "talk": [message.data for message in messages], **fields}
    return proxy.client.post("/v1/talk", json=body, headers=headers)


def stored(proxy: Proxy, session: str = "s") -> list[Any]:
    data: list[Any] = proxy.get(f"/sessions/{session}/messages")["data"]
    return data


def test_a_talk_is_stored_resent_trimmed_and_read_back(proxy: Proxy, toys: ToyProvider) -> None:
    toys.says(TALK[4])
    first = talk(proxy, TALK[:4], tools=["look"])
    assert first.json()["said"] == TALK[4].data
    assert toys.got[-1]["talk"] == [message.data for message in TALK[:4]]

    toys.says(TALK[6])
    talk(proxy, TALK[:6], tools=["look"])
    toys.says(bot("No birds."))
    last = talk(proxy, TALK, tools=["look"])
    assert last.headers["x-context-edits"] == "clear_tool_results"
    sent = [TOY.message(orjson.dumps(each)) for each in toys.got[-1]["talk"]]
    assert LONG not in sent[3].text
    assert sent[4:] == TALK[4:]
    assert TOY.problems(sent) == []
    assert stored(proxy) == [message.data for message in (*TALK[1:], bot("No birds."))]

    toys.says(bot("No fish."))
    appended = talk(proxy, [human("Fish?")], mode="append")
    assert appended.status_code == 200
    assert [each["who"] for each in toys.got[-1]["talk"]][:2] == ["rules", "human"]
    assert stored(proxy)[-2:] == [human("Fish?").data, bot("No fish.").data]


def test_a_talk_without_an_id_is_found_by_its_last_reply(proxy: Proxy, toys: ToyProvider) -> None:
    toys.says(TALK[4])
    first = talk(proxy, TALK[:2], session=None)
    toys.says(TALK[6])
    second = talk(proxy, [*TALK[:2], TALK[4], TALK[5]], session=None)
    assert first.headers["x-session-id"] == second.headers["x-session-id"]


def test_a_stream_ends_with_the_api_s_own_event(proxy: Proxy, toys: ToyProvider) -> None:
    pieces = [b'event: piece\ndata: {"add":"%b"}\n\n' % text for text in (b"Eighty", b" cats.")]
    stream = b"".join([*pieces, b'event: over\ndata: {"why":"done","spent":{"in":9,"out":2}}\n\n'])
    toys.answers.append((200, "text/event-stream", stream))
    answer = talk(proxy, TALK[:2], flow=True)
    assert answer.content == stream
    assert stored(proxy) == [TALK[1].data, bot("Eighty cats.").data]
    (exchange,) = proxy.get("/sessions/s/exchanges")["data"]
    assert exchange["status"] == "complete"

    toys.answers.append((200, "text/event-stream", pieces[0]))
    broken = talk(proxy, TALK[:2], session="t", flow=True).content
    assert broken.startswith(pieces[0] + b"event: broken\ndata: {")


def test_errors_have_the_api_s_shape(proxy: Proxy, toys: ToyProvider) -> None:
    refused = proxy.client.post("/v1/talk", content=b"{}")
    assert (refused.status_code, refused.json()) == (400, {"wrong": "This is no talk."})
    toys.answers.append((418, "application/json", b'{"wrong":"a teapot"}'))
    assert talk(proxy, TALK[:2]).json() == {"wrong": "a teapot"}
    (exchange,) = proxy.get("/sessions/s/exchanges")["data"]
    assert (exchange["status"], exchange["error"]) == ("failed", "a teapot")


def test_what_is_too_long_is_trimmed_and_sent_once_more(proxy: Proxy, toys: ToyProvider) -> None:
    toys.answers.append((400, "application/json", b'{"wrong":"too big: 900 of 800"}'))
    toys.says(TALK[4])
    assert talk(proxy, [TALK[1], TALK[2], TALK[3], TALK[4], human("So?")]).status_code == 200
    assert len(orjson.dumps(toys.got[1])) < len(orjson.dumps(toys.got[0]))


def test_a_tool_of_the_proxy_s_own_is_answered_unseen(proxy: Proxy, toys: ToyProvider) -> None:
    toys.says(bot("I look.", r=("recall_context", {"query": "cats"})), why="asks")
    toys.says(bot("Eighty."))
    answer = talk(proxy, TALK[:4], tools=["look"])
    assert toys.got[0]["tools"] == ["look", "recall_context"]
    *_, asked, found = toys.got[1]["talk"]
    assert (asked["asks"][0]["tool"], found["who"], found["key"]) == ("recall_context", "result", "r")
    assert answer.json()["said"]["says"] == ["I look.Eighty."]
    assert stored(proxy)[-1]["says"] == ["I look.Eighty."]


def test_the_same_id_in_another_dialect_is_another_session(proxy: Proxy, toys: ToyProvider) -> None:
    toys.says(TALK[4])
    talk(proxy, TALK[:4])
    reply = {"choices": [{"message": {"role": "assistant", "content": "Hi."}, "finish_reason": "stop"}]}
    toys.answers.append((200, "application/json", orjson.dumps(reply)))
    assert proxy.chat("s", "Hello.").json() == reply
    assert len(proxy.get("/sessions")["data"]) == 2
    assert stored(proxy) == [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi."}]
    toys.says(TALK[6])
    talk(proxy, TALK[:6])
    assert len(toys.got[-1]["talk"]) == 6


def test_a_talk_is_exported_and_imported(proxy: Proxy, toys: ToyProvider) -> None:
    toys.says(TALK[4])
    talk(proxy, TALK[:4], tools=["look"])
    exported = proxy.client.get("/sessions/s/export").content
    assert orjson.loads(exported.split(b"\n")[0])["dialect"] == "toy"
    assert proxy.client.delete("/sessions/s").status_code < 300
    assert proxy.client.post("/sessions/import", content=exported).status_code < 300
    assert stored(proxy) == [message.data for message in TALK[1:5]]
    toys.says(TALK[6])
    talk(proxy, TALK[:6])
    assert stored(proxy) == [message.data for message in TALK[1:7]]

    unknown = exported.replace(b'"dialect":"toy"', b'"dialect":"os.path"')
    refused = proxy.client.post("/sessions/import?as=u", content=unknown)
    assert refused.status_code == 400
    assert "only chat, responses, messages, toy is known here" in refused.json()["error"]["message"]
