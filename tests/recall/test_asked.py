from __future__ import annotations

import pytest

from proxy.errors import InvalidRequest
from proxy.recall.asked import ALLOWED, Asked, read_asked


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ('{"ref": " ref_1 "}', Asked(ref="ref_1", query="", lines="", grep="")),
        (
            '{"query": "a b", "ref": "", "lines": "", "grep": ""}',
            Asked(ref="", query="a b", lines="", grep=""),
        ),
        (
            '{"query": "a", "ref": null, "lines": null, "grep": null}',
            Asked(ref="", query="a", lines="", grep=""),
        ),
        (
            '{"ref": "r", "lines": "10 - 20", "grep": " x "}',
            Asked(ref="r", query="", lines="10-20", grep=" x "),
        ),
        ('{"ref": "r", "lines": "7"}', Asked(ref="r", query="", lines="7-7", grep="")),
        ('{"ref": "r", "lines": 7}', Asked(ref="r", query="", lines="7-7", grep="")),
        ('{"ref": "r", "lines": [3, 9]}', Asked(ref="r", query="", lines="3-9", grep="")),
        ('{"ref": "r", "lines": "x"}', Asked(ref="r", query="", lines="x", grep="")),
        ('{"ref": "r", "more": 1}', Asked(ref="r", query="", lines="", grep="")),
    ],
)
def test_what_is_asked_for(arguments: str, asked: Asked) -> None:
    assert read_asked(arguments) == asked


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "not valid JSON"),
        ('{"ref": "r"', "not valid JSON"),
        ("[" * 5_000, "not valid JSON"),
        ('["ref"]', "no JSON object"),
        ('"ref_1"', "no JSON object"),
        ("{}", "Neither"),
        ('{"ref": " ", "query": ""}', "Neither"),
        ('{"grep": "a"}', "Neither"),
        ('{"ref": "r", "query": "q"}', "Both"),
        ('{"ref": 7}', '"ref" must be a string'),
        ('{"query": ["a"]}', '"query" must be a string'),
        ('{"ref": "r", "grep": {}}', '"grep" must be a string'),
        ('{"ref": "r", "lines": true}', '"lines" must be a string'),
        ('{"ref": "r", "lines": [1, 2, 3]}', '"lines" must be a string'),
        ('{"ref": "r", "lines": []}', '"lines" must be a string'),
    ],
)
def test_what_is_wrong_is_said_with_what_is_allowed(arguments: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        read_asked(arguments)
    assert words in raised.value.message
    assert ALLOWED in raised.value.message
