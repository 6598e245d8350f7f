"""Replies of the Messages API: bodies, streams, usage, errors, and the proxy's own tools in them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects.messages import DIALECT as MESSAGES
from proxy.dialects.messages.own_tools import MessagesBodyFilter, MessagesStreamFilter
from proxy.dialects.messages.reply import CALLING, MessageReader, events_of, named_event, usage_of
from proxy.dialects.sse import EventDecoder
from proxy.errors import Forbidden, InternalError, InvalidRequest, NotFound, Overloaded
from proxy.models import Dollars, cost

API = MESSAGES.replies
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}
NAMES = ("recall",)


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def use(name: str, identity: str, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": identity, "name": name, "input": given}


def message(*blocks: Any, stop: str | None = "end_turn", **usage: int) -> dict[str, Any]:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": list(blocks),
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": {"input_tokens": 10, "output_tokens": 5, **usage},
    }


def streamed(answer: dict[str, Any]) -> bytes:
    return b"".join([named_event(data) for data in events_of(answer)])


def reader_of(stream: bytes) -> MessageReader:
    reader = MessageReader()
    for event in EventDecoder(API.ends).feed(stream):
        assert not reader.take(event)
    return reader


def event(**data: Any) -> bytes:
    return named_event(data)


# ------------------------------------------------------------------------------------------- reading


def test_a_body_is_read() -> None:
    found = API.read(orjson.dumps(message(THOUGHT, text("hi"), cache_read_input_tokens=7)))
    assert [each.data for each in found.messages] == [{"role": "assistant", "content": [THOUGHT, text("hi")]}]
    assert (found.finish_reasons, found.model, found.error) == (("end_turn",), "claude", None)
    assert found.usage is not None
    assert found.usage["prompt_tokens"] == 17
    bare = API.read(b'{"content":[],"model":7,"stop_reason":null}')
    assert (bare.finish_reasons, bare.usage, bare.model) == ((None,), None, None)
    failed = API.read(b'{"type":"error","error":{"type":"api_error","message":"no"}}')
    assert (failed.messages, failed.error) == ((), "no")
    assert API.read(b"[]").error is None
    with pytest.raises(ValueError, match=r"property name|key"):
        API.read(b"{")


def test_usage_has_the_form_that_prices_read() -> None:
    told = usage_of(
        {
            "input_tokens": 10,
            "cache_read_input_tokens": 20,
            "cache_creation_input_tokens": 30,
            "cache_creation": {"ephemeral_1h_input_tokens": 30},
            "output_tokens": 5,
            "output_tokens_details": {"thinking_tokens": 2},
            "service_tier": "standard",
        }
    )
    assert told == {
        "prompt_tokens": 60,
        "completion_tokens": 5,
        "total_tokens": 65,
        "prompt_tokens_details": {"cached_tokens": 20, "cache_write_tokens": 30},
        "completion_tokens_details": {"reasoning_tokens": 2},
        "cache_creation": {"ephemeral_1h_input_tokens": 30},
    }
    assert usage_of(None) is None
    for usage, name, tokens in (
        ({"input_tokens": None, "output_tokens": "x"}, "total_tokens", 0),
        ({"cache_read_input_tokens": 5}, "prompt_tokens", 5),
    ):
        assert (usage_of(usage) or {})[name] == tokens


@pytest.mark.parametrize("usage", [{}, {"output_tokens": 9}, {"input_tokens": None}])
def test_a_usage_that_says_nothing_of_the_input_has_no_known_cost(usage: dict[str, Any]) -> None:
    prices = Dollars(input=1.0, cached_read=0.1, cache_write=1.0, output=2.0)
    assert cost(usage_of(usage), prices) is None
    assert cost(usage_of({**usage, "input_tokens": 0}), prices) is not None


def test_a_stream_says_what_a_body_says() -> None:
    blocks = [THOUGHT, text("hi"), use("look", "a", at=[1]), use("look", "b")]
    reader = reader_of(streamed(message(*blocks, stop="tool_use")))
    assert reader.replies == API.read(orjson.dumps(message(*blocks, stop="tool_use")))
    assert not reader.failed


def test_deltas_of_every_kind_are_put_together() -> None:
    stream = b"".join(
        [
            event(type="message_start", message={"model": "claude", "usage": {"input_tokens": 9, "output_tokens": 1}}),
            event(
                type="content_block_start", index=0, content_block={"type": "thinking", "thinking": "", "signature": ""}
            ),
            event(type="content_block_delta", index=0, delta={"type": "thinking_delta", "thinking": "h"}),
            event(type="content_block_delta", index=0, delta={"type": "thinking_delta", "thinking": "m"}),
            event(type="content_block_delta", index=0, delta={"type": "signature_delta", "signature": "s"}),
            event(type="content_block_stop", index=0),
            event(type="content_block_start", index=1, content_block={"type": "text"}),
            event(type="content_block_delta", index=1, delta={"type": "text_delta", "text": "hi"}),
            event(type="content_block_delta", index=1, delta={"type": "citations_delta", "citation": {"at": 1}}),
            event(type="content_block_delta", index=1, delta={"type": "citations_delta", "citation": {"at": 2}}),
            event(type="content_block_delta", index=1, delta={"type": "odd", "number": 7}),
            event(type="ping"),
            event(type="content_block_delta", index=9, delta={}),
            event(type="content_block_stop", index=9),
            event(type="content_block_start", index=2, content_block=None),
            event(type="message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 8, "x": None}),
            event(type="message_delta", delta=None, usage=None),
            b"data: {\n\n",
            b": comment\n\n",
            b"data: 7\n\n",
        ]
    )
    found = reader_of(stream).replies
    assert found.messages[0].data["content"] == [
        THOUGHT | {"thinking": "hm"},
        {"type": "text", "text": "hi", "citations": [{"at": 1}, {"at": 2}], "number": 7},
    ]
    assert found.usage is not None
    assert (found.usage["prompt_tokens"], found.usage["completion_tokens"]) == (9, 8)


def test_citations_are_added_to_those_that_a_block_begins_with() -> None:
    begun = event(type="content_block_start", index=0, content_block={**text("hi"), "citations": [{"at": -1}]})
    cited = [
        event(type="content_block_delta", index=0, delta={"type": "citations_delta", "citation": {"at": at}})
        for at in range(20_000)
    ]
    (reply,) = reader_of(begun + b"".join(cited)).replies.messages
    assert reply.data["content"] == [{**text("hi"), "citations": [{"at": at} for at in range(-1, 20_000)]}]


def test_a_call_that_broke_off_is_told() -> None:
    begun = event(type="content_block_start", index=0, content_block=use("look", "a"))
    half = event(type="content_block_delta", index=0, delta={"type": "input_json_delta", "partial_json": '{"a'})
    (reply,) = reader_of(begun + half).replies.messages
    assert reply.data["content"] == [use("look", "a") | {"partial_json": '{"a'}]
    assert reply.without_unfinished_calls().data["content"] == []
    (silent,) = reader_of(begun).replies.messages
    assert silent.data["content"][0]["partial_json"] == ""
    whole = event(type="content_block_stop", index=0)
    assert reader_of(begun + whole).replies.messages[0].data["content"] == [use("look", "a")]


def test_a_stream_that_says_nothing_has_no_reply() -> None:
    assert reader_of(event(type="ping")).replies.messages == ()
    failed = reader_of(event(type="error", error={"message": "no"}) + event(type="error", error={"message": "yes"}))
    assert (failed.failed, failed.replies.error) == (True, "no")
    assert reader_of(event(type="error")).replies.error == "unknown error"


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("no", param="p"), "invalid_request_error"),
        (Forbidden("no"), "permission_error"),
        (NotFound("no"), "not_found_error"),
        (InternalError("no"), "api_error"),
        (Overloaded("no"), "overloaded_error"),
    ],
)
def test_errors_have_the_api_s_shape(error: Any, kind: str) -> None:
    body = API.error_body(error)
    told = orjson.loads(body)
    assert (told["type"], told["error"]["type"], told["error"]["message"]) == ("error", kind, "no")
    assert API.error_words(body) == "no"
    assert API.error_event(body) == b"event: error\ndata: " + body + b"\n\n"


def test_an_unknown_thread_is_told_where_sdks_look() -> None:
    told = [orjson.loads(API.error_body(NotFound("no", code=code)))["error"] for code in ("thread_not_found", "other")]
    assert [error.get("details") for error in told] == [{"error_code": "thread_not_found"}, None]


def test_words_of_other_errors() -> None:
    assert API.error_words(b"{") is None
    assert API.error_words(b"[]") is None
    assert API.error_words(b'{"error":"no"}') == "no"


def test_an_overflow_is_recognised() -> None:
    told = b'{"type":"error","error":{"message":"prompt is too long: 900 tokens > 800 maximum"}}'
    found = MESSAGES.requests.overflow_of(400, told)
    assert found is not None
    assert (found.window, found.asked) == (800, 900)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stored_reply_is_told_again(stream: bool) -> None:
    stored = MESSAGES.message(orjson.dumps({"role": "assistant", "content": [THOUGHT, text("hi"), use("done", "a")]}))
    kind, body = API.repeat(stored, exchange="e1", created=1, model="m", stream=stream, usage=True)
    assert kind == (b"text/event-stream" if stream else b"application/json")
    found = reader_of(body).replies if stream else API.read(body)
    assert found.messages[0].data == stored.data
    assert (found.finish_reasons, found.model) == ((CALLING,), "m")


# --------------------------------------------------------------------------------- tools of our own


def rounds(*answers: dict[str, Any], most: int = 3, stream: bool) -> tuple[Any, dict[str, Any]]:
    """Return the filter after these answers, and what the client is shown."""
    found: Any = MessagesStreamFilter(NAMES, True) if stream else MessagesBodyFilter(NAMES)
    shown = b""
    for number, answer in enumerate(answers):
        if number:
            found.next(may_ask=number < most)
        if stream:
            for each in EventDecoder().feed(streamed(answer)):
                done = each.name == "message_stop"
                shown += (b"" if found.again else each.raw) if done else found.take(each)
            assert found.end() == b""
            assert found.closing(b"x") == b"x"
        else:
            shown = found.take(orjson.dumps(answer))
    if found.again:
        gave_up = found.give_up()
        shown = shown + gave_up if stream else gave_up
    if not stream:
        return found, orjson.loads(shown)
    reply = reader_of(shown)
    assert found.reply.replies == reply.replies
    return found, {"content": reply.content, "stop_reason": reply.stop, "usage": reply.spent}


both = pytest.mark.parametrize("stream", [False, True])


@both
def test_a_reply_without_our_tools_is_shown_as_it_came(stream: bool) -> None:
    answer = message(THOUGHT, text("hi"), use("look", "a", at=1), stop="tool_use")
    found, shown = rounds(answer, stream=stream)
    assert (shown["content"], shown["stop_reason"]) == (answer["content"], "tool_use")
    assert (found.again, found.calls.own, found.calls.others, found.rounds) == (False, (), True, 0)
    assert found.last.data["content"] == answer["content"]
    assert found.usage == usage_of(answer["usage"])


@both
def test_a_round_of_our_tools_is_answered_unseen(stream: bool) -> None:
    first = message(THOUGHT, text("Let me see."), use("recall", "r", query="x"), stop="tool_use")
    second = message(text("Eighty."), use("look", "l"), stop="tool_use", cache_read_input_tokens=3)
    found, shown = rounds(first, second, stream=stream)
    assert shown["content"] == [THOUGHT, text("Let me see."), text("Eighty."), use("look", "l")]
    assert (shown["stop_reason"], found.rounds) == ("tool_use", 1)
    assert (shown["usage"]["input_tokens"], shown["usage"]["output_tokens"]) == (10 if stream else 20, 10) or stream
    assert found.usage["prompt_tokens"] == 23
    assert found.last.data["content"] == second["content"]


@both
def test_the_calls_of_a_round_are_told_apart(stream: bool) -> None:
    answer = message(text("Both."), use("recall", "r", query="x"), use("look", "l"), stop="tool_use")
    found, shown = rounds(answer, stream=stream)
    assert (shown["content"], shown["stop_reason"]) == ([text("Both."), use("look", "l")], "tool_use")
    calls = found.calls
    assert ([call.id for call in calls.own], calls.others) == (["r"], True)
    assert calls.message.data["content"] == answer["content"]
    assert found.last.data["content"] == [text("Both."), use("look", "l")]


@both
def test_a_reply_that_may_not_ask_again_says_so(stream: bool) -> None:
    again = message(use("recall", "r"), stop="tool_use")
    _, shown = rounds(again, again, again, again, stream=stream)
    assert [block["text"][:22] for block in shown["content"]] == ["(No answer was written"]
    assert shown["stop_reason"] == "end_turn"
    _, gave_up = rounds(again, stream=stream)
    assert "as many steps as it may" in gave_up["content"][-1]["text"]


@both
def test_a_call_that_was_cut_off_is_not_answered(stream: bool) -> None:
    cut = message(use("recall", "r", query="x"), stop="max_tokens")
    found, shown = rounds(cut, stream=stream)
    assert "cut off before" in shown["content"][0]["text"]
    assert (shown["stop_reason"], found.calls.own) == ("max_tokens", ()) or stream
    said = message(text("It is"), use("recall", "r"), stop="max_tokens")
    _, shown = rounds(said, stream=stream)
    assert (shown["content"], shown["stop_reason"]) == ([text("It is")], "max_tokens")


@both
def test_a_later_round_that_says_nothing_is_told(stream: bool) -> None:
    first = message(use("recall", "r"), stop="tool_use")
    _, shown = rounds(first, message(), stream=stream)
    if stream:
        assert "ended its reply without one" in shown["content"][0]["text"]
    _, shown = rounds(message(text("So."), use("recall", "r"), stop="tool_use"), message(text("x")), stream=stream)
    assert shown["content"] == [text("So."), text("x")]


def test_a_body_that_is_no_message_is_shown_as_it_is() -> None:
    found = MessagesBodyFilter(NAMES)
    assert found.take(b"{") == b"{"
    assert found.take(b'{"content":7}') == b'{"content":7}'
    assert found.usage is None
    odd = {"content": [use("recall", "r") | {"input": "x"}], "stop_reason": None, "usage": 7}
    assert found.take(orjson.dumps(odd)) == b""
    assert found.calls.message.data["content"] == [use("recall", "r")]
    nameless = {"content": [use("recall", "")], "stop_reason": "tool_use"}
    other = MessagesBodyFilter(NAMES)
    assert b"cut off before" in other.take(orjson.dumps(nameless))


def test_a_block_that_never_began_is_not_shown_once_something_is_hidden() -> None:
    found = MessagesStreamFilter(NAMES, False)
    raw = event(type="content_block_start", index=0, content_block=use("recall", "r"))
    raw += event(type="content_block_delta", index=7, delta={})
    assert b"".join(map(found.take, EventDecoder().feed(raw))) == b""


def test_events_that_say_nothing_are_shown_as_they_came() -> None:
    found = MessagesStreamFilter(NAMES, False)

    def take(raw: bytes) -> bytes:
        return b"".join(map(found.take, EventDecoder().feed(raw)))

    for raw in (b": hello\n\n", b"data: {\n\n", event(type="ping"), event(type="new")):
        assert take(raw) == raw
    assert (found.said, found.hides, found.usage) == (False, False, None)
    unbegun = event(type="content_block_delta", index=7, delta={})
    assert take(unbegun) == unbegun
    early = event(type="message_delta", delta={}, usage={"output_tokens": 1})
    assert take(early) == early
    failed = event(type="error", error={"message": "no"})
    assert take(failed) == failed
    assert (found.said, found.reply.failed) == (True, True)


def test_what_follows_the_end_of_a_hidden_round_is_not_shown() -> None:
    found = MessagesStreamFilter(NAMES, False)
    first = message(use("recall", "r"), stop="tool_use")
    for each in EventDecoder().feed(streamed(first)):
        found.take(each)
    assert found.again
    assert found.hides
    (more,) = EventDecoder().feed(event(type="message_delta", delta={}, usage={"output_tokens": 9}))
    assert found.take(more) == b""
    assert found.usage is not None
    found.next(may_ask=True)
    for each in EventDecoder().feed(event(type="message_delta", delta=None) + streamed(message(text("x")))):
        found.take(each)
    assert found.take(more) == b""


def test_a_reply_without_usage_ends_all_the_same() -> None:
    found = MessagesStreamFilter(NAMES, False)
    stream = event(type="content_block_start", index=0, content_block=use("recall", "r"))
    stream += event(type="content_block_stop", index=0) + event(type="message_delta", delta={"stop_reason": "tool_use"})
    for each in EventDecoder().feed(stream):
        assert found.take(each) == b""
    assert b'"output_tokens":0' in found.give_up()
    other = MessagesStreamFilter(NAMES, False)
    begun = event(type="content_block_start", index=1, content_block=use("look", "l"))
    shown = b"".join(map(other.take, EventDecoder().feed(stream[: stream.index(b"event: message_delta")] + begun)))
    shown += b"".join(map(other.take, EventDecoder().feed(stream[stream.index(b"event: message_delta") :])))
    assert reader_of(shown).stop == "tool_use"


_BLOCKS = st.one_of(
    st.text(min_size=1).map(text),
    st.just(THOUGHT),
    st.builds(use, st.sampled_from(["look", "recall"]), st.sampled_from(["a", "b"])),
)


@given(st.lists(_BLOCKS, min_size=1, max_size=5), st.sampled_from(["end_turn", "tool_use", "max_tokens"]))
def test_bodies_and_streams_are_filtered_alike(blocks: Iterable[dict[str, Any]], stop: str) -> None:
    answer = message(*blocks, stop=stop)
    one, body = rounds(answer, stream=False)
    other, stream = rounds(answer, stream=True)
    assert (body["content"], body["stop_reason"]) == (stream["content"], stream["stop_reason"])
    assert (one.usage, one.rounds) == (other.usage, other.rounds)
