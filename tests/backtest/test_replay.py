"""A history sent again: that it is what the proxy really sends, and what the provider's cache makes of it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.backtest.cache import NOTHING, Rule
from proxy.backtest.counted import Counted
from proxy.backtest.histories import of_messages
from proxy.backtest.replay import Model, PolicyStrategy, Request, replayed, sent_messages
from proxy.cli.serving import server_config
from proxy.config import Settings
from proxy.demo import DemoOutcome, rehearse
from proxy.demo.replay import configuration
from proxy.demo.upstream import MODEL
from proxy.dialects.chat.message import ChatMessage
from proxy.tokens import TokenCounter
from proxy.trimming import Policy, Summary
from tests.backtest.histories import agent, call, counted, reply, result, user

BLOCKS = Rule()


def policy(**settings: Any) -> PolicyStrategy:
    return PolicyStrategy(name="mine", policy=Policy.model_validate(settings))


DROPPING = policy(
    trigger={"tokens": 3000}, target={"tokens": 1500}, keep={"spans": 1}, edits=[{"type": "drop_oldest"}]
)


def requests(ready: Counted, strategy: PolicyStrategy, *rules: Rule) -> list[Request]:
    return list(replayed(ready, strategy, rules or (BLOCKS,), Model()))


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> DemoOutcome:
    """The demonstration: a recorded conversation through the real proxy to a provider with a prompt cache."""
    return rehearse(server_config, tmp_path_factory.mktemp("demo"))


@pytest.mark.parametrize("name", ["default", "off"])
def test_it_is_what_the_proxy_sends_and_what_the_provider_bills(rehearsed: DemoOutcome, name: str) -> None:
    recording = rehearsed.recording
    history = of_messages("demo", recording.messages, tools=list(recording.tools), model=MODEL)
    written = yaml.safe_load(configuration(Path(), "http://127.0.0.1:9/v1"))
    chosen = Settings(**written).policies["default"] if name == "default" else Policy()
    ours = list(
        replayed(
            Counted(history, TokenCounter("tiktoken")),
            PolicyStrategy(name=name, policy=chosen),
            [BLOCKS],
            Model(),
        )
    )
    theirs = (rehearsed.trimmed if name == "default" else rehearsed.whole).steps
    assert [request.tokens for request in ours] == [step.forwarded_tokens for step in theirs]
    assert [request.uses[BLOCKS].read for request in ours] == [step.cached_tokens for step in theirs]
    assert [len(request.sent.messages) for request in ours] == [step.forwarded_messages for step in theirs]
    assert [request.sent.moved for request in ours] == [step.moved for step in theirs]
    assert [request.untrimmed for request in ours] == [step.tokens for step in theirs]


def test_there_is_a_request_before_each_reply() -> None:
    ready = counted(agent(3))
    found = requests(ready, policy())
    assert [request.stop for request in found] == [1, 3, 5, 7]
    assert [request.sent.messages for request in found] == [
        (*ready.instructions, *ready.messages[:stop]) for stop in (1, 3, 5, 7)
    ]
    assert [request.tokens for request in found] == [request.untrimmed for request in found]


def test_between_moves_each_request_goes_on_from_the_last() -> None:
    ready = counted(agent(20))
    found = requests(ready, DROPPING)
    moves = [request.sent.moved for request in found]
    assert 2 <= sum(moves) < len(found) / 2
    for before, after in pairwise(found):
        if not after.sent.moved:
            assert after.sent.messages[: len(before.sent.messages)] == before.sent.messages
            # All of it is read but the last block.
            cached = before.tokens // 128 * 128 if before.tokens >= 1024 else 0
            assert after.uses[BLOCKS].read == cached
    assert max(request.tokens for request in found) <= 3000 + 600


def test_what_was_decided_on_arrival_stays() -> None:
    ready = counted(agent(6, size=2000))
    cutting = policy(on_arrival=[{"type": "truncate_tool_output", "max_bytes": 500}])
    found = requests(ready, cutting)
    first = next(message for message in found[1].sent.messages if message.role == "tool")
    assert len(first.text) < 800
    assert all(request.sent.messages[3] is first for request in found[1:])
    assert found[-1].tokens < found[-1].untrimmed / 3


def test_each_rule_counts_for_itself() -> None:
    points = Rule(matching="breakpoints")
    ready = counted(agent(5))
    for request in requests(ready, policy(), BLOCKS, points):
        assert request.uses[BLOCKS].sent == request.uses[points].sent == request.tokens
    last = requests(ready, policy(), BLOCKS, points)[-1]
    before = requests(ready, policy(), BLOCKS, points)[-2]
    assert last.uses[points].read == before.tokens
    assert last.uses[BLOCKS].read == before.tokens // 128 * 128


def test_the_proxy_s_marks_keep_what_does_not_change() -> None:
    ready = counted(agent(40))
    marked, unmarked = Rule(matching="breakpoints"), Rule(matching="breakpoints", explicit=False)
    clearing = policy(
        trigger={"tokens": 6000},
        keep={"spans": 1},
        edits=[{"type": "truncate_tool_output", "max_bytes": 200}],
    )
    found = requests(ready, clearing, marked, unmarked)
    assert sum(request.sent.moved for request in found) >= 2
    read = sum((request.uses[marked] for request in found), NOTHING).read
    without = sum((request.uses[unmarked] for request in found), NOTHING).read
    assert read > without
    never = list(replayed(ready, clearing, [marked], Model(marks=False)))
    assert sum((request.uses[marked] for request in never), NOTHING).read == without


def test_time_makes_the_cache_cold_and_policies_hear_of_it() -> None:
    said = [user("word " * 2000), reply("a"), user("b"), reply("c"), user("d"), reply("e")]
    times = [0, 10, 20, 30, 1000, 1010]
    timed = [{**message, "timestamp": at} for message, at in zip(said, times, strict=True)]
    rule = Rule(lifetime=300)
    ready = counted(timed)
    assert [request.uses[rule].read > 0 for request in requests(ready, policy(), rule)] == [
        False,
        True,
        False,
    ]
    waiting = policy(
        trigger={"idle_seconds": 100}, edits=[{"type": "keep_rounds", "last": 1}], keep={"rounds": 0}
    )
    moved = [request.sent.moved for request in requests(ready, waiting, rule)]
    assert moved == [False, False, True]
    assert not any(request.sent.moved for request in requests(counted(said), waiting, rule))


def test_each_agent_has_a_cut_of_its_own() -> None:
    said = [{"role": "user", "content": "go", "agent": "user"}]
    for number in range(12):
        name = "anne" if number % 2 else "bert"
        said += [{**reply(f"{number} " + "word " * 300), "agent": name}, user(f"and {number}")]
    strategy = policy(trigger={"messages": 8}, keep={"rounds": 1}, edits=[{"type": "keep_rounds", "last": 2}])
    apart = [request.sent.moved for request in requests(counted(said), strategy)]
    together = [
        request.sent.moved for request in requests(counted([{**m, "agent": "one"} for m in said]), strategy)
    ]
    assert sum(apart) > sum(together) >= 1
    assert any(one and other for one, other in pairwise(apart))


def test_what_depends_on_prices_says_so() -> None:
    assert not DROPPING.by_price
    assert not policy().by_price
    edits = [{"type": "truncate_tool_output"}]
    assert policy(trigger={"cost": "auto"}, edits=edits).by_price
    assert policy(trigger={"idle_seconds": "auto"}, edits=edits).by_price
    assert not policy(trigger={"idle_seconds": 60}, edits=edits).by_price


def test_what_a_policy_cannot_do_is_a_warning() -> None:
    unjudged = policy(trigger={"ratio": 0.5}, edits=[{"type": "truncate_tool_output"}])
    assert all(
        "context window" in request.sent.warnings[0] for request in requests(counted(agent(2)), unjudged)
    )
    known = list(replayed(counted(agent(2)), unjudged, [BLOCKS], Model(context_window=10_000)))
    assert not any(request.sent.warnings for request in known)


def test_a_broken_history_is_replayed_as_it_is() -> None:
    said = [user("go"), call("a", "b"), result("a", "1"), user("and?"), reply("ok")]
    found = requests(counted(said), policy())
    assert [len(request.sent.messages) for request in found] == [1, 4]


def _planned(role: str) -> Any:
    class Planned:
        view = (ChatMessage.of(user("new")),)
        summary = Summary(
            text="## Before\nall of it",
            role=role,  # type: ignore[arg-type]
            until=3,
            tokens=10,
            kind="statistics",
            covered_messages=3,
            covered_tokens=100,
        )

    return Planned()


def test_a_summary_is_merged_where_it_says_so() -> None:
    lead = (ChatMessage.of({"role": "system", "content": "be brief"}),)
    merged = sent_messages(lead, _planned("merge"))
    assert [message.text for message in merged] == ["be brief\n\n## Before\nall of it", "new"]
    assert sent_messages(lead, _planned("user")) == (*lead, *_planned("user").view)
