from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.backtest.cost import CacheRule
from proxy.backtest.histories import read_file
from proxy.backtest.recall import References
from proxy.backtest.replay import (
    CLEARED,
    NONE,
    ORACLE_CLEARED,
    Counted,
    ReplayedRequest,
    ReplayModel,
    baseline,
    every_baseline,
    oracle,
    replayed,
)
from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.dialects.chat.protocol import CHAT
from proxy.errors import InvalidRequest
from tests.backtest.histories import COUNTER, agent, call, counted, reply, result, user

TRAJECTORIES = sorted((Path(__file__).parents[1] / "data" / "trajectories").glob("*.json"))


def requests(ready: Counted, name: str) -> list[ReplayedRequest]:
    return list(replayed(ready, baseline(name), [CacheRule()], ReplayModel()))


def texts(request: ReplayedRequest) -> list[str]:
    return [message.text or "call" for message in request.sent.messages]


TALK = [user("1"), reply("2"), user("3"), reply("4"), user("5"), reply("6"), user("7")]
TOOLS = [
    user("go"),
    *(call("a", "b"), result("a", "A"), result("b", "B")),
    *(call("c"), result("c", "C")),
    *(call("d"), result("d", "D")),
    reply("done"),
]


def test_no_trimming_sends_everything() -> None:
    found = requests(counted(TALK), "baseline:none")
    assert [texts(request) for request in found] == [["1"], ["1", "2", "3"], [*"12345"], [*"1234567"]]
    assert not any(request.sent.moved for request in found)


def test_last_sends_the_last_messages() -> None:
    found = requests(counted([{"role": "system", "content": "s"}, *TALK]), "baseline:last=3")
    assert [texts(request) for request in found] == [["s", "1"], [*"s123"], [*"s345"], [*"s567"]]
    assert [request.sent.moved for request in found] == [False, False, True, True]


def test_last_never_begins_with_a_tool_result() -> None:
    found = requests(counted(TOOLS), "baseline:last=4")
    assert [texts(request) for request in found] == [
        ["go"],
        ["go", "call", "A", "B"],
        ["call", "C"],  # A and B would stand there without their call
        ["call", "C", "call", "D"],
    ]
    found = requests(counted(TOOLS), "baseline:last=1")
    assert texts(found[1]) == ["call", "A", "B"]  # nothing but a result is left: its span goes whole


def test_mask_clears_all_but_the_newest_results() -> None:
    found = requests(counted(TOOLS), "baseline:mask=1")
    assert [texts(request) for request in found] == [
        ["go"],
        ["go", "call", CLEARED, "B"],
        ["go", "call", CLEARED, CLEARED, "call", "C"],
        ["go", "call", CLEARED, CLEARED, "call", CLEARED, "call", "D"],
    ]
    assert [request.sent.moved for request in found] == [False, False, True, True]


def test_clear_starts_above_its_limit_and_is_for_good() -> None:
    ready = counted(agent(12))
    found = requests(ready, "baseline:clear=3000")
    cleared = [texts(request).count(CLEARED) for request in found]
    moves = [place for place, request in enumerate(found) if request.sent.moved]
    assert cleared[0] == 0
    assert cleared[-1] > 0
    assert cleared == sorted(cleared)
    assert 1 <= len(moves) < 6
    for place in moves:
        # What is above the limit is cleared but for three; then it may grow to it again.
        assert cleared[place] == place - 3
        assert found[place - 1].tokens <= 3000
    assert [place for place in range(1, len(found)) if cleared[place] > cleared[place - 1]] == moves


def test_slide_drops_the_oldest_at_every_request() -> None:
    found = requests(counted(agent(12)), "baseline:slide=3000")
    assert all(request.tokens <= 3000 for request in found)
    assert all(request.sent.moved for request in found[8:])
    assert all(texts(request)[:2] == ["be brief", "do all of it"] for request in found)


def test_middle_keeps_both_ends() -> None:
    ready = counted(agent(12))
    found = requests(ready, "baseline:middle=3000")
    assert all(request.tokens <= 3000 for request in found)
    last = texts(found[-1])
    assert last[:4] == ["be brief", "do all of it", "call", ready.messages[2].text]
    assert last[-1] == ready.messages[24].text
    whole = [message.raw for message in ready.messages[:25]]
    sent = [message.raw for message in found[-1].sent.messages[1:]]
    gap = len(whole) - len(sent)
    assert any(whole[:cut] + whole[cut + gap :] == sent for cut in range(len(sent)))


def test_middle_always_keeps_the_newest_span() -> None:
    ready = counted([user("go"), call("a"), result("a", "word " * 2000), reply("ok")])
    found = requests(ready, "baseline:middle=100")
    assert [texts(request) for request in found] == [["go"], ["go", "call", ready.messages[2].text]]


def test_the_oracle_keeps_values_that_are_used_again() -> None:
    said = [
        user("look"),
        *(call("a", arguments='{"at": "here"}'), result("a", "the number is 48151623 and nothing else matters")),
        *(call("b", arguments='{"at": "there"}'), result("b", "nothing at all is to be found in this place")),
        *(call("c", arguments='{"at": "everywhere"}'), result("c", "and nothing in that one, as it seems to be")),
        call("d", arguments='{"number": "48151623"}'),
        *(result("d", "right"), reply("done")),
    ]
    found = requests(counted(said), "baseline:oracle")
    asked = texts(found[3])
    assert asked[2] == "48151623"
    assert asked[4] == "[cleared]"
    assert asked[6].startswith("and nothing")  # it has not been sent yet
    assert texts(found[4])[2] == "48151623"  # what was sent once keeps its bytes


def test_the_name_of_a_baseline_has_its_number_unless_it_is_the_usual_one() -> None:
    assert [each.name for each in every_baseline()] == [
        *("baseline:none", "baseline:last", "baseline:slide", "baseline:mask", "baseline:clear"),
        *("baseline:middle", "baseline:oracle"),
    ]
    assert baseline("baseline:last=20").name == "baseline:last"
    assert baseline("baseline:last=7").name == "baseline:last=7"
    assert baseline("baseline:slide=7000").name == "baseline:slide=7000"
    assert all(each.about for each in every_baseline())
    assert not any(each.by_price for each in every_baseline())
    assert baseline(NONE).about == "no trimming"


@pytest.mark.parametrize(
    "name", ["baseline:", "baseline:nine", "baseline:none=3", "baseline:oracle=1", "baseline:last=", "baseline:last=0"]
)
def test_an_unknown_baseline_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="baseline:last"):
        baseline(name)


@pytest.mark.parametrize("name", ["baseline:last=-1", "baseline:last=1.5", "baseline:mask=²"])
def test_a_number_that_is_not_whole_and_positive_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="whole number"):
        baseline(name)


@pytest.mark.parametrize("path", TRAJECTORIES, ids=lambda path: path.stem)
def test_no_baseline_breaks_the_protocol(path: Path) -> None:
    (history,) = read_file(path)
    ready = Counted(history, COUNTER)
    already = len(CHAT.problems(ready.messages))  # real histories are broken at times
    for strategy in every_baseline():
        for request in replayed(ready, strategy, [CacheRule()], ReplayModel()):
            assert len(CHAT.problems(request.sent.messages)) <= already


# -------------------------------------------------------------------------------- the oracle


def calling(number: int, **arguments: Any) -> Message:
    function = {"name": "f", "arguments": json.dumps(arguments)}
    calls = [{"id": f"call_{number}", "type": "function", "function": function}]
    return ChatMessage.of({"role": "assistant", "content": None, "tool_calls": calls})


def gave(number: int, text: str) -> Message:
    return ChatMessage.of({"role": "tool", "tool_call_id": f"call_{number}", "content": text})


HISTORY: list[Message] = [
    ChatMessage.of({"role": "user", "content": "book something"}),
    calling(0),
    gave(0, "flight: HAT136, seat: 14C7"),
    calling(1),
    gave(1, "weather in ORD77 is mild and sunny"),
    calling(2, flight="HAT136"),
    gave(2, "done"),
    calling(3, other="NEW99"),
    gave(3, "a long and empty answer"),
]


def results_sent(position: int) -> list[str]:
    view = oracle(References([], HISTORY))(position)
    return [message.text for message in view if message.is_result]


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        (1, []),
        (3, ["flight: HAT136, seat: 14C7"]),
        (5, ["HAT136", "weather in ORD77 is mild and sunny"]),
        (7, ["HAT136", ORACLE_CLEARED, "done"]),
        (9, ["HAT136", ORACLE_CLEARED, "done", "a long and empty answer"]),
    ],
)
def test_the_oracle_sends_a_result_whole_once(position: int, expected: list[str]) -> None:
    assert results_sent(position) == expected


def test_the_oracle_changes_only_tool_results_and_long_arguments() -> None:
    view = oracle(References([], HISTORY))(9)
    assert [kept for kept in view if not kept.is_result] == [kept for kept in HISTORY if not kept.is_result]
    assert [message.answers for message in view] == [message.answers for message in HISTORY]
    body = "words about HAT136 and seat 14C7 in a file that is long enough to be left out"
    custom = {"id": "call_5", "type": "custom", "custom": {"name": "patch", "input": f"{body} and CRJ700"}}
    written = calling(4, path="notes.txt", content=body)
    both = ChatMessage.of({**written.data, "tool_calls": [*written.data["tool_calls"], custom]})
    history = [both, gave(4, "ok"), calling(6, seat="14C7"), calling(7, plane="CRJ700")]
    arguments = [call.arguments for call in oracle(References([], history))(4)[0].calls]
    assert arguments == ['{"kept":"14C7 CRJ700"}', ORACLE_CLEARED]


def test_a_value_stays_where_it_was_first_unless_a_text_has_it_anyway() -> None:
    history = [
        gave(0, "flight: HAT136, seat: 14C7, gate B22"),
        gave(1, "booked flight: HAT136"),
        ChatMessage.of({"role": "assistant", "content": "your gate is B22"}),
        calling(2, flight="HAT136", gate="B22"),
        calling(3, seat="14C7"),
    ]
    view = oracle(References([], history))(4)
    assert [message.text for message in view[:2]] == ["HAT136 14C7", ORACLE_CLEARED]


@pytest.mark.parametrize("path", TRAJECTORIES, ids=lambda path: path.stem)
def test_the_oracle_loses_nothing_of_a_real_session_and_sends_no_more(path: Path) -> None:
    messages = [ChatMessage.of(each) for each in json.loads(path.read_text("utf-8"))["messages"]]
    references = References([], messages)
    choose = oracle(references)

    for position in references.positions:
        view, before = choose(position), messages[:position]
        found = references.judge(position, view)
        assert found.every.present == found.every.grounded
        assert sum(len(message.raw) for message in view) <= sum(len(message.raw) for message in before)
        assert CHAT.problems(view) == CHAT.problems(before)
