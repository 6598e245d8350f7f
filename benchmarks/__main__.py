"""The command: `python -m benchmarks`, or `make bench`."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks import against, appends, cases, disk, first, memory, profiling, report, subjects
from benchmarks.compiling import BUILD, FOLDER, NoCompiler, Programs, compile_programs

_WIDTH: Final = 150
"""Width of the tables in columns."""
_RESULTS: Final = FOLDER / "results"
_PAGE: Final = FOLDER.parent / "docs" / "performance.md"
_FULL: Final = cases.Effort(rounds=3, seconds=1.2)
_QUICK: Final = cases.Effort(rounds=2, seconds=0.4)
_AGAINST: Final = cases.Effort(rounds=10, seconds=1.0)
_APPENDS: Final = "appends"
"""Their name in `--only`."""
_MEMORY: Final = "memory"
_DISK: Final = "disk"
_FIRST: Final = "first"
_APPEND_PHASES: Final = 30
_APPEND_SECONDS: Final = {False: 90.0, True: 10.0}
"""How long appends are measured, by `--quick`. The time to store the histories is added to that."""
_QUICK_SIZES: Final = (100, 1_000, 10_000)


def main(words: Sequence[str] | None = None) -> int:
    """Run the chosen benchmarks; return the exit code."""
    given = _parser().parse_args(words)
    console = Console()
    if console.width < _WIDTH:
        console = Console(width=_WIDTH)  # a truncated table is useless
    if given.list:
        console.print(
            "\n".join([*(case.name for case in cases.all_cases(quick=given.quick)), _APPENDS, _MEMORY, _DISK, _FIRST])
        )
        return 0
    if not Path("/proc/self/stat").exists():
        console.print("The benchmarks need Linux: epoll, and /proc for CPU time.")
        return 1
    try:
        programs = compile_programs()
    except NoCompiler as why:
        console.print(str(why))
        return 1
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=BUILD))  # in the checkout: on a disk, not on a RAM disk
    try:
        if given.against is not None:
            _compare(programs, folder, given, console)
            shutil.rmtree(folder)
            return 0
        results = _measure(programs, folder, given)
    except RuntimeError as why:
        console.print(f"The run failed; its files are in {folder}. {why}", markup=False)
        return 1
    shutil.rmtree(folder)
    _RESULTS.mkdir(exist_ok=True)
    (_RESULTS / "latest.json").write_text(json.dumps(results, indent=1), "utf-8")
    text = report.markdown(results)
    (_RESULTS / "latest.md").write_text(text, "utf-8")
    report.show(results, console)
    if given.publish:
        report.publish(text, _PAGE)
    console.print(f"Written: {_RESULTS}/latest.json, latest.md" + (f", {_PAGE}" if given.publish else ""))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cases, shorter turns: a first impression")
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="a case (small-64-json, medium-*), `appends`, `memory`, `disk` or `first`; repeatable",
    )
    parser.add_argument("--rounds", type=int, help="how often each subject has its turn")
    parser.add_argument("--seconds", type=float, help="how long a turn is")
    parser.add_argument("--profile", action="store_true", help="where a small request's time goes, instead")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="PATH",
        help="compare with another checkout of this repository that has its own .venv, instead",
    )
    parser.add_argument(
        "--litellm", type=Path, metavar="PATH", help="the `litellm` of an environment of its own, to measure beside"
    )
    parser.add_argument("--publish", action="store_true", help="put the tables into docs/performance.md")
    parser.add_argument("--list", action="store_true", help="name the cases and run none")
    return parser


def _measure(programs: Programs, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Run the chosen parts."""
    usual = _QUICK if given.quick else _FULL
    effort = cases.Effort(given.rounds or usual.rounds, given.seconds or usual.seconds)
    results: dict[str, Any] = {"machine": _machine(), "effort": {"rounds": effort.rounds, "seconds": effort.seconds}}
    results["cases"] = []
    say = _clock()
    if given.profile:
        say("profile")
        results["profile"] = profiling.measure(programs, folder, max(effort.seconds, 5.0))
        return results
    wanted = given.only or ["*"]
    chosen = [case for case in cases.all_cases(quick=given.quick) if _matches(case.name, wanted)]
    with ExitStack() as stack:
        upstream = stack.enter_context(subjects.upstream(programs, folder))
        if chosen:
            with ExitStack() as running:
                ours = [
                    upstream,
                    *(
                        running.enter_context(subjects.passthrough(upstream, folder, name))
                        for name in (subjects.PASSTHROUGH, subjects.CLIENT)
                    ),
                    running.enter_context(subjects.palimpsest(upstream, folder)),
                ]
                if given.litellm is not None:
                    ours.append(running.enter_context(subjects.litellm(upstream, folder, given.litellm)))
                if any(map(cases.is_for_postgres, chosen)):
                    ours.append(running.enter_context(subjects.on_postgres(upstream, folder)))
                results["cases"] = list(cases.measure(programs, ours, chosen, effort, folder, say))
        if _matches(_APPENDS, wanted):
            ours = [stack.enter_context(subjects.palimpsest(upstream, folder, appends.POLICIES, "appends"))]
            results["appends"] = appends.measure(
                programs,
                ours[0],
                folder,
                store="appends",
                phases=_APPEND_PHASES,
                seconds=_APPEND_SECONDS[given.quick],
                sizes=_QUICK_SIZES if given.quick else appends.SIZES,
                say=say,
            )
        if _matches(_FIRST, wanted):
            with subjects.palimpsest(upstream, folder, name="first") as subject:
                results["first"] = first.measure(subject, effort.rounds, say)
        if _matches(_MEMORY, wanted):
            results["memory"] = memory.measure(programs, upstream, folder, seconds=2 * effort.seconds, say=say)
    if _matches(_DISK, wanted):
        results["disk"] = disk.measure(folder, sorted(disk.RECORDED.glob("*.json")), say)
    return results


def _compare(programs: Programs, folder: Path, given: argparse.Namespace, console: Console) -> None:
    """Measure this checkout and another one in alternating rounds, and print both."""
    wanted = given.only or against.CASES
    chosen = [case for case in cases.all_cases(quick=False) if _matches(case.name, wanted)]
    effort = cases.Effort(rounds=given.rounds or _AGAINST.rounds, seconds=given.seconds or _AGAINST.seconds)
    results = against.measure(programs, given.against, chosen, effort, folder, _clock())
    results["machine"] = _machine()
    _RESULTS.mkdir(exist_ok=True)
    (_RESULTS / "against.json").write_text(json.dumps(results, indent=1), "utf-8")
    head, *rows = against.table(results)
    table = Table(*head, title=" against ".join(results["checkouts"].values()), title_justify="left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(f"Written: {_RESULTS}/against.json")


def _clock() -> cases.Say:
    """Return a function that prints what runs, with the seconds since this call."""
    began = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {what}", file=sys.stderr, flush=True)

    return say


def _matches(name: str, wanted: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in wanted)


def _machine() -> dict[str, Any]:
    """Describe the machine, which the numbers depend on."""
    lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": models[0] if models else platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
        **{name: version(name) for name in ("palimpsest", "uvicorn", "aiohttp", "httpx", "uvloop")},
    }


if __name__ == "__main__":
    sys.exit(main())
