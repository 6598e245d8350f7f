from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from proxy.backtest.recall import CAVEAT, Counts, RecallCounts, References, readable
from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage

RECORDED = Path(__file__).parents[1] / "data" / "trajectories"
SYSTEM = ChatMessage.of({"role": "system", "content": "You book flights. Support: help@example.org"})


def user(text: str) -> Message:
    return ChatMessage.of({"role": "user", "content": text})


def reply(text: str) -> Message:
    return ChatMessage.of({"role": "assistant", "content": text})


def calling(*arguments: Any) -> Message:
    calls = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "f", "arguments": each if isinstance(each, str) else json.dumps(each)},
        }
        for number, each in enumerate(arguments)
    ]
    return ChatMessage.of({"role": "assistant", "content": None, "tool_calls": calls})


def result(text: str) -> Message:
    return ChatMessage.of({"role": "tool", "tool_call_id": "call_0", "content": text})


def filler(count: int) -> list[Message]:
    return [reply(f"thinking {'so ' * number}") for number in range(count)]


def masked(messages: Sequence[Message], text: str = "[cleared]") -> list[Message]:
    return [each.replacing("content", text) if each.is_result else each for each in messages]


def counts(grounded: int, present: int, *, bound: int | None = None, whole: int | None = None) -> Counts:
    """Counts of one call, all values of which something names."""
    return Counts(
        grounded=grounded,
        present=present,
        bound_possible=grounded,
        bound=present if bound is None else bound,
        calls=1,
        whole=int(present == grounded) if whole is None else whole,
        shares=present / grounded,
    )


def test_values_that_occurred_before_are_grounded_and_the_others_are_not() -> None:
    history = [user("Fly to BOS1"), calling({"to": "BOS1", "from": "JFK1"})]

    found = References([], history).judge(1, history[:1])

    assert found.every == found.pinned == counts(1, 1)
    assert found.near == found.far == found.tool_only == Counts()


def test_the_strata_tell_where_a_value_last_occurred() -> None:
    history = [
        calling({"q": "x"}),
        result("flight: HAT136, seat: 14C7"),
        reply("The flight is HAT136"),
        *filler(4),
        user("go on with ORD77"),
        result("gate: B22"),
        calling({"a": "help@example.org", "b": "ORD77", "c": "B22", "d": "HAT136", "e": "14C7"}),
    ]
    references = References([SYSTEM], history)

    assert {references.atoms[each.atom]: each.strata for each in references.references(9)[0]} == {
        "help@example.org": ("every", "pinned"),
        "ORD77": ("every", "pinned"),
        "B22": ("every", "near"),
        "HAT136": ("every", "far", "key"),
        "14C7": ("every", "far", "tool_only", "key"),
    }
    assert references.positions == (0, 9)
    assert references.references(0) == ((),)
    assert references.references(2) == ()


def test_near_are_the_last_six_messages() -> None:
    near = [result("id: A77"), *filler(5), calling({"id": "A77"})]
    far = [result("id: A77"), *filler(6), calling({"id": "A77"})]

    assert References([], near).judge(6, []).near.grounded == 1
    assert References([], far).judge(7, []).far.grounded == 1


def test_only_the_latest_user_message_is_pinned() -> None:
    history = [user("order A77"), *filler(7), user("go on"), calling({"id": "A77"})]

    assert References([], history).judge(9, history[:9]).far == counts(1, 1)


def test_tools_are_pinned_like_instructions() -> None:
    history = [result("mode: fast_lane"), *filler(7), calling({"mode": "fast_lane"})]

    found = References([], history, tools='[{"enum": ["fast_lane"]}]').judge(8, [])

    assert found.every == found.pinned == counts(1, 1)


def test_what_the_view_left_out_is_not_present() -> None:
    history = [result("flight: HAT136, seat: 14C7"), reply("flight: HAT136"), *filler(6)]
    history.append(calling({"flight": "HAT136", "seat": "14C7"}))
    references = References([SYSTEM], history)

    assert references.judge(8, [SYSTEM, *history[:8]]).far == counts(2, 2)
    found = references.judge(8, [SYSTEM, *masked(history[:8])])
    assert found.far == found.every == counts(2, 1)
    assert found.tool_only == counts(1, 0)
    assert references.judge(8, []).far == counts(2, 0)


def test_a_stub_that_names_a_value_keeps_it_bound_and_a_bag_of_ids_does_not() -> None:
    history = [result('{"flight_number": "HAT136", "seat": "14C7"}'), *filler(6)]
    history.append(calling({"flight": "HAT136"}))
    references = References([], history)

    named = references.judge(7, masked(history[:7], "[cleared: flight_number=HAT136]"))
    bag = references.judge(7, masked(history[:7], "HAT136 14C7"))
    distant = references.judge(7, masked(history[:7], f"flight_number {'. ' * 70} HAT136"))

    assert named.tool_only == counts(1, 1)
    assert bag.tool_only == distant.tool_only == counts(1, 1, bound=0)


def test_a_value_that_nothing_named_cannot_be_bound() -> None:
    history = [result("HAT136 1450"), *filler(6), calling({"flight": "HAT136"})]

    assert References([], history).judge(7, history[:7]).far == Counts(
        grounded=1, present=1, bound_possible=0, bound=0, calls=1, whole=1, shares=1.0
    )


def test_every_call_of_a_message_counts_by_itself() -> None:
    history = [result("one: A11, two: B22, three: C33"), *filler(6), calling({"x": "A11", "y": "B22"}, {"x": "C33"})]

    found = References([], history).judge(7, masked(history[:7], "one: A11, three: C33"))

    assert found.far == Counts(grounded=3, present=2, bound_possible=3, bound=2, calls=2, whole=1, shares=1.5)


def test_messages_without_calls_and_calls_without_values_count_nothing() -> None:
    history = [user("hello A11"), reply("A11?"), calling({}), calling({"new": "B22"})]
    references = References([], history)

    assert [references.judge(position, history[:position]) for position in range(4)] == [RecallCounts()] * 4


def test_values_are_found_behind_the_escapes_of_json() -> None:
    history = [
        calling({"body": "first\nORD77 second"}),
        result('{"log": "one\\nJOB88", "city": "\\u5317\\u4eac\\ud83d\\ude00"}'),
        *filler(6),
        calling({"order": "ORD77", "job": "JOB88", "city": "北京"}),
    ]

    assert References([], history).judge(8, history[:8]).far == counts(3, 3)


def test_free_text_and_calls_of_the_older_form_are_read() -> None:
    older = ChatMessage.of(
        {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": '{"id": "ORD77"}'}}
    )
    broken = ChatMessage.of({"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": 3}})

    assert readable(broken) == "\n3"
    assert readable(user("x")) == "x"
    assert readable(older) == "\nid: ORD77"
    assert readable(calling("run ORD77 {")) == "\nrun ORD77 {"
    assert References([], [user("order ORD77"), older]).judge(1, []).pinned == counts(1, 0)


def test_a_message_that_stands_twice_is_held_at_both_places() -> None:
    history = [result("id: A11"), result("id: A11"), calling({"id": "A11"})]
    references = References([], history)

    assert sorted(references.holders(0)) == [0, 1, 2]


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.json")), ids=lambda path: path.stem)
def test_of_a_real_session_sent_whole_nothing_is_missing_and_masked_only_what_stood_in_results(path: Path) -> None:
    messages = [ChatMessage.of(each) for each in json.loads(path.read_text("utf-8"))["messages"]]
    references = References([], messages)

    for position in references.positions:
        before = messages[:position]
        whole = references.judge(position, before)
        hidden = references.judge(position, masked(before))
        strata = (whole.every, whole.pinned, whole.near, whole.far, whole.tool_only)
        assert all(each.present == each.grounded and each.bound == each.bound_possible for each in strata)
        assert whole.pinned.grounded + whole.near.grounded + whole.far.grounded == whole.every.grounded
        assert whole.tool_only.grounded == hidden.tool_only.grounded
        assert (hidden.pinned.present, hidden.tool_only.present) == (whole.pinned.present, 0)
        assert hidden.far.present == whole.far.grounded - whole.tool_only.grounded


def test_counts_add_up_stratum_by_stratum() -> None:
    one = RecallCounts(
        every=Counts(grounded=4, present=3, bound_possible=2, bound=1, calls=1, whole=0),
        far=Counts(grounded=4, present=3, bound_possible=2, bound=1, calls=1, whole=0),
    )
    two = RecallCounts(
        every=Counts(grounded=1, present=1, bound_possible=1, bound=1, calls=1, whole=1),
        near=Counts(grounded=1, present=1, bound_possible=1, bound=1, calls=1, whole=1),
    )

    total = one + two

    assert total == RecallCounts(
        every=Counts(grounded=5, present=4, bound_possible=3, bound=2, calls=2, whole=1),
        near=Counts(grounded=1, present=1, bound_possible=1, bound=1, calls=1, whole=1),
        far=Counts(grounded=4, present=3, bound_possible=2, bound=1, calls=1, whole=0),
    )
    assert (total.every.recall, total.every.bound_recall, total.every.whole_calls) == (0.8, 2 / 3, 0.5)
    assert (Counts().recall, Counts().bound_recall, Counts().whole_calls) == (None, None, None)
    assert "not sufficient" in CAVEAT


def test_whole_arguments_are_key_and_values_of_others_are_held_by_chance() -> None:
    history = [user("go"), *(result(f"order_{at} is at src/a{at}.py") for at in range(2)), *[user("more")] * 7]
    asking = calling({"path": "src/a0.py", "note": "see order_1 there"})
    references = References([], [*history, asking], strangers=["src/a1.py", "elsewhere_7", "src/a0.py"])
    found = references.judge(len(history), history)
    assert found.key == counts(1, 1)
    assert found.far.grounded == found.tool_only.grounded > 1
    assert (found.chance.grounded, found.chance.present) == (2, 1)
    part = references.judge(len(history), [history[2], *history[3:]])
    assert part.key.mean_of_calls == 0
    assert 0 < (part.far.mean_of_calls or 0) < 1
    assert references.judge(0, history).chance == Counts()
