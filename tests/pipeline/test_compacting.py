"""A summary that is asked for. Over HTTP: tests/server/test_actions.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.errors import UpstreamError
from proxy.pipeline.compacting import compact
from proxy.pipeline.present import present
from proxy.store import SummaryRow
from proxy.summaries import Caller
from tests.support.house import KEY, House, opened
from tests.support.upstream import Upstream as Provider

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    with Provider() as upstream:
        yield upstream


async def asked(house: House, *, rounds: int, patience: float = 30) -> SummaryRow | None:
    """Have a conversation, and ask for a summary of it."""
    said: list[dict[str, Any]] = []
    for number in range(rounds):
        said.append({"role": "user", "content": f"question {number} " + "about parcels " * 40})
        client = await house.ask("say:answer", messages=said)
        said.append(orjson.loads(client.got)["choices"][0]["message"])
    row = await house.store.session("t", "s")
    assert row is not None
    now = await present(row, None, house.chat.policies, house.means)
    assert now.policy is not None
    return await compact(row, now, now.policy, Caller(tenant="t"), house.means, patience=patience)


async def test_it_is_made_of_what_may_be_summed_up(provider: Provider, tmp_path: Path) -> None:
    async with opened(provider, tmp_path, summarizer={"model": "summary:good"}) as house:
        row = await asked(house, rounds=4)
        assert row is not None
        assert (row.asked, row.generation, row.until) == (True, 1, 6)
        assert await house.store.summary_rows(KEY) == [row]


async def test_there_may_be_nothing(provider: Provider, tmp_path: Path) -> None:
    async with opened(provider, tmp_path, summarizer={"model": "summary:good"}) as house:
        assert await asked(house, rounds=1) is None


@pytest.mark.parametrize("model", ["summary:empty", "fault:500"])
async def test_one_that_is_not_made_is_an_error_with_its_reason(
    provider: Provider, tmp_path: Path, model: str
) -> None:
    async with opened(provider, tmp_path, summarizer={"model": model}) as house:
        with pytest.raises(UpstreamError, match="No summary was made") as failure:
            await asked(house, rounds=4)
        assert failure.value.code == "summary_failed"


async def test_it_is_not_waited_for_longer_than_one_wants(provider: Provider, tmp_path: Path) -> None:
    async with opened(provider, tmp_path, summarizer={"model": "fault:hang", "timeout": 1}) as house:
        with pytest.raises(UpstreamError, match="still being made"):
            await asked(house, rounds=4, patience=0.01)
