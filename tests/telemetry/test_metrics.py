"""Figures for Prometheus: counted by several processes in memory that they share."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from proxy.telemetry import BUCKETS, Meters, shared_memory
from proxy.telemetry.metrics import FAMILIES, totals


def read(text: bytes) -> dict[tuple[str, ...], float]:
    """Return the samples by name and labels."""
    return {
        (sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def count(counts: Meters, name: str, *labels: str, by: float = 1) -> None:
    counts.values[counts.place(name, *labels)] += by


def test_processes_are_added_up() -> None:
    memory = shared_memory(3)
    parent = Meters(memory, 0)
    children: list[int] = []
    for part in (1, 2):
        pid = os.fork()
        if not pid:
            mine = Meters(memory, part)
            for number in range(100):
                count(mine, "palimpsest_tokens", "sent", by=number)
                count(mine, "palimpsest_warnings")
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    count(parent, "palimpsest_warnings", by=5)
    found = read(parent.exposition())
    assert found["palimpsest_warnings_total",] == 205
    assert found["palimpsest_tokens_total", "state=sent"] == 2 * sum(range(100))
    assert found["palimpsest_fail_open_total",] == 0


def test_who_takes_a_place_goes_on_counting_but_for_what_is_under_way() -> None:
    memory = shared_memory(1)
    first = Meters(memory, 0)
    count(first, "palimpsest_requests", "chat", "first", "complete", 'a "policy"\n', by=3)
    first.values[first.under_way] = 7
    second = Meters(memory, 0)
    count(second, "palimpsest_requests", "chat", "first", "complete", 'a "policy"\n')
    found = read(second.exposition())
    labels = ("dialect=chat", "kind=first", 'policy=a "policy"\n', "status=complete")
    assert found["palimpsest_requests_total", *labels] == 4
    assert found["palimpsest_open_exchanges",] == 0


def test_a_name_that_was_begun_and_not_ended_is_not_there() -> None:
    memory = shared_memory(1)
    first = Meters(memory, 0)
    end = first._start + first._used
    memory[end + 1 : end + 60] = b"x" * 59  # its first byte was to come last
    second = Meters(memory, 0)
    count(second, "palimpsest_trims")
    assert totals(memory)["palimpsest_trims", ()] == [1.0]


def test_where_there_is_no_room_nothing_else_is_counted_wrongly() -> None:
    counts = Meters()
    for number in range(9_000):
        count(counts, "palimpsest_edits", f"e{number}")
    values = {labels[0]: value[0] for (name, labels), value in totals(counts._memory).items() if name.endswith("edits")}
    assert len(values) > 8_000
    assert set(values.values()) == {1.0}


def test_a_histogram_has_cumulated_buckets() -> None:
    counts = Meters()
    values: Any = counts.values
    values[counts.storing + 2] += 3
    values[counts.storing + len(BUCKETS)] += 1  # above all bounds
    values[counts.storing + len(BUCKETS) + 1] += 400.5
    found = read(counts.exposition())
    assert found["palimpsest_store_seconds_bucket", "le=0.001"] == 0
    assert found["palimpsest_store_seconds_bucket", "le=0.0025"] == 3
    assert found["palimpsest_store_seconds_bucket", "le=300.0"] == 3
    assert found["palimpsest_store_seconds_bucket", "le=+Inf"] == 4
    assert found["palimpsest_store_seconds_count",] == 4
    assert found["palimpsest_store_seconds_sum",] == 400.5


def test_every_metric_is_told_from_the_start() -> None:
    told = Meters().exposition().decode()
    for name in FAMILIES:
        assert f"# HELP {name}" in told


def test_what_the_examples_ask_for_is_told() -> None:
    told = {name for name, *_ in read(Meters().exposition())}
    told |= {f"{name}_total" for name, family in FAMILIES.items() if family.kind == "counter"}
    for path in Path("examples/monitoring").iterdir():
        asked = set(re.findall(r"palimpsest_\w+", path.read_text(encoding="utf-8")))
        assert asked
        assert asked <= told, path
