"""Anthropic's Messages API: its messages, requests, replies and streams, and the rules that they keep."""

from __future__ import annotations

from proxy.dialects.messages.protocol import MESSAGES

DIALECT = MESSAGES  # the name under which `dialect_named` finds it
