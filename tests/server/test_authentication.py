"""Who gets in, and as whom."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import SecretStr

from proxy.config import AuthSettings
from proxy.errors import Forbidden, Unauthenticated
from proxy.pipeline import DEFAULT_TENANT
from proxy.server.authentication import Authenticator, Identity

SECRET = b"s" * 32


K1, K2, K3, K4 = (f"key-number-{n}-0123" for n in "1234")
ROOT = "key-of-the-admin"


def _gate(**settings: Any) -> Authenticator:
    return Authenticator(AuthSettings(**settings), SECRET)


def _keys(**more: Any) -> Authenticator:
    return _gate(
        mode="keys",
        keys=[{"key": SecretStr(K1), "tenant": "a"}, {"key": SecretStr(K2), "tenant": "a"}, {"key": K3, "tenant": "b"}],
        **more,
    )


def _headers(authorization: str | None = None, host: str | None = "localhost:8080") -> dict[bytes, bytes]:
    pairs = [("host", host), ("authorization", authorization)]
    return {name.encode(): value.encode("latin-1") for name, value in pairs if value is not None}


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8080", "[::1]:8080", "[::1]"])
def test_without_authentication_this_machine_is_one_tenant(host: str) -> None:
    assert _gate().admit(_headers("Bearer whatever", host)) == Identity(tenant=DEFAULT_TENANT)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8080",
        "localhost.evil.example",
        "127.0.0.1.nip.example",
        "",
        None,
        "0.0.0.0",
        ":80",
    ],
)
def test_without_authentication_other_names_are_refused(host: str | None) -> None:
    with pytest.raises(Forbidden, match=r"auth\.mode"):
        _gate().admit(_headers(host=host))


def test_with_authentication_any_name_will_do() -> None:
    assert _keys().admit(_headers(f"Bearer {K1}", "proxy.example")).tenant == "a"


@pytest.mark.parametrize(
    ("authorization", "tenant"), [(f"Bearer {K1}", "a"), (f"bearer  {K2}", "a"), (f"Bearer {K3}", "b"), (K3, "b")]
)
def test_several_keys_may_open_one_tenant(authorization: str, tenant: str) -> None:
    assert _keys().admit(_headers(authorization)) == Identity(tenant=tenant)


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer ", f"Bearer {K4}", f"Basic {K1}", "Bearer \xff"])
def test_a_wrong_key_or_none_stays_outside(authorization: str | None) -> None:
    with pytest.raises(Unauthenticated):
        _keys().admit(_headers(authorization))


def test_the_admin_key_is_nobodys_tenant() -> None:
    assert _keys(admin_key=ROOT).admit(_headers(f"Bearer {ROOT}")) == Identity(tenant="", admin=True)
    assert _gate(admin_key=ROOT).admit(_headers(f"Bearer {ROOT}")) == Identity(tenant="", admin=True)
    assert _gate(admin_key=ROOT).admit(_headers("Bearer other")) == Identity(tenant=DEFAULT_TENANT)


def test_a_reload_changes_keys_and_not_the_mode() -> None:
    gate = _keys()
    gate.take(AuthSettings(mode="none"))
    for key in (None, f"Bearer {K1}"):
        with pytest.raises(Unauthenticated):
            gate.admit(_headers(key))
    gate.take(AuthSettings.model_validate({"mode": "keys", "keys": [{"key": K4, "tenant": "d"}]}))
    assert gate.admit(_headers(f"Bearer {K4}")).tenant == "d"


def test_with_passthrough_a_key_is_a_tenant_and_cannot_be_read_from_it() -> None:
    gate = _gate(mode="passthrough")
    one, two = (gate.admit(_headers(f"Bearer sk-{i}")).tenant for i in (1, 2))
    assert one != two
    assert "sk-1" not in one
    assert gate.admit(_headers("Bearer sk-1")).tenant == one
    assert Authenticator(AuthSettings(mode="passthrough"), b"t" * 32).admit(_headers("Bearer sk-1")).tenant != one
    with pytest.raises(Unauthenticated):
        gate.admit(_headers())
