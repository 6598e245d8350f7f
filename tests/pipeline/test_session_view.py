"""What would be sent now. That it is what is sent then: tests/server/test_sessions.py."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from msgspec.structs import replace
from proxy.pipeline.knowledge import Knowledge
from proxy.pipeline.means import AppServices
from proxy.pipeline.past import HistoryLoader
from proxy.pipeline.present import present
from proxy.pipeline.preview import preview

from proxy.config import Policies, Settings
from proxy.errors import InvalidRequest
from proxy.models import Catalogue
from proxy.pipeline.background import OFF_LOOP_BYTES, Background
from proxy.recall import Recall
from proxy.store import Kept, Store
from proxy.summaries import Summaries, Summarizer
from proxy.tokens import TokenCounter
from proxy.trimming import Cut, Gap, Policy
from proxy.upstream import Upstream
from tests.support.talk import Talk, body, message

pytestmark = pytest.mark.anyio

COUNTER = TokenCounter("estimate")
SETTINGS = Settings(
    policies={
        "mini": Policy.model_validate({"match": {"models": ["mini*"]}}),
        "bert": Policy.model_validate({"match": {"tenants": ["bert"]}}),
        "tiny": Policy.model_validate(
            {
                "match": {"models": ["tiny"]},
                "trigger": {"tokens": 40},
                "target": {"tokens": 20},
                "edits": [{"type": "drop_oldest"}],
                "keep": {"rounds": 0},
            }
        ),
        "rest": Policy(),
    }
)


@pytest.fixture
async def talk(tmp_path: Path) -> AsyncIterator[Talk]:
    store = await Store.open(f"sqlite:///{tmp_path / 's.db'}")
    yield Talk(store=store)
    await store.close()


async def shown(talk: Talk, policy: str | None = None) -> dict[str, Any]:
    row = await talk.store.session(talk.tenant, talk.session)
    assert row is not None
    memory = HistoryLoader(talk.store, COUNTER, "auto")
    upstream = Upstream(SETTINGS.upstream, shares_key=False)
    knowledge = Knowledge(COUNTER, Catalogue(), upstream, None)
    try:
        background = Background()
        summarizer = Summarizer(SETTINGS.summarizer, upstream)
        summaries = Summaries(talk.store, summarizer, COUNTER, knowledge.facts_at, background.start)
        recall = Recall(talk.store)
        means = AppServices(
            store=talk.store,
            upstream=upstream,
            background=background,
            memory=memory,
            knowledge=knowledge,
            summaries=summaries,
            recall=recall,
            counter=COUNTER,
        )
        found = await preview(await present(row, policy, Policies(SETTINGS.policies), means))
    finally:
        await upstream.aclose()
    data: dict[str, Any] = orjson.loads(orjson.dumps(found))
    return data


async def test_fields_of_ours_are_left_out(talk: Talk) -> None:
    lead = (message("system", "S", is_internal=True),)
    asked = body("user", "a", agent="planner")
    exchange = await talk.begin(asked, instructions=lead, instructions_tokens=1)
    await talk.settle(exchange, asked, replies=(body("assistant", "b", refusal=None),))
    assert (await shown(talk))["messages"] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]


async def test_model_and_tools_are_those_of_the_newest_request_that_was_answered(talk: Talk) -> None:
    await talk.say("a", "b")
    bare = await shown(talk)
    assert (bare["model"], bare["policy"]) == ("model", "rest")
    tools = orjson.dumps([{"type": "function", "function": {"name": "f", "description": "word " * 50}}])
    asked = body("user", "c")
    exchange = await talk.begin(asked, model="mini-2", tools=tools)
    assert await shown(talk) == bare
    await talk.settle(exchange, asked, replies=(body("assistant", "d"),))
    answered = await shown(talk)
    assert (answered["model"], answered["policy"]) == ("mini-2", "mini")
    assert answered["tokens_before"] > bare["tokens_before"] + 40
    assert len(answered["messages"]) == 4


async def test_what_takes_long_to_count_is_counted_in_a_thread(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    counts = TokenCounter.json

    def counting(counter: TokenCounter, data: bytes, model: str) -> int:
        threads.append(threading.get_ident())
        return counts(counter, data, model)

    monkeypatch.setattr(TokenCounter, "json", counting)
    for words in (5, OFF_LOOP_BYTES // 5):
        tools = orjson.dumps(
            [{"type": "function", "function": {"name": "f", "description": "word " * words}}]
        )
        asked = body("user", f"{words} words")
        exchange = await talk.begin(asked, tools=tools)
        await talk.settle(exchange, asked, replies=(body("assistant", "d"),))
        await shown(talk)
    here = threading.get_ident()
    assert [thread == here for thread in threads] == [True, False]


async def test_the_policy_is_the_tenants(talk: Talk) -> None:
    his = Talk(store=talk.store, tenant="bert")
    await his.say("a", "b")
    assert (await shown(his))["policy"] == "bert"
    assert (await shown(his, "rest"))["policy"] == "rest"
    off = await shown(his, "off")
    assert (off["policy"], off["cut"], off["plan"]) == ("off", None, [])


async def test_every_message_that_is_not_sent_is_explained(talk: Talk) -> None:
    await talk.say("a", "b")
    session = await talk.store.session(talk.tenant, talk.session)
    assert session is not None
    second = await talk.say("c", "d", base=session.head)
    path = await talk.store.path(talk.key, second.head)
    gap = Gap(start=0, stop=2, edit="drop_oldest", reason="its round was the oldest", tokens=10, tool_calls=0)
    cut = Cut(
        position=4,
        policy="tiny",
        version=SETTINGS.policies["tiny"].version,
        changes=(),
        tokens=9,
        messages=2,
        tool_calls=0,
        gaps=(gap,),
    )
    asked = body("user", "e")
    exchange = await talk.begin(asked, base=second.head)
    await talk.settle(
        exchange,
        asked,
        base=second.head,
        replies=(body("assistant", "f"),),
        cut=replace(cut, position=5),
        kept=Kept(nodes=(path[2].node, path[3].node), messages=(0,)),
    )
    stands = await shown(talk, "tiny")
    assert [message["content"] for message in stands["messages"]] == ["c", "d", "e", "f"]
    dropped = {"edit": "drop_oldest", "action": "drop", "reason": "its round was the oldest"}
    assert stands["plan"] == [
        {**dropped, "node": row.node, "position": place, "tokens_before": 5, "tokens_after": 0}
        for place, row in enumerate(path[:2])
    ]
    assert stands["tokens_before"] - stands["tokens_sent"] == 10
    assert (stands["cut"]["position"], stands["cut"]["moved"]) == (5, False)
    for number in range(4):
        session = await talk.store.session(talk.tenant, talk.session)
        assert session is not None
        await talk.say(f"more {number}", "so", base=session.head)
    moves = await shown(talk, "tiny")
    assert moves["cut"]["moved"]
    assert [line["position"] for line in moves["plan"]] == list(range(len(moves["plan"])))
    assert len(moves["plan"]) + len(moves["messages"]) == 14
    assert moves["tokens_before"] - moves["tokens_sent"] == 5 * len(moves["plan"])


@pytest.mark.parametrize("policy", ["", "none", "OFF"])
async def test_a_policy_that_is_none_is_named_as_the_parameter(talk: Talk, policy: str) -> None:
    await talk.say("a", "b")
    with pytest.raises(InvalidRequest, match="mini, bert, tiny, rest") as refused:
        await shown(talk, policy)
    assert (refused.value.param, refused.value.code) == ("policy", "unknown_policy")


async def test_nothing_is_sent_of_nothing(talk: Talk) -> None:
    await talk.begin(body("user", "a"))
    found = await shown(talk)
    assert (found["messages"], found["plan"], found["tokens_sent"]) == ([], [], found["tokens_before"])
