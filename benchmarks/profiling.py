"""Where the time of a small request goes, by subpackage of the proxy and by library.

If py-spy is on the PATH, it samples the running server from outside while a thread holds the interpreter's lock.
Otherwise the server runs under cProfile. That measures the event loop's thread only, overstates small functions,
and does not see into the event loop: the table has a line for the rest. Of other threads it shows the CPU time.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final, cast

from benchmarks import bodies, subjects
from benchmarks.compiling import Programs
from benchmarks.load import Plan, run
from benchmarks.subjects import Subject

_LIBRARIES: Final = {
    "aiohttp": "upstream: aiohttp",
    "multidict": "upstream: aiohttp",
    "aiosignal": "upstream: aiohttp",
    "frozenlist": "upstream: aiohttp",
    "yarl": "upstream: aiohttp",
    "httpx": "upstream: httpx",
    "httpx_aiohttp": "upstream: httpx",
    "sqlalchemy": "store: SQLAlchemy",
    "sqlite3": "store: sqlite3",
    "aiosqlite": "store: sqlite3",
    "tiktoken": "tokens",
    "uvicorn": "uvicorn",
    "starlette": "starlette, FastAPI",
    "fastapi": "starlette, FastAPI",
    "asyncio": "asyncio, anyio",
    "anyio": "asyncio, anyio",
    "concurrent": "threads",
    "threading.py": "threads",
    "queue.py": "threads",
    "logging": "telemetry",
}
_ROOM: Final = re.compile(r"(?:^|/)proxy/(\w+)/")
_FILE: Final = re.compile(r"(?:^|/)proxy/\w+\.py")
_LIBRARY: Final = re.compile(r"^.*(?:site-packages|python3\.\d+)/([\w.]+)")
_WAITING: Final = re.compile(
    r"(?:^|;)(?:\w+\.)*(?:_worker|wait|get|join) \([^()]*(?:thread|threading|queue)\.py[^()]*\)$"
)
"""Innermost frames of an idle thread."""
_UNSEEN: Final = "event loop, sockets and what a profiler cannot see"
_THREADS: Final = "other threads: the store, and what is computed aside"
_CONNECTIONS: Final = 16
_WARMUP: Final = 20


def room_of(path: str) -> str | None:
    """Return the subpackage or library of a file, or None if its time counts for its caller."""
    if found := _ROOM.search(path):
        return found[1]
    if _FILE.search(path):
        return "app"
    if found := _LIBRARY.search(path):
        return _LIBRARIES.get(found[1])
    return None


def measure(programs: Programs, folder: Path, seconds: float) -> dict[str, Any]:
    """Profile the proxy under small requests, with py-spy if there is one and cProfile otherwise."""
    spy = shutil.which("py-spy")
    with subjects.upstream(programs, folder) as upstream:
        if spy is not None:
            return _from_outside(programs, folder, seconds, upstream, spy)
        return _from_inside(programs, folder, seconds, upstream)


def _load(programs: Programs, subject: Subject, folder: Path, seconds: float) -> int:
    """Put load on the subject; return how many requests it answered."""
    path = folder / "profile.http"
    question: bodies.Message = {"role": "user", "content": bodies.question(120)}
    path.write_bytes(bodies.request(f"profile-{bodies.CONNECTION}", [*bodies.history(2, 830), question]))
    measured = run(
        programs.load,
        subject,
        Plan(templates=[path], connections=_CONNECTIONS, seconds=seconds, warmup=_WARMUP, sequence=1),
    )
    return measured.sequence - 1


def _table(by: str, requests: int, spent: Mapping[str, float]) -> dict[str, Any]:
    """Return each room's share of the time and its milliseconds per request, the largest first."""
    total = sum(spent.values())
    return {
        "by": by,
        "requests": requests,
        "rooms": [
            {"room": room, "share": took / total, "ms": 1000 * took / requests}
            for room, took in sorted(spent.items(), key=lambda item: -item[1])
            if took > 0
        ],
    }


# -- from outside


def _from_outside(programs: Programs, folder: Path, seconds: float, upstream: Subject, spy: str) -> dict[str, Any]:
    stacks = folder / "stacks.txt"
    with subjects.palimpsest(upstream, folder, name="profiled") as subject:
        _load(programs, subject, folder, 1.0)
        # Sample only threads that hold the interpreter's lock: one that waits in C looks busy from outside.
        command = [spy, "record", "--gil", "--pid", str(subject.pid), "--duration", str(max(int(seconds), 1))]
        with subprocess.Popen(
            [*command, "--rate", "500", "--format", "raw", "--full-filenames", "--output", str(stacks)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as sampler:
            used = subject.cpu_seconds()
            requests = _load(programs, subject, folder, seconds)
            used = subject.cpu_seconds() - used
            sampler.wait()
    counts = count_stacks(stacks.read_text("utf-8").splitlines())
    samples = sum(counts.values())
    return _table("py-spy", requests, {room: used * count / samples for room, count in counts.items()})


def count_stacks(lines: Iterable[str]) -> Counter[str]:
    """Count samples by room. A sample belongs to the innermost frame whose room is known.

    Idle threads are left out.
    """
    counts: Counter[str] = Counter()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        if _WAITING.search(stack):
            continue
        paths = re.findall(r"\(([^()]+?)(?::\d+)?\)(?:;|$)", stack)
        room = next((room for path in reversed(paths) if (room := room_of(path))), _UNSEEN)
        counts[room] += int(count)
    return counts


# -- from inside


def _from_inside(programs: Programs, folder: Path, seconds: float, upstream: Subject) -> dict[str, Any]:
    port = subjects.free_port()
    configuration = subjects.configuration(upstream, folder, None, "profiled", port)
    told = folder / "profile.json"
    command = [sys.executable, "-m", "benchmarks.profiling", str(told), "serve", "--config", str(configuration)]
    with subjects.running(command, folder / "profiled.log", port) as pid:
        subject = Subject(name=subjects.PALIMPSEST, port=port, pid=pid, stores=True)
        _load(programs, subject, folder, 1.0)
        os.kill(pid, signal.SIGUSR1)
        requests = _load(programs, subject, folder, seconds)
    spent: dict[str, float] = json.loads(told.read_text("utf-8"))
    return _table("cProfile", requests, spent)


def spent_by_room(stats: pstats.Stats) -> dict[str, float]:
    """Return seconds by room. Time in C code and in other libraries counts for the caller."""
    table = cast(
        "dict[tuple[str, int, str], tuple[int, int, float, float, dict[tuple[str, int, str], Any]]]",
        getattr(stats, "stats"),  # noqa: B009 - pstats does not declare it
    )
    spent: defaultdict[str, float] = defaultdict(float)

    def give(function: tuple[str, int, str], took: float, depth: int) -> None:
        room = room_of(function[0])
        callers = table[function][4] if function in table else {}
        shares = {caller: float(told[2]) for caller, told in callers.items()}
        weight = sum(shares.values())
        if room is not None or depth == 0 or weight <= 0:
            spent[room or "other"] += took
            return
        for caller, share in shares.items():
            give(caller, took * share / weight, depth - 1)

    for function, told in table.items():
        give(function, told[2], 4)
    return dict(spent)


def main() -> None:
    """Run `palimpsest` with the given arguments, profiled from the first SIGUSR1 to the end."""
    from proxy.__main__ import main as palimpsest  # noqa: PLC0415 - only the profiled process knows the package

    out = Path(os.fsdecode(sys.argv.pop(1)))
    profile = cProfile.Profile(timer=time.thread_time)
    began: list[float] = []

    def begin(_number: int, _frame: FrameType | None) -> None:
        if not began:
            began.extend((time.thread_time(), time.process_time()))
            profile.enable()

    signal.signal(signal.SIGUSR1, begin)
    try:
        palimpsest()
    finally:
        profile.disable()
        mine, everybody = time.thread_time() - began[0], time.process_time() - began[1]
        spent = spent_by_room(pstats.Stats(profile))
        spent[_UNSEEN] = max(mine - sum(spent.values()), 0.0)
        spent[_THREADS] = max(everybody - mine, 0.0)
        out.write_text(json.dumps(spent), "utf-8")


if __name__ == "__main__":
    main()
