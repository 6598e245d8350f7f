"""Anthropic's Messages API: its messages, requests, replies and streams, and the rules that they keep.

message      one message: reading and rewriting, block by block
canonical    the form by which a message is recognised; never sent
protocol     spans, the rules about calls and results, their repair, and the `Dialect`
request      a request beside its bytes, why it cannot be read, and the body that goes upstream
reply        the reply that a body, or the events of a stream, hold; errors
cache_marks  cache breakpoints, of which a request has four at most
own_tools    the proxy's own tools: offered beside the client's, their calls taken out of a reply
"""

from __future__ import annotations

from proxy.dialects.messages.protocol import MESSAGES

DIALECT = MESSAGES  # the name under which `dialect_named` finds it
