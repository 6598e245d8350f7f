"""Marks: what is said of what is not shown."""

from __future__ import annotations

import pytest

from proxy.textscan.mark import ending, names_ref, omitted


def test_what_a_mark_says() -> None:
    assert omitted("15") == "… (15 omitted)"
    assert omitted("3 lines", "2 x a #") == "… (3 lines omitted: 2 x a #)"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (f"some lines\n{ending('node_1')}", True),
        ('{"compressed":true,"full_output":"node_1"}', True),
        ("[... 1 line (5 bytes) omitted of 2 (9 bytes); full output: node_1 ...]\nend", True),
        (ending("node_12"), False),
        ('{"full_output":"node_12"}', False),
        ("node_1", False),
    ],
)
def test_which_texts_name_their_original(text: str, names: bool) -> None:
    assert names_ref(text, "node_1") == names
