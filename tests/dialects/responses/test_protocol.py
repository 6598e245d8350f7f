"""Spans, and the rules about calls and reasoning."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.dialects import Message, dialect_named
from proxy.dialects.responses.items import Item
from proxy.dialects.responses.protocol import NO_RESULT
from tests.dialects.responses.test_items import CALL, CUSTOM, OUTPUT, REASONING, SHELL, item, said, turn

API = dialect_named("responses")
ASK = item({"role": "user", "content": "a"})
LOOK = turn(REASONING, CALL)
SEEN = item(OUTPUT)
DRAWN = item({"type": "custom_tool_call_output", "call_id": "c2", "output": "done"})
REFERENCE = {"type": "item_reference", "id": "fc_9"}


def test_a_turn_and_its_results_are_one_span() -> None:
    talk: list[Message] = [ASK, LOOK, SEEN, turn(said("a")), ASK, turn(CALL, CUSTOM), DRAWN, ASK, SEEN, ASK]
    found = [(span.start, span.stop, span.round) for span in API.spans(talk)]
    assert found == [(0, 1, 1), (1, 3, 1), (3, 4, 1), (4, 5, 2), (5, 9, 3), (9, 10, 4)]
    assert API.problems(talk) == ["message 5: item with the id of another one"]


def test_the_result_of_an_async_call_may_come_at_any_time() -> None:
    begun = turn({**CALL, "async": True}, said("Meanwhile"))
    assert API.repair([ASK, begun, ASK, turn(said("a")), SEEN, turn(said("b")), ASK]).notes == ()
    assert API.repair([ASK, begun, SEEN, ASK]).notes == ()
    assert API.repair([ASK, begun, ASK, turn(said("a")), ASK]).notes == ()
    twice = API.repair([ASK, begun, ASK, turn(said("a")), SEEN, turn(said("b")), SEEN])
    assert twice.notes == ("repaired: 1 x tool result without a call, left out",)
    assert API.repair([ASK, begun, ASK, turn(said("a")), DRAWN]).notes == twice.notes


@pytest.mark.parametrize(
    ("talk", "left", "problem"),
    [
        ([ASK, LOOK, ASK], [ASK, LOOK, None, ASK], "tool call without a result, a result was put in"),
        ([ASK, LOOK], [ASK, LOOK, None], "tool call without a result"),
        ([ASK, LOOK, turn(said("a")), SEEN], [ASK, LOOK, None, turn(said("a"))], "tool result without a call"),
        ([SEEN, ASK], [ASK], "tool result without a call, left out"),
        ([LOOK, SEEN, SEEN], [LOOK, SEEN], "second result of a tool call"),
        ([LOOK, item({**OUTPUT, "type": "custom_tool_call_output"})], [LOOK, None], "tool result without a call"),
        ([ASK, turn({**CALL, "call_id": ""})], [ASK], "tool call without an id"),
        ([turn(CALL, {**CALL, "id": "fc_2"}), SEEN], [None, SEEN], "tool call with the id of another one"),
        ([turn(REASONING), ASK], [ASK], "reasoning without the item after it"),
        (
            [turn(REASONING, said("a")), ASK, turn(REASONING, said("b"))],
            [turn(REASONING, said("a")), ASK, None],
            "same id",
        ),
        ([turn(said("a", id="m")), ASK, turn(said("b", id="m"))], [turn(said("a", id="m")), ASK, None], "same id"),
    ],
)
def test_what_breaks_the_rules_is_repaired(talk: list[Item], left: list[Item | None], problem: str) -> None:
    repaired = API.repair(talk)
    assert len(repaired.messages) == len(left)
    for message, source, wanted in zip(repaired.messages, repaired.sources, left, strict=True):
        assert (source is None) == (wanted is None)
        assert wanted is None or message is wanted or message == wanted
    assert repaired.notes
    assert problem in " ".join(repaired.notes) or problem == "same id"
    assert API.repair(repaired.messages).notes == ()


@pytest.mark.parametrize(
    "talk",
    [
        [ASK, LOOK, ASK, SEEN],
        [ASK, turn(SHELL), ASK],
        [ASK, turn(REFERENCE), SEEN],
        [ASK, turn({"type": "function_call", "call_id": "c1", "name": "n", "arguments": "{}", "id": 5}), SEEN],
    ],
)
def test_what_keeps_the_rules_stays_the_very_same(talk: list[Item]) -> None:
    repaired = API.repair(talk)
    assert [id(message) for message in repaired.messages] == [id(message) for message in talk]
    assert (repaired.notes, repaired.sources) == ((), tuple(range(len(talk))))


def test_a_text_stands_in_for_a_result() -> None:
    made = API.repair([ASK, turn(CUSTOM), ASK]).messages[2]
    assert made.data == {"type": "custom_tool_call_output", "call_id": "c2", "output": NO_RESULT}
    assert API.result("c1", "x").data == {"type": "function_call_output", "call_id": "c1", "output": "x"}


def test_what_the_proxy_says_is_an_entry() -> None:
    assert API.spoken("user", "hi").data == {"type": "message", "role": "user", "content": "hi"}
    assert (API.spoken("assistant", "hi").role, API.spoken("assistant", "hi").text) == ("assistant", "hi")
    assert API.message(b'{"role":"user"}').role == "user"


def test_what_other_apis_ask_for_is_not_asked_here() -> None:
    api = API.requests
    assert api.demanded_order(400, b"roles must alternate") is None
    assert api.reordered([ASK, ASK], "alternate") == (ASK, ASK)
    assert api.marked([ASK], [0], "openai") == (ASK,)
    assert api.broken([ASK], 0, 1, "openai") == (ASK,)
    assert not api.refuses_usage(b"stream_options")
    assert (api.decides_caching({}), api.decides_caching({"prompt_cache_options": b"{}"})) == (False, True)
    assert api.overflow_of(400, b'{"error":{"code":"context_length_exceeded","message":"exceeds the context window"}}')


_IDS = st.sampled_from(["c1", "c2", ""])
_ITEMS = st.one_of(
    st.just(REASONING),
    st.just(said("a")),
    st.just(REFERENCE),
    st.builds(lambda name: {**CALL, "call_id": name, "id": f"fc_{name}"}, _IDS),
    st.builds(lambda name: {**CUSTOM, "call_id": name}, _IDS),
)
_ENTRIES = st.one_of(
    st.just(ASK),
    st.builds(lambda items: turn(*items), st.lists(_ITEMS, min_size=1, max_size=4)),
    st.builds(lambda name: item({**OUTPUT, "call_id": name}), _IDS),
    st.builds(lambda name: item({**OUTPUT, "type": "custom_tool_call_output", "call_id": name}), _IDS),
)


@settings(max_examples=100)
@given(st.lists(_ENTRIES, max_size=8))
def test_a_repair_leaves_nothing_to_repair(talk: list[Item]) -> None:
    repaired = API.repair(talk)
    assert API.problems(repaired.messages) == []
    spans = API.spans(talk)
    assert [place for span in spans for place in range(span.start, span.stop)] == list(range(len(talk)))
