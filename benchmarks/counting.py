"""What metrics and statistics cost: `python -m benchmarks.counting [--seconds 180] [--postgres]`.

Two processes of the same code differ by more than that. So one proxy counts in every other second, and each second is
compared with the next one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, Final
from unittest.mock import patch

from benchmarks import cases, subjects
from benchmarks.compiling import BUILD, compile_programs

_SERVE: Final = "serve"
_CASE: Final = "small-64-json"
_LEAST: Final = 30  # fewest requests in a second that is evaluated
_FEWEST: Final = 2  # fewest pairs that have a standard error
_Second = tuple[int, int, float]  # its number, the requests that ended in it, and CPU seconds


def main(words: Sequence[str] | None = None) -> int:
    """Print how many requests were answered with and without counting, and how much CPU time each took."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counting", description=__doc__)
    parser.add_argument("--seconds", type=float, default=180.0, help="how long requests are sent")
    parser.add_argument("--postgres", action="store_true", help="store in PostgreSQL")
    given = parser.parse_args(words)
    BUILD.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        for line in _told(_measured(Path(folder), given.seconds, on_postgres=given.postgres)):
            print(line)
    return 0


def _measured(folder: Path, seconds: float, *, on_postgres: bool) -> list[_Second]:
    programs, port, out, url = compile_programs(), subjects.free_port(), folder / "seconds.txt", None
    with ExitStack() as stack:
        if on_postgres:
            from tests.support import postgres  # noqa: PLC0415 - it is needed for this alone

            url = stack.enter_context(postgres.database(stack.enter_context(postgres.server())))
        upstream = stack.enter_context(subjects.upstream(programs, folder))
        config = subjects.configuration(upstream, folder, None, _CASE, port, url)
        command = [sys.executable, "-m", "benchmarks.counting", _SERVE, str(out), str(config)]
        pid = stack.enter_context(subjects.running(command, folder / "proxy.log", port))
        proxy = subjects.Subject(name=subjects.PALIMPSEST, port=port, pid=pid, stores=True)
        chosen = [case for case in cases.all_cases(quick=True) if case.name == _CASE]
        effort = cases.Effort(rounds=1, seconds=seconds)
        list(cases.measure(programs, [proxy], chosen, effort, folder, lambda _: None))
    lines = map(str.split, out.read_text("ascii").splitlines())
    return [(int(number), int(requests), float(cpu)) for number, requests, cpu in lines]


def _serve(out: Path, config: str) -> None:
    """Run the proxy with counting on in even seconds only; write the figures of each second to `out`."""
    from proxy.__main__ import main as palimpsest  # noqa: PLC0415 - not in the process that measures
    from proxy.pipeline.settle import Exchange  # noqa: PLC0415
    from proxy.store import exchanges, functions  # noqa: PLC0415

    meter, statistics = Exchange._count, exchanges.counted  # noqa: SLF001
    now, requests, cpu = 0, 0, 0.0

    def metered(exchange: Exchange, *ended: Any) -> None:
        nonlocal now, requests, cpu
        if (second := int(time.monotonic())) != now:
            used = time.process_time()
            with out.open("a", encoding="ascii") as file:
                file.write(f"{now} {requests} {used - cpu}\n")
            now, requests, cpu = second, 0, used
        requests += 1
        if second % 2 == 0:
            meter(exchange, *ended)

    def counted(*ended: Any) -> Any:
        return None if int(time.monotonic()) % 2 else statistics(*ended)

    sys.argv = ["palimpsest", "serve", "--config", config]
    with (
        patch.object(Exchange, "_count", metered),
        patch.object(exchanges, "counted", counted),
        patch.object(functions, "counted", counted),
    ):
        palimpsest()


def _told(seconds: Sequence[_Second]) -> list[str]:
    whole = [each for each in seconds[1:] if each[1] >= _LEAST]
    together = [pair for pair in pairwise(whole) if pair[1][0] - pair[0][0] == 1]
    pairs = [pair if pair[0][0] % 2 == 0 else pair[::-1] for pair in together]
    if len(pairs) < _FEWEST:
        return ["Too few seconds: send requests for longer."]
    figures = {
        "requests": [on[1] / off[1] for on, off in pairs],
        "CPU time of a request": [on[2] / on[1] / (off[2] / off[1]) for on, off in pairs],
    }
    told = [f"Seconds with metrics and statistics against those without, {len(pairs)} pairs:"]
    for name, ratios in figures.items():
        error = stdev(ratios) / len(ratios) ** 0.5
        told.append(f"{name}: median {median(ratios):.3f}, mean {fmean(ratios):.3f} (standard error {error:.3f})")
    return told


if __name__ == "__main__":
    if sys.argv[1:2] == [_SERVE]:
        _serve(Path(sys.argv[2]), sys.argv[3])
        raise SystemExit(0)
    raise SystemExit(main())
