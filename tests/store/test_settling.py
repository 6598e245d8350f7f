from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import Executable
from sqlalchemy import text as sql_text

from proxy.conversation import ROOT, body_id, content_hash, names_under, node_id
from proxy.errors import StoreUnavailable
from proxy.store import exchanges as settling
from proxy.store.database import Parameters, Rows, SqlDialect, StoreConnection
from proxy.store.exchanges import interrupt_pending, write_exchanges
from proxy.store.records import Body, Reply, SessionRow, Settled, Source, Status
from proxy.store.store import Store
from proxy.trimming import Change, Cut
from tests.support.asides import HIDDEN, reply
from tests.support.stores import another_process
from tests.support.talk import Talk, body, message, settlement

pytestmark = pytest.mark.anyio


def cut(position: int, *changes: Change, policy: str = "default", version: str = "v1") -> Cut:
    return Cut(position=position, policy=policy, version=version, changes=changes, tokens=50, messages=3, tool_calls=1)


async def test_a_reply_makes_nodes_and_moves_the_head(store: Store) -> None:
    talk = Talk(store=store)
    asked = [body("user", "what?", 4), body("tool", "42", 6, tool_call_id="c", agent="digger")]
    stub = message("tool", "[cut]")
    change = Change(
        position=1, edit="truncate_tool_output", reason="too long", message=stub, tokens_before=6, tokens_after=2
    )
    exchange = await talk.begin(*asked, kind="first", instructions=(message("system", "x"),))
    settled = await talk.settle(
        exchange,
        *asked,
        replies=(body("assistant", "42.", 3),),
        kind="first",
        agent="writer",
        arrivals=((), (change,)),
        settled_at=2_345,
    )
    names = names_under(ROOT, map(content_hash, [asked[0].message, asked[1].message, message("assistant", "42.")]))
    assert settled == Settled(head=names[2], nodes=(names[0], names[1]), replies=(names[2],), are_new=True)
    user, tool, reply = await store.path(talk.key, settled.head)
    assert [row.node for row in (user, tool, reply)] == names
    assert [row.parent for row in (user, tool, reply)] == [ROOT, *names[:2]]
    assert [(row.depth, row.round, row.tokens, row.tokens_total) for row in (user, tool, reply)] == [
        (1, 1, 4, 4),
        (2, 1, 6, 10),
        (3, 1, 3, 13),
    ]
    assert [row.source for row in (user, tool, reply)] == [Source.CLIENT, Source.CLIENT, Source.UPSTREAM]
    assert [row.agent for row in (user, tool, reply)] == ["writer", "digger", "writer"]
    assert [row.policy for row in (user, tool, reply)] == ["v1", "v1", None]
    assert [row.arrival for row in (user, tool, reply)] == [(), (change,), None]
    assert {row.exchange for row in (user, tool, reply)} == {exchange}
    assert {row.created_at for row in (user, tool, reply)} == {2_345}
    assert [row.message for row in (user, tool)] == [one.message for one in asked]

    session = await store.session("tenant", "session")
    assert session is not None
    assert (session.head, session.arrival, session.updated_at) == (names[2], "first", 2_345)
    assert (session.messages, session.rounds, session.tokens) == (3, 1, 13)
    assert (session.requests, session.tokens_sent, session.tokens_saved) == (1, 60, 40)
    assert session.instructions is not None

    row = await store.exchange(exchange)
    assert row is not None
    assert (row.status, row.settled_at, row.nodes, row.replies) == (
        Status.COMPLETE,
        2_345,
        settled.nodes,
        settled.replies,
    )
    assert (row.tokens_before, row.tokens_sent, row.receipt) == (100, 60, {"finish_reasons": ["stop"]})


async def test_the_sums_go_on_from_request_to_request(store: Store) -> None:
    talk = Talk(store=store)
    await talk.say("one", "1")
    await talk.say("two", "2")
    settled = await talk.say("three", "3", tokens_before=10, tokens_sent=10)
    session = await store.session("tenant", "session")
    assert session is not None
    assert (session.messages, session.rounds, session.tokens) == (6, 3, 30)
    assert (session.requests, session.tokens_sent, session.tokens_saved) == (3, 130, 80)
    assert await talk.texts(settled.head) == ["one", "1", "two", "2", "three", "3"]


async def test_without_a_reply_the_exchange_alone_is_settled(store: Store) -> None:
    talk = Talk(store=store)
    before = await talk.say("one", "1")
    asked = body("user", "two")
    exchange = await talk.begin(asked, instructions=(message("system", "new"),))
    failed = await talk.settle(exchange, asked, status=Status.FAILED, receipt={"error": "boom"}, settled_at=9_000)
    assert failed == Settled(head=before.head, nodes=(), replies=())
    session = await store.session("tenant", "session")
    assert session is not None
    assert (session.head, session.requests, session.updated_at) == (before.head, 1, 9_000)
    assert session.instructions is None
    row = await store.exchange(exchange)
    assert row is not None
    assert (row.status, row.receipt, row.nodes) == (Status.FAILED, {"error": "boom"}, ())
    assert [branch.head for branch in await store.branches(talk.key)] == [before.head]


async def test_a_retry_after_a_failure_makes_nothing_twice(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "two")
    first = await talk.begin(asked)
    await talk.settle(first, asked, status=Status.FAILED)
    again = await talk.begin(asked)
    settled = await talk.settle(again, asked, replies=(body("assistant", "2"),))
    assert await talk.texts(settled.head) == ["two", "2"]
    assert len(await store.branches(talk.key)) == 1


async def test_settling_twice_is_settling_once(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "one")
    exchange = await talk.begin(asked)
    first = await talk.settle(exchange, asked, replies=(body("assistant", "1"),))
    session, row = await store.session("tenant", "session"), await store.exchange(exchange)
    again = await talk.settle(exchange, asked, replies=(body("assistant", "other"),), settled_at=9_999)
    assert again == replace(first, are_new=False)
    assert await store.session("tenant", "session") == session
    assert await store.exchange(exchange) == row


async def test_an_exchange_taken_for_interrupted_is_settled_by_its_live_worker(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "one")
    exchange = await talk.begin(asked)
    assert await store.interrupt_pending(1_500) == 1
    settled = await talk.settle(exchange, asked, replies=(body("assistant", "1"),))
    row = await store.exchange(exchange)
    assert row is not None
    assert (row.status, row.replies) == (Status.COMPLETE, settled.replies)


async def test_a_settlement_beats_who_takes_its_exchange_for_interrupted_at_that_moment(
    store: Store, store_url: str
) -> None:
    talk = Talk(store=store)
    asked = body("user", "one")
    exchange = await talk.begin(asked)
    with another_process(store_url) as other:  # it has not committed when the exchange is settled
        assert interrupt_pending(other, 1_500) == 1
        answer = talk.settle(exchange, asked, replies=(body("assistant", "1"),))
        ending = asyncio.get_running_loop().create_task(answer)
        await asyncio.wait([ending], timeout=0.2)
    settled, row = await ending, await store.exchange(exchange)
    assert row is not None
    assert (row.status, row.replies) == (Status.COMPLETE, settled.replies)


async def test_what_was_deleted_meanwhile_does_not_come_back(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "one")
    exchange = await talk.begin(asked)
    assert await store.delete(talk.key)
    assert await talk.settle(exchange, asked, replies=(body("assistant", "1"),)) == Settled(
        head=ROOT, nodes=(), replies=()
    )
    assert await store.session("tenant", "session") is None
    await talk.say("anew", "yes")  # the same id, used again: the old exchange stays away
    assert await talk.settle(exchange, asked, replies=(body("assistant", "1"),)) == Settled(
        head=ROOT, nodes=(), replies=()
    )
    assert len(await store.branches(talk.key)) == 1


async def test_several_replies_stand_side_by_side_and_the_head_takes_the_first(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "one")
    exchange = await talk.begin(asked)
    replies = (body("assistant", "a"), body("assistant", "b"), body("assistant", "a"))
    settled = await talk.settle(exchange, asked, replies=replies)
    assert settled.replies == (settled.head, node_id(settled.nodes[0], replies[1].message), settled.head)
    assert {branch.head for branch in await store.branches(talk.key)} == set(settled.replies)
    assert {branch.depth for branch in await store.branches(talk.key)} == {2}


async def test_a_rewind_is_a_branch_that_shares_what_lies_before(store: Store) -> None:
    talk = Talk(store=store)
    first = await talk.say("one", "1")
    old = await talk.say("two", "2")
    new = await talk.say("zwei", "2", base=first.head, at_head=False, kind="rewind")
    assert await talk.texts(old.head) == ["one", "1", "two", "2"]
    assert await talk.texts(new.head) == ["one", "1", "zwei", "2"]
    assert {branch.head for branch in await store.branches(talk.key)} == {old.head, new.head}
    session = await store.session("tenant", "session")
    assert session is not None
    assert (session.head, session.messages, session.arrival) == (new.head, 4, "rewind")


async def test_a_request_beside_the_conversation_leaves_it_as_it_is(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "one")
    exchange = await talk.begin(asked, instructions=(message("system", "ours"),))
    head = (await talk.settle(exchange, asked, replies=(body("assistant", "1"),), kind="resend")).head
    before = await store.session("tenant", "session")
    title = body("user", "give it a title")
    exchange = await talk.begin(title, instructions=(message("system", "titles"),))
    settled = await talk.settle(
        exchange, title, replies=(body("assistant", "A title"),), kind="side", at_head=False, moves_head=False
    )
    assert settled.head == head
    assert await talk.texts(settled.replies[0]) == ["give it a title", "A title"]
    after = await store.session("tenant", "session")
    assert before is not None
    assert after is not None
    assert (after.head, after.arrival, after.messages) == (head, "resend", before.messages)
    assert after.instructions == before.instructions
    assert after.requests == 2


async def test_the_newest_instructions_replace_older_ones_and_absent_ones_do_not(store: Store) -> None:
    talk = Talk(store=store)
    for text in ("old", "new", None):
        leading = None if text is None else (message("system", text), message("developer", text))
        exchange = await talk.begin(body("user", "x"), instructions=leading)
        await talk.settle(exchange, body("user", "x"), replies=(body("assistant", "y"),))
    newest = await store.instructions(talk.key)
    assert newest is not None
    assert newest.messages == (message("system", "new"), message("developer", "new"))
    assert await store.instructions(talk.key, newest.version) == newest


async def test_appends_at_once_all_become_nodes_under_one_another(store: Store) -> None:
    talk = Talk(store=store)
    asked = [body("user", f"q{number}") for number in range(50)]
    exchanges = await asyncio.gather(*(talk.begin(one) for one in asked))
    settled = await asyncio.gather(
        *(
            talk.settle(exchange, one, replies=(body("assistant", f"a{number}"),))
            for number, (exchange, one) in enumerate(zip(exchanges, asked, strict=True))
        )
    )
    session = await store.session("tenant", "session")
    assert session is not None
    assert (session.messages, session.rounds, session.tokens, session.requests) == (100, 50, 500, 50)
    texts = await talk.texts(session.head)
    assert {(texts[n], texts[n + 1]) for n in range(0, 100, 2)} == {(f"q{n}", f"a{n}") for n in range(50)}
    assert {one.replies[0] for one in settled} <= {row.node for row in await store.path(talk.key, session.head)}
    assert len(await store.branches(talk.key)) == 1


async def test_the_same_request_at_once_is_one_branch(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "one")
    exchanges = [await talk.begin(asked, base=ROOT) for _ in range(10)]
    reply = (body("assistant", "1"),)
    settled = await asyncio.gather(*(talk.settle(one, asked, replies=reply, at_head=False) for one in exchanges))
    assert len({(one.head, one.nodes, one.replies) for one in settled}) == 1
    assert [one.are_new for one in settled].count(True) == 1
    assert len(await store.path(talk.key, settled[0].head)) == 2
    assert len(await store.branches(talk.key)) == 1


async def test_a_cut_is_kept_at_the_last_message_of_its_request(store: Store) -> None:
    talk = Talk(store=store)
    made = cut(1, Change(position=0, edit="drop_oldest", reason="old", message=None, tokens_before=5, tokens_after=0))
    asked = body("user", "one")
    exchange = await talk.begin(asked)
    settled = await talk.settle(exchange, asked, replies=(body("assistant", "1"),), cut=made, agent="writer")
    assert await store.cut_at(talk.key, settled.nodes[0], "default", "writer") == made
    row = await store.exchange(exchange)
    assert row is not None
    assert row.cut_node == settled.nodes[0]


async def test_a_cut_of_a_request_without_new_messages_is_kept_at_its_base(store: Store) -> None:
    talk = Talk(store=store)
    base = (await talk.say("one", "1")).nodes[0]
    exchange = await talk.begin(base=base)
    await talk.settle(exchange, replies=(body("assistant", "I"),), base=base, at_head=False, cut=cut(1))
    assert await store.cut_at(talk.key, base, "default", None) == cut(1)


async def test_an_append_whose_head_moved_meanwhile_keeps_no_cut(store: Store) -> None:
    talk = Talk(store=store)
    base = (await talk.say("one", "1")).head
    asked = body("user", "three")
    exchange = await talk.begin(asked, base=base)
    await talk.say("two", "2")
    settled = await talk.settle(exchange, asked, replies=(body("assistant", "3"),), base=base, cut=cut(3))
    assert await talk.texts(settled.head) == ["one", "1", "two", "2", "three", "3"]
    names = [row.node for row in await store.path(talk.key, settled.head)]
    assert await store.cut(talk.key, names, "default", None) is None
    row = await store.exchange(exchange)
    assert row is not None
    assert row.cut_node is None


async def test_a_change_of_arrival_is_read_at_the_place_where_the_message_came_to_stand(store: Store) -> None:
    talk = Talk(store=store)
    base = (await talk.say("one", "1")).head
    asked = body("tool", "long", tool_call_id="c")
    change = Change(
        position=2,
        edit="truncate_tool_output",
        reason="long",
        message=message("tool", "l"),
        tokens_before=5,
        tokens_after=1,
    )
    exchange = await talk.begin(asked, base=base)
    await talk.say("two", "2")
    settled = await talk.settle(exchange, asked, replies=(body("assistant", "3"),), base=base, arrivals=((change,),))
    row = (await store.path(talk.key, settled.nodes[0]))[-1]
    assert row.depth == 5
    assert row.arrival == (
        Change(
            position=4, edit=change.edit, reason=change.reason, message=change.message, tokens_before=5, tokens_after=1
        ),
    )


async def test_where_nothing_was_decided_nothing_is_recorded(store: Store) -> None:
    talk = Talk(store=store)
    settled = await talk.say("one", "1", arrivals=(), policy_version="")
    row = (await store.path(talk.key, settled.nodes[0]))[0]
    assert (row.arrival, row.policy) == (None, None)


async def test_a_reply_that_broke_off_is_marked(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "one")
    exchange = await talk.begin(asked)
    plain = settlement(exchange, asked, replies=(body("assistant", "unfini"),), status=Status.PARTIAL)
    settled = await store.settle(replace(plain, replies=(replace(plain.replies[0], partial=True),)))
    row = await store.exchange(exchange)
    assert row is not None
    assert row.status is Status.PARTIAL
    assert [node.partial for node in await store.path(talk.key, settled.head)] == [False, True]


async def test_an_agent_that_cannot_be_stored_does_not_lose_the_reply(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "one", agent="a\x00b")
    exchange = await talk.begin(asked)
    settled = await talk.settle(exchange, asked, replies=(body("assistant", "1"),))
    assert (await store.path(talk.key, settled.head))[0].agent == "a\ufffdb"


async def test_what_fails_half_way_leaves_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Talk(store=store)
    before = await talk.say("one", "1")
    asked = body("user", "two")
    exchange = await talk.begin(asked)
    session, row = await store.session("tenant", "session"), await store.exchange(exchange)

    monkeypatch.setattr(settling, "_MOVE", sql_text("SELECT 1 FROM nowhere"))  # the last statement
    monkeypatch.setattr("proxy.store.functions.SETTLE", "SELECT 1 FROM nowhere")
    with pytest.raises(StoreUnavailable):
        await talk.settle(exchange, asked, replies=(body("assistant", "2"),), cut=cut(2), base=before.head)
    assert await store.circuit.closes(10)
    assert await store.session("tenant", "session") == session
    assert await store.exchange(exchange) == row
    assert [branch.head for branch in await store.branches(talk.key)] == [before.head]
    monkeypatch.undo()
    settled = await talk.settle(exchange, asked, replies=(body("assistant", "2"),))
    assert await talk.texts(settled.head) == ["one", "1", "two", "2"]


async def test_a_log_that_was_deleted_before_the_opening_fails_the_exchange_and_leaves_none_pending(
    store: Store,
) -> None:
    talk = Talk(store=store)
    base = (await talk.say("one", "1")).head
    assert await store.delete(talk.key)
    anew = await talk.say("other", "o")
    asked = body("user", "two")
    exchange = await talk.begin(asked, base=base)
    settled = await talk.settle(
        exchange,
        asked,
        replies=(body("assistant", "2"),),
        base=base,
        at_head=False,
        cut=cut(2),
        settled_at=9_000,
        receipt={"usage": {"total_tokens": 7}, "error": None},
    )
    assert settled == Settled(head=anew.head, nodes=(), replies=())
    row = await store.exchange(exchange)
    assert row is not None
    assert (row.status, row.settled_at, row.nodes, row.replies) == (Status.FAILED, 9_000, (), ())
    assert (row.base, row.cut_node, row.receipt["usage"]) == (base, None, {"total_tokens": 7})
    assert "deleted" in row.receipt["error"]
    assert [branch.head for branch in await store.branches(talk.key)] == [anew.head]
    assert await store.body(talk.key, body_id(message("assistant", "2").raw)) is None
    assert await store.interrupt_pending(10_000) == 0


# ---------------------------------------------------------------------- answered from the store


def finishing(*numbers: str) -> Body:
    calls = [
        {"id": number, "type": "function", "function": {"name": f"finish_{number}", "arguments": "{}"}}
        for number in numbers
    ]
    return body("assistant", "", tool_calls=calls)


def result(number: str, text: str = "done") -> Body:
    return body("tool", text, tool_call_id=number)


async def finish(talk: Talk, *messages: Body, **changes: Any) -> Settled:
    """Answer a request with a reply that is already stored."""
    base = changes.get("base")
    exchange = await talk.begin(*messages, **({} if base is None else {"base": base}))
    said = {"finished": True, "status": Status.COMPLETE, "tokens_before": 0, "tokens_sent": 0}
    return await talk.settle(exchange, *messages, **(said | changes))


async def row_of(talk: Talk) -> SessionRow:
    row = await talk.store.session(talk.tenant, talk.session)
    assert row is not None
    return row


async def test_messages_that_a_stored_reply_answers_become_nodes_and_the_head_follows(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "do it")
    before = await talk.settle(await talk.begin(asked), asked, replies=(finishing("a"),))
    settled = await finish(talk, result("a"), settled_at=4_000)
    assert (settled.replies, settled.nodes) == ((), (settled.head,))
    assert await talk.texts(settled.head) == ["do it", "", "done"]
    row = await row_of(talk)
    assert (row.head, row.messages, row.rounds, row.tokens) == (settled.head, 3, 1, 15)
    assert (row.requests, row.tokens_sent, row.updated_at) == (2, 60, 4_000)
    assert row.calls == ("finish_a",)  # that is still the newest reply, and nothing was asked since
    exchange = await store.exchange(talk.exchanges[-1])
    assert exchange is not None
    assert (exchange.status, exchange.base, exchange.nodes, exchange.replies, exchange.cut_node) == (
        Status.COMPLETE,
        before.head,
        settled.nodes,
        (),
        None,
    )
    again = await talk.settle(talk.exchanges[-1], result("a"), finished=True, status=Status.COMPLETE)
    assert again == settled
    assert (await row_of(talk)).requests == 2


async def test_the_same_result_sent_again_is_stored_once(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "do it")
    await talk.settle(await talk.begin(asked), asked, replies=(finishing("a", "b"),))
    first = await finish(talk, result("a"))
    second = await finish(talk, result("b"))
    # Planned behind the results that are there, as results that come one by one are.
    for repeated in (result("a"), result("b")):
        assert (await finish(talk, repeated)).head == second.head
    both = await finish(talk, result("a"), result("b"))
    assert both.nodes == (*first.nodes, *second.nodes)
    mixed = await finish(talk, result("b"), result("a", "anew"))
    assert mixed.nodes[0] == second.head
    assert await talk.texts(mixed.head) == ["do it", "", "done", "done", "anew"]
    assert [branch.head for branch in await store.branches(talk.key)] == [mixed.head]


async def test_a_history_that_is_sent_again_makes_nothing(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "do it")
    before = await talk.settle(await talk.begin(asked), asked, replies=(finishing("a"),), kind="resend")
    settled = await finish(talk, base=before.head, at_head=False)
    assert settled == Settled(head=before.head, nodes=(), replies=())
    row = await row_of(talk)
    assert (row.head, row.messages, row.calls) == (before.head, 2, ("finish_a",))


async def test_a_resend_that_goes_back_to_the_finished_task_takes_the_head_along(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "do it")
    before = await talk.settle(await talk.begin(asked), asked, replies=(finishing("a"),))
    later = await talk.say("and then?", "this")
    assert (await row_of(talk)).calls == ()
    aside = await finish(talk, base=before.head, at_head=False, moves_head=False)
    assert aside.head == later.head
    settled = await finish(talk, base=before.head, at_head=False)
    row = await row_of(talk)
    assert (settled.head, row.head, row.messages, row.calls) == (before.head, before.head, 2, ("finish_a",))
    same = (result("a", "equal"), result("b", "equal"), result("a", "equal"))
    grown = await finish(talk, *same, base=before.head, at_head=False)
    assert await talk.texts(grown.head) == ["do it", "", "equal", "equal", "equal"]
    assert len(set(grown.nodes)) == 3


async def test_a_late_result_leaves_the_head_where_the_session_went_on(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "do it")
    before = await talk.settle(await talk.begin(asked), asked, replies=(finishing("a"),))
    later = await talk.say("and then?", "this", at_head=False, base=before.head)
    settled = await finish(talk, result("a"))
    assert settled.head == later.head
    assert await talk.texts(settled.nodes[0]) == ["do it", "", "done"]
    assert (await row_of(talk)).calls == ()


async def test_what_a_stored_reply_answers_without_being_a_result_goes_where_it_was_planned(store: Store) -> None:
    talk = Talk(store=store)
    first = await talk.say("one", "1")
    last = await talk.say("two", "2")
    planned = await finish(talk, body("user", "odd"), base=first.head, at_head=False, kind="append")
    assert planned.head == last.head
    assert await talk.texts(planned.nodes[0]) == ["one", "1", "odd"]
    at_head = await finish(talk, body("user", "odd"))
    assert await talk.texts(at_head.head) == ["one", "1", "two", "2", "odd"]


async def test_a_reply_that_comes_late_is_added_once(store: Store) -> None:
    """Its messages are nodes already. The head moves unless the session has continued or there is no reply."""
    talk = Talk(store=store)
    await talk.say("one", "1")
    for goes_on, replies in ((False, ("2",)), (True, ("2",)), (False, ())):
        asked = body("user", f"{goes_on} {replies}")
        exchange = await talk.begin(asked)
        told = {"receipt": {"response_id": exchange}}
        waiting = await talk.settle(exchange, asked, finished=True, status=Status.COMPLETE, **told)
        await store.keep_provider_ids(talk.tenant, talk.session, "chat", [exchange], "")
        for tenant, name in ((talk.tenant, "resp_of_others"), ("other", exchange)):
            assert await store.unfinished(tenant, "chat", name) is None
        row = await store.unfinished(talk.tenant, "chat", exchange)
        assert row is not None
        assert row.id == exchange
        if goes_on:
            await talk.say("and", "3")
        before = await row_of(talk)
        late = settlement(exchange, replies=tuple([body("assistant", text) for text in replies]), late=True)
        late = replace(late, session=talk.session, base=row.nodes[-1], receipt={"usage": {}}, cost=0.5)
        first, second = await asyncio.gather(store.settle(late), store.settle(late))
        assert first.replies == second.replies
        now, exchange_row = await row_of(talk), await store.exchange(exchange)
        assert exchange_row is not None
        assert (exchange_row.nodes, exchange_row.base) == (waiting.nodes, row.base)
        assert (exchange_row.status, exchange_row.replies) == (late.status, first.replies)
        assert now.head == (before.head if goes_on or not replies else first.replies[0])
        assert (now.requests, now.cost) == (before.requests, (before.cost or 0) + 0.5)
        assert [await talk.texts(node) for node in first.replies] == [
            [*await talk.texts(waiting.head), text] for text in replies
        ]
        assert await store.unfinished(talk.tenant, "chat", exchange) is None


async def test_a_base_that_is_gone_fails_it(store: Store) -> None:
    talk = Talk(store=store)
    before = await talk.say("one", "1")
    settled = await finish(talk, result("a"), base="ab" * 20, at_head=False)
    assert settled == Settled(head=before.head, nodes=(), replies=())
    row = await store.exchange(talk.exchanges[-1])
    assert row is not None
    assert (row.status, row.nodes) == (Status.FAILED, ())


async def test_a_session_without_messages_stays_one(store: Store) -> None:
    talk = Talk(store=store)
    assert await finish(talk) == Settled(head=ROOT, nodes=(), replies=())
    row = await row_of(talk)
    assert (row.head, row.messages, row.calls) == (ROOT, 0, ())


# -------------------------------------------------------------------------------------- what it cost


async def test_costs_add_up_whatever_came_of_the_request(store: Store) -> None:
    talk = Talk(store=store)
    await talk.say("one", "1")
    assert (await row_of(talk)).cost is None
    await talk.say("two", "2", cost=0.5)
    asked = body("user", "three")
    await talk.settle(await talk.begin(asked), asked, status=Status.FAILED, cost=0.25)
    await talk.say("four", "4")
    assert (await row_of(talk)).cost == 0.75
    await finish(talk, cost=0.0)
    assert (await row_of(talk)).cost == 0.75
    await talk.settle(talk.exchanges[0], cost=9.0)  # it is settled already
    assert (await row_of(talk)).cost == 0.75


# ---------------------------------------------------------------------------------- how many statements


class Counted:
    """A connection that records the statements executed on it."""

    def __init__(self, connection: StoreConnection) -> None:
        self._connection = connection
        self.statements: list[str] = []

    @property
    def dialect(self) -> SqlDialect:
        return self._connection.dialect

    def execute(self, statement: Executable, parameters: Parameters | None = None, /) -> Rows:
        self.statements.append(str(statement).split(maxsplit=1)[0])
        return self._connection.execute(statement, parameters)


async def statements(store: Store, unit: Callable[[StoreConnection], object]) -> list[str]:
    """Return the kinds of the statements that a unit executes."""

    def counting(connection: StoreConnection) -> list[str]:
        counted = Counted(connection)
        unit(counted)
        return counted.statements

    return await store._database.write(counting)


async def test_what_nobody_uses_costs_no_statement(store: Store) -> None:
    """Settling a turn without hidden rounds takes no more statements than before hidden rounds existed."""
    talk = Talk(store=store)
    await talk.say("one", "1")

    async def settled(*replies: Reply) -> list[str]:
        asked = body("user", "next")
        exchange = await talk.begin(asked)
        said = settlement(exchange, asked, status=Status.COMPLETE, base=talk.bases[exchange])
        return await statements(store, lambda connection: write_exchanges(connection, [replace(said, replies=replies)]))

    # Elsewhere the session is locked before the exchange is read, and then the nodes.
    plain = [
        *(["WITH"] if store._database.blocks else ["SELECT"] * 3),
        *["INSERT"] * 3,
        "DELETE",
        "UPDATE",
        *["INSERT"] * 2,  # sums of all exchanges, and of the session
    ]
    assert await settled(reply("2")) == plain
    assert len(await settled(reply("3", HIDDEN))) == len(plain) + 2
    assert await settled(reply("4")) == plain
