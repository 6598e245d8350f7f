from __future__ import annotations

import re

from proxy.dialects.chat.cache_marks import cache_key


def test_a_key_is_short_says_nothing_and_never_changes() -> None:
    key = cache_key(b"secret", "team-a", "session-1")
    assert key == cache_key(b"secret", "team-a", "session-1") == "c3b590478b0e9dbc5cc9735f418ca993"
    assert re.fullmatch(r"[0-9a-f]{32}", key)


def test_nobody_shares_a_key() -> None:
    keys = {
        cache_key(secret, tenant, session)
        for secret in (b"a", b"b")
        for tenant, session in (("a", "bc"), ("ab", "c"), ('a","b', "c"), ("", "abc"), ("é", "\ud83d"))
    }
    assert len(keys) == 10
