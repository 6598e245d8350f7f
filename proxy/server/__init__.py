"""HTTP, thin: who asks, what for, and the words of the answer.

    gate          who asks: credentials, tenants, the names under which the proxy may be called
    connection    one HTTP exchange with a client, over ASGI
    chat          POST /v1/chat/completions
    passthrough   every other path under /v1/, untouched
    sessions      the stored sessions, to read, export, import and delete
    exchanges     the receipts
    tokens        what this process remembers of token counts
    health        liveness and readiness
    jsonl         sessions as JSON Lines
    deps          what the routes share: the open services, the caller, the session asked for

What is done about a request is done on the floors below.
"""
