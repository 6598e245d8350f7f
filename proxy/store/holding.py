"""Writing for several units at once: what they write is held back, and written statement by statement.

Units of one transaction write to the same few tables. Row by row SQLite begins each statement anew, and
so does Python; the rows of all units take a third less where one statement writes them one after the other.

What is held back is written before anybody could miss it: before a statement about a session of which rows
are held, before one that names no session, and at the end. A statement says which session it is about by a
parameter: `key`, `session`, or `the_session` where `session` is a column that is set. Rows that are inserted
are written before rows that are changed; where a session's own come in another order, or one of its rows may
be changed twice, those before are written first.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Executable

from proxy.store.connection import Parameters
from proxy.store.statements import NOTHING, Compiled, Rows, SqliteConnection, Values, compiled_for

_SESSION: Final = ("key", "session", "the_session")
"""Names of the parameter that says which session a statement is about."""


class HoldingConnection(SqliteConnection):
    """Holds back what only writes. Before the transaction ends comes `write`, or `forget`."""

    __slots__ = ("_changed", "_changes", "_inserts", "_sessions")

    def __init__(self, raw: sqlite3.Connection) -> None:
        """Execute on `raw`."""
        super().__init__(raw)
        self.forget()

    def forget(self) -> None:
        """Let go of what is held back: it is not to be written."""
        self._inserts: dict[str, list[tuple[Any, ...]]] = {}
        """Values of rows, by the text of the statement that writes them."""
        self._changes: dict[str, list[tuple[Any, ...]]] = {}
        self._sessions: set[str] = set()
        """Whose rows they are."""
        self._changed: dict[str, list[str]] = {}
        """Tables of which rows are changed, by session."""

    def write(self) -> None:
        """Write what is held back."""
        held = [*self._inserts.items(), *self._changes.items()]
        self.forget()
        for text, rows in held:
            self._raw.executemany(text, rows)

    def execute(self, statement: Executable, parameters: Parameters | None = None, /) -> Rows:
        """Execute a statement, or hold it back; see `SqliteConnection.execute`."""
        rows = _rows(parameters)
        if not rows:
            return NOTHING
        compiled, session = compiled_for(statement, rows[0]), _session_in(rows)
        if session is not None and compiled.is_plain:
            if compiled.inserts:
                self._insert(compiled, session, rows)
                return NOTHING
            if compiled.changes and len(rows) == 1:
                self._change(compiled, session, rows[0])
                return NOTHING
        if self._sessions and (session is None or session in self._sessions):
            self.write()
        return self.run(compiled, rows[0]) if len(rows) == 1 else super().execute(statement, parameters)

    def _insert(self, compiled: Compiled, session: str, rows: Sequence[Values]) -> None:
        if session in self._changed:
            self.write()
        self._sessions.add(session)
        self._inserts.setdefault(compiled.text, []).extend(map(compiled.pick, rows))

    def _change(self, compiled: Compiled, session: str, row: Values) -> None:
        if compiled.changes in self._changed.get(session, ()):
            self.write()
        self._sessions.add(session)
        self._changed.setdefault(session, []).append(compiled.changes)
        self._changes.setdefault(compiled.text, []).append(compiled.pick(row))


def _rows(parameters: Parameters | None) -> Sequence[Values]:
    """Return what a statement is to be executed with, once for each."""
    if parameters is None:
        return ({},)
    return (parameters,) if isinstance(parameters, Mapping) else parameters


def _session_in(rows: Sequence[Values]) -> str | None:
    """Return the session that all of the rows are about; None where they name none, or several."""
    for name in _SESSION:
        session = rows[0].get(name)
        if session is not None:
            return session if len(rows) == 1 or all(row[name] == session for row in rows) else None
    return None
