"""Chat Completions: its messages, requests, replies and streams, and the rules that they keep.

message      one message: reading and rewriting
canonical    the form by which a message is recognised; never sent
protocol     spans, the rules about calls and results, the repair of what breaks them
request      a request beside its bytes, and the body that goes upstream
refusals     why a request cannot be read
completion   the replies that a body, or the chunks of a stream, hold
overflow     whether an error says that a request is too large for the model
roles        orders of roles that some servers insist on
marks        explicit cache breakpoints
tools        tools of the proxy's own beside the client's
dialect      all of that as a `Dialect`
"""

from __future__ import annotations

from proxy.dialects.chat.dialect import CHAT
from proxy.dialects.chat.message import INSTRUCTION_ROLES, ChatMessage

DIALECT = CHAT
"""The name under which `dialect_named` finds it."""

__all__ = ["CHAT", "DIALECT", "INSTRUCTION_ROLES", "ChatMessage"]
