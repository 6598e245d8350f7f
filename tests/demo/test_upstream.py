from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from proxy.demo.server import plain_config, serving
from proxy.demo.upstream import MODEL, PracticeUpstream

SCRIPT = [{"role": "assistant", "content": "one"}, {"role": "assistant", "content": "two"}]
USER = {"role": "user", "content": "x" * 6000}


@pytest.fixture
def upstream() -> PracticeUpstream:
    return PracticeUpstream(SCRIPT)


@pytest.fixture
def http(upstream: PracticeUpstream) -> Iterator[httpx.Client]:
    with (
        serving(plain_config(upstream)) as address,
        httpx.Client(base_url=address, trust_env=False) as client,
    ):
        yield client


def ask(http: httpx.Client, messages: list[Any], account: str = "key", **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": messages, **fields}
    return http.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {account}"})


def test_each_account_plays_the_script_from_its_beginning(http: httpx.Client) -> None:
    said = [ask(http, [USER], who).json()["choices"][0]["message"]["content"] for who in ("a", "b", "a")]
    assert said == ["one", "one", "two"]


def test_what_is_refused_moves_nothing_on_and_is_logged(
    http: httpx.Client, upstream: PracticeUpstream
) -> None:
    refused = ask(http, [])
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "empty_array"
    assert http.post("/v1/chat/completions", content=b"{").status_code == 400
    assert ask(http, [USER]).json()["choices"][0]["message"] == SCRIPT[0]
    assert [received.refusal is None for received in upstream.log] == [False, False, True]
    assert upstream.answered("key")[0].messages == (USER,)


def test_the_end_of_the_script_is_said(http: httpx.Client) -> None:
    answers = [ask(http, [USER]) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 400]
    assert answers[2].json()["error"]["code"] == "script_ended"


def test_usage_tells_what_the_cache_held(http: httpx.Client, upstream: PracticeUpstream) -> None:
    first, second = (ask(http, [USER]).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["prompt_tokens_details"] == {"cached_tokens": 1408}
    assert second["prompt_tokens"] == upstream.tokens_of({"model": MODEL, "messages": [USER]}) == 1507
    assert second["total_tokens"] == second["prompt_tokens"] + second["completion_tokens"]


def test_tools_are_part_of_the_prompt(upstream: PracticeUpstream) -> None:
    bare = {"model": MODEL, "messages": [USER]}
    assert upstream.tokens_of(bare | {"tools": [{"a": "b" * 32}]}) == upstream.tokens_of(bare) + 11


@pytest.mark.parametrize("asked", [True, False])
def test_a_stream_ends_with_usage_only_where_it_is_asked_for(http: httpx.Client, asked: bool) -> None:
    answer = ask(http, [USER], stream=True, stream_options={"include_usage": asked})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")
    assert ('"cached_tokens"' in answer.text) is asked


def test_models_are_listed_and_nothing_else_is_there(http: httpx.Client) -> None:
    assert [model["id"] for model in http.get("/v1/models").json()["data"]] == [MODEL]
    assert http.get("/v1/files").status_code == 404
