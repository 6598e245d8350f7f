"""The log of a session, as a tree like git's.

    nodes       names of messages at their place: a hash of the parent's and the canonical form
    reconcile   where an incoming request belongs in the log
    results     where tool results belong that come alone
    spans       the smallest runs that can be removed without breaking the protocol, and rounds

Pure: no input or output, no clock, no store.
"""

from __future__ import annotations

from proxy.conversation.nodes import (
    ROOT,
    array_of,
    body_id,
    body_of,
    chain,
    child,
    content_hash,
    content_key,
    fingerprints,
    names_under,
    node_id,
    version_of,
)
from proxy.conversation.reconcile import Arrival, Incoming, Kind, Last, Log, Manner, Mode, reconcile
from proxy.conversation.results import ResultsPlace, place_of_results
from proxy.conversation.spans import (
    Round,
    open_calls,
    rounds,
    span_start,
    spans,
)

__all__ = [
    "ROOT",
    "Arrival",
    "Incoming",
    "Kind",
    "Last",
    "Log",
    "Manner",
    "Mode",
    "ResultsPlace",
    "Round",
    "array_of",
    "body_id",
    "body_of",
    "chain",
    "child",
    "content_hash",
    "content_key",
    "fingerprints",
    "names_under",
    "node_id",
    "open_calls",
    "place_of_results",
    "reconcile",
    "rounds",
    "span_start",
    "spans",
    "version_of",
]
