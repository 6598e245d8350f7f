"""Made-up measurements: an outcome in which everything holds, to be changed by each test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from proxy.demo.measures import Outcome, Run, Step
from proxy.demo.recording import Recording

RECORDING = Recording(
    id="talk",
    source="somewhere",
    license="MIT",
    tools=({"type": "function"},),
    messages=(
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "bye"},
        {"role": "assistant", "content": "farewell"},
    ),
)
FIRST = Step(1, 2, 1000, 2, 1000, 0, (), moved=False, stored=2)
SECOND = Step(2, 4, 3000, 2, 2000, 1500, ("drop_oldest",), moved=True, stored=4)


def run(*steps: Step, **changes: Any) -> Run:
    """Return a run in which everything holds."""
    made = Run("demo", steps, replies_equal=True, stored_equal=True, bytes_equal=True, extended=True)
    return replace(made, **changes)


def outcome(**changes: Any) -> Outcome:
    """Return an outcome in which everything holds."""
    untrimmed = replace(SECOND, forwarded_messages=4, forwarded_tokens=3000, edits=(), moved=False)
    made = Outcome(
        RECORDING, 2500, 1500, 900, run(FIRST, SECOND), run(FIRST, untrimmed, session="demo-off"), 0
    )
    return replace(made, **changes)
