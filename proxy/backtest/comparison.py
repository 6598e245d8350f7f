"""The backtest: replays every history under every strategy, and compares with no trimming."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from proxy.backtest.cost import PriceClass, Use
from proxy.backtest.histories import SessionHistory
from proxy.backtest.recall import RecallCounts, whole_arguments
from proxy.backtest.replay import NONE, Counted, ReplayModel, Strategy, baseline, replayed
from proxy.textscan import atoms_of_arguments
from proxy.tokens import TokenCounter

_STRANGERS: Final = 100  # values of other sessions that are searched for in each session


class Cost(Struct, frozen=True, kw_only=True):
    """Where the tokens of all requests came from at one class of prices, and what they cost in dollars."""

    use: Use = Use()
    input: float = 0.0
    output: float | None = 0.0  # the same under all strategies; None if its price is unknown
    asking: float = 0.0  # one more request for each call that misses a far value; not part of `total`

    @property
    def total(self) -> float | None:
        """Dollars for input and output."""
        return None if self.output is None else self.input + self.output

    def __add__(self, other: Cost) -> Cost:
        known = self.output is not None and other.output is not None
        output = (self.output or 0.0) + (other.output or 0.0) if known else None
        asking = self.asking + other.asking
        return Cost(use=self.use + other.use, input=self.input + other.input, output=output, asking=asking)


class Figures(Struct, frozen=True, kw_only=True):
    """The figures of one strategy at one class of prices, for one session or several."""

    sessions: int = 0
    requests: int = 0
    untrimmed: int = 0  # tokens of all requests if nothing were trimmed
    sent: int = 0
    largest: int = 0
    most_messages: int = 0  # messages of the longest request, with instructions
    moves: int = 0  # number of trims; without a cut, requests that changed the beginning of the previous one
    output: int = 0
    cost: Cost = Cost()
    recall: RecallCounts | None = None
    """The values that later tool calls used and that were still sent; None if that was not measured."""
    warnings: Mapping[str, int] = field(default_factory=dict[str, int])
    """Warnings, with the number of requests that each was given for."""

    def __add__(self, other: Figures) -> Figures:
        names = ("sessions", "requests", "untrimmed", "sent", "moves", "output", "cost")
        return Figures(
            **{name: getattr(self, name) + getattr(other, name) for name in names},
            largest=max(self.largest, other.largest),
            most_messages=max(self.most_messages, other.most_messages),
            recall=other.recall if self.recall is None else self.recall + (other.recall or RecallCounts()),
            warnings=dict(Counter(self.warnings) + Counter(other.warnings)),
        )


class SessionResult(Struct, frozen=True, kw_only=True):
    """The figures of one strategy at one class of prices for one session."""

    strategy: str
    session: str
    prices: str
    figures: Figures


class StrategyResult(Struct, frozen=True, kw_only=True):
    """The figures of one strategy at one class of prices for all sessions, compared with no trimming."""

    strategy: str
    prices: str
    figures: Figures
    ratio: float | None  # its input dollars relative to no trimming; None if that costs nothing
    highest_ratio: float | None
    most_expensive_session: str | None


class BacktestResult(Struct, frozen=True, kw_only=True):
    """Everything that a backtest measured."""

    classes: tuple[PriceClass, ...]
    about: Mapping[str, str]
    sessions: tuple[SessionResult, ...]
    strategies: tuple[StrategyResult, ...]
    warnings: tuple[str, ...] = ()  # warnings that concern all strategies


def ratio(one: Cost, other: Cost) -> float | None:
    """Return the input dollars of one relative to the other; None if the other costs nothing."""
    return one.input / other.input if other.input else None


class Backtest:
    """Replays histories under strategies at classes of prices."""

    def __init__(
        self,
        strategies: Iterable[Strategy],  # of several with the same name, the first is used
        classes: Sequence[PriceClass],  # at least one, with different names
        counter: TokenCounter,
        *,
        model: str = "",  # the model of histories that name none
        windows: Callable[[str], int | None] = lambda _: None,  # returns the context window of a model, if known
        marks: bool = True,  # whether the proxy sets cache marks for models that accept them
        recall: bool = True,  # whether to measure which values of later tool calls were still sent
    ) -> None:
        """Prepare a backtest. The strategy without trimming is always included, since others are compared with it."""
        named: dict[str, Strategy] = {NONE: baseline(NONE)}
        for strategy in strategies:
            named.setdefault(strategy.name, strategy)
        self.strategies = tuple(named.values())
        self.classes = tuple(classes)
        self._counter = counter
        self._model = model
        self._windows = windows
        self._marks = marks
        self._recall = recall

    def run(self, histories: Sequence[SessionHistory], tick: Callable[[], None] = lambda: None) -> BacktestResult:
        """Replay all histories under all strategies; `tick` is called after each replay."""
        named = _distinct(histories)
        sessions = [
            result
            for history, strangers in zip(named, self._strangers(named), strict=True)
            for result in self._sessions(history, strangers, tick)
        ]
        return BacktestResult(
            classes=self.classes,
            about={strategy.name: strategy.about for strategy in self.strategies},
            sessions=tuple(sessions),
            strategies=tuple(self._strategies(sessions)),
            warnings=tuple(f"{history.name!r} has no requests." for history in named if not history.requests),
        )

    @property
    def steps(self) -> int:
        """The number of calls of `tick` for each history."""
        return len(self.strategies)

    def _strangers(self, histories: Sequence[SessionHistory]) -> Iterator[Sequence[str]]:
        """Yield for each history some values that calls of the others used."""
        used = [_values(history) if self._recall else () for history in histories]
        for at in range(len(histories)):
            others = [value for other, values in enumerate(used) if other != at for value in values]
            chance = Random(at)  # noqa: S311 - the same sample in each run
            yield chance.sample(others, min(_STRANGERS, len(others)))

    def _sessions(
        self, history: SessionHistory, strangers: Sequence[str], tick: Callable[[], None]
    ) -> Iterator[SessionResult]:
        """Yield the results of one session. One replay serves all classes, unless a strategy depends on prices."""
        counted = Counted(history, self._counter, self._model, strangers)
        window = self._windows(counted.model)
        for strategy in self.strategies:
            for classes in [(each,) for each in self.classes] if strategy.by_price else [self.classes]:
                model = ReplayModel(prices=classes[0].prices, context_window=window, marks=self._marks)
                for each, figures in self._replay(counted, strategy, classes, model).items():
                    yield SessionResult(strategy=strategy.name, session=history.name, prices=each.name, figures=figures)
            tick()

    def _replay(
        self, counted: Counted, strategy: Strategy, classes: Sequence[PriceClass], model: ReplayModel
    ) -> dict[PriceClass, Figures]:
        timed = counted.history.times is not None
        rules = {each: each.rule(timed=timed) for each in classes}
        costs = dict.fromkeys(classes, Cost())
        references = counted.references if self._recall else None
        figures = Figures(sessions=1, recall=None if references is None else RecallCounts())
        for request in replayed(counted, strategy, tuple(dict.fromkeys(rules.values())), model):
            stop = request.stop
            has_reply = stop < len(counted.messages)
            reply = counted.reply_tokens(stop) if has_reply else 0
            recall = references.judge(stop, request.sent.messages) if references is not None and has_reply else None
            missed = recall.far.calls - recall.far.whole if recall is not None else 0
            for each, rule in rules.items():
                use = request.uses[rule]
                costs[each] += Cost(
                    use=use,
                    input=each.input_dollars(use),
                    output=each.output_dollars(use, reply),
                    asking=missed * each.input_dollars(Use(read=use.sent)),
                )
            figures += Figures(
                requests=1,
                untrimmed=request.untrimmed,
                sent=request.tokens,
                largest=request.tokens,
                most_messages=len(request.sent.messages),
                moves=int(request.sent.moved),
                output=reply,
                recall=recall,
                warnings=Counter(request.sent.warnings),
            )
        return {each: replace(figures, cost=costs[each]) for each in classes}

    def _strategies(self, results: Sequence[SessionResult]) -> Iterator[StrategyResult]:
        found: Mapping[tuple[str, str], dict[str, Figures]] = {
            (strategy.name, each.name): {} for strategy in self.strategies for each in self.classes
        }
        for result in results:
            found[result.strategy, result.prices][result.session] = result.figures
        for (strategy, prices), sessions in found.items():
            whole = found[NONE, prices]
            total = sum(sessions.values(), Figures())
            compared = {name: ratio(figures.cost, whole[name].cost) for name, figures in sessions.items()}
            ratios = {name: value for name, value in compared.items() if value is not None}
            highest = max(ratios, key=ratios.__getitem__, default=None)
            yield StrategyResult(
                strategy=strategy,
                prices=prices,
                figures=total,
                ratio=ratio(total.cost, sum(whole.values(), Figures()).cost),
                highest_ratio=ratios[highest] if highest is not None else None,
                most_expensive_session=highest,
            )


def _values(history: SessionHistory) -> Sequence[str]:
    """Return the values that are a whole argument of one of the history's calls, each once."""
    arguments = [call.arguments for message in history.messages for call in message.calls]
    whole = dict.fromkeys(
        atom for each in arguments for atom in atoms_of_arguments(each) if atom in whole_arguments(each)
    )
    return tuple(whole)


def _distinct(histories: Iterable[SessionHistory]) -> list[SessionHistory]:
    """Return the histories with distinct names: repeated names get a number."""
    used: set[str] = set()
    found: list[SessionHistory] = []
    for history in histories:
        name, number = history.name, 2
        while name in used:
            name, number = f"{history.name} ({number})", number + 1
        used.add(name)
        found.append(replace(history, name=name))
    return found
