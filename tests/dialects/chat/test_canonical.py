from __future__ import annotations

import json
import random
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects.chat.canonical import REPLY_FIELDS, canonical, first_canonical, has_random_calls

Data = dict[str, Any]


def called(arguments: Any = "{}", **fields: Any) -> Data:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function} | fields]}


def told(**fields: Any) -> Data:
    return {"role": "assistant", "content": "hi"} | fields


def said(content: Any, role: str = "user") -> Data:
    return {"role": role, "content": content}


IMAGE = {"type": "image_url", "image_url": {"url": "data:,x"}}
RANDOM = "call_7Qk2mZp9TnX4cVb8Rw3sLd6f"

SAME: list[tuple[str, Data, Data]] = [
    ("key order", said("a"), {"content": "a", "role": "user"}),
    ("key order of arguments", called('{"a":1,"b":2}'), called('{ "b": 2,\n "a": 1 }')),
    ("null content", {"role": "assistant"}, said(None, "assistant")),
    ("empty content", {"role": "assistant"}, said("", "assistant")),
    ("no parts", {"role": "assistant"}, said([], "assistant")),
    ("one empty part", {"role": "assistant"}, said([{"type": "text", "text": ""}], "assistant")),
    ("empty object", said("a"), said("a") | {"x": {}}),
    ("null fields", told(), told(refusal=None, tool_calls=None, function_call=None, name=None, x="")),
    ("no calls", told(), told(tool_calls=[])),
    ("one part", said("a"), said([{"type": "text", "text": "a"}])),
    ("one marked part", said("a"), said([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}])),
    ("marked part", said([IMAGE, IMAGE]), said([IMAGE, IMAGE | {"prompt_cache_breakpoint": True}])),
    ("two parts", said([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), said("ab")),
    ("part with more", said([{"type": "text", "text": "a", "annotations": [1], "id": "x"}]), said("a")),
    (
        "part with more beside an image",
        said([{"type": "text", "text": "a", "x": 1}, IMAGE]),
        said([{"type": "text", "text": "a"}, IMAGE]),
    ),
    ("space around a reply", told(), told(content="\n hi \n\n")),
    ("space around the parts of a reply", told(), told(content=[{"type": "text", "text": " hi\n"}])),
    ("a reply of space", {"role": "assistant"}, said(" \n", "assistant")),
    ("space beside calls", called(), called() | {"content": "\n\n"}),
    ("a reply that is an object", told(content='{"a": [1.0], "b": {}}'), told(content='\n{\n "b": {},\n "a": [1]\n}')),
    (
        "parts of a reply that is an object",
        told(content='{"a": 1}'),
        told(content=[{"type": "text", "text": '{"a":'}, {"type": "text", "text": "1}"}]),
    ),
    ("an object behind reasoning", told(content='{"a": 1}'), told(content='<think>x</think>{"a":1}')),
    ("text beside a call with a random id", called(id=RANDOM), called(id=RANDOM) | {"content": "I look."}),
    (
        "parts of text beside a call with a random id",
        called(id=RANDOM),
        called(id=RANDOM) | {"content": [{"type": "text", "text": "I look."}]},
    ),
    (
        "parts of reasoning",
        told(),
        told(content=[{"type": "thinking", "thinking": "x"}, {"type": "text", "text": "hi"}]),
    ),
    ("reasoning before a reply", told(), told(content="<think>\nx\n</think>\n\nhi")),
    ("other reasoning before a reply", told(), told(content="<thought>x</thought> <think>y</think>hi")),
    ("reasoning that the template opened", told(), told(content="x\ny\n</think>\n\nhi")),
    ("reasoning in a part", told(), told(content=[{"type": "text", "text": "<thinking>x</thinking>\nhi"}])),
    ("reasoning before calls", called(), called() | {"content": "<think>x</think>\n"}),
    (
        "a part that refuses",
        {"role": "assistant", "refusal": "no"},
        said([{"type": "refusal", "refusal": "no"}], "assistant"),
    ),
    (
        "a spoken reply, named by its id",
        {
            "role": "assistant",
            "content": None,
            "audio": {"id": "a", "data": "UklG", "transcript": "hi", "expires_at": 9},
        },
        {"role": "assistant", "audio": {"id": "a"}},
    ),
    ("a part that refuses nothing", {"role": "assistant"}, said([{"type": "refusal"}], "assistant")),
    ("empty field of a part", said([IMAGE]), said([IMAGE | {"x": None, "y": [], "z": ""}])),
    (
        "empty field in a part",
        said([IMAGE]),
        said([{"type": "image_url", "image_url": {"url": "data:,x", "detail": None}}]),
    ),
    ("mark on the message", said("a"), said("a") | {"cache_control": {"type": "ephemeral"}}),
    ("developer", said("a", "system"), said("a", "developer")),
    ("developer with more", said("a", "system") | {"n": 1}, said("a", "developer") | {"n": 1}),
    ("name of a result", said("a", "tool"), said("a", "tool") | {"name": "f"}),
    ("private field of a result", said("a", "tool"), said("a", "tool") | {"__clientSource": {"kind": "tool"}}),
    ("index of a call", called(), called(index=0)),
    ("mark on a call", called(), called(cache_control={"type": "ephemeral"})),
    ("signature of a call", called(), called(extra_content={"google": {"thought_signature": "x"}})),
    ("null in a call", called(), called(custom=None)),
    ("what LiteLLM adds to a call", called(), called(provider_specific_fields={"x": 1})),
    (
        "arguments that an SDK has parsed",
        called('{"a": 1}'),
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "a",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"a": 1}', "parsed_arguments": {"a": 1}},
                }
            ],
        },
    ),
    (
        "index of a call whose function is a text",
        {"role": "assistant", "tool_calls": [{"id": "a", "function": "f"}]},
        {"role": "assistant", "tool_calls": [{"id": "a", "function": "f", "index": 0}]},
    ),
    ("type of a call", called(), called(type=None)),
    ("type of a call missing", called(), {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]}),
    ("no arguments", called(), called(None)),
    ("empty arguments", called(), called("")),
    ("spaced empty arguments", called(), called("{ }")),
    ("integral floats", called('{"a": 1.0, "b": [-2.0, 1e3]}'), called('{"a": 1, "b": [-2, 1000]}')),
    ("large integral floats", called("[1e18, 1e20, 1e300]"), called(f"[{10**18}, {10**20}, {int(1e300)}]")),
    ("zero", called('{"a": -0.0}'), called('{"a": 0}')),
    ("escapes", called('{"a": "é\\/"}'), called('{"a": "\\u00e9/"}')),
    ("array arguments", called("[1, 2]"), called("[1,2]")),
    ("large integers", called(f'{{"b": 1, "a": {10**40}}}'), called(f'{{"a":{10**40},"b":1}}')),
    (
        "integers that JavaScript rounds",
        called(f"[{2**53 + 1}, {10**18 + 1}, {-(10**30) - 1}]"),
        called(f"[{2**53}, {10**18}, {-(10**30)}]"),
    ),
    ("arguments as an object", called('{"a": 1}'), called({"a": 1.0})),
    (
        "legacy call",
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
        {"role": "assistant", "function_call": {"name": "f", "arguments": '{"a":1.0}', "x": None}},
    ),
    (
        "custom call",
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "custom", "custom": {"name": "f", "input": "x"}}]},
        {
            "role": "assistant",
            "tool_calls": [{"id": "a", "type": "custom", "index": 3, "custom": {"name": "f", "input": "x", "y": None}}],
        },
    ),
    *((f"{name} beside content", told(), told(**{name: "x"})) for name in sorted(REPLY_FIELDS)),
    *((f"{name} beside a call", called(), called() | {name: [{"x": 1}]}) for name in sorted(REPLY_FIELDS)),
    (
        "reasoning beside a legacy call",
        {"role": "assistant", "function_call": {"name": "f"}},
        {"role": "assistant", "function_call": {"name": "f"}, "reasoning": "x"},
    ),
]

OTHER: list[tuple[str, Data, Data]] = [
    ("text", said("a"), said("b")),
    ("space", said("a"), said("a ")),
    ("space in a reply", told(), told(content="h i")),
    ("parts of reasoning alone", said([{"type": "thinking", "thinking": "x"}], "assistant"), {"role": "assistant"}),
    ("parts of reasoning of a user", said([{"type": "thinking", "thinking": "x"}]), said(None)),
    ("normal form of text", said("é"), said("e\u0301")),
    ("role", said("a"), said("a", "assistant")),
    ("role and no content", {"role": "user"}, {"role": "assistant"}),
    ("system is no user", said("a", "system"), said("a")),
    ("answered call", said("a", "tool") | {"tool_call_id": "x"}, said("a", "tool") | {"tool_call_id": "y"}),
    ("name of a user", said("a") | {"name": "x"}, said("a")),
    ("name of a function's result", said("a", "function") | {"name": "f"}, said("a", "function") | {"name": "g"}),
    ("order of parts", said([IMAGE, {"type": "text", "text": "b"}]), said([{"type": "text", "text": "b"}, IMAGE])),
    ("part of another type", said([{"type": "input_text", "text": "a"}]), said("a")),
    ("part without type", said([{"text": "a"}]), said("a")),
    ("string as a part", said(["a"]), said("a")),
    ("object as content", said({"type": "text", "text": "a"}), said("a")),
    ("part with a number", said([{"type": "text", "text": 5}]), said([{"type": "text", "text": "5"}])),
    ("image", said([IMAGE]), said([{"type": "image_url", "image_url": {"url": "data:,y"}}])),
    ("empty parts", said([{}]), said([])),
    ("null part", said([None]), said([])),
    ("zero", said(0), said(None)),
    ("false", said(False), said(0)),
    ("unknown field", said("a") | {"x": 1}, said("a")),
    ("false field", said("a") | {"x": False}, said("a")),
    ("id of a call", called(), called(id="b")),
    ("what an object says", told(content='{"a": 1}'), told(content='{"a": "1"}')),
    ("an empty object", told(content="{}"), told(content="")),
    ("an object that breaks off", told(content='{"a": 1'), told(content='{"a":1')),
    ("an array", told(content="[1, 2]"), told(content="[1,2]")),
    ("an object that a user says", said('{"a": 1}'), said('{"a":1}')),
    ("text beside a call that is counted", called(id="call_1"), called(id="call_1") | {"content": "I look."}),
    (
        "text beside calls of which one is counted",
        {"role": "assistant", "tool_calls": [{"id": RANDOM}, {"id": "call_1"}]},
        {"role": "assistant", "tool_calls": [{"id": RANDOM}, {"id": "call_1"}], "content": "I look."},
    ),
    ("text beside a call without an id", called(id=None), called(id=None) | {"content": "I look."}),
    ("image beside a call with a random id", called(id=RANDOM), called(id=RANDOM) | {"content": [IMAGE]}),
    ("type of a call", called(), called(type="custom")),
    ("unknown field of a call", called(), called(x=1)),
    ("name of a function", called(), {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "g"}}]}),
    ("call that is no object", {"tool_calls": ["x"]}, {"tool_calls": ["y"]}),
    ("no call", {"role": "assistant"}, {"role": "assistant", "tool_calls": [{}]}),
    ("arguments", called('{"a": 1}'), called('{"a": 2}')),
    ("replies that are nothing but reasoning", told(content="<think>x</think>"), told(content="<think>y</think>")),
    ("reasoning inside a reply", told(content="a <think>x</think> b"), told(content="a  b")),
    ("a word about reasoning", told(content="It ends with </think> then"), told(content="then")),
    ("reasoning that a user says", said("<think>x</think>hi"), said("hi")),
    ("fraction", called('{"a": 1.5}'), called('{"a": 1}')),
    ("type in arguments", called('{"a": 1}'), called('{"a": "1"}')),
    ("true in arguments", called('{"a": 1}'), called('{"a": true}')),
    ("null in arguments", called('{"a": null}'), called("{}")),
    ("empty text in arguments", called('{"a": ""}'), called("{}")),
    ("mark in arguments", called('{"cache_control": 1}'), called("{}")),
    ("order in arguments", called("[1, 2]"), called("[2, 1]")),
    ("empty array as arguments", called("[]"), called("{}")),
    ("neighbouring integers", called(f"[{2**53 - 1}]"), called(f"[{2**53}]")),
    ("large integers", called(f"[{-(2**63)}]"), called(f"[{-(2**63) - 2**20}]")),
    ("broken arguments", called('{"a": 1'), called('{"a": 1}')),
    ("spaces of broken arguments", called('{"a": 1'), called('{"a":1')),
    ("text that is JSON text", called('"{}"'), called("{}")),
    ("text and number", called("5"), called(5)),
    (
        "arguments of a custom call",
        called(type="custom", custom={"input": "{}"}),
        called(type="custom", custom={"input": "{ }"}),
    ),
    ("reasoning alone", {"role": "assistant", "reasoning": "a"}, {"role": "assistant", "reasoning": "b"}),
    *((f"{name} alone", {"role": "assistant", name: "x"}, {"role": "assistant"}) for name in sorted(REPLY_FIELDS)),
    ("audio alone", said(None) | {"audio": {"id": "a"}}, said("") | {"audio": {"id": "b"}}),
    ("half a character", said("\ud83d"), said("\\ud83d")),
]


@pytest.mark.parametrize(("one", "other"), [row[1:] for row in SAME], ids=[row[0] for row in SAME])
def test_changes_that_clients_make_do_not_count(one: Data, other: Data) -> None:
    assert str(one) != str(other)
    assert canonical(one) == canonical(other)


@pytest.mark.parametrize(("one", "other"), [row[1:] for row in OTHER], ids=[row[0] for row in OTHER])
def test_changes_of_meaning_count(one: Data, other: Data) -> None:
    assert canonical(one) != canonical(other)


def test_the_order_of_calls_counts() -> None:
    first, second = called()["tool_calls"], called(id="b")["tool_calls"]

    assert canonical({"tool_calls": first + second}) != canonical({"tool_calls": second + first})


@pytest.mark.parametrize("deep", ["[" * 102 + "]" * 102, "[" * 1020 + "]" * 1020, '{"a":' * 2000 + "1" + "}" * 2000])
def test_arguments_that_are_too_deep_for_json_are_compared_as_text(deep: str) -> None:
    for text in (deep, f"[{deep},1e300]", f"[1e300,{deep}]"):
        assert canonical(called(text)) == canonical(called(text))
        assert canonical(called(text)) != canonical(called(text + " "))


def test_arguments_that_are_not_too_deep_are_compared_as_json() -> None:
    text = "[" * 101 + "]" * 101

    assert canonical(called(text)) == canonical(called(text + " "))
    assert canonical(called(f"[1e300, {text[1:-1]}]")) == canonical(called(f"[1e300,{text[1:-1]}]"))


def test_a_number_out_of_range_makes_arguments_text() -> None:
    digits = "1" * 5000

    assert canonical(called(f"[{digits}]")) != canonical(called(f"[ {digits}]"))
    assert canonical(called("[1e999]")) != canonical(called("[ 1e999]"))
    assert canonical(called(f"[1e308, 0.{digits}]")) == canonical(called(f"[1e308,0.{digits}]"))


def test_the_canonical_form_is_plain_json() -> None:
    assert canonical({"content": "é", "role": "developer"}) == '{"content":"é","role":"system"}'.encode()
    assert canonical(called('{"b":1,"a":1.0}', index=1)) == (
        b'{"role":"assistant","tool_calls":[{"function":{"arguments":{"a":1,"b":1},"name":"f"},"id":"a"}]}'
    )


def test_the_message_is_not_changed() -> None:
    for _, one, other in SAME + OTHER:
        before = deepcopy((one, other))
        canonical(one)
        canonical(other)
        assert (one, other) == before


EARLIER: list[tuple[Data, Data, bool]] = [
    (said("a"), said([{"type": "text", "text": "a", "cache_control": {}}]), True),
    (said("a"), said([{"type": "text", "text": "a", "id": "x"}]), False),
    (said("ab"), said([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), False),
    (told(), told(content="hi "), False),
    (said("a"), said("a") | {"__x": 1}, False),
    (told(), told(reasoning="x", content="hi"), True),
    ({"role": "assistant"}, said("", "assistant"), True),
    ({"role": "assistant"}, said([{"type": "text", "text": ""}], "assistant"), True),
    (said({"type": "text", "text": "a"}), said({"type": "text", "text": "a", "x": None}), True),
]


@pytest.mark.parametrize(("one", "other", "same"), EARLIER)
def test_the_earlier_form_tells_what_it_told(one: Data, other: Data, same: bool) -> None:
    assert (first_canonical(one) == first_canonical(other)) == same
    assert first_canonical(one) == canonical(one)


NAMES = st.sampled_from(
    [
        "role",
        "content",
        "tool_calls",
        "function_call",
        "function",
        "custom",
        "arguments",
        "type",
        "text",
        "name",
        "index",
        "image_url",
        "x",
        "cache_control",
        "reasoning",
    ]
)
WORDS = ["", "text", "function", "custom", "image_url", "tool", "developer", "{", "[1.0]", "[1e99]", "{}", "9" * 30]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(WORDS)
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=12
)


@given(st.dictionaries(NAMES, ANYTHING))
def test_any_json_in_any_place_has_a_form_that_is_its_own(data: Data) -> None:
    form = canonical(data)

    assert canonical(dict(reversed(list(data.items())))) == form
    assert canonical(data | {"only here": 1}) != form


def test_depth_and_size_of_numbers_have_no_limit() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = {"a": [deep]}

    for value in (deep, 10**4500, float("inf"), float("nan")):
        for place in (
            said(value),
            said([value]),
            said([IMAGE | {"x": value}]),
            called(value),
            called(x=value),
            {"tool_calls": value},
        ):
            assert canonical(place) == canonical(dict(place))
            assert canonical(place) != canonical(said("x"))


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcdef"), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.sampled_from("abcdef"), JSON, max_size=3)
MESSAGES = st.one_of(
    st.builds(
        lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "system", "assistant"]), TEXT
    ),
    st.builds(lambda text, call: {"role": "tool", "tool_call_id": call, "content": text}, TEXT, TEXT),
    st.builds(
        lambda text, calls: {
            "role": "assistant",
            "content": text,
            "tool_calls": [
                {"id": call, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
                for call, name, arguments in calls
            ],
        },
        st.none() | TEXT,
        st.lists(st.tuples(TEXT, TEXT, ARGUMENTS), min_size=1, max_size=3),
    ),
)


def rewritten(data: Data, rng: random.Random) -> Data:
    """Return the message as some client might send it back."""
    copy: Data = deepcopy(data)
    for number, call in enumerate(copy.get("tool_calls", [])):
        function = call["function"]
        arguments = json.loads(function["arguments"])
        function["arguments"] = json.dumps(
            arguments, indent=rng.choice([None, 1]), sort_keys=True, ensure_ascii=rng.random() < 0.5
        )
        call.update(rng.choice([{}, {"index": number}, {"extra_content": {"x": 1}}, {"cache_control": {"type": "e"}}]))
    if isinstance(copy["content"], str) and rng.random() < 0.5:
        copy["content"] = [
            {"type": "text", "text": copy["content"]} | rng.choice([{}, {"cache_control": {}}, {"annotations": []}])
        ]
    elif copy["content"] is None:
        copy["content"] = rng.choice([None, "", []])
    if copy["role"] == "system":
        copy["role"] = rng.choice(["system", "developer"])
    if copy["role"] == "tool":
        copy |= rng.choice([{}, {"name": "f"}])
    for name in rng.sample(sorted(REPLY_FIELDS), 2):
        copy[name] = rng.choice(["x", None, [1], {"a": 1}])
    if rng.random() < 0.5:
        copy |= {"function_call": None, "audio": None, "prompt_cache_breakpoint": {"a": 1}}
    items = list(copy.items())
    rng.shuffle(items)
    return dict(items)


@given(MESSAGES, st.randoms(use_true_random=False))
def test_a_message_is_recognised_whatever_the_client_did_to_it(data: Data, rng: random.Random) -> None:
    assert canonical(rewritten(data, rng)) == canonical(data)


@given(MESSAGES, MESSAGES)
def test_two_messages_are_not_taken_for_one(one: Data, other: Data) -> None:
    def plain(data: Data) -> str:
        copy = deepcopy(data)
        if copy["role"] == "assistant":
            copy["content"] = None if has_random_calls(copy) else (copy["content"] or "").strip() or None
        for call in copy.get("tool_calls", []):
            call["function"]["arguments"] = canonical({"role": "x", "function_call": call["function"]}).hex()
        return json.dumps(copy, sort_keys=True)

    assert (canonical(one) == canonical(other)) == (plain(one) == plain(other))
