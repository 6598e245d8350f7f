"""Metrics for Prometheus, summed over all workers.

All processes share one block of memory. Each process counts in its own part, and the process that serves `/metrics`
adds up the parts. Counting is an addition to an array element, without a lock or a call. A worker that replaces another
one continues in its part.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, TypeAlias

import orjson
from msgspec import Struct

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

Labels: TypeAlias = tuple[str, ...]

_PLACES: Final = 8192  # figures of one process
_VALUES: Final = _PLACES * 8  # bytes
_NAMES: Final = 1_048_576  # bytes for their names; unused pages take no memory
_PART: Final = _VALUES + _NAMES
BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Upper bounds of histograms, in seconds."""


class Family(Struct, frozen=True, kw_only=True):
    """One metric."""

    kind: str  # `counter`, `gauge` or `histogram`
    help: str
    labels: Labels = ()


FAMILIES: Final = {
    "palimpsest_requests": Family(
        kind="counter", help="Exchanges that have ended.", labels=("dialect", "kind", "status", "policy")
    ),
    "palimpsest_tokens": Family(
        kind="counter",
        help="Tokens: before trimming and as sent (as estimated), and as upstream reported them.",
        labels=("state",),
    ),
    "palimpsest_dollars": Family(
        kind="counter",
        help="Dollars: paid, would have been paid untrimmed, their difference (saved), saved by the provider's cache, "
        "paid for summaries. What is saved can fall: for a rate, take would_have_paid less paid.",
        labels=("state",),
    ),
    "palimpsest_trims": Family(kind="counter", help="Requests at which the cut moved."),
    "palimpsest_edits": Family(kind="counter", help="Requests that an edit changed.", labels=("edit",)),
    "palimpsest_warnings": Family(kind="counter", help="Warnings of exchanges."),
    "palimpsest_recalls": Family(kind="counter", help="Calls of the proxy's own tools."),
    "palimpsest_cache_misses": Family(
        kind="counter", help="Requests whose beginning the provider's cache did not hold.", labels=("cause",)
    ),
    "palimpsest_summaries": Family(kind="counter", help="Attempts at a summary by a model.", labels=("status",)),
    "palimpsest_fail_open": Family(
        kind="counter", help="Requests sent again untrimmed, after upstream refused them trimmed."
    ),
    "palimpsest_spooled": Family(kind="counter", help="Exchanges kept on disk until the store can take them."),
    "palimpsest_refused": Family(kind="counter", help="Requests beyond a budget.", labels=("budget",)),
    "palimpsest_added_seconds": Family(kind="histogram", help="Time from the end of a request to asking upstream."),
    "palimpsest_upstream_seconds": Family(kind="histogram", help="Time from asking upstream to the end of its answer."),
    "palimpsest_store_seconds": Family(kind="histogram", help="Time that storing the end of an exchange took."),
    "palimpsest_store_queue": Family(kind="gauge", help="Exchanges whose end waits to be stored."),
    "palimpsest_open_exchanges": Family(kind="gauge", help="Exchanges under way, streams among them."),
}


_SUMS: Final = (
    *(("palimpsest_tokens", state, f"tokens_{state}") for state in ("before", "sent", "input", "cached", "written")),
    ("palimpsest_tokens", "output", "tokens_output"),
    ("palimpsest_dollars", "paid", "cost"),
    ("palimpsest_dollars", "would_have_paid", "cost"),
    ("palimpsest_dollars", "would_have_paid", "cost_saved"),
    ("palimpsest_dollars", "saved", "cost_saved"),
    ("palimpsest_dollars", "cache_saved", "cost_cache_saved"),
    *((f"palimpsest_{name}", "", name) for name in ("trims", "warnings", "recalls")),
)
"""Sums over exchanges: the metric, its label, and the figure of the exchange that is added."""


class ExchangePlaces(Struct, frozen=True, kw_only=True):
    """The places in which exchanges of one dialect, kind, status and policy are counted."""

    requests: int
    sums: tuple[tuple[int, str], ...]  # places, each with the name of the exchange's figure that is added
    added: int
    upstream: int


class Meters:
    """The metrics of one process, in its part of the shared memory."""

    def __init__(self, memory: mmap.mmap | None = None, part: int = 0) -> None:
        """Count in part `part` of `memory`, or in private memory if it is None."""
        self._memory = shared_memory(1) if memory is None else memory
        start = part * _PART
        view = memoryview(self._memory)
        self.values: Final = view[start : start + _VALUES].cast("d")
        """The figures by place. Place 0 takes everything that there is no room for."""
        self._start = start + _VALUES
        self._places: dict[tuple[str, Labels], int] = {}
        self._free = 1  # the next place
        self._used = 0  # bytes of names
        self.exchanges: dict[tuple[str, str, str, str], ExchangePlaces] = {}
        """The places of exchanges, by dialect, kind, status and policy."""
        for name, labels in _names(self._memory, self._start):
            self._note(name, labels)
        self.queue: Final = self.place("palimpsest_store_queue")
        self.under_way: Final = self.place("palimpsest_open_exchanges")
        self.storing: Final = self.place("palimpsest_store_seconds")
        for gauge in (self.queue, self.under_way):
            self.values[gauge] = 0.0  # an earlier process may have left another value

    def exposition(self) -> bytes:
        """Return the metrics of all processes in Prometheus's text format."""
        return exposition(self._memory)

    def place(self, name: str, *labels: str) -> int:
        """Return the place of a figure. A histogram's place is that of its first bucket."""
        found = self._places.get((name, labels))
        return self._new(name, labels) if found is None else found

    def add(self, name: str, *labels: str, amount: float = 1.0) -> None:
        """Add to a figure by name. For rare events, or figures with many labels; others use `place` once."""
        self.values[self.place(name, *labels)] += amount

    def of_exchanges(self, dialect: str, kind: str, status: str, policy: str) -> ExchangePlaces:
        """Return the places of such exchanges, and remember them in `exchanges`."""
        found = self.exchanges[dialect, kind, status, policy] = ExchangePlaces(
            requests=self.place("palimpsest_requests", dialect, kind, status, policy),
            sums=tuple([(self.place(metric, *filter(None, (label,))), name) for metric, label, name in _SUMS]),
            added=self.place("palimpsest_added_seconds"),
            upstream=self.place("palimpsest_upstream_seconds"),
        )
        return found

    def _new(self, name: str, labels: Labels) -> int:
        line = orjson.dumps([name, *labels]) + b"\n"
        end = self._start + self._used
        if len(line) >= _NAMES - self._used or self._free + _size(name) > _PLACES:
            return 0
        # A reader sees the whole line or nothing: the first byte is written last, and a zero follows the line.
        self._memory[end + 1 : end + len(line) + 1] = line[1:] + b"\0"
        self._memory[end] = line[0]
        return self._note(name, labels)

    def _note(self, name: str, labels: Labels) -> int:
        place = self._places[name, labels] = self._free
        self._free += _size(name)
        self._used += len(orjson.dumps([name, *labels])) + 1
        return place


def shared_memory(parts: int) -> mmap.mmap:
    """Return memory for `parts` processes. Processes that are forked after this call share it."""
    return mmap.mmap(-1, parts * _PART)


def _size(name: str) -> int:
    return len(BUCKETS) + 2 if FAMILIES[name].kind == "histogram" else 1


def _names(memory: mmap.mmap, start: int) -> Iterator[tuple[str, Labels]]:
    """Yield names and labels of the figures in a part, in the order of their places."""
    at = start
    while memory[at]:
        end = memory.find(b"\n", at)
        name, *labels = orjson.loads(memory[at:end])
        yield name, tuple(labels)
        at = end + 1


def totals(memory: mmap.mmap) -> dict[tuple[str, Labels], list[float]]:
    """Return the sums over all processes by name and labels. A histogram has all its values, others have one."""
    found: dict[tuple[str, Labels], list[float]] = {}
    for start in range(0, len(memory), _PART):
        values = memoryview(memory)[start : start + _VALUES].cast("d")
        place = 1
        for name, labels in _names(memory, start + _VALUES):
            size = _size(name)
            sums = found.setdefault((name, labels), [0.0] * size)
            for number in range(size):
                sums[number] += values[place + number]
            place += size
    return found


def exposition(memory: mmap.mmap) -> bytes:
    """Return the metrics of all processes in Prometheus's text format."""
    # Imported here, because it loads an HTTP server and is rarely needed.
    from prometheus_client import CollectorRegistry, generate_latest  # noqa: PLC0415
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily  # noqa: PLC0415

    sums = totals(memory)

    class _Samples:
        def collect(self) -> Iterator[Metric]:
            for name, family in FAMILIES.items():
                if family.kind == "histogram":
                    values = sums.get((name, ()), [0.0] * _size(name))
                    yield HistogramMetricFamily(name, family.help, _buckets(values), values[-1])
                    continue
                made = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
                metric = made(name, family.help, labels=family.labels)
                for (other, labels), values in sorted(sums.items()):
                    if other == name:
                        metric.add_metric(labels, values[0])
                if not family.labels and (name, ()) not in sums:
                    metric.add_metric((), 0.0)
                yield metric

    registry = CollectorRegistry(auto_describe=False)
    figures: Collector = _Samples()
    registry.register(figures)
    return generate_latest(registry)


def _buckets(values: list[float]) -> list[tuple[str, float]]:
    """Return the buckets with cumulative counts."""
    buckets: list[tuple[str, float]] = []
    count = 0.0
    for bound, number in zip((*map(str, map(float, BUCKETS)), "+Inf"), values, strict=False):
        count += number
        buckets.append((bound, count))
    return buckets
