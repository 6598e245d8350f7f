"""The command line: `palimpsest`, or `python -m proxy`.

Exit codes: 0 fine, 1 failed, 2 used or configured wrongly.
"""

from __future__ import annotations

import sys

import typer

from proxy.commands import configuration, database, demonstration, serving, sessions
from proxy.errors import ConfigurationError, PalimpsestError, RequestError

app = typer.Typer(
    name="palimpsest",
    help="A reverse proxy for OpenAI-compatible APIs that keeps everything and sends less.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("serve")(serving.serve)
app.command("check")(configuration.check)
app.command("schema")(configuration.schema)
app.command("demo")(demonstration.demo)
app.command("upgrade")(database.upgrade)
# A revision may be -1, which is no option.
app.command("downgrade", context_settings={"ignore_unknown_options": True})(database.downgrade)
app.add_typer(sessions.app, name="sessions")


def main() -> None:
    """Run the command that the arguments name."""
    try:
        app()
    except PalimpsestError as why:
        typer.echo(why.message, err=True)
        sys.exit(2 if isinstance(why, (ConfigurationError, RequestError)) else 1)


if __name__ == "__main__":
    main()
