"""Requests that go on from one place of a long log, and the one move that serves all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from proxy.conversation import Arrival, Kind
from proxy.dialects import Message
from proxy.pipeline.background import Background
from proxy.pipeline.past import History, size_of
from proxy.pipeline.sharing import PlanCoalescer, Where
from proxy.store import Body, StandingCut
from proxy.trimming import Cut, Entry, Plan
from tests.support.talk import message

pytestmark = pytest.mark.anyio

WHERE = Where(tenant="t", session="s", node="b", policy="p", version="v", agent=None, model="m")
LONG = "x" * 200_000
PLAIN = Plan(
    policy="p",
    version="v",
    cut=None,
    moved=False,
    fired="",
    arrivals=(),
    tokens_before=0,
    tokens_sent=0,
    view=(),
)


def past(kind: Kind, text: str = LONG, *, fresh: int = 1) -> History:
    """Return a request with two stored messages, which goes on from the second one."""
    said: list[Message] = [message("user", text), message("assistant", "a")]
    said += [message("user", f"new {number}") for number in range(fresh)]
    entries = tuple(
        Entry(message=each, tokens=1, ref="ref_", position=place) for place, each in enumerate(said)
    )
    bodies = tuple(Body(message=each, tokens=1) for each in said[2:])
    return History(
        id="s",
        arrival=Arrival(kind=kind, base="b", fresh=2),
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
        return replace(PLAIN, cut=cut(3 if fork is None else fork), moved=True)


async def turns(until: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not until():  # noqa: ASYNC110 - nobody is told of it
            await asyncio.sleep(0)


async def test_the_next_branch_goes_on_from_what_the_last_one_decided() -> None:
    moves, decide = PlanCoalescer(), _Deciding()
    _, first = await moves.shared(past(Kind.REWIND), WHERE, decide)
    mine, second = await moves.shared(past(Kind.REWIND), WHERE, decide)
    assert first.cut == second.cut == cut(2)
    assert (first.moved, second.moved) == (True, False)
    assert (mine.standing, mine.borrowed) == (StandingCut(cut=cut(2), node="b", kept=None), True)
    elsewhere, _ = await moves.shared(past(Kind.REWIND), WHERE._replace(model="other"), decide)
    assert elsewhere.standing is None


async def test_who_comes_meanwhile_waits_and_all_but_two_are_spared() -> None:
    moves, decide = PlanCoalescer(), _Deciding(waits=True)
    asked = [Background().start(moves.shared(past(Kind.RESEND), WHERE, decide)) for _ in range(5)]
    await turns(lambda: decide.asked)
    assert len(decide.asked) == 1
    decide.goes_on.set()
    plans = [planned for _, planned in await asyncio.gather(*asked)]
    # The first one does not know of the others: its cut is its own.
    assert [planned.moved for planned in plans] == [True, True, False, False, False]
    assert [planned.cut for planned in plans] == [cut(3), *[cut(2)] * 4]


async def test_a_resend_that_is_alone_decides_for_itself() -> None:
    moves, decide = PlanCoalescer(), _Deciding()
    for _ in range(2):
        mine, planned = await moves.shared(past(Kind.RESEND), WHERE, decide)
        assert (planned.cut, mine.borrowed) == (cut(3), False)


async def test_one_that_fails_or_leaves_holds_nobody_up() -> None:
    moves, decide = PlanCoalescer(), _Deciding(waits=True)
    leaves = Background().start(moves.shared(past(Kind.REWIND), WHERE, decide))
    stays = Background().start(moves.shared(past(Kind.REWIND), WHERE, decide))
    await turns(lambda: decide.asked)
    leaves.cancel()
    decide.goes_on.set()
    _, planned = await stays
    assert planned.moved
    assert leaves.cancelled()

    async def fail(*_: object) -> Plan:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await moves.shared(past(Kind.REWIND), WHERE._replace(node="c"), fail)
    _, planned = await moves.shared(past(Kind.REWIND), WHERE._replace(node="c"), decide)
    assert planned.moved


async def test_a_short_log_is_decided_about_without_waiting() -> None:
    moves = PlanCoalescer()
    for kind, fork in ((Kind.REWIND, 2), (Kind.RESEND, None)):
        decide = _Deciding()
        mine = past(kind, "short")
        assert (await moves.shared(mine, WHERE, decide))[0] is mine
        assert decide.asked == [(mine, fork)]


@pytest.mark.parametrize("kind", [Kind.FIRST, Kind.APPEND, Kind.WINDOWED, Kind.SIDE])
async def test_other_requests_share_nothing(kind: Kind) -> None:
    moves, decide = PlanCoalescer(), _Deciding()
    await moves.shared(past(kind), WHERE, decide)
    assert decide.asked[0][1] is None


async def test_a_request_without_anything_new_shares_nothing() -> None:
    moves, decide = PlanCoalescer(), _Deciding()
    assert past(Kind.REWIND, fresh=0).fork is None
    await moves.shared(past(Kind.REWIND, fresh=0), WHERE, decide)
    assert decide.asked[0][1] is None


async def test_a_cut_that_stands_there_already_is_not_replaced() -> None:
    moves, decide = PlanCoalescer(), _Deciding()
    await moves.shared(past(Kind.REWIND), WHERE, decide)
    standing = StandingCut(cut=cut(2), node="b", kept=("a",))
    mine, _ = await moves.shared(replace(past(Kind.REWIND), standing=standing), WHERE, decide)
    assert (mine.standing, mine.borrowed) == (standing, False)


async def test_the_oldest_moves_are_forgotten() -> None:
    moves, decide = PlanCoalescer(1), _Deciding()
    for node in ("b", "c", "b"):
        _, planned = await moves.shared(past(Kind.REWIND), WHERE._replace(node=node), decide)
        assert planned.moved
