"""The commands by name, each imported when it is asked for.

What `serve` stands on takes a second to import; `check` and `--version` must not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import Any, Final, cast

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from proxy.cli.many import ManyValues

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

_SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "downgrade": {"ignore_unknown_options": True},  # a revision may be -1, which is no option
}


_KINDS: Final[dict[str, type[TyperCommand]]] = {"backtest": ManyValues}
"""Commands whose arguments are read in a way of their own."""


class Catalogue(TyperGroup):
    """The group of all commands. Its help, which shows what each one is for, imports them all."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = cast("MutableMapping[str, Any]", _Commands())  # nobody adds to it


class _Commands(Mapping[str, Any]):
    """The commands by name: typer's own, made when they are looked up."""

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
    """Return the command, or group, of this name; raises `KeyError` where there is none."""
    module, member = _PLACES[name]
    found = getattr(import_module(f"proxy.cli.{module}"), member)
    if isinstance(found, typer.Typer):
        group = get_command(found)
        group.name = name
        return group
    alone = typer.Typer(add_completion=False)
    alone.command(name, cls=_KINDS.get(name), context_settings=_SETTINGS.get(name))(found)
    return get_command(alone)
