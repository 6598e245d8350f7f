"""Recorded conversations in all three APIs, under every edit, with reasoning that is bound to its prefix.

The upstream refuses nothing and drops reasoning only at a trim. Between two trims each request begins with the
previous one. What is stored is what was said.

    PALIMPSEST_TRAJECTORIES=FOLDER python -m pytest tests/e2e/test_dialect_replays.py

replays every `*.json` of a folder instead (`{messages, tools}` of chat completions each); it takes an hour for
seventy long ones.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.e2e.conftest import Serve
from tests.support.replay import Recording
from tests.support.server import Proxy
from tests.support.tongues import TONGUES, Tongue
from tests.support.upstream import Upstream

GIVEN = os.environ.get("PALIMPSEST_TRAJECTORIES")  # noqa: TID251 - a choice of whoever runs the tests
FOLDER = Path(GIVEN) if GIVEN else Path(__file__).parents[1] / "data" / "trajectories"
FEW = ("bfcl-multi_turn_base_0", "pydantic-images", "tau-airline-t00-r2")
FILES = [path for path in sorted(FOLDER.glob("*.json")) if path.stem in FEW or (GIVEN and path.stem != "manifest")]

SIZES: dict[str, Any] = {"trigger": {"tokens": 900}, "target": {"tokens": 600}, "keep": {"rounds": 1, "spans": 2}}
DROP = {"type": "drop_oldest"}
ARRIVAL = [{"type": "compact_tool_output", "over_tokens": 50}, {"type": "truncate_tool_output", "max_lines": 20}]
EDITS: dict[str, dict[str, Any]] = {
    "keep-tool-calls": {"edits": [{"type": "keep_tool_calls", "last": 2, "scope": "all"}]},
    "keep-rounds": {"edits": [{"type": "keep_rounds", "last": 1}]},
    "recent-window": {"edits": [{"type": "recent_window", "on_overflow": "stop"}]},
    "clear": {"edits": [{"type": "clear_tool_results", "keep": 1, "clear_inputs": True}]},
    "fold": {"edits": [{"type": "clear_tool_results", "keep": 1, "clear_inputs": True, "fold_calls": True}]},
    "clear-any-time": {"trim_at": "any", "edits": [{"type": "clear_tool_results", "keep": 1}, DROP]},
    "compact": {"edits": [{"type": "compact_tool_output", "over_tokens": 50}, {"type": "evict_images", "keep": 1}]},
    "truncate": {"edits": [{"type": "truncate_tool_output", "max_lines": 10, "max_bytes": 500}, DROP]},
    "arrival": {"on_arrival": ARRIVAL, "edits": [{"type": "deduplicate_results"}, DROP]},
    "agents": {"edits": [{"type": "digest_agent_calls", "keep": 1}, {"type": "drop_internal"}, DROP]},
    "statistics": {
        "edits": [
            {"type": "summarize", "mode": "statistics", "min_messages": 2, "min_new_messages": 1, "keep_rounds": 0},
            DROP,
        ]
    },
    "model": {
        "edits": [
            {"type": "summarize", "mode": "model", "min_messages": 2, "min_new_messages": 1, "keep_rounds": 0},
            DROP,
        ]
    },
    "every": {"trigger": {"every_request": True}, "edits": [{"type": "clear_tool_results", "keep": 1}]},
    "built-in": {},
}
WAYS = [
    (tongue, policy, mode)
    for place, tongue in enumerate(TONGUES)
    for number, policy in enumerate(EDITS)
    for mode in ("400", "drop")
    if GIVEN or (mode == "drop") == bool((place + number) % 2)  # half of them are enough by default
]
POLICIES = {name: {**SIZES, **policy} for name, policy in EDITS.items() if policy}


@pytest.fixture(scope="module")
def proxy(serve: Serve) -> Proxy:
    matched = {name: {**policy, "match": {"models": [f"*+{name}"]}} for name, policy in POLICIES.items()}
    models = [{"match": ("*",), "context_window": 4000, "prices": {"input": 2, "cached_read": 0.2, "output": 8}}]
    return serve(policies=matched, models=models, summarizer={"model": "summary:good", "background": False})


def presentable(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation in a form that every API accepts.

    No text is blank, call ids are unique, arguments are objects, instructions come first, the first message is the
    user's, and no reply follows another one.
    """
    found: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for place, message in enumerate(messages):
        role, content = message["role"], message.get("content")
        if role in {"system", "developer"} and any(each["role"] not in {"system", "developer"} for each in found):
            role = "user"
        if role == "assistant" and (not found or found[-1]["role"] in {"system", "developer", "assistant"}):
            found.append({"role": "user", "content": "(go on)"})
        if isinstance(content, list):
            known = [part for part in content if part["type"] in {"text", "image_url"}]
            content = [part for part in known if part["type"] != "text" or part["text"].strip()]
        elif content is not None and not content.strip():
            content = None
        if not content and not message.get("tool_calls"):
            content = "(empty)"
        made = {"role": role, "content": content}
        if role == "tool":
            made["tool_call_id"] = names[message["tool_call_id"]]
        if message.get("tool_calls"):
            made["tool_calls"] = [
                {**call, "id": f"call-{place}-{at}", "function": {**call["function"], "arguments": object_of(call)}}
                for at, call in enumerate(message["tool_calls"])
            ]
            names |= {call["id"]: f"call-{place}-{at}" for at, call in enumerate(message["tool_calls"])}
        found.append(made)
    return found


def object_of(call: dict[str, Any]) -> str:
    """Return the arguments of a call as the text of an object."""
    given: str = call["function"]["arguments"]
    try:
        return given if isinstance(orjson.loads(given or "{}"), dict) else orjson.dumps({"raw": given}).decode()
    except orjson.JSONDecodeError:
        return orjson.dumps({"raw": given}).decode()


def lead_of(entries: list[dict[str, Any]]) -> int:
    """Return how many entries are instructions, which are stored beside the history."""
    roles = [entry.get("role") for entry in entries]
    return next((at for at, role in enumerate(roles) if role not in {"system", "developer"}), len(roles))


def bare(value: Any) -> Any:
    """Return JSON without cache marks, which move. A text that became a part to carry a mark is a text again."""
    if isinstance(value, dict):
        return {name: bare(each) for name, each in value.items() if name != "cache_control"}
    if not isinstance(value, list):
        return value
    parts = [bare(each) for each in value]
    is_text = len(parts) == 1 and isinstance(parts[0], dict) and parts[0].keys() == {"type", "text"}
    return parts[0]["text"] if is_text else parts


REPLAYS = [
    pytest.param(path, *way, id=f"{path.stem[:40]}-{'-'.join(way)}")
    for place, path in enumerate(FILES)
    for number, way in enumerate(WAYS)
    if GIVEN or (place + number) % 2 == 0  # likewise: some recordings for each way, half of the ways for each
]


@pytest.mark.parametrize(("path", "api", "policy", "mode"), REPLAYS)
def test_a_recording(
    proxy: Proxy, upstream: Upstream, session: str, path: Path, api: str, policy: str, mode: str
) -> None:
    tongue = TONGUES[api]
    recording = Recording.read(path)
    recording = Recording(name=recording.name, messages=presentable(recording.messages), tools=recording.tools)
    stream = mode == "drop"
    recording = recording.streamable() if stream else recording
    said: list[dict[str, Any]] = list(recording.messages[: recording.lead])
    start = recording.lead
    # With older models, a reply in a tool loop must begin with thinking, even if it is stale.
    older = api == "messages" and mode == "400"
    fields: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": 1024}} if older else {}
    for turn in recording.replies:
        said += tongue.entries(recording.messages[start:turn])
        start = turn + 1
        upstream.load(session, [recording.messages[turn]])
        model = f"script:{session}+reason+prefix:{mode}+{policy}"
        answer = proxy.ask(tongue, session, said, model, stream=stream, tools=recording.tools, **fields)
        assert answer.status_code == 200, (turn, answer.text, upstream.last.refused)
        said += tongue.reply(answer.content, stream=stream)
    asked = [request for request in upstream.log if b"+prefix:" in request.body]
    receipts = proxy.exchanges(session)
    assert [request.refused for request in asked] == [None] * len(receipts)
    assert {receipt["kind"] for receipt in receipts[1:]} <= {"resend"}
    check_views(tongue, policy, [request.json for request in asked], receipts)
    moved = [receipt["cut"] is not None and receipt["cut"]["moved"] for receipt in receipts]
    dropped = [request.dropped_reasoning for request, moves in zip(asked, moved, strict=True) if not moves]
    assert not any(dropped)
    stored = proxy.messages(session)
    whole = said[recording.lead if tongue.name == "messages" else lead_of(said) :]
    assert [told(entry) for entry in stored] == [told(entry) for entry in whole]


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
def test_a_trim_that_is_refused_amid_a_tool_loop_waits_for_its_end(
    proxy: Proxy, upstream: Upstream, session: str, stream: bool
) -> None:
    """A model with an older name that still checks its thinking: after one refusal, no more is tried."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    model = f"claude-sonnet-4-5+script:{session}+reason+prefix:400+clear-any-time"
    said: list[dict[str, Any]] = []
    for turn in range(3):
        said.append({"role": "user", "content": f"question {turn}"})
        calls = [
            {"id": f"c{turn}-{at}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            for at in range(6)
        ]
        replies = [{"role": "assistant", "content": None, "tool_calls": [call]} for call in calls]
        upstream.load(session, [*replies, {"role": "assistant", "content": "Here it is."}])
        for call in [*calls, None]:
            thinking = {"type": "enabled", "budget_tokens": 1024}
            answer = proxy.ask(TONGUES["messages"], session, said, model, stream=stream, tools=tools, thinking=thinking)
            assert answer.status_code == 200, answer.text
            said += TONGUES["messages"].reply(answer.content, stream=stream)
            if call is not None:
                output = {"type": "tool_result", "tool_use_id": call["id"], "content": "many words " * 120}
                said.append({"role": "user", "content": [output]})
    assert sum(request.refused is not None for request in upstream.log) == 1
    moved = [place for place, row in enumerate(proxy.exchanges(session)) if row["cut"] and row["cut"]["moved"]]
    assert moved == [7, 14]  # with the next questions
    assert [told(entry) for entry in proxy.messages(session)] == [told(entry) for entry in said]


LOOK = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
THINKS: dict[str, Any] = {"type": "enabled", "budget_tokens": 1024}


def step_of(number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a reply that calls a tool, and its result."""
    call = {"id": f"c{number}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    output = {"type": "tool_result", "tool_use_id": f"c{number}", "content": "many words " * 120}
    return {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "user", "content": [output]}


def test_a_request_that_is_refused_either_way_says_nothing_of_trims_amid_a_tool_loop(
    proxy: Proxy, upstream: Upstream, session: str
) -> None:
    model = f"claude-sonnet-4-5+script:{session}+reason+prefix:drop+needs:magic word+clear-any-time"
    said: list[dict[str, Any]] = [{"role": "user", "content": "question"}]
    for number in range(6):
        reply, result = step_of(number)
        upstream.load(session, [reply])
        before = len(upstream.log)
        bad = proxy.ask(TONGUES["messages"], session, said, model, tools=LOOK, thinking=THINKS, system="Be brief.")
        assert bad.status_code == 400
        asked = len(upstream.log) - before
        assert ("and the original too" in bad.headers.get("x-context-warning", "")) is (asked == 2)
        fine = proxy.ask(TONGUES["messages"], session, said, model, tools=LOOK, thinking=THINKS, system="magic word")
        assert fine.status_code == 200, fine.text
        said += [*TONGUES["messages"].reply(fine.content, stream=False), result]
    rows = proxy.exchanges(session)
    refused = [row for row in rows if any("and the original too" in warning for warning in row["warnings"])]
    assert refused
    trims = [row for row in rows if row["status"] == "complete" and row["cut"] is not None and row["cut"]["moved"]]
    assert trims  # within the loop: the model was not mistaken for one that refuses this


def test_a_tool_loop_that_is_too_long_is_told_so_where_a_trim_of_it_is_refused(
    proxy: Proxy, upstream: Upstream, session: str
) -> None:
    model = f"script:{session}+reason+prefix:400+ctx:1500+clear-any-time"  # of a name that binds its loops
    said: list[dict[str, Any]] = [{"role": "user", "content": "question"}]
    number = 0
    while True:
        number += 1
        reply, result = step_of(number)
        upstream.load(session, [reply])
        before = len(upstream.log)
        answer = proxy.ask(TONGUES["messages"], session, said, model, tools=LOOK, thinking=THINKS)
        if answer.status_code != 200:
            break
        assert len(upstream.log) == before + 1
        said += [*TONGUES["messages"].reply(answer.content, stream=False), result]
    assert (answer.status_code, "maximum context length" in answer.text) == (400, True)
    assert "and the original too" in answer.headers["x-context-warning"]
    assert [bool(request.refused) for request in upstream.log[before:]] == [False, True]  # the first one is too long
    assert not any(row["cut"] and row["cut"]["moved"] for row in proxy.exchanges(session))


def told(entry: dict[str, Any]) -> bytes:
    """Return an entry without its empty fields."""
    return orjson.dumps({name: value for name, value in entry.items() if value}, option=orjson.OPT_SORT_KEYS)


def check_views(tongue: Tongue, policy: str, bodies: list[Any], receipts: list[dict[str, Any]]) -> None:
    """Check that between two trims each view begins with the previous one."""
    before: list[Any] = []
    for number, (body, receipt) in enumerate(zip(bodies, receipts, strict=True)):
        view = bare(body[tongue.listed])
        moved = receipt["cut"] is not None and receipt["cut"]["moved"]
        if not moved and policy != "every":
            assert view[: len(before)] == before, f"request {number} does not go on from the one before"
        before = view
