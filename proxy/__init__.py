"""Palimpsest: a reverse proxy for the Chat Completions API that keeps everything and sends less.

The floors, each of which imports only from those below it:

    __main__    the command line
    commands    one file for each group of commands
    app         opens, wires, closes
    api, demo   HTTP, thin; the demonstration with its practice upstream
    exchange    one chat completion, top to bottom (read `exchange/exchange.py` first)
    backtest    sessions that happened, replayed under policies; beside `exchange`
    upstream    the provider behind the proxy
    store       sessions in SQLite or PostgreSQL
    tokens      counting
    models      context windows, prices, how providers cache
    telemetry   what the process says of itself
    settings    the configuration file
    trimming    history + policy -> plan -> view; pure
    history     node names, reconciliation, spans, rounds; pure
    wire        messages, requests, headers, events; pure
    errors      every error on purpose

`docs/architecture.md` tells the way of one request through them.
"""

__version__ = "0.1.0"
