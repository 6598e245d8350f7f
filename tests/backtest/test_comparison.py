"""Sessions under strategies and prices. The first tests reckon a session of known size by hand."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.backtest.comparison import Backtest, BacktestResult, Cost, Figures, ratio
from proxy.backtest.cost import Use, price_class, standard_classes
from proxy.backtest.recall import Counts, RecallCounts
from proxy.backtest.replay import PolicyStrategy, baseline, every_baseline
from proxy.dialects import Message
from proxy.tokens import TokenCounter
from proxy.trimming import Policy
from tests.backtest.histories import COUNTER, agent, call, figures_of, history, reply, result, user


class Letters(TokenCounter):
    """A letter of the text is a token, and nothing else is."""

    def message(self, message: Message, model: str) -> int:  # noqa: ARG002 - every model counts alike
        return len(message.text)


SAID: list[dict[str, Any]] = [
    {"role": "system", "content": "s" * 1000},
    user("u" * 100),
    call("a", text="r" * 50),
    result("a", "A" * 350),
    call("b", text="r" * 50),
    result("b", "B" * 450),
    reply("done"),
]
"""Three requests, of 1,100, 1,500 and 2,000 tokens; replies of 50, 50 and 4."""


def run(*names: str, said: list[dict[str, Any]] = SAID, recall: bool = False) -> BacktestResult:
    test = Backtest([baseline(name) for name in names], standard_classes(), Letters("estimate"), recall=recall)
    return test.run([history(said)])


@pytest.mark.parametrize(
    ("prices", "use", "millionths"),
    [
        # 1,100: 1,024 written. 1,500: 1,024 read, 384 written. 2,000: 1,408 read, 512 written.
        ("read 0.5", Use(read=2432, written=1920, plain=248), 2432 * 0.5 + 2168),
        ("read 0.25", Use(read=2432, written=1920, plain=248), 2432 * 0.25 + 2168),
        ("read 0.1", Use(read=2432, written=1920, plain=248), 2432 * 0.1 + 2168),
        # 1,100 written; 1,100 read, 400 written; 1,500 read, 500 written.
        ("read 0.1, write 1.25", Use(read=2600, written=2000, plain=0), 2600 * 0.1 + 2000 * 1.25),
        ("read 0.05, write 1.25", Use(read=2600, written=2000, plain=0), 2600 * 0.05 + 2000 * 1.25),
    ],
)
def test_no_trimming_by_hand(prices: str, use: Use, millionths: float) -> None:
    figures = figures_of(run(), "baseline:none", prices)
    assert (figures.requests, figures.sent, figures.untrimmed, figures.largest) == (3, 4600, 4600, 2000)
    assert (figures.most_messages, figures.moves, figures.output) == (6, 0, 104)
    assert figures.cost.use == use
    assert figures.cost.input == pytest.approx(millionths / 1e6)
    assert figures.cost.output == pytest.approx(104 * 4 / 1e6)


@pytest.mark.parametrize(
    ("prices", "use", "millionths"),
    [
        # The third request has 1,683. 1,150 of it are as before, and of the 33 of the placeholder the part of
        # the bytes before its text, 18: nine blocks are read. 13 are in the cache then.
        ("read 0.1", Use(read=1024 + 1152, written=1024 + 384 + 512, plain=187), 2176 * 0.1 + 2107),
        # 1,683: what ended at 1,100 is read.
        ("read 0.1, write 1.25", Use(read=2200, written=2083, plain=0), 2200 * 0.1 + 2083 * 1.25),
    ],
)
def test_masking_by_hand(prices: str, use: Use, millionths: float) -> None:
    outcome = run("baseline:mask=1")
    figures = figures_of(outcome, "baseline:mask=1", prices)
    masked = 2000 - 350 + len("[Old tool result content cleared]")
    assert masked == 1683
    assert (figures.sent, figures.untrimmed, figures.moves) == (1100 + 1500 + masked, 4600, 1)
    assert figures.cost.use == use
    assert figures.cost.input == pytest.approx(millionths / 1e6)
    compared = next(c for c in outcome.strategies if (c.strategy, c.prices) == ("baseline:mask=1", prices))
    whole = figures_of(outcome, "baseline:none", prices).cost.input
    assert compared.ratio == compared.highest_ratio == pytest.approx(millionths / 1e6 / whole)
    assert compared.most_expensive_session == "talk"


def test_no_trimming_comes_first_and_each_strategy_once() -> None:
    assert list(run("baseline:mask", "baseline:none", "baseline:mask").about) == ["baseline:none", "baseline:mask"]


def test_sessions_with_equal_names_get_numbers() -> None:
    test = Backtest([], [price_class(0.1)], COUNTER, recall=False)
    outcome = test.run([history(SAID), history(agent(2)), history(SAID, "other")])
    assert [line.session for line in outcome.sessions] == ["talk", "talk (2)", "other"]
    (compared,) = outcome.strategies
    assert compared.figures.sessions == 3
    assert compared.figures.sent == sum(line.figures.sent for line in outcome.sessions)


def test_the_most_expensive_session_is_named() -> None:
    test = Backtest([baseline("baseline:last=2")], [price_class(0.1)], COUNTER, recall=False)
    outcome = test.run([history([user("a"), reply("b")], "short"), history(agent(10), "long")])
    compared = outcome.strategies[-1]
    long = figures_of(outcome, "baseline:last=2", "read 0.1", "long").cost
    whole = figures_of(outcome, "baseline:none", "read 0.1", "long").cost
    assert compared.most_expensive_session == "short" if long.input < whole.input else "long"
    assert compared.highest_ratio == max(1.0, long.input / whole.input)


def test_tick_is_called_after_each_replay() -> None:
    ticks: list[int] = []
    test = Backtest(every_baseline(), standard_classes(), COUNTER, recall=False)
    test.run([history(agent(2)), history(SAID)], lambda: ticks.append(1))
    assert len(ticks) == 2 * test.steps == 2 * len(test.strategies)


def test_a_policy_that_depends_on_prices_is_replayed_at_each_class() -> None:
    policy = Policy.model_validate(
        {"trigger": {"cost": "auto"}, "edits": [{"type": "truncate_tool_output", "max_bytes": 40}]}
    )
    test = Backtest([PolicyStrategy(name="mine", policy=policy)], standard_classes(), COUNTER, recall=False)
    lines = [line for line in test.run([history(agent(60, size=600))]).sessions if line.strategy == "mine"]
    assert len(lines) == 5
    assert len({line.figures.sent for line in lines}) > 1


def test_a_context_window_is_asked_for_by_model() -> None:
    asked: list[str] = []

    def window(model: str) -> int:
        asked.append(model)
        return 2000

    policy = Policy.model_validate(
        {"trigger": {"ratio": 0.5}, "edits": [{"type": "truncate_tool_output", "max_bytes": 40}]}
    )
    test = Backtest(
        [PolicyStrategy(name="mine", policy=policy)],
        [price_class(0.1)],
        COUNTER,
        model="big",
        windows=window,
        recall=False,
    )
    outcome = test.run([history(agent(4)), history(agent(4), "named", model="small")])
    assert set(asked) == {"big", "small"}
    assert all(line.figures.moves for line in outcome.sessions if line.strategy == "mine")


def test_warnings_are_counted() -> None:
    policy = Policy.model_validate({"trigger": {"ratio": 0.5}, "edits": [{"type": "truncate_tool_output"}]})
    test = Backtest([PolicyStrategy(name="mine", policy=policy)], [price_class(0.1)], COUNTER, recall=False)
    (warning,) = test.run([history(agent(4))]).strategies[-1].figures.warnings.items()
    assert warning[1] == 5
    assert "context window" in warning[0]


def test_recall_judges_what_was_sent() -> None:
    said = [
        user("find it"),
        *(call("a", arguments='{"where": "shelf"}'), result("a", '{"code": "XK-4471-B", "kept": true}')),
        *(call("b", arguments='{"where": "attic"}'), result("b", "nothing")),
        *(call("c", arguments='{"where": "cellar"}'), result("c", "nothing")),
        *(call("d", arguments='{"where": "garden"}'), result("d", "nothing")),
        *(call("e", arguments='{"code": "XK-4471-B"}'), result("e", "right")),
        reply("done"),
    ]
    outcome = run("baseline:mask", "baseline:last=3", said=said, recall=True)
    found = {line.strategy: line.figures.recall for line in outcome.sessions if line.prices == "read 0.1"}
    shares = {name: (counts.far.recall, counts.tool_only.recall) for name, counts in found.items() if counts}
    assert shares == {"baseline:none": (1.0, 1.0), "baseline:mask": (0.0, 0.0), "baseline:last=3": (0.0, 0.0)}
    assert run(said=said).sessions[0].figures.recall is None


# ----------------------------------------------------------------------------------- figures


def test_costs_add_up() -> None:
    both = Cost(use=Use(read=1, written=2, plain=3), input=0.5, output=0.25) + Cost(
        use=Use(read=10, written=20, plain=30), input=1.5, output=0.75
    )
    assert both == Cost(use=Use(read=11, written=22, plain=33), input=2.0, output=1.0)
    assert both.total == 3.0


def test_costs_with_unknown_output_have_no_total() -> None:
    assert Cost(input=1.0, output=None).total is None
    assert (Cost(input=1.0, output=None) + Cost(input=1.0, output=1.0)).output is None
    assert (Cost(input=1.0, output=1.0) + Cost(input=1.0, output=None)).total is None


def test_figures_add_up_and_keep_the_largest_request() -> None:
    recall = RecallCounts(far=Counts(grounded=4, present=3))
    one = Figures(
        sessions=1,
        requests=2,
        untrimmed=300,
        sent=200,
        largest=150,
        most_messages=7,
        moves=1,
        output=20,
        cost=Cost(use=Use(plain=200), input=1.0, output=1.0),
        recall=recall,
        warnings={"odd": 2},
    )
    two = Figures(
        sessions=1,
        requests=3,
        untrimmed=400,
        sent=400,
        largest=100,
        most_messages=9,
        moves=0,
        output=30,
        cost=Cost(use=Use(read=400), input=0.5, output=1.0),
        recall=recall,
        warnings={"odd": 1, "new": 1},
    )
    both = one + two
    assert both == Figures(
        sessions=2,
        requests=5,
        untrimmed=700,
        sent=600,
        largest=150,
        most_messages=9,
        moves=1,
        output=50,
        cost=Cost(use=Use(read=400, written=0, plain=200), input=1.5, output=2.0),
        recall=RecallCounts(far=Counts(grounded=8, present=6)),
        warnings={"odd": 3, "new": 1},
    )
    assert sum([one, two], Figures()) == both


def test_recall_that_was_not_measured_stays_unknown() -> None:
    seen = Figures(recall=RecallCounts(far=Counts(grounded=1)))
    assert (Figures() + Figures()).recall is None
    assert (Figures() + seen).recall == seen.recall
    assert (seen + Figures()).recall == seen.recall


def test_a_ratio_compares_input_only() -> None:
    assert ratio(Cost(input=1.0, output=9.0), Cost(input=4.0, output=9.0)) == pytest.approx(0.25)
    assert ratio(Cost(input=1.0), Cost()) is None
