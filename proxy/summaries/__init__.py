"""Summaries by a model: what goes into one, how it is asked for and checked, when it is made and by whom.

    jobs         making summaries: scheduling, the lease, reading the branch, writing; start here
    verbatim     what code takes itself: the user's own messages, identifiers that recur
    prompt       what the model is asked
    summarizer   the model that writes, and the breaker that leaves it alone after failures
    validate     the checks of what it wrote
    render       the text of a summary

A summary never fails a request, and holds none up that does not wait for it.
"""

from __future__ import annotations

from proxy.summaries.jobs import Given, Summaries, Work
from proxy.summaries.summarizer import Caller, Summarizer

__all__ = ["Caller", "Given", "Summaries", "Summarizer", "Work"]
