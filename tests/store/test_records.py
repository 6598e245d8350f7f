from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.store.records import session_key


@given(st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"])))
def test_owner_and_id_cannot_be_taken_for_each_other(tenant: str, session: str) -> None:
    key = session_key(tenant, session)
    assert len(key) == 32
    assert key == session_key(tenant, session)
    if session:
        assert key != session_key(tenant + session[0], session[1:])
        assert key != session_key(tenant + ":" + session[0], session[1:])
