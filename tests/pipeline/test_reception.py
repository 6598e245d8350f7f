"""How a request is received: how it is planned, what it is named, what is said of that, what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.errors import InvalidRequest
from proxy.pipeline.reception import Reception
from proxy.pipeline.turn import Call
from proxy.trimming import Policy
from tests.support.house import KEY, LONG, House, opened
from tests.support.upstream import Upstream as Provider

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    with Provider() as upstream:
        yield upstream


@pytest.fixture
async def house(provider: Provider, tmp_path: Path) -> AsyncIterator[House]:
    provider.forget()
    async with opened(provider, tmp_path) as house:
        yield house


def call(**body: Any) -> Call:
    asked = {"model": "echo", "messages": [{"role": "user", "content": "hi"}], **body}
    return Call(tenant="t", headers=[(b"x-session-id", b"s")], query=b"", body=orjson.dumps(asked))


async def test_a_turn_has_all_that_is_planned_and_nothing_is_stored_yet(house: House) -> None:
    reception = Reception(house.settings, house.means, "0123abcd")
    turn = await reception.turn(call(messages=LONG))
    assert (turn.past.id, turn.past.arrival.kind, len(turn.past.fresh)) == ("s", "first", len(LONG))
    assert turn.ticket.plan.view == tuple(turn.request.messages)
    assert (turn.stored, turn.began, turn.settled) == (True, None, False)
    assert await house.store.exchanges(KEY, limit=1) == ([], None)


async def test_ids_are_named_after_the_time_and_the_process_and_are_never_the_same(house: House) -> None:
    reception = Reception(house.settings, house.means, "0123abcd")
    ids = [(await reception.turn(call())).ticket.exchange for _ in range(20)]
    assert all(len(each) == 36 and each.startswith("exc_") and each.endswith("0123abcd") for each in ids)
    assert ids == sorted(set(ids))  # each moment of this house is later than the one before


async def test_what_cannot_be_read_is_refused(house: House) -> None:
    with pytest.raises(InvalidRequest):
        await Reception(house.settings, house.means, "0123abcd").turn(
            Call(tenant="t", headers=[], query=b"", body=b"{")
        )


async def test_a_policy_that_changed_is_applied_to_the_whole_log(house: House, provider: Provider) -> None:
    """What an older version dropped is read again when the next one moves the cut."""
    lean = {"trigger": {"messages": 6}, "target": {"tokens": 60}, "keep": {"rounds": 1, "spans": 1}}
    edits = [{"type": "drop_oldest"}]
    house.chat.policies.current = {"lean": Policy.model_validate(lean | {"edits": edits})}
    for number in range(8):
        await house.ask(messages=[{"role": "user", "content": f"number {number}"}])
    assert len(provider.last.json["messages"]) < 8
    kept = lean | {"target": {"tokens": 60}, "trigger": {"messages": 2}, "pin": [{"regex": "number 0"}]}
    house.chat.policies.current = {"lean": Policy.model_validate(kept | {"edits": edits})}
    await house.ask(messages=[{"role": "user", "content": "number 8"}])
    assert provider.last.json["messages"][0] == {"role": "user", "content": "number 0"}
    row = await house.last()
    assert (row.kind, row.receipt["cut"]["moved"]) == ("append", True)


@pytest.mark.parametrize(
    ("header", "param"),
    [
        ((b"x-session-mode", b"sometimes"), "X-Session-Mode"),
        ((b"x-context-policy", b"none"), "X-Context-Policy"),
        ((b"x-agent-name", b"%00"), "x-agent-name"),
    ],
)
async def test_what_cannot_be_meant_is_not_stored(
    house: House, provider: Provider, header: tuple[bytes, bytes], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await house.ask("echo", header)
    assert refused.value.param == param
    assert await house.store.exchanges(KEY, limit=1) == ([], None)
    assert provider.log == []


async def test_calls_without_tools_are_warned_of(house: House) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert "tool" in (await house.ask(messages=said)).headers["x-context-warning"]
    assert "x-context-warning" not in (await house.ask(messages=said, tools=tools)).headers


async def test_branches_of_a_long_history_share_the_move_of_the_first(
    house: House, provider: Provider
) -> None:
    lean = {"trigger": {"tokens": 2_000}, "target": {"tokens": 1_000}, "edits": [{"type": "drop_oldest"}]}
    house.chat.policies.current = {"lean": Policy.model_validate(lean)}
    rows = []
    for text in ("and now?", "or so?", "or thus?"):
        await house.ask(messages=[*LONG[:-1], {"role": "user", "content": text}])
        rows.append(await house.last())
    assert [(row.kind, row.receipt["cut"]["moved"]) for row in rows] == [
        ("first", True),
        ("rewind", True),
        ("rewind", False),
    ]
    second, third = rows[1:]
    assert second.cut_node == third.receipt["cut"]["node"] == second.base == third.base
    assert second.receipt["cut"]["position"] == len(LONG) - 1
    sent = [request.json["messages"] for request in provider.log[-2:]]
    assert sent[0][:-1] == sent[1][:-1]
    assert len(sent[0]) < len(LONG) // 2
    assert [messages[-1]["content"] for messages in sent] == ["or so?", "or thus?"]
