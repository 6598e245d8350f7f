"""What Chat Completions leaves to the seam, and what it says of requests for other APIs."""

from __future__ import annotations

import orjson
import pytest

from proxy.dialects import dialect_named
from proxy.errors import InvalidRequest

API = dialect_named("chat")


def test_a_message_stands_for_itself() -> None:
    message = API.spoken("user", "hi")
    assert (message.listed, message.is_field, message.is_lasting) == ((message.raw,), False, False)
    assert not message.parted
    assert message.with_paired_reasoning() is message.behind_rounds([message]) is message
    assert len(API.earlier_canonicals(API.message(b'{"role":"user","content":[]}'))) == 3


def test_a_question_of_the_proxy_s_own_is_a_request() -> None:
    asked = API.requests.parse(API.question("m", "Be brief.", "hi"))
    assert (asked.model, asked.instructions[0].text, asked.messages[0].text) == ("m", "Be brief.", "hi")


def test_what_ends_a_stream_is_shown_as_it_came() -> None:
    assert API.replies.stream_filter(["recall"], False).closing(b"data: [DONE]\n\n") == b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"input": "hi"}, "/v1/responses"),
        ({"messages": [{"role": "user"}], "system": "x", "max_tokens": 1}, "/v1/messages"),
    ],
)
def test_a_body_for_another_api_is_told_where_it_belongs(body: object, path: str) -> None:
    with pytest.raises(InvalidRequest, match=path):
        API.requests.parse(orjson.dumps(body))
