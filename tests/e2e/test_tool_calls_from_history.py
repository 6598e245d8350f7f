"""Eight rounds of one tool call each, three of them kept: what is stored and what is sent.

The figures are those of the system that examples/policies/tool-calls-from-history.yaml reproduces: the calls
of the current round do not count, and stored messages are never removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.examples import serving
from tests.support.server import Proxy
from tests.support.tongues import TONGUES, Tongue
from tests.support.upstream import Upstream

CITIES = ("Tokyo", "Paris", "New York", "Berlin", "Sydney", "Cairo", "Lima", "London")
STORED = [1, 2, 3, 4, 5, 6, 7, 8]
IN_HISTORY = [0, 1, 2, 3, 4, 5, 6, 7]
SENT_FROM_HISTORY = [0, 1, 2, 3, 3, 3, 3, 3]
SENT_IN_ALL = [1, 2, 3, 4, 4, 4, 4, 4]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def proxy(provider: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with serving("tool-calls-from-history", provider, tmp_path_factory.mktemp("store")) as served:
        yield served


def results(messages: list[dict[str, Any]]) -> int:
    return sum(message["role"] == "tool" for message in messages)


@pytest.mark.parametrize("tongue", TONGUES.values(), ids=TONGUES)
@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
@pytest.mark.parametrize("use", ["resend", "append"])
def test_the_table(proxy: Proxy, upstream: Upstream, session: str, use: str, stream: bool, tongue: Tongue) -> None:
    said: list[dict[str, Any]] = []
    new: list[dict[str, Any]] = []
    table: list[tuple[int, int, int, int]] = []

    def ask(*messages: dict[str, Any]) -> dict[str, Any]:
        """Send messages; return the reply in the form in which clients send it back."""
        said.extend(messages)
        sent = said if use == "resend" else list(messages)
        answer = proxy.ask(tongue, session, sent, f"script:{session}", stream=stream, tools=TOOLS)
        assert answer.status_code == 200, answer.text
        reply = {name: value for name, value in tongue.said(answer.content, stream=stream).items() if value}
        said.append(reply)
        return reply

    def stored() -> list[dict[str, Any]]:
        return [{k: v for k, v in m.items() if v} for m in tongue.told(proxy.messages(session))]

    for number, city in enumerate(CITIES):
        call = {
            "id": f"c{number}",
            "type": "function",
            "function": {"name": "weather", "arguments": f'{{"q":"{city}"}}'},
        }
        answer = {"role": "assistant", "content": f"It is fine in {city}."}
        upstream.load(session, [{"role": "assistant", "content": None, "tool_calls": [call]}, answer])
        before = results(stored()) if number else 0
        asked = {"role": "user", "content": f"Weather in {city}?"}
        assert ask(asked)["tool_calls"] == [call]
        from_history = results(upstream.last.chat)
        new = [{"role": "tool", "tool_call_id": f"c{number}", "content": f"{city}: 20 degrees"}]
        assert ask(*new)["content"] == answer["content"]
        sent = upstream.last.chat
        # The current round is always sent whole.
        assert [m["role"] for m in sent[-3:]] == ["user", "assistant", "tool"]
        assert sent[-1] == new[0]
        assert sum(bool(m.get("tool_calls")) for m in sent) == results(sent)
        assert sum(m["role"] == "user" for m in sent) == number + 1
        table.append((results(stored()), before, from_history, results(sent)))

    assert [row[0] for row in table] == STORED
    assert [row[1] for row in table] == IN_HISTORY
    assert [row[2] for row in table] == SENT_FROM_HISTORY
    assert [row[3] for row in table] == SENT_IN_ALL
    assert all(request.refused is None for request in upstream.log)
    kept = {"role", "content", "tool_calls", "tool_call_id"}
    assert [{k: v for k, v in m.items() if k in kept} for m in stored()] == [
        {k: v for k, v in m.items() if k in kept and v} for m in said
    ]
    kinds = [row["kind"] for row in proxy.exchanges(session)]
    assert kinds == ["first"] + [use] * 15
    assert proxy.exchanges(session)[-1]["edits"] == ["keep_tool_calls"]


def call(*ids: str, text: str | None = None) -> dict[str, Any]:
    """Return an assistant message that calls the tool once for each id."""
    function = {"name": "weather", "arguments": "{}"}
    calls = [{"id": each, "type": "function", "function": function} for each in ids]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def result(identity: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": identity, "content": f"what {identity} found"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


NOW = [user("and now?"), call("n1", "n2", "n3", "n4"), *map(result, ("n1", "n2", "n3", "n4"))]
"""A current round with more calls than are kept of all other rounds."""


@pytest.mark.parametrize(
    ("history", "kept"),
    [
        pytest.param(
            [user("q"), call("a", "b", "c", "d"), *map(result, "abcd"), said("so")],
            [user("q"), call("b", "c", "d"), *map(result, "bcd"), said("so")],
            id="of parallel calls those that are kept",
        ),
        pytest.param(
            [user("q"), call("a", text="I look"), result("a"), call("b", "c", "d"), *map(result, "bcd")],
            [user("q"), said("I look"), call("b", "c", "d"), *map(result, "bcd")],
            id="the text of a message whose calls are gone",
        ),
        pytest.param(
            [user("q"), call("a"), result("a"), said("so"), call("b", "c", "d"), *map(result, "bcd")],
            [user("q"), said("so"), call("b", "c", "d"), *map(result, "bcd")],
            id="nothing of a message that held no more than calls",
        ),
        pytest.param(
            [user("q"), call("a", "b", "c"), *map(result, "abc"), said("so"), user("thanks"), said("oh")],
            [user("q"), call("a", "b", "c"), *map(result, "abc"), said("so"), user("thanks"), said("oh")],
            id="all, where they are few enough",
        ),
    ],
)
def test_what_is_left_of_the_history(
    proxy: Proxy, upstream: Upstream, session: str, history: list[dict[str, Any]], kept: list[dict[str, Any]]
) -> None:
    answer = proxy.chat(session, [*history, *NOW], tools=TOOLS)
    assert answer.status_code == 200, answer.text
    sent = [{k: v for k, v in m.items() if v} for m in upstream.last.messages]
    assert sent == [{k: v for k, v in m.items() if v} for m in [*kept, *NOW]]
    assert proxy.messages(session)[:-1] == [*history, *NOW]
