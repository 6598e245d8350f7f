"""What the store is told of an exchange at its beginning and at its end."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from msgspec import msgpack
from msgspec.structs import replace

from proxy.dialects import Request
from proxy.dialects.chat import CHAT
from proxy.dialects.chat.request import parse_chat_request
from proxy.errors import UpstreamTimeout
from proxy.models import Catalogue
from proxy.pipeline import ClientRequest
from proxy.pipeline.background import Background
from proxy.pipeline.context import RequestContext
from proxy.pipeline.history import History, HistoryLoader
from proxy.pipeline.prepare import Prepared
from proxy.pipeline.receipt import report_of
from proxy.pipeline.relay import Answered
from proxy.pipeline.settle import Exchange, opening_of, settlement_of
from proxy.store import ExchangeFigures, Kept, Status, Store
from proxy.telemetry.metrics import Meters
from proxy.tokens import TokenCounter
from proxy.trimming import PlanningContext, Policy, plan
from proxy.upstream import Destination
from tests.support.stores import empty_store
from tests.support.talk import Talk, message

pytestmark = pytest.mark.anyio

COUNTER = TokenCounter("estimate")
CONTEXT = RequestContext(
    dialect=CHAT, tenant="t", policy_name="lean", policy=Policy(), session="s", idempotency="k", agent="boss"
)
SYSTEM = {"role": "system", "content": "S"}
SAID = [{"role": "user", "content": "hello", "agent": "planner"}]


def request_of(messages: list[dict[str, Any]], **fields: Any) -> Request:
    return parse_chat_request(orjson.dumps({"model": "m", "messages": messages, **fields}))


FACTS = Catalogue().facts("m", None)
PLANNING = PlanningContext(count=lambda text: COUNTER.message(text, "m"), agent="boss")
SERVICES: Any = SimpleNamespace()
PRICED = ExchangeFigures(model="m", policy="lean", cost=0.25, priced=1)
UNPRICED = ExchangeFigures(model="m", policy="lean")
DESTINATION = Destination(base_url="http://provider/v1", authorization=None, forwards_credentials=True)


def prepared_of(request: Request, history: History, **policy: Any) -> Prepared:
    """Return a request that was planned with this policy."""
    chosen = Policy.model_validate(policy)
    made = plan(history.entries, chosen, "lean", PLANNING, None, composed=history.arrival.composed)
    return Prepared(
        received=time.monotonic(),
        call=ClientRequest(dialect=CHAT, tenant="t", headers=[], query=b"", body=request.raw),
        request=request,
        context=replace(CONTEXT, policy=chosen),
        history=history,
        planning=PLANNING,
        destination=DESTINATION,
        facts=FACTS,
        instructions_tokens=sum(COUNTER.messages(history.instructions, "m")),
        report=report_of("exc_1", history, made, PLANNING),
        own_tools=(),
        tools=request.tools,
        finishing=None,
    )


@pytest.fixture
async def talk(tmp_path: Path) -> Any:
    store = await Store.open(empty_store(tmp_path / "s.db"))
    yield Talk(store=store, tenant="t", session="s")
    await store.close()


async def first(talk: Talk, request: Request, **policy: Any) -> Exchange:
    history = await HistoryLoader(talk.store, COUNTER, "auto").load(request, CONTEXT)
    return Exchange(prepared_of(request, history, **policy), SERVICES)


async def test_an_opening_holds_the_request(talk: Talk) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    request = request_of([SYSTEM, *SAID], temperature=0.50, tools=tools, stream=True, x={"b": 1, "a": [None]})
    exchange = await first(talk, request)
    told = opening_of(exchange.prepared, 7)
    assert (told.tenant, told.session, told.exchange, told.created_at) == ("t", "s", "exc_1", 7)
    assert (told.kind, told.base, told.model, told.agent, told.policy) == ("first", "", "m", "boss", "lean")
    assert [body.message.data for body in told.messages] == SAID  # our own fields are kept
    assert told.instructions is not None
    assert [text.data for text in told.instructions] == [SYSTEM]
    assert told.instructions_tokens > 0
    assert told.parameters == {"model": "m", "temperature": 0.5, "stream": True, "x": {"b": 1, "a": [None]}}
    assert told.tools is not None
    assert orjson.loads(told.tools) == tools
    assert told.stream is True
    assert told.digest == exchange.prepared.history.digest


async def test_an_opening_without_instructions_and_tools(talk: Talk) -> None:
    told = opening_of((await first(talk, request_of(SAID))).prepared, 7)
    assert (told.instructions, told.instructions_tokens, told.tools, told.forms) == (None, 0, None, ())


async def test_a_settlement_holds_the_replies_and_the_receipt(talk: Talk) -> None:
    exchange = await first(talk, request_of(SAID))
    exchange.mark("planned")
    replies = ((message("assistant", "one"), False), (message("assistant", "tw"), True))
    usage = {"prompt_tokens": 3}
    answered = Answered(
        status=Status.PARTIAL,
        replies=replies,
        finish_reasons=("stop", None),
        usage=usage,
        model="m-2",
        error="it broke",
        upstream_status=200,
    )
    told = settlement_of(exchange, answered, 9, COUNTER, UNPRICED, None)
    assert (told.status, told.settled_at, told.base, told.cut) == (Status.PARTIAL, 9, "", None)
    assert told.messages == opening_of(exchange.prepared, 7).messages
    assert len(told.arrivals) == len(told.messages)
    assert [(reply.body.message.text, reply.partial) for reply in told.replies] == [("one", False), ("tw", True)]
    assert all(reply.body.tokens > 0 for reply in told.replies)
    expected = {
        "usage": usage,
        "finish_reasons": ["stop", None],
        "upstream_model": "m-2",
        "upstream_status": 200,
        "error": "it broke",
    }
    assert {name: told.receipt[name] for name in expected} == expected
    assert set(told.receipt["timings"]) == {"planned"}
    assert orjson.loads(orjson.dumps(told.receipt)) == told.receipt


async def test_a_receipt_holds_only_what_every_format_takes(talk: Talk) -> None:
    usage = {"prompt_tokens": 3, "tier": "a\ud83d", "n": 2**70}
    exchange = await first(talk, request_of(SAID))
    told = settlement_of(exchange, Answered(status=Status.COMPLETE, usage=usage), 9, COUNTER, UNPRICED, None)
    assert msgpack.decode(msgpack.encode(told.receipt))["usage"] == {
        "prompt_tokens": 3,
        "tier": "a\ufffd",
        "n": float(2**70),
    }


async def test_a_failure_is_settled_without_replies(talk: Talk) -> None:
    exchange = await first(talk, request_of(SAID))
    told = settlement_of(
        exchange, Answered(status=Status.FAILED, error=UpstreamTimeout("late").message), 9, COUNTER, UNPRICED, None
    )
    assert (told.replies, told.receipt["error"], told.receipt["upstream_status"]) == ((), "late", None)


@pytest.mark.parametrize(
    ("destination", "headers", "query"),
    [
        (DESTINATION, [(b"Authorization", b"Bearer sk-of-the-client")], b""),
        (DESTINATION, [(b"x-api-key", b"sk-of-the-client")], b""),
        (replace(DESTINATION, authorization=b"Bearer sk-of-the-client", forwards_credentials=False), [], b""),
        (replace(DESTINATION, api_key=b"sk-of-the-client", forwards_credentials=False), [], b""),
        (replace(DESTINATION, forwards_query=True), [], b"key=sk-of-the-client"),
        (replace(DESTINATION, forwards_query=True), [], b"api-version=2024-10-21&Api-Key=sk%2Dof%2Dthe%2Dclient"),
        (replace(DESTINATION, forwards_query=True), [], b"code=sk-of-the-client"),
    ],
)
async def test_a_key_that_an_error_repeats_is_not_stored(
    talk: Talk, destination: Destination, headers: list[tuple[bytes, bytes]], query: bytes
) -> None:
    exchange = await first(talk, request_of(SAID))
    call = replace(exchange.prepared.call, headers=headers, query=query)
    exchange.prepared = replace(exchange.prepared, destination=destination, call=call)
    failed = Answered(status=Status.FAILED, error="Incorrect API key: sk-of-the-client.", upstream_status=401)
    told = settlement_of(exchange, failed, 9, COUNTER, UNPRICED, None)
    assert told.receipt["error"] == "Incorrect API key: [key]."


async def test_the_address_that_an_error_repeats_is_stored_but_for_its_key(talk: Talk) -> None:
    exchange = await first(talk, request_of(SAID))
    query = b"api-version=2024-10-21&key=AIza%2Fof%2Fthe%2Fclient"
    call, destination = replace(exchange.prepared.call, query=query), replace(DESTINATION, forwards_query=True)
    exchange.prepared = replace(exchange.prepared, destination=destination, call=call)
    failed = Answered(status=Status.FAILED, error=f"no /v1/chat/completions?{query.decode()}", upstream_status=404)
    told = settlement_of(exchange, failed, 9, COUNTER, UNPRICED, None)
    assert told.receipt["error"] == "no /v1/chat/completions?api-version=2024-10-21&key=[key]"


async def test_a_placeholder_for_a_key_is_not_looked_for(talk: Talk) -> None:
    exchange = await first(talk, request_of(SAID))
    call = replace(exchange.prepared.call, headers=[(b"authorization", b"Bearer none")])
    exchange.prepared = replace(exchange.prepared, call=call)
    failed = Answered(status=Status.FAILED, error="none of the models answers", upstream_status=503)
    told = settlement_of(exchange, failed, 9, COUNTER, UNPRICED, None)
    assert told.receipt["error"] == "none of the models answers"


async def test_arrival_changes_are_stored_of_new_messages_only(talk: Talk) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    long = "\n".join(f"line {number} with some words in it" for number in range(99))
    block: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": long},
    ]
    await talk.say("hello", "hi")
    past = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    request = request_of([*past, {"role": "user", "content": "go"}, *block])
    exchange = await first(talk, request, on_arrival=[{"type": "truncate_tool_output", "max_lines": 2}])
    told = settlement_of(exchange, Answered(status=Status.COMPLETE), 9, COUNTER, UNPRICED, None)
    assert [body.message.role for body in told.messages] == ["user", "assistant", "tool"]
    assert [[change.edit for change in changes] for changes in told.arrivals] == [[], [], ["truncate_tool_output"]]
    assert told.arrivals[2][0].position == 4


@pytest.mark.parametrize("moves", [True, False])
async def test_a_cut_is_stored_only_where_it_moved(talk: Talk, moves: bool) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    rounds: list[dict[str, Any]] = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ]
    trigger = {"every_request": True} if moves else {"tool_calls": 9}
    policy = {"trigger": trigger, "edits": [{"type": "keep_tool_calls", "last": 0}]}
    exchange = await first(talk, request_of([*rounds, *SAID]), **policy)
    told = settlement_of(exchange, Answered(status=Status.COMPLETE), 9, COUNTER, UNPRICED, None)
    assert (told.cut is not None) == moves
    assert (told.tokens_sent < told.tokens_before) == moves


async def test_the_receipt_holds_the_cost(talk: Talk) -> None:
    exchange = await first(talk, request_of(SAID))
    assert settlement_of(exchange, Answered(status=Status.COMPLETE), 9, COUNTER, PRICED, None).receipt["cost"] == 0.25
    assert settlement_of(exchange, Answered(status=Status.COMPLETE), 9, COUNTER, UNPRICED, None).receipt["cost"] is None


async def test_what_a_cut_kept_is_stored_by_node_and_by_place(talk: Talk) -> None:
    await talk.say("one", "1")
    await talk.say("two", "2")
    past = [
        {"role": role, "content": text}
        for role, text in (("user", "one"), ("assistant", "1"), ("user", "two"), ("assistant", "2"))
    ]
    policy = {
        "trigger": {"messages": 3},
        "target": {"tokens": 1},
        "keep": {"rounds": 1, "spans": 1, "first_user": True},
        "edits": [{"type": "drop_oldest"}],
    }
    exchange = await first(talk, request_of([*past, *SAID]), **policy)
    told = settlement_of(exchange, Answered(status=Status.COMPLETE), 9, COUNTER, UNPRICED, None)
    assert told.cut is not None
    assert told.kept is not None
    assert [(gap.start, gap.stop) for gap in told.cut.gaps] == [(1, 4)]
    assert told.kept == Kept(nodes=exchange.prepared.history.nodes[:1], messages=(0,))
    # Of a window nobody knows what its branch had before it.
    history = replace(exchange.prepared.history, start=2)
    window = Exchange(replace(exchange.prepared, history=history), SERVICES)
    assert settlement_of(window, Answered(status=Status.COMPLETE), 9, COUNTER, UNPRICED, None).kept is None


async def test_events_are_timed_in_milliseconds(talk: Talk) -> None:
    made = (await first(talk, request_of(SAID))).prepared
    exchange = Exchange(replace(made, received=time.monotonic() - 2), SERVICES)
    exchange.mark("late")
    assert exchange.timings["late"] >= 2000


async def test_what_follows_a_settlement_is_done_even_if_the_client_leaves_meanwhile(talk: Talk) -> None:
    exchange = await first(talk, request_of(SAID))
    stored, going_on = asyncio.Event(), asyncio.Event()
    settled = SimpleNamespace(replies=("node",))
    done: list[Any] = []

    async def settle(*_: object) -> Any:
        going_on.set()
        await stored.wait()
        return settled

    background = Background()
    knowledge = SimpleNamespace(now=9, learn=lambda *_: None)
    store = SimpleNamespace(settle=settle)
    services: Any = SimpleNamespace(
        background=background,
        knowledge=knowledge,
        store=store,
        counter=COUNTER,
        counts=Meters(),
        used_by=None,
        loader=SimpleNamespace(remember=lambda *_: None),
    )
    exchange._services = services
    partial = Answered(status=Status.PARTIAL, replies=((message("assistant", "tw"), True),))
    settling = background.start(exchange.settle(partial, done.append))
    await going_on.wait()
    settling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await settling
    stored.set()
    await background.drain()
    assert done == [settled]
