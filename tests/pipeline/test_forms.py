"""Other forms of stored messages are offered to the store once."""

from __future__ import annotations

from proxy.conversation import body_of
from proxy.dialects.chat.message import ChatMessage
from proxy.pipeline.forms import Variants
from proxy.store import Mark

STORED = ChatMessage(b'{"role":"assistant","content":"hi","refusal":null}')
SENT = ChatMessage(b'{"role":"assistant","content":"hi"}')


def mark(node: str) -> Mark:
    return Mark(node=node, depth=1, body=body_of(STORED), tokens=3, arrival=None)


def test_only_what_differs_is_a_form_and_each_is_offered_once() -> None:
    forms = Variants()
    assert list(forms.new("s", [STORED, SENT], [mark("a"), mark("b")])) == [("b", SENT)]
    assert list(forms.new("s", [STORED, SENT], [mark("a"), mark("b")])) == []


def test_a_form_belongs_to_its_place_and_its_session() -> None:
    forms = Variants()
    for session, node in (("s", "a"), ("s", "b"), ("t", "a")):
        assert list(forms.new(session, [SENT], [mark(node)])) == [(node, SENT)]


def test_new_messages_have_no_stored_form() -> None:
    assert list(Variants().new("s", [SENT, SENT], [mark("a")])) == [("a", SENT)]


def test_what_was_forgotten_is_offered_again() -> None:
    forms = Variants(4)
    names = [str(number) for number in range(9)]
    for name in names:
        assert list(forms.new("s", [SENT], [mark(name)]))
    assert not list(forms.new("s", [SENT], [mark(names[-1])]))
    assert list(forms.new("s", [SENT], [mark(names[0])]))
