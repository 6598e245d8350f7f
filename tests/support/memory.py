"""A folder in memory, if the machine has one. On a disk each commit waits, and each file costs more.

No test simulates a loss of power, and what a killed process wrote survives as it does on a disk. If the test run itself
is killed, its files stay in memory until someone removes them or the machine restarts.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

_MEMORY: Final = Path("/dev/shm")
_ROOM: Final = 4_000_000_000
"""Bytes that must be free there: the peak use of the tests and their databases, with a margin."""


def memory_folder() -> Path | None:
    """Return a folder in memory with enough free space, or None if there is none."""
    has_room = _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ROOM
    return _MEMORY if has_room else None
