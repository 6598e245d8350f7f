"""The group of all commands, and shared options and output.

A command is imported when it is used, so that `check`, for example, does not load the server.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final, cast
from unicodedata import east_asian_width

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="Configuration file. Default: config.yaml, if there is one.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Tenant = Annotated[str | None, typer.Option("--tenant", help="Tenant of the session, if several tenants have the id.")]

_PLACES: Final[dict[str, tuple[str, str]]] = {
    "serve": ("serving", "serve"),
    "check": ("configuration", "check"),
    "schema": ("configuration", "schema"),
    "demo": ("demonstration", "demo"),
    "upgrade": ("sessions", "upgrade"),
    "downgrade": ("sessions", "downgrade"),
    "sessions": ("sessions", "app"),
    "stats": ("operating", "stats"),
    "exchange": ("operating", "exchange_app"),
    "key": ("operating", "key_app"),
    "doctor": ("operating", "doctor"),
    "backtest": ("backtest", "backtest"),
}
"""Module and name of each command or group of commands, in the order of the help."""


class LazyGroup(TyperGroup):
    """The group of all commands. Only the help of the group imports all of them."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = dict.fromkeys(_PLACES, cast("Any", None))  # names for the help and for suggestions

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 - no command depends on it
        """Import and return a command or group of commands, or None if it does not exist."""
        return _made(cmd_name) if cmd_name in _PLACES else None


@cache
def _made(name: str) -> Any:
    module, member = _PLACES[name]
    found = getattr(import_module(f"proxy.cli.{module}"), member)
    if isinstance(found, typer.Typer):
        group = get_command(found)
        group.name = name
        return group
    alone = typer.Typer(add_completion=False)
    # A revision may be -1, which must not be parsed as an option.
    settings = {"ignore_unknown_options": True} if name == "downgrade" else None
    alone.command(name, cls=_ManyValues if name == "backtest" else None, context_settings=settings)(found)
    return get_command(alone)


class _ManyValues(TyperCommand):
    """A command whose repeatable options take several values in a row: `--file *.json`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments as if the option were repeated before each of its values."""
        many = {name for option in self.params if getattr(option, "multiple", False) for name in option.opts}
        return super().parse_args(ctx, list(spelled_out(args, many)))


def spelled_out(arguments: Iterable[str], many: Collection[str]) -> Iterator[str]:
    """Yield the arguments, repeating an option of `many` before its second and later values."""
    option, has_value = "", False
    for argument in arguments:
        if argument.startswith("-"):
            name, given, _ = argument.partition("=")
            option, has_value = (name if name in many else ""), bool(given)
        elif option:
            if has_value:
                yield option
            has_value = True
        yield argument


def print_table(
    columns: Sequence[str], rows: Collection[Sequence[str]], *, texts: Collection[int], indent: str = ""
) -> None:
    """Print aligned columns. Columns in `texts` are left-aligned, the others right-aligned. No cell is truncated."""
    lines = [columns, *([plain(cell) for cell in row] for row in rows)]
    widths = [max(map(_width, cells)) for cells in zip(*lines, strict=True)]
    for cells in lines:
        gaps = [" " * (width - _width(cell)) for cell, width in zip(cells, widths, strict=True)]
        padded = [
            cell + gap if place in texts else gap + cell
            for place, (cell, gap) in enumerate(zip(cells, gaps, strict=True))
        ]
        typer.echo(indent + "  ".join(padded).rstrip())


def numbered(count: int, thing: str) -> str:
    """Return a count with its noun: `1 session`, `2 sessions`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def plain(text: str) -> str:
    """Return a text that is safe for a terminal: control and other unprintable characters are escaped."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character == " " else f"\\u{ord(character):04x}" for character in text
    )


def _width(text: str) -> int:
    return sum(2 if east_asian_width(character) in "WF" else 1 for character in text)
