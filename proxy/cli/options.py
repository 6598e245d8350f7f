"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Configuration file. Default: config.yaml, where there is one."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a script to read.")]
Tenant = Annotated[str | None, typer.Option("--tenant", help="Whose session, where several tenants have it.")]
