"""What operators read and configure, with several workers: views, search, retention, budgets, keys, masks."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from proxy.server.limits import LimitedProtocol
from tests.support.raw_socket import RawClient
from tests.support.served import SECONDS, Served, config_file, environment
from tests.support.stores import empty_store
from tests.support.upstream import Upstream
from tests.support.waiting import until

TRIMS = {
    "trigger": {"tokens": 900},
    "target": {"tokens": 500},
    "edits": [{"type": "clear_tool_results", "keep": 0}, {"type": "drop_oldest"}],
}
PRICED = [{"match": ["*"], "context_window": 128_000, "prices": {"input": 1000, "cached_read": 500, "output": 2000}}]
ADMIN = "key-of-the-admin-001"


def call(base: str, method: str, path: str, key: str | None = None, **given: Any) -> httpx.Response:
    headers: dict[str, str] = given.pop("headers", {}) | ({} if key is None else {"authorization": f"Bearer {key}"})
    return httpx.request(method, f"{base}{path}", headers=headers, trust_env=False, timeout=SECONDS, **given)


def get(base: str, path: str, key: str | None = None, **query: Any) -> Any:
    answer = call(base, "GET", path, key, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ask(
    base: str, session: str, messages: list[Any], key: str | None = None, policy: str | None = None, **body: Any
) -> httpx.Response:
    headers = {"x-session-id": session} | ({} if policy is None else {"x-context-policy": policy})
    mode = body.pop("mode", None)
    headers |= {} if mode is None else {"x-session-mode": mode}
    return call(
        base, "POST", "/v1/chat/completions", key, headers=headers, json={"model": "echo", "messages": messages, **body}
    )


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_the_view_is_what_was_sent_and_search_finds_texts(tmp_path: Path, upstream: Upstream, store_url: str) -> None:
    watch = {**TRIMS, "mode": "observe"}
    config = config_file(tmp_path, upstream, store_url, policies={"lean": TRIMS, "watch": watch})
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    with Served(config, "--workers", "4").wait() as served:
        for policy in ("lean", "watch", "off"):
            for mode in ("full", "append"):
                exchange = ""
                history: list[Any] = [{"role": "system", "content": "You are S."}]
                for turn in range(7):
                    new = [user(f"turn {turn} under {policy} {mode} <script>alert(1)</script> " + "word " * 90)]
                    if turn == 2 and mode == "full":
                        named = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                        asked: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [named]}
                        new += [asked]
                        new += [{"role": "tool", "tool_call_id": "call_1", "content": "line of output\n" * 60}]
                    history += new
                    sent = history if mode == "full" else (history[:1] if not turn else []) + new
                    answer = ask(served.url, f"{policy}-{mode}", sent, policy=policy, mode=mode, tools=tools)
                    assert answer.status_code == 200, answer.text
                    exchange = answer.headers["x-exchange-id"]
                    view = get(served.url, f"/exchanges/{exchange}/view", diff="true")
                    received = orjson.loads(upstream.last.body)
                    assert view["messages"] == received["messages"]
                    assert view["tools"] == received["tools"]
                    assert len(view["diff"]) == len(history) - 1
                    if policy == "watch":
                        assert answer.headers["x-context-edits"] == ""
                        assert received["messages"] == history
                    said = answer.json()["choices"][0]["message"]
                    history.append({"role": said["role"], "content": said["content"]})
                receipt = get(served.url, f"/exchanges/{exchange}")
                assert ("observed" in receipt) == (policy == "watch")
                assert (receipt["tokens_sent"] < receipt["tokens_before"]) == (policy == "lean")
        found = get(served.url, "/search", q="turn 3 under LEAN append")
        assert {each["role"] for each in found["data"]} == {"user", "assistant"}
        assert found["searched"]["complete"]
        assert call(served.url, "GET", "/search").status_code == 400
        largest = [each["tokens"] for each in get(served.url, "/sessions", sort="largest")["data"]]
        assert largest == sorted(largest, reverse=True)
        assert call(served.url, "GET", "/sessions?sort=best").status_code == 400
        assert call(served.url, "GET", "/stats?since=yesterday").status_code == 400
        assert call(served.url, "GET", "/stats?group=colour").status_code == 400
        for group in ("day", "hour", "model", "policy", "tenant", "session", "kind", "status", "dialect", "miss"):
            of_all = call(served.url, "GET", f"/stats?group={group}")
            of_one = call(served.url, "GET", f"/stats?group={group}&session=lean-full")
            assert (of_all.status_code, of_one.status_code) == (200, 400 if group == "miss" else 200)


def test_budgets_are_shared_and_keys_are_read_again(tmp_path: Path, upstream: Upstream, store_url: str) -> None:
    one, other, late = "key-of-team-one-0001", "key-of-team-other-01", "key-of-team-late-001"
    hashed = f"sha256:{hashlib.sha256(other.encode()).hexdigest()}"
    spends, beside = "key-of-team-spend-01", "key-of-team-spend-02"
    keys = [{"key": one, "tenant": "one"}, {"key": hashed, "tenant": "other", "name": "another"}]
    keys += [{"key": spends, "tenant": "other", "name": "spends"}, {"key": beside, "tenant": "other"}]
    sections: dict[str, Any] = {
        "models": PRICED,
        "auth": {"mode": "keys", "keys": keys, "admin_key": ADMIN},
        "budgets": [
            {"tenant": "one", "requests_per_minute": 15},
            {"key": "another", "tokens_per_minute": 60},
            {"tenant": "late", "dollars_per_day": 0.05},
            {"key": "spends", "dollars_per_month": 0.4},
        ],
    }
    config = config_file(tmp_path, upstream, store_url, **sections)
    data = json.loads(config.read_text())
    data["upstream"]["api_key"] = "sk-provider"
    config.write_text(json.dumps(data))
    with Served(config, "--workers", "4").wait() as served:
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda number: ask(served.url, f"s{number}", [user("hi")], one), range(30)))
        assert Counter(answer.status_code for answer in answers) == {200: 15, 429: 15}
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert "has used 15 of 15" in refused.json()["error"]["message"]
        assert call(served.url, "POST", "/v1/embeddings", one, json={"input": "hi"}).status_code == 429
        assert call(served.url, "GET", "/v1/models", one).status_code != 429
        metrics = call(served.url, "GET", "/metrics", ADMIN).text
        assert 'palimpsest_refused_total{budget="requests_per_minute"} 16.0' in metrics
        assert _until_refused(served.url, other) < 30
        assert ask(served.url, "s", [user("hi")], hashed).status_code == 401
        assert ask(served.url, "s", [user("hi")], late).status_code == 401
        data["auth"]["keys"] = [*data["auth"]["keys"][1:], {"key": late, "tenant": "late"}]
        data["budgets"].insert(0, {"tenant": "nobody", "requests_per_minute": 7})
        config.write_text(json.dumps(data))
        until(lambda: _accepted_everywhere(served.url, late), "it is so in time")
        until(
            lambda: all(ask(served.url, "s", [user("hi")], one).status_code == 401 for _ in range(12)),
            "it is so in time",
            40,
        )
        _until_refused(served.url, late)
        assert get(served.url, "/stats", ADMIN, group="tenant")["total"]["requests"] >= 15
        assert call(served.url, "GET", "/metrics", late).status_code == 403
        assert call(served.url, "DELETE", "/tenants/late", other).status_code == 403
        assert _until_refused(served.url, spends) > 1
        check_the_policies_page_tells_budgets(served.url, spends)
        assert ask(served.url, "beside", [user("hi")], beside).status_code == 200  # another key of this tenant
        assert call(served.url, "DELETE", "/tenants/late", ADMIN).json()["deleted"] >= 1
        tenants = {row["group"] for row in get(served.url, "/stats", ADMIN, group="tenant")["data"]}
        assert tenants == {"one", "other"}
        for line in ("the administrator asks: GET /stats", "configuration read again; changed: auth.keys"):
            assert line in served.log
    with Served(config, "--workers", "4").wait() as served:  # dollars are kept
        refused = ask(served.url, "s", [user("hi")], spends)
        assert refused.status_code == 429
        assert 0 < int(refused.headers["retry-after"]) <= 31 * 86_400
        told = refused.json()["error"]["message"]
        assert re.match(r"Key 'spends' has used \d+\.\d{4} of 0\.4 dollars \(dollars_per_month\)\. It goes on", told)
        assert call(served.url, "DELETE", "/tenants/other", ADMIN).status_code == 200
        until(lambda: ask(served.url, "s", [user("hi")], spends).status_code == 200, "nothing of it is left")


def check_the_policies_page_tells_budgets(base: str, key: str) -> None:
    """Check that the page shows the current settings, not those at the start, and the use of each budget."""

    def is_in_force() -> bool:
        shown = get(base, "/ui/policies.json", ADMIN)
        return bool("tenant: nobody" in shown["settings"] and len(shown["budgets"]) == 5)

    until(is_in_force, "every worker has read the configuration again")

    def is_used_up() -> bool:
        own = get(base, "/ui/policies.json", key)
        assert own["settings"] is None
        ((whose, used, most),) = [(each["whose"], each["used"], each["most"]) for each in own["budgets"]]
        return bool(whose == "Key 'spends'" and used >= most)

    until(is_used_up, "it is known everywhere")
    assert "dollars this month" in call(base, "GET", "/ui/policies", key).text


def _until_refused(base: str, key: str) -> int:
    """Send requests until a budget refuses; return how many were answered. Dollars are known a second late."""
    answered: list[int] = []

    def refused() -> bool:
        answer = ask(base, "budget", [user("hi " * 10)], key)
        if answer.status_code != 429:
            answered.append(answer.status_code)
            return False
        return int(answer.headers["retry-after"]) >= 1

    until(refused, "the budget refuses")
    return len(answered)


def _accepted_everywhere(base: str, key: str) -> bool:
    return all(ask(base, "s", [user("hi")], key).status_code in {200, 429} for _ in range(12))


def test_sessions_that_are_too_old_or_too_many_go(tmp_path: Path, upstream: Upstream, store_url: str) -> None:
    config = config_file(tmp_path, upstream, store_url, retention={"days": 0.00015, "max_sessions": 3})
    with Served(config, "--workers", "4").wait() as served:
        for number in range(8):
            assert ask(served.url, f"s{number}", [user("hi")]).status_code == 200

        def left() -> list[str]:
            return [each["id"] for each in get(served.url, "/sessions")["data"]]

        until(lambda: len(left()) <= 3, "it is so in time")
        assert set(left()) <= {"s5", "s6", "s7"}  # the oldest went
        until(lambda: left() == [], "it is so in time")
        assert get(served.url, "/search", q="hi")["data"] == []
        told = get(served.url, "/stats")["total"]
        assert (told["requests"], told["sessions"]) == (8, 0)


def test_a_log_in_json_is_json_from_the_first_line_to_the_last(tmp_path: Path, upstream: Upstream) -> None:
    store = empty_store(tmp_path / "s.db")
    config = config_file(tmp_path, upstream, store, telemetry={"log_format": "json"})
    with Served(config, "--workers", "2").wait() as served:
        assert call(served.url, "POST", "/v1/chat/completions", json={"model": "echo"}).status_code == 400
        assert served.stop() == 0
        lines = [json.loads(line) for line in served.log.splitlines()]
    assert any("OPENAI_BASE_URL=" in line["message"] and line["level"] == "info" for line in lines)


@pytest.mark.parametrize("closed", ["2> /dev/full", "2>&-", "<&- >&- 2>&-"])
def test_it_serves_where_its_log_cannot_be_written(tmp_path: Path, upstream: Upstream, closed: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = config_file(tmp_path, upstream, empty_store(tmp_path / "s.db"), server={"port": port})
    command = f"exec {shlex.quote(sys.executable)} -m proxy serve --config {shlex.quote(str(config))} {closed}"
    with subprocess.Popen(["/bin/sh", "-c", command], env=environment()) as process:  # noqa: S603 - our own
        base = f"http://127.0.0.1:{port}"

        def serves() -> bool:
            assert process.poll() is None
            with suppress(httpx.TransportError):
                return call(base, "GET", "/readyz").status_code == 200
            return False

        until(serves, "it serves", SECONDS)
        assert ask(base, "a", [user("hi")]).status_code == 200
        process.terminate()
        assert process.wait(SECONDS) == 0


def test_a_stop_lets_running_streams_end_and_is_ready_for_nothing_new(
    tmp_path: Path, upstream: Upstream, store_url: str
) -> None:
    config = config_file(tmp_path, upstream, store_url, server={"workers": 4, "drain_timeout": 40})

    def stream(number: int) -> bytes:
        body = {"stream": True, "model": "long:6+gate"}
        return call(
            served.url,
            "POST",
            "/v1/chat/completions",
            headers={"x-session-id": f"s{number}"},
            json={"messages": [user("hi")], **body},
        ).content

    def is_ready() -> bool:
        try:
            return call(served.url, "GET", "/readyz").status_code == 200
        except httpx.TransportError:
            return False

    with Served(config).wait() as served, ThreadPoolExecutor(8) as pool:
        assert is_ready()
        streams = [pool.submit(stream, number) for number in range(8)]
        until(lambda: upstream.open == 8, "all are asked")
        served.process.send_signal(signal.SIGTERM)
        until(lambda: not is_ready(), "nothing new is taken")
        assert not any(each.done() for each in streams)
        upstream.gate.set()
        for each in streams:
            assert each.result(30).endswith(b"data: [DONE]\n\n")
        assert served.process.wait(30) == 0
    with Served(config).wait() as served:  # the store was closed after the last of them
        rows = [row for number in range(8) for row in get(served.url, f"/sessions/s{number}/exchanges")["data"]]
        assert [row["status"] for row in rows] == ["complete"] * 8


def test_a_stop_answers_what_still_comes_on_a_kept_connection(
    tmp_path: Path, upstream: Upstream, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LimitedProtocol, "last_call_seconds", 60.0)
    with Served(config_file(tmp_path, upstream, store_url)).wait() as served:
        port = int(served.url.rsplit(":", 1)[1])

        def is_refused() -> bool:
            try:
                RawClient(port).socket.close()
            except ConnectionRefusedError:
                return True
            return False

        with RawClient(port) as client:
            client.socket.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            until(client.has_answer, "it is answered")
            client.socket.recv(65_536)
            served.process.send_signal(signal.SIGTERM)
            until(is_refused, "nothing new is taken")
            client.socket.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            status, headers, _ = client.answer()
            assert (status, headers["connection"]) == (200, "close")
        assert served.process.wait(30) == 0


def test_shares_are_stable_and_tools_are_left_out(tmp_path: Path, upstream: Upstream, store_url: str) -> None:
    slim = {"tools": {"remove": ["junk", "called", "forced"]}}
    policies = {"some": {**TRIMS, "share": 0.3}, "slim": slim, "watch": {**slim, "mode": "observe"}}
    config = config_file(tmp_path, upstream, store_url, policies=policies)
    names = ("kept", "junk", "called", "forced")
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in names]
    with Served(config, "--workers", "4").wait() as served:
        chosen: Counter[str] = Counter()
        for number in range(40):
            policy = {
                ask(served.url, f"s{number}", [user(f"{turn}")], mode="append").headers["x-context-policy"]
                for turn in range(2)
            }
            assert len(policy) == 1
            chosen.update(policy)
        assert set(chosen) == {"some", "slim"}
        assert chosen["some"] < chosen["slim"]
        calls = [{"id": "call_1", "type": "function", "function": {"name": "called", "arguments": "{}"}}]
        history = [user("x"), {"role": "assistant", "content": None, "tool_calls": calls}]
        history += [{"role": "tool", "tool_call_id": "call_1", "content": "r"}, user("y")]
        forced = {"type": "function", "function": {"name": "forced"}}
        answer = ask(served.url, "tools", history, policy="slim", tools=tools, tool_choice=forced)
        sent = orjson.loads(upstream.last.body)["tools"]
        assert [tool["function"]["name"] for tool in sent] == ["kept", "called", "forced"]
        before, after = (int(answer.headers[f"x-context-tokens-{when}"]) for when in ("before", "sent"))
        assert before > after  # tools that are left out count in the tokens before

        def left(session: str, policy: str = "slim") -> list[str]:
            assert ask(served.url, session, history, policy=policy, tools=tools).status_code == 200
            return [tool["function"]["name"] for tool in orjson.loads(upstream.last.body)["tools"]]

        assert left("early") == ["kept", "called"]
        assert left("watched", "watch") == [*names]
        data = json.loads(config.read_text())
        data["policies"]["slim"]["tools"]["remove"] = ["junk", "kept"]
        config.write_text(json.dumps(data))
        sessions = iter(range(10_000))
        until(
            lambda: all(left(f"late-{next(sessions)}") == ["called", "forced"] for _ in range(12)),
            "every worker has read the configuration again",
        )
        for _ in range(6):  # on any worker: the decision for a session stays
            assert left("early") == ["kept", "called"]
        assert get(served.url, f"/exchanges/{answer.headers['x-exchange-id']}/view")["tools"] == sent


def test_a_session_without_an_id_stays_on_its_side_of_a_share(
    tmp_path: Path, upstream: Upstream, store_url: str
) -> None:
    policies = {"some": {"share": 0.5}, "watch": {"share": 0.5, "mode": "observe"}, "rest": {}}
    config = config_file(tmp_path, upstream, store_url, policies=policies, responses={"state": "proxy"})

    def post(path: str, **body: Any) -> tuple[httpx.Response, tuple[str, str]]:
        answer = call(served.url, "POST", path, json={"model": "echo", **body})
        assert answer.status_code == 200, answer.text
        return answer, (answer.headers["x-session-id"], answer.headers["x-context-policy"])

    with Served(config, "--workers", "2").wait() as served:
        chosen = dict[str, str]()
        for number in range(12):
            said = f"a conversation that is number {number}"
            answer, first = post("/v1/chat/completions", messages=[user(said)])
            marked = {"type": "text", "text": said, "cache_control": {"type": "ephemeral"}}
            reply = answer.json()["choices"][0]["message"]
            talk = [{"role": "user", "content": [marked]}, reply, user("go on")]
            assert post("/v1/chat/completions", messages=talk)[1] == first
            answer, second = post("/v1/responses", input=said)
            for _ in range(2):
                answer, now = post("/v1/responses", input="go on", previous_response_id=answer.json()["id"])
                assert now == second
            chosen |= dict((first, second))
        assert len(set(chosen.values())) > 1
        for session, policy in chosen.items():
            assert get(served.url, f"/sessions/{session}/context")["policy"] == policy


def test_what_is_masked_is_nowhere_in_the_store(tmp_path: Path, upstream: Upstream, store_url: str) -> None:
    secret, word = "sk-abcdefghijklmnopqrstuvwx0123456789", "hunter2-correcthorse"
    config = config_file(
        tmp_path, upstream, store_url, store={"mask": ["keys", "hunter2-[a-z]+"]}, policies={"lean": TRIMS}
    )
    with Served(config, "--workers", "4").wait() as served:
        history: list[Any] = [{"role": "system", "content": f"Use {secret}."}]
        for turn in range(6):
            history.append(user(f"turn {turn}: {secret} {word} " + "word " * 80))
            answer = ask(served.url, "s", history)
            assert answer.status_code == 200
            assert secret.encode() in upstream.last.body  # the provider receives what the client sent
            said = answer.json()["choices"][0]["message"]
            assert secret in said["content"]
            history.append({"role": said["role"], "content": said["content"]})
        kinds = {row["kind"] for row in get(served.url, "/sessions/s/exchanges")["data"]}
        assert kinds == {"first", "resend"}  # the session is recognized by its content
        assert len(get(served.url, "/sessions/s")["branches"]) == 1
        answer = ask(served.url, "s", [user("and now?")], mode="append", policy="off")
        assert "masked" in answer.headers["x-context-warning"]
        assert secret.encode() not in upstream.last.body
        for path in ("/sessions/s", "/sessions/s/messages", "/sessions/s/exchanges", "/sessions/s/export"):
            text = call(served.url, "GET", path).text
            assert secret not in text
            assert word not in text
        assert re.search(r"\[masked:[0-9a-f]{12}\]", call(served.url, "GET", "/sessions/s/messages").text)
    for file in tmp_path.rglob("*"):
        if file.is_file() and file.suffix in {".db", ".db-wal", ".log"}:
            assert secret.encode() not in file.read_bytes(), file


def test_an_index_finds_texts_at_every_worker_and_forgets_with_the_session(
    tmp_path: Path, upstream: Upstream, store_url: str
) -> None:
    secret = "sk-abcdefghijklmnopqrstuvwx0123456789"
    file = config_file(tmp_path, upstream, store_url, store={"mask": ["keys"]})
    with Served(file).wait() as served:  # messages from before there is an index
        assert ask(served.url, "old", [user(f"the old parcel, 预算表, {secret}")]).status_code == 200
    config = config_file(tmp_path, upstream, store_url, store={"mask": ["keys"], "search": "index"})
    with Served(config, "--workers", "4").wait() as served:

        def found(words: str) -> set[str]:
            told = get(served.url, "/search", q=words)
            for _ in range(30):  # on a busy machine, a search may not get through everything in its second
                if told["searched"]["complete"]:
                    break
                told = get(served.url, "/search", q=words)
            assert told["searched"]["complete"]
            return {each["session"] for each in told["data"]}

        with ThreadPoolExecutor(4) as pool:
            names = [f"s{number}" for number in range(12)]
            assert all(pool.map(lambda name: ask(served.url, name, [user(f"parcel {name}, 预算")]).is_success, names))
            assert list(pool.map(found, ["parcel"] * 8)) == [{"old", *names}] * 8
        until(lambda: get(served.url, "/search", q="parcel")["searched"]["index"], "all is indexed")
        assert found("预算") == {"old", *names}
        assert found("预算表") == {"old"}
        assert found("PARCEL s7") == {"s7"}
        assert found("masked") == {"old"}
        assert found("abcdefghijklmnopqrstuvwx0123456789") == set()
        assert "The index named 26 messages" in call(served.url, "GET", "/ui/sessions?text=parcel").text
        looked = subprocess.check_output(  # noqa: S603 - our own
            [sys.executable, "-m", "proxy", "sessions", "search", "parcel", "s3", "--config", str(config)],
            text=True,
            env=environment(),
        )
        assert looked.splitlines()[-1] == "2 found by the index."
        assert call(served.url, "DELETE", "/sessions/s7").status_code in {200, 204}
        assert found("parcel") == {"old", *names} - {"s7"}
        assert found("s7") == set()


def test_without_content_ids_counts_and_receipts_are_kept_and_nothing_that_was_said(
    tmp_path: Path, upstream: Upstream, store_url: str
) -> None:
    drops = {"trigger": {"tokens": 900}, "target": {"tokens": 500}, "edits": [{"type": "drop_oldest"}]}
    config = config_file(
        tmp_path, upstream, store_url, store={"content": "none"}, policies={"lean": TRIMS, "drops": drops}
    )
    words = "plumbus"  # occurs in every message
    moved = dict[str, int]()
    tool = {"name": "look", "description": words, "parameters": {"type": "object", "title": words}}
    with Served(config, "--workers", "4").wait() as served:
        for policy in ("lean", "drops"):
            history: list[Any] = [{"role": "system", "content": f"You keep the {words}."}]
            kinds: list[str] = []
            for turn in range(8):
                new: list[Any] = [user(f"turn {turn}: {words} " + "word " * 80)]
                if turn % 2:
                    function = {"name": "look", "arguments": json.dumps({words: f"{words} {turn}"})}
                    calls = [{"id": f"call_{turn}", "type": "function", "function": function}]
                    new.append({"role": "assistant", "content": None, "tool_calls": calls})
                    new.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": f"{words} {turn}\n" * 60})
                history += new
                tools = [{"type": "function", "function": tool}]
                answer = ask(served.url, policy, history, policy=policy, tools=tools, metadata={"note": words})
                assert answer.status_code == 200, answer.text
                kinds.append(answer.headers["x-context-kind"])
                view = get(served.url, f"/exchanges/{answer.headers['x-exchange-id']}/view", diff="true")
                sent = orjson.loads(upstream.last.body)["messages"]
                assert words in json.dumps(sent[-1])  # the provider receives the text
                assert "not stored" not in json.dumps(sent)
                assert [each["role"] for each in view["messages"]] == [each["role"] for each in sent]
                assert view["content"] == "none"
                said = answer.json()["choices"][0]["message"]
                history.append({"role": said["role"], "content": said["content"]})
            assert kinds == ["first", *["resend"] * 7]  # on any worker
            receipts = get(served.url, f"/sessions/{policy}/exchanges")["data"]
            assert receipts[0]["tokens_sent"] < receipts[0]["tokens_before"]
            assert receipts[0]["edits"]
            moved[policy] = sum(row["cut"] is not None and row["cut"]["moved"] for row in receipts)
            assert len(get(served.url, f"/sessions/{policy}")["branches"]) == 1
        assert min(moved.values()) > 0
        check_nothing_is_told(served.url, words)
    for file in tmp_path.rglob("*"):
        if file.is_file() and file.suffix in {".db", ".db-wal", ".log"}:
            assert words.encode() not in file.read_bytes(), file


def check_nothing_is_told(base: str, words: str) -> None:
    """Check that each route that needs content says that there is none, and that `words` occur nowhere."""

    refused = ask(base, "lean", [user("and now?")], mode="append")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "content_not_stored")
    for path in ("/sessions/lean/context", "/ui/policies/lab?session=lean&policy=off"):
        assert call(base, "GET", path).status_code == 400
    assert call(base, "POST", "/sessions/lean/compact").status_code == 400
    found = get(base, "/search", q=words)
    assert found["data"] == []
    assert found["searched"]["not_stored"] == found["searched"]["messages"] > 0
    exported = call(base, "GET", "/sessions/lean/export")
    assert call(base, "POST", "/sessions/import?as=again", content=exported.content).status_code == 400
    paths = ["", "/messages", "/exchanges", "/export"]
    pages = ["/ui/sessions/lean", "/ui/sessions/drops.json?request=8", "/ui/cache.json", "/ui/sessions?text=plumbu"]
    for path in [*(f"/sessions/lean{path}" for path in paths), *pages]:
        answer = call(base, "GET", path)
        assert answer.status_code == 200, answer.text
        assert f"{words} " not in answer.text, path
        assert words not in answer.text, path
    assert "[content not stored: " in exported.text
    assert "[content not stored: " in call(base, "GET", "/ui/sessions/lean").text
