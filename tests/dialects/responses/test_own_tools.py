"""The proxy's own tools: offered, and their calls taken out of bodies and streams."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.dialects import ToolDefinition, dialect_named
from proxy.dialects.own_tools import BROKE_OFF, MOST_TOOLS, SAID_NOTHING, STOPPED, BodyFilter, StreamFilter
from proxy.dialects.responses.reply import event_of, item_events
from proxy.dialects.sse import Event, EventDecoder
from tests.dialects.responses.test_items import REASONING, said
from tests.dialects.responses.test_reply import USAGE, response
from tests.dialects.responses.test_request import HELLO, asked

API = dialect_named("responses")
RECALL = ToolDefinition(name="recall", description="d", parameters=(("query", "What. {unset} for all."),))
LOOK = {"type": "function", "name": "look", "parameters": {}}
MINE = {"type": "function_call", "id": "fc_m", "call_id": "m1", "name": "recall", "arguments": '{"query":"x"}'}
THEIRS = {"type": "function_call", "id": "fc_t", "call_id": "t1", "name": "look", "arguments": "{}"}


def offered(**fields: Any) -> tuple[tuple[str, ...], Any]:
    offer = API.requests.offer_tools(asked(HELLO, **fields), [RECALL])
    return offer.names, None if offer.tools is None else orjson.loads(offer.tools)


def test_tools_are_offered_beside_the_client_s() -> None:
    names, tools = offered(tools=[LOOK])
    assert (names, tools[0], tools[1]["name"], tools[1]["strict"]) == (("recall",), LOOK, "recall", False)
    assert "required" not in tools[1]["parameters"]
    names, tools = offered(tools=[{**LOOK, "strict": True}, {"type": "web_search"}])
    assert (tools[2]["strict"], tools[2]["parameters"]["required"]) == (True, ["query"])
    assert "Empty" in tools[2]["parameters"]["properties"]["query"]["description"]
    assert offered()[0] == ("recall",)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "none", "tools": [LOOK]},
        {"tools": [{**LOOK, "name": "recall"}]},
        {"tools": [{**LOOK, "name": f"t{n}"} for n in range(MOST_TOOLS)]},
    ],
)
def test_tools_are_not_offered_where_there_is_no_room(fields: dict[str, Any]) -> None:
    assert offered(**fields) == ((), fields["tools"])


# ---------------------------------------------------------------------------------------------- bodies


def body_filter() -> BodyFilter[Any]:
    return API.replies.body_filter(["recall"])


def body(*output: Any, **fields: Any) -> bytes:
    return orjson.dumps(response(*output, **fields))


def texts(shown: bytes) -> list[Any]:
    return [part["text"] for each in orjson.loads(shown)["output"] for part in each.get("content", [])]


def test_a_body_without_calls_of_ours_stays() -> None:
    found = body_filter()
    for text in (body(said("a"), THEIRS), b"no", b"[]"):
        assert found.take(text) == text
        assert not found.again
    assert found.calls.own == ()


def test_a_body_that_calls_ours_alone_is_followed_by_another() -> None:
    found = body_filter()
    assert found.take(body(REASONING, said("I look."), MINE)) == b""
    assert found.again
    assert [call.name for call in found.calls.own] == ["recall"]
    assert not found.calls.others
    assert [each["type"] for each in found.calls.message.data["items"]] == ["reasoning", "message", "function_call"]
    found.next(may_ask=True)
    shown = orjson.loads(found.take(body({**REASONING, "id": "rs_2"}, said("Found."))))
    assert [each["type"] for each in shown["output"]] == ["reasoning", "message", "reasoning", "message"]
    assert shown["usage"]["input_tokens"] == 2 * USAGE["input_tokens"]
    assert (found.usage or {})["prompt_tokens"] == 2 * USAGE["input_tokens"]
    assert (found.rounds, found.last.text) == (1, "Found.")


def test_a_body_that_calls_theirs_too_is_the_last() -> None:
    found = body_filter()
    shown = orjson.loads(found.take(body(REASONING, MINE, THEIRS)))
    assert [each.get("name") for each in shown["output"]] == [None, "look"]
    assert (found.again, found.calls.others, len(found.calls.own)) == (False, True, 1)


def test_a_reply_that_says_nothing_is_told_so() -> None:
    found = body_filter()
    found.take(body(MINE))
    found.next(may_ask=True)
    assert texts(found.take(body(REASONING))) == [SAID_NOTHING]
    found = body_filter()
    found.take(body(MINE))
    found.next(may_ask=False)
    assert texts(found.take(body(MINE))) == [STOPPED]
    found = body_filter()
    cut = {**MINE, "arguments": '{"qu', "status": "incomplete"}
    assert texts(found.take(body(cut, status="incomplete"))) == [BROKE_OFF]
    assert found.calls.message.data["items"] == []
    found = body_filter()
    found.take(body(said("a"), MINE))
    assert texts(found.give_up()) == ["a", STOPPED]
    assert found.last.text == STOPPED


def test_calls_get_what_a_request_needs() -> None:
    found = body_filter()
    bare = {**MINE, "call_id": ""}
    taken = {**MINE, "call_id": "call_0"}
    found.take(body(bare, taken, {**MINE, "arguments": "x"}, {**MINE, "arguments": None}))
    calls = found.calls
    assert [call.id for call in calls.own] == ["call_0_", "call_0", "call_2", "call_3"]
    assert [each["arguments"] for each in calls.message.data["items"]] == ['{"query":"x"}'] * 2 + ["{}"] * 2
    found = body_filter()
    found.take(body(MINE, usage=5))
    assert found.usage is None


# --------------------------------------------------------------------------------------------- streams


def stream_filter() -> StreamFilter[Any]:
    return API.replies.stream_filter(["recall"], False)


def events(*output: dict[str, Any], end: str = "completed", **fields: Any) -> list[Event]:
    made: list[tuple[str, dict[str, Any]]] = [("response.created", {"response": response(status="in_progress")})]
    for place, item in enumerate(output):
        made += item_events(place, item)
    made.append((f"response.{end}", {"response": response(*output, status=end, **fields)}))
    raw = [event_of(name, {"type": name, **data, "sequence_number": at}) for at, (name, data) in enumerate(made)]
    return EventDecoder(API.replies.ends).feed(b"".join(raw))


def run(found: StreamFilter[Any], given: list[Event]) -> bytes:
    """Relay a round as the pipeline does; return what is shown."""
    shown, tail = b"", b""
    for each in given:
        if each.is_done:
            shown, tail = shown + found.end(each), each.raw
        else:
            shown += found.take(each)
    return shown if found.again else shown + found.closing(tail)


def told(shown: bytes) -> list[dict[str, Any]]:
    return [orjson.loads(each.data or b"") for each in EventDecoder().feed(shown)]


def output_of(shown: bytes) -> list[dict[str, Any]]:
    output: list[dict[str, Any]] = told(shown)[-1]["response"]["output"]
    return output


def test_a_stream_without_calls_of_ours_stays() -> None:
    found = stream_filter()
    given = events(REASONING, said("a"), THEIRS)
    assert run(found, given) == b"".join([each.raw for each in given])
    assert (found.again, found.hides, found.said, found.ended) == (False, False, True, True)
    assert found.reply.replies.finish_reasons == ("completed",)
    assert found.end() == b""


def test_a_stream_that_calls_ours_alone_is_followed_by_another() -> None:
    found = stream_filter()
    shown = run(found, events(REASONING, said("I look."), MINE))
    assert found.again
    assert found.hides
    assert [call.name for call in found.calls.own] == ["recall"]
    found.next(may_ask=True)
    shown += run(found, events({**REASONING, "id": "rs_2"}, said("Found.")))
    data = told(shown)
    assert [each["sequence_number"] for each in data] == list(range(len(data)))
    assert sorted({each["output_index"] for each in data if "output_index" in each}) == [0, 1, 2, 3]
    assert [each["type"] for each in output_of(shown)] == ["reasoning", "message", "reasoning", "message"]
    assert (found.usage or {})["prompt_tokens"] == 2 * USAGE["input_tokens"]
    assert found.last.text == "Found."
    assert found.reply.replies.messages[0].text == "I look.Found."
    assert found.rounds == 1


def test_a_stream_that_calls_theirs_too_is_the_last() -> None:
    found = stream_filter()
    shown = run(found, events(REASONING, MINE, THEIRS))
    assert [each.get("name") for each in output_of(shown)] == [None, "look"]
    assert {each["output_index"] for each in told(shown) if "output_index" in each} == {0, 1}
    assert (found.again, found.calls.others) == (False, True)


def test_a_stream_that_says_nothing_is_told_so() -> None:
    found = stream_filter()
    run(found, events(MINE))
    found.next(may_ask=False)
    shown = run(found, events(MINE))
    assert [each["content"][0]["text"] for each in output_of(shown)] == [STOPPED]
    assert found.last.text == STOPPED
    found = stream_filter()
    shown = run(found, events({**MINE, "arguments": '{"qu', "status": "incomplete"}, end="incomplete"))
    assert [each["content"][0]["text"] for each in output_of(shown)] == [BROKE_OFF]
    found = stream_filter()
    run(found, events(said("a"), MINE))
    given_up = found.give_up()
    assert [each["content"][0]["text"] for each in output_of(given_up)] == ["a", STOPPED]
    assert found.ended


def test_what_ends_in_another_way_is_relayed() -> None:
    found = stream_filter()
    opened, *rest = events(said("a"))
    assert found.take(opened) == opened.raw
    assert not found.said
    assert (found.take(rest[0]), found.end()) == (rest[0].raw, b"")
    assert found.closing(b"data: [DONE]\n\n") == b"data: [DONE]\n\n"
    failed = events(MINE, end="failed", error={"message": "no"})
    found = stream_filter()
    assert run(found, failed).endswith(failed[-1].raw)
    assert found.reply.failed
    found = stream_filter()
    odd = Event(raw=b": hi\n\n", data=None)
    assert (found.take(odd), found.take(Event(raw=b"data: x\n\n", data=b"x"))) == (odd.raw, b"data: x\n\n")
    unnumbered = Event(raw=b"data: {}\n\n", data=b"{}")
    assert found.take(unnumbered) == unnumbered.raw


def test_an_end_without_a_name_is_an_end() -> None:
    found = stream_filter()
    given = [Event(raw=b"data: %b\n\n" % (each.data or b""), data=each.data) for each in events(said("a"))]
    assert b"".join([found.take(each) for each in given]) == b"".join([each.raw for each in given])
    assert found.ended
    found = stream_filter()
    for each in events(MINE):
        assert found.take(Event(raw=each.raw, data=each.data)) == (each.raw if each.name == "response.created" else b"")
    assert found.again
    found.next(may_ask=True)
    assert found.take(events()[0]) == b""
    assert found.take(Event(raw=b"", data=b'{"type":"response.output_item.added","output_index":0}')) != b""
    bad = Event(raw=b"x", data=b'{"type":"response.completed"}')
    assert found.end(bad) == b""
