"""Latency of appends by the number of stored messages. The proxy sends the same amount upstream at every size.

A client sends one new message; the proxy adds the stored ones, trimmed by `drop_oldest`. The sizes alternate
request by request on one connection, so that other load on the machine affects all of them. Each size
follows every other one equally often. One request with the whole history stores a session. The two
smaller sizes use a new session in each phase, since appends make a session longer: a session of 100 messages
grows by at most a third in a phase.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import mean
from typing import Any, Final

from benchmarks import bodies
from benchmarks.compiling import Programs
from benchmarks.load import Plan, run
from benchmarks.subjects import Subject
from proxy.store.packing import unpack

Say = Callable[[str], None]

SIZES: Final = (100, 1_000, 10_000, 100_000)
"""Numbers of messages stored before the first append."""
_REUSED: Final = 10_000
"""From this size on, all phases share one session."""
POLICIES: Final = {
    "appends": {"trigger": {"tokens": 3000}, "target": {"tokens": 2000}, "edits": [{"type": "drop_oldest"}]}
}
"""Both limits are below the tokens of 100 messages, so that all sizes send the same amount."""
_BYTES: Final = 260
"""Size of a message including its JSON; about 45 tokens."""
_QUESTION: Final = 220
_APPENDS: Final = 14
"""Appends of each size that are measured in a phase."""
_WARMUP: Final = 2


_RECEIPTS: Final = (
    "SELECT receipt, exchanges.tokens_sent FROM exchanges JOIN sessions USING (session) "
    "WHERE sessions.id = ? AND kind = 'append'"
)


def measure(
    programs: Programs,
    subject: Subject,
    folder: Path,
    *,
    store: str,
    phases: int,
    seconds: float,
    sizes: Sequence[int],
    say: Say,
) -> dict[str, Any]:
    """Measure at least one phase, then more until there were `phases` or `seconds` have passed.

    `store` is the name under which the subject was started: its database file is `{store}.db` in `folder`.

    Raises:
        RuntimeError: the proxy gave a wrong answer.
    """
    samples: dict[int, list[float]] = {size: [] for size in sizes}
    seeded: dict[int, float] = {}
    names: dict[int, list[str]] = {size: [] for size in sizes}
    sequence, began = 1, 0.0
    phase = 0
    while phase < phases and (phase == 0 or time.monotonic() - began < seconds):
        templates = []
        for size in sizes:
            name = f"stored-{size}-{0 if size >= _REUSED else phase}"
            if name not in names[size]:
                say(f"append: storing {size:,} messages")
                names[size].append(name)
                plan = Plan(templates=[_history(folder, name, size)], requests=1, sequence=sequence)
                stored = run(programs.load, subject, plan)
                sequence = stored.sequence
                seeded.setdefault(size, stored.latency["mean"] / 1000)
            templates.append(_append(folder, name))
        say(f"append: phase {phase + 1}")
        began = began or time.monotonic()
        count = len(sizes)
        order = turns(count)
        plan = Plan(
            templates=[templates[number] for number in order],
            cycle=True,
            warmup=_WARMUP * count,
            requests=_APPENDS * count,
            seconds=max(seconds - (time.monotonic() - began), 1.0),
            least=count,
            sequence=sequence,
        )
        measured = run(programs.load, subject, plan)
        sequence = measured.sequence
        for number, latencies in zip(order, measured.samples, strict=True):
            samples[sizes[number]] += latencies
        phase += 1
    lines = [
        _line(size, samples[size], seeded[size], [_receipts(folder / f"{store}.db", name) for name in names[size]])
        for size in sizes
    ]
    for line in lines:
        line["ratio_p50"] = line["p50_ms"] / lines[0]["p50_ms"]
        line["ratio_p99"] = line["p99_ms"] / lines[0]["p99_ms"]
    return {"phases": phase, "policy": POLICIES, "sizes": lines}


def turns(count: int) -> list[int]:
    """Return an order for `count` sizes: rows of all sizes, in which each follows every other equally often."""
    zigzag = [(place + 1) // 2 if place % 2 else -place // 2 for place in range(count)]
    rows = [[(number + shift) % count for number in zigzag] for shift in range(count)]
    if count % 2:
        rows += [row[::-1] for row in rows]
    return [number for row in rows for number in row]


def _line(
    size: int, latencies: Sequence[float], seeding: float, receipts: Sequence[Sequence[dict[str, Any]]]
) -> dict[str, Any]:
    appended = [one for session in receipts for one in session]
    ordered = sorted(latencies)
    return {
        "stored": size,
        "requests": len(ordered),
        "p50_ms": ordered[(len(ordered) - 1) // 2],
        "p99_ms": ordered[(len(ordered) - 1) * 99 // 100],
        "mean_ms": mean(ordered),
        "moves": sum(1 for one in appended if (one["cut"] or {}).get("moved")),
        "appends": len(appended),
        "tokens_sent": mean(one["tokens_sent"] for one in appended),
        "longest": max(one["messages_before"] for one in appended),
        "seeding_seconds": seeding,
    }


def _receipts(store: Path, session: str) -> list[dict[str, Any]]:
    """Return the receipts of a session's appends, as they are stored.

    They are not read over HTTP, where each dropped message is a line of its own: a trim can drop 100,000.
    """
    with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as connection:
        rows = connection.execute(_RECEIPTS, (session,)).fetchall()
    return [json.loads(unpack(receipt)) | {"tokens_sent": tokens} for receipt, tokens in rows]


def _history(folder: Path, name: str, messages: int) -> Path:
    """Write the request that stores a history of `messages` messages, of which its answer is the last."""
    asked: list[bodies.Message] = [
        {"role": "assistant", "content": bodies.words(_BYTES - 40, number)}
        if number % 2
        else {"role": "user", "content": bodies.words(_BYTES - 35, number)}
        for number in range(messages - 2)
    ]
    asked.append({"role": "user", "content": bodies.question(_QUESTION)})
    path = folder / "stored.http"
    path.write_bytes(bodies.request(name, asked))
    return path


def _append(folder: Path, name: str) -> Path:
    path = folder / f"{name}.http"
    question: bodies.Message = {"role": "user", "content": bodies.question(_QUESTION)}
    path.write_bytes(bodies.request(name, [question]))
    return path
