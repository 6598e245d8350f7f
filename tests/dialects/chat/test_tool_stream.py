"""What a client is shown of a stream in which the model calls the proxy's own tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects.chat.completion import Deltas
from proxy.dialects.chat.own_tools import StreamedCall, StreamedCalls, ToolStreamFilter
from proxy.dialects.own_tools import BROKE_OFF, SAID_NOTHING, STOPPED
from proxy.dialects.sse import Event, EventDecoder

Data = dict[str, Any]
NAMES = ("ours", "ours_too")
BASE = {"id": "1", "created": 1, "model": "m"}


def chunk(delta: Any = None, finish: str | None = None, **more: Any) -> Data:
    return {**BASE, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}


def event(data: Any) -> Event:
    raw = data if isinstance(data, bytes) else b"data: " + orjson.dumps(data) + b"\n\n"
    return EventDecoder().feed(raw)[0]


def call(index: int | None, name: str | None = None, arguments: Any = None, **more: Any) -> Data:
    function = {"name": name, "arguments": arguments}
    function = {key: value for key, value in function.items() if value is not None}
    item = {"function": function, **more}
    return item if index is None else {"index": index, **item}


def calls(*items: Data, **more: Any) -> Data:
    return chunk({"tool_calls": list(items), **more})


class Shown:
    """A sieve, and what it shows for one chunk after another."""

    def __init__(self, **how: Any) -> None:
        self.sieve = ToolStreamFilter(NAMES, **{"hides_usage": False, **how})

    def take(self, data: Any) -> list[Data]:
        return self.read(self.sieve.take(event(data)))

    def read(self, raw: bytes) -> list[Data]:
        return [orjson.loads(found.data) for found in EventDecoder().feed(raw) if found.data is not None]

    def deltas(self, *chunks: Data) -> list[Data]:
        """Return the deltas that are shown for all of these together."""
        return [found["choices"][0]["delta"] for data in chunks for found in self.take(data)]


@pytest.mark.parametrize(
    "data",
    [
        b": ping\n\n",
        b"data: hello\n\n",
        b"data: [1]\n\n",
        b"event: x\nid: 7\ndata: {}\n\n",
        {"choices": []},
        {"choices": [1]},
        {"choices": [{"delta": {"content": "a"}}, {"delta": {"content": "b"}, "index": 1}]},
        {"error": {"message": "no"}},
        {"choices": [], "usage": {"n": 1}},
        chunk(None),
        chunk("x"),
        chunk({"content": "hi"}, usage={"n": 1}),
        chunk({"tool_calls": None, "content": ""}),
        chunk({"tool_calls": ["junk"]}),
        chunk({"tool_calls": [{"index": 0, "function": "junk"}]}, "tool_calls"),
        calls(call(0, "theirs", "", id="a")),
        calls(call(None, "theirs", "{}", id="a"), call(None, "more", "{}", id="b")),
        calls({"index": 3, "type": "custom", "custom": {"name": "theirs", "input": ""}}, content="so"),
        {"choices": [{"message": {"role": "assistant", "tool_calls": [call(None, "theirs")]}}]},
    ],
    ids=str,
)
def test_calls_of_other_tools_are_shown_as_they_came(data: Any) -> None:
    given = event(data)
    sieve = ToolStreamFilter(NAMES, hides_usage=False)
    assert sieve.take(given) == given.raw
    assert not sieve.hides
    assert sieve.end() == b""
    assert not sieve.again


def test_a_usage_that_only_the_proxy_asked_for_is_not_shown() -> None:
    shown = Shown(hides_usage=True)
    assert shown.take({"choices": [], "usage": {"n": 1}}) == []
    assert shown.sieve.usage == {"n": 1}


@pytest.mark.parametrize(
    "pieces",
    [
        [call(0, "our", ""), call(0, "sely", "{}")],
        [call(0, None, "", id="a"), call(0, "ours_", ""), call(0, "x")],
        [call(0, "ours", ""), call(0, "_2")],
        [call(0, "o"), call(0, None, "{}")],
        [call(0, "ours_t"), call(0, "ours_t", "{")],
        [call(0, "ours"), call(0, "ours_x")],
    ],
    ids=str,
)
def test_a_name_that_is_not_ours_is_shown_as_soon_as_that_is_known(pieces: list[Data]) -> None:
    shown = Shown()
    *waiting, last = [calls(piece) for piece in pieces]
    for data in waiting:
        assert shown.take(data) == []
        assert shown.sieve.hides
    assert shown.take(last) == [*waiting, last]
    assert not shown.sieve.hides
    more = calls(call(0, None, '{"q":1}'))
    assert shown.take(more) == [more]
    theirs = Deltas()
    for data in (*waiting, last, more):
        theirs.add(data["choices"][0]["delta"])
    [choice] = shown.sieve.reply.choices()
    assert choice.message == theirs.message()


def test_a_name_goes_on_after_it_is_known_not_to_be_ours() -> None:
    shown = Shown()
    pieces = [calls(call(0, piece, "")) for piece in ("ours_", "no", "tes")] + [calls(call(0, None, "{}"))]
    assert [shown.take(data) for data in pieces] == [[], pieces[:2], pieces[2:3], pieces[3:]]
    for account in (shown.sieve.reply.choices()[0].message, shown.sieve.message):
        assert account["tool_calls"][0]["function"] == {"name": "ours_notes", "arguments": "{}"}


@pytest.mark.parametrize(
    "pieces",
    [
        [call(0, "ours", "{}")],
        [call(0, None, "", id="a"), call(0, "ours", ""), call(0, None, "{}")],
        [call(0, "ou", ""), call(0, "rs", ""), call(0, None, "{}")],
        [call(0, "ours", ""), call(0, "_too", ""), call(0, None, "{}")],
        [call(0, "ours", "{"), call(0, "ours", "}")],
        [{"index": 0, "type": "custom", "custom": {"name": "ours", "input": "x"}}],
        [call(0, "ours", {"q": 1})],
    ],
    ids=str,
)
def test_a_name_that_is_ours_is_never_shown(pieces: list[Data]) -> None:
    shown = Shown()
    assert [shown.take(calls(piece)) for piece in pieces] == [[]] * len(pieces)
    assert shown.take(chunk({}, "tool_calls")) == []
    assert shown.sieve.again
    assert shown.sieve.ended
    assert len(shown.sieve.message["tool_calls"]) == 1
    assert (len(shown.sieve.calls.own), shown.sieve.calls.others) == (1, False)
    assert not shown.sieve.last.calls
    assert shown.sieve.end() == b""


def test_a_name_is_whole_at_the_end_at_the_latest() -> None:
    shown = Shown()
    held = [calls(call(0, "our", "", id="a")), calls(call(1, "ours", "", id="b"))]
    assert [shown.take(data) for data in held] == [[], []]
    assert shown.take(chunk({}, "tool_calls")) == [held[0], chunk({}, "tool_calls")]

    shown = Shown()
    assert [shown.take(data) for data in held] == [[], []]
    assert shown.read(shown.sieve.end()) == [held[0]]
    assert not shown.sieve.again


def test_events_after_an_undecided_name_wait_for_it() -> None:
    shown = Shown()
    assert shown.deltas(calls(call(0, None, "", id="a")), calls(call(1, "theirs", "{}", id="b"))) == []
    first = calls(call(0, "ours", "{}"))
    assert shown.deltas(first) == [{"tool_calls": [call(0, "theirs", "{}", id="b")]}]


def test_text_is_shown_at_once() -> None:
    shown = Shown()
    both = calls(call(0, "our", "", id="a"), role="assistant", content="so")
    assert shown.deltas(both) == [{"role": "assistant", "content": "so"}]
    assert shown.deltas(chunk({"content": " on"})) == [{"content": " on"}]
    assert shown.deltas(calls(call(0, "self", "{}"))) == [
        {"tool_calls": [call(0, "our", "", id="a")]},
        {"tool_calls": [call(0, "self", "{}")]},
    ]


def test_one_chunk_may_hold_everything() -> None:
    shown = Shown()
    everything = {"tool_calls": [call(0, "ours", "{}"), call(1, "theirs", "{}")]}
    given = chunk({"role": "assistant", "content": "so", **everything}, "tool_calls", usage={"n": 1})
    kept = {"role": "assistant", "content": "so", "tool_calls": [call(0, "theirs", "{}")]}
    assert shown.take(given) == [chunk(kept, "tool_calls", usage={"n": 1})]

    shown = Shown()
    only = calls(call(0, "ours", "{}"), role="assistant")
    only["choices"][0]["finish_reason"] = "tool_calls"
    assert shown.take(only) == [chunk({"role": "assistant"})]
    assert not shown.sieve.said  # but that somebody is there
    assert shown.sieve.again

    whole = {"choices": [{"message": {"content": "so", "tool_calls": [call(None, "ours")]}, "finish_reason": "stop"}]}
    shown = Shown()
    assert shown.take(whole) == [{"choices": [{"message": {"content": "so"}, "finish_reason": None}]}]


def test_probabilities_of_our_calls_are_not_shown() -> None:
    both = calls(call(0, "ours", "{}"), call(1, "theirs", "{}"))
    both["choices"][0]["logprobs"] = {"content": [{"token": "ours"}]}
    [shown] = Shown().take(both)
    assert shown["choices"][0]["logprobs"] is None


def test_the_client_s_calls_are_numbered_from_zero_on() -> None:
    shown = Shown()
    deltas = shown.deltas(
        calls(call(0, "theirs", "{}", id="a")),
        calls(call(1, "ours", "{", id="b")),
        calls(call(2, "theirs", "{", id="c"), call(1, None, "}")),
        calls(call(3, "theirs", "{}", id="d")),
        calls(call(2, None, "}"), call(0, None, " ")),
    )
    assert [[item["index"] for item in delta["tool_calls"]] for delta in deltas] == [[0], [1], [2], [1, 0]]


def test_calls_without_numbers_and_all_with_the_same() -> None:
    shown = Shown()
    deltas = shown.deltas(
        calls(call(None, "ours", "{", id="a")),
        calls(call(None, None, "}")),
        calls(call(None, None, "", id="a")),
        calls(call(None, "theirs", "{", id="b")),
        calls(call(None, None, "}")),
    )
    assert deltas == [{"tool_calls": [{**call(0, "theirs", "{", id="b")}]}, {"tool_calls": [call(0, None, "}")]}]
    shown = Shown()
    deltas = shown.deltas(
        calls(call(0, "ours", "", id="a")),  # whole, since another one begins in its place
        calls(call(0, "theirs", "{}", id="b")),
        calls(call(0, "theirs", "{}", id="c")),
    )
    assert [delta["tool_calls"][0]["index"] for delta in deltas] == [0, 1]


def test_a_later_round_goes_on_with_the_first() -> None:
    shown = Shown()
    shown.take({"id": "", "created": 0, "model": "", "choices": [], "prompt_filter_results": []})
    shown.take(chunk({"role": "assistant", "content": "so"}))
    shown.take(calls(call(0, "ours", "{}")))
    assert shown.take(chunk({}, "tool_calls")) == []
    assert shown.take({"choices": [], "usage": {"n": 1}}) == []
    assert shown.take({"choices": [], "prompt_filter_results": []}) == []
    assert shown.take(chunk({"content": "lost"}, usage={"n": 2})) == []
    shown.sieve.next(may_ask=True)
    assert shown.sieve.rounds == 1
    assert shown.sieve.message == {}

    other: Data = {"id": "2", "created": 2, "model": "n", "fingerprint": "f"}
    first = {**other, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    assert shown.take(first) == []
    assert shown.take({**other, "choices": []}) == [{**BASE, "fingerprint": "f", "choices": []}]
    assert shown.take(chunk({"content": " on"}, **other, usage={"n": 5})) == [
        chunk({"content": " on"}, fingerprint="f", usage={"n": 7})
    ]
    assert shown.take(chunk({}, "stop", **other)) == [chunk({}, "stop", fingerprint="f")]
    assert shown.take({**other, "choices": [], "usage": {"n": 5}}) == [
        {**BASE, "fingerprint": "f", "choices": [], "usage": {"n": 7}}
    ]
    assert shown.sieve.usage == {"n": 7}
    [choice] = shown.sieve.reply.choices()
    assert choice.message == {"role": "assistant", "content": "so on"}


def test_the_first_to_say_the_role_is_shown_to_say_it() -> None:
    shown = Shown()
    shown.take(calls(call(0, "ours", "{}")))
    shown.take(chunk({}, "tool_calls"))
    shown.sieve.next(may_ask=True)
    assert shown.deltas(chunk({"role": "assistant"}), chunk({"role": "assistant", "content": "x"})) == [
        {"role": "assistant"},
        {"content": "x"},
    ]


def test_an_error_in_a_round_of_ours_is_shown() -> None:
    shown = Shown()
    shown.take(calls(call(0, "ours", "{}")))
    shown.take(chunk({}, "tool_calls"))
    error = {"error": {"message": "no"}}
    assert shown.take(error) == [error]
    assert shown.sieve.said
    assert shown.sieve.reply.error == {"message": "no"}


def test_the_form_of_an_event_stays_where_its_data_changes() -> None:
    shown = Shown()
    shown.sieve.next(may_ask=True)
    data = orjson.dumps(chunk({"content": "x", "role": "assistant"}))
    raw = b"event: message\r\nid: 7\r\ndata: " + data + b"\r\n\r\n"
    assert shown.sieve.take(event(raw)) == raw
    split = b"data: " + data[:1] + b"\ndata: " + data[1:] + b"\n\n"
    assert shown.sieve.take(event(split)) == b"data: %b\n\n" % data.replace(b',"role":"assistant"', b"")


def test_a_round_that_may_not_be_followed_ends_the_reply() -> None:
    shown = Shown()
    shown.sieve.next(may_ask=False)
    shown.take(calls(call(0, "ours", "{}")))
    assert shown.take(chunk({}, "tool_calls", usage=None)) == [
        chunk({"content": STOPPED}),
        chunk({}, "stop", usage=None),
    ]
    assert shown.take(chunk({}, "tool_calls")) == [chunk({}, "tool_calls")]  # said twice, decided once
    assert not shown.sieve.again

    shown = Shown()
    shown.sieve.next(may_ask=False)
    shown.take(calls(call(0, "ours", "{}"), content="So."))
    assert shown.read(shown.sieve.end()) == [chunk({}, "stop")]


def test_a_reply_without_a_chunk_says_something_all_the_same() -> None:
    shown = Shown()
    shown.sieve.next(may_ask=True)
    [said] = shown.read(shown.sieve.end())
    assert said["choices"] == [{"index": 0, "delta": {"content": SAID_NOTHING}, "finish_reason": "stop"}]


def test_a_call_that_was_cut_off_is_told_as_such() -> None:
    shown = Shown()
    shown.take(calls(call(0, "ours", '{"q')))
    assert shown.deltas(chunk({}, "length")) == [{"content": BROKE_OFF}, {}]


def _again(shown: Shown, *deltas: Data) -> None:
    """Let a round say this, and then call a tool of ours."""
    for delta in deltas:
        shown.take(chunk(delta))
    shown.take(calls(call(0, "ours", "{}")))
    shown.take(chunk({}, "tool_calls"))
    shown.sieve.next(may_ask=True)


def test_the_texts_of_two_rounds_are_kept_apart() -> None:
    shown = Shown()
    _again(shown, {"role": "assistant", "content": "One."})
    other: Data = {"id": "2", "created": 2, "model": "n", "fingerprint": "f", "usage": None}
    assert shown.take(chunk({"role": "assistant", "content": ""}, **other)) == []
    first, last = shown.take(chunk({"content": "Two"}, **other))
    assert first == chunk({"content": "\n\n"}, fingerprint="f")
    assert last == chunk({"content": "Two"}, fingerprint="f", usage=None)
    assert shown.deltas(chunk({"content": "."}, **other)) == [{"content": "."}]
    [choice] = shown.sieve.reply.choices()
    assert choice.message["content"] == "One.\n\nTwo."
    assert shown.sieve.message["content"] == "Two."  # the round did not say it

    _again(shown)
    _again(shown, {"content": "Three."})
    assert shown.deltas(calls(call(0, "theirs", "{}"), content="Four.")) == [
        {"content": "\n\n"},
        {"content": "Four.", "tool_calls": [call(0, "theirs", "{}")]},
    ]
    [choice] = shown.sieve.reply.choices()
    assert choice.message["content"] == "One.\n\nTwo.\n\nThree.\n\nFour."


@pytest.mark.parametrize(("before", "after"), [("One. ", "Two"), ("One.", "\nTwo"), ("", "Two"), (None, "Two")])
def test_nothing_is_shown_between_texts_that_stand_apart(before: str | None, after: str) -> None:
    shown = Shown()
    _again(shown, {"role": "assistant", "content": before})
    assert shown.deltas(chunk({"content": after}), chunk({"content": "!"})) == [{"content": after}, {"content": "!"}]
    shown = Shown()
    _again(shown)
    assert shown.deltas(chunk({"content": after})) == [{"content": after}]


def test_what_the_proxy_says_itself_is_kept_apart_too() -> None:
    shown = Shown()
    _again(shown, {"content": "One."})
    told = shown.read(shown.sieve.give_up().removesuffix(b"data: [DONE]\n\n"))
    assert [found["choices"][0]["delta"] for found in told] == [{"content": "\n\n"}, {"content": STOPPED}]
    assert [found["choices"][0]["finish_reason"] for found in told] == [None, "stop"]
    assert shown.sieve.message["content"] == STOPPED


@pytest.mark.parametrize("hides_usage", [True, False])
@pytest.mark.parametrize("usage", [{"n": 1}, None])
def test_giving_up_ends_a_reply_that_was_to_go_on(hides_usage: bool, usage: Data | None) -> None:
    shown = Shown(hides_usage=hides_usage)
    shown.take(calls(call(0, "ours", "{}")))
    shown.take(chunk({}, "tool_calls"))
    if usage:
        shown.take({**BASE, "choices": [], "usage": usage})
    raw = shown.sieve.give_up()
    told = shown.read(raw.removesuffix(b"data: [DONE]\n\n"))
    assert raw.endswith(b"data: [DONE]\n\n")
    assert told[0] == chunk({"content": STOPPED}, "stop")
    assert told[1:] == ([{**BASE, "choices": [], "usage": usage}] if usage and not hides_usage else [])
    assert (shown.sieve.usage, shown.sieve.ended, shown.sieve.again) == (usage, True, False)


CALLED = frozenset({"ours", "ours_too"})


def call_of(index: int | None, name: Any = None, arguments: Any = None, **more: Any) -> Data:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    item = {"function": function, **more}
    return item if index is None else {"index": index, **item}


def learnt(*items: Any) -> StreamedCalls:
    """Return what is known after these deltas, each in a chunk of its own."""
    calls = StreamedCalls(names=CALLED)
    for item in items:
        calls.learn([item])
    return calls


@pytest.mark.parametrize(
    ("items", "name", "own"),
    [
        ([call_of(0, "theirs")], "theirs", False),
        ([call_of(0, "o")], "o", None),
        ([call_of(0, "ours", "")], "ours", None),
        ([call_of(0, "ours", "{}")], "ours", True),
        ([call_of(0, "our", "{}")], "our", False),
        ([call_of(0, None, "{}")], None, None),
        ([call_of(0, None, "{}"), call_of(0, "ours"), call_of(0, None, "")], "ours", None),
        ([call_of(0, "ours"), call_of(0, "ours", "{"), call_of(0, "ours", "}")], "ours", True),
        ([call_of(0, "ours"), call_of(0, "_too"), call_of(0, None, "{}")], "ours_too", True),
        ([call_of(0, "ours"), call_of(0, "_three")], "ours_three", False),
        ([call_of(0, "theirs"), call_of(0, "_too"), call_of(0, None, "{}")], "theirs_too", False),
        ([call_of(0, "our"), call_of(0, "ours"), call_of(0, "ours_too", "{}")], "ours_too", True),
        ([call_of(0, "ours", "{"), call_of(0, "_too", "}")], "ours", True),
        ([call_of(0, "ours_x", "{"), call_of(0, "y", "}")], "ours_x", False),
        ([{"index": 0, "custom": {"name": "ours", "input": "x"}}], "ours", True),
        ([{"index": 0, "function": "odd"}], None, None),
        ([call_of(0, ["odd"], "{}")], ["odd"], False),
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
    assert found.own is (isinstance(name, str) and name in CALLED)
    assert not calls.undecided


def test_beside_a_name_that_is_known_another_is_taken_for_whole() -> None:
    calls = learnt(call_of(0, "theirs"), call_of(1, "ours"))
    calls.decide()
    assert [call.own for call in calls.begun] == [False, True]


def test_calls_that_are_decided_are_not_asked_again() -> None:
    asked = 0

    class Begun(list[StreamedCall]):
        def __iter__(self) -> Iterator[StreamedCall]:
            nonlocal asked
            asked += len(self)
            return super().__iter__()

        def __getitem__(self, place: Any) -> Any:
            nonlocal asked
            found = super().__getitem__(place)
            asked += len(found) if isinstance(place, slice) else 1
            return found

    relay = ToolStreamFilter(NAMES, hides_usage=False)
    relay._calls.begun = Begun()
    for at in range(1000):
        begun = event(calls(call(at, f"theirs {at}")))
        assert relay.take(begun) == begun.raw
    assert asked <= 2000


@pytest.mark.parametrize("items", [None, "x", {}, [1, "x", None]])
def test_tool_calls_that_are_no_list_are_ignored(items: Any) -> None:
    assert StreamedCalls(names=CALLED).learn(items) == []


INDEXES = st.none() | st.integers(0, 2)
IDS = st.sampled_from([None, "", "a", "b", 1])
TOLD = st.sampled_from([None, "", "o", "ou", "ours", "_too", "ours_too", "r", 7])
ARGUMENTS = st.sampled_from([None, "", "x", {"q": 1}])
KINDS = st.sampled_from(["function", "custom"])


@given(KINDS, st.lists(st.tuples(INDEXES, IDS, TOLD, ARGUMENTS), max_size=8))
def test_calls_are_those_that_the_message_has(kind: str, deltas: list[tuple[int | None, Any, Any, Any]]) -> None:
    """Whatever is said in whichever order: what is shown and what is answered must be of one mind."""
    calls, message = StreamedCalls(names=CALLED), Deltas()
    for index, identity, name, arguments in deltas:
        item = call_of(index, name, arguments, id=identity)
        item[kind] = item.pop("function")
        if kind == "custom":
            item[kind]["input"] = item[kind].pop("arguments", None)
        calls.learn([item])
        message.add({"tool_calls": [item]})
    built = message.message().get("tool_calls", [])
    found = [(identity, each.name.value) for identity, each in zip(calls.finder.ids, calls.begun, strict=True)]
    assert sorted(found, key=repr) == sorted(((each.get("id"), each[kind].get("name")) for each in built), key=repr)
    calls.decide()
    ours = [each[kind].get("name") in CALLED for each in built]
    if len({index is None for index, *_ in deltas}) == 1:  # nobody numbers some deltas and not others
        assert sum(each.own is True for each in calls.begun) == sum(ours)
