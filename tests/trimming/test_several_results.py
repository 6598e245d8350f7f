"""A message with several results, and text beside them: each result is decided about by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from proxy.conversation import body_of
from proxy.dialects import Message
from proxy.dialects.messages import DIALECT as MESSAGES
from proxy.recall import ref_of, referred
from proxy.trimming import Entry, Plan, PlanningContext, Policy, plan
from proxy.trimming.trim import BEYOND_KEEP

LONG = "many words about one thing " * 40
OTHER = "few words about another thing " * 40
REMINDER = {"type": "text", "text": "Mind the gap."}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}


def user(*blocks: Any, **fields: Any) -> Message:
    return MESSAGES.message(orjson.dumps({"role": "user", "content": list(blocks), **fields}))


def ask(text: str) -> Message:
    return MESSAGES.spoken("user", text)


def reply(*blocks: Any, **fields: Any) -> Message:
    return MESSAGES.message(orjson.dumps({"role": "assistant", "content": list(blocks), **fields}))


def use(identity: str, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": identity, "name": "look", "input": given}


def result(identity: str, text: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": identity, "content": text}


TALK: list[Message] = [
    ask("What is there?"),
    reply(use("a"), use("b", note="n" * 300)),
    user(result("a", LONG), result("b", OTHER), REMINDER),
    reply({"type": "text", "text": "Two things."}),
    ask("And now?"),
    reply(use("c"), use("d")),
    user(result("c", LONG), result("d", LONG)),
    reply({"type": "text", "text": "The same."}),
    ask("Thank you."),
]


def _count(message: Message) -> int:
    return 4 + len(message.raw) // 4


def entries(messages: Sequence[Message]) -> list[Entry]:
    return [
        Entry(
            message=message.without_own_fields(),
            tokens=_count(message),
            ref=ref_of(body_of(message)),
            position=at,
            is_internal=message.is_internal,
        )
        for at, message in enumerate(messages)
    ]


def planned(*edits: dict[str, Any], messages: Sequence[Message] = TALK, **policy: Any) -> Plan:
    chosen = {"trigger": {"every_request": True}, "edits": edits, "keep": {"rounds": 1}, **policy}
    made = plan(entries(messages), Policy.model_validate(chosen), "p", PlanningContext(count=_count), None)
    assert MESSAGES.problems(made.view) == []
    return made


def test_results_are_cleared_one_by_one_and_the_text_beside_them_stays() -> None:
    made = planned({"type": "clear_tool_results", "keep": 3})
    cleared, other, beside = made.view[2].data["content"]
    assert cleared["content"].startswith("[cleared ")
    assert f"ref={body_of(TALK[2])[:8]}-1" in cleared["content"]
    assert (other, beside) == (result("b", OTHER), REMINDER)
    (change,) = made.changes
    assert (change.position, change.tokens_before) == (2, _count(TALK[2]))

    assert made.cut is not None
    policy = Policy.model_validate(
        {
            "trigger": {"every_request": True},
            "edits": [{"type": "clear_tool_results", "keep": 1}],
            "keep": {"rounds": 1},
        }
    )
    first = plan(entries(TALK), policy, "p", PlanningContext(count=_count), None)
    more = [*TALK, reply(use("e")), user(result("e", OTHER)), ask("So?")]
    later = plan(entries(more), policy, "p", PlanningContext(count=_count), first.cut)
    assert later.view[2] == first.view[2]
    assert [block["content"][:9] for block in later.view[6].data["content"]] == ["[cleared ", "[cleared "]
    assert later.view[6].data["content"][0] == first.view[6].data["content"][0]
    assert first.view[6].data["content"][1] == result("d", LONG)


def test_the_arguments_go_once_all_results_are_cleared() -> None:
    made = planned({"type": "clear_tool_results", "keep": 3, "clear_inputs": True})
    assert len(made.view[1].calls[1].arguments) > 300
    made = planned({"type": "clear_tool_results", "keep": 2, "clear_inputs": True})
    assert len(made.view[1].calls[1].arguments) < 300


@pytest.mark.parametrize(
    ("ref", "text"),
    [("{}-1", LONG), ("{}-2", OTHER), ("{}", f"{LONG}\n\n{OTHER}\n\nMind the gap."), ("{}-3", None), ("{}-0", None)],
)
def test_a_ref_names_one_of_several_results(ref: str, text: str | None) -> None:
    found = referred(ref.format(ref_of(body_of(TALK[2]))), TALK[2])
    assert (None if found is None else found.text) == text


def test_a_ref_to_one_result_leaves_out_what_stands_beside_it() -> None:
    one = user(result("a", LONG), REMINDER)
    found = referred(ref_of(body_of(one)), one)
    assert found is not None
    assert found.text == LONG


def test_results_are_shortened_one_by_one() -> None:
    lines = "\n".join(f"line {n} of many" for n in range(50))
    talk = [TALK[0], TALK[1], user(result("a", lines), result("b", "short"), REMINDER), *TALK[3:]]
    made = planned({"type": "truncate_tool_output", "max_lines": 4}, messages=talk)
    cut, short, beside = made.view[2].data["content"]
    assert len(cut["content"]) < len(lines)
    assert f"full output: {ref_of(body_of(talk[2]))}-1 " in cut["content"]
    assert (short, beside) == (result("b", "short"), REMINDER)
    cuts = [{"type": "truncate_tool_output", "max_lines": 4}]
    arrived = planned(messages=talk, on_arrival=cuts, trigger=None)
    assert arrived.view[2] == made.view[2]
    assert planned({"type": "truncate_tool_output"}, messages=talk).view[2] == talk[2]


def test_a_result_that_repeats_one_in_the_same_message_points_to_it() -> None:
    made = planned({"type": "deduplicate_results"})
    assert made.view[2] == TALK[2]
    assert [block["content"][:12] for block in made.view[6].data["content"]] == ["[same output", "[same output"]
    both = planned({"type": "deduplicate_results"}, messages=TALK[4:])
    whole, pointer = both.view[2].data["content"]
    assert whole == result("c", LONG)
    assert f"ref={ref_of(body_of(TALK[6]))}-1" in pointer["content"]


def test_a_pointer_is_taken_back_when_what_it_points_to_goes() -> None:
    made = planned({"type": "deduplicate_results"}, {"type": "keep_rounds", "last": 1})
    first, second = made.view[2].data["content"]
    assert first == result("c", LONG)
    assert second["content"].startswith("[same output")


def test_old_calls_go_and_the_text_beside_their_results_stays() -> None:
    made = planned({"type": "keep_tool_calls", "last": 3})
    assert [call.id for call in made.view[1].calls] == ["b"]
    assert made.view[2].data["content"] == [result("b", OTHER), REMINDER]
    made = planned({"type": "keep_tool_calls", "last": 1})
    assert [message.role for message in made.view[:3]] == ["user", "user", "assistant"]
    assert made.view[1].data["content"] == [REMINDER]
    assert made.view[5].data["content"] == [result("d", LONG)]
    gone = planned({"type": "keep_tool_calls", "last": 0})
    assert all(not message.is_result and not message.calls for message in gone.view)


def test_what_is_internal_goes_with_its_results() -> None:
    marked = [TALK[0], reply(use("a"), use("b"), is_internal=True), *TALK[2:]]
    made = planned({"type": "drop_internal"}, messages=marked)
    assert made.view[1].data["content"] == [REMINDER]
    half = [TALK[0], TALK[1], user(result("a", LONG), is_internal=True), user(result("b", OTHER), REMINDER), *TALK[3:]]
    made = planned({"type": "drop_internal"}, messages=half)
    assert [call.id for call in made.view[1].calls] == ["b"]
    assert made.view[2] == half[3]


def test_what_was_said_last_beside_results_is_protected() -> None:
    talk = TALK[:3]
    made = planned({"type": "drop_oldest"}, messages=talk, target={"tokens": 1}, keep={"rounds": 0, "spans": 0})
    assert made.view[-2:] == (TALK[1], TALK[2])
    pins = [{"regex": "gap", "roles": ["user"]}]
    pinned = planned({"type": "drop_oldest"}, target={"tokens": 1}, pin=pins, keep={"rounds": 0})
    assert TALK[2] in pinned.view


@pytest.mark.parametrize(
    "edit", [{"type": "keep_tool_calls", "last": 0, "scope": "all"}, {"type": "recent_window", "tokens": 60}]
)
def test_no_reply_ends_the_view_where_what_followed_it_was_trimmed(edit: dict[str, Any]) -> None:
    said = {"type": "text", "text": "I will look."}
    talk = [ask("What is there?"), reply(said), reply(said, use("a")), user(result("a", LONG))]
    made = planned(edit, messages=talk, keep={"rounds": 0, "spans": 0})
    assert made.view == (talk[0],)
    assert made.tokens_sent == _count(talk[0])


def test_results_beside_what_was_said_last_are_cut_where_the_request_is_too_long() -> None:
    talk = [*TALK[:1], reply(use("a")), user(result("a", "line of it\n" * 2000), REMINDER)]

    def rescued(**policy: Any) -> Plan:
        context = PlanningContext(count=_count)
        return plan(entries(talk), Policy.model_validate(policy), "p", context, None, overflow=1000)

    made = rescued()
    assert made.tokens_sent <= 1000
    assert MESSAGES.problems(made.view) == []
    cut, beside = made.view[-1].data["content"]
    assert beside == REMINDER
    assert ref_of(body_of(talk[2])) in cut["content"]
    assert BEYOND_KEEP in made.warnings
    # Pinned, it stays as it is.
    assert rescued(pin=[{"regex": "gap", "roles": ["user"]}]).view[-1] == talk[2]


def test_a_result_that_lost_the_others_keeps_its_ref() -> None:
    made = planned(
        {"type": "keep_tool_calls", "last": 3}, {"type": "truncate_tool_output", "max_bytes": 90}, keep={"rounds": 1}
    )
    assert f"{ref_of(body_of(TALK[2]))}-2" in made.view[2].text
    alone = [TALK[0], reply(use("a"), use("b")), user(result("a", LONG), result("b", OTHER)), *TALK[3:]]
    made = planned(
        {"type": "keep_tool_calls", "last": 3}, {"type": "truncate_tool_output", "max_bytes": 90}, messages=alone
    )
    assert f"{ref_of(body_of(alone[2]))}-2" in made.view[2].text


@pytest.mark.parametrize(("keeps_loop", "kept"), [(False, []), (True, [THOUGHT])])
def test_thinking_of_a_loop_under_way_stays_where_the_model_requires_it(keeps_loop: bool, kept: list[Any]) -> None:
    old = [ask("Before."), reply({"type": "text", "text": LONG})]
    talk = [*old, ask("What is there?"), reply(THOUGHT, use("a")), user(result("a", "x"))]
    policy = Policy.model_validate(
        {"trigger": {"every_request": True}, "target": {"tokens": 60}, "edits": [{"type": "drop_oldest"}]}
    )
    context = PlanningContext(count=_count, keeps_loop=keeps_loop)
    made = plan(entries(talk), policy, "p", context, None)
    assert [block for block in made.view[1].data["content"] if block["type"] == "thinking"] == kept
    done = plan(entries([*talk, reply(THOUGHT), ask("So?")]), policy, "p", context, None)
    assert all(b"signature" not in message.raw for message in done.view)


@pytest.mark.parametrize("keeps_loop", [False, True])
def test_calls_that_stay_are_no_loop_under_way_behind_their_answer(keeps_loop: bool) -> None:
    answer = reply(THOUGHT, {"type": "text", "text": "One thing."})
    talk = [ask("What is there?"), reply(THOUGHT, use("a")), user(result("a", "Mind the gap.")), answer, ask("So?")]
    settings = {"trigger": {"every_request": True}, "target": {"tokens": 1}, "edits": [{"type": "drop_oldest"}]}
    for pins, stays in (([{"regex": "gap", "roles": ["tool"]}], True), ([], False)):
        context = PlanningContext(count=_count, keeps_loop=keeps_loop)
        made = plan(entries(talk), Policy.model_validate(settings | {"pin": pins}), "p", context, None)
        assert any(message.is_result for message in made.view) is stays
        assert any(message.text == "One thing." for message in made.view) is (keeps_loop and stays)
        assert made.view[-1] == talk[-1]


def test_what_results_of_one_message_cost_is_counted_once() -> None:
    names = "abcd"
    talk = [TALK[0], reply(*map(use, names)), user(*[result(each, LONG) for each in names]), *TALK[3:5]]
    assert planned({"type": "clear_tool_results", "keep": 4, "keep_share": 0.99}, messages=talk).changes == ()
    (change,) = planned({"type": "clear_tool_results", "keep": 4, "keep_share": 0.5}, messages=talk).changes
    assert change.message is not None
    assert [each.text.startswith("[cleared") for each in change.message.results] == [True, True, False, False]


@pytest.mark.parametrize("edit", [{"type": "clear_tool_results", "keep": 0}, {"type": "deduplicate_results"}])
def test_however_many_results_a_message_has_it_is_changed_once(edit: dict[str, Any]) -> None:
    names = [f"n{number}" for number in range(300)]
    talk = [TALK[0], reply(*map(use, names)), user(*[result(each, LONG) for each in names]), *TALK[3:5]]
    (change,) = planned(edit, messages=talk).changes
    assert change.message is not None
    assert sum([each.text != LONG for each in change.message.results]) >= 299


def test_of_several_results_no_more_are_cleared_than_the_target_asks_for() -> None:
    names = "abcd"
    talk = [TALK[0], reply(*map(use, names)), user(*[result(each, LONG) for each in names]), *TALK[3:5]]
    target = {"tokens": sum(map(_count, talk)) - 300}
    (change,) = planned({"type": "clear_tool_results", "keep": 0}, messages=talk, target=target).changes
    assert change.message is not None
    assert [each.text.startswith("[cleared") for each in change.message.results] == [True, True, False, False]
