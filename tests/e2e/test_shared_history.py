"""Several agents on one history: what each of them gets, and what nobody outside sees.

As examples/policies/shared-history.yaml has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.examples import serving
from tests.support.server import Proxy
from tests.support.upstream import Upstream


@pytest.fixture(scope="module")
def proxy(provider: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with serving("shared-history", provider, tmp_path_factory.mktemp("store")) as served:
        yield served


def say(proxy: Proxy, session: str, agent: str, *messages: dict[str, Any], **headers: str) -> None:
    """Append, as an agent."""
    named = {"x-agent-name": agent, "x-session-mode": "append"}
    answer = proxy.chat(session, list(messages), f"say:{agent} answers", headers=named | headers)
    assert answer.status_code == 200, answer.text


def test_each_agent_reads_what_the_others_said(proxy: Proxy, upstream: Upstream, session: str) -> None:
    say(proxy, session, "planner", {"role": "user", "content": "plan it"})
    say(proxy, session, "coder", {"role": "user", "content": "code it", "agent": "planner"})
    say(proxy, session, "planner", {"role": "user", "content": "is it done?"})
    texts = ["plan it", "planner answers", "code it", "coder answers", "is it done?"]
    assert [message["content"] for message in upstream.last.messages] == texts
    assert not {"agent", "is_internal"} & {key for message in upstream.last.messages for key in message}
    assert "x-agent-name" not in upstream.last.names
    stored = proxy.messages(session)
    assert stored[2]["agent"] == "planner"
    say(proxy, f"{session}-own", "coder", {"role": "user", "content": "alone"})
    assert len(upstream.last.messages) == 1


def test_internal_messages_are_stored_and_a_policy_leaves_them_out(
    proxy: Proxy, upstream: Upstream, session: str
) -> None:
    say(proxy, session, "planner", {"role": "user", "content": "a note", "is_internal": True, "agent": "x"})
    say(proxy, session, "planner", {"role": "user", "content": "seen by all"})
    texts = ["a note", "planner answers", "seen by all"]
    assert [message["content"] for message in upstream.last.messages] == texts
    asked = {"role": "user", "content": "a title?"}
    say(proxy, session, "titles", asked, **{"x-context-policy": "public"})
    texts = ["planner answers", "seen by all", "planner answers", "a title?"]
    assert [message["content"] for message in upstream.last.messages] == texts
    assert proxy.messages(session)[0] == {
        "role": "user",
        "content": "a note",
        "is_internal": True,
        "agent": "x",
    }


def test_new_instructions_take_the_place_of_older_ones(
    proxy: Proxy, upstream: Upstream, session: str
) -> None:
    for version in ("old", "new"):
        system = {"role": "system", "content": f"{version} instructions"}
        say(proxy, session, "planner", system, {"role": "user", "content": "go on"})
    systems = [message["content"] for message in upstream.last.messages if message["role"] == "system"]
    assert systems == ["new instructions"]
    assert upstream.last.messages[0]["role"] == "system"


def test_what_is_old_is_compressed_for_all_of_them(proxy: Proxy, upstream: Upstream, session: str) -> None:
    talk = [
        {"role": ("user", "assistant")[at % 2], "content": f"{at} " + "word " * 2_000} for at in range(31)
    ]
    answer = proxy.chat(session, talk, "say:fine", headers={"x-agent-name": "planner"})
    assert int(answer.headers["x-context-tokens-before"]) > 60_000
    assert int(answer.headers["x-context-tokens-sent"]) <= 30_000
    assert answer.headers["x-context-edits"] == "summarize"
    first = upstream.last.messages[0]
    assert first["role"] == "user"
    assert first["content"].startswith("Archived Session Summary\n")
    say(proxy, session, "coder", {"role": "user", "content": "and now?"})
    receipt = proxy.exchanges(session)[-1]
    assert receipt["tokens_sent"] <= 60_000
    assert len(proxy.messages(session)) == 34
