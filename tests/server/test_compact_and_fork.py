"""What is done to a session over HTTP: summed up now, and gone on from in another one."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Serve
from tests.support.server import Proxy
from tests.support.upstream import Upstream
from tests.support.waiting import until

KEYS = [{"key": "key-of-anne-0123", "tenant": "anne"}, {"key": "key-of-bert-0123", "tenant": "bert"}]
ADMIN = {"authorization": "Bearer key-of-the-admin"}


@pytest.fixture(scope="module")
def proxy(serve: Serve) -> Proxy:
    return serve(summarizer={"model": "summary:good"}, policies={"all": {}})


def talk(proxy: Proxy, session: str, rounds: int = 4, headers: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Have a conversation by resending it; return it as it stands."""
    said: list[dict[str, Any]] = [{"role": "system", "content": "You help."}]
    for number in range(rounds):
        said.append({"role": "user", "content": f"Question {number} about parcel P-10{number}. " + "well " * 60})
        answer = proxy.chat(session, said, f"say:Answer {number}. " + "so " * 60, headers=headers or {})
        assert answer.status_code == 200, answer.text
        said.append(answer.json()["choices"][0]["message"])
    return said


def post(proxy: Proxy, path: str, body: Any = None, **headers: str) -> httpx.Response:
    return proxy.client.post(path, json=body, headers=headers)


def refused(answer: httpx.Response, status: int, param: str | None) -> str:
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), answer.text
    return str(error["message"])


def test_a_session_is_summed_up_now_and_the_next_request_uses_it(
    proxy: Proxy, upstream: Upstream, session: str
) -> None:
    said = talk(proxy, session)
    made = post(proxy, f"/sessions/{session}/compact")
    assert made.status_code == 201, made.text
    summary = made.json()
    assert (summary["kind"], summary["model"], summary["generation"]) == ("model", "summary:good", 1)
    assert summary["message_count"] == summary["summarized_until"] > 0
    assert summary["compression_rate"] == round(summary["summary_tokens"] / summary["original_tokens"], 3) < 1
    assert proxy.get(f"/sessions/{session}")["summaries"] == [summary]
    answer = proxy.chat(session, [*said, {"role": "user", "content": "and now?"}])
    assert answer.headers["x-context-edits"] == "summarize"
    sent = upstream.last.messages
    assert sent[0]["content"].endswith(summary["summary"])
    assert len(sent) == 1 + len(said) - summary["message_count"]
    receipt = proxy.exchanges(session)[-1]
    assert receipt["cut"]["fired"] == "a summary was asked for"
    assert receipt["summary"]["model"] == "summary:good"
    assert len(proxy.messages(session)) == len(said) + 1


def test_one_that_was_made_beside_the_requests_is_used_at_once_when_asked_for(
    serve: Serve, upstream: Upstream, session: str
) -> None:
    edit = {"type": "summarize", "mode": "model", "keep_rounds": 12, "min_messages": 4}
    policy = {"trigger": {"tokens": 2_000}, "target": {"tokens": 500}, "edits": [edit]}
    proxy = serve(
        summarizer={"model": "summary:good"}, policies={"lean": {**policy, "keep": {"rounds": 2, "spans": 9}}}
    )
    said = talk(proxy, session, rounds=14)
    until(lambda: len(proxy.get(f"/sessions/{session}")["summaries"]) == 1, "a summary is there")
    (made,) = proxy.get(f"/sessions/{session}")["summaries"]
    first = post(proxy, f"/sessions/{session}/compact?policy=lean")
    assert (first.status_code, first.json()["summarized_until"]) == (201, made["summarized_until"])
    assert first.json()["summary"] == made["summary"]
    assert post(proxy, f"/sessions/{session}/compact").json() == first.json()
    assert proxy.get(f"/sessions/{session}")["summaries"] == [made]
    calls = len(upstream.log)
    answer = proxy.chat(session, [*said, {"role": "user", "content": "and now?"}])
    assert "summarize" in answer.headers["x-context-edits"]
    assert len(upstream.log) == calls + 1
    assert proxy.exchanges(session)[-1]["cut"]["fired"].startswith("a summary was asked for")


def test_where_there_is_nothing_to_sum_up_that_is_the_answer(proxy: Proxy, upstream: Upstream, session: str) -> None:
    talk(proxy, session, rounds=1)
    answer = post(proxy, f"/sessions/{session}/compact")
    assert (answer.status_code, answer.json()["summary"]) == (200, None)
    assert len(upstream.log) == 1


def test_a_summary_that_is_refused_says_why_and_changes_nothing(serve: Serve, session: str) -> None:
    proxy = serve(summarizer={"model": "summary:empty"}, policies={"all": {}})
    said = talk(proxy, session)
    answer = post(proxy, f"/sessions/{session}/compact")
    assert "The session is as it was" in refused(answer, 502, None)
    assert answer.json()["error"]["code"] == "summary_failed"
    shown = proxy.get(f"/sessions/{session}")
    assert (shown["summaries"], shown["summarizer"]["refused"]) == ([], 1)
    assert shown["summarizer"]["last"]["reason"]
    assert proxy.chat(session, [*said, {"role": "user", "content": "b"}]).headers["x-context-edits"] == ""


def test_nothing_is_summed_up_under_off_or_a_policy_that_is_none(proxy: Proxy, session: str) -> None:
    talk(proxy, session, rounds=1)
    for policy in ("off", "none"):
        refused(post(proxy, f"/sessions/{session}/compact?policy={policy}"), 400, "policy")
    assert post(proxy, "/sessions/nobody/compact").status_code == 404


def test_a_fork_goes_its_own_way(proxy: Proxy, upstream: Upstream, session: str) -> None:
    said = talk(proxy, session)
    nodes = proxy.get(f"/sessions/{session}/messages", meta=True)["data"]
    fork = post(proxy, f"/sessions/{session}/fork", {"as": f"{session}-2", "at": nodes[3]["node"]})
    assert fork.status_code == 201, fork.text
    assert (fork.json()["messages"], fork.json()["head"]) == (4, nodes[3]["node"])
    answer = proxy.chat(f"{session}-2", "what else?")
    assert answer.headers["x-session-id"] == f"{session}-2"
    # It appends: the history and the instructions come from the store.
    assert [message["role"] for message in upstream.last.messages] == [
        "system", "user", "assistant", "user", "assistant", "user",
    ]  # fmt: skip
    assert len(proxy.messages(session)) == len(said) - 1
    whole = post(proxy, f"/sessions/{session}/fork", {"as": f"{session}-3"})
    assert whole.json()["messages"] == len(said) - 1


def test_a_copy_has_model_tools_and_policy_of_its_original(serve: Serve, upstream: Upstream, session: str) -> None:
    edit = {"type": "summarize", "mode": "model"}
    mine = {"match": {"models": ["summary*"]}, "trigger": {"messages": 900}, "edits": [edit]}
    proxy = serve(policies={"mine": mine, "other": {}})
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
    said: list[dict[str, Any]] = []
    for number in range(12):
        said.append({"role": "user", "content": f"Question {number}. " + "well " * 60})
        answer = proxy.chat(session, said, "summary:good", tools=[tool])
        said.append(answer.json()["choices"][0]["message"])
    post(proxy, f"/sessions/{session}/fork", {"as": "forked"})
    exported = proxy.client.get(f"/sessions/{session}/export").content
    assert proxy.client.post("/sessions/import?as=imported", content=exported).status_code == 201
    now = proxy.get(f"/sessions/{session}/context")
    assert (now["policy"], now["model"]) == ("mine", "summary:good")
    for copied in ("forked", "imported"):
        of_copy = proxy.get(f"/sessions/{copied}/context")
        assert [of_copy[name] for name in ("policy", "model", "messages")] == [
            now[name] for name in ("policy", "model", "messages")
        ]
        plain = proxy.get(f"/sessions/{copied}/context", policy="off")["tokens_before"]
        assert plain == of_copy["tokens_before"] > sum(row["tokens"] for row in nodes_of(proxy, copied))
        assert post(proxy, f"/sessions/{copied}/compact").status_code == 201
        assert upstream.last.json["model"] == "summary:good"


def nodes_of(proxy: Proxy, session: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = proxy.get(f"/sessions/{session}/messages", meta=True)["data"]
    return found


def test_a_fork_that_cannot_be_made_says_what_to_send(proxy: Proxy, session: str) -> None:
    talk(proxy, session, rounds=1)
    path = f"/sessions/{session}/fork"
    assert refused(post(proxy, path, {"as": session}), 409, None)
    assert refused(post(proxy, path, {"as": "x", "at": "f" * 40}), 404, None)
    assert '"as"' in refused(post(proxy, path, {}), 400, "as")
    assert refused(post(proxy, path, {"as": "x", "of": 1}), 400, "of")
    assert refused(post(proxy, path, [1]), 400, None)
    assert refused(post(proxy, path, {"as": "a\nb"}), 400, "as")
    assert refused(proxy.client.post(path, content=b"{"), 400, None)
    empty = f"{session}-empty"
    proxy.chat(empty, [{"role": "user", "content": "hello"}], "needs:something else")
    assert "no messages yet" in refused(post(proxy, f"/sessions/{empty}/fork", {"as": "x"}), 404, None)


def test_tenants_do_it_to_their_own_and_the_administrators_key_goes_nowhere(
    serve: Serve, upstream: Upstream, session: str
) -> None:
    proxy = serve(
        auth={"mode": "keys", "keys": KEYS, "admin_key": "key-of-the-admin"},
        upstream={"api_key": "sk-upstream"},
        summarizer={"model": "summary:good"},
        policies={"all": {}},
    )
    anne, bert = {"authorization": "Bearer key-of-anne-0123"}, {"authorization": "Bearer key-of-bert-0123"}
    talk(proxy, session, headers=anne)
    for path, body in (("compact", None), ("fork", {"as": "stolen"})):
        assert post(proxy, f"/sessions/{session}/{path}", body, **bert).status_code == 404
    made = post(proxy, f"/sessions/{session}/compact?tenant=anne", None, **ADMIN)
    assert made.status_code == 201, made.text
    assert ("authorization", "Bearer sk-upstream") in upstream.last.headers
    fork = post(proxy, f"/sessions/{session}/fork", {"as": "mine"}, **anne)
    assert fork.json()["tenant"] == "anne"
    assert len(proxy.client.get("/sessions/mine", headers=anne).json()["summaries"]) == 1


def test_people_are_shown_clean_text_and_pages_of_it(proxy: Proxy, session: str) -> None:
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "<Agent: Scout> [调用工具 grep]", "agent": "Scout"},
        {"role": "user", "content": "for models alone", "is_internal": True},
        {"role": "user", "content": "what did it find?"},
    ]
    proxy.chat(session, said, "say:nothing", headers={"x-agent-name": "boss"})
    path = f"/sessions/{session}/messages"
    shown = [(line["sender"], line["text"]) for line in proxy.get(path, channel="display")["data"]]
    assert shown == [("Scout", "[调用工具 grep]"), ("user", "what did it find?"), ("boss", "nothing")]
    assert [message["content"] for message in proxy.get(path)["data"]][:3] == [message["content"] for message in said]
    first = proxy.get(path, limit=3, meta=True)
    assert (len(first["data"]), first["next"]) == (3, first["data"][2]["node"])
    rest = proxy.get(path, limit=3, after=first["next"])
    assert ([message["content"] for message in rest["data"]], rest["next"]) == (["nothing"], None)
    assert refused(proxy.client.get(path, params={"after": "f" * 40}), 400, "after")
    assert refused(proxy.client.get(path, params={"channel": "tv"}), 400, "channel")
