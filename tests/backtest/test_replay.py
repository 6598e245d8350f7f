"""A history sent again: it is what the proxy sends, and the cache bills what a provider would."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.backtest.cost import CacheRule, Segment, Use
from proxy.backtest.histories import of_messages
from proxy.backtest.replay import (
    NO_SUMMARY,
    Counted,
    PolicyStrategy,
    ReplayedRequest,
    ReplayModel,
    replayed,
    sent_messages,
)
from proxy.cli.serving import server_config
from proxy.config import Settings
from proxy.demo import DemoOutcome, rehearse
from proxy.demo.replay import configuration
from proxy.demo.upstream import MODEL
from proxy.dialects.chat.message import ChatMessage
from proxy.tokens import TokenCounter
from proxy.trimming import Policy, Summary
from tests.backtest.histories import COUNTER, agent, call, counted, reply, result, user
from tests.support.talk import message

BLOCKS = CacheRule()


def policy(**settings: Any) -> PolicyStrategy:
    return PolicyStrategy(name="mine", policy=Policy.model_validate(settings))


DROPPING = policy(trigger={"tokens": 3000}, target={"tokens": 1500}, keep={"spans": 1}, edits=[{"type": "drop_oldest"}])


def requests(ready: Counted, strategy: PolicyStrategy, *rules: CacheRule) -> list[ReplayedRequest]:
    return list(replayed(ready, strategy, rules or (BLOCKS,), ReplayModel()))


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> DemoOutcome:
    """The demonstration: a recorded conversation through the real proxy to a provider with a prompt cache."""
    return rehearse(server_config, tmp_path_factory.mktemp("demo"))


@pytest.mark.parametrize("name", ["default", "off"])
def test_a_replay_equals_what_the_proxy_sends_and_the_provider_bills(rehearsed: DemoOutcome, name: str) -> None:
    recording = rehearsed.recording
    history = of_messages("demo", recording.messages, tools=list(recording.tools), model=MODEL)
    written = yaml.safe_load(configuration(Path(), "http://127.0.0.1:9/v1"))
    chosen = Settings(**written).policies["default"] if name == "default" else Policy()
    ours = list(
        replayed(
            Counted(history, TokenCounter("tiktoken")),
            PolicyStrategy(name=name, policy=chosen),
            [BLOCKS],
            ReplayModel(),
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


def test_between_trims_each_request_extends_the_last() -> None:
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


def test_decisions_on_arrival_are_kept() -> None:
    ready = counted(agent(6, size=2000))
    cutting = policy(on_arrival=[{"type": "truncate_tool_output", "max_bytes": 500}])
    found = requests(ready, cutting)
    first = next(message for message in found[1].sent.messages if message.role == "tool")
    assert len(first.text) < 800
    assert all(request.sent.messages[3] is first for request in found[1:])
    assert found[-1].tokens < found[-1].untrimmed / 3


def test_each_cache_rule_has_a_cache_of_its_own() -> None:
    points = CacheRule(matching="breakpoints")
    ready = counted(agent(5))
    for request in requests(ready, policy(), BLOCKS, points):
        assert request.uses[BLOCKS].sent == request.uses[points].sent == request.tokens
    last = requests(ready, policy(), BLOCKS, points)[-1]
    before = requests(ready, policy(), BLOCKS, points)[-2]
    assert last.uses[points].read == before.tokens
    assert last.uses[BLOCKS].read == before.tokens // 128 * 128


def test_marks_of_the_proxy_keep_the_unchanged_part_cached() -> None:
    ready = counted(agent(40))
    marked, unmarked = CacheRule(matching="breakpoints"), CacheRule(matching="breakpoints", explicit=False)
    clearing = policy(
        trigger={"tokens": 6000}, keep={"spans": 1}, edits=[{"type": "truncate_tool_output", "max_bytes": 200}]
    )
    found = requests(ready, clearing, marked, unmarked)
    assert sum(request.sent.moved for request in found) >= 2
    read = sum((request.uses[marked] for request in found), Use()).read
    without = sum((request.uses[unmarked] for request in found), Use()).read
    assert read > without
    never = list(replayed(ready, clearing, [marked], ReplayModel(marks=False)))
    assert sum((request.uses[marked] for request in never), Use()).read == without


def test_idle_time_empties_the_cache_and_reaches_the_policy() -> None:
    said = [user("word " * 2000), reply("a"), user("b"), reply("c"), user("d"), reply("e")]
    times = [0, 10, 20, 30, 1000, 1010]
    timed = [{**message, "timestamp": at} for message, at in zip(said, times, strict=True)]
    rule = CacheRule(lifetime=300)
    ready = counted(timed)
    assert [request.uses[rule].read > 0 for request in requests(ready, policy(), rule)] == [False, True, False]
    waiting = policy(trigger={"idle_seconds": 100}, edits=[{"type": "keep_rounds", "last": 1}], keep={"rounds": 0})
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
    together = [request.sent.moved for request in requests(counted([{**m, "agent": "one"} for m in said]), strategy)]
    assert sum(apart) > sum(together) >= 1
    assert any(one and other for one, other in pairwise(apart))


def test_by_price_tells_whether_a_policy_depends_on_prices() -> None:
    assert not DROPPING.by_price
    assert not policy().by_price
    edits = [{"type": "truncate_tool_output"}]
    assert policy(trigger={"cost": "auto"}, edits=edits).by_price
    assert policy(trigger={"idle_seconds": "auto"}, edits=edits).by_price
    assert not policy(trigger={"idle_seconds": 60}, edits=edits).by_price


def test_a_policy_warns_of_what_it_cannot_do() -> None:
    unjudged = policy(trigger={"ratio": 0.5}, edits=[{"type": "truncate_tool_output"}])
    assert all("context window" in request.sent.warnings[0] for request in requests(counted(agent(2)), unjudged))
    known = list(replayed(counted(agent(2)), unjudged, [BLOCKS], ReplayModel(context_window=10_000)))
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


def test_a_summary_with_role_merge_is_merged_into_the_instructions() -> None:
    lead = (ChatMessage.of({"role": "system", "content": "be brief"}),)
    merged = sent_messages(lead, _planned("merge"))
    assert [message.text for message in merged] == ["be brief\n\n## Before\nall of it", "new"]
    assert sent_messages(lead, _planned("user")) == (*lead, *_planned("user").view)


# ------------------------------------------------------------------------- counted histories


TOOLS = [{"type": "function", "function": {"name": "look"}}]
TOLD = [{"role": "system", "content": "be brief"}, user("go"), call("c"), result("c", "found"), reply("ok")]


def test_instructions_and_tools_are_fixed_tokens() -> None:
    ready = counted(TOLD, tools=TOOLS)
    system = COUNTER.message(message("system", "be brief"), "")
    assert ready.history.tools is not None
    assert ready.fixed_tokens == system + COUNTER.json(ready.history.tools, "")
    assert counted(TOLD).fixed_tokens == system
    assert [entry.position for entry in ready.entries] == [0, 1, 2, 3]
    assert [entry.tokens for entry in ready.entries] == COUNTER.messages(ready.messages, "")


def test_tools_that_a_policy_leaves_out_are_not_sent() -> None:
    tools = [{"type": "function", "function": {"name": name, "description": "word " * 90}} for name in ("look", "book")]
    ready = counted(agent(2), tools=tools)
    (whole,) = ready.tools
    for removed, left in ((["book"], tools[:1]), (["look"], tools[1:]), (["other"], tools), (["look", "book"], tools)):
        (sent,) = ready.tools_without(removed)
        assert json.loads(sent.text) == left
        for request in requests(ready, policy(tools={"remove": removed})):
            assert request.untrimmed - request.tokens == whole.tokens - sent.tokens
    begun = counted([call("a"), result("a", "x"), user("go on"), reply("ok")], tools=tools)
    assert json.loads(begun.tools_without(["look", "book"])[0].text) == tools[:1]
    assert counted(agent(2)).tools_without(["look"]) == ()


def test_where_a_summary_by_a_model_is_missing_it_is_told() -> None:
    said = [message for at in range(30) for message in (user(f"{at} " + "word " * 90), reply("ok"))]
    summing = policy(
        trigger={"tokens": 2000},
        target={"tokens": 1000},
        edits=[{"type": "summarize", "mode": "model", "keep_rounds": 1}, {"type": "drop_oldest"}],
    )
    found = requests(counted(said), summing)
    moved = [request for request in found if request.sent.moved]
    assert moved
    assert [request for request in found if NO_SUMMARY in request.sent.warnings] == moved


def test_a_prompt_begins_with_the_tools() -> None:
    ready = counted(TOLD, tools=TOOLS)
    prompt = ready.prompt((*ready.instructions, *ready.messages))
    text = b'[{"type":"function","function":{"name":"look"}}]'
    assert prompt[0] == Segment(text=text, tokens=COUNTER.json(text, ""))
    assert [part.text for part in prompt[1:]] == [each.raw for each in (*ready.instructions, *ready.messages)]
    assert sum(part.tokens for part in prompt) == ready.fixed_tokens + sum(e.tokens for e in ready.entries)


def test_our_own_fields_are_not_sent() -> None:
    ready = counted([{**user("go"), "agent": "planner"}, {**reply("ok"), "is_internal": True, "agent": 7}])
    assert ready.messages == (message("user", "go"), message("assistant", "ok"))
    assert [(entry.agent, entry.is_internal) for entry in ready.entries] == [("planner", False), (None, True)]


def test_refs_are_those_of_the_proxy() -> None:
    entry = counted([user("go")]).entries[0]
    assert entry.ref.startswith("ref_")
    assert len(entry.ref) == 20


def test_cache_marks_are_found_and_do_not_change_the_segment() -> None:
    marked = user("go") | {"content": [{"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}}]}
    ready = counted([{"role": "system", "content": "be brief"}, marked, reply("ok")], tools=TOOLS)
    whole = (*ready.instructions, *ready.messages)
    assert ready.marks(whole) == {2}
    assert ready.marks(whole, [0]) == {1, 2}
    plain = counted([{**marked, "content": [{"type": "text", "text": "go", "cache_control": None}]}])
    assert ready.segment(ready.messages[0]).text == plain.segment(plain.messages[0]).text


def test_the_tokens_of_a_reply_include_its_reasoning() -> None:
    plain = counted([user("go"), reply("ok")])
    thought = counted([user("go"), reply("ok", reasoning_content="let me see")])
    assert thought.entries[1].tokens == plain.entries[1].tokens
    assert thought.reply_tokens(1) == plain.reply_tokens(1) + COUNTER.text("let me see", "")


def test_the_model_is_the_history_s_own() -> None:
    assert counted([user("a")], model="gpt-4").model == "gpt-4"


def test_references_are_read_once() -> None:
    ready = counted([user("read /tmp/report.txt"), call("c", arguments='{"path": "/tmp/report.txt"}')])
    assert ready.references.positions == (1,)
    assert ready.references is ready.references
