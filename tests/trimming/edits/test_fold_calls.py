"""`clear_tool_results` with `fold_calls`: of calls in a row one stays, and a line tells of each other one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from pydantic import ValidationError

from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.dialects.messages.message import MessagesMessage
from proxy.dialects.responses.items import Item
from proxy.trimming import Cut, Hidden, Plan, Policy, plan
from proxy.trimming.model import Entry, PlanningContext

LONG = "words of no value stand here and there, " * 20
FOLD: dict[str, Any] = {
    "type": "clear_tool_results",
    "keep": 1,
    "clear_inputs": True,
    "clear_texts": True,
    "fold_calls": True,
}


def cost(message: Message) -> int:
    return len(message.raw)


def entries(log: Sequence[Message]) -> list[Entry]:
    return [Entry(message=each, tokens=cost(each), ref=f"ref_{at:08d}", position=at) for at, each in enumerate(log)]


def user(text: str) -> Message:
    return ChatMessage.of({"role": "user", "content": text})


def call(at: int, arguments: str = "{}", text: Any = None, name: str = "look", **fields: Any) -> Message:
    calls = [{"id": f"c{at}", "type": "function", "function": {"name": name, "arguments": arguments}}]
    return ChatMessage.of({"role": "assistant", "content": text, "tool_calls": calls, **fields})


def gave(at: int, content: Any = LONG) -> Message:
    return ChatMessage.of({"role": "tool", "tool_call_id": f"c{at}", "content": content})


def talk(*between: Message) -> list[Message]:
    """Return a round with a call, what is `between`, and two calls of which the last stays whole."""
    return [user("Go"), call(0), gave(0), *between, call(8), gave(8), call(9), gave(9)]


def planned(
    log: Sequence[Message], cut: Cut | None = None, edits: Sequence[dict[str, Any]] = (FOLD,), **policy: Any
) -> Plan:
    return planned_of(entries(log), cut, edits, **policy)


def planned_of(log: Sequence[Entry], cut: Cut | None, edits: Sequence[dict[str, Any]], **policy: Any) -> Plan:
    chosen = {"trigger": {"every_request": True}, "keep": {"rounds": 0, "spans": 0}, "edits": edits, **policy}
    made = plan(log, Policy.model_validate(chosen), "p", PlanningContext(count=cost), cut)
    assert made.view[0].dialect.problems(made.view) == []
    assert made.warnings == ()
    return made


def roles(made: Plan) -> str:
    return " ".join(message.role for message in made.view)


def lines(made: Plan, place: int = 2) -> list[str]:
    """Return the lines behind the stub of a result."""
    stub, *told = made.view[place].text.split("\n")
    assert stub.startswith("[cleared ")
    return told


def test_a_line_tells_of_each_call_behind_the_first_result() -> None:
    arguments = '{"path": "src/main.c", "lines": [1, 2], "limit": 20, "old": "if x:\\n  y"}'
    made = planned(talk(call(1, arguments, "I will\nread it.", "read"), gave(1, "12 passed\n\n1 failed\n")))
    assert roles(made) == "user assistant tool assistant tool"
    size = cost(gave(8))
    assert lines(made) == [
        "[then, shortened:]",
        "I will read it.",
        "read path=src/main.c lines=[1,2] limit=20 old=if x: y → 12 passed",
        "  ",
        "  1 failed",
        f"look → [cleared {size} tokens; ref=00000006]",
    ]
    assert made.view[1] == call(0)
    assert made.view[3:] == (call(9), gave(9))


def test_no_output_can_be_taken_for_a_call() -> None:
    made = planned(talk(call(1), gave(1, "ok\nrun a → b")))
    assert lines(made)[1:3] == ["look → ok", "  run a → b"]


def test_what_the_agent_wrote_is_as_short_as_it_would_be_in_its_place() -> None:
    long = planned(talk(call(1, f'{{"text": "{LONG}"}}', LONG), gave(1)))
    kept = {**FOLD, "fold_calls": False}
    apart = planned(talk(call(1, f'{{"text": "{LONG}"}}', LONG), gave(1)), edits=[kept])
    _, said, told, _ = lines(long)
    assert said == apart.view[3].text
    assert told == f"look text=[cleared {len(LONG)} characters] → {apart.view[4].text}"
    assert long.tokens_sent < apart.tokens_sent


def test_the_plan_tells_what_was_folded() -> None:
    made = planned(talk(call(1), gave(1)))
    assert made.cut is not None
    (gap,) = made.cut.gaps
    assert (gap.start, gap.stop, gap.edit) == (3, 7, "clear_tool_results")
    assert gap.reason == "a line behind an earlier result was put in its place"
    assert [change.reason for change in made.made if change.position == 2] == [
        "not among the newest 1 tool results",
        "lines behind it tell of 2 calls after it",
    ]


def test_a_later_trim_leaves_the_bytes_of_an_earlier_one() -> None:
    log = talk(call(1), gave(1))
    first = planned(log)
    more = [*log, *(each for at in (10, 11) for each in (call(at), gave(at)))]
    second = planned(more, first.cut)
    assert second.view[:3] == first.view[:3]
    assert roles(second) == "user assistant tool assistant tool assistant tool"
    assert lines(second, 4) == ["[then, shortened:]", f"look → [cleared {cost(gave(10))} tokens; ref=00000010]"]
    third = planned([*more, user("Now?")], second.cut, trigger={"tokens": 10**6})
    assert third.view[:-1] == second.view


def test_a_very_long_row_of_calls_is_folded_in_parts() -> None:
    log = [user("Go"), *(each for at in range(71) for each in (call(at), gave(at)))]
    made = planned(log)
    assert roles(made) == "user" + " assistant tool" * 4
    assert [len(lines(made, place)) for place in (2, 4, 6)] == [32, 32, 6]


def test_calls_of_two_rounds_stay_apart() -> None:
    made = planned(talk(call(1), gave(1), user("And?"), call(2), gave(2)))
    assert roles(made) == "user assistant tool user assistant tool assistant tool"
    assert len(lines(made)) == len(lines(made, 5)) == 2


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    "between",
    [
        pytest.param([call(1, text=[PICTURE]), gave(1)], id="the agent showed a picture"),
        pytest.param([call(1, name="note"), gave(1)], id="its tool is excluded"),
        pytest.param([call(1, text="KEEP"), gave(1)], id="it is pinned"),
        pytest.param([ChatMessage.of({"role": "assistant", "content": "Done."})], id="it is no call"),
    ],
)
def test_what_no_line_can_tell_stays_and_parts_the_others(between: list[Message]) -> None:
    edits = [{**FOLD, "exclude_tools": ["note"]}]
    made = planned([*talk(call(3), gave(3), *between), call(10), gave(10)], edits=edits, pin=[{"regex": "KEEP"}])
    assert made.view[3] == between[0]
    assert len(lines(made)) == 2
    assert len(lines(made, 4 + len(between))) == 2


def test_a_result_that_is_no_text_and_costs_little_keeps_its_place() -> None:
    log = talk(call(1), gave(1, [PICTURE]))
    cheap = PlanningContext(count=lambda message: 9 if b"image_url" in message.raw else cost(message))
    priced = [replace(entry, tokens=cheap.count(entry.message)) for entry in entries(log)]
    chosen = {"trigger": {"every_request": True}, "keep": {"rounds": 0, "spans": 0}, "edits": [FOLD]}
    made = plan(priced, Policy.model_validate(chosen), "p", cheap, None)
    assert made.view[3:5] == tuple(log[3:5])


def test_parallel_calls_are_lines_of_one_span() -> None:
    both = [
        {"id": f"c{at}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for at, name in ((1, "first"), (2, "second"))
    ]
    block = ChatMessage.of({"role": "assistant", "content": None, "tool_calls": both})
    made = planned(talk(block, gave(2, "two"), gave(1, "one")))
    assert lines(made)[1:3] == ["first → one", "second → two"]


def test_a_call_whose_results_are_not_all_cleared_stays() -> None:
    both = [{"id": f"c{at}", "type": "function", "function": {"name": "look", "arguments": "{}"}} for at in (8, 9)]
    block = ChatMessage.of({"role": "assistant", "content": None, "tool_calls": both})
    log = [user("Go"), call(0), gave(0), call(1), gave(1), block, gave(8), gave(9)]
    made = planned(log)
    assert roles(made) == "user assistant tool assistant tool tool"
    assert made.view[4].text.startswith("[cleared ")
    assert made.view[5] == gave(9)


def test_a_call_with_an_id_twice_stays() -> None:
    twice = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}] * 2
    block = ChatMessage.of({"role": "assistant", "content": None, "tool_calls": twice})
    log = entries(talk(block, gave(1, "one"), gave(1, "two")))
    chosen = {"trigger": {"every_request": True}, "keep": {"rounds": 0, "spans": 0}, "edits": [FOLD]}
    made = plan(log, Policy.model_validate(chosen), "p", PlanningContext(count=cost), None)
    assert "[then" not in made.view[2].text


def test_older_forms_of_calls_are_folded_too() -> None:
    custom = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "{}\n+ line"}}
    older = ChatMessage.of({"role": "assistant", "content": None, "function_call": {"name": "say", "arguments": "[]"}})
    answer = ChatMessage.of({"role": "function", "name": "say", "content": "hi"})
    block = ChatMessage.of({"role": "assistant", "content": None, "tool_calls": [custom]})
    made = planned(talk(block, gave(1, "done"), older, answer))
    assert lines(made)[1:3] == ["patch {} + line → done", "say [] → hi"]


def test_a_target_that_is_met_leaves_what_is_newer_in_its_place() -> None:
    log = [user("Go"), *(each for at in range(6) for each in (call(at), gave(at)))]
    made = planned(log, target={"tokens": 4300})
    assert roles(made) == "user assistant tool" + " assistant tool" * 3
    assert len(lines(made)) == 3
    assert made.tokens_sent <= 4300


def test_calls_whose_lines_would_free_nothing_stay() -> None:
    chosen = {"trigger": {"every_request": True}, "keep": {"rounds": 0, "spans": 0}, "edits": [FOLD]}
    context = PlanningContext(count=lambda message: 2000 if b"[then" in message.raw else cost(message))
    made = plan(entries(talk()), Policy.model_validate(chosen), "p", context, None)
    assert roles(made) == "user assistant tool assistant tool assistant tool"


def test_what_was_recalled_for_a_call_keeps_it_in_its_place() -> None:
    log = entries(talk(call(1), gave(1)))
    rounds = Hidden(before=(call(7), gave(7, "recalled")), reply=None, after=(), tokens=30)
    log[3] = replace(log[3], hidden=rounds)
    made = planned_of(log, None, [FOLD])
    assert call(1) in made.view


def test_compaction_leaves_what_was_folded() -> None:
    rows = '{"rows": [' + ", ".join('{"name": "a", "size": 1}' for _ in range(3)) + "]}"
    compact = {"type": "compact_tool_output", "methods": ["minify", "table"]}
    log = talk(call(1), gave(1, rows))
    first = planned(log, edits=[{**FOLD, "digest_chars": 0}, compact])
    second = planned([*log, call(10), gave(10)], first.cut, edits=[{**FOLD, "digest_chars": 0}, compact])
    assert second.view[2] == first.view[2]
    assert "[then, shortened:]" in second.view[2].text


def test_truncation_leaves_what_was_folded() -> None:
    truncate = {"type": "truncate_tool_output", "max_lines": 1, "max_bytes": 400}
    log = [user("Go"), *(each for at in range(9) for each in (call(at), gave(at)))]
    first = planned(log, edits=[FOLD, truncate])
    second = planned([*log, call(10), gave(10)], first.cut, edits=[FOLD, truncate])
    assert len(lines(first)) == 8
    assert second.view[2] == first.view[2]


def test_what_looks_folded_and_is_not_is_truncated() -> None:
    truncate = {"type": "truncate_tool_output", "max_bytes": 400}
    log = [user("Go"), call(0), gave(0, f"ok\n[then, shortened:]\n{LONG}")]
    made = planned(log, edits=[FOLD, truncate])
    assert "bytes) omitted" in made.view[2].text


def test_what_was_folded_is_not_folded_again() -> None:
    edits = [{**FOLD, "exclude_tools": ["note"]}, {**FOLD, "when": {"messages": 10}}]
    log = [user("Go"), call(0, name="note"), gave(0), *(each for at in (1, 2, 3) for each in (call(at), gave(at)))]
    first = planned(log, edits=edits)
    second = planned([*log, *(each for at in (4, 5) for each in (call(at), gave(at)))], first.cut, edits=edits)
    assert first.view[2] == gave(0)
    assert second.view[2].text.startswith("[cleared ")
    assert lines(second, 4) == lines(first, 4)
    assert roles(second) == "user" + " assistant tool" * 4


def test_the_window_of_a_client_holds_all_that_was_folded_into_a_call_before_it() -> None:
    log = talk(call(1), gave(1), call(2), gave(2))
    first = planned(log)
    assert first.cut is not None
    chosen = {"keep": {"rounds": 0, "spans": 0}, "edits": [FOLD]}
    for start in (3, 5):
        window = entries([*log, user("Now?")])[start:]
        context = PlanningContext(count=cost)
        idle = Policy.model_validate({"trigger": {"tokens": 10**6}, **chosen})
        whole = plan(window, idle, "p", context, replace(first.cut, version=idle.version), start=start)
        assert whole.tokens_before == sum(entry.tokens for entry in window)
        assert whole.view == tuple(entry.message for entry in window)
        eager = Policy.model_validate({"trigger": {"every_request": True}, **chosen})
        made = plan(window, eager, "p", context, first.cut, start=start)
        assert len(made.view) == len(window)
        stubs = [message.text for message in made.view if message.is_result][:-1]
        assert all(text.startswith("[cleared ") and "[then" not in text for text in stubs)


# ------------------------------------------------------------------------------------------ other APIs


def use(at: int, *before: dict[str, Any]) -> Message:
    block = {"type": "tool_use", "id": f"c{at}", "name": "look", "input": {"n": at}}
    return MessagesMessage.of({"role": "assistant", "content": [*before, block]})


def used(at: int, *more: dict[str, Any], content: Any = LONG) -> Message:
    block = {"type": "tool_result", "tool_use_id": f"c{at}", "content": content}
    return MessagesMessage.of({"role": "user", "content": [block, *more]})


def test_messages_with_thinking_are_folded() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    start = MessagesMessage.of({"role": "user", "content": "Go"})
    log = [start, use(0, thought), used(0), use(1, thought), used(1), use(9), used(9)]
    made = planned(log)
    assert roles(made) == "user assistant tool assistant tool"
    assert made.view[1] == use(0, thought)
    assert lines(made)[1].startswith("look n=1 → [cleared ")


@pytest.mark.parametrize("place", ["beside", "search"])
def test_what_a_user_or_the_provider_did_beside_a_call_keeps_it(place: str) -> None:
    search: list[dict[str, Any]] = [
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
    ]
    start = MessagesMessage.of({"role": "user", "content": "Go"})
    middle = [use(1), used(1, {"type": "text", "text": "Mind."})] if place == "beside" else [use(1, *search), used(1)]
    made = planned([start, use(0), used(0), *middle, use(2), used(2), use(9), used(9)])
    assert roles(made) == "user assistant tool assistant tool assistant tool assistant tool"


def test_what_a_user_said_beside_a_result_long_ago_stays() -> None:
    start = MessagesMessage.of({"role": "user", "content": "Go"})
    later = MessagesMessage.of({"role": "user", "content": "And?"})
    beside = used(1, {"type": "text", "text": "Mind."})
    made = planned([start, use(0), used(0), use(1), beside, use(2), used(2), later, use(9), used(9)])
    assert roles(made) == "user assistant tool assistant tool assistant tool user assistant tool"
    assert made.view[4].beside == "Mind."


def test_of_several_results_in_a_message_the_last_one_tells_of_what_follows() -> None:
    pair = MessagesMessage.of({"role": "assistant", "content": [use(0).data["content"][0], use(1).data["content"][0]]})
    both = MessagesMessage.of({"role": "user", "content": [used(0).data["content"][0], used(1).data["content"][0]]})
    start = MessagesMessage.of({"role": "user", "content": "Go"})
    made = planned([start, pair, both, use(2), used(2, content="short"), use(3), used(3), use(9), used(9)])
    assert roles(made) == "user assistant tool assistant tool"
    first, last = made.view[2].results
    assert "[then" not in first.text
    assert last.text.split("\n")[2] == "look n=2 → short"


def test_what_was_folded_behind_a_short_result_of_several_is_not_cleared_itself() -> None:
    pair = MessagesMessage.of({"role": "assistant", "content": [use(0).data["content"][0], use(1).data["content"][0]]})
    both = [used(0).data["content"][0], used(1, content="short").data["content"][0]]
    start = MessagesMessage.of({"role": "user", "content": "Go"})
    log: list[Message] = [start, pair, MessagesMessage.of({"role": "user", "content": both})]
    log += [each for at in range(2, 9) for each in (use(at), used(at))]
    first = planned(log)
    second = planned([*log, use(9), used(9)], first.cut)
    assert "[then" in first.view[2].results[1].text
    assert second.view[2] == first.view[2]


def test_a_failed_result_keeps_its_call() -> None:
    failed = MessagesMessage.of({"role": "user", "content": [used(1).data["content"][0] | {"is_error": True}]})
    start = MessagesMessage.of({"role": "user", "content": "Go"})
    made = planned([start, use(0), used(0), use(1), failed, use(2), used(2), use(9), used(9)])
    assert roles(made) == "user assistant tool assistant tool assistant tool assistant tool"
    assert made.view[4].data["content"][0]["is_error"] is True


def test_a_result_beside_a_stub_is_compacted_all_the_same() -> None:
    rows = '{"rows": [' + ", ".join('{"name": "abc", "size": 1}' for _ in range(40)) + "]}"
    compact = {"type": "compact_tool_output", "methods": ["minify", "table"]}
    pair = MessagesMessage.of({"role": "assistant", "content": [use(0).data["content"][0], use(1).data["content"][0]]})
    blocks = [used(0).data["content"][0], used(1, content=rows).data["content"][0]]
    start = MessagesMessage.of({"role": "user", "content": "Go"})
    made = planned([start, pair, MessagesMessage.of({"role": "user", "content": blocks})], edits=[FOLD, compact])
    first, last = made.view[2].results
    assert first.text.startswith("[cleared ")
    assert len(last.text) < len(rows)
    assert "[cleared " not in last.text


def turn(at: int, *before: dict[str, Any]) -> Message:
    item = {"type": "function_call", "call_id": f"c{at}", "name": "look", "arguments": "{}"}
    return Item.of({"type": "turn", "role": "assistant", "items": [*before, item]})


def output(at: int) -> Message:
    return Item.of({"type": "function_call_output", "call_id": f"c{at}", "output": LONG})


@pytest.mark.parametrize(
    ("before", "folded"),
    [
        ([{"type": "reasoning", "id": "r1", "summary": []}], True),
        ([{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So."}]}], True),
        ([{"type": "web_search_call", "id": "ws1", "status": "completed"}], False),
    ],
)
def test_items_are_folded_but_for_what_the_provider_ran(before: list[dict[str, Any]], folded: bool) -> None:
    start = Item.of({"type": "message", "role": "user", "content": "Go"})
    made = planned([start, turn(0), output(0), turn(1, *before), output(1), turn(9), output(9)])
    assert len(made.view) == (5 if folded else 7)
    assert ("[then" in made.view[2].text) is folded


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("shell_call", {"output": [{"stdout": "", "stderr": LONG, "outcome": {"type": "exit", "exit_code": 3}}]}),
        ("apply_patch_call", {"status": "failed", "output": LONG}),
        ("tool_search_call", {"execution": "client", "tools": [{"type": "function", "name": "late"}]}),
    ],
)
def test_a_call_whose_result_says_more_than_its_text_stays(kind: str, fields: dict[str, Any]) -> None:
    item = {"type": kind, "call_id": "c1", "execution": "client"}
    result = {"type": "tool_search_output" if kind.startswith("tool") else f"{kind}_output", "call_id": "c1", **fields}
    log = [Item.of({"type": "message", "role": "user", "content": "Go"}), turn(0), output(0)]
    log += [Item.of({"type": "turn", "role": "assistant", "items": [item]}), Item.of(result)]
    made = planned([*log, turn(2), output(2), turn(3), output(3), turn(9), output(9)])
    assert made.view[3].calls[0].id == "c1"
    assert "[then" not in made.view[4].text
    assert len(made.view) == 9


def test_folding_needs_short_arguments() -> None:
    with pytest.raises(ValidationError, match="fold_calls needs clear_inputs: true"):
        Policy.model_validate({"edits": [{"type": "clear_tool_results", "fold_calls": True}]})
