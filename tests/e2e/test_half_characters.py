"""Half of an emoji (a lone surrogate), escaped in the JSON of tool output or arguments, fails no request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.conftest import Serve
from tests.support.server import Proxy
from tests.support.upstream import Upstream

HALF = r"abc\ud83d"
POLICIES: dict[str, Any] = {
    "cleared": {
        "trigger": {"messages": 10},
        "edits": [{"type": "clear_tool_results", "keep": 1, "clear_inputs": True}],
    },
    "summed-up": {
        "trigger": {"messages": 10},
        "edits": [{"type": "summarize", "mode": "statistics", "min_messages": 4, "keep_rounds": 1}],
    },
}


@pytest.fixture(scope="module")
def proxy(serve: Serve) -> Proxy:
    return serve(policies=POLICIES)


def talk(rounds: int) -> list[dict[str, Any]]:
    """Return rounds in which every text and the arguments contain half an emoji."""
    messages: list[dict[str, Any]] = []
    for at in range(rounds):
        arguments = f'{{"n":1.10,"path":"{HALF}","text":"{"x y z " * 60}"}}'
        call = {"id": f"c{at}", "type": "function", "function": {"name": "read", "arguments": arguments}}
        result = f'{{"name":"party {HALF}","id":"Z-{at}77","text":"{"some words here " * 60}"}}'
        messages += [
            {"role": "user", "content": f'{{"note":"{HALF}-{at}x"}}'},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{at}", "content": result},
            {"role": "assistant", "content": f'{{"id":"{HALF}-1y"}}'},
        ]
    return [*messages, {"role": "user", "content": f"go on {HALF}"}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_half_an_emoji(proxy: Proxy, upstream: Upstream, session: str, policy: str, stream: bool) -> None:
    for rounds in (6, 9):  # the second one continues the stored history of the first
        messages = talk(rounds)
        answer = proxy.chat(session, messages, "say:fine", stream=stream, headers={"x-context-policy": policy})
        assert answer.status_code == 200, answer.text
        sent = json.dumps(upstream.last.messages)
        if policy == "cleared":
            assert "[cleared " in sent
            assert "Z-077" in sent
            cleared = upstream.last.messages[1]["tool_calls"][0]["function"]["arguments"]
            assert cleared.startswith(f'{{"n":1.10,"path":"{HALF}","text":"[cleared ')
        else:
            assert "Archived Session Summary" in sent
        edits = proxy.exchanges(session)[-1]["edits"]
        assert edits == [POLICIES[policy]["edits"][0]["type"]]
    stored = [message.get("content") for message in proxy.messages(session)]
    assert talk(9)[2]["content"] in stored
