"""Formats mistakes in a configuration, one line each: place in the file, setting, and what is allowed.

A value is shown only if it cannot be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, TypeAlias, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

Location: TypeAlias = tuple[str | int, ...]  # the path to a value: keys of mappings and indices of lists
Where = Callable[[Location], str]
"""Names the source of the value at a location: `config.yaml:12`, a variable, the command line."""

_SECRET: Final = frozenset(
    {"key", "keys", "api_key", "anthropic_api_key", "admin_key", "url", "base_url", "anthropic_base_url", "proxy"}
)
_KINDS: Final = {
    "dict": "a mapping",
    "list": "a list",
    "tuple": "a list",
    "str": "a text",
    "int": "a number",
    "float": "a number",
    "NoneType": "nothing",
}
_MAPPING, _LIST = "a mapping is expected here", "a list is expected here"
_WHOLE, _NUMBER = "a whole number is expected here", "a number is expected here"
_EXPECTED: Final = {
    **dict.fromkeys(("model_type", "dict_type", "model_attributes_type"), _MAPPING),
    **dict.fromkeys(("tuple_type", "list_type", "set_type", "frozen_set_type"), _LIST),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), _WHOLE),
    **dict.fromkeys(("float_type", "float_parsing", "finite_number"), _NUMBER),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false is expected here"),
    "string_type": "a text is expected here; put it in quotes",
    "string_too_short": "a text with at least {min_length} character is expected here",
    "too_short": "a list with at least {min_length} entry is expected here",
    "too_long": "a list with at most {max_length} entries is expected here",
    "literal_error": "{expected} is expected here",
    "greater_than": "a number above {gt:g} is expected here",
    "greater_than_equal": "a number of at least {ge:g} is expected here",
    "less_than_equal": "a number of at most {le:g} is expected here",
    "missing": "this is required and missing",
}
"""What is expected, by type of pydantic's error. Placeholders are filled from the error's context."""
_SHOWN_TEXT: Final = ("literal_error", "int_", "float_", "bool_", "greater_", "less_")
"""Prefixes of error types whose text is a mistyped choice or number, which may be shown."""
_PLAIN_STEP: Final = re.compile(r"[\w-]+")
_LINE: Final = re.compile(r"[^:]*:([0-9]+): ")
_AMOUNT: Final = re.compile(r"([0-9][0-9,_']*(?:\.[0-9]+)?)\s*([a-z]+|%)?", re.IGNORECASE)
"""A number as people write it: `50k`, `30s`, `90%`, `1,000`."""
_SECONDS: Final = {"ms": 0.001, "s": 1, "sec": 1, "min": 60, "h": 3600, "d": 86400}
_SIZES: Final = {"k": 1e3, "kb": 1e3, "kib": 2**10, "m": 1e6, "mb": 1e6, "mib": 2**20, "g": 1e9, "gib": 2**30}


def describe(
    error: ValidationError,
    root: type[BaseModel],
    where: Where,
    owner: Callable[[Location], Location],
    reference: Callable[[Location], str | None],
) -> list[str]:
    """Return one line for each mistake in `error`: `config.yaml:12: server.port: problem (got -1)`.

    `owner` returns where an inherited value is written; a mistake in it is reported once, there. `reference` returns
    the text `${NAME}` if a value comes from a variable; it is shown instead of the value.
    """
    # If entries of a list are wrong, pydantic reports in addition that too few are left: ignore that.
    told = [each for each in error.errors(include_url=False) if each["type"] != "too_short" or not each["input"]]
    found = [_mistake(details, root, reference) for details in told]
    reported = set(found)
    lines = [
        line_about(location, what, where)
        for location, what in dict.fromkeys(found)
        if (written := owner(location)) == location or (written, what) not in reported
    ]
    return sorted(lines, key=_place)


def _place(line: str) -> int:
    """Return the line number in the message, to sort mistakes from top to bottom."""
    named = _LINE.match(line)
    return int(named[1]) if named is not None else 0


def line_about(location: Location, what: str, where: Where) -> str:
    """Return the line that says `what` about the value at `location`."""
    path = dotted(location)
    return f"{where(location)}: {path}: {what}" if path else f"{where(location)}: {what}"


def dotted(location: Location) -> str:
    """Return the location as people write it: `policies.default.edits[0].last`."""
    text = ""
    for step in location:
        if isinstance(step, int):
            text += f"[{step}]"
        elif _PLAIN_STEP.fullmatch(step):
            text += f".{step}" if text else step
        else:
            text += f"[{step!r}]"
    return text


def _mistake(
    details: ErrorDetails, root: type[BaseModel], reference: Callable[[Location], str | None]
) -> tuple[Location, str]:
    location, owner, annotation = _trace(root, details["loc"])
    context, kind, found = details.get("ctx", {}), details["type"], details["input"]
    if kind == "extra_forbidden":
        said = _unknown("key", str(location[-1]), owner.model_fields if owner is not None else ())
        return location, said + _name_forgotten(root, location)
    if kind == "union_tag_invalid":
        discriminator = str(context["discriminator"]).strip("'")
        allowed = re.findall(r"'([^']*)'", str(context["expected_tags"]))
        return (*location, discriminator), _unknown(discriminator, str(context["tag"]), allowed)
    if kind == "union_tag_not_found":
        discriminator = str(context["discriminator"]).strip("'")
        allowed = _tags(annotation, discriminator)
        named = [tag for tag in allowed if isinstance(found, dict) and tag in found]
        hint = f": write {{type: {named[0]}, …}}" if named else ""
        return location, f"{discriminator!r} is required and missing; one of {', '.join(allowed)}{hint}"
    if kind == "contradiction":
        return (*location, *context["at"]), details["msg"]
    if kind == "value_error":
        return location, str(context["error"])
    written = reference(location)
    hint = ""
    if written is None:
        hint = _right_form(found, location, annotation) if isinstance(found, str) else _right_kind(found, annotation)
    what = _EXPECTED[kind].format(**context) if kind in _EXPECTED else details["msg"]
    if hint and kind == "literal_error":  # a number or a choice is allowed, and a number was meant
        what = _WHOLE
    if kind != "missing":
        what += f" (got {_shown(found, kind, location) if written is None else written})"
    if kind == "literal_error" and isinstance(found, str) and not hint:
        hint = did_you_mean(found, re.findall(r"'([^']*)'", str(context["expected"])))
    return location, what + hint + _name_forgotten(root, location)


def _unknown(noun: str, found: str, allowed: Iterable[str]) -> str:
    """Return a message that `found` is unknown, with the allowed choices and the probable one."""
    choices = list(allowed)
    return f"unknown {noun} {found!r}; allowed here: {', '.join(choices)}{did_you_mean(found, choices)}"


def did_you_mean(found: str, choices: Iterable[str]) -> str:
    """Return a hint with the choice most similar to `found`, or an empty text."""
    near = get_close_matches(found, list(choices), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _shown(found: Any, kind: str, location: Location) -> str:
    """Return the value itself if it is not a secret, else its kind."""
    if isinstance(found, bool):
        text = "true" if found else "false"
        quotes = ": YAML reads a bare on, off, yes or no so; put it in quotes"
        return text + quotes if kind == "literal_error" else text
    hidden = any(step in _SECRET for step in location)
    if not hidden and (isinstance(found, int | float) or (isinstance(found, str) and kind.startswith(_SHOWN_TEXT))):
        return repr(found)
    if found in ([], ""):
        return f"an empty {'list' if found == [] else 'text'}"
    return _KINDS.get(type(found).__name__, "something else")


def _name_forgotten(root: type[BaseModel], location: Location) -> str:
    """Return a hint if a setting stands where a name belongs: `policies: {edits: […]}`."""
    section = root.model_fields.get(str(location[0])) if 2 <= len(location) <= 3 else None
    named = _bare(section.annotation) if section is not None else None
    if get_origin(named) is not dict or location[1] not in getattr(_bare(get_args(named)[1]), "model_fields", ()):
        return ""
    return f"; if {location[1]!r} is a setting, put it under a name: {location[0]}: {{default: {{{location[1]}: …}}}}"


def _right_kind(found: Any, annotation: Any) -> str:
    """Return how to write a value of the wrong type: `trigger: 50000`, `edits: {type: …}`, an empty `default:`."""
    fields = getattr(annotation, "model_fields", {})
    if isinstance(found, int) and not isinstance(found, bool) and "tokens" in fields:
        return f": write {{tokens: {found}}}"
    if found is None and (fields or get_origin(annotation) is dict):
        return ": write {}"
    return ": put it in brackets: [{…}]" if isinstance(found, dict) and get_origin(annotation) is tuple else ""


def _right_form(found: str, location: Location, annotation: Any) -> str:
    """Return how to write what `found` probably means: an edit without braces, or a number with a unit."""
    listed = get_origin(annotation) is tuple
    union = _bare(get_args(annotation)[0]) if listed else annotation
    if get_origin(union) in {Union, UnionType} and found in _tags(union, "type"):
        edit = f"{{type: {found}}}"
        return f": write {f'[{edit}]' if listed else edit}"
    if listed and union is str:
        return ": put it in brackets: […]"
    amount = _AMOUNT.fullmatch(found.strip())
    if amount is None or not {int, float} & {annotation, *map(_bare, get_args(annotation))}:
        return ""
    number, unit = float(re.sub("[,_']", "", amount[1])), (amount[2] or "").lower()
    name = str(location[-1])
    timed = name == "lifetime" or name.endswith(("timeout", "seconds"))
    if unit == "%":
        form = f"{number / 100:g}"
        return f": write {form}" if annotation is not int else f": a share is written as ratio: {form}"
    if timed and (scale := 60 if unit == "m" else _SECONDS.get(unit)) is not None:
        return f": write {number * scale:.15g} (seconds)"
    scale = _SIZES.get(unit, 1 if not unit else None)
    form = f"{number * scale:.15g}" if scale is not None else found
    return f": write {form}" if form != found else ""


def _trace(root: type[BaseModel], loc: Sequence[str | int]) -> tuple[Location, type[BaseModel] | None, Any]:
    """Return the location in the file, the model that contains its last step, and the type of the value there.

    pydantic's `loc` has steps that the file does not have: the member of a union, and `[key]` for a mapping's key.
    """
    location: list[str | int] = []
    owner: type[BaseModel] | None = None
    annotation: Any = root
    for step in loc:
        if step == "[key]":
            continue
        annotation = _bare(annotation)
        arguments = get_args(annotation)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            owner = annotation
            field = annotation.model_fields.get(str(step))
            annotation = field.annotation if field is not None else None
        elif get_origin(annotation) in {Union, UnionType}:
            tagged = [member for member in arguments if _has_tag(_bare(member), str(step))]
            if tagged:
                annotation = tagged[0]
            continue
        else:
            owner = None
            annotation = arguments[-1 if get_origin(annotation) is dict else 0] if arguments else None
        location.append(step)
    return tuple(location), owner, _bare(annotation)


def _tags(union: Any, discriminator: str) -> list[str]:
    """Return the allowed values of `discriminator` in the members of `union`."""
    members = [member for member in map(_bare, get_args(union)) if hasattr(member, "model_fields")]
    fields = [member.model_fields[discriminator] for member in members]
    return [tag for field in fields for tag in get_args(field.annotation)]


def _bare(annotation: Any) -> Any:
    """Return the annotation without `Annotated` and `| None`."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in {Union, UnionType}:
        members = [member for member in get_args(annotation) if member is not NoneType]
        if len(members) == 1:
            return _bare(members[0])
    return annotation


def _has_tag(member: Any, tag: str) -> bool:
    """Tell whether the model `member` has a literal field that allows `tag`, like the discriminator of a union."""
    if not (isinstance(member, type) and issubclass(member, BaseModel)):
        return False
    kinds = [field.annotation for field in member.model_fields.values()]
    return any(get_origin(kind) is Literal and tag in get_args(kind) for kind in kinds)
