"""A session that grows request by request, as an agent has it, and what must hold of each plan for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from msgspec.structs import replace

from proxy.conversation import rounds, spans
from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.dialects.chat.protocol import CHAT
from proxy.trimming.history import outside_gaps
from proxy.trimming.model import Change, Entry, Hidden, Plan, PlanningContext, ReadySummary, SummaryRequest
from proxy.trimming.planner import compaction, merged, plan
from proxy.trimming.policy import Policy
from proxy.trimming.trim import protected
from tests.support import api_rules
from tests.trimming.notation import DIALECT


@dataclass(frozen=True)
class Request:
    """One request of a session, and what was planned for it."""

    entries: tuple[Entry, ...]
    """The whole log."""
    plan: Plan
    last: Plan | None
    """What was planned for the request before it."""


def hidden(entry: Entry, known: PlanningContext) -> Hidden:
    """Return rounds with a tool of the proxy's that a client was not shown, of an assistant message.

    One stands before it; where it calls tools itself, it called the proxy's in the same breath.
    """
    message, name = entry.message, f"own_{entry.position}"
    call = {"id": name, "type": "function", "function": {"name": "recall_context", "arguments": "{}"}}
    first = {**call, "id": f"{name}_first"}
    before = (
        ChatMessage.of({"role": "assistant", "content": None, "tool_calls": [first]}),
        ChatMessage.of({"role": "tool", "tool_call_id": first["id"], "content": f"of {entry.ref}"}),
    )
    reply: Message | None = None
    after: tuple[Message, ...] = ()
    if message.data.get("tool_calls"):
        reply = message.replacing("tool_calls", [call, *message.data["tool_calls"]])
        after = (ChatMessage.of({"role": "tool", "tool_call_id": name, "content": "nothing was found"}),)
    more = sum(map(known.count, (*before, *after)))
    return Hidden(
        before=before,
        reply=reply,
        after=after,
        tokens=more + (known.count(reply) if reply is not None else entry.tokens) - entry.tokens,
    )


def prepared(wanted: SummaryRequest, known: PlanningContext, *, asked: bool = False) -> ReadySummary:
    """Return a summary such as a model would have made it."""
    text = "s" * max(1, min(wanted.room - 12, 300))
    tokens = known.count(ChatMessage.of({"role": "system", "content": text}))
    return ReadySummary(
        text=text,
        tokens=tokens,
        until=wanted.stop,
        model="small",
        covered_messages=wanted.stop,
        covered_tokens=1000,
        asked=asked,
    )


def requests(
    log: Sequence[Entry],
    stops: Iterable[int],
    policy: Policy,
    known: PlanningContext,
    *,
    idle: Sequence[float] = (0,),
    asking: Sequence[bool] = (False,),
) -> Iterator[Request]:
    """Yield each request of a session; it speaks of the log up to each of `stops`, put together by the store.

    What lies in the gaps of the cut is left out, unless the plan asks for it. The session is `idle` for so
    many seconds before each request, in turns. A summary that is wanted is there at the next request; where
    it is `asking`, in turns too, somebody asks for one.
    """
    arrivals: list[tuple[Change, ...]] = []
    last: Plan | None = None
    made_by_model: ReadySummary | None = None
    for number, stop in enumerate(stops):
        pause = idle[number % len(idle)] if last is not None else None
        asked = replace(known, idle=pause, ready_summary=made_by_model)
        cut = last.cut if last is not None else None
        whole = [replace(each, arrival=then) for each, then in zip(log, arrivals, strict=False)]
        whole += log[len(arrivals) : stop]
        left = outside_gaps(whole, cut.gaps, attrgetter("position")) if cut is not None else whole
        made = plan(left, policy, "p", asked, cut, composed=True)
        if made.needs_whole:
            left, made = whole, plan(whole, policy, "p", asked, cut, composed=True)
        assert made == plan(left, policy, "p", asked, cut, composed=True)
        decided = {entry.position: each for entry, each in zip(left, made.decided, strict=True)}
        arrivals += [decided[position] for position in range(len(arrivals), stop)]
        yield Request(entries=tuple(whole), plan=made, last=last)
        wanted, is_asked = made.summary_request, asking[number % len(asking)]
        if is_asked:
            wanted = compaction(left, policy, asked, made.cut) or wanted
        if wanted is not None:
            assert 0 < wanted.stop <= stop
            made_by_model = prepared(wanted, known, asked=is_asked)
        last = made


def check(request: Request, policy: Policy, known: PlanningContext, instructions: Sequence[Message] = ()) -> None:
    """Check that a plan keeps what is promised of every plan."""
    made = request.plan
    sent = tuple(instructions)
    if made.summary is not None and made.summary.role == "merge":
        sent = merged(sent, made.summary, DIALECT)
    assert CHAT.problems(made.view) == []
    if sent or made.view:
        body = {"model": "m", "messages": [message.data for message in (*sent, *made.view)]}
        api_rules.check(body, plain=False, lenient=True)
    check_counts(made, known)
    check_target(made, policy, known)
    check_protected(request, policy)
    check_prefix(made, request.last, request.entries)


def check_counts(made: Plan, known: PlanningContext) -> None:
    """Check that the tokens that are told are those of what is sent."""
    summed = made.summary.tokens if made.summary is not None and made.summary.role == "merge" else 0
    assert made.tokens_sent == known.fixed_tokens + summed + sum(map(known.count, made.view))
    if made.trimmed:
        assert made.cut is not None
        assert (made.cut.tokens, made.cut.messages) == (made.tokens_sent, len(made.view))
        assert made.cut.summary == made.summary


def check_target(made: Plan, policy: Policy, known: PlanningContext) -> None:
    """Check that a target is met, or that it is told by how much it is missed."""
    if made.trimmed and policy.target is not None:
        limit = policy.target.within(known.context_window)
        missed = any(warning.startswith("target missed") for warning in made.warnings)
        assert missed == (limit is not None and made.tokens_sent > int(limit / known.scale))


def check_protected(request: Request, policy: Policy) -> None:
    """Check that no move touches what is protected as it stands then; a message that is pinned stays so."""
    made, last = request.plan, request.last
    if not made.trimmed:
        return
    cut = last.cut if last is not None else None
    same = cut is not None and cut.version == policy.version
    left = outside_gaps(request.entries, cut.gaps, attrgetter("position")) if cut is not None and same else None
    entries = request.entries if left is None else left
    log = [entry.message for entry in entries]
    kept = {entries[place].position for place in protected(log, spans(log), rounds(log), policy)}
    assert not kept & {change.position for change in made.made}


def check_prefix(made: Plan, last: Plan | None, entries: Sequence[Entry] = ()) -> None:
    """Check that a view begins with the last one, up to the first message that a move changes newly."""
    if last is None:
        return
    if not made.trimmed:
        assert made.view[: len(last.view)] == last.view
        assert made.summary == last.summary
        return
    same = last.cut is not None and last.cut.version == made.version
    if made.summary != last.summary or not (same or last.cut is None):
        return
    if any(warning.startswith("repaired") for warning in (*made.warnings, *last.warnings)):
        return
    assert made.cut is not None
    first = min((change.position for change in made.made), default=made.cut.position)
    ahead = len(standing_before(last, first, entries))
    assert made.view[:ahead] == last.view[:ahead]


def standing_before(made: Plan, position: int, entries: Sequence[Entry] = ()) -> range:
    """Return the places in the view of what stands before this position; there must be no repair in it."""
    cut = made.cut
    ahead = int(made.summary is not None and made.summary.role != "merge")
    changed = {change.position for change in cut.changes} if cut is not None else set[int]()
    for entry in entries[:position]:
        if entry.hidden is not None and entry.position not in changed:
            ahead += len(entry.hidden.before) + len(entry.hidden.after)
    if cut is None:
        return range(min(position + ahead, len(made.view)))
    gone = {at for gap in cut.gaps for at in range(gap.start, gap.stop)}
    last = {change.position: change.message for change in cut.changes}
    gone.update(at for at, message in last.items() if message is None)
    for entry in entries[:position]:
        if entry.hidden is not None and entry.position in gone - changed:
            ahead -= len(entry.hidden.before) + len(entry.hidden.after)
    return range(min(ahead + position - sum(at < position for at in gone), len(made.view)))
