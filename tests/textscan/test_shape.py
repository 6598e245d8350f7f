"""What each piece of a text looks like."""

from __future__ import annotations

import pytest

from proxy.textscan.shape import LONGEST, kind_of


@pytest.mark.parametrize(
    ("piece", "kind"),
    [
        ("https://example.org/a?b=c&d=12", "url"),
        ("ana.lopez+home@example.org", "email"),
        ("/srv/data/report.txt", "path"),
        ("src/views/list", "path"),
        ("report.txt", "path"),
        ("a.c", "path"),
        ("2024-05-22", "date"),
        ("2024-05-22T10:30:00Z", "date"),
        ("2024-05-22 10:30", "date"),
        ("22/05/2024", "date"),
        ("10:30", "date"),
        ("136", "number"),
        ("-12.5", "number"),
        ("1,250,000", "number"),
        ("45%", "number"),
        ("300ms", "number"),
        ("HAT136", "id"),
        ("user_id", "id"),
        ("buildDir", "id"),
        ("v1.2.3", "id"),
        ("module.name.parts", "id"),
        ("#1042", "id"),
        ("@ana_lopez", "id"),
        ("555-0199", "id"),
        ("3f9a2c1", "id"),
        ("外卖市场", "cjk"),
        ("東京タワー", "cjk"),
        ("ordinary", None),
        ("Ordinary", None),
        ("two words", None),
        ("and/or", None),
        ("well-known", None),
        ("12-3", None),
        ("a=b", None),
        ("@", None),
        ("true", None),
        ("e.g", None),
        ("x", None),
        ("///", None),
        ("_____", None),
        ("混合text", None),
        ("外" * 13, None),
        ("a1" * LONGEST, None),
    ],
)
def test_a_piece_has_the_shape_of(piece: str, kind: str | None) -> None:
    assert kind_of(piece) == kind
