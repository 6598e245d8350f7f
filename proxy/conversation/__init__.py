"""The log of a session: a hash-linked tree, like git's.

    ids         node ids: a hash of the parent's id and the message's canonical form
    reconcile   decides where an incoming request belongs in the log
    evidence    recognises replies that a client sends back without a session id
    placement   decides where new messages go, from facts read from the log
    spans       spans (the smallest runs that can be removed without breaking the protocol) and rounds

Pure: no I/O, no clock, no store.
"""

from __future__ import annotations

from proxy.conversation.evidence import TELLING, Evidence, Witness, continues, is_longer, is_unique, said, squeezed
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
