"""Summaries by a model, and leases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from proxy.errors import InvalidRequest
from proxy.store.archive import SummaryRecord
from proxy.store.records import SummaryStatus
from proxy.store.store import Store
from tests.support.asides import RECIPE, failed, summary
from tests.support.forked import Forked, run_program
from tests.support.talk import Talk
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


async def nodes_of(talk: Talk, *texts: str) -> list[str]:
    """Say these one after the other; return the nodes of the branch."""
    for text in texts:
        await talk.say(text, f"on {text}")
    row = await talk.store.session(talk.tenant, talk.session)
    assert row is not None
    return [each.node for each in await talk.store.path(talk.key, row.head)]


async def booked(talk: Talk) -> tuple[int, float | None]:
    row = await talk.store.session(talk.tenant, talk.session)
    assert row is not None
    return row.summaries, row.cost


async def test_it_comes_back_as_it_was_kept(store: Store) -> None:
    talk = Talk(store=store)
    nodes = await nodes_of(talk, "one", "two")
    kept = summary("a", nodes[1], 2, tip=nodes[3], predecessor="sum_0", generation=3, asked=True)
    tried = failed("b", nodes[1], 2, usage=None, cost=None, exchange=None, created_at=4_000)
    assert await store.keep_summary(talk.key, kept)
    assert await store.keep_summary(talk.key, tried)
    assert await store.summary_rows(talk.key) == [tried, kept]
    assert await store.summary_rows("other") == []


async def test_what_no_database_holds_does_not_lose_it(store: Store) -> None:
    talk = Talk(store=store)
    (node, _) = await nodes_of(talk, "one")
    odd = summary("a", node, 1, text="a\x00b\ud83e", state={"k": ["\ud83e\x00"]}, model="m\x00")
    assert await store.keep_summary(talk.key, odd)
    (row,) = await store.summary_rows(talk.key)
    assert (row.text, row.model) == ("a\ufffdb\ufffd", "m\ufffd")
    assert row.state == {"k": ["\ufffd\x00"]}


async def test_it_is_kept_and_paid_for_once(store: Store) -> None:
    talk = Talk(store=store)
    (node, _) = await nodes_of(talk, "one")
    assert await booked(talk) == (0, None)
    assert await store.keep_summary(talk.key, summary("a", node, 1, cost=None))
    assert await booked(talk) == (1, None)
    for _ in range(2):
        assert await store.keep_summary(talk.key, failed("b", node, 1, cost=0.5))
    assert await booked(talk) == (2, 0.5)
    assert await store.keep_summary(talk.key, failed("c", node, 1, cost=0.25))
    assert await booked(talk) == (3, 0.75)


async def test_the_second_of_two_that_are_ready_at_one_node_is_paid_for_and_not_kept(store: Store) -> None:
    """Its maker had lost the lease meanwhile, and did not know."""
    talk = Talk(store=store)
    nodes = await nodes_of(talk, "one", "two")
    first = summary("a", nodes[1], 2)
    assert await store.keep_summary(talk.key, first)
    assert not await store.keep_summary(talk.key, summary("b", nodes[1], 2, text="Other"))
    assert await store.summary_rows(talk.key) == [first]
    assert await booked(talk) == (1, 0.5)
    # Of another recipe, or of more, or no summary at all: that takes nobody's place.
    assert await store.keep_summary(talk.key, summary("c", nodes[1], 2, recipe="f" * 12))
    assert await store.keep_summary(talk.key, summary("d", nodes[2], 3))
    assert await store.keep_summary(talk.key, failed("e", nodes[1], 2))
    assert (await booked(talk))[0] == 4


async def test_where_only_attempts_stand_a_ready_one_is_kept(store: Store) -> None:
    talk = Talk(store=store)
    (node, _) = await nodes_of(talk, "one")
    assert await store.keep_summary(talk.key, failed("a", node, 1, status=SummaryStatus.REFUSED))
    assert await store.keep_summary(talk.key, summary("b", node, 1))


async def test_of_many_at_once_one_is_kept(store: Store) -> None:
    talk = Talk(store=store)
    (node, _) = await nodes_of(talk, "one")
    rows = [summary(str(number), node, 1, cost=1.0) for number in range(8)]
    assert sum(await asyncio.gather(*(store.keep_summary(talk.key, row) for row in rows))) == 1
    assert len(await store.summary_rows(talk.key)) == 1
    assert await booked(talk) == (1, 8.0)


async def test_without_its_session_it_is_gone(store: Store) -> None:
    talk = Talk(store=store)
    (node, _) = await nodes_of(talk, "one")
    await store.delete(talk.key)
    assert not await store.keep_summary(talk.key, summary("a", node, 1))
    assert await store.summary_rows(talk.key) == []


# ---------------------------------------------------------------------------- those of a branch


async def test_the_ready_one_that_covers_most_and_the_one_tried_last_are_found(store: Store) -> None:
    talk = Talk(store=store)
    nodes = await nodes_of(talk, "one", "two", "three")
    most = summary("most", nodes[3], 4, created_at=1_000)
    less = summary("less", nodes[1], 2, created_at=2_000)
    tried = failed("tried", nodes[4], 5, created_at=3_000)
    for row in (most, less):
        await store.keep_summary(talk.key, row)
    assert await store.ready_summary(talk.key, nodes, RECIPE) == (most, less)
    await store.keep_summary(talk.key, tried)
    assert await store.ready_summary(talk.key, nodes, RECIPE) == (most, tried)
    assert await store.ready_summary(talk.key, nodes[:2], RECIPE) == (less, less)
    assert await store.ready_summary(talk.key, nodes[4:], RECIPE) == (None, tried)
    assert await store.ready_summary(talk.key, nodes[5:], RECIPE) == (None, None)
    assert await store.ready_summary(talk.key, nodes, "f" * 12) == (None, None)
    assert await store.ready_summary(talk.key, nodes, "f\x00") == (None, None)
    assert await store.ready_summary(talk.key, [], RECIPE) == (None, None)


async def test_a_branch_is_recognised_by_the_end_on_which_it_was_made(store: Store) -> None:
    talk = Talk(store=store)
    nodes = await nodes_of(talk, "one", "two")
    made = summary("a", nodes[0], 1, tip=nodes[2])
    await store.keep_summary(talk.key, made)
    assert await store.ready_summary(talk.key, [nodes[2]], RECIPE) == (made, made)
    assert await store.ready_summary(talk.key, [nodes[1], nodes[3]], RECIPE) == (None, None)


async def test_behind_any_number_of_another_branch_it_is_found(store: Store) -> None:
    talk = Talk(store=store)
    nodes = await nodes_of(talk, "one", "two")
    mine = summary("mine", nodes[0], 1, created_at=1_000)
    await store.keep_summary(talk.key, mine)
    for number in range(130):  # two pages and a rest, many of the same time
        node = f"{number:040x}"
        at = 2_000 + number // 40
        await store.keep_summary(talk.key, summary(f"{number:03d}", node, 2, tip=node, created_at=at))
    assert await store.ready_summary(talk.key, nodes, RECIPE) == (mine, mine)
    assert await store.ready_summary(talk.key, ["none"], RECIPE) == (None, None)


# --------------------------------------------------------------------------------- what an export has


def record(**changes: Any) -> SummaryRecord:
    row = summary("a", "n2", 2, tip="n3")
    columns = {name: getattr(row, name) for name in SummaryRecord.__struct_fields__}
    return SummaryRecord(**(columns | changes))


DEPTHS = {"n1": 1, "n2": 2, "n3": 3, "m3": 3}
DESCENDS: Callable[[str, str], bool] = lambda node, above: (node, above) in {("n3", "n2"), ("n2", "n2")}  # noqa: E731 - it stands for a method


def test_a_record_says_what_it_was_made_of_and_no_more_what_it_cost() -> None:
    row = summary("a", "n2", 2, tip="n3")
    assert record().read(DEPTHS, DESCENDS) == replace(row, usage=None, cost=None, exchange=None)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"node": "x"}, "a branch with x"),
        ({"tip": "x"}, "a branch with x"),
        ({"tip": "m3"}, "not of such a branch"),
        ({"tip": "n1"}, "not of such a branch"),
        ({"until": 1}, "covers 1 messages"),
        ({"covered_messages": 3}, "speaks of more"),
        ({"text": ""}, "says nothing"),
        ({"recipe": "a\x00"}, "recipe holds a NUL"),
    ],
)
def test_a_record_of_no_such_branch_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, InvalidRequest), match=says):
        record(**changes).read(DEPTHS, DESCENDS)


RACE = """
import asyncio, sys, time
from pathlib import Path
from proxy.store.store import Store

async def run(url, key, holder, folder):
    store = await Store.open(url, migrate=False)
    (folder / f"{holder}-ready").touch()
    while not (folder / "go").exists():
        time.sleep(0.001)
    won = [n for n in range(60) if await store.lease(key, f"n{n}", holder, 1_000, 2_000)]
    await store.close()
    (folder / f"{holder}-won").write_text(" ".join(map(str, won)))

asyncio.run(run(*sys.argv[1:]))
"""


async def test_one_has_it_at_a_time(store: Store) -> None:
    talk = Talk(store=store)
    await talk.begin()
    assert await store.lease(talk.key, "recipe", "a", 1_000, 2_000)
    assert not await store.lease(talk.key, "recipe", "b", 1_999, 5_000)
    assert await store.lease(talk.key, "other", "b", 1_000, 2_000)
    other = Talk(store=store, session="another")
    await other.begin()
    assert await store.lease(other.key, "recipe", "b", 1_000, 2_000)


async def test_its_holder_prolongs_it(store: Store) -> None:
    talk = Talk(store=store)
    await talk.begin()
    assert await store.lease(talk.key, "recipe", "a", 1_000, 2_000)
    assert await store.lease(talk.key, "recipe", "a", 1_500, 9_000)
    assert not await store.lease(talk.key, "recipe", "b", 8_999, 9_999)


async def test_who_comes_after_its_end_has_it(store: Store) -> None:
    talk = Talk(store=store)
    await talk.begin()
    assert await store.lease(talk.key, "recipe", "dead", 1_000, 2_000)
    assert await store.lease(talk.key, "recipe", "b", 2_000, 3_000)
    assert not await store.lease(talk.key, "recipe", "dead", 2_500, 9_000)  # it lives after all, and is told


async def test_what_is_given_back_is_free(store: Store) -> None:
    talk = Talk(store=store)
    await talk.begin()
    assert await store.lease(talk.key, "recipe", "a", 1_000, 2_000)
    await store.release(talk.key, "recipe", "b")  # that is not b's to give
    assert not await store.lease(talk.key, "recipe", "b", 1_000, 2_000)
    await store.release(talk.key, "recipe", "a")
    await store.release(talk.key, "recipe", "a")
    assert await store.lease(talk.key, "recipe", "b", 1_000, 2_000)


async def test_without_a_session_there_is_nothing_to_have(store: Store) -> None:
    talk = Talk(store=store)
    assert not await store.lease(talk.key, "recipe", "a", 1_000, 2_000)
    await talk.begin()
    assert await store.lease(talk.key, "recipe", "a", 1_000, 2_000)
    assert await store.delete(talk.key)
    assert not await store.lease(talk.key, "recipe", "a", 1_000, 2_000)
    await talk.begin()
    assert await store.lease(talk.key, "recipe", "b", 1_000, 2_000)  # nothing was left of the old one


async def test_of_many_at_once_one_has_it(store: Store) -> None:
    talk = Talk(store=store)
    await talk.begin()
    asked = [store.lease(talk.key, "recipe", f"h{number}", 1_000, 2_000) for number in range(12)]
    assert sum(await asyncio.gather(*asked)) == 1


async def test_two_processes_never_have_the_same_one(store: Store, store_url: str, tmp_path: Path) -> None:
    talk = Talk(store=store)
    await talk.begin()
    with ExitStack() as stack:
        processes = [
            stack.enter_context(Forked(run_program, RACE, store_url, talk.key, holder, tmp_path)) for holder in "ab"
        ]
        until(lambda: all((tmp_path / f"{holder}-ready").exists() for holder in "ab"), "both are ready")
        (tmp_path / "go").touch()
        assert [process.wait(60) for process in processes] == [0, 0]
    won = [(tmp_path / f"{holder}-won").read_text().split() for holder in "ab"]
    assert sorted(map(int, won[0] + won[1])) == list(range(60))
    for holder, names in zip("ab", won, strict=True):
        for name in names:
            assert not await store.lease(talk.key, f"n{name}", "other", 1_999, 3_000)
            assert await store.lease(talk.key, f"n{name}", holder, 1_999, 3_000)
