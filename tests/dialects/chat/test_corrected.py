from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from proxy.dialects.chat.own_calls import Correction, corrected

BODY = b"""{
  "id": "x" , "choices": [ { "index":0,
     "message" : {"content": null, "tool_calls": [{"id": "a"}, {"id":  "b"}], "refusal":null },
     "finish_reason": "tool_calls" } ] ,
  "usage": {"prompt_tokens": 1}
}
"""
CALLS = b'"tool_calls": [{"id": "a"}, {"id":  "b"}]'


@pytest.mark.parametrize(
    ("change", "old", "new"),
    [
        (Correction(), b"", b""),
        (Correction(content="hi"), b'"content": null', b'"content": "hi"'),
        (Correction(finish_reason="stop"), b'"finish_reason": "tool_calls"', b'"finish_reason": "stop"'),
        (Correction(usage={"prompt_tokens": 3}), b'{"prompt_tokens": 1}', b'{"prompt_tokens":3}'),
        (Correction(calls=[0, 1]), CALLS, b'"tool_calls": [{"id": "a"},{"id":  "b"}]'),
        (Correction(calls=[1]), CALLS, b'"tool_calls": [{"id":  "b"}]'),
        (Correction(calls=[]), b", " + CALLS, b""),
    ],
)
def test_only_what_is_changed_is_changed(change: Correction, old: bytes, new: bytes) -> None:
    assert corrected(BODY, change) == BODY.replace(old, new, 1)


def _body(message: bytes, more: bytes = b"") -> bytes:
    return b'{"choices":[{"message":%b}]%b}' % (message, more)


@pytest.mark.parametrize(
    ("message", "change", "expected"),
    [
        (b'{"tool_calls": [1], "a": 1}', Correction(calls=[]), b'{ "a": 1}'),
        (b'{"a": 1 , "tool_calls":[1]}', Correction(calls=[]), b'{"a": 1}'),
        (b'{"tool_calls":[1]}', Correction(calls=[]), b"{}"),
        (b'{"a":1}', Correction(calls=[]), b'{"a":1}'),
        (b"{}", Correction(content="x"), b'{"content":"x"}'),
        # a field that stands there twice: the last one counts
        (b'{"tool_calls":[1],"a":1,"tool_calls":[2,3]}', Correction(calls=[1]), b'{"tool_calls":[3],"a":1}'),
        (b'{"tool_calls":[1],"a":1,"tool_calls":[2]}', Correction(calls=[]), b'{"a":1}'),
        (b'{"a":1,"a":[[22],[333]],"tool_calls":[1]}', Correction(calls=[]), b'{"a":[[22],[333]]}'),
        (b'{"a":1,"b":12,"a":345,"tool_calls":[1]}', Correction(calls=[]), b'{"a":345,"b":12}'),
        (
            b'{"a":{"x":1,"tool_calls":[1]},"tool_calls":[1,2],"a":"1234"}',
            Correction(calls=[]),
            b'{"a":"1234"}',
        ),
    ],
)
def test_fields_go_and_come_wherever_they_stand(message: bytes, change: Correction, expected: bytes) -> None:
    assert corrected(_body(message), change) == _body(expected)


def test_a_body_gets_a_usage_that_it_had_not() -> None:
    assert orjson.loads(corrected(_body(b'{"a":1}'), Correction(usage={"n": 1})))["usage"] == {"n": 1}


@pytest.mark.parametrize(
    ("message", "change", "expected"),
    [
        (b'{"content":"a"}', Correction(content="b", usage={"n": 1}), {"content": "b"}),
        (b'{"tool_calls":[1,2]}', Correction(calls=[1]), {"tool_calls": [2]}),
        (b'{"tool_calls":[1]}', Correction(calls=[], finish_reason="stop"), {}),
        (b'{"a":1}', Correction(calls=[]), {"a": 1}),
    ],
)
def test_what_is_no_strict_json_is_written_anew(message: bytes, change: Correction, expected: Any) -> None:
    made = json.loads(corrected(_body(message, b',"p":[-Infinity]'), change))
    assert made["choices"][0]["message"] == expected
    assert made["choices"][0].get("finish_reason") == change.finish_reason
    assert made.get("usage") == change.usage
