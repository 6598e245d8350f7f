"""A request that the upstream refuses as too long is trimmed and sent once more: seen over HTTP."""

from __future__ import annotations

import threading
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from proxy.pipeline.send import RESCUED
from proxy.trimming.trim import BEYOND_KEEP
from tests.e2e.conftest import Serve
from tests.support.answers import OVERFLOWS, tokens_of
from tests.support.server import Proxy, settings_for
from tests.support.upstream import Upstream
from tests.support.waiting import until

JsonObject = dict[str, Any]

WINDOW = 8_000
MODEL = f"echo+ctx:{WINDOW}"
WORDS = ("the", "carrier", "moved", "the", "parcel", "from", "one", "depot", "to", "another")
POLICIES: dict[str, JsonObject] = {
    "default": {"match": {"models": ["*ctx*"]}},
    "cleared": {
        "match": {"models": ["nobody"]},
        "trigger": {"tokens": 500_000},
        "target": {"tokens": 300_000},
        "edits": [{"type": "clear_tool_results", "keep": 1}],
    },
    "listed": {
        "match": {"models": ["nobody"]},
        "trigger": {"tokens": 500_000},
        "target": {"tokens": 300_000},
        "keep": {"rounds": 2, "spans": 2, "first_user": True},
        "pin": [{"regex": "never", "roles": ["user"]}],
        "edits": [{"type": "drop_oldest"}],
    },
}
_NUMBERS = count(1)


@pytest.fixture(scope="module")
def proxy(serve: Serve) -> Proxy:
    return serve(policies=POLICIES)


@pytest.fixture
def session() -> str:
    return f"overflow-{next(_NUMBERS)}"


def words(tokens: int, start: int = 0) -> str:
    """Return a text of about this many tokens, as the stand-in counts them."""
    said = []
    size = 0
    for number in count(start):
        said.append(f"{WORDS[number % len(WORDS)]}{number}")
        size += len(said[-1]) + 1
        if size >= 4 * tokens:
            return " ".join(said)
    raise AssertionError


def user(text: str) -> JsonObject:
    return {"role": "user", "content": text}


def tool_round(number: int, tokens: int) -> list[JsonObject]:
    """Return a round with a long tool result."""
    function = {"name": "look", "arguments": orjson.dumps({"at": number}).decode()}
    return [
        user(f"question {number}"),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": f"c{number}", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": f"c{number}", "content": words(tokens, number)},
        {"role": "assistant", "content": f"answer {number}"},
    ]


def history(tokens: int, *, each: int = 500) -> list[JsonObject]:
    """Return a history of this many tokens that ends with a question."""
    said = [message for number in range(tokens // each) for message in tool_round(number, each)]
    return [*said, user("and now?")]


def attempts(upstream: Upstream) -> list[int]:
    """Return the tokens of every received request."""
    return [tokens_of(request.json, {}) for request in upstream.log]


def last(proxy: Proxy, session: str) -> JsonObject:
    receipt: JsonObject = proxy.exchanges(session)[-1]
    return receipt


@pytest.mark.parametrize("tokens", [10_000, 30_000, 100_000])
@pytest.mark.parametrize("policy", ["built-in", "default", "cleared", "listed"])
def test_a_history_beyond_the_window_is_answered_at_the_second_try(
    proxy: Proxy, upstream: Upstream, session: str, policy: str, tokens: int
) -> None:
    said = [user("never forget the blue key"), {"role": "assistant", "content": "ok"}, *history(tokens)]
    answer = proxy.chat(session, said, MODEL, headers={"x-context-policy": policy})
    assert answer.status_code == 200, answer.text
    first, second = attempts(upstream)
    assert first > WINDOW >= second
    assert second <= first // 2
    sent = upstream.last.json["messages"]
    assert sent[-1] == said[-1]
    if policy in {"built-in", "listed"}:  # the messages that they keep or pin stay
        assert sent[0] == said[0]
    assert answer.json()["choices"][0]["message"]["content"] == "echo: and now?"
    assert RESCUED in answer.headers["x-context-warning"]
    assert answer.headers["x-context-policy"] == policy
    assert answer.headers["x-context-messages-sent"] == str(len(sent))
    assert answer.headers["x-context-edits"]
    receipt = last(proxy, session)
    assert RESCUED in receipt["warnings"]
    assert (receipt["status"], receipt["cut"]["moved"]) == ("complete", True)
    assert receipt["cut"]["fired"].startswith("overflow")
    assert set(receipt["timings"]) == {"planned", "overflowed", "answered", "settled"}
    assert len(proxy.messages(session)) == len(said) + 1


def test_a_stream_is_answered_at_the_second_try(proxy: Proxy, upstream: Upstream, session: str) -> None:
    said = history(20_000)
    answer = proxy.chat(session, said, MODEL, stream=True)
    assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
    assert answer.content.endswith(b"data: [DONE]\n\n")
    assert RESCUED in answer.headers["x-context-warning"]
    first, second = attempts(upstream)
    assert first > WINDOW >= second
    assert all(request.json["stream_options"] == {"include_usage": True} for request in upstream.log)
    receipt = last(proxy, session)
    assert (receipt["status"], receipt["finish_reasons"]) == ("complete", ["stop"])
    assert receipt["usage"]["prompt_tokens"] == second
    assert proxy.messages(session)[-1]["content"] == "echo: and now?"


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
def test_an_append_is_answered_at_the_second_try(proxy: Proxy, upstream: Upstream, session: str, stream: bool) -> None:
    proxy.chat(session, [*history(20_000)[:-1], user("first")])
    upstream.forget()
    answer = proxy.chat(session, "and now?", MODEL, stream=stream, headers={"x-session-mode": "append"})
    assert answer.status_code == 200, answer.text
    first, second = attempts(upstream)
    assert first > WINDOW >= second
    assert [row["kind"] for row in proxy.exchanges(session)][-1] == "append"
    assert upstream.last.json["messages"][-1] == user("and now?")


def test_streams_of_those_who_refuse_to_be_asked_for_their_usage(
    proxy: Proxy, upstream: Upstream, session: str
) -> None:
    answer = proxy.chat(session, history(20_000), f"{MODEL}+plain", stream=True)
    assert answer.content.endswith(b"data: [DONE]\n\n")
    assert ["stream_options" in request.json for request in upstream.log] == [True, False, False]
    assert last(proxy, session)["status"] == "complete"


@pytest.mark.parametrize("whose", OVERFLOWS)
@pytest.mark.parametrize("times", [0.8, 1.0, 1.4])
def test_whatever_words_it_is_said_in_and_however_it_counts(
    proxy: Proxy, upstream: Upstream, session: str, whose: str, times: float
) -> None:
    model = f"{MODEL}+words:{whose}+times:{times}"
    # If the provider does not say how long its window is, the proxy can only try half of the request.
    said = history(int(10_500 / times) if whose == "silent" else 60_000)
    answer = proxy.chat(session, said, model)
    assert answer.status_code == 200, answer.text
    assert len(upstream.log) == 2
    assert RESCUED in last(proxy, session)["warnings"]


def test_a_window_that_nobody_names_is_known_from_the_configuration(
    serve: Serve, upstream: Upstream, session: str
) -> None:
    proxy = serve(models=[{"match": ["*"], "context_window": WINDOW}], policies={"default": {}})
    assert proxy.chat(session, history(60_000), f"{MODEL}+words:silent").status_code == 200
    assert len(upstream.log) == 2


def test_room_for_the_reply_is_left(proxy: Proxy, upstream: Upstream, session: str) -> None:
    proxy.chat(session, history(40_000), MODEL)
    plain = attempts(upstream)[-1]
    upstream.forget()
    proxy.chat(session + "-2", history(40_000), MODEL, max_completion_tokens=4_000)
    assert attempts(upstream)[-1] < plain
    assert attempts(upstream)[-1] + 4_000 <= WINDOW


def test_a_reply_without_a_limit_to_speak_of_takes_no_room(proxy: Proxy, upstream: Upstream, session: str) -> None:
    proxy.chat(session, history(40_000), MODEL)
    proxy.chat(f"{session}-long", history(40_000), MODEL, max_tokens=WINDOW)
    plain, long = attempts(upstream)[1::2]
    assert plain == long > WINDOW // 2


def test_off_means_off(proxy: Proxy, upstream: Upstream, session: str) -> None:
    said = history(10_000)
    answer = proxy.chat(session, said, MODEL, headers={"x-context-policy": "off"})
    assert (answer.status_code, len(upstream.log)) == (400, 1)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert last(proxy, session)["status"] == "failed"


def test_another_refusal_is_no_overflow(proxy: Proxy, upstream: Upstream, session: str) -> None:
    answer = proxy.chat(session, history(1_000), "fault:429")
    assert (answer.status_code, len(upstream.log)) == (429, 1)
    assert "x-context-warning" not in answer.headers or RESCUED not in answer.headers["x-context-warning"]


@pytest.mark.parametrize("append", [False, True], ids=["resend", "append"])
def test_the_cut_is_kept_until_the_view_has_grown(
    serve: Serve, upstream: Upstream, tmp_path: Path, session: str, append: bool
) -> None:
    """The session continues after the retry and after a restart: one refusal each time that the window fills up."""
    settings = settings_for(upstream, tmp_path, {})
    said = history(20_000)
    headers = {"x-session-mode": "append"} if append else {}

    def turns(proxy: Proxy, number: int) -> None:
        for turn in range(number):
            answer = proxy.chat(session, said[-1:] if append and turns_done else said, MODEL, headers=headers)
            assert answer.status_code == 200, answer.text
            turns_done.append(turn)
            said.extend([answer.json()["choices"][0]["message"], user(words(150, turn))])

    turns_done: list[int] = []
    with Proxy(settings) as proxy:
        turns(proxy, 4)
        (rescued,) = [row for row in proxy.exchanges(session) if RESCUED in row["warnings"]]
        assert rescued["cut"]["moved"]
    with Proxy(settings) as proxy:
        turns(proxy, 3)
        rows = proxy.exchanges(session)
        assert [row["cut"]["moved"] for row in rows] == [True] + [False] * 6
        assert proxy.messages(session) == [
            {**m, "refusal": None, "annotations": []} if m.get("content", "") and "echo" in m["content"] else m
            for m in said[:-1]
        ]
        assert len(upstream.log) == 8
        # Between trims each request begins with the whole previous one.
        bodies = [request.json["messages"] for request in upstream.log[1:]]
        for earlier, later in pairwise(bodies):
            assert later[: len(earlier)] == earlier
        turns(proxy, 16)  # it fills up again
        rescues = [row for row in proxy.exchanges(session) if RESCUED in row["warnings"]]
        assert len(rescues) == 2
        assert all(row["status"] == "complete" for row in proxy.exchanges(session))


def test_a_second_refusal_is_the_clients(proxy: Proxy, upstream: Upstream, session: str) -> None:
    said = history(20_000)
    model = "echo+ctx:5"
    answer = proxy.chat(session, said, model)
    assert len(upstream.log) == 2
    assert answer.status_code == 400
    said_by_upstream = answer.json()["error"]
    asked = tokens_of(upstream.last.json, {})
    assert f"resulted in {asked} tokens" in said_by_upstream["message"]
    receipt = last(proxy, session)
    assert (receipt["status"], receipt["upstream_status"], receipt["nodes"]) == ("failed", 400, [])
    assert RESCUED in receipt["warnings"]
    # It has no lasting effect: the next request that fits is sent unchanged.
    proxy.chat(session, said)
    assert upstream.last.json["messages"] == said


def test_one_message_that_is_too_long_alone_cannot_be_helped(proxy: Proxy, upstream: Upstream, session: str) -> None:
    answer = proxy.chat(session, words(9_000), MODEL)
    assert (answer.status_code, len(upstream.log)) == (400, 1)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    receipt = last(proxy, session)
    assert (receipt["status"], receipt["cut"]) == ("failed", None)
    assert RESCUED not in receipt["warnings"]


def test_what_keep_names_gives_way_last(proxy: Proxy, upstream: Upstream, session: str) -> None:
    said = [*history(4_000)[:-1], *tool_round(99, 9_000)[:3]]
    answer = proxy.chat(session, said, MODEL)
    assert answer.status_code == 200, answer.text
    assert BEYOND_KEEP in answer.headers["x-context-warning"]
    assert user("question 99") in upstream.last.json["messages"]


def test_who_leaves_while_it_is_asked_again_is_settled_once(proxy: Proxy, upstream: Upstream, session: str) -> None:
    said = history(20_000)
    body = {"model": f"{MODEL}+fault:hang", "messages": said}
    client = httpx.Client(base_url=proxy.url, trust_env=False)

    def ask() -> None:
        with pytest.raises(httpx.TransportError):
            client.post("/v1/chat/completions", json=body, headers={"x-session-id": session})

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: len(upstream.log) == 2 and upstream.open == 1, "it is asked again")
    for connection in client._transport._pool.connections:  # type: ignore[attr-defined]  # httpx offers no other way
        connection._connection._network_stream.get_extra_info("socket").shutdown(2)
    thread.join()
    client.close()
    until(lambda: upstream.open == 0, "the provider is free")
    until(lambda: last(proxy, session)["status"] == "cancelled", "it is settled")
    assert len(proxy.exchanges(session)) == 1
    assert proxy.messages(session) == []
    again = proxy.chat(session, said, MODEL)
    assert again.status_code == 200
    assert len(proxy.messages(session)) == len(said) + 1


@pytest.mark.parametrize(("fault", "status"), [("drop-before", 502), ("500", 500), ("bad-json", 200)])
def test_an_upstream_that_fails_when_it_is_asked_again(
    proxy: Proxy, upstream: Upstream, session: str, fault: str, status: int
) -> None:
    said = history(20_000)
    answer = proxy.chat(session, said, f"{MODEL}+fault:{fault}")
    assert (answer.status_code, len(upstream.log)) == (status, 2)
    (receipt,) = proxy.exchanges(session)
    assert (receipt["status"], receipt["nodes"]) == ("failed", [])
    assert proxy.chat(session, said, MODEL).status_code == 200
    assert len(proxy.messages(session)) == len(said) + 1


def test_a_stream_that_breaks_off_after_the_second_try(proxy: Proxy, upstream: Upstream, session: str) -> None:
    answer = proxy.chat(session, history(20_000), f"{MODEL}+long:20+fault:drop", stream=True)
    assert answer.status_code == 200
    assert b"[DONE]" not in answer.content
    (receipt,) = proxy.exchanges(session)
    assert (receipt["status"], len(receipt["replies"])) == ("partial", 1)
    assert receipt["cut"]["moved"]


def test_a_request_that_belongs_to_no_session_is_rescued_too(serve: Serve, upstream: Upstream) -> None:
    proxy = serve(sessions={"missing": "stateless"})
    answer = proxy.chat(None, history(20_000), MODEL)
    assert (answer.status_code, len(upstream.log)) == (200, 2)
    assert "x-session-id" not in answer.headers
