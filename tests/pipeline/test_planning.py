from __future__ import annotations

import pytest
from msgspec.structs import replace

from proxy.conversation import ROOT, Arrival, Kind
from proxy.pipeline.past import History
from proxy.pipeline.planning import nothing_sent, planned_of, report_of
from proxy.trimming import Entry, PlanningContext, Policy
from tests.support.talk import message

pytestmark = pytest.mark.anyio

KNOWN = PlanningContext(count=lambda _: 10, fixed_tokens=5, context_window=1_000, scale=2.0)
ENTRIES = tuple(
    Entry(
        message=message("user" if at % 2 == 0 else "assistant", f"text {at}"),
        tokens=10,
        ref=f"ref_{at}",
        position=at,
    )
    for at in range(5)
)
PAST = History(
    id="s",
    arrival=Arrival(kind=Kind.FIRST, base=ROOT, fresh=0),
    digest=ROOT,
    entries=ENTRIES,
    nodes=(),
    fresh=(),
    instructions=(message("system", "S"),),
    size=9,
)
POLICY = Policy.model_validate(
    {
        "trigger": {"tokens": 40},
        "target": {"tokens": 40},
        "keep": {"rounds": 1},
        "edits": [{"type": "drop_oldest"}],
    }
)


async def test_a_policy_decides_what_is_sent() -> None:
    planned = await planned_of(PAST, "lean", POLICY, KNOWN)
    assert planned.moved
    assert (planned.tokens_before, planned.tokens_sent, len(planned.view)) == (55, 15, 1)


async def test_without_one_all_of_it_is() -> None:
    planned = await planned_of(PAST, "off", None, KNOWN)
    assert (planned.policy, planned.tokens_sent, len(planned.view)) == ("off", 55, 5)


def test_a_ticket_says_what_is_known() -> None:
    planned = nothing_sent(ENTRIES, KNOWN)
    assert (planned.tokens_before, planned.tokens_sent, planned.view) == (55, 0, ())
    ticket = report_of(PAST, planned, KNOWN, "exc_1", ("told",))
    assert (ticket.session, ticket.exchange, ticket.window, ticket.instructions) == ("s", "exc_1", 1_000, 1)
    assert (ticket.tokens_before, ticket.all_warnings) == (110, ("told",))
    assert report_of(replace(PAST, id=None), planned, KNOWN, "exc_1").session is None
