"""Start-up time of the proxy, and the memory of its processes, by the number of workers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks import bodies, cases
from benchmarks.compiling import Programs
from benchmarks.load import Plan, run
from benchmarks.subjects import PALIMPSEST, Subject, command_line, configuration, free_port, running, with_children

WORKERS: Final = (1, 2, 4)
_CONNECTIONS: Final = 16
_SETTLING: Final = 1.0
"""Seconds before memory is read, so that garbage of the start or the load is freed by then."""


def measure(
    programs: Programs,
    upstream: Subject,
    folder: Path,
    *,
    seconds: float,
    say: cases.Say,
    workers: Sequence[int] = WORKERS,
) -> list[dict[str, Any]]:
    """Return a line for each number of workers: seconds until all serve, megabytes when idle and after a load."""
    template = folder / "process.http"
    asked: list[bodies.Message] = [{"role": "user", "content": bodies.question(800)}]
    template.write_bytes(bodies.request(f"process-{bodies.SEQUENCE}", asked, stream=False))
    plan = Plan(templates=[template], connections=_CONNECTIONS, seconds=seconds, warmup=1)
    lines: list[dict[str, Any]] = []
    for number in workers:
        name, port = f"memory-{number}", free_port()
        say(name)
        config, log = configuration(upstream, folder, None, name, port), folder / f"{name}.log"
        command = [*command_line(), "serve", "--config", str(config), "--workers", str(number)]
        began = time.monotonic()
        with running(command, log, port) as pid:
            while "use it:" not in log.read_text("utf-8"):  # all workers serve
                time.sleep(0.005)
            ready = time.monotonic() - began
            idle = _memory(pid)
            run(programs.load, Subject(name=PALIMPSEST, port=port, pid=pid), replace(plan, sequence=1))
            lines.append({"workers": number, "ready_seconds": ready, "idle": idle, "loaded": _memory(pid)})
    return lines


def _memory(pid: int) -> dict[str, float]:
    """Return the memory of a process and its children in megabytes: RSS, and PSS, which counts shared pages once."""
    time.sleep(_SETTLING)
    sizes = {"Rss": 0.0, "Pss": 0.0}
    for each in with_children(pid):
        for line in Path(f"/proc/{each}/smaps_rollup").read_text("ascii").splitlines():
            field, _, value = line.partition(":")
            if field in sizes:
                sizes[field] += int(value.split()[0]) / 1024
    return {"rss_mb": sizes["Rss"], "pss_mb": sizes["Pss"]}
