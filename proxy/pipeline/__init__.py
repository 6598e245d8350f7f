"""One chat completion, from the client's bytes to the stored reply.

    exchange     the straight line: read it first
    reception    a request, from its bytes to a turn that is planned
    turn         one exchange under way, and what the store is told of it
    asking       how a request asks, beside what it says
    identity     which session a request belongs to
    past         what the log knows, where the request belongs in it, and the messages to plan with
    knowledge    what trimming must be told beside: counts, prices, the window, how long it was idle
    planning     the plan, and the ticket that says what is known of it
    summing      summaries by a model: the one that is ready, the one that is wanted
    forms        stored messages in other words than those stored
    body         what goes upstream: the view in the place of the client's messages
    inquiry      asking upstream, and once more where that may help
    relay        the upstream's answer on its way to the client, read beside
    virtual      the same, where it may call tools of the proxy's own
    rounds       those calls, their answers, and asking upstream again
    offering     the proxy's own tools, as one exchange offers them
    finished     a task that is finished: its reply given once more
    receipt      what is said of an exchange: response headers, the stored receipt, the log line
    present      a session as it stands now, without a request
    preview      what would be sent of it
    compacting   a summary of it that somebody asks for
    documents    sessions and summaries as JSON, for the HTTP API and the command line
    means        everything that is open while the process serves
    background   work that outlives the request that began it

It speaks to the client through `Client`, and so knows nothing of ASGI.
"""

from __future__ import annotations

from proxy.pipeline.background import Background, compute
from proxy.pipeline.compacting import compact
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
from proxy.pipeline.identity import valid_id
from proxy.pipeline.inquiry import RESCUED
from proxy.pipeline.knowledge import Knowledge
from proxy.pipeline.means import AppServices, opened
from proxy.pipeline.past import HistoryLoader, request_form
from proxy.pipeline.present import last_answered, present
from proxy.pipeline.preview import preview
from proxy.pipeline.receipt import PlanReport, expanded, gap_lines, log_line, plan_lines
from proxy.pipeline.relay import Outcome
from proxy.pipeline.rounds import Rounds
from proxy.pipeline.turn import Call
from proxy.pipeline.virtual import VirtualRelay

__all__ = [
    "DEFAULT_TENANT",
    "RESCUED",
    "AppServices",
    "Background",
    "Call",
    "ChatCompletions",
    "HistoryLoader",
    "Knowledge",
    "Outcome",
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
    "present",
    "preview",
    "read_lines",
    "request_form",
    "session_document",
    "session_id_of",
    "summary_document",
    "timestamp",
    "valid_id",
    "write_lines",
]
