"""Options that take several values in a row, as a shell makes them of a pattern: `--file *.json`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from typer.core import TyperCommand


class ManyValues(TyperCommand):
    """A command without arguments of its own: what follows the value of a repeatable option is one more."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments as if the option stood before each of its values."""
        many = {name for option in self.params if getattr(option, "multiple", False) for name in option.opts}
        return super().parse_args(ctx, list(spelled_out(args, many)))


def spelled_out(arguments: Iterable[str], many: Collection[str]) -> Iterator[str]:
    """Yield the arguments, and the option before each value after its first; `many` are such options."""
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
