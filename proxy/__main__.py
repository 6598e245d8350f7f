"""The command line: `palimpsest`, or `python -m proxy`.

Exit codes: 0 success, 1 failure, 2 wrong usage or configuration.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated, TextIO

import typer

from proxy import __version__
from proxy.cli.commands import LazyGroup
from proxy.errors import ConfigurationError, PalimpsestError, RequestError

app = typer.Typer(
    name="palimpsest", cls=LazyGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)

_UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE})


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
    _open_standard_files()
    if sys.argv[1:2] == ["serve"] and hasattr(signal, "SIGHUP") and not os.isatty(0):
        # Ignore SIGHUP until the proxy handles it: a reload must not end a process that still starts or migrates.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with closing_output():
            app()
    except PalimpsestError as why:
        typer.echo(why.message, err=True)
        sys.exit(2 if isinstance(why, (ConfigurationError, RequestError)) else 1)


def _open_standard_files() -> None:
    """Open the standard files (0, 1, 2) that were closed at the start: a socket with such a number breaks libuv."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    errors: TextIO | None = sys.stderr
    if errors is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - for the life of the process


@contextmanager
def closing_output() -> Generator[None]:
    """Flush the output at the end. If it cannot be written, exit with 1 and a message."""
    output: TextIO | None = sys.stdout  # None if it was closed from the start
    try:
        try:
            yield
        finally:
            if output is not None:
                output.flush()
    except OSError as why:
        if output is None or why.filename is not None or why.errno not in _UNWRITABLE:
            raise
        # Redirect it, or Python would try to flush again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
        if why.errno != errno.EPIPE:  # EPIPE: the reader, such as `head`, has closed the pipe
            typer.echo(f"The output cannot be written: {why.strerror}.", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
