"""Responses: its items, requests, replies and streams, and the rules that they keep."""

from __future__ import annotations

from proxy.dialects.responses.protocol import RESPONSES

DIALECT = RESPONSES  # the name under which `dialect_named` finds it
