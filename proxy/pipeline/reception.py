"""How a request is received: read, given its place in the log, and planned, from its bytes to a turn.

Nothing is stored and nobody is asked yet: what goes wrong here has left nothing behind.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Iterable, Mapping
from typing import Final

from msgspec.structs import replace

from proxy.config import OFF, Policies, Settings
from proxy.dialects import Message, headers
from proxy.dialects.chat.request import ChatRequest, parse_chat_request
from proxy.dialects.chat.tools import offer_tools
from proxy.models import ModelFacts
from proxy.pipeline.asking import RequestContext, context_of
from proxy.pipeline.background import COUNTING, compute
from proxy.pipeline.finished import FINISHED, finishing_reply
from proxy.pipeline.identity import header_of, session_of
from proxy.pipeline.means import AppServices
from proxy.pipeline.past import History, size_of
from proxy.pipeline.planning import nothing_sent, planned_of, report_of
from proxy.pipeline.sharing import PlanCoalescer, Where
from proxy.pipeline.summing import caller_of, missed, prepared_of
from proxy.pipeline.turn import Call, ExchangeContext
from proxy.recall import offered
from proxy.trimming import Plan, PlanningContext, Policy

_TOOLS_ABSENT: Final = "the history holds tool calls, and the request offers no tools"


class Reception:
    """Receives one request after another. One for the life of the process."""

    def __init__(self, settings: Settings, means: AppServices, mark: str) -> None:
        """Put together what it takes; `mark` is what every exchange's id ends with."""
        self._settings = settings
        self.policies: Final = Policies(settings.policies)
        """Those in force; exchanged when the configuration is read again."""
        self._memory = means.memory
        self._knowledge = means.knowledge
        self._summaries = means.summaries
        self._moves = PlanCoalescer()
        self._mark = mark
        self._chance = random.Random()  # noqa: S311 - ids are names and no secrets, and the system's costs more

    async def turn(self, call: Call) -> ExchangeContext:
        """Read a request, find its place, and plan what is sent.

        Raises:
            PalimpsestError: it could not be read or planned.
        """
        started = time.monotonic()
        request = await compute(len(call.body), parse_chat_request, call.body)
        sent = headers.first_values(call.headers)
        name, policy = self._policy(call, sent, request)
        asking = context_of(call.tenant, sent, request, name, policy)
        past = await self._past(sent, request, asking)
        own: tuple[str, ...] = ()
        tools = request.tools
        definitions = offered(
            self._settings.virtual_tools,
            has_tools=request.has_tools,
            stateless=past.id is None,
            off=policy is None,
        )
        if definitions:
            offer = offer_tools(request, definitions)
            own, tools = offer.names, offer.tools
        finishing = finishing_reply(past.entries, self._settings.finish.tools)
        facts = self._knowledge.facts(request.model)
        known = await self._known(request, past, tools, asking.agent, facts)
        if finishing is not None:
            planned = nothing_sent(past.entries, known)
        else:
            past, planned = await self._planned(past, asking, request.model, name, policy, known)
            if planned.needs_whole:  # the policy was changed: it decides over what was not read, too
                past = await self._past(sent, request, replace(asking, whole=True))
                known = await self._known(request, past, tools, asking.agent, facts)
                past, planned = await self._planned(past, asking, request.model, name, policy, known)
        ticket = report_of(past, planned, known, self._new_id())
        turn = ExchangeContext(
            call=call,
            request=request,
            past=past,
            ticket=ticket,
            asking=asking,
            known=known,
            facts=facts,
            started=started,
            stored=past.id is not None,
            policy=policy,
            own=own,
            tools=tools,
            finishing=finishing,
        )
        return self.warned(turn)

    def warned(self, turn: ExchangeContext) -> ExchangeContext:
        """Say with its ticket what is to be known of how a request was planned."""
        planned = turn.ticket.plan
        if turn.finishing is not None:
            warnings: tuple[str, ...] = (FINISHED,)
        else:
            waits = planned.wanted is not None and not self._settings.summarizer.background
            if planned.wanted is not None and not waits:
                turn.hindered = self._summaries.none_begins(turn.request.model, caller_of(turn.call))
            warnings = ()
            if turn.waited is not None or not waits:
                reason, hindered = turn.waited or "", turn.hindered
                attempt = turn.past.attempt
                warnings = missed(planned.wanted, attempt, planned.cut, reason=reason, hindered=hindered)
            if turn.tools is None and _holds_calls(planned.view):
                warnings += (_TOOLS_ABSENT,)
        if warnings != turn.ticket.warnings:
            turn.ticket = replace(turn.ticket, warnings=warnings)
        return turn

    def _policy(
        self, call: Call, sent: Mapping[bytes, bytes], request: ChatRequest
    ) -> tuple[str, Policy | None]:
        """Return name and policy that decide what is sent; None where trimming is switched off.

        Raises:
            InvalidRequest: there is no policy of the name that the client asks for.
        """
        asked = header_of(sent, headers.CONTEXT_POLICY)
        if asked == OFF:
            return OFF, None
        return self.policies.select(call.tenant, request.model, asked)

    async def _past(
        self, sent: Mapping[bytes, bytes], request: ChatRequest, asking: RequestContext
    ) -> History:
        """Find the request's session, and its place in the log of that."""
        sessions = self._settings.sessions
        session = session_of(sent, request, sessions)
        if session is None and sessions.missing == "stateless":
            return await self._memory.without_log(request)
        incoming = await self._memory.incoming(request, asking)
        if session is not None:
            return await self._memory.past_of(request, incoming, session, asking)
        return await self._memory.past_of_unnamed(request, incoming, asking)

    async def _known(
        self, request: ChatRequest, past: History, tools: bytes | None, agent: str | None, facts: ModelFacts
    ) -> PlanningContext:
        """Return what planning must be told."""
        model, fixed = request.model, 0
        if past.instructions or tools is not None:
            size = COUNTING * (len(tools or b"") + size_of(past.instructions))
            fixed = await compute(size, self._knowledge.fixed_tokens, past.instructions, tools, model)
        known = self._knowledge.known(
            model, facts, fixed=fixed, agent=agent, updated_at=past.updated_at, scale=past.scale
        )
        if past.id is None:  # nothing is stored of it, no cut either
            return replace(known, keeps=False)
        return known if past.prepared is None else replace(known, prepared=prepared_of(past.prepared))

    async def _planned(
        self,
        past: History,
        asking: RequestContext,
        model: str,
        name: str,
        policy: Policy | None,
        known: PlanningContext,
    ) -> tuple[History, Plan]:
        """Decide what is sent; return the past too, with a cut that others have just made at its place."""
        if policy is None:
            return past, await planned_of(past, name, policy, known)

        def decide(past: History, fork: int | None) -> Awaitable[Plan]:
            return planned_of(past, name, policy, known if fork is None else replace(known, fork=fork))

        base = past.arrival.base
        where = Where(
            tenant=asking.tenant,
            session=past.id or "",
            node=base,
            policy=name,
            version=policy.version,
            agent=asking.agent,
            model=model,
        )
        return await self._moves.shared(past, where, decide)

    def _new_id(self) -> str:
        """Return an exchange's id: ids that this process makes later sort later, to the microsecond."""
        microseconds = int(self._knowledge.clock() * 1_000_000)
        return f"exc_{microseconds:014x}{self._chance.getrandbits(40):010x}{self._mark}"


def _holds_calls(messages: Iterable[Message]) -> bool:
    """Tell whether one of the messages has tool calls; where that is known of its text, nothing is read."""
    return any((message.facts is None or message.facts.has_calls) and message.calls for message in messages)
