from __future__ import annotations

import base64
import hashlib
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiktoken_ext.openai_public
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.tokens import vocabulary
from proxy.tokens.vocabulary import EncodingName, Vocabulary, encoding_of, estimate

NAMES: tuple[EncodingName, ...] = ("cl100k_base", "o200k_base")
SHA256 = {
    "cl100k_base": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    "o200k_base": "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
}
"""Of the files as OpenAI publishes them; tiktoken expects the same."""
BUILT = {name: Vocabulary(name) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_the_packed_vocabulary_is_openais_byte_for_byte(name: EncodingName) -> None:
    encoding = BUILT[name].build()
    assert encoding is not None
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(encoding.token_byte_values()))
    in_rank_order = sorted((encoding.encode_single_token(token), token) for token in encoding.token_byte_values())
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in in_rank_order)
    assert hashlib.sha256(b"".join(lines)).hexdigest() == SHA256[name]


@pytest.mark.parametrize("name", NAMES)
def test_texts_are_divided_as_tiktoken_divides_them(name: EncodingName, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def load(_address: str, expected_hash: str) -> dict[bytes, int]:
        loaded.append(expected_hash)
        return {}

    monkeypatch.setattr(tiktoken_ext.openai_public, "load_tiktoken_bpe", load)
    definition: dict[str, Any] = getattr(tiktoken_ext.openai_public, name)()
    encoding = BUILT[name].build()
    assert encoding is not None
    assert definition["pat_str"] == encoding._pat_str
    assert loaded == [SHA256[name]]


@pytest.mark.parametrize(
    ("text", "cl100k", "o200k"),
    [
        ("", 0, 0),
        ("hello world", 2, 2),
        ("tiktoken is great!", 6, 6),
        ("antidisestablishmentarianism", 6, 6),
        ("お誕生日おめでとう", 9, 8),
        ("<|endoftext|>", 7, 7),
    ],
)
def test_known_counts(text: str, cl100k: int, o200k: int) -> None:
    assert BUILT["cl100k_base"].count(text) == cl100k
    assert BUILT["o200k_base"].count(text) == o200k


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("gpt-4o-mini", "o200k_base"),
        ("gpt-5.6", "o200k_base"),
        ("o3-mini", "o200k_base"),
        ("gpt-oss-120b", "o200k_base"),
        ("gpt-4-0613", "cl100k_base"),
        ("gpt-3.5-turbo", "cl100k_base"),
        ("text-davinci-003", "cl100k_base"),
        ("gpt2", "cl100k_base"),
        ("openai/gpt-4-turbo", "cl100k_base"),
        ("openai/gpt-4o", "o200k_base"),
        ("qwen3-max", "o200k_base"),
        ("", "o200k_base"),
    ],
)
def test_each_model_has_a_vocabulary(model: str, name: str) -> None:
    assert encoding_of(model) == name


HOSTILE = {
    "spaces": " " * 1_000_000,
    "tabs": "\t" * 1_000_000,
    "no-break spaces": "\u00a0" * 1_000_000,
    "newlines": "\n" * 1_000_000,
    "CRLF": "\r\n" * 500_000,
    "runs just below the limit": (" " * 999 + "x") * 1_000,
    "one letter": "a" * 1_000_000,
    "capitals": "A" * 1_000_000,
    "digits": "7" * 1_000_000,
    "Chinese": "中" * 1_000_000,
    "punctuation": "=" * 1_000_000,
    "combining marks": "a" + "\u0301" * 1_000_000,
    "lone surrogates": "\ud800" * 100_000,
    "special tokens": "<|endoftext|><|im_start|>" * 10_000,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_texts_are_counted(text: str, caplog: pytest.LogCaptureFixture) -> None:
    tokens = BUILT["o200k_base"].count(text)
    assert 1000 < tokens <= 3 * len(text)
    assert not caplog.records, "it was estimated"


@given(st.lists(st.sampled_from([" ", "\n", "\t", "\u00a0", "a", "中", " " * 998, " " * 999, " " * 1000, "\n" * 2500])))
@settings(max_examples=60)
def test_a_text_is_divided_only_within_long_white_space(parts: list[str]) -> None:
    text = "".join(parts)
    pieces = vocabulary._pieces(text)
    assert "".join(pieces) == text
    for piece in pieces:
        longest = max((len(run) for run in "".join(c if c.isspace() else "\0" for c in piece).split("\0")), default=0)
        assert longest < 1000
    if len(pieces) == 1 and text:
        assert BUILT["o200k_base"].count(text) == len(BUILT["o200k_base"].build().encode_ordinary(text))  # type: ignore[union-attr]  # it is built


@given(st.lists(st.sampled_from([" ", "\n", "a", "b" * 9_999, "中" * 10_000, "c" * 20_001, "d" * 45_000])))
@settings(max_examples=60)
def test_a_text_is_divided_within_long_runs_without_white_space(parts: list[str]) -> None:
    text = "".join(parts)
    pieces = vocabulary._pieces(text)
    assert "".join(pieces) == text
    assert all(len(run) <= 20_000 for piece in pieces for run in piece.split())
    assert len(pieces) == 1 or any(len(run) >= 20_000 for run in text.split())


def test_a_run_has_as_many_tokens_in_pieces_but_for_one_at_each_end() -> None:
    run = "deadbeef" * 12_500
    encoding = BUILT["o200k_base"].build()
    assert encoding is not None
    whole = len(encoding.encode_ordinary(run))
    assert abs(BUILT["o200k_base"].count(run) - whole) <= 5


class PanicException(BaseException):
    """What a panic in tiktoken's Rust code looks like from here."""


class Broken:
    """A tokenizer that fails."""

    def __init__(self, why: BaseException) -> None:
        self.why = why

    def encode_ordinary(self, _text: str) -> list[int]:
        raise self.why


def broken(monkeypatch: pytest.MonkeyPatch, why: BaseException) -> Vocabulary:
    monkeypatch.setattr(vocabulary, "_load", lambda _name: Broken(why))
    return Vocabulary("o200k_base")


def test_a_panic_of_the_tokenizer_becomes_an_estimate(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert broken(monkeypatch, PanicException()).count("some words here") == estimate("some words here", "o200k_base")
    assert "estimated" in caplog.text


def test_other_exceptions_than_a_panic_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        broken(monkeypatch, KeyboardInterrupt()).count("some words here")


def test_a_vocabulary_that_cannot_be_read_is_tried_once_and_estimated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[str] = []

    def load(name: str) -> object:
        tries.append(name)
        raise FileNotFoundError(name)

    monkeypatch.setattr(vocabulary, "_load", load)
    lost = Vocabulary("cl100k_base")
    assert lost.build() is None
    assert lost.count("some words here") == estimate("some words here", "cl100k_base")
    assert tries == ["cl100k_base"]
    assert "cannot be read" in caplog.text


def test_several_threads_build_a_vocabulary_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []
    together = threading.Barrier(4)

    def load(name: str) -> object:
        tries.append(name)
        return object()

    monkeypatch.setattr(vocabulary, "_load", load)
    fresh = Vocabulary("o200k_base")

    def build() -> object:
        together.wait()
        return fresh.build()

    with ThreadPoolExecutor(4) as pool:
        built = [work.result() for work in [pool.submit(build) for _ in range(4)]]
    assert tries == ["o200k_base"]
    assert len(set(built)) == 1


def test_building_a_vocabulary_uses_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert Vocabulary("cl100k_base").count("hello world") == 2


@pytest.mark.parametrize("name", NAMES)
def test_the_ranks_are_in_memory_once(name: EncodingName) -> None:
    encoding = BUILT[name].build()
    assert encoding is not None
    assert encoding._mergeable_ranks == {}
    assert Vocabulary(name).build() is encoding


class Lazy:
    """A tokenizer that goes on needing the ranks that it was given."""

    def __init__(self, _name: str, *, mergeable_ranks: dict[bytes, int], **_: object) -> None:
        self.ranks = mergeable_ranks

    def encode_ordinary(self, text: str) -> list[int]:
        return [self.ranks[text[:1].encode()]]


def test_a_tokenizer_that_needs_its_ranks_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "Encoding", Lazy)
    made: Any = vocabulary._load.__wrapped__("cl100k_base")
    assert made.encode_ordinary("a") == [64]


def test_importing_the_counter_builds_no_vocabulary() -> None:
    program = "import lzma\nlzma.decompress = None\nimport proxy.tokens.counter\nproxy.tokens.counter.TokenCounter()\n"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])  # noqa: S603 - our own program


ENGLISH = """The proxy keeps the full history of every session and sends a view of it. Messages are never
overwritten: an edited turn is a branch, and the same message at the same place is stored once. When the
conversation grows beyond what the model can take, the oldest rounds are left out, and what was left out can
still be read by its reference."""
CODE = """def settle(self, exchange: Exchange) -> None:
    for message in exchange.messages:
        if message.role == "assistant" and not message.calls:
            self.head = self.store.append(message, parent=self.head)
    return None
"""
JSON = """{"status": "ok", "items": [{"id": 48213, "price": 1299.5, "currency": "EUR", "created":
"2026-11-20T10:15:00Z"}, {"id": 48214, "price": 7.25, "currency": "USD", "tags": ["new", "sale"]}]}"""
CHINESE = """代理保存每个会话的完整历史,只把其中一部分发送给模型。消息永远不会被覆盖:编辑过的一轮是一个分支,
同一位置的同一条消息只存储一次。当对话超过模型的上限时,最早的几轮会被省略,但仍然可以通过引用读取原文。"""
MIXED = "Привет, как дела? Ελληνικά κείμενα, 🙂🎉 and العربية text"


@pytest.mark.parametrize("encoding", ["cl100k_base", "o200k_base"])
@pytest.mark.parametrize(
    ("text", "tolerance"),
    [(ENGLISH, 0.2), (CODE, 0.2), (JSON, 0.2), (CHINESE, 0.25), (MIXED, 0.3)],
    ids=["english", "code", "json", "chinese", "mixed"],
)
def test_an_estimate_is_near_the_exact_count(text: str, tolerance: float, encoding: EncodingName) -> None:
    assert estimate(text, encoding) == pytest.approx(BUILT[encoding].count(text), rel=tolerance)


def test_an_estimate_is_0_for_the_empty_text_only() -> None:
    assert estimate("", "o200k_base") == 0
    assert estimate(" ", "o200k_base") == 1
    assert estimate("!", "o200k_base") == 1


def test_lone_surrogates_are_estimated() -> None:
    assert estimate("\ud800" * 10, "o200k_base") > 1


@pytest.mark.parametrize("unit", ["a", "7", " ", "\n", "中", "!", "é", "🙂", "\ud800"])
def test_the_estimate_of_a_run_of_one_character_grows_with_its_length(unit: str) -> None:
    short, long = estimate(unit * 10_000, "o200k_base"), estimate(unit * 100_000, "o200k_base")
    assert short > 10
    assert long == pytest.approx(10 * short, rel=0.05)


def test_a_long_text_is_counted_in_windows_and_has_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"word {number} and a line\n  of 中文 " for number in range(400))
    whole, guessed = BUILT["o200k_base"].count(text), estimate(text, "o200k_base")
    monkeypatch.setattr(vocabulary, "_AT_ONCE", 1_000)
    monkeypatch.setattr(vocabulary, "_SEARCHED", 200)
    assert BUILT["o200k_base"].count(text) == whole
    assert abs(estimate(text, "o200k_base") - guessed) <= guessed // 100
    assert BUILT["o200k_base"].count("汉" * 2_500) > 0
