"""`summarize`: older rounds become one summary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from pydantic import ValidationError

from proxy.dialects import Message
from proxy.trimming.draft import Draft
from proxy.trimming.edits.summarize import COMPACTION, Beginning, Summarize, beginnings
from proxy.trimming.model import Change, Cut, Gap, ReadySummary, Summary, SummaryRequest
from proxy.trimming.planner import plan
from proxy.trimming.policy import Policy
from tests.trimming.edits.held import check, draft_of, outcome, recorded, standing
from tests.trimming.histories import TRIED, valid
from tests.trimming.notation import DIALECT, KNOWN, log, messages

# --------------------------------------------------------------------------------------- summarize


def edit(**settings: Any) -> Summarize:
    """Return the edit without its conditions, keeping two rounds, unless the settings say otherwise."""
    free = {"keep_rounds": 2, "min_messages": 0, "min_new_messages": 0, "growth_ratio": 0}
    return Summarize.model_validate({"mode": "statistics", **free, **settings})


def talk(rounds: int, first: int = 1) -> list[str]:
    """Return rounds of about 640 tokens, and the question of another one."""
    lines = []
    for number in range(first, first + rounds):
        lines += [
            f"user {number}. question {'?' * 200}",
            f"assistant | a search_{number}",
            f"tool a result {number} {'=' * 280}",
            f"assistant answer {number} {'.' * 100}",
        ]
    return [*lines, "user and now"]


def summed(settings: Summarize, draft: Draft) -> Summary:
    summary = outcome(settings, draft)[1]
    assert summary is not None
    return summary


def test_rounds_older_than_those_that_stay_become_one_summary() -> None:
    draft = draft_of(messages(talk(5)))
    after = check(edit(), draft)
    assert standing(after) == list(draft.messages[12:])
    summary = after.summary
    assert summary is not None
    assert summary.text.startswith("Archived Session Summary\nRounds 1-3: 12 messages (3 user, 6 assistant, 3 tool).\n")
    assert replace(summary, text="", state={}) == Summary(
        text="",
        role="merge",
        until=12,
        tokens=draft.count(summary.message(DIALECT)),
        kind="statistics",
        covered_messages=12,
        covered_tokens=sum(draft.tokens[:12]),
    )
    assert json.loads(json.dumps(summary.state)) == summary.state


def test_too_few_rounds_change_nothing() -> None:
    assert outcome(edit(), draft_of(messages(talk(2)))) == ([], None)
    assert outcome(edit(), draft_of([])) == ([], None)
    assert outcome(Summarize(mode="statistics"), draft_of(messages(talk(10)))) == ([], None)
    assert outcome(Summarize(mode="statistics"), draft_of(messages(talk(11))))[1] is not None


def test_what_stands_before_the_first_question_is_covered_too() -> None:
    draft = draft_of(messages(["assistant welcome", *talk(3)]))
    assert summed(edit(), draft).text.splitlines()[1] == ("Rounds 1-1: 5 messages (3 assistant, 1 user, 1 tool).")


def test_what_is_protected_is_not_covered_and_stays() -> None:
    draft = draft_of(messages(talk(4)), {"rounds": 0, "first_user": True})
    after = check(edit(keep_rounds=3), draft)
    assert standing(after) == [draft.messages[0], *draft.messages[4:]]
    assert after.summary is not None
    assert (after.summary.covered_messages, after.summary.until) == (3, 4)


def test_where_all_of_it_is_protected_nothing_is_covered() -> None:
    draft = draft_of(messages(talk(4)), {"rounds": 9, "spans": 9})
    assert outcome(edit(), draft) == ([], None)


def test_a_preamble_alone_has_no_rounds() -> None:
    draft = draft_of(messages(["assistant welcome", "user q1", *talk(2)]), {"rounds": 0, "first_user": True})
    assert summed(edit(), draft).text.splitlines()[1:2] == ["1 messages (1 assistant)."]


def test_with_a_limit_only_as_many_rounds_as_it_takes() -> None:
    draft = draft_of(messages(talk(9)))
    each = sum(draft.tokens[:4])
    some = summed(edit(max_tokens=100), replace(draft, target=draft.total - 2 * each + 100))
    assert some.until == 8
    more = summed(edit(max_tokens=100), replace(draft, target=draft.total - 2 * each + 99))
    assert more.until == 12
    least = summed(edit(max_tokens=100), replace(draft, target=1))
    assert least.until == summed(edit(max_tokens=100), draft).until == 28
    assert outcome(edit(), replace(draft, target=draft.total)) == ([], None)


def test_where_the_shortest_summary_does_not_get_within_the_limit_more_is_covered() -> None:
    draft = draft_of(messages(["user q1", f"user {'?' * 90}", "assistant a2", f"user {'?' * 40}"]))
    tight = replace(draft, target=draft.total - 12 + 1)
    short = edit(keep_rounds=0, max_tokens=1)
    assert summed(short, tight).until == 3
    assert check(short, tight).total <= draft.total - 12 + 1


def test_upper_and_lower_take_the_place_of_the_trigger_and_the_target() -> None:
    draft = replace(draft_of(messages(talk(9))), target=1, fixed_tokens=50)
    each = sum(draft.tokens[:4])
    assert outcome(edit(upper=draft.total), draft) == ([], None)
    assert summed(edit(upper=draft.total - 1), draft).until == 28
    limit = draft.total - 2 * each + 100
    assert summed(edit(max_tokens=100, lower=limit), draft).until == 8
    # Upstream counts twice what is counted here.
    assert summed(edit(max_tokens=100, lower=limit * 2), replace(draft, scale=2.0)).until == 8
    assert outcome(edit(upper=draft.total * 2), replace(draft, scale=2.0)) == ([], None)


def test_the_first_summary_waits_for_messages() -> None:
    draft = draft_of(messages(talk(4)))
    assert outcome(edit(min_messages=18), draft) == ([], None)
    assert outcome(edit(min_messages=17), draft)[1] is not None


def next_draft(before: Draft, more: Sequence[str]) -> Draft:
    """Return what stands, with its summary, and what came since."""
    stood = [(entry, message) for entry, message in zip(before.entries, before.messages, strict=True) if message]
    new = log(*more)
    start = before.entries[-1].position + 1
    later = [replace(entry, position=start + place) for place, entry in enumerate(new)]
    entries = [replace(entry, ref="") for entry, _ in stood] + [replace(entry, ref="") for entry in later]
    made = draft_of(entries)
    return replace(
        made,
        entries=tuple(replace(entry, position=old.position) for entry, old in zip(made.entries, entries, strict=True)),
        summary=before.summary,
    )


def test_the_next_summary_is_made_of_the_standing_one_and_what_is_new() -> None:
    first = check(edit(), draft_of(messages(talk(5))))
    second = check(edit(), next_draft(first, talk(3, first=6)))
    assert first.summary is not None
    assert second.summary is not None
    assert (first.summary.generation, second.summary.generation) == (1, 2)
    # The fifth question was never answered: it is a round of its own.
    whole = check(edit(), draft_of(messages(talk(5) + talk(3, first=6))))
    assert whole.summary is not None
    assert second.summary == replace(whole.summary, generation=2)
    assert "search_1 ×1" in second.summary.text
    assert second.summary.until == 25


def test_further_summaries_wait_until_they_are_worth_it() -> None:
    draft = next_draft(check(edit(), draft_of(messages(talk(5)))), talk(1, first=6))
    summary = draft.summary
    assert summary is not None
    covered = 8
    new = sum(draft.tokens[:covered])
    assert summed(edit(min_new_messages=covered), draft).generation == 2
    assert outcome(edit(min_new_messages=covered + 1), draft) == ([], None)
    assert summed(edit(growth_ratio=(new - 1) / summary.tokens), draft).generation == 2
    assert outcome(edit(growth_ratio=new / summary.tokens), draft) == ([], None)


def test_with_a_limit_it_goes_on_until_it_is_worth_it() -> None:
    first = check(edit(), draft_of(messages(talk(5))))
    draft = next_draft(first, talk(5, first=6))
    close = replace(draft, target=draft.total - 1)
    assert summed(edit(max_tokens=300), close).until == 16
    assert summed(edit(max_tokens=300, min_new_messages=5), close).until == 20
    assert outcome(edit(max_tokens=300, min_new_messages=99), close) == ([], None)


def test_a_summary_by_a_model_is_left_alone() -> None:
    draft = draft_of(messages(talk(5)))
    made = summed(edit(), draft)
    assert outcome(edit(), replace(draft, summary=replace(made, kind="model"))) == ([], None)


def test_it_has_fewer_tokens_than_it_may_and_than_it_replaces() -> None:
    draft = draft_of(messages(talk(9)))
    assert 500 < summed(edit(), draft).tokens <= 1500
    assert summed(edit(max_tokens=300), draft).tokens <= 300
    assert summed(edit(budget_ratio=0.1), replace(draft, target=3000, fixed_tokens=100)).tokens <= 290
    short = draft_of(messages(["user q1", "assistant a1", "user q2", "assistant a2", *talk(1)]))
    made = summed(edit(), short)
    assert made.text == "Archived Session Summary\nRounds 1-1: 2 messages (1 user, 1 assistant)."


def test_how_it_is_headed_where_it_goes_and_its_language() -> None:
    draft = draft_of(messages(["user 你好，请帮我查一下订单的状态", "assistant 好的", *talk(2)]))
    auto = summed(edit(), draft)
    assert (auto.role, auto.message(DIALECT).role) == ("merge", "system")
    assert auto.text == "Archived Session Summary\n第 1-1 轮：共 2 条消息（用户 1，助手 1）。"
    told = summed(edit(heading="Before", language="en", role="user"), draft)
    assert (told.role, told.message(DIALECT).role) == ("user", "user")
    assert told.text.startswith("Before\nRounds 1-1: ")
    assert summed(edit(role="system"), draft).role == "system"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "model", "max_generations": 0}, "greater than 0"),
        ({"mode": "statistics", "upper": 10, "lower": 11}, "above upper"),
        ({"mode": "statistics", "growth_ratio": -1}, "greater than or equal to 0"),
        ({"mode": "statistics", "heading": ""}, "at least 1 character"),
        ({}, "Field required"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Summarize.model_validate(settings)
    assert Summarize(mode="statistics", upper=10, lower=10).lower == 10


def test_in_the_current_round_spans_are_summed_up_where_no_round_need_stay() -> None:
    calls = [line for n in range(9) for line in (f"assistant | c{n} f", f"tool c{n} {'=' * 90}")]
    given = messages(["user do it", *calls])
    draft = draft_of(given, {"rounds": 1, "spans": 3})
    after = check(edit(keep_rounds=0), draft)
    assert standing(after) == [given[0], *given[13:]]
    assert after.summary is not None
    assert after.summary.until == 13
    assert after.summary.text.splitlines()[1] == "12 messages (6 assistant, 6 tool)."
    assert outcome(edit(keep_rounds=1), draft) == ([], None)
    # Whatever `keep` says, the newest span stays.
    least = check(edit(keep_rounds=0), draft_of(given))
    assert standing(least) == [given[0], *given[17:]]


def by_model(**settings: Any) -> Summarize:
    return edit(**{"mode": "model", **settings})


def ready(until: int, letters: int = 100, **fields: Any) -> ReadySummary:
    """Return a summary by a model that has ten tokens and one for each letter."""
    given = {"covered_messages": until, "covered_tokens": 9999, **fields}
    return ReadySummary(text="s" * letters, tokens=10 + letters, until=until, model="small", **given)


def test_what_a_model_wrote_takes_the_place_of_what_it_covers() -> None:
    draft = replace(draft_of(messages(talk(5))), ready_summary=ready(8, generation=3))
    after = check(by_model(role="system"), draft)
    assert standing(after) == list(draft.messages[8:])
    assert after.summary == Summary(
        text="s" * 100,
        role="system",
        until=8,
        tokens=110,
        kind="model",
        covered_messages=8,
        covered_tokens=9999,
        generation=3,
        model="small",
    )
    assert after.summary.message(DIALECT).role == "system"
    assert by_model().ready(draft) == replace(after.summary, role="merge")
    assert edit().ready(draft) is None


def test_what_is_protected_stays_after_it() -> None:
    draft = replace(draft_of(messages(talk(5)), {"rounds": 0, "first_user": True}), ready_summary=ready(8))
    after = check(by_model(), draft)
    assert standing(after) == [draft.messages[0], *draft.messages[8:]]


def test_a_span_that_it_covers_by_half_stays_whole() -> None:
    draft = replace(draft_of(messages(talk(5))), ready_summary=ready(6))
    after = check(by_model(), draft)
    assert standing(after) == list(draft.messages[5:])


def test_what_a_model_wrote_is_used_only_where_it_makes_the_view_smaller() -> None:
    draft = draft_of(messages(talk(5)))
    covered = sum(draft.tokens[:8])
    for letters, used in ((covered - 11, True), (covered - 10, False)):
        given = replace(draft, ready_summary=ready(8, letters))
        assert (by_model().ready(given) is not None) == used
    assert by_model().ready(replace(draft, ready_summary=ready(22))) is None
    assert by_model().ready(draft) is None
    assert outcome(by_model(upper=draft.total), replace(draft, ready_summary=ready(8))) == ([], None)
    assert outcome(by_model(lower=draft.total), replace(draft, ready_summary=ready(8))) == ([], None)


def test_where_the_cut_moves_one_is_used_though_what_it_covers_was_dropped_before() -> None:
    log = draft_of(messages(talk(5)))
    rest = log.entries[12:]
    draft = replace(
        draft_of([entry.message for entry in rest]),
        entries=rest,
        gaps=(Gap(start=0, stop=12, edit="drop_oldest", reason="", tokens=9999, tool_calls=0),),
        ready_summary=ready(12),
    )
    assert by_model().ready(draft) is None
    used = by_model().ready(draft, trimming=True)
    assert used is not None
    assert outcome(by_model(), draft) == ([], used)
    assert outcome(by_model(), replace(draft, tight=True)) == ([], None)
    # It must be smaller than what it covers in the log, and leave the others their part of the limit.
    for covered, there in ((110, False), (111, True)):
        given = replace(draft, ready_summary=ready(12, covered_tokens=covered))
        assert (by_model().ready(given, trimming=True) is not None) == there
    within = by_model(lower=2000, budget_ratio=0.06)
    assert within.ready(replace(draft, fixed_tokens=166), trimming=True) is not None
    assert within.ready(replace(draft, fixed_tokens=167), trimming=True) is None


def test_it_must_reach_further_than_what_stands() -> None:
    draft = draft_of(messages(talk(5)))
    model = Summary(
        text="before", role="merge", until=8, tokens=16, kind="model", covered_messages=8, covered_tokens=999
    )
    for until, used in ((7, False), (8, False), (9, True)):
        given = replace(draft, ready_summary=ready(until), summary=model)
        assert (by_model().ready(given) is not None) == used
    counted = replace(model, kind="statistics", tokens=200)
    for until, used in ((7, False), (8, True)):
        given = replace(draft, ready_summary=ready(until), summary=counted)
        assert (by_model().ready(given) is not None) == used
    # It takes the place of one made of numbers though nothing else goes.
    alone = draft_of(messages(["user and now"]))
    entries = (replace(alone.entries[0], position=8),)
    alone = replace(alone, entries=entries, ready_summary=ready(8), summary=counted)
    assert outcome(by_model(), alone) == ([], by_model().ready(alone))
    assert by_model().ready(alone) is not None


def wishes(settings: Summarize, draft: Draft) -> list[SummaryRequest]:
    """Return what an edit wants where it changes nothing."""
    made = list(settings.apply(draft))
    assert not any(isinstance(each, Change | Summary) for each in made)
    return [each for each in made if isinstance(each, SummaryRequest)]


def test_where_none_is_ready_it_says_which_it_wants() -> None:
    draft = draft_of(messages(talk(9)))
    each = sum(draft.tokens[:4])
    assert wishes(by_model(), draft) == [SummaryRequest(stop=28, room=7 * each - 1, urgent=True)]
    # With a limit no more than it takes, whatever room the summary takes.
    limit = draft.total - 3 * each + 260
    assert wishes(by_model(budget_ratio=0.1, lower=limit), draft) == [
        SummaryRequest(stop=16, room=int(0.1 * limit), urgent=True)
    ]
    within = replace(draft, target=limit, fixed_tokens=100)
    assert wishes(by_model(budget_ratio=0.1), within) == [
        SummaryRequest(stop=16, room=int(0.1 * (limit - 100)), urgent=True)
    ]
    # What a model may write is not what the summary may have: code adds to it.
    assert wishes(by_model(max_tokens=10), draft) == wishes(by_model(), draft)
    assert wishes(by_model(upper=draft.total), draft) == []
    assert wishes(by_model(keep_rounds=9), draft) == []
    assert wishes(by_model(lower=1), replace(draft, fixed_tokens=10)) == []


def test_the_first_one_waits_for_messages_and_further_ones_for_what_is_new() -> None:
    draft = draft_of(messages(talk(9)))
    each = sum(draft.tokens[:4])
    assert wishes(by_model(min_messages=37), draft) != []
    assert wishes(by_model(min_messages=38), draft) == []
    model = Summary(
        text="before", role="merge", until=8, tokens=100, kind="model", covered_messages=8, covered_tokens=999
    )
    stands = replace(draft, summary=model)
    assert wishes(by_model(min_messages=38), stands) == [SummaryRequest(stop=28, room=5 * each + 99, urgent=True)]
    assert wishes(by_model(min_new_messages=20), stands) != []
    assert wishes(by_model(min_new_messages=21), stands) == []
    assert wishes(by_model(growth_ratio=(5 * each - 1) / 100), stands) != []
    assert wishes(by_model(growth_ratio=5 * each / 100), stands) == []
    # What is ready and not in use yet counts as one.
    newer = replace(stands, ready_summary=ready(28))
    assert by_model().request(newer) is None
    assert by_model(min_new_messages=16).request(replace(newer, ready_summary=ready(12))) is not None
    assert by_model(min_new_messages=17).request(replace(newer, ready_summary=ready(12))) is None
    # What lies in gaps is new too; one made of numbers is none, but covers what is not there.
    dropped = replace(stands, gaps=(Gap(start=8, stop=20, edit="drop_oldest", reason="", tokens=5000, tool_calls=0),))
    assert by_model(min_new_messages=32).request(dropped) is not None
    counted = replace(draft, summary=replace(model, kind="statistics"))
    assert by_model(min_new_messages=99).request(counted) == SummaryRequest(stop=28, room=7 * each - 1, urgent=False)
    assert by_model().request(replace(counted, summary=replace(model, kind="statistics", until=28))) is None


def test_it_has_room_by_what_the_log_has_however_little_is_still_sent() -> None:
    draft = draft_of(messages(talk(9)))
    short = replace(draft, messages=(None,) * 27 + draft.messages[27:], tokens=(0,) * 27 + draft.tokens[27:])
    sent = draft.tokens[27]
    assert by_model(lower=2000).request(short) == SummaryRequest(stop=28, room=int(0.26 * 2000), urgent=False)
    # Without a limit as much as a model may write, and as code's part may take where more is replaced.
    assert by_model(max_tokens=1234).request(short) == SummaryRequest(stop=28, room=1234, urgent=False)
    assert by_model(max_tokens=130).request(short) == SummaryRequest(stop=28, room=max(130, sent - 1), urgent=False)
    # Who asks gets one that makes the view smaller.
    asked = by_model().request(short, whole=True)
    assert asked == (SummaryRequest(stop=28, room=sent - 1, urgent=False) if sent > 120 else None)
    # In so little room there would be hardly more than its heading.
    assert by_model(lower=1000, budget_ratio=0.12).request(draft) is not None
    assert by_model(lower=1000, budget_ratio=0.119).request(draft) is None


def test_no_other_is_wanted_where_the_one_that_is_ready_is_enough() -> None:
    draft = replace(draft_of(messages(talk(9))), ready_summary=ready(8))
    left = draft.total - sum(draft.tokens[:8]) + 110
    assert by_model().request(replace(draft, target=left)) is None
    assert by_model().request(replace(draft, target=left), added=1) == SummaryRequest(
        stop=12, room=110 + sum(draft.tokens[:4]) - 1, urgent=False
    )
    assert by_model().request(replace(draft, target=left), whole=True) is not None
    assert by_model().request(draft) is not None


def test_what_somebody_asked_for_is_used_whatever_the_limits_say() -> None:
    draft = replace(draft_of(messages(talk(5))), target=10**6, ready_summary=ready(8, asked=True))
    for settings in (by_model(), by_model(upper=10**6), COMPACTION):
        assert not settings.is_done(draft)
        assert standing(check(settings, draft)) == list(draft.messages[8:])
        assert settings.is_done(check(settings, draft))
    assert by_model().is_done(replace(draft, ready_summary=ready(8)))
    assert edit().is_done(draft)
    # Where it is of no use, that changes nothing.
    useless = replace(draft, ready_summary=ready(8, 9999, asked=True))
    assert by_model().is_done(useless)
    assert wishes(by_model(), useless) == []


def test_a_copy_with_other_settings_has_another_recipe() -> None:
    edit = by_model()
    recipe = edit.recipe
    assert edit.model_copy(update={"heading": "Until now"}).recipe == by_model(heading="Until now").recipe
    assert edit.model_copy(update={"when": None}).recipe == recipe
    assert by_model(heading="Until now").recipe != recipe


def test_a_recipe_names_what_the_text_depends_on() -> None:
    recipe = by_model().recipe
    assert len(recipe) == 12
    assert int(recipe, 16) >= 0
    same = by_model(upper=9, lower=9, role="user", keep_rounds=7, soft=0.5, growth_ratio=3, budget_ratio=1)
    assert same.recipe == recipe
    others: list[dict[str, Any]] = [{"heading": "Before"}, {"prompt": "Sum up."}, {"language": "zh"}, {"max_tokens": 9}]
    recipes = {by_model(**each).recipe for each in [*others, {"max_generations": 9}]}
    assert len(recipes | {recipe}) == 6


def test_the_size_of_one_that_is_not_there_is_imagined() -> None:
    draft = draft_of(messages(talk(9)))
    after = by_model(max_tokens=100).imagined(draft, SummaryRequest(stop=28, room=500, urgent=False))
    assert after.total == draft.total - sum(draft.tokens[:28]) + 100
    least = by_model(max_tokens=100).imagined(draft, SummaryRequest(stop=28, room=50, urgent=False))
    assert least.total == after.total - 50


def test_at_four_fifths_of_the_window_ten_whole_rounds_stay() -> None:
    """As HelloAgent's history manager does it, request by request; nothing is summed up before its time."""
    policy = Policy.model_validate(
        {
            "trigger": {"ratio": 0.8},
            "edits": [{"type": "summarize", "mode": "statistics", "min_messages": 0, "min_new_messages": 0}],
        }
    )
    known = replace(KNOWN, context_window=20_000)
    lines = talk(64)
    cut: Cut | None = None
    generations = set()
    for stop in range(1, len(lines) + 1, 4):
        made = plan(log(*lines[:stop]), policy, "p", known, cut, composed=True)
        assert made.tokens_before <= 16_000 or made.summary is not None
        assert made.tokens_sent <= 16_000
        if made.trimmed:
            assert made.summary is not None
            generations.add(made.summary.generation)
            assert made.view == tuple(messages(lines[:stop])[-41:])
            assert f"Rounds 1-{(stop - 1) // 4 - 10}: " in made.summary.text
        cut = made.cut
    assert max(generations) >= 3


def test_a_recorded_session_in_short() -> None:
    draft = draft_of(recorded("tau-airline-t46-r3"))
    after = check(edit(keep_rounds=3), draft)
    assert after.summary is not None
    assert after.total < 0.6 * draft.total
    text = after.summary.text
    assert "Rounds 1-9: 34 messages (9 user, 17 assistant, 8 tool)." in text
    assert "search_direct_flight ×2" in text
    assert "noah_muller_9847" in text
    spoken = "\n".join(message.text for message in draft.messages if message is not None)
    for line in text.splitlines():
        number, _, words = line.partition(". ")
        if number.isdecimal():
            assert words.removesuffix("…") in spoken


def test_a_recorded_session_in_chinese() -> None:
    after = check(edit(keep_rounds=1), draft_of(recorded("crosswoz-val-11290")))
    assert after.summary is not None
    assert "第 1-10 轮：共 20 条消息（用户 10，助手 10）。" in after.summary.text


@TRIED
@given(
    st.lists(valid(), max_size=3),
    st.integers(0, 2),
    st.integers(0, 2),
    st.none() | st.integers(1, 400),
    st.sampled_from([1, 60, 1500]),
)
def test_it_is_safe_on_any_history(
    parts: list[list[Message]], last: int, kept: int, target: int | None, most: int
) -> None:
    history = [message for part in parts for message in part]
    draft = replace(draft_of(history, {"rounds": kept, "spans": 2, "first_user": kept > 1}), target=target)
    after = check(edit(keep_rounds=last, max_tokens=most), draft)
    summary = after.summary
    assert (summary is None) == (after.messages == draft.messages)
    if summary is not None:
        gone = [place for place, message in enumerate(after.messages) if message is None]
        assert len(gone) == summary.covered_messages
        assert sum(draft.tokens[place] for place in gone) == summary.covered_tokens
        assert max(gone) < summary.until
        least = len(summary.text.splitlines()) == 2
        assert least or summary.tokens < summary.covered_tokens
        assert least or summary.tokens <= most


# ---------------------------------------------------------------------------------------- coverage

LOG = ("assistant hi", "user 1", "assistant | a f", "tool a 1", "user 2", "assistant 2", "user 3", "assistant 3")


def stops(draft: Draft, keep_rounds: int) -> list[int]:
    return [each.stop for each in beginnings(draft, keep_rounds)]


def test_a_beginning_ends_with_a_round_of_the_history() -> None:
    draft = draft_of(messages(LOG))
    assert stops(draft, 2) == []
    assert stops(draft, 1) == [4]
    assert list(beginnings(draft, 1)) == [
        Beginning(stop=4, until=4, messages=4, tokens=44, rounds=1, new_messages=4, new_tokens=44)
    ]
    assert draft.history_before(1) == 4


def test_where_no_round_need_stay_it_may_end_in_the_current_one_but_not_after_the_newest_span() -> None:
    draft = draft_of(messages((*LOG, "assistant | b f, c f", "tool b 1", "tool c 2", "assistant | d f")))
    # The question is protected; the answer and the calls after it are not. The newest call is open.
    assert stops(draft, 0) == [4, 6, 8, 11]
    last = list(beginnings(draft, 0))[-1]
    assert (last.until, last.messages, last.rounds) == (11, 10, 2)
    assert stops(draft_of(messages(LOG)), 0) == [4, 6]
    assert stops(draft_of([]), 0) == []


def test_of_a_preamble_alone_spans_may_go() -> None:
    assert stops(draft_of(messages(("assistant 1", "assistant 2", "assistant 3"))), 0) == [1, 2]
    assert stops(draft_of(messages(("assistant 1", "assistant 2", "assistant 3"))), 1) == []


def test_what_is_protected_is_not_counted_and_ends_nothing_in_the_current_round() -> None:
    draft = replace(draft_of(messages((*LOG, "assistant 4"))), protected=frozenset({1, 2, 3, 6, 7}))
    assert [(each.stop, each.messages, each.rounds) for each in beginnings(draft, 0)] == [(4, 1, 0), (6, 3, 1)]


def test_what_is_gone_is_not_counted_but_new_where_no_summary_covers_it() -> None:
    draft = draft_of(messages(LOG))
    draft = draft.after([draft.removing(4, "an_edit", ""), draft.removing(5, "an_edit", "")])
    last = list(beginnings(draft, 0, 3))[-1]
    assert (last.stop, last.messages, last.rounds) == (6, 4, 1)
    assert (last.new_messages, last.new_tokens) == (3, 33)


def test_what_earlier_moves_dropped_is_new_where_no_summary_covers_it() -> None:
    draft = draft_of(messages(LOG))
    entries = tuple(replace(each, position=each.position + (10 if each.position < 4 else 20)) for each in draft.entries)
    gaps = (
        Gap(start=0, stop=10, edit="e", reason="", tokens=500, tool_calls=2),
        Gap(start=14, stop=24, edit="e", reason="", tokens=1000, tool_calls=0),
    )
    draft = replace(draft, entries=entries, gaps=gaps)
    first, second = beginnings(draft, 0, 5)
    # The second gap lies between two rounds: whatever covers the first of these covers it.
    assert (first.until, first.new_messages, first.new_tokens) == (24, 5 + 4 + 10, 250 + 44 + 1000)
    assert (second.until, second.new_messages, second.messages) == (26, 21, 6)
