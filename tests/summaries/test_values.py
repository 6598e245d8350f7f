"""Exact values: what a user gives by name, what a call was given, and which stay."""

from __future__ import annotations

import json

import pytest

from proxy.summaries.values import Value, latest, values_given, values_said


def said(text: str) -> list[tuple[str, str]]:
    return [(value.name, value.text) for value in values_said(text)]


def test_values_that_a_user_gives_by_name() -> None:
    text = "Budget: 5000 USD, log_level=debug. rate: 3.5%, see http://x.y/a?b=1 at 12:30"
    assert said(text) == [("Budget", "5000 USD"), ("log_level", "debug"), ("rate", "3.5%")]
    assert said("预算：5000，人数是3人，单价约¥25.5") == [
        ("预算", "5000"),
        ("人数", "3人"),
        ("单价", "¥25.5"),
    ]
    assert said("nothing here") == []


def test_a_value_is_written_as_the_user_wrote_it() -> None:
    text = "Budget: 5000 USD, log_level=debug. 预算：700，人数是3人\nrate:\n3.5%"
    assert [value.written for value in values_said(text)] == [
        "Budget: 5000 USD",
        "log_level=debug",
        "预算：700",
        "rate: 3.5%",
        "人数是3人",
    ]
    (given,) = values_given('{"amount": 327}')
    assert given.written == "amount=327"


def test_an_identifier_with_a_mark_in_it_is_no_value() -> None:
    assert said("take sha256:9ab4e1 of python:3.11-slim, libssl3=3.0.2-r1, in a.py:214") == []


def test_numbers_and_dates_of_arguments() -> None:
    arguments = '{"amount": 327, "n": 3, "rate": 0.5, "on": {"date": "2024-05-01"}, "text": "see 99 of them"}'
    assert [(value.name, value.text, value.said) for value in values_given(arguments)] == [
        ("amount", "327", False),
        ("rate", "0.5", False),
        ("date", "2024-05-01", False),
    ]
    assert list(values_given("amount 327")) == []
    assert list(values_given("[327]")) == []


@pytest.mark.parametrize(
    "key",
    [
        "limit",
        "offset",
        "page",
        "page_size",
        "per_page",
        "pageSize",
        "max_results",
        "start_line",
        "endLine",
        "top_k",
        "view_range",
        "timeout",
        "timeout_ms",
        "num_results",
        "maxTokens",
        "n",
    ],
)
def test_which_part_is_looked_at_is_no_value(key: str) -> None:
    assert list(values_given(json.dumps({key: 280}))) == []


@pytest.mark.parametrize(
    "key", ["amount", "price", "year", "port", "weight", "total", "budget", "count_of_bags"]
)
def test_other_numbers_are_values(key: str) -> None:
    assert [value.text for value in values_given(json.dumps({key: 280}))] == ["280"]


def test_a_user_s_newer_value_takes_the_place_of_the_older_one() -> None:
    older = Value(name="budget", text="10", said=True)
    newer = Value(name="budget", text="20", said=True)
    given = [Value(name="amount", text=text, said=False) for text in ("10", "20", "10")]
    assert latest([older, *given, newer]) == (given[1], given[2], newer)


def test_of_very_many_the_user_s_and_the_newest_stay() -> None:
    mine = Value(name="budget", text="10", said=True)
    given = [Value(name="n", text=str(number), said=False) for number in range(200)]
    kept = latest([mine, *given])
    assert len(kept) == 120
    assert kept[0] == mine
    assert kept[1:] == tuple(given[-119:])
