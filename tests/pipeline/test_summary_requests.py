from __future__ import annotations

import time

import orjson
import pytest
from msgspec.structs import replace
from msgspec.structs import replace as changed

from proxy.conversation import ROOT, Arrival, Kind, chain
from proxy.dialects.chat.request import parse_chat_request
from proxy.models import Catalogue
from proxy.pipeline.asking import RequestContext
from proxy.pipeline.past import History
from proxy.pipeline.planning import nothing_sent, report_of
from proxy.pipeline.summing import missed, prepared_of, work_of
from proxy.pipeline.turn import Call, ExchangeContext
from proxy.store import Body, SummaryRow, SummaryStatus
from proxy.trimming import Cut, Entry, PlanningContext, Policy, Summary, SummaryRequest
from tests.support.talk import message

FACTS = Catalogue().facts("m", None)
KNOWN = PlanningContext(count=lambda _: 1)
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


def turn(*, stored: int = 2, kind: Kind = Kind.RESEND, start: int = 0) -> ExchangeContext:
    """A request that brings all of the log, of which some messages are stored."""
    entries = tuple(
        Entry(message=each, tokens=1, ref=f"ref_{at}", position=at) for at, each in enumerate(LOG)
    )
    fresh = tuple(Body(message=each, tokens=1) for each in LOG[stored:])
    base = NODES[stored - 1] if stored else ROOT
    arrival = Arrival(kind=kind, base=base, fresh=stored)
    past = History(
        id="s",
        arrival=arrival,
        digest=ROOT,
        entries=entries,
        nodes=NODES[:stored],
        fresh=fresh,
        instructions=(),
        size=9,
        start=start,
        attempt=ROW,
    )
    raw = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}]})
    call = Call(tenant="t", headers=[(b"authorization", b"Bearer k")], query=b"v=1", body=raw)
    ticket = report_of(past, nothing_sent(entries, KNOWN), KNOWN, "exc_1")
    return ExchangeContext(
        call=call,
        request=parse_chat_request(raw),
        past=past,
        ticket=ticket,
        asking=RequestContext(tenant="t"),
        known=KNOWN,
        facts=FACTS,
        started=time.monotonic(),
        stored=True,
    )


def test_a_summary_that_is_ready_can_be_used() -> None:
    prepared = prepared_of(ROW)
    assert prepared is not None
    assert (prepared.text, prepared.tokens, prepared.until, prepared.asked) == ("So far.", 7, 2, True)
    assert (prepared.model, prepared.covered_messages, prepared.covered_tokens) == ("m", 2, 90)
    assert prepared.generation == 3


@pytest.mark.parametrize("status", [SummaryStatus.REFUSED, SummaryStatus.FAILED])
def test_no_other_is(status: SummaryStatus) -> None:
    assert prepared_of(None) is None
    assert prepared_of(changed(ROW, status=status)) is None


def test_after_an_exchange_it_is_made_of_what_is_stored() -> None:
    work = work_of(turn(), POLICY, WANTED, NODES[3])
    assert (work.tip, work.given, work.asked, work.exchange) == (NODES[3], None, False, "exc_1")
    assert (work.edit, work.model, work.attempt) == (POLICY.summarizing, "m", ROW)
    assert (work.caller.tenant, work.caller.query) == ("t", b"v=1")
    assert work.caller.headers == ((b"authorization", b"Bearer k"),)


@pytest.mark.parametrize("stored", [0, 2])
def test_before_it_what_the_request_brings_is_given_along(stored: int) -> None:
    work = work_of(turn(stored=stored), POLICY, WANTED)
    assert work.given is not None
    assert (work.given.messages, work.given.nodes, work.tip) == (LOG, NODES, NODES[3])


@pytest.mark.parametrize("asked", [turn(kind=Kind.APPEND), turn(kind=Kind.WINDOWED, start=1)])
def test_a_request_that_does_not_bring_all_of_it_is_read_from_the_store(asked: ExchangeContext) -> None:
    work = work_of(asked, POLICY, WANTED)
    assert (work.tip, work.given) == (NODES[1], None)


def test_what_was_to_be_used_and_is_not_there_is_said() -> None:
    assert missed(None, None) == missed(replace(WANTED, urgent=False), ROW) == ()
    assert "no summary is ready" in missed(WANTED, None)[0]
    used = Cut(
        position=4,
        policy="p",
        version="v",
        changes=(),
        tokens=9,
        messages=1,
        tool_calls=0,
        summary=Summary(
            text="So far.",
            role="merge",
            until=2,
            tokens=7,
            kind="model",
            covered_messages=2,
            covered_tokens=90,
        ),
    )
    assert "no newer summary is ready" in missed(WANTED, ROW, used)[0]
    assert "is ready and was not used" in missed(WANTED, ROW)[0]
    assert missed(WANTED, ROW, reason="it is being left alone") == ("no summary: it is being left alone",)
    refused = changed(ROW, status=SummaryStatus.REFUSED, reason="it is empty")
    assert missed(WANTED, refused) == ("no summary: it is empty",)
    assert missed(WANTED, None, hindered="left alone") == ("no summary: left alone",)
    assert missed(WANTED, refused, hindered="left alone") == ("no summary: it is empty; left alone",)
