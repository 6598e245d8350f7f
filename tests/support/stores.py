"""Empty SQLite stores: all migrations run once in each process, and their file is copied."""

from __future__ import annotations

import asyncio
import atexit
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from proxy.store import upgrade


def empty_store(file: Path) -> str:
    """Return the URL of a store in `file`, which gets the tables of an empty one if it is not there."""
    if not file.exists():
        shutil.copy(_template(), file)
    return f"sqlite:///{file}"


@cache
def _template() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="palimpsest-test-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = folder / "palimpsest.db"
    with ThreadPoolExecutor(1) as thread:  # the caller may be in an event loop
        thread.submit(lambda: asyncio.run(upgrade(f"sqlite:///{file}"))).result()
    assert list(folder.iterdir()) == [file]  # nothing of it waits in a journal
    return file
