"""`palimpsest serve` in its own process, which can be killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol, Self

import orjson

from tests.support.forked import Forked, run_palimpsest
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
SECONDS = 60
"""How long a process may take to start or to end, on a busy machine."""

LONG_RUN = bool(os.environ.get("PALIMPSEST_TEST_LONG"))  # noqa: TID251 - a setting of the tests, not of the program
"""Whether to run with three times the load and twice the kills."""

_ADDRESS = re.compile(r"use it: +OPENAI_BASE_URL=(http\S+)/v1 ")
_WORKER = re.compile(r"Started server process \[(\d+)\]")


class HasAddress(Protocol):
    """Any upstream."""

    @property
    def base_url(self) -> str: ...


def config_file(folder: Path, upstream: HasAddress, store_url: str, /, **sections: Any) -> Path:
    """Write a configuration with this upstream and this store."""
    data: dict[str, Any] = {
        "server": {"port": 0},
        "upstream": {"base_url": upstream.base_url, "anthropic_base_url": upstream.base_url},
        "store": {"url": store_url, "spool": str(folder / "spool")},
        "tokens": {"method": "estimate"},
    }
    for name, section in sections.items():
        data[name] = {**data.get(name, {}), **section} if isinstance(section, dict) else section
    file = folder / "config.yaml"
    file.write_bytes(orjson.dumps(data))  # JSON is YAML
    return file


def environment() -> dict[str, str]:
    """Return the environment for a child process: this one, without settings of the proxy."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PALIMPSEST_")}  # noqa: TID251 - a child's environment
    return kept | {"PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}


class Served:
    """A proxy that runs as a command. It is always ended at the end of the `with` block."""

    def __init__(self, config: Path, *arguments: str, new_interpreter: bool = False) -> None:
        """Start it; `wait` returns once it serves. Its log goes to a file, so that no pipe fills up.

        `new_interpreter`: start it as operators do. That takes a second longer than forking it.
        """
        number = len(list(config.parent.glob("serve-*.log")))
        self._log = config.parent / f"serve-{number}.log"
        arguments = ("serve", "--config", str(config), *arguments)
        self.process: Forked | subprocess.Popen[bytes]
        if new_interpreter:
            command = [sys.executable, "-m", "proxy", *arguments]
            with self._log.open("wb") as log:
                self.process = subprocess.Popen(  # noqa: S603 - our own
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment()
                )
        else:
            self._log.touch()
            self.process = Forked(run_palimpsest, arguments, self._log, environment())

    @property
    def log(self) -> str:
        """Its log so far."""
        return self._log.read_text()

    @property
    def url(self) -> str:
        """Its address."""
        found = _ADDRESS.search(self.log)
        assert found is not None, self.log
        return found[1]

    @property
    def workers(self) -> list[int]:
        """Ids of all worker processes so far, in the order of their start."""
        return [int(found) for found in _WORKER.findall(self.log)]

    def wait(self) -> Self:
        """Return once it serves."""

        def serves() -> bool:
            assert self.process.poll() is None, self.log
            return _ADDRESS.search(self.log) is not None

        until(serves, "it serves", SECONDS)
        return self

    def kill(self) -> None:
        """Kill it without warning, like a loss of power."""
        self.process.kill()
        self.process.wait()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Tell it to end; return its exit code."""
        self.process.send_signal(number)
        return self.process.wait(SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.kill()


def peak(process: int) -> int:
    """Return a process's peak memory in bytes (Linux)."""
    status = Path(f"/proc/{process}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) * 1024


def resident(process: int) -> int:
    """Return a process's resident memory in bytes (Linux)."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def children(process: int) -> list[int]:
    """Return the ids of a process's children (Linux)."""
    tasks = Path(f"/proc/{process}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def is_running(process: int) -> bool:
    """Tell whether there is a process with this id."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
