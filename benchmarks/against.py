"""Compares two checkouts of this repository side by side: `python -m benchmarks --against PATH`.

PATH is another checkout with its own `.venv`. Both proxies run at the same time behind one fake upstream
and get the same load in short alternating rounds, so that a slowdown of the machine affects both.
Each figure is compared within a round; the table shows the median of all rounds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks import cases, subjects
from benchmarks.compiling import FOLDER, Programs

CASES: Final = ("small-64-json", "small-64-stream", "growing-16-json")
"""The cases to compare if `--only` names none."""
HERE: Final = "this"
OTHER: Final = "other"
_STARTS: Final = 3
"""How often each checkout is started to measure its start-up time."""
_IDLE_SECONDS: Final = 4.0
"""How long a server idles before its memory is read: it loads its vocabularies after it starts to listen."""


def measure(
    programs: Programs, checkout: Path, chosen: Sequence[cases.Case], effort: cases.Effort, folder: Path, say: cases.Say
) -> dict[str, Any]:
    """Measure both checkouts; return the figures of each, and their ratios.

    Raises:
        RuntimeError: the other checkout cannot be started, or a proxy gave a wrong answer.
    """
    checkouts = {HERE: FOLDER.parent, OTHER: checkout.resolve()}
    for path in checkouts.values():
        if not (path / ".venv" / "bin" / "palimpsest").exists():
            raise RuntimeError(f"{path} has no .venv/bin/palimpsest: a checkout with its own .venv is needed.")
    starts: dict[str, list[float]] = {name: [] for name in checkouts}
    with ExitStack() as stack:
        upstream = stack.enter_context(subjects.upstream(programs, folder))

        @contextmanager
        def started(name: str, number: int) -> Iterator[subjects.Subject]:
            store = folder / f"start-{number}"  # each start creates a new store
            store.mkdir(exist_ok=True)
            began = time.monotonic()
            with subjects.palimpsest(upstream, store, None, name, checkouts[name]) as subject:
                starts[name].append(time.monotonic() - began)
                yield subject

        say("start-up")
        for number in range(1, _STARTS):
            for name in _alternating(list(checkouts), number):
                with started(name, number):
                    pass
        both = [stack.enter_context(started(name, _STARTS)) for name in checkouts]
        time.sleep(_IDLE_SECONDS)
        idle = [subject.memory_mb() for subject in both]
        records = list(cases.measure(programs, both, chosen, effort, folder, say))
        loaded = [subject.memory_mb() for subject in both]
    return {
        "checkouts": {name: str(path) for name, path in checkouts.items()},
        "cases": [_compared(record) for record in records],
        "start_seconds": {name: median(starts[name]) for name in checkouts},
        "idle_mb": dict(zip(checkouts, idle, strict=True)),
        "loaded_mb": dict(zip(checkouts, loaded, strict=True)),
    }


def table(results: dict[str, Any]) -> list[list[str]]:
    """Return the comparison as rows of cells, the heading first."""
    rows = [["", HERE, OTHER, f"{HERE} / {OTHER}", "rounds: lowest … highest"]]
    for case in results["cases"]:
        for figure, unit in (("per_second", "requests/s"), ("cpu_ms", "CPU ms"), ("p50_ms", "p50 ms")):
            values, ratios = case["figures"][figure], case["ratios"][figure]
            rows.append(
                [
                    f"{case['name']}, {unit}",
                    *(f"{values[name]:,.2f}" for name in (HERE, OTHER)),
                    f"{median(ratios):.3f}" if ratios else "",
                    f"{min(ratios):.2f} … {max(ratios):.2f}" if ratios else "",
                ]
            )
    titles = {"start_seconds": "start-up, s", "idle_mb": "memory idle, MB", "loaded_mb": "memory after load, MB"}
    for figure, title in titles.items():
        here, other = results[figure][HERE], results[figure][OTHER]
        rows.append([title, f"{here:.2f}", f"{other:.2f}", f"{here / other:.3f}", ""])
    return rows


def _alternating(names: list[str], number: int) -> list[str]:
    return names if number % 2 else names[::-1]


def _compared(record: dict[str, Any]) -> dict[str, Any]:
    """Return one case: the median of each checkout, and the ratio in every round."""
    here, other = (record["subjects"][name]["rounds"] for name in (HERE, OTHER))
    figures: dict[str, tuple[list[float], list[float]]] = {
        "per_second": ([one["per_second"] for one in here], [one["per_second"] for one in other]),
        "cpu_ms": ([one["cpu"] for one in here], [one["cpu"] for one in other]),
        "p50_ms": ([one["latency"]["p50"] for one in here], [one["latency"]["p50"] for one in other]),
    }
    return {
        "name": record["name"],
        "figures": {name: {HERE: median(ours), OTHER: median(theirs)} for name, (ours, theirs) in figures.items()},
        "ratios": {
            name: [one / base for one, base in zip(ours, theirs, strict=True) if base]
            for name, (ours, theirs) in figures.items()
        },
    }
