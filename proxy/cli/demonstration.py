"""`demo`: runs the proxy on a recorded conversation, without key, network or configuration."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Final

import typer

from proxy.cli.commands import AsJson
from proxy.cli.serving import server_config
from proxy.demo import CONFIG, STORE, TRIMMED, as_data, rehearse, report
from proxy.errors import ConfigurationError

_KEEP = typer.Option("--keep", metavar="DIR", help="Folder for the store and its configuration. Default: a new one.")
QUESTIONS: Final = (
    ("what did I save this week?", "palimpsest stats --since 7d"),
    ("which sessions are biggest?", "palimpsest sessions list --sort largest"),
    ("what did the model see at request 17?", f"palimpsest exchange show {TRIMMED} --request 17 --diff"),
    ("search my history", "palimpsest sessions search delayed flight"),
    ("what did each policy serve?", "palimpsest stats --group policy"),
    ("delete after 30 days", "PALIMPSEST_RETENTION__DAYS=30 palimpsest serve"),
    ("a budget", 'PALIMPSEST_BUDGETS=\'[{"tenant": "default", "dollars_per_day": 5}]\' palimpsest serve'),
    ("a policy on 10 % of the traffic", "PALIMPSEST_POLICIES__DEFAULT__SHARE=0.1 palimpsest serve"),
    ("which metrics can I scrape?", "palimpsest serve, and: curl http://127.0.0.1:8080/metrics"),
)
"""Questions of operators, and the commands that answer them in the folder of the demonstration."""


def demo(keep: Annotated[Path | None, _KEEP] = None, as_json: AsJson = False) -> None:
    """Replay a recorded conversation through the proxy, and show what was stored and what was sent.

    Exit 1 if a check fails.
    """
    folder = Path(tempfile.mkdtemp(prefix="palimpsest-demo-")) if keep is None else _empty(keep)
    outcome = rehearse(server_config, folder)
    if as_json:
        typer.echo(json.dumps(as_data(outcome) | {"kept": str(folder)}))
    else:
        typer.echo("\n".join([*report(outcome), "", *_look(folder, outcome.trimmed.session)]))
    if not outcome.holds:
        raise typer.Exit(1)


def _empty(folder: Path) -> Path:
    """Return the folder, created if needed. Raises `ConfigurationError` rather than overwrite a file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (STORE, CONFIG):
        if (folder / name).exists():
            raise ConfigurationError(f"{folder / name} exists already. Name another folder, or remove it first.")
    return folder


def _look(folder: Path, session: str) -> list[str]:
    """Return the lines that suggest commands for the store in a folder."""
    program = Path(sys.executable).with_name("palimpsest")
    is_found = shutil.which("palimpsest") is not None or not program.exists()
    path = "" if is_found else f"; export PATH={program.parent}:$PATH"
    width = max(len(command) for _, command in QUESTIONS if len(command) < 60)
    return [
        f"Look deeper: {'palimpsest' if is_found else program} sessions show {TRIMMED} --config {folder / CONFIG}",
        "",
        f"Or go to its folder: cd {folder}{path}",
        "",
        *(f"  {command:<{width}}  # {question}" for question, command in QUESTIONS),
        "",
        f"With `palimpsest serve`, http://127.0.0.1:8080/ui/sessions/{session} shows the same.",
    ]
