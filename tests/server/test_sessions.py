"""The sessions API on a running proxy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import orjson
import pytest

from proxy.dialects.chat.message import ChatMessage
from proxy.dialects.messages.message import MessagesMessage
from proxy.errors import StoreUnavailable
from proxy.pipeline import timestamp
from proxy.server.sessions import shown
from proxy.store import Store
from tests.e2e.conftest import Serve
from tests.support.server import Proxy
from tests.support.stores import empty_store
from tests.support.upstream import Upstream
from tests.support.waiting import until

ADMIN = {"authorization": "Bearer key-of-the-admin"}
POLICIES = {
    "lean": {
        "trigger": {"tool_calls": 3},
        "on_arrival": [{"type": "truncate_tool_output", "max_lines": 2, "direction": "head"}],
        "edits": [{"type": "keep_tool_calls", "last": 1, "scope": "all"}],
    },
    "all": {"match": {"models": ["none"]}, "edits": []},
}
WORDS = ("red", "grün", "蓝", "red", *["grey, of which there is more than anybody needs"] * 40)
LINES = "\n".join(f"line {number}: {word}" for number, word in enumerate(WORDS, 1))


@pytest.fixture(scope="module")
def proxy(serve: Serve) -> Proxy:
    return serve(policies=POLICIES, auth={"admin_key": "key-of-the-admin"})


@pytest.fixture(scope="module")
def keys(serve: Serve) -> Proxy:
    pairs = [{"key": "key-of-anne-0123", "tenant": "anne"}, {"key": "key-of-bert-0123", "tenant": "bert"}]
    return serve(auth={"mode": "keys", "keys": pairs, "admin_key": "key-of-the-admin"})


def refused(answer: httpx.Response, status: int, param: str | None) -> str:
    """Check that an answer refuses in OpenAI's shape; return its words."""
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), answer.text
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


def work(proxy: Proxy, session: str, results: list[str]) -> None:
    """Let a model call a tool once for each result, and answer at the end."""
    for number, text in enumerate(results):
        proxy.chat(session, f"question {number}", "tool:look")
        call = proxy.messages(session)[-1]["tool_calls"][0]["id"]
        proxy.chat(session, [{"role": "tool", "tool_call_id": call, "content": text}], "tool:look")


def pages(proxy: Proxy, path: str, limit: int, **headers: str) -> list[list[dict[str, Any]]]:
    found, after = [], None
    while True:
        query = {"limit": limit} | ({"after": after} if after else {})
        answer = proxy.client.get(path, params=query, headers=headers).json()
        found.append(answer["data"])
        if (after := answer["next"]) is None:
            return found


def test_pages_hold_every_session_once_the_newest_first(serve: Serve) -> None:
    proxy = serve()
    names = [f"s{number}" for number in range(7)]
    for name in names:
        proxy.chat(name, "a")
    proxy.chat("s3", "b")
    order = ["s3", *[name for name in reversed(names) if name != "s3"]]
    for limit, sizes in ((3, [3, 3, 1]), (7, [7]), (100, [7]), (6, [6, 1])):
        found = pages(proxy, "/sessions", limit)
        assert [len(page) for page in found] == sizes
        assert [row["id"] for page in found for row in page] == order
    row = proxy.get("/sessions", limit=1)["data"][0]
    assert (row["messages"], row["rounds"], row["requests"], row["finished"]) == (4, 2, 2, False)
    assert row["tokens"] > 0
    assert row["created_at"] < row["updated_at"]


@pytest.mark.parametrize("after", ["", "x", "1", "--1.a", "1e5.a", "٣.a", "9" * 30 + ".a", "1.\0"])
def test_a_cursor_that_is_none(proxy: Proxy, session: str, after: str) -> None:
    proxy.chat(session, "a")
    for path in ("/sessions", f"/sessions/{quote(session)}/exchanges"):
        answer = proxy.client.get(path, params={"after": after})
        assert "after" in refused(answer, 400, "after")


def test_the_administrator_lists_all_or_ones(keys: Proxy, session: str) -> None:
    for key in ("key-of-anne-0123", "key-of-bert-0123"):
        keys.chat(session, key, headers={"authorization": f"Bearer {key}"})
    both = [row for row in keys.client.get("/sessions", headers=ADMIN).json()["data"] if row["id"] == session]
    assert {row["tenant"] for row in both} == {"anne", "bert"}
    for tenant in ("anne", "bert"):
        (row,) = [
            row
            for row in keys.client.get(f"/sessions?tenant={tenant}", headers=ADMIN).json()["data"]
            if row["id"] == session
        ]
        assert row["tenant"] == tenant
        shown = keys.client.get(f"/sessions/{session}?tenant={tenant}", headers=ADMIN).json()
        assert shown["tenant"] == tenant
    assert keys.client.get("/sessions?tenant=carl", headers=ADMIN).json() == {"data": [], "next": None}
    refused(keys.client.get(f"/sessions/{session}", headers=ADMIN), 400, "tenant")
    refused(keys.client.get("/sessions?tenant=bert", headers={"authorization": "Bearer key-of-anne-0123"}), 403, None)
    deleted = keys.client.delete(f"/sessions/{session}?tenant=bert", headers=ADMIN)
    assert deleted.json() == {"id": session, "deleted": True}
    assert keys.client.get(f"/sessions/{session}", headers=ADMIN).json()["tenant"] == "anne"


@pytest.mark.parametrize("name", ["a/b", "100%", "a%2Fb", "会话", "a?b#c", "import", "..", " x "])
def test_every_route_finds_an_odd_name(proxy: Proxy, name: str) -> None:
    said = proxy.chat(None, "hello", headers={"x-session-id": quote(name, safe="")})
    if name == " x ":
        name = said.headers["x-session-id"].replace("%20", " ")
    path = "/sessions/" + quote(name, safe="").replace("..", "%2e%2e")
    assert proxy.get(path)["id"] == name
    if name == "..":
        assert proxy.get(path + "%7f")["id"] == name  # as clients ask that resolve dots
    for below in ("/messages", "/context", "/exchanges", "/export"):
        assert proxy.client.get(path + below).status_code == 200
    lines = proxy.client.get(path + "/export").text.splitlines()
    body = next(line["body"] for line in map(orjson.loads, lines) if line["record"] == "body")
    assert proxy.client.get(f"{path}/refs/{body[:16]}").status_code == 200
    assert proxy.client.delete(path).json()["id"] == name
    refused(proxy.client.get(path), 404, "session")


def test_branches_are_read_by_their_nodes(proxy: Proxy, session: str) -> None:
    first = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "echo: a"}]
    proxy.chat(session, first[:1])
    for text in ("b", "c"):
        proxy.chat(session, [*first, {"role": "user", "content": text}])
    shown = proxy.get(f"/sessions/{session}")
    assert [branch["depth"] for branch in shown["branches"]] == [4, 4]
    assert shown["head"] in {branch["head"] for branch in shown["branches"]}
    texts = set()
    for branch in shown["branches"]:
        data = proxy.get(f"/sessions/{session}/messages", branch=branch["head"])["data"]
        assert [message["content"] for message in data[:2]] == ["a", "echo: a"]
        texts.add(data[3]["content"])
    assert texts == {"echo: b", "echo: c"}
    assert proxy.messages(session)[-1]["content"] == "echo: c"
    proxy.chat(session + "-2", "another")
    other = proxy.get(f"/sessions/{session}-2")["head"]
    for branch in ("", "x", "\0", "f" * 40, other, shown["head"][:12]):
        refused(proxy.client.get(f"/sessions/{session}/messages", params={"branch": branch}), 404, "branch")


def test_what_is_known_of_each_message(proxy: Proxy, session: str) -> None:
    said = {"role": "user", "content": "a", "agent": "planner"}
    exchange = proxy.chat(session, [said], "echo", headers={"x-agent-name": "boss"}).headers["x-exchange-id"]
    asked, reply = proxy.get(f"/sessions/{session}/messages", meta=True)["data"]
    assert (asked["message"], asked["source"], reply["source"]) == (said, "client", "upstream")
    assert (asked["parent"], reply["parent"], reply["depth"]) == (None, asked["node"], 2)
    assert asked["exchange"] == reply["exchange"] == exchange
    assert (asked["agent"], reply["agent"]) == ("planner", "boss")
    assert asked["partial"] is reply["partial"] is False
    assert asked["tokens"] > 0
    plain = proxy.messages(session)
    assert plain == [asked["message"], reply["message"]]
    refused(proxy.client.get(f"/sessions/{session}/messages?meta=maybe"), 400, "meta")


def test_the_context_is_what_is_sent_next(proxy: Proxy, upstream: Upstream, session: str) -> None:
    system = {"role": "system", "content": "Be brief.", "agent": "planner"}
    proxy.chat(session, [system, {"role": "user", "content": "hi"}])
    work(proxy, session, ["one", "two", "three", LINES])
    before = proxy.client.get(f"/sessions/{session}/export").content
    shown = proxy.get(f"/sessions/{session}/context")
    assert proxy.client.get(f"/sessions/{session}/export").content == before
    assert (shown["policy"], shown["messages"][0]) == ("lean", {"role": "system", "content": "Be brief."})
    assert shown["tokens_sent"] < shown["tokens_before"]
    nodes = [row["node"] for row in proxy.get(f"/sessions/{session}/messages", meta=True)["data"]]
    assert {line["edit"] for line in shown["plan"]} == {"keep_tool_calls", "truncate_tool_output"}
    assert all(nodes[line["position"]] == line["node"] for line in shown["plan"])
    proxy.chat(session, "more")
    assert upstream.last.messages == [*shown["messages"], {"role": "user", "content": "more"}]


def test_the_context_under_another_policy(proxy: Proxy, session: str) -> None:
    work(proxy, session, [LINES, "two", "three", "four"])
    roles = [message["role"] for message in proxy.messages(session)]
    for policy, result in (("all", None), ("off", LINES)):
        shown = proxy.get(f"/sessions/{session}/context", policy=policy)
        assert (shown["policy"], shown["cut"]) == (policy, None)
        assert [message["role"] for message in shown["messages"]] == roles
        # What was decided at a result's arrival stays, whatever the policy is now; `off` knows none.
        assert (shown["messages"][2]["content"] == LINES) == (result is not None)
        assert (shown["tokens_sent"] == shown["tokens_before"]) == (policy == "off")
    for policy in ("", "none", "OFF", "\0"):
        answer = proxy.client.get(f"/sessions/{session}/context", params={"policy": policy})
        assert "lean" in refused(answer, 400, "policy")


def test_the_context_counts_the_tools_that_are_sent(serve: Serve, session: str) -> None:
    """The proxy's own are among them, those that the policy leaves out are not."""
    lean = {"trigger": {"tokens": 900}, "tools": {"remove": ["long"]}, "edits": [{"type": "drop_oldest"}]}
    proxy = serve(
        policies={"lean": {**lean, "target": {"tokens": 600}}},
        virtual_tools={"recall_context": True},
        tokens={"calibrate": False},
    )
    described = {"long": "a long story " * 300, "look": "looks"}
    tools = [
        {"type": "function", "function": {"name": name, "description": text, "parameters": {"type": "object"}}}
        for name, text in described.items()
    ]
    proxy.chat(session, "hi", "say:ok", tools=tools)
    now, told = proxy.get(f"/sessions/{session}/context"), proxy.exchanges(session)[-1]
    replied = proxy.get(f"/sessions/{session}/messages", meta=True)["data"][-1]["tokens"]
    assert told["own_tools"] == ["recall_context"]
    assert now["cut"] is None
    assert now["tokens_sent"] == told["tokens_sent"] + replied
    assert now["tokens_before"] == told["tokens_before"] + replied
    off = proxy.get(f"/sessions/{session}/context", policy="off")
    assert off["tokens_sent"] > 900


def test_the_context_of_a_session_without_messages(proxy: Proxy, session: str) -> None:
    proxy.chat(session, "a", "fault:500")
    shown = proxy.get(f"/sessions/{session}/context")
    assert (shown["messages"], shown["plan"], shown["cut"]) == ([], [], None)
    assert proxy.get(f"/sessions/{session}")["branches"] == []


@pytest.fixture(scope="module")
def ref(proxy: Proxy) -> tuple[str, str]:
    """A session, and the ref that stands in a view of it."""
    proxy.chat("refs", "look", "tool:look")
    call = proxy.messages("refs")[-1]["tool_calls"][0]["id"]
    proxy.chat("refs", [{"role": "tool", "tool_call_id": call, "content": LINES}])
    sent = proxy.get("/sessions/refs/context")["messages"][2]["content"]
    assert "grün" in sent
    assert "蓝" not in sent
    nodes = [orjson.loads(line) for line in proxy.client.get("/sessions/refs/export").text.splitlines()]
    body = next(line for line in nodes if line["record"] == "body" and line["data"].get("content") == LINES)
    return "refs", str(body["body"])


@pytest.mark.parametrize(
    ("query", "chosen"),
    [
        ({}, range(1, 45)),
        ({"lines": "1-44"}, range(1, 45)),
        ({"lines": "2-3"}, [2, 3]),
        ({"lines": "44-999999999"}, [44]),
        ({"lines": "45-99"}, []),
        ({"grep": "red$"}, [1, 4]),
        ({"grep": "蓝"}, [3]),
        ({"grep": "red", "lines": "2-9"}, [4]),
        ({"grep": "x"}, []),
        ({"grep": ""}, range(1, 45)),
    ],
)
def test_a_ref_gives_the_original(
    proxy: Proxy, ref: tuple[str, str], query: dict[str, str], chosen: Iterable[int]
) -> None:
    session, body = ref
    lines = LINES.split("\n")
    for name in (body, body[:12], f"ref_{body[:16]}"):
        shown = proxy.get(f"/sessions/{session}/refs/{name}", **query)
        assert (shown["ref"], shown["role"]) == (f"ref_{body[:16]}", "tool")
        assert shown["text"].split("\n") == ([lines[number - 1] for number in chosen] or [""])
        assert shown["numbers"] == (list(chosen) if "grep" in query else None)
        assert (shown["lines"], shown["bytes"]) == (44, len(LINES.encode()))
        assert shown["message"]["content"] == LINES


@pytest.mark.parametrize("lines", ["", "1", "a-b", "0-1", "3-2", "-1-2", "1-2-3", "1-" + "9" * 5000, "١-٣"])
def test_lines_that_are_none(proxy: Proxy, ref: tuple[str, str], lines: str) -> None:
    answer = proxy.client.get(f"/sessions/{ref[0]}/refs/{ref[1]}", params={"lines": lines})
    assert "lines=10-20" in refused(answer, 400, "lines")


@pytest.mark.parametrize("grep", ["(", "a{1000}{1000}", r"(?=x)", r"\1"])
def test_a_pattern_that_is_none(
    proxy: Proxy, ref: tuple[str, str], grep: str, capfd: pytest.CaptureFixture[str]
) -> None:
    answer = proxy.client.get(f"/sessions/{ref[0]}/refs/{ref[1]}", params={"grep": grep})
    assert "b'" not in refused(answer, 400, "grep")
    assert capfd.readouterr().err == ""


def test_a_ref_belongs_to_its_session(proxy: Proxy, ref: tuple[str, str], session: str) -> None:
    proxy.chat(session, "a")
    for owner, name in (
        (session, ref[1]),
        (ref[0], "f" * 16),
        (ref[0], ref[1][:7]),
        (ref[0], ref[1].upper()),
        (ref[0], ref[1] + "0"),
        (ref[0], "ref_"),
        (ref[0], "%00"),
    ):
        refused(proxy.client.get(f"/sessions/{owner}/refs/{name}"), 404, "ref")


def test_there_and_back_again(proxy: Proxy, upstream: Upstream, session: str) -> None:
    proxy.chat(session, [{"role": "system", "content": "S"}, {"role": "user", "content": "a"}])
    work(proxy, session, ["one", "two", "three", LINES])
    exported = proxy.client.get(f"/sessions/{session}/export")
    assert exported.headers["content-type"] == "application/x-ndjson"
    copy = proxy.client.post("/sessions/import", params={"as": f"{session}/2"}, content=exported.content)
    assert (copy.status_code, copy.json()["id"]) == (201, f"{session}/2")
    refused(proxy.client.post("/sessions/import", content=exported.content), 409, None)
    assert proxy.messages(f"{session}/2") == proxy.messages(session)
    original, copied = (proxy.get(f"/sessions/{quote(name, safe='')}") for name in (session, f"{session}/2"))
    for field in ("messages", "rounds", "tokens", "head", "instructions", "created_at"):
        assert copied[field] == original[field]
    proxy.chat(session, "more")
    sent = upstream.last.messages
    proxy.chat(None, "more", headers={"x-session-id": quote(f"{session}/2", safe="")})
    assert upstream.last.messages == sent
    assert proxy.client.delete(f"/sessions/{session}").status_code == 200
    refused(proxy.client.delete(f"/sessions/{session}"), 404, "session")
    assert proxy.client.post("/sessions/import", content=exported.content).status_code == 201
    assert len(proxy.messages(session)) == original["messages"]


@pytest.mark.anyio
async def test_a_log_that_could_not_be_emptied_is_emptied_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Path] = []

    def refuse(path: Path) -> bool:
        tries.append(path)
        if len(tries) == 1:
            raise StoreUnavailable("The store cannot be used.")
        return True

    monkeypatch.setattr("proxy.store.store.empty_log", refuse)
    store = await Store.open(empty_store(tmp_path / "own.db"))
    await store.delete("gone")
    with pytest.raises(StoreUnavailable):
        await store.forget_deleted()
    for _ in range(2):
        await store.forget_deleted()
    assert len(tries) == 2
    await store.close()


def test_what_is_deleted_leaves_the_files(
    serve: Serve, session: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.server.app._SWEEP_SECONDS", 0.1)
    monkeypatch.setattr("proxy.server.app._INDEX_SECONDS", 0.5)
    proxy = serve(store={"url": empty_store(tmp_path / "own.db"), "search": "index"})
    assert proxy.chat(session, "the parcel of Smithandjones").status_code == 200

    def is_there(word: str) -> bool:
        return any(word.encode() in file.read_bytes() for file in tmp_path.glob("own.db*"))

    until(lambda: is_there("smithandjones"), "it is indexed")
    assert proxy.client.delete(f"/sessions/{session}").status_code == 200
    until(lambda: not is_there(session) and not is_there("smithandjones"), "it is gone from all files")


def test_what_cannot_be_imported(serve: Serve, session: str) -> None:
    proxy = serve(server={"max_body_bytes": 100_000})
    proxy.chat(session, "a")
    lines = proxy.client.get(f"/sessions/{session}/export").text.splitlines()

    def send(content: Any, **query: str) -> httpx.Response:
        return proxy.client.post("/sessions/import", params=query, content=content)

    def changed(number: int, **fields: Any) -> str:
        return "\n".join(
            orjson.dumps(orjson.loads(line) | (fields if number == place else {})).decode()
            for place, line in enumerate(lines)
        )

    assert "nothing to import" in refused(send(b""), 400, None)
    assert "Line 2" in refused(send(lines[0] + "\n{"), 400, None)
    assert "Line 1" in refused(send(b"\xff\n"), 400, None)
    assert "Line 2" in refused(send(lines[0] + "\n[]"), 400, None)
    refused(send("\n".join(lines[1:])), 400, None)
    assert "format" in refused(send(changed(0, format=2), **{"as": "x"}), 400, "[0]")
    assert "head" in refused(send(changed(0, head="f" * 40), **{"as": "x"}), 400, "[0]")
    text = "\n".join(lines)
    changed_text = send(text.replace("echo: a", "echo: b"), **{"as": "x"})
    assert (changed_text.status_code, "was changed" in changed_text.text) == (400, True)
    for name in ("\0", "x" * 513, "\n"):
        refused(send(text, **{"as": name}), 400, "as")
    assert "max_body_bytes" in refused(send(b" " * 100_001), 413, None)

    def pieces() -> Any:
        for _ in range(11):
            yield b" " * 10_000

    assert "max_body_bytes" in refused(send(pieces()), 413, None)
    assert [row["id"] for row in proxy.get("/sessions")["data"]] == [session]


def test_the_administrator_says_whose_an_import_becomes(keys: Proxy, session: str) -> None:
    keys.chat(session, "a", headers={"authorization": "Bearer key-of-anne-0123"})
    exported = keys.client.get(f"/sessions/{session}/export", headers=ADMIN).content
    made = keys.client.post("/sessions/import?tenant=bert", content=exported, headers=ADMIN)
    assert (made.status_code, made.json()["tenant"]) == (201, "bert")
    answer = keys.client.post(
        "/sessions/import?tenant=bert", content=exported, headers={"authorization": "Bearer key-of-anne-0123"}
    )
    refused(answer, 403, None)
    refused(keys.client.post("/sessions/import", content=exported, headers=ADMIN), 400, "tenant")
    for wrong in ("%00", "", "%20bert", "a%0Ab"):
        refused(keys.client.post(f"/sessions/import?tenant={wrong}", content=exported, headers=ADMIN), 400, "tenant")


def test_times_are_iso_in_utc() -> None:
    assert timestamp(0) == "1970-01-01T00:00:00.000Z"
    assert timestamp(1_700_000_000_123) == "2023-11-14T22:13:20.123Z"


def test_the_summaries_of_a_session_are_told(serve: Serve, upstream: Upstream, session: str) -> None:
    summarize = {
        "type": "summarize",
        "mode": "statistics",
        "min_messages": 4,
        "min_new_messages": 2,
        "growth_ratio": 0,
        "keep_rounds": 1,
        "role": "system",
    }
    policy = {"trigger": {"messages": 8}, "keep": {"rounds": 1, "spans": 1}, "edits": [summarize]}
    proxy = serve(policies={"default": policy})
    proxy.chat(session, "hello")
    assert proxy.get(f"/sessions/{session}")["summaries"] == []
    for number in range(14):
        proxy.chat(session, f"question {number}: " + "what was said about it? " * 20)
    receipts = proxy.exchanges(session)
    made = [row["summary"] for row in receipts if row["cut"] is not None and row["cut"]["moved"]]
    told = proxy.get(f"/sessions/{session}")["summaries"]
    assert len(told) == len(made) > 1
    assert sorted(told, key=lambda one: one["summarized_until"], reverse=True) == told
    newest = told[0]
    assert upstream.last.json["messages"][0] == {"role": "system", "content": newest["summary"]}
    for one, receipt in zip(told, reversed(made), strict=True):
        shared = {"kind", "summarized_until", "summary_tokens", "message_count", "original_tokens", "generation"}
        assert {name: one[name] for name in shared} == {name: receipt[name] for name in shared}
        assert one["compression_rate"] == round(one["summary_tokens"] / one["original_tokens"], 3)
        assert one["model"] is None
        assert any(one["created_at"] == row["settled_at"] for row in receipts)


CALLS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("message", "sender", "text"),
    [
        ({"role": "user", "content": "hello"}, "user", "hello"),
        ({"role": "user", "content": "hello", "name": "anne"}, "anne", "hello"),
        ({"role": "user", "content": "hello", "agent": "planner"}, "planner", "hello"),
        ({"role": "assistant", "content": "hi"}, "writer", "hi"),
        ({"role": "assistant", "content": "hi", "agent": "coder"}, "coder", "hi"),
        ({"role": "user", "content": "<Agent: Scout> [调用工具 grep]"}, "Scout", "[调用工具 grep]"),
        ({"role": "user", "content": "<Scout> [调用工具 grep]"}, "Scout", "[调用工具 grep]"),
        ({"role": "user", "content": "<Agent: Scout> found it</Agent: Scout>"}, "Scout", "found it"),
        ({"role": "user", "content": "<智能体：侦察员>\n找到了</智能体：侦察员>\n"}, "侦察员", "找到了"),
        ({"role": "user", "content": "<Agent: Scout> a</b>"}, "Scout", "a</b>"),
        ({"role": "user", "content": "<div> what is this?"}, "user", "<div> what is this?"),
        ({"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image_url"}]}, "user", "see"),
        ({"role": "assistant", "content": "I look.", "tool_calls": CALLS}, "writer", "I look."),
        ({"role": "assistant", "content": None, "refusal": "Not that."}, "writer", "Not that."),
        ({"role": "assistant", "content": None, "audio": {"id": "a", "transcript": "Seven."}}, "writer", "Seven."),
    ],
)
def test_people_are_shown_clean_text_and_who_said_it(message: dict[str, Any], sender: str, text: str) -> None:
    assert shown(ChatMessage.of(message), "writer") == {"sender": sender, "text": text}


def test_people_are_shown_what_a_user_says_beside_results() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": "output"}
    asked = MessagesMessage.of({"role": "user", "content": [result, {"type": "text", "text": "Go on."}]})
    assert shown(asked) == {"sender": "user", "text": "Go on."}
    assert shown(MessagesMessage.of({"role": "user", "content": [result]})) is None


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "secret", "is_internal": True},
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "c", "content": "output"},
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "  "},
        {"role": "user", "content": "<Agent: Scout> </Agent: Scout>"},
    ],
)
def test_what_is_for_models_is_not_shown(message: dict[str, Any]) -> None:
    assert shown(ChatMessage.of(message)) is None


def test_a_million_spaces_take_no_time() -> None:
    """It goes on in one pass: with going back and forth it would take minutes."""
    for text in ("<a:" + " " * 10**6, " " * 10**6 + "<a", "<" + "a" * 10**6):
        assert shown(ChatMessage.of({"role": "user", "content": text})) == {"sender": "user", "text": text}


@pytest.mark.parametrize(
    ("call", "name", "words"),
    [
        ("/sessions?limt=5", "limt", "It can be: after, limit, min_tokens, model, since, sort, tenant, until."),
        ("/sessions/s?branch=x", "branch", "It can be: dialect, tenant."),
        ("/sessions/s/messages?brnch=x", "brnch", "It can be: after, branch, channel, dialect, limit, meta, tenant."),
        ("/sessions/s/exchanges?since=1", "since", "It can be: after, dialect, limit, tenant."),
        ("/exchanges/e?diff=true", "diff", "This call takes none."),
        ("/tokens/cache?all=1", "all", "This call takes none."),
        ("/healthz?verbose=1", "verbose", "This call takes none."),
        ("/readyz?verbose=1", "verbose", "This call takes none."),
    ],
)
def test_an_unknown_query_parameter_is_refused_with_those_that_are_known(
    proxy: Proxy, call: str, name: str, words: str
) -> None:
    told = refused(proxy.client.get(call), 400, name)
    assert told == f"Unknown query parameter '{name}'. {words}"


def test_below_v1_query_parameters_are_the_upstreams_business(proxy: Proxy) -> None:
    assert proxy.client.get("/v1/models?whatever=1").status_code == 200
