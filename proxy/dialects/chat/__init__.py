"""Chat Completions: its messages, requests, replies and streams, and the rules that they keep."""

from __future__ import annotations

from proxy.dialects.chat.protocol import CHAT

DIALECT = CHAT  # the name under which `dialect_named` finds it
