"""Turns a client's bytes into a plan. Nothing is stored or sent yet, so an error leaves no trace."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable, Collection, Hashable, Sequence
from secrets import token_hex
from typing import Final
from weakref import WeakValueDictionary

import msgspec
from cachetools import FIFOCache
from msgspec import Raw, Struct
from msgspec.structs import replace

from proxy.config import OFF, Policies, Settings
from proxy.conversation import Kind
from proxy.dialects import LONG_BODY, Dialect, Message, Request
from proxy.errors import StoreUnavailable
from proxy.models import ModelFacts
from proxy.pipeline.background import COUNTING, OFF_LOOP_BYTES, TRIMMING, compute
from proxy.pipeline.context import ClientRequest, RequestContext, free_of_charge, read_context
from proxy.pipeline.history import History, size_of
from proxy.pipeline.outage import AWAY
from proxy.pipeline.prefix import Key, KnownPrefixes, KnownRequest
from proxy.pipeline.receipt import PlanReport, observed, report_of
from proxy.pipeline.services import AppServices
from proxy.recall import offered
from proxy.store import MARK, Doubt, Packing, StandingCut, SummaryRow, SummaryStatus, session_key
from proxy.trimming import (
    Cut,
    Entry,
    Plan,
    PlannedStart,
    PlanningContext,
    Policy,
    ReadySummary,
    SummaryRequest,
    bypass,
    extended,
    plan,
    planned_start,
    untrimmed,
    without_bound_reasoning,
)
from proxy.upstream import Destination

_LOG: Final = logging.getLogger("palimpsest.clients")
_TOOLS_ABSENT: Final = "the history holds tool calls, and the request offers no tools"
FINISHED: Final = "answered from the store: the task is finished"
"""Warning of an exchange for which the upstream was not asked."""
MASKED: Final = "what was masked in the store is sent masked: the client sent only what is new"
_PRODUCT: Final = re.compile(
    r"[!-.0-~]{1,60}(?:/[A-Za-z][!-~]{0,40})?"
)  # as in `OpenAI/Python 2.0`, or `curl` of `curl/8`
_MODELS: Final = 256  # limit of remembered models that refuse trims amid a tool loop; clients choose the names
_CLIENTS: Final = 256  # limit of client types that are logged; clients choose the names
_TRIMS: Final = 64  # trims that one process remembers until they are stored; each is as long as the view


class Prepared(Struct, frozen=True, kw_only=True):
    """A request after reading, placing and planning: the first stage of an exchange."""

    received: float  # `time.monotonic()` when its body had arrived
    call: ClientRequest
    request: Request
    context: RequestContext
    history: History
    planning: PlanningContext  # what the plan was made with
    destination: Destination  # where the request is sent
    facts: ModelFacts  # about the model at that destination
    instructions_tokens: int  # tokens of the sent instructions
    report: PlanReport
    own_tools: tuple[str, ...]  # names of the proxy's own tools that the request offers
    tools: bytes | None  # the JSON text of all offered tools; None without any
    finishing: Entry | None  # the reply that finished the task, if nothing came after it; it is the answer
    removed_tools: tuple[str, ...] = ()  # names of the client's tools that the policy leaves out
    removed_tokens: int = 0  # their tokens
    packing: Packing | None = None  # of its new messages for the store, begun before the request is planned
    no_summary: str = ""
    """Why the summary that the plan asks for is not being made; empty if it is, or if the plan asks for none."""

    @property
    def stored(self) -> bool:
        """Whether the request belongs to a session. A stateless request is not stored."""
        return self.history.id is not None

    @property
    def key(self) -> str:
        """The internal name of its session."""
        return session_key(self.call.tenant, self.history.id or "", self.call.dialect.name)

    def reported(self, plan: Plan, warnings: tuple[str, ...]) -> PlanReport:
        """Return the report of another plan for this request; `warnings` are added to the plan's own."""
        return report_of(self.report.exchange, self.history, plan, self.planning, warnings, self.removed_tokens)


class Original(Struct, frozen=True, kw_only=True):
    """A request before trimming, for an upstream that refused the trimmed one."""

    plan: Plan
    waits: bool = False  # whether the trim is only postponed to the end of the current tool loop


class Preparer:
    """Prepares requests. One for the life of the process."""

    def __init__(self, settings: Settings, services: AppServices, process_mark: str) -> None:
        """Set up for the process. Exchange ids end with `process_mark`, 8 hexadecimal digits."""
        self._settings = settings
        self.policies: Final = Policies(settings.policies)
        """The policies in force; replaced when the configuration is reloaded."""
        self._services = services
        self._coalescer = PlanCoalescer()
        self._prefixes = KnownPrefixes(settings.sessions.headers)
        self._process_mark = process_mark
        self._leaves_tools_out = any(policy.tools.remove for policy in settings.policies.values())
        self._offers_tools = bool(offered(settings.virtual_tools, has_tools=True))
        self._session_header = next(iter(settings.sessions.headers), "X-Session-ID")
        self._unnamed: set[str] = set()  # types of clients that were logged
        self._binding: FIFOCache[tuple[str, str | None], bool] = FIFOCache(_MODELS)
        """(model, address) of models that refused a trim amid a tool loop.

        They require the loop's reasoning, and check what stands before it.
        """
        self._random = random.Random()  # noqa: S311 - ids are not secret, and the system's source is slower

    async def prepare(self, call: ClientRequest) -> Prepared:
        """Read a request, find its place in the history, and plan what to send."""
        received, settings, services = time.monotonic(), self._settings, self._services
        key = self._prefixes.key_of(call) if len(call.body) >= LONG_BODY else None
        request, known = await self._read(call, key)
        context = read_context(call, request, settings.sessions, self.policies)
        destination = services.upstream.destination(request.model, call.dialect.name)
        kept_there = request.untouched or request.references
        if kept_there:
            request, context = await self._with_provider(call, request, context, destination)
        facts = services.knowledge.facts_at(request.model, destination.base_url + call.dialect.requests.path)
        await services.knowledge.can_count(request.model)
        stateless = context.session is None and settings.sessions.missing == "stateless"
        own: tuple[str, ...] = ()
        offered_tools, has_tools, off = request.tools, request.has_tools, context.policy is None
        if self._offers_tools:
            mine = offered(settings.virtual_tools, has_tools=has_tools, stateless=stateless, off=off)
            offer = call.dialect.requests.offer_tools(request, mine)
            own, offered_tools = offer.names, offer.tools
        # If the policy depends on the session, it may need the whole history.
        whole = context.observes or context.select is not None
        while True:
            history = await self._history(call, request, context, known, whole=whole, stateless=stateless)
            context = context.in_session(history.placed_in)
            policy, observes = context.policy, context.observes
            packing = self._pack(call, history)
            if is_added_to := bool(request.state) and not history.arrival.expanded:  # the provider adds to the history
                context, policy, observes = replace(context, policy_name=OFF, policy=None), None, False
            if is_added_to or history.unplaced is not None:
                own, offered_tools = (), request.tools  # the proxy's own tools need the history
            removed = await self._removed(call, request, history, policy)
            tools, without = without_tools(call.dialect, offered_tools, request, removed, history.entries, own)
            planning, lead = await self._planning(request, history, tools, context.agent, facts)
            removed_tokens = await self._removed_tokens(offered_tools, tools, request.model)
            finishing = finishing_reply(history.entries, settings.finish.tools) if settings.finish.tools else None
            if finishing is not None:
                made = replace(bypass(history.entries, planning), tokens_sent=0, view=(), warnings=())
                break
            before = known.planned if known is not None else None
            history, made = await self._plan(history, context, request.model, planning, before)
            if whole or not made.needs_whole:
                break
            whole = True  # the policy changed: also load what the cut dropped, and plan again
        if key is not None and history.known is not None:
            planned = _planned(history, made, policy, planning)
            kept = history.known if planned is None else replace(history.known, planned=planned)
            await self._prefixes.keep(key, kept, parsed=0 if made.trimmed else request.known)
        warnings, no_summary = self._warnings(call, request, context, history, made, tools, finishing)
        report = report_of(self._new_id(), history, made, planning, warnings, removed_tokens)
        if observes and finishing is None:
            report = observed(report, bypass(history.entries, planning, composed=history.composed))
            context = replace(context, policy=None)  # no summary is made, and the client handles an overflow
        return Prepared(
            received=received,
            call=call,
            request=request,
            context=context,
            history=history,
            planning=planning,
            destination=destination,
            facts=facts,
            instructions_tokens=lead,
            report=report,
            own_tools=own,
            tools=tools,
            finishing=finishing,
            removed_tools=without,
            removed_tokens=removed_tokens,
            packing=packing,
            no_summary=no_summary,
        )

    def _pack(self, call: ClientRequest, history: History) -> Packing | None:
        """Begin to pack the new messages of a long request in another thread, while the request is planned."""
        if history.id is None or history.unplaced is not None:
            return None
        return self._services.store.pack(session_key(call.tenant, history.id, call.dialect.name), history.fresh)

    async def _removed(
        self, call: ClientRequest, request: Request, history: History, policy: Policy | None
    ) -> Collection[str]:
        """Return the names of the tools to leave out.

        A session continues as it began: each tool of its first request with tools stays in or out as it was then.
        """
        if policy is None or policy.mode == "observe":
            return ()
        removed = policy.tools.remove
        self._leaves_tools_out = self._leaves_tools_out or bool(removed)
        new = history.id is None or history.unplaced is not None or history.arrival.kind is Kind.FIRST
        if new or request.tools is None or not self._leaves_tools_out:
            return removed
        first = await self._services.store.first_tools(session_key(call.tenant, history.id or "", call.dialect.name))
        if first is None:
            return removed
        try:
            known = {name for name, _ in call.dialect.requests.declared(first.tools)}
        except msgspec.DecodeError:  # masking changed more than text in them
            return removed
        return {*first.removed, *(name for name in removed if name not in known)}

    def _warnings(
        self,
        call: ClientRequest,
        request: Request,
        context: RequestContext,
        history: History,
        made: Plan,
        tools: bytes | None,
        finishing: Entry | None,
    ) -> tuple[tuple[str, ...], str]:
        """Return the warnings that are added to the plan's own, and why no summary is made."""
        services, no_summary = self._services, ""
        warnings = (FINISHED,) if finishing is not None else _absent_tools(request, tools, made.view)
        warnings = (AWAY,) * (history.unplaced is not None) + warnings + request.notes
        if services.store.masker is not None:
            warnings += _masked(history)
        if finishing is None and made.summary_request is not None and self._settings.summarizer.background:
            no_summary = services.summaries.none_begins(request.model, call.caller)
            warnings = missing_summary(made.summary_request, history.attempt, made.cut, hindered=no_summary) + warnings
        if context.session is None and history.id is not None:
            self._tell_unnamed(call)
            if history.doubt is not None:
                warnings += (resemblance(history.doubt, request, self._session_header),)
        return warnings, no_summary

    def _tell_unnamed(self, call: ClientRequest) -> None:
        """Log, once for each type of client, that it names no session, and how it could."""
        agent = next((value for name, value in call.headers if name.lower() == b"user-agent"), b"")
        found = _PRODUCT.match(agent.decode("latin-1"))
        client = found[0] if found is not None else "a client without User-Agent"
        if client not in self._unnamed and len(self._unnamed) < _CLIENTS:
            self._unnamed.add(client)
            _LOG.info(
                "%s sends no session id: its conversations are told apart by the replies that it sends back. "
                "To name them, let it send the header %s",
                client,
                self._session_header,
            )

    async def _history(
        self,
        call: ClientRequest,
        request: Request,
        context: RequestContext,
        known: KnownRequest | None,
        *,
        whole: bool,
        stateless: bool,
    ) -> History:
        """Find the place of a request; see `HistoryLoader.load`."""
        services = self._services
        if stateless:
            return await services.loader.without_store(request)
        try:
            return await services.loader.load(request, context, whole=whole, known=known)
        except StoreUnavailable as why:
            return await services.outage.history(request, context, len(call.body), why)

    async def _with_provider(
        self, call: ClientRequest, request: Request, context: RequestContext, destination: Destination
    ) -> tuple[Request, RequestContext]:
        """Check ownership of the items that a request references at the provider, and resolve those it can.

        Trimming is switched off for a request that the provider adds to. A state is decided later, from the history,
        because the proxy may expand it.
        """
        loader = self._services.loader
        if request.references and not destination.forwards_credentials:
            await loader.check_owned(call.tenant, call.dialect, request.references)
        if request.pointers:
            request = await loader.resolved(request, context)
        if request.untouched and not request.state:
            context = replace(context, policy_name=OFF, policy=None, select=None)
        return request, context

    async def _read(self, call: ClientRequest, key: Key | None) -> tuple[Request, KnownRequest | None]:
        """Parse a body. Also return the session's request before it, if both begin with the same messages."""
        body, parse = call.body, call.dialect.requests.parse
        known = self._prefixes.find(key) if key is not None else None
        kept = known.request.common(body) if known is not None else 0
        start = known.request.ends[kept] if known is not None and kept else 0
        if call.admit is not None:
            await call.admit(kept, start)
        if known is None or not kept:
            return await compute(len(body), parse, body), None
        return await compute(len(body) - start, parse, body, known.request, kept), known

    async def with_summary(self, prepared: Prepared, attempt: SummaryRow | None, reason: str) -> Prepared:
        """Plan again with the summary that the request waited for.

        `attempt` is the result, if an attempt was started; `reason` says why there is no summary.
        """
        history, planning, context = prepared.history, prepared.planning, prepared.context
        made = prepared.report.plan
        if attempt is not None:
            history = replace(history, attempt=attempt)
        summary = ready_summary_of(attempt)
        if summary is not None and context.policy is not None:
            planning = replace(planning, ready_summary=summary)
            made = await plan_of(history, context.policy_name, context.policy, planning)
        wanted = made.summary_request
        warnings = missing_summary(wanted, history.attempt, made.cut, reason=reason)
        absent = _absent_tools(prepared.request, prepared.tools, made.view)
        warnings += absent + tuple([one for one in prepared.report.beside if one != _TOOLS_ABSENT])
        report = prepared.reported(made, warnings)
        return replace(prepared, history=history, planning=planning, report=report, no_summary=reason)

    async def original_of(self, prepared: Prepared) -> Original | None:
        """Return the request before trimming, or None if that is no longer known.

        Amid a tool loop whose reasoning is required, only the newest trim is undone: it waits for the end of the loop.
        """
        history, context, planning = prepared.history, prepared.context, prepared.planning
        policy, entries = context.policy, history.entries
        if policy is None:
            return None
        if planning.keeps_loop and prepared.report.plan.trimmed and entries[-1].message.is_result:
            waiting = await plan_of(history, context.policy_name, policy, replace(planning, binds_loop=True))
            return Original(plan=waiting, waits=True)
        if history.composed and history.standing is not None:  # the messages that the cut dropped were not read
            again = replace(context, session=history.id, charge=free_of_charge)  # a refusal would hide the upstream's
            whole = await self._services.loader.load(prepared.request, again, whole=True)
            if whole.arrival.base != history.arrival.base:
                return None
            entries = whole.entries
        made = await compute(
            history.size, untrimmed, entries, policy, context.policy_name, prepared.planning, composed=history.composed
        )
        return Original(plan=replace(made, decided=tuple([entry.arrival or () for entry in history.entries])))

    async def unbound_of(self, prepared: Prepared, made: Plan) -> Plan | None:
        """Return the plan without reasoning that is bound to another view, or None if that changes nothing."""
        history = prepared.history
        if prepared.context.policy is None or not history.nodes:
            return None
        return await compute(
            history.size,
            without_bound_reasoning,
            made,
            history.entries,
            prepared.planning,
            composed=history.composed,
            start=history.start,
        )

    def let_trims_wait(self, prepared: Prepared) -> None:
        """Remember that the request's model refuses trims amid a tool loop."""
        self._binding[prepared.request.model, prepared.facts.base_url] = True

    async def _planning(
        self, request: Request, history: History, tools: bytes | None, agent: str | None, facts: ModelFacts
    ) -> tuple[PlanningContext, int]:
        """Return the planning context, and the tokens of the instructions."""
        model, lead, fixed, counter = request.model, 0, 0, self._services.counter
        masker = self._services.store.masker
        if history.instructions:
            size = COUNTING * size_of(history.instructions)
            lead = fixed = sum(await compute(size, counter.messages, history.instructions, model))
        fixed += await self._tools_tokens(tools, model)
        planning = self._services.knowledge.planning(
            model,
            facts,
            fixed=fixed,
            agent=agent,
            updated_at=history.updated_at,
            scale=history.scale,
            ready_summary=ready_summary_of(history.ready_summary),
            keeps=history.id is not None and history.unplaced is None and (masker is None or masker.keeps_cuts),
        )
        if request.keeps_loop:
            binds = (model, facts.base_url) in self._binding
            planning = replace(planning, keeps_loop=True, binds_loop=request.binds_loop or binds)
        return planning, lead

    async def _tools_tokens(self, tools: bytes | None, model: str) -> int:
        """Return the tokens of the tools' JSON text; 0 without tools."""
        return 0 if tools is None else await compute(COUNTING * len(tools), self._services.counter.json, tools, model)

    async def _removed_tokens(self, offered: bytes | None, tools: bytes | None, model: str) -> int:
        """Return how many tokens leaving out tools saves: those of `offered` minus those of `tools`."""
        if offered is tools:
            return 0
        return await self._tools_tokens(offered, model) - await self._tools_tokens(tools, model)

    async def _plan(
        self,
        history: History,
        context: RequestContext,
        model: str,
        planning: PlanningContext,
        before: PlannedStart | None,
    ) -> tuple[History, Plan]:
        """Decide what to send. Also return the history, with the cut that another request just made at its place.

        `before` is the reusable part of the previous request's plan.
        """
        name, policy = context.policy_name, context.policy
        if policy is None:
            made = await plan_of(history, name, policy, planning)
            if history.owed:
                size = COUNTING * size_of(history.owed)
                tokens = sum(await compute(size, self._services.counter.messages, history.owed, model))
                made = replace(made, tokens_before=made.tokens_before + tokens, tokens_sent=made.tokens_sent + tokens)
            return history, made

        def decide(history: History, fork: int | None) -> Awaitable[Plan]:
            context = planning if fork is None else replace(planning, fork=fork)
            return plan_of(history, name, policy, context, before=before)

        session = (context.dialect.name, context.tenant, history.id)
        place = (*session, history.arrival.base, name, policy.version, context.agent, model)
        return await self._coalescer.plan(history, place, decide)

    def _new_id(self) -> str:
        """Return a new exchange id. Ids of one process sort by time, to the microsecond."""
        microseconds = int(self._services.knowledge.clock() * 1_000_000)
        return f"exc_{microseconds:014x}{self._random.getrandbits(40):010x}{self._process_mark}"


async def plan_of(
    history: History,
    name: str,
    policy: Policy | None,
    planning: PlanningContext,
    *,
    overflow: int | None = None,
    before: PlannedStart | None = None,
) -> Plan:
    """Decide what of the history to send.

    Without a policy nothing is trimmed. `overflow` is the target in tokens after the upstream found the request too
    long. `before` is the reusable part of the previous request's plan.
    """
    composed, cut = history.composed, history.standing.cut if history.standing is not None else None
    if policy is None:
        return await compute(history.size, bypass, history.entries, planning, composed=composed)
    if before is not None and overflow is None and not composed and not history.start:
        made = extended(before, history.entries, policy, name, planning, cut)
        if made is not None:
            return made
    return await compute(
        TRIMMING * history.size,
        plan,
        history.entries,
        policy,
        name,
        planning,
        cut,
        composed=composed,
        start=history.start,
        overflow=overflow,
    )


def _planned(history: History, made: Plan, policy: Policy | None, planning: PlanningContext) -> PlannedStart | None:
    """Return the part of the plan that the next request can reuse, or None if there is none."""
    if policy is None or history.composed or history.start:
        return None
    return planned_start(history.entries, len(history.nodes), made, policy, planning)


def _masked(history: History) -> tuple[str, ...]:
    """Return the warning that the request is composed of stored messages and some are masked, if so."""
    stored = history.entries[: len(history.nodes)] if history.composed else ()
    return (MASKED,) if any(MARK.encode() in entry.message.raw for entry in stored) else ()


def without_tools(
    dialect: Dialect,
    tools: bytes | None,
    request: Request,
    names: Collection[str],
    entries: Sequence[Entry],
    own: Collection[str] = (),
) -> tuple[bytes | None, tuple[str, ...]]:
    """Remove the tools in `names` that nothing depends on. Return the JSON text of the rest, and the removed names.

    A tool stays if the history calls it or `tool_choice` names it. If only the proxy's `own` tools would be left, all
    stay. The result is the same for every request of a session, because a tool that is not offered is never called.
    """
    if tools is None or not names:
        return tools, ()
    called = {call.name for entry in entries for call in entry.message.calls}
    choice = request.fields.get("tool_choice") or b""
    kept: list[Raw] = []
    removed: list[str] = []
    is_any_left = False
    for name, text in dialect.requests.declared(tools):
        if name is None or name not in names or name in called or msgspec.json.encode(name) in choice:
            kept.append(text)
            is_any_left = is_any_left or name not in own
        else:
            removed.append(name)
    return (msgspec.json.encode(kept), tuple(removed)) if is_any_left else (tools, ())


def resemblance(doubt: Doubt, request: Request, header: str) -> str:
    """Return the warning that a request resembles a session but was not joined to it."""
    if doubt.rivals > 1:
        why = f"this history fits {doubt.rivals} sessions alike, {doubt.session} among them"
    elif doubt.instructions:
        why = f"this history resembles session {doubt.session}, but its instructions differ"
    elif doubt.differs is None:
        why = f"this history resembles session {doubt.session}"
    else:
        role = request.messages[doubt.differs].role
        number = len(request.instructions) + doubt.differs
        why = f"this history resembles session {doubt.session}, but messages[{number}] ({role}) differs"
    return f"{why}: it became a session of its own. To name its session, send {header}"


def finishing_reply(entries: Sequence[Entry], tools: Collection[str]) -> Entry | None:
    """Return the reply that finishes a task, if only results of its calls came after it; otherwise None.

    An agent that called one of `tools` is done. Asked again with nothing new, a model would say something different.
    """
    last = next((each for each in reversed(entries) if not each.message.is_result or each.message.beside), None)
    finishes = last is not None and any(call.name in tools for call in last.message.calls)
    return last if finishes else None


def _absent_tools(request: Request, tools: bytes | None, view: Sequence[Message]) -> tuple[str, ...]:
    """Return the warning that the view holds tool calls and the request offers no tools, if so.

    `tools` are the sent tools. Older clients of Chat Completions have others in `functions`.
    """
    if tools is not None or (request.has_tools and request.tools is None):
        return ()
    for message in view:
        if (message.facts is None or message.facts.has_calls) and message.calls:
            return (_TOOLS_ABSENT,)
    return ()


# ------------------------------------------------------------------------------------ summaries by a model


def ready_summary_of(row: SummaryRow | None) -> ReadySummary | None:
    """Return a stored summary in the form for trimming, or None if it is not ready."""
    if row is None or row.status is not SummaryStatus.READY:
        return None
    return ReadySummary(**{name: getattr(row, name) for name in ReadySummary.__struct_fields__})


def unused(row: SummaryRow | None, cut: Cut | None) -> SummaryRow | None:
    """Return the summary if it is ready and covers more than the cut's own summary; otherwise None."""
    used = cut.summary.until if cut is not None and cut.summary is not None else 0
    return row if row is not None and row.status is SummaryStatus.READY and row.until > used else None


def as_requested(row: SummaryRow, at: int) -> SummaryRow:
    """Return a copy of a background summary, marked as explicitly requested; `at` is its new creation time.

    It has no cost, because the first summary recorded that.
    """
    return replace(row, id=f"sum_{token_hex(12)}", asked=True, usage=None, cost=None, created_at=at)


def has_target(policy: Policy) -> bool:
    """Tell whether the policy says how far to trim."""
    return policy.target is not None or policy.summarizing.lower is not None


def missing_summary(
    wanted: SummaryRequest | None,
    attempt: SummaryRow | None,
    cut: Cut | None = None,
    *,
    reason: str = "",
    hindered: str = "",
) -> tuple[str, ...]:
    """Return the warning that a trim goes without the summary that it asked for, and why.

    `reason` says why no summary was made although the request waited for it. `hindered` says why none is started.
    """
    if wanted is None or not wanted.urgent:
        return ()
    if reason:
        return (f"no summary: {reason}",)
    failed = attempt.reason if attempt is not None else ""
    if failed or hindered:
        return (f"no summary: {'; '.join(filter(None, (failed, hindered)))}",)
    if attempt is None:
        return ("no summary is ready: the other edits did the work",)
    if unused(attempt, cut) is None:
        return ("no newer summary is ready: the other edits did the work",)
    return ("a summary is ready and was not used: what is sent would not get smaller by it",)


# -------------------------------------------------------------------------------- requests that share a trim


class PlanCoalescer:
    """Lets requests that continue from the same place of a long history share one trim.

    Many branches may begin at one place at once: best of n, an evaluation, sub-agents. One request decides at a time.
    The others use its cut, even if it is not stored yet, so that the provider's cache serves them all.
    """

    def __init__(self, most: int = _TRIMS) -> None:
        """Remember at most `most` trims."""
        self._locks: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()
        """Locks of the places where a request decides or waits."""
        self._made: FIFOCache[Hashable, StandingCut] = FIFOCache(most)

    async def plan(
        self, history: History, place: Hashable, decide: Callable[[History, int | None], Awaitable[Plan]]
    ) -> tuple[History, Plan]:
        """Return a request's history and its plan. If another request at the same `place` made a cut, both use it.

        `decide` makes the plan. If it is given a position, it may keep a trim at that position for other requests.
        """
        fork, kind = history.fork, history.arrival.kind
        if fork is None or kind not in {Kind.RESEND, Kind.REWIND}:
            return history, await decide(history, None)
        if TRIMMING * history.size < OFF_LOOP_BYTES:  # decided on the event loop, so no other request can come between
            return history, await decide(history, fork if kind is Kind.REWIND else None)
        contended = place in self._locks
        lock = self._locks.setdefault(place, asyncio.Lock())
        async with lock:
            found = self._made.get(place)
            if found is not None and (history.standing is None or history.standing.cut.position < fork):
                history = replace(history, standing=found, borrowed=True)
            made = await decide(history, fork if kind is Kind.REWIND or contended else None)
            if made.trimmed and made.cut is not None and made.cut.position == fork:
                self._made[place] = StandingCut(cut=made.cut, node=history.arrival.base, kept=None)
        return history, made
