"""Compares the default policy with other policies, baselines and packages, on the sessions of `benchmarks/sessions`.

    python -m benchmarks.prove [--rivals PYTHON] [--write]

`PYTHON` is that of an environment with the packages of `requirements-prove.txt`; `make prove` makes one. Each is
replayed on every session, cut where its agent compacted, at the most common prices: a cached token costs a tenth.
Intervals are of 95 %, by session. `--write` puts the table into the README.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from proxy.backtest import (
    NONE,
    Backtest,
    BacktestResult,
    PolicyStrategy,
    SessionHistory,
    Strategy,
    baseline,
    percent,
    price_class,
    read_files,
)
from proxy.backtest.replay import Baseline, Counted, NextRequest, ReplayModel, SentRequest
from proxy.config import BUILT_IN, load
from proxy.dialects.chat.message import ChatMessage
from proxy.tokens import TokenCounter
from proxy.trimming import Policy

HERE: Final = Path(__file__).parent
SESSIONS: Final = HERE / "sessions"
README: Final = HERE.parent / "README.md"
BEGIN, END = "<!-- made by: make prove -->\n", "<!-- the end of it -->\n"
WINDOW: Final = 1_000_000  # the model's context window in tokens
PRESETS: Final = ("coding", "agent")
HYSTERESIS: Final = {"trigger": {"tokens": 60_000}, "target": {"tokens": 30_000}, "edits": [{"type": "drop_oldest"}]}
CLEARING: Final = {
    "trigger": {"tokens": 30_000},
    "edits": [{"type": "clear_tool_results", "keep": 3, "digest_chars": 0}],
}
COLUMNS: Final = ("", "input cost", "far values kept", "those only in results", "worst session")
DOES: Final = {
    "langchain-core": "`trim_messages` to 30k",
    "litellm": "`trim_messages` to 30k",
    "headroom-ai": "`compress`",
}


class Rival(Baseline, frozen=True, kw_only=True):
    """What a package sends, by session and by number of messages including the instructions."""

    views: dict[str, dict[int, Sequence[int]]]
    made: dict[str, Sequence[Any]]

    def begin(self, counted: Counted, model: ReplayModel) -> NextRequest:  # noqa: ARG002 - none needs the model
        """Return a function that sends what the package sent."""
        lead, name = len(counted.instructions), counted.history.name
        made = [ChatMessage.of(each) for each in self.made[name]]
        known = [*counted.instructions, *counted.messages, *made]

        def next_request(stop: int, idle: float | None) -> SentRequest:  # noqa: ARG001 - none needs a clock
            view = self.views[name][stop + lead]
            return SentRequest(messages=tuple([known[at] for at in view]), moved=False)

        return next_request


def rivals(python: str, histories: Sequence[SessionHistory]) -> Iterator[Rival]:
    """Yield each package of another environment with the views that it makes of the sessions."""
    asked: dict[str, list[int]] = {}
    given: list[dict[str, Any]] = []
    for history in histories:
        messages = [message.without_own_fields().data for message in (*history.instructions, *history.messages)]
        asked[history.name] = [len(history.instructions) + stop for stop in history.requests]
        given.append({"name": history.name, "messages": messages, "requests": asked[history.name]})
    command = [python, str(HERE / "rivals.py")]
    done = subprocess.run(command, input=json.dumps(given).encode(), capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr.decode(errors="replace"))
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for name in dict.fromkeys(line["rival"] for line in lines):
        own = {line["session"]: line for line in lines if line["rival"] == name}
        yield Rival(
            name=f"{name} {next(iter(own.values()))['version']}: {DOES[name]}",
            about="as the package does it",
            start=lambda _: lambda _: (),
            views={key: dict(zip(asked[key], line["views"], strict=True)) for key, line in own.items()},
            made={key: line["made"] for key, line in own.items()},
        )


def policies() -> Iterator[Strategy]:
    """Yield our own policies."""
    yield PolicyStrategy(name="**the default policy**", policy=BUILT_IN)
    for name in PRESETS:
        loaded = load(HERE.parent / "examples" / "policies" / f"{name}.yaml")
        yield PolicyStrategy(name=f"preset `{name}`", policy=loaded.policies["default"])


def baselines() -> Iterator[Strategy]:
    """Yield what providers and agents do, and an oracle as the lower bound."""
    yield PolicyStrategy(name="clear above 30k, keep 3", policy=Policy.model_validate(CLEARING))
    yield PolicyStrategy(name="drop the oldest, 60k to 30k", policy=Policy.model_validate(HYSTERESIS))
    yield baseline("baseline:mask")
    yield baseline("baseline:oracle")


def rows(result: BacktestResult) -> Iterator[tuple[str, ...]]:
    """Yield the table, cheapest first."""
    whole = {line.session: line.figures.cost.input for line in result.sessions if line.strategy == NONE}
    for each in sorted(result.strategies, key=lambda each: each.figures.cost.input):
        if each.strategy == NONE:
            continue
        lines = [line for line in result.sessions if line.strategy == each.strategy]
        counts = [line.figures.recall for line in lines if line.figures.recall is not None]
        yield (
            {"baseline:mask": "mask all but 3, always", "baseline:oracle": "*knows the future*"}.get(
                each.strategy, each.strategy
            ),
            _cell([(line.figures.cost.input, whole[line.session]) for line in lines]),
            *(
                _cell([(float(some.present), float(some.grounded)) for some in stratum])
                for stratum in ([count.far for count in counts], [count.tool_only for count in counts])
            ),
            f"{100 * (each.highest_ratio or 0):.0f}%",
        )


def _cell(pairs: Sequence[tuple[float, float]]) -> str:
    return percent(pairs).replace(" %", "%").replace(" to ", "-")


def table(result: BacktestResult, sessions: int, recordings: int) -> str:
    """Return the table in Markdown and a note on the data: `sessions` were cut out of `recordings` recordings."""
    requests = result.strategies[0].figures.requests
    lines = [f"| {' | '.join(cells)} |" for cells in (COLUMNS, ["---", *["---:"] * (len(COLUMNS) - 1)], *rows(result))]
    about = (
        f"{sessions} sessions from {recordings} recordings of real agents, cut where they compacted, "
        f"{requests:,} requests; in brackets 95 % intervals by session."
    )
    return "\n".join([*lines, "", about, ""])


def main() -> None:
    """Print the table, or write it into the README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rivals", metavar="PYTHON")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    histories = read_files(SESSIONS)
    others = list(rivals(given.rivals, histories)) if given.rivals else []
    test = Backtest([*policies(), *baselines(), *others], [price_class(0.1)], TokenCounter(), windows=lambda _: WINDOW)
    text = table(test.run(histories), len(histories), len(list(SESSIONS.glob("*.json.gz"))))
    sys.stdout.write(text)
    if given.write:
        before, _, rest = README.read_text("utf-8").partition(BEGIN)
        README.write_text(f"{before}{BEGIN}{text}{END}{rest.partition(END)[2]}", "utf-8")


if __name__ == "__main__":
    main()
