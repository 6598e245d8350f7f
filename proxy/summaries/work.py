"""What making one summary needs, and what came of it. Plain data; no rule is here."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from proxy.dialects import Message
from proxy.store import SummaryRow
from proxy.summaries.summarizer import Caller
from proxy.trimming import Summarize, SummaryRequest


@dataclass(frozen=True, slots=True)
class Given:
    """The beginning of a branch, where whoever wants the summary has it whole."""

    messages: tuple[Message, ...] = field(repr=False)
    """The untouched messages from the oldest on, at least up to what is to be covered."""
    nodes: tuple[str, ...]
    """For each of them the name that it has, or will have."""


class Work(Struct, frozen=True, kw_only=True):
    """One summary that is wanted."""

    key: str
    """The session's internal name."""
    session: str
    """The session's id, for the log."""
    tip: str
    """The end of the branch: a node at or after the last message to be covered, stored unless `given` is."""
    wanted: SummaryRequest
    edit: Summarize
    model: str
    """The model that the session's requests ask for: it will read the summary."""
    caller: Caller
    asked: bool = False
    """Whether somebody asked for it: then an earlier refusal is no reason not to try."""
    exchange: str | None = None
    """The exchange that began it."""
    attempt: SummaryRow | None = None
    """The newest attempt on this branch, where it is known: what was refused is not tried again at once."""
    given: Given | None = None
    """The messages; None: they are read from the store."""
    hint: str = ""
    """How the reader of the summary can read more, in words that are sent with it; empty where it cannot."""


class Attempt(Struct, frozen=True, kw_only=True):
    """What came of it."""

    row: SummaryRow | None
    """The summary, or an attempt that was kept with its reason; None where none was made."""
    reason: str = ""
    """Why there is no summary, in words for a receipt; empty where there is one."""
