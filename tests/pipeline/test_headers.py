from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.errors import InvalidRequest
from proxy.pipeline import headers
from proxy.pipeline.headers import decode_value, encode_value, first_values, to_client, to_upstream

HOP_BY_HOP = [
    b"Connection",
    b"Keep-Alive",
    b"Proxy-Authenticate",
    b"Proxy-Authorization",
    b"Proxy-Connection",
    b"TE",
    b"Trailer",
    b"Transfer-Encoding",
    b"Upgrade",
]
OURS = [
    b"X-Session-ID",
    b"x-session-mode",
    b"X-Session-Anything",
    b"X-Context-Policy",
    b"X-CONTEXT-TOKENS-SENT",
    b"X-Agent-Name",
    b"X-Exchange-ID",
]


def test_names_are_those_of_the_documentation_in_lower_case() -> None:
    names = {value for name, value in vars(headers).items() if name.isupper() and isinstance(value, str)}

    assert names == {
        "x-session-id",
        "x-session-mode",
        "x-context-policy",
        "x-agent-name",
        "x-exchange-id",
        "x-context-kind",
        "x-context-tokens-before",
        "x-context-tokens-sent",
        "x-context-messages-before",
        "x-context-messages-sent",
        "x-context-edits",
        "x-context-warning",
    }


def test_passed_headers_keep_order_repetition_case_and_bytes() -> None:
    sent = [(b"Accept", b"*/*"), (b"X-Thing", b"\xff 1"), (b"accept", b""), (b"x-thing", b"2"), (b"Cookie", b"a=b")]

    assert to_upstream(sent) == sent
    assert to_client(sent) == sent


@pytest.mark.parametrize("name", [*HOP_BY_HOP, *OURS])
def test_hop_by_hop_headers_and_our_own_are_never_passed_on(name: bytes) -> None:
    sent = [(b"A", b"1"), (name, b"x"), (b"B", b"2"), (name.upper(), b"y"), (name.lower(), b"z")]

    assert to_upstream(sent) == [(b"A", b"1"), (b"B", b"2")]
    assert to_client(sent) == [(b"A", b"1"), (b"B", b"2")]


def test_headers_that_connection_names_are_not_passed_on() -> None:
    sent = [
        (b"X-One", b"1"),
        (b"Connection", b"close, x-ONE"),
        (b"connection", b"X-Two ,, "),
        (b"x-two", b"2"),
        (b"K", b"3"),
    ]

    assert to_upstream(sent) == [(b"K", b"3")]
    assert to_client(sent) == [(b"K", b"3")]


def test_headers_of_the_sender_itself_are_not_passed_on() -> None:
    sent = [(b"Host", b"h"), (b"Content-Length", b"1"), (b"Expect", b"100-continue"), (b"Content-Type", b"t")]

    assert to_upstream(sent) == [(b"Content-Type", b"t")]
    assert to_client(sent) == [sent[0], sent[2], sent[3]]


def test_headers_with_names_similar_to_ours_are_passed_on() -> None:
    sent = [(b"X-Sessions", b"1"), (b"X-Contextual", b"2"), (b"X-Agent-Names", b"3"), (b"My-X-Session-ID", b"4")]

    assert to_upstream(sent) == sent


def test_authorization_is_dropped_when_asked() -> None:
    sent = [(b"AUTHORIZATION", b"Bearer x"), (b"OpenAI-Beta", b"o")]

    assert to_upstream(sent) == sent
    assert to_upstream(sent, drop_credentials=True) == sent[1:]


KEYS = [b"authorization", b"API-Key", b"X-Api-Key", b"x-goog-api-key", b"Cookie"]
STEERING = [b"OpenAI-Organization", b"OpenAI-Project", b"X-HTTP-Method-Override", b"X-Original-URL", b"X-Rewrite-URL"]


@pytest.mark.parametrize("name", [*KEYS, *STEERING])
def test_every_header_that_may_hold_a_key_is_dropped_with_the_credentials(name: bytes) -> None:
    sent = [(name, b"secret"), (b"x-own", b"1")]

    assert to_upstream(sent, drop_credentials=True) == sent[1:]
    assert to_upstream(sent) == sent


def test_further_headers_are_dropped_when_asked() -> None:
    sent = [(b"Accept-Encoding", b"gzip"), (b"X", b"1")]

    assert to_upstream(sent, extra_drop={b"accept-encoding"}) == [(b"X", b"1")]
    assert to_client(sent, extra_drop=[b"x"]) == [(b"Accept-Encoding", b"gzip")]
    assert to_upstream(sent) == sent  # nothing is remembered


@pytest.mark.parametrize(
    ("text", "raw"),
    [
        ("abc-123_./:~!", b"abc-123_./:~!"),
        ("", b""),
        ("a b", b"a%20b"),
        ("50%", b"50%25"),
        ("会话", b"%E4%BC%9A%E8%AF%9D"),
        ("😀", b"%F0%9F%98%80"),
    ],
)
def test_values_are_percent_encoded_utf8(text: str, raw: bytes) -> None:
    assert encode_value(text) == raw
    assert decode_value(raw, "X") == text


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"])))
@example("\u2028\ufeff\U0010ffff%41")
def test_an_encoded_value_is_visible_ascii_and_reads_back(text: str) -> None:
    raw = encode_value(text)

    assert all(0x21 <= byte <= 0x7E for byte in raw)
    assert decode_value(raw, "X") == text


def test_a_lone_surrogate_becomes_a_replacement_character() -> None:
    assert decode_value(encode_value("a\ud83db"), "X") == "a\ufffdb"


def test_a_value_that_is_not_encoded_is_taken_as_it_is() -> None:
    assert decode_value("a b é".encode(), "X") == "a b é"
    assert decode_value(b"100% %zz %4", "X") == "100% %zz %4"
    assert decode_value(b"%c3%a9", "X") == "é"


@pytest.mark.parametrize("raw", [b"a\x00", b"%00", b"a%0Ab", b"%7F", b"a\tb", b"%C2%85"])
def test_control_characters_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match="X-Session-ID holds control characters") as caught:
        decode_value(raw, "X-Session-ID")

    assert caught.value.param == "X-Session-ID"


@pytest.mark.parametrize("raw", [b"\xff", b"%ff", b"%ED%A0%80", b"caf\xe9"])
def test_a_value_that_is_not_utf8_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match="X-Agent-Name is not UTF-8") as caught:
        decode_value(raw, "X-Agent-Name")

    assert caught.value.param == "X-Agent-Name"
    assert caught.value.status == 400


def test_the_first_value_of_a_header_counts_whatever_the_case_of_its_name() -> None:
    sent = [(b"X-Session-ID", b" a\t"), (b"x-session-id", b"b"), (b"Accept", b"")]
    assert first_values(sent) == {b"x-session-id": b"a", b"accept": b""}
