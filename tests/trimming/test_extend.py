"""The plan of a log that goes on is the same whether its beginning was planned again or not."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.trimming.extend import PlannedStart, extended, planned_start
from proxy.trimming.model import Cut, Entry, PlanningContext
from proxy.trimming.planner import plan
from proxy.trimming.policy import Policy
from tests.trimming.growing import hidden
from tests.trimming.histories import SPANS, TRIED, broken
from tests.trimming.notation import KNOWN, entries

POLICIES: list[dict[str, Any]] = [
    {"trigger": {"cost": "auto", "ratio": 0.9}, "edits": [{"type": "clear_tool_results", "keep": 1}]},
    {"trigger": {"messages": 9}, "target": {"tokens": 120}, "edits": [{"type": "drop_oldest"}]},
    {
        "trigger": {"tokens": 90},
        "target": {"tokens": 60},
        "edits": [{"type": "clear_tool_results", "keep": 0}, {"type": "drop_oldest"}],
    },
    {"trigger": {"tool_calls": 3}, "edits": [{"type": "clear_tool_results", "keep": 1}]},
    {"on_arrival": [{"type": "compact_tool_output", "over_tokens": 0}]},
    {"trigger": {"tokens": 400}, "edits": [{"type": "summarize", "mode": "model"}]},
    {},
]
LEAN = {
    "trigger": {"tokens": 300},
    "target": {"tokens": 200},
    "keep": {"rounds": 1, "spans": 1},
    "edits": [{"type": "clear_tool_results", "keep": 0, "digest_chars": 0}],
}
LONG = "word " * 60


def stored(log: list[Entry]) -> list[Entry]:
    """Return entries as they come back: what was decided about each on arrival is recorded."""
    return [replace(entry, arrival=entry.arrival or ()) for entry in log]


def said(*roles: str) -> list[Entry]:
    return entries([ChatMessage.of({"role": role, "content": f"{role} {number}"}) for number, role in enumerate(roles)])


def call(name: str, text: str = LONG) -> list[Message]:
    function = {"name": "search", "arguments": "{}"}
    calls = [{"id": name, "type": "function", "function": function}]
    return [
        ChatMessage.of({"role": "assistant", "content": None, "tool_calls": calls}),
        ChatMessage.of({"role": "tool", "tool_call_id": name, "content": text}),
    ]


def begun(
    log: list[Entry], count: int, policy: Policy, cut: Cut | None = None, context: PlanningContext = KNOWN
) -> PlannedStart | None:
    """Return what the plan of a log says of the next one, of which the first `count` messages are stored."""
    return planned_start(log, count, plan(log, policy, "p", context, cut), policy, context)


@TRIED
@given(st.lists(st.one_of(SPANS, SPANS, SPANS, broken()), min_size=1, max_size=12), st.integers(0, 10**6))
def test_a_log_that_goes_on_has_the_plan_that_it_would_have_without(blocks: list[list[Message]], seed: int) -> None:
    chance = Random(seed)  # noqa: S311 - the same for the same seed
    log = entries([message for block in blocks for message in block])
    if not log:
        return
    policy = Policy.model_validate(chance.choice(POLICIES))
    start: PlannedStart | None = None
    cut: Cut | None = None
    seen = 0
    for stop in sorted({chance.randint(1, len(log)) for _ in range(5)} | {len(log)}):
        given = stored(log[:seen]) + log[seen:stop]
        context = replace(KNOWN, fixed_tokens=chance.choice([0, 40]), idle=chance.choice([None, 0.0, 900.0]))
        expected = plan(given, policy, "p", context, cut)
        if start is not None:
            made = extended(start, given, policy, "p", context, cut)
            assert made is None or made == expected
        start = planned_start(given, seen, expected, policy, context)
        cut, seen = expected.cut, stop


def test_nothing_is_planned_again_where_nothing_fires() -> None:
    policy = Policy.model_validate(POLICIES[0])
    log = said("user", "assistant", "user", "assistant", "user")
    start = begun(stored(log[:2]) + log[2:3], 2, policy)
    assert start is not None
    made = extended(start, stored(log[:4]) + log[4:], policy, "p", KNOWN, None)
    assert made == plan(stored(log[:4]) + log[4:], policy, "p", KNOWN)
    assert made is not None
    assert made.view[:2] == start.view

    whole = stored(log[:2]) + log[2:]
    assert extended(start, whole, policy, "p", KNOWN, None) is not None
    other = Policy.model_validate(POLICIES[1])
    assert extended(start, whole, other, "p", KNOWN, None) is None  # another version
    assert extended(start, whole, policy, "q", KNOWN, None) is None
    assert extended(start, whole, policy, "p", replace(KNOWN, context_window=9), None) is None
    assert extended(start, whole[1:], policy, "p", KNOWN, None) is None  # another beginning
    assert extended(start, whole, policy, "p", replace(KNOWN, idle=900.0), None) is None  # the cache is cold

    by_size = begun(whole[:3], 2, other)
    assert by_size is not None
    longer = stored(log[:2]) + said(*["user", "assistant"] * 5)[2:]
    assert extended(by_size, longer, other, "p", KNOWN, None) is None  # its trigger fires
    questions = said("user", "user")
    start = begun(questions, 1, policy)
    assert start is not None
    assert extended(start, questions, policy, "p", KNOWN, None) is None  # there is no reply: the cost is not known


def trimmed(policy: Policy) -> tuple[list[Entry], Cut]:
    """Return a log of calls whose results a trim has cleared, and its cut."""
    asked = ChatMessage.of({"role": "user", "content": "look"})
    log = entries([asked, *call("a"), *call("b"), *call("c")])
    cut = plan(log, policy, "p", KNOWN).cut
    assert cut is not None
    assert cut.changes
    return log, cut


@pytest.mark.parametrize(
    ("more", "sure"),
    [
        ([ChatMessage.of({"role": "user", "content": "go on"})], True),
        (call("d", "ok"), True),
        ([*call("d", "ok"), *call("e", "ok")], True),
        (call("d", "ok")[:1], False),  # a call without its result is repaired
        ([ChatMessage.of({"role": "tool", "tool_call_id": "c", "content": "again"})], False),
    ],
)
def test_what_comes_after_a_cut_is_sent_as_it_is(more: list[Message], sure: bool) -> None:
    policy = Policy.model_validate(LEAN)
    log, cut = trimmed(policy)
    start = begun(stored(log), len(log), policy, cut)
    assert start is not None
    assert start.view == plan(stored(log), policy, "p", KNOWN, cut).view
    whole = stored(log) + entries([*[entry.message for entry in log], *more])[len(log) :]
    made = extended(start, whole, policy, "p", KNOWN, cut)
    assert (made is not None) is sure
    assert made is None or made == plan(whole, policy, "p", KNOWN, cut)
    assert extended(start, whole, policy, "p", KNOWN, None) is None


@pytest.mark.parametrize("of", ["arrival", "hidden"])
@pytest.mark.parametrize(("more", "sure"), [(call("d", "ok"), True), (call("d", "ok")[:1], False)])
def test_what_comes_after_a_changed_message_is_sent_as_it_is_without_a_cut(
    of: str, more: list[Message], sure: bool
) -> None:
    asked = ChatMessage.of({"role": "user", "content": "look"})
    log = entries([asked, *call("a")])
    if of == "arrival":
        shortening = Policy.model_validate({"on_arrival": [{"type": "truncate_tool_output", "max_bytes": 100}]})
        decided = plan(log, shortening, "p", KNOWN).decided
        log = [replace(entry, arrival=changes) for entry, changes in zip(log, decided, strict=True)]
        assert log[-1].arrival
    else:
        log = stored([log[0], replace(log[1], hidden=hidden(log[1], KNOWN)), log[2]])
    policy = Policy.model_validate({})  # the edits on arrival were taken out of it
    start = begun(log, len(log), policy)
    assert start is not None
    assert start.plan.cut is None
    whole = log + entries([*[entry.message for entry in log], *more])[len(log) :]
    made = extended(start, whole, policy, "p", KNOWN, None)
    assert (made is not None) is sure
    assert made is None or made == plan(whole, policy, "p", KNOWN)


def test_a_call_that_waits_is_planned_with_its_result() -> None:
    policy = Policy.model_validate(LEAN)
    log, cut = trimmed(policy)
    messages = [entry.message for entry in log]
    whole = stored(log) + entries([*messages, *call("d", "ok")])[len(log) :]
    start = begun(stored(whole[:-1]) + whole[-1:], len(whole) - 1, policy, cut)
    assert start is not None
    assert len(start.entries) == len(log)
    more = stored(whole) + entries([*[entry.message for entry in whole], *call("e", "ok")])[len(whole) :]
    assert extended(start, more, policy, "p", KNOWN, cut) == plan(more, policy, "p", KNOWN, cut)


def test_a_plan_that_did_something_says_nothing_of_the_next() -> None:
    policy = Policy.model_validate(LEAN)
    log, cut = trimmed(policy)
    assert begun(log, len(log), policy) is None  # it trims
    arriving = Policy.model_validate(POLICIES[4])
    assert begun(log, len(log), arriving) is None
    broken_off = stored(log[:-1])  # a call lost its result: it is repaired
    assert begun(broken_off, len(broken_off), policy, replace(cut, position=len(broken_off))) is None
    assert begun(log, 0, Policy.model_validate({})) is None
    behind = replace(log[-1], hidden=hidden(log[-2], KNOWN))
    assert begun([*log[:-1], behind], len(log) - 2, Policy.model_validate({})) is None
    # What is stored ends before the cut: nobody knows what is sent of it alone.
    assert begun(stored(log), 2, policy, cut) is None
    # A prepared summary is to be looked at.
    start = begun(stored(log), len(log), policy, cut)
    assert start is not None
    asked: Any = replace(KNOWN, ready_summary=object())
    assert extended(start, log, policy, "p", asked, cut) is None
