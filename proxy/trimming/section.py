"""One mapping of a policy in the configuration file, and the kinds of numbers that stand in it.

It knows how a mistake of the file becomes an error: unknown keys are refused, and so is a truth
value where a number belongs. It does not know any setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeAlias

from pydantic import BaseModel, BeforeValidator, Field
from pydantic_core import PydanticCustomError


class Section(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """A mapping whose keys are fields: frozen, unknown keys refused, docstrings in the JSON Schema.

    The classes say `frozen=True` once more: type checkers look for it in each of them.
    """

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other settings; what follows from the settings is worked out for them anew."""
        copied = super().model_copy(update=update, deep=deep)
        kept = vars(copied)  # with the settings there lies what was worked out once, and it was copied too
        for name in kept.keys() - type(self).model_fields.keys():
            del kept[name]
        return copied


def contradiction(message: str, *at: str | int) -> PydanticCustomError:
    """Return an error that names the value at fault, seen from the model that finds it (context `at`)."""
    return PydanticCustomError("contradiction", "{message}", {"message": message, "at": at})  # pyright: ignore[reportArgumentType] - a LiteralString is asked for, and is given


def _no_truth_value(value: object) -> object:
    """Refuse what YAML makes of an unquoted yes, no, on or off: Python would count true as 1."""
    if isinstance(value, bool):
        raise ValueError("a number is needed here, not true or false (YAML reads yes, no, on, off as these)")  # noqa: TRY004  pydantic turns a ValueError, not a TypeError, into an error of the file
    return value


Positive: TypeAlias = Annotated[int, Field(gt=0), BeforeValidator(_no_truth_value)]
"""A whole number, at least 1."""

Natural: TypeAlias = Annotated[int, Field(ge=0), BeforeValidator(_no_truth_value)]
"""A whole number, 0 included."""

Share: TypeAlias = Annotated[float, Field(gt=0, le=1), BeforeValidator(_no_truth_value)]
"""A part of a whole: above 0, at most 1."""
