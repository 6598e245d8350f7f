"""Made-up measurements: an outcome in which everything holds, to be changed by each test."""

from __future__ import annotations

from typing import Any

import uvicorn
from msgspec.structs import replace

from proxy.demo import DemoOutcome
from proxy.demo.replay import DemoRun, DemoStep, Recording


def plain(application: Any) -> uvicorn.Config:
    """Return uvicorn's settings for an application without start-up and shutdown."""
    return uvicorn.Config(application, lifespan="off", log_config=None, access_log=False)


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
FIRST = DemoStep(
    turn=1,
    messages=2,
    tokens=1000,
    forwarded_messages=2,
    forwarded_tokens=1000,
    cached_tokens=0,
    edits=(),
    moved=False,
    stored=2,
)
SECOND = DemoStep(
    turn=2,
    messages=4,
    tokens=3000,
    forwarded_messages=2,
    forwarded_tokens=2000,
    cached_tokens=1500,
    edits=("drop_oldest",),
    moved=True,
    stored=4,
)


def run(*steps: DemoStep, **changes: Any) -> DemoRun:
    """Return a run in which everything holds."""
    made = DemoRun(session="demo", steps=steps, replies_equal=True, stored_equal=True, bytes_equal=True, extended=True)
    return replace(made, **changes)


def outcome(**changes: Any) -> DemoOutcome:
    """Return an outcome in which everything holds."""
    untrimmed = replace(SECOND, forwarded_messages=4, forwarded_tokens=3000, edits=(), moved=False)
    made = DemoOutcome(
        recording=RECORDING,
        trigger=2500,
        target=1500,
        fixed_tokens=900,
        trimmed=run(FIRST, SECOND),
        whole=run(FIRST, untrimmed, session="demo-off"),
        refused=0,
    )
    return replace(made, **changes)
