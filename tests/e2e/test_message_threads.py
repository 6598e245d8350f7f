"""Message threads of the Messages API: the provider keeps the conversation; a request names the previous reply."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from proxy.dialects.messages.reply import events_of, named_event
from tests.support.plain_provider import EVENTS, Asked, PlainProvider, Told
from tests.support.server import Proxy, settings_for
from tests.support.upstream import Upstream

KEYS = [{"key": "key-of-anne-0123", "tenant": "anne"}, {"key": "key-of-bert-0123", "tenant": "bert"}]
LOOK = {"name": "look", "input_schema": {"type": "object"}}
HI = {"role": "user", "content": "Look for cats."}
FOUND = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_cats", "content": "two"}]}
CALL = {"type": "tool_use", "id": "toolu_cats", "name": "look", "input": {"q": "cats"}}
SAID = {"type": "text", "text": "Two."}


class Provider(PlainProvider):
    """Answers the first request of a thread with a call."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = count(1)

    def answer(self, asked: Asked) -> Told:
        goes_on = asked.body.get("thread", {}).get("type") == "continue"
        told = {
            "id": f"msg_{next(self._numbers)}",
            "type": "message",
            "role": "assistant",
            "model": "m",
            "content": [SAID if goes_on else CALL],
            "stop_reason": "end_turn" if goes_on else "tool_use",
            "usage": {"input_tokens": 10, "output_tokens": 2},
        }
        if asked.body.get("stream"):
            return Told(kind=EVENTS, body=b"".join([named_event(data) for data in events_of(told)]))
        return Told(body=orjson.dumps(told))


@pytest.fixture
def api() -> Iterator[Provider]:
    with Provider() as provider:
        yield provider


@pytest.fixture
def serves(api: Provider, upstream: Upstream, tmp_path: Path) -> Iterator[Callable[..., Proxy]]:
    with ExitStack() as stack:

        def start(**sections: Any) -> Proxy:
            sections["upstream"] = {"anthropic_base_url": api.base_url, **sections.get("upstream", {})}
            return stack.enter_context(Proxy(settings_for(upstream, tmp_path, sections)))

        yield start


def ask(
    proxy: Proxy, *messages: Any, session: str | None = None, key: str = "sk-test", **fields: Any
) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} | ({} if session is None else {"x-session-id": session})
    body = {"model": "m", "max_tokens": 100, "messages": messages, **fields}
    return proxy.client.post("/v1/messages", json=body, headers=headers)


def goes_on(before: str) -> dict[str, str]:
    return {"type": "continue", "previous_message_id": before}


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
@pytest.mark.parametrize("session", [None, "s"], ids=["inferred", "named"])
@pytest.mark.parametrize("state", ["upstream", "proxy"])
def test_what_goes_on_with_a_thread_goes_out_as_it_is_and_is_stored_behind_it(
    serves: Callable[..., Proxy], api: Provider, session: str | None, stream: bool, state: str
) -> None:
    proxy = serves(
        responses={"state": state},
        policies={"default": {"trigger": {"every_request": True}, "edits": [{"type": "drop_internal"}]}},
    )
    asks: dict[str, Any] = {"session": session, "stream": stream}
    first = ask(proxy, HI, tools=[LOOK], system="Be brief.", thread={"type": "create"}, **asks)
    second = ask(proxy, FOUND, thread=goes_on("msg_1"), **asks)
    assert (first.status_code, second.status_code) == (200, 200), second.text
    assert second.headers["x-context-kind"] == "provider_state"
    assert api.got[1].body["messages"] == [FOUND]
    assert "system" not in api.got[1].body
    name = first.headers["x-session-id"]
    assert second.headers["x-session-id"] == name
    call, said = [{"role": "assistant", "content": [block]} for block in (CALL, SAID)]
    assert proxy.messages(name) == [HI, call, FOUND, said]
    # If a thread is lost, the SDK starts a new one with the whole history.
    third = ask(proxy, HI, call, FOUND, said, HI, tools=[LOOK], thread={"type": "create"}, **asks)
    assert (third.headers["x-session-id"], third.headers["x-context-kind"]) == (name, "resend")
    assert len(proxy.messages(name)) == 6


def test_with_a_shared_key_a_thread_is_its_tenant_s_own(serves: Callable[..., Proxy], api: Provider) -> None:
    proxy = serves(upstream={"anthropic_api_key": "sk-shared"}, auth={"mode": "keys", "keys": KEYS})
    anne, bert = "key-of-anne-0123", "key-of-bert-0123"
    ask(proxy, HI, tools=[LOOK], key=anne, thread={"type": "create"})
    ask(proxy, HI, tools=[LOOK], key=anne)  # not in a thread, so no request can continue it
    refused = [ask(proxy, FOUND, key=key, thread=goes_on(name)) for key, name in ((bert, "msg_1"), (anne, "msg_2"))]
    assert [answer.status_code for answer in refused] == [404, 404]
    # SDKs read this field to decide whether to start a new thread.
    assert {answer.json()["error"]["details"]["error_code"] for answer in refused} == {"thread_not_found"}
    assert ask(proxy, FOUND, key=anne, thread=goes_on("msg_1")).status_code == 200
    assert len(api.got) == 3
