"""Summaries by a model: what goes into one, how it is asked for and judged, when it is made and by whom.

    facts      what code takes: rules (by markers), names (and wholes), values, failures; state: what is kept
    prompt     how the model is asked, about a transcript that is fenced
    gates      what is not sent: by what the source says (inventions), in which tongue, and whether it gives
               orders (wordings)
    text       what is sent, within its room (fitting)
    summarizer, breaker    the model that writes: asked, and left alone after failures
    work, span, writing, lease, making    from what is wanted to what is kept

All up to `text` are pure.

Nothing here ever fails a request, or holds one up that does not wait for it.
"""

from __future__ import annotations

from proxy.summaries.making import Summaries
from proxy.summaries.summarizer import Caller, Summarizer
from proxy.summaries.work import Given, Work

__all__ = ["Caller", "Given", "Summaries", "Summarizer", "Work"]
