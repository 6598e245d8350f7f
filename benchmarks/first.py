"""The first request of a long session, and its first trim: how long they take, and how long other requests wait.

    first   a long session that the proxy has not seen before; the built-in policy trims it if it is long enough
    trim    the same messages in another session, which was stored without trimming

Meanwhile another client sends small requests, one after the other.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Final

import orjson

from benchmarks import bodies
from benchmarks.subjects import Subject

Say = Callable[[str], None]

SIZES: Final = (1_000, 10_000)
"""Numbers of messages in the session."""
_BYTES: Final = 730
"""Size of a message."""
_PAUSE: Final = 0.005
"""Seconds between two small requests."""
_SECONDS: Final = 60
_OFF: Final = {"X-Context-Policy": "off"}


def measure(subject: Subject, rounds: int, say: Say, sizes: Sequence[int] = SIZES) -> list[dict[str, Any]]:
    """Return a line for each kind of request and size: medians over `rounds`, the longest wait of others included.

    Raises:
        RuntimeError: the proxy gave a wrong answer.
    """
    lines: list[dict[str, Any]] = []
    for size in sizes:
        say(f"first: {size:,} messages")
        asked = [*bodies.history(size, size * _BYTES), {"role": "user", "content": "Go on."}]
        body = orjson.dumps({"model": "gpt-4o", "messages": asked})
        first: list[dict[str, float]] = []
        trim: list[dict[str, float]] = []
        for number in range(rounds):
            first.append(_timed(subject, f"first-{size}-{number}", body))
            _ask(subject.port, f"trim-{size}-{number}", body, _OFF)
            trim.append(_timed(subject, f"trim-{size}-{number}", body))
        for kind, times in (("first", first), ("trim", trim)):
            middle = {name: median(one[name] for one in times) for name in times[0]}
            lines.append({"kind": kind, "messages": size, "bytes": len(body), **middle})
    return lines


def _timed(subject: Subject, session: str, body: bytes) -> dict[str, float]:
    """Send a request while another thread sends small ones; return times in seconds."""
    waited: list[float] = []
    stop = threading.Event()

    def others() -> None:
        number = 0
        while not stop.wait(_PAUSE):
            number += 1
            small = orjson.dumps({"model": "gpt-4o", "messages": [{"role": "user", "content": f"Hello {number}."}]})
            began = time.perf_counter()
            _ask(subject.port, f"beside-{session}-{number}", small)
            waited.append(time.perf_counter() - began)

    beside = threading.Thread(target=others)
    beside.start()
    time.sleep(20 * _PAUSE)
    usual = len(waited)
    cpu, began = subject.cpu_seconds(), time.perf_counter()
    _ask(subject.port, session, body)
    took, cpu = time.perf_counter() - began, subject.cpu_seconds() - cpu
    stop.set()
    beside.join()
    return {
        "seconds": took,
        "cpu": cpu,
        "usual": median(waited[:usual]) if usual else 0.0,
        "waited": median(waited[usual:]) if waited[usual:] else 0.0,
        "longest": max(waited[usual:], default=0.0),
    }


def _ask(port: int, session: str, body: bytes, headers: dict[str, str] | None = None) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_SECONDS)
    try:
        named = {"content-type": "application/json", "X-Session-ID": session, **(headers or {})}
        connection.request("POST", "/v1/chat/completions", body, named)
        answer = connection.getresponse()
        answer.read()
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise RuntimeError(f"{session}: answered with {answer.status}")
