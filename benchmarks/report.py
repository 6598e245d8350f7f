"""The results as tables: on the terminal, and as Markdown for the documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.subjects import ALL, CLIENT, NO_PROXY, PASSTHROUGH

_BEGIN: Final = "<!-- bench: begin -->"
_END: Final = "<!-- bench: end -->"

Rows = list[list[str]]


def markdown(results: dict[str, Any]) -> str:
    """Return all results as Markdown."""
    parts = [_conditions(results)]
    for title, rows in _tables(results):
        head, *body = rows
        lines = [head, ["---"] * len(head), *body]
        parts.append(f"**{title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(parts) + "\n"


def show(results: dict[str, Any], console: Console) -> None:
    """Print all results on the terminal."""
    console.print(_conditions(results))
    for title, (head, *body) in _tables(results):
        table = Table(*head, title=title, title_justify="left")
        for line in body:
            table.add_row(*line)
        console.print(table)


def publish(text: str, page: Path) -> None:
    """Replace the part of the page that is marked for the tables.

    Raises:
        ValueError: the page has no such mark.
    """
    before, begin, rest = page.read_text("utf-8").partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{page} has no place for the tables: {_BEGIN} … {_END}")
    page.write_text(f"{before}{_BEGIN}\n\n{text}\n{_END}{after}", "utf-8")


def _conditions(results: dict[str, Any]) -> str:
    machine = results["machine"]
    effort = results["effort"]
    turns = f"{effort['rounds']} rounds of {effort['seconds']:g} s for each line and subject, medians of them"
    if results.get("profile"):
        turns = f"{results['profile']['requests']:,} requests under {results['profile']['by']}"
    return (
        f"{machine['date']}, {machine['cores']} cores ({machine['cpu']}), {machine['system']}, "
        f"Python {machine['python']}, uvicorn {machine['uvicorn']}, aiohttp {machine['aiohttp']}; "
        f"load average before {machine['load']:.1f}; {turns}."
    )


def _tables(results: dict[str, Any]) -> list[tuple[str, Rows]]:
    cases = results["cases"]
    whole = [case for case in cases if not case["stream"]]
    streams = [case for case in cases if case["stream"]]
    made = [
        ("JSON: milliseconds to the end (p50 / p99), requests per second", _latencies(whole, "latency_ms")),
        ("Streams: milliseconds to the first byte of the body (p50 / p99), requests per second",
         _latencies(streams, "first_byte_ms")),
        ("Palimpsest against the passthrough and against no proxy", _comparison(cases)),
        ("CPU milliseconds of the process for each request", _cpu(cases)),
        ("Appends, by what is stored; equally much is sent", _appends(results.get("appends"))),
        ("The first request of a session, its first trim, and small requests beside them (p50 / longest)",
         _first(results.get("first"))),
        ("Start and memory of all processes (RSS / PSS), by the number of workers", _memory(results.get("memory"))),
        ("Bytes on disk, beside an empty store, of recorded conversations", _disk(results.get("disk"))),
        ("Where the time of a small request goes", _profile(results.get("profile"))),
    ]  # fmt: skip
    return [(title, rows) for title, rows in made if len(rows) > 1]


def _latencies(cases: Sequence[dict[str, Any]], measure: str) -> Rows:
    names = _names(cases)
    rows = [["body", "connections", *names]]
    for case in cases:
        cells = [
            f"{_ms(of[measure]['p50'])} / {_ms(of[measure]['p99'])}, {of['per_second']:,.0f}/s" if of else ""
            for of in (case["subjects"].get(name) for name in names)
        ]
        rows.append([_body(case), str(case["connections"]), *cells])
    return rows


def _comparison(cases: Sequence[dict[str, Any]]) -> Rows:
    rows = [
        [
            "body",
            "connections",
            "throughput: × passthrough",
            "× AsyncClient",
            "added p50 to passthrough",
            "added p50 to no proxy",
            "first byte: added to passthrough",
        ]
    ]
    for case in cases:
        compared = case["compared"]
        if not compared:
            continue
        plain, client, none = (compared.get(name, {}) for name in (PASSTHROUGH, CLIENT, NO_PROXY))
        rows.append(
            [
                _body(case) + (", stream" if case["stream"] else ""),
                str(case["connections"]),
                _ratio(plain.get("throughput_ratio")),
                _ratio(client.get("throughput_ratio")),
                _added(plain.get("added_p50_ms")),
                _added(none.get("added_p50_ms")),
                _added(plain.get("added_first_byte_p50_ms")) if case["stream"] else "",
            ]
        )
    return rows


def _cpu(cases: Sequence[dict[str, Any]]) -> Rows:
    names = _names(cases)
    rows = [["body", "connections", *names]]
    for case in cases:
        if case["body"] == "growing":  # too few requests to measure with a clock of 100 ticks per second
            continue
        measured = [case["subjects"].get(name) for name in names]
        cells = [_ms(of["cpu_ms"]) if of else "" for of in measured]
        rows.append([_body(case) + (", stream" if case["stream"] else ""), str(case["connections"]), *cells])
    return rows


def _appends(appends: dict[str, Any] | None) -> Rows:
    rows = [["stored", "p50", "p99", "p50 × smallest", "p99 × smallest", "tokens sent", "moves of the cut"]]
    rows += [
        [
            f"{line['stored']:,}",
            f"{_ms(line['p50_ms'])} ms",
            f"{_ms(line['p99_ms'])} ms",
            _ratio(line["ratio_p50"]),
            _ratio(line["ratio_p99"]),
            f"{line['tokens_sent']:,.0f}",
            f"{line['moves']} in {line['appends']}",
        ]
        for line in (appends or {"sizes": []})["sizes"]
    ]
    return rows


def _first(lines: Sequence[dict[str, Any]] | None) -> Rows:
    rows = [["request", "messages", "MB", "takes", "CPU", "small requests before", "beside it"]]
    for line in lines or ():
        kind = {"first": "first", "trim": "first trim"}[line["kind"]]
        beside = f"{_ms(1000 * line['waited'])} / {_ms(1000 * line['longest'])} ms"
        times = [f"{line['seconds']:.2f} s", f"{line['cpu']:.2f} s", f"{_ms(1000 * line['usual'])} ms", beside]
        rows.append([kind, f"{line['messages']:,}", f"{line['bytes'] / 1e6:.1f}", *times])
    return rows


def _memory(lines: Sequence[dict[str, Any]] | None) -> Rows:
    rows = [["workers", "serves after", "idle", "after a load"]]
    for line in lines or ():
        sizes = [f"{line[when]['rss_mb']:.0f} / {line[when]['pss_mb']:.0f} MB" for when in ("idle", "loaded")]
        rows.append([str(line["workers"]), f"{line['ready_seconds']:.1f} s", *sizes])
    return rows


def _disk(lines: Sequence[dict[str, Any]] | None) -> Rows:
    rows = [["store", "messages", "JSON per message", "stored per message", "× JSON"]]
    for line in lines or ():
        each = [f"{line[what] / line['messages']:,.0f}" for what in ("raw", "stored")]
        rows.append([line["store"], f"{line['messages']:,}", *each, _ratio(line["stored"] / line["raw"])])
    return rows


def _profile(profile: dict[str, Any] | None) -> Rows:
    rows = [["where", "share", "ms for each request"]]
    rows += [
        [line["room"], f"{100 * line['share']:.1f} %", _ms(line["ms"])] for line in (profile or {"rooms": []})["rooms"]
    ]
    return rows


def _names(cases: Sequence[dict[str, Any]]) -> list[str]:
    return [name for name in ALL if any(name in case["subjects"] for case in cases)]


def _body(case: dict[str, Any]) -> str:
    size = case["bytes"]
    return f"{case['body']}, {size / 1e6:.2f} MB" if size >= 1e6 else f"{case['body']}, {size / 1e3:.0f} kB"


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _added(value: float | None) -> str:
    return "" if value is None else f"{'+' if value >= 0 else '−'}{_ms(abs(value))} ms"
