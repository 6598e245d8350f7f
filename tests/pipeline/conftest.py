"""A provider to send requests to, and everything that is open while the process serves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.house import House, opened
from tests.support.upstream import Upstream as Provider


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    with Provider() as upstream:
        yield upstream


@pytest.fixture
async def house(provider: Provider, tmp_path: Path) -> AsyncIterator[House]:
    provider.forget()
    # One connection: a test fails if it is not released.
    async with opened(provider, tmp_path, upstream={"max_connections": 1, "connect_timeout": 1}) as house:
        yield house
