"""Where settings come from: defaults < file < environment < command line, and the form of the file.

What is allowed stands in `model`; how a mistake is said, in `problems`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

from pydantic import ValidationError

from proxy.errors import ConfigurationError
from proxy.settings.document import Document, Location
from proxy.settings.environment import Environment
from proxy.settings.model import Settings
from proxy.settings.problems import describe

DEFAULT_FILE: Final = Path("config.yaml")
"""The file that is read where none is named, if it is there."""

_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


def load(path: Path | None = None, overrides: Mapping[str, Any] = _NOTHING) -> Settings:
    """Return the settings of the file at `path`, the environment and the command line.

    Args:
        path: the file; None takes `config.yaml` of the working folder if it is there.
        overrides: what the command line says, nested like the file; a None in it says nothing.

    Raises:
        ConfigurationError: the message has one line for each mistake, with file and line (or the name
            of the variable), the setting, and what was allowed.
    """
    document = _document(path)
    # A section with nothing but comments under it is None to YAML; it means the defaults.
    in_file = {section: value for section, value in document.data.items() if value is not None}
    environment = Environment.read()
    on_command_line = _said(overrides)
    data = _merged(_merged(in_file, environment.data), on_command_line)

    def where(location: Location) -> str:
        """Name the source that set the value, or most of the way to it; of several the last one."""
        ranked = [(_reach(on_command_line, location), "command line")]
        ranked.append((_reach(environment.data, location), environment.variable(location) or "environment"))
        ranked.append((_reach(in_file, location), f"{document.name}:{document.line(location)}"))
        reach, source = max(ranked, key=lambda entry: entry[0])  # the first of the greatest
        return source if reach else document.name

    try:
        return Settings(**data)
    except ValidationError as why:
        # Its own text holds the values, keys among them: nothing may print it.
        raise ConfigurationError("\n".join(describe(why, Settings, where))) from None


def schema_of() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the file, with a description of each setting."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Settings.model_json_schema()}


def _document(path: Path | None) -> Document:
    if path is not None:
        if not path.exists():
            raise ConfigurationError(f"{path}: there is no such file")
        return Document.read(path)
    return Document.read(DEFAULT_FILE) if DEFAULT_FILE.exists() else Document("configuration", None, {})


def _said(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `overrides` without the options that were not given."""
    said: dict[str, Any] = {}
    for key, value in overrides.items():
        kept = _said(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else value
        if kept is not None and kept != {}:
            said[key] = kept
    return said


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, `above` winning; mappings are merged, lists are replaced."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        if isinstance(under, Mapping) and isinstance(value, Mapping):
            merged[key] = _merged(cast("Mapping[str, Any]", under), cast("Mapping[str, Any]", value))
        else:
            merged[key] = value
    return merged


def _reach(data: Any, location: Location) -> int:
    """Return how many steps of `location` can be taken in `data`."""
    for taken, step in enumerate(location):
        try:
            data = data[step]
        except (KeyError, IndexError, TypeError):
            return taken
    return len(location)
