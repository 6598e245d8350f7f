"""The summary that a plan uses or asks for, and what is said where there is none."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from msgspec.structs import replace

from proxy.conversation import ROOT, Arrival, Kind, chain
from proxy.dialects import Call
from proxy.dialects.chat import CHAT
from proxy.dialects.chat.request import parse_chat_request
from proxy.models import Catalogue
from proxy.pipeline import ClientRequest
from proxy.pipeline.context import RequestContext
from proxy.pipeline.exchange import summary_work
from proxy.pipeline.history import History
from proxy.pipeline.own_tools import BEGUN, NOTHING_TO_SUM_UP, own_tools
from proxy.pipeline.prepare import Prepared, as_requested, missing_summary, ready_summary_of, unused
from proxy.pipeline.receipt import report_of
from proxy.pipeline.settle import Exchange
from proxy.recall import COMPRESS, RECALL, Recall
from proxy.store import Body, Store, SummaryRow, SummaryStatus
from proxy.summaries import Given
from proxy.trimming import Cut, Entry, PlanningContext, Policy, Summary, SummaryRequest, bypass
from tests.support.stores import empty_store
from tests.support.talk import message

FACTS = Catalogue().facts("m", None)
PLANNING = PlanningContext(count=lambda _: 1)
POLICY = Policy()
WANTED = SummaryRequest(stop=2, room=100, urgent=True)
LOG = tuple(message("user" if at % 2 == 0 else "assistant", f"text {at}") for at in range(4))
NODES = tuple(chain(ROOT, LOG))
ROW = SummaryRow(
    id="sum_1",
    node=NODES[1],
    tip=NODES[3],
    recipe="r",
    until=2,
    generation=3,
    status=SummaryStatus.READY,
    reason="",
    model="m",
    text="So far.",
    state={},
    tokens=7,
    covered_messages=2,
    covered_tokens=90,
    predecessor=None,
    asked=True,
    usage=None,
    cost=None,
    exchange=None,
    created_at=1,
)

DESTINATION: Any = None  # nothing is sent


def prepared_request(*, stored: int = 2, kind: Kind = Kind.RESEND, start: int = 0) -> Prepared:
    """Return a request that brings the whole history, of which `stored` messages are stored."""
    entries = tuple(Entry(message=each, tokens=1, ref=f"ref_{at}", position=at) for at, each in enumerate(LOG))
    history = History(
        id="s",
        arrival=Arrival(kind=kind, base=NODES[stored - 1] if stored else ROOT, known=stored),
        composed=kind is Kind.APPEND,
        digest=ROOT,
        entries=entries,
        nodes=NODES[:stored],
        fresh=tuple(Body(message=each, tokens=1) for each in LOG[stored:]),
        instructions=(),
        size=9,
        start=start,
        attempt=ROW,
    )
    raw = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}]})
    return Prepared(
        received=time.monotonic(),
        call=ClientRequest(dialect=CHAT, tenant="t", headers=[(b"authorization", b"Bearer k")], query=b"v=1", body=raw),
        request=parse_chat_request(raw),
        context=RequestContext(dialect=CHAT, tenant="t", policy_name="default", policy=POLICY),
        history=history,
        planning=PLANNING,
        destination=DESTINATION,
        facts=FACTS,
        instructions_tokens=0,
        report=report_of("exc_1", history, bypass(entries, PLANNING), PLANNING),
        own_tools=(RECALL, COMPRESS),
        tools=None,
        finishing=None,
    )


def test_a_summary_that_is_ready_can_be_used() -> None:
    ready = ready_summary_of(ROW)
    assert ready is not None
    assert (ready.text, ready.tokens, ready.until, ready.asked) == ("So far.", 7, 2, True)
    assert (ready.model, ready.covered_messages, ready.covered_tokens) == ("m", 2, 90)
    assert ready.generation == 3


@pytest.mark.parametrize("status", [SummaryStatus.REFUSED, SummaryStatus.FAILED])
def test_a_summary_that_is_not_ready_cannot_be_used(status: SummaryStatus) -> None:
    assert ready_summary_of(None) is None
    assert ready_summary_of(replace(ROW, status=status)) is None


def test_after_the_exchange_a_summary_is_made_of_stored_messages() -> None:
    work = summary_work(prepared_request(), POLICY, WANTED, NODES[3])
    assert (work.tip, work.given, work.asked, work.exchange) == (NODES[3], None, False, "exc_1")
    assert (work.edit, work.model, work.attempt) == (POLICY.summarizing, "m", ROW)
    assert (work.caller.tenant, work.caller.query) == ("t", b"v=1")
    assert work.caller.headers == ((b"authorization", b"Bearer k"),)


@pytest.mark.parametrize("stored", [0, 2])
def test_before_the_exchange_is_settled_the_messages_are_given_along(stored: int) -> None:
    work = summary_work(prepared_request(stored=stored), POLICY, WANTED)
    assert work.given is not None
    assert (work.given.messages, work.given.nodes, work.tip) == (LOG, NODES, NODES[3])


@pytest.mark.parametrize(
    "prepared", [prepared_request(kind=Kind.APPEND), prepared_request(kind=Kind.WINDOWED, start=1)]
)
def test_a_request_that_does_not_bring_the_whole_branch_is_read_from_the_store(prepared: Prepared) -> None:
    work = summary_work(prepared, POLICY, WANTED)
    assert (work.tip, work.given) == (NODES[1], None)


@pytest.mark.parametrize(
    "prepared", [prepared_request(kind=Kind.APPEND), prepared_request(kind=Kind.WINDOWED, start=1)]
)
def test_new_messages_that_are_to_be_summed_up_are_given_along(prepared: Prepared) -> None:
    work = summary_work(prepared, POLICY, replace(WANTED, stop=3))
    assert (work.tip, work.given) == (NODES[3], Given(messages=LOG[2:], nodes=NODES[2:], base=NODES[1]))


def test_a_summary_that_a_trim_lacks_is_warned_of_with_its_reason() -> None:
    assert missing_summary(None, None) == missing_summary(replace(WANTED, urgent=False), ROW) == ()
    assert "no summary is ready" in missing_summary(WANTED, None)[0]
    used = Cut(
        position=4,
        policy="p",
        version="v",
        changes=(),
        tokens=9,
        messages=1,
        tool_calls=0,
        summary=Summary(
            text="So far.", role="merge", until=2, tokens=7, kind="model", covered_messages=2, covered_tokens=90
        ),
    )
    assert "no newer summary is ready" in missing_summary(WANTED, ROW, used)[0]
    assert "is ready and was not used" in missing_summary(WANTED, ROW)[0]
    assert missing_summary(WANTED, ROW, reason="it is being left alone") == ("no summary: it is being left alone",)
    refused = replace(ROW, status=SummaryStatus.REFUSED, reason="it is empty")
    assert missing_summary(WANTED, refused) == ("no summary: it is empty",)
    assert missing_summary(WANTED, None, hindered="left alone") == ("no summary: left alone",)
    assert missing_summary(WANTED, refused, hindered="left alone") == ("no summary: it is empty; left alone",)


def test_a_ready_summary_is_unused_where_it_covers_more_than_the_cut_uses() -> None:
    cut = Cut(position=4, policy="p", version="v", changes=(), tokens=9, messages=1, tool_calls=0)
    assert unused(ROW, None) == unused(ROW, cut) == ROW
    used = Summary(text="", role="merge", until=2, tokens=7, kind="model", covered_messages=2, covered_tokens=90)
    assert unused(ROW, replace(cut, summary=used)) is None
    assert unused(replace(ROW, status=SummaryStatus.FAILED), None) is unused(None, None) is None


def test_a_summary_made_beside_the_requests_is_stored_again_as_a_requested_one() -> None:
    row = as_requested(replace(ROW, asked=False, cost=0.5, usage={"total_tokens": 3}), 7)
    assert (row.asked, row.created_at, row.cost, row.usage) == (True, 7, None, None)
    assert row.id != ROW.id
    assert (row.text, row.node, row.until) == (ROW.text, ROW.node, ROW.until)


# ------------------------------------------------------------- the model asks: the proxy's own tools

# The whole way is shown in tests/e2e/test_recall.py.


@pytest.fixture
async def recall(tmp_path: Path) -> AsyncIterator[Recall]:
    store = await Store.open(empty_store(tmp_path / "s.db"))
    yield Recall(store)
    await store.close()


SERVICES: Any = SimpleNamespace()


def exchange_of(prepared: Prepared) -> Exchange:
    return Exchange(prepared, SERVICES)


async def compress(exchange: Exchange, recall: Recall) -> str:
    return await own_tools(exchange, recall).answer(Call(id="c", name=COMPRESS, arguments="{}"))


@pytest.mark.anyio
async def test_what_the_request_brings_and_does_not_send_can_be_found(recall: Recall) -> None:
    exchange = exchange_of(prepared_request(stored=0))
    exchange.report = replace(exchange.report, plan=replace(exchange.report.plan, view=LOG[2:]))
    own = own_tools(exchange, recall)
    assert own.names == {RECALL, COMPRESS}
    assert "text 0" in await own.answer(Call(id="c", name=RECALL, arguments='{"query": "text 0"}'))


@pytest.mark.anyio
async def test_a_summary_that_the_model_asks_for_is_noted(recall: Recall) -> None:
    prepared = prepared_request(stored=0)
    entries = tuple(replace(entry, tokens=5_000) for entry in prepared.history.entries)
    exchange = exchange_of(
        replace(
            prepared,
            history=replace(prepared.history, entries=entries),
            planning=replace(PLANNING, count=lambda message: len(message.raw)),
        )
    )
    assert await compress(exchange, recall) == BEGUN
    assert isinstance(exchange.requested_summary, SummaryRequest)
    assert exchange.requested_summary.stop == 2


def _short(**changes: Any) -> Prepared:
    prepared = prepared_request(stored=0)
    entries = prepared.history.entries[2:3]
    return replace(prepared, history=replace(prepared.history, entries=entries, **changes))


@pytest.mark.anyio
async def test_a_ready_summary_that_was_not_used_is_used(recall: Recall) -> None:
    exchange = exchange_of(_short(ready_summary=ROW))
    assert await compress(exchange, recall) == BEGUN
    assert exchange.requested_summary == ROW


@pytest.mark.anyio
async def test_the_model_is_told_where_there_is_nothing_to_sum_up(recall: Recall) -> None:
    prepared = _short()
    without_policy = replace(prepared, context=replace(prepared.context, policy=None))
    for each in (prepared, without_policy):
        exchange = exchange_of(each)
        assert await compress(exchange, recall) == NOTHING_TO_SUM_UP
        assert exchange.requested_summary is None
