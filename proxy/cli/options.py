"""Options and output that several commands share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated
from unicodedata import east_asian_width

import typer

Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="Configuration file. Default: config.yaml, if there is one.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Tenant = Annotated[str | None, typer.Option("--tenant", help="Tenant of the session, if several tenants have the id.")]


def print_table(
    columns: Sequence[str], rows: Collection[Sequence[str]], *, texts: Collection[int], indent: str = ""
) -> None:
    """Print aligned columns, numbers on the right and those in `texts` on the left. No cell is ever cut."""
    lines = [columns, *rows]
    widths = [max(map(_width, cells)) for cells in zip(*lines, strict=True)]
    for cells in lines:
        padded = (
            cell + " " * (width - _width(cell)) if place in texts else " " * (width - _width(cell)) + cell
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        typer.echo(indent + "  ".join(padded).rstrip())


def _width(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    return sum(2 if east_asian_width(character) in "WF" else 1 for character in text)
