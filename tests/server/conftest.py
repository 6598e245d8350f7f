"""The routes are tested on a running proxy, with the same stand-in provider as the end-to-end tests."""

from __future__ import annotations

from tests.e2e.conftest import _direct, provider, serve, session, upstream

__all__ = ["_direct", "provider", "serve", "session", "upstream"]
