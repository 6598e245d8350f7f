from __future__ import annotations

import pytest

from proxy.recall.terms import MOST_TERMS, lowered, places, terms_of


def found(query: str, text: str) -> bool:
    return any(next(places(lowered(text), term), -1) >= 0 for term in terms_of(query))


@pytest.mark.parametrize(
    ("query", "texts"),
    [
        ("Refunds", ["refund", "refunded", "a REFUND.", "refund_policy", "no-refunds"]),
        ("cancelled", ["cancellation", "Cancelled!"]),
        ("parse_args", ["def parse_args(", "x.parse_args"]),
        ("src/main.c", ["in src/main.c:12", "SRC/MAIN.C"]),
        ("ORD-1234", ["order ORD-1234.", "(ord-1234)"]),
        ("W12", ["#W12", "w12"]),
        ("hat", ["HAT271", "a hat"]),
        ("外卖骑手", ["全职骑手", "外卖"]),
        ("渝", ["渝A"]),
        ("ABC订单123", ["订单", "abc", "号码123。"]),
        ("ประกัน", ["การประกันภัย"]),
        ("İstanbul", ["to İstanbul"]),
        ("c", ["plan c"]),
    ],
)
def test_what_is_found(query: str, texts: list[str]) -> None:
    for text in texts:
        assert found(query, text), text


@pytest.mark.parametrize(
    ("query", "texts"),
    [
        ("fund", ["refund"]),
        ("hat", ["hats", "that"]),
        ("W12", ["W123", "AW12"]),
        ("a.b-c", ["a.b-cd"]),
        ("外卖", ["外 卖"]),
        ("plan c", ["c"]),
        ("…!?", ["…!?"]),
        ("", ["a"]),
    ],
)
def test_what_is_not_found(query: str, texts: list[str]) -> None:
    for text in texts:
        assert not found(query, text), text


def test_what_says_more_counts_more() -> None:
    weights = {term.text: term.weight for term in terms_of("the reservation of user_42 in row 7781 骑手 id")}
    assert weights["user_42"] > weights["7781"] > weights["reservation"] > weights["骑手"] > weights["id"]
    assert weights["user"] < weights["reservation"]


def test_a_term_counts_once_and_there_are_not_too_many() -> None:
    assert [term.text for term in terms_of("user user_1 User")] == ["user", "user_1"]
    assert terms_of("user user_1")[0].weight == 1.0
    assert len(terms_of(" ".join(f"word{n}" for n in range(900)))) == MOST_TERMS


def test_all_places_are_given() -> None:
    (term,) = terms_of("dog")
    assert list(places("dog dogs hotdog dog", term)) == [0, 16]


def test_what_only_looks_like_it_is_not_looked_for_for_ever() -> None:
    (term,) = terms_of("aa")
    assert list(places("b" + "a" * 100_000 + " aa", term)) == []


def test_lower_case_is_as_long_as_what_it_is_of() -> None:
    assert lowered("ÄB") == "äb"
    assert lowered("İA") == "ia"
