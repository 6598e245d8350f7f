"""Inference of the session of a request that names none, from the replies that it sends back."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.conversation import ROOT, Incoming, Witness, body_of, chain, earlier_names, fingerprints, version_of
from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.store import Body, Doubt, HistoryQuery, Reply, Store, session_key
from proxy.store.database import StoreConnection
from proxy.store.schema import EVIDENCE, insert_new
from tests.support.talk import Talk, infer, message

pytestmark = pytest.mark.anyio

LONG = "The Rhine is 1230 kilometres long, and rises in the Alps."
BRIEF = (message("system", "be brief"),)


def said(role: str, text: str, *calls: str) -> Message:
    made = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in calls]
    return ChatMessage.of({"role": role, "content": text or None} | ({"tool_calls": made} if calls else {}))


def conversation(*texts: str) -> list[Message]:
    return [said(("user", "assistant")[place % 2], text) for place, text in enumerate(texts)]


async def hold(
    store: Store,
    session: str,
    *messages: Message,
    base: str = ROOT,
    instructions: Any = None,
    relayed: tuple[int, ...] = (),
    partial: bool = False,
) -> str:
    """Store an exchange whose reply is the last message; return its node."""
    talk = Talk(store=store, session=session)
    asked = [Body(message=each, tokens=3) for each in messages[:-1]]
    exchange = await talk.begin(*asked, instructions=instructions)
    reply = Reply(body=Body(message=messages[-1], tokens=3), partial=partial)
    settled = await talk.settle(exchange, *asked, replies=(reply,), base=base, at_head=False, relayed=relayed)
    return settled.head


async def test_a_reply_behind_the_same_history_counts_at_any_length(store: Store) -> None:
    await hold(store, "a", *conversation("hi", "ok"))
    assert (await infer(store, conversation("hi", "ok", "on"))).session == "a"
    assert (await infer(store, conversation("hi", "ok", "on"), tenant="other")).session is None
    assert (await infer(store, conversation("hello", "ok", "on"))).session is None


async def test_what_the_client_made_up_before_it_does_not_matter(store: Store) -> None:
    await hold(store, "a", *conversation("example", "made up", "hi", "ok"))
    assert (await infer(store, conversation("example", "made up", "hi", "ok", "on"))).session == "a"
    assert (await infer(store, conversation("example", "made up", "other"))).session is None


async def test_a_greeting_with_which_every_conversation_begins_tells_nothing(store: Store) -> None:
    greeting = said("assistant", "Hello! How can I help you today?")
    await hold(store, "a", greeting, *conversation("hi", "ok"))
    found = await infer(store, [greeting, said("user", "hi")])
    assert found.session is None
    assert (await infer(store, [greeting, said("user", "other")])).session is None
    assert (await infer(store, [greeting, *conversation("hi", "ok", "on")])).session == "a"
    await hold(store, "b", *conversation("hi", LONG))
    assert (await infer(store, [greeting, *conversation("hi there", LONG, "on")])).session is None


async def test_a_long_text_counts_alone_under_the_same_instructions(store: Store) -> None:
    await hold(store, "a", *conversation("hi", LONG), instructions=BRIEF)
    moved = conversation("hi, with a reminder", f" {LONG}\n", "on")
    same = version_of(BRIEF)
    assert (await infer(store, moved, instructions=same)).session == "a"
    other = await infer(store, moved, instructions="v2")
    assert other.session is None
    assert other.doubt == Doubt(session="a", instructions=True)


async def test_instructions_that_a_session_had_once_are_its_own(store: Store) -> None:
    head = await hold(store, "a", *conversation("hi", LONG), instructions=BRIEF)
    planner = (message("system", "make a plan"),)
    plan = "1. Look at the river. 2. Say how long it is."
    await hold(store, "a", said("user", "plan"), said("assistant", plan), base=head, instructions=planner)
    asked = conversation("hi, with a reminder", plan, "on")
    assert (await infer(store, asked, instructions=version_of(BRIEF))).session == "a"
    assert (await infer(store, asked, instructions=version_of(planner))).session == "a"
    assert (await infer(store, asked, instructions="v2")).doubt == Doubt(session="a", instructions=True)


async def test_under_other_instructions_a_session_has_to_have_all_that_was_said(store: Store) -> None:
    spaced = LONG.replace(" ", "  ")
    await hold(store, "a", *conversation("hi", "ok", "How long is it? (Be brief.)", LONG), instructions=BRIEF)
    for first, question, session in (
        ("hi", "How long is it? (Be brief.)", "a"),
        ("hi", "How long is it?", "a"),  # a reminder was taken off
        ("hi", "How l", None),
        ("hey", "How long is it? (Be brief.)", None),
        ("hey", "How long is it?", None),
    ):
        asked = [said("user", first), said("assistant", "ok"), *conversation(question, spaced, "on")]
        assert (await infer(store, asked, instructions="v2")).session == session
        longer = [*asked, said("assistant", "never said"), said("user", "on")]
        assert (await infer(store, longer, instructions="v2")).session is None


async def test_a_text_alone_counts_only_where_the_session_has_all_assistant_messages_before_it(store: Store) -> None:
    await hold(store, "a", *conversation("hi", "made up", "so", LONG))
    assert (await infer(store, conversation("so", LONG, "on"))).session == "a"
    assert (await infer(store, conversation("x", "made up", "so", LONG, "on"))).session == "a"
    strange = await infer(store, conversation("x", "never said", "so", LONG, "on"))
    assert strange.session is None
    assert strange.doubt == Doubt(session="a", differs=1)


async def test_an_id_that_counts_is_none_without_its_separators_either(store: Store) -> None:
    """A client leaves the separators out. What the reply calls is known, and no other conversation has it."""
    await hold(store, "a", said("user", "hi"), said("assistant", "", "functions.exec:12"))
    asked = [said("user", "hi"), said("assistant", "", "functionsexec12"), message("tool", "done")]
    assert (await infer(store, asked)).session == "a"
    await hold(store, "b", said("user", "hello"), said("assistant", "", "functionsexec12"))
    assert (await infer(store, [said("user", "so"), *asked[1:]])).session is None


async def test_a_random_id_needs_nothing_more(store: Store) -> None:
    name = "call_9f86d081884c7d659a2feaa0"
    await hold(store, "a", said("user", "hi"), said("assistant", "", name), instructions=BRIEF)
    history = [*conversation("x", "never said", "so"), said("assistant", "", name)]
    assert (await infer(store, history)).session == "a"
    result = ChatMessage.of({"role": "tool", "tool_call_id": name, "content": "seen"})
    assert (await infer(store, [result])).session == "a"
    await hold(store, "b", said("user", "hi"), said("assistant", "", "call_1"))
    assert (await infer(store, [*history[:3], said("assistant", "", "call_1")])).session is None


async def test_of_equal_conversations_the_one_counts_that_stands_there(store: Store) -> None:
    await hold(store, "a", *conversation("hi", "ok"))
    head = await hold(store, "b", *conversation("hi", "ok"))
    both = await infer(store, conversation("hi", "ok", "on"))
    assert (both.session, both.relayed) == (None, (1,))
    assert both.doubt == Doubt(session="a", rivals=2)
    await hold(store, "b", said("user", "on"), said("assistant", "well"), base=head)
    assert (await infer(store, conversation("hi", "ok", "on"))).session == "a"
    assert (await infer(store, conversation("hi", "ok", "on", "well", "more"))).session == "b"
    # Replies that are vouched for count like replies that were relayed in this session.
    await hold(store, "c", *conversation("hi", "ok", "on", "well"), relayed=(1,))
    assert (await infer(store, conversation("hi", "ok", "on", "well", "more"))).session is None


async def test_of_equal_conversations_the_one_counts_that_stands_where_another_model_went_on(store: Store) -> None:
    head = await hold(store, "a", *conversation("hi", "ok"))
    await hold(store, "b", *conversation("hi", "ok"))
    asked = conversation("hi", "ok", "on", "said elsewhere", "more")
    both = await infer(store, asked)
    assert (both.session, both.doubt) == (None, Doubt(session="a", rivals=2))
    await hold(store, "a", *conversation("on", "said elsewhere", "more", "well"), base=head)
    assert (await infer(store, asked)).session == "b"
    assert (await infer(store, [*asked, *conversation("elsewhere too")])).session == "b"
    await hold(store, "c", *conversation("hi", "ok"))
    assert (await infer(store, asked)).session is None
    assert (await infer(store, [*asked, said("assistant", "well"), said("user", "on")])).session == "a"


async def test_what_was_made_up_before_an_equal_conversation_is_no_evidence(store: Store) -> None:
    examples = conversation("example", LONG)
    for session in ("a", "b"):
        await hold(store, session, *examples, *conversation("hi", "ok"), instructions=BRIEF)
    both = await infer(store, [*examples, *conversation("hi", "ok", "on")], instructions=version_of(BRIEF))
    assert (both.session, both.relayed) == (None, (3,))
    whole = [*examples, *conversation("hi", "ok", "on", "well")]
    await hold(store, "c", *whole, instructions=BRIEF, relayed=both.relayed)
    other = await infer(store, [*examples, *conversation("other")], instructions=version_of(BRIEF))
    assert other.session is None
    assert (await infer(store, [*whole, said("user", "more")], instructions=version_of(BRIEF))).session == "c"


async def test_of_several_the_one_with_the_most_evidence_counts_or_the_newest_head(store: Store) -> None:
    one, two = "call_9f86d081884c7d659a2feaa0", "call_60303ae22b998861bce3b28f"
    head = await hold(store, "a", said("user", "hi"), said("assistant", "", one))
    await hold(store, "a", said("user", "so"), said("assistant", "", two), base=head)
    await hold(store, "b", said("user", "hey"), said("assistant", "", one))
    last = await hold(store, "c", said("user", "hey"), said("assistant", "", two))
    asked = [said("user", "x"), said("assistant", "", one), said("user", "y"), said("assistant", "", two)]
    assert (await infer(store, asked)).session == "a"
    await hold(store, "c", said("user", "so"), said("assistant", "", one), base=last)
    assert (await infer(store, asked)).session == "a"  # both have both, and "a" stands at the newest


async def test_a_phrase_that_everybody_has_tells_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.store.evidence._HOLDERS", 3)
    for number in range(5):
        await hold(store, f"s{number}", *conversation(f"hi {number}", LONG))
    assert (await infer(store, conversation("hey", LONG, "on"))).session is None
    assert (await infer(store, conversation("hi 3", LONG, "on"))).session == "s3"


async def test_of_many_with_the_same_reply_the_one_counts_that_has_the_messages(store: Store) -> None:
    for number in range(12):
        await hold(store, f"s{number}", *conversation(f"hi {number}", LONG), instructions=BRIEF)
    changed = conversation("hi 11", LONG.replace(" ", "  "), "on")
    assert (await infer(store, changed, instructions=version_of(BRIEF))).session == "s11"


async def test_of_many_with_the_same_reply_the_one_counts_that_gave_it_to_this_question(store: Store) -> None:
    same = version_of(BRIEF)
    for name, question in (("a", "How long is it?"), ("b", "How wide is it? (Be brief.)"), ("c", "How deep is it?")):
        await hold(store, name, *conversation(question, LONG), instructions=BRIEF)
    assert (await infer(store, conversation("How wide is it?", LONG, "on"), instructions=same)).session == "b"
    assert (await infer(store, conversation("How wide is it?!", LONG, "on"), instructions=same)).session is None
    assert (await infer(store, conversation("How wide is", LONG, "on"), instructions=same)).session == "b"
    assert (await infer(store, conversation("How w", LONG, "on"), instructions=same)).session is None
    await hold(store, "d", *conversation("Today is Monday.\nHow deep is it?", LONG), instructions=BRIEF)
    assert (await infer(store, conversation("Today is Monday.", LONG, "on"), instructions=same)).session == "d"
    await hold(store, "e", *conversation("How wide is it? (Today is Monday.)", LONG), instructions=BRIEF)
    assert (await infer(store, conversation("How wide is it?", LONG, "on"), instructions=same)).session is None


async def test_a_short_reply_counts_where_the_session_ends_as_the_request_does(store: Store) -> None:
    same = version_of(BRIEF)
    question = "How deep is it over there?"
    await hold(store, "a", *conversation(f"{question} (Be brief.)", "ok"), instructions=BRIEF)
    later = conversation(question, "ok", "on")
    assert (await infer(store, later, instructions="v2")).session is None
    assert (await infer(store, conversation("How wide?", "ok", "on"), instructions=same)).session is None
    assert (await infer(store, [*conversation("x", "y"), *later], instructions=same)).session is None
    assert (await infer(store, later, instructions=same)).session == "a"
    await hold(store, "b", *conversation(f"{question} (Be kind.)", "ok"), instructions=BRIEF)
    assert (await infer(store, later, instructions=same)).session is None


async def test_a_window_of_short_replies_counts_where_the_session_ends_with_it(store: Store) -> None:
    said_before = conversation(
        "hi", "hello", "What is the longest river?", "the Nile", "and the deepest one?", "the Congo"
    )
    await hold(store, "a", *said_before)
    await hold(store, "b", *conversation("hi", "hello", "and the deepest one?", "the Congo"))
    assert (await infer(store, [*said_before[2:], said("user", "on")])).session == "a"
    assert (await infer(store, [*said_before[4:], said("user", "on")])).session is None  # both end with it


async def test_what_users_say_tells_nothing_of_whose_it_is(store: Store) -> None:
    question = "Can you keep a secret for me, a long one?"
    await hold(store, "a", *conversation("My boss is ill.", "Go on.", question, "Yes."))
    window = conversation(question, "Yes.", "I stole a bike.")
    assert (await infer(store, window)).session is None
    head = await hold(store, "b", *conversation(question, "Yes."))
    await hold(store, "b", *conversation("So?", "I see."), base=head)
    assert (await infer(store, window)).session in {None, "b"}


async def test_a_random_id_counts_more_than_the_same_words(store: Store) -> None:
    called = said("assistant", "", "call_8fJ2kQ9xZt4LmW")
    result = ChatMessage.of({"role": "tool", "tool_call_id": "call_8fJ2kQ9xZt4LmW", "content": "seen"})
    await hold(
        store, "a", said("user", "do it"), called, result, said("assistant", "Done, all of it is as you wished.")
    )
    await hold(store, "b", *conversation("do it", "Done, all of it is as you wished."))
    cleared = ChatMessage.of({"role": "tool", "tool_call_id": "call_8fJ2kQ9xZt4LmW", "content": ""})
    asked = [
        said("user", "do it"),
        called,
        cleared,
        said("assistant", "Done, all of it is as you wished."),
        said("user", "on"),
    ]
    assert (await infer(store, asked)).session == "a"


async def test_a_tie_is_not_decided_by_looking_at_some(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.store.evidence._TRIED", 2)
    for name in ("a", "b", "c"):
        await hold(store, name, *conversation("hi", LONG, f"and {name}?", "well"))
    assert (await infer(store, conversation("hi", LONG, "on"))).session is None


async def test_of_equal_conversations_with_reminders_the_one_counts_that_ends_there(store: Store) -> None:
    asked = conversation("hi (be brief)", LONG)
    head = await hold(store, "a", *asked, instructions=BRIEF)
    await hold(store, "a", *conversation("so", "well"), base=head, instructions=BRIEF)
    await hold(store, "b", *asked, instructions=BRIEF)
    later = conversation("hi", LONG, "so")
    assert (await infer(store, later, instructions=version_of(BRIEF))).session == "b"
    name = "call_9f86d081884c7d659a2feaa0"
    called = [said("user", "hey (be brief)"), said("assistant", "", name)]
    head = await hold(store, "c", *called)
    await hold(store, "c", *conversation("so", "well"), base=head)
    await hold(store, "d", *called)
    assert (await infer(store, [said("user", "hey"), called[1], said("user", "so")])).session == "d"


async def test_of_several_that_end_there_none_counts_nor_one_that_went_on(store: Store) -> None:
    asked = conversation("hi (be brief)", LONG)
    head = await hold(store, "a", *asked, instructions=BRIEF)
    await hold(store, "a", *conversation("so", "well"), base=head, instructions=BRIEF)
    await hold(store, "b", *asked, instructions=BRIEF)
    await hold(store, "c", *asked, instructions=BRIEF)
    later = conversation("hi", LONG, "so")
    assert (await infer(store, later, instructions=version_of(BRIEF))).session is None


async def test_questions_alone_count_where_the_session_answered_with_calls_alone(store: Store) -> None:
    called = said("assistant", "", "call_1")
    head = await hold(store, "a", said("user", "look"), called)
    asked = [said("user", "look"), said("user", "again")]
    assert (await infer(store, asked)).session is None  # the same question may have failed elsewhere
    assert (await infer(store, [*asked, said("user", "more")])).session is None
    await hold(store, "a", said("user", "again"), called, base=head)
    assert (await infer(store, asked)).session is None
    assert (await infer(store, [*asked, said("user", "more")])).session == "a"
    assert (await infer(store, asked[:1])).session is None
    assert (await infer(store, [message("system", "x")])).session is None
    await hold(store, "b", *conversation("hi", "ok"))
    assert (await infer(store, [said("user", "hi"), said("user", "on")])).session is None


async def test_a_session_that_ends_there_counts_before_one_that_has_been_there(store: Store) -> None:
    head = await hold(store, "a", *conversation("hi", "ok"))
    await hold(store, "a", *conversation("so", "well"), base=head)
    asked = conversation("hi", "ok", "on")
    assert (await infer(store, asked)).session == "a"
    called = said("assistant", "", "call_1")
    result = ChatMessage.of({"role": "tool", "tool_call_id": "call_1", "content": "seen"})
    await hold(store, "b", said("user", "hi"), called, result, said("assistant", "ok"))
    assert (await infer(store, asked)).session == "b"  # its calls were left out
    await hold(store, "c", said("user", "hi"), called, result, said("assistant", "ok"))
    assert (await infer(store, asked)).session is None


async def test_a_call_in_words_counts_by_its_id_under_the_same_instructions(store: Store) -> None:
    name = "call_9f86d081884c7d659a2feaa0"
    await hold(store, "a", said("user", "hi"), said("assistant", "", name), instructions=BRIEF)
    words = conversation("New task: hi", f"Calling tools: [{{'id': '{name}'}}]", "Observation: seen")
    assert (await infer(store, words, instructions=version_of(BRIEF))).session == "a"
    assert (await infer(store, words, instructions="v2")).session is None
    strange = [*conversation("x", "never said"), *words]
    assert (await infer(store, strange, instructions=version_of(BRIEF))).session is None


async def test_nobody_looks_for_one_of_many_with_the_same_short_reply(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.store.evidence._BRIEF", 3)
    for number in range(3):
        await hold(store, f"s{number}", *conversation(f"number {number} of the questions (be brief)", "ok"))
    later = conversation("number 1 of the questions", "ok", "on")
    assert (await infer(store, later)).session == "s1"
    monkeypatch.setattr("proxy.store.evidence._TRIED", 2)
    assert (await infer(store, later)).session is None
    await hold(store, "s3", *conversation("number 3 of the questions (be brief)", "ok"))
    assert (await infer(store, later)).session is None


@pytest.mark.parametrize("partial", [False, True])
async def test_the_beginning_of_a_reply_counts_where_one_session_ends_with_it(store: Store, partial: bool) -> None:
    begun = LONG[:30]
    await hold(store, "other", *conversation("hi", LONG), *conversation("go", "on"), instructions=BRIEF)
    asked, same = conversation("hi", begun, "on"), version_of(BRIEF)
    assert (await infer(store, asked, instructions=same)).session is None
    await hold(store, "a", *conversation("hi", LONG), instructions=BRIEF, partial=partial)
    assert (await infer(store, asked, instructions=same)).session == "a"
    assert (await infer(store, asked, instructions="v2")).session is None
    for other in (
        conversation("hi", LONG[:20], "on"),
        conversation("hi", LONG[1:31], "on"),
        conversation("hi", "made up", "so", begun, "on"),
        [said("user", "hi"), said("user", begun), said("assistant", "ok"), said("user", "on")],
    ):
        assert (await infer(store, other, instructions=same)).session is None
    more = conversation("hi", LONG[:40] + " ", "on", "and on")  # with a space, it has another name in older forms
    assert (await infer(store, more[:3], instructions=same)).session == "a"
    await hold(store, "b", *more)
    assert (await infer(store, more[:3], instructions=same)).session is None
    assert (await infer(store, asked, instructions=same)).session == "a"
    await hold(store, "c", *conversation("hi", LONG), instructions=(message("system", "be long"),))
    assert (await infer(store, asked, instructions=same)).session is None


async def test_old_replies_are_looked_up_where_the_newest_tell_nothing(store: Store) -> None:
    await hold(store, "a", *conversation("hi", "ok"))
    strange = [text for number in range(40) for text in (f"q {number}", f"a {number}")]
    assert (await infer(store, conversation("hi", "ok", *strange))).session == "a"


async def test_a_request_that_parts_from_a_session_is_told_where(store: Store) -> None:
    head = await hold(store, "a", *conversation("hi", "ok"))
    await hold(store, "a", said("user", "so"), said("assistant", "well"), base=head)
    await hold(store, "b", *conversation("hi", "no"))
    found = await infer(store, conversation("hi", "changed", "so"))
    assert (found.session, found.relayed) == (None, ())
    assert found.doubt is not None
    assert found.doubt.differs == 1
    assert (await infer(store, conversation("never", "heard", "of"))).doubt is None


CALL = {"id": "call_7Qk2mZp9TnX4cVb8Rw3sLd6f", "type": "function", "function": {"name": "look", "arguments": "{}"}}
LOOKED = ChatMessage.of({"role": "assistant", "content": "I look.\n", "tool_calls": [CALL]})
SOURCED = ChatMessage.of({**LOOKED.data, "__source": "model"})
SEEN = ChatMessage.of({"role": "tool", "tool_call_id": CALL["id"], "content": "seen"})


@pytest.mark.parametrize(
    ("messages", "version"),
    [
        (conversation("hi", "ok \n", "so", "well"), 2),
        ([said("user", "hi"), SOURCED, SEEN, said("assistant", "well")], 0),
        ([said("user", "hi"), LOOKED, SEEN, said("assistant", "well")], 1),
        ([said("user", "hi"), LOOKED, SEEN, said("assistant", "well")], 2),
    ],
    ids=["first", "newest, with private fields", "before, with calls", "first, with calls"],
)
async def test_a_conversation_that_an_older_version_stored_goes_on(
    store: Store, messages: list[Message], version: int
) -> None:
    older, newer = list(earlier_names(ROOT, messages[:3]))[version], chain(ROOT, messages)
    assert older[1] != newer[1]
    records: list[dict[str, Any]] = [
        {"record": "session", "format": 1, "created_at": 1, "updated_at": 1, "head": older[-1]}
    ]
    for parent, node, each in zip([ROOT, *older], older, messages, strict=False):
        records.append({"record": "body", "body": body_of(each), "tokens": 1, "text": each.raw.decode()})
        named = {"record": "node", "node": node, "parent": parent, "body": body_of(each)}
        records.append(named | {"tokens": 1, "created_at": 1, "source": "upstream"})
    await store.load("tenant", "old", records)
    incoming = Incoming(names=newer, contents=fingerprints(ROOT, messages)[1], replies=[1, 3])
    asked = HistoryQuery(tenant="tenant", session="old", incoming=incoming, messages=messages, policy=None, agent=None)
    found = await store.recall(asked)
    assert (found.arrival.kind, found.arrival.base, found.arrival.known) == ("resend", older[-1], 3)
    assert list(found.names) == [*older, *chain(older[-1], messages[3:])]


async def test_a_reply_that_an_older_version_stored_is_found(store: Store) -> None:
    messages = conversation("hi", "ok \n", "so", "well")
    older = list(earlier_names(ROOT, messages[:3]))[-1]
    await hold(store, "a", messages[0], said("assistant", "no"))
    await hold(store, "a", messages[3], base=older[0])

    def enter(connection: StoreConnection) -> None:
        """Insert evidence as the migration does."""
        piece = Witness(tenant="tenant", dialect="chat").place(older[1]).piece
        insert_new(connection, EVIDENCE, [{"session": session_key("tenant", "a"), "piece": piece}])

    await store._database.write(enter)
    assert (await infer(store, messages[:3])).session == "a"
