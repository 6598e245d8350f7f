"""Where settings come from: defaults < file < environment < command line, and the form of the file.

What is allowed stands in `model`; how a mistake is said, in `problems`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

from pydantic import ValidationError

from proxy.config.document import Document, Location
from proxy.config.environment import Environment
from proxy.config.inheritance import ancestry
from proxy.config.layers import laid_over
from proxy.config.model import Settings
from proxy.config.problems import describe, said_at
from proxy.errors import ConfigurationError

DEFAULT_FILE: Final = Path("config.yaml")
"""The file that is read where none is named, if it is there."""

_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Source:
    """Where a process has its settings from, so that it can read them again."""

    path: Path | None = None
    """The file; None for `config.yaml` of the working folder if it is there."""
    overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the command line says, nested like the file; a None in it says nothing."""

    @property
    def file(self) -> Path:
        """The file, whether or not it is there."""
        return self.path or DEFAULT_FILE

    def content(self) -> bytes | None:
        """Return what the file holds; None where none is named and there is no `config.yaml`.

        Raises:
            ConfigurationError: it is not there, or cannot be read.
        """
        try:
            return self.file.read_bytes()
        except FileNotFoundError:
            if self.path is None:
                return None
            raise ConfigurationError(f"{self.path}: there is no such file") from None
        except OSError as why:
            raise ConfigurationError(f"{self.file}: cannot be read: {why.strerror}") from why

    def read(self) -> Loaded:
        """Read the file, the environment and the command line.

        Raises:
            ConfigurationError: the message has one line for each mistake, with file and line (or the name
                of the variable), the setting, and what was allowed.
        """
        return self.parse(self.content())

    def parse(self, content: bytes | None) -> Loaded:
        """Return what `read` returns if the file holds `content`; raises as it does."""
        if content is None:
            document = Document("configuration", None, {})
        else:
            document = Document.parse(content, str(self.file))
        merged = _Merged(document, Environment.read(), _said(self.overrides))
        try:
            settings = Settings(**merged.data)
        except ValidationError as why:
            # Its own text holds the values, keys among them: nothing may print it.
            raise ConfigurationError("\n".join(merged.mistakes(why))) from None
        return Loaded(source=self, content=content, settings=settings, doubts=tuple(merged.doubts(settings)))


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings as they were read."""

    source: Source
    content: bytes | None = field(repr=False)
    """What the file held, which may be a key; None where there was none."""
    settings: Settings
    doubts: tuple[str, ...] = ()
    """A line for each thing that is allowed and does nothing, in the form of those about mistakes."""


def load(path: Path | None = None, overrides: Mapping[str, Any] = _NOTHING) -> Settings:
    """Return the settings of the file at `path`, the environment and the command line.

    Args and errors are those of `Source`.
    """
    return Source(path=path, overrides=overrides).read().settings


class _Merged:
    """What the sources say together, and which of them said what."""

    def __init__(self, document: Document, environment: Environment, on_command_line: dict[str, Any]) -> None:
        # A section with nothing but comments under it is None to YAML; it means the defaults.
        in_file = {section: value for section, value in document.data.items() if value is not None}
        self.data = laid_over(laid_over(in_file, environment.data), on_command_line)
        self._document = document
        self._environment = environment
        self._in_file = in_file
        self._on_command_line = on_command_line

    def mistakes(self, error: ValidationError) -> list[str]:
        """Return a line for each mistake."""
        return describe(error, Settings, self._where, self._written)

    def doubts(self, settings: Settings) -> Iterator[str]:
        """Yield a line for each thing that does nothing."""
        for name, policy in settings.policies.items():
            for what, *at in policy.doubts:
                location = ("policies", name, *at)
                if self._written(location) == location:
                    yield said_at(location, what, self._where)

    def _where(self, location: Location) -> str:
        """Name the source that set the value, or most of the way to it; of several the last one."""
        ranked = [(_reach(self._on_command_line, location), "command line")]
        variable = self._environment.variable(location) or "environment"
        ranked.append((_reach(self._environment.data, location), variable))
        line = self._document.line(location)
        ranked.append((_reach(self._in_file, location), f"{self._document.name}:{line}"))
        reach, source = max(ranked, key=lambda entry: entry[0])  # the first of the greatest
        return source if reach else self._document.name

    def _written(self, location: Location) -> Location:
        """Return where a part of a policy stands that this policy took over from another one."""
        if len(location) < 3 or location[0] != "policies" or not isinstance(name := location[1], str):
            return location
        policies, (_, _, *rest) = self.data["policies"], location
        for owner in (name, *ancestry(name, policies)):
            if _reach(policies[owner], tuple(rest)) == len(rest):
                return ("policies", owner, *rest)
        return location


def schema_of() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the file, with a description of each setting."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Settings.model_json_schema()}


def _said(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `overrides` without the options that were not given."""
    said: dict[str, Any] = {}
    for key, value in overrides.items():
        kept = _said(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else value
        if kept is not None and kept != {}:
            said[key] = kept
    return said


def _reach(data: Any, location: Location) -> int:
    """Return how many steps of `location` can be taken in `data`."""
    for taken, step in enumerate(location):
        try:
            data = data[step]
        except (KeyError, IndexError, TypeError):
            return taken
    return len(location)
