from __future__ import annotations

from pathlib import Path

import pytest

from proxy.config import Settings
from proxy.errors import StoreUnavailable
from proxy.pipeline.means import opened

pytestmark = pytest.mark.anyio


def settings_at(path: Path, **store: object) -> Settings:
    return Settings.model_validate(
        {"store": {"url": f"sqlite:///{path}", **store}, "tokens": {"method": "estimate", "calibrate": False}}
    )


async def test_all_of_it_is_open_and_closed_at_the_end(tmp_path: Path) -> None:
    async with opened(settings_at(tmp_path / "s.db")) as means:
        await means.store.ready()
        assert means.knowledge.counter is means.counter
        assert means.counter.text("four words are here", "m") > 0
    with pytest.raises(StoreUnavailable):
        await means.store.ready()


async def test_a_store_of_another_version_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="palimpsest upgrade"):
        async with opened(settings_at(tmp_path / "s.db", migrate=False)):
            pass
