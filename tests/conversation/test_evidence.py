"""Evidence: what a reply is known by."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.conversation import TELLING, Witness
from proxy.conversation.evidence import is_random, squeezed
from proxy.dialects.chat.message import ChatMessage

OURS = Witness(tenant="team", dialect="chat")
LONG = "This sentence is long enough to tell."


def said(content: Any, *ids: str, role: str = "assistant") -> ChatMessage:
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in ids]
    return ChatMessage.of({"role": role, "content": content} | ({"tool_calls": calls} if calls else {}))


def kinds(message: ChatMessage) -> list[str]:
    return [evidence.kind for evidence in OURS.of(message, "0" * 40)]


@pytest.mark.parametrize(
    ("name", "random"),
    [
        ("call_9f86d081884c7d659a2feaa0", True),
        ("toolu_01A09q90qw90lq917835lq9", True),
        ("chatcmpl-tool-5f3a9c0e7d", True),
        ("D681PevKs", True),
        ("550e8400-e29b-41d4-a716-446655440000", True),
        ("function-call-1234567890123456", True),
        ("functions.get_weather:0", False),
        ("call_1", False),
        ("call_00000001", False),
        ("tool_call_20260101", False),
        ("searchTheWholeWeb", False),
        ("", False),
    ],
)
def test_ids_that_others_have_too_are_no_evidence(name: str, random: bool) -> None:
    assert is_random(name) is random


def test_a_reply_is_known_by_its_place_its_ids_and_its_text() -> None:
    assert kinds(said(LONG, "call_9f86d081884c7d659a2feaa0", "call_1")) == ["place", "id", "text"]
    assert kinds(said(None, "call_1")) == ["place"]


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
