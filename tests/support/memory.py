"""A folder in memory, where the machine has one: on a disk each commit waits, and each file costs more.

No test takes the power away, and what a killed process has written is there as it is on a disk. What tests leave that
were killed themselves stays in memory until somebody removes it, or the machine starts again.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

_MEMORY: Final = Path("/dev/shm")
_ROOM: Final = 4_000_000_000
"""Bytes that must be free there: what tests and their databases have at a time, with room to spare."""


def memory_folder() -> Path | None:
    """Return a folder in memory that has room; None without one."""
    has_room = _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ROOM
    return _MEMORY if has_room else None
