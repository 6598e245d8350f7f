"""The command line: `palimpsest`, or `python -m proxy`.

Exit codes: 0 success, 1 failure, 2 wrong usage or configuration.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from proxy import __version__
from proxy.cli.commands import LazyGroup
from proxy.errors import ConfigurationError, PalimpsestError, RequestError

app = typer.Typer(
    name="palimpsest", cls=LazyGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"palimpsest {__version__}")
        raise typer.Exit


@app.callback()
def palimpsest(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A reverse proxy for LLM APIs that keeps everything and sends less."""


def main() -> None:
    """Run the command that the arguments name."""
    try:
        app()
    except PalimpsestError as why:
        typer.echo(why.message, err=True)
        sys.exit(2 if isinstance(why, (ConfigurationError, RequestError)) else 1)


if __name__ == "__main__":
    main()
