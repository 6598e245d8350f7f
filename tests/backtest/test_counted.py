from __future__ import annotations

from proxy.backtest.cache import Segment
from tests.backtest.histories import COUNTER, call, counted, reply, result, user
from tests.support.talk import message

TOOLS = [{"type": "function", "function": {"name": "look"}}]
SAID = [{"role": "system", "content": "be brief"}, user("go"), call("c"), result("c", "found"), reply("ok")]


def test_what_is_sent_beside_the_log_is_counted_once() -> None:
    ready = counted(SAID, tools=TOOLS)
    system = COUNTER.message(message("system", "be brief"), "")
    assert ready.history.tools is not None
    assert ready.fixed_tokens == system + COUNTER.json(ready.history.tools, "")
    assert counted(SAID).fixed_tokens == system
    assert [entry.position for entry in ready.entries] == [0, 1, 2, 3]
    assert [entry.tokens for entry in ready.entries] == COUNTER.messages(ready.messages, "")


def test_a_prompt_begins_with_the_tools() -> None:
    ready = counted(SAID, tools=TOOLS)
    prompt = ready.prompt((*ready.instructions, *ready.messages))
    assert prompt[0] == Segment(
        text=b'[{"type":"function","function":{"name":"look"}}]', tokens=ready.tools[0].tokens
    )
    assert [part.text for part in prompt[1:]] == [each.raw for each in (*ready.instructions, *ready.messages)]
    assert sum(part.tokens for part in prompt) == ready.fixed_tokens + sum(e.tokens for e in ready.entries)


def test_our_own_fields_are_not_sent() -> None:
    ready = counted([{**user("go"), "agent": "planner"}, {**reply("ok"), "is_internal": True, "agent": 7}])
    assert ready.messages == (message("user", "go"), message("assistant", "ok"))
    assert [(entry.agent, entry.is_internal) for entry in ready.entries] == [("planner", False), (None, True)]
    assert ready.agent(0) == "planner"
    assert ready.agent(2) is None


def test_refs_are_those_of_the_proxy() -> None:
    entry = counted([user("go")]).entries[0]
    assert entry.ref.startswith("ref_")
    assert len(entry.ref) == 20


def test_marks_are_found_and_do_not_change_what_is_compared() -> None:
    marked = user("go") | {
        "content": [{"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}}]
    }
    ready = counted([{"role": "system", "content": "be brief"}, marked, reply("ok")], tools=TOOLS)
    whole = (*ready.instructions, *ready.messages)
    assert ready.marks(whole) == {2}
    assert ready.marks(whole, [0]) == {1, 2}
    assert ready.is_marked(ready.messages[0])
    assert not ready.is_marked(ready.messages[1])
    plain = counted([{**marked, "content": [{"type": "text", "text": "go", "cache_control": None}]}])
    assert ready.segment(ready.messages[0]).text == plain.segment(plain.messages[0]).text


def test_a_reply_costs_its_reasoning_too() -> None:
    plain = counted([user("go"), reply("ok")])
    thought = counted([user("go"), reply("ok", reasoning_content="let me see")])
    assert thought.entries[1].tokens == plain.entries[1].tokens
    assert thought.reply_tokens(1) == plain.reply_tokens(1) + COUNTER.text("let me see", "")


def test_the_model_is_the_history_s_own() -> None:
    assert counted([user("a")], model="gpt-4").model == "gpt-4"


def test_what_the_calls_used_is_found_out_once() -> None:
    ready = counted([user("read /tmp/report.txt"), call("c", arguments='{"path": "/tmp/report.txt"}')])
    assert ready.references.positions == (1,)
    assert ready.references is ready.references
