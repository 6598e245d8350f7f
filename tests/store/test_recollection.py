from __future__ import annotations

import pytest

from proxy.store.records import TooLong, allow


@pytest.mark.parametrize("most", [None, 3, 4])
def test_what_is_allowed_is_read(most: int | None) -> None:
    allow(3, most)


def test_more_is_not() -> None:
    with pytest.raises(TooLong):
        allow(3, 2)
