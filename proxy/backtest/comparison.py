"""The backtest itself: every history under every strategy, beside no trimming.

What does not depend on prices is replayed once for all of them; a policy that reckons with prices is replayed
under each. It reads no file and no store, and shows nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from proxy.backtest.baselines import NONE, baseline
from proxy.backtest.counted import Counted
from proxy.backtest.figures import Compared, Figures, Line, Outcome, Spent, ratio, summed
from proxy.backtest.histories import History
from proxy.backtest.price import PriceClass
from proxy.backtest.recall import RecallCounts
from proxy.backtest.replay import Model, Strategy, replayed
from proxy.tokens import TokenCounter


class Backtest:
    """Strategies and prices, and what is known of models."""

    def __init__(
        self,
        strategies: Iterable[Strategy],
        classes: Sequence[PriceClass],
        counter: TokenCounter,
        *,
        model: str = "",
        windows: Callable[[str], int | None] = lambda _: None,
        marks: bool = True,
        recall: bool = True,
    ) -> None:
        """Put strategies beside no trimming, which is always the first of them.

        Args:
            strategies: What is compared; of two with the same name the first counts.
            classes: At least one class of prices, with different names.
            counter: Counts tokens.
            model: The model that is taken where a history names none.
            windows: Returns the context window of a model, where it is known.
            marks: Whether the proxy sets cache marks, for models that take any.
            recall: Whether it is found out what of the values that tool calls used was still sent.
        """
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

    def run(self, histories: Sequence[History], tick: Callable[[], None] = lambda: None) -> Outcome:
        """Replay all histories under all strategies; `tick` is called after each of them."""
        named = _distinct(histories)
        lines = [line for history in named for line in self._lines(history, tick)]
        return Outcome(
            classes=self.classes,
            about={strategy.name: strategy.about for strategy in self.strategies},
            lines=tuple(lines),
            compared=tuple(self._compared(lines)),
            warnings=tuple(
                f"No request can be made out in {history.name!r}."
                for history in named
                if not history.requests
            ),
        )

    @property
    def steps(self) -> int:
        """How many times `run` calls `tick` for each history."""
        return len(self.strategies)

    def _lines(self, history: History, tick: Callable[[], None]) -> Iterator[Line]:
        """Yield the lines of one session."""
        counted = Counted(history, self._counter, self._model)
        for strategy in self.strategies:
            for each, figures in self._figures(counted, strategy):
                yield Line(strategy=strategy.name, session=history.name, prices=each.name, figures=figures)
            tick()

    def _figures(self, counted: Counted, strategy: Strategy) -> Iterator[tuple[PriceClass, Figures]]:
        """Yield what a strategy came to under each class of prices."""
        window = self._windows(counted.model)
        groups = [(each,) for each in self.classes] if strategy.by_price else [self.classes]
        for classes in groups:
            yield from self._replay(
                counted,
                strategy,
                classes,
                Model(prices=classes[0].prices, context_window=window, marks=self._marks),
            ).items()

    def _replay(
        self, counted: Counted, strategy: Strategy, classes: Sequence[PriceClass], model: Model
    ) -> dict[PriceClass, Figures]:
        """Replay once, and return what it came to under each of the classes."""
        timed = counted.history.times is not None
        rules = {each: each.rule(timed=timed) for each in classes}
        spent = dict.fromkeys(classes, Spent())
        references = counted.references if self._recall else None
        recall = RecallCounts()
        warnings: Counter[str] = Counter()
        figures = Figures(sessions=1)
        for request in replayed(counted, strategy, tuple(dict.fromkeys(rules.values())), model):
            stop = request.stop
            has_reply = stop < len(counted.messages)
            reply = counted.reply_tokens(stop) if has_reply else 0
            for each, rule in rules.items():
                use = request.uses[rule]
                spent[each] += Spent(
                    use=use, input=each.input_dollars(use), output=each.output_dollars(use, reply)
                )
            if references is not None and has_reply:
                recall += references.judge(stop, request.sent.messages)
            warnings.update(request.sent.warnings)
            figures += Figures(
                requests=1,
                untrimmed=request.untrimmed,
                sent=request.tokens,
                largest=request.tokens,
                most_messages=len(request.sent.messages),
                moves=int(request.sent.moved),
                output=reply,
            )
        known = recall if references is not None else None
        figures = replace(figures, recall=known, warnings=dict(warnings))
        return {each: replace(figures, spent=spent[each]) for each in classes}

    def _compared(self, lines: Sequence[Line]) -> Iterator[Compared]:
        """Yield each strategy under each class of prices on all sessions."""
        by_class: Mapping[tuple[str, str], dict[str, Figures]] = {
            (strategy.name, each.name): {} for strategy in self.strategies for each in self.classes
        }
        for line in lines:
            by_class[line.strategy, line.prices][line.session] = line.figures
        for (strategy, prices), sessions in by_class.items():
            whole = by_class[NONE, prices]
            total = summed(sessions.values())
            ratios = {
                name: found
                for name, figures in sessions.items()
                if (found := ratio(figures.spent, whole[name].spent)) is not None
            }
            dearest = max(ratios, key=ratios.__getitem__, default=None)
            yield Compared(
                strategy=strategy,
                prices=prices,
                figures=total,
                ratio=ratio(total.spent, summed(whole.values()).spent),
                dearest=ratios[dearest] if dearest is not None else None,
                dearest_session=dearest,
            )


def _distinct(histories: Iterable[History]) -> list[History]:
    """Return the histories under names of which no two are equal."""
    used: set[str] = set()
    found: list[History] = []
    for history in histories:
        name, number = history.name, 2
        while name in used:
            name, number = f"{history.name} ({number})", number + 1
        used.add(name)
        found.append(replace(history, name=name))
    return found
