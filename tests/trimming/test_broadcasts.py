"""Broadcasts and their digest: what is read, what is refused, and that a digest reads what it wrote."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.trimming.edits.digest_agent_calls import (
    BUILT_IN,
    Broadcast,
    Digest,
    broadcast_digest,
    broadcast_of,
    checked_pattern,
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("<Agent: Ann> [调用工具 search]", Broadcast(speaker="Agent: Ann", tool="search", chinese=True)),
        (
            "  <Agent：Ann>\n[调用工具：search] 参数",
            Broadcast(speaker="Agent: Ann", tool="search", chinese=True),
        ),
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
    assert broadcast_of("tool search", pattern, "Ann") == Broadcast(
        speaker="Ann", tool="search", chinese=False
    )


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
