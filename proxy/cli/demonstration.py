"""`demo`: the main job shown on a recorded conversation, without key, network or configuration file."""

from __future__ import annotations

import json
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from proxy.cli.options import AsJson
from proxy.cli.serving import server_config
from proxy.demo import CONFIG, STORE, TRIMMED, DemoOutcome, as_data, rehearse, show
from proxy.errors import ConfigurationError

Keep = Annotated[
    Path | None,
    typer.Option("--keep", metavar="DIR", help="Leave the store and its configuration file in this folder."),
]


def demo(keep: Keep = None, as_json: AsJson = False) -> None:
    """Replay a recorded conversation through the proxy, and show what was kept and what was sent.

    Exit 1 if anything that should hold does not.
    """
    with (
        nullcontext(_empty(keep))
        if keep is not None
        else tempfile.TemporaryDirectory(prefix="palimpsest-") as folder
    ):
        outcome = rehearse(server_config, Path(folder))
    if as_json:
        typer.echo(json.dumps(as_data(outcome) | {"kept": str(keep) if keep is not None else None}))
    else:
        show(outcome, Console(), _look(keep, outcome))
    if not outcome.holds:
        raise typer.Exit(1)


def _empty(folder: Path) -> Path:
    """Return the folder, made if need be.

    Raises:
        ConfigurationError: it holds something that would be overwritten.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (STORE, CONFIG):
        if (folder / name).exists():
            raise ConfigurationError(
                f"{folder / name} is there already. Name another folder, or remove it first."
            )
    return folder


def _look(keep: Path | None, outcome: DemoOutcome) -> tuple[str, ...]:
    """Return where to look on."""
    if keep is None:
        return ("Look deeper: palimpsest demo --keep DIR leaves the store to look into.",)
    config = keep / CONFIG
    return (
        f"Look deeper: palimpsest sessions show {TRIMMED} --config {config}",
        f"             palimpsest serve --config {config}",
        f"             curl http://127.0.0.1:8080/sessions/{outcome.trimmed.session}/context",
    )
