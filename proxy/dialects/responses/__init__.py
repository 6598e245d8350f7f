"""Responses: its items, requests, replies and streams, and the rules that they keep.

items      one entry: an item, or all that the model wrote in a row; reading and rewriting
canonical  the form by which an entry is recognised; never sent
protocol   spans, the rules about calls, results and reasoning, their repair, and the `Dialect`
request    a request beside its bytes, and the body that goes upstream
reply      the response that a body, or the events of a stream, hold; errors
own_tools  the proxy's own tools: offered beside the client's, their calls taken out of a reply
"""

from __future__ import annotations

from proxy.dialects.responses.protocol import RESPONSES

DIALECT = RESPONSES  # the name under which `dialect_named` finds it
