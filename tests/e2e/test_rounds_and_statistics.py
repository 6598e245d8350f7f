"""Above 0.8 of the window, ten whole rounds stay and older ones are summarized; long output is cut but stored.

The figures are those of the system that examples/policies/rounds-and-statistics.yaml reproduces.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.examples import serving
from tests.support.server import Proxy
from tests.support.upstream import Upstream

WINDOW = 8_000
LIMIT = 6_400
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
HEADING = "Archived Session Summary"

Message = dict[str, Any]


@pytest.fixture(scope="module")
def proxy(provider: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    models = [{"match": ["small*"], "context_window": WINDOW}]
    folder = tmp_path_factory.mktemp("store")
    with serving("rounds-and-statistics", provider, folder, models=models) as served:
        yield served


def words(number: int, name: str) -> str:
    return " ".join([name] * number)


def turn(number: int, size: int = 175) -> list[Message]:
    """Return one round of about 500 tokens: a question, a call, its result and an answer."""
    call = {"id": f"c{number}", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    return [
        {"role": "user", "content": f"question {number}: {words(size, 'why')}"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"c{number}", "content": words(size // 2, "found")},
        {"role": "assistant", "content": words(size, "because")},
    ]


def rounds(number: int, size: int = 175) -> list[Message]:
    return [message for at in range(1, number + 1) for message in turn(at, size)]


def question(number: int) -> Message:
    return turn(number)[0]


def ask(proxy: Proxy, session: str, messages: list[Message], model: str = "small") -> dict[str, Any]:
    """Send a request, and return its receipt."""
    answer = proxy.chat(session, messages, f"{model}+say:fine", tools=TOOLS)
    assert answer.status_code == 200, answer.text
    return proxy.exchanges(session)[-1]


def bare(messages: list[Message]) -> list[Message]:
    return [{key: value for key, value in message.items() if value} for message in messages]


def test_ten_whole_rounds_stay_above_four_fifths_of_the_window(proxy: Proxy, upstream: Upstream, session: str) -> None:
    receipt: dict[str, Any] = {"edits": []}
    messages: list[Message] = []
    number = 0
    while not receipt["edits"]:
        number += 1
        messages = [SYSTEM, *rounds(number - 1), question(number)]
        receipt = ask(proxy, f"{session}-{number}", messages)
        if not receipt["edits"]:
            assert receipt["tokens_before"] <= LIMIT
            assert upstream.last.messages == messages
        assert number < 20
    assert receipt["tokens_before"] > LIMIT
    assert receipt["edits"] == ["summarize"]
    assert number > 11
    system, *rest = bare(upstream.last.messages)
    assert rest == bare(messages[1 + 4 * (number - 11) :])
    assert sum(message["role"] == "user" for message in rest) == 11  # ten rounds, and the current one
    start, _, summary = system["content"].partition(f"\n\n{HEADING}\n")
    assert start == SYSTEM["content"]
    older = number - 11
    assert f"Rounds 1-{older}: {4 * older} messages" in summary
    assert f"read ×{older}" in summary
    assert "1. question 1: why why" in summary
    assert receipt["summary"]["kind"] == "statistics"
    assert receipt["summary"]["message_count"] == receipt["summary"]["summarized_until"] == 4 * older
    assert bare(proxy.messages(f"{session}-{number}")[:-1]) == bare(messages[1:])


def test_too_few_rounds_change_nothing(proxy: Proxy, upstream: Upstream, session: str) -> None:
    messages = [SYSTEM, *rounds(10, 400), question(11)]
    receipt = ask(proxy, session, messages)
    assert receipt["tokens_before"] > LIMIT
    assert receipt["edits"] == []
    assert receipt["summary"] is None
    assert upstream.last.messages == messages


def test_the_next_summary_grows_out_of_the_last(proxy: Proxy, upstream: Upstream, session: str) -> None:
    messages = rounds(13)
    generations = [0]
    for number in range(14, 24):
        messages = [*messages, {"role": "user", "content": f"question {number}: {words(430, 'why')}"}]
        receipt = ask(proxy, session, messages)
        told = receipt["summary"]
        generations.append(told["generation"])
        sent = upstream.last.messages
        assert sent[0]["role"] == "system"
        assert sent[0]["content"].startswith(f"{HEADING}\n")
        assert sent[0]["content"].count(HEADING) == 1
        assert f"Rounds 1-{told['summarized_until'] // 4}: " in sent[0]["content"]
        assert bare(sent[1:]) == bare(messages[told["summarized_until"] :])
        if generations[-1] > generations[-2]:
            assert told["summarized_until"] == 4 * (number - 11)
        assert receipt["tokens_sent"] <= LIMIT + 600
        messages += bare(proxy.messages(session)[-1:])
    assert generations[1] == 1
    assert generations[-1] > 1
    assert generations == sorted(generations)


def test_without_a_window_a_ratio_decides_nothing_and_it_is_said(proxy: Proxy, session: str) -> None:
    receipt = ask(proxy, session, [*rounds(30), question(31)], model="other")
    assert receipt["tokens_before"] > LIMIT
    assert receipt["edits"] == []
    assert "context window" in " ".join(receipt["warnings"])


# ------------------------------------------------------------------------------------ tool output


def with_output(text: str) -> list[Message]:
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    return [
        {"role": "user", "content": "read it"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": text},
    ]


@pytest.mark.parametrize(
    ("text", "kept", "omitted"),
    [
        pytest.param(
            "".join(f"{number}\n" for number in range(2_100)),
            "".join(f"{number}\n" for number in range(2_000)),
            "100 lines (500 bytes) omitted of 2100",
            id="2,000 lines",
        ),
        pytest.param(
            "".join(f"{number:0127d}\n" for number in range(1_000)),
            "".join(f"{number:0127d}\n" for number in range(400)),
            "600 lines (76800 bytes) omitted of 1000",
            id="51,200 bytes",
        ),
        pytest.param("字" * 20_000, "字" * 17_066, "1 line (8802 bytes) omitted of 1", id="in characters"),
    ],
)
def test_long_output_is_cut_to_its_beginning_and_can_be_read_whole(
    proxy: Proxy, upstream: Upstream, session: str, text: str, kept: str, omitted: str
) -> None:
    receipt = ask(proxy, session, with_output(text))
    sent = upstream.last.messages[-1]["content"]
    assert sent.startswith(kept)
    assert len(kept.encode()) <= 51_200
    mark = sent.removeprefix(kept).strip()
    assert mark.startswith(f"[... {omitted}")
    ref = mark.partition("full output: ")[2].partition(" ")[0]
    assert proxy.get(f"/sessions/{session}/refs/{ref}")["text"] == text
    assert proxy.messages(session)[-2]["content"] == text
    assert receipt["edits"] == ["truncate_tool_output"]
    (line,) = receipt["plan"]
    assert f"{len(kept.encode())} bytes kept (head)" in line["reason"]
    assert line["tokens_after"] < line["tokens_before"]


@pytest.mark.parametrize(
    "text", ["line\n" * 2_000, "x" * 51_199 + "\n", "word " * 10_240], ids=["lines", "bytes", "one line"]
)
def test_output_at_the_limits_goes_as_it_is(proxy: Proxy, upstream: Upstream, session: str, text: str) -> None:
    ask(proxy, session, with_output(text), model="other")
    assert upstream.last.messages[-1]["content"] == text


# ------------------------------------------------------------------------------------ counting


def test_what_was_counted_can_be_read_and_cleared_and_only_new_messages_are_counted(proxy: Proxy, session: str) -> None:
    cleared = proxy.client.delete("/tokens/cache")
    assert cleared.status_code == 200
    empty = {"cached_messages": 0, "total_cached_tokens": 0}
    assert empty.items() <= proxy.get("/tokens/cache").items()
    messages: list[Message] = []
    seen = empty
    receipt: dict[str, Any] = {}
    for number in range(4):
        messages.append({"role": "user", "content": words(10 + number, "count")})
        receipt = ask(proxy, session, messages)
        cached = proxy.get("/tokens/cache")
        # A question and its answer are new; the answer is the same each time, and was counted once.
        assert cached["cached_messages"] == seen["cached_messages"] + (1 if number else 2)
        messages += bare(proxy.messages(session)[-1:])
        new = cached["total_cached_tokens"] - seen["total_cached_tokens"]
        assert new == 4 + round(1.14 * (10 + number)) + (0 if number else 5)
        seen = cached
    tools = receipt["tokens_before"] - seen["total_cached_tokens"] - 2 * 5
    assert tools > 0  # the request's tools are counted too, but are not a message
