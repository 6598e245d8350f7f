"""A request for a response, and the body that goes upstream."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.dialects import Request, dialect_named
from proxy.dialects.responses.items import Item
from proxy.errors import InvalidRequest
from tests.dialects.responses.test_items import CALL, CUSTOM, OUTPUT, REASONING, item, said, turn

API = dialect_named("responses")
compose = API.requests.compose


def parsed(body: Any) -> Request:
    return API.requests.parse(body if isinstance(body, bytes) else orjson.dumps(body))


def asked(*items: Any, **fields: Any) -> Request:
    return parsed({"model": "m", "input": list(items), **fields})


HELLO = {"role": "user", "content": "hello"}


def test_what_the_model_wrote_in_a_row_is_one_entry() -> None:
    request = asked(HELLO, REASONING, said("a"), CALL, OUTPUT, HELLO, {"id": "msg_1"})
    assert [message.role for message in request.messages] == ["user", "assistant", "tool", "user", "assistant"]
    assert request.messages[1] == turn(REASONING, said("a"), CALL)
    assert request.replies == (1, 4)
    assert [message.facts is not None for message in request.messages] == [True] * 5
    again = asked(HELLO, REASONING, said("a"), CALL, OUTPUT, HELLO, {"id": "msg_1"})
    assert again.messages == request.messages
    assert again.messages[1].facts is request.messages[1].facts


def test_an_item_of_an_unknown_type_is_the_model_s_if_it_has_an_id_and_no_output() -> None:
    made = {"type": "sketch_call", "id": "sk_1", "status": "completed", "strokes": [1, 2]}
    answer = {"type": "sketch_call_output", "id": "sko_1", "call_id": "sk_1", "output": "ok"}
    request = asked(HELLO, REASONING, made, said("a"), answer, {"type": "sketch", "strokes": []})
    assert request.messages[1] == turn(REASONING, made, said("a"))
    assert [message.raw for message in request.messages[2:]] == [
        orjson.dumps(answer),
        orjson.dumps({"type": "sketch", "strokes": []}),
    ]
    assert "assistant" not in [message.role for message in request.messages[2:]]


def test_what_a_client_puts_in_is_not_the_model_s_though_it_has_an_id() -> None:
    tools = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": []}
    update = {"type": "configuration_update", "id": "cu_1", "reasoning": {"effort": "low"}}
    request = asked(HELLO, tools, update, HELLO, {"type": "compaction_trigger", "id": "ct_1"})
    assert request.replies == ()
    assert len(request.messages) == 5


def test_a_text_is_a_message_of_the_user_s() -> None:
    request = parsed({"model": "m", "input": "hello", "stream": True, "max_output_tokens": 20})
    assert request.messages == (item({"type": "message", **HELLO}),)
    assert (request.stream, request.reply_tokens, request.wants_usage) == (True, 20, True)
    assert compose(request) == request.raw
    assert orjson.loads(compose(request, messages=request.messages * 2))["input"] == [{"type": "message", **HELLO}] * 2


def test_instructions_are_a_field_and_leading_items() -> None:
    request = asked({"role": "developer", "content": "b"}, HELLO, instructions="a")
    assert [message.text for message in request.instructions] == ["a", "b"]
    assert [message.is_field for message in request.instructions] == [True, False]
    assert request.instructions[0].listed == (b'{"role":"system","content":"a"}',)
    assert "instructions" not in request.parameters
    longer = [request.instructions[0].with_appended("more"), request.instructions[1]]
    made = orjson.loads(compose(request, instructions=longer))
    assert made["instructions"] == "a\n\nmore"
    assert len(made["input"]) == 2
    made = orjson.loads(compose(request, instructions=(), messages=[item(HELLO)]))
    assert (made.get("instructions"), made["input"]) == (None, [HELLO])
    assert asked(HELLO, instructions=None).instructions == ()


def test_only_what_is_asked_for_is_changed() -> None:
    body = b'{ "model" : "m", "input" : [ {"role":"user", "content":"hi"} ], "metadata":{"s":"x"}, "odd" : 1.50 }'
    request = parsed(body)
    assert compose(request) == body
    assert compose(request, messages=request.messages, drop_fields=["input.s", "none"], tools=None) == body
    assert compose(request, cache_key="k") == (
        b'{"model":"m","input":[ {"role":"user", "content":"hi"} ],"metadata":{"s":"x"},"odd":1.50,'
        b'"prompt_cache_key":"k"}'
    )
    made = compose(request, drop_fields=["metadata.s"], tools=b"[]")
    assert made == b'{"model":"m","input":[ {"role":"user", "content":"hi"} ],"odd":1.50,"tools":[]}'
    named = asked(HELLO, prompt_cache_key="mine", tools=[{"type": "web_search"}])
    assert compose(named, cache_key="k", tools=named.tools) == named.raw
    assert named.has_tools


def test_our_own_fields_never_go_out() -> None:
    request = asked({**HELLO, "agent": "a"}, {**CALL, "agent": "b"})
    assert request.has_own_fields
    assert orjson.loads(compose(request))["input"] == [HELLO, CALL]


def test_reasoning_that_nobody_keeps_is_not_sent() -> None:
    kept = {**REASONING, "encrypted_content": "x"}
    request = asked(HELLO, store=False)
    view = [item(HELLO), turn(REASONING, CALL), item(OUTPUT), turn(kept, CUSTOM), turn(REASONING)]
    made = orjson.loads(compose(request, messages=view))["input"]
    assert [each.get("type") for each in made] == [None, "function_call", OUTPUT["type"], "reasoning", CUSTOM["type"]]
    assert "id" not in made[1]
    assert len(orjson.loads(compose(asked(HELLO), messages=view))["input"]) == 7


def test_state_that_the_provider_holds_is_told() -> None:
    plain = asked(HELLO)
    assert (plain.untouched, plain.state, plain.references) == (False, "", ())
    follow = parsed({"previous_response_id": "resp_1"})
    assert (follow.untouched, follow.state, follow.references, follow.messages) == (True, "resp_1", ("resp_1",), ())
    talk = asked(HELLO, {"id": "msg_1"}, REASONING, conversation={"id": "conv_1"})
    assert (talk.state, talk.references) == ("conv_1", ("conv_1", "msg_1", "rs_1"))
    assert asked(HELLO, conversation="conv_1").state == "conv_1"
    assert asked(HELLO, previous_response_id=5).state == ""
    assert asked(HELLO, {"type": "item_reference", "id": 5}).references == ()
    late = asked(HELLO, background=True)
    assert (late.untouched, late.state) == (False, "")


def test_references_are_read_as_the_items_that_they_name() -> None:
    talk = [HELLO, {"type": "item_reference", "id": "rs_1"}, CALL, OUTPUT, {"id": "msg_1"}, {"id": "msg_9"}, HELLO]
    request = asked(*talk)
    assert (request.pointers, asked(HELLO, REASONING, CALL).pointers) == (("rs_1", "msg_1", "msg_9"), ())
    replies = [turn(REASONING, {**CALL, "id": "fc_1"}), turn(said("It is so.", id="msg_1"))]
    resolve = API.requests.resolved
    assert resolve is not None
    found = resolve(request, replies)
    whole = asked(HELLO, REASONING, CALL, OUTPUT, said("It is so.", id="msg_1"), {"id": "msg_9"}, HELLO)
    assert found.messages == whole.messages
    assert [each.facts and each.facts.content for each in found.messages] == [
        each.facts and each.facts.content for each in whole.messages
    ]
    assert compose(found) is request.raw
    trimmed = orjson.loads(compose(found, messages=found.messages[1:]))["input"]
    assert trimmed == [REASONING, CALL, OUTPUT, said("It is so.", id="msg_1"), {"id": "msg_9"}, HELLO]
    assert resolve(request, []).messages == request.messages
    odd = asked(HELLO, {"type": "item_reference", "id": ["x"]}, {"type": "item_reference", "id": "msg_1"})
    assert b'"id":["x"]' in resolve(odd, replies).messages[1].raw  # upstream says what is wrong with it


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"[]", None, "Invalid body: expected a JSON object"),
        (b'{"input":[1]', None, "We could not parse"),
        (b'{"input":[{"role":"user","content":"\\ud83d"}]}', "input[0]", "lone surrogate"),
        ({"model": "m"}, "input", "Send a string, or an array"),
        ({"model": "m", "messages": []}, "input", "belongs to /v1/chat/completions"),
        ({"model": "m", "messages": [], "system": "x"}, "input", "belongs to /v1/messages"),
        ({"model": "m", "messages": [], "tools": [{"input_schema": {}}]}, "input", "belongs to /v1/messages"),
        ({"model": "m", "messages": [], "tools": 5}, "input", "belongs to /v1/chat/completions"),
        ({"input": []}, "input", "empty array"),
        ({"input": 5}, "input", "expected one of a string or array of input items, but got an integer"),
        ({"input": [5]}, "input[0]", "expected an object"),
        ({"input": [{}]}, "input[0].type", "Give each item a type"),
        ({"input": [{"type": 5}]}, "input[0].type", "expected a string"),
        ({"input": [{"role": 5}]}, "input[0].role", "expected a string"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "expected a string, or an array"),
        ({"input": [{"type": "turn", "items": []}]}, "input[0].type", "Invalid value"),
        ({"input": "x", "instructions": 5}, "instructions", "expected a string"),
        ({"input": "x", "tools": {}}, "tools", "expected an array"),
        ({"input": "x", "stream": 1}, "stream", "expected a boolean"),
        ({"input": "x", "model": 1}, "model", "expected a string"),
        (b'{"input":' + b"[" * 600 + b"]" * 600 + b"}", "input[0]", "nested too deeply"),
    ],
)
def test_a_body_is_refused_with_its_reason_and_place(body: Any, param: str | None, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parsed(body)
    assert (caught.value.param, words in caught.value.message) == (param, True), caught.value.message


def test_an_entry_of_another_kind_is_composed_as_it_is() -> None:
    request = asked(HELLO, store=False)
    assert isinstance(request.messages[0], Item)
    assert orjson.loads(compose(request, messages=[*request.messages, item(HELLO)]))["input"] == [HELLO, HELLO]
