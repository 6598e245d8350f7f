"""Fixtures and hooks that tests of more than one package need."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncGenerator, Generator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import httpx2
import pytest
from hypothesis import HealthCheck, settings

from proxy.dialects import Call
from proxy.dialects.chat.message import ChatMessage
from tests.support.memory import memory_folder

# Fixtures import the store themselves, since the tests of the pure packages run without it.
if TYPE_CHECKING:
    from proxy.store import Store

ROOT = Path(__file__).parents[1]

LONG = (
    "tests/e2e/test_operating.py",
    "tests/store/test_convert.py",
    "tests/e2e/test_unnamed_sessions.py",
    "tests/e2e/test_server_restarts.py",
    "tests/e2e/test_store_away.py",
    "tests/hostile/test_findings.py",
    "tests/dashboard/test_browser.py",
    "tests/store/test_partitioned.py",
    "tests/hostile/test_fuzz.py",
    "tests/test_benchmarks.py",
    "tests/store/test_functions.py",
    "tests/e2e/test_statistics.py",
    "tests/e2e/test_recorded_sdks.py",
    "tests/e2e/test_tracing.py",
    "tests/store/test_history.py",
    "tests/store/test_migrate.py",
    "tests/e2e/test_dirty_histories.py",
    "tests/e2e/test_store_faults.py",
    "tests/cli/test_serving.py",
    "tests/hostile/test_matrix.py",
    "tests/e2e/test_responses.py",
    "tests/dashboard/test_large.py",
    "tests/store/test_portions.py",
    "tests/test_examples.py",
    "tests/e2e/test_command_line.py",
    "tests/store/test_messages.py",
    "tests/e2e/test_container.py",
    "tests/store/test_fork.py",
    "tests/config/test_reload.py",
    "tests/e2e/test_replay.py",
    "tests/e2e/test_recall.py",
    "tests/e2e/test_overflow.py",
    "tests/hostile/test_heads.py",
    "tests/store/test_placement.py",
    "tests/store/test_evidence.py",
    "tests/store/test_settling.py",
    "tests/e2e/test_cache_marks.py",
)
"""The slowest files. They start first, so that no long file runs alone at the end of a parallel run."""


# Machines are shared: no example fails because it took long, whichever profile `--hypothesis-profile` names.
for profile in ("default", "ci"):
    settings.register_profile(
        profile, settings.get_profile(profile), deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )


def pytest_configure() -> None:
    """Let tests write to memory, unless a folder is configured."""
    if (folder := memory_folder()) is not None:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(folder))  # noqa: TID251 - read by pytest


def pytest_collection_finish() -> None:
    """Exclude modules and collected tests from garbage collection: they live as long as the process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # a test leaves little garbage


@pytest.hookimpl(trylast=True)  # Hypothesis marks its tests first
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest files first; keep the order within a file.

    Generated examples do not count for coverage: tracing would double their time, and an example that reaches a
    branch by chance does not test it.
    """
    place = {ROOT / name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path, len(place)))
    for item in items:
        if item.get_closest_marker("hypothesis") is not None:
            item.add_marker("no_cover")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of test processes: one more than processors, since many tests wait for other processes."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(processors + 1, 8)


@pytest.fixture(scope="session", autouse=True)
def _certificates_are_read_once() -> Generator[None]:
    """Let all HTTP clients share the CA certificates, those of SDKs too: reading them takes each client 20 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", cache(httpx.create_ssl_context))
        patch.setattr("httpx2._transports.default.create_ssl_context", cache(httpx2.create_ssl_context))
        yield


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def postgres_server() -> Generator[str]:
    """URL of a PostgreSQL server."""
    from tests.support import postgres  # noqa: PLC0415 - see above

    with postgres.server() as url:
        yield url


@pytest.fixture
def empty_postgres(postgres_server: str) -> Generator[str]:
    """URL of a PostgreSQL database without tables."""
    from tests.support import postgres  # noqa: PLC0415 - see above

    with postgres.database(postgres_server) as url:
        yield url


@pytest.fixture(scope="session")
def postgres_template(postgres_server: str) -> Generator[str]:
    """Name of a database with all tables. No test connects to it, so that `postgres.database` can copy it."""
    from sqlalchemy import make_url  # noqa: PLC0415 - see above

    from proxy.store import upgrade  # noqa: PLC0415 - see above
    from tests.support import postgres  # noqa: PLC0415 - see above

    with postgres.database(postgres_server) as url:
        asyncio.run(upgrade(url))
        yield str(make_url(url).database)


@pytest.fixture(scope="session")
def _migrated_postgres(postgres_server: str, postgres_template: str) -> Generator[str]:
    from tests.support import postgres  # noqa: PLC0415 - see above

    with postgres.database(postgres_server, postgres_template) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty store: each test runs on SQLite and on PostgreSQL."""
    from proxy.store import METADATA  # noqa: PLC0415 - see above
    from tests.support import postgres  # noqa: PLC0415 - see above
    from tests.support.stores import empty_store  # noqa: PLC0415 - see above

    if request.param == "sqlite":
        return empty_store(tmp_path / "palimpsest.db")
    url: str = request.getfixturevalue("_migrated_postgres")
    # DELETE, since TRUNCATE recreates the files of every table and index, which takes ten times as long.
    postgres.execute(url, "; ".join(str(table.delete()) for table in reversed(METADATA.sorted_tables)))
    return url


@pytest.fixture
async def store(store_url: str) -> AsyncGenerator[Store]:
    """An open, empty store."""
    from proxy.store import Store  # noqa: PLC0415 - see above

    opened = await Store.open(store_url, migrate=False)  # its tables exist already
    yield opened
    await opened.close()


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The tool call of each comparison between a call and a result, in Chat Completions."""
    found: list[Call] = []
    answers_call = ChatMessage.answers_call

    def noted(result: ChatMessage, call: Call) -> bool:
        found.append(call)
        return answers_call(result, call)

    monkeypatch.setattr(ChatMessage, "answers_call", noted)
    return found
