"""Errors know their status and OpenAI's shape; the drawing of them is the truth."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from proxy import errors
from proxy.errors import NotFound, PalimpsestError, StoreUnavailable


def _all(base: type[PalimpsestError] = PalimpsestError) -> Iterator[type[PalimpsestError]]:
    yield base
    for below in base.__subclasses__():
        yield from _all(below)


KINDS = [kind for kind in _all() if kind.__module__ == errors.__name__]
DRAWN = dict(re.findall(r"[+·] (\w+) +(\d{3}|)", errors.__doc__ or ""))


def test_every_error_is_drawn_and_every_drawn_one_is_there() -> None:
    assert {kind.__name__ for kind in KINDS} - {"PalimpsestError"} == set(DRAWN)


@pytest.mark.parametrize("name", [name for name, status in DRAWN.items() if status])
def test_the_status_is_as_drawn(name: str) -> None:
    assert getattr(errors, name).status == int(DRAWN[name])


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_has_openais_shape(kind: type[PalimpsestError]) -> None:
    body = kind("It went wrong.").body()
    assert body == {"error": {"message": "It went wrong.", "type": kind.type, "param": None, "code": kind.default_code}}
    assert str(kind("It went wrong.")) == "It went wrong."
    assert 400 <= kind.status < 600
    # Clients recognize a temporary failure by this type, since an error within a stream has no status.
    assert (kind.type == "server_error") is (kind.status >= 500)


def test_a_code_may_say_it_more_closely() -> None:
    error = NotFound("No.", param="session", code="gone").body()["error"]
    assert (error["param"], error["code"]) == ("session", "gone")
    assert StoreUnavailable("No.").code == "store_unavailable"
