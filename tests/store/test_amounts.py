from __future__ import annotations

from typing import Any

import msgspec
import pytest

from proxy.store.records import LIMIT, Amount, Time


@pytest.mark.parametrize(
    ("kind", "number", "fits"),
    [
        (Amount, 0, True),
        (Amount, LIMIT - 1, True),
        (Amount, LIMIT, False),
        (Amount, -1, False),
        (Time, 253_402_300_799_999, True),
        (Time, 253_402_300_800_000, False),
        (Time, -1, False),
    ],
)
def test_what_a_column_cannot_hold_or_nobody_can_be_shown_is_no_number(
    kind: Any, number: int, *, fits: bool
) -> None:
    try:
        assert msgspec.convert(number, kind) == number
    except msgspec.ValidationError:
        assert not fits
    else:
        assert fits
