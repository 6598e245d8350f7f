from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.errors import InvalidRequest
from proxy.pipeline.present import Present, present
from tests.support.house import House, opened
from tests.support.upstream import Upstream as Provider

pytestmark = pytest.mark.anyio

POLICY = {
    "trigger": {"messages": 4},
    "keep": {"rounds": 1},
    "edits": [{"type": "keep_rounds", "last": 1}, {"type": "summarize", "mode": "model"}],
}


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    with Provider() as upstream:
        yield upstream


@pytest.fixture
async def house(provider: Provider, tmp_path: Path) -> AsyncIterator[House]:
    async with opened(provider, tmp_path, policies={"lean": POLICY}) as house:
        yield house


async def standing(house: House, policy: str | None = None) -> Present:
    row = await house.store.session("t", "s")
    assert row is not None
    return await present(row, policy, house.chat.policies, house.means)


async def test_it_is_the_branch_of_the_head_with_its_cut(house: House) -> None:
    said: list[dict[str, Any]] = [{"role": "system", "content": "S"}]
    for number in range(4):
        said.append({"role": "user", "content": f"question {number}", "agent": "boss"})
        client = await house.ask(messages=said)
        said.append(orjson.loads(client.got)["choices"][0]["message"])
    now = await standing(house)
    assert (now.policy_name, now.model, now.agent) == ("lean", "echo", "boss")
    assert len(now.rows) == len(now.entries) == 8
    assert [message.text for message in now.instructions] == ["S"]
    assert now.standing is not None
    assert now.standing.cut.position == 7
    assert now.size == sum(len(row.message.raw) for row in now.rows)
    off = await standing(house, "off")
    assert (off.policy, off.standing) == (None, None)


async def test_calls_of_others_that_wait_are_not_shown_to_the_agent_that_asked_last(house: House) -> None:
    for agent, model in (("A", "tool:find"), ("B", "echo")):
        asked = {"role": "user", "content": f"{agent} asks"}
        await house.ask(model, (b"x-agent-name", agent.encode()), messages=[asked])
    now = await standing(house, "off")
    assert (now.agent, len(now.rows)) == ("B", 4)
    assert [bool(entry.arrival) for entry in now.entries] == [False, True, False, False]


async def test_a_session_without_messages_stands_nowhere(house: House) -> None:
    await house.ask("fault:500")
    now = await standing(house)
    assert (now.rows, now.entries, now.standing) == ((), (), None)
    assert await house.store.session("t", "s") is not None


async def test_a_policy_that_is_none_is_refused_as_a_parameter(house: House) -> None:
    await house.ask()
    with pytest.raises(InvalidRequest) as refusal:
        await standing(house, "none")
    assert refusal.value.param == "policy"
