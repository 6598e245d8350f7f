"""Weights: they tell the tokens of a form from those of the original."""

from __future__ import annotations

import json

import pytest

from proxy.textscan.document import read, write
from proxy.textscan.table import tabulated
from proxy.textscan.weight import weight
from proxy.tokens import TokenCounter

RECORDS = [{"number": n, "city": f"City {n}", "price": n * 1.25, "open": n % 3 == 0} for n in range(40)]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", 0),
        ("words and 12345", 4),
        ('{"a": [1]}', 6),
        ("中文 字", 2),
        ("a\n\n\n  b", 3),
        (" " * 100_000, 0),
    ],
)
def test_what_a_text_weighs(text: str, pieces: int) -> None:
    assert weight(text) == pieces


@pytest.mark.parametrize("indent", [None, 2])
def test_a_table_weighs_what_it_costs(indent: int | None) -> None:
    text = json.dumps(RECORDS, indent=indent)
    table = write(tabulated(read(text)) or [])
    counter = TokenCounter()
    estimate = counter.text(text, "gpt-4o") * weight(table) / weight(text)
    assert estimate == pytest.approx(counter.text(table, "gpt-4o"), rel=0.15)
