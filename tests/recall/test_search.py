"""Searching a conversation: terms, and which messages come first."""

from __future__ import annotations

import pytest

from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.recall.search import MOST_TERMS, lowered, places, search, terms_of


def said(*texts: str) -> list[Message]:
    return [ChatMessage.of({"role": "user", "content": text}) for text in texts]


def order(messages: list[Message], query: str, **given: set[int]) -> list[int]:
    return [passage.index for passage in search(messages, query, 8, **given).passages]


FILLER = [f"status report number {n}: nothing to say about the order" for n in range(50)]


def test_what_is_rare_counts_more_than_what_is_common() -> None:
    messages = said(*FILLER, "the order was lost in Rotterdam", "order order order", *FILLER)
    assert order(messages, "order Rotterdam")[0] == 50


def test_who_has_more_of_it_comes_first() -> None:
    messages = said("the blue suitcase", *FILLER, "the blue suitcase from Lisbon", *FILLER, "a blue wall")
    assert order(messages, "blue suitcase Lisbon") == [51, 0]


def test_what_stands_together_comes_before_what_stands_apart() -> None:
    apart = "\n".join(["Lisbon", *["nothing"] * 30, "suitcase"])
    together = "\n".join(["nothing", "Lisbon", "suitcase", *["nothing"] * 30])
    assert order(said(apart, together, apart + "!", *FILLER), "suitcase Lisbon")[0] == 1


def test_the_very_words_come_first() -> None:
    messages = said("not found: the file", "The  file\nnot found", "file not found", "found: not the file")
    assert order(messages, "File not found")[0] in (1, 2)
    assert set(order(messages, "File not found")[:2]) == {1, 2}


def test_of_equals_the_newest_comes_first_and_the_same_text_once() -> None:
    messages = said("code 4711 here", "code 4711 here", *FILLER, "code 4711 there")
    assert order(messages, "4711") == [52, 1]


def test_the_lines_are_told_with_their_numbers() -> None:
    text = "\n".join(f"line {n}" for n in range(1, 100)) + "\nthe password is tulip\nlast"
    (passage,) = search(said(text, *FILLER), "password", 8).passages
    assert passage.lines == ((100, "the password is tulip"),)


def test_neighbouring_lines_are_told_in_order_and_not_too_many() -> None:
    text = "alpha\nbeta\ngamma\ndelta\nepsilon\nalpha beta"
    (passage,) = search(said(text, *FILLER), "alpha beta gamma delta epsilon", 8).passages
    assert len(passage.lines) == 4
    assert [number for number, _ in passage.lines] == sorted(number for number, _ in passage.lines)


def test_of_a_long_line_the_part_around_is_told() -> None:
    (passage,) = search(said("x " * 9_000 + "tulip" + " y" * 9_000, *FILLER), "tulip", 8).passages
    ((number, line),) = passage.lines
    assert number == 10  # a long line counts as several
    assert "x tulip y" in line
    assert len(line) < 500


def test_only_so_many_places_in_one_message_are_looked_at() -> None:
    text = "\n".join(["tulip"] * 300 + ["tulip rose"])
    (passage,) = search(said(text, *FILLER), "tulip", 8).passages
    assert [number for number, _ in passage.lines] == [1, 2, 3, 4]


def test_calls_are_searched_too() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"id":"#W99"}'}}
    messages = [ChatMessage.of({"role": "assistant", "content": None, "tool_calls": [call]}), *said(*FILLER)]
    assert order(messages, "W99") == [0]
    assert order(messages, "find") == [0]


def test_what_is_left_out_is_counted_and_keeps_nothing_else_out() -> None:
    messages = said("tulip was the password", *FILLER, "what was the password, was it tulip?")
    found = search(messages, "what was the password, was it tulip?", 8, {51})
    assert [passage.index for passage in found.passages] == [0]
    assert found.left_out == 1


def test_what_is_found_by_much_less_is_not_told() -> None:
    messages = said(*FILLER, "order 4711 of Anna went to Rotterdam", *[f"Anna {n}" for n in range(30)])
    assert order(messages, "order 4711 Anna Rotterdam") == [50]


def test_nothing_is_found_where_nothing_is_said() -> None:
    assert search([], "a", 8).passages == ()
    assert search(said("a", ""), "…", 8).passages == ()
    assert search(said("a"), "b", 8).left_out == 0


def test_the_same_question_finds_the_same() -> None:
    messages = said(*FILLER, *FILLER)
    assert search(messages, "status order", 8) == search(messages, "status order", 8)
    assert len(search(messages, "status order", 3).passages) == 3


# ------------------------------------------------------------------------------------ terms


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
