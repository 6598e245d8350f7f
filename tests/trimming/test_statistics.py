"""Statistics of a conversation: what is counted and quoted, in which language, and that parts add up."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from proxy.conversation import spans
from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.trimming.statistics import DETAILS, Detail, Language, Statistics, ToolUse, statistics_of
from tests.trimming.edits.held import recorded
from tests.trimming.histories import TRIED, valid
from tests.trimming.notation import messages

ALL, LEAST = DETAILS[0], DETAILS[-1]


def of(*lines: str, rounds: int = 1) -> Statistics:
    given_messages = messages(lines)
    return statistics_of(given_messages, spans(given_messages), rounds)


def block(identity: str, name: str, arguments: str) -> Message:
    call = {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
    return ChatMessage.of({"role": "assistant", "content": None, "tool_calls": [call]})


def test_the_text_in_english() -> None:
    log = [
        *messages(["user Please read\n\nand tell me about src/a.py"]),
        block("a", "read", '{"path": "src/a.py"}'),
        *messages(["tool a def main(): # see src/b.py", "assistant It is a program."]),
        *messages(["user And src/b.py?", "assistant | b read, c find", "tool b Error: no such file"]),
        *messages(["tool c none", "assistant There is\nno such file."]),
    ]
    assert statistics_of(log, spans(log), 2).text("en", ALL).split("\n") == [
        "Rounds 1-2: 9 messages (2 user, 4 assistant, 3 tool).",
        "Tool calls: read ×2 (1 failed), find ×1.",
        "Requests of the user (2 of 2):",
        "1. Please read…",
        "2. And src/b.py?",
        "Named most: src/a.py, src/b.py",
        "Last reply: There is no such file.",
    ]


def test_the_text_in_chinese() -> None:
    statistics = of(
        "user 请查一下订单 HAT136 的状态",
        "assistant | a query, b 工具",
        'tool a {"success": false, "id": "HAT136"}',
        "tool b 好",
        "function f 好",
        "assistant 订单 HAT136 已经发货。",
    )
    assert statistics.language == "zh"
    assert statistics.text("zh", ALL).split("\n") == [
        "第 1-1 轮：共 6 条消息（用户 1，助手 2，工具 2，function 1）。",
        "工具调用：query×1（失败 1），工具×1。",
        "用户请求（1 条中的 1 条）：",
        "1. 请查一下订单 HAT136 的状态",
        "多次出现：HAT136",
        "最后回复：订单 HAT136 已经发货。",
    ]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_least_is_one_line(language: Language) -> None:
    statistics = of("user find src/a.py", "assistant | a read", "tool a src/a.py", "assistant src/a.py")
    assert statistics.text(language, LEAST).count("\n") == 0
    assert statistics.text(language, Detail(requests=0, request=0, tools=1, values=0, reply=0)).count("\n") == 1
    assert of("assistant hello", rounds=0).text("en", LEAST) == "1 messages (1 assistant)."
    assert of("assistant 好", rounds=0).text("zh", LEAST) == "共 1 条消息（助手 1）。"


def test_each_detail_shows_less_than_the_one_before() -> None:
    session = recorded("tau-airline-t46-r3")
    statistics = statistics_of(session, spans(session), 13)
    for language in ("en", "zh"):
        sizes = [len(statistics.text(language, detail)) for detail in DETAILS]
        assert sizes == sorted(set(sizes), reverse=True)


@pytest.mark.parametrize(
    ("lines", "language"),
    [
        (["user 你好，我想订一张去 New York 的机票"], "zh"),
        (["user Please translate 你好 for my friend from Beijing"], "en"),
        (["user 私は学生です。日本語を話します"], "en"),
        (["user 한국어로 大韓民國 이야기"], "en"),
        (["user 12345 !!!"], "en"),
        (["tool a 这是工具的输出", "user hello"], "en"),
    ],
)
def test_the_language_is_that_of_those_who_speak(lines: list[str], language: Language) -> None:
    assert of(*lines).language == language


@pytest.mark.parametrize(
    ("output", "failed"),
    [
        ("Error: no such file", True),
        ("[ERROR] no such file", True),
        ("Traceback (most recent call last):", True),
        ("错误：没有找到", True),
        ('{"error": "not found"}', True),
        ('{"data": null, "errors": ["a"]}', True),
        ('{"ok": false}', True),
        ('{"isError":true,"content":[]}', True),
        ('{"error": null, "data": 1}', False),
        ('{"errors": [], "failed": 0}', False),
        ('{"success": true}', False),
        ("no error", False),
        ("errors: 0", False),
        ("", False),
        ("{" + " " * 1_000_000, False),
        ('"error" ' * 100_000, False),
    ],
    ids=lambda value: str(value)[:30],
)
def test_which_results_say_that_a_call_failed(output: str, failed: bool) -> None:
    statistics = of("assistant | a f", f"tool a {output}")
    assert statistics.tools == (ToolUse(name="f", calls=1, errors=int(failed)),)


def test_the_older_form_counts_by_its_own_name() -> None:
    statistics = of("assistant | search()", "function search Error", "function other failed")
    assert statistics.tools == (ToolUse(name="search", calls=1, errors=1), ToolUse(name="other", calls=0, errors=1))
    assert of("tool a Error").tools == (ToolUse(name="", calls=0, errors=1),)


def test_what_is_named_most_is_what_tells_something() -> None:
    statistics = of(
        "user see one_way and HAT136 and HAT137",
        "assistant one_way, HAT136, HAT137, only/once.py",
        "user one_way, HAT137",
    )
    assert "Named most: HAT137, HAT136, one_way\n" in statistics.text("en", ALL)
    assert "Named most: HAT137, HAT136\n" in statistics.text("en", replace(ALL, values=2))


def test_no_value_is_cut_in_two_where_a_long_message_is() -> None:
    for cut in range(1, 10):
        text = "word " * 3998 + " " * (10 - cut) + "HAT_1234567 more"
        call = block("c", "read", json.dumps({"note": f"{text} HAT_7654321"}))
        found = statistics_of([*messages([f"user {text}"]), call], spans([*messages([f"user {text}"]), call]), 1)
        assert found.values == ()


def test_half_an_emoji_is_named_nowhere() -> None:
    call = block("c", "read", r'{"path": "src/a\ud83d.c", "id": "K77"}')
    found = statistics_of([call], spans([call]), 1)
    assert [each.text for each in found.values] == ["K77"]


def test_what_is_kept_does_not_grow_with_the_conversation() -> None:
    lines = []
    for number in range(500):
        lines += [f"user question {number}", f"assistant | a tool_{number}", f"tool a file_{number}.py"]
        lines += [f"assistant file_{number}.py"]
    statistics = of(*lines, rounds=500)
    assert len(statistics.requests) == 40
    assert [each.number for each in statistics.requests[8:12]] == [9, 10, 471, 472]
    assert statistics.requested == 500
    assert len(statistics.tools) == 100
    assert statistics.values[-1].text == "file_499.py"
    assert len(statistics.values) == 100
    text = statistics.text("en", Detail(requests=6, request=80, tools=12, values=6, reply=160))
    assert ", 88 more tools." in text
    assert "Requests of the user (6 of 500):\n1. question 0\n2. question 1\n497. question 496\n" in text
    assert "，另有 88 种。" in statistics.text("zh", Detail(requests=6, request=80, tools=12, values=6, reply=160))
    assert len(json.dumps(statistics.model_dump(mode="json"))) < 20_000


def test_long_texts_are_cut_with_a_mark() -> None:
    statistics = of(f"user {'a' * 300}", f"assistant {'b ' * 3_000}")
    assert statistics.requests[0].text == "a" * 199 + "…"
    assert statistics.reply == ("b " * 300)[:599] + "…"
    assert "1. aaaa…\n" in statistics.text("en", replace(ALL, request=5))
    assert of(f"user {'a' * 200}").requests[0].text == "a" * 200
    assert of("user \n\n  a   b\n").requests[0].text == "a b"
    assert of(f"assistant a{' ' * 5_000}b").reply == "a…"


@TRIED
@given(st.lists(valid(), min_size=2, max_size=4))
def test_the_statistics_of_parts_add_up_to_those_of_the_whole(parts: list[list[Message]]) -> None:
    whole = [message for part in parts for message in part]
    sum_of_parts = Statistics()
    for part in parts:
        read_again = Statistics.model_validate(json.loads(sum_of_parts.model_dump_json()))
        sum_of_parts = read_again.and_then(statistics_of(part, spans(part), 2))
    assert sum_of_parts == statistics_of(whole, spans(whole), 2 * len(parts))
    assert sum_of_parts.messages == len(whole)
