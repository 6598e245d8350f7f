"""Explicit cache breakpoints, and the key that names a session in the provider's cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects import MarkKind, Message
from proxy.dialects.chat.cache_marks import broken, decides_itself, marked
from proxy.dialects.chat.canonical import canonical
from proxy.dialects.chat.message import ChatMessage
from proxy.dialects.chat.request import parse_chat_request

OPENAI = b'"prompt_cache_breakpoint":{"mode":"explicit"}'
ANTHROPIC = b'"cache_control":{"type":"ephemeral"}'
MARKS: dict[MarkKind, bytes] = {"openai": OPENAI, "anthropic": ANTHROPIC}

SYSTEM = b'{"role":"system","content":"Be brief."}'
USER = b'{"role":"user","content":"go on"}'
REPLY = b'{"role":"assistant","content":"I look."}'
CALL = (
    b'{"role":"assistant","content":null,"tool_calls":[{"id":"c1","type":"function",'
    b'"function":{"name":"f","arguments":"{}"}}]}'
)
RESULT = b'{"role":"tool","tool_call_id":"c1","content":"found"}'
TALK = (SYSTEM, USER, CALL, RESULT, REPLY)


def messages(texts: Sequence[bytes]) -> list[Message]:
    return [ChatMessage(text) for text in texts]


def after(texts: Sequence[bytes], places: Sequence[int], kind: MarkKind) -> list[bytes]:
    return [message.raw for message in marked(messages(texts), places, kind)]


def places_of(texts: Sequence[bytes]) -> list[int]:
    """Return which messages have a mark."""
    return [at for at, text in enumerate(texts) if OPENAI in text or ANTHROPIC in text]


@pytest.mark.parametrize("kind", MARKS)
def test_a_text_becomes_one_part_with_a_mark_and_keeps_its_bytes(kind: MarkKind) -> None:
    text = rb'{ "role" : "user",  "content": "caf\u00e9\n\ud83d\ude00", "x": 1.50 }'
    assert after([text], [0], kind) == [
        rb'{ "role" : "user",  "content": [{"type":"text","text":"caf\u00e9\n\ud83d\ude00",%b}], "x": 1.50 }'
        % MARKS[kind]
    ]


def test_the_last_part_gets_it_and_every_other_byte_stays() -> None:
    text = b'{"content":[ {"type":"text","text":"a"} ,\n{"type": "text", "text": "b" } ] , "role":"user","name":"x"}'
    assert after([text], [0], "openai") == [text.replace(b'"b" }', b'"b" ,' + OPENAI + b"}")]


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("openai", b'{"type":"image_url","image_url":{"url":"data:"}}'),
        ("openai", b'{"type":"input_audio","input_audio":{"data":""}}'),
        ("openai", b'{"type":"file","file":{"file_id":"f"}}'),
        ("openai", b'{"type":"text","text":"x","cache_control":null}'),
        ("anthropic", b'{"type":"text","text":"x"}'),
    ],
)
def test_parts_that_take_marks(kind: MarkKind, part: bytes) -> None:
    text = b'{"role":"user","content":[{"type":"text","text":"a"},%b]}' % part
    assert after([text], [0], kind) == [text.replace(b"}]}", b"," + MARKS[kind] + b"}]}")]


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("anthropic", b'{"type":"image_url","image_url":{"url":"data:"}}'),
        ("anthropic", b'{"type":"text","text":" \\n"}'),
        ("openai", b'{"type":"text","text":""}'),
        ("openai", b'{"type":"text"}'),
        ("openai", b'{"type":"refusal","refusal":"No."}'),
        ("openai", b'{"type":["text"]}'),
        ("openai", b'"text"'),
    ],
)
def test_before_a_part_that_takes_none_the_one_before_it_gets_it(kind: MarkKind, part: bytes) -> None:
    text = b'{"role":"user","content":[{"type":"text","text":"a"},%b]}' % part
    assert after([text], [0], kind) == [text.replace(b'"a"}', b'"a",' + MARKS[kind] + b"}")]


@pytest.mark.parametrize(
    ("kind", "place", "lands"),
    [
        ("openai", 0, [0]),
        ("openai", 1, [1]),
        ("openai", 2, [1]),  # no assistant message takes one
        ("openai", 3, [3]),
        ("openai", 4, [3]),
        ("openai", 5, []),
        ("openai", -1, []),
        ("anthropic", 2, [1]),  # there is nothing but calls
        ("anthropic", 3, [3]),
        ("anthropic", 4, [4]),
    ],
)
def test_a_message_that_takes_no_mark_leaves_it_to_the_nearest_before_it(
    kind: MarkKind, place: int, lands: list[int]
) -> None:
    assert places_of(after(TALK, [place], kind)) == lands


@pytest.mark.parametrize(
    "text",
    [
        b'{"role":"user","content":""}',
        b'{"role":"user","content":" "}',
        b'{"role":"user","content":[]}',
        b'{"role":"user","content":[{"type":"text","text":""},{"type":"refusal","refusal":"No."}]}',
        b'{"role":"user","content":{"type":"text","text":"x"}}',
        b'{"role":"user"}',
        b'{"role":"function","name":"f","content":"x"}',
    ],
)
def test_without_anything_that_takes_one_nothing_changes(text: bytes) -> None:
    assert after([text], [0], "openai") == [text]
    assert places_of(after([USER, text], [1], "openai")) == [0]


def test_places_that_land_on_one_message_make_one_mark() -> None:
    assert places_of(after(TALK, [1, 2], "openai")) == [1]
    assert after(TALK, [1, 2], "openai")[1].count(OPENAI) == 1


@pytest.mark.parametrize(("kind", "most"), [("openai", 3), ("anthropic", 4)])
def test_never_more_than_the_provider_takes_and_then_the_last_ones(kind: MarkKind, most: int) -> None:
    assert places_of(after([USER] * 9, range(9), kind)) == list(range(9))[-most:]


@pytest.mark.parametrize(
    "client",
    [
        b'{"role":"user","content":"x","cache_control":{"type":"ephemeral"}}',
        b'{"role":"user","content":[{"type":"text","text":"x","cache_control":{"type":"ephemeral"}}]}',
        b'{"role":"user","content":[{"type":"text","text":"x","prompt_cache_breakpoint":{"mode":"explicit"}}]}',
        b'{"role":"user","content":{"type":"text","text":"x","cache_control":{"type":"ephemeral"}}}',
        b'{"role":"user","content":[{"type":"image_url","image_url":{"url":"u","cache_control":{}}}]}',
        b'{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f"},"cache_control":{}}]}',
        rb'{"role":"user","content":[{"type":"text","text":"x","c\u0061che_control":{"type":"ephemeral"}}]}',
    ],
    ids=range(7),
)
@pytest.mark.parametrize("kind", MARKS)
def test_beside_marks_of_the_client_there_are_none_of_ours(kind: MarkKind, client: bytes) -> None:
    texts = [SYSTEM, client, USER]
    assert after(texts, [0, 1, 2], kind) == texts


@pytest.mark.parametrize(
    "client",
    [
        b'{"role":"user","content":"how does \\"cache_control\\": {} work?"}',
        b'{"role":"user","content":[{"type":"text","text":"x","cache_control":null}]}',
        b'{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{\\"cache_control\\":1}"}}]}',
        rb'{"role":"user","content":"caf\u00e9"}',
        b'{"role":"user","content":["cache_control"],"tool_calls":"cache_control"}',
    ],
    ids=range(5),
)
def test_to_speak_of_marks_is_to_set_none(client: bytes) -> None:
    assert places_of(after([USER, client], [0], "anthropic")) == [0]


@pytest.mark.parametrize(
    ("field", "decides"),
    [
        ({}, False),
        ({"cache_control": None, "prompt_cache_options": None}, False),
        ({"prompt_cache_key": "k"}, False),
        ({"cache_control": {"type": "ephemeral"}}, True),
        ({"prompt_cache_options": {"mode": "explicit"}}, True),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, False),
        ({"tools": [{"type": "function", "function": {"name": "f"}, "cache_control": {}}]}, True),
        ({"tools": [{"type": "function", "function": {"name": "f", "cache_control": {}}}]}, True),
        ({"tools": [{"function": {"parameters": {"properties": {"cache_control": {}}}}}]}, False),
        ({"tools": [{"function": {"description": "cache_control"}}, "cache_control"]}, False),
    ],
    ids=range(10),
)
def test_a_client_can_decide_about_the_cache_beside_its_messages(field: dict[str, Any], decides: bool) -> None:
    request = parse_chat_request(orjson.dumps({"messages": [{"role": "user", "content": "x"}], **field}))
    assert decides_itself(request.fields) is decides


def test_tools_that_are_no_list_decide_nothing() -> None:
    assert not decides_itself({"tools": b'"cache_control"'})


_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
_PARTS = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, _TEXTS),
    st.builds(lambda url: {"type": "image_url", "image_url": {"url": url}}, _TEXTS),
    _TEXTS,
)
_MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"])},
    optional={
        "content": st.none() | _TEXTS | st.lists(_PARTS, max_size=3),
        "name": _TEXTS,
        "tool_calls": st.just([{"id": "c", "function": {"name": "f", "arguments": "{ }"}}]),
    },
)


@given(
    st.lists(_MESSAGES, max_size=8),
    st.sets(st.integers(-2, 9)),
    st.sampled_from(list(MARKS)),
    st.sampled_from([0, orjson.OPT_INDENT_2]),
)
def test_marks_change_nothing_but_what_they_add(
    data: list[dict[str, Any]], places: set[int], kind: MarkKind, option: int
) -> None:
    before = [ChatMessage(orjson.dumps(message, option=option)) for message in data]
    sent = marked(before, places, kind)

    assert len(sent) == len(before)
    assert [canonical(message.data) for message in sent] == [canonical(message.data) for message in before]
    assert [message.role for message in sent] == [message.role for message in before]
    assert [message.calls for message in sent] == [message.calls for message in before]
    new = [(old, message) for old, message in zip(before, sent, strict=True) if old != message]
    assert len(new) <= min(len(places), 4)
    for old, message in new:
        assert message.raw.count(MARKS[kind]) == 1
        content = old.data["content"]
        if isinstance(content, str):
            name = b'"content": ' if option else b'"content":'
            part = b'[{"type":"text","text":%b,%b}]' % (orjson.dumps(content), MARKS[kind])
            assert message.raw == old.raw.replace(name + orjson.dumps(content), name + part)
        else:
            assert message.raw.replace(b"," + MARKS[kind], b"") == old.raw
    assert marked(sent, places, kind) == sent


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
def test_a_mark_goes_into_a_message(kind: MarkKind) -> None:
    whole = messages(TALK)
    made = broken(whole, 0, 3, kind)
    assert made[1:] == tuple(whole[1:])
    parts = b'{"type":"text","text":"Be ",%b},{"type":"text","text":"brief."}' % MARKS[kind]
    assert made[0].raw == b'{"role":"system","content":[%b]}' % parts
    again = broken(made, 0, 3, kind)
    assert again == made  # it has its place already
    full = [ChatMessage(b'{"role":"user","content":[{"type":"text","text":"a",%b}]}' % MARKS[kind])] * 4
    assert broken((*whole, *full), 0, 3, kind) == (*whole, *full)  # no room
    assert broken(whole, 0, 0, kind) == tuple(whole)
    silent = (ChatMessage(b'{"role":"system"}'), *whole)
    assert broken(silent, 0, 1, kind) == silent
    # A mark that the client set elsewhere in the message stays, so this would be a fifth one.
    parts = b'{"type":"text","text":"Today."},{"type":"text","text":"Be brief.",%b}' % MARKS[kind]
    theirs = (ChatMessage(b'{"role":"system","content":[%b]}' % parts), *full[:3])
    assert broken(theirs, 0, 3, kind) == theirs
    assert broken(theirs[:1], 0, 3, kind) != theirs[:1]


def test_a_client_s_marks_of_a_lifetime_are_left_alone() -> None:
    lasting = b'"cache_control":{"type":"ephemeral","ttl":"1h"}'
    whole = messages([b'{"role":"system","content":[{"type":"text","text":"Be brief.",%b}]}' % lasting, *TALK[1:]])
    assert broken(whole, 0, 3, "anthropic") == tuple(whole)


def test_where_no_mark_may_stand_there_is_none() -> None:
    assert broken(messages(TALK), 4, 2, "openai") == tuple(messages(TALK))
