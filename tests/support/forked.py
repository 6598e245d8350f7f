"""Runs programs in child processes, forked from a fork server that has already imported the modules they need.

Importing the proxy in a new interpreter takes more than a second of CPU time, and tests start about a hundred. The fork
server has one thread and no connections. It ends with the test process.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Self

_FORKSERVER = get_context("forkserver")
_FORKSERVER.set_forkserver_preload(
    [
        "alembic.command",
        "anyio._backends._asyncio",
        "genai_prices.data",
        "genai_prices.update_prices",
        "proxy.__main__",
        "proxy.cli.serving",
        "sqlalchemy.dialects.sqlite.pysqlite",
        "tests.support.forked",
        "uvicorn.lifespan.on",
        "uvicorn.protocols.http.httptools_impl",
        "uvloop",
        "tests.support.frozen",
    ]
)


class Forked:
    """A forked process. It has the part of the interface of `subprocess.Popen` that tests need."""

    def __init__(self, work: Callable[..., None], *arguments: object) -> None:
        """Start it. `work` is a module-level function; the process imports its module."""
        self._process = _FORKSERVER.Process(target=work, args=arguments)
        self._process.start()

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it ends; return its exit code."""
        self._process.join(timeout)
        ended = self._process.exitcode
        assert ended is not None, f"process {self.pid} has not ended within {timeout} s"
        return ended

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal if it is running."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        """End it, even if the test failed."""
        self.kill()
        self._process.join()


def run_palimpsest(arguments: tuple[str, ...], log: Path, environment: Mapping[str, str]) -> None:
    """Do what `python -m proxy ARGUMENTS > LOG 2>&1` does."""
    os.environ.clear()  # noqa: TID251 - of this process alone
    os.environ.update(environment)  # noqa: TID251 - likewise
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.argv = ["palimpsest", *arguments]
    from proxy.__main__ import main  # noqa: PLC0415 - who starts processes need not have imported the program

    main()


def run_program(program: str, *arguments: str) -> None:
    """Do what `python -c PROGRAM ARGUMENTS` does."""
    sys.argv = ["-c", *arguments]
    exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})  # noqa: S102 - a test's own
