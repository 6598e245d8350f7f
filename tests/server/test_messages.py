"""The Messages API through a running proxy: stored, trimmed, relayed; keys, routes and what is passed through."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from proxy.dialects.messages.reply import events_of, named_event
from tests.support.plain_provider import EVENTS, Asked, PlainProvider, Told
from tests.support.server import Proxy, settings_for
from tests.support.upstream import Upstream

KEY = "team-key-that-is-long-enough"
VERSION = {"anthropic-version": "2023-06-01"}
LOOK = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
LONG = "many words about one thing " * 40
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}
TRIMS = {"trigger": {"messages": 6}, "keep": {"rounds": 1}, "edits": [{"type": "clear_tool_results", "keep": 1}]}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def use(name: str, identity: str, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": identity, "name": name, "input": given}


def result(identity: str, said: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": identity, "content": said}


def answer_of(*blocks: Any, stop: str = "end_turn") -> dict[str, Any]:
    usage = {"input_tokens": 100, "cache_read_input_tokens": 50, "cache_creation_input_tokens": 20, "output_tokens": 5}
    told = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude-x", "content": list(blocks)}
    return {**told, "stop_reason": stop, "stop_sequence": None, "usage": usage}


class Anthropic(PlainProvider):
    """Answers with what it is told to, as a body or as a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[tuple[int, dict[str, Any]]] = []

    def answer(self, asked: Asked) -> Told:
        status, told = self.answers.pop(0)
        if asked.body.get("stream") and status == 200:
            return Told(kind=EVENTS, body=b"".join(map(named_event, events_of(told))))
        return Told(status=status, body=orjson.dumps(told))

    def says(self, *blocks: Any, stop: str = "end_turn") -> dict[str, Any]:
        told = answer_of(*blocks, stop=stop)
        self.answers.append((200, told))
        return told

    @property
    def last(self) -> dict[str, Any]:
        body: dict[str, Any] = self.got[-1].body
        return body


@pytest.fixture
def claude() -> Iterator[Anthropic]:
    with Anthropic() as claude:
        yield claude


Start = Callable[..., Proxy]


@pytest.fixture
def start(claude: Anthropic, upstream: Upstream, tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def begin(**sections: Any) -> Proxy:
            sections["upstream"] = {"anthropic_base_url": claude.base_url, **sections.get("upstream", {})}
            return stack.enter_context(Proxy(settings_for(upstream, tmp_path, sections)))

        yield begin


def ask(proxy: Proxy, messages: list[Any], session: str | None = "s", **fields: Any) -> httpx.Response:
    headers = {**VERSION, **fields.pop("headers", {}), **({} if session is None else {"x-session-id": session})}
    body = {"model": "claude-x", "max_tokens": 100, "messages": messages, **fields}
    return proxy.client.post("/v1/messages", json=body, headers=headers)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_is_stored_trimmed_and_relayed(start: Start, claude: Anthropic, stream: bool) -> None:
    proxy = start(policies={"default": TRIMS})
    talk: list[Any] = []
    edits = ""
    for number in range(3):
        talk.append({"role": "user", "content": f"Question {number}?"})
        blocks = [THOUGHT, text("I look."), use("look", f"a{number}"), use("look", f"b{number}", at=number)]
        told = claude.says(*blocks, stop="tool_use")
        shown = ask(proxy, talk, tools=[LOOK], stream=stream, system="Be brief.")
        expected = b"".join(map(named_event, events_of(told))) if stream else orjson.dumps(told)
        assert shown.content == expected
        talk.append({"role": "assistant", "content": blocks})
        results = [result(f"a{number}", f"{number} {LONG}"), result(f"b{number}", LONG)]
        talk.append({"role": "user", "content": [*results, text("Mind the gap.")]})
        claude.says(text(f"Answer {number}."))
        edits = ask(proxy, talk, tools=[LOOK], stream=stream, system="Be brief.").headers["x-context-edits"]
        talk.append({"role": "assistant", "content": [text(f"Answer {number}.")]})
    assert proxy.messages("s") == talk
    assert edits == "clear_tool_results"
    sent = claude.last["messages"]
    assert [each["content"][:9] for each in sent[2]["content"][:2]] == ["[cleared ", "[cleared "]
    assert sent[2]["content"][2] == text("Mind the gap.")
    assert sent[-1] == talk[-2]
    assert all(block["type"] != "thinking" for block in sent[5]["content"])
    receipt = proxy.exchanges("s")[-1]
    assert (receipt["usage"]["prompt_tokens"], receipt["finish_reasons"]) == (170, ["end_turn"])
    assert receipt["usage"]["prompt_tokens_details"] == {"cached_tokens": 50, "cache_write_tokens": 20}
    (ref,) = re.findall(r"ref=([0-9a-f]+-2)", orjson.dumps(sent[2]).decode())
    assert proxy.get(f"/sessions/s/refs/{ref}")["text"] == LONG
    assert proxy.client.get(f"/sessions/s/refs/{ref[:-1]}9").status_code == 404


def test_a_body_for_another_endpoint_is_refused_in_the_api_s_shape(start: Start) -> None:
    proxy = start()
    refused = proxy.client.post("/v1/messages", json={"model": "m", "messages": [{"role": "user", "content": "x"}]})
    assert refused.status_code == 400
    told = refused.json()
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert "/v1/chat/completions" in told["error"]["message"]
    chat = proxy.client.post(
        "/v1/chat/completions",
        json={"model": "m", "max_tokens": 9, "system": "Be.", "messages": [{"role": "user", "content": "x"}]},
    )
    assert "/v1/messages" in chat.json()["error"]["message"]


def test_keys_go_where_they_belong_and_nowhere_else(start: Start, claude: Anthropic) -> None:
    other = {"models": ["routed-*"], "base_url": claude.base_url, "api_key": "sk-route"}
    proxy = start(
        auth={"mode": "keys", "keys": [{"key": KEY, "tenant": "a"}]},
        upstream={"api_key": "sk-openai", "anthropic_api_key": "sk-ant", "routes": [other]},
    )
    proxy.client.headers.pop("authorization")

    def credentials() -> dict[str, str]:
        headers = claude.got[-1].headers
        return {name: headers[name] for name in ("authorization", "x-api-key", "api-key") if name in headers}

    hi = [{"role": "user", "content": "hi"}]
    for headers in ({"x-api-key": KEY}, {"api-key": KEY}, {"authorization": f"Bearer {KEY}", "x-api-key": KEY}):
        claude.says(text("ho"))
        assert ask(proxy, hi, None, headers=headers).status_code == 200
        assert credentials() == {"x-api-key": "sk-ant"}
    assert claude.got[-1].headers["anthropic-version"] == VERSION["anthropic-version"]
    claude.says(text("ho"))
    assert ask(proxy, hi, None, headers={"x-api-key": KEY}, model="routed-1").status_code == 200
    assert credentials() == {"authorization": "Bearer sk-route", "x-api-key": "sk-route"}
    for headers in ({}, {"x-api-key": "wrong"}, {"x-api-key": KEY, "authorization": "Bearer other"}):
        refused = ask(proxy, hi, None, headers=headers)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    keys = {**VERSION, "x-api-key": KEY}
    for model, key in (("claude-x", "sk-ant"), ("routed-1", "sk-route")):
        claude.answers.append((200, {"input_tokens": 7}))
        counted = proxy.client.post("/v1/messages/count_tokens", json={"model": model, "messages": hi}, headers=keys)
        assert (counted.json(), credentials()["x-api-key"]) == ({"input_tokens": 7}, key)
    assert claude.got[-1].path == "/v1/messages/count_tokens"
    claude.answers.append((400, {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}}))
    assert proxy.client.post("/v1/messages/count_tokens", json={"model": 7}, headers=keys).status_code == 400
    beside = proxy.client.get("/v1/messages/batches", headers=keys)
    assert (beside.status_code, beside.json()["error"]["type"]) == (403, "permission_error")


def test_the_client_s_own_key_goes_to_the_messages_provider(start: Start, claude: Anthropic) -> None:
    proxy = start(upstream={"api_key": "sk-openai"}, sessions={"body_fields": ["metadata.user_id"]})
    proxy.client.headers.pop("authorization")
    claude.says(text("ho"))
    hi = [{"role": "user", "content": "hi"}]
    said = ask(proxy, hi, None, headers={"x-api-key": "sk-mine"}, metadata={"user_id": "u1"}, context_management={})
    assert said.headers["x-session-id"] == "u1"
    assert (claude.got[-1].headers["x-api-key"], claude.last["metadata"]) == ("sk-mine", {"user_id": "u1"})
    claude.says(text("ho"))
    keys = {"x-api-key": "sk-mine"}
    managed = ask(proxy, hi, headers=keys, context_management={"edits": [{"type": "clear_tool_uses_20250919"}]})
    assert "left to the provider" in managed.headers["x-context-warning"]
    for edits in ([], [{"type": "clear_thinking_20251015", "keep": "all"}]):  # these change nothing
        claude.says(text("ho"))
        kept = ask(proxy, hi, headers=keys, context_management={"edits": edits})
        assert "x-context-warning" not in kept.headers


@pytest.mark.parametrize("stream", [False, True])
def test_tools_of_the_proxy_s_own_are_answered_unseen(start: Start, claude: Anthropic, stream: bool) -> None:
    proxy = start(virtual_tools={"recall_context": True}, finish={"tools": ["done"]})
    hi = [{"role": "user", "content": "How many cats?"}]
    claude.says(text("Let me see."), use("recall_context", "r", query="cats"), stop="tool_use")
    claude.says(text("Eighty."), use("done", "d"), stop="tool_use")
    shown = ask(proxy, hi, tools=[LOOK], stream=stream)
    assert b"recall_context" not in shown.content
    *_, asked, found = claude.last["messages"]
    assert (asked["content"][1]["name"], found["content"][0]["tool_use_id"]) == ("recall_context", "r")
    assert proxy.messages("s")[-1]["content"] == [text("Let me see."), text("Eighty."), use("done", "d")]

    more: list[Any] = [*hi, proxy.messages("s")[-1], {"role": "user", "content": [result("d", "ok")]}]
    finished = ask(proxy, more, tools=[LOOK], stream=stream)
    assert b'"stop_reason":"tool_use"' in finished.content
    assert len(claude.got) == 2
    claude.says(text("And more."))
    more[-1]["content"].append(text("One more thing."))
    assert b"And more." in ask(proxy, more, tools=[LOOK], stream=stream).content


def test_what_is_too_long_is_trimmed_and_sent_once_more(start: Start, claude: Anthropic) -> None:
    proxy = start(policies={"default": {**TRIMS, "trigger": {"tokens": 100_000}}})
    told = {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "prompt is too long: 900 tokens > 800 maximum"},
    }
    claude.answers.append((400, told))
    claude.says(text("ho"))
    talk: list[Any] = []
    for number in range(4):
        talk += [{"role": "user", "content": f"{number} {LONG}"}, {"role": "assistant", "content": LONG}]
    assert ask(proxy, [*talk, {"role": "user", "content": "So?"}]).status_code == 200
    assert len(claude.got[1].body["messages"]) < len(claude.got[0].body["messages"])
