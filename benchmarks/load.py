"""One run of the load generator against one subject, and its result."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.subjects import Subject


@dataclass(frozen=True, slots=True)
class Plan:
    """The arguments of the load generator; its own source documents them."""

    templates: Sequence[Path]
    """Whole HTTP requests, as `bodies.request` writes them."""
    connections: int = 1
    """The number of concurrent connections."""
    stream: bool = False
    """Whether the answers are streams."""
    seconds: float = 0.0
    """How long to measure. With `requests` this is a maximum, and 0 means no limit."""
    least: int = 0
    """The fewest answers to measure, however long that takes."""
    requests: int = 0
    """How many requests of each connection are measured; 0: as many as fit into `seconds`."""
    warmup: int = 0
    """How many requests each connection sends before."""
    sequence: int = 0
    """The first request's number."""
    first: int = 0
    """The first connection's number."""
    cycle: bool = False
    """Whether one connection sends the templates in turn."""
    grow: Path | None = None
    """A turn that is added to the history after each answer."""

    def words(self) -> list[str]:
        """Return the plan as command-line arguments."""
        numbers: dict[str, Any] = {
            "connections": self.connections,
            "seconds": self.seconds,
            "least": self.least,
            "requests": self.requests,
            "warmup": self.warmup,
            "sequence": self.sequence,
            "first": self.first,
            "stream": int(self.stream),
            "cycle": int(self.cycle),
            "samples": int(self.cycle),
        }
        words = [f"{name}={value}" for name, value in numbers.items() if value]
        return [*words, *([] if self.grow is None else [f"grow={self.grow}"]), *map(str, self.templates)]


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a run. Times are in milliseconds."""

    per_second: float
    """Answers per second while measuring."""
    requests: int
    """Requests whose latency was measured."""
    sequence: int
    """The next unused request number."""
    cpu: float
    """CPU time of the subject per measured answer."""
    latency: dict[str, float]
    """`mean`, `p50`, `p90`, `p99`, `max`, to the end of the answer."""
    first_byte: dict[str, float]
    """The same to the first byte of the answer's body."""
    samples: list[list[float]] = field(default_factory=list)
    """With `cycle`: the latencies of each template."""


def run(program: Path, subject: Subject, plan: Plan) -> Measured:
    """Put load on a subject.

    Raises:
        RuntimeError: an answer was wrong or missing.
    """
    clocks: dict[str, float] = {}
    said: list[str] = []
    command = [str(program), str(subject.port), *plan.words()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        if process.stdout is None or process.stderr is None:
            raise RuntimeError("the load generator has no output")
        for line in process.stdout:
            if line.strip() in {"open", "closed"}:
                clocks[line.strip()] = subject.cpu_seconds()
            else:
                said.append(line)
        complaint = process.stderr.read()
    if process.returncode or not said:
        raise RuntimeError(f"{subject.name}: {complaint.strip()}")
    told: dict[str, Any] = json.loads(said[-1])
    if told["errors"]:
        raise RuntimeError(f"{subject.name}: {told['errors']} wrong answers: {told['first_error']}")
    first = max(told["templates"], key=lambda of: int(of["requests"]))
    used = clocks.get("closed", 0.0) - clocks.get("open", 0.0)
    return Measured(
        per_second=told["finished"] / told["seconds"] if told["seconds"] else 0.0,
        requests=sum(of["requests"] for of in told["templates"]),
        sequence=told["sequence"],
        cpu=1000 * used / max(told["finished"], 1),
        latency=first["latency"] or {},
        first_byte=first["first_byte"] or {},
        samples=[of.get("samples", []) for of in told["templates"]],
    )
