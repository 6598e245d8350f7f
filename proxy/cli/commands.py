"""The group of all commands. A command is imported when it is used: `check` must not load the server."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import Any, Final, cast

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

_PLACES: Final[dict[str, tuple[str, str]]] = {
    "serve": ("serving", "serve"),
    "check": ("configuration", "check"),
    "schema": ("configuration", "schema"),
    "demo": ("demonstration", "demo"),
    "upgrade": ("database", "upgrade"),
    "downgrade": ("database", "downgrade"),
    "sessions": ("sessions", "app"),
    "backtest": ("backtest", "backtest"),
}
"""Module and name of each command, or group of commands, in the order of the help."""


class LazyGroup(TyperGroup):
    """All commands. Only their help imports all of them."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = cast("MutableMapping[str, Any]", _Commands())  # nothing is added to it


class _Commands(Mapping[str, Any]):
    """typer's commands by name, made at the first look-up."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = _made(name)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_PLACES)

    def __len__(self) -> int:
        return len(_PLACES)


def _made(name: str) -> Any:
    """Return the command or group of this name; raises `KeyError` if there is none."""
    module, member = _PLACES[name]
    found = getattr(import_module(f"proxy.cli.{module}"), member)
    if isinstance(found, typer.Typer):
        group = get_command(found)
        group.name = name
        return group
    alone = typer.Typer(add_completion=False)
    # A revision may be -1, which is not an option.
    settings = {"ignore_unknown_options": True} if name == "downgrade" else None
    alone.command(name, cls=_ManyValues if name == "backtest" else None, context_settings=settings)(found)
    return get_command(alone)


class _ManyValues(TyperCommand):
    """A command whose repeatable options take several values in a row: `--file *.json`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments as if the option were repeated before each of its values."""
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
