"""Identifiers that a text is divided at otherwise: each as it was written, wherever it stands."""

from __future__ import annotations

import json
from itertools import chain, repeat

import pytest

from proxy.summaries.wholes import is_whole, wholes_in

WHOLES = [
    "172.20.3.9",
    "172.20.3.9:6379",
    "2001:db8::7:1",
    "fe80::12ff:fe34:5678:9abc",
    "2001:db8:0:1:1:1:1:1",
    "AC:DE:48:00:11:22",
    "arn:aws:iam::771:role/reader",
    "urn:isbn:0451450523",
    "doi:10.1000/182",
    "sha256:77fe02",
    "user:9281:cart",
    "git@git.example.org:team/tool.git",
    r"D:\Data\2026\list.xlsx",
    "lib/store/read.rs:88",
    "lib/store/read.rs:88:12",
    "cache.internal:6379",
    "localhost:8080",
    "node:20-alpine",
    "hub.example.org:5000/team/web:2.0.1",
    "openssl=3.1.4-r5",
    "httpx==0.27.0",
    "left-pad@1.3.0",
    "+4915112345678",
    "+44-20-7946-0018",
    "#90417",
    "@mona",
    "Makefile",
    "Dockerfile",
    "README",
    ".env.local",
]


@pytest.mark.parametrize("whole", WHOLES)
def test_what_holds_marks_is_one_piece(whole: str) -> None:
    assert is_whole(whole)
    for text in (
        f"see {whole} there",
        f"It is ({whole}).",
        f"用的是{whole}。请看",
        f"{whole}: gone",
        json.dumps({"key": whole, "also": ["\n"]}),
        json.dumps({"text": f'it has "{whole}", and\nmore'}),
    ):
        assert whole in list(wholes_in(text)), text


@pytest.mark.parametrize("whole", WHOLES)
def test_a_name_before_it_is_no_part_of_it(whole: str) -> None:
    assert whole in list(wholes_in(f"target={whole}"))


@pytest.mark.parametrize(
    "text",
    [
        "nothing of this is one: at 10:30, at 10:30:45, from 3:4, a profile, 3.5, 1.2.3, a=b, x=1.5",
        "https://example.org:8080/a?b=c#12",
        "The user said: yes. It's 5% of #1!",
        "margin:4px; width:100px",
        "std::move(a) == b",
        "def read(self, path: str) -> int:",
        "",
    ],
)
def test_most_of_what_has_marks_is_none(text: str) -> None:
    assert list(wholes_in(text)) == []


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("Your order 88120347 is late", "order 88120347"),
        ("see PR #9921, please", "PR #9921"),
        ("the ticket no. 4471 is open", "ticket no. 4471"),
        ("请查一下订单20261121008的状态", "订单20261121008"),
        ("请查一下合同号HT-2026-0318的状态", "合同号HT-2026-0318"),
        ("停车的是京A88888吗", "京A88888"),
        ("新能源车粤BD12345停在这里", "粤BD12345"),
        ("call +49 30 555 0142 today", "+49 30 555 0142"),
    ],
)
def test_a_number_stands_with_what_it_is_the_number_of(text: str, whole: str) -> None:
    assert whole in list(wholes_in(text))


def test_a_number_alone_has_no_word_before_it() -> None:
    assert list(wholes_in("it took 88120347 steps, 20261121 of them at once; border 12345")) == []


def test_json_that_was_written_with_escapes() -> None:
    assert list(wholes_in(json.dumps({"plate": "京A88888"}))) == ["京A88888"]
    # JSON inside of a text that is none.
    inner = json.dumps({"path": r"D:\Data\list.xlsx"})
    assert list(wholes_in(f"it gave {inner}")) == [r"D:\Data\list.xlsx"]
    assert list(wholes_in('it gave "a.py:12\\nb.py:34"')) == ["a.py:12", "b.py:34"]
    assert list(wholes_in('{"a": broken\\n #4711')) == ["#4711"]


def test_each_comes_once() -> None:
    assert list(wholes_in("#4711 and #4711, order 4711 and order 4711")) == ["#4711", "order 4711"]


def test_of_a_text_full_of_numbers_not_all_are_looked_at() -> None:
    numbers = " ".join(str(10_000 + number) for number in range(6000))
    assert list(wholes_in(f"{numbers} order 99999999")) == []
    assert list(wholes_in(" ".join(chain(repeat("12345", 9000), ["order 99999999"])))) == ["order 99999999"]
