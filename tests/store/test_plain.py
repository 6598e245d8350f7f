from __future__ import annotations

import pytest

from proxy.errors import InvalidRequest
from proxy.store.records import is_plain, require_plain, sanitize


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


def test_a_request_with_such_a_name_is_refused_by_its_name() -> None:
    require_plain(tenant="t", agent=None)
    with pytest.raises(InvalidRequest, match="agent holds a NUL") as refused:
        require_plain(tenant="t", agent="a\x00b")
    assert refused.value.param == "agent"
