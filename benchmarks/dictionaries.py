"""Train the dictionaries of `proxy/store/packing.py` on a store: `python -m benchmarks.dictionaries STORE.db`.

Fill the store first, with conversations whose licence permits to copy from them (`python -m benchmarks.disk --keep
STORE.db FILE…`): a dictionary holds pieces of what it was trained on. THIRD_PARTY.md names the sources of those that
are shipped. A new dictionary gets a new number in its name: rows that were packed with the old one need that.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import zstandard
from sqlalchemy import Column, select

from proxy.store.schema import BODIES, EXCHANGES, INSTRUCTIONS, NODES
from proxy.store.sqlite import SqliteConnection, connect

_OF_A_SESSION: Final = 200_000  # bytes: a long session must not crowd out the others
_OF_A_TEXT: Final = 4_000
_A_HOME: Final = re.compile(rb"/(?:root|home|Users)/[\w.-]+")
"""Paths of one machine or person: no dictionary needs them."""
_SIZES: Final = {"texts": 65_536, "records": 8_192}


def main(words: Sequence[str] | None = None) -> int:
    """Write both dictionaries into a folder."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dictionaries", description=__doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("--into", type=Path, default=Path.cwd())
    parser.add_argument("--number", type=int, required=True, help="of the new dictionaries")
    given = parser.parse_args(words)
    with closing(connect(given.store)) as raw:
        connection = SqliteConnection(raw)
        columns: dict[str, tuple[Column[Any], ...]] = {
            "texts": (BODIES.c.text, NODES.c.text, INSTRUCTIONS.c.messages),
            "records": (EXCHANGES.c.receipt, EXCHANGES.c.parameters),
        }
        for name, of in columns.items():
            samples: list[Any] = [sample for column in of for sample in _samples(connection, column)]
            trained = zstandard.train_dictionary(_SIZES[name], samples)
            path = given.into / f"{name}-{given.number}.zdict"
            path.write_bytes(trained.as_bytes())
            print(f"{path}: {len(trained.as_bytes()):,} bytes from {len(samples):,} texts")
    return 0


def _samples(connection: SqliteConnection, column: Column[Any]) -> Iterable[bytes]:
    taken: defaultdict[str, int] = defaultdict(int)
    table = column.table
    for session, text in connection.execute(select(table.c.session, column).where(column.is_not(None))):
        sample = _A_HOME.sub(b"/home/user", text.encode()[:_OF_A_TEXT])
        if taken[session] < _OF_A_SESSION:
            taken[session] += len(sample)
            yield sample


if __name__ == "__main__":
    sys.exit(main())
