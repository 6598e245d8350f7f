"""One chat completion, from the client's bytes to the stored reply.

    exchange          the main request flow; start here
    context           what the request's headers say
    prepare           read, placed, planned; requests that share a trim
    history           the request in its place in the stored history
    send              the body, sent upstream; sent again where that may help
    relay             the upstream's answer on its way to the client
    own_tools         the same, where the model may call tools of the proxy's own
    own_tools_stream  such an answer as a stream of events
    rounds            those calls, their answers, and asking upstream again
    settle            what is stored of the exchange
    receipt           response headers, the stored receipt, the log line
    summary_requests  the summary that a plan uses or asks for
    session_view      a session as it stands now, without a request
    documents         sessions and summaries as JSON, for the HTTP API and the command line
    services          everything that is open while the process serves
    background        work that outlives the request that began it

An exchange goes through stages: `Prepared`, `Sent`, `Answered`, `Settled`. The client is spoken to through
`Client`, so that nothing here knows ASGI.
"""

from __future__ import annotations

from proxy.pipeline.background import Background, compute
from proxy.pipeline.context import Call, Client, valid_id
from proxy.pipeline.documents import (
    DEFAULT_TENANT,
    compression_rate,
    read_lines,
    session_document,
    session_id_of,
    summary_document,
    timestamp,
    write_lines,
)
from proxy.pipeline.exchange import ChatCompletions
from proxy.pipeline.history import HistoryLoader
from proxy.pipeline.own_tools import VirtualRelay
from proxy.pipeline.receipt import PlanReport, expanded, gap_lines, log_line, plan_lines
from proxy.pipeline.relay import Answered
from proxy.pipeline.rounds import Rounds
from proxy.pipeline.send import RESCUED
from proxy.pipeline.services import AppServices, Knowledge, opened
from proxy.pipeline.session_view import compact, last_answered, preview, session_view

__all__ = [
    "DEFAULT_TENANT",
    "RESCUED",
    "Answered",
    "AppServices",
    "Background",
    "Call",
    "ChatCompletions",
    "Client",
    "HistoryLoader",
    "Knowledge",
    "PlanReport",
    "Rounds",
    "VirtualRelay",
    "compact",
    "compression_rate",
    "compute",
    "expanded",
    "gap_lines",
    "last_answered",
    "log_line",
    "opened",
    "plan_lines",
    "preview",
    "read_lines",
    "session_document",
    "session_id_of",
    "session_view",
    "summary_document",
    "timestamp",
    "valid_id",
    "write_lines",
]
