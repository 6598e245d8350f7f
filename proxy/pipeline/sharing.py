"""What requests share that go on from one place of a long log: the move that one of them has decided.

Many branches may begin at one place at once: best of n, an evaluation, sub-agents. Each of them would decide
the same about the same messages. So one decides at a time, and the others go on from its cut, though it may
not be stored yet; that also lets the provider's cache serve all of them. It decides nothing itself.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from msgspec.structs import replace

from proxy.conversation import Kind
from proxy.pipeline.background import OFF_LOOP_BYTES, TRIMMING
from proxy.pipeline.past import History
from proxy.store import StandingCut
from proxy.trimming import Plan

MOVES: Final = 64
"""Moves that are remembered in one process: each until it is stored, and it is as long as what is sent."""

Decide = Callable[[History, int | None], Awaitable[Plan]]
"""Makes the plan of a request in its place; a move may be kept at the position, where one is given."""


class Where(NamedTuple):
    """A place at which a move serves every request that goes on from there."""

    tenant: str
    session: str
    node: str
    policy: str
    version: str
    agent: str | None
    model: str


@dataclass(slots=True)
class _Turn:
    """Who decides for a place, and who waits to."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class PlanCoalescer:
    """The moves that are being decided, and those decided lately. One for the life of the process."""

    def __init__(self, most: int = MOVES) -> None:
        """Remember `most` moves at most."""
        self._most: Final = most
        self._turns: dict[Where, _Turn] = {}
        self._made: OrderedDict[Where, StandingCut] = OrderedDict()

    async def shared(self, past: History, where: Where, decide: Decide) -> tuple[History, Plan]:
        """Return the plan of a request that goes on from `where`, and its past, with a cut of another one."""
        fork = past.fork
        if fork is None or past.arrival.kind not in {Kind.RESEND, Kind.REWIND}:
            return past, await decide(past, None)
        rewinds = past.arrival.kind is Kind.REWIND
        if TRIMMING * past.size < OFF_LOOP_BYTES:  # it is decided before anybody else can ask
            return past, await decide(past, fork if rewinds else None)
        turn = self._turns.setdefault(where, _Turn())
        contended = turn.users > 0
        turn.users += 1
        try:
            async with turn.lock:
                found = self._made.get(where)
                if found is not None and (past.standing is None or past.standing.cut.position < fork):
                    past = replace(past, standing=found, borrowed=True)
                planned = await decide(past, fork if rewinds or contended else None)
                self._note(where, planned, fork)
        finally:
            turn.users -= 1
            if not turn.users:
                del self._turns[where]
        return past, planned

    def _note(self, where: Where, planned: Plan, fork: int) -> None:
        """Remember a move that is kept at the place."""
        if planned.moved and planned.cut is not None and planned.cut.position == fork:
            self._made[where] = StandingCut(cut=planned.cut, node=where.node, kept=None)
            if len(self._made) > self._most:
                self._made.popitem(last=False)
