"""Waits for a condition, with a deadline. No test measures how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(true: Callable[[], object], what: str, seconds: float = 60) -> None:
    """Return once `true()` holds. After `seconds`, fail and say that `what` did not happen."""

    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)
