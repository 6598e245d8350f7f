"""HTTP: the application, authentication, the endpoints, and the JSON they answer with.

app              the ASGI application: opens everything and sends each request to its endpoint
authentication   credentials and tenants
endpoint         a request for a completion, of every dialect; the way in
passthrough      every other path under /v1/, relayed unchanged
sessions         the sessions API
exchanges        the receipts
operations       liveness, readiness, the cache of token counts
dependencies     what the routes share
"""
