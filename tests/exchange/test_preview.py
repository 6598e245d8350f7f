"""What would be sent now. That it is what is sent then: tests/api/test_sessions.py."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.errors import InvalidRequest
from proxy.exchange.past import Memory
from proxy.exchange.preview import preview
from proxy.settings.model import Settings
from proxy.store.store import Store
from proxy.tokens.counter import TokenCounter
from proxy.trimming.policy import Policy
from tests.support.talk import Talk, body, message

pytestmark = pytest.mark.anyio

COUNTER = TokenCounter("estimate")
SETTINGS = Settings(
    policies={
        "mini": Policy.model_validate({"match": {"models": ["mini*"]}}),
        "bert": Policy.model_validate({"match": {"tenants": ["bert"]}}),
        "rest": Policy(),
    }
)


@pytest.fixture
async def talk(tmp_path: Path) -> AsyncIterator[Talk]:
    store = await Store.open(f"sqlite:///{tmp_path / 's.db'}")
    yield Talk(store)
    await store.close()


async def shown(talk: Talk, policy: str | None = None) -> dict[str, Any]:
    row = await talk.store.session(talk.tenant, talk.session)
    assert row is not None
    memory = Memory(talk.store, COUNTER, "auto")
    found = await preview(row, policy, SETTINGS, talk.store, COUNTER, memory)
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


async def test_the_policy_is_the_tenants(talk: Talk) -> None:
    his = Talk(talk.store, "bert")
    await his.say("a", "b")
    assert (await shown(his))["policy"] == "bert"
    assert (await shown(his, "rest"))["policy"] == "rest"
    off = await shown(his, "off")
    assert (off["policy"], off["cut"], off["plan"]) == ("off", None, [])


@pytest.mark.parametrize("policy", ["", "none", "OFF"])
async def test_a_policy_that_is_none_is_named_as_the_parameter(talk: Talk, policy: str) -> None:
    await talk.say("a", "b")
    with pytest.raises(InvalidRequest, match="mini, bert, rest") as refused:
        await shown(talk, policy)
    assert (refused.value.param, refused.value.code) == ("policy", "unknown_policy")


async def test_nothing_is_sent_of_nothing(talk: Talk) -> None:
    await talk.begin(body("user", "a"))
    found = await shown(talk)
    assert (found["messages"], found["plan"], found["tokens_sent"]) == ([], [], found["tokens_before"])
