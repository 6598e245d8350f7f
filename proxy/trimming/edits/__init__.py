"""All edits, in the list `Edit` below. `edit.py` defines the interface of an edit."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias, get_args

from pydantic import Field

from proxy.trimming.edits.clear_tool_results import ClearToolResults
from proxy.trimming.edits.compact_tool_output import CompactToolOutput
from proxy.trimming.edits.deduplicate_results import DeduplicateResults
from proxy.trimming.edits.digest_agent_calls import DigestAgentCalls
from proxy.trimming.edits.dropping import DropInternal, DropOldest, KeepRounds, KeepToolCalls, RecentWindow
from proxy.trimming.edits.edit import BaseEdit, ToolOutputEdit
from proxy.trimming.edits.evict_images import EvictImages
from proxy.trimming.edits.summarize import Summarize
from proxy.trimming.edits.truncate_tool_output import TruncateToolOutput

Edit: TypeAlias = Annotated[
    KeepToolCalls
    | ClearToolResults
    | TruncateToolOutput
    | CompactToolOutput
    | DeduplicateResults
    | DigestAgentCalls
    | DropInternal
    | EvictImages
    | KeepRounds
    | RecentWindow
    | Summarize
    | DropOldest,
    Field(discriminator="type"),
]
"""The list of all edits, distinguished by `type`. To add an edit, write a new file and add its class here."""

TOOL_OUTPUT_TYPES: Final[tuple[str, ...]] = tuple(
    each.model_fields["type"].default for each in get_args(get_args(Edit)[0]) if issubclass(each, ToolOutputEdit)
)
"""The types of the edits of tool output. Only these are allowed under `on_arrival`."""
