"""Receipts: what was asked, what was sent instead and why, and how it ended."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest

from tests.e2e.conftest import Serve
from tests.support.server import Proxy
from tests.support.upstream import Upstream

LONG = "\n".join(f"line {number} of something that goes on and on" for number in range(50))
POLICY = {
    "trigger": {"tool_calls": 3},
    "on_arrival": [{"type": "truncate_tool_output", "max_lines": 2}],
    "edits": [{"type": "keep_tool_calls", "last": 1, "scope": "all"}],
}


@pytest.fixture(scope="module")
def proxy(serve: Serve) -> Proxy:
    return serve(policies={"lean": POLICY})


def call(proxy: Proxy, session: str, result: str, model: str = "tool:look") -> dict[str, Any]:
    """Let the model call a tool, and give it the result; return the receipt of that."""
    proxy.chat(session, "look", model)
    asked = proxy.messages(session)[-1]["tool_calls"][0]["id"]
    proxy.chat(session, [{"role": "tool", "tool_call_id": asked, "content": result}], model)
    return proxy.exchanges(session)[-1]


def lines(receipt: dict[str, Any], edit: str) -> list[dict[str, Any]]:
    return [line for line in receipt["plan"] if line["edit"] == edit]


def test_many_receipts_are_sent_one_by_one(proxy: Proxy, session: str) -> None:
    for number in range(60):
        assert proxy.chat(session, f"{number}", headers={"x-session-mode": "append"}).status_code == 200
    answer = proxy.client.get(f"/sessions/{session}/exchanges?limit=55")
    assert (answer.status_code, "content-length" in answer.headers) == (200, False)
    told, pages, after = answer.json(), list[Any](), None
    for limit in (20, 20, 15):
        page = proxy.get(f"/sessions/{session}/exchanges", limit=limit, **({} if after is None else {"after": after}))
        pages, after = pages + page["data"], page["next"]
    assert told == {"data": pages, "next": after}
    rest = proxy.get(f"/sessions/{session}/exchanges", limit=55, after=after)
    assert (len(rest["data"]), rest["next"]) == (5, None)


def test_a_plain_exchange(proxy: Proxy, session: str) -> None:
    answer = proxy.chat(session, "hi", "echo", headers={"x-agent-name": "boss"}, temperature=0.5)
    shown = proxy.get(f"/exchanges/{answer.headers['x-exchange-id']}")
    assert proxy.get(f"/sessions/{session}/exchanges") == {"data": [shown], "next": None}
    asked, replied = (row["node"] for row in proxy.get(f"/sessions/{session}/messages", meta=True)["data"])
    expected = {
        "session": session,
        "tenant": "default",
        "status": "complete",
        "kind": "first",
        "policy": "lean",
        "model": "echo",
        "agent": "boss",
        "stream": False,
        "base": None,
        "nodes": [asked],
        "replies": [replied],
        "cut": None,
        "plan": [],
        "edits": [],
        "warnings": [],
        "finish_reasons": ["stop"],
        "upstream_status": 200,
        "error": None,
        "messages_before": 1,
        "messages_sent": 1,
    }
    assert {name: shown[name] for name in expected} == expected
    assert shown["usage"]["completion_tokens"] == 7
    assert set(shown["timings"]) == {"planned", "answered", "settled"}
    assert str(shown["tokens_sent"]) == answer.headers["x-context-tokens-sent"]
    assert shown["created_at"] <= shown["settled_at"]


def test_a_moved_cut_and_a_standing_one_tell_the_same(proxy: Proxy, session: str) -> None:
    for number in range(4):
        call(proxy, session, f"result {number}")
    proxy.chat(session, "and now?")
    everything = proxy.exchanges(session)
    moved = next(row for row in everything if row["cut"] is not None)
    assert moved["cut"]["moved"]
    assert moved["cut"]["fired"]
    standing = everything[everything.index(moved) + 1]
    assert (standing["cut"]["moved"], standing["cut"]["fired"]) == (False, "")
    assert standing["cut"]["node"] == moved["cut"]["node"]
    nodes = [row["node"] for row in proxy.get(f"/sessions/{session}/messages", meta=True)["data"]]
    assert nodes[moved["cut"]["position"] - 1] == moved["cut"]["node"]
    dropped = lines(moved, "keep_tool_calls")
    assert len(dropped) > 1
    # What one exchange decided message by message is a gap for those after it.
    gaps = lines(standing, "keep_tool_calls")
    keys = set(dropped[0])
    assert [{name: gap[name] for name in keys - {"tokens_before"}} for gap in gaps] == [
        {name: line[name] for name in keys - {"tokens_before"}}
        for line in dropped
        if line["position"] - 1 not in {other["position"] for other in dropped}
    ]
    inside = [position for gap in gaps for position in range(gap["position"], gap["stop"])]
    assert inside == [line["position"] for line in dropped]
    assert all(gap["messages"] == gap["stop"] - gap["position"] for gap in gaps)
    assert sum(gap["tokens_before"] for gap in gaps) == sum(line["tokens_before"] for line in dropped)
    for line in dropped:
        assert (nodes[line["position"]], line["action"], line["tokens_after"]) == (line["node"], "drop", 0)
        assert line["tokens_before"] > 0
        assert line["reason"]
    for row in (moved, standing):
        assert row["edits"] == ["keep_tool_calls"]
        saved = row["tokens_before"] - row["tokens_sent"]
        assert saved == sum(line["tokens_before"] - line["tokens_after"] for line in row["plan"])
        assert row["messages_before"] - row["messages_sent"] == len(dropped)
    assert [proxy.get(f"/exchanges/{row['id']}") for row in everything] == everything


def test_the_view_names_the_edit_that_took_each_message_away(proxy: Proxy, session: str) -> None:
    for number in range(4):
        call(proxy, session, f"result {number}")
    proxy.chat(session, "and now?")
    everything = proxy.exchanges(session)
    moved = next(place for place, row in enumerate(everything) if row["cut"] is not None)
    assert [row["cut"]["moved"] for row in everything[moved : moved + 2]] == [True, False]
    for row in everything[moved : moved + 2]:
        shown = proxy.get(f"/exchanges/{row['id']}/view", diff="true")["diff"]
        told = {(each["fate"], each["edit"]) for each in shown}
        assert told == {("dropped", "keep_tool_calls"), ("sent", None)}


def test_what_arrival_changed_is_told_each_time(proxy: Proxy, session: str) -> None:
    first = call(proxy, session, LONG)
    (line,) = lines(first, "truncate_tool_output")
    nodes = [row["node"] for row in proxy.get(f"/sessions/{session}/messages", meta=True)["data"]]
    assert (line["node"], line["action"]) == (nodes[2], "replace")
    assert 0 < line["tokens_after"] < line["tokens_before"]
    proxy.chat(session, "and now?")
    assert lines(proxy.exchanges(session)[-1], "truncate_tool_output") == [line]
    assert first["tokens_before"] - first["tokens_sent"] == line["tokens_before"] - line["tokens_after"]


@pytest.mark.parametrize(
    ("model", "status", "upstream_status"),
    [("fault:500", "failed", 500), ("fault:drop-before", "failed", None), ("fault:bad-json", "failed", 200)],
)
def test_a_failed_exchange_has_a_receipt_without_nodes(
    proxy: Proxy, session: str, model: str, status: str, upstream_status: int | None
) -> None:
    proxy.chat(session, "a")
    head = proxy.get(f"/sessions/{session}")["head"]
    proxy.chat(session, "b", model)
    shown = proxy.exchanges(session)[-1]
    assert (shown["status"], shown["upstream_status"], shown["base"]) == (status, upstream_status, head)
    assert (shown["nodes"], shown["replies"], shown["usage"]) == ([], [], None)
    assert shown["error"]
    assert proxy.get(f"/sessions/{session}")["head"] == head


def test_a_failed_exchange_that_would_have_moved_the_cut(proxy: Proxy, session: str) -> None:
    for number in range(3):
        call(proxy, session, f"result {number}")
    asked = call(proxy, session, "result", "tool:look")
    assert asked["status"] == "complete"
    before = proxy.get(f"/sessions/{session}/context")
    proxy.chat(session, "more", "fault:500")
    failed = proxy.exchanges(session)[-1]
    assert failed["status"] == "failed"
    assert {line["edit"] for line in failed["plan"]} == {"keep_tool_calls"}
    assert all(line["node"] for line in failed["plan"])
    assert proxy.get(f"/sessions/{session}/context") | {"model": before["model"]} == before


@pytest.mark.parametrize(
    ("edit", "fate", "incomplete"),
    [
        ({"type": "keep_rounds", "last": 1}, "dropped", False),
        ({"type": "summarize", "mode": "statistics", "min_messages": 2, "keep_rounds": 1}, "summarised", True),
        ({"type": "clear_tool_results", "keep": 0}, "shortened", True),
    ],
)
def test_a_failed_exchange_shows_what_its_trim_did(
    serve: Serve, upstream: Upstream, session: str, edit: dict[str, Any], fate: str, incomplete: bool
) -> None:
    """Its cut is not stored: nothing of it became a node."""
    lean = {"trigger": {"messages": 6}, "keep": {"rounds": 1}, "edits": [edit]}
    proxy = serve(policies={"lean": lean, "watching": {**lean, "mode": "observe", "match": {"models": ["none"]}}})
    said: list[dict[str, Any]] = []
    for number in range(5):
        asked = {"id": f"c{number}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        said.append({"role": "user", "content": f"Question {number}. " + "word " * 60})
        said.append({"role": "assistant", "content": None, "tool_calls": [asked]})
        said.append({"role": "tool", "tool_call_id": f"c{number}", "content": "plain words and no values " * 60})
    said += [{"role": "assistant", "content": "So."}, {"role": "user", "content": "And?"}]
    answer = proxy.chat(session, said, "fault:500")
    assert answer.status_code == 500
    view = proxy.get(f"/exchanges/{answer.headers['x-exchange-id']}/view", diff="true")
    assert ("incomplete" in view, fate in {each["fate"] for each in view["diff"]}) == (incomplete, True)
    if not incomplete:
        assert view["messages"] == upstream.last.messages
    watched = proxy.chat(f"{session}-2", said, "fault:500", headers={"x-context-policy": "watching"})
    assert proxy.get(f"/exchanges/{watched.headers['x-exchange-id']}/view")["messages"] == said
    kept = {"sent", "shortened"}
    assert (
        len(view["messages"]) == sum(each["fate"] in kept for each in view["diff"]) < len(said) + (fate == "shortened")
    )


@pytest.mark.parametrize("reasoning", ["auto", "drop"])
def test_a_reply_that_the_client_sends_back_whole_is_shown_as_it_was_sent(
    serve: Serve, upstream: Upstream, session: str, reasoning: str
) -> None:
    proxy = serve(policies={"default": {}}, upstream={"reasoning": reasoning})
    said: list[dict[str, Any]] = [{"role": "user", "content": "Why?"}]
    for number in range(2):
        reply = proxy.chat(session, said, "reason").json()["choices"][0]["message"]
        assert {"refusal", "reasoning_content"} <= set(reply)
        said += [reply, {"role": "user", "content": f"and then {number}"}]
    answer = proxy.chat(session, said, "reason")
    assert answer.headers["x-context-kind"] == "resend"
    view = proxy.get(f"/exchanges/{answer.headers['x-exchange-id']}/view", diff="true")
    assert view["messages"] == upstream.last.messages == said
    assert [each["sent"] for each in view["diff"]] == said
    proxy.chat(session, "more", "reason", headers={"x-session-mode": "append"})
    appended = proxy.exchanges(session)[-1]["id"]
    assert proxy.get(f"/exchanges/{appended}/view")["messages"] == upstream.last.messages != said


@pytest.mark.parametrize("policy", ["tight", "off"])
def test_the_view_of_a_window_begins_where_the_client_began(
    serve: Serve, upstream: Upstream, session: str, policy: str
) -> None:
    proxy = serve(policies={"tight": {"trigger": {"messages": 5}, "edits": [{"type": "keep_rounds", "last": 1}]}})
    headers = {"x-context-policy": policy}
    said: list[dict[str, Any]] = []
    for number in range(12):
        said.append({"role": "user", "content": f"question {number}"})
        asked = [{"role": "system", "content": "Be brief."}, *said[-7:]]
        answer = proxy.chat(session, asked, headers=headers)
        said.append(answer.json()["choices"][0]["message"])
        shown = proxy.get(f"/exchanges/{answer.headers['x-exchange-id']}/view", diff="true")
        assert shown["messages"] == upstream.last.messages
        sent = [each["original"] for each in shown["diff"] if each["fate"] == "sent"]
        assert sent == [each for each in upstream.last.messages if each["role"] != "system"]
        left = max(0, 2 * number - 6)
        told = [(each["fate"], each["edit"], each["reason"]) for each in shown["diff"][:left]]
        assert told == [("dropped", None, "the client left it out")] * left
    rows = proxy.exchanges(session)[4:]
    assert [row["kind"] for row in rows] == ["windowed"] * 8
    assert any(row["edits"] for row in rows) == (policy == "tight")


def test_the_view_of_a_window_holds_what_other_agents_said(serve: Serve, upstream: Upstream, session: str) -> None:
    proxy = serve(policies={"default": {"agents": "merge"}})
    said: list[dict[str, Any]] = []
    for number in range(8):
        said.append({"role": "user", "content": f"question {number}"})
        answer = proxy.chat(session, said[-5:], headers={"x-agent-name": ["anne", "bob"][number // 2 % 2]})
        said.append(answer.json()["choices"][0]["message"])
        shown = proxy.get(f"/exchanges/{answer.headers['x-exchange-id']}/view")
        assert shown["messages"] == upstream.last.messages
    assert len(upstream.last.messages) > 5
    assert proxy.exchanges(session)[-1]["kind"] == "windowed"


def test_pages_hold_every_exchange_once_the_newest_first(proxy: Proxy, session: str) -> None:
    ids = [proxy.chat(session, str(number)).headers["x-exchange-id"] for number in range(5)]
    proxy.chat(session + "-2", "another")
    found: list[str] = []
    after: str | None = None
    sizes = []
    while True:
        query = {"limit": 2} | ({"after": after} if after else {})
        page = proxy.get(f"/sessions/{quote(session)}/exchanges", **query)
        found += [row["id"] for row in page["data"]]
        sizes.append(len(page["data"]))
        if (after := page["next"]) is None:
            break
    assert (found, sizes) == (ids[::-1], [2, 2, 1])


@pytest.mark.parametrize("name", ["none", "exc_", "%00", "a%2Fb", "%ff", "exc_" + "0" * 500])
def test_an_exchange_that_is_none(proxy: Proxy, name: str) -> None:
    answer = proxy.client.get(f"/exchanges/{name}")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (404, "exchange", "not_found")


def test_one_under_way_has_a_receipt_too(proxy: Proxy, upstream: Upstream, session: str) -> None:
    body = {"model": "long:10+gate", "messages": [{"role": "user", "content": "a"}], "stream": True}
    headers = {"x-session-id": session}
    with proxy.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        pieces = answer.iter_raw()
        next(pieces)
        shown = proxy.get(f"/exchanges/{answer.headers['x-exchange-id']}")
        assert (shown["status"], shown["settled_at"], shown["plan"]) == ("pending", None, [])
        upstream.gate.set()
        assert b"[DONE]" in b"".join(pieces)
    settled = proxy.exchanges(session)[0]
    assert settled["status"] == "complete"
    assert set(settled) == set(shown)


def test_a_receipt_is_as_long_as_what_is_sent(serve: Serve, session: str) -> None:
    tight = {"trigger": {"messages": 10}, "target": {"tokens": 60}, "edits": [{"type": "drop_oldest"}]}
    proxy = serve(policies={"tight": tight})
    past = [
        {"role": role, "content": f"{role} {number} says this and that"}
        for number in range(300)
        for role in ("user", "assistant")
    ]
    proxy.chat(session, [*past, {"role": "user", "content": "and now?"}])
    for number in range(20):
        proxy.chat(session, f"more {number}, as ever", headers={"x-session-mode": "append"})
    first, *later = proxy.exchanges(session)
    assert first["cut"]["moved"]
    assert len(first["plan"]) > 500
    assert sum(row["cut"]["moved"] for row in later) > 1
    nodes = [row["node"] for row in proxy.get(f"/sessions/{session}/messages", meta=True)["data"]]
    for row in later:
        gap, *own = row["plan"]
        assert (gap["position"], gap["node"], gap["action"]) == (0, nodes[0], "drop")
        assert gap["messages"] == gap["stop"] > 500
        assert not any("messages" in line for line in own)
        assert len(own) < 20
        assert all(nodes[line["position"]] == line["node"] for line in own)
        missing = gap["messages"] + sum(line["action"] == "drop" for line in own)
        assert row["messages_before"] - row["messages_sent"] == missing
        saved = sum(line["tokens_before"] - line["tokens_after"] for line in row["plan"])
        assert row["tokens_before"] - row["tokens_sent"] == saved
    shown = proxy.get(f"/sessions/{session}/context")
    assert len(shown["plan"]) + len(shown["messages"]) == len(nodes)


def test_receipts_of_several_branches_name_the_messages_of_their_own(proxy: Proxy, session: str) -> None:
    for number in range(4):
        call(proxy, session, f"result {number}")
    past = proxy.messages(session)
    for text in ("b", "c"):
        asked = [*past, {"role": "user", "content": text}]
        proxy.chat(session, asked)
        proxy.chat(session, [*asked, *proxy.messages(session)[-1:], {"role": "user", "content": "on"}])
    rows = [row for row in proxy.exchanges(session) if row["kind"] in {"resend", "rewind"}]
    assert [row["kind"] for row in rows] == ["resend", "resend", "rewind", "resend"]
    for row in rows:
        path = proxy.get(f"/sessions/{session}/messages", meta=True, branch=row["replies"][0])["data"]
        assert row["plan"]
        assert all(path[line["position"]]["node"] == line["node"] for line in row["plan"])


TWICE = {"type": "truncate_tool_output", "max_bytes": 400}
TOLD: dict[str, dict[str, Any]] = {
    "clear and drop": {
        "target": {"tokens": 700},
        "edits": [{"type": "clear_tool_results", "keep": 1}, {"type": "drop_oldest"}],
    },
    "cut twice": {
        "target": {"tokens": 900},
        "on_arrival": [{**TWICE, "max_bytes": 800}],
        "edits": [
            TWICE,
            {**TWICE, "max_bytes": 200, "when": {"messages": 16}},
            {"type": "clear_tool_results", "keep": 1},
            {"type": "drop_oldest"},
        ],
    },
    "sum up": {
        "target": {"tokens": 900},
        "edits": [
            {"type": "clear_tool_results", "keep": 1},
            {
                "type": "summarize",
                "mode": "statistics",
                "min_messages": 4,
                "min_new_messages": 2,
                "growth_ratio": 0,
                "keep_rounds": 1,
            },
        ],
    },
    "point back": {"target": {"tokens": 900}, "edits": [{"type": "deduplicate_results"}, {"type": "drop_oldest"}]},
}


@pytest.mark.parametrize("append", [False, True], ids=["resend", "append"])
@pytest.mark.parametrize("told", TOLD)
def test_the_lines_of_a_receipt_add_up_whatever_was_done_before(
    serve: Serve, session: str, told: str, append: bool
) -> None:
    policy = {"trigger": {"tokens": 1_500}, "keep": {"rounds": 1, "spans": 1}, **TOLD[told]}
    proxy = serve(policies={"default": policy}, tokens={"calibrate": False})
    said: list[dict[str, Any]] = []
    moves = overtaken = 0
    for number in range(24):
        # Each third result is as the one before it; rounds have two calls.
        result = f"result {number - (number % 3 == 2)}\n{LONG[: 700 + 80 * (number % 5)]}"
        function = {"name": "look", "arguments": "{}"}
        new: list[Any] = [{"role": "user", "content": f"question {number}"}] if number % 2 == 0 else []
        called: dict[str, Any] = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": f"c{number}", "type": "function", "function": function}],
        }
        new += [called, {"role": "tool", "tool_call_id": f"c{number}", "content": result}]
        said += new
        headers = {"x-session-mode": "append" if append else "full"}
        reply = proxy.chat(session, new if append else said, "say:ok", headers=headers)
        assert reply.status_code == 200, reply.text
        said.append({"role": "assistant", "content": "ok"})
    for row in proxy.exchanges(session):
        summed = row["summary"]["summary_tokens"] if row["summary"] is not None else 0
        freed = sum(line["tokens_before"] - line["tokens_after"] for line in row["plan"])
        assert row["tokens_before"] - row["tokens_sent"] == freed - summed
        assert all(line["node"] and line["reason"] and line["edit"] for line in row["plan"])
        if row["cut"] is not None and row["cut"]["moved"]:
            moves += 1
            dropped = {line["position"] for line in row["plan"] if line["action"] == "drop"}
            overtaken += any(line["position"] in dropped for line in row["plan"] if line["action"] == "replace")
    assert moves > 1
    assert overtaken or told == "point back"
