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
    telemetry       the log
    config          the configuration file
    trimming        history + policy -> plan -> view; pure
    textscan        values, digests and shorter forms of texts; pure
    conversation    node ids, reconciliation, placement, spans; pure
    dialects        what travels, as bytes and plain data; `base.py` is the seam between APIs; pure
    errors          every error on purpose

`docs/architecture.md` follows one request through them, and says which files to touch to add something.
"""

__version__ = "0.1.0"
