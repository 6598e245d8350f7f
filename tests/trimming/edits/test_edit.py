"""What all edits of tool output have in common."""

from __future__ import annotations

from typing import Literal

from proxy.dialects import Message
from proxy.trimming.edits.edit import Shortened, ToolOutputEdit
from proxy.trimming.model import Entry
from tests.trimming.edits.golden import Case


class SayLess(ToolOutputEdit, frozen=True):
    """Replaces every result by one text."""

    type: Literal["say_less"] = "say_less"
    """Which one."""
    text: str = "less"
    """What is said instead."""

    def shorten(self, message: Message, entry: Entry) -> Shortened | None:
        if message.text == self.text:
            return None
        return Shortened(message=message.replacing("content", f"{self.text}"), reason=f"see {entry.ref}")


def draft(*before: str, pin: str = "^$never") -> Case:
    return Case({"before": list(before), "pin": [{"regex": pin}]})


LOG = (
    "user a long question",
    "assistant | a f",
    "tool a a long result",
    "assistant | f()",
    "function f another one",
)


def test_it_asks_for_each_result_of_both_forms_and_for_nothing_else() -> None:
    changes = list(SayLess().apply(draft(*LOG).draft()))
    assert [(change.position, change.reason) for change in changes] == [(2, "see ref_2"), (4, "see ref_4")]
    assert [(change.edit, change.tokens_before, change.tokens_after) for change in changes] == [
        ("say_less", 23, 14),
        ("say_less", 21, 14),
    ]


def test_what_is_protected_is_not_asked_for() -> None:
    changes = list(SayLess().apply(draft(*LOG, pin="long result").draft()))
    assert [change.position for change in changes] == [4]


def test_what_costs_no_less_stays() -> None:
    assert list(SayLess(text="something much longer than that").apply(draft(*LOG).draft())) == []


def test_what_is_short_already_stays() -> None:
    before = draft(*LOG).draft()
    assert list(SayLess().apply(before.after(list(SayLess().apply(before))))) == []
