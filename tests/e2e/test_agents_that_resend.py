"""Several agents each resend their own history into one session, and are sent what the others said."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.conftest import Serve
from tests.support.server import Proxy
from tests.support.upstream import Upstream

JsonObject = dict[str, Any]


@pytest.fixture(scope="module")
def proxy(serve: Serve) -> Proxy:
    return serve(policies={"default": {"agents": "merge"}, "apart": {"match": {"models": ["never"]}}})


class Agent:
    """An agent with an ordinary SDK. It knows only its own history."""

    def __init__(self, proxy: Proxy, session: str, name: str, policy: str = "default") -> None:
        self.proxy, self.session, self.name = proxy, session, name
        self.said: list[JsonObject] = [{"role": "system", "content": f"You are {name}.", "agent": name}]
        self.headers = {"x-context-policy": policy}

    def ask(self, text: str, model: str = "echo") -> str:
        self.said.append({"role": "user", "content": text})
        return self.go_on(model)

    def go_on(self, model: str = "echo") -> str:
        answer = self.proxy.chat(self.session, self.said, model=model, headers=self.headers)
        assert answer.status_code == 200, answer.text
        self.said.append(answer.json()["choices"][0]["message"])
        kind: str = answer.headers["x-context-kind"]
        return kind


def sent(upstream: Upstream) -> list[Any]:
    assert not {"agent"} & {key for message in upstream.last.messages for key in message}
    return [message["content"] for message in upstream.last.messages[1:]]


def test_each_hears_what_the_others_said_since_and_hears_it_at_the_same_place_again(
    proxy: Proxy, upstream: Upstream, session: str
) -> None:
    planner, coder = Agent(proxy, session, "Planner"), Agent(proxy, session, "Coder")
    planner.ask("plan it")
    planner.ask("in two steps")
    coder.ask("code it")
    to_coder = ["<Planner>echo: plan it</Planner>", "<Planner>echo: in two steps</Planner>", "code it"]
    assert sent(upstream) == to_coder
    planner.ask("is it done?")
    to_planner = ["plan it", "echo: plan it", "in two steps", "echo: in two steps"]
    to_planner += ["<Coder>echo: code it</Coder>", "is it done?"]
    assert sent(upstream) == to_planner
    first = upstream.last.body
    planner.ask("really?")
    assert sent(upstream) == [*to_planner, "echo: is it done?", "really?"]
    assert upstream.last.body.startswith(first[: first.index(b'"is it done?"')])  # byte for byte
    coder.ask("test it")
    assert sent(upstream) == [
        *to_coder,
        "echo: code it",
        "<Planner>echo: is it done?</Planner>",
        "<Planner>echo: really?</Planner>",
        "test it",
    ]


def test_nothing_is_put_between_calls_and_their_results(proxy: Proxy, upstream: Upstream, session: str) -> None:
    planner, coder = Agent(proxy, session, "Planner"), Agent(proxy, session, "Coder")
    coder.ask("code it")
    planner.ask("look", model="tool:look")
    coder.ask("more")
    call = planner.said[-1]["tool_calls"][0]["id"]
    planner.said.append({"role": "tool", "tool_call_id": call, "content": "seen"})
    planner.go_on()
    assert sent(upstream)[-1] == "seen"
    planner.ask("and?")
    assert sent(upstream)[-2:] == ["<Coder>echo: more</Coder>", "and?"]


def test_agents_stay_apart_where_the_policy_does_not_ask_for_it(proxy: Proxy, upstream: Upstream, session: str) -> None:
    planner, coder = Agent(proxy, session, "Planner", "apart"), Agent(proxy, session, "Coder", "apart")
    planner.ask("plan it")
    planner.ask("again")
    coder.ask("code it")
    assert sent(upstream) == ["code it"]
