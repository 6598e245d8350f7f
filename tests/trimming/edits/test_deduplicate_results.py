"""`deduplicate_results`: its table, what follows when the older copy goes, and what holds on any history."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.trimming.draft import Draft
from proxy.trimming.edits.deduplicate_results import DeduplicateResults
from proxy.trimming.model import Change
from proxy.trimming.planner import plan
from proxy.trimming.policy import Policy
from tests.trimming.edits.golden import Case, cases
from tests.trimming.edits.held import check, draft_of, outcome, recorded, texts
from tests.trimming.histories import TRIED, valid
from tests.trimming.notation import KNOWN, count, log, message, messages

LONG = "the same words again and again, so many that a pointer to them says it in fewer words"
POINTER = f"[same output as the earlier one of search: {len(LONG)} characters; ref=ref_{{}}]"
TWICE = (
    "user q1",
    "assistant | a search",
    f"tool a {LONG}",
    "assistant | b search",
    f"tool b {LONG}",
    "assistant | c search",
    f"tool c {LONG}",
    "user q2",
)


@pytest.mark.parametrize("case", cases("deduplicate_results"), ids=str)
def test_golden(case: Case) -> None:
    case.check()


def pointed() -> Draft:
    """Return a draft in which two results point to the first."""
    after = check(DeduplicateResults(), draft_of(messages(TWICE)))
    assert texts(after)[2:7:2] == [LONG, POINTER.format(2), POINTER.format(2)]
    return after


def test_an_older_copy_that_is_cut_puts_the_newer_one_back_and_later_ones_point_to_that() -> None:
    draft = pointed()
    cut = draft.after([draft.replacing(2, "other", "", message("tool a the same words ..."))])
    changes = list(DeduplicateResults().afterwards(cut))
    assert [(change.position, change.edit) for change in changes] == [
        (4, "deduplicate_results"),
        (6, "deduplicate_results"),
    ]
    after = cut.after(changes)
    assert texts(after)[2:7:2] == ["the same words ...", LONG, POINTER.format(4)]
    assert after.messages[4] == message(TWICE[4])
    assert list(DeduplicateResults().afterwards(after)) == []
    assert outcome(DeduplicateResults(), after) == ([], None)


def test_an_older_copy_that_is_dropped_puts_the_newer_one_back() -> None:
    draft = pointed()
    dropped = draft.after([draft.removing(place, "other", "") for place in (1, 2)])
    assert texts(dropped.after(list(DeduplicateResults().afterwards(dropped))))[2:5:2] == [LONG, POINTER.format(4)]


def test_an_older_copy_that_is_in_no_draft_any_more_puts_the_newer_one_back() -> None:
    draft = pointed()
    later = replace(
        draft_of(draft.entries[3:]),
        messages=draft.messages[3:],
        tokens=draft.tokens[3:],
        entries=draft.entries[3:],
        made_by=draft.made_by[3:],
    )
    assert texts(later.after(list(DeduplicateResults().afterwards(later))))[1:4:2] == [LONG, POINTER.format(4)]


def test_what_is_put_back_is_what_was_first_sent() -> None:
    draft = pointed()
    short = message("tool b in short")
    arrived = Change(
        position=4,
        edit="compact_tool_output",
        reason="",
        message=short,
        tokens_before=draft.entries[4].tokens,
        tokens_after=count(short),
    )
    entries = list(draft.entries)
    entries[4] = replace(entries[4], arrival=(arrived,))
    cut = replace(draft, entries=tuple(entries)).after([draft.removing(2, "other", "")])
    changes = list(DeduplicateResults().afterwards(cut))
    assert [change.message for change in changes] == [short, message(TWICE[6])]


def test_what_is_protected_by_now_is_not_put_back() -> None:
    draft = pointed()
    cut = replace(draft.after([draft.removing(2, "other", "")]), protected=frozenset({3, 4}))
    assert [change.position for change in DeduplicateResults().afterwards(cut)] == [6]


def test_words_of_a_tool_that_look_like_a_pointer_are_words() -> None:
    quoted = f"{POINTER.format(99)} {' ' * 9}"
    lines = ["user q1", f"tool a {quoted}", f"tool b {LONG}", f"tool c {LONG}", "user q2"]
    after = check(DeduplicateResults(), draft_of(messages(lines)))
    assert texts(after)[1:4] == [quoted, LONG, POINTER.format(2).replace("search", "a tool")]
    assert list(DeduplicateResults().afterwards(after)) == []
    # Nor where another edit has left no more than them.
    cut = draft_of(messages(["user q1", f"tool a before {quoted}", "user q2"]))
    left = cut.after([cut.replacing(1, "other", "", message(f"tool a {quoted}"))])
    assert list(DeduplicateResults().afterwards(left)) == []
    # Nor are they once they were a pointer themselves, and were put back.
    longer = f"[same output as the earlier one of {'f' * 150}: 9 characters; ref=ref_99]"
    lines = ["user q1", f"tool a {longer}", f"tool b {longer}", f"tool c {longer}", "user q2"]
    made = check(DeduplicateResults(), draft_of(messages(lines)))
    assert [len(text) < len(longer) for text in texts(made)[1:4]] == [False, True, True]
    cut = made.after([made.removing(1, "other", "")])
    back = cut.after(list(DeduplicateResults().afterwards(cut)))
    assert texts(back)[1] == longer
    assert list(DeduplicateResults().afterwards(back)) == []


def test_a_cut_does_not_grow_by_words_that_look_like_a_pointer() -> None:
    policy = Policy.model_validate(
        {"trigger": {"every_request": True}, "keep": {"rounds": 0}, "edits": [{"type": "deduplicate_results"}]}
    )
    lines = ["user go", "assistant | a f", f"tool a {POINTER.format(99)}", "assistant so", "user more"]
    cut = None
    for more in range(3):
        cut = plan(log(*lines, *["assistant so", "user more"] * more), policy, "p", KNOWN, cut).cut
        assert cut is not None
        assert cut.changes == ()


def test_outputs_that_differed_are_not_told_to_be_the_same() -> None:
    draft = draft_of(messages([*TWICE[:4], f"tool b {LONG} or not", "user q2"]))
    shortened = draft.after([draft.replacing(4, "other", "", message(f"tool b {LONG}"))])
    assert outcome(DeduplicateResults(), shortened) == ([], None)


def test_outputs_in_parts_count_by_their_text_and_others_stay() -> None:
    def result(call: str, *parts: dict[str, Any]) -> Message:
        return ChatMessage.of({"role": "tool", "tool_call_id": call, "content": list(parts)})

    words = {"type": "text", "text": LONG}
    picture = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    blocks = messages(["user q1", "assistant | a f, b f, c f, d f"])
    results = [result("a", words), result("b", words, picture), result("c", words, picture), result("d", words)]
    after = check(DeduplicateResults(), draft_of([*blocks, *results]))
    assert after.messages[2:5] == tuple(results[:3])
    assert texts(after)[5].startswith("[same output as the earlier one of f: ")


def test_a_tool_without_a_name() -> None:
    given_log = messages(["user q1", f"tool a {LONG} and more", f"tool b {LONG} and more"])
    assert texts(check(DeduplicateResults(), draft_of(given_log)))[2].startswith(
        "[same output as the earlier one of a tool: "
    )


def test_where_a_later_edit_of_the_same_move_drops_the_older_copy_nothing_dangles() -> None:
    lines = TWICE[:-1]
    policy = Policy.model_validate(
        {
            "trigger": {"every_request": True},
            "target": {"tokens": check(DeduplicateResults(), draft_of(messages(lines))).total - 1},
            "keep": {"rounds": 0},
            "edits": [{"type": "deduplicate_results"}, {"type": "drop_oldest"}],
        }
    )
    made = plan(log(*lines), policy, "p", KNOWN)
    assert [each.text for each in made.view] == ["q1", "", LONG, "", POINTER.format(4)]
    assert made.edits == ("drop_oldest", "deduplicate_results")


def test_in_a_recorded_session_an_answer_that_came_again_points_back() -> None:
    session = recorded("deerflow-thread-4f3e55ee")
    call, result = next(
        (block, answer)
        for block, answer in pairwise(session)
        if answer.role == "tool" and len(block.calls) == 1 and len(answer.text) > 1_000
    )
    draft = draft_of([*session, ChatMessage.of({"role": "user", "content": "once more"}), call, result])
    after = check(DeduplicateResults(), draft)
    assert after.messages[:-1] == draft.messages[:-1]
    assert after.messages[-1] is not None
    assert after.messages[-1].answers == call.calls[0].id
    assert call.calls[0].name in after.messages[-1].text
    assert len(after.messages[-1].text) < 120


RESULT = st.builds(
    lambda identity, text: messages([f"assistant | {identity} search", f"tool {identity} {text}"]),
    st.sampled_from(["a", "b"]),
    st.sampled_from([LONG, f"{LONG} ", LONG * 2, "ok"]),
)


@TRIED
@given(st.lists(st.one_of(RESULT, RESULT, valid()), max_size=8), st.integers(0, 2), st.data())
def test_it_is_safe_on_any_history_and_nothing_dangles(
    parts: list[list[Message]], kept: int, data: st.DataObject
) -> None:
    draft = draft_of([each for part in parts for each in part], {"rounds": kept, "spans": 2})
    edit = DeduplicateResults()
    after = check(edit, draft)
    spans = data.draw(st.lists(st.sampled_from(draft.spans), unique=True)) if draft.spans else []
    dropped = after.after(
        [
            after.removing(place, "other", "")
            for span in spans
            for place in range(span.start, span.stop)
            if place not in draft.protected
        ]
    )
    changes = list(edit.afterwards(dropped))
    assert not {change.position for change in changes} & draft.protected
    mended = dropped.after(changes)
    assert list(edit.afterwards(mended)) == []
    standing = {f"ref_{place}" for place, each in enumerate(mended.messages) if each == draft.messages[place]}
    for text in texts(mended):
        if text.startswith("[same output"):
            assert text.rpartition("ref=")[2].rstrip("]") in standing
