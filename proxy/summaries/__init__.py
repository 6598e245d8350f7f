"""Summaries by a model: when they are made, what they contain, how the model is prompted and its answer checked.

    jobs         makes summaries: scheduling, the lease, reading the branch, writing; start here
    prompt       the request to the model
    summarizer   the model that writes, and the breaker that pauses it after failures
    validate     the checks of the narrative
    render       the text: the user's own messages, identifiers, the narrative

A summary never fails a request, and delays only requests that wait for it.
"""

from __future__ import annotations

from proxy.summaries.jobs import KEPT_LATER, Given, Summaries, UsedBy, Work
from proxy.summaries.summarizer import Caller, Summarizer
