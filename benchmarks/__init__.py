"""What the proxy costs, measured against an empty passthrough and against no proxy.

    python -m benchmarks            everything; `--help` says how to choose

    c/             the load generator and the fake upstream, plain C
    compiling      makes programs of them
    bodies         the requests that are sent and the answers that come
    passthrough    the baseline: an empty FastAPI proxy
    subjects       what is measured, as processes
    load           one run of the load generator, and what it says
    cases          requests per second and latency, by size, connections and kind of answer
    appends        latency of appends, by the number of messages that are stored
    memory         how long the proxy takes to serve, and its memory, by the number of workers
    against        this checkout and another one, in alternating rounds
    profiling      where the time of a small request goes
    report         the results as tables

The package is used from outside: by its command line, over HTTP, and by stored receipts. Only `profiling`
imports it. The benchmarks need Linux: the C programs use epoll, and CPU time is read from /proc.
"""
