"""`digest_agent_calls`: its table, whose messages stay, how moves add up, and what holds on any history."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from pydantic import ValidationError

from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.trimming.draft import Draft
from proxy.trimming.edits.digest_agent_calls import DigestAgentCalls, broadcast_digest
from proxy.trimming.model import Cut
from proxy.trimming.planner import plan
from proxy.trimming.policy import Policy
from tests.trimming.edits.golden import Case, cases
from tests.trimming.edits.held import check, draft_of, outcome, recorded, texts
from tests.trimming.histories import TRIED, valid
from tests.trimming.notation import KNOWN, entries, log, messages


@pytest.mark.parametrize("case", cases("digest_agent_calls"), ids=str)
def test_golden(case: Case) -> None:
    case.check()


def told(*tools: str, speaker: str = "Worker: Ann") -> list[str]:
    return [f"user <{speaker}> [调用工具 {tool}]" for tool in tools]


def test_eight_calls_and_the_newest_five_as_the_reference_has_it() -> None:
    tools = ["ToolA", "ToolA", "ToolB", "ToolA", "ToolB", "ToolA", "ToolB", "ToolA"]
    newest = ["ToolC", "ToolA", "ToolC", "ToolB", "ToolA"]
    draft = draft_of(messages([*told(*tools, *newest), "user go on"]))
    after = check(DigestAgentCalls(), draft)
    first, *others = texts(after)
    assert first == "<Worker: Ann> [早期工具调用摘要: ToolA×5, ToolB×3, 共 8 次]</Worker: Ann>"
    assert others == [f"<Worker: Ann> [调用工具 {tool}]" for tool in newest] + ["go on"]


@pytest.mark.parametrize(
    ("asking", "stays"),
    [
        ("Ann", True),
        ("Worker: Ann", True),
        ("Worker：Ann", True),
        ("Bob", False),
        ("Worker", False),
        ("Lead: Ann", False),
        (None, False),
    ],
)
def test_ones_own_stay_with_or_without_the_type(asking: str | None, stays: bool) -> None:
    draft = draft_of(messages([*told("a", "b", "c"), "user go on"]), agent=asking)
    assert (outcome(DigestAgentCalls(keep=1), draft) == ([], None)) == stays


@pytest.mark.parametrize(("asking", "stays"), [("Ann", True), ("Worker: Ann", True), ("Worker: Bob", False)])
def test_ones_own_without_a_type(asking: str, stays: bool) -> None:
    draft = draft_of(messages([*told("a", "b", speaker="Ann"), "user go on"]), agent=asking)
    assert (outcome(DigestAgentCalls(keep=1), draft) == ([], None)) == stays


def by(draft: Draft, agent: str) -> Draft:
    return replace(draft, entries=tuple(replace(entry, agent=agent) for entry in draft.entries))


def test_the_field_of_the_message_tells_who_speaks_too() -> None:
    draft = by(draft_of(messages([*told("a", "b"), "user go on"]), agent="a-17"), "a-17")
    assert outcome(DigestAgentCalls(keep=1), draft) == ([], None)
    short = DigestAgentCalls(keep=1, patterns=("^uses (?P<tool>.+)",))
    draft = draft_of(messages(["user uses x", "user uses y", "user go on"]))
    assert outcome(short, draft) == ([], None)
    assert texts(check(short, by(draft, "Bob"))) == [
        "<Bob> [Earlier tool calls: x×1, 1 in all]</Bob>",
        "uses y",
        "go on",
    ]


def test_what_holds_more_than_text_stays() -> None:
    picture: dict[str, Any] = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    words = {"type": "text", "text": "<Ann> [调用工具 look]"}
    given_log = [ChatMessage.of({"role": "user", "content": [words, picture]})] * 3
    assert outcome(DigestAgentCalls(keep=1), draft_of(given_log)) == ([], None)


def test_what_was_removed_is_not_counted() -> None:
    draft = draft_of(messages([*told("a", "b", "c"), "user go on"]))
    emptied = draft.after([draft.removing(0, "other", "")])
    assert texts(check(DigestAgentCalls(keep=1), emptied))[0] == (
        "<Worker: Ann> [早期工具调用摘要: b×1, 共 1 次]</Worker: Ann>"
    )


@pytest.mark.parametrize(
    ("patterns", "words"),
    [(["("], "RE2"), (["a"], "must have a group"), ([], "at least one pattern"), ([""], "at least 1")],
)
def test_a_pattern_that_cannot_be_used_is_refused(patterns: list[str], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        DigestAgentCalls.model_validate({"patterns": patterns})


def test_moves_add_up_to_what_one_move_makes() -> None:
    policy = Policy.model_validate(
        {
            "trigger": {"every_request": True},
            "keep": {"rounds": 0},
            "edits": [{"type": "digest_agent_calls", "keep": 2}],
        }
    )
    lines = [*told("read", "edit", "read"), "assistant ok", *told("bash", "read"), "user q", *told("x", "y")]
    cut: Cut | None = None
    views = []
    for stop in range(1, len(lines) + 1):
        made = plan(log(*lines[:stop]), policy, "p", KNOWN, cut, composed=True)
        cut = made.cut
        views.append([message.text for message in made.view])
    assert views[-1] == [
        "<Worker: Ann> [早期工具调用摘要: read×3, edit×1, bash×1, 共 5 次]</Worker: Ann>",
        "ok",
        "q",
        "<Worker: Ann> [调用工具 x]",
        "<Worker: Ann> [调用工具 y]",
    ]
    alone = plan(log(*lines), policy, "p", KNOWN, composed=True)
    assert [message.text for message in alone.view] == views[-1]


def test_in_a_recorded_session_nothing_looks_like_such_a_message() -> None:
    session = recorded("tau-airline-t46-r3")
    assert outcome(DigestAgentCalls(keep=1), draft_of(session)) == ([], None)
    spoken = [
        ChatMessage.of({"role": "assistant", "content": f"<Agent: clerk> [called tool {call.name}]"})
        for message in session
        for call in message.calls
    ]
    after = check(DigestAgentCalls(), draft_of([*spoken, *session]))
    digest = broadcast_digest(texts(after)[0])
    assert digest is not None
    assert sum(digest.tools.values()) == len(spoken) - 5
    assert after.messages[len(spoken) :] == tuple(session)


AGENTS = st.sampled_from(["Worker: Ann", "Worker: Bob", "Bob"])
SPOKEN = st.builds(
    lambda role, speaker, words, tool: [
        ChatMessage.of({"role": role, "content": f"<{speaker}> [{words} {tool}]"})
    ],
    st.sampled_from(["user", "assistant"]),
    AGENTS,
    st.sampled_from(["调用工具", "calls tool"]),
    st.sampled_from(["read", "edit"]),
)


@TRIED
@given(
    st.lists(st.one_of(SPOKEN, SPOKEN, SPOKEN, valid()), max_size=14),
    st.integers(0, 3),
    st.integers(0, 2),
    st.sampled_from([None, "Bob", "Worker: Ann"]),
)
def test_it_is_safe_on_any_history(
    parts: list[list[Message]], keep: int, kept: int, asking: str | None
) -> None:
    history = [message for part in parts for message in part]
    draft = draft_of(history, {"rounds": kept, "spans": 2}, agent=asking)
    after = check(DigestAgentCalls(keep=keep), draft)
    before = sum("> [" in message.text for message in history)
    digests = [digest for text in texts(after) if (digest := broadcast_digest(text)) is not None]
    whole = sum("> [" in text for text in texts(after)) - len(digests)
    assert whole + sum(sum(digest.tools.values()) for digest in digests) == before
    assert len({digest.speaker for digest in digests}) == len(digests)
    assert len(entries(history)) == len(after.messages)
