from __future__ import annotations

import pytest

from proxy.tokens.estimate import estimate
from proxy.tokens.vocabulary import EncodingName, Vocabulary

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

EXACT: dict[EncodingName, Vocabulary] = {
    "cl100k_base": Vocabulary("cl100k_base"),
    "o200k_base": Vocabulary("o200k_base"),
}


@pytest.mark.parametrize("encoding", ["cl100k_base", "o200k_base"])
@pytest.mark.parametrize(
    ("text", "tolerance"),
    [(ENGLISH, 0.2), (CODE, 0.2), (JSON, 0.2), (CHINESE, 0.25), (MIXED, 0.3)],
    ids=["english", "code", "json", "chinese", "mixed"],
)
def test_it_is_near_the_exact_count(text: str, tolerance: float, encoding: EncodingName) -> None:
    assert estimate(text, encoding) == pytest.approx(EXACT[encoding].count(text), rel=tolerance)


def test_nothing_has_no_tokens_and_anything_has_one() -> None:
    assert estimate("", "o200k_base") == 0
    assert estimate(" ", "o200k_base") == 1
    assert estimate("!", "o200k_base") == 1


def test_a_lone_surrogate_is_counted() -> None:
    assert estimate("\ud800" * 10, "o200k_base") > 1


@pytest.mark.parametrize("unit", ["a", "7", " ", "\n", "中", "!", "é", "🙂", "\ud800"])
def test_an_endless_run_of_one_character_grows_with_its_length(unit: str) -> None:
    short, long = estimate(unit * 10_000, "o200k_base"), estimate(unit * 100_000, "o200k_base")
    assert short > 10
    assert long == pytest.approx(10 * short, rel=0.05)
