from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.dialects.chat.completion import Deltas
from proxy.dialects.chat.tool_stream import StreamedCalls

Data = dict[str, Any]
NAMES = frozenset({"ours", "ours_too"})


def call(index: int | None, name: Any = None, arguments: Any = None, **more: Any) -> Data:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    item = {"function": function, **more}
    return item if index is None else {"index": index, **item}


def learnt(*items: Any) -> StreamedCalls:
    """Return what is known after these deltas, each in a chunk of its own."""
    calls = StreamedCalls(NAMES)
    for item in items:
        calls.learn([item])
    return calls


@pytest.mark.parametrize(
    ("items", "name", "own"),
    [
        ([call(0, "theirs")], "theirs", False),
        ([call(0, "o")], "o", None),
        ([call(0, "ours", "")], "ours", None),
        ([call(0, "ours", "{}")], "ours", True),
        ([call(0, "our", "{}")], "our", False),
        ([call(0, None, "{}")], None, None),
        ([call(0, None, "{}"), call(0, "ours"), call(0, None, "")], "ours", None),
        ([call(0, "ours"), call(0, "ours", "{"), call(0, "ours", "}")], "ours", True),
        ([call(0, "ours"), call(0, "_too"), call(0, None, "{}")], "ours_too", True),
        ([call(0, "ours"), call(0, "_three")], "ours_three", False),
        ([call(0, "theirs"), call(0, "_too"), call(0, None, "{}")], "theirs_too", False),
        ([call(0, "our"), call(0, "ours"), call(0, "ours_too", "{}")], "ours_too", True),
        ([call(0, "ours", "{"), call(0, "_too", "}")], "ours", True),
        ([call(0, "ours_x", "{"), call(0, "y", "}")], "ours_x", False),
        ([{"index": 0, "custom": {"name": "ours", "input": "x"}}], "ours", True),
        ([{"index": 0, "function": "odd"}], None, None),
        ([call(0, ["odd"], "{}")], ["odd"], False),
    ],
    ids=str,
)
def test_when_a_name_is_known(items: list[Data], name: Any, own: bool | None) -> None:
    calls = learnt(*items)
    [found] = calls.begun
    assert (found.name.value, found.own) == (name, own)
    assert calls.undecided is (own is None)
    assert calls.any_own is (own is True)
    calls.decide()
    assert found.own is (isinstance(name, str) and name in NAMES)
    assert not calls.undecided


@pytest.mark.parametrize("items", [None, "x", {}, [1, "x", None]])
def test_what_is_no_list_of_deltas_is_none(items: Any) -> None:
    assert StreamedCalls(NAMES).learn(items) == []


INDEXES = st.none() | st.integers(0, 2)
IDS = st.sampled_from([None, "", "a", "b", 1])
TOLD = st.sampled_from([None, "", "o", "ou", "ours", "_too", "ours_too", "r", 7])
ARGUMENTS = st.sampled_from([None, "", "x", {"q": 1}])
KINDS = st.sampled_from(["function", "custom"])


@given(KINDS, st.lists(st.tuples(INDEXES, IDS, TOLD, ARGUMENTS), max_size=8))
@settings(deadline=None)
def test_calls_are_those_that_the_message_has(
    kind: str, deltas: list[tuple[int | None, Any, Any, Any]]
) -> None:
    """Whatever is said in whichever order: what is shown and what is answered must be of one mind."""
    calls, message = StreamedCalls(NAMES), Deltas()
    for index, identity, name, arguments in deltas:
        item = call(index, name, arguments, id=identity)
        item[kind] = item.pop("function")
        if kind == "custom":
            item[kind]["input"] = item[kind].pop("arguments", None)
        calls.learn([item])
        message.add({"tool_calls": [item]})
    built = message.message().get("tool_calls", [])
    found = [(each.id, each.name.value) for each in calls.begun]
    assert sorted(found, key=repr) == sorted(
        ((each.get("id", ""), each[kind].get("name")) for each in built), key=repr
    )
    calls.decide()
    ours = [each[kind].get("name") in NAMES for each in built]
    if len({index is None for index, *_ in deltas}) == 1:  # nobody numbers some deltas and not others
        assert sum(each.own is True for each in calls.begun) == sum(ours)
