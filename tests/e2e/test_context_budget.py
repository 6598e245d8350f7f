"""A budget of 0.6 of the context window, of which 0.65 is for recent messages: exact to the token.

The figures are those of the system that examples/policies/context-budget.yaml reproduces.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.examples import serving
from tests.support.server import Proxy
from tests.support.upstream import Upstream

WINDOW = 128_000
BUDGET = 76_800
TOOLS = [{"type": "function", "function": {"name": "query", "parameters": {"type": "object"}}}]
SUMMED = {"x-context-policy": "with-summary"}
ROLES = ("user", "assistant")

SMALL = {
    "extends": "with-summary",
    "trigger": {"tokens": 610},
    "edits": [
        {
            "type": "summarize",
            "mode": "statistics",
            "upper": 610,
            "lower": 600,
            "budget_ratio": 1,
            "min_messages": 20,
            "min_new_messages": 2,
            "growth_ratio": 0.5,
            "keep_rounds": 0,
        }
    ],
}
"""Limits so close to each other that not every further summary pays off."""

Message = dict[str, Any]


@pytest.fixture(scope="module")
def proxy(provider: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    more = {"policies": {"small": SMALL}}
    with serving("context-budget", provider, tmp_path_factory.mktemp("store"), **more) as served:
        yield served


def text_of(tokens: int, mark: str = "") -> str:
    """Return a text that makes a message of this many tokens; `mark` is a word without digits."""
    words = round((tokens - 4) / 1.14)
    assert round(1.14 * words) == tokens - 4, f"no text has {tokens - 4} tokens"
    return " ".join([mark or "word"] + ["word"] * (words - 1))


def talk(*tokens: int, first: str = "user") -> list[Message]:
    """Return messages of these sizes, alternating between user and assistant; each begins with its own word."""
    start = ROLES.index(first)
    return [{"role": ROLES[(start + at) % 2], "content": text_of(size, mark_of(at))} for at, size in enumerate(tokens)]


def mark_of(number: int) -> str:
    """Return a word for a number: digits would cost more tokens."""
    return "m" + "".join("abcdefghij"[int(digit)] for digit in str(number))


def ask(proxy: Proxy, session: str, messages: Sequence[Message], **given: Any) -> dict[str, Any]:
    """Send a request, and return its receipt."""
    answer = proxy.chat(session, list(messages), "say:fine", **given)
    assert answer.status_code == 200, answer.text
    return proxy.exchanges(session)[-1]


def bare(messages: Sequence[Message]) -> list[Message]:
    return [{key: value for key, value in message.items() if value} for message in messages]


SYSTEM = {"role": "system", "content": text_of(2_004)}


# ------------------------------------------------------------------------------------ the budget


def test_up_to_ten_messages_nothing_is_done(proxy: Proxy, upstream: Upstream, session: str) -> None:
    messages = talk(*[9_000] * 10, first="assistant")
    receipt = ask(proxy, session, messages)
    assert receipt["tokens_before"] == receipt["tokens_sent"] == 90_000 > BUDGET
    assert upstream.last.messages == messages

    messages = talk(*[9_000] * 11)
    receipt = ask(proxy, f"{session}-eleven", messages)
    assert receipt["edits"] == ["recent_window"]
    assert upstream.last.messages == messages[-5:]  # of 0.65 * 76,800 = 49,920


def test_what_fits_into_the_budget_is_sent_as_it_is(proxy: Proxy, upstream: Upstream, session: str) -> None:
    """0.65 * (76,800 - 2,004) = 48,617 tokens are for messages."""
    messages = [SYSTEM, *talk(*[2_004] * 23, 2_525)]
    receipt = ask(proxy, session, messages)
    assert receipt["tokens_before"] == receipt["tokens_sent"] == 2_004 + 48_617
    assert upstream.last.messages == messages

    messages = [SYSTEM, *talk(*[2_004] * 23, 2_526)]
    receipt = ask(proxy, f"{session}-above", messages)
    assert receipt["tokens_before"] == 2_004 + 48_618
    assert receipt["edits"] == ["recent_window"]


def test_of_the_rest_0_65_is_for_recent_messages(proxy: Proxy, upstream: Upstream, session: str) -> None:
    """0.65 * (76,800 - 2,004) = 48,617 tokens: 48 messages of 1,004 are 48,192, 49 would be too many."""
    messages = talk(*[1_004] * 81)
    receipt = ask(proxy, session, [SYSTEM, *messages])
    assert upstream.last.messages == [SYSTEM, *messages[-48:]]
    assert receipt["tokens_sent"] == 2_004 + 48 * 1_004
    assert receipt["messages_sent"] == 49
    dropped = [line for line in receipt["plan"] if line["edit"] == "recent_window"]
    assert [line["position"] for line in dropped] == list(range(33))
    assert {line["action"] for line in dropped} == {"drop"}
    assert bare(proxy.messages(session)[:-1]) == messages  # all of it stays stored


def test_a_chain_goes_whole_and_what_does_not_fit_is_skipped(proxy: Proxy, upstream: Upstream, session: str) -> None:
    def chain(name: str, tokens: int) -> list[Message]:
        calls = [
            {"id": f"{name}{at}", "type": "function", "function": {"name": "query", "arguments": "{}"}}
            for at in range(2)
        ]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in calls]
        return [{"role": "assistant", "content": text_of(tokens), "tool_calls": calls}, *results]

    small, large = chain("s", 5_004), chain("l", 40_000)
    messages = [*talk(*[1_004] * 9), *small, *talk(*[1_004] * 9), *large, *talk(*[1_004] * 23)]
    receipt = ask(proxy, session, messages, tools=TOOLS)
    assert receipt["tokens_before"] > BUDGET
    assert bare(upstream.last.messages) == [message for message in messages if message not in large]
    assert receipt["edits"] == ["recent_window"]
    assert upstream.last.refused is None

    messages = [*messages, {"role": "assistant", "content": "so"}, *talk(*[1_004] * 30)]
    receipt = ask(proxy, f"{session}-more", messages, tools=TOOLS)
    sent = upstream.last.messages
    assert sum(message["role"] == "tool" for message in sent) == 0  # now the other does not fit either
    assert not any(message.get("tool_calls") for message in sent)


def test_what_has_just_come_goes_whole_however_large_it_is(proxy: Proxy, upstream: Upstream, session: str) -> None:
    receipt = ask(proxy, session, talk(*[1_004] * 10, 80_000))
    assert (receipt["messages_sent"], receipt["edits"]) == (1, ["recent_window"])
    assert receipt["tokens_sent"] == 80_000


def test_it_is_within_the_budget_again_after_each_move(proxy: Proxy, upstream: Upstream, session: str) -> None:
    messages = talk(*[1_004] * 81)
    ask(proxy, session, messages)
    before = upstream.last.messages
    for _ in range(5):
        reply = bare(proxy.messages(session)[-1:])
        messages = [*messages, *reply, {"role": "user", "content": text_of(9_000)}]
        receipt = ask(proxy, session, messages)
        if receipt["cut"]["moved"]:
            assert receipt["tokens_sent"] <= 0.65 * BUDGET
        else:
            assert upstream.last.messages[: len(before)] == before
        before = upstream.last.messages


# ------------------------------------------------------------------------------------ tool output


def result(content: Any) -> list[Message]:
    """Return a call and its result."""
    call = {"id": "c1", "type": "function", "function": {"name": "query", "arguments": "{}"}}
    text = content if isinstance(content, str) else json.dumps(content)
    return [
        {"role": "user", "content": "query it"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": text},
    ]


ROWS = [
    {
        "id": number,
        "title": f"row {number}",
        "text": "many words " * 60,
        **{f"field_{at}": f"value {at}" for at in range(12)},
    }
    for number in range(20)
]
TEN = talk(*[52] * 10)
"""Ten messages: with what comes after them there are more."""


def shown(proxy: Proxy, upstream: Upstream, session: str, content: Any) -> Any:
    """Return what is sent for a tool result, and check that the original is stored."""
    messages = [*TEN, *result(content)]
    ask(proxy, session, messages, tools=TOOLS)
    assert proxy.messages(session)[-2]["content"] == messages[-1]["content"]
    return upstream.last.messages[-1]["content"]


@pytest.mark.parametrize("name", ["items", "results"])
def test_of_twenty_items_five_entries_are_shown(proxy: Proxy, upstream: Upstream, session: str, name: str) -> None:
    given = {"success": True, "total": 20, "page": {"count": 20, "next": None}, name: ROWS}
    made = json.loads(shown(proxy, upstream, session, given))
    assert made["success"] is True
    assert made["total"] == 20
    assert made["page"] == {"count": 20, "next": None}
    assert made["compressed"] is True
    first, second, mark, *last = made[f"{name}_preview"]
    assert [row["id"] for row in (first, second, *last)] == [0, 1, 18, 19]
    assert mark == "… (16 omitted)"
    assert first["title"] == "row 0"
    assert set(first) == {"id", "title", "…"}  # with their texts they would not fit within 200 tokens
    assert name not in made
    ref = made["full_output"]
    assert proxy.get(f"/sessions/{session}/refs/{ref}")["text"] == json.dumps(given)


def test_a_list_alone_becomes_items_preview(proxy: Proxy, upstream: Upstream, session: str) -> None:
    made = json.loads(shown(proxy, upstream, session, ROWS))
    assert len(made["items_preview"]) == 5
    assert made["compressed"] is True


def test_a_failure_stays_a_failure(proxy: Proxy, upstream: Upstream, session: str) -> None:
    rows = [*ROWS[:9], {"id": 9, "error": "permission denied"}, *ROWS[10:]]
    given = {"success": False, "error": "1 of 20 failed", "rows": rows}
    made = json.loads(shown(proxy, upstream, session, given))
    assert made["success"] is False
    assert made["error"] == "1 of 20 failed"
    assert {"id": 9, "error": "permission denied"} in made["rows_preview"]


def test_output_of_200_tokens_stays_and_of_more_does_not(proxy: Proxy, upstream: Upstream, session: str) -> None:
    rows = [{"id": "x", "text": "word"} for _ in range(20)]
    for number in range(4, 21):
        text = json.dumps({"rows": rows[:number]})
        sent = shown(proxy, upstream, f"{session}-{number}", text)
        tokens = proxy.get(f"/sessions/{session}-{number}/messages", meta="true")["data"][-2]["tokens"]
        assert (sent == text) == (tokens <= 200), (number, tokens)


def test_within_ten_messages_output_goes_whole(proxy: Proxy, upstream: Upstream, session: str) -> None:
    messages = result(ROWS)
    ask(proxy, session, [*TEN[:7], *messages], tools=TOOLS)
    assert upstream.last.messages[-1] == messages[-1]
    ask(proxy, f"{session}-more", [*TEN[:8], *messages], tools=TOOLS)
    assert upstream.last.messages[-1] != messages[-1]


def test_above_ten_messages_what_came_among_them_is_a_preview_too(
    proxy: Proxy, upstream: Upstream, session: str
) -> None:
    ask(proxy, session, [*result(ROWS), *TEN[:9]], tools=TOOLS)
    early = next(message for message in upstream.last.messages if message["role"] == "tool")
    assert json.loads(early["content"])["compressed"] is True


# ------------------------------------------------------------------------------------ the summary


def test_above_50000_tokens_what_is_old_is_summed_up(proxy: Proxy, upstream: Upstream, session: str) -> None:
    messages = talk(*[2_004] * 25)
    receipt = ask(proxy, f"{session}-below", [SYSTEM, *messages[:-2]], headers=SUMMED)
    assert receipt["tokens_before"] == receipt["tokens_sent"] == 48_096
    assert receipt["summary"] is None

    receipt = ask(proxy, session, [SYSTEM, *messages], headers=SUMMED)
    assert receipt["tokens_before"] == 52_104
    assert receipt["tokens_sent"] < 30_000
    assert receipt["edits"] == ["summarize"]
    system, summary, *rest = upstream.last.messages
    assert system == SYSTEM
    assert summary["role"] == "system"
    assert summary["content"].startswith("Summary of the earlier conversation\n")
    assert rest == messages[-len(rest) :]
    covered = len(messages) - len(rest)
    told = receipt["summary"]
    assert told["kind"] == "statistics"
    assert told["role"] == "system"
    assert told["summarized_until"] == told["message_count"] == covered
    assert told["original_tokens"] == covered * 2_004
    assert told["summary_tokens"] == receipt["tokens_sent"] - 2_004 - len(rest) * 2_004
    assert told["generation"] == 1
    assert f"{covered} messages" in summary["content"]
    # No more messages are summarized than necessary.
    assert receipt["tokens_sent"] + 2 * 2_004 > 30_000


def test_the_first_summary_needs_twenty_messages(proxy: Proxy, upstream: Upstream, session: str) -> None:
    messages = talk(*[3_004] * 19)
    receipt = ask(proxy, session, messages, headers=SUMMED)
    assert receipt["tokens_before"] > 50_000
    assert receipt["summary"] is None
    assert receipt["edits"] == ["recent_window"]
    assert upstream.last.messages == messages[-9:]  # of 30,000 tokens

    messages = talk(*[3_004] * 20, first="assistant")
    receipt = ask(proxy, f"{session}-twenty", messages, headers=SUMMED)
    assert receipt["edits"] == ["summarize"]
    assert receipt["tokens_sent"] < 30_000


def test_a_further_summary_needs_ten_more_messages(proxy: Proxy, upstream: Upstream, session: str) -> None:
    messages = talk(*[1_004] * 20, *[10_004] * 5)
    first = ask(proxy, session, [SYSTEM, *messages], headers=SUMMED)
    assert first["summary"]["generation"] == 1
    text = upstream.last.messages[1]["content"]
    rest = len(upstream.last.messages) - 2
    generations: list[int] = []
    receipt = first
    while generations[-1:] != [2]:
        messages = [*messages, *bare(proxy.messages(session)[-1:]), {"role": "user", "content": text_of(9_000)}]
        receipt = ask(proxy, session, [SYSTEM, *messages], headers=SUMMED)
        generations.append(receipt["summary"]["generation"])
        assert upstream.last.messages[0] == SYSTEM
        if generations[-1] == 1:
            assert upstream.last.messages[1]["content"] == text
            assert receipt["tokens_sent"] <= BUDGET
        assert len(generations) < 12
    assert receipt["summary"]["summarized_until"] >= first["summary"]["summarized_until"] + 10
    assert receipt["summary"]["message_count"] >= first["summary"]["message_count"] + 10
    assert receipt["tokens_sent"] < 30_000
    assert len(generations) > 3
    assert rest < 10


def test_a_further_summary_needs_half_of_the_standing_ones_tokens(proxy: Proxy, session: str) -> None:
    small = {"x-context-policy": "small"}
    messages = talk(*[60] * 21)
    first = last = ask(proxy, session, messages, headers=small)
    assert first["summary"]["generation"] == 1
    too_little = 0
    while last["summary"]["generation"] == 1:
        assert last["summary"] == first["summary"]
        too_little += last is not first and last["cut"]["moved"]
        messages = [*messages, *bare(proxy.messages(session)[-1:]), {"role": "user", "content": text_of(28)}]
        assert len(messages) < 60
        last = ask(proxy, session, messages, headers=small)
    assert too_little
    added = last["summary"]["original_tokens"] - first["summary"]["original_tokens"]
    assert added > 0.5 * first["summary"]["summary_tokens"]


def test_a_summary_outlives_a_restart_to_the_byte(provider: Upstream, tmp_path: Path, session: str) -> None:
    provider.forget()
    messages = talk(*[2_004] * 27)
    with serving("context-budget", provider, tmp_path) as proxy:
        ask(proxy, session, messages, headers=SUMMED)
        messages = [*messages, *bare(proxy.messages(session)[-1:]), *talk(1_004)]
    before = provider.last.messages
    with serving("context-budget", provider, tmp_path) as proxy:
        receipt = ask(proxy, session, messages, headers=SUMMED)
        assert not receipt["cut"]["moved"]
        assert receipt["summary"]["generation"] == 1
        assert provider.last.messages[: len(before)] == before
        # A client that appends gets the same.
        receipt = ask(proxy, session, talk(504), headers=SUMMED | {"x-session-mode": "append"})
        assert provider.last.messages[: len(before)] == before
        assert receipt["summary"]["generation"] == 1


# ------------------------------------------------------------------------------------ the log


def test_the_log_line_tells_window_budget_and_reduction(
    proxy: Proxy, session: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="palimpsest.exchange")
    receipt = ask(proxy, session, [SYSTEM, *talk(*[1_004] * 81)])
    lines = [getattr(record, "fields") for record in caplog.records if record.name == "palimpsest.exchange"]  # noqa: B009 - mypy knows no such attribute
    told = next(line for line in lines if line["session"] == session)
    assert told["window"] == WINDOW
    assert told["budget"] == BUDGET
    assert told["instructions_tokens"] == 2_004
    assert (told["messages_before"], told["tokens_before"]) == (82, 2_004 + 81 * 1_004)
    assert told["ratio"] == round(told["tokens_before"] / WINDOW, 3)
    assert (told["messages_sent"], told["tokens_sent"]) == (49, 2_004 + 48 * 1_004)
    assert told["saved_percent"] == round(100 * (1 - told["tokens_sent"] / told["tokens_before"]), 1)
    assert told["tokens_sent"] == receipt["tokens_sent"]
    assert told["edits"] == "recent_window"
