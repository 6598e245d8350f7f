"""The clearer that knows the future."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.backtest.clairvoyant import PLACEHOLDER, Clairvoyant
from proxy.backtest.recall import References
from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.dialects.chat.protocol import problems

RECORDED = Path(__file__).parents[1] / "data" / "trajectories"


def calling(number: int, **arguments: Any) -> Message:
    function = {"name": "f", "arguments": json.dumps(arguments)}
    calls = [{"id": f"call_{number}", "type": "function", "function": function}]
    return ChatMessage.of({"role": "assistant", "content": None, "tool_calls": calls})


def result(number: int, text: str) -> Message:
    return ChatMessage.of({"role": "tool", "tool_call_id": f"call_{number}", "content": text})


HISTORY = [
    ChatMessage.of({"role": "user", "content": "book something"}),
    calling(0),
    result(0, "flight: HAT136, seat: 14C7"),
    calling(1),
    result(1, "weather in ORD77 is mild and sunny"),
    calling(2, flight="HAT136"),
    result(2, "done"),
    calling(3, other="NEW99"),
    result(3, "a long and empty answer"),
]


def texts(position: int) -> list[str]:
    view = Clairvoyant(References([], HISTORY)).view(position)
    return [message.text for message in view if message.is_result]


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        (1, []),
        (3, ["flight: HAT136, seat: 14C7"]),
        (5, ["flight: HAT136, seat: 14C7", "weather in ORD77 is mild and sunny"]),
        (7, [PLACEHOLDER, PLACEHOLDER, "done"]),
        (9, [PLACEHOLDER, PLACEHOLDER, "done", "a long and empty answer"]),
    ],
)
def test_a_result_stands_until_its_last_use_and_is_seen_once_in_any_case(
    position: int, expected: list[str]
) -> None:
    assert texts(position) == expected


def test_all_but_results_stands_as_it_was() -> None:
    view = Clairvoyant(References([], HISTORY)).view(9)

    assert [kept for kept in view if not kept.is_result] == [kept for kept in HISTORY if not kept.is_result]
    assert [message.answers for message in view] == [message.answers for message in HISTORY]


def test_a_sparing_one_keeps_the_newest_message_that_holds_a_value() -> None:
    history = [
        result(0, "flight: HAT136, seat: 14C7"),
        result(1, "booked flight: HAT136"),
        ChatMessage.of({"role": "assistant", "content": "thanks"}),
        calling(2, flight="HAT136"),
        calling(3, seat="14C7"),
    ]
    references = References([], history)

    def standing(clearer: Clairvoyant, position: int) -> list[bool]:
        view = clearer.view(position)
        return [view[place] == history[place] for place in range(2)]

    assert standing(Clairvoyant(references), 3) == [True, True]
    assert standing(Clairvoyant(references), 4) == [True, False]
    assert standing(Clairvoyant(references, sparing=True), 3) == [True, True]

    seatless = References([], history[:4])
    assert standing(Clairvoyant(seatless), 3) == [True, True]
    assert standing(Clairvoyant(seatless, sparing=True), 3) == [False, True]


@pytest.mark.parametrize("sparing", [False, True])
@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.json")), ids=lambda path: path.stem)
def test_of_a_real_session_it_loses_nothing_that_is_used_and_sends_no_more(path: Path, sparing: bool) -> None:
    messages = [ChatMessage.of(each) for each in json.loads(path.read_text("utf-8"))["messages"]]
    references = References([], messages)
    clairvoyant = Clairvoyant(references, sparing=sparing)

    for position in references.positions:
        view, before = clairvoyant.view(position), messages[:position]
        found = references.judge(position, view)
        assert found.every.present == found.every.grounded
        assert sparing or found.every.bound == found.every.bound_possible
        assert sum(len(message.raw) for message in view) <= sum(len(message.raw) for message in before)
        assert problems(view) == problems(before)
