"""A session as it stands now: its branch, what would be sent, and a summary on demand.

That the preview is what is sent then: tests/server/test_sessions.py. Over HTTP: tests/server/test_actions.py.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from msgspec.structs import replace

from proxy.config import Policies, Settings
from proxy.errors import InvalidRequest, StoreUnavailable, UpstreamError
from proxy.models import Catalogue
from proxy.pipeline import AppServices, Background, compact, preview, session_view
from proxy.pipeline.background import OFF_LOOP_BYTES
from proxy.pipeline.history import HistoryLoader
from proxy.pipeline.services import Knowledge
from proxy.pipeline.session_view import SessionView
from proxy.recall import Recall
from proxy.store import Kept, Store, SummaryRow
from proxy.summaries import Caller, Summaries, Summarizer
from proxy.telemetry import Meters
from proxy.tokens import TokenCounter
from proxy.trimming import Cut, Gap, Policy
from proxy.upstream import Upstream
from tests.support.house import KEY, House, opened
from tests.support.stores import empty_store
from tests.support.talk import Talk, body, message
from tests.support.upstream import Upstream as Provider

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
    store = await Store.open(empty_store(tmp_path / "s.db"))
    yield Talk(store=store)
    await store.close()


NO_OUTAGE: Any = None  # nothing here is asked while the store is away


async def shown(talk: Talk, policy: str | None = None) -> dict[str, Any]:
    row = await talk.store.session(talk.tenant, talk.session)
    assert row is not None
    loader = HistoryLoader(talk.store, COUNTER, "auto")
    upstream = Upstream(SETTINGS.upstream, shares_key=False)
    knowledge = Knowledge(COUNTER, Catalogue(), upstream, None)
    try:
        background = Background()
        summarizer = Summarizer(SETTINGS.summarizer, upstream)
        summaries = Summaries(talk.store, summarizer, COUNTER, knowledge.facts_at, background.start)
        recall = Recall(talk.store)
        services = AppServices(
            store=talk.store,
            upstream=upstream,
            background=background,
            loader=loader,
            outage=NO_OUTAGE,
            knowledge=knowledge,
            summaries=summaries,
            recall=recall,
            counter=COUNTER,
            counts=Meters(),
        )
        found = await preview(await session_view(row, policy, Policies(SETTINGS.policies), services))
    finally:
        await upstream.aclose()
    data: dict[str, Any] = orjson.loads(orjson.dumps(found))
    return data


async def test_our_own_fields_are_left_out_of_the_preview(talk: Talk) -> None:
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


async def test_large_tools_are_counted_in_a_thread(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    counts = TokenCounter.json

    def counting(counter: TokenCounter, data: bytes, model: str) -> int:
        threads.append(threading.get_ident())
        return counts(counter, data, model)

    monkeypatch.setattr(TokenCounter, "json", counting)
    for words in (5, OFF_LOOP_BYTES // 5):
        tools = orjson.dumps([{"type": "function", "function": {"name": "f", "description": "word " * words}}])
        asked = body("user", f"{words} words")
        exchange = await talk.begin(asked, tools=tools)
        await talk.settle(exchange, asked, replies=(body("assistant", "d"),))
        await shown(talk)
    here = threading.get_ident()
    assert [thread == here for thread in threads] == [True, False]


async def test_the_policy_is_chosen_for_the_tenant_unless_one_is_named(talk: Talk) -> None:
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
async def test_an_unknown_policy_is_refused_as_the_parameter_with_the_known_ones(talk: Talk, policy: str) -> None:
    await talk.say("a", "b")
    with pytest.raises(InvalidRequest, match="mini, tiny, rest") as refused:
        await shown(talk, policy)
    assert (refused.value.param, refused.value.code) == ("policy", "unknown_policy")


async def test_the_preview_of_an_empty_session_is_empty(talk: Talk) -> None:
    await talk.begin(body("user", "a"))
    found = await shown(talk)
    assert (found["messages"], found["plan"], found["tokens_sent"]) == ([], [], found["tokens_before"])


# -------------------------------------------------------------------- the view of a running proxy

POLICY = {
    "trigger": {"messages": 4},
    "keep": {"rounds": 1},
    "edits": [{"type": "keep_rounds", "last": 1}, {"type": "summarize", "mode": "model"}],
}


@pytest.fixture
async def house(provider: Provider, tmp_path: Path) -> AsyncIterator[House]:
    async with opened(provider, tmp_path, policies={"lean": POLICY}) as house:
        yield house


async def view_of(house: House, policy: str | None = None) -> SessionView:
    row = await house.store.session("t", "s")
    assert row is not None
    return await session_view(row, policy, house.chat.policies, house.services)


async def test_a_view_is_the_branch_of_the_head_with_its_cut(house: House) -> None:
    said: list[dict[str, Any]] = [{"role": "system", "content": "S"}]
    for number in range(4):
        said.append({"role": "user", "content": f"question {number}", "agent": "boss"})
        client = await house.ask(messages=said)
        said.append(orjson.loads(client.got)["choices"][0]["message"])
    now = await view_of(house)
    assert (now.policy_name, now.model, now.agent) == ("lean", "echo", "boss")
    assert len(now.rows) == len(now.entries) == 8
    assert [message.text for message in now.instructions] == ["S"]
    assert now.standing is not None
    assert now.standing.cut.position == 7
    assert now.size == sum(len(row.message.raw) for row in now.rows)
    off = await view_of(house, "off")
    assert (off.policy, off.standing) == (None, None)


async def test_open_calls_of_others_are_left_out_for_the_agent_that_asked_last(house: House) -> None:
    for agent, model in (("A", "tool:find"), ("B", "echo")):
        asked = {"role": "user", "content": f"{agent} asks"}
        await house.ask(model, (b"x-agent-name", agent.encode()), messages=[asked])
    now = await view_of(house, "off")
    assert (now.agent, len(now.rows)) == ("B", 4)
    assert [bool(entry.arrival) for entry in now.entries] == [False, True, False, False]


async def test_the_view_of_a_session_without_messages_is_empty(house: House) -> None:
    await house.ask("fault:500")
    now = await view_of(house)
    assert (now.rows, now.entries, now.standing) == ((), (), None)
    assert await house.store.session("t", "s") is not None


async def test_a_view_with_an_unknown_policy_is_refused(house: House) -> None:
    await house.ask()
    with pytest.raises(InvalidRequest) as refusal:
        await view_of(house, "none")
    assert refusal.value.param == "policy"


# -------------------------------------------------------------------------- a summary on demand


async def compacted(house: House, *, rounds: int, patience: float = 30) -> SummaryRow | None:
    """Have a conversation, and ask for a summary of it."""
    said: list[dict[str, Any]] = []
    for number in range(rounds):
        said.append({"role": "user", "content": f"question {number} " + "about parcels " * 40})
        client = await house.ask("say:answer", messages=said)
        said.append(orjson.loads(client.got)["choices"][0]["message"])
    row = await house.store.session("t", "s")
    assert row is not None
    now = await session_view(row, None, house.chat.policies, house.services)
    assert now.policy is not None
    return await compact(row, now, now.policy, Caller(tenant="t"), house.services, patience=patience)


async def test_a_summary_on_demand_covers_all_that_may_be_summed_up(provider: Provider, tmp_path: Path) -> None:
    async with opened(provider, tmp_path, summarizer={"model": "summary:good"}) as house:
        row = await compacted(house, rounds=4)
        assert row is not None
        assert (row.asked, row.generation, row.until) == (True, 1, 6)
        assert await house.store.summary_rows(KEY) == [row]


async def test_there_may_be_nothing_to_sum_up(provider: Provider, tmp_path: Path) -> None:
    async with opened(provider, tmp_path, summarizer={"model": "summary:good"}) as house:
        assert await compacted(house, rounds=1) is None


@pytest.mark.parametrize("model", ["summary:empty", "fault:500"])
async def test_a_summary_that_fails_is_an_error_with_its_reason(provider: Provider, tmp_path: Path, model: str) -> None:
    async with opened(provider, tmp_path, summarizer={"model": model}) as house:
        with pytest.raises(UpstreamError, match="No summary was made") as failure:
            await compacted(house, rounds=4)
        assert failure.value.code == "summary_failed"


async def test_a_summary_that_cannot_be_stored_is_kept_once_the_store_is_back(
    provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> bool:
        raise StoreUnavailable("The store cannot be used. It is a test.")

    masks = {"mask": ["word[0-9]+"]}
    async with opened(provider, tmp_path, summarizer={"model": "summary:good"}, store=masks) as house:
        with monkeypatch.context() as patch:
            patch.setattr(house.store, "keep_summary", fail)
            with pytest.raises(StoreUnavailable, match="A summary was made"):
                await compacted(house, rounds=4)
        calls = len(provider.log)
        assert await house.store.circuit.closes(10)
        (row,) = await house.store.summary_rows(KEY)
        assert (row.asked, row.until, len(provider.log)) == (True, 6, calls)


async def test_a_summary_is_waited_for_no_longer_than_the_patience(provider: Provider, tmp_path: Path) -> None:
    async with opened(provider, tmp_path, summarizer={"model": "fault:hang", "timeout": 1}) as house:
        with pytest.raises(UpstreamError, match="still being made"):
            await compacted(house, rounds=4, patience=0.01)
