"""Tool calls that other agents report: the newest five of each agent stay whole, older ones are only counted.

Figures and formats are those of the system that examples/policies/agent-broadcasts.yaml reproduces.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.examples import serving
from tests.support.server import Proxy
from tests.support.upstream import Upstream

Message = dict[str, Any]

OFF = {"extends": "default", "edits": [{"type": "digest_agent_calls", "keep": 0}]}


@pytest.fixture(scope="module")
def proxy(provider: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    more = {"policies": {"none": OFF}}
    with serving("agent-broadcasts", provider, tmp_path_factory.mktemp("store"), **more) as served:
        yield served


def told(speaker: str, tool: str, role: str = "user") -> Message:
    return {"role": role, "content": f"<{speaker}> [调用工具 {tool}]"}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def sent_for(proxy: Proxy, upstream: Upstream, session: str, messages: list[Message], **headers: str) -> list[Message]:
    """Send the messages; return what reaches the upstream."""
    named = {f"x-{name.replace('_', '-')}": value for name, value in headers.items()}
    answer = proxy.chat(session, messages, headers=named)
    assert answer.status_code == 200, answer.text
    return upstream.last.messages


ASKED = [user("who knows?")]
EIGHT = [told("Worker: Bob", name) for name in ("ToolA", "ToolB", *["ToolA"] * 3, *["ToolB"] * 2, "ToolA")]
NEWEST = [told("Worker: Bob", f"New{number}") for number in range(5)]
DIGEST = user("<Worker: Bob> [早期工具调用摘要: ToolA×5, ToolB×3, 共 8 次]</Worker: Bob>")


def test_the_digest_is_this_text(proxy: Proxy, upstream: Upstream, session: str) -> None:
    messages = [*EIGHT, *NEWEST, *ASKED]
    assert sent_for(proxy, upstream, session, messages) == [DIGEST, *NEWEST, *ASKED]
    assert proxy.messages(session)[:-1] == messages
    assert proxy.exchanges(session)[-1]["edits"] == ["digest_agent_calls"]


def test_the_older_form_without_a_type(proxy: Proxy, upstream: Upstream, session: str) -> None:
    bob = [told("Bob", "search") for _ in range(7)]
    digest = user("<Bob> [早期工具调用摘要: search×2, 共 2 次]</Bob>")
    assert sent_for(proxy, upstream, session, [*bob, *ASKED]) == [digest, *bob[2:], *ASKED]


def test_in_english_too(proxy: Proxy, upstream: Upstream, session: str) -> None:
    bob = [user("<Worker: Bob> [calls tool search]") for _ in range(6)]
    digest = user("<Worker: Bob> [Earlier tool calls: search×1, 1 in all]</Worker: Bob>")
    assert sent_for(proxy, upstream, session, [*bob, *ASKED]) == [digest, *bob[1:], *ASKED]


def test_what_assistants_said_counts_and_becomes_a_user_message(proxy: Proxy, upstream: Upstream, session: str) -> None:
    bob = [told("Worker: Bob", "search", role) for role in ("assistant", "user", "assistant", "user")]
    messages = [user("go"), *bob, *NEWEST, *ASKED]
    digest = user("<Worker: Bob> [早期工具调用摘要: search×4, 共 4 次]</Worker: Bob>")
    assert sent_for(proxy, upstream, session, messages) == [user("go"), digest, *NEWEST, *ASKED]


def test_agents_are_counted_apart_and_the_order_stays(proxy: Proxy, upstream: Upstream, session: str) -> None:
    messages: list[Message] = [user("go")]
    for number in range(7):
        messages += [
            told("Worker: Bob", f"b{number}"),
            user(f"said between {number}"),
            told("Planner: Ann", f"a{number}", "assistant"),
        ]
    sent = sent_for(proxy, upstream, session, [*messages, *ASKED])
    bob = user("<Worker: Bob> [早期工具调用摘要: b0×1, b1×1, 共 2 次]</Worker: Bob>")
    ann = user("<Planner: Ann> [早期工具调用摘要: a0×1, a1×1, 共 2 次]</Planner: Ann>")
    assert sent == [messages[0], bob, messages[2], ann, messages[5], *messages[7:], *ASKED]


@pytest.mark.parametrize("number", [1, 4, 5])
def test_up_to_five_stay(proxy: Proxy, upstream: Upstream, session: str, number: int) -> None:
    messages = [*EIGHT[:number], *ASKED]
    assert sent_for(proxy, upstream, session, messages) == messages
    assert proxy.exchanges(session)[-1]["edits"] == []


def test_a_threshold_of_zero_and_a_history_without_broadcasts_change_nothing(
    proxy: Proxy, upstream: Upstream, session: str
) -> None:
    messages = [*EIGHT, *NEWEST, *ASKED]
    assert sent_for(proxy, upstream, session, messages, context_policy="none") == messages
    messages = [user(f"no broadcast {number}") for number in range(20)]
    assert sent_for(proxy, upstream, f"{session}-plain", messages) == messages


@pytest.mark.parametrize("name", ["Bob", "Worker: Bob"])
@pytest.mark.parametrize("speaker", ["Bob", "Worker: Bob"])
def test_an_agents_own_broadcasts_are_never_touched(
    proxy: Proxy, upstream: Upstream, session: str, name: str, speaker: str
) -> None:
    own = [told(speaker, f"own{number}") for number in range(9)]
    ann = [told("Planner: Ann", f"a{number}") for number in range(6)]
    sent = sent_for(proxy, upstream, session, [*own, *ann, *ASKED], agent_name=name)
    digest = user("<Planner: Ann> [早期工具调用摘要: a0×1, 共 1 次]</Planner: Ann>")
    assert sent == [*own, digest, *ann[1:], *ASKED]
    assert all(not key.startswith("x-agent") for key in upstream.last.names)


def test_a_digest_counts_on_and_has_the_same_bytes_each_time(proxy: Proxy, upstream: Upstream, session: str) -> None:
    said = list(EIGHT)
    for number in range(6):
        said += [told("Worker: Bob", f"More{number}"), {"role": "assistant", "content": "fine"}]
        whole = [*said, *ASKED]
        grown = sent_for(proxy, upstream, session, whole)
        # A session that sends everything at once gets the same view.
        assert sent_for(proxy, upstream, f"{session}-{number}", whole) == grown
        assert f"共 {4 + number} 次" in grown[0]["content"]
        assert sum("[调用工具" in message["content"] for message in grown) == 5
