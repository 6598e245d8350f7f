"""What holds of every plan: random histories, random policies, and sessions that grow.

No provider refuses a view; what is protected is sent as it is; between two moves each view begins
with the last one; the target is met or the miss is told; nothing given is changed.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from proxy.history.spans import is_result, rounds, spans
from proxy.trimming.engine import plan
from proxy.trimming.gaps import TOLD_APART, joined, standing
from proxy.trimming.plan import Cut, Entry, Known, Plan
from proxy.trimming.policy import Policy
from proxy.trimming.protection import protected
from proxy.trimming.protocol import problems
from proxy.wire.messages import Message
from tests.support import api_rules
from tests.trimming.histories import SPANS, TRIED, broken, grown, valid
from tests.trimming.notation import count, entries

WINDOW = 1000
NAMES = st.lists(st.sampled_from(["search", "note"]), max_size=1)


def _optional(required: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(required, optional=optional)


TRIGGERS = _optional(
    {},
    {
        "tokens": st.integers(1, 400),
        "ratio": st.sampled_from([0.05, 0.2, 0.4]),
        "messages": st.integers(1, 12),
        "tool_calls": st.integers(1, 6),
        "every_request": st.just(True),
    },
).filter(bool)
WHEN = {"when": TRIGGERS}
CALLS = _optional(
    {"type": st.just("keep_tool_calls"), "last": st.integers(0, 4)},
    {"scope": st.sampled_from(["history", "all"]), "exclude_tools": NAMES, **WHEN},
)
OUTPUT = _optional(
    {
        "type": st.just("truncate_tool_output"),
        "max_lines": st.integers(1, 40),
        "max_bytes": st.integers(1, 200),
    },
    {"direction": st.sampled_from(["head", "tail", "head_tail"]), **WHEN},
)
DROP = _optional({"type": st.just("drop_oldest")}, WHEN)
KEEP = _optional({}, {"rounds": st.integers(0, 3), "spans": st.integers(0, 4), "first_user": st.booleans()})
PINS = st.lists(st.just({"regex": "never"}), max_size=1)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Return a policy that the file could hold."""
    keys: dict[str, Any] = {
        "keep": draw(KEEP),
        "pin": draw(PINS),
        "on_arrival": draw(st.lists(OUTPUT, max_size=2)),
    }
    if draw(st.booleans()):
        keys["trigger"] = trigger = draw(TRIGGERS)
        target = draw(st.none() | st.integers(1, trigger.get("tokens", 400)))
        kinds = [CALLS, OUTPUT, DROP] if target is not None else [CALLS, OUTPUT]
        keys["edits"] = draw(st.lists(st.one_of(kinds), min_size=1, max_size=4))
        keys["target"] = {"tokens": target} if target is not None else None
    return Policy.model_validate(keys)


KNOWNS = st.builds(
    Known,
    count=st.just(count),
    fixed_tokens=st.sampled_from([0, 60]),
    context_window=st.sampled_from([None, WINDOW]),
)


def _recorded(log: list[Message], last: Plan | None) -> list[Entry]:
    """Return the log as it comes back from the store: what was sent before carries what was decided then."""
    decided = last.decided if last is not None else ()
    made = entries(log)
    return [replace(each, arrival=then) for each, then in zip(made, decided, strict=False)] + made[
        len(decided) :
    ]


def _check_accounts(made: Plan, log: list[Entry], known: Known) -> None:
    """Check what holds of every plan by itself."""
    assert made.tokens_before == known.fixed_tokens + sum(entry.tokens for entry in log)
    assert made.tokens_sent == known.fixed_tokens + sum(map(count, made.view))
    assert (made.messages_before, len(made.decided)) == (len(log), len(log))
    if made.cut is not None and made.moved:
        assert (made.cut.position, made.cut.tokens) == (len(log), made.tokens_sent)
        assert made.cut.messages == len(made.view)


def _check_target(made: Plan, policy: Policy) -> None:
    if made.moved and policy.target is not None and policy.target.tokens is not None:
        missed = any(warning.startswith("target missed") for warning in made.warnings)
        assert missed == (made.tokens_sent > policy.target.tokens)


@TRIED
@given(broken(), policies(), KNOWNS, st.booleans())
def test_a_view_that_was_trimmed_or_put_together_here_keeps_the_rules(
    log: list[Message],
    policy: Policy,
    known: Known,
    composed: bool,
) -> None:
    made = plan(entries(log), policy, "p", known, composed=composed)
    _check_accounts(made, entries(log), known)
    _check_target(made, policy)
    if composed or made.changes or made.earlier:
        assert problems(made.view) == []
        if made.view:
            api_rules.check(
                {"model": "m", "messages": [each.data for each in made.view]}, plain=False, lenient=False
            )
    else:
        assert made.view == tuple(log)


@TRIED
@given(broken(), policies(), KNOWNS)
def test_the_same_arguments_give_the_same_plan_and_nothing_given_is_changed(
    log: list[Message], policy: Policy, known: Known
) -> None:
    given_entries = entries(log)
    before = [(entry.message.raw, dict(entry.message.data)) for entry in given_entries]
    first = plan(given_entries, policy, "p", known)
    again = [replace(entry, message=Message(entry.message.raw)) for entry in given_entries]
    assert plan(again, Policy.model_validate_json(policy.model_dump_json()), "p", known) == first
    assert [(entry.message.raw, entry.message.data) for entry in given_entries] == before
    assert given_entries == entries(log)


@TRIED
@given(valid(), policies(), KNOWNS)
def test_what_is_protected_is_sent_as_it_is(log: list[Message], policy: Policy, known: Known) -> None:
    made = plan(entries(log), policy, "p", known)
    changed = {change.position for change in made.made}
    kept = protected(log, spans(log), rounds(log), policy)
    assert not changed & kept
    users = [position for position, message in enumerate(log) if message.role == "user"]
    if users:
        assert users[-1] in kept
        assert log[users[-1]] in made.view
    for position, message in enumerate(log):
        if policy.pins(message):
            assert message in made.view, position


@TRIED
@given(st.lists(st.lists(SPANS, min_size=1, max_size=3), min_size=2, max_size=6), policies(), KNOWNS)
def test_between_two_moves_each_view_begins_with_the_last_one(
    growth: list[list[list[Message]]], policy: Policy, known: Known
) -> None:
    log: list[Message] = []
    last: Plan | None = None
    standing: Cut | None = None
    for more in growth:
        log += [message for span in more for message in span]
        made = plan(_recorded(log, last), policy, "p", known, standing)
        _check_accounts(made, entries(log), known)
        _check_target(made, policy)
        assert problems(made.view) == []
        if last is not None:
            assert made.decided[: len(last.decided)] == last.decided
            # Whatever this request moves, without a move it would have extended the last one.
            calm = Policy(pin=policy.pin, on_arrival=policy.on_arrival)
            still = plan(_recorded(log, last), calm, "p", known, standing)
            assert still.view[: len(last.view)] == last.view
            assert still.cut == last.cut
            if not made.moved:
                assert made.view == still.view
        last, standing = made, made.cut


@TRIED
@given(
    st.lists(st.lists(SPANS, min_size=1, max_size=3), min_size=2, max_size=8),
    policies(),
    policies(),
    st.sets(st.integers(0, 8), max_size=2),
    KNOWNS,
)
def test_a_log_without_its_gaps_is_planned_as_the_whole_one(
    growth: list[list[list[Message]]], one: Policy, other: Policy, others: set[int], known: Known
) -> None:
    log: list[Message] = []
    last: Plan | None = None
    for turn, more in enumerate(growth):
        log += [message for span in more for message in span]
        policy = other if turn in others else one
        standing_cut = last.cut if last is not None else None
        every = _recorded(log, last)
        whole = plan(every, policy, "p", known, standing_cut, composed=True)
        gaps = standing_cut.gaps if standing_cut is not None else ()
        left = standing(every, gaps, attrgetter("position"))
        part = plan(left, policy, "p", known, standing_cut, composed=True)
        assert len(part.decided) == len(left)
        if part.needs_whole:
            assert whole.moved
            assert standing_cut is not None
            assert standing_cut.version != policy.version
            assert part.cut == standing_cut
        else:
            assert replace(part, decided=()) == replace(whole, decided=())
            assert part.decided == tuple(whole.decided[entry.position] for entry in left)
        _check_accounts(whole, every, known)
        _check_cut(whole, log)
        last = whole


def _check_cut(made: Plan, log: list[Message]) -> None:
    """Check that gaps are in order, that nothing in them is spoken of, and that they are few."""
    cut = made.cut
    if cut is None:
        return
    last = 0
    for gap in cut.gaps:
        assert last <= gap.start < gap.stop <= cut.position
        inside = log[gap.start : gap.stop]
        assert (gap.tokens, gap.tool_calls) == (sum(map(count, inside)), sum(map(is_result, inside)))
        last = gap.stop
    outside = standing(range(cut.position), cut.gaps, int)
    assert {change.position for change in cut.changes} <= set(outside)
    assert len(cut.gaps) <= (len(outside) + 1) * TOLD_APART
    assert joined(cut.gaps) == cut.gaps


@TRIED
@given(broken(), st.data(), policies(), KNOWNS)
def test_repairs_do_not_break_that_either(
    log: list[Message], data: st.DataObject, policy: Policy, known: Known
) -> None:
    first = plan(entries(log), policy, "p", known, composed=True)
    longer = data.draw(grown(log))
    second = plan(_recorded(longer, first), policy, "p", known, first.cut, composed=True)
    if not second.moved:
        assert second.view[: len(first.view)] == first.view
