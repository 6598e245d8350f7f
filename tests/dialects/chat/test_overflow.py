from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects import Overflow
from proxy.dialects.chat.refusals import overflow_of

GOLDEN: dict[str, list[dict[str, Any]]] = yaml.safe_load(Path(__file__).with_name("overflows.yaml").read_text("utf-8"))
SAID = {case["case"]: case["says"] for case in GOLDEN["overflows"]}
STATUSES = (400, 413, 422, 500)

UNKNOWN = Overflow(window=None, asked=None, reply=None)
TOO_LONG = SAID["Anthropic, input alone"]
BY_SO_MUCH = Overflow(window=200000, asked=210000, reply=None)


def body(message: str, **more: Any) -> bytes:
    """Return an error in OpenAI's shape."""
    return orjson.dumps({"error": {"message": message, "type": "invalid_request_error", **more}})


@pytest.mark.parametrize("case", GOLDEN["overflows"], ids=lambda case: case["case"])
def test_every_wording_is_known_with_its_numbers(case: dict[str, Any]) -> None:
    numbers = {"window": None, "asked": None, "reply": None} | case["numbers"]
    answer = body(case["says"])
    assert overflow_of(400, answer) == Overflow(**numbers)


@pytest.mark.parametrize("case", GOLDEN["others"], ids=lambda case: case["case"])
def test_words_that_are_nearly_the_same_are_not(case: dict[str, Any]) -> None:
    answer = body(case["says"], code=case.get("code"))
    assert [overflow_of(status, answer) for status in STATUSES] == [None] * 4


@pytest.mark.parametrize("status", STATUSES)
def test_it_comes_with_several_statuses(status: int) -> None:
    assert overflow_of(status, body(TOO_LONG)) == BY_SO_MUCH


@pytest.mark.parametrize("status", [200, 401, 404, 429, 502, 503])
def test_it_does_not_come_with_others(status: int) -> None:
    assert overflow_of(status, body(TOO_LONG)) is None


@pytest.mark.parametrize(
    "more",
    [
        {"code": "context_length_exceeded"},
        {"code": "context_window_exceeded"},
        {"code": "model_max_prompt_tokens_exceeded"},
        {"type": "ContextWindowExceededError"},
        {"type": "exceed_context_size_error", "n_ctx": -1, "n_prompt_tokens": True},
    ],
    ids=lambda more: "-".join(map(str, more.values())),
)
def test_a_code_is_enough(more: dict[str, Any]) -> None:
    assert overflow_of(400, body("No.", **more)) == UNKNOWN


def test_the_numbers_that_llama_cpp_names_are_taken() -> None:
    answer = body("No.", type="exceed_context_size_error", n_ctx=256, n_prompt_tokens=1407)
    assert overflow_of(400, answer) == Overflow(window=256, asked=1407, reply=None)


@pytest.mark.parametrize(
    "answer",
    [
        {"type": "error", "error": {"type": "invalid_request_error", "message": TOO_LONG}},
        {"error": TOO_LONG, "error_type": "validation"},
        {"object": "error", "message": TOO_LONG, "code": 400},
        [{"error": {"code": 400, "message": TOO_LONG, "status": "INVALID_ARGUMENT"}}],
        {"detail": [{"loc": ["body"], "msg": TOO_LONG}]},
        {"base_resp": {"status_code": 2013, "status_msg": TOO_LONG}},
        {"error": {"message": "Provider error", "metadata": {"raw": body(TOO_LONG).decode()}}},
        {"errors": ["x"] * 200, "message": TOO_LONG},
        {"message": "x" * 9000 + TOO_LONG},
        TOO_LONG,
    ],
    ids=range(10),
)
def test_it_is_found_wherever_an_error_speaks(answer: Any) -> None:
    assert overflow_of(400, orjson.dumps(answer)) == BY_SO_MUCH


@pytest.mark.parametrize("before", [b"error: ", b"\xff", b"<html>" * 2000])
def test_it_is_found_in_what_is_no_json(before: bytes) -> None:
    assert overflow_of(400, before + TOO_LONG.encode()) == BY_SO_MUCH


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"<html><head><title>413 Request Entity Too Large</title></head></html>",
        b'{"error":null}',
        orjson.dumps({"detail": [{"msg": "Field required", "input": {"content": TOO_LONG}}]}),
        orjson.dumps({"error": {"message": "No."}, "request": {"messages": [{"content": TOO_LONG}]}}),
    ],
    ids=range(5),
)
def test_a_request_that_is_repeated_and_bodies_without_words_say_nothing(answer: bytes) -> None:
    assert [overflow_of(status, answer) for status in STATUSES] == [None] * 4


_KEYS = st.sampled_from(["error", "message", "code", "n_ctx", "n_prompt_tokens", "choices", "other"])
_SCALARS = st.none() | st.booleans() | st.integers(-9, 2**63) | st.floats() | st.text(max_size=9)
JSON = st.recursive(
    _SCALARS | st.sampled_from(list(SAID.values())),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_no_json_makes_it_fail(value: Any) -> None:
    answer = orjson.dumps(value)
    overflow = overflow_of(400, answer)
    for number in (overflow.window, overflow.asked) if overflow is not None else ():
        assert number is None or number > 0


@given(st.binary(max_size=200))
def test_no_bytes_make_it_fail(answer: bytes) -> None:
    assert overflow_of(400, answer) is None


@pytest.mark.parametrize(
    ("answer", "overflow"),
    [
        (b"[" * 100_000, None),
        (b'{"error":' * 5000 + b'"prompt is too long"' + b"}" * 5000, None),  # nobody wraps so often
        (
            b'{"message":"prompt is too long: %b > 9 maximum"}' % (b"9" * 5000),
            Overflow(window=9, asked=None, reply=None),
        ),
        (
            b'{"message":"prompt is too long: 1%b > 9 maximum"}' % (b",000" * 1500),
            Overflow(window=9, asked=1_000_000_000, reply=None),
        ),
        (rb'{"message":"prompt is too long: \ud83d"}', UNKNOWN),
        (b'{"n_ctx":%b,"message":"prompt is too long"}' % (b"9" * 5000), UNKNOWN),
    ],
    ids=range(6),
)
def test_no_size_makes_it_fail(answer: bytes, overflow: Overflow | None) -> None:
    assert overflow_of(400, answer) == overflow


@pytest.mark.parametrize(
    "piece", ["exceeds ", "exceeds a b c d ", "a'", "input length ", "1,000", "context length is ", "\\"]
)
def test_a_long_text_takes_no_longer_than_its_length(piece: str) -> None:
    # With a pattern that looks back over what it has seen this would not end.
    assert overflow_of(400, body(piece * (4_000_000 // len(piece)))) is None
