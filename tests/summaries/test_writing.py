"""Writing one summary: asked, judged, asked again, put together; against answers that a test makes up."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from proxy.config import ModelPrices, ModelRule, SummarizerSettings, UpstreamSettings
from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.models import Catalogue
from proxy.store import SummaryRow, SummaryStatus
from proxy.summaries import Caller, Summarizer, Work
from proxy.summaries.jobs import Stretch, Writer, Written
from proxy.summaries.prompt import Prompt
from proxy.summaries.summarizer import ModelAnswer, NoAnswer, SummarizerTarget
from proxy.summaries.render import SummaryState, user_text
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
    """Answers with what it was told to, in turn; an exception is raised."""

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


async def written(told: Told, span: Stretch | None = None, work: Work = WORK, *rules: ModelRule) -> Written:
    writer = Writer(told, TokenCounter("estimate"), Catalogue(rules).facts)
    return await writer.write(span or span_of(), work, told.target(work.model, work.caller))


async def test_in_a_room_for_no_more_than_its_heading_there_is_none(upstream: Upstream) -> None:
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
    assert (made.spending.tries, made.spending.usage, made.spending.cost) == (1, USAGE, None)
    assert "part 9 of it" in told.asked[0]


async def test_a_refused_answer_is_asked_for_once_more_with_the_reason(upstream: Upstream) -> None:
    told = Told(upstream, "", GOOD)
    prices = ModelRule(match=("gpt",), prices=ModelPrices(input=10, output=100))
    made = await written(told, None, WORK, prices)
    assert made.status is SummaryStatus.READY
    assert made.spending.tries == 2
    assert made.spending.usage == {
        "prompt_tokens": 200,
        "completion_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 80},
    }
    assert made.spending.cost == pytest.approx(2 * (100 * 10 + 10 * 100) / 1_000_000)
    assert len(told.asked[1]) > len(told.asked[0])


async def test_one_that_is_refused_twice_ends_it(upstream: Upstream) -> None:
    told = Told(upstream, said("x", "length"), said("", "tool_calls", calls=True))
    made = await written(told)
    assert (made.status, made.text, made.state) == (SummaryStatus.REFUSED, "", {})
    assert made.reason == "it called a tool instead of writing"
    assert "cut off" in told.asked[1]
    assert made.spending.tries == 2


async def test_an_answer_that_its_provider_filtered_is_refused(upstream: Upstream) -> None:
    told = Told(upstream, said("so", "content_filter"), said("so", "content_filter"))
    assert "filtered" in (await written(told)).reason


async def test_no_answer_ends_it_and_what_was_spent_is_known(upstream: Upstream) -> None:
    made = await written(Told(upstream, "", NoAnswer("the summarizer answered 500")))
    assert (made.status, made.reason) == (SummaryStatus.FAILED, "the summarizer answered 500")
    assert made.spending.usage == USAGE
    assert made.model == "gpt"


async def test_what_it_would_save_is_not_paid_for_with_more(upstream: Upstream) -> None:
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


async def test_it_goes_on_from_the_summary_before_it(upstream: Upstream) -> None:
    first = await written(Told(upstream, GOOD))
    before = row(first)
    later = [ChatMessage.of({"role": "user", "content": f"Later: {'other words ' * 40}"})] * 4
    told = Told(upstream, "## Goal\nother words, later")
    made = await written(told, span_of(later, before))
    assert made.status is SummaryStatus.READY
    assert "look for the depot" in told.asked[0]  # what the model wrote the last time
    assert "part 9 of it" not in told.asked[0]
    assert RULE in made.text  # said long before
    assert state_of(made).facts.messages == 16


def state_of(made: Written) -> SummaryState:
    state = SummaryState.read(made.state)
    assert state is not None
    return state


def row(made: Written) -> SummaryRow:
    return SummaryRow(
        id="1",
        node="n",
        tip="n",
        recipe=WORK.edit.recipe,
        until=12,
        generation=1,
        status=made.status,
        reason="",
        model=made.model,
        text=made.text,
        state=made.state,
        tokens=made.tokens,
        covered_messages=12,
        covered_tokens=span_of().tokens,
        predecessor=None,
        asked=False,
        usage=None,
        cost=None,
        exchange=None,
        created_at=1,
    )


# ------------------------------------------------------------------------------------ long ones


LONG = [
    ChatMessage.of({"role": ("user", "assistant")[at % 2], "content": f"part {at}: {'parcels and depots ' * 150}"})
    for at in range(20)
]


async def test_what_is_too_long_for_its_window_is_read_in_parts(upstream: Upstream) -> None:
    told = Told(upstream, *[f"## Goal\nparcels and depots, {word}" for word in ("part",) * 20])
    made = await written(told, span_of(LONG), WORK, ModelRule(match=("gpt",), context_window=5_000))
    assert made.status is SummaryStatus.READY
    assert 2 < made.spending.tries == len(told.asked) < 20
    assert "part 0" in told.asked[0]
    assert "part 19" not in told.asked[0]
    assert "part 0" not in told.asked[-1]
    assert "part 19" in told.asked[-1]
    assert all("parcels and depots, part" in asked for asked in told.asked[1:])


@pytest.mark.parametrize("window", [None, 9_000])
async def test_what_is_too_long_after_all_is_tried_in_shorter_parts(upstream: Upstream, window: int | None) -> None:
    too_long = NoAnswer("the summarizer found the request too long", too_long=True, window=window)
    told = Told(upstream, too_long, *["## Goal\nparcels and depots"] * 20)
    made = await written(told, span_of(LONG), WORK, ModelRule(match=("gpt",), context_window=20_000))
    assert made.status is SummaryStatus.READY
    assert len(told.asked[1]) < len(told.asked[0])


@pytest.mark.parametrize(("window", "tries"), [(None, 3), (100, 1)])
async def test_a_model_that_finds_everything_too_long_is_given_up(
    upstream: Upstream, window: int | None, tries: int
) -> None:
    told = Told(upstream, *[NoAnswer("too long", too_long=True, window=window)] * 9)
    made = await written(told, span_of(LONG))
    assert made.status is SummaryStatus.FAILED
    assert "too long" in made.reason
    assert len(told.asked) == tries


# ------------------------------------------------------------------------------------ how it is worded


async def test_a_prompt_of_the_operators_is_used_and_needs_no_headings(upstream: Upstream) -> None:
    edit = Summarize(mode="model", prompt="Task goal, in 3 lines.", heading="What was", language="en")
    work = Work(
        key="k",
        session="s",
        tip="t",
        wanted=WORK.wanted,
        edit=edit,
        model="gpt",
        caller=Caller(tenant="t"),
        hint="Ask for more.",
    )
    told = Told(upstream, "They want to move the parcels to the depot.")
    made = await written(told, None, work)
    assert made.status is SummaryStatus.READY
    assert "Task goal, in 3 lines." in told.asked[0]
    assert made.text.startswith("What was\n")
    assert "Ask for more." in made.text


async def test_chinese_is_summed_up_in_chinese(upstream: Upstream) -> None:
    talk = [
        ChatMessage.of({"role": role, "content": f"{text}{'请把包裹送到仓库，然后检查清单。' * 12}"})
        for role, text in [("user", "必须先检查清单。"), ("assistant", "好的。")] * 4
    ]
    told = Told(upstream, "## 目标\n把包裹送到仓库\n## 下一步\n检查清单")
    made = await written(told, span_of(talk))
    assert (made.status, made.reason) == (SummaryStatus.READY, "")
    assert "目标" in told.asked[0]
    assert "必须先检查清单" in made.text


async def test_what_no_database_holds_is_not_sent(upstream: Upstream) -> None:
    made = await written(Told(upstream, f"{GOOD}\x00\ud800"))
    assert made.status is SummaryStatus.READY
    assert "\x00" not in made.text
    made.text.encode()


async def test_usage_is_added_up_whatever_is_in_it(upstream: Upstream) -> None:
    odd: dict[str, Any] = {"prompt_tokens": 1, "tier": "a", "audio": None, "details": {"x": 1}}
    newer: dict[str, Any] = {"prompt_tokens": 2.5, "tier": "b", "audio": {"x": 2}, "cached": True}
    answers = [ModelAnswer(text="", finish="stop", calls=False, usage=usage, model="m") for usage in (odd, None)]
    made = await written(Told(upstream, *answers))
    assert made.spending.usage == odd
    answers = [ModelAnswer(text="", finish="stop", calls=False, usage=usage, model="m") for usage in (odd, newer)]
    made = await written(Told(upstream, *answers))
    assert made.spending.usage == {
        "prompt_tokens": 3.5,
        "tier": "b",
        "audio": {"x": 2},
        "details": {"x": 1},
        "cached": True,
    }
