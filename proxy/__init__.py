"""Palimpsest: a reverse proxy for LLM APIs that keeps everything and sends less.

The rooms, each of which imports only from those below it:

    __main__        the command line's entry point
    cli             one file for each group of commands
    server, demo    HTTP: the ASGI app, authentication, the endpoints; the demonstration
    dashboard       pages for people at `/ui`; beside `server`
    pipeline        one exchange, top to bottom (start with `pipeline/exchange.py`)
    backtest        recorded sessions replayed under policies, offline; beside `pipeline`
    summaries       summaries by a model
    recall          the tools that the proxy answers itself
    upstream        the provider behind the proxy
    store           sessions in SQLite or PostgreSQL
    tokens, models  counting; context windows, prices and prompt caches
    telemetry       log, metrics, traces
    config          the configuration file
    trimming        history + policy -> plan -> view; pure
    textscan        finds values in texts, makes digests, compacts; pure
    conversation    node ids, reconciliation, placement, spans; pure
    dialects        the APIs' JSON: parse, rewrite, check; `base.py` is the interface of a dialect; pure
    errors          the errors that the proxy raises

`docs/architecture.md` follows one request through them, and says which files to change to add something.
"""

__version__ = "0.1.0"
