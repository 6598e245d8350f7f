"""Every edit there is: one file each, and one name in the list below.

keep_tool_calls         of the tool calls of the history, only the newest
truncate_tool_output    tool output over a limit of lines or bytes is cut, with a mark
drop_oldest             whole rounds from the oldest, then spans, until the target is met

edit                    what an edit is, and what an edit of tool output is
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias, get_args

from pydantic import Field

from proxy.trimming.edits.drop_oldest import DropOldest
from proxy.trimming.edits.edit import BaseEdit, ToolOutputEdit
from proxy.trimming.edits.keep_tool_calls import KeepToolCalls
from proxy.trimming.edits.truncate_tool_output import TruncateToolOutput

Edit: TypeAlias = Annotated[KeepToolCalls | TruncateToolOutput | DropOldest, Field(discriminator="type")]
"""The one list. `type` tells them apart; a new edit is a new file and its name here."""

TOOL_OUTPUT_TYPES: Final[tuple[str, ...]] = tuple(
    each.model_fields["type"].default
    for each in get_args(get_args(Edit)[0])
    if issubclass(each, ToolOutputEdit)
)
"""The types of the edits of tool output: those that may stand under `on_arrival`."""

__all__ = ["TOOL_OUTPUT_TYPES", "BaseEdit", "Edit", "ToolOutputEdit"]
