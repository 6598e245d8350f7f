"""From the bytes of a request to its plan, and the requests that share a trim."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from msgspec.structs import replace

from proxy.conversation import ROOT, Arrival, Kind
from proxy.dialects import Message
from proxy.dialects.chat import CHAT
from proxy.dialects.chat.message import ChatMessage
from proxy.errors import InvalidRequest
from proxy.pipeline import Background, ClientRequest
from proxy.pipeline.history import History, size_of
from proxy.pipeline.prepare import FINISHED, PlanCoalescer, Preparer, finishing_reply, plan_of
from proxy.store import Body, StandingCut
from proxy.trimming import Cut, Entry, Plan, PlanningContext, Policy
from tests.support.house import KEY, LONG, House, opened
from tests.support.talk import message
from tests.support.upstream import Upstream as Provider

pytestmark = pytest.mark.anyio


def call(**body: Any) -> ClientRequest:
    asked = {"model": "echo", "messages": [{"role": "user", "content": "hi"}], **body}
    return ClientRequest(
        dialect=CHAT, tenant="t", headers=[(b"x-session-id", b"s")], query=b"", body=orjson.dumps(asked)
    )


async def test_a_prepared_request_is_planned_and_nothing_of_it_is_stored_yet(house: House) -> None:
    prepared = await Preparer(house.settings, house.services, "0123abcd").prepare(call(messages=LONG))
    history = prepared.history
    assert (history.id, history.arrival.kind, len(history.fresh)) == ("s", "first", len(LONG))
    assert prepared.report.plan.view == tuple(prepared.request.messages)
    assert prepared.stored
    assert await house.store.exchanges(KEY, limit=1) == ([], None)


async def test_exchange_ids_sort_by_time_name_the_process_and_never_repeat(house: House) -> None:
    preparer = Preparer(house.settings, house.services, "0123abcd")
    ids = [(await preparer.prepare(call())).report.exchange for _ in range(20)]
    assert all(len(each) == 36 and each.startswith("exc_") and each.endswith("0123abcd") for each in ids)
    assert ids == sorted(set(ids))  # each moment of this house is later than the one before


async def test_a_body_that_is_not_json_is_refused(house: House) -> None:
    with pytest.raises(InvalidRequest):
        await Preparer(house.settings, house.services, "0123abcd").prepare(
            ClientRequest(dialect=CHAT, tenant="t", headers=[], query=b"", body=b"{")
        )


async def test_a_changed_policy_applies_to_the_whole_history(house: House, provider: Provider) -> None:
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
async def test_a_header_with_a_wrong_value_is_refused_and_nothing_is_stored(
    house: House, provider: Provider, header: tuple[bytes, bytes], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await house.ask("echo", header)
    assert refused.value.param == param
    assert await house.store.exchanges(KEY, limit=1) == ([], None)
    assert provider.log == []


async def test_tool_calls_in_the_history_without_tools_in_the_request_are_warned_of(house: House) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert "tool" in (await house.ask(messages=said)).headers["x-context-warning"]
    assert "x-context-warning" not in (await house.ask(messages=said, tools=tools)).headers


async def test_functions_of_older_clients_are_tools_too(house: House) -> None:
    asked = {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}}
    said = [{"role": "user", "content": "go"}, asked, {"role": "function", "name": "look", "content": "found"}]
    assert "x-context-warning" not in (await house.ask(messages=said, functions=[{"name": "look"}])).headers
    assert "tool" in (await house.ask(messages=said, functions=[])).headers["x-context-warning"]


async def test_a_client_whose_only_tools_would_go_keeps_them_beside_those_of_the_proxy(
    provider: Provider, tmp_path: Path
) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("f", "g")]
    slim = {"slim": {"tools": {"remove": ["f"]}}}
    async with opened(provider, tmp_path, policies=slim, virtual_tools={"recall_context": True}) as house:
        preparer = Preparer(house.settings, house.services, "0123abcd")
        for offered, removed in ((tools[:1], ()), (tools, ("f",))):
            prepared = await preparer.prepare(call(tools=offered))
            assert prepared.own_tools == ("recall_context",)
            assert prepared.removed_tools == removed
            saved = prepared.report.tokens_before - prepared.report.tokens_sent
            assert (saved, saved > 0) == (prepared.removed_tokens, bool(removed))


async def test_branches_of_a_long_history_share_the_trim_of_the_first(house: House, provider: Provider) -> None:
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


# -------------------------------------------------------------------------------------------- the plan

KNOWN = PlanningContext(count=lambda _: 10, fixed_tokens=5, context_window=1_000, scale=2.0)
ENTRIES = tuple(
    Entry(
        message=message("user" if at % 2 == 0 else "assistant", f"text {at}"), tokens=10, ref=f"ref_{at}", position=at
    )
    for at in range(5)
)
HISTORY = History(
    id="s",
    arrival=Arrival(kind=Kind.FIRST, base=ROOT, known=0),
    composed=False,
    digest=ROOT,
    entries=ENTRIES,
    nodes=(),
    fresh=(),
    instructions=(message("system", "S"),),
    size=9,
)
POLICY = Policy.model_validate(
    {"trigger": {"tokens": 40}, "target": {"tokens": 40}, "keep": {"rounds": 1}, "edits": [{"type": "drop_oldest"}]}
)


async def test_a_policy_decides_what_is_sent() -> None:
    made = await plan_of(HISTORY, "lean", POLICY, KNOWN)
    assert made.trimmed
    assert (made.tokens_before, made.tokens_sent, len(made.view)) == (55, 15, 1)


async def test_without_a_policy_everything_is_sent() -> None:
    made = await plan_of(HISTORY, "off", None, KNOWN)
    assert (made.policy, made.tokens_sent, len(made.view)) == ("off", 55, 5)


async def test_a_plan_that_sends_nothing_still_tells_what_would_be_sent(provider: Provider, tmp_path: Path) -> None:
    async with opened(provider, tmp_path, finish={"tools": ["finish_task"]}) as house:
        preparer = Preparer(house.settings, house.services, "0123abcd")
        prepared = await preparer.prepare(call(messages=[ASK, DONE, RESULT]))
        assert prepared.finishing == prepared.history.entries[1]
        assert (prepared.report.plan.tokens_sent, prepared.report.plan.view) == (0, ())
        assert prepared.report.tokens_before > 0
        assert prepared.report.warnings == (FINISHED,)


# ------------------------------------------------------------------------------------ finished tasks

ASK = {"role": "user", "content": "do it"}
CALL = {"id": "c1", "type": "function", "function": {"name": "finish_task", "arguments": '{"ok": true}'}}
OTHER = {"id": "c2", "type": "function", "function": {"name": "search", "arguments": "{}"}}
DONE = {"role": "assistant", "content": "All is done.", "tool_calls": [CALL]}
BOTH = {"role": "assistant", "content": None, "tool_calls": [OTHER, CALL]}
SEARCH = {"role": "assistant", "content": None, "tool_calls": [OTHER]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "noted"}
TOOLS = ("finish_task", "ask_user")


def entries_of(*messages: dict[str, Any]) -> list[Entry]:
    return [Entry(message=ChatMessage.of(m), tokens=1, ref=f"ref_{i}", position=i) for i, m in enumerate(messages)]


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ([ASK, DONE], 1),
        ([ASK, DONE, RESULT], 1),
        ([ASK, BOTH, RESULT, RESULT], 1),
        ([ASK, DONE, RESULT, ASK], None),
        ([ASK, SEARCH, RESULT], None),
        ([ASK, DONE, RESULT, {"role": "assistant", "content": "and more"}], None),
        ([ASK, DONE, {"role": "system", "content": "go on"}], None),
        ([RESULT], None),
        ([], None),
    ],
)
def test_a_history_that_ends_with_a_finishing_call_is_finished(messages: list[Any], found: int | None) -> None:
    entries = entries_of(*messages)
    reply = finishing_reply(entries, TOOLS)
    assert reply == (None if found is None else entries[found])


def test_without_finishing_tools_nothing_is_finished() -> None:
    assert finishing_reply(entries_of(ASK, DONE), ()) is None


# --------------------------------------------------------------------- requests that share a trim

PLACE = ("s", "b")
LONG_TEXT = "x" * 200_000
PLAIN = Plan(
    policy="p", version="v", cut=None, trimmed=False, fired="", arrivals=(), tokens_before=0, tokens_sent=0, view=()
)


def going_on(kind: Kind, text: str = LONG_TEXT, *, fresh: int = 1) -> History:
    """Return a request with two stored messages, which goes on from the second one."""
    said: list[Message] = [message("user", text), message("assistant", "a")]
    said += [message("user", f"new {number}") for number in range(fresh)]
    entries = tuple(Entry(message=each, tokens=1, ref="ref_", position=place) for place, each in enumerate(said))
    bodies = tuple(Body(message=each, tokens=1) for each in said[2:])
    return History(
        id="s",
        arrival=Arrival(kind=kind, base="b", known=2),
        composed=kind is Kind.APPEND,
        digest="d",
        entries=entries,
        nodes=("a", "b"),
        fresh=bodies,
        instructions=(),
        size=size_of(said),
    )


def cut(position: int) -> Cut:
    return Cut(position=position, policy="p", version="v", changes=(), tokens=1, messages=1, tool_calls=0)


class _Deciding:
    """Decides that the cut moves, to the fork where it is told one; waits until it is let go on."""

    def __init__(self, *, waits: bool = False) -> None:
        self.asked: list[tuple[History, int | None]] = []
        self.goes_on = asyncio.Event()
        if not waits:
            self.goes_on.set()

    async def __call__(self, given: History, fork: int | None) -> Plan:
        self.asked.append((given, fork))
        await self.goes_on.wait()
        if given.standing is not None:
            return replace(PLAIN, cut=given.standing.cut)
        return replace(PLAIN, cut=cut(3 if fork is None else fork), trimmed=True)


async def until_true(until: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not until():  # noqa: ASYNC110 - nobody is told of it
            await asyncio.sleep(0)


async def test_the_next_branch_goes_on_from_the_cut_of_the_last_one() -> None:
    coalescer, decide = PlanCoalescer(), _Deciding()
    _, first = await coalescer.plan(going_on(Kind.REWIND), PLACE, decide)
    mine, second = await coalescer.plan(going_on(Kind.REWIND), PLACE, decide)
    assert first.cut == second.cut == cut(2)
    assert (first.trimmed, second.trimmed) == (True, False)
    assert (mine.standing, mine.borrowed) == (StandingCut(cut=cut(2), node="b", kept=None), True)
    elsewhere, _ = await coalescer.plan(going_on(Kind.REWIND), (*PLACE, "other"), decide)
    assert elsewhere.standing is None


async def test_requests_that_come_meanwhile_wait_and_share_one_trim() -> None:
    coalescer, decide = PlanCoalescer(), _Deciding(waits=True)
    asked = [Background().start(coalescer.plan(going_on(Kind.RESEND), PLACE, decide)) for _ in range(5)]
    await until_true(lambda: decide.asked)
    assert len(decide.asked) == 1
    decide.goes_on.set()
    plans = [made for _, made in await asyncio.gather(*asked)]
    # The first one does not know of the others: its cut is its own.
    assert [made.trimmed for made in plans] == [True, True, False, False, False]
    assert [made.cut for made in plans] == [cut(3), *[cut(2)] * 4]


async def test_a_resend_that_is_alone_decides_for_itself() -> None:
    coalescer, decide = PlanCoalescer(), _Deciding()
    for _ in range(2):
        mine, made = await coalescer.plan(going_on(Kind.RESEND), PLACE, decide)
        assert (made.cut, mine.borrowed) == (cut(3), False)


async def test_a_request_that_fails_or_leaves_does_not_block_the_others() -> None:
    coalescer, decide = PlanCoalescer(), _Deciding(waits=True)
    leaves = Background().start(coalescer.plan(going_on(Kind.REWIND), PLACE, decide))
    stays = Background().start(coalescer.plan(going_on(Kind.REWIND), PLACE, decide))
    await until_true(lambda: decide.asked)
    leaves.cancel()
    decide.goes_on.set()
    _, made = await stays
    assert made.trimmed
    assert leaves.cancelled()

    async def fail(*_: object) -> Plan:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await coalescer.plan(going_on(Kind.REWIND), ("s", "c"), fail)
    _, made = await coalescer.plan(going_on(Kind.REWIND), ("s", "c"), decide)
    assert made.trimmed


async def test_a_short_history_is_planned_without_waiting() -> None:
    coalescer = PlanCoalescer()
    for kind, fork in ((Kind.REWIND, 2), (Kind.RESEND, None)):
        decide = _Deciding()
        mine = going_on(kind, "short")
        assert (await coalescer.plan(mine, PLACE, decide))[0] is mine
        assert decide.asked == [(mine, fork)]


@pytest.mark.parametrize("kind", [Kind.FIRST, Kind.APPEND, Kind.WINDOWED, Kind.SIDE])
async def test_requests_of_other_kinds_share_nothing(kind: Kind) -> None:
    coalescer, decide = PlanCoalescer(), _Deciding()
    await coalescer.plan(going_on(kind), PLACE, decide)
    assert decide.asked[0][1] is None


async def test_a_request_without_anything_new_shares_nothing() -> None:
    coalescer, decide = PlanCoalescer(), _Deciding()
    assert going_on(Kind.REWIND, fresh=0).fork is None
    await coalescer.plan(going_on(Kind.REWIND, fresh=0), PLACE, decide)
    assert decide.asked[0][1] is None


async def test_a_cut_that_stands_there_already_is_not_replaced() -> None:
    coalescer, decide = PlanCoalescer(), _Deciding()
    await coalescer.plan(going_on(Kind.REWIND), PLACE, decide)
    standing = StandingCut(cut=cut(2), node="b", kept=("a",))
    mine, _ = await coalescer.plan(replace(going_on(Kind.REWIND), standing=standing), PLACE, decide)
    assert (mine.standing, mine.borrowed) == (standing, False)


async def test_the_oldest_trims_are_forgotten() -> None:
    coalescer, decide = PlanCoalescer(1), _Deciding()
    for node in ("b", "c", "b"):
        _, made = await coalescer.plan(going_on(Kind.REWIND), ("s", node), decide)
        assert made.trimmed
