"""`check` and `schema`: the configuration file, without starting anything."""

from __future__ import annotations

import json

import typer

from proxy.commands.options import AsJson, Config
from proxy.errors import ConfigurationError
from proxy.settings.load import load, schema_of


def check(config: Config = None, as_json: AsJson = False) -> None:
    """Check the configuration: exit 0, or 2 with file, line, place and cure of each mistake."""
    try:
        settings = load(config)
    except ConfigurationError as why:
        if as_json:
            typer.echo(json.dumps({"valid": False, "errors": why.message.splitlines()}, ensure_ascii=False))
            raise typer.Exit(2) from why
        raise
    names = list(settings.policies)
    if as_json:
        typer.echo(json.dumps({"valid": True, "policies": names}, ensure_ascii=False))
    else:
        typer.echo(f"The configuration is valid. Policies: {', '.join(names) or 'only the built-in one'}.")


def schema() -> None:
    """Print the JSON Schema of the configuration file, for editors."""
    typer.echo(json.dumps(schema_of(), indent=2, ensure_ascii=False))
