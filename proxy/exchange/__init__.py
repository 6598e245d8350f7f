"""One chat completion, from the client's bytes to the stored reply.

    exchange     the straight line: read it first
    turn         one exchange under way, and what the store is told of it
    identity     which session a request belongs to
    past         what the log knows, where the request belongs in it, and the messages to plan with
    knowledge    what trimming must be told beside: counts, prices, the window, how long it was idle
    forms        stored messages in other words than those stored
    body         what goes upstream: the view in the place of the client's messages
    relay        the upstream's answer on its way to the client, read beside
    receipt      what is said of an exchange: response headers, the stored receipt, the log line
    preview      what would be sent of a session now, without a request
    background   work that outlives the request that began it

It speaks to the client through `Client`, and so knows nothing of ASGI.
"""
