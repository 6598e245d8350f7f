"""The records of trimming, its input and its decisions: `history + policy + context -> plan -> view`.

A position is an index into the log of one branch: 0 is its oldest message, instructions not counted. A place is
an index into what is left of the log, without its gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final, Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from proxy.dialects import Dialect, Message

SummaryRole: TypeAlias = Literal["merge", "system", "user"]  # `merge`: the end of the instructions

SUMMARIZE: Final = "summarize"
HIDDEN_ROUNDS: Final = "hidden_rounds"  # stands for an edit's type in changes that drop hidden rounds

Count = Callable[[Message], int]  # counts the tokens of one message for the upstream's model


class Size(Struct, frozen=True, kw_only=True):
    """The size of a view."""

    tokens: int  # tokens, including instructions and tools
    messages: int  # messages of the log
    tool_calls: int = 0  # tool results among them; 0 if they were not counted


PriceSource: TypeAlias = Literal["known", "configured", "assumed"]  # `assumed`: the model's prices are unknown


class Step(Struct, frozen=True, kw_only=True):
    """A price step: a request with more than `above` input tokens costs `factor` times as much, all of it."""

    above: int  # input tokens, including cached ones; the step applies to requests with more
    factor: float  # price of input above it, relative to the price below every step


class Prices(Struct, frozen=True, kw_only=True):
    """Prices of tokens, relative to an uncached input token (= 1)."""

    read: float  # a token that is read from the provider's cache; 1 if the model has no cache
    write: float  # a token that is written to the cache; 1 if writing is free: it then costs only its input
    output: float  # a token of output
    lifetime: float  # seconds without a request after which the provider's cache is cold
    minimum: int  # tokens of the shortest prefix that the provider caches
    steps: tuple[Step, ...] = ()  # in rising order of `above`
    served: float = 1.0  # observed hit rate: the share of the tokens expected in the cache that really were there
    source: PriceSource = "assumed"  # where the prices come from; a receipt warns if they are assumed

    def factor(self, tokens: int) -> float:
        """Return the price factor of a request with `tokens` input tokens; 1 below every step."""
        return next((step.factor for step in reversed(self.steps) if tokens > step.above), 1.0)


ASSUMED: Final = Prices(read=0.1, write=1.0, output=4.0, lifetime=300.0, minimum=1024)
"""The most common prices, used for models whose prices are unknown."""


class Change(Struct, frozen=True, kw_only=True):
    """One decision of one edit about one message."""

    position: int  # position of the message; a place while a trim is under way
    edit: str  # the `type` of the edit that decided it
    reason: str  # the reason, in words for the receipt
    message: Message | None  # what is sent in its place; None if nothing is
    tokens_before: int  # tokens at this position before the change
    tokens_after: int  # tokens at this position after the change; 0 if the message is removed

    @property
    def freed(self) -> int:
        """Tokens that the change saves; negative if it adds some."""
        return self.tokens_before - self.tokens_after

    def at(self, position: int) -> Change:
        """Return the same change with another `position`."""
        return self if self.position == position else replace(self, position=position)


class Hidden(Struct, frozen=True, kw_only=True):
    """Tool rounds of one reply that the proxy answered itself and did not show to the client.

    Rounds that call only the proxy's own tools are sent `before` the reply. If one reply calls the client's tools and
    the proxy's, `reply` holds all the calls, and the results of the proxy's calls are sent `after` it.
    """

    before: tuple[Message, ...]  # sent before the reply: assistant messages with calls, each with its results
    reply: Message | None  # sent instead of the reply; None if the reply is sent as it is
    after: tuple[Message, ...]  # sent right after the reply: results of the calls that the client did not see
    tokens: int  # tokens that all this adds to those of the reply

    @property
    def messages(self) -> int:
        """The number of messages that this adds."""
        return len(self.before) + len(self.after)


class Entry(Struct, frozen=True, gc=False, kw_only=True):
    """One message of the branch, as trimming sees it.

    It is never part of a reference cycle, so the garbage collector does not track it.
    """

    message: Message  # the message as it is sent if nothing is trimmed, without our own fields
    tokens: int  # its tokens
    ref: str  # the name under which its original can be read again (`GET /sessions/{id}/refs/{ref}`)
    position: int  # position in the log of the branch, even if the given entries begin later
    arrival: tuple[Change, ...] | None = None  # what `on_arrival` decided; None if it is sent for the first time
    agent: str | None = None  # the agent named in the message as its author
    is_internal: bool = False  # whether the message is marked as not shown to users
    hidden: Hidden | None = None  # hidden rounds that are sent with it, until it is changed or dropped


class Gap(Struct, frozen=True, kw_only=True):
    """Adjacent messages that are no longer sent, with their totals."""

    start: int  # position of the first one
    stop: int  # position after the last one
    edit: str  # the `type` of the edit that dropped them; if several did, of the one that dropped most
    reason: str  # that edit's reason
    tokens: int  # their tokens if nothing were trimmed
    tool_calls: int  # tool results among them

    @property
    def messages(self) -> int:
        """The number of messages in the gap."""
        return self.stop - self.start

    def part(self, start: int, messages: int) -> Gap:
        """Return a part of the gap. Its totals are a proportional share, since those of each message are not stored."""
        share = messages / self.messages
        tokens, tool_calls = round(self.tokens * share), round(self.tool_calls * share)
        return replace(self, start=start, stop=start + messages, tokens=tokens, tool_calls=tool_calls)


class StaleRange(Struct, frozen=True, kw_only=True):
    """A part of a log whose reasoning is left out."""

    start: int  # position of its first message
    stop: int  # position after its last message


class Summary(Struct, frozen=True, kw_only=True):
    """A summary that is sent in place of the beginning of a log."""

    text: str  # with its heading
    role: SummaryRole
    until: int  # position of the first message that it does not cover
    tokens: int  # tokens of the summary as it is sent
    kind: Literal["statistics", "model"]
    covered_messages: int  # number of messages that it replaces
    covered_tokens: int  # their tokens
    generation: int = 1  # length of its chain of predecessors, itself included
    state: Mapping[str, Any] = {}  # JSON from which the next summary of kind `statistics` is made
    model: str | None = None  # the model that made it; None if no model did

    def message(self, dialect: Dialect) -> Message:
        """Return a message that holds the summary. One with role `merge` is only for counting, or if it leads alone."""
        return dialect.spoken("user" if self.role == "user" else "system", self.text)


class ReadySummary(Struct, frozen=True, kw_only=True):
    """A summary by a model of the beginning of the branch. The next trim may use it."""

    text: str  # with its heading, as it is sent
    tokens: int  # tokens of the summary as it is sent
    until: int  # position of the first message that it does not cover
    model: str  # the model that made it
    covered_messages: int  # messages that it stands for: all before `until`
    covered_tokens: int  # their tokens
    generation: int = 1  # length of its chain of predecessors, itself included
    asked: bool = False  # whether a user or the model asked for it: then it is used at once, whatever the trigger says


class SummaryRequest(Struct, frozen=True, kw_only=True):
    """A summary that a model should make. The caller of the planner may fulfil it or ignore it."""

    stop: int  # position of the first message that it must not cover
    room: int  # its maximum size in tokens, including the heading
    urgent: bool  # whether the log is trimmed now and would have used the summary


class Outlay(Struct, frozen=True, kw_only=True):
    """The estimated cost of input at certain prices, in tokens of uncached input."""

    untrimmed: float  # cost if nothing had been trimmed
    saved: float  # what trimming has saved of that; negative if trimming has cost more than it saved so far


class Account(Outlay, frozen=True, kw_only=True):
    """The cost of a branch's input up to a request."""

    turns: int  # number of requests
    worst: Outlay | None = None  # the same at the prices at which trims pay least; None in old stored records


UNTRIMMED: Final = "untrimmed:"
"""Prefix of a cut's version. It means: do not trim, since upstream refused a request trimmed by this version."""


class Cut(Struct, frozen=True, kw_only=True):
    """The trim boundary, and how the messages before it are trimmed: `trim(A[:position]) + A[position:]`.

    While the policy keeps its version, the next trim keeps this and adds to it. Spans that are not sent at all are in
    `gaps`; all other changes of messages are in `changes`.
    """

    position: int  # number of messages of the log before the cut
    policy: str  # name of the policy
    version: str  # version of the policy that made it
    changes: tuple[Change, ...]  # changes of messages outside the gaps, by position; those of one message in order
    tokens: int  # tokens of the whole view right after the trim, including instructions and tools
    messages: int  # messages of the view right after the trim
    tool_calls: int  # tool results of the view right after the trim
    gaps: tuple[Gap, ...] = ()  # whole spans that are not sent, by position; dropped by this trim or an earlier one
    summary: Summary | None = None  # sent in place of some of them
    account: Account | None = None  # cost of input up to this trim; None if it was not computed
    stale: tuple[StaleRange, ...] = ()
    """Where reasoning is left out, by position. It was made before a trim changed something in front of it."""


class PlanningContext(Struct, frozen=True, kw_only=True):
    """Everything outside the history and the policy that trimming needs to know. Trimming does no I/O."""

    count: Count  # counts the tokens of a message that an edit made
    fixed_tokens: int = 0  # tokens of instructions and tools, which are sent with the log
    context_window: int | None = None  # the model's context window in tokens, if known; a `ratio` needs it
    agent: str | None = None  # name of the requesting agent
    idle: float | None = None  # seconds since the session's last request; None if there was none, or it is unknown
    prices: Prices | None = None  # prices of the model's input; `cost: auto` needs them
    scale: float = 1.0  # upstream's token count divided by ours; limits are in upstream's tokens
    ready_summary: ReadySummary | None = None  # the newest summary by a model on the branch that the policy may use
    keeps: bool = True  # whether a new cut is kept for the next request; if not, `cost: auto` never pays
    keeps_loop: bool = False  # whether the reasoning of a tool loop under way must be sent
    binds_loop: bool = False  # whether that reasoning is refused behind a changed prefix: no trim before the loop ends
    fork: int | None = None
    """Position at which this request's branch leaves others. If a trim changes nothing after it, the cut is put there,
    so that all these branches can use it."""


class Plan(Struct, frozen=True, kw_only=True):
    """The decisions for one request."""

    policy: str  # name of the policy; `off` if trimming is bypassed
    version: str  # version of the policy; empty for `off`
    cut: Cut | None = None  # the cut in force for this request: the current one, or the new one after a trim
    trimmed: bool = False  # whether this request was trimmed: then the cut is new
    fired: str = ""  # what fired, in words ("tokens 51234 > 50000"); empty if nothing did
    arrivals: tuple[Change, ...] = ()  # changes by `on_arrival` outside `earlier`, recorded or new, by position
    tokens_before: int  # tokens of the request if nothing were trimmed, but with the tools that are really sent
    tokens_sent: int  # tokens of the view, after repairs
    view: tuple[Message, ...]  # the messages of the log that are sent, in order, without instructions
    warnings: tuple[str, ...] = ()  # repairs, and what could not be done, in words
    decided: tuple[tuple[Change, ...], ...] = ()  # for each given entry the decisions of `on_arrival`, to be recorded
    made: tuple[Change, ...] = ()  # changes by the edits in this request's trim, by position
    earlier: tuple[Gap, ...] = ()  # gaps of earlier trims within the part of the log that the request covers
    messages_before: int = 0  # messages in the part of the log that the request covers, including those in gaps
    target: int | None = None  # maximum tokens after a trim, as upstream counts them
    stable_ends: tuple[int, ...] = ()
    """Message counts from the start of the view. No later trim changes anything before one of them while the policy
    stays the same."""
    summary: Summary | None = None  # the summary in force; the caller adds one with role `merge` to the instructions
    summary_request: SummaryRequest | None = None  # a summary that a model should make; None if none is due
    needs_whole: bool = False  # whether a trim needs every entry of the log: plan again with all of them

    @property
    def changes(self) -> tuple[Change, ...]:
        """The changes of single messages in this view: those on arrival, then the others by position."""
        if not self.trimmed:
            return self.arrivals + (self.cut.changes if self.cut is not None else ())
        new = set(self.made)
        old = [change for change in self.cut.changes if change not in new] if self.cut is not None else []
        return self.arrivals + tuple(sorted([*old, *self.made], key=attrgetter("position")))

    @property
    def edits(self) -> tuple[str, ...]:
        """The types of the edits that changed something, each once: those on arrival, then by first position."""
        if self.cut is None and self.summary is None and not (self.arrivals or self.earlier or self.made):
            return ()  # the common case
        first: dict[str, int] = {}  # by edit, the first position that it changed
        places = [(gap.edit, gap.start) for gap in self.earlier]
        for changes in (self.cut.changes if self.cut is not None else (), self.made):
            places += [(change.edit, change.position) for change in changes]
        for edit, position in places:
            if position < first.get(edit, position + 1):
                first.pop(edit, None)  # re-inserted, so that edits with the same position keep the order found here
                first[edit] = position
        if self.summary is not None and SUMMARIZE not in first:
            first[SUMMARIZE] = 0  # everything it covers was dropped by other edits before
        names = [change.edit for change in self.arrivals] + sorted(first, key=first.__getitem__)
        # Hidden rounds are internal: no policy names the edit that drops them.
        return tuple([name for name in dict.fromkeys(names) if name != HIDDEN_ROUNDS])
