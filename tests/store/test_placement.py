from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace
from msgspec.structs import replace as replace_change

from proxy.conversation import ROOT, content_hash, names_under
from proxy.dialects import JsonObject
from proxy.store.records import Body, Kept, SessionRow, Settled, Status
from proxy.store.store import Store
from proxy.trimming import Change, Cut
from tests.support.asides import HIDDEN, reply
from tests.support.asides import settle as settle_asides
from tests.support.talk import Talk, body, message, settlement

pytestmark = pytest.mark.anyio


def cut(position: int, *changes: Change, policy: str = "default", version: str = "v1") -> Cut:
    return Cut(position=position, policy=policy, version=version, changes=changes, tokens=50, messages=3, tool_calls=1)


def calling(*ids: str) -> Body:
    """Return a reply that calls tools."""
    return body("assistant", "", tool_calls=[call(name) for name in ids])


def call(name: str) -> JsonObject:
    return {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}


async def test_nothing_comes_between_open_calls_and_their_results(store: Store) -> None:
    talk = Talk(store=store)
    start = await talk.say("start", "ok")
    late, asked, reply = body("user", "slow"), body("user", "tool"), calling("c1")
    slow = await talk.begin(late, base=start.head)
    tool = await talk.begin(asked, base=start.head)
    called = await talk.settle(tool, asked, replies=(reply,), base=start.head)
    after = await talk.settle(
        slow, late, replies=(body("assistant", "at last"),), base=start.head, cut=cut(3), settled_at=3_000
    )
    assert await talk.texts(after.head) == ["start", "ok", "tool", "", "slow", "at last"]
    assert await store.cut_at(talk.key, after.nodes[0], "default", None) is None  # it was made for others
    result = body("tool", "42", tool_call_id="c1")
    answer = await talk.begin(result, base=called.head)
    end = await talk.settle(answer, result, replies=(body("assistant", "done"),), base=called.head)
    rows = await store.path(talk.key, end.head)
    said = ["start", "ok", "tool", "slow", "at last", "", "42", "done"]
    assert [row.message.text for row in rows] == said
    assert rows[5].message.calls[0].id == "c1"
    branches = {branch.head for branch in await store.branches(talk.key)}
    assert branches == {end.head, after.head}


async def test_what_was_planned_after_the_calls_goes_on_under_them(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "tool")
    exchange = await talk.begin(asked)
    called = await talk.settle(exchange, asked, replies=(calling("c1"),))
    never_mind = body("user", "never mind")
    exchange = await talk.begin(never_mind, base=called.head)
    settled = await talk.settle(exchange, never_mind, replies=(body("assistant", "ok"),), base=called.head)
    assert await talk.texts(settled.head) == ["tool", "", "never mind", "ok"]
    assert len(await store.branches(talk.key)) == 1


@pytest.mark.parametrize("title_first", [True, False])
@pytest.mark.parametrize("words", ["title?", "work"])
async def test_a_title_asked_for_at_the_same_moment_stands_aside(store: Store, title_first: bool, words: str) -> None:
    talk = Talk(store=store)
    asked, title = body("user", "work"), body("user", words)
    first = {"kind": "first", "base": ROOT}
    main = await talk.begin(asked, instructions=(message("system", "be good"),), tools=b"[1]", **first)
    beside = await talk.begin(title, instructions=(message("system", "find a title"),), **first)
    ends = [(main, asked, body("assistant", "done")), (beside, title, body("assistant", "Work"))]
    settled = [
        await talk.settle(exchange, question, replies=(said,), yields=True, **first)
        for exchange, question, said in (reversed(ends) if title_first else ends)
    ]
    assert await talk.texts(settled[-1].head) == ["work", "done"]
    assert sorted([branch.depth for branch in await store.branches(talk.key)]) == [2, 2]


@pytest.mark.parametrize("between", [1, 20])
async def test_a_late_result_goes_to_its_calls_and_not_to_the_head(store: Store, between: int) -> None:
    talk = Talk(store=store)
    asked = body("user", "tool")
    exchange = await talk.begin(asked)
    called = await talk.settle(exchange, asked, replies=(calling("c1", "c2"),))
    last = called
    for number in range(between):
        last = await talk.say(f"q{number}", "a", base=last.head)
    results = (body("tool", "1", tool_call_id="c2"), body("tool", "2", tool_call_id="c1"))
    exchange = await talk.begin(*results, base=last.head)
    settled = await talk.settle(exchange, *results, replies=(body("assistant", "3"),), base=last.head, cut=cut(4))
    said = [text for number in range(between) for text in (f"q{number}", "a")]
    assert await talk.texts(settled.head) == ["tool", *said, "", "1", "2", "3"]
    row = await store.exchange(exchange)
    assert row is not None
    places = await store.path(talk.key, settled.head)
    assert (row.base, row.cut_node) == (places[-4].node, None)
    assert list(row.nodes) == [place.node for place in places[-3:-1]]
    session = await store.session("tenant", "session")
    assert session is not None
    assert (session.head, session.messages) == (settled.head, 5 + 2 * between)
    assert last.head in {branch.head for branch in await store.branches(talk.key)}


async def test_a_result_whose_call_is_not_near_the_head_goes_to_the_head(store: Store) -> None:
    talk = Talk(store=store)
    asked = [body("user", "tool"), calling("c1"), *(body("user", f"m{number}") for number in range(63))]
    exchange = await talk.begin(*asked)
    far = await talk.settle(exchange, *asked, replies=(body("assistant", "far"),))
    for name in ("c1", "unknown", ""):
        result = body("tool", "late", tool_call_id=name)
        exchange = await talk.begin(result, base=far.head)
        settled = await talk.settle(exchange, result, replies=(body("assistant", "ok"),), base=far.head)
        assert (await talk.texts(settled.head))[-2:] == ["late", "ok"]
    session = await store.session("tenant", "session")
    assert session is not None
    assert session.messages == 66 + 3 * 2
    assert len(await store.branches(talk.key)) == 1


@pytest.mark.parametrize("goes_on", [False, True])
async def test_results_that_stand_there_already_stay_before_the_others_of_their_block(
    store: Store, goes_on: bool
) -> None:
    talk = Talk(store=store)
    asked, first = body("user", "tool"), body("tool", "1", tool_call_id="c1")
    exchange = await talk.begin(asked)
    called = await talk.settle(exchange, asked, replies=(calling("c1", "c2"),))
    exchange = await talk.begin(base=called.head)  # as an import can leave it: the head is a result
    end = await talk.settle(exchange, replies=(first,), base=called.head, at_head=False)
    if goes_on:
        end = await talk.say("and?", "so", base=end.head)
    second = body("tool", "2", tool_call_id="c2")
    exchange = await talk.begin(second, base=end.head)
    settled = await talk.settle(exchange, second, replies=(body("assistant", "ok"),), base=end.head)
    between = ["and?", "so"] if goes_on else []
    assert await talk.texts(settled.head) == ["tool", *between, "", "1", "2", "ok"]


async def test_calls_that_broke_off_are_not_waited_for(store: Store) -> None:
    talk = Talk(store=store)
    start = await talk.say("start", "ok")
    late, asked = body("user", "slow"), body("user", "tool")
    slow = await talk.begin(late, base=start.head)
    tool = await talk.begin(asked, base=start.head)
    broken = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a'}}
    plain = settlement(
        tool, asked, replies=(body("assistant", "", tool_calls=[broken]),), base=start.head, status=Status.PARTIAL
    )
    await store.settle(replace(plain, replies=(replace(plain.replies[0], partial=True),)))
    settled = await talk.settle(slow, late, replies=(body("assistant", "at last"),), base=start.head)
    assert await talk.texts(settled.head) == ["start", "ok", "tool", "", "slow", "at last"]


async def test_the_exchange_says_where_its_messages_went(store: Store) -> None:
    talk = Talk(store=store)
    base = (await talk.say("one", "1")).head
    asked = body("user", "three")
    exchange, failing = await talk.begin(asked, base=base), await talk.begin(asked, base=base)
    moved = (await talk.say("two", "2", base=base)).head
    await talk.settle(exchange, asked, replies=(body("assistant", "3"),), base=base)
    await talk.settle(failing, asked, base=base)
    rows = [await store.exchange(exchange), await store.exchange(failing)]
    assert [row.base for row in rows if row is not None] == [moved, base]


async def _between(talk: Talk, *calls: str) -> tuple[str, Settled, Settled]:
    """Have A call tools, and B speak after that; return the node before the calls and what both made."""
    asked, other = body("user", "tool"), body("user", "b", agent="B")
    called = await talk.settle(await talk.begin(asked, agent="A"), asked, replies=(calling(*calls),), agent="A")
    change = Change(
        position=2,
        edit="truncate_tool_output",
        reason="long",
        message=message("user", "b!"),
        tokens_before=5,
        tokens_after=1,
    )
    exchange = await talk.begin(other, agent="B")
    spoke = await settle_asides(
        talk, exchange, other, replies=(reply("rb", HIDDEN),), agent="B", arrivals=((change,),), settled_at=5_000
    )
    return called.nodes[0], called, spoke


async def _answer(talk: Talk, called: Settled, text: str, answer: str, call_id: str = "c1", **changes: Any) -> Settled:
    """Have A send a result for which it was planned where its calls stand, though others spoke since."""
    asked = body("tool", text, tool_call_id=call_id)
    exchange = await append(talk, asked, base=called.head, agent="A")
    told = {"base": called.head, "at_head": False, "kind": "append", "agent": "A"}
    return await talk.settle(exchange, asked, replies=(body("assistant", answer),), **(told | changes))


async def test_what_is_carried_along_says_what_it_said_and_the_old_nodes_stay(store: Store) -> None:
    talk = Talk(store=store)
    before, called, spoke = await _between(talk, "c1")
    old = await store.path(talk.key, spoke.head)
    settled = await _answer(talk, called, "42", "ra")
    rows = await store.path(talk.key, settled.head)
    assert [row.message.text for row in rows] == ["tool", "b", "rb", "", "42", "ra"]
    assert rows[0].node == before
    carried = [rows[3], rows[1], rows[2]]
    for mine, was in zip(carried, old[1:], strict=True):
        kept = ("body", "message", "tokens", "source", "partial", "exchange", "agent", "policy", "created_at")
        assert all(getattr(mine, name) == getattr(was, name) for name in kept)
        assert mine.node != was.node
    assert old[2].arrival is not None
    assert rows[1].arrival == (replace_change(old[2].arrival[0], position=1),)
    assert [(row.depth, row.round, row.tokens_total) for row in rows] == [
        (1, 1, 5),
        (2, 2, 10),
        (3, 2, 15),
        (4, 2, 20),
        (5, 2, 25),
        (6, 2, 30),
    ]
    session = await now(store)
    assert (session.head, session.messages, session.rounds, session.tokens) == (settled.head, 6, 2, 30)
    assert session.hidden == 2
    assert await store.hidden(session, [old[3].node, rows[2].node]) == {old[3].node: HIDDEN, rows[2].node: HIDDEN}
    assert await store.path(talk.key, spoke.head) == old
    assert {branch.head for branch in await store.branches(talk.key)} == {spoke.head, settled.head}
    assert settled.nodes == (rows[4].node,)
    assert await base_of(store, talk.exchanges[-1]) == rows[3].node


async def test_what_is_carried_along_twice_is_there_once(store: Store) -> None:
    talk = Talk(store=store)
    _, called, spoke = await _between(talk, "c1")
    first = await _answer(talk, called, "42", "ra")
    exchange = await talk.begin(base=called.head)  # somebody goes back to where B had just spoken
    again = await talk.settle(
        exchange, body("user", "b", agent="B"), replies=(body("assistant", "rb"),), base=called.head, at_head=False
    )
    assert again.head == spoke.head
    other = await _answer(talk, called, "43", "sa")
    assert await talk.texts(other.head) == ["tool", "b", "rb", "", "43", "sa"]
    assert (await store.path(talk.key, first.head))[:4] == (await store.path(talk.key, other.head))[:4]
    assert (await now(store)).hidden == 2


async def test_calls_that_wait_are_carried_along_until_their_results_come(store: Store) -> None:
    talk = Talk(store=store)
    asked, other = body("user", "a"), body("user", "b")
    first = await talk.settle(await talk.begin(asked, agent="A"), asked, replies=(calling("ca"),), agent="A")
    second = await talk.settle(await talk.begin(other, agent="B"), other, replies=(calling("cb"),), agent="B")
    one = await _answer(talk, first, "ra", "done a", "ca")
    assert await talk.texts(one.head) == ["a", "b", "", "", "ra", "done a"]
    two = await _answer(talk, second, "rb", "done b", "cb", agent="B")
    rows = await store.path(talk.key, two.head)
    assert [row.message.text for row in rows] == ["a", "b", "", "ra", "done a", "", "rb", "done b"]
    assert [call.id for row in rows for call in row.message.calls] == ["ca", "cb"]


async def test_of_calls_with_one_id_an_agents_own_are_answered(store: Store) -> None:
    talk = Talk(store=store)
    asked, other = body("user", "a"), body("user", "b")
    first = await talk.settle(await talk.begin(asked, agent="A"), asked, replies=(calling("c1"),), agent="A")
    await talk.settle(await talk.begin(other, agent="B"), other, replies=(calling("c1"),), agent="B")
    settled = await _answer(talk, first, "ra", "done a")
    rows = await store.path(talk.key, settled.head)
    assert [row.message.text for row in rows] == ["a", "b", "", "", "ra", "done a"]
    assert [row.agent for row in rows] == ["A", "B", "B", "A", "A", "A"]


@pytest.mark.parametrize("planned", [True, False])
async def test_a_cut_is_kept_where_what_is_carried_along_is_what_was_planned(store: Store, planned: bool) -> None:
    talk = Talk(store=store)
    before, called, spoke = await _between(talk, "c1")
    carried = (*spoke.nodes, *spoke.replies, called.head)
    if not planned:
        await talk.say("c", "rc")
    settled = await _answer(
        talk,
        called,
        "42",
        "ra",
        cut=cut(5),
        kept=Kept(nodes=(before, spoke.replies[0], called.head), messages=(0,)),
        carried=carried,
    )
    rows = await store.path(talk.key, settled.head)
    said = [] if planned else ["c", "rc"]
    assert [row.message.text for row in rows] == ["tool", "b", "rb", *said, "", "42", "ra"]
    row = await store.exchange(talk.exchanges[-1])
    assert row is not None
    found = await store.cut(talk.key, [row.node for row in rows], "default", "A")
    if planned:
        assert found is not None
        assert (found.cut, found.node, row.cut_node) == (cut(5), rows[4].node, rows[4].node)
        assert found.kept == tuple(rows[place].node for place in (0, 2, 3, 4))
    else:
        assert (found, row.cut_node) == (None, None)


async def test_results_sent_twice_at_once_carry_once(store: Store) -> None:
    talk = Talk(store=store)
    _, called, _ = await _between(talk, "c1")
    asked = body("tool", "42", tool_call_id="c1")
    twins = [await append(talk, asked, base=called.head, agent="A") for _ in range(2)]
    told: dict[str, Any] = {"base": called.head, "at_head": False, "kind": "append", "agent": "A"}
    for twin, answer in zip(twins, ("1", "2"), strict=True):
        settled = await talk.settle(twin, asked, replies=(body("assistant", answer),), **told)
        assert await talk.texts(settled.head) == ["tool", "b", "rb", "", "42", answer]
    assert len(await store.branches(talk.key)) == 3


@pytest.mark.parametrize("agent", ["A", "other"])
@pytest.mark.parametrize("at_head", [False, True])
@pytest.mark.parametrize("goes_on", [False, True])
async def test_the_same_results_sent_again_are_stored_once_and_take_nothing_from_the_head(
    store: Store, goes_on: bool, at_head: bool, agent: str
) -> None:
    talk = Talk(store=store)
    asked = body("user", "tool")
    called = await talk.settle(await talk.begin(asked), asked, replies=(calling("c1"),))
    first = await _answer(talk, called, "42", "ra")
    after = await talk.say("c", "rc") if goes_on else first
    again = await _answer(talk, called, "42", "ra2", at_head=at_head, agent=agent)
    assert again.nodes == first.nodes
    assert await talk.texts(again.replies[0]) == ["tool", "", "42", "ra2"]
    assert again.head == (after.head if goes_on else again.replies[0])


async def test_calls_that_were_known_are_found_however_far_up_they_are(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "tool")
    called = await talk.settle(await talk.begin(asked), asked, replies=(calling("c1"),))
    many = [body("user", f"m{number}") for number in range(100)]
    await talk.settle(await talk.begin(*many), *many, replies=(body("assistant", "far"),))
    settled = await _answer(talk, called, "42", "done")
    texts = await talk.texts(settled.head)
    assert (texts[:2], texts[-5:]) == (["tool", "m0"], ["m99", "far", "", "42", "done"])


async def test_results_of_calls_that_the_session_went_back_from_become_a_branch(store: Store) -> None:
    talk = Talk(store=store)
    start = await talk.say("start", "ok")
    asked = body("user", "tool")
    called = await talk.settle(await talk.begin(asked), asked, replies=(calling("c1"),))
    back = await talk.say("instead", "yes", base=start.head, at_head=False, kind="rewind")
    settled = await _answer(talk, called, "42", "done")
    assert settled.head == back.head
    assert await talk.texts(settled.replies[0]) == ["start", "ok", "tool", "", "42", "done"]


async def now(store: Store) -> SessionRow:
    session = await store.session("tenant", "session")
    assert session is not None
    return session


async def append(talk: Talk, *asked: Body, **changes: Any) -> str:
    """Open an append, with a digest of what it says."""
    return await talk.begin(
        *asked, **{"digest": names_under(ROOT, [content_hash(b.message) for b in asked])[-1]} | changes
    )


async def base_of(store: Store, exchange: str) -> str:
    row = await store.exchange(exchange)
    assert row is not None
    return row.base


@pytest.mark.parametrize("answered_first", ["one", "other"])
@pytest.mark.parametrize("knows", [False, True])
async def test_the_same_append_twice_at_once_has_one_place(store: Store, answered_first: str, knows: bool) -> None:
    talk = Talk(store=store)
    base = (await talk.say("start", "ok")).head
    asked = body("user", "b")
    one = await append(talk, asked, base=base, created_at=1_500)
    other = await append(talk, asked, base=base, created_at=1_501)
    answers = {one: (body("assistant", "1"),), other: (body("assistant", "2"),)}
    order = [one, other] if answered_first == "one" else [other, one]
    made = [
        # Where the second one was planned while the first was pending, it has its place already.
        await talk.settle(
            twin,
            asked,
            base=base,
            replies=answers[twin],
            at_head=not (knows and twin == other),
            kind="append",
            cut=cut(3),
        )
        for twin in order
    ]
    assert made[0].nodes == made[1].nodes
    assert await base_of(store, one) == await base_of(store, other) == base
    assert {branch.head for branch in await store.branches(talk.key)} == {
        reply for each in made for reply in each.replies
    }
    # Whoever sent it again waits for the answer to that.
    session = await now(store)
    assert await talk.texts(session.head) == ["start", "ok", "b", "2"]
    assert (session.messages, session.requests) == (4, 3)
    assert await store.cut_at(talk.key, made[0].nodes[0], "default", None) == cut(3)


async def test_first_messages_sent_twice_at_once_have_one_place(store: Store) -> None:
    talk = Talk(store=store)
    asked, answer = body("user", "b"), (body("assistant", "1"),)
    twins = [await append(talk, asked, kind="first") for _ in range(10)]
    settled = await asyncio.gather(*(talk.settle(one, asked, replies=answer, kind="first") for one in twins[::-1]))
    assert len({(one.head, one.nodes, one.replies) for one in settled}) == 1
    assert await talk.texts(settled[0].head) == ["b", "1"]


async def test_a_twin_goes_where_the_other_one_came_to_stand(store: Store) -> None:
    talk = Talk(store=store)
    base = (await talk.say("start", "ok")).head
    asked = body("user", "b")
    early, late = await append(talk, asked, base=base), await append(talk, asked, base=base)
    between = (await talk.say("between", "yes")).head
    first = await talk.settle(early, asked, base=base, replies=(body("assistant", "1"),))
    second = await talk.settle(late, asked, base=base, replies=(body("assistant", "2"),), at_head=False, kind="append")
    assert (first.nodes, await base_of(store, late)) == (second.nodes, between)
    assert await talk.texts(second.head) == ["start", "ok", "between", "yes", "b", "2"]


async def test_the_head_stays_where_something_came_after_the_first_of_twins(store: Store) -> None:
    talk = Talk(store=store)
    base = (await talk.say("start", "ok")).head
    asked = body("user", "b")
    early, late = await append(talk, asked, base=base), await append(talk, asked, base=base)
    await talk.settle(early, asked, base=base, replies=(body("assistant", "1"),))
    after = await talk.say("after", "yes")
    beside = await talk.settle(late, asked, base=base, replies=(body("assistant", "2"),))
    assert (beside.head, (await now(store)).head) == (after.head, after.head)
    assert await talk.texts(after.head) == ["start", "ok", "b", "1", "after", "yes"]
    assert await talk.texts(beside.replies[0]) == ["start", "ok", "b", "2"]


@pytest.mark.parametrize("whole", ["early", "late"])
async def test_of_twins_a_whole_reply_goes_before_one_that_broke_off(store: Store, whole: str) -> None:
    talk = Talk(store=store)
    base = (await talk.say("start", "ok")).head
    asked = body("user", "b")
    early, late = await append(talk, asked, base=base), await append(talk, asked, base=base)
    for twin, name in ((late, "late"), (early, "early")) if whole == "early" else ((early, "early"), (late, "late")):
        status = Status.COMPLETE if name == whole else Status.PARTIAL
        await talk.settle(twin, asked, base=base, replies=(body("assistant", name),), status=status)
    assert await talk.texts((await now(store)).head) == ["start", "ok", "b", whole]


async def test_what_is_said_again_later_is_no_twin(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "go on")
    first = await talk.settle(await append(talk, asked), asked, replies=(body("assistant", "1"),))
    exchange = await append(talk, asked, base=first.head)
    await talk.say("between", "yes")
    settled = await talk.settle(exchange, asked, base=first.head, replies=(body("assistant", "2"),))
    assert await talk.texts(settled.head) == ["go on", "1", "between", "yes", "go on", "2"]


@pytest.mark.parametrize(
    "other",
    [{"agent": "writer"}, {"created_at": 100_000}, {"kind": "resend"}, {"digest": "other"}],
    ids=["another agent", "long after", "no append", "other words"],
)
async def test_what_is_no_twin_follows_the_head(store: Store, other: dict[str, Any]) -> None:
    talk = Talk(store=store)
    base = (await talk.say("start", "ok")).head
    asked = body("user", "b")
    one = await append(talk, asked, base=base)
    two = await append(talk, asked, **{"base": base, **other})
    await talk.settle(one, asked, base=base, replies=(body("assistant", "1"),))
    settled = await talk.settle(
        two,
        asked,
        base=base,
        replies=(body("assistant", "2"),),
        agent=other.get("agent"),
        kind=other.get("kind", "append"),
    )
    assert await talk.texts(settled.head) == ["start", "ok", "b", "1", "b", "2"]


async def test_one_that_was_not_answered_leaves_its_twin_alone(store: Store) -> None:
    talk = Talk(store=store)
    base = (await talk.say("start", "ok")).head
    asked = body("user", "b")
    one, two = await append(talk, asked, base=base), await append(talk, asked, base=base)
    await talk.settle(one, asked, base=base, status=Status.FAILED)
    await talk.say("between", "yes")
    settled = await talk.settle(two, asked, base=base, replies=(body("assistant", "2"),))
    assert await talk.texts(settled.head) == ["start", "ok", "between", "yes", "b", "2"]


async def test_the_results_of_one_call_sent_twice_have_one_place(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "tool")
    exchange = await append(talk, asked)
    called = await talk.settle(exchange, asked, replies=(calling("c1"),))
    result = body("tool", "42", tool_call_id="c1")
    twins = [await append(talk, result, base=called.head) for _ in range(2)]
    for twin, answer in zip(twins, ("1", "2"), strict=True):
        settled = await talk.settle(twin, result, base=called.head, replies=(body("assistant", answer),))
        assert await talk.texts(settled.head) == ["tool", "", "42", answer]
    assert len(await store.branches(talk.key)) == 2


async def test_a_twin_stays_with_the_other_one_where_the_same_was_said_once_more(store: Store) -> None:
    talk = Talk(store=store)
    base = (await talk.say("start", "ok")).head
    asked = body("user", "go on")
    slow, quick = await append(talk, asked, base=base), await append(talk, asked, base=base)
    first = await talk.settle(quick, asked, base=base, replies=(body("assistant", "1"),))
    more = await append(talk, asked, base=first.head)
    last = await talk.settle(more, asked, base=first.head, replies=(body("assistant", "2"),))
    settled = await talk.settle(slow, asked, base=base, replies=(body("assistant", "3"),))
    assert settled.head == last.head
    assert await talk.texts(last.head) == ["start", "ok", "go on", "1", "go on", "2"]
    assert await talk.texts(settled.replies[0]) == ["start", "ok", "go on", "3"]


async def test_a_twin_of_what_is_not_answered_yet_takes_no_turn_from_the_branch(store: Store) -> None:
    talk = Talk(store=store)
    base = (await talk.say("start", "ok")).head
    asked = body("user", "b")
    pending, twin = await append(talk, asked, base=base), await append(talk, asked, base=base)
    between = (await talk.say("between", "yes")).head
    first = await talk.settle(twin, asked, base=base, at_head=False, kind="append", replies=(body("assistant", "1"),))
    assert await base_of(store, twin) == between
    second = await talk.settle(pending, asked, base=base, replies=(body("assistant", "2"),))
    assert (second.nodes, second.head) == (first.nodes, first.head)
    assert await talk.texts(first.head) == ["start", "ok", "between", "yes", "b", "1"]


async def test_results_of_one_block_that_come_at_once_all_stay_there(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "tool")
    exchange = await append(talk, asked)
    called = await talk.settle(exchange, asked, replies=(calling("c1", "c2", "c3"),))
    results = [body("tool", f"result {name}", tool_call_id=name) for name in ("c1", "c2", "c3")]
    exchanges = [await append(talk, result, base=called.head) for result in results]
    ok = (body("assistant", "ok"),)
    for exchange, result in zip(exchanges, results, strict=True):
        # Each was planned at the calls, behind no other result.
        await talk.settle(exchange, result, base=called.head, at_head=False, kind="append", replies=ok)
    said = ["tool", "", "result c1", "result c2", "result c3", "ok"]
    assert await talk.texts((await now(store)).head) == said


async def test_a_repetition_of_what_was_answered_long_ago_stays_there(store: Store) -> None:
    talk = Talk(store=store)
    base = (await talk.say("start", "ok")).head
    first = await talk.say("b", "1", base=base)
    after = await talk.say("after", "yes")
    asked = body("user", "b")
    again = await append(talk, asked, base=base, created_at=900_000)
    settled = await talk.settle(
        again, asked, base=base, replies=(body("assistant", "2"),), at_head=False, kind="append", moves_head=False
    )
    assert (settled.nodes, settled.head) == (first.nodes, after.head)
    assert await talk.texts(settled.replies[0]) == ["start", "ok", "b", "2"]


@pytest.mark.parametrize("at", [30_000, 700_000])
async def test_a_retry_that_comes_late_leaves_the_head_with_what_came_after(store: Store, at: int) -> None:
    talk = Talk(store=store)
    base = (await talk.say("start", "ok")).head
    asked = body("user", "b")
    first = await talk.settle(
        await talk.begin(asked, base=base, digest="d"), asked, base=base, replies=(body("assistant", "1"),)
    )
    again = await talk.begin(asked, base=base, digest="d", created_at=at)  # it was told where to go
    other = body("user", "x")
    exchange = await talk.begin(other, base=first.head, created_at=at + 1)
    after = await talk.settle(exchange, other, base=first.head, replies=(body("assistant", "yes"),), settled_at=at + 2)
    late = await talk.settle(
        again, asked, base=base, at_head=False, replies=(body("assistant", "2"),), settled_at=at + 3
    )
    session = await store.session("tenant", "session")
    assert session is not None
    assert session.head == after.head
    assert late.nodes == first.nodes
