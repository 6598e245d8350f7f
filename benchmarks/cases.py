"""Requests per second and latency by body size, connections and kind of answer.

    small     1 kB: instructions, one turn, and a new message
    medium    124 kB: 200 messages, and a new one
    large     1.45 MB: 2,000 messages, and a new one
    shared    small, with one session for all connections
    new       1 kB, and every request begins a new session
    growing   medium, and each request resends all earlier questions and answers, as SDKs do

In the first three each connection has its own session. One request stores its history. Then each request resends
that history with a new message: a branch at the same place, so all requests have the same size. `growing` adds a
turn with each request instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks import bodies
from benchmarks.compiling import Programs
from benchmarks.load import Measured, Plan, run
from benchmarks.subjects import PALIMPSEST, POSTGRES, Subject

Say = Callable[[str], None]

_SIZES: Final = {"small": (2, 830), "shared": (2, 830), "medium": (200, 123_500), "large": (2000, 1_449_500)}
"""Number of stored messages without instructions, and the bytes of all. The bodies have 1 kB, 124 kB and 1.45 MB."""
_ON_POSTGRES: Final = frozenset({"small", "shared"})
"""Bodies that are measured with a store on PostgreSQL too."""
_QUESTION: Final = 120
_STORING: Final = {"large": 3}
"""Requests that it takes to store a body's history, if more than one. Of a long history the first request is trimmed,
and so is the second, which is a branch of its own. The third is planned as a whole."""
_WARMUP: Final = 2
"""Requests of each connection before measuring starts."""
_GROWING_REQUESTS: Final = 40


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table."""

    body: str
    """A name from the list at the top of this file."""
    connections: int
    """The number of concurrent connections."""
    stream: bool
    """Whether the answers are streams."""

    @property
    def name(self) -> str:
        """Its name in `--only`."""
        return f"{self.body}-{self.connections}-{'stream' if self.stream else 'json'}"


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    rounds: int
    """How often each subject is measured."""
    seconds: float
    """How long each measurement takes."""


def all_cases(*, quick: bool) -> list[Case]:
    """Return the cases in the order in which they run."""
    kinds = (False, True)
    if quick:
        cases = [
            Case(body="small", connections=connections, stream=stream) for connections in (1, 64) for stream in kinds
        ]
        cases += [Case(body="medium", connections=connections, stream=False) for connections in (1, 64)]
        return [
            *cases,
            Case(body="medium", connections=1, stream=True),
            Case(body="large", connections=1, stream=False),
            Case(body="growing", connections=1, stream=False),
        ]
    cases = [
        Case(body=body, connections=connections, stream=stream)
        for body in _SIZES
        if body != "shared"
        for connections in (1, 16, 64)
        for stream in kinds
    ]
    return [
        *cases,
        *(Case(body="shared", connections=connections, stream=False) for connections in (1, 64)),
        *(Case(body="new", connections=connections, stream=False) for connections in (1, 64)),
        *(Case(body="growing", connections=connections, stream=False) for connections in (1, 16)),
    ]


def is_for_postgres(case: Case) -> bool:
    """Tell whether a case is measured with a store on PostgreSQL too."""
    return case.body in _ON_POSTGRES and not case.stream and case.connections in {1, 64}


def measure(
    programs: Programs, subjects: Sequence[Subject], cases: Sequence[Case], effort: Effort, folder: Path, say: Say
) -> Iterator[dict[str, Any]]:
    """Run the cases; yield one record for each, with every round and the medians.

    Raises:
        RuntimeError: a subject gave a wrong answer.
    """
    runner = _Runner(programs, folder)
    for case in cases:
        say(f"{case.name}")
        asked = [subject for subject in subjects if subject.name != POSTGRES or is_for_postgres(case)]
        runner.prepare(case, asked, max(c.connections for c in cases if c.body == case.body))
        rounds: list[dict[str, Measured]] = []
        for number in range(effort.rounds):
            # The order of the subjects rotates from round to round.
            turns = [*asked[number % len(asked) :], *asked[: number % len(asked)]]
            rounds.append({subject.name: runner.turn(case, subject, effort.seconds) for subject in turns})
        yield _record(case, runner.size(case), rounds)


class _Runner:
    """Counts the requests and sessions so far, so that each request that must be unique is."""

    def __init__(self, programs: Programs, folder: Path) -> None:
        self._program = programs.load
        self._folder = folder
        self._sequence = 1
        self._sessions = 1
        self._stored: set[tuple[str, str]] = set()

    def prepare(self, case: Case, subjects: Sequence[Subject], connections: int) -> None:
        """Store the histories of this body in each subject that has a store, one session for each connection."""
        if case.body not in _SIZES:
            return
        for subject in subjects:
            if subject.stores and (case.body, subject.name) not in self._stored:
                count = 1 if case.body == "shared" else connections
                requests = _STORING.get(case.body, 1)
                plan = Plan(templates=[self._template(case.body, stream=False)], connections=count, requests=requests)
                self._run(subject, plan)
                self._stored.add((case.body, subject.name))

    def turn(self, case: Case, subject: Subject, seconds: float) -> Measured:
        """Measure one subject once."""
        template = [self._template(case.body, stream=case.stream)]
        if case.body == "growing":
            grow = self._folder / "turn.txt"
            grow.write_bytes(bodies.turn(bodies.question(_QUESTION)))
            plan = Plan(
                templates=template,
                connections=case.connections,
                stream=case.stream,
                requests=_GROWING_REQUESTS,
                warmup=_WARMUP,
                first=self._sessions,
                grow=grow,
            )
            self._sessions += case.connections
            return self._run(subject, plan)
        plan = Plan(
            templates=template,
            connections=case.connections,
            stream=case.stream,
            seconds=seconds,
            least=case.connections,
            warmup=1 if case.body == "large" else _WARMUP,
        )
        return self._run(subject, plan)

    def size(self, case: Case) -> int:
        """Return the size of the request body in bytes; of a growing body, the size of the first."""
        template = self._template(case.body, stream=case.stream).read_bytes()
        return len(template.partition(b"\r\n\r\n")[2].replace(bodies.GROWING.encode(), b""))

    def _run(self, subject: Subject, plan: Plan) -> Measured:
        measured = run(self._program, subject, replace(plan, sequence=self._sequence))
        self._sequence = measured.sequence
        return measured

    def _template(self, body: str, *, stream: bool) -> Path:
        path = self._folder / f"{body}-{'stream' if stream else 'json'}.http"
        if not path.exists():
            of = {"new": f"-{bodies.SEQUENCE}", "shared": ""}.get(body, f"-{bodies.CONNECTION}")
            session = f"{body}{of}"
            messages, size = _SIZES[{"new": "small", "growing": "medium"}.get(body, body)]
            question: bodies.Message = {"role": "user", "content": bodies.question(_QUESTION)}
            asked = [*bodies.history(messages, size), question]
            path.write_bytes(bodies.request(session, asked, stream=stream, growing=body == "growing"))
        return path


def _record(case: Case, size: int, rounds: Sequence[dict[str, Measured]]) -> dict[str, Any]:
    """Return a case's rounds and their medians. Subjects are compared within a round."""
    subjects = {}
    for name in rounds[0]:
        mine = [turns[name] for turns in rounds]
        subjects[name] = {
            "per_second": median(one.per_second for one in mine),
            "cpu_ms": median(one.cpu for one in mine),
            "latency_ms": _medians([one.latency for one in mine]),
            "first_byte_ms": _medians([one.first_byte for one in mine]),
            "rounds": [asdict(one) for one in mine],
        }
    return {
        "name": case.name,
        "body": case.body,
        "bytes": size,
        "connections": case.connections,
        "stream": case.stream,
        "subjects": subjects,
        "compared": {
            base: _compared([(turns[PALIMPSEST], turns[base]) for turns in rounds])
            for base in rounds[0]
            if base != PALIMPSEST and PALIMPSEST in rounds[0]
        },
    }


def _medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: median(one[key] for one in rounds) for key in rounds[0]}


def _compared(pairs: Sequence[tuple[Measured, Measured]]) -> dict[str, float]:
    """Compare the proxy with a baseline in the same rounds. Positive milliseconds: the proxy is slower."""
    return {
        "throughput_ratio": median(ours.per_second / theirs.per_second for ours, theirs in pairs),
        "added_p50_ms": median(ours.latency["p50"] - theirs.latency["p50"] for ours, theirs in pairs),
        "added_p99_ms": median(ours.latency["p99"] - theirs.latency["p99"] for ours, theirs in pairs),
        "added_first_byte_p50_ms": median(ours.first_byte["p50"] - theirs.first_byte["p50"] for ours, theirs in pairs),
        "added_cpu_ms": median(ours.cpu - theirs.cpu for ours, theirs in pairs),
    }
