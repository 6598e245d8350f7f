from __future__ import annotations

import pytest
from msgspec.structs import replace

from proxy.conversation import ROOT, Kind
from proxy.errors import Conflict
from proxy.store.records import Body, Kept, TooLong
from proxy.store.store import Store
from proxy.trimming import Change, Gap
from tests.support.recalling import (
    ask,
    calling,
    cut_with,
    long_talk,
    result_of,
    said_with_calls,
    texts,
)
from tests.support.talk import Talk, body, message

pytestmark = pytest.mark.anyio


async def test_an_append_reads_the_branch_with_its_texts(store: Store) -> None:
    talk = Talk(store=store)
    await talk.say("one", "1")
    settled = await talk.say("two", "2")
    found = await ask(talk, message("user", "three"))
    assert (found.arrival.kind, found.arrival.base) == (Kind.APPEND, settled.head)
    assert texts(found) == ["one", "1", "two", "2"]
    assert (found.start, found.depth) == (0, 4)


async def test_an_append_without_instructions_gets_the_newest_ones(store: Store) -> None:
    talk = Talk(store=store)
    system = (message("system", "S"),)
    asked = body("user", "one")
    exchange = await talk.begin(asked, instructions=system)
    await talk.settle(exchange, asked, replies=(body("assistant", "1"),))
    assert (await ask(talk, message("user", "two"))).instructions == system
    assert (await ask(talk, message("user", "two"), instructed=True)).instructions == ()


async def test_results_are_placed_at_their_calls(store: Store) -> None:
    talk = Talk(store=store)
    called = await said_with_calls(talk, "c1")
    found = await ask(talk, result_of("c1"))
    assert (found.arrival.base, found.arrival.at_head) == (called.head, False)
    assert (texts(found), found.carried, found.depth) == (["one", ""], (), 2)


async def test_what_was_said_since_stands_before_the_calls_that_are_answered(store: Store) -> None:
    talk = Talk(store=store)
    called = await said_with_calls(talk, "c1")
    change = Change(
        position=2,
        edit="truncate_tool_output",
        reason="long",
        message=message("user", "o"),
        tokens_before=5,
        tokens_after=1,
    )
    other = await talk.say("other", "2", arrivals=((change,),))
    found = await ask(talk, result_of("c1"))
    assert (found.arrival.base, found.arrival.at_head, found.arrival.moves_head) == (called.head, False, True)
    assert texts(found) == ["one", "other", "2", ""]
    assert found.carried == (*other.nodes, *other.replies, called.head)
    assert [row.depth for row in found.rows] == [1, 2, 3, 4]
    assert found.depth == 4
    assert [row.arrival for row in found.rows][1] == (replace(change, position=1),)
    # The stored order is what it was.
    assert texts(await ask(talk, message("user", "x"))) == ["one", "", "other", "2"]


async def test_calls_at_the_root_are_followed_too(store: Store) -> None:
    talk = Talk(store=store)
    asked = (calling("c1"), body("user", "other"))
    await talk.settle(await talk.begin(*asked), *asked, replies=(body("assistant", "2"),))
    found = await ask(talk, result_of("c1"))
    assert (texts(found), [row.depth for row in found.rows]) == (["other", "2", ""], [1, 2, 3])


async def test_a_reply_to_some_of_the_results_gives_way(store: Store) -> None:
    talk = Talk(store=store)
    await said_with_calls(talk, "c1", "c2")
    first = body("tool", "1", tool_call_id="c1")
    early = await talk.settle(await talk.begin(first), first, replies=(body("assistant", "early"),))
    found = await ask(talk, result_of("c2"))
    assert (texts(found), found.carried, found.depth) == (["one", "", "1"], (), 3)
    assert found.arrival.base == early.nodes[0]
    await talk.say("other", "2")
    found = await ask(talk, result_of("c2"))
    assert texts(found) == ["one", "other", "2", "", "1"]


@pytest.mark.parametrize("goes_on", [False, True])
async def test_the_same_results_once_more_go_where_they_stand(store: Store, goes_on: bool) -> None:
    talk = Talk(store=store)
    called = await said_with_calls(talk, "c1")
    result = Body(message=result_of("c1"), tokens=5)
    await talk.settle(await talk.begin(result), result, replies=(body("assistant", "done"),))
    if goes_on:
        await talk.say("other", "2")
    found = await ask(talk, result_of("c1"))
    assert (texts(found), found.arrival.base, found.depth) == (["one", ""], called.head, 2)
    assert found.arrival.beside is goes_on


async def test_an_agents_own_open_call_is_meant_where_others_use_its_id(store: Store) -> None:
    talk = Talk(store=store)
    mine = await said_with_calls(talk, "c1", agent="A")
    await said_with_calls(talk, "c1", agent="B")
    found = await ask(talk, result_of("c1"), agent="A")
    assert found.arrival.base == mine.head
    assert [row.agent for row in found.rows] == ["A", "B", "B", "A"]


async def test_what_a_cut_dropped_since_the_calls_is_read(store: Store) -> None:
    talk = Talk(store=store)
    called = await said_with_calls(talk, "c1")
    nodes = [*called.nodes, *called.replies]
    for number in range(2):
        settled = await talk.say(f"q{number}", f"a{number}")
        nodes += [*settled.nodes, *settled.replies]
    asked = body("user", "last")
    exchange = await talk.begin(asked)
    await talk.settle(
        exchange,
        asked,
        replies=(body("assistant", "end"),),
        cut=cut_with(7, Gap(start=2, stop=6, edit="drop_oldest", reason="old", tokens=20, tool_calls=0)),
        kept=Kept(nodes=tuple(nodes[:2]), messages=(0,)),
    )
    assert texts(await ask(talk, message("user", "x"), policy="lean")) == ["one", "", "last", "end"]
    found = await ask(talk, result_of("c1"), policy="lean")
    assert texts(found) == ["one", "q0", "a0", "q1", "a1", "last", "end", ""]
    assert [row.depth for row in found.rows] == list(range(1, 9))
    assert found.cut is None  # it was made where the calls stood
    await ask(talk, result_of("c1"), policy="lean", most=20)
    with pytest.raises(TooLong):
        await ask(talk, result_of("c1"), policy="lean", most=7)


async def test_an_append_reads_what_a_cut_kept_and_what_came_after_it(store: Store) -> None:
    talk = Talk(store=store)
    nodes = await long_talk(talk, 6)
    found = await ask(talk, message("user", "new"), policy="lean")
    assert texts(found) == ["q0", "last", "end"]
    assert [row.depth for row in found.rows] == [1, 11, 12]
    assert found.cut is not None
    assert (found.cut.node, found.cut.kept) == (nodes[10], (nodes[0], nodes[10]))
    assert found.depth == 12
    await talk.say("new", "2")
    found = await ask(talk, message("user", "newer"), policy="lean")
    assert texts(found) == ["q0", "last", "end", "new", "2"]


async def test_the_whole_branch_is_read_where_it_is_wanted_or_no_cut_helps(store: Store) -> None:
    talk = Talk(store=store)
    await long_talk(talk, 6)
    whole = await ask(talk, message("user", "new"), policy="lean", whole=True)
    assert len(whole.rows) == 12
    assert whole.cut is not None
    other = await ask(talk, message("user", "new"), policy="other")
    assert (len(other.rows), other.cut) == (12, None)
    none = await ask(talk, message("user", "new"))
    assert (len(none.rows), none.cut) == (12, None)


async def test_a_cut_of_another_branch_is_passed_over(store: Store) -> None:
    talk = Talk(store=store)
    nodes = await long_talk(talk, 4)
    asked = body("user", "edited")
    exchange = await talk.begin(asked)
    await talk.settle(
        exchange, asked, replies=(body("assistant", "b"),), base=nodes[3], at_head=False, kind="first"
    )
    found = await ask(talk, message("user", "new"), policy="lean")
    assert texts(found) == ["q0", "a0", "q1", "a1", "edited", "b"]
    assert found.cut is None
    more = [body("user", f"m{number}") for number in range(6)]
    exchange = await talk.begin(*more)
    await talk.settle(exchange, *more, replies=(body("assistant", "c"),))
    found = await ask(talk, message("user", "new"), policy="lean")
    assert (len(found.rows), found.cut) == (13, None)


async def test_where_a_cut_does_not_say_what_it_kept_all_is_read(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "one")
    gap = Gap(start=0, stop=1, edit="drop_oldest", reason="old", tokens=5, tool_calls=0)
    await talk.settle(
        await talk.begin(asked), asked, replies=(body("assistant", "1"),), cut=cut_with(1, gap), kept=None
    )
    found = await ask(talk, message("user", "two"), policy="lean")
    assert texts(found) == ["one", "1"]
    assert found.cut is not None
    assert found.cut.kept is None


async def test_a_cut_whose_messages_are_not_there_is_told(store: Store) -> None:
    """As where a session is deleted while a request that belongs to it is read."""
    talk = Talk(store=store)
    asked = body("user", "one")
    await talk.settle(
        await talk.begin(asked),
        asked,
        replies=(body("assistant", "1"),),
        cut=cut_with(1),
        kept=Kept(nodes=("ab" * 20,), messages=()),
    )
    with pytest.raises(Conflict, match="deleted"):
        await ask(talk, message("user", "two"), policy="lean")


async def test_an_append_to_a_base_that_the_cut_dropped_knows_how_deep_it_is(store: Store) -> None:
    talk = Talk(store=store)
    base = (await talk.say("one", "1")).head
    exchange = await talk.begin(digest=ROOT)  # instructions alone: the cut is made at the reply itself
    await talk.settle(
        exchange,
        replies=(body("assistant", "2"),),
        base=base,
        cut=cut_with(2, Gap(start=0, stop=2, edit="drop_oldest", reason="old", tokens=10, tool_calls=0)),
        kept=Kept(nodes=(), messages=()),
    )
    found = await ask(talk, policy="lean", retried=True)
    assert found.arrival.base == base
    assert found.cut is not None
    assert (found.cut.node, texts(found), found.depth) == (base, [], 2)
