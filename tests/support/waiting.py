"""Waiting for what must become true, with a deadline: no test measures how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(true: Callable[[], object], what: str, seconds: float = 60) -> None:
    """Return once `true()` holds; fail after `seconds`, saying `what` did not happen."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)
