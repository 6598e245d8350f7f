"""The log of a session, as a tree like git's.

    ids         names of messages at their place: a hash of the parent's and the canonical form
    reconcile   where an incoming request belongs in the log
    evidence    what a reply is known by when a client that names no session sends it back
    placement   where new messages go, decided from what was read of the log
    spans       the smallest runs that can be removed without breaking the protocol, and rounds

Pure: no input or output, no clock, no store.
"""

from __future__ import annotations

from proxy.conversation.evidence import TELLING, Evidence, Witness, continues, is_longer, said, squeezed
from proxy.conversation.ids import (
    ROOT,
    array_of,
    body_of,
    chain,
    child,
    content_hash,
    content_key,
    earlier_names,
    fingerprints,
    names_under,
    node_id,
    version_of,
)
from proxy.conversation.placement import (
    TWIN_MS,
    AnsweredEarlier,
    Placement,
    StoredMessage,
    is_placed_anew,
    nearest_place,
    place_append,
    place_finished,
    takes_head,
)
from proxy.conversation.reconcile import (
    APPENDING,
    Arrival,
    Incoming,
    Kind,
    Last,
    Log,
    Manner,
    Mode,
    known_prefix,
    reconcile,
)
from proxy.conversation.spans import Round, open_calls, rounds, span_start, spans
from proxy.dialects import body_id
