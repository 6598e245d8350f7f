"""Records, cursors, and what can be stored."""

from __future__ import annotations

from hashlib import shake_256
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import InvalidRequest
from proxy.store.packing import TEXTS, is_plain, pack, pack_all, require_plain, sanitize, unpack
from proxy.store.records import LIMIT, Amount, Cursor, Time, session_key


@given(st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"])))
def test_owner_and_id_cannot_be_taken_for_each_other(tenant: str, session: str) -> None:
    key = session_key(tenant, session)
    assert len(key) == 32
    assert key == session_key(tenant, session)
    if session:
        assert key != session_key(tenant + session[0], session[1:])
        assert key != session_key(tenant + ":" + session[0], session[1:])


@pytest.mark.parametrize(
    ("text", "plain", "made"),
    [
        ("", True, ""),
        ("名前 \n\x01🦊", True, "名前 \n\x01🦊"),
        ("a\x00b", False, "a\ufffdb"),
        ("\ud800x\udfff", False, "\ufffdx\ufffd"),
    ],
)
def test_what_a_database_cannot_hold_is_told_and_replaced(text: str, plain: bool, made: str) -> None:
    assert is_plain(text) is plain
    assert sanitize(text) == made


def test_several_texts_are_packed_as_each_alone_would_be() -> None:
    texts = ["short", "said again " * 20, shake_256(b"no pattern").hexdigest(8), "名前 " * 9]
    packed = pack_all([text.encode() for text in texts], TEXTS)
    assert packed == [pack(text, TEXTS) for text in texts]
    assert [unpack(each) for each in packed] == texts
    assert pack_all([b"{}"], TEXTS) == [pack("{}", TEXTS)]
    assert pack_all([], TEXTS) == []


def test_a_request_with_such_a_name_is_refused_by_its_name() -> None:
    require_plain(tenant="t", agent=None)
    with pytest.raises(InvalidRequest, match="agent holds a NUL") as refused:
        require_plain(tenant="t", agent="a\x00b")
    assert refused.value.param == "agent"


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
def test_what_a_column_cannot_hold_or_nobody_can_be_shown_is_no_number(kind: Any, number: int, *, fits: bool) -> None:
    try:
        assert msgspec.convert(number, kind) == number
    except msgspec.ValidationError:
        assert not fits
    else:
        assert fits


@given(st.integers(-(2**63) + 1, 2**63 - 1), st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_a_cursor_comes_back_as_it_was(time: int, name: str) -> None:
    assert Cursor.read(str(Cursor(time=time, name=name))) == Cursor(time=time, name=name)


@pytest.mark.parametrize(
    "text", ["", "12", ".", ".name", "1e3.name", "٣.name", f"{2**63}.n", "1.a\0b", "9" * 5000 + ".n"]
)
def test_what_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Cursor.read(text)
    assert refused.value.param == "after"
