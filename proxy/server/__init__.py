"""HTTP: the application, authentication, the endpoints, and the JSON they answer with.

app              the ASGI application: opens everything and sends each request to its endpoint
authentication   credentials and tenants
endpoint         a request for a completion, of every dialect; the way in
passthrough      every other path under /v1/, relayed unchanged
limits           limits where bytes arrive: heads, pace, connections, memory
budgets          what tenants and keys may use, counted over all workers
sessions         the sessions API, and the receipts
operations       liveness, readiness, the cache of token counts, statistics
dependencies     what the routes share
"""
