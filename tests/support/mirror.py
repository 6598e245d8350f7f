"""What the stand-in provider answers on all other paths: it echoes the request.

/v1/mirror…    the unchanged body, with its content type
/v1/ticks      one piece, and a second one once the gate is open
/v1/moved      a redirect, which a proxy must relay and not follow
anything else  a JSON object: method, target, query, headers, size of the body
"""

from __future__ import annotations

import orjson

from tests.support.answers import Answering
from tests.support.received import Received

JSON = [(b"content-type", b"application/json")]


async def reflect(received: Received, out: Answering) -> None:
    """Answer a request on a path without an API."""
    if received.path.startswith("/v1/mirror"):
        kind = (received.header("content-type") or "application/octet-stream").encode()
        own = [(b"content-type", kind), (b"set-cookie", b"a=1"), (b"set-cookie", b"b=2"), (b"x-custom", b"yes")]
        await out.whole(200, own, received.body)
    elif received.path == "/v1/ticks":
        await out.begin(200, [(b"content-type", b"text/plain")])
        await out.write(b"tick\n")
        await out.wait_for_gate()
        await out.write(b"tock\n")
        await out.finish()
    elif received.path == "/v1/models":
        model = {"id": "echo", "object": "model", "created": 1, "owned_by": "test"}
        await out.whole(200, JSON, orjson.dumps({"object": "list", "data": [model]}))
    elif received.path == "/v1/moved":
        await out.whole(307, [(b"location", b"/v1/mirror")], b"")
    else:
        told = {
            "method": received.method,
            "target": received.target,
            "query": received.query,
            "headers": received.headers,
            "bytes": len(received.body),
        }
        await out.whole(200, JSON, orjson.dumps(told))
