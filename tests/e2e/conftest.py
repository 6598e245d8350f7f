"""Fixtures for all end-to-end tests: a stand-in provider, and proxies in front of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.server import Proxy, settings_for
from tests.support.upstream import Upstream

Serve = Callable[..., Proxy]


@pytest.fixture(scope="session", autouse=True)
def _direct() -> Iterator[None]:
    """Connect to this machine directly, even if the environment names an HTTP proxy."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NO_PROXY", "no_proxy"):
            patch.setenv(name, "127.0.0.1,localhost")
        yield


@pytest.fixture(scope="session")
def provider(_direct: None) -> Iterator[Upstream]:
    with Upstream() as upstream:
        yield upstream


@pytest.fixture
def upstream(provider: Upstream) -> Upstream:
    """The provider, with an empty log."""
    provider.forget()
    return provider


@pytest.fixture(scope="module")
def serve(provider: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Return a function that starts a proxy with sections of settings; it runs until the end of the module's tests."""
    with ExitStack() as stack:

        def start(**sections: Any) -> Proxy:
            settings = settings_for(provider, tmp_path_factory.mktemp("store"), sections)
            return stack.enter_context(Proxy(settings))

        yield start


@pytest.fixture
def session(request: pytest.FixtureRequest) -> str:
    """A session id that is unique to the test."""
    return re.sub(r"\W+", "-", request.node.name, flags=re.ASCII)
