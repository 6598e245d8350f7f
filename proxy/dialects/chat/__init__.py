"""Chat Completions: its messages, requests, replies and streams, and their rules."""

from __future__ import annotations

from proxy.dialects.chat.protocol import CHAT

DIALECT = CHAT  # `dialect_named` looks it up under this name
