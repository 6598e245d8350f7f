"""A second dialect takes one folder, one line in `DIALECTS` and one route: a toy API through pipeline and store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from proxy.dialects import DIALECTS, Message, dialect_named
from proxy.server import app
from tests.support.plain_provider import EVENTS, Asked, PlainProvider, Told
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


class ToyProvider(PlainProvider):
    """Answers talks with what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Told] = []

    def answer(self, asked: Asked) -> Told:
        assert asked.path in {"/v1/talk", "/v1/chat/completions"}
        return self.answers.pop(0)

    def says(self, reply: Message, why: str = "done") -> None:
        answer = {"said": reply.data, "why": why, "spent": {"in": 100, "out": 5}}
        self.answers.append(Told(body=orjson.dumps(answer)))


@pytest.fixture
def toys() -> Iterator[ToyProvider]:
    with ToyProvider() as provider:
        yield provider


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
    assert toys.got[-1].body["talk"] == [message.data for message in TALK[:4]]

    toys.says(TALK[6])
    talk(proxy, TALK[:6], tools=["look"])
    toys.says(bot("No birds."))
    last = talk(proxy, TALK, tools=["look"])
    assert last.headers["x-context-edits"] == "clear_tool_results"
    sent = [TOY.message(orjson.dumps(each)) for each in toys.got[-1].body["talk"]]
    assert LONG not in sent[3].text
    assert sent[4:] == TALK[4:]
    assert TOY.problems(sent) == []
    assert stored(proxy) == [message.data for message in (*TALK[1:], bot("No birds."))]

    toys.says(bot("No fish."))
    appended = talk(proxy, [human("Fish?")], mode="append")
    assert appended.status_code == 200
    assert [each["who"] for each in toys.got[-1].body["talk"]][:2] == ["rules", "human"]
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
    toys.answers.append(Told(kind=EVENTS, body=stream))
    answer = talk(proxy, TALK[:2], flow=True)
    assert answer.content == stream
    assert stored(proxy) == [TALK[1].data, bot("Eighty cats.").data]
    (exchange,) = proxy.get("/sessions/s/exchanges")["data"]
    assert exchange["status"] == "complete"

    toys.answers.append(Told(kind=EVENTS, body=pieces[0]))
    broken = talk(proxy, TALK[:2], session="t", flow=True).content
    assert broken.startswith(pieces[0] + b"event: broken\ndata: {")


def test_errors_have_the_api_s_shape(proxy: Proxy, toys: ToyProvider) -> None:
    refused = proxy.client.post("/v1/talk", content=b"{}")
    assert (refused.status_code, refused.json()) == (400, {"wrong": "This is no talk."})
    toys.answers.append(Told(status=418, body=b'{"wrong":"a teapot"}'))
    assert talk(proxy, TALK[:2]).json() == {"wrong": "a teapot"}
    (exchange,) = proxy.get("/sessions/s/exchanges")["data"]
    assert (exchange["status"], exchange["error"]) == ("failed", "a teapot")


def test_what_is_too_long_is_trimmed_and_sent_once_more(proxy: Proxy, toys: ToyProvider) -> None:
    toys.answers.append(Told(status=400, body=b'{"wrong":"too big: 900 of 800"}'))
    toys.says(TALK[4])
    assert talk(proxy, [TALK[1], TALK[2], TALK[3], TALK[4], human("So?")]).status_code == 200
    assert len(orjson.dumps(toys.got[1].body)) < len(orjson.dumps(toys.got[0].body))


def test_a_tool_of_the_proxy_s_own_is_answered_unseen(proxy: Proxy, toys: ToyProvider) -> None:
    toys.says(bot("I look.", r=("recall_context", {"query": "cats"})), why="asks")
    toys.says(bot("Eighty."))
    answer = talk(proxy, TALK[:4], tools=["look"])
    assert toys.got[0].body["tools"] == ["look", "recall_context"]
    *_, asked, found = toys.got[1].body["talk"]
    assert (asked["asks"][0]["tool"], found["who"], found["key"]) == ("recall_context", "result", "r")
    assert answer.json()["said"]["says"] == ["I look.Eighty."]
    assert stored(proxy)[-1]["says"] == ["I look.Eighty."]


def test_the_same_id_in_another_dialect_is_another_session(proxy: Proxy, toys: ToyProvider) -> None:
    toys.says(TALK[4])
    talk(proxy, TALK[:4])
    reply = {"choices": [{"message": {"role": "assistant", "content": "Hi."}, "finish_reason": "stop"}]}
    toys.answers.append(Told(body=orjson.dumps(reply)))
    assert proxy.chat("s", "Hello.").json() == reply
    assert len(proxy.get("/sessions")["data"]) == 2
    assert stored(proxy) == [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi."}]
    toys.says(TALK[6])
    talk(proxy, TALK[:6])
    assert len(toys.got[-1].body["talk"]) == 6
    assert [proxy.get("/sessions/s", dialect=name)["messages"] for name in ("toy", "chat")] == [6, 2]
    assert proxy.get("/stats", session="s")["total"]["requests"] == 1
    assert proxy.get("/stats", session="s", dialect="toy")["total"]["requests"] == 2
    refused = proxy.client.get("/sessions/s?dialect=prose")
    assert refused.status_code == 400
    assert "chat or responses or messages or toy" in refused.text
    assert proxy.client.delete("/sessions/s?dialect=toy").status_code == 200
    assert [each["messages"] for each in proxy.get("/sessions")["data"]] == [2]


def test_what_is_deleted_by_its_id_is_deleted_in_every_dialect(proxy: Proxy, toys: ToyProvider) -> None:
    toys.says(TALK[4])
    talk(proxy, TALK[:4])
    toys.answers.append(Told(body=b'{"choices":[{"message":{"role":"assistant","content":"Hi."}}]}'))
    proxy.chat("s", "Hello.")
    assert proxy.client.delete("/sessions/s").status_code == 200
    assert proxy.get("/sessions")["data"] == []


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
