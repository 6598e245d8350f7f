"""The log of a session, as a tree like git's.

    nodes       names of messages at their place: a hash of the parent's and the canonical form
    reconcile   where an incoming request belongs in the log
    results     where tool results belong that come alone
    spans       the smallest runs that can be removed without breaking the protocol, and rounds

Pure: no input or output, no clock, no store.
"""
