"""HTTP: the application, authentication, the endpoints, and their JSON.

app              the ASGI application: opens all services and routes each request to its endpoint
authentication   credentials and tenants
endpoint         completions in every dialect; the entry point of a request
encoding         bodies with a Content-Encoding
passthrough      every other path under /v1/, relayed unchanged
limits           limits on incoming bytes: heads, pace, connections, memory
budgets          limits on use by tenants and keys, counted over all workers
sessions         the sessions API, and the receipts
operations       liveness, readiness, metrics, the cache of token counts, statistics, search
dependencies     shared dependencies of the routes
"""
