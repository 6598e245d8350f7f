"""What is wrong with a configuration, a line for each mistake: where, which setting, what was allowed.

pydantic says what it found, in terms of its models; here it is said in terms of the file. Values are
shown only where they cannot be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from proxy.config.document import Location

Where = Callable[[Location], str]
"""Names the source of the value at a location: `config.yaml:12`, a variable, the command line."""

Source = Callable[[Location], Location]
"""Tells where what is at a location was written: there, or where it was taken over from."""

_SECRET: Final = frozenset({"key", "keys", "api_key", "admin_key", "url", "base_url"})
_KINDS: Final = {
    "dict": "a mapping",
    "list": "a list",
    "tuple": "a list",
    "str": "a text",
    "int": "a number",
    "float": "a number",
    "NoneType": "nothing",
}
_EXPECTED: Final = {
    "model_type": "a mapping is expected here",
    "dict_type": "a mapping is expected here",
    "model_attributes_type": "a mapping is expected here",
    "tuple_type": "a list is expected here",
    "list_type": "a list is expected here",
    "set_type": "a list is expected here",
    "frozen_set_type": "a list is expected here",
    "string_type": "a text is expected here; put it in quotes",
    "missing": "this is required and missing",
}
_SHOWN_TEXT: Final = ("literal_error", "int_", "float_", "bool_", "greater_", "less_")
"""Errors whose text input is a choice or a number that was mistyped, and may be shown."""
_PLAIN_STEP: Final = re.compile(r"[\w-]+")


def describe(
    error: ValidationError, root: type[BaseModel], where: Where, source: Source | None = None
) -> list[str]:
    """Return one line for each mistake in `error`: `config.yaml:12: server.port: what is wrong (got -1)`.

    Args:
        error: what pydantic found.
        root: the model that it validated.
        where: names the source of a value.
        source: tells where a value was written that stands at a location; a mistake that was taken over from
            elsewhere is said there alone.
    """
    found = [_mistake(details, root) for details in error.errors(include_url=False)]
    if source is not None:
        said = set(found)
        found = [
            (location, what)
            for location, what in found
            if (written := source(location)) == location or (written, what) not in said
        ]
    return [said_at(location, what, where) for location, what in found]


def said_at(location: Location, what: str, where: Where) -> str:
    """Return the line that says `what` of the value at `location`."""
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


def _mistake(details: ErrorDetails, root: type[BaseModel]) -> tuple[Location, str]:
    """Return where the mistake is, and what it is."""
    location, owner, annotation = _trace(root, details["loc"])
    context, kind = details.get("ctx", {}), details["type"]
    if kind == "extra_forbidden":
        what = _unknown("key", str(location[-1]), owner.model_fields if owner is not None else ())
    elif kind == "union_tag_invalid":
        discriminator = str(context["discriminator"]).strip("'")
        location = (*location, discriminator)
        allowed = re.findall(r"'([^']*)'", str(context["expected_tags"]))
        what = _unknown(discriminator, str(context["tag"]), allowed)
    elif kind == "union_tag_not_found":
        discriminator = str(context["discriminator"]).strip("'")
        what = (
            f"{discriminator!r} is required and missing; one of {', '.join(_tags(annotation, discriminator))}"
        )
    elif kind == "contradiction":
        location = (*location, *context["at"])
        what = details["msg"]
    elif kind == "value_error":
        what = str(context["error"])
    else:
        what = _EXPECTED.get(kind, details["msg"]) + _got(details, location)
    return location, what


def _unknown(noun: str, found: str, allowed: Iterable[str]) -> str:
    """Say that `found` is unknown, what is allowed, and what was probably meant."""
    choices = list(allowed)
    near = get_close_matches(found, choices, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {noun} {found!r}; allowed here: {', '.join(choices)}{meant}"


def _got(details: ErrorDetails, location: Location) -> str:
    """Return ` (got …)`, with the value itself only where it is no secret."""
    found, kind = details["input"], details["type"]
    if kind == "missing":
        return ""
    shape = _KINDS.get(type(found).__name__, "something else")
    hidden = any(step in _SECRET for step in location)
    if isinstance(found, bool):
        shown = "true" if found else "false"
        if kind == "literal_error":
            shown += ": YAML reads a bare on, off, yes or no so; put it in quotes"
    elif not hidden and (
        isinstance(found, int | float) or (isinstance(found, str) and kind.startswith(_SHOWN_TEXT))
    ):
        shown = repr(found)
    else:
        shown = shape
    return f" (got {shown})"


def _trace(root: type[BaseModel], loc: Sequence[str | int]) -> tuple[Location, type[BaseModel] | None, Any]:
    """Follow pydantic's `loc` through the models.

    It holds more than the way through the file: the tag of a union's member, `[key]` for the key of a
    mapping. Returns the way through the file, the model in which its last step stands, if any, and the
    type of what stands there.
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
            annotation = next((member for member in arguments if _has_tag(_bare(member), str(step))), None)
            continue
        else:
            owner = None
            annotation = arguments[-1 if get_origin(annotation) is dict else 0] if arguments else None
        location.append(step)
    return tuple(location), owner, _bare(annotation)


def _tags(union: Any, discriminator: str) -> list[str]:
    """Return what `discriminator` may be in the members of `union`."""
    fields = [_bare(member).model_fields[discriminator] for member in get_args(union)]
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
    """Tell whether a field of the model `member` can only be `tag`, as a union's discriminator is."""
    if not (isinstance(member, type) and issubclass(member, BaseModel)):
        return False
    kinds = [field.annotation for field in member.model_fields.values()]
    return any(get_origin(kind) is Literal and tag in get_args(kind) for kind in kinds)
