from __future__ import annotations

import pytest

from proxy.cli.many import spelled_out


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("", ""),
        ("--file a", "--file a"),
        ("--file a b c", "--file a --file b --file c"),
        ("--file a --policy x y --json", "--file a --policy x --policy y --json"),
        ("--file=a b", "--file=a --file b"),
        ("--file a --config c --policy x", "--file a --config c --policy x"),
        ("--json a", "--json a"),
        ("--config c d", "--config c d"),
        ("--file", "--file"),
    ],
)
def test_each_value_gets_its_option(written: str, meant: str) -> None:
    assert list(spelled_out(written.split(), {"--file", "--policy"})) == meant.split()
