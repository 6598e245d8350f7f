"""The measured processes: the fake upstream, the baselines, and Palimpsest as its command line starts it.

All of them run the whole time, so that rounds alternate between warm processes.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import bodies
from benchmarks.compiling import FOLDER, Programs
from benchmarks.rivals import OFFLINE

_START_SECONDS: Final = 60
_STOP_SECONDS: Final = 40
_TICK: Final = os.sysconf("SC_CLK_TCK")

NO_PROXY: Final = "no proxy"
PASSTHROUGH: Final = "passthrough"
CLIENT: Final = "passthrough, httpx.AsyncClient"
PALIMPSEST: Final = "palimpsest"
POSTGRES: Final = "palimpsest, PostgreSQL"
LITELLM: Final = "LiteLLM"
ALL: Final = (NO_PROXY, PASSTHROUGH, CLIENT, LITELLM, PALIMPSEST, POSTGRES)


@dataclass(frozen=True, slots=True)
class Subject:
    """A process that answers chat completions."""

    name: str
    """One of `ALL`, or the name of a checkout."""
    port: int
    """The port on 127.0.0.1 that it listens on."""
    pid: int
    """Its process, which may have children."""
    stores: bool = False
    """Whether it has a store. Then the histories must be stored before a case is measured."""

    def memory_mb(self) -> float:
        """Return its memory in megabytes, children included; shared pages count once (PSS)."""
        lines = [
            line
            for pid in with_children(self.pid)
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines()
        ]
        return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024

    def cpu_seconds(self) -> float:
        """Return the CPU time of all its threads and its children so far, in user and kernel mode."""
        fields = [
            Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split() for pid in with_children(self.pid)
        ]
        return sum(int(each[11]) + int(each[12]) for each in fields) / _TICK


def with_children(pid: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text("ascii").split():
            yield from with_children(int(child))


@contextmanager
def upstream(programs: Programs, folder: Path) -> Iterator[Subject]:
    """Run the fake upstream; its answers are files in `folder`."""
    answers = {
        "answer.json": bodies.completion(),
        "events.txt": bodies.events(usage=False),
        "usage.txt": bodies.events(usage=True),
    }
    for name, body in answers.items():
        (folder / name).write_bytes(body)
    command = [str(programs.upstream), *(str(folder / name) for name in answers)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        if process.stdout is None:
            raise RuntimeError("the upstream has no output")
        yield Subject(name=NO_PROXY, port=int(process.stdout.readline()), pid=process.pid)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def passthrough(behind: Subject, folder: Path, name: str) -> Iterator[Subject]:
    """Run one of the baselines before the upstream."""
    port = free_port()
    words = ["--upstream", f"http://127.0.0.1:{behind.port}/v1", "--port", str(port)]
    via = "transport" if name == PASSTHROUGH else "client"
    with running(
        [sys.executable, "-m", "benchmarks.passthrough", *words, "--via", via], folder / f"{via}.log", port
    ) as pid:
        yield Subject(name=name, port=port, pid=pid)


@contextmanager
def litellm(behind: Subject, folder: Path, command: Path) -> Iterator[Subject]:
    """Run LiteLLM's proxy before the upstream: every model there, no database, one worker."""
    port = free_port()
    there = {"model": "openai/*", "api_base": f"http://127.0.0.1:{behind.port}/v1", "api_key": "none"}
    config = folder / "litellm.yaml"
    settings = {
        "model_list": [{"model_name": "*", "litellm_params": there}],
        "general_settings": {"dangerously_permit_weak_or_unset_master_key": True},  # nobody but us reaches it
    }
    config.write_text(json.dumps(settings), "utf-8")
    words = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    with running([str(command.absolute()), *words], folder / "litellm.log", port) as pid:
        yield Subject(name=LITELLM, port=port, pid=pid)


@contextmanager
def palimpsest(
    behind: Subject,
    folder: Path,
    policies: Mapping[str, Any] | None = None,
    name: str = PALIMPSEST,
    checkout: Path | None = None,
    store: str | None = None,
) -> Iterator[Subject]:
    """Run the proxy before the upstream, with its defaults, a store in `folder`, and these policies.

    Args:
        behind: the upstream.
        folder: the folder for its configuration, its store and its log.
        policies: the policies of its configuration.
        name: the name of its files in `folder`; with `checkout` or `store` also the name of the subject.
        checkout: the checkout to run, with its own `.venv`; None is this one.
        store: the URL of a store, instead of a file in `folder`.
    """
    port = free_port()
    if checkout is None:
        command, subject = command_line(), PALIMPSEST if store is None else name
    else:
        command, subject = [str(checkout / ".venv" / "bin" / "palimpsest")], name
    config = configuration(behind, folder, policies, name, port, store)
    with running(
        [*command, "serve", "--config", str(config)], folder / f"{name}.log", port, checkout or FOLDER.parent
    ) as pid:
        yield Subject(name=subject, port=port, pid=pid, stores=True)


@contextmanager
def on_postgres(behind: Subject, folder: Path) -> Iterator[Subject]:
    """Run the proxy with a store on a PostgreSQL server that is started for it, as in the tests."""
    from tests.support import postgres  # noqa: PLC0415 - what starts it is needed for this alone

    with (
        postgres.server() as server,
        postgres.database(server) as url,
        palimpsest(behind, folder, name=POSTGRES, store=url) as subject,
    ):
        yield subject


def configuration(
    behind: Subject, folder: Path, policies: Mapping[str, Any] | None, name: str, port: int, store: str | None = None
) -> Path:
    """Write a configuration file: the port, the upstream, the store, and the policies if any."""
    data: dict[str, Any] = {
        "server": {"port": port},
        "upstream": {"base_url": f"http://127.0.0.1:{behind.port}/v1"},
        "store": {"url": store or f"sqlite+aiosqlite:///{folder / name}.db"},
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(data | ({"policies": policies} if policies else {})), "utf-8")  # JSON is YAML
    return path


def command_line() -> list[str]:
    """Return the command that starts `palimpsest`."""
    installed = Path(sys.executable).with_name("palimpsest")
    return [str(installed)] if installed.exists() else [sys.executable, "-m", "proxy"]


def environment() -> dict[str, str]:
    """Return this process's environment without HTTP proxies and settings of Palimpsest; nothing is downloaded."""
    return OFFLINE | {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PALIMPSEST_") and not name.lower().endswith("_proxy")
    }


@contextmanager
def running(command: list[str], log: Path, port: int, cwd: Path = FOLDER.parent) -> Iterator[int]:
    """Run a server; yield its process id once it listens, and stop it afterwards."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment(), cwd=cwd)
        try:
            _wait_for(process, port, log)
            yield process.pid
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        with socket.socket() as asked:
            if asked.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"It did not start: {log.read_text('utf-8', 'replace')[-2000:]}")
        time.sleep(0.005)


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        port: int = asked.getsockname()[1]
        return port
