from __future__ import annotations

import pytest

from proxy.dialects.chat import request as refusals


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
def test_a_body_is_refused_with_its_reason_and_place(
    body: bytes, param: str | None, code: str, words: str
) -> None:
    error = refusals._unreadable(body)

    assert words in error.message
    assert (error.param, error.code, error.status) == (param, code, 400)


def test_errors_have_the_words_and_codes_of_the_api() -> None:
    assert refusals._missing("messages", "Send some.").body() == {
        "error": {
            "message": "Missing required parameter: 'messages'. Send some.",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "missing_required_parameter",
        }
    }
    assert refusals._wrong_type("tools", "an array of objects", "x").message == (
        "Invalid type for 'tools': expected an array of objects, but got a string instead."
    )
    assert refusals._empty_messages().code == "empty_array"
    assert refusals._empty_model().param == "model"
    assert "at most 7 levels" in refusals._too_deep("user", 7).message
