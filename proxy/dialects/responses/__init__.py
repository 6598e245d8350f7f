"""Responses: its items, requests, replies and streams, and their rules."""

from __future__ import annotations

from proxy.dialects.responses.protocol import RESPONSES

DIALECT = RESPONSES  # `dialect_named` looks it up under this name
