"""The body that goes upstream, and sending it again: after an overflow, or where roles need another order."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from cachetools import LRUCache
from msgspec.structs import replace

from proxy.config import Settings
from proxy.conversation import ROOT, Arrival, Kind
from proxy.dialects import Message, Request
from proxy.dialects.chat import CHAT
from proxy.dialects.chat.message import ChatMessage
from proxy.dialects.chat.request import parse_chat_request
from proxy.errors import UpstreamBusy
from proxy.models import Catalogue
from proxy.pipeline import ClientRequest
from proxy.pipeline.context import RequestContext
from proxy.pipeline.history import History
from proxy.pipeline.prepare import Prepared
from proxy.pipeline.receipt import report_of
from proxy.pipeline.send import RESCUED, Attempt, UpstreamSender, cache_key
from proxy.store import Status
from proxy.trimming import Entry, Plan, PlanningContext, Policy, Summary
from proxy.upstream import Answer
from tests.support.house import LONG, SESSION, Heard, House, opened
from tests.support.upstream import Upstream as Provider

pytestmark = pytest.mark.anyio


WINDOW = "echo+ctx:4000"


async def test_a_request_that_is_too_long_is_trimmed_and_sent_once_more(house: House, provider: Provider) -> None:
    client = await house.ask(WINDOW, messages=LONG)
    assert (client.status, len(provider.log)) == (200, 2)
    row = await house.last()
    assert RESCUED in row.receipt["warnings"]
    assert row.status is Status.COMPLETE
    assert row.tokens_sent * 2 <= row.tokens_before
    assert client.headers["x-context-tokens-sent"] == str(row.tokens_sent)


async def test_the_query_of_the_client_is_not_sent_to_a_route(provider: Provider, tmp_path: Path) -> None:
    routes = [{"models": ["echo+*"], "base_url": provider.base_url, "api_key": "sk-route"}]
    provider.forget()
    async with opened(provider, tmp_path, upstream={"routes": routes}) as house:
        for model in ("echo", "echo+ctx:4000"):
            body = orjson.dumps({"model": model, "messages": [{"role": "user", "content": "hi"}]})
            await house.chat.answer(
                ClientRequest(
                    dialect=CHAT, tenant="t", headers=[SESSION], query=b"api-version=1&key=sk-client", body=body
                ),
                Heard(),
            )
    base, route = provider.log
    assert (base.query, route.query) == ("api-version=1&key=sk-client", "")
    assert ("authorization", "Bearer sk-route") in route.headers


async def test_usage_that_is_refused_after_an_overflow_is_not_asked_for_again(
    house: House, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may look at the length first, and at the fields of what is short enough then."""
    sent: list[bool] = []
    ask = house.upstream.ask

    async def refusing(*given: Any) -> Answer:
        destination, method, path, fields, body = given
        asked = orjson.loads(body)
        sent.append("stream_options" in asked)
        if len(asked["messages"]) < len(LONG) and sent[-1]:
            body = orjson.dumps({**asked, "model": "plain"})
        return await ask(destination, method, path, fields, body)

    monkeypatch.setattr(house.upstream, "ask", refusing)
    client = await house.ask(WINDOW, messages=LONG, stream=True)
    assert (client.status, client.got.endswith(b"data: [DONE]\n\n")) == (200, True)
    assert sent == [True, True, False]
    assert RESCUED in (await house.last()).receipt["warnings"]
    provider.forget()
    await house.ask(WINDOW, stream=True)
    assert sent[3:] == [False]  # it is remembered


async def test_an_error_after_a_rescue_reports_what_was_sent_last(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = house.upstream.ask
    asked: list[bytes] = []

    async def busy(*given: Any) -> Answer:
        asked.append(given[-1])
        if len(asked) == 2:
            raise UpstreamBusy("All are in use.")
        return await ask(*given)

    monkeypatch.setattr(house.upstream, "ask", busy)
    client = await house.ask(WINDOW, messages=LONG)
    assert isinstance(client.error, UpstreamBusy)
    row = await house.last()
    assert RESCUED in client.headers["x-context-warning"]
    assert client.headers["x-context-tokens-sent"] == str(row.tokens_sent)
    assert client.headers["x-context-messages-sent"] == str(len(orjson.loads(asked[1])["messages"]))


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_rescue_that_fails_frees_the_connection(
    house: House, provider: Provider, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    why: type[BaseException] = asyncio.CancelledError if cancelled else ZeroDivisionError

    async def fail(*_: Any) -> bool:
        raise why

    with monkeypatch.context() as patch:
        patch.setattr(UpstreamSender, "_trim_harder", fail)
        with pytest.raises(why):
            await house.ask(WINDOW, messages=LONG)
    await house.background.drain()
    row = await house.last()
    assert row.status is (Status.CANCELLED if cancelled else Status.FAILED)
    assert len(provider.log) == 1
    assert (await house.ask()).status == 200  # there is one connection only


async def test_a_request_that_cannot_get_shorter_is_not_sent_again(house: House, provider: Provider) -> None:
    client = await house.ask(WINDOW, messages=[{"role": "user", "content": "parcel " * 6_000}])
    assert (client.status, len(provider.log)) == (400, 1)
    assert orjson.loads(client.got)["error"]["code"] == "context_length_exceeded"
    assert RESCUED not in (await house.last()).receipt["warnings"]


async def test_a_second_plan_is_made_where_the_first_is_too_long_by_its_bytes(house: House, provider: Provider) -> None:
    """Much of what is left here is not text: it counts for more with upstream than the counter thinks."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    short: list[dict[str, Any]] = []
    for number in range(160):
        called = {"role": "assistant", "content": None, "tool_calls": [{**call, "id": f"c{number}"}]}
        short += [called, {"role": "tool", "tool_call_id": f"c{number}", "content": "1"}]
    said = [*LONG[:-1], LONG[-1], *short]
    client = await house.ask(WINDOW, messages=said)
    assert (client.status, len(provider.log)) == (200, 2)


# --------------------------------------------------------------------------------- orders of roles

TURNS = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
LATE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "1"}]
LATE += [{"role": "system", "content": "S"}, {"role": "user", "content": "b"}]


async def times_asked(house: House, provider: Provider, model: str, said: list[dict[str, Any]]) -> int:
    """Return how often upstream was asked until it was content."""
    provider.forget()
    assert (await house.ask(model, messages=said)).status == 200
    return len(provider.log)


async def test_the_order_that_a_model_insists_on_is_remembered_and_added_up(house: House, provider: Provider) -> None:
    model = "strict:one-system,alternate"
    assert await times_asked(house, provider, model, LATE) == 2
    assert await times_asked(house, provider, model, LATE) == 1
    assert await times_asked(house, provider, model, TURNS) == 2
    assert await times_asked(house, provider, model, TURNS) == 1
    assert await times_asked(house, provider, model, LATE) == 1
    assert await times_asked(house, provider, f"{model}+another", TURNS) == 2


async def test_orders_are_remembered_of_the_models_that_were_used_last(house: House, provider: Provider) -> None:
    house.chat._sender._orders = LRUCache(2)
    models = {name: f"strict:alternate+{name}" for name in "xyz"}
    for name in "xyxz":
        await times_asked(house, provider, models[name], TURNS)
    asked = [await times_asked(house, provider, models[name], TURNS) for name in "xzy"]
    assert asked == [1, 1, 2]


# ---------------------------------------------------------------------------------------- the body

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "one"}
SAID = {"role": "assistant", "content": "two"}
MORE = {"role": "user", "content": "three"}
MARK = {"mode": "explicit"}


def request_of(*messages: dict[str, Any], **fields: Any) -> Request:
    # Spaces that nobody else would write: whether they are there tells whose bytes these are.
    return parse_chat_request(orjson.dumps({"model": "m", "messages": messages, **fields}, option=orjson.OPT_INDENT_2))


def history_of(request: Request, kind: Kind = Kind.RESEND, stored: Sequence[Message] = ()) -> History:
    entries = [
        Entry(message=message.without_own_fields(), tokens=5, ref="ref_", position=place)
        for place, message in enumerate((*stored, *request.messages))
    ]
    return History(
        id="s",
        arrival=Arrival(kind=kind, base=ROOT, known=0),
        composed=kind is Kind.APPEND,
        digest="d",
        entries=tuple(entries),
        nodes=(),
        fresh=(),
        instructions=request.instructions,
        size=len(request.raw),
    )


def plan_of(history: History, view: Sequence[Message] | None = None, **more: Any) -> Plan:
    shown = tuple(entry.message for entry in history.entries) if view is None else tuple(view)
    fixed: dict[str, Any] = {"policy": "p", "version": "v", "cut": None, "trimmed": False, "fired": "", "arrivals": ()}
    return Plan(**fixed, tokens_before=9, tokens_sent=9, view=shown, **more)


DESTINATION: Any = SimpleNamespace(base_url="http://127.0.0.1:9/v1")
UPSTREAM: Any = None  # nothing is sent
PREPARER: Any = None  # nor planned again


def body_of(
    request: Request,
    history: History,
    plan: Plan,
    *,
    add_usage: bool = False,
    settings: dict[str, Any] | None = None,
    sender: UpstreamSender | None = None,
    **facts: Any,
) -> bytes:
    """Return the body that is sent; `facts` are known of the model."""
    planning = PlanningContext(count=lambda _: 5)
    prepared = Prepared(
        received=0.0,
        call=ClientRequest(dialect=CHAT, tenant="t", headers=[], query=b"", body=request.raw),
        request=request,
        context=RequestContext(dialect=CHAT, tenant="t", policy_name="p", policy=Policy()),
        history=history,
        planning=planning,
        destination=DESTINATION,
        instructions_tokens=0,
        facts=replace(Catalogue().facts("m", None), **{"breakpoints": "none", **facts}),
        report=report_of("e", history, plan, planning),
        own_tools=(),
        tools=request.tools,
        finishing=None,
    )
    sender = sender or UpstreamSender(Settings.model_validate(settings or {}), UPSTREAM, PREPARER, b"secret")
    attempt = Attempt(
        prepared=prepared, report=prepared.report, told=lambda *_: None, adds_usage=add_usage, orders=frozenset()
    )
    return sender._body(attempt, attempt.orders)


def messages_of(body: bytes) -> list[Any]:
    messages: list[Any] = orjson.loads(body)["messages"]
    return messages


def test_an_untouched_request_is_sent_as_the_clients_own_bytes() -> None:
    request = request_of(SYSTEM, ASKED, SAID, MORE)
    history = history_of(request)
    assert body_of(request, history, plan_of(history)) is request.raw


def test_our_own_fields_are_never_sent() -> None:
    request = request_of(SYSTEM, {**ASKED, "agent": "boss", "is_internal": True})
    history = history_of(request)
    assert messages_of(body_of(request, history, plan_of(history))) == [SYSTEM, ASKED]


def test_dropped_messages_are_left_out_and_the_rest_keeps_its_bytes() -> None:
    request = request_of(SYSTEM, ASKED, SAID, MORE, temperature=0.50)
    history = history_of(request)
    body = body_of(request, history, plan_of(history, request.messages[2:]))
    assert messages_of(body) == [SYSTEM, MORE]
    assert request.instructions[0].raw in body
    assert request.messages[2].raw in body
    assert orjson.loads(body)["temperature"] == 0.5


def test_an_append_is_sent_with_the_stored_messages() -> None:
    request = request_of(MORE)
    stored = [ChatMessage.of(ASKED), ChatMessage.of(SAID)]
    history = history_of(request, Kind.APPEND, stored)
    assert messages_of(body_of(request, history, plan_of(history))) == [ASKED, SAID, MORE]


def test_an_append_with_nothing_stored_is_sent_as_it_is() -> None:
    request = request_of(MORE)
    history = history_of(request, Kind.APPEND)
    body = body_of(request, history, plan_of(history))
    assert orjson.loads(body) == orjson.loads(request.raw)


@pytest.mark.parametrize(
    ("lead", "told"), [([SYSTEM], "Be brief.\n\nSo far."), ([], "So far.")], ids=["instructed", "without instructions"]
)
def test_a_merged_summary_ends_the_instructions(lead: list[dict[str, Any]], told: str) -> None:
    request = request_of(*lead, ASKED, SAID, MORE)
    history = history_of(request)
    summary = Summary(
        text="So far.", role="merge", until=2, tokens=4, kind="statistics", covered_messages=2, covered_tokens=10
    )
    body = body_of(request, history, plan_of(history, request.messages[2:], summary=summary))
    assert messages_of(body) == [{"role": "system", "content": told}, MORE]


def test_a_summary_in_a_message_of_its_own_is_part_of_the_view() -> None:
    request = request_of(SYSTEM, ASKED, SAID, MORE)
    history = history_of(request)
    summary = Summary(
        text="So far.", role="system", until=2, tokens=4, kind="statistics", covered_messages=2, covered_tokens=10
    )
    view = [summary.message(CHAT), request.messages[2]]
    body = body_of(request, history, plan_of(history, view, summary=summary))
    assert messages_of(body) == [SYSTEM, {"role": "system", "content": "So far."}, MORE]


def marks(body: bytes) -> list[int]:
    return [place for place, message in enumerate(messages_of(body)) if b"breakpoint" in orjson.dumps(message)]


def test_cache_marks_stand_where_settled_parts_end() -> None:
    request = request_of(SYSTEM, ASKED, SAID, MORE, SAID, MORE)
    history = history_of(request)
    body = body_of(request, history, plan_of(history, stable_ends=(1, 3)), breakpoints="openai")
    assert marks(body) == [1, 3]
    assert messages_of(body)[1]["content"] == [{"type": "text", "text": "one", "prompt_cache_breakpoint": MARK}]
    assert [message.raw in body for message in request.messages[3:]] == [True, True]


def test_cache_marks_count_merged_instructions() -> None:
    request = request_of(ASKED, SAID, MORE)
    history = history_of(request)
    summary = Summary(
        text="So far.", role="merge", until=2, tokens=4, kind="statistics", covered_messages=2, covered_tokens=10
    )
    plan = plan_of(history, request.messages[2:], summary=summary, stable_ends=(1,))
    assert marks(body_of(request, history, plan, breakpoints="openai")) == [1]


@pytest.mark.parametrize(
    ("how", "settled"),
    [
        ({}, (1,)),
        ({"breakpoints": "openai", "settings": {"cache": {"breakpoints": "never"}}}, (1,)),
        ({"breakpoints": "openai"}, ()),
    ],
    ids=["not taken", "not wanted", "nothing settled"],
)
def test_otherwise_there_is_no_cache_mark(how: dict[str, Any], settled: tuple[int, ...]) -> None:
    request = request_of(SYSTEM, ASKED, SAID, MORE)
    history = history_of(request)
    assert body_of(request, history, plan_of(history, stable_ends=settled), **how) is request.raw


@pytest.mark.parametrize(
    "said",
    [
        {
            "messages": [
                SYSTEM,
                {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]},
                SAID,
                MORE,
            ]
        },
        {"prompt_cache_options": {"mode": "explicit"}},
        {"tools": [{"type": "function", "function": {"name": "f"}, "cache_control": {"type": "ephemeral"}}]},
    ],
    ids=lambda said: next(iter(said)),
)
def test_a_client_that_sets_cache_marks_is_left_alone(said: dict[str, Any]) -> None:
    request = parse_chat_request(orjson.dumps({"model": "m", "messages": [SYSTEM, ASKED, SAID, MORE], **said}))
    history = history_of(request)
    assert body_of(request, history, plan_of(history, stable_ends=(1,)), breakpoints="openai") is request.raw


RULES = "\n".join(f"Rule {number}: look twice." for number in range(300)) + "\n"


@pytest.mark.parametrize(
    ("prompts", "at"),
    [
        ([["Rules", "{}It is ten."], ["Rules", "{}It is eleven."]], [None, (1, RULES)]),
        ([["{}It is ten."], ["{}It is ten."]], [None, None]),
        (
            [["{}It is ten.\nOn Monday."], ["{}It is ten.\nOn Friday."], ["{}It is two."], ["{}It is two."]],
            [None, (0, f"{RULES}It is ten.\n"), (0, RULES), (0, RULES)],
        ),
        ([["{}", "It is ten."], ["{}", "Eleven."]], [None, (0, RULES)]),
        ([["{}", "It is ten."], ["{}"]], [None, None]),
        ([["{}"], ["{}", "It is ten."]], [None, (0, RULES)]),
        ([["It is ten.{}"], ["Eleven.{}"]], [None, None]),
        ([["Short. Ten."], ["Short. Two."]], [None, None]),
    ],
    ids=["changes", "stays", "changes more", "another message", "one less", "one more", "the beginning", "short"],
)
def test_a_cache_mark_stands_before_what_changes_in_the_instructions(
    prompts: list[list[str]], at: list[tuple[int, str] | None]
) -> None:
    sender = UpstreamSender(Settings(), UPSTREAM, PREPARER, b"secret")
    for texts, expected in zip(prompts, at, strict=True):
        said = [{"role": "system", "content": text.replace("{}", RULES)} for text in texts]
        request = request_of(*said, ASKED)
        history = history_of(request)
        body = body_of(request, history, plan_of(history), breakpoints="openai", sender=sender)
        sent = messages_of(body)
        shown = [
            each["content"] if isinstance(each["content"], str) else "".join(part["text"] for part in each["content"])
            for each in sent
        ]
        assert shown == [each["content"] for each in (*said, ASKED)]
        assert marks(body) == ([] if expected is None else [expected[0]])
        if expected is not None:
            assert sent[expected[0]]["content"][0] == {
                "type": "text",
                "text": expected[1],
                "prompt_cache_breakpoint": MARK,
            }


def test_instructions_behind_other_tools_share_nothing() -> None:
    sender = UpstreamSender(Settings(), UPSTREAM, PREPARER, b"secret")
    asked = [("ten", "f"), ("noon", "g"), ("ten", "f"), ("two", "g"), ("ten", "f"), ("two", "f")]
    for (hour, tool), marked in zip(asked, [False, False, False, True, False, True], strict=True):
        tools = [{"type": "function", "function": {"name": tool}}]
        request = request_of({"role": "system", "content": f"{RULES}It is {hour}."}, ASKED, tools=tools)
        history = history_of(request)
        body = body_of(request, history, plan_of(history), breakpoints="openai", sender=sender)
        assert marks(body) == ([0] if marked else [])


def test_a_cache_key_is_sent_where_the_client_sends_none() -> None:
    ours = cache_key(b"secret", "t", "s")
    for fields, key in (({}, ours), ({"prompt_cache_key": "mine"}, "mine")):
        request = request_of(ASKED, **fields)
        history = history_of(request)
        body = body_of(request, history, plan_of(history), settings={"cache": {"key": "session"}}, takes_key=True)
        assert orjson.loads(body)["prompt_cache_key"] == key


def test_session_fields_are_dropped_and_usage_is_asked_for() -> None:
    request = request_of(ASKED, stream=True, metadata={"session_id": "s"})
    history = history_of(request)
    body = orjson.loads(
        body_of(
            request,
            history,
            plan_of(history),
            add_usage=True,
            settings={"sessions": {"body_fields": ["metadata.session_id"]}},
        )
    )
    assert (body["stream_options"], "metadata" in body) == ({"include_usage": True}, False)


def test_a_cache_key_is_short_opaque_and_stable() -> None:
    key = cache_key(b"secret", "team-a", "session-1")
    assert key == cache_key(b"secret", "team-a", "session-1") == "c3b590478b0e9dbc5cc9735f418ca993"
    assert re.fullmatch(r"[0-9a-f]{32}", key)


def test_no_two_sessions_share_a_cache_key() -> None:
    keys = {
        cache_key(secret, tenant, session)
        for secret in (b"a", b"b")
        for tenant, session in (("a", "bc"), ("ab", "c"), ('a","b', "c"), ("", "abc"), ("é", "\ud83d"))
    }
    assert len(keys) == 10
