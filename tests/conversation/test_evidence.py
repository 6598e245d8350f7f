"""Evidence: what a reply is known by."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.conversation import TELLING, Witness, continues, is_longer
from proxy.conversation.evidence import squeezed
from proxy.dialects.chat.message import ChatMessage

OURS = Witness(tenant="team", dialect="chat")
LONG = "This sentence is long enough to tell."


def said(content: Any, *ids: str, role: str = "assistant") -> ChatMessage:
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in ids]
    return ChatMessage.of({"role": role, "content": content} | ({"tool_calls": calls} if calls else {}))


def called(name: str, arguments: str) -> ChatMessage:
    call = {"id": name, "type": "function", "function": {"name": "look", "arguments": arguments}}
    return ChatMessage.of({"role": "assistant", "content": None, "tool_calls": [call]})


def asked(text: str) -> ChatMessage:
    return said(text, role="user")


def kinds(message: ChatMessage) -> list[str]:
    return [evidence.kind for evidence in OURS.of(message, "0" * 40)]


def test_a_reply_is_known_by_its_place_its_ids_and_its_text() -> None:
    assert kinds(said(LONG, "call_9f86d081884c7d659a2feaa0", "call_1")) == ["place", "id", "text"]
    assert kinds(said(None, "call_9f86d081884c7d659a2feaa0")) == ["place", "id"]
    assert kinds(said(None)) == ["place"]


def test_an_id_is_known_by_its_letters_and_digits() -> None:
    sent, kept = (said(None, name) for name in ("call_9f86d081884c7d659a2feaa0", "call9f86d081884c7d659a2feaa0"))
    assert [*OURS.marks(sent)] == [*OURS.marks(kept)] != [*OURS.earlier(sent)] != []
    assert not list(OURS.earlier(kept))  # it is stored as it was
    assert not list(OURS.earlier(said(None, "call_1")))


@pytest.mark.parametrize("name", ["functionsexec12", "functionsreadFile0", "call00000001", "toolcall20260101"])
def test_a_word_and_a_number_are_no_id_that_nobody_else_has(name: str) -> None:
    """Other conversations count too: a client made it of "functions.exec:12" or "call_00000001"."""
    assert [evidence.kind for evidence in OURS.marks(said(None, name))] == ["text"]
    assert not list(OURS.earlier(said(None, name)))


def test_calls_without_a_random_id_are_a_text_that_tells_nothing_alone() -> None:
    made = [*OURS.marks(called("call_1", '{"a": 1, "b": 2}'))]
    assert [(evidence.kind, evidence.tells) for evidence in made] == [("text", False)]
    assert made == [*OURS.marks(called("call_9", '{"b":2,"a":1}'))]
    assert made != [*OURS.marks(called("call_1", '{"a": 1, "b": 3}'))]
    assert [*OURS.marks(called("call_1", "ls  -la"))] == [*OURS.marks(called("call_1", "ls -la"))]
    deep = "[" * 500 + "]" * 500
    assert [*OURS.marks(called("call_1", deep))] == [*OURS.marks(called("call_2", f" {deep}"))]


def test_texts_of_a_reply_are_known_one_by_one_and_calls_in_words_by_their_ids() -> None:
    parts = [{"type": "text", "text": LONG}, {"type": "text", "text": "short"}]
    assert list(OURS.told(said(parts))) == list(OURS.marks(said(LONG)))
    assert not list(OURS.told(said(LONG)))
    assert not list(OURS.told(said(parts, role="user")))
    assert list(OURS.told(said(f"{LONG}\nCalling tools:\n[{{'id': 'call_1'}}]"))) == list(OURS.marks(said(LONG)))
    named = "call_9f86d081884c7d659a2feaa0"
    words = said(f"Calling tools: [{{'id': '{named}'}}, {{'id': 'call_00000001'}}] {named}")
    assert [(each.piece, each.kind) for each in OURS.told(words)] == [
        (next(OURS.marks(said(None, named))).piece, "text")
    ]


def test_the_result_of_a_call_is_known_by_the_id_of_the_call() -> None:
    result = ChatMessage.of({"role": "tool", "tool_call_id": "call_9f86d081884c7d659a2feaa0", "content": LONG})
    assert [evidence.kind for evidence in OURS.of(result, "0" * 40)] == ["id"]
    call = said(None, "call_9f86d081884c7d659a2feaa0")
    assert set(OURS.marks(result)) == set(OURS.marks(call))


def test_what_others_say_is_no_evidence() -> None:
    assert kinds(said(LONG, role="user")) == []


def test_white_space_and_parts_do_not_count() -> None:
    spaced = said(
        [{"type": "text", "text": "\n This sentence is  long", "x": 1}, {"type": "text", "text": " enough to\ntell."}]
    )
    assert list(OURS.marks(spaced)) == list(OURS.marks(said(LONG)))


def test_how_an_object_is_written_does_not_count() -> None:
    (made,) = OURS.marks(said('{"place": "Paris", "rivers": ["Seine"]}'))
    assert made.tells
    assert [made] == [*OURS.marks(said('\n{\n  "rivers": [\n    "Seine"\n  ],\n  "place": "Paris"\n}'))]
    assert [made] != [*OURS.marks(said('{"place": "Paris", "rivers": ["Oise"]}'))]
    assert [*OURS.marks(said('{"place":  "Paris", '))] == [*OURS.marks(said('{"place": "Paris",'))]


def test_a_short_text_tells_nothing_alone() -> None:
    assert [evidence.tells for evidence in OURS.marks(said("a" * (TELLING - 1)))] == [False]
    assert [evidence.tells for evidence in OURS.marks(said("a" * TELLING))] == [True]


def test_nobody_meets_the_evidence_of_another_tenant_or_dialect() -> None:
    witnesses = [OURS, Witness(tenant="other", dialect="chat"), Witness(tenant="team", dialect="responses")]
    assert len({evidence.piece for witness in witnesses for evidence in witness.marks(said(LONG))}) == 3
    assert all(-(2**63) <= evidence.piece < 2**63 for evidence in OURS.of(said(LONG), "a" * 40))


@pytest.mark.parametrize("text", ["", " ", "ab", " ab  cd\n", "ab cd", "a\u3000b   ", "      a", "abcdef gh     i"])
@pytest.mark.parametrize("window", [1, 2, 3, 5, 100])
def test_white_space_is_squeezed_window_by_window(text: str, window: int) -> None:
    assert squeezed(text, window) == " ".join(text.split())


RESULT = ChatMessage.of({"role": "tool", "tool_call_id": "call_1", "content": "seen"})
FIRST = "how deep is the lake here?"
BRANCH = [asked(f"{FIRST} (be brief)"), said("ok"), asked("look"), called("call_1", "{}"), RESULT, said("done")]


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        (BRANCH, True),
        ([asked(FIRST), *BRANCH[1:]], True),  # the reminder was taken off
        ([asked("(be brief)"), *BRANCH[1:]], False),  # as short as what others say
        ([BRANCH[0], BRANCH[1], BRANCH[2], BRANCH[5]], True),  # the calls were left out
        ([BRANCH[0], BRANCH[1], asked("other"), BRANCH[5]], False),  # before them another question
        ([asked(f"{FIRST} (be"), *BRANCH[1:]], True),
        ([asked(f"{FIRST} (b"), *BRANCH[1:]], False),  # in the middle of a word
        ([asked(f"{FIRST} (be brief) now"), *BRANCH[1:]], False),
        ([*BRANCH[:5], said("other")], False),
        (BRANCH[:4], False),  # the branch goes on
        ([asked("before"), *BRANCH], False),
        (BRANCH[2:], False),  # short, and something else stands before it
        ([], False),
    ],
)
def test_a_branch_goes_on_with_what_clients_change_of_it(messages: list[ChatMessage], found: bool) -> None:
    assert continues(messages, reversed(BRANCH), from_root=True) is found


def test_one_of_several_messages_of_the_user_in_a_row_may_be_left_out() -> None:
    now, question = asked("It is noon."), asked(f"{FIRST} (be brief)")
    assert continues([question, said("ok")], [said("ok"), now, question], from_root=True)
    assert continues([question, now, said("ok")], [said("ok"), now, question], from_root=True)
    assert not continues([asked("brief?"), said("ok")], [said("ok"), now, question], from_root=True)
    assert not continues([question, said("ok")], [said("ok"), now, said("yes"), question], from_root=True)
    assert not continues([question, said("ok")], [said("ok"), now], from_root=True)


def test_replies_at_the_end_of_a_branch_have_to_say_enough() -> None:
    end = [asked("and now?"), said("yes, it is that deep everywhere")]
    short = [asked("and now something longer, which many may say?"), said("yes")]
    assert continues(end, [*end[::-1], *BRANCH[::-1]], from_root=True)
    assert not continues(short, [*short[::-1], *BRANCH[::-1]], from_root=True)
    assert continues([asked("before"), *end], end[::-1], from_root=False)
    assert not continues([asked("before"), *end], end[::-1], from_root=True)
    assert not continues([asked("before"), *short], short[::-1], from_root=False)
    two = [*short, asked("so?"), said("no")]
    assert continues(two, [*two[::-1], *BRANCH[::-1]], from_root=True)


def test_a_branch_of_which_all_replies_were_left_out_has_to_be_the_whole_conversation() -> None:
    silent = [called("call_1", "{}"), asked("look at this, please, at once")]
    assert continues(silent[1:], silent, from_root=True, silent=True)
    assert not continues(silent[1:], silent, from_root=True)
    assert not continues(silent[1:], silent, from_root=False, silent=True)
    assert not continues(BRANCH[:1], BRANCH[::-1], from_root=True, silent=True)


def test_a_text_is_longer_where_whole_words_stand_before_or_behind_it() -> None:
    assert is_longer("Today is Monday. How deep?", "How deep?")
    assert not is_longer("how", "how")
    assert not is_longer("how", "")
