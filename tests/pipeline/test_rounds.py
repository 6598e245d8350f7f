"""The rounds behind a reply. How they look to a client is in test_virtual.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from proxy.dialects import Call, Message
from proxy.dialects.chat import CHAT
from proxy.dialects.chat.message import ChatMessage
from proxy.dialects.chat.own_tools import CalledRound
from proxy.errors import UpstreamUnreachable
from proxy.pipeline.own_tools import MOST_ASKS, MOST_CALLS, TOO_LONG, TOO_MANY, Rounds
from tests.support.answers import overflow_body
from tests.support.replies import message_of

pytestmark = pytest.mark.anyio

NAMES = frozenset({"recall_context"})


async def _answer(call: Call) -> str:
    return f"found for {call.id}"


class _Answer:
    def __init__(self, status: int, body: bytes = b"", fault: BaseException | None = None) -> None:
        self.status, self.body, self.fault, self.closed = status, body, fault, False

    async def read(self) -> bytes:
        if self.fault is not None:
            raise self.fault
        return self.body

    async def aclose(self) -> None:
        self.closed = True


TOO_MUCH = overflow_body("openai", 100, 200)


def _rounds(*answers: _Answer) -> Rounds:
    waiting = list(answers)

    async def ask_again(messages: Sequence[Message]) -> Any:
        assert messages
        return waiting.pop(0)

    return Rounds(CHAT, NAMES, _answer, ask_again, lambda message, _: message)


async def _answered(rounds: Rounds, line: str) -> None:
    await rounds.answer(CalledRound(names=NAMES, message=message_of(line)).calls, None)


def _result(identity: str, text: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": identity, "content": text}


async def test_each_round_is_a_reply_with_its_results() -> None:
    rounds = _rounds()
    await _answered(rounds, "So. | >recall_context a | >recall_context b")
    await _answered(rounds, ">recall_context a")

    first, *results, second, last = [message.data for message in rounds.messages]
    assert (first, second) == (
        message_of("So. | >recall_context a | >recall_context b"),
        message_of(">recall_context a"),
    )
    assert [*results, last] == [_result("a", "found for a"), _result("b", "found for b"), _result("a", "found for a")]
    assert len(rounds) == 2
    assert [(done.tool, done.round, done.chars, done.error) for done in rounds.answered] == [
        ("recall_context", number, 11, None) for number in (1, 1, 2)
    ]


async def test_of_many_calls_at_once_the_first_are_answered_and_the_others_told_so() -> None:
    rounds = _rounds()
    await _answered(rounds, " | ".join(f">recall_context c{number}" for number in range(MOST_CALLS + 2)))
    texts = [message.data["content"] for message in rounds.messages[1:]]
    assert texts == [f"found for c{number}" for number in range(MOST_CALLS)] + [TOO_MANY] * 2


async def test_it_asks_so_often_and_no_more() -> None:
    rounds = _rounds(*[_Answer(200) for _ in range(MOST_ASKS)])
    for _ in range(MOST_ASKS):
        await _answered(rounds, ">recall_context a")
        assert await rounds.ask() is not None
    assert not rounds.may_ask
    assert await rounds.ask() is None


async def test_the_newest_results_give_way_first_and_then_those_before() -> None:
    rounds = _rounds(_Answer(200), _Answer(*TOO_MUCH), answer := _Answer(*TOO_MUCH))
    await _answered(rounds, ">recall_context a")
    await rounds.ask()
    await _answered(rounds, ">recall_context b")

    assert await rounds.ask() is None
    assert answer.closed
    assert [message.data["content"] for message in rounds.messages if message.role == "tool"] == [TOO_LONG] * 2
    assert [done.error for done in rounds.answered] == [TOO_LONG] * 2


@pytest.mark.parametrize("answer", [_Answer(429, b"{}"), _Answer(200), _Answer(302)])
async def test_any_other_answer_is_the_caller_s_affair(answer: _Answer) -> None:
    rounds = _rounds(answer)
    await _answered(rounds, ">recall_context a")
    found: object = await rounds.ask()
    assert found is answer
    assert not answer.closed
    assert rounds.answered[0].error is None


async def test_an_overflow_that_nothing_of_ours_causes_is_the_caller_s_affair() -> None:
    rounds = _rounds(_Answer(*TOO_MUCH), last := _Answer(*TOO_MUCH))
    await _answered(rounds, ">recall_context a")
    found: object = await rounds.ask()
    assert found is last


async def test_an_error_that_cannot_be_read_is_closed() -> None:
    rounds = _rounds(answer := _Answer(500, fault=UpstreamUnreachable("it broke")))
    await _answered(rounds, ">recall_context a")
    with pytest.raises(UpstreamUnreachable):
        await rounds.ask()
    assert answer.closed

    rounds = _rounds(answer := _Answer(500, fault=anyio.get_cancelled_exc_class()()))
    await _answered(rounds, ">recall_context a")
    with pytest.raises(anyio.get_cancelled_exc_class()):
        await rounds.ask()
    assert answer.closed


async def test_what_belongs_to_a_reply_says_everything_once() -> None:
    reply = ChatMessage.of(message_of("A.B."))
    rounds = _rounds()
    assert rounds.hidden(reply, ChatMessage.of(message_of("A.B.")), partial=False) is None

    await _answered(rounds, "A. | >recall_context a")
    hidden = rounds.hidden(reply, ChatMessage.of(message_of("B.")), partial=False)
    assert hidden is not None
    assert hidden.before == rounds.messages
    assert hidden.reply == ChatMessage.of(message_of("B."))
    assert (hidden.after, hidden.tokens) == ((), 0)

    nothing = rounds.hidden(ChatMessage.of(message_of("A.")), ChatMessage.of(message_of("")), partial=False)
    assert nothing is None  # the reply is what was said before the calls, and they led to nothing


async def test_a_reply_that_is_all_of_the_last_round_is_sent_as_it_is() -> None:
    rounds = _rounds()
    await _answered(rounds, ">recall_context a")
    hidden = rounds.hidden(ChatMessage.of(message_of("B.")), ChatMessage.of(message_of("B.")), partial=False)
    assert hidden is not None
    assert (len(hidden.before), hidden.reply) == (2, None)


async def test_the_form_with_all_calls_stands_for_a_mixed_reply() -> None:
    rounds = _rounds()
    message = message_of("A. | >weather a | >recall_context b")
    await rounds.answer_last(CalledRound(names=NAMES, message=message).calls)
    theirs = message_of("A. | >weather a")
    hidden = rounds.hidden(ChatMessage.of(theirs), ChatMessage.of(theirs), partial=False)
    assert hidden is not None
    assert (hidden.before, hidden.reply) == ((), ChatMessage.of(message))
    assert [result.data for result in hidden.after] == [_result("b", "found for b")]
