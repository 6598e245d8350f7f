from __future__ import annotations

import pytest

from proxy.conversation import body_id
from proxy.recall.refs import copied, name_in, ref_of

BODY = body_id(b"{}")


def test_a_ref_is_the_beginning_of_a_name() -> None:
    ref = ref_of(BODY)
    assert ref == f"ref_{BODY[:16]}"
    assert name_in(ref) == BODY[:16]
    assert name_in(BODY) == BODY
    assert name_in(BODY[:12]) == BODY[:12]


@pytest.mark.parametrize(
    "ref",
    ["", "ref_", "ref_123", "REF_" + "0" * 16, "ref_" + "g" * 16, "0" * 41, f"ref={'0' * 16}", "..", "%00"],
)
def test_what_is_no_ref(ref: str) -> None:
    assert name_in(ref) is None


@pytest.mark.parametrize(
    "written",
    [
        "ref_0123456789abcdef",
        " ref_0123456789abcdef\n",
        "ref=ref_0123456789abcdef;",
        "ref: ref_0123456789abcdef",
        "[ref_0123456789abcdef]",
        '"REF_0123456789ABCDEF"',
        "`ref_0123456789abcdef`.",
    ],
)
def test_a_ref_is_known_as_a_model_copies_it(written: str) -> None:
    assert copied(written) == "ref_0123456789abcdef"


def test_a_very_long_one_is_none() -> None:
    assert name_in(copied("f" * 100_000)) is None
