"""Inventions: what a source lacks is found, and another way of writing what it has is not."""

from __future__ import annotations

import pytest

from proxy.summaries.inventions import invented
from proxy.summaries.source import Source
from tests.trimming.notation import messages

FLIGHT = Source.of(
    messages(
        [
            "user Noah_Muller_9847 wants HAT082 on 2024-05-17 at 11:00 for 1002 dollars",
            "assistant he paid 957 and it takes 3 days, by `search_flights`",
        ]
    )
)


def lacking(text: str, source: Source = FLIGHT) -> list[str]:
    return list(invented(text, source))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("The order ORD-99817 was shipped.", "ORD-99817"),
        ("See /etc/invented/path.py for it.", "/etc/invented/path.py"),
        ("It stands at https://evil.example/x now.", "https://evil.example/x"),
        ("Ask bob@evil.example about it.", "bob@evil.example"),
        ("He paid $4,321 for all of it.", "4,321"),
        ("The rate is 7.25 now.", "7.25"),
        ("一共花了9999元，都已付清。", "9999"),
        ("`bookFlight` was used for it.", "bookFlight"),
        ("They used cancel_all_flights for it.", "cancel_all_flights"),
    ],
)
def test_what_the_source_lacks(text: str, named: str) -> None:
    assert lacking(text) == [named]


@pytest.mark.parametrize(
    "text",
    [
        "Three steps of a 3-step plan, Q3, and JavaScript and/or TypeScript.",
        "The total is $1,002 or 1002.00 dollars, at 23:00 on May 17.",
        "The flight HAT 082 and Noah_Muller_9847.",
        "The flight took 3 days and 4 nights, a 2-hour one for 5GB.",
        "It was found by `search_flights`.",
    ],
)
def test_other_ways_of_writing_what_the_source_has(text: str) -> None:
    assert lacking(text) == []


def test_identifiers_come_before_numbers_each_as_often_as_it_stands_there() -> None:
    assert lacking("It cost 777 with QX-71, and 778.\nThen 777 again.") == ["QX-71", "777", "778", "777"]


def test_a_sum_or_a_difference_of_two_numbers_beside_it() -> None:
    paid = "The total price is 1002 but 957 was paid, a difference of 45 dollars"
    assert lacking(paid) == []
    assert lacking("The difference is 45 dollars.") == ["45"]
    assert lacking("The total price is 1002 and 957 was paid,\nthe rest of 45 is missing.") == ["45"]
    assert lacking("The prices 957 and 1002 make 1959.") == ["1959"]
    assert lacking(paid.replace("45 dollars", "46 dollars")) == ["46"]
    many = Source.of(messages(["user 100 200 300 400 500 600 700 flights"]))
    assert lacking("The flights 100 200 300 400 500 600 700 and 900", many) == ["900"]


def test_numbers_that_are_scaled() -> None:
    thousands = Source.of(messages(["user it was 12000 once and 3万 later"]))
    assert lacking("It was 12k once and 30,000 later.", thousands) == []
    assert lacking("It was 13k once and 31,000 later.", thousands) == ["13", "31,000"]
