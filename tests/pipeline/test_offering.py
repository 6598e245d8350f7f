"""The proxy's own tools within one exchange. The whole way is shown in tests/e2e/test_recall.py."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from proxy.dialects import Call
from proxy.pipeline.offering import BEGUN, NOTHING_TO_SUM_UP, own_tools
from proxy.pipeline.turn import ExchangeContext
from proxy.recall import COMPRESS, RECALL, Recall
from proxy.store import Store
from proxy.trimming import Policy, SummaryRequest
from tests.pipeline.test_summing import LOG, ROW, turn

pytestmark = pytest.mark.anyio


@pytest.fixture
async def recall(tmp_path: object) -> object:
    store = await Store.open(f"sqlite:///{tmp_path}/s.db")
    yield Recall(store)
    await store.close()


def offering(stored: int = 0) -> ExchangeContext:
    asked = turn(stored=stored)
    asked.own = (RECALL, COMPRESS)
    asked.policy = Policy()
    return asked


async def test_what_the_request_brings_can_be_found(recall: Recall) -> None:
    asked = offering()
    asked.ticket = replace(asked.ticket, plan=replace(asked.ticket.plan, view=LOG[2:]))
    own = own_tools(asked, recall)
    assert own.names == {RECALL, COMPRESS}
    assert "text 0" in await own.answer(Call(id="c", name=RECALL, arguments='{"query": "text 0"}'))


async def test_a_summary_that_is_asked_for_is_noted(recall: Recall) -> None:
    asked = offering()
    asked.known = replace(asked.known, count=lambda message: len(message.raw))
    entries = tuple(replace(entry, tokens=5_000) for entry in asked.past.entries)
    asked.past = replace(asked.past, entries=entries)
    assert await own_tools(asked, recall).answer(Call(id="c", name=COMPRESS, arguments="{}")) == BEGUN
    assert isinstance(asked.compaction, SummaryRequest)
    assert asked.compaction.stop == 2


async def test_one_that_is_there_and_was_not_used_is_used(recall: Recall) -> None:
    asked = offering()
    asked.past = replace(asked.past, entries=asked.past.entries[2:3], prepared=ROW)
    assert await own_tools(asked, recall).answer(Call(id="c", name=COMPRESS, arguments="{}")) == BEGUN
    assert asked.compaction == ROW


async def test_where_there_is_nothing_to_sum_up_that_is_said(recall: Recall) -> None:
    asked = offering()
    asked.past = replace(asked.past, entries=asked.past.entries[2:3])
    assert (
        await own_tools(asked, recall).answer(Call(id="c", name=COMPRESS, arguments="{}"))
        == NOTHING_TO_SUM_UP
    )
    asked.policy = None
    assert (
        await own_tools(asked, recall).answer(Call(id="c", name=COMPRESS, arguments="{}"))
        == NOTHING_TO_SUM_UP
    )
    assert asked.compaction is None
