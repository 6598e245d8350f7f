"""Formats the measurements: as text with aligned tables, or as JSON data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final

from msgspec import to_builtins

from proxy.demo.replay import DemoCost, DemoOutcome, DemoRun, DemoStep

_TURNS: Final = ("turn", "requests", "messages", "tokens", "sent on", "tokens", "cached", "stored", "edits", "cut")
_TOTALS: Final = ("", "client sent", "forwarded", "saved", "of it cached", "not cached")
_DOLLARS: Final = ("dollars of input at the prices of", "untrimmed", "trimmed", "saved")
_LEFT: Final = frozenset({"edits", "cut", "", _DOLLARS[0]})  # columns with words; the others have figures


def as_data(outcome: DemoOutcome) -> dict[str, Any]:
    """Return all measurements as JSON data."""
    return {
        "recording": {"id": outcome.recording.id, "source": outcome.recording.source},
        "fixed_tokens": outcome.fixed_tokens,
        "runs": [_run_data(outcome.trimmed, "default"), _run_data(outcome.whole, "off")],
        "policy": {"trigger_tokens": outcome.trigger, "target_tokens": outcome.target},
        "costs": [{**to_builtins(cost), "saved_percent": cost.saved_percent} for cost in outcome.costs],
        "refused": outcome.refused,
        "checks": [{"claim": claim, "holds": holds} for claim, holds in outcome.checks.items()],
        "holds": outcome.holds,
    }


def report(outcome: DemoOutcome) -> Iterator[str]:
    """Yield the lines of the report."""
    recording = outcome.recording
    edits = sorted({edit for step in outcome.trimmed.steps for edit in step.edits})
    yield from (
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
    yield from _aligned(_TURNS, [_turn_row(list(steps)) for _, steps in turns])
    yield from ("", "Prompt tokens of all requests, and of the same conversation untrimmed:", "")
    runs = (("with the policy", outcome.trimmed), ("X-Context-Policy: off", outcome.whole))
    yield from _aligned(_TOTALS, [_total_row(name, run) for name, run in runs])
    yield ""
    yield from _aligned(_DOLLARS, [_cost_row(cost) for cost in outcome.costs])
    yield from (
        "",
        "Tokens are counted by the practice upstream. Its prompt cache is a simulation:",
        "common beginnings from 1,024 tokens on, in blocks of 128, never forgotten. A move",
        "of the cut costs what was cached behind the first message that it changes. Caches",
        "of whole requests (gpt-5.6) lose more: there the built-in policy trims nothing.",
        "",
    )
    for claim, holds in outcome.checks.items():
        yield f"{'ok    ' if holds else 'FAILED'} {claim}"


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


def _cost_row(cost: DemoCost) -> list[str]:
    return [cost.model, f"{cost.whole:.4f}", f"{cost.trimmed:.4f}", f"{cost.saved_percent} %"]


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


def _aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        cells = (
            cell.ljust(width) if name in _LEFT else cell.rjust(width)
            for name, cell, width in zip(columns, row, widths, strict=True)
        )
        yield "  ".join(cells).rstrip()
