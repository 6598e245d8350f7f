"""Anthropic's Messages API: its messages, requests, replies and streams, and their rules."""

from __future__ import annotations

from proxy.dialects.messages.protocol import MESSAGES

DIALECT = MESSAGES  # `dialect_named` looks it up under this name
