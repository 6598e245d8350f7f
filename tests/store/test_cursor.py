from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import InvalidRequest
from proxy.store.records import Cursor


@given(st.integers(0, 2**63 - 1), st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_a_cursor_comes_back_as_it_was(time: int, name: str) -> None:
    assert Cursor.read(str(Cursor(time=time, name=name))) == Cursor(time=time, name=name)


@pytest.mark.parametrize(
    "text",
    ["", "12", ".", ".name", "-1.name", "1e3.name", "٣.name", f"{2**63}.n", "1.a\0b", "9" * 5000 + ".n"],
)
def test_what_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Cursor.read(text)
    assert refused.value.param == "after"
