"""Eight rounds of one tool call each, three of them kept: what is stored and what is sent.

The figures are those of the system that `keep_tool_calls` reproduces: the calls of the current round do
not count, and nothing is ever taken from what is stored.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.conftest import Serve
from tests.support.server import Proxy
from tests.support.upstream import Upstream

CITIES = ("Tokyo", "Paris", "New York", "Berlin", "Sydney", "Cairo", "Lima", "London")
STORED = [1, 2, 3, 4, 5, 6, 7, 8]
IN_HISTORY = [0, 1, 2, 3, 4, 5, 6, 7]
SENT_FROM_HISTORY = [0, 1, 2, 3, 3, 3, 3, 3]
SENT_IN_ALL = [1, 2, 3, 4, 4, 4, 4, 4]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def proxy(serve: Serve) -> Proxy:
    edits = [{"type": "keep_tool_calls", "last": 3}]
    return serve(policies={"three": {"trigger": {"every_request": True}, "edits": edits}})


def results(messages: list[dict[str, Any]]) -> int:
    return sum(message["role"] == "tool" for message in messages)


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
@pytest.mark.parametrize("use", ["resend", "append"])
def test_the_table(proxy: Proxy, upstream: Upstream, session: str, use: str, stream: bool) -> None:
    said: list[dict[str, Any]] = []
    new: list[dict[str, Any]] = []
    table: list[tuple[int, int, int, int]] = []

    def ask(*messages: dict[str, Any]) -> dict[str, Any]:
        """Send, and return the reply as it was stored, in the form in which clients send it back."""
        said.extend(messages)
        sent = said if use == "resend" else list(messages)
        answer = proxy.chat(session, sent, f"script:{session}", stream=stream, tools=TOOLS)
        assert answer.status_code == 200, answer.text
        reply = {name: value for name, value in proxy.messages(session)[-1].items() if value}
        said.append(reply)
        return reply

    for number, city in enumerate(CITIES):
        call = {
            "id": f"c{number}",
            "type": "function",
            "function": {"name": "weather", "arguments": f'{{"q":"{city}"}}'},
        }
        answer = {"role": "assistant", "content": f"It is fine in {city}."}
        upstream.load(session, [{"role": "assistant", "content": None, "tool_calls": [call]}, answer])
        before = results(proxy.messages(session)) if number else 0
        asked = {"role": "user", "content": f"Weather in {city}?"}
        assert ask(asked)["tool_calls"] == [call]
        from_history = results(upstream.last.messages)
        new = [{"role": "tool", "tool_call_id": f"c{number}", "content": f"{city}: 20 degrees"}]
        assert ask(*new)["content"] == answer["content"]
        sent = upstream.last.messages
        # The current round goes whole, whatever becomes of the older ones.
        assert [m["role"] for m in sent[-3:]] == ["user", "assistant", "tool"]
        assert sent[-1] == new[0]
        assert sum(bool(m.get("tool_calls")) for m in sent) == results(sent)
        assert sum(m["role"] == "user" for m in sent) == number + 1
        table.append((results(proxy.messages(session)), before, from_history, results(sent)))

    assert [row[0] for row in table] == STORED
    assert [row[1] for row in table] == IN_HISTORY
    assert [row[2] for row in table] == SENT_FROM_HISTORY
    assert [row[3] for row in table] == SENT_IN_ALL
    assert all(request.refused is None for request in upstream.log)
    kept = {"role", "content", "tool_calls", "tool_call_id"}
    stored = [{k: v for k, v in m.items() if k in kept and v} for m in proxy.messages(session)]
    assert stored == [{k: v for k, v in m.items() if v} for m in said]
    kinds = [row["kind"] for row in proxy.exchanges(session)]
    assert kinds == ["first"] + [use] * 15
    assert proxy.exchanges(session)[-1]["edits"] == ["keep_tool_calls"]
