"""A request beside its bytes, why one is refused, and the body that goes upstream."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.dialects import JoinedTexts, Message, Request, bodies
from proxy.dialects.bodies import MAX_LEVELS
from proxy.dialects.chat import request as chat_request
from proxy.dialects.chat.message import ChatMessage
from proxy.dialects.chat.request import compose, parse_chat_request
from proxy.errors import InvalidRequest

HELLO = b'{"role":"user","content":"hi"}'


def body(messages: bytes = HELLO, rest: bytes = b"") -> bytes:
    return b'{"messages":[%b]%b}' % (messages, rest)


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


# --------------------------------------------------------------------------------------- reading


def test_a_request_is_read_beside_its_bytes() -> None:
    raw = (
        b'{ "model": "m", "temperature": 1.0,\n"messages" : [ {"role":"system","content":"s"}, '
        b'{"role":"developer","content":"d"},{"role" : "user", "content":"u\\u0000\\u00e9", "agent": "a"},'
        b'{"role":"system","content":"late"} ], "tools":[ {"type": "function"} ], "stream":true,'
        b' "stream_options":{"include_usage":false}, "new": {"x":[1, 2]} }\n'
    )

    request = parse_chat_request(raw)

    assert request.raw is raw
    assert list(request.fields) == ["model", "temperature", "messages", "tools", "stream", "stream_options", "new"]
    assert request.fields["temperature"] == b"1.0"
    assert request.fields["new"] == b'{"x":[1, 2]}'
    assert [message.raw for message in request.instructions] == [
        b'{"role":"system","content":"s"}',
        b'{"role":"developer","content":"d"}',
    ]
    assert [message.raw for message in request.messages] == [
        b'{"role" : "user", "content":"u\\u0000\\u00e9", "agent": "a"}',
        b'{"role":"system","content":"late"}',
    ]
    assert request.messages[0].data == {"role": "user", "content": "u\0é", "agent": "a"}
    assert (request.model, request.stream) == ("m", True)
    assert (request.has_tools, request.tools) == (True, b'[ {"type": "function"} ]')
    assert request.wants_usage is False


def test_missing_fields_have_defaults() -> None:
    request = parse_chat_request(body())

    assert (request.instructions, request.messages) == ((), (ChatMessage(HELLO),))
    assert (request.model, request.stream, request.has_tools, request.tools) == ("", False, False, None)
    assert request.wants_usage is None


def test_a_request_may_be_instructions_alone() -> None:
    request = parse_chat_request(body(b'{"role":"system","content":"s"}'))

    assert len(request.instructions) == 1
    assert request.messages == ()


@pytest.mark.parametrize("tools", [b"null", b"[]", b"[ ]"])
def test_no_tools_are_offered(tools: bytes) -> None:
    request = parse_chat_request(body(rest=b',"tools":' + tools))

    assert (request.has_tools, request.tools) == (False, None)


@pytest.mark.parametrize(
    ("options", "wants"),
    [
        (b"null", None),
        (b"{}", None),
        (b'{"include_usage":null}', None),
        (b'{"include_usage":true}', True),
        (b'{"include_usage":false,"x":1}', False),
        (b'{"include_usage":"yes"}', True),
        (b'"strange"', False),
    ],
)
def test_what_a_request_says_of_the_usage(options: bytes, wants: bool | None) -> None:
    assert parse_chat_request(body(rest=b',"stream_options":' + options)).wants_usage is wants


@pytest.mark.parametrize(
    "message",
    [
        b'{"role":"user","content":[{"type":"unheard_of","x":1e300}],"field":{"deep":[[[]]]}}',
        b'{"role":"unheard_of","content":null}',
        b'{"role":""}',
        b'{"role":"assistant","content":{"an":"object"},"tool_calls":[{"function":{"arguments":{"a":1}}}]}',
        b'{"role":"assistant","content":"","function_call":{"name":"f","arguments":"{"}}',
        b'{"role":"assistant","tool_calls":[{"id":"a","type":"custom","custom":{"name":"f","input":"x"}}]}',
        b'{"role":"assistant","tool_calls":"none"}',
        b'{"role":"user","content":"\\u0000 \\ud83d\\ude00"}',
        b'{"role":"user","content":"' + b"[{" * 1000 + b'"}',
        b'{"role":"user","content":' + nested(MAX_LEVELS - 1) + b"}",
    ],
)
def test_unknown_fields_pass(message: bytes) -> None:
    raw = body(message)

    assert parse_chat_request(raw).messages[0].raw == message
    assert compose(parse_chat_request(raw)) == raw


@pytest.mark.parametrize(
    ("raw", "param", "words"),
    [
        (b"{", None, "could not parse the JSON body"),
        (b"[]", None, "expected a JSON object, but got an array"),
        (b'{"\xff":1}', None, "not UTF-8"),
        (nested(5000), None, "nested too deeply"),
        (b"{}", "messages", "Missing required parameter: 'messages'"),
        (b'{"messages":null}', "messages", "expected an array of objects, but got null"),
        (b'{"messages":{}}', "messages", "but got an object"),
        (b'{"messages":"\xff"}', "messages", "not valid UTF-8"),
        (b'{"messages":[ ]}', "messages", "empty array"),
        (body(HELLO + b',"x"'), "messages[1]", "expected an object, but got a string"),
        (body(HELLO + b",null"), "messages[1]", "but got null"),
        (body(HELLO + b',{"content":"x"}'), "messages[1].role", "Missing required parameter"),
        (body(b'{"role":null}'), "messages[0].role", "expected a string, but got null"),
        (body(b'{"role":"user","content":5}'), "messages[0].content", "but got an integer"),
        (body(b'{"role":"user","content":5.5}'), "messages[0].content", "but got a number"),
        (body(b'{"role":"user","content":false}'), "messages[0].content", "but got a boolean"),
        (body(HELLO + rb',{"role":"user","content":"\ud83d!"}'), "messages[1]", "lone surrogate"),
        (body(HELLO + b',{"role":"user","content":"\xe9"}'), "messages[1]", "not valid UTF-8"),
        (body(b'{"role":"user","content":1e999}'), "messages[0]", "cannot be read"),
        (body(b'{"role":"user","content":' + nested(MAX_LEVELS) + b"}"), "messages[0]", "at most 200 levels"),
        (body(rest=b',"x":' + nested(MAX_LEVELS + 1)), "x", "nested too deeply"),
        (body(rest=b',"seed":1e999'), "seed", "cannot be read"),
        (body(rest=b',"model":null'), "model", "expected a string, but got null"),
        (body(rest=b',"model":5'), "model", "but got an integer"),
        (body(rest=b',"model":""'), "model", "empty string"),
        (body(rest=b',"model":"g\\u0000"'), "model", "control characters"),
        (body(rest=b',"model":"' + b"g" * 2049 + b'"'), "model", "longer than 2048 characters"),
        (body(rest=b',"stream":"true"'), "stream", "expected a boolean or null, but got a string"),
        (body(rest=b',"stream":1'), "stream", "but got an integer"),
        (body(rest=b',"tools":{}'), "tools", "expected an array of objects, but got an object"),
    ],
    ids=range(30),
)
def test_a_wrong_field_is_refused_by_name(raw: bytes, param: str | None, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat_request(raw)

    assert caught.value.param == param
    assert words in caught.value.message
    assert caught.value.code is not None


# ------------------------------------------------------------------------------------- composing


def test_a_request_with_nothing_changed_is_the_very_same_bytes() -> None:
    raw = b' {"messages":[ {"role":"system","content":"s"} , {"role":"user"} ],  "x":1.0}\n'
    request = parse_chat_request(raw)

    assert compose(request) is raw
    assert compose(request, instructions=request.instructions, messages=list(request.messages)) is raw
    assert compose(request, messages=[ChatMessage(b'{"role":"user"}')], drop_fields=["y", "x.y", "messages"]) is raw
    assert compose(request, messages=[ChatMessage(b'{"role":"user","agent":"a"}')]) is raw


def test_other_messages_replace_those_of_the_request() -> None:
    raw = b'{ "a" : 1.0, "messages":[{"role":"system","content":"s"}, {"role":"user"}], "b":[ 1] }'
    request = parse_chat_request(raw)
    new = ChatMessage(b'{"role": "user","content":"new"}')

    assert compose(request, messages=[new, *request.messages]) == (
        b'{"a":1.0,"messages":[{"role":"system","content":"s"},'
        b'{"role": "user","content":"new"},{"role":"user"}],"b":[ 1]}'
    )
    assert compose(request, instructions=[]) == b'{"a":1.0,"messages":[{"role":"user"}],"b":[ 1]}'
    assert compose(request, instructions=[new], messages=[]) == (
        b'{"a":1.0,"messages":[{"role": "user","content":"new"}],"b":[ 1]}'
    )


def test_fields_of_ours_never_go_out() -> None:
    request = parse_chat_request(
        body(HELLO + b',{"role":"user", "is_internal":true,"content": "x","agent":"a"}', b',"n": 1')
    )

    assert compose(request) == b'{"messages":[{"role":"user","content":"hi"},{"role":"user","content":"x"}],"n":1}'
    assert request.messages[1].data["agent"] == "a"
    assert b"agent" not in compose(request, messages=[ChatMessage(b'{"role":"user","agent":null}')])


@pytest.mark.parametrize(
    ("raw", "sent"),
    [
        (body(), body(rest=b',"stream_options":{"include_usage":true}')),
        (body() + b" \r\n", body(rest=b',"stream_options":{"include_usage":true}') + b" \r\n"),
        (body(rest=b' , "x":"}" '), body(rest=b' , "x":"}" ,"stream_options":{"include_usage":true}')),
        (
            b'{"stream_options" : null, "messages": [%b] }' % HELLO,
            b'{"stream_options" : {"include_usage":true}, "messages": [%b] }' % HELLO,
        ),
        (body(rest=b', "stream_options":{ }, "x":1'), body(rest=b', "stream_options":{"include_usage":true}, "x":1')),
        (
            body(rest=b',\t"stream_options": {"include_obfuscation": false}'),
            body(rest=b',\t"stream_options": {"include_obfuscation":false,"include_usage":true}'),
        ),
        (
            body(rest=b',"stream_options":{"include_usage":null,"a":1.0}'),
            body(rest=b',"stream_options":{"include_usage":true,"a":1.0}'),
        ),
        (
            b'{"n":1,"stream_options":{},"n":"22222","messages":[%b]}' % HELLO,
            b'{"n":"22222","stream_options":{"include_usage":true},"messages":[%b]}' % HELLO,
        ),
    ],
)
def test_usage_is_asked_for_and_no_other_byte_changes(raw: bytes, sent: bytes) -> None:
    assert compose(parse_chat_request(raw), add_usage=True) == sent
    assert parse_chat_request(sent).wants_usage is True


@pytest.mark.parametrize("options", [b'{"include_usage":false}', b'{"include_usage":true}', b'"strange"', b"[]"])
def test_what_the_client_says_of_the_usage_stands(options: bytes) -> None:
    raw = body(rest=b',"stream_options":' + options)

    assert compose(parse_chat_request(raw), add_usage=True) == raw


@pytest.mark.parametrize(
    ("rest", "limit"),
    [
        (b"", None),
        (b',"max_tokens":7', 7),
        (b',"max_tokens":7,"max_completion_tokens":9', 9),
        (b',"max_completion_tokens":null,"max_tokens":7', 7),
        (b',"max_tokens":0', None),
        (b',"max_tokens":"7","max_completion_tokens":true', None),
    ],
)
def test_how_long_the_reply_may_be(rest: bytes, limit: int | None) -> None:
    assert parse_chat_request(body(rest=rest)).reply_tokens == limit


def test_a_cache_is_named_unless_the_client_names_one() -> None:
    request = parse_chat_request(body())
    assert orjson.loads(compose(request, cache_key="k")) == {**orjson.loads(request.raw), "prompt_cache_key": "k"}
    named = parse_chat_request(body(rest=b',"prompt_cache_key":"mine"'))
    assert compose(named, cache_key="k") == named.raw


@pytest.mark.parametrize(
    ("rest", "sent"),
    [
        (b',"tools":[{"a" : 1}],"z":1', b',"tools":[{"b":2}],"z":1'),
        (b',"tools":null', b',"tools":[{"b":2}]'),
        (b"", b',"tools":[{"b":2}]'),
    ],
)
def test_other_tools_replace_those_of_the_request(rest: bytes, sent: bytes) -> None:
    request = parse_chat_request(body(rest=rest))
    assert compose(request, tools=b'[{"b":2}]') == body(HELLO, sent)


def test_the_same_tools_change_nothing() -> None:
    request = parse_chat_request(body(rest=b', "tools": [{"a" : 1}]'))
    assert compose(request, tools=b'[{"a" : 1}]') is request.raw


def test_usage_is_asked_for_beside_other_changes() -> None:
    request = parse_chat_request(b'{"stream_options":{"x": 1}, "messages":[%b], "user":"u"}' % HELLO)

    assert compose(request, add_usage=True, drop_fields=["user"]) == (
        b'{"stream_options":{"x":1,"include_usage":true},"messages":[{"role":"user","content":"hi"}]}'
    )
    assert compose(parse_chat_request(body()), add_usage=True, messages=[]) == (
        b'{"messages":[],"stream_options":{"include_usage":true}}'
    )


@pytest.mark.parametrize(
    ("rest", "paths", "left"),
    [
        (b', "user":"u","x":1', ["user"], b',"x":1'),
        (b',"metadata":{"session_id":"s"},"x":1', ["metadata.session_id"], b',"x":1'),
        (b',"metadata":{"session_id":"s","a": 1.0}', ["metadata.session_id"], b',"metadata":{"a":1.0}'),
        (b',"metadata":{"a":{"b":{"c":1}}}', ["metadata.a.b.c"], b""),
        (b',"metadata":{"a":1,"b":2,"c":3}', ["metadata.a", "metadata.c"], b',"metadata":{"b":2}'),
        (b',"metadata":{"a":1,"b":2}', ["metadata.a", "metadata.b", "metadata.c"], b""),
        (b',"metadata":"text","user":1', ["metadata.session_id", "user"], b',"metadata":"text"'),
        (b',"stream_options":{"a":1}', ["stream_options"], b""),
    ],
)
def test_fields_are_dropped(rest: bytes, paths: list[str], left: bytes) -> None:
    assert compose(parse_chat_request(body(rest=rest)), drop_fields=paths) == body(rest=left)


@pytest.mark.parametrize(
    ("rest", "path", "value"),
    [
        (b',"user":"u"', "user", "u"),
        (b',"user":"\\u00e9"', "user", "é"),
        (b',"metadata":{"session_id":"s"}', "metadata.session_id", "s"),
        (b',"metadata":{"a":{"b":7}}', "metadata.a.b", "7"),
        (b',"n":123456789012345678901234567890', "n", "123456789012345678901234567890"),
        (b',"n":-1.50', "n", "-1.50"),
        (b',"user":""', "user", ""),
        (b',"user":null', "user", None),
        (b',"user":true', "user", None),
        (b',"user":["u"]', "user", None),
        (b',"metadata":{"session_id":{}}', "metadata.session_id", None),
        (b',"metadata":{"x":1}', "metadata.session_id", None),
        (b',"metadata":"s"', "metadata.session_id", None),
        (b"", "metadata.session_id", None),
        (b"", "user", None),
    ],
)
def test_a_field_is_read_by_its_path(rest: bytes, path: str, value: str | None) -> None:
    assert parse_chat_request(body(rest=rest)).field(path) == value


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "developer", "tool"])},
    optional={"content": st.none() | TEXT, "agent": TEXT, "is_internal": st.booleans(), "x": JSON},
)
EXTRA = st.dictionaries(
    TEXT.filter(lambda name: name not in {"messages", "model", "stream", "tools", "stream_options"}), JSON, max_size=3
)


@given(st.lists(MESSAGES, min_size=1, max_size=5), EXTRA, st.booleans(), st.sampled_from([None, 2]), st.booleans())
def test_a_request_goes_out_as_it_came_but_for_our_own_fields(
    messages: list[dict[str, Any]], extra: dict[str, Any], at_the_end: bool, indent: int | None, add_usage: bool
) -> None:
    data = extra | {"messages": messages} if at_the_end else {"messages": messages} | extra
    raw = json.dumps(data, indent=indent).encode()
    request = parse_chat_request(raw)
    stripped = [{key: value for key, value in item.items() if key not in {"agent", "is_internal"}} for item in messages]
    usage = {"stream_options": {"include_usage": True}} if add_usage else {}

    sent = compose(request, add_usage=add_usage)

    assert orjson.loads(sent) == data | {"messages": stripped} | usage
    assert list(orjson.loads(sent)) == [*data, *usage]
    assert compose(parse_chat_request(sent), add_usage=add_usage) == sent
    if stripped == messages:
        assert sent.startswith(raw[:-2])
    own = [*request.instructions, *request.messages]
    assert [message.data for message in own] == messages
    assert all(message.raw in raw for message in own)
    assert orjson.loads(compose(request, instructions=[], messages=own)) == data | {"messages": stripped}


def test_a_text_that_was_read_before_is_the_same_message_and_is_not_read_again() -> None:
    raw = body(b'{"role":"user","content":"never sent before: 81"},' + HELLO)
    first, again = parse_chat_request(raw), parse_chat_request(bytes(bytearray(raw)))

    assert first.messages == again.messages
    assert first.messages[0].facts is again.messages[0].facts is not None
    assert again.messages[0]._data is None
    assert again.messages[0].data == {"role": "user", "content": "never sent before: 81"}


def test_a_refused_request_is_refused_again() -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest) as refused:
            parse_chat_request(body(HELLO + b',{"role":"user","content":82}'))
        assert refused.value.param == "messages[1].content"


def test_our_own_fields_are_left_out_of_a_known_message_too() -> None:
    raw = body(b'{"role":"user","content":"83","agent":"a"},' + HELLO)
    for _ in range(2):
        assert compose(parse_chat_request(raw)) == body(b'{"role":"user","content":"83"},' + HELLO)


@pytest.mark.parametrize(
    ("body", "param", "code", "words"),
    [
        (b"", None, "invalid_json", "zero-length"),
        (b'{"a":1,}', None, "invalid_json", "line 1 column 7"),
        (b'{"a":\n tru}', None, "invalid_json", "line 2 column 2"),
        (b"\xef\xbb\xbf{}", None, "invalid_json", "BOM"),
        (b'{"a":1} x', None, "invalid_json", "after document"),
        (b'{"a":"\xff"}', None, "invalid_json", "not UTF-8"),
        (b"[" * 3000, None, "invalid_json", "nested too deeply"),
        (b'{"a":' * 1000 + b"1" + b"}" * 1000, None, "invalid_json", "nested too deeply"),
        (b"[1]", None, "invalid_type", "got an array"),
        (b'"x"', None, "invalid_type", "got a string"),
        (b"true", None, "invalid_type", "got a boolean"),
        (b"1", None, "invalid_type", "got an integer"),
        (b"1.5", None, "invalid_type", "got a number"),
        (b"null", None, "invalid_type", "got null"),
        (
            rb'{"messages":[{"content":"x"},{"content":"a\ud83d b"}]}',
            "messages[1]",
            "invalid_json",
            "'messages[1]' holds a lone",
        ),
        (rb'{"messages":[{"content":[{"text":"\ude00"}]}]}', "messages[0]", "invalid_json", "U+FFFD"),
        (rb'{"messages":"\ude00"}', "messages", "invalid_json", "'messages' holds"),
        (rb'{"messages":[1],"user":"\ud83d\ud83d"}', "user", "invalid_json", "'user' holds"),
        (rb'{"\ud83d":1}', None, "invalid_json", "The body holds"),
        (rb'{"\ud83d":"\ud83d"}', None, "invalid_json", "The body holds"),
        (rb'["\ud83d"]', None, "invalid_json", "The body holds"),
        (rb'{"user":"\ud83d"', None, "invalid_json", "could not parse the JSON body"),
        (rb'{"user":"\ud83d","a":' + b"[" * 100_000, None, "invalid_json", "could not parse the JSON body"),
    ],
    ids=range(23),
)
def test_a_body_is_refused_with_its_reason_and_place(body: bytes, param: str | None, code: str, words: str) -> None:
    error = bodies.unreadable(body, "messages")

    assert words in error.message
    assert (error.param, error.code, error.status) == (param, code, 400)


def test_errors_have_the_words_and_codes_of_the_api() -> None:
    assert bodies.missing("messages", "Send some.").body() == {
        "error": {
            "message": "Missing required parameter: 'messages'. Send some.",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "missing_required_parameter",
        }
    }
    assert bodies.wrong_type("tools", "an array of objects", "x").message == (
        "Invalid type for 'tools': expected an array of objects, but got a string instead."
    )
    with pytest.raises(InvalidRequest) as raised:
        parse_chat_request(b'{"messages": []}')
    assert raised.value.code == "empty_array"
    with pytest.raises(InvalidRequest) as raised:
        parse_chat_request(b'{"model": "", "messages": [{"role": "user"}]}')
    assert raised.value.param == "model"
    assert f"at most {MAX_LEVELS} levels" in bodies._too_deep("user").message


# ------------------------------------------------------------------- a body that begins like the one before

_TEXT = st.text(st.sampled_from('aé漢😀"\\\n{}[],:'), max_size=8)
_WHITE = st.sampled_from([b"", b" ", b"\n\t "])
_FIELD = st.sampled_from(
    [
        b'"model":"m"',
        b'"model":"n"',
        b'"mod\\u0065l":"escaped"',
        b'"tools":[{"type":"function","function":{"parameters":{"messages":[]}}}]',
        b'"tools":[]',
        b'"stream":true',
        b'"stream":1',
        b'"messages":[]',
        b'"messages":[{"role":"user","content":"again"}]',
        b'"m\\u0065ssages":[{"role":"user","content":"escaped"}]',
        b'"x\\"messages":[{"role":"user"}]',
        b'"metadata":{"messages":[{"role":"user","content":"inner"}]}',
        b'"n":1e999',
        b'"n":1.50',
    ]
)


@st.composite
def _message_texts(draw: st.DrawFn) -> bytes:
    fields: dict[str, Any] = {"role": draw(st.sampled_from(["system", "user", "assistant", "tool"]))}
    fields["content"] = draw(_TEXT)
    if draw(st.booleans()):
        fields["agent"] = "a"
    return orjson.dumps(fields) if draw(st.booleans()) else json.dumps(fields).encode()


@st.composite
def _long_bodies(draw: st.DrawFn, messages: list[bytes]) -> bytes:
    white, comma = draw(_WHITE), draw(st.sampled_from([b",", b", ", b" ,\n"]))
    fields = [*draw(st.lists(_FIELD, max_size=2)), b'"messages"%b:%b[%b]' % (white, white, comma.join(messages))]
    fields += draw(st.lists(_FIELD, max_size=2))
    return white + b"{" + comma.join(fields) + b"}" + white


def _outcome(raw: bytes, before: Request | None = None, kept: int = 0) -> Any:
    """Return all that is read of a body, or the error."""
    try:
        request = parse_chat_request(raw, before, kept)
    except InvalidRequest as why:
        return (str(why), why.param, why.code)
    told = {name: getattr(request, name) for name in request.__struct_fields__ if name not in {"kept", "joined"}}
    return {**told, "fields": list(request.fields.items()), "messages": list(request.messages)}


def _read_both_ways(before: Request, raw: bytes) -> None:
    kept = before.common(raw)
    if kept:
        assert raw.startswith(before.raw[: before.ends[kept]])
    for count in {kept, min(kept, 1)}:
        assert _outcome(raw, before, count) == _outcome(raw)


@settings(max_examples=100)
@given(st.data())
def test_a_body_is_read_alike_from_its_known_beginning_on(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_request, "LONG_BODY", 0)
        _read_some_bodies(data)


def _read_some_bodies(data: st.DataObject) -> None:
    texts = [HELLO, *data.draw(st.lists(_message_texts(), max_size=4))]
    raw = data.draw(_long_bodies(texts))
    try:
        before = parse_chat_request(raw)
    except InvalidRequest:
        return
    more = data.draw(st.lists(_message_texts(), max_size=2))
    for other in (
        raw,
        data.draw(_long_bodies([*texts, *more])),
        data.draw(_long_bodies([*texts[:-1], *more])),
        raw.replace(texts[-1] + b"]", b",".join([texts[-1], *more]) + b"]" + data.draw(_WHITE)),
        raw[: raw.rindex(b"]") + 1] + b"," + data.draw(_FIELD) + b"}",
    ):
        _read_both_ways(before, other)
    if before.ends:
        cut = before.ends[data.draw(st.integers(1, len(before.ends) - 1))]
        tails = [b"", b".5]}", b"5]}", b"e5]}", b"]", b"]}", b"]}}", b"},]}", b",]}", b",null]}", b"]]}", b"}]}", b',"']
        tails += [b'],"messages":[]}', b'],"messages":[{}]}', b'],"messages":[{"role":"user"}]}', b'],"n":[{}]}']
        for tail in tails:
            _read_both_ways(before, raw[:cut] + tail)


_SHORT_TALK = [b'{"role":"system","content":"s"}', b'{"role":"user","content":"\xc3\xa9\\u00e9\\ud83d\\ude00"}', HELLO]
_SHORT_BODY = b'{"model":"m","messages":[%b, %b],"tools":[{"type":"function"}],"stream":true}'


@pytest.fixture
def outlined(monkeypatch: pytest.MonkeyPatch) -> Request:
    """Return a request that is short, and whose messages' places are noted all the same."""
    monkeypatch.setattr(chat_request, "LONG_BODY", 0)
    return parse_chat_request(_SHORT_BODY % (b",".join(_SHORT_TALK[:2]), HELLO))


def test_a_body_may_be_cut_anywhere(outlined: Request) -> None:
    for place in range(len(outlined.raw)):
        _read_both_ways(outlined, outlined.raw[:place])
        _read_both_ways(outlined, outlined.raw[:place] + b"]}")


def test_a_body_may_change_anywhere(outlined: Request) -> None:
    raw = outlined.raw
    for place in range(len(raw)):
        for byte in b'\x00 "\\,]}5\xff':
            _read_both_ways(outlined, raw[:place] + bytes([byte]) + raw[place + 1 :])
            _read_both_ways(outlined, raw[:place] + bytes([byte]) + raw[place:])
        _read_both_ways(outlined, raw[:place] + raw[place + 1 :])


@pytest.mark.parametrize("messages", [HELLO, b"{}", b""], ids=["longer", "as long as an empty one", "none"])
def test_a_field_of_messages_that_stands_there_again_is_read(outlined: Request, messages: bytes) -> None:
    again = outlined.raw[:-1] + b',"messages":[%b]}' % messages
    assert outlined.common(again) == 3
    _read_both_ways(outlined, again)


def test_known_messages_are_the_very_objects(outlined: Request) -> None:
    raw = outlined.raw.replace(b"],", b',{"role":"assistant","content":"yes"}],', 1)

    request = parse_chat_request(raw, outlined, outlined.common(raw))

    assert (request.kept, request.known, request.new_bytes) == (3, 2, len(raw) - outlined.ends[3])
    assert all(one is other for one, other in zip(request.messages, outlined.messages, strict=False))
    assert request.replies == (2,)
    assert parse_chat_request(raw).kept == 0


def test_the_places_of_messages_are_noted_where_they_are_sure(outlined: Request) -> None:
    assert outlined.raw[: outlined.ends[0]].endswith(b'"messages":')
    texts = [outlined.raw[:end] for end in outlined.ends[1:]]
    assert all(text.endswith(message) for text, message in zip(texts, _SHORT_TALK, strict=True))
    inner = b'{"tools":[{"messages":[%b]}],"messages":[%b]}' % (HELLO, HELLO)
    assert parse_chat_request(inner).ends == (inner.rindex(b"["), inner.rindex(b"]"))
    other = b'{"tools":[{"messages":[]}],"messages":[%b]}' % HELLO
    assert parse_chat_request(other).ends == (other.rindex(b"["), other.rindex(b"]"))
    assert parse_chat_request(b'{"m\\u0065ssages":[%b]}' % HELLO).ends == ()
    assert outlined.common(b"") == 0


def test_the_places_in_a_short_body_are_not_noted() -> None:
    assert parse_chat_request(body()).ends == ()
    assert parse_chat_request(body()).common(body()) == 0


def test_a_request_of_the_messages_api_is_told_where_it_belongs() -> None:
    with pytest.raises(InvalidRequest, match="/v1/messages"):
        parse_chat_request(body(rest=b',"system":"Be brief.","max_tokens":9'))
    assert parse_chat_request(body(rest=b',"system":"Be brief."')).parameters["system"] == "Be brief."


def test_a_request_of_the_responses_api_is_told_where_it_belongs() -> None:
    with pytest.raises(InvalidRequest, match="/v1/responses"):
        parse_chat_request(b'{"model":"m","input":"x"}')


_SAID: list[Message] = [
    *(ChatMessage.of({"role": "user", "content": text}) for text in ("a", "b", "c")),
    ChatMessage(b'{"role": "user", "content": "ours", "agent": "x"}'),
    *parse_chat_request(b'{"model":"m","messages":[{"role":"user","content":"known"}]}').messages,
]


@given(st.lists(st.lists(st.sampled_from(_SAID), max_size=6), min_size=1, max_size=8))
def test_texts_that_were_joined_before_are_joined_as_anew(views: list[list[Message]]) -> None:
    """Whatever two views have in common: a beginning, an end, or a part."""
    joined = JoinedTexts()
    for view in views:
        sent, text = joined.sent(tuple(view))
        plain = [message.without_own_fields() for message in view]
        assert list(sent) == plain
        assert text == b",".join([message.raw for message in plain])
        assert joined.size == len(text)


def test_a_view_is_joined_rightly_whatever_it_shares_with_the_last_one() -> None:
    joined = JoinedTexts()
    a, b, c = _SAID[:3]
    joined.sent((a, b, c))
    assert joined.sent((c, b, c))[1] == b",".join([c.raw, b.raw, c.raw])
    assert joined.sent((c, b, a))[1] == b",".join([c.raw, b.raw, a.raw])
    assert joined.size == len(c.raw + b.raw + a.raw) + 2
    assert joined.sent((c, b))[1] == b",".join([c.raw, b.raw])
    assert joined.sent(())[1] == b""
