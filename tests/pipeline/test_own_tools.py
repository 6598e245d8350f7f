"""Calls of the proxy's own tools, taken out on the way: what upstream says, and what the client has of it.

Let me look. | >recall_context a      a round: its texts and calls, in order (`tests.support.replies`)
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import anyio
import anyio.lowlevel
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion

from proxy.dialects.chat.message import ChatMessage
from proxy.dialects.chat.own_tools import BLANK_LINE
from proxy.dialects.own_tools import BROKE_OFF, SAID_NOTHING, STOPPED
from proxy.errors import StoreUnavailable, UpstreamUnreachable
from proxy.pipeline.own_tools import MOST_ASKS, TOO_LONG
from proxy.pipeline.relay import Answered
from proxy.store import Status
from tests.support.answers import overflow_body
from tests.support.replies import DONE, USAGE, body_of, events_of, message_of
from tests.support.virtual import OWN, USER, Answer, World, bodies, by_sdk, chunks_of, streams, times, until_true

pytestmark = pytest.mark.anyio

TABLE: dict[str, tuple[list[str], str, list[str]]] = {
    "text": (["Hello there."], "Hello there.", []),
    "the client's": (["Well. | >weather a"], "Well.", ["a"]),
    "one round": ([">recall_context a", "It was blue."], "It was blue.", []),
    "text before": (["Let me look. | >recall_context a", "Blue."], "Let me look.\n\nBlue.", []),
    "text after": ([">recall_context a | Hm.", "Blue."], "Hm.\n\nBlue.", []),
    "spaced": (["Look: | >recall_context a", " So. | >recall_context b", "Blue."], "Look: So.\n\nBlue.", []),
    "a pause": (["Hm. | >recall_context a", ">recall_context b", "Blue."], "Hm.\n\nBlue.", []),
    "two at once": ([">recall_context a | >recall_context b", "Blue."], "Blue.", []),
    "both of ours": ([">recall_context a | >compress_chat_history b {}", "Blue."], "Blue.", []),
    "two rounds": ([">recall_context a", "And? | >recall_context a", "Blue."], "And?\n\nBlue.", []),
    "three rounds": ([">recall_context a", ">recall_context b", ">recall_context c", "No."], "No.", []),
    "ours first": ([">recall_context a | >weather b"], "", ["b"]),
    "ours last": (["So. | >weather a | >recall_context b"], "So.", ["a"]),
    "ours in the middle": ([">weather a | >recall_context b | >clock c"], "", ["a", "c"]),
    "ours around": ([">recall_context a | >weather b | >recall_context c"], "", ["b"]),
    "text between": (["A. | >recall_context a | B. | >weather b | C."], "A.B.C.", ["b"]),
    "then mixed": (["I. | >recall_context a", "II. | >recall_context b | >weather c"], "I.\n\nII.", ["c"]),
    "then the client's": ([">recall_context a", ">weather b | >clock c"], "", ["b", "c"]),
    "names like ours": ([">recall a | >recall_context_v2 b | >recall_context c"], "", ["a", "b"]),
    "no arguments": ([">compress_chat_history a  | >weather b {}"], "", ["b"]),
}


def _check_reply(world: World, completion: Any, rounds: Sequence[str], text: str, calls: list[str]) -> None:
    """Check what the client has, what is stored, and what is sent the next time."""
    message, answered = completion.choices[0].message, world.settled()
    assert (message.role, message.content or "") == ("assistant", text)
    assert [call.id for call in message.tool_calls or []] == calls
    assert completion.choices[0].finish_reason == ("tool_calls" if calls else "stop")
    if any(">" in line for line in rounds[:-1]):
        assert not any(name.encode() in world.got for name in OWN)
    assert answered.status is Status.COMPLETE
    assert (answered.error, answered.upstream_status, answered.model) == (None, 200, "m-1")
    [(reply, partial)] = answered.replies
    assert not partial
    assert (reply.text, [call.id for call in reply.calls]) == (text, calls)
    said = [call for line in rounds for call in ChatMessage.of(message_of(line)).calls]
    assert world.calls == [call for call in said if call.name in OWN]
    assert [(done.tool, done.chars) for done in answered.own_calls] == [
        (call.name, len(f"found for {call.id}")) for call in world.calls
    ]
    theirs = {call.id: call for call in said if call.name not in OWN}
    assert [theirs[call.id] for call in reply.calls] == list(reply.calls)
    assert answered.usage == times(len(rounds))
    assert answered.first_usage == (USAGE if len(rounds) > 1 else None)
    # What is sent the next time begins with what was sent last, and says everything once.
    assert len(world.asked) == len(rounds) - 1
    view = world.next_view()
    asked = [USER, *(world.asked[-1] if world.asked else [])]
    assert view[: len(asked)] == asked
    sent = "".join(said.get("content") or "" for said in view if said["role"] == "assistant")
    assert sent == text.replace(BLANK_LINE, "")  # which no round said
    assert [call["id"] for said in view for call in said.get("tool_calls", ())] == [
        call.id for line in rounds for call in ChatMessage.of(message_of(line)).calls
    ]


HOW: list[dict[str, Any]] = [
    {},
    {"order": "heads first"},
    {"names": "pieces"},
    {"names": "late"},
    {"names": "repeated"},
    {"crlf": True},
]


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
async def test_the_client_sees_one_reply(row: tuple[list[str], str, list[str]], how: dict[str, Any]) -> None:
    rounds, text, calls = row
    tasks = asyncio.all_tasks()
    first, *later = streams(rounds, **how)
    world = World(first, *later)
    answered = await world.run()
    await anyio.lowlevel.checkpoint()
    assert asyncio.all_tasks() == tasks  # nobody is left to keep a line alive
    assert [answer.closed for answer in (first, *later)] == [bool(later), *[True] * len(later)]  # the caller's, too

    names_once = how.get("names") != "repeated"  # the SDK puts all that it hears together
    chunks = chunks_of(world.got)
    if names_once:
        _check_reply(world, by_sdk(world.got), rounds, text, calls)
    assert answered.status is Status.COMPLETE
    assert not any(name.encode() + b'"' in world.got for name in OWN)
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-0"}
    heads = [
        item["index"]
        for chunk in chunks
        for choice in chunk["choices"]
        for item in choice["delta"].get("tool_calls", ())
        if item.get("id")
    ]
    assert heads == list(range(len(calls)))
    assert [chunk["usage"] for chunk in chunks if not chunk["choices"]] == [times(len(rounds))]
    assert world.ended
    assert world.got.count(b"[DONE]") == 1
    assert b"[DONE]" not in world.seen_at_settling
    world.next_view()


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
async def test_a_body_says_what_a_stream_says(row: tuple[list[str], str, list[str]]) -> None:
    rounds, text, calls = row
    first, *later = bodies(rounds)
    world = World(first, *later)
    await world.run(stream=False)

    assert [answer.closed for answer in (first, *later)] == [bool(later), *[True] * len(later)]  # the caller's, too
    _check_reply(world, ChatCompletion.model_validate_json(world.got), rounds, text, calls)
    assert world.seen_at_settling == b""
    assert world.headers[-1] == (b"content-length", b"%d" % len(world.got))


@pytest.mark.parametrize("names", ["whole", "pieces", "late"])
@pytest.mark.parametrize("row", ["ours first", "names like ours", "two rounds", "text between", "spaced"])
async def test_the_bytes_may_be_cut_anywhere(row: str, names: str) -> None:
    rounds, _, _ = TABLE[row]
    whole, cut = World(*streams(rounds, names=names)), World(*streams(rounds, 1, names=names))
    await whole.run()
    await cut.run()

    assert cut.got == whole.got
    assert cut.settled().replies == whole.settled().replies
    assert cut.settled().hidden == whole.settled().hidden


@pytest.mark.parametrize("size", [7, 1 << 20])
@pytest.mark.parametrize("crlf", [False, True])
@pytest.mark.parametrize("line", ["Hello.", "So. | >weather a | >clock b", ">recall a | >clock b", ""])
async def test_what_calls_nothing_of_ours_comes_as_it_was_sent(line: str, crlf: bool, size: int) -> None:
    sent = b": ping\n\n" + events_of(line, crlf=crlf, order="heads first") + b": bye\n\n"
    world = World(Answer(sent, size=size, fault=UpstreamUnreachable("nobody cares any more")))
    await world.run()
    assert world.got == sent
    assert world.settled().hidden is None

    body = body_of(line)
    whole = World(Answer(body))
    await whole.run(stream=False)
    assert whole.got == body


PART = st.sampled_from(["A. ", "B.", ">recall_context {}", ">compress_chat_history {}", ">weather {}", ">recall {}"])
LINE = st.lists(PART, min_size=1, max_size=5)


@given(
    st.lists(LINE, min_size=4, max_size=4),
    st.sampled_from(["serial", "heads first"]),
    st.sampled_from(["whole", "late", "pieces"]),
    st.integers(1, 60),
)
@settings(max_examples=60)
def test_any_reply_in_any_pieces(lines: list[list[str]], order: str, names: str, size: int) -> None:
    rounds, text, calls = list[str](), "", list[str]()
    for number, parts in enumerate(lines):
        called = [part for part in parts if part.startswith(">")]
        if number == MOST_ASKS and called and not any(part in {">weather {}", ">recall {}"} for part in called):
            parts = ["End."]  # noqa: PLW2901 - the limit has tests of its own
            called = []
        line = " | ".join(part.format(f"c{place}") for place, part in enumerate(parts))
        rounds.append(line)
        said = "".join(part for part in parts if not part.startswith(">"))
        text += BLANK_LINE + said if text.endswith(".") and said else said
        theirs = [call.id for call in ChatMessage.of(message_of(line)).calls if call.name not in OWN]
        if theirs or not called:
            calls = theirs
            break
    for stream in (True, False):
        answers = streams(rounds, size, order=order, names=names) if stream else bodies(rounds)
        world = World(*answers)
        asyncio.run(_run(world, stream=stream))
        reply = by_sdk(world.got) if stream else ChatCompletion.model_validate_json(world.got)
        _check_reply(world, reply, rounds, text, calls)


async def _run(world: World, *, stream: bool) -> None:
    await world.run(stream=stream)


# ------------------------------------------------------------------------------------------ the limit


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("text", ["", "Hm."])
async def test_a_model_that_calls_ours_for_ever_is_stopped(stream: bool, text: str) -> None:
    line = f"{text} | >recall_context a" if text else ">recall_context a"
    world = World(*(streams if stream else bodies)([line] * (MOST_ASKS + 1)))
    answered = await world.run(stream=stream)

    reply = by_sdk(world.got) if stream else ChatCompletion.model_validate_json(world.got)
    said = [text] * (MOST_ASKS + 1) if text else [STOPPED]
    assert reply.choices[0].message.content == BLANK_LINE.join(said)
    assert reply.choices[0].finish_reason == "stop"
    assert not reply.choices[0].message.tool_calls
    assert len(world.asked) == len(world.calls) == MOST_ASKS
    assert answered.status is Status.COMPLETE
    assert answered.usage == times(MOST_ASKS + 1)
    view = world.next_view()
    assert view[-1] == {"role": "assistant", "content": text or STOPPED}
    assert len(view) == 1 + 2 * MOST_ASKS + 1


@pytest.mark.parametrize("stream", [True, False])
async def test_the_client_s_calls_end_the_loop_at_its_limit(stream: bool) -> None:
    rounds = [">recall_context a"] * MOST_ASKS + [">recall_context b | >weather c"]
    world = World(*(streams if stream else bodies)(rounds))
    await world.run(stream=stream)

    reply = by_sdk(world.got) if stream else ChatCompletion.model_validate_json(world.got)
    _check_reply(world, reply, rounds, "", ["c"])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("text", ["", "Hm."])
async def test_a_call_that_was_cut_off_is_not_answered(stream: bool, text: str) -> None:
    line = f'{text} | >recall_context a {{"ref": "re' if text else '>recall_context a {"ref": "re'
    make = events_of if stream else body_of
    world = World(Answer(make(line, "length")))
    answered = await world.run(stream=stream)

    reply = by_sdk(world.got) if stream else ChatCompletion.model_validate_json(world.got)
    assert reply.choices[0].message.content == (text or BROKE_OFF)
    assert (reply.choices[0].finish_reason, reply.choices[0].message.tool_calls) == ("length", None)
    assert (world.calls, world.asked, answered.hidden) == ([], [], None)
    assert b"recall" not in world.got


@pytest.mark.parametrize("stream", [True, False])
async def test_a_reply_is_not_empty_where_a_model_says_nothing_after_our_answer(stream: bool) -> None:
    world = World(*(streams if stream else bodies)([">recall_context a", ""]))
    await world.run(stream=stream)

    reply = by_sdk(world.got) if stream else ChatCompletion.model_validate_json(world.got)
    assert reply.choices[0].message.content == SAID_NOTHING
    assert world.next_view()[-1]["content"] == SAID_NOTHING


@pytest.mark.parametrize("stream", [True, False])
async def test_a_last_round_without_text_is_not_sent_as_an_empty_message(stream: bool) -> None:
    """What was said before it is the reply then, and the calls that led to nothing are not kept."""
    world = World(*(streams if stream else bodies)([">recall_context a", "Look: | >recall_context b", ""]))
    answered = await world.run(stream=stream)

    assert [message.text for message, _ in answered.replies] == ["Look:"]
    view = world.next_view()
    assert view[-1] == {"role": "assistant", "content": "Look:"}
    assert len(view) == 4


# -------------------------------------------------------------------------- asking again does not work


def _too_long() -> Answer:
    status, body = overflow_body("openai", 100, 200)
    return Answer(body, status=status)


@pytest.mark.parametrize("stream", [True, False])
async def test_what_is_too_long_for_the_model_gives_way_to_a_text_that_says_so(stream: bool) -> None:
    refusal = _too_long()
    first, last = (streams if stream else bodies)([">recall_context a", "Then not."])
    world = World(first, refusal, last)
    answered = await world.run(stream=stream)

    assert [asked[-1]["content"] for asked in world.asked] == ["found for a", TOO_LONG]
    assert world.next_view()[2]["content"] == TOO_LONG
    assert [done.error for done in answered.own_calls] == [TOO_LONG]
    assert refusal.closed
    assert b"Then" in world.got


async def test_an_earlier_answer_gives_way_where_the_last_was_not_to_blame() -> None:
    first, second, last = streams([">recall_context a", ">recall_context b", "So."])
    world = World(first, second, _too_long(), last)
    await world.run()
    assert [message["content"] for message in world.asked[-1] if message["role"] == "tool"] == ["found for a", TOO_LONG]

    world = World(streams([">recall_context a"])[0], _too_long(), _too_long())
    await world.run()
    assert (world.status, len(world.asked)) == (400, 2)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("hides_usage", [True, False])
async def test_one_that_may_not_be_asked_again_is_stopped_too(stream: bool, hides_usage: bool) -> None:
    rounds = ["Well. | >recall_context a", ">recall_context b", ">recall_context c"]
    world = World(*(streams if stream else bodies)(rounds), _too_long())
    answered = await world.run(stream=stream, hides_usage=hides_usage)

    reply = by_sdk(world.got) if stream else ChatCompletion.model_validate_json(world.got)
    content = "Well." + BLANK_LINE + STOPPED
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (content, "stop")
    assert (answered.status, answered.usage) == (Status.COMPLETE, times(3))
    if stream:
        assert world.got.endswith(DONE)
        usages = [chunk["usage"] for chunk in chunks_of(world.got) if chunk.get("usage")]
        assert usages == ([] if hides_usage else [times(3)])
    view = world.next_view()
    assert view[-1] == {"role": "assistant", "content": STOPPED}
    assert [message["content"] for message in view if message["role"] == "tool"][-1] == TOO_LONG


@pytest.mark.parametrize("stream", [True, False])
async def test_a_refusal_before_the_first_byte_is_upstream_s_own(stream: bool) -> None:
    body = b'{ "error": {"message": "slow down"} }'
    answer = Answer(body, status=429)
    world = World((streams if stream else bodies)([">recall_context a"])[0], answer)
    answered = await world.run(stream=stream)

    assert (world.status, world.got, world.ended) == (429, body, True)
    assert (b"x-status", b"429") in world.headers
    assert (answered.status, answered.error, answered.upstream_status) == (Status.FAILED, "slow down", 429)
    assert (answered.replies, answered.hidden, answered.usage) == ((), None, USAGE)
    assert answer.closed


@pytest.mark.parametrize("stream", [True, False])
async def test_a_failure_before_the_first_byte_is_told_as_such(stream: bool) -> None:
    make = streams if stream else bodies
    world = World(make([">recall_context a"])[0], UpstreamUnreachable("it is gone"))
    with pytest.raises(UpstreamUnreachable):
        await world.run(stream=stream)
    assert world.settled().status is Status.FAILED
    assert world.settled().error == "it is gone"
    assert world.settled().usage == USAGE
    assert (world.status, world.got) == (0, b"")


async def test_a_body_without_a_reply_is_passed_on_as_it_is() -> None:
    for body in (b"<html>", b"[]", b'{"error": {"message": "no"}}', b'{"choices": []}'):
        world = World(*bodies([">recall_context a"]), Answer(body))
        answered = await world.run(stream=False)
        assert (world.got, answered.status) == (body, Status.FAILED)
        assert answered.usage == USAGE


async def test_contents_in_parts_are_put_together_as_parts() -> None:
    part = {"type": "text", "text": "Blue."}
    parts = orjson.dumps([part])
    for first, last, together in (
        (body_of("A. | >recall_context a"), body_of("?").replace(b'"?"', parts), [{**part, "text": "A."}, part]),
        (
            body_of("? | >recall_context a").replace(b'"?"', parts),
            body_of("B."),
            [part, {**part, "text": BLANK_LINE + "B."}],
        ),
    ):
        world = World(Answer(first), Answer(last))
        await world.run(stream=False)
        assert orjson.loads(world.got)["choices"][0]["message"]["content"] == together


async def test_a_body_that_breaks_is_told_as_such() -> None:
    world = World(Answer(b"{", fault=UpstreamUnreachable("it broke")))
    with pytest.raises(UpstreamUnreachable):
        await world.run(stream=False)
    assert world.settled().error == "it broke"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_while_a_tool_is_answered(stream: bool) -> None:
    world = World(*(streams if stream else bodies)(["Look. | >recall_context a"]))
    world.answering = anyio.Event()
    relay = world.open(stream=stream)
    async with anyio.create_task_group() as group:
        group.start_soon(relay.run, world.settle)
        await until_true(lambda: world.calls)
        group.cancel_scope.cancel()
    answered = await relay.ending(left=True)

    assert world.answered is None
    assert answered.error == "the client left"
    assert answered.hidden is None
    if stream:
        assert [(message.text, partial) for message, partial in answered.replies] == [("Look.", True)]
    else:
        assert (answered.status, answered.replies) == (Status.CANCELLED, ())
        assert (await relay.ending()).status is Status.FAILED


@pytest.mark.parametrize("stream", [True, False])
async def test_a_reply_that_cannot_be_stored_is_not_acknowledged(stream: bool) -> None:
    world = World(*(streams if stream else bodies)([">recall_context a", "Blue."]))

    async def settle(answered: Answered) -> None:
        raise StoreUnavailable(str(answered.status))

    with pytest.raises(StoreUnavailable, match="complete"):
        await world.open(stream=stream).run(settle)
    assert not world.ended
