"""The body that goes upstream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from proxy.conversation import ROOT, Arrival, Kind
from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.dialects.chat.request import ChatRequest, parse_chat_request
from proxy.pipeline.body import Sending, body_of_view
from proxy.pipeline.past import History
from proxy.trimming import Entry, Plan, Summary

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "one"}
SAID = {"role": "assistant", "content": "two"}
MORE = {"role": "user", "content": "three"}
MARK = {"mode": "explicit"}


def request_of(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    # Spaces that nobody else would write: whether they are there tells whose bytes these are.
    return parse_chat_request(
        orjson.dumps({"model": "m", "messages": messages, **fields}, option=orjson.OPT_INDENT_2)
    )


def past_of(request: ChatRequest, kind: Kind = Kind.RESEND, stored: Sequence[Message] = ()) -> History:
    entries = [
        Entry(message=message.without_own_fields(), tokens=5, ref="ref_", position=place)
        for place, message in enumerate((*stored, *request.messages))
    ]
    return History(
        id="s",
        arrival=Arrival(kind=kind, base=ROOT, fresh=0),
        digest="d",
        entries=tuple(entries),
        nodes=(),
        fresh=(),
        instructions=request.instructions,
        size=len(request.raw),
    )


def plan_of(past: History, view: Sequence[Message] | None = None, **more: Any) -> Plan:
    shown = tuple(entry.message for entry in past.entries) if view is None else tuple(view)
    fixed: dict[str, Any] = {
        "policy": "p",
        "version": "v",
        "cut": None,
        "moved": False,
        "fired": "",
        "arrivals": (),
    }
    return Plan(**fixed, tokens_before=9, tokens_sent=9, view=shown, **more)


def body_of(request: ChatRequest, past: History, plan: Plan, **how: Any) -> bytes:
    given: dict[str, Any] = {"add_usage": False, "drop_fields": (), **how}
    return body_of_view(request, past, plan, Sending(**given))


def messages_of(body: bytes) -> list[Any]:
    messages: list[Any] = orjson.loads(body)["messages"]
    return messages


def test_what_nobody_touched_is_the_clients_own_bytes() -> None:
    request = request_of(SYSTEM, ASKED, SAID, MORE)
    past = past_of(request)
    assert body_of(request, past, plan_of(past)) is request.raw


def test_our_own_fields_never_go_out() -> None:
    request = request_of(SYSTEM, {**ASKED, "agent": "boss", "is_internal": True})
    past = past_of(request)
    assert messages_of(body_of(request, past, plan_of(past))) == [SYSTEM, ASKED]


def test_what_is_left_out_goes_and_the_rest_keeps_its_bytes() -> None:
    request = request_of(SYSTEM, ASKED, SAID, MORE, temperature=0.50)
    past = past_of(request)
    body = body_of(request, past, plan_of(past, request.messages[2:]))
    assert messages_of(body) == [SYSTEM, MORE]
    assert request.instructions[0].raw in body
    assert request.messages[2].raw in body
    assert orjson.loads(body)["temperature"] == 0.5


def test_an_append_brings_what_is_stored() -> None:
    request = request_of(MORE)
    stored = [ChatMessage.of(ASKED), ChatMessage.of(SAID)]
    past = past_of(request, Kind.APPEND, stored)
    assert messages_of(body_of(request, past, plan_of(past))) == [ASKED, SAID, MORE]


def test_an_append_with_nothing_before_it_is_composed_too() -> None:
    request = request_of(MORE)
    past = past_of(request, Kind.APPEND)
    body = body_of(request, past, plan_of(past))
    assert orjson.loads(body) == orjson.loads(request.raw)


@pytest.mark.parametrize(
    ("lead", "told"),
    [([SYSTEM], "Be brief.\n\nSo far."), ([], "So far.")],
    ids=["instructed", "without instructions"],
)
def test_a_summary_that_is_merged_ends_the_instructions(lead: list[dict[str, Any]], told: str) -> None:
    request = request_of(*lead, ASKED, SAID, MORE)
    past = past_of(request)
    summary = Summary(
        text="So far.",
        role="merge",
        until=2,
        tokens=4,
        kind="statistics",
        covered_messages=2,
        covered_tokens=10,
    )
    body = body_of(request, past, plan_of(past, request.messages[2:], summary=summary))
    assert messages_of(body) == [{"role": "system", "content": told}, MORE]


def test_a_summary_in_a_message_of_its_own_is_in_the_view_already() -> None:
    request = request_of(SYSTEM, ASKED, SAID, MORE)
    past = past_of(request)
    summary = Summary(
        text="So far.",
        role="system",
        until=2,
        tokens=4,
        kind="statistics",
        covered_messages=2,
        covered_tokens=10,
    )
    view = [summary.message(request.messages[2].dialect), request.messages[2]]
    body = body_of(request, past, plan_of(past, view, summary=summary))
    assert messages_of(body) == [SYSTEM, {"role": "system", "content": "So far."}, MORE]


def marks(body: bytes) -> list[int]:
    return [
        place for place, message in enumerate(messages_of(body)) if b"breakpoint" in orjson.dumps(message)
    ]


def test_marks_stand_at_the_ends_of_what_is_settled() -> None:
    request = request_of(SYSTEM, ASKED, SAID, MORE, SAID, MORE)
    past = past_of(request)
    body = body_of(request, past, plan_of(past, settled=(1, 3)), breakpoints="openai")
    assert marks(body) == [1, 3]
    assert messages_of(body)[1]["content"] == [
        {"type": "text", "text": "one", "prompt_cache_breakpoint": MARK}
    ]
    assert [message.raw in body for message in request.messages[3:]] == [True, True]


def test_a_mark_counts_from_the_merged_instructions() -> None:
    request = request_of(ASKED, SAID, MORE)
    past = past_of(request)
    summary = Summary(
        text="So far.",
        role="merge",
        until=2,
        tokens=4,
        kind="statistics",
        covered_messages=2,
        covered_tokens=10,
    )
    plan = plan_of(past, request.messages[2:], summary=summary, settled=(1,))
    assert marks(body_of(request, past, plan, breakpoints="openai")) == [1]


@pytest.mark.parametrize(
    ("how", "settled"),
    [({}, (1,)), ({"breakpoints": "none"}, (1,)), ({"breakpoints": "openai"}, ())],
    ids=["not taken", "not wanted", "nothing settled"],
)
def test_otherwise_there_is_none(how: dict[str, Any], settled: tuple[int, ...]) -> None:
    request = request_of(SYSTEM, ASKED, SAID, MORE)
    past = past_of(request)
    assert body_of(request, past, plan_of(past, settled=settled), **how) is request.raw


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
def test_a_client_that_marks_itself_is_left_alone(said: dict[str, Any]) -> None:
    request = parse_chat_request(
        orjson.dumps({"model": "m", "messages": [SYSTEM, ASKED, SAID, MORE], **said})
    )
    past = past_of(request)
    assert body_of(request, past, plan_of(past, settled=(1,)), breakpoints="openai") is request.raw


def test_a_key_goes_along_where_the_client_has_none() -> None:
    for fields, key in (({}, "ours"), ({"prompt_cache_key": "mine"}, "mine")):
        request = request_of(ASKED, **fields)
        past = past_of(request)
        body = body_of(request, past, plan_of(past), key="ours")
        assert orjson.loads(body)["prompt_cache_key"] == key


def test_fields_are_dropped_and_usage_is_asked_for() -> None:
    request = request_of(ASKED, stream=True, metadata={"session_id": "s"})
    past = past_of(request)
    body = orjson.loads(
        body_of(request, past, plan_of(past), add_usage=True, drop_fields=["metadata.session_id"])
    )
    assert (body["stream_options"], "metadata" in body) == ({"include_usage": True}, False)
