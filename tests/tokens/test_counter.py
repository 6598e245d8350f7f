from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.dialects.chat.message import ChatMessage
from proxy.tokens import vocabulary
from proxy.tokens.counter import ENTRY_BYTES, LOW_DETAIL_TOKENS, MEDIA_TOKENS, MESSAGE_TOKENS, Cached, TokenCounter

MODEL = "gpt-4o"
COUNTER = TokenCounter()


def words(*texts: str) -> int:
    """Return the tokens of the texts, each counted alone."""
    return sum(COUNTER.text(text, MODEL) for text in texts)


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


LONG_URL = "data:image/png;base64," + "iVBORw0KGgo" * 5000

COUNTED: dict[str, tuple[dict[str, Any], int]] = {
    "text": ({"role": "user", "content": "Where is it?"}, words("Where is it?")),
    "nothing": ({"role": "assistant", "content": None}, 0),
    "no content": ({"role": "assistant"}, 0),
    "a name": ({"role": "user", "name": "alice", "content": "Hi"}, words("Hi", "alice")),
    "parts": (
        {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]},
        words("One", "Two"),
    ),
    "calls": (
        {"role": "assistant", "content": None, "tool_calls": [call("f", '{"a": 1}'), call("g", "{}")]},
        words("f", '{"a": 1}', "g", "{}"),
    ),
    "a custom call": (
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "sh", "input": "ls"}}]},
        words("sh", "ls"),
    ),
    "a legacy call": (
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        words("f", "{}"),
    ),
    "a result": ({"role": "tool", "tool_call_id": "call_1", "content": "sunny"}, words("sunny")),
    "a refusal": ({"role": "assistant", "content": None, "refusal": "I cannot."}, words("I cannot.")),
    "no reasoning": (
        {"role": "assistant", "content": "Yes", "reasoning_content": "Let me think about this at length."},
        words("Yes"),
    ),
    "none of our own fields": (
        {"role": "user", "content": "Hi", "agent": "researcher", "is_internal": True},
        words("Hi"),
    ),
    "an image": ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": LONG_URL}}]}, MEDIA_TOKENS),
    "an image in low detail": (
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": LONG_URL, "detail": "low"}}]},
        LOW_DETAIL_TOKENS,
    ),
    "an image in the form of Responses": (
        {"role": "user", "content": [{"type": "input_image", "image_url": LONG_URL, "detail": "low"}]},
        LOW_DETAIL_TOKENS,
    ),
    "sound": (
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "UklG" * 9999, "format": "wav"}}]},
        MEDIA_TOKENS,
    ),
    "a file": ({"role": "user", "content": [{"type": "file", "file": {"file_data": LONG_URL}}]}, MEDIA_TOKENS),
    "another part": ({"role": "user", "content": [{"type": "widget", "size": 3}]}, words('{"type":"widget","size":3}')),
    "a part that is a text": ({"role": "user", "content": ["Hi"]}, words('"Hi"')),
    "a text part without a text": ({"role": "user", "content": [{"type": "text"}]}, words('{"type":"text"}')),
    "a type that is no text": ({"role": "user", "content": [{"type": [1]}]}, words('{"type":[1]}')),
    "an object for content": ({"role": "tool", "content": {"a": 1}}, words('{"a":1}')),
}


@pytest.mark.parametrize("case", COUNTED)
def test_what_is_counted_of_a_message(case: str) -> None:
    data, tokens = COUNTED[case]
    assert COUNTER.message(ChatMessage.of(data), MODEL) == MESSAGE_TOKENS + tokens


def test_the_vocabulary_is_that_of_the_model() -> None:
    text = "お誕生日おめでとう"
    assert (COUNTER.text(text, "gpt-4"), COUNTER.text(text, "gpt-4o")) == (9, 8)
    message = ChatMessage.of({"role": "user", "content": text})
    assert (COUNTER.message(message, "gpt-4"), COUNTER.message(message, "gpt-4o")) == (13, 12)


def test_json_is_counted_as_text() -> None:
    raw = b'[{"type":"function","function":{"name":"get_weather"}}]'
    assert COUNTER.json(raw, MODEL) == words(raw.decode())
    assert COUNTER.json(b'"\xff"', MODEL) > 0
    assert COUNTER.json(b"[1, ", MODEL) > 0


@pytest.mark.parametrize("written", [{}, {"indent": 2}, {"ensure_ascii": False}])
def test_json_counts_alike_however_it_is_written(written: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "get_weather", "description": "查询天气", "parameters": {}}}]
    compact = json.dumps(tools, ensure_ascii=False, separators=(",", ":"))
    assert COUNTER.json(json.dumps(tools, **written).encode(), MODEL) == words(compact)


def test_a_message_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = TokenCounter()
    first = counter.message(ChatMessage.of({"role": "user", "content": "Where?"}), MODEL)
    tools = counter.json(b"[1]", MODEL)

    def fail(*_arguments: object) -> int:
        raise AssertionError("it was counted again")

    monkeypatch.setattr(vocabulary.Vocabulary, "count", fail)
    assert counter.message(ChatMessage.of({"role": "user", "content": "Where?"}), MODEL) == first
    assert counter.message(ChatMessage.of({"role": "user", "content": "Where?"}), "gpt-4o-mini") == first
    assert counter.json(b"[1]", MODEL) == tools
    with pytest.raises(AssertionError, match="again"):
        counter.message(ChatMessage.of({"role": "user", "content": "Where!"}), MODEL)
    with pytest.raises(AssertionError, match="again"):
        counter.message(ChatMessage.of({"role": "user", "content": "Where?"}), "gpt-4")


def said(text: str) -> ChatMessage:
    return ChatMessage.of({"role": "user", "content": text})


def test_the_cache_shows_messages_and_tokens_and_can_be_cleared() -> None:
    counter = TokenCounter("estimate")
    assert counter.cached == Cached(cached_messages=0, total_cached_tokens=0)
    tokens = [counter.message(said(text), MODEL) for text in ("One", "Two", "Two")]
    counter.json(b"[]", MODEL)
    assert counter.cached == Cached(cached_messages=2, total_cached_tokens=tokens[0] + tokens[1])
    counter.clear()
    assert counter.cached == Cached(cached_messages=0, total_cached_tokens=0)
    assert counter.message(said("One"), MODEL) == tokens[0]
    assert counter.cached == Cached(cached_messages=1, total_cached_tokens=tokens[0])


def test_the_cache_is_bounded() -> None:
    counter = TokenCounter("estimate", cache_bytes=3 * ENTRY_BYTES)
    for number in range(10):
        counter.message(said(f"{number}" * 1000), MODEL)
    assert counter.cached.cached_messages == 3


def test_a_cache_of_no_bytes_holds_one_count() -> None:
    counter = TokenCounter("estimate", cache_bytes=0)
    counter.message(said("One"), MODEL)
    tokens = counter.message(said("Two, three, four"), MODEL)
    assert counter.cached == Cached(cached_messages=1, total_cached_tokens=tokens)


@pytest.mark.parametrize("together", [False, True])
def test_the_least_recently_used_count_is_forgotten_first(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = TokenCounter("estimate", cache_bytes=2 * ENTRY_BYTES)
    counter.messages([said("a"), said("b")], MODEL)
    if together:
        counter.messages([said("b"), said("a"), said("a")], MODEL)
    else:
        counter.message(said("a"), MODEL)
    counter.message(said("c"), MODEL)
    counted: list[str] = []

    def count(_vocabulary: vocabulary.Vocabulary, text: str) -> int:
        counted.append(text)
        return 1

    monkeypatch.setattr(vocabulary.Vocabulary, "count", count)
    counter.messages([said("c"), said("a"), said("b")], MODEL)
    assert counted == ["b"]


def test_the_counts_of_json_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.tokens.counter._JSON_COUNTS", 2)
    counter = TokenCounter("estimate")
    for raw in (b"[1]", b"[2]", b"[3]"):
        counter.json(raw, MODEL)
    counted: list[str] = []

    def count(_vocabulary: vocabulary.Vocabulary, text: str) -> int:
        counted.append(text)
        return 1

    monkeypatch.setattr(vocabulary.Vocabulary, "count", count)
    for raw in (b"[3]", b"[2]", b"[1]"):
        counter.json(raw, MODEL)
    assert counted == ["[1]"]


def test_threads_do_not_disturb_the_sums_of_the_cache() -> None:
    counter = TokenCounter("estimate", cache_bytes=50 * ENTRY_BYTES)
    messages = [said("word " * number) for number in range(97)]

    def work(seed: int) -> None:
        for number in range(1000):
            counter.message(messages[(seed * number) % 97], MODEL)
            counter.messages([messages[number % 97], messages[(number + 1) % 97]], MODEL)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, (3, 5, 7, 11)))
    cached = counter._counts
    assert counter.cached == Cached(cached_messages=50, total_cached_tokens=sum(cached.values()))


def test_an_estimate_needs_no_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_name: str) -> None:
        raise AssertionError("a vocabulary was built")

    monkeypatch.setattr(vocabulary, "_load", fail)
    counter = TokenCounter("estimate")
    counter.warm()
    assert counter.text("Where is it?", MODEL) == 4


def test_warming_builds_both_vocabularies(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    monkeypatch.setattr(vocabulary, "_load", built.append)
    TokenCounter().warm()
    assert sorted(built) == ["cl100k_base", "o200k_base"]


def test_only_the_vocabulary_of_the_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    monkeypatch.setattr(vocabulary, "_load", built.append)
    counter = TokenCounter()
    assert not counter.is_built("gpt-4")
    counter.build("gpt-4")
    assert counter.is_built("gpt-4")
    assert not counter.is_built("gpt-4o")
    assert built == ["cl100k_base"]
    assert TokenCounter("estimate").is_built("gpt-4o")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "name"]), inner),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(["role", "content", "name", "tool_calls", "function_call", "refusal"]),
        JSON | st.sampled_from(["assistant", "image_url", "text"]),
    )
)
@settings(max_examples=150)
def test_any_json_object_can_be_counted(data: dict[str, Any]) -> None:
    assert COUNTER.message(ChatMessage.of(data), MODEL) >= MESSAGE_TOKENS


def test_many_messages_are_counted_as_one_by_one() -> None:
    counter = TokenCounter("estimate")
    messages = [ChatMessage.of({"role": "user", "content": text}) for text in ("One", "Two, three", "One", "")]
    counts = [TokenCounter("estimate").message(message, MODEL) for message in messages]
    assert counter.messages(messages, MODEL) == counts
    assert counter.messages(messages, MODEL) == counts
    assert counter.messages([], MODEL) == []
    assert counter.cached.cached_messages == 3
