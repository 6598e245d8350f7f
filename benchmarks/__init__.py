"""What the proxy costs, measured against an empty passthrough and against no proxy.

    python -m benchmarks            everything; `--help` says how to choose

    c/             the load generator and the fake upstream, plain C
    compiling      compiles them
    bodies         requests for the load generator and answers for the fake upstream
    passthrough    the baseline: an empty FastAPI proxy
    subjects       what is measured, as processes
    load           one run of the load generator, and its result
    cases          requests per second and latency, by size, connections and kind of answer
    appends        latency of appends, by the number of stored messages
    memory         start-up time and memory of the proxy, by the number of workers
    against        compares this checkout with another one, in alternating rounds
    profiling      where the time of a small request goes
    report         the results as tables

These benchmarks use the proxy from outside: its command line, its HTTP API, and its stored receipts. Only
`profiling` imports it. The benchmarks need Linux: the C programs use epoll, and CPU time is read from /proc.
"""
