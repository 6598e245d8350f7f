"""Search in a conversation: terms, and the ranking of messages."""

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


def test_a_rare_term_weighs_more_than_a_common_one() -> None:
    messages = said(*FILLER, "the order was lost in Rotterdam", "order order order", *FILLER)
    assert order(messages, "order Rotterdam")[0] == 50


def test_a_message_with_more_terms_comes_first() -> None:
    messages = said("the blue suitcase", *FILLER, "the blue suitcase from Lisbon", *FILLER, "a blue wall")
    assert order(messages, "blue suitcase Lisbon") == [51, 0]


def test_terms_close_together_come_before_terms_apart() -> None:
    apart = "\n".join(["Lisbon", *["nothing"] * 30, "suitcase"])
    together = "\n".join(["nothing", "Lisbon", "suitcase", *["nothing"] * 30])
    assert order(said(apart, together, apart + "!", *FILLER), "suitcase Lisbon")[0] == 1


def test_the_phrase_comes_first() -> None:
    messages = said("not found: the file", "The  file\nnot found", "file not found", "found: not the file")
    assert order(messages, "File not found")[0] in (1, 2)
    assert set(order(messages, "File not found")[:2]) == {1, 2}


def test_of_equals_the_newest_comes_first_and_each_text_once() -> None:
    messages = said("code 4711 here", "code 4711 here", *FILLER, "code 4711 there")
    assert order(messages, "4711") == [52, 1]


def test_lines_come_with_their_numbers() -> None:
    text = "\n".join(f"line {n}" for n in range(1, 100)) + "\nthe password is tulip\nlast"
    (passage,) = search(said(text, *FILLER), "password", 8).passages
    assert passage.lines == ((100, "the password is tulip"),)


def test_up_to_four_neighbouring_lines_come_in_order() -> None:
    text = "alpha\nbeta\ngamma\ndelta\nepsilon\nalpha beta"
    (passage,) = search(said(text, *FILLER), "alpha beta gamma delta epsilon", 8).passages
    assert len(passage.lines) == 4
    assert [number for number, _ in passage.lines] == sorted(number for number, _ in passage.lines)


def test_of_a_long_line_the_part_around_the_match_comes() -> None:
    (passage,) = search(said("x " * 9_000 + "tulip" + " y" * 9_000, *FILLER), "tulip", 8).passages
    ((number, line),) = passage.lines
    assert number == 10  # a long line counts as several
    assert "x tulip y" in line
    assert len(line) < 500


def test_occurrences_in_one_message_are_bounded() -> None:
    text = "\n".join(["tulip"] * 300 + ["tulip rose"])
    (passage,) = search(said(text, *FILLER), "tulip", 8).passages
    assert [number for number, _ in passage.lines] == [1, 2, 3, 4]


def test_tool_calls_are_searched() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"id":"#W99"}'}}
    messages = [ChatMessage.of({"role": "assistant", "content": None, "tool_calls": [call]}), *said(*FILLER)]
    assert order(messages, "W99") == [0]
    assert order(messages, "find") == [0]


def test_left_out_messages_are_counted_and_do_not_displace_others() -> None:
    messages = said("tulip was the password", *FILLER, "what was the password, was it tulip?")
    found = search(messages, "what was the password, was it tulip?", 8, {51})
    assert [passage.index for passage in found.passages] == [0]
    assert found.left_out == 1


def test_weak_matches_are_dropped() -> None:
    messages = said(*FILLER, "order 4711 of Anna went to Rotterdam", *[f"Anna {n}" for n in range(30)])
    assert order(messages, "order 4711 Anna Rotterdam") == [50]


def test_an_empty_conversation_or_query_finds_nothing() -> None:
    assert search([], "a", 8).passages == ()
    assert search(said("a", ""), "…", 8).passages == ()
    assert search(said("a"), "b", 8).left_out == 0


def test_the_same_query_gives_the_same_result() -> None:
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
def test_texts_that_match(query: str, texts: list[str]) -> None:
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
def test_texts_that_do_not_match(query: str, texts: list[str]) -> None:
    for text in texts:
        assert not found(query, text), text


def test_weights_of_terms() -> None:
    weights = {term.text: term.weight for term in terms_of("the reservation of user_42 in row 7781 骑手 id")}
    assert weights["user_42"] > weights["7781"] > weights["reservation"] > weights["骑手"] > weights["id"]
    assert weights["user"] < weights["reservation"]


def test_each_term_is_used_once_and_their_number_is_bounded() -> None:
    assert [term.text for term in terms_of("user user_1 User")] == ["user", "user_1"]
    assert terms_of("user user_1")[0].weight == 1.0
    assert len(terms_of(" ".join(f"word{n}" for n in range(900)))) == MOST_TERMS


def test_all_places_of_a_term() -> None:
    (term,) = terms_of("dog")
    assert list(places("dog dogs hotdog dog", term)) == [0, 16]


def test_the_search_for_a_term_ends_after_many_misses() -> None:
    (term,) = terms_of("aa")
    assert list(places("b" + "a" * 100_000 + " aa", term)) == []


def test_lower_case_keeps_the_length() -> None:
    assert lowered("ÄB") == "äb"
    assert lowered("İA") == "ia"
