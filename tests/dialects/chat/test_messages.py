"""One message: how it is read and rewritten, and what is remembered of its text."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects import Attachment, Call, Facts
from proxy.dialects.chat import CHAT
from proxy.dialects.chat.message import _MOST_IDS as MOST_IDS
from proxy.dialects.chat.message import ChatMessage, ChatTies, text_of

CALLS = [
    {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
    {"id": "b", "type": "custom", "custom": {"name": "g", "input": "free text"}},
]


def test_a_message_is_its_text() -> None:
    message = ChatMessage(b'{"role": "user", "content": "a", "n": 1.0}')

    assert message == ChatMessage(b'{"role": "user", "content": "a", "n": 1.0}')
    assert message != ChatMessage(b'{"role":"user","content":"a","n":1.0}')
    assert message != message.raw
    assert len({message, ChatMessage(message.raw)}) == 1
    assert repr(message) == f"ChatMessage({message.raw!r})"
    assert len(repr(ChatMessage(b'"' + b"x" * 1000 + b'"'))) < 100


def test_data_is_parsed_once_and_a_known_one_not_at_all() -> None:
    known = {"role": "user"}

    assert ChatMessage(b'{"role":"user"}', known).data is known
    message = ChatMessage(b'{"role":"user"}')
    assert message.data == known
    assert message.data is message.data


def test_a_message_is_made_of_data_in_its_order() -> None:
    assert (
        ChatMessage.of({"role": "user", "content": "é", "a": None}).raw
        == '{"role":"user","content":"é","a":null}'.encode()
    )


def test_a_message_is_made_of_data_of_any_depth() -> None:
    deep: Any = []
    for _ in range(700):
        deep = [deep]

    assert ChatMessage.of({"role": "assistant", "x": deep}).data["x"] == deep
    assert ChatMessage(b"{}").replacing("x", deep).data == {"x": deep}
    called = ChatMessage.of({"role": "assistant", "tool_calls": [{"function": {"arguments": {"a": deep}}}]})
    assert called.calls[0].arguments == '{"a":' + "[" * 701 + "]" * 701 + "}"


@pytest.mark.parametrize(
    ("data", "role", "answers"),
    [
        ({"role": "user", "tool_call_id": "a"}, "user", None),
        ({"role": "tool", "tool_call_id": "a"}, "tool", "a"),
        ({"role": "tool"}, "tool", None),
        ({"role": "tool", "tool_call_id": 5}, "tool", None),
        ({"role": 5}, "", None),
        ({}, "", None),
    ],
)
def test_role_and_answered_call(data: dict[str, Any], role: str, answers: str | None) -> None:
    assert ChatMessage.of(data).role == role
    assert ChatMessage.of(data).answers == answers


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("abc", "abc"),
        ([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "text", "text": 5}, "a", None, {"text": "b"}], "b"),
        (None, ""),
        ({"text": "a"}, ""),
        (5, ""),
    ],
)
def test_text_of_a_content(content: Any, text: str) -> None:
    assert text_of(content) == text
    assert ChatMessage.of({"content": content}).text == text


def test_calls_of_functions_and_of_custom_tools() -> None:
    message = ChatMessage.of({"role": "assistant", "tool_calls": CALLS})

    assert message.calls == (
        Call(id="a", name="f", arguments='{"x": 1}'),
        Call(id="b", name="g", arguments="free text", custom=True),
    )
    assert ChatMessage.of({"role": "user", "tool_calls": CALLS}).calls == ()


@pytest.mark.parametrize(
    ("item", "call"),
    [
        ("x", Call(id="", name="", arguments="")),
        ({}, Call(id="", name="", arguments="")),
        ({"id": 5, "function": {"name": None, "arguments": None}}, Call(id="", name="", arguments="")),
        ({"id": "a", "function": "f"}, Call(id="a", name="", arguments="")),
        ({"id": "a", "function": {"name": "f", "arguments": {"x": 1}}}, Call(id="a", name="f", arguments='{"x":1}')),
        (
            {"id": "a", "type": "custom", "function": {"name": "f", "arguments": "{}"}},
            Call(id="a", name="", arguments="", custom=True),
        ),
        (
            {"id": "a", "type": "other", "function": {"name": "f", "arguments": ""}},
            Call(id="a", name="f", arguments=""),
        ),
    ],
)
def test_a_call_that_is_not_as_it_should_be_is_read_as_far_as_it_goes(item: Any, call: Call) -> None:
    assert ChatMessage.of({"role": "assistant", "tool_calls": [item]}).calls == (call,)


@pytest.mark.parametrize("calls", [None, {}, "x", 5])
def test_calls_that_are_no_list_are_none(calls: Any) -> None:
    assert ChatMessage.of({"role": "assistant", "tool_calls": calls}).calls == ()


def test_fields_are_left_out_and_the_others_keep_their_bytes() -> None:
    message = ChatMessage(b'{ "agent":"x", "role" : "user","n": 1.50, "is_internal" :true, "content":"\\u00e9" }')

    assert message.without("agent", "is_internal").raw == b'{"role":"user","n":1.50,"content":"\\u00e9"}'
    assert message.without("other") is message


def test_a_field_is_left_out_however_its_name_is_written() -> None:
    assert ChatMessage(b'{"\\u0061gent":1,"role":"user"}').without("agent").raw == b'{"role":"user"}'


def test_a_field_is_replaced_at_its_place_and_the_others_keep_their_bytes() -> None:
    message = ChatMessage(b'{"role" : "user","content":"a","n": 1.50}')

    assert message.replacing("content", ["é"]).raw == '{"role":"user","content":["é"],"n":1.50}'.encode()
    assert message.replacing("new", None).raw == b'{"role":"user","content":"a","n":1.50,"new":null}'
    assert message.data["content"] == "a"


def test_calls_are_kept_by_position_with_their_bytes() -> None:
    message = ChatMessage(b'{"role":"assistant","tool_calls":[ {"id": "a"}, {"id":  "b"},{"id":"c"}],"x":1}')

    kept = message.with_calls(frozenset({1, 2}))
    assert kept.raw == b'{"role":"assistant","tool_calls":[{"id":  "b"},{"id":"c"}],"x":1}'
    assert message.with_calls(frozenset()).raw == b'{"role":"assistant","x":1}'


def test_a_call_of_the_older_form_is_kept_or_left_out_alone() -> None:
    message = ChatMessage.of({"role": "assistant", "content": "x", "function_call": {"name": "f"}})
    assert message.with_calls([0]) == message
    assert message.with_calls([]).data == {"role": "assistant", "content": "x"}


NAMES = st.sampled_from(["role", "content", "agent", "is_internal", "é", "x"])
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.dictionaries(NAMES, st.none() | TEXT | st.lists(st.integers(-(2**53), 2**53))), NAMES, TEXT)
def test_changing_a_message_is_changing_its_data(data: dict[str, Any], name: str, value: str) -> None:
    message = ChatMessage(orjson.dumps(data, option=orjson.OPT_INDENT_2))

    assert message.replacing(name, value).data == data | {name: value}
    assert message.without(name).data == {key: kept for key, kept in data.items() if key != name}
    assert list(message.replacing(name, value).data) == list(dict.fromkeys([*data, name]))


@pytest.mark.parametrize(
    ("data", "own"),
    [
        ({"role": "user", "content": "agent"}, ()),
        ({"role": "user", "agent": None}, ("agent",)),
        ({"is_internal": True, "role": "user", "agent": "a"}, ("agent", "is_internal")),
    ],
)
def test_own_fields_are_those_of_the_proxy(data: dict[str, Any], own: tuple[str, ...]) -> None:
    raw = orjson.dumps(data)

    assert ChatMessage(raw).own_fields == own
    assert (
        ChatMessage(raw, None, Facts(raw=raw, role="user", has_own_fields=bool(own), has_calls=True)).own_fields == own
    )


def test_a_message_whose_text_is_known_is_not_parsed_for_its_role() -> None:
    raw = b"not even JSON"
    message = ChatMessage(raw, None, Facts(raw=raw, role="user", has_own_fields=False, has_calls=True))

    assert (message.role, message.calls, message.answers, message.own_fields) == ("user", (), None, ())


def test_a_reply_that_is_known_to_call_nothing_is_not_parsed_for_its_calls() -> None:
    raw = b"not even JSON"
    message = ChatMessage(raw, None, Facts(raw=raw, role="assistant", has_own_fields=False, has_calls=False))

    assert message.calls == ()
    assert message.without_own_fields() is message


def test_a_message_without_our_own_fields_may_go_upstream() -> None:
    message = ChatMessage(b'{"role":"user","agent":"a","content":"x"}')

    assert message.without_own_fields().raw == b'{"role":"user","content":"x"}'


def test_ties_tell_what_pairs_a_message_with_others() -> None:
    assert ChatMessage.of({"role": "user", "content": "a", "tool_calls": CALLS}).ties == ChatTies(role="user")
    assert ChatMessage.of({"role": "tool", "tool_call_id": "a"}).ties == ChatTies(role="tool", answers="a")
    assert ChatMessage.of({"role": "tool", "tool_call_id": 1}).ties == ChatTies(role="tool")
    both = ChatMessage.of({"role": "assistant", "tool_calls": [*CALLS, {}], "function_call": {}, "content": "a"})
    assert both.ties == ChatTies(
        role="assistant",
        ids=("a", "b", ""),
        followers=frozenset({"tool", "function"}),
        answers=None,
        legacy_call=True,
        names_calls=True,
        has_content=True,
    )
    assert ChatMessage.of({"role": "assistant", "tool_calls": [], "content": []}).ties == ChatTies(
        role="assistant", names_calls=True
    )
    assert ChatMessage.of({"role": "assistant", "audio": {"id": "x"}}).ties == ChatTies(
        role="assistant", has_content=True
    )


class Unread(ChatMessage):
    """A message whose text must not be parsed."""

    @property
    def data(self) -> dict[str, Any]:
        raise AssertionError


@pytest.mark.parametrize(
    "data",
    [
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "assistant", "content": "so"},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
    ],
)
def test_ties_are_remembered_with_the_text(data: dict[str, Any]) -> None:
    raw = ChatMessage.of(data).raw
    facts = Facts(raw=raw, role=data["role"], has_own_fields=False, has_calls="tool_calls" in data)
    ties = ChatMessage(raw, None, facts).ties

    assert Unread(raw, None, facts).ties is ties
    assert Unread(raw, None, facts).answers == data.get("tool_call_id")


def test_of_very_many_calls_nothing_is_remembered_with_the_text() -> None:
    calls = [{"id": str(number)} for number in range(MOST_IDS + 1)]
    raw = ChatMessage.of({"role": "assistant", "tool_calls": calls}).raw
    message = ChatMessage(raw, None, Facts(raw=raw, role="assistant", has_own_fields=False, has_calls=True))

    assert message.ties is message.ties
    assert len(message.ties.ids) == MOST_IDS + 1
    assert message.facts is not None
    assert message.facts.ties is None


def test_calls_are_read_once() -> None:
    message = ChatMessage.of({"role": "assistant", "tool_calls": CALLS})
    assert message.calls is message.calls


TEXT_PART = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        (None, ""),
        ([], ""),
        ([TEXT_PART, TEXT_PART], "aa"),
        ([TEXT_PART, {"type": "image_url", "image_url": {"url": "x"}}], None),
        (["odd"], None),
    ],
)
def test_plain_text_is_none_where_the_content_holds_anything_else(content: Any, text: str | None) -> None:
    message = ChatMessage.of({"role": "user", "content": content})
    assert (message.plain_text, message.is_plain) == (text, text is not None)


def test_new_facts_know_only_what_they_are_given() -> None:
    new = Facts(raw=b"{}", role="tool", has_own_fields=True, has_calls=True)
    assert (new.raw, new.role, new.has_own_fields) == (b"{}", "tool", True)
    assert (new.content, new.body, new.step, new.ties) == (None, None, None, None)


def test_equal_texts_of_a_request_share_what_is_known_of_them() -> None:
    twice = b'{"role": "user", "content": "said twice"}'
    request = CHAT.requests.parse(b'{"messages": [%b, %b]}' % (twice, twice))
    again = CHAT.requests.parse(b'{"messages": [%b]}' % twice)
    assert request.messages[0].facts is request.messages[1].facts is again.messages[0].facts


# ------------------------------------------------------------------- a reply in the form of a request

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
HALF = {"id": "c2", "type": "function", "function": {"name": "g", "arguments": '{"a": '}}
CUSTOM = {"id": "c3", "type": "custom", "custom": {"name": "h", "input": "free text"}}
LEGACY = {"name": "old", "arguments": '{"b": 1}'}
TEXT_A, TEXT_B = {"type": "text", "text": "a"}, {"type": "text", "text": "b", "x": 1}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}


def _form(data: dict[str, Any], reasoning: Any = "auto", *, partial: bool = False) -> dict[str, Any]:
    return ChatMessage.of({"role": "assistant"} | data).as_request(reasoning, partial=partial).data


def test_a_request_has_no_fields_that_only_a_response_has() -> None:
    reply: dict[str, Any] = {
        "content": "hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    assert _form(reply) == {"role": "assistant", "content": "hi"}


def test_what_servers_leave_out_of_calls_is_put_in() -> None:
    bare = {"id": "c1", "function": {"name": "f"}}
    assert _form({"tool_calls": [bare, 5, CUSTOM]})["tool_calls"] == [CALL, 5, CUSTOM]
    assert _form({"tool_calls": [{**bare, "type": None}]})["tool_calls"] == [CALL]


def test_a_reply_that_is_a_request_message_already_keeps_its_bytes() -> None:
    message = ChatMessage(b'{ "role":"assistant", "content": "hi" }')
    assert message.as_request("auto", partial=False) is message


@pytest.mark.parametrize(
    "data", [{"content": None, "tool_calls": [CALL]}, {"content": ""}, {"content": "x", "refusal": "no"}]
)
def test_a_request_keeps_what_the_api_takes(data: dict[str, Any]) -> None:
    assert _form(data) == {"role": "assistant"} | data


def test_audio_is_sent_back_by_its_id() -> None:
    assert _form({"content": None, "audio": {"id": "a1", "data": "AAAA", "expires_at": 1}})["audio"] == {"id": "a1"}


@pytest.mark.parametrize(
    ("mode", "calls", "kept"),
    [("auto", True, True), ("auto", False, False), ("keep", False, True), ("drop", True, False)],
)
def test_reasoning_is_sent_back_where_it_is_wanted(mode: str, calls: bool, kept: bool) -> None:
    data: dict[str, Any] = {"content": "x", "reasoning_content": "hm"} | ({"tool_calls": [CALL]} if calls else {})
    assert ("reasoning_content" in _form(data, mode)) is kept


def test_reasoning_that_exists_only_to_be_sent_back_is_kept_unless_all_is_dropped() -> None:
    data = {"content": "x", "reasoning_details": [{"type": "reasoning.text"}]}
    assert "reasoning_details" in _form(data)
    assert "reasoning_details" not in _form(data, "drop")


def test_a_reply_that_broke_off_loses_its_unfinished_calls() -> None:
    assert _form({"content": "x", "tool_calls": [CALL, HALF]}, partial=True)["tool_calls"] == [CALL]
    assert "tool_calls" not in _form({"content": "x", "tool_calls": [HALF]}, partial=True)
    assert _form({"content": "x", "tool_calls": [HALF]})["tool_calls"] == [HALF]


def test_unfinished_calls_are_left_out_and_a_whole_reply_stays_the_same() -> None:
    broken = ChatMessage.of({"role": "assistant", "content": "x", "tool_calls": [CALL, HALF]})
    assert broken.without_unfinished_calls().data["tool_calls"] == [CALL]
    whole = ChatMessage.of({"role": "assistant", "content": "x", "tool_calls": [CALL]})
    assert whole.without_unfinished_calls() is whole


# --------------------------------------------------------------------------------------- our own fields


@pytest.mark.parametrize(
    ("fields", "agent", "is_internal"),
    [
        ({}, None, False),
        ({"agent": "planner", "is_internal": True}, "planner", True),
        ({"agent": ""}, None, False),
        ({"agent": 7, "is_internal": 1}, None, False),
    ],
)
def test_our_own_fields_tell_agent_and_whether_it_is_internal(
    fields: dict[str, Any], agent: str | None, is_internal: bool
) -> None:
    message = ChatMessage.of({"role": "user", "content": "a", **fields})
    assert (message.agent, message.is_internal) == (agent, is_internal)


def test_a_message_is_shown_by_the_beginning_of_its_text() -> None:
    assert repr(ChatMessage(b'{"role":"user"}')) == 'ChatMessage(b\'{"role":"user"}\')'


# --------------------------------------------------------------------------- what every dialect answers


@pytest.mark.parametrize(
    ("content", "texts"), [("a", ("a",)), (None, ("",)), ([TEXT_A, IMAGE, TEXT_B], ("a", "", "b")), ([], ())]
)
def test_texts_are_those_of_the_content_parts(content: Any, texts: tuple[str, ...]) -> None:
    assert ChatMessage.of({"role": "user", "content": content}).texts == texts


def test_a_message_may_have_a_name() -> None:
    assert [ChatMessage.of({"role": "user", "name": name}).name for name in ("bob", 7, None)] == ["bob", "", ""]


def test_a_result_answers_its_call_by_id_and_the_older_form_by_its_role() -> None:
    call = Call(id="c1", name="f", arguments="{}")
    result = ChatMessage.of({"role": "tool", "tool_call_id": "c1", "content": "r"})
    assert result.is_result
    assert result.answers_call(call)
    assert not result.answers_call(Call(id="c2", name="f", arguments="{}"))
    assert not ChatMessage.of({"role": "tool"}).answers_call(Call(id="", name="f", arguments=""))
    legacy = Call(id="", name="f", arguments="{}", legacy=True)
    assert ChatMessage.of({"role": "function", "name": "f", "content": "r"}).answers_call(legacy)
    assert not result.answers_call(legacy)


@pytest.mark.parametrize(
    ("data", "has_content"),
    [
        ({"content": "a"}, True),
        ({"content": " \n"}, False),
        ({"content": None}, False),
        ({"content": [TEXT_A]}, True),
        ({"content": [{"type": "text", "text": ""}]}, False),
        ({"content": None, "refusal": "no"}, True),
        ({"content": None, "audio": {"id": "a"}}, True),
    ],
)
def test_content_is_what_can_be_sent_back_beside_calls(data: dict[str, Any], has_content: bool) -> None:
    assert ChatMessage.of({"role": "assistant", **data}).has_content is has_content


LONG_NAME = "n" * 300


@pytest.mark.parametrize(
    ("part", "kind", "is_image", "description"),
    [
        (IMAGE, "image_url", True, "https://example.org/a.png"),
        ({"type": "image_url", "image_url": "data:image/png;base64,AAAA"}, "image_url", True, "image/png, 3 bytes"),
        (
            {"type": "input_audio", "input_audio": {"data": "AAAAAA==", "format": "wav"}},
            "input_audio",
            False,
            "wav, 4 bytes",
        ),
        ({"type": "file", "file": {"filename": "a b.pdf", "file_data": "AAAA"}}, "file", False, "a b.pdf, 3 bytes"),
        ({"type": "image", "source": {"media_type": "image/gif", "data": "AAAA"}}, "image", True, "image/gif, 3 bytes"),
        ({"type": "image_url", "image_url": {"url": 7}}, "image_url", True, "no address"),
        ({"type": "image_url", "image_url": 7}, "image_url", True, "no address"),
        ({"type": 7, "data": "AAAA"}, "part", False, "unknown type, 3 bytes"),
        ({"type": LONG_NAME}, "n" * 200 + "…", False, "no address"),
    ],
)
def test_an_attachment_is_described_by_its_type_and_size_or_its_address(
    part: dict[str, Any], kind: str, is_image: bool, description: str
) -> None:
    message = ChatMessage.of({"role": "user", "content": [TEXT_A, part]})
    assert message.attachments == (Attachment(place=1, kind=kind, is_image=is_image, description=description),)


@pytest.mark.parametrize(
    "content", ["text", [TEXT_A], ["odd"], [{"type": "refusal", "refusal": "no"}], [{"type": "x", "text": "a"}]]
)
def test_parts_with_text_are_no_attachments(content: Any) -> None:
    assert ChatMessage.of({"role": "user", "content": content}).attachments == ()


def test_all_texts_are_those_that_somebody_wrote() -> None:
    message = ChatMessage.of(
        {
            "role": "assistant",
            "content": [TEXT_A, IMAGE],
            "tool_calls": [CALL],
            "name": "bob",
            "agent": "planner",
            "refusal": "no",
        }
    )
    assert list(message.all_texts()) == ["a", "f", "{}", "bob", "planner", "no"]
    assert list(ChatMessage.of({"role": "user", "content": "a"}).all_texts()) == ["a"]


def test_a_reply_in_sound_is_read_by_its_transcript() -> None:
    audio = {"id": "audio_1", "data": "QUJD", "expires_at": 1, "transcript": "It is seven."}
    reply = ChatMessage.of({"role": "assistant", "content": None, "audio": audio})
    assert (reply.display_text, reply.readable()) == ("It is seven.", "It is seven.")


def test_a_message_is_readable_as_its_text_with_a_line_for_each_other_thing() -> None:
    message = ChatMessage.of(
        {
            "role": "assistant",
            "content": [TEXT_A, "odd", {"type": "refusal", "refusal": "not this"}, IMAGE],
            "refusal": "no",
            "tool_calls": [CALL],
        }
    )
    assert message.readable().splitlines() == [
        "a",
        "no",
        "not this",
        '["odd"]',
        "[image_url: https://example.org/a.png; only text can be shown here]",
        "[call of f: {}]",
    ]
    assert ChatMessage.of({"role": "user", "content": "a"}).readable() == "a"
    assert ChatMessage.of({"role": "assistant", "tool_calls": [CALL]}).readable() == "[call of f: {}]"


def test_a_text_takes_the_place_of_the_content() -> None:
    message = ChatMessage(b'{"role": "user", "content": [], "x": 1.50}')
    assert message.with_text("a").raw == b'{"role":"user","content":"a","x":1.50}'


def test_texts_take_the_place_of_those_of_the_parts() -> None:
    assert ChatMessage.of({"role": "user", "content": "a"}).with_texts(["b"]).data["content"] == "b"
    parts = ChatMessage.of({"role": "user", "content": [TEXT_A, IMAGE, TEXT_B]})
    assert parts.with_texts([None, "", "c"]).data["content"] == [IMAGE, {**TEXT_B, "text": "c"}]


@pytest.mark.parametrize(
    ("content", "after"), [("a", "a\n\nmore"), (None, "more"), ([TEXT_A], [TEXT_A, {"type": "text", "text": "more"}])]
)
def test_a_text_is_appended_as_a_paragraph_or_a_part(content: Any, after: Any) -> None:
    assert ChatMessage.of({"role": "user", "content": content}).with_appended("more").data["content"] == after


def test_arguments_of_calls_are_replaced_in_order() -> None:
    odd = {"id": "c4", "type": "function", "function": {"name": "k", "arguments": {"a": 1}}}
    message = ChatMessage.of({"role": "assistant", "tool_calls": [CALL, CUSTOM, "odd", odd], "function_call": LEGACY})
    changed = message.with_arguments(["1", "2", "3", "4", "5"]).data
    assert changed["tool_calls"] == [
        {**CALL, "function": {"name": "f", "arguments": "1"}},
        {**CUSTOM, "custom": {"name": "h", "input": "2"}},
        "odd",
        odd,
    ]
    assert changed["function_call"] == {"name": "old", "arguments": "5"}
    assert ChatMessage.of({"role": "assistant", "function_call": {"name": "old"}}).with_arguments(["1"]).data == {
        "role": "assistant",
        "function_call": {"name": "old"},
    }


def test_notes_take_the_place_of_attachments() -> None:
    message = ChatMessage.of({"role": "user", "content": [TEXT_A, IMAGE]})
    assert message.with_notes({1: "[gone]"}).data["content"] == [TEXT_A, {"type": "text", "text": "[gone]"}]


def test_a_message_takes_the_whole_content_of_another_one() -> None:
    said = ChatMessage.of({"role": "assistant", "content": [{"type": "text", "text": "so"}], "name": "n"})
    taken = ChatMessage.of({"role": "assistant", "content": None, "refusal": None}).with_content_of(said)
    assert taken.data == {"role": "assistant", "content": [{"type": "text", "text": "so"}], "refusal": None}


def test_what_was_parsed_can_be_forgotten() -> None:
    message = ChatMessage(b'{"role":"user","content":"hi"}')
    parsed = message.data

    message.forget()

    assert message.data == parsed
    assert message.data is not parsed


def test_reasoning_that_is_bound_to_what_stands_before_it_is_left_out() -> None:
    signed = {"role": "assistant", "content": "x", "reasoning_content": "hm", "reasoning_details": [{"data": "y"}]}
    assert ChatMessage.of(signed).without_reasoning().data == {
        "role": "assistant",
        "content": "x",
        "reasoning_content": "hm",
    }
    for plain in ({"role": "assistant", "reasoning_content": "hm"}, {"role": "user", "reasoning_details": []}):
        message = ChatMessage.of(plain)
        assert message.without_reasoning() is message


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "reasoning_details", "thinking_blocks"])
def test_reasoning_is_found_in_every_form(name: str) -> None:
    assert ChatMessage.of({"role": "assistant", "content": "hi", name: ["so"]}).has_reasoning
    assert not ChatMessage.of({"role": "assistant", "content": "hi", name: None}).has_reasoning
    assert not ChatMessage.of({"role": "user", "content": "hi", name: "so"}).has_reasoning


def test_the_ids_of_a_message_are_those_of_its_calls_or_of_the_call_that_it_answers() -> None:
    calls = [{"id": name, "function": {"name": "f"}} for name in ("a", "", "b")]
    assert ChatMessage.of({"role": "assistant", "tool_calls": calls}).ids == ("a", "b")
    assert ChatMessage.of({"role": "tool", "tool_call_id": "a", "content": "x"}).ids == ("a",)


@pytest.mark.parametrize(
    "data",
    [
        {"role": "assistant", "content": "<think>x</think>hi"},
        {"role": "assistant", "content": '{"a": 1}'},
        {"role": "assistant", "content": "I look.", "tool_calls": [{"id": "call_7Qk2mZp9TnX4cVb8Rw3sLd6f"}]},
        {"role": "tool", "tool_call_id": "a", "content": "x", "__clientSource": "tool"},
        {"role": "user", "content": "hi", "__clientSource": "user"},
    ],
)
def test_a_message_has_an_earlier_canonical_form(data: dict[str, Any]) -> None:
    spaced = ChatMessage.of({"role": "assistant", "content": "hi "})
    private, strict, first = spaced.dialect.earlier_canonicals(spaced)
    assert private == strict == spaced.dialect.canonical(spaced) != first
    message = ChatMessage.of(data)
    assert message.dialect.canonical(message) not in message.dialect.earlier_canonicals(message)[2:]
    (read,) = CHAT.requests.parse(b'{"model":"m","messages":[%b]}' % message.raw).messages
    assert read.facts is not None
    assert read.facts.reshaped


def test_private_fields_counted_before_text_beside_calls_did() -> None:
    call = {"id": "call_7Qk2mZp9TnX4cVb8Rw3sLd6f", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    quiet = {"role": "assistant", "content": None, "tool_calls": [call], "__clientSource": "model"}
    spoken = quiet | {"content": "I look."}
    private, strict, _ = zip(*(CHAT.earlier_canonicals(ChatMessage.of(each)) for each in (quiet, spoken)), strict=True)
    assert private[0] == private[1] != CHAT.canonical(ChatMessage.of(quiet))
    assert strict[0] != strict[1]
