"""`digest_agent_calls`: what other agents told of their calls becomes one count."""

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
from proxy.trimming.edits.digest_agent_calls import (
    BUILT_IN,
    Broadcast,
    Digest,
    DigestAgentCalls,
    broadcast_digest,
    broadcast_of,
    checked_pattern,
)
from proxy.trimming.model import Cut
from proxy.trimming.planner import plan
from proxy.trimming.policy import Policy
from tests.trimming.edits.golden import Case, cases
from tests.trimming.edits.held import check, draft_of, outcome, recorded, texts
from tests.trimming.histories import TRIED, valid
from tests.trimming.notation import KNOWN, entries, log, messages

# ------------------------------------------------------------------------------ digest_agent_calls


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
    lambda role, speaker, words, tool: [ChatMessage.of({"role": role, "content": f"<{speaker}> [{words} {tool}]"})],
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
def test_it_is_safe_on_any_history(parts: list[list[Message]], keep: int, kept: int, asking: str | None) -> None:
    history = [message for part in parts for message in part]
    draft = draft_of(history, {"rounds": kept, "spans": 2}, agent=asking)
    after = check(DigestAgentCalls(keep=keep), draft)
    before = sum("> [" in message.text for message in history)
    digests = [digest for text in texts(after) if (digest := broadcast_digest(text)) is not None]
    whole = sum("> [" in text for text in texts(after)) - len(digests)
    assert whole + sum(sum(digest.tools.values()) for digest in digests) == before
    assert len({digest.speaker for digest in digests}) == len(digests)
    assert len(entries(history)) == len(after.messages)


# -------------------------------------------------------------------------------------- broadcasts


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("<Agent: Ann> [调用工具 search]", Broadcast(speaker="Agent: Ann", tool="search", chinese=True)),
        ("  <Agent：Ann>\n[调用工具：search] 参数", Broadcast(speaker="Agent: Ann", tool="search", chinese=True)),
        ("<团队成员: 小王> [调用工具 搜索]", Broadcast(speaker="团队成员: 小王", tool="搜索", chinese=True)),
        ("<Ann> [调用工具 web search]</Ann>", Broadcast(speaker="Ann", tool="web search", chinese=True)),
        ("<Agent: Ann> [calls tool search]", Broadcast(speaker="Agent: Ann", tool="search", chinese=False)),
        ("<Ann> [Calling the tool: search(q)]", Broadcast(speaker="Ann", tool="search", chinese=False)),
        ("<Ann> [tool call: mcp/search:1]", Broadcast(speaker="Ann", tool="mcp/search:1", chinese=False)),
        ("<Ann> [invoked function search]", Broadcast(speaker="Ann", tool="search", chinese=False)),
        ("<Ann> hello", None),
        ("<Ann> 我 [调用工具 search]", None),
        ("[调用工具 search]", None),
        ("<Ann> [调用工具 ]", None),
        ("<Ann> [tools search]", None),
        ("<Ann> [早期工具调用摘要: search×1, 共 1 次]</Ann>", None),
        ("", None),
    ],
)
def test_what_is_a_broadcast(text: str, told: Broadcast | None) -> None:
    assert broadcast_of(text, tuple(BUILT_IN), None) == told


def test_who_speaks_may_stand_in_the_field_of_the_message() -> None:
    pattern = (r"^tool (?P<tool>\S+)",)
    assert broadcast_of("tool search", pattern, None) is None
    assert broadcast_of("tool search", pattern, "Ann") == Broadcast(speaker="Ann", tool="search", chinese=False)


def test_names_are_brought_into_a_form_that_a_digest_can_hold() -> None:
    pattern = (r"^(?P<agent>.+)\|(?P<tool>.+)",)
    told = broadcast_of("A <b>  c|x×2, y  z", pattern, None)
    assert told == Broadcast(speaker="A b c", tool="xx2 y z", chinese=False)
    assert broadcast_of("<>|x", pattern, None) is None


@pytest.mark.parametrize(
    ("regex", "words"),
    [
        ("(", "not a pattern that RE2 takes"),
        ("(?P<agent>a)", r"it must have a group \(\?P<tool>...\)"),
        ("(?P<tool>a)(?P<who>b)", "unknown group who; allowed here: type, agent, tool"),
    ],
)
def test_a_pattern_that_does_not_tell_the_tool_is_refused(regex: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        checked_pattern(regex)


def test_the_built_in_patterns_are_taken_by_name_and_as_they_are() -> None:
    for name, patterns in BUILT_IN.items():
        assert checked_pattern(name) == name
        assert tuple(map(checked_pattern, patterns)) == patterns
    assert broadcast_of("<Ann> [调用工具 a]", ("english",), None) is None
    assert broadcast_of("<Ann> [calls tool a]", ("chinese",), None) is None


def test_a_digest_is_written_as_it_is_documented() -> None:
    tools = {"ToolA": 5, "ToolB": 3}
    assert Digest(speaker="Type: AgentName", tools=tools, chinese=True).text == (
        "<Type: AgentName> [早期工具调用摘要: ToolA×5, ToolB×3, 共 8 次]</Type: AgentName>"
    )
    assert Digest(speaker="AgentName", tools=tools, chinese=False).text == (
        "<AgentName> [Earlier tool calls: ToolA×5, ToolB×3, 8 in all]</AgentName>"
    )


@pytest.mark.parametrize(
    "text",
    [
        "<A> [早期工具调用摘要: a×1, 共 2 次]</A>",
        "<A> [早期工具调用摘要: a×1, 共 1 次]</B>",
        "<A> [早期工具调用摘要: a×1, 共 1 次]</A> and more",
        "<A> [早期工具调用摘要: a, 共 1 次]</A>",
        "<A> [早期工具调用摘要: ×1, 共 1 次]</A>",
        "<A> [早期工具调用摘要: a×" + "1" * 5_000 + ", 共 1 次]</A>",
        "<A> [Earlier tool calls: " + "a" * 1_000_000,
        "<" * 1_000_000,
    ],
    ids=lambda text: text[:40],
)
def test_what_is_no_digest(text: str) -> None:
    assert broadcast_digest(text) is None


NAMES = st.text(min_size=1, max_size=30).map(lambda name: f"n{name}")


@given(NAMES, NAMES, st.lists(NAMES, min_size=1, max_size=5), st.booleans())
def test_a_digest_reads_what_it_wrote(kind: str, agent: str, tools: list[str], chinese: bool) -> None:
    pattern = (rf"(?s)^(?P<type>.*){SPLIT}(?P<agent>.*){SPLIT}(?P<tool>.*){'调' * chinese}$",)
    counted: dict[str, int] = {}
    speaker = ""
    for tool in tools:
        told = broadcast_of(SPLIT.join([kind, agent, tool]) + "调" * chinese, pattern, None)
        assert told is not None
        assert told.chinese == chinese
        speaker = told.speaker
        counted[told.tool] = counted.get(told.tool, 0) + 1
    digest = Digest(speaker=speaker, tools=counted, chinese=chinese)
    assert broadcast_digest(digest.text) == digest


SPLIT = "\x00\x01"
