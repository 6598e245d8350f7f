"""Streams with calls of the proxy's own tools: how they break, how they end, who waits and who leaves.

What a client has of whole replies is in test_own_tools.py.
"""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from proxy.dialects.own_tools import STOPPED
from proxy.errors import PalimpsestError, UpstreamUnreachable
from proxy.pipeline.own_tools import COMMENT, MOST_ASKS
from proxy.store import Status
from tests.support.replies import DONE, events_of
from tests.support.virtual import USER, Answer, World, by_sdk, chunks_of, streams, times, until_true

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (UpstreamUnreachable("it is gone"), "it is gone"),
        (Answer(b'{"error": {"message": "slow\\n down"}}', status=429), "slow\n down"),
        (Answer(b"<html>", status=502), "HTTP 502"),
        (Answer(b"{", status=500, fault=UpstreamUnreachable("it broke")), "it broke"),
    ],
)
async def test_a_failure_in_a_stream_that_began_is_its_last_event(answer: Answer | PalimpsestError, said: str) -> None:
    world = World(*streams(["Let me look. | >recall_context a"]), answer)
    answered = await world.run()

    assert (world.status, world.ended) == (200, True)
    assert b"[DONE]" not in world.got
    assert said in chunks_of(world.got)[-1]["error"]["message"]
    assert (answered.status, answered.error) == (Status.PARTIAL, said)
    assert [(message.text, partial) for message, partial in answered.replies] == [("Let me look.", True)]
    assert world.next_view() == [USER, {"role": "assistant", "content": "Let me look."}]


@pytest.mark.parametrize("rounds", [["A.", ""], ["A.", "B."]])
async def test_a_later_round_that_breaks_keeps_what_was_said(rounds: list[str]) -> None:
    first = events_of(f"{rounds[0]} | >recall_context a")
    second = events_of(f"{rounds[1]} | >recall_context b" if rounds[1] else ">recall_context b", number=1)
    second = second[: second.rindex(b'"finish_reason":"tool_calls"') - 100]
    world = World(Answer(first), Answer(second, fault=UpstreamUnreachable("it broke")))
    answered = await world.run()

    assert "error" in chunks_of(world.got)[-1]
    assert (answered.status, answered.error) == (Status.PARTIAL, "it broke")
    assert [(message.text, partial) for message, partial in answered.replies] == [
        ("\n\n".join(filter(None, rounds)), True)
    ]
    view = world.next_view()
    assert "".join(said.get("content") or "" for said in view if said["role"] == "assistant") == "".join(rounds)
    assert len(view) == (4 if rounds[1] else 2)


async def test_an_error_of_upstream_s_own_is_relayed_and_ends_it() -> None:
    error = b'data: {"error": {"message": "overloaded"}}\n\n'
    round_ = events_of(">recall_context a").removesuffix(DONE)
    for sent in (round_ + error, round_ + error + DONE):
        world = World(Answer(sent))
        answered = await world.run()
        assert error in world.got
        assert world.got.count(b"error") == 1
        assert (answered.status, answered.error, world.calls) == (Status.FAILED, "overloaded", [])


# ----------------------------------------------------------------------------- odd ends of streams


def _without_finish(line: str) -> bytes:
    events = events_of(line, usage=False).split(b"\n\n")
    return b"\n\n".join(event for event in events if b'"finish_reason":"' not in event)


async def test_a_stream_that_does_not_say_why_it_ends() -> None:
    world = World(Answer(_without_finish("A. | >recall_context a")), Answer(_without_finish("B.")))
    await world.run()
    assert [message.text for message, _ in world.settled().replies] == ["A.\n\nB."]
    assert world.got.count(b"[DONE]") == 1

    world = World(Answer(_without_finish(">recall_context a | >weather b")))
    await world.run()
    assert [call.id for message, _ in world.settled().replies for call in message.calls] == ["b"]
    assert world.settled().hidden is not None

    world = World(*[Answer(_without_finish(">recall_context a")) for _ in range(MOST_ASKS + 1)])
    await world.run()
    reply = by_sdk(world.got).choices[0]
    assert (reply.message.content, reply.finish_reason) == (STOPPED, "stop")

    broken = _without_finish(">recall_context a").removesuffix(DONE)
    world = World(Answer(broken))
    answered = await world.run()
    assert (answered.status, world.calls) == (Status.FAILED, [])
    assert "error" in chunks_of(world.got)[-1]


@pytest.mark.parametrize("end", [b"", b"data: [DONE]", b": half"])
async def test_a_round_that_closes_without_done_is_whole_all_the_same(end: bytes) -> None:
    first, last = (
        events_of(line, number=place).removesuffix(DONE) + end
        for place, line in enumerate([">recall_context a", "Blue. | >recall_context b | >weather c"])
    )
    world = World(Answer(first), Answer(last, fault=UpstreamUnreachable("it broke")))
    answered = await world.run()

    assert answered.status is Status.COMPLETE
    assert world.got.count(b"[DONE]") == end.count(b"[DONE]")
    assert by_sdk(world.got + b"\n\n").choices[0].message.content == "Blue."
    assert answered.hidden is not None
    assert len(answered.hidden.before) == 2
    world.next_view()


async def test_a_stream_without_a_reply_is_a_failure() -> None:
    for sent, why in ((DONE, "holds no reply"), (b"", "closed the stream")):
        world = World(Answer(sent))
        answered = await world.run()
        assert answered.status is Status.FAILED
        assert why in (answered.error or "")
        assert (world.got == DONE) is (sent == DONE)


async def test_a_stream_in_a_strange_encoding_goes_through() -> None:
    answer = Answer(b"\x1f\x8b...")
    answer.readable = False
    world = World(answer)
    answered = await world.run()
    assert (world.got, answered.status) == (b"\x1f\x8b...", Status.FAILED)
    assert (await world.relay.ending(left=True)).error == "the client left"


# ---------------------------------------------------------------------------- who waits, and who leaves


async def test_the_usage_that_nobody_asked_for_is_kept_back_and_counted() -> None:
    world = World(*streams([">recall_context a", "Blue."]))
    answered = await world.run(hides_usage=True)
    assert all(chunk["choices"] for chunk in chunks_of(world.got))
    assert answered.usage == times(2)


async def test_text_flows_while_a_call_of_ours_is_on_its_way() -> None:
    answer = Answer(events_of("Let me look. | >recall_context a"), size=1)
    answer.gate = anyio.Event()
    world = World(answer, *streams(["Blue."]))
    async with anyio.create_task_group() as group:
        group.start_soon(world.open(stream=True).run, world.settle)
        await until_true(lambda: b"look." in world.got)
        assert world.asked == []
        answer.gate.set()
    assert b"Blue." in world.got


@pytest.mark.parametrize("text", ["", "Well."])
async def test_comments_keep_the_line_alive_while_a_tool_is_answered(text: str) -> None:
    line = f"{text} | >recall_context a" if text else ">recall_context a"
    world = World(*streams([line, "Blue."]))
    answering = world.answering = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(world.open(stream=True, interval=0.001).run, world.settle)
        await until_true(lambda: world.got.count(COMMENT) > 1)
        answering.set()
    assert (world.status, world.ended) == (200, True)
    assert by_sdk(world.got).choices[0].message.content == "\n\n".join(filter(None, [text, "Blue."]))


async def test_a_stream_begins_though_nothing_is_said_for_long() -> None:
    answer = Answer(events_of("Hi."), size=1 << 20)
    answer.gate = anyio.Event()
    world = World(answer)
    async with anyio.create_task_group() as group:
        group.start_soon(world.open(stream=True, interval=0.001).run, world.settle)
        await until_true(lambda: world.status)
        assert world.got == b""
        answer.gate.set()
    assert world.got == events_of("Hi.")  # nothing of ours in it: not a comment either


@pytest.mark.parametrize("tells", [False, True])
async def test_who_waits_for_the_end_of_a_connection_has_the_end_of_the_stream(tells: bool) -> None:
    rounds = streams([">recall_context a", "Hi."])
    waited: list[bytes] = []
    for answer in rounds:
        answer.tells = tells
        answer.at_end = lambda: waited.append(world.got)
    world = World(*rounds)
    answered = await world.run()
    # Nobody waits for an end that is known; else the client has all of it by then, of the last round.
    assert waited == ([] if tells else [b"", world.got])
    assert answered.status is Status.COMPLETE
    assert world.got.endswith(DONE)
    assert world.got.count(DONE) == 1
    assert DONE not in world.seen_at_settling


async def test_a_stream_whose_end_is_known_ends_in_one_piece() -> None:
    class Counting(World):
        written: tuple[bytes, ...] = ()

        async def write(self, data: bytes) -> None:
            self.written += (data,)
            await super().write(data)

    world = Counting(*streams(["Hi."]))
    await world.run()
    assert world.written[-1] == DONE
    assert len(world.written) == 2


async def test_a_silence_of_upstream_s_own_is_not_broken() -> None:
    answer = Answer(events_of("Hi."), size=len(events_of("Hi.")) - len(DONE))
    answer.gate = anyio.Event()
    world = World(answer)
    async with anyio.create_task_group() as group:
        group.start_soon(world.open(stream=True, interval=0).run, world.settle)
        for _ in range(100):
            await anyio.lowlevel.checkpoint()
        assert world.got.endswith(b"\n\n")
        answer.gate.set()
    assert world.got == events_of("Hi.")


async def test_a_client_that_leaves_during_a_mixed_block_has_its_own_calls() -> None:
    world = World(*streams(["I. | >recall_context a", "II. | >recall_context b | >weather c"]))
    world.slow = "b"
    relay = world.open(stream=True)
    async with anyio.create_task_group() as group:
        group.start_soon(relay.run, world.settle)
        await until_true(lambda: len(world.calls) == 2)
        group.cancel_scope.cancel()
    answered = world.answered = await relay.ending(left=True)

    assert (answered.status, answered.error) == (Status.COMPLETE, None)
    assert answered.hidden is not None
    assert (len(answered.hidden.before), answered.hidden.after) == (2, ())
    assert [call["id"] for message in world.next_view() for call in message.get("tool_calls", ())] == ["a", "c"]


async def test_an_answer_that_is_left_is_closed() -> None:
    later = Answer(events_of("Blue.", number=1), size=1)
    later.gate = anyio.Event()
    world = World(*streams([">recall_context a"]), later)
    async with anyio.create_task_group() as group:
        group.start_soon(world.open(stream=True).run, world.settle)
        await until_true(lambda: b"Blue." in world.got)
        group.cancel_scope.cancel()
    assert later.closed
