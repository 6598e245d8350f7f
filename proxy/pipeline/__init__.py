"""One exchange, from the client's bytes to the stored reply.

    exchange          the main request flow; start here
    context           reads the request's headers
    headers           names, forwards, drops, encodes and decodes headers
    prepare           reads, places and plans a request; lets requests share a trim
    prefix            caches the last long request of each session, so that its beginning is not parsed again
    history           loads the stored history that a request belongs to
    send              sends the body upstream; retries where that may help
    relay             relays the upstream's answer to the client
    own_tools         answers calls of the proxy's own tools, asks upstream again, and relays the combined reply
    outage            serves requests while the store is away, and stores their exchanges later
    settle            stores the exchange
    late              stores a reply that the provider made in the background, when the client fetches it
    receipt           makes response headers, the stored receipt and the log line
    session_view      shows a session without a request: its current view, its JSON documents, its export
    inspection        shows stored exchanges: receipts, and what was sent; searches texts
    savings           computes what a trim saved, and why the provider's cache missed
    statistics        parses queries for sums over exchanges, and formats the results
    services          opens everything that the process serves with
    background        runs work that outlives the request that began it

An exchange goes through stages: `Prepared`, `Sent`, `Answered`, `Settled`. The pipeline talks to the client through
`Client`, so nothing here depends on ASGI.
"""

from __future__ import annotations

from proxy.pipeline.background import COMPUTING, Background, compute
from proxy.pipeline.context import ClientRequest, valid_id, valid_tenant
from proxy.pipeline.exchange import ExchangeHandler
from proxy.pipeline.late import LateReply
from proxy.pipeline.outage import can_serve_without, erase_tenant, spool_at, warn_of_others
from proxy.pipeline.services import AppServices, open_services
from proxy.pipeline.session_view import (
    DEFAULT_TENANT,
    compact,
    last_answered,
    preview,
    read_lines,
    session_document,
    session_id_of,
    session_view,
    summary_document,
    timestamp,
    write_lines,
)
