from __future__ import annotations

import pytest

from proxy.backtest.baselines import baseline
from proxy.backtest.comparison import Backtest
from proxy.backtest.histories import History
from proxy.backtest.price import standard_classes
from proxy.backtest.synthetic import stripped, synthetic_agents
from proxy.dialects.chat.protocol import problems
from proxy.tokens import TokenCounter
from tests.backtest.histories import figures_of

COUNTER = TokenCounter("tiktoken")


@pytest.fixture(scope="module")
def agents() -> tuple[History, History]:
    return synthetic_agents(COUNTER)


def sizes(history: History, role: str) -> list[int]:
    return [COUNTER.text(message.text, "") for message in history.messages if message.role == role]


def test_sizes_are_as_told(agents: tuple[History, History]) -> None:
    for history in agents:
        assert len(sizes(history, "tool")) == 100
        assert all(1780 <= size <= 1800 for size in sizes(history, "tool"))
        assert set(sizes(history, "assistant")) == {200}
        assert history.tools is not None
        fixed = COUNTER.text(history.instructions[0].text, "") + COUNTER.json(history.tools, "")
        assert 7990 <= fixed <= 8000
        assert problems(history.messages) == []
        assert len(history.requests) == 101


def test_of_the_noisy_one_s_output_two_fifths_are_noise(agents: tuple[History, History]) -> None:
    plain, noisy = agents
    for message in noisy.messages:
        if message.role == "tool":
            left = COUNTER.text(stripped(message.text), "") / COUNTER.text(message.text, "")
            assert left == pytest.approx(0.6, abs=0.01)
    assert all(stripped(message.text) == message.text for message in plain.messages)


def test_no_text_comes_twice(agents: tuple[History, History]) -> None:
    lines = [
        line for message in agents[0].messages if message.role == "tool" for line in message.text.split("\n")
    ]
    assert len(set(lines)) == len(lines)


def test_it_is_the_same_every_time(agents: tuple[History, History]) -> None:
    assert synthetic_agents(COUNTER) == agents


def test_no_trimming_costs_what_can_be_reckoned_by_hand(agents: tuple[History, History]) -> None:
    """A prefix of 8,000 tokens, 2,000 more at each of 101 requests, nearly all of it read from the cache."""
    outcome = Backtest([baseline("baseline:slide")], standard_classes(), COUNTER, recall=False).run(
        agents[:1]
    )
    sent = sum(8_000 + 2_000 * turn for turn in range(101))
    new = 8_000 + 2_000 * 100
    for name, read, write in (
        ("read 0.5", 0.5, 1),
        ("read 0.1", 0.1, 1),
        ("read 0.05, write 1.25", 0.05, 1.25),
    ):
        figures = figures_of(outcome, "baseline:none", name, "synthetic")
        assert figures.sent == pytest.approx(sent, rel=0.02)
        dollars = (read * (sent - new) + write * new) / 1e6
        assert figures.spent.input == pytest.approx(dollars, rel=0.03)
    sliding = {each.prices: each.ratio for each in outcome.compared if each.strategy == "baseline:slide"}
    assert (sliding["read 0.5"] or 9) < 0.5
    assert (sliding["read 0.1"] or 0) > 1.4
    assert (sliding["read 0.05, write 1.25"] or 0) > 2.5
