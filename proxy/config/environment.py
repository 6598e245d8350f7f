"""The variables `PALIMPSEST_…`: `PALIMPSEST_SERVER__PORT` is `server.port`; lists and mappings are JSON.

Names are read without regard to case, so a policy that is named by a variable has a lower-case name.
An empty variable counts as absent. Values never stand in messages.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, Final

from pydantic import BaseModel
from pydantic_settings import EnvSettingsSource
from pydantic_settings.exceptions import SettingsError

from proxy.config.document import Location
from proxy.config.model import Settings
from proxy.errors import ConfigurationError

_PREFIX: Final = "PALIMPSEST_"
_LEVEL: Final = "__"
_SERVICE_LINK: Final = ("tcp://", "udp://", "sctp://")
"""What Kubernetes puts into `PALIMPSEST_SERVER_PORT` where a service happens to be named so."""


class Environment:
    """The settings that the environment holds: `data` as in the file, `variable(location)` for messages."""

    def __init__(self, data: dict[str, Any], names: dict[str, str]) -> None:
        """Wrap what was read; use `read`."""
        self.data = data
        self._names = names

    @classmethod
    def read(cls) -> Environment:
        """Read the variables of this process.

        Raises:
            ConfigurationError: a name that means nothing, or a list or mapping that is no JSON.
        """
        ours = (name for name in os.environ if name.upper().startswith(_PREFIX))
        values = {name: os.environ[name] for name in ours if os.environ[name]}
        problems = [*_misnamed(values)]
        data: dict[str, Any] = {}
        try:
            data = _source(values)()
        except SettingsError:
            problems += [
                f"{name}: this is not JSON, as lists and mappings must be here"
                for name, value in values.items()
                if not _readable(name, value)
            ]
        if problems:
            raise ConfigurationError("\n".join(problems))
        return cls(data, {name.upper(): name for name in values})

    def variable(self, location: Location) -> str | None:
        """Return the name of the variable that sets the value at `location`, or something around it."""
        for length in range(len(location), 0, -1):
            name = _PREFIX + _LEVEL.join(str(step) for step in location[:length]).upper()
            if name in self._names:
                return self._names[name]
        return None


def _source(values: dict[str, str]) -> EnvSettingsSource:
    source = EnvSettingsSource(Settings)
    source.env_vars = {name.lower(): value for name, value in values.items()}
    return source


def _readable(name: str, value: str) -> bool:
    try:
        _source({name: value})()
    except SettingsError:
        return False
    return True


def _misnamed(values: dict[str, str]) -> Iterator[str]:
    """Yield a problem for each variable that looks like a setting and is none.

    Others that begin with our prefix are left alone: they may be anybody's.
    """
    sections = Settings.model_fields
    for name, value in values.items():
        rest = name[len(_PREFIX) :].lower()
        section = rest.partition(_LEVEL)[0]
        if section in sections:
            continue
        if _LEVEL in rest:
            near = get_close_matches(section, sections, n=1)
            meant = f"; did you mean {_PREFIX}{near[0].upper()}{_LEVEL}…?" if near else ""
            yield f"{name}: unknown section {section!r}; there are: {', '.join(sections)}{meant}"
        elif (setting := _with_two_underscores(rest)) is not None and not value.startswith(_SERVICE_LINK):
            yield f"{name}: two underscores stand between section and setting: {setting}"


def _with_two_underscores(rest: str) -> str | None:
    """Return the variable that was meant by `server_port`; None where there is none like it."""
    for section, field in Settings.model_fields.items():
        model, setting = field.annotation, rest.removeprefix(f"{section}_")
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            continue  # policies: their names are anybody's
        if setting != rest and setting in model.model_fields:
            return f"{_PREFIX}{section}{_LEVEL}{setting}".upper()
    return None
