"""The demonstration: the proxy between a client that replays a recorded conversation and a practice upstream.

    recording       the conversation: what was asked, what was answered, where it comes from
    upstream        a provider for practice: answers by a script, over HTTP
    refusals        what such a provider refuses, in its words
    answers         a reply as JSON or as a stream of events, with its usage
    cache           the provider's prompt cache, simulated
    client          an SDK's part: resends the whole history, reads the stream
    configuration   the file that the proxy is started with: policy, store, upstream
    server          an ASGI application on a port of its own, while it is needed
    measures        what was measured, and whether it holds
    rehearsal       all of it together: the conversation replayed twice
    report          the measurements as a table, as plain text, as JSON

It needs no key, no network and no configuration file. The proxy is handed in and is the one that
serves; nothing here reaches into it.
"""
