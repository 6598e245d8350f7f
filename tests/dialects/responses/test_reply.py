"""What a response says, as a body and as a stream; answers and errors of the proxy's own."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from openai.types.responses import Response

from proxy.dialects import Replies, begun_under, dialect_named
from proxy.dialects.responses.reply import event_of
from proxy.dialects.sse import Event, EventDecoder
from proxy.errors import UpstreamError
from tests.dialects.responses.test_items import CALL, CUSTOM, REASONING, said, turn

API = dialect_named("responses")
USAGE: dict[str, Any] = {
    "input_tokens": 9,
    "output_tokens": 2,
    "total_tokens": 11,
    "input_tokens_details": {"cached_tokens": 4},
}
TOLD = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11, "prompt_tokens_details": {"cached_tokens": 4}}


def response(*output: Any, **fields: Any) -> dict[str, Any]:
    return {"id": "resp_1", "model": "m", "status": "completed", "output": list(output), "usage": USAGE, **fields}


def read(data: Any) -> Replies:
    return API.replies.read(data if isinstance(data, bytes) else orjson.dumps(data))


def event(name: str, **data: Any) -> Event:
    (made,) = EventDecoder(API.replies.ends).feed(event_of(name, {"type": name, **data}))
    return made


def streamed(*events: Event) -> Replies:
    reader = API.replies.reader()
    assert not any([reader.take(each) for each in events])
    return reader.replies


def test_a_body_is_one_reply() -> None:
    found = read(response(REASONING, said("a", id="msg_1"), conversation={"id": "conv_1"}))
    assert found.messages == (turn(REASONING, said("a", id="msg_1")),)
    assert (found.finish_reasons, found.usage, found.model, found.error) == (("completed",), TOLD, "m", None)
    assert found.ids == ("resp_1", "conv_1", "rs_1", "msg_1")
    assert found.kept
    assert not read(response(said("a"), store=False)).kept
    assert read(response(said("a"), conversation="conv_2")).ids == ("resp_1", "conv_2")


@pytest.mark.parametrize(
    ("fields", "reason", "error"),
    [
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, "max_output_tokens", None),
        ({"status": "incomplete"}, "incomplete", None),
        ({"status": "failed", "error": {"message": "no"}}, None, "no"),
        ({"status": "queued"}, None, "the response is queued"),
    ],
)
def test_how_a_response_ended_is_told(fields: dict[str, Any], reason: str | None, error: str | None) -> None:
    found = read(response(said("a"), **fields))
    assert (found.finish_reasons, found.error) == ((reason,), error)


def test_whatever_a_body_holds_is_read() -> None:
    assert read(b"[]").messages == read(b"{}").messages == read(response(output=5)).messages == ()
    assert read(b'{"output":[5,{"type":"message"}]}').messages == (turn({"type": "message"}),)
    assert (
        read(b'{"output":[{"type":"message","content":"\\ud83d"}]}').messages[0].data["items"][0]["content"] == "\ufffd"
    )
    assert read({"output": [{"type": "message"}], "usage": 5, "model": 5}).usage is None
    with pytest.raises(ValueError, match="Expecting value"):
        read(b"no")


def test_the_last_event_of_a_stream_holds_the_reply() -> None:
    item = said("a", id="msg_1")
    found = streamed(
        event("response.created", response=response(status="in_progress", usage=None)),
        event("response.output_item.done", output_index=0, item=said("b")),
        event("response.completed", response=response(item)),
        Event(raw=b"data: [DONE]\n\n", data=b"[DONE]"),
    )
    assert (found.messages, found.finish_reasons, found.usage) == ((turn(item),), ("completed",), TOLD)
    assert found.ids == ("resp_1", "msg_1")


def test_a_stream_that_ended_under_another_id_is_known_by_both() -> None:
    found = streamed(
        event("response.created", response=response(id="resp_0", status="in_progress", usage=None)),
        event("response.completed", response=response(said("a", id="msg_1"))),
    )
    assert found.ids == ("resp_1", "msg_1", "resp_0", begun_under("resp_0"))


def test_a_stream_that_breaks_off_leaves_what_came() -> None:
    opened = event("response.created", response=response(status="in_progress"))
    deltas = [
        event(
            "response.output_item.added", output_index=0, item={"type": "message", "role": "assistant", "content": []}
        ),
        event("response.output_text.delta", output_index=0, content_index=0, delta="He"),
        event("response.output_text.delta", output_index=0, content_index=0, delta="llo"),
        event("response.refusal.delta", output_index=0, content_index=1, delta="No."),
        event("response.output_item.added", output_index=1, item={**CALL, "arguments": ""}),
        event("response.function_call_arguments.delta", output_index=1, delta='{"at'),
    ]
    parts = [{"type": "output_text", "text": "Hello"}, {"type": "refusal", "refusal": "No."}]
    whole = turn({"type": "message", "role": "assistant", "content": parts}, {**CALL, "arguments": '{"at'})
    for events in ([opened, *deltas], deltas):
        found = streamed(*events)
        assert (found.messages, found.finish_reasons, found.error) == ((whole,), (None,), None)
    done = streamed(opened, event("response.output_item.done", output_index=0, item=CALL), *deltas[4:])
    assert done.messages == (turn(CALL, {**CALL, "arguments": '{"at'}),)


def test_of_very_many_items_that_broke_off_each_has_its_own_deltas() -> None:
    many = 30_000
    calls = [event("response.output_item.added", output_index=at, item={**CALL, "arguments": ""}) for at in range(many)]
    deltas = [
        event("response.function_call_arguments.delta", output_index=at, delta=f"{at} said") for at in range(many)
    ]
    assert streamed(*calls, *deltas).messages == (turn(*({**CALL, "arguments": f"{at} said"} for at in range(many))),)


def test_whatever_comes_is_read() -> None:
    odd = [
        Event(raw=b": hi\n\n", data=None),
        Event(raw=b"data: x\n\n", data=b"x"),
        Event(raw=b"data: 5\n\n", data=b"5"),
        event("response.output_text.delta", delta=5),
        event("response.output_text.delta", output_index="x", content_index="y", delta="z"),
        event("response.output_item.done", item=5),
        event("response.odd"),
        Event(raw=b"", data=b'{"type":"response.output_item.done","item":{"a":"\\ud83d"}}'),
    ]
    found = streamed(*odd)
    assert found.messages == (turn({"a": "\ufffd"}),)
    assert streamed(odd[0]).messages == ()


def test_an_error_of_a_stream_is_told() -> None:
    for bad in (
        event("error", error={"message": "too long"}),
        event("error", message="too long"),
        event("response.failed", response=response(status="failed", error={"message": "too long"})),
        Event(raw=b"", data=b'{"error":{"message":"too long"}}'),
    ):
        reader = API.replies.reader()
        reader.take(event("response.output_item.done", output_index=0, item=said("a")))
        assert not reader.failed
        reader.take(bad)
        reader.take(event("error", error={"message": "later"}))
        assert (reader.failed, reader.replies.error) == (True, "too long")


def test_an_error_that_a_stream_begins_with_is_told() -> None:
    opening = API.requests.opening_error
    assert opening is not None
    created = event("response.created", response={}).raw + event("response.in_progress", response={}).raw
    assert opening(created) is opening(created[:30]) is opening(b": hi\n\n" + b"data: 5") is None
    assert opening(created + event("response.output_item.added", item={}).raw) == b""
    assert opening(created + b"data: 5\n\n") == b""
    assert opening(event("error", error={"code": "x"}).raw) == b'{"error":{"code":"x"}}'
    assert opening(event("error", code="x").raw) == b'{"error":{"type":"error","code":"x"}}'
    failed = event("response.failed", response={"error": {"code": "x"}}).raw
    assert opening(created + failed) == b'{"error":{"code":"x"}}'
    assert opening(event("response.failed").raw) == b""


def made(stream: bool, *items: dict[str, Any]) -> tuple[bytes, bytes]:
    how = {"exchange": "exc_1", "created": 5, "model": "m", "stream": stream, "usage": True}
    return API.replies.repeat(turn(*items), **how)


def test_an_answer_is_made_of_a_stored_reply() -> None:
    kind, body = made(False, said("a"), CALL)
    assert kind == b"application/json"
    assert [each["type"] for each in orjson.loads(body)["output"]] == ["message", "function_call"]
    refusal = {**said(), "content": [{"type": "refusal", "refusal": "No."}, 5]}
    plain = {**said(), "content": "x"}
    kind, body = made(True, said("a"), CALL, CUSTOM, {**CALL, "arguments": 5}, refusal, plain)
    assert kind == b"text/event-stream"
    events = EventDecoder(API.replies.ends).feed(body)
    assert [each.is_done for each in events] == [False] * (len(events) - 1) + [True]
    assert [orjson.loads(each.data or b"")["sequence_number"] for each in events] == list(range(len(events)))
    names = [each.name for each in events]
    assert names[:6] == [
        "response.created",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
    ]
    assert "response.custom_tool_call_input.done" in names
    assert streamed(*events).messages[0].calls[0].name == "look"


EASY: dict[str, Any] = {"role": "assistant", "content": "All is done."}  # a message as clients may send it


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_of_our_own_is_a_whole_response(stream: bool) -> None:
    _, body = made(stream, {**EASY, "id": None}, CALL, CUSTOM)
    if stream:
        told = [orjson.loads(each.data or b"") for each in EventDecoder(API.replies.ends).feed(body)]
        spoken = [each["part"]["text"] for each in told if each["type"] == "response.content_part.added"]
        spoken += [each["delta"] for each in told if each["type"] == "response.output_text.delta"]
        assert spoken == ["", "All is done."]
        body = orjson.dumps(told[-1]["response"])
    answer = Response.model_validate_json(body, strict=True)
    assert answer.output_text == "All is done."
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens == 0
    assert answer.usage.output_tokens_details.reasoning_tokens == 0


def test_errors_have_the_shape_of_the_api() -> None:
    body = API.replies.error_body(UpstreamError("broken", code="c"))
    assert orjson.loads(body)["error"]["message"] == API.replies.error_words(body) == "broken"
    (told,) = EventDecoder().feed(API.replies.error_event(body))
    data = orjson.loads(told.data or b"")
    assert (told.name, data["type"], data["code"], data["error"]["code"]) == ("error", "error", "c", "c")
    (told,) = EventDecoder().feed(API.replies.error_event(b'{"error":"no"}'))
    assert orjson.loads(told.data or b"")["message"] == "no"
    (told,) = EventDecoder().feed(API.replies.error_event(b"[]"))
    assert orjson.loads(told.data or b"")["message"] is None
