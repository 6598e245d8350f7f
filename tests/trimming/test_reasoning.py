"""Reasoning is bound to what stands before it: a trim leaves out what it makes invalid, and nothing else."""

from __future__ import annotations

from typing import Any

import orjson

from proxy.conversation import body_of
from proxy.dialects import Message, dialect_named
from proxy.dialects.responses.items import Item, turn_of
from proxy.recall import ref_of
from proxy.trimming import Cut, Entry, Hidden, Plan, PlanningContext, Policy, StaleRange, plan
from proxy.trimming.draft import joined_ranges
from proxy.trimming.history import without_reasoning

API = dialect_named("responses")
LONG = "many words " * 80


def turn(number: int, *, call: bool = True) -> Item:
    items: list[dict[str, Any]] = [{"type": "reasoning", "id": f"rs_{number}", "summary": [], "encrypted_content": "x"}]
    if call:
        items.append(
            {"type": "function_call", "id": f"fc_{number}", "call_id": f"c{number}", "name": "f", "arguments": "{}"}
        )
    else:
        items.append({"type": "message", "id": f"msg_{number}", "role": "assistant", "content": "ok"})
    return Item(turn_of([orjson.dumps(item) for item in items]))


def talk(rounds: int) -> list[Message]:
    """Return rounds of a question, a call, its result and an answer."""
    said: list[Message] = []
    for number in range(rounds):
        said += [API.spoken("user", f"question {number}"), turn(2 * number), API.result(f"c{2 * number}", LONG)]
        said.append(turn(2 * number + 1, call=False))
    return [*said, API.spoken("user", "and now?")]


def entries(messages: list[Message], hidden: dict[int, Hidden] | None = None) -> list[Entry]:
    return [
        Entry(
            message=message,
            tokens=4 + len(message.raw) // 4,
            ref=ref_of(body_of(message)),
            position=at,
            hidden=(hidden or {}).get(at),
        )
        for at, message in enumerate(messages)
    ]


def planned(
    given: list[Entry], cut: Cut | None = None, *, fork: int | None = None, start: int = 0, **policy: Any
) -> Plan:
    chosen = {"trigger": {"tokens": 500}, "keep": {"rounds": 1}, "edits": [{"type": "clear_tool_results", "keep": 1}]}
    context = PlanningContext(count=lambda message: 4 + len(message.raw) // 4, fork=fork)
    return plan(given, Policy.model_validate(chosen | policy), "p", context, cut, start=start)


def reasoning(view: tuple[Message, ...]) -> list[str]:
    """Return the ids of the reasoning items of a view."""
    return [item["id"] for each in view if isinstance(each, Item) for item in each.items if item["type"] == "reasoning"]


def test_reasoning_from_the_first_change_on_is_left_out_and_stays_out() -> None:
    made = planned(entries(talk(3)))
    assert made.trimmed
    assert made.cut is not None
    assert made.cut.stale == (StaleRange(start=2, stop=12),)
    assert reasoning(made.view) == ["rs_0"]  # it stands before the first result that was cleared
    assert API.problems(made.view) == []
    assert "fc_2" not in str(made.view[5].data)

    more = [*talk(3), turn(90, call=False), API.spoken("user", "go on")]
    later = planned(entries(more), made.cut)
    assert not later.trimmed
    assert later.view[: len(made.view)] == made.view
    assert reasoning(later.view) == ["rs_0", "rs_90"]


def test_a_later_trim_leaves_out_what_is_behind_its_own_changes() -> None:
    first = planned(entries(talk(3)))
    more = talk(5)
    second = planned(entries(more), first.cut)
    assert second.cut is not None
    assert second.trimmed
    assert second.cut.stale == (StaleRange(start=2, stop=20),)
    assert reasoning(second.view) == ["rs_0"]
    third = planned(entries([*more, *talk(1)]), second.cut, trigger={"tokens": 100}, edits=[{"type": "drop_internal"}])
    assert reasoning(third.view) != []  # another version begins anew, and what changes by that is told


def test_where_nothing_was_changed_reasoning_stays() -> None:
    made = planned(entries(talk(3)), edits=[{"type": "drop_internal"}])
    assert made.trimmed
    assert made.cut is not None
    assert made.cut.stale == ()
    assert len(reasoning(made.view)) == 6
    plain = [each for each in talk(3) if each.role != "assistant" or each.calls]
    bare = [API.message(each.raw) if each.role != "assistant" else each for each in plain]
    quiet = planned(entries([_mute(each) for each in bare]))
    assert quiet.cut is not None
    assert quiet.cut.stale == ()


def _mute(message: Message) -> Message:
    return message.without_reasoning() or message


def test_a_summary_in_front_makes_all_reasoning_invalid() -> None:
    summarize = {"type": "summarize", "mode": "statistics", "upper": 300, "lower": 200, "min_messages": 2}
    made = planned(entries(talk(4)), edits=[{**summarize, "min_new_messages": 1, "keep_rounds": 0}])
    assert made.summary is not None
    assert reasoning(made.view) == []


def test_a_client_s_own_window_keeps_what_was_decided_before_it() -> None:
    first = planned(entries(talk(4)))
    assert first.cut is not None
    window = entries(talk(6))[4:]
    second = planned(window, first.cut, start=4, edits=[{"type": "clear_tool_results", "keep": 0}])
    assert second.cut is not None
    assert second.cut.stale[0].start == 2
    again = planned(window, second.cut, start=4, edits=[{"type": "clear_tool_results", "keep": 0}])
    assert not again.trimmed
    assert again.view == second.view


def test_a_trim_that_leaves_reasoning_out_behind_a_fork_is_not_shared() -> None:
    given = entries(talk(3))
    assert planned(given, fork=11).cut == planned(given).cut


def test_what_the_client_was_not_shown_loses_its_reasoning_too() -> None:
    hidden = Hidden(before=(turn(70), API.result("c70", "x")), reply=turn(71, call=False), after=(), tokens=9)
    messages, beside = without_reasoning([turn(1, call=False), None], {0: hidden}, [0, 1])
    assert messages[1] is None
    assert reasoning(beside[0].before) == []
    assert beside[0].reply is not None
    assert reasoning((beside[0].reply,)) == []
    bare = Hidden(before=(), reply=None, after=(), tokens=0)
    assert without_reasoning([None], {0: bare}, [0])[1] == {0: bare}
    made = planned(entries(talk(3), {9: hidden}))
    assert reasoning(made.view) == ["rs_0"]
    assert len(made.view) == len(talk(3)) + 2


def test_stretches_that_meet_are_one() -> None:
    parts = [
        StaleRange(start=5, stop=9),
        StaleRange(start=0, stop=2),
        StaleRange(start=2, stop=3),
        StaleRange(start=6, stop=7),
    ]
    assert joined_ranges(parts) == (StaleRange(start=0, stop=3), StaleRange(start=5, stop=9))


def test_what_the_provider_summed_up_is_never_trimmed() -> None:
    summed = Item(turn_of([b'{"type":"compaction","encrypted_content":"x"}']))
    given = entries([API.spoken("user", "one"), summed, *talk(3)])
    made = planned(given, target={"tokens": 1}, edits=[{"type": "drop_oldest"}])
    assert made.view[0] is summed
    assert len(made.view) == 2
