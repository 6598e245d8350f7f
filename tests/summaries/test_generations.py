"""What the user said survives three summaries by a model that drops all it can, in recorded conversations.

Fifty constraints and twenty identifiers are planted in short user messages. All of them must stand in the
third summary, and the summary must stay within its budget.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from proxy.config import SummarizerSettings, UpstreamSettings
from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.models import Catalogue
from proxy.pipeline import Background
from proxy.store import Body, Store, SummaryRow, SummaryStatus
from proxy.summaries import Caller, Summaries, Summarizer, Work
from proxy.summaries.prompt import Prompt
from proxy.summaries.summarizer import ModelAnswer, SummarizerTarget
from proxy.tokens import TokenCounter
from proxy.trimming import Summarize, SummaryRequest
from proxy.upstream import Upstream
from tests.support.stores import empty_store
from tests.support.talk import Talk, message

pytestmark = pytest.mark.anyio

TRAJECTORIES = Path(__file__).parents[1] / "data" / "trajectories"
TARGET = 30_000
LONGEST = 30
"""Tokens of the longest planted message."""
EDIT = Summarize(mode="model")
ROOM = int(EDIT.budget_ratio * TARGET)
COUNTER = TokenCounter()
SCENES: dict[str, tuple[list[str], list[str], list[str], str]] = {
    "en": (
        ["tau-airline-t46-r3", "deerflow-thread-4f3e55ee", "tau-airline-t00-r2", "whowhen-algo-23"],
        [f"Constraint {n}: never ship pallet {n * 37 % 91 + 9} before the customs form is signed." for n in range(50)],
        [f"By the way, the booking is ZQ{n:02d}-{n * 7919 % 9000 + 1000}." for n in range(20)],
        "So it went on.",
    ),
    "zh": (
        ["smile-53930", "crosswoz-val-11290", "deerflow-replay-ultra-processed-foods"],
        [f"第{n}条：第{n * 37 % 91 + 9}号货架的货在验收之前不要发出。" for n in range(50)],
        [f"顺便说一下，订单号是 ZQ{n:02d}-{n * 7919 % 9000 + 1000}。" for n in range(20)],
        "对话就这样继续进行。",
    ),
}


class Forgetful(Summarizer):
    """Always gives the same short answer."""

    says = ""

    async def ask(self, target: SummarizerTarget, prompt: Prompt) -> ModelAnswer:  # noqa: ARG002 - overridden
        return ModelAnswer(text=self.says, finish="stop", calls=False, usage=None, model=target.model)


@pytest.fixture
async def summarizer() -> AsyncIterator[Forgetful]:
    upstream = Upstream(UpstreamSettings(base_url="http://127.0.0.1:1/v1"), shares_key=False)
    yield Forgetful(SummarizerSettings(), upstream)
    await upstream.aclose()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = await Store.open(empty_store(tmp_path / "palimpsest.db"))
    yield store
    await store.close()


def recorded(names: list[str]) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = []
    for name in names:
        data = json.loads((TRAJECTORIES / f"{name}.json").read_text())
        messages = data["messages"] if isinstance(data, dict) else data
        said += [each for each in messages if each["role"] != "system"]
    return said


async def told(talk: Talk, names: list[str], planted: list[str]) -> int:
    """Store recorded conversations with messages planted at regular distances; return the number of messages."""
    messages, left = recorded(names), list(planted)
    every = max(1, len(messages) // len(planted))
    log: list[Message] = []
    for number, each in enumerate(messages):
        log.append(ChatMessage.of(each))
        follows = messages[number + 1]["role"] if number + 1 < len(messages) else "user"
        if left and number % every == 0 and follows != "tool":
            log.append(message("user", left.pop(0)))
    log += [message("user", text) for text in left]
    bodies = [Body(message=each, tokens=COUNTER.message(each, "gpt-4o")) for each in log]
    exchange = await talk.begin(*bodies)
    await talk.settle(exchange, *bodies, replies=(Body(message=message("assistant", "Yes."), tokens=5),))
    return len(log)


async def make(store: Store, summarizer: Forgetful, talk: Talk, stops: Sequence[int]) -> list[SummaryRow]:
    """Make a summary up to each of these positions, one after the other."""
    background = Background()
    summaries = Summaries(store, summarizer, COUNTER, Catalogue(()).facts, background.start)
    session = await store.session("tenant", "session")
    assert session is not None
    rows: list[SummaryRow] = []
    for stop in stops:
        work = Work(
            key=talk.key,
            session="session",
            tip=session.head,
            wanted=SummaryRequest(stop=stop, room=ROOM, urgent=False),
            edit=EDIT,
            model="gpt-4o",
            caller=Caller(tenant="tenant"),
        )
        attempt = await summaries.make(work)
        assert attempt.row is not None
        assert attempt.reason == attempt.row.reason
        rows.append(attempt.row)
    await summaries.aclose()
    await background.drain()
    return rows


@pytest.mark.parametrize("language", SCENES)
async def test_every_planted_message_stands_in_the_third_summary(
    store: Store, summarizer: Forgetful, language: str
) -> None:
    names, constraints, identifiers, summarizer.says = SCENES[language]
    assert max(COUNTER.text(text, "gpt-4o") for text in constraints + identifiers) <= LONGEST
    planted = [text for pair in zip(constraints, identifiers * 3, strict=False) for text in pair][:40]
    planted += constraints[20:]
    assert set(planted) == {*constraints, *identifiers}
    talk = Talk(store=store)
    length = await told(talk, names, planted)
    rows = await make(store, summarizer, talk, (length // 3, 2 * length // 3, length))
    assert [(row.status, row.generation) for row in rows] == [(SummaryStatus.READY, at) for at in (1, 2, 3)]
    made = rows[-1]
    assert [text for text in planted if text not in made.text] == []
    assert made.tokens <= ROOM
    assert made.tokens < made.covered_tokens


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ("The user moved order QX-99817-ZZ to the depot.", "never said: QX-99817-ZZ"),
        ("It went on and on. " * 30_000, "and what it replaces"),
    ],
)
async def test_an_ungrounded_or_longer_summary_is_refused(
    store: Store, summarizer: Forgetful, says: str, reason: str
) -> None:
    names, constraints, *_ = SCENES["en"]
    talk = Talk(store=store)
    length = await told(talk, names, constraints)
    summarizer.says = says
    (row,) = await make(store, summarizer, talk, [length])
    assert row.status is SummaryStatus.REFUSED
    assert reason in row.reason
