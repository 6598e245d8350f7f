"""The example policies with summaries by a model, with the figures of the systems that they reproduce.

context-budget-by-model.yaml: above 50,000 tokens it trims to under 30,000; a summary covers 20 messages, and the next
one needs ten new messages with more than half of the tokens. rounds-by-model.yaml: above 0.8 of the window, ten whole
rounds stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.examples import serving
from tests.support.parcels import Message, asked_for, sent, tried
from tests.support.server import Proxy
from tests.support.upstream import Upstream

MODEL = "say:fine"
WRITER = "summary:good"
ROLES = ("user", "assistant")
WINDOW = 8_000
LIMIT = 6_400


@pytest.fixture(scope="module")
def budget(provider: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("store")
    with serving("context-budget-by-model", provider, folder, summarizer={"model": WRITER}) as served:
        yield served


@pytest.fixture(scope="module")
def waiting(provider: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder, summarizer = tmp_path_factory.mktemp("store"), {"model": WRITER, "background": False}
    with serving("context-budget-by-model", provider, folder, summarizer=summarizer) as served:
        yield served


@pytest.fixture(scope="module")
def smart(provider: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder, models = tmp_path_factory.mktemp("store"), [{"match": ["small*"], "context_window": WINDOW}]
    with serving("rounds-by-model", provider, folder, summarizer={"model": WRITER}, models=models) as served:
        yield served


def text_of(tokens: int, first: str = "word") -> str:
    """Return a text that makes a message of this many tokens."""
    words = round((tokens - 4) / 1.14)
    assert round(1.14 * words) == tokens - 4, f"no text has {tokens - 4} tokens"
    return " ".join([first] + ["word"] * (words - 1))


def talk(*tokens: int, last: str = "user") -> list[Message]:
    """Return messages of these sizes, alternating between user and assistant; the last one has the role `last`."""
    start = (ROLES.index(last) - len(tokens) + 1) % 2
    return [{"role": ROLES[(start + at) % 2], "content": text_of(size)} for at, size in enumerate(tokens)]


SYSTEM = {"role": "system", "content": text_of(2_004)}


def ask(
    proxy: Proxy, session: str, messages: list[Message], model: str = MODEL, policy: str = "default"
) -> dict[str, Any]:
    """Send a request, and return its receipt."""
    answer = proxy.chat(session, messages, model, headers={"x-context-policy": policy})
    assert answer.status_code == 200, answer.text
    return proxy.exchanges(session)[-1]


# ------------------------------------------------------------------------------------ a budget


def test_above_50000_tokens_what_is_old_is_summed_up_until_30000(
    budget: Proxy, upstream: Upstream, session: str
) -> None:
    messages = talk(*[2_004] * 25)
    receipt = ask(budget, session, [SYSTEM, *messages[:-2]])
    assert receipt["tokens_before"] == receipt["tokens_sent"] == 48_096
    assert receipt["summary"] is None
    assert tried(budget, session)["ready"] == 1  # from 40,000 on

    receipt = ask(budget, session, [SYSTEM, *messages])
    assert receipt["tokens_before"] == 52_104
    assert receipt["tokens_sent"] < 30_000
    assert receipt["edits"] == ["summarize"]
    system, summary, *rest = sent(upstream)
    assert system == SYSTEM
    assert summary["role"] == "system"
    assert summary["content"].startswith("Summary of the earlier conversation\n")
    assert rest == messages[-len(rest) :]

    covered = len(messages) - len(rest)
    (told,) = budget.get(f"/sessions/{session}")["summaries"]
    expected = {
        "summary": summary["content"],
        "summarized_until": covered,
        "message_count": covered,
        "original_tokens": covered * 2_004,
        "summary_tokens": receipt["tokens_sent"] - 2_004 - len(rest) * 2_004,
        "kind": "model",
        "model": WRITER,
        "generation": 1,
    }
    assert {name: told[name] for name in expected} == expected
    assert told["compression_rate"] == round(told["summary_tokens"] / told["original_tokens"], 3)
    assert told["created_at"]
    assert {name: receipt["summary"][name] for name in ("summarized_until", "message_count", "role")} == {
        "summarized_until": covered,
        "message_count": covered,
        "role": "system",
    }


def test_below_the_soft_mark_nothing_is_prepared(budget: Proxy, upstream: Upstream, session: str) -> None:
    ask(budget, session, talk(*[2_004] * 19))
    ask(budget, session, talk(*[2_004] * 19, 1_144, 104))
    assert budget.get(f"/sessions/{session}")["summarizer"]["ready"] == 0
    assert asked_for(upstream) == []


def test_the_first_summary_needs_twenty_messages(waiting: Proxy, upstream: Upstream, session: str) -> None:
    receipt = ask(waiting, session, talk(*[3_004] * 19))
    assert receipt["tokens_before"] > 50_000
    assert receipt["edits"] == ["recent_window"]
    assert asked_for(upstream) == []
    receipt = ask(waiting, f"{session}-twenty", talk(*[3_004] * 20))
    assert receipt["edits"] == ["summarize"]
    assert receipt["tokens_sent"] < 30_000


def test_a_further_summary_needs_ten_more_messages(waiting: Proxy, upstream: Upstream, session: str) -> None:
    messages = [SYSTEM, *talk(*[1_004] * 20, *[10_004] * 5)]
    first = ask(waiting, session, messages)["summary"]
    assert first["generation"] == 1
    text = sent(upstream)[1]["content"]
    generations: list[int] = []
    while generations[-1:] != [2]:
        assert len(generations) < 12
        messages += [{"role": "assistant", "content": "fine"}, {"role": "user", "content": text_of(9_000)}]
        receipt = ask(waiting, session, messages)
        generations.append(receipt["summary"]["generation"])
        if generations[-1] == 1:
            assert sent(upstream)[1]["content"] == text
            assert len(asked_for(upstream)) == 1
        else:
            assert receipt["summary"]["summarized_until"] >= first["summarized_until"] + 10
            assert receipt["tokens_sent"] < 30_000
    assert len(generations) > 3
    kept = waiting.get(f"/sessions/{session}")["summaries"]
    assert [each["generation"] for each in kept] == [2, 1]  # each generation stays


def test_a_further_summary_needs_half_of_the_standing_ones_tokens(
    provider: Upstream, upstream: Upstream, tmp_path: Path
) -> None:
    """With messages of 60 tokens and limits close to each other, the summary is long and little is new."""
    small = {
        "extends": "default",
        "trigger": {"tokens": 1_610},
        "target": {"tokens": 1_600},
        "edits": [
            {
                "type": "summarize",
                "mode": "model",
                "upper": 1_610,
                "lower": 1_600,
                "budget_ratio": 1,
                "min_messages": 20,
                "min_new_messages": 1,
                "growth_ratio": 0.5,
                "keep_rounds": 0,
                "role": "system",
            }
        ],
    }
    sections: dict[str, Any] = {"summarizer": {"model": WRITER, "background": False}, "policies": {"small": small}}
    with serving("context-budget-by-model", provider, tmp_path, **sections) as proxy:
        messages = talk(*[60] * 29)
        made = last = ask(proxy, "s", messages, policy="small")["summary"]
        too_little = 0
        while last["generation"] == 1:
            assert len(messages) < 200
            messages += talk(60, 60)
            before, last = last, ask(proxy, "s", messages, policy="small")["summary"]
            too_little += before == last
        assert too_little
        new = last["original_tokens"] - made["original_tokens"]
        assert new > 0.5 * made["summary_tokens"]


# ------------------------------------------------------------------------------------ rounds


def rounds(number: int, size: int = 200) -> list[Message]:
    """Return this many rounds of about 470 tokens, and the next question."""
    said: list[Message] = []
    for at in range(1, number + 2):
        said += [
            {"role": "user", "content": f"question {at}: {' '.join(['why'] * size)}"},
            {"role": "assistant", "content": f"answer {at}: {' '.join(['because'] * size)}"},
        ]
    return said[:-1]


def test_above_four_fifths_of_the_window_ten_whole_rounds_stay(smart: Proxy, upstream: Upstream, session: str) -> None:
    receipt: dict[str, Any] = {"edits": []}
    number = 8
    while not receipt["edits"]:
        number += 1
        receipt = ask(smart, session, rounds(number), "small+say:fine")
        if not receipt["edits"]:
            assert receipt["tokens_before"] <= LIMIT
            assert sent(upstream) == rounds(number)
            assert asked_for(upstream) == []
        assert number < 30
    assert receipt["tokens_before"] > LIMIT
    assert receipt["edits"] == ["summarize"]
    system, *rest = sent(upstream)
    assert system["role"] == "system"
    assert system["content"].startswith("Archived Session Summary\n")
    assert rest == rounds(number)[-21:]  # ten rounds, and the current one
    assert receipt["summary"]["kind"] == "model"
    assert receipt["summary"]["summarized_until"] == 2 * (number - 10)

    (request,) = asked_for(upstream)
    for section in ("Task goal", "Key decisions", "Work done", "Still to do", "Important findings"):
        assert section in request["messages"][0]["content"]
        assert section in system["content"]
    assert "at most 3 lines" in request["messages"][0]["content"]


@pytest.mark.parametrize("writer", ["summary:empty", "fault:500"])
def test_where_the_smart_one_does_not_come_the_one_of_statistics_does_the_work(
    provider: Upstream, upstream: Upstream, tmp_path: Path, writer: str
) -> None:
    sections: dict[str, Any] = {
        "summarizer": {"model": writer},
        "models": [{"match": ["small*"], "context_window": WINDOW}],
    }
    with serving("rounds-by-model", provider, tmp_path, **sections) as proxy:
        receipt = ask(proxy, "s", rounds(14), "small+say:fine")
        assert receipt["tokens_before"] > LIMIT
        assert receipt["summary"]["kind"] == "statistics"
        assert sent(upstream)[1:] == rounds(14)[-21:]


def test_too_few_rounds_change_nothing(smart: Proxy, upstream: Upstream, session: str) -> None:
    messages = rounds(10, 400)
    receipt = ask(smart, session, messages, "small+say:fine")
    assert receipt["tokens_before"] > LIMIT
    assert (receipt["edits"], receipt["summary"]) == ([], None)
    assert sent(upstream) == messages
    assert asked_for(upstream) == []
