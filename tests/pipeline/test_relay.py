"""The answer on its way: >> what upstream sends, << what the client gets, and what is settled when."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson
import pytest

from proxy.dialects.chat import CHAT
from proxy.dialects.sse import EventDecoder
from proxy.errors import PalimpsestError, UpstreamUnreachable
from proxy.pipeline.relay import Answered, StreamRelay, read_answer, relay_whole
from proxy.store import Status

pytestmark = pytest.mark.anyio


def _chunk(delta: dict[str, Any] | None, finish: str | None = None, **more: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return b"data: " + orjson.dumps({"id": "x", "choices": choices, **more}) + b"\n\n"


HELLO = _chunk({"role": "assistant", "content": "Hel"}) + _chunk({"content": "lo"})
STOP = _chunk({}, "stop")
USAGE = _chunk(None, usage={"prompt_tokens": 3})
DONE = b"data: [DONE]\n\n"


class _Answer:
    """What upstream says: these pieces, and then perhaps a fault."""

    def __init__(self, *pieces: bytes, fault: PalimpsestError | None = None, status: int = 200) -> None:
        self.pieces, self.fault, self.status, self.readable = pieces, fault, status, True
        self.ended = False
        """Whether it is known that all of it was taken."""
        self.room = True
        self._said = self.said()

    async def chunk(self, *, plain: bool = False) -> bytes:
        assert plain is self.readable
        return await anext(self._said, b"")

    def hold_stream(self) -> bool:
        return self.room

    async def said(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece
        if self.fault is not None:
            raise self.fault

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self._said])


class _Client:
    """What the client gets, with a mark where the exchange was settled."""

    def __init__(self) -> None:
        self.status = 0
        self.got = b""
        self.seen_at_settling: bytes | None = None
        self.answered: Answered | None = None
        self.ended = False

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        del headers
        self.status = status

    async def write(self, data: bytes) -> None:
        self.got += data

    async def end(self, data: bytes = b"") -> None:
        self.got += data
        self.ended = True

    async def fail(self, error: PalimpsestError, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        raise AssertionError((error, headers))

    async def settle(self, answered: Answered) -> None:
        assert self.answered is None
        self.answered, self.seen_at_settling = answered, self.got


async def _relay(*pieces: bytes, fault: PalimpsestError | None = None, hides_usage: bool = False) -> _Client:
    client = _Client()
    answer: Any = _Answer(*pieces, fault=fault)
    await StreamRelay(CHAT, answer, client, lambda _: [], hides_usage=hides_usage).run(client.settle)
    assert client.ended
    return client


def _text(client: _Client) -> Any:
    assert client.answered is not None
    return [(message.data["content"], partial) for message, partial in client.answered.replies]


async def test_the_end_is_held_back_until_the_reply_is_settled() -> None:
    client = await _relay(HELLO + STOP + USAGE + DONE)
    assert client.got == HELLO + STOP + USAGE + DONE
    assert client.seen_at_settling == HELLO + STOP + USAGE
    assert client.answered is not None
    assert (client.answered.status, client.answered.usage) == (Status.COMPLETE, {"prompt_tokens": 3})
    assert _text(client) == [("Hello", False)]


@pytest.mark.parametrize("ended", [False, True])
async def test_who_waits_for_the_end_of_a_connection_has_the_end_of_the_stream(ended: bool) -> None:
    client = _Client()
    seen: list[bytes] = []

    class Answer(_Answer):
        async def said(self) -> AsyncIterator[bytes]:
            self.ended = ended
            yield HELLO + STOP + DONE + b": bye\n"
            seen.append(client.got)

    answer: Any = Answer()
    await StreamRelay(CHAT, answer, client, lambda _: [], hides_usage=False).run(client.settle)
    assert seen == ([] if ended else [HELLO + STOP + DONE + b": bye\n"])
    assert client.seen_at_settling == HELLO + STOP
    assert (client.got, client.ended) == (HELLO + STOP + DONE + b": bye\n", True)


async def test_the_usage_that_only_the_proxy_asked_for_is_kept_back() -> None:
    client = await _relay(HELLO + STOP + USAGE + USAGE, DONE, hides_usage=True)
    assert client.got == HELLO + STOP + DONE
    assert client.answered is not None
    assert client.answered.usage == {"prompt_tokens": 3}


async def test_a_close_after_the_finish_reason_is_a_whole_reply() -> None:
    client = await _relay(HELLO, STOP)
    assert client.got == HELLO + STOP
    assert client.answered is not None
    assert client.answered.status is Status.COMPLETE


@pytest.mark.parametrize("fault", [None, UpstreamUnreachable("it broke")])
async def test_a_stream_that_breaks_ends_in_one_error_event(fault: PalimpsestError | None) -> None:
    client = await _relay(HELLO, b'data: {"cut', fault=fault)
    head, _, tail = client.got.rpartition(b"data: ")
    assert head == HELLO  # the half event is not passed on: with the error it would be one line
    assert "error" in orjson.loads(tail)
    assert client.answered is not None
    assert client.answered.status is Status.PARTIAL
    assert _text(client) == [("Hello", True)]


@pytest.mark.parametrize("fault", [None, UpstreamUnreachable("it broke")])
async def test_a_last_event_that_lacks_only_its_end_is_shown_before_the_error(fault: PalimpsestError | None) -> None:
    client = await _relay(HELLO, HELLO.rstrip(b"\n"), fault=fault)
    head, _, tail = client.got.rpartition(b"data: ")
    assert head == HELLO + HELLO
    assert "error" in orjson.loads(tail)
    assert _text(client) == [("HelloHello", True)]


async def test_an_error_of_upstreams_own_is_not_repeated() -> None:
    error = b'data: {"error": {"message": "overloaded"}}\n\n'
    client = await _relay(HELLO + error)
    assert client.got == HELLO + error
    assert client.answered is not None
    assert (client.answered.status, client.answered.error) == (Status.PARTIAL, "overloaded")


async def test_a_stream_without_a_reply_is_a_failure() -> None:
    for pieces in ((), (b": ping\n\n",), (DONE,), (b'data: {"error": "no"}\n\n', DONE)):
        client = await _relay(*pieces)
        assert client.answered is not None
        assert client.answered.status is Status.FAILED
        assert client.answered.error


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("end", [DONE, b""])
async def test_of_a_stream_for_which_there_is_no_memory_the_rest_is_passed_on_unread(room: bool, end: bytes) -> None:
    long = HELLO.replace(b"lo", b"lo" * 1_200_000)
    pieces = (long, long, HELLO, STOP + end)
    answer: Any = _Answer(*pieces)
    answer.room, client = room, _Client()
    await StreamRelay(CHAT, answer, client, lambda _: [], hides_usage=False).run(client.settle)
    assert client.got == b"".join(pieces)
    assert client.answered is not None
    assert client.answered.status is (Status.COMPLETE if room else Status.PARTIAL)
    assert len(_text(client)[0][0]) == 2 * 2_400_003 + (5 if room else 0)
    assert (client.answered.error is None) is room


async def test_a_large_event_for_which_there_is_no_memory_ends_the_stream_with_an_error() -> None:
    answer: Any = _Answer(HELLO, b'data: {"more":"' + b"a" * 1_200_000, b"a" * 1_200_000)
    answer.room, client = False, _Client()
    await StreamRelay(CHAT, answer, client, lambda _: [], hides_usage=False).run(client.settle)
    assert client.got.startswith(HELLO)
    assert b"upstream_too_large" in client.got
    assert len(client.got) < 1_000
    assert client.answered is not None
    assert client.answered.status is Status.PARTIAL
    assert "event longer than" in str(client.answered.error)


async def test_a_stream_that_has_come_to_its_end_is_stored_whole_whatever_its_length() -> None:
    answer: Any = _Answer(HELLO.replace(b"lo", b"lo" * 3_000_000) + DONE)
    answer.room, client = False, _Client()
    await StreamRelay(CHAT, answer, client, lambda _: [], hides_usage=False).run(client.settle)
    assert client.answered is not None
    assert (client.answered.status, client.answered.error) == (Status.COMPLETE, None)


async def test_what_is_no_json_is_relayed_all_the_same() -> None:
    client = await _relay(b"data: hello\n\n" + HELLO + STOP + DONE)
    assert client.got.startswith(b"data: hello\n\n")
    assert _text(client) == [("Hello", False)]


async def test_what_clients_can_read_is_kept_even_where_it_is_no_strict_json() -> None:
    halves = b'data: {"choices":[{"index":0,"delta":{"content":"A%s"},"logprob":%s}]}\n\n'
    emoji = halves % (b"\\ud83d", b"-Infinity") + halves.replace(b"A", b"") % (b"\\ude00", b"0")
    client = await _relay(emoji + STOP + DONE)
    assert client.got == emoji + STOP + DONE
    assert _text(client) == [("A😀", False)]
    lone = await _relay(halves % (b"\\ud83d", b"0") + STOP + DONE)
    assert _text(lone) == [("A\ufffd", False)]


async def test_an_error_with_half_a_character_is_an_error_like_others() -> None:
    error = b'data: {"error": {"code": "\\ud83d"}}\n\n'
    client = await _relay(HELLO + error)
    assert client.got == HELLO + error
    assert client.answered is not None
    assert (client.answered.status, client.answered.error) == (Status.PARTIAL, '{"code":"\\ud83d"}')


async def test_of_several_choices_each_is_whole_or_not_by_itself() -> None:
    def chunk(index: int, delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish}
        return b"data: " + orjson.dumps({"choices": [choice]}) + b"\n\n"

    calls = [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}]
    first = chunk(0, {"tool_calls": calls}) + chunk(0, {}, "tool_calls")
    client = await _relay(first + chunk(1, {"content": "half"}) + chunk(2, {"role": "assistant"}))
    assert client.answered is not None
    assert client.answered.status is Status.PARTIAL
    assert _text(client) == [(None, False), ("half", True)]


@pytest.mark.parametrize("cut", range(0, 24, 3))
async def test_what_follows_the_end_comes_through_wherever_it_is_split(cut: int) -> None:
    sent = HELLO + STOP + DONE + b": by" + b"e\n\n: x\n\n"
    place = len(HELLO + STOP) + cut
    assert (await _relay(sent[:place], sent[place:])).got == sent


async def test_nothing_is_added_to_a_stream_that_cannot_be_read() -> None:
    client = _Client()
    answer: Any = _Answer(b"\x1f\x8b...")
    answer.readable = False
    await StreamRelay(CHAT, answer, client, lambda _: [], hides_usage=False).run(client.settle)
    assert client.got == b"\x1f\x8b..."
    assert client.answered is not None
    assert client.answered.status is Status.FAILED


@pytest.mark.parametrize(("arguments", "is_kept"), [("{}", True), ('{"a', False)])
async def test_a_complete_call_of_a_stream_that_broke_is_kept(arguments: str, is_kept: bool) -> None:
    """A client may have answered it: its result needs the call."""
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    chunk = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": None, "tool_calls": [call]}}]}
    client = await _relay(b"data: " + orjson.dumps(chunk) + b"\n\n", fault=UpstreamUnreachable("it broke"))
    assert client.answered is not None
    assert client.answered.status is (Status.PARTIAL if is_kept else Status.FAILED)
    assert [(len(reply.calls), partial) for reply, partial in client.answered.replies] == [(1, True)] * is_kept


async def test_what_follows_the_end_is_relayed_too() -> None:
    assert (await _relay(HELLO + STOP + DONE, b": bye\n\n")).got.endswith(DONE + b": bye\n\n")


def test_a_client_that_leaves_keeps_what_had_come() -> None:
    answer: Any = _Answer()
    relay = StreamRelay(CHAT, answer, _Client(), lambda _: [], hides_usage=False)
    decoder = EventDecoder()
    assert relay.answered(left=True).status is Status.CANCELLED
    for event in decoder.feed(HELLO):
        relay._read(event)
    assert (relay.answered(left=True).status, relay.answered(left=True).error) == (Status.PARTIAL, "the client left")
    for event in decoder.feed(STOP):
        relay._read(event)
    assert relay.answered(left=True).status is Status.COMPLETE


async def test_a_json_answer_is_settled_before_it_is_sent() -> None:
    client = _Client()
    body = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}]}'
    answer: Any = _Answer(body)
    await relay_whole(CHAT, answer, client, lambda _: [], client.settle)
    assert (client.got, client.seen_at_settling) == (body, b"")
    assert _text(client) == [("hi", False)]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"<html>", "not JSON"),
        (b"[]", "no reply"),
        (b'{"choices":[]}', "no reply"),
        (b'{"error":{"message":"busy"}}', "busy"),
        (b'{"error":{"code":1}}', '"code":1'),
    ],
)
def test_an_answer_without_a_reply_is_a_failure_with_its_reason(body: bytes, error: str) -> None:
    answered = read_answer(CHAT, body, 200)
    assert (answered.status, answered.replies) == (Status.FAILED, ())
    assert error in (answered.error or "")


def test_an_empty_reply_is_a_reply() -> None:
    body = b'{"choices":[{"message":{"role":"assistant","content":""},"finish_reason":"length"}]}'
    answered = read_answer(CHAT, body, 200)
    assert (answered.status, answered.replies[0][0].text) == (Status.COMPLETE, "")


async def test_an_empty_stream_that_finished_is_a_reply() -> None:
    client = await _relay(_chunk({"role": "assistant", "content": ""}) + STOP + DONE)
    assert client.answered is not None
    assert client.answered.status is Status.COMPLETE
    assert _text(client) == [("", False)]


@pytest.mark.parametrize(
    ("body", "error"), [(b'{"error":{"message":"no"}}', "no"), (b"<html>", "HTTP 429"), (b"[1]", "HTTP 429")]
)
async def test_a_refusal_goes_through_as_it_is(body: bytes, error: str) -> None:
    client = _Client()
    answer: Any = _Answer(body, status=429)
    await relay_whole(CHAT, answer, client, lambda _: [], client.settle)
    assert (client.status, client.got) == (429, body)
    assert client.answered is not None
    assert client.answered.error == error
