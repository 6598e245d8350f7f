"""What holds of every plan: random histories, random policies, and sessions that grow.

No provider refuses a view; what is protected is sent as it is; between two moves each view begins
with the last one; the target is met or the miss is told; nothing given is changed.
"""

from __future__ import annotations

import json
from operator import attrgetter
from typing import Any
from zlib import crc32

from hypothesis import given, reject
from hypothesis import strategies as st
from msgspec.structs import replace
from pydantic import ValidationError

from proxy.conversation import rounds, spans
from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.dialects.chat.protocol import CHAT
from proxy.trimming.history import KEPT_APART, joined, outside_gaps
from proxy.trimming.model import Cut, Entry, Plan, PlanningContext, ReadySummary
from proxy.trimming.planner import plan
from proxy.trimming.policy import Policy
from proxy.trimming.trim import protected
from tests.support import api_rules
from tests.trimming.growing import check_counts, check_prefix, check_target, hidden
from tests.trimming.histories import SPANS, TRIED, broken, grown, valid
from tests.trimming.notation import KNOWN, count, entries
from tests.trimming.random_policies import PRICES

WINDOW = 1000
NAMES = st.lists(st.sampled_from(["search", "note"]), max_size=1)
OUTPUTS = (
    *("", "ok", "never forget this", "x" * 40, "line\n" * 30, "多字节\n" * 12),
    json.dumps([{"id": each, "name": f"n{each}", "state": "done", "total": each * 7} for each in range(9)]),
    json.dumps({"path": "/a/b", "items": list(range(40)), "text": "long " * 20}, indent=2),
    "\n".join(f"2026-01-0{1 + each % 9} INFO step {each} done" for each in range(20)) + "\nERROR it failed",
    "\x1b[31mred\x1b[0m " + "word " * 60,
    "<html><body><p>" + "text " * 30 + "</p></body></html>",
)
"""What tools give: little, lines, JSON of several forms, a log, terminal escapes, a page."""
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 60}}


def _optional(required: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(required, optional=optional)


@st.composite
def _spans(draw: st.DrawFn) -> list[Message]:
    """Return a span as a history has it, or an image, or what another agent tells of a call."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return [ChatMessage.of({"role": "user", "content": [{"type": "text", "text": "look"}, IMAGE]})]
    if kind <= 2:
        agent, tool = draw(st.sampled_from("ab")), draw(st.sampled_from(["search", "note"]))
        return [ChatMessage.of({"role": "user", "content": f"<Worker: {agent}> [called tool {tool}]"})]
    return _varied(draw, draw(SPANS))


def _varied(draw: st.DrawFn, history: list[Message]) -> list[Message]:
    """Return a history with tool results of several kinds."""
    return [each.replacing("content", draw(st.sampled_from(OUTPUTS))) if each.is_result else each for each in history]


@st.composite
def _histories(draw: st.DrawFn, given: st.SearchStrategy[list[Message]]) -> list[Message]:
    """Return such a history with tool results of several kinds, and some spans more."""
    more = draw(st.lists(_spans(), max_size=3))
    return _varied(draw, draw(given)) + [message for span in more for message in span]


def _entries(given: list[Message]) -> list[Entry]:
    """Return messages as trimming sees them, always the same ones.

    Some are an agent's, some are internal, with some goes what the client was not shown.
    """
    made = []
    for entry in entries(given):
        lot = crc32(entry.message.raw) + entry.position
        hides = entry.message.role == "assistant" and lot % 4 == 0
        made.append(
            replace(
                entry,
                agent=(None, "a", "b")[lot % 3],
                is_internal=lot % 7 == 0,
                hidden=hidden(entry, KNOWN) if hides else None,
            )
        )
    return made


def _as_seen(made: Plan, log: list[Entry]) -> list[Message]:
    """Return what is sent of a log, as the client saw it: without what it was not shown."""
    hid = {entry.hidden.reply: entry.message for entry in log if entry.hidden is not None}
    return [hid.get(message, message) for message in made.view if b"own_" not in message.raw or message in hid]


TRIGGERS = _optional(
    {},
    {
        "tokens": st.integers(1, 600),
        "ratio": st.sampled_from([0.05, 0.2, 0.4]),
        "messages": st.integers(1, 12),
        "tool_calls": st.integers(1, 6),
        "idle_seconds": st.sampled_from(["auto", 100]),
        "cost": st.just("auto"),
        "every_request": st.just(True),
    },
).filter(bool)
WHEN = {"when": TRIGGERS}
CALLS = _optional(
    {"type": st.just("keep_tool_calls"), "last": st.integers(0, 4)},
    {"scope": st.sampled_from(["history", "all"]), "exclude_tools": NAMES, **WHEN},
)
_FOLD = st.sampled_from([{}, {}, {"clear_inputs": True}, {"clear_inputs": True, "fold_calls": True}])
CLEAR = _optional(
    {"type": st.just("clear_tool_results"), "keep": st.integers(0, 3)},
    {
        "at_least": st.integers(0, 100),
        "exclude_tools": NAMES,
        "clear_texts": st.booleans(),
        "digest_chars": st.sampled_from([0, 30, 300]),
        **WHEN,
    },
).flatmap(lambda settings: _FOLD.map(lambda more: settings | more))
TRUNCATE = _optional(
    {"type": st.just("truncate_tool_output"), "max_lines": st.integers(1, 40), "max_bytes": st.integers(1, 200)},
    {"direction": st.sampled_from(["head", "tail", "head_tail"]), **WHEN},
)
COMPACT = _optional(
    {"type": st.just("compact_tool_output"), "over_tokens": st.sampled_from([0, 30, 100])},
    {"keep_items": st.integers(1, 2), "max_string": st.integers(1, 40), **WHEN},
)
OUTPUT = TRUNCATE | COMPACT
DROP = _optional({"type": st.just("drop_oldest")}, WHEN)
OWN = _optional({"type": st.just("drop_oldest"), "target": st.just({"tokens": 150})}, WHEN)
WINDOWS = _optional(
    {"type": st.just("recent_window"), "tokens": st.integers(1, 500)},
    {"on_overflow": st.sampled_from(["skip", "stop"]), **WHEN},
)
SUMS = _optional(
    {
        "type": st.just("summarize"),
        "mode": st.sampled_from(["statistics", "model"]),
        "keep_rounds": st.integers(0, 2),
        "min_messages": st.just(0),
    },
    {
        "lower": st.integers(1, 400),
        "min_new_messages": st.integers(0, 4),
        "growth_ratio": st.sampled_from([0, 0.5]),
        "max_tokens": st.sampled_from([60, 1500]),
        "role": st.sampled_from(["auto", "system", "user"]),
        **WHEN,
    },
)


def _alone(kind: str, **keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return _optional({"type": st.just(kind), **keys}, WHEN)


EDITS = st.one_of(
    CALLS,
    CLEAR,
    TRUNCATE,
    COMPACT,
    OWN,
    WINDOWS,
    SUMS,
    _alone("deduplicate_results"),
    _alone("digest_agent_calls", keep=st.integers(1, 3)),
    _alone("drop_internal"),
    _alone("evict_images", keep=st.integers(0, 2)),
    _alone("keep_rounds", last=st.integers(0, 3)),
)
KEEP = _optional({}, {"rounds": st.integers(0, 3), "spans": st.integers(0, 4), "first_user": st.booleans()})
KEEP_LITTLE = _optional({"rounds": st.integers(0, 1)}, {"first_user": st.booleans()})
"""Of older rounds nothing: where a question goes and its answers stay, they count to the round before."""
PINS = st.lists(st.just({"regex": "never"}), max_size=1)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Return a policy that the file could hold."""
    keys: dict[str, Any] = {"keep": draw(KEEP), "pin": draw(PINS), "on_arrival": draw(st.lists(OUTPUT, max_size=2))}
    if draw(st.booleans()):
        keys["trigger"] = trigger = draw(TRIGGERS)
        target = draw(st.none() | st.integers(1, trigger.get("tokens", 400)))
        kinds = EDITS | DROP if target is not None else EDITS
        keys["edits"] = draw(st.lists(kinds, min_size=1, max_size=4))
        keys["target"] = {"tokens": target} if target is not None else None
    try:
        return Policy.model_validate(keys)
    except ValidationError:  # edits that contradict each other: no file can hold them
        reject()


KNOWNS = st.builds(
    PlanningContext,
    count=st.just(count),
    fixed_tokens=st.sampled_from([0, 60]),
    context_window=st.sampled_from([None, WINDOW]),
    agent=st.sampled_from([None, "a"]),
    idle=st.sampled_from([None, 0, 50, 400]),
    prices=st.sampled_from(PRICES),
    scale=st.sampled_from([1.0, 0.7, 1.3]),
    ready_summary=st.none()
    | st.builds(
        ReadySummary,
        text=st.sampled_from(["so", "s" * 40]),
        tokens=st.sampled_from([12, 50]),
        until=st.integers(1, 9),
        model=st.just("small"),
        covered_messages=st.just(9),
        covered_tokens=st.just(400),
        asked=st.booleans(),
    ),
)


def _recorded(log: list[Message], last: Plan | None) -> list[Entry]:
    """Return the log as it comes back from the store: what was sent before carries what was decided then."""
    decided = last.decided if last is not None else ()
    made = _entries(log)
    return [replace(each, arrival=then) for each, then in zip(made, decided, strict=False)] + made[len(decided) :]


def _check_accounts(made: Plan, log: list[Entry], known: PlanningContext) -> None:
    """Check what holds of every plan by itself."""
    # Hidden rounds count as long as their reply was not dropped by an earlier move.
    hidden = [entry.hidden for entry in log if entry.hidden is not None]
    least = known.fixed_tokens + sum(entry.tokens for entry in log)
    tokens, messages = made.tokens_before - least, made.messages_before - len(log)
    assert 0 <= tokens <= sum(each.tokens for each in hidden)
    assert 0 <= messages <= sum(each.messages for each in hidden)
    assert len(made.decided) == len(log)
    check_counts(made, known)
    if made.cut is not None and made.trimmed:
        assert made.cut.position == len(log)
    assert all(0 < end <= len(made.view) for end in made.stable_ends)


@TRIED
@given(_histories(broken()), policies(), KNOWNS, st.booleans())
def test_a_view_that_was_trimmed_or_put_together_here_keeps_the_rules(
    log: list[Message], policy: Policy, known: PlanningContext, composed: bool
) -> None:
    made = plan(_entries(log), policy, "p", known, composed=composed)
    _check_accounts(made, _entries(log), known)
    check_target(made, policy, known)
    if composed or made.changes or made.earlier or any(entry.hidden for entry in _entries(log)):
        assert CHAT.problems(made.view) == []
        if made.view:
            api_rules.check({"model": "m", "messages": [each.data for each in made.view]}, plain=False, lenient=False)
    else:
        assert made.view == tuple(log)


@TRIED
@given(_histories(broken()), policies(), KNOWNS)
def test_the_same_arguments_give_the_same_plan_and_nothing_given_is_changed(
    log: list[Message], policy: Policy, known: PlanningContext
) -> None:
    given_entries = _entries(log)
    before = [(entry.message.raw, dict(entry.message.data)) for entry in given_entries]
    first = plan(given_entries, policy, "p", known)
    again = [replace(entry, message=ChatMessage(entry.message.raw)) for entry in given_entries]
    assert plan(again, Policy.model_validate_json(policy.model_dump_json()), "p", known) == first
    assert [(entry.message.raw, entry.message.data) for entry in given_entries] == before
    assert given_entries == _entries(log)


@TRIED
@given(_histories(broken()), policies(), KNOWNS)
def test_a_log_that_is_left_as_it_came_is_planned_as_any_other(
    log: list[Message], policy: Policy, known: PlanningContext
) -> None:
    ignored = Cut(
        position=len(log) + 1, policy="p", version=policy.version, changes=(), tokens=1, messages=1, tool_calls=0
    )
    roomy = replace(known, context_window=100 * WINDOW)
    for given_entries in (_entries(log), entries(log)):
        for told in (known, roomy):
            short = plan(given_entries, policy, "p", told)
            assert short == plan(given_entries, policy, "p", told, ignored)


@TRIED
@given(_histories(valid()), policies(), KNOWNS)
def test_what_is_protected_is_sent_as_it_is(log: list[Message], policy: Policy, known: PlanningContext) -> None:
    made = plan(_entries(log), policy, "p", known)
    changed = {change.position for change in made.made}
    kept = protected(log, spans(log), rounds(log), policy)
    assert not changed & kept
    users = [position for position, message in enumerate(log) if message.role == "user"]
    if users:
        assert users[-1] in kept
        assert log[users[-1]] in made.view
    seen = _as_seen(made, _entries(log))
    for position, message in enumerate(log):
        if policy.pins(message):
            assert message in seen, position


@TRIED
@given(st.lists(st.lists(_spans(), min_size=1, max_size=3), min_size=2, max_size=6), policies(), KNOWNS)
def test_between_two_moves_each_view_begins_with_the_last_one(
    growth: list[list[list[Message]]], policy: Policy, known: PlanningContext
) -> None:
    log: list[Message] = []
    last: Plan | None = None
    standing: Cut | None = None
    for more in growth:
        log += [message for span in more for message in span]
        made = plan(_recorded(log, last), policy, "p", known, standing)
        _check_accounts(made, _entries(log), known)
        check_target(made, policy, known)
        assert CHAT.problems(made.view) == []
        if last is not None:
            assert made.decided[: len(last.decided)] == last.decided
            # Whatever this request moves, without a move it would have extended the last one.
            calm = Policy(pin=policy.pin, on_arrival=policy.on_arrival)
            still = plan(_recorded(log, last), calm, "p", replace(known, ready_summary=None), standing)
            assert still.view[: len(last.view)] == last.view
            assert still.cut == last.cut
            if not made.trimmed:
                assert made.view == still.view
        check_prefix(made, last)
        _check_settled(made, last)
        last, standing = made, made.cut


def _check_settled(made: Plan, last: Plan | None) -> None:
    """Check that the parts of a view that are said to stay do, unless a move says what it changed of them."""
    if last is None or last.cut is None or not last.stable_ends or last.cut.version != made.version:
        return
    changed = max((change.position for change in last.cut.changes), default=-1)
    if made.summary != last.summary or any(change.position <= changed for change in made.made):
        return
    end = last.stable_ends[-1]
    assert made.view[:end] == last.view[:end]
    if not any(warning.startswith("repaired") for warning in made.warnings):
        # It is told again at every request, until a move comes to a longer one.
        assert end in made.stable_ends


@TRIED
@given(
    st.lists(st.lists(_spans(), min_size=1, max_size=3), min_size=2, max_size=8),
    policies(),
    policies(),
    st.sets(st.integers(0, 8), max_size=2),
    KNOWNS,
)
def test_a_log_without_its_gaps_is_planned_as_the_whole_one(
    growth: list[list[list[Message]]], one: Policy, other: Policy, others: set[int], known: PlanningContext
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
        left = outside_gaps(every, gaps, attrgetter("position"))
        part = plan(left, policy, "p", known, standing_cut, composed=True)
        assert len(part.decided) == len(left)
        if part.needs_whole:
            trigger = policy.trigger
            # A move that would not pay, or that nothing but time asks for, may turn out to be none.
            may_not = trigger is not None and (trigger.cost is not None or trigger.idle_seconds is not None)
            assert whole.trimmed or may_not
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
        assert (gap.tokens, gap.tool_calls) == (sum(map(count, inside)), sum(message.is_result for message in inside))
        last = gap.stop
    outside = outside_gaps(range(cut.position), cut.gaps, int)
    assert {change.position for change in cut.changes} <= set(outside)
    assert len(cut.gaps) <= (len(outside) + 1) * KEPT_APART
    assert joined(cut.gaps) == cut.gaps
    if made.summary is not None and made.summary.kind == "statistics":
        gone = set(range(made.summary.until)) - set(outside)
        gone |= {change.position for change in cut.changes if change.message is None}
        assert len(gone) >= made.summary.covered_messages
        assert sum(count(log[at]) for at in gone) >= made.summary.covered_tokens


@TRIED
@given(_histories(broken()), st.data(), policies(), KNOWNS)
def test_repairs_do_not_break_that_either(
    log: list[Message], data: st.DataObject, policy: Policy, known: PlanningContext
) -> None:
    first = plan(_entries(log), policy, "p", known, composed=True)
    longer = data.draw(grown(log))
    second = plan(_recorded(longer, first), policy, "p", known, first.cut, composed=True)
    if not second.trimmed:
        assert second.view[: len(first.view)] == first.view


@TRIED
@given(_histories(valid()), EDITS, KEEP_LITTLE, st.none() | st.integers(1, 400), KNOWNS)
def test_a_second_move_right_after_the_first_changes_nothing(
    log: list[Message], edit: dict[str, Any], keep: dict[str, Any], target: int | None, known: PlanningContext
) -> None:
    keys = {"trigger": {"every_request": True}, "keep": keep, "edits": [{**edit, "when": None}]}
    policy = Policy.model_validate({**keys, "target": {"tokens": target} if target is not None else None})
    first = plan(_entries(log), policy, "p", known)
    second = plan(_recorded(log, first), policy, "p", known, first.cut)
    assert second.trimmed
    assert second.made == ()
    assert (second.view, second.summary) == (first.view, first.summary)
    assert second.cut is not None
    assert first.cut is not None
    assert (second.cut.changes, second.cut.gaps) == (first.cut.changes, first.cut.gaps)


@TRIED
@given(_histories(valid()), policies(), KNOWNS)
def test_moves_come_to_rest(log: list[Message], policy: Policy, known: PlanningContext) -> None:
    cut: Cut | None = None
    last: Plan | None = None
    for _ in range(8):
        made = plan(_recorded(log, last), policy, "p", replace(known, idle=10**6), cut)
        if last is not None and not made.made:
            return
        last, cut = made, made.cut
    raise AssertionError("edits undo what others did, again and again")
