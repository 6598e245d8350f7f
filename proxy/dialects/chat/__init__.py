"""Chat Completions: its messages, requests, replies and streams, and the rules that they keep.

message      one message: reading and rewriting
canonical    the form by which a message is recognised; never sent
protocol     spans, the rules about calls and results, their repair, and the `Dialect`
request      a request beside its bytes, why it cannot be read, and the body that goes upstream
completion   the replies that a body, or the chunks of a stream, hold
refusals     what an upstream's error asks for: a shorter request, another order of roles
cache_marks  explicit cache breakpoints
own_tools    the proxy's own tools: offered beside the client's, their calls taken out of a reply
"""

from __future__ import annotations

from proxy.dialects.chat.protocol import CHAT

DIALECT = CHAT  # the name under which `dialect_named` finds it
