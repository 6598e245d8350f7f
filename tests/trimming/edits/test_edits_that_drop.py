"""The edits that drop whole messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from pydantic import ValidationError

from proxy.dialects import Call, Message
from proxy.dialects.chat.message import ChatMessage
from proxy.dialects.messages.message import MessagesMessage
from proxy.trimming.draft import Draft
from proxy.trimming.edits.dropping import DropInternal, DropOldest, KeepRounds, KeepToolCalls, RecentWindow
from proxy.trimming.model import Change, PlanningContext
from proxy.trimming.planner import plan
from proxy.trimming.policy import Policy
from tests.trimming.edits.golden import Case, cases, rows
from tests.trimming.edits.held import check, draft_of, outcome, recorded, standing
from tests.trimming.histories import TRIED, valid
from tests.trimming.notation import KNOWN, count, entries, lines, log

# ------------------------------------------------------------------------------------- keep_rounds


@pytest.mark.parametrize("case", cases("keep_rounds"), ids=str)
def test_golden(case: Case) -> None:
    case.check()


def test_of_a_recorded_session_the_newest_rounds_stay_as_they_were() -> None:
    session = recorded("tau-airline-t46-r3")
    after = standing(check(KeepRounds(last=3), draft_of(session)))
    assert sum(message.role == "user" for message in session) == 13
    assert sum(message.role == "user" for message in after) == 3 + 1
    assert after == session[len(session) - len(after) :]


@TRIED
@given(valid(), st.integers(0, 4), st.integers(0, 2))
def test_it_is_safe_on_any_history(log: list[Message], last: int, kept: int) -> None:
    draft = draft_of(log, {"rounds": kept, "spans": 2})
    after = check(KeepRounds(last=last), draft)
    users = [message for message in log if message.role == "user"]
    assert [message for message in standing(after) if message.role == "user"][-last - 1 :] == users[-last - 1 :]


# ------------------------------------------------------------------------------------- drop_oldest


@pytest.mark.parametrize("case", cases("drop_oldest"), ids=str)
def test_golden_drop_oldest(case: Case) -> None:
    case.check()


def test_without_a_target_it_drops_nothing() -> None:
    draft = Case({"before": ["user q1", "assistant a1", "user q2"]}).draft()
    assert list(DropOldest().apply(draft)) == []
    assert list(DropOldest().apply(replace(draft, target=1)))


def test_an_empty_log_has_nothing_to_drop() -> None:
    assert list(DropOldest().apply(Case({"before": [], "fixed_tokens": 9, "target": 1}).draft())) == []


@TRIED
@given(valid(), st.integers(1, 300))
def test_it_drops_no_more_than_it_must_and_its_own_work_is_left_alone(log: list[Message], target: int) -> None:
    draft = Case({"before": lines(log), "target": target}).draft()
    changes = list(DropOldest().apply(draft))
    after = draft.after(changes)
    assert after.within() or not [
        position for position, _ in after.remaining(0, len(after.messages)) if position not in draft.protected
    ]
    if changes:
        groups = draft.rounds if changes[-1].reason == "its round was the oldest" else draft.spans
        last = next(group for group in groups if changes[-1].position < group.stop)
        assert draft.after([each for each in changes if not last.start <= each.position < last.stop]).total > target
    assert list(DropOldest().apply(after)) == []


@pytest.mark.parametrize(
    ("newest", "order"),
    [
        pytest.param(["user status"], [1, 2, 3, 4], id="behind a question"),
        pytest.param(["user status", "user status"], [1, 2, 3, 4, 5], id="behind two of the user"),
        pytest.param(["assistant | a f", "tool a 1", "user status"], [1, 2, 3, 4, 5, 6], id="behind results"),
        pytest.param(
            ["assistant | a f", "tool a 1", "assistant | b f", "tool b 2", "user status"],
            [1, 2, 3, 5, 6, 4, 7, 8],
            id="behind the results of the second call",
        ),
        pytest.param(["assistant a2", "user status"], [1, 2, 3, 4, 5], id="behind an answer"),
    ],
)
def test_what_is_not_answered_goes_last(newest: list[str], order: list[int]) -> None:
    before = ["user q1", "assistant | c f", "tool c 3", "assistant a1", "user q2", *newest]
    draft = Case({"before": before, "target": 1}).draft()
    changes = list(DropOldest().apply(replace(draft, protected=frozenset({0, len(before) - 1}))))
    assert [change.position for change in changes] == order


def test_where_there_is_room_for_it_what_is_not_answered_stays() -> None:
    before = ["user q1", "assistant a1", "user q2", "assistant | a f", "tool a 1", "assistant | b f", "tool b 2"]
    draft = Case({"before": [*before, "user status"], "target": 1}).draft()
    left = sum(draft.tokens[at] for at in (2, 5, 6, 7)) + draft.fixed_tokens
    changes = list(DropOldest().apply(replace(draft, target=left, protected=frozenset({7}))))
    assert [change.position for change in changes] == [0, 1, 3, 4]


# ----------------------------------------------------------------------------------- drop_internal


def marking(draft: Draft, places: Iterable[int]) -> Draft:
    marked = set(places)
    return replace(
        draft, entries=tuple(replace(entry, is_internal=place in marked) for place, entry in enumerate(draft.entries))
    )


class MarkedCase(Case):
    """A row that says which messages are marked."""

    def draft(self) -> Draft:
        return marking(super().draft(), self.row.get("internal", []))


@pytest.mark.parametrize("case", [MarkedCase(row) for row in rows("drop_internal")], ids=str)
def test_golden_drop_internal(case: MarkedCase) -> None:
    case.check()


def test_what_an_earlier_edit_removed_is_left_alone() -> None:
    draft = MarkedCase({"before": ["user q1", "assistant | a f", "tool a 1", "user q2"], "internal": [1, 2]}).draft()
    emptied = draft.after([Change(position=1, edit="other", reason="", message=None, tokens_before=10, tokens_after=0)])
    assert [change.position for change in DropInternal().apply(emptied)] == [2]


def test_in_a_recorded_session_the_notes_between_agents_go() -> None:
    session = recorded("deerflow-replay-ultra-processed-foods")
    spoken = [place for place, message in enumerate(session) if message.role == "assistant"]
    draft = marking(draft_of(session), spoken[:2])
    after = check(DropInternal(), draft)
    assert [message.role for message in session][:4] == ["user", "assistant", "assistant", "tool"]
    assert standing(after) == [session[0], *session[4:]]


@TRIED
@given(valid(), st.data(), st.integers(0, 2))
def test_it_is_safe_on_any_history_drop_internal(log: list[Message], data: st.DataObject, kept: int) -> None:
    marked = data.draw(st.sets(st.integers(0, max(0, len(log) - 1))))
    draft = marking(draft_of(log, {"rounds": kept, "spans": 2}), marked)
    after = check(DropInternal(), draft)
    left = {position for position, _ in after.remaining(0, len(log))}
    assert left & marked <= draft.protected


# ----------------------------------------------------------------------------------- recent_window


@pytest.mark.parametrize("case", cases("recent_window"), ids=str)
def test_golden_recent_window(case: Case) -> None:
    case.check()


def test_a_budget_is_one_or_the_other() -> None:
    assert (RecentWindow().tokens, RecentWindow().ratio) == (None, 0.65)
    assert (RecentWindow(tokens=5).tokens, RecentWindow(tokens=5).ratio) == (5, None)
    assert RecentWindow(ratio=0.5).ratio == 0.5
    for wrong in ({"tokens": 5, "ratio": 0.5}, {"tokens": None, "ratio": None}):
        with pytest.raises(ValidationError, match="set one of tokens, ratio"):
            RecentWindow.model_validate(wrong)
    with pytest.raises(ValidationError):
        RecentWindow.model_validate("recent")


def test_only_a_ratio_needs_a_target() -> None:
    def policy(**edit: Any) -> Policy:
        return Policy.model_validate({"trigger": {"every_request": True}, "edits": [{"type": "recent_window", **edit}]})

    assert policy(tokens=5).edits
    with pytest.raises(ValidationError, match="recent_window needs a target"):
        policy()


def test_of_a_window_of_128000_tokens_the_recent_conversation_gets_its_part() -> None:
    """0.6 of the window less the system prompt, and of that 65 %."""
    policy = Policy.model_validate(
        {
            "trigger": {"every_request": True},
            "target": {"ratio": 0.6},
            "keep": {"rounds": 0},
            "edits": [{"type": "recent_window"}],
        }
    )
    known = PlanningContext(count=count, fixed_tokens=2_000, context_window=128_000)
    budget = int(0.65 * (128_000 * 0.6 - 2_000))
    assert budget == 48_620
    log = entries([ChatMessage.of({"role": "user", "content": "x" * 990}) for _ in range(80)])
    assert sum(entry.tokens for entry in log) + 2_000 > 128_000 * 0.6
    made = plan(log, policy, "p", known)
    assert made.tokens_sent - 2_000 == budget // 1_000 * 1_000
    assert made.view == tuple(entry.message for entry in log[-(budget // 1_000) :])


def test_its_own_target_takes_the_place_of_the_policys() -> None:
    log = entries([ChatMessage.of({"role": "user", "content": "x" * 990}) for _ in range(80)])
    policy = Policy.model_validate(
        {
            "trigger": {"messages": 10},
            "keep": {"rounds": 0},
            "edits": [{"type": "recent_window", "ratio": 0.5, "target": {"ratio": 0.25}}],
        }
    )
    made = plan(log, policy, "p", PlanningContext(count=count, fixed_tokens=2_000, context_window=80_000))
    assert made.tokens_sent == 2_000 + 9_000
    assert made.target == 20_000
    assert plan(log, policy, "p", PlanningContext(count=count)).tokens_sent == 80_000  # of a window that nobody knows


def test_of_a_recorded_session_the_newest_that_fits_stays() -> None:
    draft = draft_of(recorded("deerflow-thread-4f3e55ee"))
    after = check(RecentWindow(tokens=20_000), draft)
    stopped = check(RecentWindow(tokens=20_000, on_overflow="stop"), draft)
    assert draft.total > 38_000
    assert 10_000 < stopped.total < after.total <= 20_000


@TRIED
@given(valid(), st.integers(1, 400), st.sampled_from(["skip", "stop"]), st.integers(0, 2))
def test_it_is_safe_on_any_history_recent_window(
    log: list[Message], tokens: int, on_overflow: Literal["skip", "stop"], kept: int
) -> None:
    draft = draft_of(log, {"rounds": kept, "spans": 2})
    after = check(RecentWindow(tokens=tokens, on_overflow=on_overflow), draft)
    protected = sum(draft.tokens[position] for position in draft.protected)
    assert after.total <= max(tokens, protected)
    gone = [span for span in draft.spans if after.messages[span.start] is None]
    if gone and on_overflow == "stop":
        assert not [place for place, _ in after.remaining(0, gone[-1].start) if place not in draft.protected]


# --------------------------------------------------------------------------------- keep_tool_calls

CITIES = ("Tokyo", "Delhi", "Shanghai", "Cairo", "Mexico", "Beijing", "Mumbai", "London")


@pytest.mark.parametrize("case", cases("keep_tool_calls"), ids=str)
def test_golden_keep_tool_calls(case: Case) -> None:
    case.check()


@pytest.mark.parametrize("answered", [True, False], ids=["with the current call", "before it"])
def test_eight_rounds_of_one_call_each_keep_three_from_history(*, answered: bool) -> None:
    policy = Policy(trigger={"every_request": True}, edits=({"type": "keep_tool_calls", "last": 3},))  # type: ignore[arg-type]  # as in a file
    stored, history, from_history, sent = [], [], [], []
    lines: list[str] = []
    for city in CITIES:
        question, call, result = (
            f"user weather in {city}?",
            "assistant | call_1 weather",
            f"tool call_1 sunny in {city}",
        )
        view = plan(log(*lines, question, *((call, result) if answered else ())), policy, "p", KNOWN).view
        texts = [message.text for message in view if message.role == "tool"]
        history.append(sum(line.startswith("tool") for line in lines))
        from_history.append(sum(city not in text for text in texts))
        sent.append(len(texts))
        lines += [question, call, result, f"assistant it is sunny in {city}"]
        stored.append(sum(line.startswith("tool") for line in lines))
        assert [message.text for message in view if message.role == "user"] == [
            line[5:] for line in lines if line.startswith("user")
        ]
    assert stored == [1, 2, 3, 4, 5, 6, 7, 8]
    assert history == [0, 1, 2, 3, 4, 5, 6, 7]
    assert from_history == [0, 1, 2, 3, 3, 3, 3, 3]
    assert sent == ([1, 2, 3, 4, 4, 4, 4, 4] if answered else from_history)


def test_it_leaves_alone_what_an_earlier_edit_removed() -> None:
    case = Case(
        {
            "edit": {"type": "keep_tool_calls", "last": 0},
            "before": ["user q1", "assistant | a f", "tool a 1", "user q2"],
        }
    )
    draft = case.draft()
    emptied = draft.after(
        [
            Change(position=position, edit="other", reason="", message=None, tokens_before=10, tokens_after=0)
            for position in (1, 2)
        ]
    )
    assert list(KeepToolCalls(last=0).apply(emptied)) == []


def test_what_a_program_of_the_provider_s_called_goes_with_it_or_stays() -> None:
    def said(*blocks: dict[str, Any], role: str = "assistant") -> Message:
        return MessagesMessage.of({"role": role, "content": list(blocks)})

    def called(name: str) -> dict[str, Any]:
        return {"type": "tool_use", "id": name, "name": name, "input": {}, "caller": {"type": "x", "tool_id": "s"}}

    def seen(name: str) -> Message:
        return said({"type": "tool_result", "tool_use_id": name, "content": "seen " * 50}, role="user")

    begun = {"type": "server_tool_use", "id": "s", "name": "code_execution", "input": {}}
    ended = {"type": "code_execution_tool_result", "tool_use_id": "s", "content": {}}
    asked = said({"type": "text", "text": "Look."}, role="user")
    program = [said(begun, called("a")), seen("a"), said(called("b")), seen("b"), said(ended)]
    draft = draft_of([asked, *program, asked], target=100)
    assert list(KeepToolCalls(last=0).apply(draft)) == []
    assert [result.tool for result in draft.results()] == ["a", "b"]
    current = draft_of([asked, *program, said({"type": "text", "text": "So it is."})], target=100)
    assert [change.position for change in DropOldest().apply(current)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("edit", [KeepToolCalls(last=20, scope="all"), DropInternal()], ids=["calls", "internal"])
def test_of_very_many_calls_in_one_message_each_is_compared_with_its_results(
    edit: KeepToolCalls | DropInternal, comparisons: list[Call]
) -> None:
    many = 300
    before = [f"assistant | {', '.join(f'i{at} f' for at in range(many))}", *(f"tool i{at} 1" for at in range(many))]
    draft = marking(draft_of(log(*before, "user hi")), range(1, many - 19) if isinstance(edit, DropInternal) else ())
    left = lines(standing(draft.after(list(edit.apply(draft)))))
    assert left == [
        f"assistant | {', '.join(f'i{at} f' for at in range(many - 20, many))}",
        *(f"tool i{at} 1" for at in range(many - 20, many)),
        "user hi",
    ]
    assert len(comparisons) <= 3 * many


def test_its_own_work_is_left_alone() -> None:
    for case in cases("keep_tool_calls"):
        edit, draft = case.edit(), case.draft()
        changes, _ = outcome(edit, draft)
        assert list(edit.apply(draft.after(changes))) == [], str(case)
