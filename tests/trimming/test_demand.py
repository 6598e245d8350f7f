"""When a summary by a model is wanted, and what it should cover."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from proxy.trimming.cost import NO_CHANGE, Costs
from proxy.trimming.draft import Draft
from proxy.trimming.edits.summarize import COMPACTION, Summarize
from proxy.trimming.model import Account, Prepared, Prices, Size, Summary, SummaryRequest
from proxy.trimming.planner import requested_in_time, tokens_left
from proxy.trimming.policy import Policy
from tests.trimming.edits.held import draft_of
from tests.trimming.notation import KNOWN, messages

PRICES = Prices(read=0.1, write=1.25, output=5.0, lifetime=300.0, minimum=0, source="known")


def edit(**settings: Any) -> Summarize:
    """Return the edit without its conditions, keeping one round, unless the settings say otherwise."""
    free = {"keep_rounds": 1, "min_messages": 0, "min_new_messages": 0, "growth_ratio": 0}
    return Summarize.model_validate({"mode": "model", **free, **settings})


def policy(trigger: dict[str, Any] | None, sums: Summarize) -> Policy:
    keys = {"trigger": trigger, "edits": [sums]} if trigger is not None else {}
    return Policy.model_validate(keys)


def talk(rounds: int) -> Draft:
    """Return a talk of so many rounds of 220 tokens, and a question."""
    lines = [line for n in range(rounds) for line in (f"user {n}{'?' * 99}", f"assistant {n}{'.' * 99}")]
    return draft_of(messages([*lines, "user and now"]))


@pytest.mark.parametrize(
    ("trigger", "settings", "size", "added"),
    [
        ({"tokens": 1000}, {}, Size(tokens=800, messages=0, tool_calls=0), None),
        ({"tokens": 1000}, {}, Size(tokens=801, messages=0, tool_calls=0), 199),
        ({"tokens": 1000}, {"soft": 0.5}, Size(tokens=501, messages=0, tool_calls=0), 499),
        ({"tokens": 1000}, {}, Size(tokens=1200, messages=0, tool_calls=0), 0),
        ({"ratio": 0.5}, {}, Size(tokens=801, messages=0, tool_calls=0), 199),
        ({"messages": 10}, {}, Size(tokens=900, messages=8, tool_calls=0), None),
        ({"messages": 10}, {}, Size(tokens=900, messages=9, tool_calls=0), 100),
        ({"tool_calls": 10}, {}, Size(tokens=900, messages=0, tool_calls=9), 100),
        ({"tool_calls": 10, "tokens": 1000}, {}, Size(tokens=900, messages=0, tool_calls=1), 100),
        ({"every_request": True}, {}, Size(tokens=1, messages=1, tool_calls=0), 0),
        ({"every_request": True}, {"upper": 1000}, Size(tokens=900, messages=0, tool_calls=0), 100),
        ({"every_request": True}, {"upper": 1000}, Size(tokens=800, messages=0, tool_calls=0), None),
        ({"idle_seconds": 9}, {}, Size(tokens=1, messages=1, tool_calls=0), None),
        ({"idle_seconds": 9}, {"upper": 1000}, Size(tokens=900, messages=0, tool_calls=0), 100),
        ({"cost": "auto"}, {"upper": 1000}, Size(tokens=800, messages=0, tool_calls=0), None),
        ({"messages": 10}, {"upper": 1000}, Size(tokens=800, messages=99, tool_calls=0), None),
        ({"messages": 10}, {"upper": 1000}, Size(tokens=900, messages=99, tool_calls=0), 100),
        ({"tokens": 1000}, {"when": {"messages": 10}}, Size(tokens=900, messages=8, tool_calls=0), None),
        ({"tokens": 1000}, {"when": {"messages": 10}}, Size(tokens=900, messages=9, tool_calls=0), 100),
        (None, {}, Size(tokens=9999, messages=99, tool_calls=99), None),
    ],
)
def test_a_summary_is_due_from_a_part_of_what_moves_the_cut(
    trigger: dict[str, Any] | None, settings: dict[str, Any], size: Size, added: int | None
) -> None:
    known = replace(KNOWN, context_window=2000)
    sums = edit(**settings)
    assert tokens_left(policy(trigger, sums), sums, known, size) == added
    # Where upstream counts twice as many, half as many are enough.
    twice, half = replace(known, scale=2.0), replace(size, tokens=size.tokens // 2)
    later = tokens_left(policy(trigger, sums), sums, twice, half)
    if size.tokens % 2 == 0:
        assert later == (None if added is None else added // 2)


def test_what_comes_before_the_trigger_fires_counts() -> None:
    draft = replace(talk(9), target=1500)
    assert draft.total == 9 * 220 + 17
    near = requested_in_time(draft, edit(budget_ratio=0.1), 0, None)
    assert near == SummaryRequest(stop=6, room=150, urgent=False)
    later = requested_in_time(draft, edit(budget_ratio=0.1), 300, None)
    assert later == SummaryRequest(stop=10, room=150, urgent=False)
    assert requested_in_time(draft, edit(min_messages=20), 0, None) is None


def costs(draft: Draft, turns: int) -> Costs:
    places = len(draft.messages)
    account = Account(turns=turns, untrimmed=10**6, saved=0.0)
    return Costs(
        prices=PRICES,
        warm=True,
        messages=draft.messages,
        tokens=draft.tokens,
        summary=None,
        fixed=0,
        cached=places - 1,
        account=account,
        reads=(0,) * places,
    )


def test_where_cost_moves_the_cut_it_must_pay_what_it_costs_to_make() -> None:
    draft = talk(9)
    sums = edit(max_tokens=100)
    assert requested_in_time(draft, sums, None, costs(draft, 8)) is None
    wanted = requested_in_time(draft, sums, None, costs(draft, 30))
    assert wanted == SummaryRequest(stop=16, room=1759, urgent=False)
    assert requested_in_time(draft, sums, None, None) is None
    assert requested_in_time(draft, edit(min_messages=99), None, costs(draft, 30)) is None
    # 1760 tokens are read to write 100; 337 are sent instead of 1997, of which 1980 were cached. Later ones
    # cost 166 less each.
    loss = 1.25 * 337 - 0.1 * 1980 - 1.25 * 17 + 1760 + 5 * 100
    gain = 0.1 * 1660
    for turns in (8, 13, 15, 30):
        assert wanted is not None
        paying = costs(draft, turns).summary_pays(draft, sums.imagined(draft, wanted), NO_CHANGE)
        assert paying == (loss <= gain * turns)


def test_who_asks_gets_all_of_it_but_what_must_stay() -> None:
    draft = talk(9)
    assert edit(keep_rounds=2).requested_now(draft) == SummaryRequest(stop=14, room=1539, urgent=False)
    # No more rounds stay than leave one to sum up, and no condition counts.
    strict = edit(keep_rounds=99, min_messages=99, min_new_messages=99, growth_ratio=9)
    assert strict.requested_now(draft) == SummaryRequest(stop=2, room=219, urgent=False)
    # A target that is met already, and upper and lower, are no reason to stop.
    assert edit(upper=9999, lower=9000).requested_now(replace(draft, target=9999)) == SummaryRequest(
        stop=16, room=1759, urgent=False
    )


def test_in_one_long_round_what_lies_behind_is_summed_up() -> None:
    calls = [line for n in range(9) for line in (f"assistant | c{n} f", f"tool c{n} {'=' * 90}")]
    draft = draft_of(messages(["user do it", *calls]), {"rounds": 1, "spans": 4})
    assert COMPACTION.requested_now(draft) == SummaryRequest(stop=11, room=5 * 110 - 1, urgent=False)
    assert edit(keep_rounds=10).requested_now(draft) == SummaryRequest(
        stop=11, room=5 * 110 - 1, urgent=False
    )


def test_what_is_summed_up_is_not_again() -> None:
    draft = talk(9)
    made = Prepared(text="so", tokens=12, until=16, model="small", covered_messages=16, covered_tokens=1760)
    assert edit().requested_now(replace(draft, prepared=made)) is None
    standing = Summary(
        text="so", role="merge", until=16, tokens=12, kind="model", covered_messages=16, covered_tokens=1760
    )
    assert edit().requested_now(replace(draft, summary=standing)) is None
    # It is made of that one and of a round, and has fewer tokens than these.
    assert edit().requested_now(replace(draft, prepared=replace(made, until=14))) == SummaryRequest(
        stop=16, room=12 + 220 - 1, urgent=False
    )
    assert COMPACTION.requested_now(draft_of(messages(["user hi"]))) is None
    assert COMPACTION.requested_now(draft_of([])) is None
