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
from msgspec import Struct
from sqlalchemy import Column, select

from proxy.store.schema import BODIES, EXCHANGES, INSTRUCTIONS, NODES
from proxy.store.sqlite import SqliteConnection, connect

_OF_A_TEXT: Final = 4_000
_A_HOME: Final = re.compile(rb"/(?:root|home|Users)/[\w.-]+")
"""Paths of one machine or person: they do not belong in a dictionary."""
_A_SCRIPT: Final = re.compile(rb"script:[^\"]+")
"""The model name of a replayed recording: real requests do not have it."""


class _Kind(Struct, frozen=True, kw_only=True):
    """The training data and the settings of a dictionary."""

    columns: tuple[Column[Any], ...]
    size: int  # bytes of the dictionary
    of_a_session: int  # most bytes of samples from one session: a long one must not crowd out the others
    settings: dict[str, int] = {}  # of the training; chosen by the size of sessions outside the training data


_KINDS: Final = {
    "texts": _Kind(columns=(BODIES.c.text, NODES.c.text, INSTRUCTIONS.c.messages), size=65_536, of_a_session=200_000),
    "receipts": _Kind(
        columns=(EXCHANGES.c.receipt, EXCHANGES.c.parameters),
        size=8_192,
        of_a_session=20_000,
        # A receipt mostly repeats the keys of the previous one: long pieces, in the same order.
        settings={"k": 1_000, "d": 8, "level": 5},
    ),
}


def main(words: Sequence[str] | None = None) -> int:
    """Write both dictionaries into a folder."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dictionaries", description=__doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("--into", type=Path, default=Path.cwd())
    parser.add_argument("--number", type=int, required=True, help="of the new dictionaries")
    given = parser.parse_args(words)
    with closing(connect(given.store)) as raw:
        connection = SqliteConnection(raw)
        for name, kind in _KINDS.items():
            samples: list[Any] = [each for column in kind.columns for each in _samples(connection, column, kind)]
            trained = zstandard.train_dictionary(kind.size, samples, **kind.settings)
            path = given.into / f"{name}-{given.number}.zdict"
            path.write_bytes(trained.as_bytes())
            print(f"{path}: {len(trained.as_bytes()):,} bytes from {len(samples):,} texts")
    return 0


def _samples(connection: SqliteConnection, column: Column[Any], kind: _Kind) -> Iterable[bytes]:
    taken: defaultdict[str, int] = defaultdict(int)
    table = column.table
    for session, text in connection.execute(select(table.c.session, column).where(column.is_not(None))):
        sample = _A_SCRIPT.sub(b"gpt-4o", _A_HOME.sub(b"/home/user", text.encode()[:_OF_A_TEXT]))
        if taken[session] < kind.of_a_session:
            taken[session] += len(sample)
            yield sample


if __name__ == "__main__":
    sys.exit(main())
