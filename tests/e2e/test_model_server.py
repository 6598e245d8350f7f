"""A real model server behind the proxy, llama.cpp's: how it streams, counts and refuses.

Not run by default: `make test-model` installs the server and runs this file. It is also a record of
a real server's wire format:

- A stream begins with a chunk of `{"role": "assistant", "content": null}`. Chunks with a word or more
  each follow, then a chunk with an empty delta and the `finish_reason`, then `[DONE]`.
- Usage is sent only if requested, in a chunk without choices. It includes cached tokens.
- `timings` is beside the choices of the last chunk, or in the usage chunk if there is one.
- An exceeded context is a 400 whose `code` is a number and whose `type` is `exceed_context_size_error`,
  with the numbers in other fields. It is JSON even if a stream was requested.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import orjson
import pytest

from tests.e2e.conftest import Serve
from tests.support.model_server import CONTEXT, MODEL, model_server
from tests.support.random_model import WORDS
from tests.support.server import Proxy

pytestmark = pytest.mark.model_server

GREEDY = {"max_tokens": 8, "temperature": 0}
"""Settings that make answers short and deterministic."""
CHANGING = ("id", "created", "timings")
"""Fields that differ between any two answers."""


@pytest.fixture(scope="module")
def base_url(_direct: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with model_server(tmp_path_factory.mktemp("model")) as url:
        yield url


@pytest.fixture(scope="module")
def proxy(serve: Serve, base_url: str) -> Proxy:
    return serve(upstream={"base_url": base_url})


def asked(said: Any, **given: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    return {"model": MODEL, "messages": messages, **GREEDY, **given}


def directly(base_url: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{base_url}/chat/completions", json=body, trust_env=False)


def ask(proxy: Proxy, session: str, said: Any, **given: Any) -> httpx.Response:
    body = asked(said, **given)
    return proxy.client.post("/v1/chat/completions", json=body, headers={"x-session-id": session})


def steady(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer or a chunk without the fields in `CHANGING`."""
    return {name: value for name, value in answer.items() if name not in CHANGING}


def events(raw: bytes) -> list[Any]:
    """Return the parsed events of a stream; `[DONE]` is kept as a string."""
    assert raw.endswith(b"\n\n")
    datas = [event.removeprefix(b"data: ") for event in raw.split(b"\n\n")[:-1]]
    return [data.decode() if data == b"[DONE]" else orjson.loads(data) for data in datas]


def texts(chunks: list[Any]) -> str:
    return "".join(
        choice["delta"].get("content") or ""
        for chunk in chunks
        if isinstance(chunk, dict)
        for choice in chunk["choices"]
    )


def test_json(proxy: Proxy, base_url: str, session: str) -> None:
    told = directly(base_url, asked("hello"))  # from now on its cache holds the prompt
    told = directly(base_url, asked("hello"))
    answer = ask(proxy, session, "hello")
    assert answer.status_code == told.status_code == 200
    assert steady(answer.json()) == steady(told.json())
    assert answer.json().keys() == told.json().keys()
    assert answer.headers["content-type"] == told.headers["content-type"]

    message = answer.json()["choices"][0]["message"]
    assert set(message["content"].split()) <= set(WORDS)
    assert proxy.messages(session) == [{"role": "user", "content": "hello"}, message]
    (row,) = proxy.exchanges(session)
    assert (row["status"], row["finish_reasons"]) == ("complete", ["length"])
    assert row["usage"] == answer.json()["usage"]
    assert row["usage"]["completion_tokens"] == GREEDY["max_tokens"]
    assert row["upstream_model"] == MODEL


def test_a_stream_whose_usage_the_client_did_not_ask_for(proxy: Proxy, base_url: str, session: str) -> None:
    told = events(directly(base_url, asked("hello", stream=True)).content)
    answer = ask(proxy, session, "hello", stream=True)
    seen = events(answer.content)
    assert answer.headers["content-type"] == "text/event-stream"
    assert seen[-1] == told[-1] == "[DONE]"
    assert [steady(chunk) for chunk in seen[:-1]] == [steady(chunk) for chunk in told[:-1]]
    # The proxy requested usage, and did not relay it.
    assert b'"usage"' not in answer.content
    (row,) = proxy.exchanges(session)
    assert row["usage"]["completion_tokens"] == GREEDY["max_tokens"]
    assert row["usage"]["total_tokens"] == row["usage"]["prompt_tokens"] + GREEDY["max_tokens"]
    assert proxy.messages(session)[-1] == {"role": "assistant", "content": texts(seen)}


def test_a_stream_whose_usage_the_client_asked_for(proxy: Proxy, base_url: str, session: str) -> None:
    body = {"stream": True, "stream_options": {"include_usage": True}}
    directly(base_url, asked("hello"))
    told = events(directly(base_url, asked("hello", **body)).content)
    seen = events(ask(proxy, session, "hello", **body).content)
    assert [steady(chunk) for chunk in seen[:-1]] == [steady(chunk) for chunk in told[:-1]]
    assert seen[-2]["choices"] == []
    assert seen[-2]["usage"] == proxy.exchanges(session)[0]["usage"]


def test_a_stream_whose_usage_the_client_refused(proxy: Proxy, session: str) -> None:
    answer = ask(proxy, session, "hello", stream=True, stream_options={"include_usage": False})
    assert texts(events(answer.content)) == proxy.messages(session)[-1]["content"]
    assert proxy.exchanges(session)[0]["usage"] is None


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
def test_a_stop(proxy: Proxy, session: str, stream: bool) -> None:
    said = ask(proxy, f"{session}-free", "hello").json()["choices"][0]["message"]["content"]
    last = said.split()[-1]
    answer = ask(proxy, session, "hello", stop=[last], stream=stream)
    content = texts(events(answer.content)) if stream else answer.json()["choices"][0]["message"]["content"]
    assert content == said[: said.index(last)]
    assert proxy.messages(session)[-1]["content"] == content
    assert proxy.exchanges(session)[0]["finish_reasons"] == ["stop"]


TURNS = ("one", "two and three", "left or right", "up")


def reply(answer: httpx.Response, stream: bool) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    if stream:
        return {"role": "assistant", "content": texts(events(answer.content))}
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
def test_both_uses_are_the_same_to_it(proxy: Proxy, base_url: str, session: str, stream: bool) -> None:
    resent, appended = f"{session}-resent", f"{session}-appended"
    past: list[dict[str, Any]] = []
    for text in TURNS:
        new = {"role": "user", "content": text}
        past.append(new)
        one = reply(ask(proxy, resent, past, stream=stream), stream)
        other = reply(ask(proxy, appended, [new], stream=stream), stream)
        assert one == other == reply(directly(base_url, asked(past, stream=stream)), stream)
        past.append(one)
    assert proxy.messages(resent) == proxy.messages(appended) == past
    whole, parts = proxy.exchanges(resent), proxy.exchanges(appended)
    assert [row["kind"] for row in whole] == ["first", *["resend"] * 3]
    assert [row["kind"] for row in parts] == ["first", *["append"] * 3]
    prompts = [row["usage"]["prompt_tokens"] for row in whole]
    assert prompts == [row["usage"]["prompt_tokens"] for row in parts]
    assert prompts == sorted(prompts)


def test_each_request_finds_the_last_one_in_its_cache(proxy: Proxy, session: str) -> None:
    for text in TURNS:
        ask(proxy, session, text)
    usages = [row["usage"] for row in proxy.exchanges(session)]
    for before, usage in pairwise(usages):
        # The reply is tokenized again from its text, and may get other tokens than those that were sampled.
        assert usage["prompt_tokens_details"]["cached_tokens"] >= before["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
def test_a_context_that_is_exceeded(proxy: Proxy, base_url: str, session: str, stream: bool) -> None:
    ask(proxy, session, "hello")
    before = proxy.messages(session)
    long = {"role": "user", "content": "x" * CONTEXT}
    told = directly(base_url, asked([*before, long], stream=stream))
    answer = ask(proxy, session, [*before, long], stream=stream)
    assert (answer.status_code, answer.content) == (told.status_code, told.content)
    assert answer.headers["content-type"] == told.headers["content-type"]
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (400, "exceed_context_size_error", 400)
    assert error["n_prompt_tokens"] > error["n_ctx"] == CONTEXT

    assert proxy.messages(session) == before
    row = proxy.exchanges(session)[-1]
    assert (row["status"], row["upstream_status"]) == ("failed", 400)
    assert str(CONTEXT) in row["error"]
    short = {"role": "user", "content": "then"}
    said = reply(ask(proxy, session, [*before, short], stream=stream), stream)
    assert proxy.messages(session) == [*before, short, said]


def test_a_conversation_longer_than_its_context(serve: Serve, base_url: str, session: str) -> None:
    policy = {
        "trigger": {"messages": 9},
        "target": {"tokens": 40},
        "keep": {"rounds": 1},
        "edits": [{"type": "drop_oldest"}],
    }
    proxy = serve(upstream={"base_url": base_url}, policies={"short": policy})
    said = 0
    for number in range(40):
        assert ask(proxy, session, f"turn {number}").status_code == 200
        said += 1
    rows = proxy.exchanges(session)
    assert len(proxy.messages(session)) == 2 * said
    assert all(row["usage"]["prompt_tokens"] < CONTEXT for row in rows)
    assert any(row["cut"] and row["cut"]["moved"] for row in rows)
    whole = proxy.client.post(
        "/v1/chat/completions", json=asked("and now?"), headers={"x-session-id": session, "x-context-policy": "off"}
    )
    assert (whole.status_code, whole.json()["error"]["type"]) == (400, "exceed_context_size_error")
