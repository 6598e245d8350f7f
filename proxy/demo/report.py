"""The measurements for a reader: a table on a terminal, aligned text elsewhere, JSON for a script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, Final

from msgspec import to_builtins
from rich import box
from rich.console import Console
from rich.table import Table

from proxy.demo.replay import DemoOutcome, DemoRun, DemoStep

_TURNS: Final = ("turn", "requests", "messages", "tokens", "sent on", "tokens", "cached", "stored", "edits", "cut")
_TOTALS: Final = ("", "client sent", "forwarded", "saved", "of it cached", "not cached")
_LEFT: Final = frozenset({"edits", "cut", ""})
"""Columns of words; the others hold figures."""


def as_data(outcome: DemoOutcome) -> dict[str, Any]:
    """Return everything that was measured, as JSON data."""
    return {
        "recording": {"id": outcome.recording.id, "source": outcome.recording.source},
        "fixed_tokens": outcome.fixed_tokens,
        "runs": [_run_data(outcome.trimmed, "default"), _run_data(outcome.whole, "off")],
        "policy": {"trigger_tokens": outcome.trigger, "target_tokens": outcome.target},
        "refused": outcome.refused,
        "checks": [to_builtins(check) for check in outcome.checks],
        "holds": outcome.holds,
    }


def show(outcome: DemoOutcome, console: Console, look: Iterable[str]) -> None:
    """Print the report; `look` are lines at its end that say where to look further."""
    recording = outcome.recording
    edits = sorted({edit for step in outcome.trimmed.steps for edit in step.edits})
    _say(
        console,
        f"A recorded conversation ({recording.id}, {len(recording.tools)} tools) through the proxy to a",
        f"practice upstream: {len(recording.replies)} requests, each with its history, as SDKs send it.",
        f"The policy trims requests above {outcome.trigger:,} tokens, down to {outcome.target:,}.",
        f"{outcome.fixed_tokens:,} tokens of each are instructions and tools, which stay.",
        "",
        "Each turn of the user, at its last request: what the client sent, what was sent",
        "on, its share in the upstream's prompt cache, messages stored, edits that worked",
        f"({', '.join(f'{_letter(edit)} {edit}' for edit in edits)}):",
        "",
    )
    turns = groupby(outcome.trimmed.steps, key=lambda step: step.turn)
    _table(console, _TURNS, [_turn_row(list(steps)) for _, steps in turns])
    _say(console, "", "Prompt tokens of all requests, and of the same conversation untrimmed:", "")
    runs = (("with the policy", outcome.trimmed), ("X-Context-Policy: off", outcome.whole))
    _table(console, _TOTALS, [_total_row(name, run) for name, run in runs])
    _say(
        console,
        "",
        "Tokens are counted by the practice upstream. Its prompt cache is a simulation:",
        "common beginnings from 1,024 tokens on, in blocks of 128, never forgotten. A move",
        "of the cut costs what was cached behind the first message that it changes.",
        "",
    )
    for check in outcome.checks:
        _say(console, f"{'ok    ' if check.holds else 'FAILED'} {check.claim}")
    _say(console, "", *look)


def _turn_row(steps: Sequence[DemoStep]) -> list[str]:
    last = steps[-1]
    cached = sum(step.cached_tokens for step in steps) / sum(step.forwarded_tokens for step in steps)
    sizes = (last.messages, last.tokens, last.forwarded_messages, last.forwarded_tokens)
    return [
        *(str(last.turn), str(len(steps)), *(f"{size:,}" for size in sizes)),
        *(f"{cached:.0%}", str(last.stored), " ".join(sorted(map(_letter, last.edits)))),
        "moved" if any(step.moved for step in steps) else "",
    ]


def _letter(edit: str) -> str:
    return edit[0].upper()


def _total_row(name: str, run: DemoRun) -> list[str]:
    saved = f"{run.saved_percent} %"
    return [name, f"{run.tokens:,}", f"{run.forwarded:,}", saved, f"{run.cached:,}", f"{run.forwarded - run.cached:,}"]


def _run_data(run: DemoRun, policy: str) -> dict[str, Any]:
    return {
        "session": run.session,
        "policy": policy,
        "requests": len(run.steps),
        "tokens": run.tokens,
        "forwarded_tokens": run.forwarded,
        "cached_tokens": run.cached,
        "saved_percent": run.saved_percent,
        "moves": run.moves,
        "steps": [to_builtins(step) for step in run.steps],
    }


def _table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: with lines on a terminal, aligned text elsewhere."""
    if not console.is_terminal:
        widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
        for row in (columns, *rows):
            cells = (
                cell.ljust(width) if name in _LEFT else cell.rjust(width)
                for name, cell, width in zip(columns, row, widths, strict=True)
            )
            _say(console, "  ".join(cells).rstrip())
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
