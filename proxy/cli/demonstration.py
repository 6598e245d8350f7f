"""`demo`: shows the proxy at work on a recorded conversation, without key, network or configuration."""

from __future__ import annotations

import json
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from proxy.cli.commands import AsJson
from proxy.cli.serving import server_config
from proxy.demo import CONFIG, STORE, TRIMMED, DemoOutcome, as_data, rehearse, report
from proxy.errors import ConfigurationError

_KEEP = typer.Option("--keep", metavar="DIR", help="Keep the store and its configuration file in this folder.")


def demo(keep: Annotated[Path | None, _KEEP] = None, as_json: AsJson = False) -> None:
    """Replay a recorded conversation through the proxy, and show what was stored and what was sent.

    Exit 1 if a check fails.
    """
    with nullcontext(_empty(keep)) if keep is not None else tempfile.TemporaryDirectory(prefix="palimpsest-") as folder:
        outcome = rehearse(server_config, Path(folder))
    if as_json:
        typer.echo(json.dumps(as_data(outcome) | {"kept": str(keep) if keep is not None else None}))
    else:
        typer.echo("\n".join([*report(outcome), "", *_look(keep, outcome)]))
    if not outcome.holds:
        raise typer.Exit(1)


def _empty(folder: Path) -> Path:
    """Return the folder, created if needed. No file in it is ever overwritten."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (STORE, CONFIG):
        if (folder / name).exists():
            raise ConfigurationError(f"{folder / name} exists already. Name another folder, or remove it first.")
    return folder


def _look(keep: Path | None, outcome: DemoOutcome) -> tuple[str, ...]:
    if keep is None:
        return ("Look deeper: palimpsest demo --keep DIR keeps the store to look into.",)
    config = keep / CONFIG
    return (
        f"Look deeper: palimpsest sessions show {TRIMMED} --config {config}",
        f"             palimpsest serve --config {config}",
        f"             curl http://127.0.0.1:8080/sessions/{outcome.trimmed.session}/context",
    )
