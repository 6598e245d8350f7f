from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest

from proxy.demo.replay import serving
from proxy.demo.upstream import MODEL, PracticeUpstream, Refused, check_request, completion
from proxy.dialects import Message
from proxy.tokens import TokenCounter
from tests.demo.measured import plain


class QuarterOfBytes(TokenCounter):
    """Counts four bytes as a token."""

    def message(self, message: Message, model: str) -> int:  # noqa: ARG002 - every model counts alike
        return -(-len(message.raw) // 4)

    def json(self, raw: bytes, model: str) -> int:  # noqa: ARG002 - every model counts alike
        return -(-len(raw) // 4)


SCRIPT = [{"role": "assistant", "content": "one"}, {"role": "assistant", "content": "two"}]
USER = {"role": "user", "content": "x" * 6000}


@pytest.fixture
def upstream() -> PracticeUpstream:
    return PracticeUpstream(SCRIPT, QuarterOfBytes())


@pytest.fixture
def http(upstream: PracticeUpstream) -> Iterator[httpx.Client]:
    with serving(plain(upstream)) as address, httpx.Client(base_url=address, trust_env=False) as client:
        yield client


def ask(http: httpx.Client, messages: list[Any], account: str = "key", **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": messages} | fields
    return http.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {account}"})


def test_each_account_plays_the_script_from_its_beginning(http: httpx.Client) -> None:
    said = [ask(http, [USER], who).json()["choices"][0]["message"]["content"] for who in ("a", "b", "a")]
    assert said == ["one", "one", "two"]


def test_a_refused_request_does_not_advance_the_script_and_is_logged(
    http: httpx.Client, upstream: PracticeUpstream
) -> None:
    refused = ask(http, [])
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages"
    assert http.post("/v1/chat/completions", content=b"{").status_code == 400
    assert ask(http, [USER]).json()["choices"][0]["message"] == SCRIPT[0]
    assert [received.refusal is None for received in upstream.log] == [False, False, True]
    assert upstream.answered("key")[0].messages == (USER,)


def test_a_request_after_the_end_of_the_script_is_refused(http: httpx.Client) -> None:
    answers = [ask(http, [USER]) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 400]
    assert answers[2].json()["error"]["code"] == "script_ended"


def test_usage_reports_cached_tokens(http: httpx.Client, upstream: PracticeUpstream) -> None:
    first, second = (ask(http, [USER]).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["prompt_tokens_details"] == {"cached_tokens": 1408}
    assert second["prompt_tokens"] == upstream.tokens_of({"model": MODEL, "messages": [USER]}) == 1507
    assert second["total_tokens"] == second["prompt_tokens"] + second["completion_tokens"]


def test_tools_are_part_of_the_prompt(upstream: PracticeUpstream) -> None:
    bare = {"model": MODEL, "messages": [USER]}
    assert upstream.tokens_of(bare | {"tools": [{"a": "b" * 32}]}) == upstream.tokens_of(bare) + 11


def test_other_paths_return_404(http: httpx.Client) -> None:
    assert http.get("/v1/files").status_code == 404


@pytest.mark.parametrize(("account", "model"), [("other", MODEL), ("key", "other")])
def test_accounts_and_models_have_caches_of_their_own(http: httpx.Client, account: str, model: str) -> None:
    ask(http, [USER], "key", model=MODEL)
    usage = ask(http, [USER], account, model=model).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


# ----------------------------------------------------------------------------------- refusals


def calling(*ids: str) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"id": i, "type": "function"} for i in ids]}


def result(call: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": "{}"}


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [USER, calling("a"), result("a"), calling("a"), result("a"), USER],
        [USER, calling("a", "b"), result("b"), result("a")],
        [{"role": "assistant", "content": "hello"}, USER],
    ],
    ids=["plain", "an id used again", "parallel calls", "assistant first"],
)
def test_requests_that_keep_the_rules_are_accepted(messages: list[Any]) -> None:
    request = {"model": "m", "messages": messages}
    assert check_request(orjson.dumps(request)) == request


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([USER, calling("a"), USER], "messages.2", "did not have response messages: a"),
        ([USER, calling("a", "b"), result("a")], "messages.3", "did not have response messages: b"),
        ([USER, result("a")], "messages.1.role", "must be a response to"),
        ([USER, calling("a"), result("a"), result("a")], "messages.3.role", "must be a response to"),
        ([USER, calling()], "messages.1.tool_calls", "at least 1 item"),
        ([{"role": "robot"}], "messages.0.role", "or 'tool'"),
        (["hi"], "messages.0", "an object"),
        ([], "messages", "at least 1 item"),
    ],
    ids=["no result", "one missing", "orphan", "answered twice", "no calls", "role", "no object", "no messages"],
)
def test_messages_are_refused(messages: list[Any], param: str, words: str) -> None:
    with pytest.raises(Refused, match=words) as caught:
        check_request(orjson.dumps({"model": "m", "messages": messages}))
    error = caught.value.body["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (None, "an object"),
        ({"messages": [USER]}, "required"),
        ({"model": "m"}, "required"),
        ({"model": "m", "messages": [USER], "tools": []}, "at least 1 item"),
    ],
)
def test_requests_are_refused(request_: Any, words: str) -> None:
    with pytest.raises(Refused, match=words):
        check_request(orjson.dumps(request_))


# ------------------------------------------------------------------------------------ replies


USAGE = {"prompt_tokens": 3}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"text":"' + "x" * 60 + '"}'}}


def test_a_completion_holds_the_reply_as_it_is() -> None:
    reply = {"content": None, "role": "assistant", "tool_calls": [CALL]}
    data = orjson.loads(completion(7, "m", reply, USAGE))
    assert data["choices"][0]["message"] == reply
    assert data["choices"][0]["finish_reason"] == "tool_calls"
    assert (data["object"], data["usage"], data["id"]) == ("chat.completion", USAGE, "chatcmpl-practice-7")
