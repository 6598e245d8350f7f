"""What trimming reads and what it decides, as plain records: `history + policy + context -> plan -> view`.

Positions are those of the log of one branch: 0 is its oldest message, instructions not counted. A place is an
index into what is left of the log.
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
HIDDEN_ROUNDS: Final = "hidden_rounds"  # what stands in the place of an edit's type where hidden rounds were let go

Count = Callable[[Message], int]  # counts the tokens of one message as the upstream's model would


class Size(Struct, frozen=True, kw_only=True):
    """How much is sent."""

    tokens: int  # tokens, those of instructions and tools included
    messages: int  # messages of the log
    tool_calls: int = 0  # tool results among them; 0 where nobody asks for them


PriceSource: TypeAlias = Literal["known", "configured", "assumed"]  # `assumed`: nobody knows


class Step(Struct, frozen=True, kw_only=True):
    """A step of the price: above so many input tokens the whole request costs `factor` times as much."""

    above: int  # input tokens, cached ones included, up to which it does not hold
    factor: float  # what input costs above it, in units of what it costs below every step


class Prices(Struct, frozen=True, kw_only=True):
    """What input costs, relative to an uncached input token (= 1)."""

    read: float  # a token that is read from the provider's cache; 1 where the model has none
    write: float  # a token that is written to the cache; 1 where writing is free, since it costs just its input
    output: float  # a token of output
    lifetime: float  # seconds without a request after which the provider's cache is cold
    minimum: int  # tokens of the shortest prefix that is cached
    steps: tuple[Step, ...] = ()  # in rising order of `above`
    served: float = 1.0  # part of the tokens that should be in the provider's cache that are, as far as was learnt
    source: PriceSource = "assumed"  # where they come from; a receipt says so when they are assumed

    def factor(self, tokens: int) -> float:
        """Return what a request of `tokens` input tokens costs, relative to one below every step."""
        return next((step.factor for step in reversed(self.steps) if tokens > step.above), 1.0)


ASSUMED: Final = Prices(read=0.1, write=1.0, output=4.0, lifetime=300.0, minimum=1024)
"""The most common prices, for models of which none are known."""


class Change(Struct, frozen=True, kw_only=True):
    """One decision of one edit about one message."""

    position: int  # place of the message in the log of the branch
    edit: str  # the `type` of the edit that decided it
    reason: str  # why, in words for the receipt
    message: Message | None  # what is sent in its place; None where nothing is
    tokens_before: int  # tokens of what stood there before this change
    tokens_after: int  # tokens of what stands there now; 0 where nothing does

    @property
    def freed(self) -> int:
        """Tokens that it saves; negative where it costs some."""
        return self.tokens_before - self.tokens_after

    def at(self, position: int) -> Change:
        """Return the same change of the message at `position`."""
        return self if self.position == position else replace(self, position=position)


class Hidden(Struct, frozen=True, kw_only=True):
    """Tool rounds that the proxy answered itself, and the client was not shown: they belong to one reply.

    Rounds of the proxy's own alone stand `before` the reply. Where a reply calls tools of the client and of
    the proxy at once, the form with all the calls stands for it, and results of the proxy's own `after` it.
    """

    before: tuple[Message, ...]  # what is sent before the reply: assistant messages with calls, each with its results
    reply: Message | None  # what is sent for the reply itself; None: the reply as it is
    after: tuple[Message, ...]  # what is sent right after it: results of the calls that the client did not see
    tokens: int  # how many tokens all that adds to those of the reply

    @property
    def messages(self) -> int:
        """How many messages all that adds."""
        return len(self.before) + len(self.after)


class Entry(Struct, frozen=True, gc=False, kw_only=True):
    """One message of the branch, as trimming sees it. No cycle leads through it: the garbage collector skips it."""

    message: Message  # the message as it is sent when nothing is trimmed, without our own fields
    tokens: int  # its tokens
    ref: str  # the name under which its original can be read again (`GET /sessions/{id}/refs/{ref}`)
    position: int  # place of the message in the log of the branch, wherever the entries that are given begin
    arrival: tuple[Change, ...] | None = None  # what `on_arrival` decided; None where it is sent for the first time
    agent: str | None = None  # name of the agent that the message says it is from
    is_internal: bool = False  # whether it is marked as one that no user is shown
    hidden: Hidden | None = None  # what is sent with it that the client was not shown, until it is changed or dropped


class Gap(Struct, frozen=True, kw_only=True):
    """Messages that lie side by side and are not sent any more, summed up."""

    start: int  # position of the first of them
    stop: int  # position after the last one
    edit: str  # the `type` of the edit that dropped them; where many edits took turns, of the one that dropped most
    reason: str  # why, in that edit's words
    tokens: int  # their tokens, as they would be sent if nothing were trimmed
    tool_calls: int  # tool results among them

    @property
    def messages(self) -> int:
        """How many they are."""
        return self.stop - self.start

    def part(self, start: int, messages: int) -> Gap:
        """Return a part of the gap with its share of the sums: what each message had is not known."""
        share = messages / self.messages
        tokens, tool_calls = round(self.tokens * share), round(self.tool_calls * share)
        return replace(self, start=start, stop=start + messages, tokens=tokens, tool_calls=tool_calls)


class StaleRange(Struct, frozen=True, kw_only=True):
    """A part of a log."""

    start: int  # position of its first message
    stop: int  # position after its last message


class Summary(Struct, frozen=True, kw_only=True):
    """What is sent in the place of the beginning of a log."""

    text: str  # with its heading
    role: SummaryRole
    until: int  # position of the first message that it does not cover
    tokens: int  # tokens of what is sent of it
    kind: Literal["statistics", "model"]
    covered_messages: int  # messages that are not sent, but summed up here
    covered_tokens: int  # their tokens
    generation: int = 1  # how many summaries it is made from, itself included
    state: Mapping[str, Any] = {}  # JSON from which the next one is made; of `statistics`
    model: str | None = None  # the model that made it; None where none did

    def message(self, dialect: Dialect) -> Message:
        """Return the message that holds it; of a merged one, the message by which it is counted."""
        return dialect.spoken("user" if self.role == "user" else "system", self.text)


class ReadySummary(Struct, frozen=True, kw_only=True):
    """A summary that a model made of the beginning of the branch; the next trim may use it."""

    text: str  # with its heading, as it is sent
    tokens: int  # tokens of what is sent of it
    until: int  # position of the first message that it does not cover
    model: str  # the model that made it
    covered_messages: int  # messages that it stands for: all before `until`
    covered_tokens: int  # their tokens
    generation: int = 1  # how many summaries it is made from, itself included
    asked: bool = False  # whether a user or the model asked for it: it is then used at once, whatever the trigger says


class SummaryRequest(Struct, frozen=True, kw_only=True):
    """A summary that a model should make. Whoever has the plan sees to it, or not."""

    stop: int  # position of the first message that it is not to cover
    room: int  # tokens that it may have at most, heading included
    urgent: bool  # whether the log is trimmed now, and would have used it


class Outlay(Struct, frozen=True, kw_only=True):
    """What input has cost at some prices, about; in tokens of uncached input."""

    untrimmed: float  # what it would have cost if nothing had been trimmed
    saved: float  # what trimming saved of that; negative where it cost more so far than it saved


class Account(Outlay, frozen=True, kw_only=True):
    """What the input of a branch has cost up to a request."""

    turns: int  # requests
    worst: Outlay | None = None  # the same at the prices at which trims pay least; None in what is stored since long


UNTRIMMED: Final = "untrimmed:"
"""What the version of a cut begins with under which nothing is trimmed: upstream refused what that version made."""


class Cut(Struct, frozen=True, kw_only=True):
    """Where the view is trimmed up to, and how: `trim(A[:position]) + A[position:]`.

    As long as the policy's version stays, so does what is here: the next trim adds to it. Spans that are not
    sent at all are `gaps`; what else was done to messages is in `changes`.
    """

    position: int  # number of messages of the log that lie before the cut
    policy: str  # name of the policy
    version: str  # version of the policy that made it
    changes: tuple[Change, ...]  # what is done to messages outside the gaps, by position; several of one in order
    tokens: int  # tokens of the whole view, fixed ones included, right after the trim
    messages: int  # messages of the view right after the trim
    tool_calls: int  # tool results of the view right after the trim
    gaps: tuple[Gap, ...] = ()  # what is not sent at all, by position: whole spans, by this trim or by an earlier one
    summary: Summary | None = None  # what is sent in the place of some of that
    account: Account | None = None  # what input had cost when it was made; None where nobody reckoned
    stale: tuple[StaleRange, ...] = ()
    """Where reasoning is left out, by position: it stands behind what a trim has changed, and was made before that."""


class PlanningContext(Struct, frozen=True, kw_only=True):
    """What trimming must be told, since it asks nobody."""

    count: Count  # counts a message that an edit made
    fixed_tokens: int = 0  # tokens of what is sent beside the log: instructions and tools
    context_window: int | None = None  # tokens that the model takes, where known; a `ratio` needs it
    agent: str | None = None  # name of the agent that asks
    idle: float | None = None  # seconds since the session's last request; None where there was none, or nobody knows
    prices: Prices | None = None  # what the model's input costs; `cost: auto` needs it
    scale: float = 1.0  # how many tokens upstream counts for one that is counted here: limits are in upstream's
    ready_summary: ReadySummary | None = None  # the newest summary by a model on the branch that the policy may use
    keeps: bool = True  # whether a new cut is kept for the next request; where it is not, `cost: auto` never pays
    keeps_loop: bool = False  # whether the reasoning of a tool loop that is under way must be sent
    binds_loop: bool = False  # whether that is also refused behind anything else: no trim before the loop's end
    fork: int | None = None
    """Position at which this request leaves others. If a trim changes nothing after it, the cut is put there, so
    that all of them can use it."""


class Plan(Struct, frozen=True, kw_only=True):
    """What was decided for one request."""

    policy: str  # name of the policy, `off` where trimming is bypassed
    version: str  # version of the policy; empty for `off`
    cut: Cut | None = None  # the cut in force for this request: the current one, or the new one after a trim
    trimmed: bool = False  # whether this request was trimmed: then the cut is new
    fired: str = ""  # what fired, in words ("tokens 51234 > 50000"); empty where nothing did
    arrivals: tuple[Change, ...] = ()  # what `on_arrival` changes outside `earlier`, recorded or now, by position
    tokens_before: int  # tokens of the request if nothing were trimmed; of tools those that are sent
    tokens_sent: int  # tokens of the view, repairs included
    view: tuple[Message, ...]  # the messages of the log that are sent, in order; instructions not among them
    warnings: tuple[str, ...] = ()  # what was repaired or could not be done, in words
    decided: tuple[tuple[Change, ...], ...] = ()  # for each given entry what `on_arrival` decided: to be recorded
    made: tuple[Change, ...] = ()  # what the edits decided at this request's trim, message by message, by position
    earlier: tuple[Gap, ...] = ()  # what earlier trims dropped of the messages that the request speaks of
    messages_before: int = 0  # messages of the log that the request speaks of, those in gaps included
    target: int | None = None  # how many tokens were to be sent at most after a trim, as upstream counts them
    stable_ends: tuple[int, ...] = ()
    """Message counts from the start of the view: up to each of them no later trim changes anything while the
    policy stays."""
    summary: Summary | None = None  # the summary in force; one with role `merge` is still to be added to instructions
    summary_request: SummaryRequest | None = None  # a summary that a model should make; None where none is due
    needs_whole: bool = False  # whether to decide again with every entry of the log, since it must be trimmed

    @property
    def changes(self) -> tuple[Change, ...]:
        """Changes of single messages that led to this view: those on arrival, then the others by position."""
        if not self.trimmed:
            return self.arrivals + (self.cut.changes if self.cut is not None else ())
        new = set(self.made)
        old = [change for change in self.cut.changes if change not in new] if self.cut is not None else []
        return self.arrivals + tuple(sorted([*old, *self.made], key=attrgetter("position")))

    @property
    def edits(self) -> tuple[str, ...]:
        """The types of the edits that changed something, each once, in the order of what they changed."""
        if self.cut is None and self.summary is None and not (self.arrivals or self.earlier or self.made):
            return ()  # nearly always
        first: dict[str, int] = {}  # by edit, the first position that it changed
        places = [(gap.edit, gap.start) for gap in self.earlier]
        for changes in (self.cut.changes if self.cut is not None else (), self.made):
            places += [(change.edit, change.position) for change in changes]
        for edit, position in places:
            if position < first.get(edit, position + 1):
                first.pop(edit, None)  # of those at one place, the one that is met there first comes first
                first[edit] = position
        if self.summary is not None and SUMMARIZE not in first:
            first[SUMMARIZE] = 0  # all that it stands for was dropped before
        names = [change.edit for change in self.arrivals] + sorted(first, key=first.__getitem__)
        # Hidden rounds that were let go are no edit of anybody's, and nobody was shown them.
        return tuple([name for name in dict.fromkeys(names) if name != HIDDEN_ROUNDS])
