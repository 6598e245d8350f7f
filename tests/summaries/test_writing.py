"""Writing one summary: the request, the checks, the second attempt, the text; with made-up answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from proxy.config import ModelPrices, ModelRule, SummarizerSettings, UpstreamSettings
from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.errors import NoAnswer
from proxy.models import Catalogue
from proxy.store import SummaryRow, SummaryStatus
from proxy.summaries import Caller, Summarizer, Work
from proxy.summaries.jobs import Stretch, Writer
from proxy.summaries.prompt import Prompt
from proxy.summaries.render import SummaryState, user_text
from proxy.summaries.summarizer import ModelAnswer, SummarizerTarget
from proxy.tokens import TokenCounter
from proxy.trimming import Summarize, SummaryRequest
from proxy.upstream import Upstream

pytestmark = pytest.mark.anyio

RULE = "You must never write to the folder /etc/parcels."
GOOD = "## Goal\nmove the parcels to the depot\n## Next step\nlook for the depot"
TALK = [
    ChatMessage.of({"role": role, "content": text})
    for role, text in [
        ("user", f"Please move the parcels to the depot. {RULE}"),
        ("assistant", "I will move the parcels and look for the depot."),
        *[
            (("user", "assistant")[at % 2], f"The parcels and the depot, part {at} of it. " + "more words " * 30)
            for at in range(10)
        ],
    ]
]
USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": 40}}
WORK = Work(
    key="key",
    session="s",
    tip="tip",
    wanted=SummaryRequest(stop=12, room=400, urgent=False),
    edit=Summarize(mode="model"),
    model="gpt",
    caller=Caller(tenant="t"),
)


class Told(Summarizer):
    """Gives the answers of a list in turn; raises those that are exceptions."""

    def __init__(self, upstream: Upstream, *answers: str | ModelAnswer | Exception) -> None:
        super().__init__(SummarizerSettings(), upstream)
        self.answers = list(answers)
        self.asked: list[str] = []

    async def ask(self, target: SummarizerTarget, prompt: Prompt) -> ModelAnswer:  # noqa: ARG002 - overridden
        self.asked.append(f"{prompt.system}\n{prompt.user}")
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, ModelAnswer) else said(answer)


def said(text: str, finish: str = "stop", *, calls: bool = False) -> ModelAnswer:
    return ModelAnswer(text=text, finish=finish, calls=calls, usage=USAGE, model="m-2024")


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    upstream = Upstream(UpstreamSettings(base_url="http://127.0.0.1:1/v1"), shares_key=False)
    yield upstream
    await upstream.aclose()


def span_of(messages: Sequence[Message] = TALK, predecessor: SummaryRow | None = None) -> Stretch:
    start = 0 if predecessor is None else predecessor.until
    tokens = sum(TokenCounter("estimate").messages(messages, "gpt"))
    if predecessor is not None:
        tokens += predecessor.covered_tokens
    return Stretch(
        start=start,
        earlier=() if predecessor is None else (user_text(TALK[0]),),
        messages=tuple(messages),
        nodes=tuple(f"n{at}" for at in range(len(messages))),
        tokens=tokens,
        predecessor=predecessor,
    )


async def written(told: Told, span: Stretch | None = None, work: Work = WORK, *rules: ModelRule) -> SummaryRow:
    writer = Writer(told, TokenCounter("estimate"), Catalogue(rules).facts)
    return await writer.write(span or span_of(), work, told.target(work.model, work.caller))


async def test_a_room_for_the_heading_alone_gives_no_summary(upstream: Upstream) -> None:
    told = Told(upstream, "## Goal\nthe depot", "## Goal\nthe depot")
    work = replace(WORK, wanted=SummaryRequest(stop=12, room=52, urgent=True))
    made = await written(told, span_of(TALK[1:]), work)
    assert (made.status, made.text) == (SummaryStatus.REFUSED, "")
    assert made.reason == "nothing but its heading fits within 52 tokens"


async def test_a_good_answer_becomes_a_summary(upstream: Upstream) -> None:
    told = Told(upstream, GOOD)
    made = await written(told)
    assert (made.status, made.reason, made.model) == (SummaryStatus.READY, "", "m-2024")
    assert made.text.startswith("Archived Session Summary\n")
    assert RULE in made.text
    assert "look for the depot" in made.text
    counted = TokenCounter("estimate").message(ChatMessage.of({"role": "system", "content": made.text}), "gpt")
    assert made.tokens == counted <= WORK.wanted.room
    assert state_of(made).told == GOOD
    assert (len(told.asked), made.usage, made.cost) == (1, USAGE, None)
    assert "part 9 of it" in told.asked[0]


async def test_a_refused_answer_is_requested_once_more_with_the_reason(upstream: Upstream) -> None:
    told = Told(upstream, "", GOOD)
    prices = ModelRule(match=("gpt",), prices=ModelPrices(input=10, output=100))
    made = await written(told, None, WORK, prices)
    assert made.status is SummaryStatus.READY
    assert len(told.asked) == 2
    assert made.usage == {"prompt_tokens": 200, "completion_tokens": 20, "prompt_tokens_details": {"cached_tokens": 80}}
    assert made.cost == pytest.approx(2 * (100 * 10 + 10 * 100) / 1_000_000)
    assert len(told.asked[1]) > len(told.asked[0])


async def test_after_two_refusals_there_is_no_summary(upstream: Upstream) -> None:
    told = Told(upstream, said("x", "length"), said("", "tool_calls", calls=True))
    made = await written(told)
    assert (made.status, made.text, made.state) == (SummaryStatus.REFUSED, "", {})
    assert made.reason == "it called a tool instead of writing"
    assert "cut off" in told.asked[1]
    assert len(told.asked) == 2


async def test_a_filtered_answer_is_refused(upstream: Upstream) -> None:
    told = Told(upstream, said("so", "content_filter"), said("so", "content_filter"))
    assert "filtered" in (await written(told)).reason


async def test_without_an_answer_there_is_no_summary_and_the_usage_is_kept(upstream: Upstream) -> None:
    made = await written(Told(upstream, "", NoAnswer("the summarizer answered 500")))
    assert (made.status, made.reason) == (SummaryStatus.FAILED, "the summarizer answered 500")
    assert made.usage == USAGE
    assert made.model == "gpt"


async def test_a_summary_that_saves_nothing_is_refused(upstream: Upstream) -> None:
    few = [ChatMessage.of({"role": "user", "content": RULE}), ChatMessage.of({"role": "assistant", "content": "Yes."})]
    work = Work(
        key="k",
        session="s",
        tip="t",
        wanted=SummaryRequest(stop=2, room=400, urgent=False),
        edit=Summarize(mode="model"),
        model="gpt",
        caller=Caller(tenant="t"),
    )
    made = await written(Told(upstream, *["## Goal\nwrite to the folder"] * 2), span_of(few), work)
    assert made.status is SummaryStatus.REFUSED


async def test_the_next_summary_continues_its_predecessor(upstream: Upstream) -> None:
    first = await written(Told(upstream, GOOD))
    later = [ChatMessage.of({"role": "user", "content": f"Later: {'other words ' * 40}"})] * 4
    told = Told(upstream, "## Goal\nother words, later")
    made = await written(told, span_of(later, first))
    assert made.status is SummaryStatus.READY
    assert "look for the depot" in told.asked[0]  # what the model wrote the last time
    assert "part 9 of it" not in told.asked[0]
    assert (made.generation, made.predecessor, made.until) == (2, first.id, 16)
    assert RULE in made.text  # said long before
    assert state_of(made).facts.messages == 16


def state_of(made: SummaryRow) -> SummaryState:
    state = SummaryState.read(made.state)
    assert state is not None
    return state


# ------------------------------------------------------------------------------------ long ones


LONG = [
    ChatMessage.of({"role": ("user", "assistant")[at % 2], "content": f"part {at}: {'parcels and depots ' * 150}"})
    for at in range(20)
]


async def test_a_transcript_beyond_the_context_window_is_sent_in_parts(upstream: Upstream) -> None:
    told = Told(upstream, *[f"## Goal\nparcels and depots, {word}" for word in ("part",) * 20])
    made = await written(told, span_of(LONG), WORK, ModelRule(match=("gpt",), context_window=5_000))
    assert made.status is SummaryStatus.READY
    assert 2 < len(told.asked) < 20
    assert "part 0" in told.asked[0]
    assert "part 19" not in told.asked[0]
    assert "part 0" not in told.asked[-1]
    assert "part 19" in told.asked[-1]
    assert all("parcels and depots, part" in asked for asked in told.asked[1:])


@pytest.mark.parametrize("window", [None, 9_000])
async def test_parts_that_are_too_long_are_shortened(upstream: Upstream, window: int | None) -> None:
    too_long = NoAnswer("the summarizer found the request too long", too_long=True, window=window)
    told = Told(upstream, too_long, *["## Goal\nparcels and depots"] * 20)
    made = await written(told, span_of(LONG), WORK, ModelRule(match=("gpt",), context_window=20_000))
    assert made.status is SummaryStatus.READY
    assert len(told.asked[1]) < len(told.asked[0])


@pytest.mark.parametrize(("window", "tries"), [(None, 3), (100, 1)])
async def test_a_model_that_refuses_every_length_fails(upstream: Upstream, window: int | None, tries: int) -> None:
    told = Told(upstream, *[NoAnswer("too long", too_long=True, window=window)] * 9)
    made = await written(told, span_of(LONG))
    assert made.status is SummaryStatus.FAILED
    assert "too long" in made.reason
    assert len(told.asked) == tries


# ------------------------------------------------------------------------------------ how it is worded


async def test_the_operators_prompt_is_used_and_needs_no_headings(upstream: Upstream) -> None:
    edit = Summarize(mode="model", prompt="Task goal, in 3 lines.", heading="What was", language="en")
    work = Work(key="k", session="s", tip="t", wanted=WORK.wanted, edit=edit, model="gpt", caller=Caller(tenant="t"))
    told = Told(upstream, "They want to move the parcels to the depot.")
    made = await written(told, None, work)
    assert made.status is SummaryStatus.READY
    assert "Task goal, in 3 lines." in told.asked[0]
    assert made.text.startswith("What was\n")


async def test_a_chinese_conversation_gets_a_chinese_summary(upstream: Upstream) -> None:
    talk = [
        ChatMessage.of({"role": role, "content": f"{text}{'请把包裹送到仓库，然后检查清单。' * 12}"})
        for role, text in [("user", "必须先检查清单。"), ("assistant", "好的。")] * 4
    ]
    told = Told(upstream, "## 目标\n把包裹送到仓库\n## 下一步\n检查清单")
    made = await written(told, span_of(talk))
    assert (made.status, made.reason) == (SummaryStatus.READY, "")
    assert "目标" in told.asked[0]
    assert "必须先检查清单" in made.text


async def test_characters_that_no_database_stores_are_removed(upstream: Upstream) -> None:
    made = await written(Told(upstream, f"{GOOD}\x00\ud800"))
    assert made.status is SummaryStatus.READY
    assert "\x00" not in made.text
    made.text.encode()


async def test_usage_of_any_shape_is_added_up(upstream: Upstream) -> None:
    odd: dict[str, Any] = {"prompt_tokens": 1, "tier": "a", "audio": None, "details": {"x": 1}}
    newer: dict[str, Any] = {"prompt_tokens": 2.5, "tier": "b", "audio": {"x": 2}, "cached": True}
    answers = [ModelAnswer(text="", finish="stop", calls=False, usage=usage, model="m") for usage in (odd, None)]
    made = await written(Told(upstream, *answers))
    assert made.usage == odd
    answers = [ModelAnswer(text="", finish="stop", calls=False, usage=usage, model="m") for usage in (odd, newer)]
    made = await written(Told(upstream, *answers))
    assert made.usage == {"prompt_tokens": 3.5, "tier": "b", "audio": {"x": 2}, "details": {"x": 1}, "cached": True}
