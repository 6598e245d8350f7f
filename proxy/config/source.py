"""The sources of settings: defaults < file < environment < command line.

    PALIMPSEST_SERVER__PORT=9000            sets server.port; lists and mappings are written as JSON
    api_key: ${OPENAI_API_KEY}              in the file: a variable of the environment; `$${` is a literal `${`
    api_key_file: /run/secrets/openai       any secret may be read from a file; also as PALIMPSEST_…_FILE

Names of variables are case-insensitive, and an empty variable counts as absent. The values of variables and secret
files never appear in messages. Some mistakes that YAML accepts silently are refused in the file: duplicate keys, and a
bare `on` or `no` as a key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

import yaml
from msgspec import Struct
from pydantic import BaseModel, ValidationError
from pydantic_settings import EnvSettingsSource
from pydantic_settings.exceptions import SettingsError
from yaml.parser import ParserError
from yaml.reader import ReaderError
from yaml.scanner import ScannerError

from proxy.config.policies import ancestry, laid_over, unreachable
from proxy.config.problems import Location, describe, line_about
from proxy.config.settings import Settings, UpstreamSettings
from proxy.errors import ConfigurationError, InvalidRequest
from proxy.trimming import Policy

DEFAULT_FILE: Final = Path("config.yaml")  # read if no file is named; it need not exist

SECRETS: Final = frozenset(
    {
        *(("upstream", "api_key"), ("upstream", "anthropic_api_key"), ("summarizer", "api_key")),
        *(("auth", "key"), ("auth", "admin_key")),
    }
)
"""Section and name of the settings that may be given as `NAME_file`, at any depth of the section."""

_PREFIX: Final = "PALIMPSEST_"
_LEVEL: Final = "__"
_FILE: Final = "_file"
_SERVICE_LINK: Final = ("tcp://", "udp://", "sctp://")
"""Prefixes of values that Kubernetes puts into `PALIMPSEST_SERVER_PORT` for a service with such a name."""
_REFERENCE: Final = re.compile(r"(\$?)\$\{(?:([A-Za-z_][A-Za-z0-9_]*)\})?")
_WANT_KEYS: Final = frozenset({"api.openai.com", "api.anthropic.com"})  # hosts that require a key
_ONLY_TENANT: Final = "default"  # the tenant of everybody without authentication
_VERBATIM: Final = frozenset({"regex", "patterns", "prompt", "heading", "type", "extends"})
"""Settings of policies in which `${…}` is left unchanged."""


class ConfigSource(Struct, frozen=True, kw_only=True):
    """The sources of a process's settings. They can be read again."""

    path: Path | None = None  # the file; None: `config.yaml` in the working directory, if it exists
    overrides: Mapping[str, Any] = {}  # settings of the command line, nested like the file; None values are ignored
    serves: bool = False  # whether the process will serve; other commands do not know a port passed to `serve`

    @property
    def file(self) -> Path:
        """The file, whether or not it exists."""
        return self.path or DEFAULT_FILE

    def content(self) -> bytes | None:
        """Return the content of the file, or None if no file is named and there is no `config.yaml`.

        Raises `ConfigurationError` if the file cannot be read.
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

        Raises `ConfigurationError` with one line for each mistake: file and line or the variable; the setting; what is
        allowed.
        """
        return self.parse(self.content())

    def parse(self, content: bytes | None) -> Loaded:
        """Do the same as `read`, for a file with this `content`."""
        name = str(self.file)
        document = Document.parse(content, name) if content is not None else Document(name="configuration")
        merged = _Merged(document, Environment.read(), _given(self.overrides))
        try:
            settings = Settings(**merged.data)
        except ValidationError as why:
            # The original message shows values, which may be keys. It must not be printed.
            raise ConfigurationError("\n".join(merged.mistakes(why))) from None
        own = list(merged.own_addresses(settings))
        if wrong := [*merged.misread(settings), *(own if self.serves else ())]:
            raise ConfigurationError("\n".join(wrong))
        warnings = (*own, *merged.warnings(settings))
        return Loaded(source=self, content=content, settings=settings, warnings=warnings)


class Loaded(Struct, frozen=True, kw_only=True):
    """Settings with their source and warnings."""

    source: ConfigSource
    content: bytes | None  # the content of the file, which may hold a key; None without a file
    settings: Settings
    warnings: tuple[str, ...] = ()
    """One line for each setting without effect, and for each address that is the proxy's own unless it serves on
    another port. The format is that of mistakes."""

    def __repr__(self) -> str:
        return f"Loaded(source={self.source!r}, settings={self.settings!r})"


def load(path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Return the settings of the file at `path`, the environment and the command line."""
    return ConfigSource(path=path, overrides=overrides or {}).read().settings


def policy_of(text: str, known: Mapping[str, Policy]) -> Policy:
    """Parse a policy that a user typed as YAML. It may extend the policies in `known`.

    Raises `InvalidRequest` with all mistakes.
    """
    try:
        _check_typed(text)
        written = yaml.safe_load(text)
        if not isinstance(written, dict):
            raise InvalidRequest("Write a policy as YAML, such as {trigger: {tokens: 50000}, edits: […]}.")
        return Settings(policies={**known, _TYPED: cast("Any", written)}).policies[_TYPED]
    except yaml.YAMLError as why:
        raise InvalidRequest(f"This is not YAML: {' '.join(str(why).split())}") from why
    except ValidationError as why:
        lines = describe(why, Settings, lambda _: "policy", lambda location: location, lambda _: None)
        raise InvalidRequest("; ".join(line.replace(f"policies.{_TYPED}.", "") for line in lines)) from why


def _check_typed(text: str) -> None:
    """Raise `InvalidRequest` for aliases and deep nesting, which could take too much memory or recursion."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise InvalidRequest("A policy that is typed here cannot repeat a part with *NAME.")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise InvalidRequest(f"A policy has no more than {_DEEPEST} levels.")


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the file, with a description of each setting."""
    schema = Settings.model_json_schema()
    models: dict[str, Any] = schema["$defs"]
    for model in models.values():
        properties: dict[str, Any] = model["properties"]
        for name in [name for name in properties if "password" in repr(properties[name])]:
            description = f"Path of a file that holds `{name}`, instead of `{name}` itself."
            properties[name + _FILE] = {"type": "string", "description": description}
            if name in model.get("required", ()):
                model["required"].remove(name)
                model["oneOf"] = [{"required": [name]}, {"required": [name + _FILE]}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


_TYPED: Final = "typed"
_DEEPEST: Final = 20
_DATE: Final = "tag:yaml.org,2002:timestamp"
_INT: Final = "tag:yaml.org,2002:int"
_FLOAT: Final = "tag:yaml.org,2002:float"
_NULL: Final = "tag:yaml.org,2002:null"
_READ_AS: Final = {
    "tag:yaml.org,2002:bool": "a boolean",
    _INT: "a number",
    _FLOAT: "a number",
    _NULL: "nothing",
    _DATE: "a date",
}
_CURES: Final = {
    "'\\t'": "a tab: YAML is indented with spaces only",
    "block end": "this does not fit the lines before it: check the indentation",
    "undefined alias": "*NAME repeats a value marked by &NAME, and there is none; put other text in quotes",
    "tag handle": "!NAME is an unknown tag; put other text in quotes",
    "constructor for the tag": "!NAME is an unknown tag; put other text in quotes",
    "another document": "--- begins a second document; the file holds one only",
    "mapping values are not allowed": "a colon is not allowed here; put text with ': ' in quotes",
    "but got '{'": 'a brace is not allowed here; inside of {…} and […], put "${NAME}" in quotes',
}
"""How to fix the most common syntax mistakes, by a part of YAML's own message."""
_QUOTING_NOTHING: Final = (ParserError, ScannerError)  # errors whose messages quote at most single characters
_TEXT: Final = "tag:yaml.org,2002:str"
_MERGE: Final = "tag:yaml.org,2002:merge"
_OCTAL: Final = re.compile(r"[-+]?0[0-7_]+")
_MOST_REPEATED: Final = 100_000  # repeated values: a thousand large policies with aliases, which load in seconds
_LONGEST_NUMBER: Final = 100  # digits; Python refuses to read numbers of more than 4,300
_POINTED: Final = re.compile(r"[0-9]{1,3}\.000")


class Document(Struct, frozen=True, kw_only=True):
    """A parsed YAML file: `data` is its content, `line(location)` the line of a value. Created by `parse`."""

    name: str
    root: yaml.Node | None = None
    data: dict[str, Any] = {}

    @classmethod
    def parse(cls, content: bytes, name: str) -> Document:
        """Parse `content`. Messages call the file `name`. Raises `ConfigurationError`."""
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as why:
            line = content.count(b"\n", 0, why.start) + 1
            raise ConfigurationError(f"{name}:{line}: not UTF-8 text: save the file as UTF-8") from why
        loader: yaml.SafeLoader | None = None
        try:
            loader = yaml.SafeLoader(text)
            try:
                root = loader.get_single_node()
                if root is not None and _repeated(root) > _MOST_REPEATED:
                    raise ConfigurationError(f"{name}: *NAME repeats too much: write no more than the settings need")
                problems = list(_misread(root)) if root is not None else []
                if problems:
                    raise ConfigurationError("\n".join(f"{name}:{line}: {what}" for line, what in problems))
                construct = cast("Callable[[yaml.Node], object]", loader.construct_document)  # the stub has no types
                data = construct(root) if root is not None else None
            finally:
                loader.dispose()
        except (ReaderError, yaml.MarkedYAMLError) as why:
            # The original message quotes the line, which may hold a key. It must not be printed.
            raise ConfigurationError(f"{name}{_syntax_problem(why, text)}") from None
        except (ValueError, KeyError, TypeError):
            raise ConfigurationError(f"{name}: a value does not fit the tag (!!…) before it") from None
        except RecursionError as why:
            line = loader.line + 1 if loader is not None else 1
            raise ConfigurationError(f"{name}:{line}: the nesting is too deep") from why
        if data is None:
            return cls(name=name)
        if not isinstance(data, dict):
            raise ConfigurationError(
                f"{name}:1: the file must be a mapping of sections (server:, upstream:, policies:, …), "
                f"not {'a list' if isinstance(data, list) else 'a single value'}"
            )
        return cls(name=name, root=root, data=cast("dict[str, Any]", data))

    def line(self, location: Location) -> int:
        """Return the line (from 1) of the value at `location`, or of the nearest enclosing value."""
        node, line = self.root, 1
        for step in location:
            if isinstance(node, yaml.MappingNode):
                # Search from the end: pairs from a merge key (`<<`) come first, and the mapping's own keys win.
                found = next((pair for pair in reversed(node.value) if pair[0].value == step), None)
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
                found = (node.value[step], node.value[step])
            else:
                found = None
            if found is None:
                break
            line = found[0].start_mark.line + 1
            node = found[1]
        return line

    def pointed(self) -> Iterator[tuple[Location, str]]:
        """Yield location and text of each number that may use a point as thousands separator: 50.000."""
        return _pointed(self.root, ())


def _pointed(node: yaml.Node | None, location: Location) -> Iterator[tuple[Location, str]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _pointed(value, (*location, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for place, value in enumerate(node.value):
            yield from _pointed(value, (*location, place))
    elif isinstance(node, yaml.ScalarNode) and node.tag == _FLOAT and _POINTED.fullmatch(node.value):
        yield location, node.value


def _repeated(root: yaml.Node) -> int:
    """Return how many additional values aliases (*NAME) produce."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if (known := sizes.get(id(node))) is not None:
            return known
        sizes[id(node)] = 0  # stops at cycles of anchors
        children: list[yaml.Node] = [] if isinstance(node, yaml.ScalarNode) else list(node.value)
        if isinstance(node, yaml.MappingNode):
            children = [part for pair in node.value for part in pair]
        sizes[id(node)] = 1 + sum(map(size, children))
        return sizes[id(node)]

    return size(root) - len(sizes)


def _misread(root: yaml.Node) -> Iterator[tuple[int, str]]:
    """Yield line and problem of values that YAML reads differently than their author meant, such as dates."""
    found: list[tuple[int, str]] = []
    waiting, seen = [root], {id(root)}
    while waiting:
        node = waiting.pop()
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            found += _problems_of_mapping(node)
            children = [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            children = list(node.value)
        elif node.tag == _DATE:
            found.append((node.start_mark.line + 1, "YAML reads this as a date: put it in quotes"))
        elif node.tag in {_INT, _FLOAT} and ":" in node.value:
            problem = f"YAML reads {node.value} as minutes and seconds: write one number, or put it in quotes"
            found.append((node.start_mark.line + 1, problem))
        elif node.tag == _INT and len(node.value) > _LONGEST_NUMBER:
            found.append((node.start_mark.line + 1, "this number is too long; put it in quotes if it is text"))
        elif node.tag == _INT and _OCTAL.fullmatch(node.value):
            meant = node.value.lstrip("0_") or "0"
            problem = f"YAML reads {node.value} as octal: write {meant}, or put it in quotes if it is text"
            found.append((node.start_mark.line + 1, problem))
        for child in children:  # each node once, because anchors may form a cycle
            if id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    yield from sorted(found)


def _problems_of_mapping(mapping: yaml.MappingNode) -> Iterator[tuple[int, str]]:
    first: dict[str, yaml.Node] = {}
    digits = ""  # the number before: in {tokens: 30,000} YAML reads 000 as a key
    with_commas: dict[int, str] = {}
    for key, value in mapping.value:
        line = key.start_mark.line + 1
        if key.tag == _MERGE:
            continue
        if digits and _is_rest_of_number(key, value):
            digits += key.value
            with_commas[line] = digits
            continue
        digits = value.value if value.tag == _INT else ""
        if not isinstance(key, yaml.ScalarNode):
            yield line, "a key must be text, not a list or a mapping"
        elif key.tag != _TEXT:
            read_as = _READ_AS.get(key.tag, "something other than text")
            yield line, f"YAML reads the key {key.value or '~'!r} as {read_as}: put it in quotes"
        elif (earlier := first.setdefault(key.value, key)) is not key:
            at = earlier.start_mark.line + 1
            yield line, f"the key {key.value!r} is given twice, first in line {at}"
    for line, digits in with_commas.items():
        yield line, f"a comma ends a value inside of {{…}}: write {digits}"


def _is_rest_of_number(key: yaml.Node, value: yaml.Node) -> bool:
    return key.tag == _INT and len(key.value) == 3 and (value.tag, value.value) == (_NULL, "")


def _syntax_problem(why: ReaderError | yaml.MarkedYAMLError, text: str) -> str:
    """Return `:line: problem` without values of the file, because one of them may be a key."""
    if isinstance(why, ReaderError):
        line = text.count("\n", 0, why.position) + 1
        return f":{line}: a control character, or one that YAML does not allow"
    mark = why.problem_mark or why.context_mark
    problem = why.problem or why.context or ""
    cures = (cure for words, cure in _CURES.items() if words in problem)
    problem = next(cures, problem if isinstance(why, _QUOTING_NOTHING) else "this is not YAML")
    begun = getattr(why, "context_mark", None)
    if begun is not None and mark is not None and begun.line < mark.line:
        problem += f", in what begins in line {begun.line + 1}"
    return f":{mark.line + 1 if mark is not None else 1}: {problem}"


class Environment(Struct, frozen=True, kw_only=True):
    """The settings in the environment: `data` is nested like the file. Created by `read`."""

    data: dict[str, Any]
    names: Mapping[str, str]  # the original names of the variables, by name in upper case

    @classmethod
    def read(cls) -> Environment:
        """Read the variables of this process. Raises `ConfigurationError`."""
        ours = (name for name in os.environ if name.upper().startswith(_PREFIX))
        values = {name: os.environ[name] for name in ours if os.environ[name]}
        problems = [*_misnamed(values)]
        for name, value in values.items():
            try:
                _parsed({name: value})
            except SettingsError:
                problems.append(f"{name}: this is not JSON; lists and mappings are written as JSON here")
        if problems:
            raise ConfigurationError("\n".join(problems))
        return cls(data=_parsed(values), names={name.upper(): name for name in values})

    def variable(self, location: Location) -> str:
        """Return the name of the variable that sets the value at `location`, an enclosing value, or a part of it."""
        path = [_PREFIX + _LEVEL.join(map(str, location[:length])).upper() for length in range(len(location), 0, -1)]
        found = next((name for name in path if name in self.names), None)
        if found is None:
            found = next((name for name in self.names if path and name.startswith(path[0] + _LEVEL)), None)
        return "environment" if found is None else self.names[found]


def _parsed(values: dict[str, str]) -> dict[str, Any]:
    source = EnvSettingsSource(Settings)
    source.env_vars = {name.lower(): value for name, value in values.items()}
    return source()


def _misnamed(values: dict[str, str]) -> Iterator[str]:
    """Yield a problem for each variable that looks like a misspelled setting. Others are ignored."""
    sections = Settings.model_fields
    for name, value in values.items():
        rest = name[len(_PREFIX) :].lower()
        section = rest.partition(_LEVEL)[0]
        if section in sections:
            continue
        if _LEVEL in rest:
            near = get_close_matches(section, sections, n=1)
            hint = f"; did you mean {_PREFIX}{near[0].upper()}{_LEVEL}…?" if near else ""
            yield f"{name}: unknown section {section!r}; there are: {', '.join(sections)}{hint}"
        elif (setting := _with_two_underscores(rest)) is not None and not value.startswith(_SERVICE_LINK):
            yield f"{name}: write two underscores between section and setting: {setting}"


def _with_two_underscores(rest: str) -> str | None:
    """Return the correct name of a variable with one underscore, such as `server_port`, or None."""
    for section, field in Settings.model_fields.items():
        model, setting = field.annotation, rest.removeprefix(f"{section}_")
        if setting == rest or not (isinstance(model, type) and issubclass(model, BaseModel)):
            continue  # such as `policies`, which has no fixed names
        if setting in model.model_fields or (section, setting.removesuffix(_FILE)) in SECRETS:
            return f"{_PREFIX}{section}{_LEVEL}{setting}".upper()
    return None


class _Resolved:
    """The settings of one source with `${NAME}` and `NAME_file` replaced by what they refer to."""

    def __init__(self, data: Mapping[str, Any], *, variables: bool) -> None:
        self.references: dict[Location, str] = {}
        """The original text of each value that comes from a variable, by its location."""
        self.files: dict[Location, Location] = {}
        """The location of `NAME_file` for each value that comes from a file, by its location."""
        self.problems: list[tuple[Location, str]] = []
        self._variables = variables
        self._around: set[int] = set()
        self.data: dict[str, Any] = self._value(data, ())

    def _value(self, value: Any, location: Location) -> Any:
        if isinstance(value, str):
            verbatim = location[:1] == ("policies",) and not _VERBATIM.isdisjoint(location[2:])
            return self._text(value, location) if self._variables and not verbatim else value
        mark, resolved = id(value), value
        if mark in self._around:  # an anchor that contains itself
            return value
        self._around.add(mark)
        if isinstance(value, list):
            items = enumerate(cast("Iterable[Any]", value))
            resolved = [self._value(item, (*location, place)) for place, item in items]
        elif isinstance(value, dict):
            resolved = self._mapping(cast("dict[str, Any]", value), location)
        self._around.discard(mark)
        return resolved

    def _mapping(self, mapping: dict[str, Any], location: Location) -> dict[str, Any]:
        resolved: dict[str, Any] = {}
        for key, value in mapping.items():
            at = (*location, key)
            section, name = str(at[0]), key.removesuffix(_FILE)
            if (section, key) in SECRETS and value is None and mapping.get(key + _FILE) is not None:
                continue
            if name == key or (section, name) not in SECRETS:
                resolved[key] = self._value(value, at)
            elif mapping.get(name) is not None:
                self.problems.append((at, f"{name} is given too: remove one of the two"))
            elif value is not None:
                resolved[name] = self._content(self._value(value, at), at)
                self.files[*location, name] = at
        return resolved

    def _text(self, text: str, location: Location) -> str:
        def replacement(match: re.Match[str]) -> str:
            escape, name = match.groups()
            if escape:
                return match[0][1:]
            if name is None:
                problem = "write ${NAME} for a variable of the environment, or $${ for a literal ${"
                self.problems.append((location, problem))
            elif not os.environ.get(name):
                self.problems.append((location, f"the variable {name} is not set in the environment"))
            else:
                self.references[location] = text
                return os.environ[name]
            return ""

        return _REFERENCE.sub(replacement, text) if "${" in text else text

    def _content(self, path: Any, location: Location) -> str | None:
        """Return the content of a secret file. Messages do not show the path: it may be the key itself."""
        if any(at == location for at, _ in self.problems):  # the path is already reported: its variable is not set
            return None
        if not isinstance(path, str) or not path:
            self.problems.append((location, "write the path of a file"))
            return None
        problem = "the file is empty"
        try:
            if content := Path(path).read_text("utf-8").strip():
                return content
        except OSError as why:
            problem = f"the file cannot be read: {why.strerror}"
        except ValueError:
            problem = "the file is not UTF-8 text"
        self.problems.append((location, problem))
        return None


class _Merged:
    """The settings of all sources, and which source each of them comes from."""

    def __init__(self, document: Document, environment: Environment, on_command_line: dict[str, Any]) -> None:
        # YAML reads a section with only comments as None. It means the defaults.
        in_file = {section: value for section, value in document.data.items() if value is not None}
        self._document = document
        self._environment = environment
        self._file = _Resolved(in_file, variables=True)
        self._variables = _Resolved(environment.data, variables=False)
        self._on_command_line = on_command_line
        problems = [line_about(at, problem, self._line) for at, problem in self._file.problems]
        problems += [line_about(at, said, environment.variable) for at, said in self._variables.problems]
        if problems:
            raise ConfigurationError("\n".join(problems))
        self.data = laid_over(laid_over(self._file.data, self._variables.data), on_command_line)

    def mistakes(self, error: ValidationError) -> list[str]:
        """Return a line for each mistake in `error`."""
        return describe(error, Settings, self._where, self._owner, self._reference)

    def misread(self, settings: Settings) -> Iterator[str]:
        """Yield a line for each integer with a point as thousands separator, which YAML reads as a fraction."""
        for location, text in self._document.pointed():
            if type(_value_at(settings, location)) is int:
                what = f"YAML reads {text} as {float(text):g}: write {text.replace('.', '')} or {float(text):g}"
                yield line_about(location, what, self._line)

    def own_addresses(self, settings: Settings) -> Iterator[str]:
        """Yield a line for each address of a provider that is the proxy's own address."""
        what = "this is the address of the proxy itself: name the provider's, or give the proxy another server.port"
        for location in settings.own_addresses():
            yield line_about(location, what, self._where)

    def warnings(self, settings: Settings) -> Iterator[str]:
        """Yield a line for each setting that has no effect."""
        if settings.auth.keys and settings.auth.mode != "keys":
            what = f"auth.mode is '{settings.auth.mode}', so these keys are not used: set auth.mode to 'keys'"
            yield line_about(("auth", "keys"), what, self._where)
        if settings.auth.mode == "keys" and (locked := _locked(settings.upstream)):
            what = f"{locked} wants a key, and clients' keys are not sent on: set upstream.api_key"
            yield line_about(("upstream", "api_key"), what, self._where)
        for place, name, what in _idle_budgets(settings):
            yield line_about(("budgets", place, name), f"{what}, so this budget limits nobody", self._where)
        for name, other in unreachable(settings.policies):
            what = f"this is never tried, because {other!r} matches every request: put {name!r} before {other!r}"
            yield line_about(("policies", name, "match"), what, self._where)
        for name, policy in settings.policies.items():
            for what, *steps in policy.warnings:
                location = ("policies", name, *steps)
                if self._owner(location) == location:
                    yield line_about(location, what, self._where)

    def _where(self, location: Location) -> str:
        """Return the last source that sets the value at `location`, or the nearest enclosing value."""
        variable = self._environment.variable(self._variables.files.get(location, location))
        found = [
            (_reach(self._on_command_line, location), "command line"),
            (_reach(self._variables.data, location), variable),
            (_reach(self._file.data, location), self._line(location)),
        ]
        reach, source = max(found, key=lambda entry: entry[0])  # the first of the greatest
        return source if reach else self._document.name

    def _line(self, location: Location) -> str:
        return f"{self._document.name}:{self._document.line(self._file.files.get(location, location))}"

    def _owner(self, location: Location) -> Location:
        """Return where a value is written: in this policy, or in the one from which it is inherited."""
        if len(location) < 3 or location[0] != "policies" or not isinstance(name := location[1], str):
            return location
        policies, (_, _, *rest) = self.data["policies"], location
        for owner in (name, *ancestry(name, policies)):
            if _reach(policies[owner], tuple(rest)) == len(rest):
                return ("policies", owner, *rest)
        return location

    def _reference(self, location: Location) -> str | None:
        """Return the text in the file (`${NAME}`) if the value comes from a variable, else None."""
        owner = self._owner(location)
        over = (self._variables.data, self._on_command_line)
        if any(_reach(layer, owner) == len(owner) for layer in over):
            return None
        return self._file.references.get(owner)


def _locked(upstream: UpstreamSettings) -> str:
    """Return the upstream's address if it certainly needs a key and none is set, else an empty text."""
    if upstream.api_key is not None or upstream.anthropic_api_key is not None or upstream.routes:
        return ""
    return upstream.base_url if urlsplit(upstream.base_url).hostname in _WANT_KEYS else ""


def _idle_budgets(settings: Settings) -> Iterator[tuple[int, str, str]]:
    """Yield index, setting and reason of each budget for a tenant or key that does not exist."""
    mode, keys = settings.auth.mode, settings.auth.keys if settings.auth.mode == "keys" else ()
    names, tenants = {key.name for key in keys}, {key.tenant for key in keys}
    for place, budget in enumerate(settings.budgets):
        if budget.key is not None and budget.key not in names:
            yield place, "key", "no key in use has this name"
        elif budget.tenant is not None and mode == "keys" and budget.tenant not in tenants:
            yield place, "tenant", "none of auth.keys belongs to this tenant"
        elif budget.tenant is not None and mode == "none" and budget.tenant != _ONLY_TENANT:
            yield place, "tenant", f"without authentication the tenant is called {_ONLY_TENANT!r}"


def _given(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `overrides` without the options that were not given."""
    given: dict[str, Any] = {}
    for key, value in overrides.items():
        kept = _given(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else value
        if kept is not None and kept != {}:
            given[key] = kept
    return given


def _value_at(settings: Settings, location: Location) -> Any:
    """Return the setting at `location`, or None."""
    value: Any = settings
    for step in location:
        try:
            value = getattr(value, str(step)) if isinstance(value, BaseModel) else value[step]
        except (AttributeError, KeyError, IndexError, TypeError):
            return None
    return value


def _reach(data: Any, location: Location) -> int:
    """Return how many steps of `location` can be taken in `data`."""
    for taken, step in enumerate(location):
        try:
            data = data[step]
        except (KeyError, IndexError, TypeError):
            return taken
    return len(location)
