"""What the store returns when a request arrives."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from sqlalchemy import Executable

from proxy.conversation import ROOT, Kind, Manner, Mode
from proxy.dialects import Message
from proxy.errors import Conflict
from proxy.store import history
from proxy.store import store as module
from proxy.store.database import Parameters, Rows, StoreConnection
from proxy.store.history import Branches, recall
from proxy.store.records import Body, HistoryQuery, HistorySnapshot, Kept, Mark, Status, TooLong
from proxy.store.sqlite import _compiled, connect
from proxy.store.store import Store
from proxy.trimming import Change, Cut, Gap
from tests.support.asides import HIDDEN, RECIPE, failed, reply, say, settle, summary
from tests.support.recalling import ask, calling, cut_with, incoming, long_talk, result_of, said_with_calls, texts
from tests.support.stores import empty_store
from tests.support.talk import Talk, body, message

pytestmark = pytest.mark.anyio


def marks(*names: str) -> tuple[Mark, ...]:
    return tuple(
        Mark(node=name, depth=depth, body="body", tokens=3, arrival=None) for depth, name in enumerate(names, 1)
    )


def test_what_was_kept_is_known_as_far_as_the_names_agree() -> None:
    branches = Branches()
    branches.keep("s", 1, marks("a", "b", "c"))
    assert branches.beginning("s", ["a", "b", "c", "d"]) == (1, marks("a", "b", "c"))
    assert branches.beginning("s", ["a", "b"]) == (1, marks("a", "b"))
    assert branches.beginning("s", ["a", "x", "y"]) == (1, marks("a"))
    assert branches.beginning("s", []) == (1, ())


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_a_common_beginning_is_found_wherever_it_ends(kept: int, asked: int, common: int) -> None:
    branches = Branches()
    branches.keep("s", 1, marks(*(f"n{i}" for i in range(kept))))
    names = [f"n{i}" if i < common else f"x{i}" for i in range(asked)]
    assert len(branches.beginning("s", names)[1]) == min(kept, asked, common)


def test_a_session_made_again_is_another_one() -> None:
    branches = Branches()
    branches.keep("s", 1, marks("a"))
    assert branches.beginning("s", ["a"])[0] != 2
    assert branches.beginning("t", ["a"]) == (0, ())


def test_those_that_were_not_used_for_the_longest_go() -> None:
    branches = Branches(5)
    branches.keep("s", 1, marks("a", "b"))
    branches.keep("t", 1, marks("a", "b"))
    branches.keep("s", 1, marks("a", "b", "c"))
    branches.keep("u", 1, marks("a"))
    assert branches.beginning("t", ["a"]) == (0, ())
    assert branches.beginning("s", ["a", "b", "c"]) == (1, marks("a", "b", "c"))
    branches.keep("u", 1, marks(*"abcdef"))  # more than there is room for
    assert branches.beginning("u", ["a"]) == (1, marks("a"))


def test_what_is_remembered_of_all_sessions_is_bounded_early() -> None:
    branches = Branches()
    forty = marks(*(f"n{number}" for number in range(40)))
    for number in range(1_500):  # 30,000 exchanges: a process that served more takes no more memory
        branches.keep(f"s{number}", 1, forty)
    assert branches.beginning("s0", ["n0"]) == (0, ())
    assert branches.beginning("s500", ["n0"]) == (1, forty[:1])


def test_texts_that_are_sent_in_the_place_of_messages_take_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_MARK_BYTES", 100)
    branches, long = Branches(100), message("tool", "x" * 6_000, tool_call_id="c")
    change = Change(position=0, edit="compact", reason="long", message=long, tokens_before=9, tokens_after=4)
    for name in "stu":
        branches.keep(name, 1, (replace(marks("a")[0], arrival=(change,)),))
    assert [len(branches.beginning(name, ["a"])[1]) for name in "stu"] == [0, 0, 1]
    branches.keep("u", 1, marks("a"))
    branches.keep("s", 1, marks("a"))
    assert [len(branches.beginning(name, ["a"])[1]) for name in "su"] == [1, 1]


def test_a_branch_is_known_with_the_time_at_which_its_session_was_made() -> None:
    branches = Branches()
    assert branches.beginning("s", ["a"]) == (0, ())
    branches.keep("s", 7, marks("a", "b"))
    assert branches.beginning("s", ["a", "b", "c"]) == (7, marks("a", "b"))
    assert branches.beginning("s", ["x"]) == (7, ())


def test_a_branch_goes_on_where_it_ends_alone() -> None:
    branches = Branches()
    said = (("b", body("user", "two"), ()), ("c", body("assistant", "2"), None))
    branches.extend("s", "a", said)
    assert branches.beginning("s", ["a", "b", "c"]) == (0, ())
    branches.keep("s", 7, marks("a"))
    branches.extend("s", "x", said)
    assert branches.beginning("s", ["a", "b", "c"]) == (7, marks("a"))
    branches.extend("s", "a", said)
    assert [mark.node for mark in branches.beginning("s", ["a", "b", "c", "d"])[1]] == ["a", "b", "c"]


async def test_what_an_exchange_stored_is_known_as_it_would_be_read(store: Store) -> None:
    talk = Talk(store=store)
    first = await talk.say("one", "1", kind="resend")
    told = [message("user", "one"), message("assistant", "1"), message("user", "two")]
    await ask(talk, *told)  # what the first exchange stored is read, and remembered
    change = Change(position=2, edit="keep_first", reason="long", message=told[0], tokens_before=9, tokens_after=4)
    asked, answer = body("user", "two", tokens=9), body("assistant", "2", tokens=7)
    exchange = await talk.begin(asked, base=first.head)
    how: dict[str, Any] = {"at_head": False, "base": first.head, "arrivals": ((change,),)}
    await talk.settle(exchange, asked, replies=(answer,), **how)

    told += [message("assistant", "2"), message("user", "three")]
    names = incoming(told).names
    _, known = store._branches.beginning(talk.key, names)
    assert len(known) == 4
    assert (await ask(talk, *told)).marks == known
    assert await marks_read(store, told) == known


async def marks_read(store: Store, told: list[Message]) -> Sequence[Mark]:
    """Return the marks of messages as read from the database, without the cache."""
    question = HistoryQuery(
        tenant="tenant", session="session", incoming=incoming(told), messages=told, policy=None, agent=None
    )
    return (await store._database.read(partial(recall, question=question, branches=Branches()))).marks


async def begun(talk: Talk) -> tuple[list[Message], dict[str, Any]]:
    """Begin a conversation whose first exchange is cached; return it, and how to settle the next one."""
    first = await talk.say("one", "1", kind="resend")
    told = [message("user", "one"), message("assistant", "1"), message("user", "two")]
    await ask(talk, *told)
    return told, {"at_head": False, "base": first.head}


async def test_where_nothing_is_decided_on_arrival_it_is_known_all_the_same(store: Store) -> None:
    talk, asked = Talk(store=store), body("user", "two")
    told, how = await begun(talk)
    exchange = await talk.begin(asked, base=how["base"])
    await talk.settle(exchange, asked, replies=(body("assistant", "2"),), arrivals=(), **how)

    told += [message("assistant", "2"), message("user", "three")]
    _, known = store._branches.beginning(talk.key, incoming(told).names)
    assert len(known) == 4
    assert await marks_read(store, told) == known


async def test_what_was_stored_before_is_not_known_in_another_form(store: Store) -> None:
    talk, asked, otherwise = Talk(store=store), body("user", "two"), body("user", "two", tokens=9)
    told, how = await begun(talk)
    exchanges = [await talk.begin(each, base=how["base"]) for each in (asked, otherwise)]
    other = await Store.open(store._url)  # the same question at once, at another worker
    there = Talk(store=other, bases=talk.bases)
    settled = await there.settle(exchanges[0], asked, replies=(body("assistant", "2"),), **how)
    await other.close()
    await talk.settle(exchanges[1], otherwise, replies=(body("assistant", "two"),), **how)
    told += [message("assistant", "2"), message("user", "three")]
    assert (await ask(talk, *told[:4])).marks == await marks_read(store, told[:4])

    how = {"at_head": False, "base": settled.nodes[0]}
    await ask(talk, *told[:3])
    exchange = await talk.begin(base=how["base"])  # asked for once more, and said in the same words
    await talk.settle(exchange, replies=(body("assistant", " 2 ", tokens=7),), **how)
    assert (await ask(talk, *told)).marks == await marks_read(store, told)


async def test_nothing_is_known_of_what_was_never_asked(store: Store) -> None:
    found = await ask(Talk(store=store), message("user", "hi"))
    assert found == HistorySnapshot(arrival=found.arrival)
    assert found.arrival.kind is Kind.FIRST


class Late:
    """A connection on which the first look-up does not find the session, and later ones do."""

    def __init__(self, connection: StoreConnection) -> None:
        self._connection = connection
        self._looked = False
        self.dialect = connection.dialect

    def execute(self, statement: Executable, parameters: Parameters | None = None, /) -> Rows:
        if not self._looked:
            self._looked, parameters = True, {"key": "not there"}
        return self._connection.execute(statement, parameters)


async def test_a_session_that_another_worker_begins_just_now_is_a_new_one(store: Store) -> None:
    talk = Talk(store=store)
    await talk.say("one", "1")
    question = HistoryQuery(
        tenant="tenant",
        session="session",
        incoming=incoming([message("user", "one")]),
        messages=(message("user", "one"),),
        policy=None,
        agent=None,
    )
    unit = partial(recall, question=question, branches=Branches())
    assert (await store._database.read(unit)).arrival.kind is not Kind.FIRST
    found = await store._database.read(lambda connection: unit(Late(connection)))
    assert (found.arrival.kind, found.arrival.known, found.marks) == (Kind.FIRST, 0, ())


async def test_it_is_known_when_the_session_was_used_last(store: Store) -> None:
    talk = Talk(store=store)
    await talk.say("one", "1", settled_at=7_000)
    told = [message("user", "one"), message("assistant", "1"), message("user", "two")]
    for asked in (told[2:], told, [message("user", "other"), message("assistant", "x"), told[2]]):
        assert (await ask(talk, *asked)).updated_at == 7_000


async def test_a_resend_reads_what_was_noted_about_its_messages(store: Store) -> None:
    talk = Talk(store=store)
    settled = await talk.say("one", "1")
    found = await ask(talk, message("user", "one"), message("assistant", "1"), message("user", "two"))
    assert (found.arrival.kind, found.arrival.base, found.arrival.known) == (Kind.RESEND, settled.head, 2)
    assert [mark.node for mark in found.marks] == [*settled.nodes, *settled.replies]
    assert [(mark.depth, mark.tokens) for mark in found.marks] == [(1, 5), (2, 5)]
    assert (found.start, found.depth) == (0, 2)


async def test_a_window_is_found_by_what_its_first_message_says(store: Store) -> None:
    talk = Talk(store=store)
    for number in range(5):
        await talk.say(f"q{number}", f"a{number}", kind="resend")
    seen = [message(role, f"{role[0].replace('u', 'q')}{n}") for n in (3, 4) for role in ("user", "assistant")]
    found = await ask(talk, *seen, message("user", "q5"))
    assert found.arrival.kind is Kind.WINDOWED
    assert [mark.depth for mark in found.marks] == [7, 8, 9, 10]
    assert (found.start, found.depth) == (6, 10)
    assert found.marks[-1].node == found.arrival.base


async def test_a_window_is_found_where_its_first_message_stands_a_hundred_times(store: Store) -> None:
    talk = Talk(store=store)
    for number in range(100):
        await talk.say("go on", f"a{number}", kind="resend")
    seen = [message("user", "go on"), message("assistant", "a98"), message("user", "go on")]
    found = await ask(talk, *seen, message("assistant", "a99"), message("user", "go on"))
    # Its very beginning is the session's, too: what is recognised first counts.
    assert found.arrival.kind is Kind.REWIND
    seen = [message("assistant", "a97"), *seen]
    found = await ask(talk, *seen, message("assistant", "a99"), message("user", "go on"))
    assert (found.arrival.kind, found.start, found.depth) == (Kind.WINDOWED, 195, 200)


async def test_a_foreign_history_knows_nothing_of_the_session(store: Store) -> None:
    talk = Talk(store=store)
    await talk.say("one", "1")
    found = await ask(talk, message("user", "x"), message("assistant", "y"), message("user", "z"))
    assert found.arrival.kind is Kind.FOREIGN
    assert (found.marks, found.rows, found.cut, found.depth) == ((), (), None, 0)


async def test_a_request_in_another_manner_stands_aside(store: Store) -> None:
    talk = Talk(store=store)
    system = (message("system", "S"),)
    asked = body("user", "one")
    exchange = await talk.begin(asked, instructions=system, tools=b"[{}]", model="big")
    await talk.settle(exchange, asked, replies=(body("assistant", "1"),))
    title = Manner(instructions="other", tools=None, model="small")
    assert (await ask(talk, message("user", "title?"), manner=title)).arrival.kind is Kind.SIDE
    usual = Manner(instructions=None, tools=None, model="big")
    assert (await ask(talk, message("user", "two"), manner=usual)).arrival.kind is Kind.APPEND


async def test_a_summary_of_what_is_carried_along_is_not_used(store: Store) -> None:
    talk = Talk(store=store)
    called = await said_with_calls(talk, "c1")
    other = await talk.say("other", "2")
    before = summary("before", called.nodes[0], 1)
    await store.keep_summary(talk.key, before)
    for name, node, until in (("block", called.head, 2), ("since", other.head, 4)):
        await store.keep_summary(talk.key, summary(name, node, until))
    assert (await ask(talk, message("user", "x"))).ready_summary == summary("since", other.head, 4)
    assert (await ask(talk, result_of("c1"))).ready_summary == before


# ------------------------------------------------------------------------------------- retries


async def _asked(talk: Talk, what: str, **changes: Any) -> str:
    asked = body("user", what)
    digest = incoming([asked.message]).digest
    return await talk.begin(asked, digest=digest, **changes)


async def _answered(talk: Talk, what: str, answer: str, at: int, **changes: Any) -> None:
    exchange = await _asked(talk, what, created_at=at, **changes)
    await talk.settle(exchange, body("user", what), replies=(body("assistant", answer),))


async def test_an_announced_retry_finds_its_request_behind_others(store: Store) -> None:
    talk = Talk(store=store)
    await _answered(talk, "one", "1", 1_000)
    await _answered(talk, "go", "2", 2_000)
    first = await store.session(talk.tenant, talk.session)
    await _answered(talk, "three", "3", 3_000)
    assert first is not None
    again = await ask(talk, message("user", "go"), retried=True)
    assert again.arrival.beside
    assert texts(again) == ["one", "1"]
    assert (await ask(talk, message("user", "go"))).arrival.at_head


async def test_a_repeated_key_announces_a_retry_of_just_that_request(store: Store) -> None:
    talk = Talk(store=store)
    await _answered(talk, "go", "1", 1_000, idempotency="k1")
    await _answered(talk, "go", "2", 2_000, idempotency="k2")
    assert texts(await ask(talk, message("user", "go"), idempotency="k2")) == ["go", "1"]
    assert texts(await ask(talk, message("user", "go"), idempotency="k1")) == []
    assert (await ask(talk, message("user", "go"), idempotency="k3")).arrival.at_head
    assert (await ask(talk, message("user", "other"), idempotency="k2")).arrival.at_head


async def test_the_last_request_is_repeated_without_a_word_if_it_has_no_whole_reply(store: Store) -> None:
    talk = Talk(store=store)
    await _answered(talk, "one", "1", 1_000)
    exchange = await _asked(talk, "two", created_at=2_000)
    # Both at once have one place.
    assert not (await ask(talk, message("user", "two"))).arrival.at_head
    await talk.settle(exchange, body("user", "two"), replies=(body("assistant", "ha"),), status=Status.PARTIAL)
    assert texts(await ask(talk, message("user", "two"))) == ["one", "1"]


@pytest.mark.parametrize(
    ("mode", "fields", "is_repeated"),
    [
        (Mode.AUTO, {}, True),
        (Mode.APPEND, {}, False),
        (Mode.AUTO, {"audio": {"id": "a", "transcript": "Seven."}}, False),
        (Mode.AUTO, {"images": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}, False),
        (Mode.AUTO, {"reasoning_content": "Hm."}, False),
    ],
    ids=["empty", "appended", "spoken", "drawn", "thought"],
)
async def test_a_request_is_repeated_without_a_word_if_its_reply_is_empty(
    store: Store, mode: Mode, fields: dict[str, Any], is_repeated: bool
) -> None:
    talk = Talk(store=store)
    exchange = await _asked(talk, "go on")
    await talk.settle(exchange, body("user", "go on"), replies=(body("assistant", "", **fields),))
    for more in ([], [message("user", "and on")]):
        found = await ask(talk, message("user", "go on"), *more, mode=mode)
        assert found.arrival.at_head is not is_repeated


@pytest.mark.parametrize("statement", [history._ASKED_THIS, history._ANSWERED_THERE, history._ASKED_BY_KEY])
def test_an_index_finds_the_request_that_is_repeated(tmp_path: Path, statement: Executable) -> None:
    file = tmp_path / "palimpsest.db"
    empty_store(file)
    with closing(connect(file)) as raw:
        asked = _compiled(statement, ()).text
        plan = raw.execute(f"EXPLAIN QUERY PLAN {asked}", [b""] * asked.count("?")).fetchall()
    steps = [step for *_, step in plan if step.partition(" ")[2].startswith("exchanges")]
    assert steps == ["SEARCH exchanges USING INDEX ix_exchanges_session_digest (session=? AND digest=?)"]


# ------------------------------------------------------------------------------------------- cuts


async def test_a_resend_finds_the_cut_of_its_branch(store: Store) -> None:
    talk = Talk(store=store)
    nodes = await long_talk(talk, 3)
    said = [message("user", "q0"), message("assistant", "a0"), message("user", "q1"), message("assistant", "a1")]
    end = [message("user", "last"), message("assistant", "end"), message("user", "new")]
    found = await ask(talk, *said, *end, policy="lean")
    assert found.arrival.kind is Kind.RESEND
    assert len(found.marks) == 6
    assert found.cut is not None
    assert found.cut.node == nodes[4]
    before = await ask(talk, *said, message("user", "edited"), policy="lean")
    assert (before.arrival.kind, before.cut) == (Kind.REWIND, None)


# ----------------------------------------------------------------------------- without a session's id


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("policy", [None, "lean"])
@pytest.mark.parametrize("most", [0, 1, 2, 3, 5])
async def test_a_long_reading_is_begun_here_and_done_elsewhere(
    store: Store, monkeypatch: pytest.MonkeyPatch, most: int, policy: str | None, cut: bool
) -> None:
    talk = Talk(store=store)
    await talk.say("one", "1")
    asked = body("user", "two")
    await talk.settle(
        await talk.begin(asked), asked, replies=(body("assistant", "2"),), cut=cut_with(2) if cut else None
    )
    await talk.say("three", "3")
    whole = await ask(talk, message("user", "more"), policy=policy)
    asked_for = list[bool]()
    read = store._database.read

    async def noting(unit: Any, *, short: bool = False) -> Any:
        asked_for.append(short)
        return await read(unit, short=short)

    monkeypatch.setattr(store._database, "read", noting)
    monkeypatch.setattr(module, "_FEW", most)
    assert await ask(talk, message("user", "more"), policy=policy) == whole
    if store._database.blocks:
        assert asked_for == ([True] if len(whole.rows) <= most else [True, False])
    else:
        assert asked_for == [True]  # at once: whatever it takes, it holds nothing up


async def test_what_is_stored_while_a_new_session_is_read_is_not_known(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Talk(store=store)
    await talk.say("one", "1")
    monkeypatch.setattr("proxy.store.sessions.standing_session", lambda *_, **__: None)  # it was looked for before that
    found = await ask(talk, message("user", "one"))
    assert (found.arrival.kind, found.arrival.known, found.marks) == ("first", 0, ())


async def test_more_than_is_allowed_is_not_read(store: Store) -> None:
    talk = Talk(store=store)
    await talk.say("one", "1")
    more = message("user", "more")
    question = HistoryQuery(
        tenant="tenant", session="session", incoming=incoming([more]), messages=[more], policy=None, agent=None
    )
    with pytest.raises(TooLong):
        await store._database.read(lambda connection: recall(connection, question, Branches(), most=1))
    found = await store._database.read(lambda connection: recall(connection, question, Branches(), most=2))
    assert texts(found) == ["one", "1"]


async def test_a_resend_reads_what_is_new_since_the_last_one(store: Store) -> None:
    talk = Talk(store=store)
    said: list[Message] = []
    for number in range(4):
        said += [message("user", f"q{number}"), message("assistant", f"a{number}")]
        await talk.say(f"q{number}", f"a{number}", kind="resend")
    branches = Branches()

    def asked(most: int, *more: Message) -> Any:
        messages = [*said, *more]
        question = HistoryQuery(
            tenant="tenant", session="session", incoming=incoming(messages), messages=messages, policy=None, agent=None
        )
        return store._database.read(lambda connection: recall(connection, question, branches, most=most))

    with pytest.raises(TooLong):
        await asked(7, message("user", "more"))
    first = await asked(8, message("user", "more"))
    assert await asked(0, message("user", "more")) == first
    await talk.say("q4", "a4", kind="resend")
    said += [message("user", "q4"), message("assistant", "a4")]
    with pytest.raises(TooLong):
        await asked(1, message("user", "more"))
    found = await asked(2, message("user", "more"))
    assert found.marks[:8] == first.marks
    assert [mark.depth for mark in found.marks] == list(range(1, 11))


async def test_a_session_that_was_made_again_is_not_taken_for_the_old_one(store: Store) -> None:
    talk = Talk(store=store)
    said = [message("user", "q"), message("assistant", "a")]
    for at, tokens in ((1_000, 5), (2_000, 7)):
        asked = body("user", "q", tokens)
        exchange = await talk.begin(asked, created_at=at)
        await talk.settle(exchange, asked, replies=(body("assistant", "a", tokens),), kind="resend")
        found = await ask(talk, *said, message("user", "more"))
        assert [mark.tokens for mark in found.marks] == [tokens, tokens]
        await store.delete(talk.key)


async def test_a_long_window_is_looked_for_elsewhere(store: Store) -> None:
    talk = Talk(store=store)
    for number in range(5):
        await talk.say(f"q{number}", f"a{number}", kind="resend")
    seen = [message("assistant", "a2"), message("user", "q3"), message("assistant", "a3")]
    question = HistoryQuery(
        tenant="tenant", session="session", incoming=incoming(seen), messages=seen, policy=None, agent=None
    )
    with pytest.raises(TooLong):
        await store._database.read(lambda connection: recall(connection, question, Branches(), most=2))
    found = await store._database.read(lambda connection: recall(connection, question, Branches(), most=3))
    assert found.arrival.kind is Kind.WINDOWED


# ------------------------------------------------------------------------------------- what is gone


# ---------------------------------------------------------------------- what stands beside the messages


async def test_what_was_hidden_of_a_reply_is_read_with_it(store: Store) -> None:
    talk = Talk(store=store)
    first = await say(talk, "one", reply("1", HIDDEN))
    await talk.say("two", "2")
    last = await say(talk, "three", reply("3", HIDDEN))
    both = {first.head: HIDDEN, last.head: HIDDEN}
    assert (await ask(talk, message("user", "more"))).hidden == both
    told = [message(*each) for each in (("user", "one"), ("assistant", "1"), ("user", "two"))]
    assert (await ask(talk, *told)).hidden == {first.head: HIDDEN}
    told += [message(*each) for each in (("assistant", "2"), ("user", "three"), ("assistant", "3"))]
    assert (await ask(talk, *told)).hidden == both
    window = await ask(talk, *told[1:], message("user", "more"))
    assert (window.arrival.kind, window.hidden) == (Kind.WINDOWED, both)
    foreign = await ask(talk, message("user", "other"), message("assistant", "x"), told[2])
    assert foreign.hidden == {}


async def test_what_was_hidden_of_messages_that_a_cut_dropped_is_not_read(store: Store) -> None:
    talk = Talk(store=store)
    await say(talk, "one", reply("1", HIDDEN))
    asked = body("user", "two")
    cut = cut_with(3, Gap(start=0, stop=2, edit="drop_oldest", reason="old", tokens=10, tool_calls=0))
    exchange = await talk.begin(asked)
    last = await settle(
        talk, exchange, asked, replies=(reply("2", HIDDEN),), cut=cut, kept=Kept(nodes=(), messages=(0,))
    )
    assert (await ask(talk, message("user", "three"), policy="lean")).hidden == {last.head: HIDDEN}
    whole = await ask(talk, message("user", "three"), policy="lean", whole=True)
    assert len(whole.hidden) == 2


async def test_the_summaries_of_the_branch_are_found_by_whoever_goes_on_with_it(store: Store) -> None:
    talk = Talk(store=store)
    await talk.say("one", "1")
    last = await talk.say("two", "2")
    rows = await store.path(talk.key, last.head)
    made = summary("a", rows[1].node, 2, tip=last.head)
    tried = failed("b", rows[2].node, 3, tip=last.head, created_at=9_000)
    elsewhere = summary("c", "ab" * 20, 2, created_at=9_999)
    for row in (made, tried, elsewhere):
        await store.keep_summary(talk.key, row)
    told = [row.message for row in rows]
    for asked in ((message("user", "more"),), (*told, message("user", "more"))):
        found = await ask(talk, *asked)
        assert (found.ready_summary, found.attempt) == (made, tried)
        other = await ask(talk, *asked, recipe="f" * 12)
        assert (other.ready_summary, other.attempt) == (None, None)
        none = await ask(talk, *asked, recipe=None)
        assert (none.ready_summary, none.attempt) == (None, None)
    rewound = await ask(talk, *told[:2], message("user", "else"))
    assert (rewound.arrival.kind, rewound.ready_summary, rewound.attempt) == (Kind.REWIND, made, made)
    before = await ask(talk, told[0], message("assistant", "other"), message("user", "else"))
    assert (before.arrival.base, before.ready_summary) == (rows[0].node, None)
    side = await ask(talk, message("user", "aside"), message("assistant", "x"))
    assert (side.arrival.kind, side.ready_summary, side.attempt) == (Kind.FOREIGN, None, None)


async def test_behind_a_cut_a_summary_is_known_by_its_end_the_base_or_the_cut(store: Store) -> None:
    talk = Talk(store=store)
    first = await talk.say("one", "1")
    asked = body("user", "two")
    cut = cut_with(3, Gap(start=0, stop=3, edit="drop_oldest", reason="old", tokens=15, tool_calls=0))
    last = await talk.settle(
        await talk.begin(asked), asked, replies=(body("assistant", "2"),), cut=cut, kept=Kept(nodes=(), messages=())
    )
    for name, node, until, tip in (
        ("by its end", first.nodes[0], 1, last.head),
        ("by the cut", last.nodes[0], 3, last.nodes[0]),
        ("by the base", last.head, 4, last.head),
    ):
        made = summary(name, node, until, tip=tip)
        await store.keep_summary(talk.key, made)
        found = await ask(talk, message("user", "three"), policy="lean")
        assert texts(found) == ["2"]
        assert found.ready_summary == made
    # What nothing that was read belongs to is not found: the branch is not read for it.
    await store.delete(talk.key)


async def test_without_summaries_and_hidden_rounds_nothing_is_asked_for(store: Store) -> None:
    talk = Talk(store=store)
    await talk.say("one", "1")
    question = HistoryQuery(
        tenant="tenant",
        session="session",
        incoming=incoming([message("user", "two")]),
        messages=[message("user", "two")],
        policy="lean",
        agent=None,
        recipe=RECIPE,
    )

    def unit(connection: StoreConnection) -> list[str]:
        asked: list[str] = []

        class Noted:
            dialect = connection.dialect

            def execute(self, statement: Executable, parameters: Parameters | None = None, /) -> Rows:
                asked.append(str(statement))
                return connection.execute(statement, parameters)

        recall(Noted(), question, Branches())
        return asked

    plain = await store._database.read(unit)
    assert len(plain) == 6  # the session, what was asked last, cuts (twice), the branch, instructions
    last = await say(talk, "two", reply("2", HIDDEN))
    assert len(await store._database.read(unit)) == len(plain) + 2
    await store.keep_summary(talk.key, summary("a", last.head, 4))
    assert len(await store._database.read(unit)) == len(plain) + 5


async def test_many_hidden_rounds_are_read_elsewhere(store: Store) -> None:
    talk = Talk(store=store)
    for number in range(3):
        await say(talk, f"q{number}", reply(f"a{number}", HIDDEN))
    said = [message(role, f"{sign}{n}") for n in range(3) for role, sign in (("user", "q"), ("assistant", "a"))]
    question = HistoryQuery(
        tenant="tenant", session="session", incoming=incoming(said), messages=said, policy=None, agent=None
    )
    branches = Branches()
    await store._database.read(lambda connection: recall(connection, question, branches))
    with pytest.raises(TooLong):
        await store._database.read(partial(recall, question=question, branches=branches, most=2))
    found = await store._database.read(partial(recall, question=question, branches=branches, most=3))
    assert len(found.hidden) == 3


@pytest.mark.parametrize("manner", [None, Manner(instructions="other", tools="tools", model="small")])
async def test_whoever_goes_on_with_a_fork_may_append(store: Store, manner: Manner | None) -> None:
    """An agent that was given a history has its own instructions and tools, and still continues the history."""
    talk = Talk(store=store)
    asked = body("user", "one")
    exchange = await talk.begin(asked, instructions=(message("system", "x"),))
    last = await talk.settle(exchange, asked, replies=(body("assistant", "1"),), kind="resend", scale=1.5)
    await store.fork("tenant", talk.key, last.head, "fork")
    new = Talk(store=store, session="fork")
    found = await ask(new, message("user", "go on"), manner=manner)
    assert (found.arrival.kind, found.arrival.base, texts(found)) == (Kind.APPEND, last.head, ["one", "1"])
    assert (found.scale, found.model, found.instructions) == (1.5, "model", (message("system", "x"),))
    told = [message("user", "one"), message("assistant", "1"), message("user", "x")]
    assert (await ask(new, *told, manner=manner)).arrival.kind is Kind.RESEND
    await new.say("go on", "2", kind="resend")
    assert (await ask(new, message("user", "aside"), manner=manner)).arrival.kind is Kind.SIDE


async def test_what_was_there_lately_is_seen_at_one_glance(store: Store) -> None:
    talk, asked = Talk(store=store), list[str]()
    await talk.say("q", "a", kind="resend")
    said = [message("user", "q"), message("assistant", "a")]
    branches = Branches()
    question = HistoryQuery(
        tenant="tenant",
        session="session",
        incoming=incoming([*said, said[0]]),
        messages=[*said, said[0]],
        policy="p",
        agent=None,
    )

    class _Counting:
        """A connection that records the queries."""

        def __init__(self, connection: Any) -> None:
            self._connection = connection
            self.dialect = connection.dialect

        def execute(self, statement: Any, parameters: Any = None, /) -> Any:
            asked.append(str(statement))
            return self._connection.execute(statement, parameters)

    async def read() -> HistorySnapshot:
        asked.clear()
        return await store._database.read(lambda connection: recall(_Counting(connection), question, branches))

    first = await read()
    assert len(asked) > 1
    assert await read() == first
    assert len(asked) == 1
    # Where it has gone on meanwhile, it is asked again.
    await talk.say("q", "b", kind="resend")
    found = await read()
    assert (found.arrival.kind, found.arrival.known, found.depth) == (Kind.REWIND, 3, 3)
    # And so where it is another session by now, of the same age and with less in it.
    await store.delete(talk.key)
    exchange = await talk.begin(asked_first := body("user", "q"), base=ROOT)
    await talk.settle(exchange, asked_first, replies=(body("assistant", "other"),), kind="resend")
    again = await read()
    assert (again.arrival.known, again.depth) == (1, 1)


async def test_a_cut_that_came_after_the_last_look_is_seen(store: Store) -> None:
    talk = Talk(store=store)
    settled = await talk.say("q", "a", kind="resend")
    said = [message("user", "q"), message("assistant", "a"), message("user", "more")]
    assert (await ask(talk, *said, policy="default")).cut is None
    mine = Cut(position=2, policy="default", version="v1", changes=(), tokens=1, messages=1, tool_calls=0)
    exchange = await talk.begin(beside := body("user", "beside"), base=settled.head)
    await talk.settle(exchange, beside, replies=(body("assistant", "b"),), cut=mine, base=settled.head, at_head=False)
    found = await ask(talk, *said, policy="default")
    assert found.cut is not None
    assert (found.cut.cut, found.cut.node) == (mine, settled.head)  # kept for all that go on from there


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
    await talk.settle(exchange, asked, replies=(body("assistant", "b"),), base=nodes[3], at_head=False, kind="first")
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
    """This happens if a session is deleted while one of its requests is read."""
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
