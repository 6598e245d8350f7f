"""Recorded conversations in all three APIs, under every edit, with reasoning that is bound to its prefix.

Upstream refuses nothing, drops no reasoning but at a trim, and between two trims each request begins with the one
before. What is stored is what was said.

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
    if GIVEN or (mode == "drop") == bool((place + number) % 2)  # half of them will do for every day
]
POLICIES = {name: {**SIZES, **policy} for name, policy in EDITS.items() if policy}


@pytest.fixture(scope="module")
def proxy(serve: Serve) -> Proxy:
    matched = {name: {**policy, "match": {"models": [f"*+{name}"]}} for name, policy in POLICIES.items()}
    models = [{"match": ("*",), "context_window": 4000, "prices": {"input": 2, "cached_read": 0.2, "output": 8}}]
    return serve(policies=matched, models=models, summarizer={"model": "summary:good", "background": False})


def presentable(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation as every API takes it.

    No text is blank, no call has the id of another one, arguments are objects, instructions come first, a user
    begins, and no reply follows another one.
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
    """Return JSON without marks for the cache, which move."""
    if isinstance(value, dict):
        return {name: bare(each) for name, each in value.items() if name != "cache_control"}
    return [bare(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("api", "policy", "mode"), WAYS)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem[:40])
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
    for turn in recording.replies:
        said += tongue.entries(recording.messages[start:turn])
        start = turn + 1
        upstream.load(session, [recording.messages[turn]])
        model = f"script:{session}+reason+prefix:{mode}+{policy}"
        answer = proxy.ask(tongue, session, said, model, stream=stream, tools=recording.tools)
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


def told(entry: dict[str, Any]) -> bytes:
    """Return what an entry says, without what is empty in it."""
    return orjson.dumps({name: value for name, value in entry.items() if value}, option=orjson.OPT_SORT_KEYS)


def check_views(tongue: Tongue, policy: str, bodies: list[Any], receipts: list[dict[str, Any]]) -> None:
    """Between two trims each view begins with the one before."""
    before: list[Any] = []
    for number, (body, receipt) in enumerate(zip(bodies, receipts, strict=True)):
        view = bare(body[tongue.listed])
        moved = receipt["cut"] is not None and receipt["cut"]["moved"]
        if not moved and policy != "every":
            assert view[: len(before)] == before, f"request {number} does not go on from the one before"
        before = view
