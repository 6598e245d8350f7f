"""`check` and `schema`: the configuration file, without starting the proxy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import typer

from proxy.cli.commands import AsJson, Config
from proxy.config import ConfigSource, json_schema, with_built_in
from proxy.errors import ConfigurationError
from proxy.trimming import Policy


def check(config: Config = None, as_json: AsJson = False) -> None:
    """Check the configuration: exit 0, or 2 with file, line, setting and hint for each mistake.

    Shows each policy with everything that it takes over by `extends`, in the order in which they are tried.
    """
    try:
        source = ConfigSource(path=config)
        loaded = source.read()
    except ConfigurationError as why:
        if as_json:
            typer.echo(json.dumps({"valid": False, "errors": why.message.splitlines()}, ensure_ascii=False))
            raise typer.Exit(2) from why
        raise
    own = loaded.settings.policies
    merged = with_built_in(own)
    if as_json:
        told = {
            "valid": True,
            "policies": list(own),
            "merged": {
                # As it could be written in the file without `extends`.
                name: {"version": policy.version, **policy.model_dump(mode="json", exclude_none=True)}
                for name, policy in merged.items()
            },
            "warnings": list(loaded.warnings),
        }
        typer.echo(json.dumps(told, ensure_ascii=False))
        return
    read = f"{source.file} is valid" if source.content() is not None else f"There is no {source.file}: defaults only"
    typer.echo(f"{read}. Policies: {', '.join(own) or 'only the built-in one'}.")
    for name, policy in merged.items():
        typer.echo(f"\n{name}{'' if name in own else ' (built in)'}  [{policy.version}]")
        for key, value in _lines(policy):
            typer.echo(f"  {key + ':':<12}{value}")
    for warning in loaded.warnings:
        typer.echo(f"warning: {warning}", err=True)


def schema() -> None:
    """Print the JSON Schema of the configuration file, for editors."""
    typer.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))


def _lines(policy: Policy) -> Iterator[tuple[str, str]]:
    if policy.extends is not None:
        yield "extends", policy.extends
    match = policy.match
    yield "match", f"models {', '.join(match.models)}; tenants {', '.join(match.tenants)}"
    yield from _unusual(policy)
    if policy.trigger is not None:
        yield "trigger", _shown(policy.trigger.model_dump(exclude_defaults=True))
    if policy.target is not None:
        yield "target", _shown(policy.target.model_dump(exclude_none=True))
    if policy.edits or policy.pin:
        yield "keep", _shown(policy.keep.model_dump())
    if policy.pin:
        yield "pin", ", ".join(pin.regex for pin in policy.pin)
    for key, edits in (("on_arrival", policy.on_arrival), ("edits", policy.edits)):
        if edits:
            yield key, ", ".join(edit.type for edit in edits)
    if not policy.edits and not policy.on_arrival:
        yield "edits", "none: every message is sent"


def _unusual(policy: Policy) -> Iterator[tuple[str, str]]:
    """Yield the rarely changed settings of a policy that differ from their defaults."""
    for name in ("mode", "share", "trim_at", "agents"):
        value = getattr(policy, name)
        if value != Policy.model_fields[name].default:
            yield name, str(value)
    if policy.tools.remove:
        yield "tools", f"without {', '.join(policy.tools.remove)}"


def _shown(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key}: {json.dumps(value)}" for key, value in settings.items())
