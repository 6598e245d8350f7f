"""One exchange, from the client's bytes to the stored reply.

    exchange          the main request flow; start here
    context           what the request's headers say
    headers           their names, which of them pass in which direction, how values are encoded
    prepare           read, placed, planned; requests that share a trim
    prefix            how the session's last long request began
    history           the request in its place in the stored history
    send              the body, sent upstream; sent again where that may help
    relay             the upstream's answer on its way to the client
    own_tools         calls of the proxy's own tools: their answers, asking upstream again, the way to the client
    outage            while the store is away: what is served, and storing it later
    settle            what is stored of the exchange
    late              a reply that was made in the background, stored when it is fetched
    receipt           response headers, the stored receipt, the log line
    session_view      a session without a request: as it stands now, as JSON, as an export
    inspection        stored exchanges looked at again: their receipts, what was sent, where a text stands
    savings           what a trim saved in an exchange, and why the provider's cache missed
    statistics        sums over exchanges, as they are asked for and shown
    services          everything that is open while the process serves
    background        work that outlives the request that began it

An exchange goes through stages: `Prepared`, `Sent`, `Answered`, `Settled`. The client is spoken to through
`Client`, so that nothing here knows ASGI.
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
