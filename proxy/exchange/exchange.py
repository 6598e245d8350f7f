"""One chat completion, top to bottom.

    read the request -> find its session -> find its place in the log -> plan -> open the exchange
    -> ask upstream -> relay -> settle

The request is stored while upstream is asked and before the client hears of an answer; the reply
is stored before the client sees its end. Whatever ends the exchange, it is settled once.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Final

from proxy.errors import InvalidRequest, PalimpsestError
from proxy.exchange.background import COUNTING, TRIMMING, Background, compute
from proxy.exchange.body import body_of_view
from proxy.exchange.identity import header_of, session_of
from proxy.exchange.knowledge import Knowledge
from proxy.exchange.past import Asking, Memory, Past, size_of
from proxy.exchange.receipt import Ticket, log_line
from proxy.exchange.relay import Client, Outcome, StreamRelay, relay_json, relay_refusal
from proxy.exchange.turn import Call, Turn, opening_of, settlement_of
from proxy.history.reconcile import Mode
from proxy.models.dollars import cost
from proxy.settings.model import Settings
from proxy.settings.policies import OFF, Policies
from proxy.store.records import Status
from proxy.store.store import Store
from proxy.trimming.engine import bypass, plan
from proxy.trimming.plan import Known, Plan
from proxy.trimming.policy import Policy
from proxy.upstream.client import Answer, Destination, Upstream
from proxy.wire import headers
from proxy.wire.cache_key import cache_key
from proxy.wire.overflow import Overflow, overflow_of
from proxy.wire.request import ChatRequest, parse_chat_request

_LOG: Final = logging.getLogger("palimpsest.exchange")
_RETRY_COUNT: Final = "x-stainless-retry-count"
_IDEMPOTENCY_KEY: Final = "idempotency-key"
_POSITIVE: Final = re.compile("0*[1-9][0-9]*")
_EVENTS: Final = b"text/event-stream"
_UNNAMED: Final = frozenset({b"", b"application/octet-stream", b"text/plain"})
_LEAST_REPLY: Final = 256
"""Tokens that are left for a reply whose length nobody names."""
_MARGIN: Final = 0.8
"""How much of a window is filled after an overflow. What is left is text of another kind than what went, and
the two counts of it may differ by a fourth more; and the next turns need room too."""
_TRIALS: Final = 2
"""Plans that are made after an overflow: a second one where the first seems to be too long by its bytes."""
_LEAST_STEP: Final = 0.5
"""By how much less the second one may aim. (An image has many bytes and few tokens.)"""
RESCUED: Final = "upstream found the request too long: it was trimmed and asked once more"
"""What is said of a request that went through at the second try."""
_TOOLS_ABSENT: Final = "the history holds tool calls, and the request offers no tools"


class ChatCompletions:
    """Answers requests for chat completions. One for the life of the process."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        upstream: Upstream,
        background: Background,
        memory: Memory,
        knowledge: Knowledge,
        mark: str | None = None,
        cache_secret: bytes = b"",
    ) -> None:
        """Put together what an exchange needs.

        `mark`: 8 hexadecimal digits that every exchange's id ends with, the process's own. `cache_secret`:
        what the names of sessions in the provider's cache are made with.
        """
        self._settings = settings
        self.policies = Policies(settings.policies)
        """Those in force; exchanged when the configuration is read again."""
        self._store = store
        self._upstream = upstream
        self._background = background
        self._memory = memory
        self._knowledge = knowledge
        self._cache_secret = cache_secret
        self._mark = secrets.token_hex(4) if mark is None else mark
        self._dropped = frozenset(
            {b"accept-encoding", *(name.lower().encode() for name in settings.sessions.headers)}
        )
        """Headers that do not go upstream, beside those that never do."""
        self._refuses_usage: set[tuple[str, str]] = set()
        """(address, model) of those that refuse to be asked for their usage."""

    async def answer(self, call: Call, client: Client) -> None:
        """Serve one request from its bytes to the end of the response.

        Raises:
            PalimpsestError: it could not be read or planned; `client` was told nothing yet.
        """
        started = time.monotonic()
        request = await compute(len(call.body), lambda: parse_chat_request(call.body))
        sent = headers.first_values(call.headers)
        agent = header_of(sent, headers.AGENT_NAME)
        name, policy = self._policy(call, sent, request)
        asking = Asking(
            tenant=call.tenant,
            mode=_mode_of(sent),
            retried=_announces_retry(sent),
            idempotency=_idempotency_of(sent),
            agent=agent,
            policy=name if policy is not None else None,
        )
        past = await self._past(sent, request, asking)
        known, planned = await self._plan(request, past, name, policy, agent)
        if planned.needs_whole:  # the policy was changed: it decides over what was not read, too
            past = await self._past(sent, request, replace(asking, whole=True))
            known, planned = await self._plan(request, past, name, policy, agent)
        ticket = Ticket(
            session=past.id,
            exchange=self._new_id(),
            plan=planned,
            instructions=len(past.instructions),
            messages=planned.messages_before,
            warnings=(_TOOLS_ABSENT,) if _lacks_tools(request, planned) else (),
            window=known.context_window,
            fixed_tokens=known.fixed_tokens,
            scale=known.scale,
        )
        turn = Turn(
            call, request, past, ticket, asking, known, started, stored=past.id is not None, policy=policy
        )
        turn.mark("planned")
        self._begin(turn)
        try:
            await self._serve(turn, client)
        except PalimpsestError as why:
            await self._settle(turn, Outcome(Status.FAILED, error=why.message))
            await client.fail(why, turn.ticket.headers())
        except BaseException as why:
            # The client left (or the server stops) before there was anything to keep, or we made a
            # mistake: either way nothing more will come, and the exchange must not stay pending.
            left = isinstance(why, asyncio.CancelledError)
            await self._settle(
                turn,
                Outcome(Status.CANCELLED, error="the client left")
                if left
                else Outcome(Status.FAILED, error=f"internal error: {type(why).__name__}"),
            )
            raise

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

    async def _past(self, sent: Mapping[bytes, bytes], request: ChatRequest, asking: Asking) -> Past:
        """Find the request's session, and its place in the log of that."""
        sessions = self._settings.sessions
        session = session_of(sent, request, sessions)
        if session is None and sessions.missing == "stateless":
            return await self._memory.without_log(request)
        incoming = await self._memory.incoming(request, asking)
        if session is not None:
            return await self._memory.past_of(request, incoming, session, asking)
        return await self._memory.past_of_unnamed(request, incoming, asking)

    async def _plan(
        self, request: ChatRequest, past: Past, name: str, policy: Policy | None, agent: str | None
    ) -> tuple[Known, Plan]:
        """Decide what of the branch is sent; return what was known for it, too."""
        size = COUNTING * (len(request.tools or b"") + size_of(past.instructions))
        fixed = await compute(
            size, lambda: self._knowledge.fixed_tokens(past.instructions, request.tools, request.model)
        )
        known = self._knowledge.known(
            request.model, fixed=fixed, agent=agent, updated_at=past.updated_at, scale=past.scale
        )
        if past.id is None:  # nothing is stored of it, no cut either
            known = replace(known, keeps=False)
        composed = past.arrival.composed
        if policy is None:
            return known, await compute(past.size, lambda: bypass(past.entries, known, composed=composed))
        standing = past.standing.cut if past.standing is not None else None
        return known, await compute(
            TRIMMING * past.size,
            lambda: plan(past.entries, policy, name, known, standing, composed=composed, start=past.start),
        )

    async def _replan(self, turn: Turn, policy: Policy, overflow: Overflow) -> bool:
        """Trim what upstream found too long to a safe size; return whether that makes it shorter."""
        ticket, past, known, size = turn.ticket, turn.past, turn.known, turn.sent_bytes
        before = shortest = ticket.plan.tokens_sent
        standing = past.standing.cut if past.standing is not None else None
        window = overflow.window or known.context_window
        room: float | None = None
        if window is not None:
            reply = overflow.reply or turn.request.reply_tokens or _LEAST_REPLY
            # A reply that may be as long as the window is none that counts for it: it ends where that ends.
            room = (window - (reply if reply < window else _LEAST_REPLY)) * _MARGIN
        # By upstream's own count of this request, where it says it. A smaller scale than usual, or than 1,
        # may be due to the very text that goes.
        scale = max(overflow.asked / before if overflow.asked and before else 1.0, known.scale, 1.0)
        target = before // 2 if room is None else min(before // 2, int(room / scale))
        for _ in range(_TRIALS):
            planned = await compute(
                TRIMMING * past.size,
                partial(
                    plan,
                    past.entries,
                    policy,
                    ticket.plan.policy,
                    known,
                    standing,
                    composed=past.arrival.composed,
                    start=past.start,
                    overflow=max(target, 1),
                ),
            )
            if planned.tokens_sent >= shortest:
                break
            shortest = planned.tokens_sent
            turn.ticket = replace(ticket, plan=planned, warnings=(*ticket.warnings, RESCUED))
            if room is None or overflow.asked is None or not size:
                break
            # Many short messages may count for more than their text: what is sent tells that by its bytes.
            expected = overflow.asked * len(self._body(turn, adds_usage=False)) / size
            if expected <= room:
                break
            target = int(target * max(room / expected, _LEAST_STEP))
        return shortest < before

    def _begin(self, turn: Turn) -> None:
        """Store what is new, while upstream is being asked."""
        if turn.stored:
            turn.began = self._background.start(
                self._store.begin(opening_of(turn, self._now(), self._knowledge.counter))
            )

    async def _begun(self, turn: Turn) -> None:
        """Wait until what is new is stored.

        Raises:
            StoreUnavailable: it could not be.
        """
        if turn.began is not None:
            try:
                await asyncio.shield(turn.began)
            except PalimpsestError:
                turn.stored = False  # there is nothing to settle
                raise

    async def _serve(self, turn: Turn, client: Client) -> None:
        """Ask upstream and relay its answer."""
        answer, hides_usage = await self._ask(turn)
        try:
            turn.mark("answered")
            await self._begun(turn)
            out = [*headers.to_client(answer.headers, extra_drop=_decoded(answer)), *turn.ticket.headers()]

            async def settle(outcome: Outcome) -> None:
                await self._settle(turn, outcome)

            if not 200 <= answer.status < 300:
                body = await answer.read()
                await relay_refusal(answer, client, out, body, settle)
            elif _is_stream(answer, asked=turn.request.stream):
                relay = StreamRelay(answer, client, hides_usage=hides_usage)
                try:
                    await relay.run(out, settle)
                except asyncio.CancelledError:
                    await self._settle(turn, relay.outcome(left=True))
                    raise
            else:
                await relay_json(answer, client, out, settle)
        finally:
            await answer.aclose()

    async def _ask(self, turn: Turn) -> tuple[Answer, bool]:
        """Ask upstream; return its answer, and whether the usage chunk is to be kept from the client."""
        request = turn.request
        destination = self._upstream.destination(request.model)
        adds_usage = (
            request.stream
            and request.wants_usage is None
            and self._settings.upstream.include_usage == "auto"
            and (destination.base_url, request.model) not in self._refuses_usage
        )
        answer, adds_usage = await self._ask_once(turn, destination, adds_usage=adds_usage)
        if answer.status >= 400 and await self._rescued(turn, answer):
            turn.mark("overflowed")
            answer, adds_usage = await self._ask_once(turn, destination, adds_usage=adds_usage)
        return answer, adds_usage

    async def _ask_once(
        self, turn: Turn, destination: Destination, *, adds_usage: bool
    ) -> tuple[Answer, bool]:
        """Send the view, and again where usage may not be asked for; return whether it was asked for."""
        answer = await self._send(turn, destination, adds_usage=adds_usage)
        if not (adds_usage and answer.status in {400, 422} and await _names_usage(answer)):
            return answer, adds_usage
        await answer.aclose()
        answer = await self._send(turn, destination, adds_usage=False)
        if answer.status < 300:  # it was our option indeed, not something of the client's
            self._refuses_usage.add((destination.base_url, turn.request.model))
        return answer, False

    async def _rescued(self, turn: Turn, answer: Answer) -> bool:
        """Tell whether the request was refused for its length, and made shorter; then close that answer."""
        if turn.policy is None:
            return False
        try:
            overflow = overflow_of(answer.status, await answer.read())
            if overflow is None or not await self._replan(turn, turn.policy, overflow):
                return False
        except BaseException:  # cancelled too: nobody else holds the answer yet, and it occupies a connection
            await answer.aclose()
            raise
        await answer.aclose()
        return True

    async def _send(self, turn: Turn, destination: Destination, *, adds_usage: bool) -> Answer:
        """Send the view upstream."""
        sent = headers.to_upstream(
            turn.call.headers,
            drop_credentials=not destination.forwards_credentials,
            extra_drop=self._dropped,
        )
        path = "/chat/completions" + (f"?{turn.call.query.decode('latin-1')}" if turn.call.query else "")
        body = self._body(turn, adds_usage=adds_usage)
        turn.sent_bytes = len(body)
        return await self._upstream.ask(
            destination, "POST", path, [*sent, (b"accept-encoding", b"identity")], body
        )

    def _body(self, turn: Turn, *, adds_usage: bool) -> bytes:
        """Return the body to send: the client's own bytes where nothing was trimmed or added."""
        cache, key = self._settings.cache, None
        facts = self._knowledge.facts(turn.request.model)
        if cache.key == "session" and facts.takes_key and turn.past.id is not None:
            key = cache_key(self._cache_secret, turn.call.tenant, turn.past.id)
        return body_of_view(
            turn.request,
            turn.past,
            turn.ticket.plan,
            add_usage=adds_usage,
            drop_fields=self._settings.sessions.body_fields,
            breakpoints=facts.breakpoints if cache.breakpoints == "auto" else "none",
            key=key,
        )

    async def _settle(self, turn: Turn, outcome: Outcome) -> None:
        """Store how the exchange ended, once, whatever happens to the request meanwhile.

        Raises:
            StoreUnavailable: it could not be stored; nothing was acknowledged.
        """
        if turn.settled:
            return
        turn.settled = True
        turn.mark("settled")
        if outcome.usage is not None:
            model, planned, scale = turn.request.model, turn.ticket.plan, turn.past.scale
            reported = outcome.usage.get("prompt_tokens")
            turn.scale = self._knowledge.learn(model, scale, planned.tokens_sent, reported)
        _LOG.info(
            "exchange",
            extra={
                "fields": log_line(
                    turn.ticket, turn.past.arrival.kind, outcome.status, turn.timings["settled"]
                )
            },
        )
        if not turn.stored:
            return
        if outcome.status is Status.COMPLETE and (turn.began is None or turn.began.done()):
            # Nearly always. What the store was asked for is done, whatever becomes of who asked: it needs no
            # task of its own. Who is being cancelled already could not even ask.
            await self._store_outcome(turn, outcome)
        else:
            await self._background.finish(self._store_outcome(turn, outcome))

    async def _store_outcome(self, turn: Turn, outcome: Outcome) -> None:
        if turn.began is not None:
            await turn.began
        spent = cost(outcome.usage, self._knowledge.facts(turn.request.model).dollars)
        await self._store.settle(settlement_of(turn, outcome, self._now(), self._knowledge.counter, spent))

    def _new_id(self) -> str:
        """Return an exchange's id: ids that this process makes later sort later, to the microsecond."""
        return f"exc_{int(self._knowledge.clock() * 1_000_000):014x}{secrets.token_hex(5)}{self._mark}"

    def _now(self) -> int:
        return self._knowledge.now


def _is_stream(answer: Answer, *, asked: bool) -> bool:
    """Tell whether the answer is a stream of events; some servers do not say so, where one was asked for."""
    kind = (answer.header(b"content-type") or b"").partition(b";")[0].strip().lower()
    return kind == _EVENTS or (asked and kind in _UNNAMED)


def _mode_of(sent: Mapping[bytes, bytes]) -> Mode:
    value = header_of(sent, headers.SESSION_MODE)
    if value is None:
        return Mode.AUTO
    try:
        return Mode(value.strip().lower())
    except ValueError as why:
        raise InvalidRequest(
            f"X-Session-Mode is {value!r}. It can be: auto, append, full.", param="X-Session-Mode"
        ) from why


def _announces_retry(sent: Mapping[bytes, bytes]) -> bool:
    value = header_of(sent, _RETRY_COUNT)
    return value is not None and _POSITIVE.fullmatch(value.strip()) is not None


def _idempotency_of(sent: Mapping[bytes, bytes]) -> str | None:
    """Return a hash of the key by which the client marks all sendings of one request; None without one."""
    value = header_of(sent, _IDEMPOTENCY_KEY)
    return None if value is None else blake2b(value.encode(), digest_size=16).hexdigest()


def _lacks_tools(request: ChatRequest, planned: Plan) -> bool:
    return not request.has_tools and any(message.calls for message in planned.view)


async def _names_usage(answer: Answer) -> bool:
    """Tell whether a refusal is about the usage that was asked for; an answer that breaks is closed."""
    try:
        body = await answer.read()
    except BaseException:  # cancelled too: nobody else holds the answer yet, and it occupies a connection
        await answer.aclose()
        raise
    return b"stream_options" in body or b"include_usage" in body


def _decoded(answer: Answer) -> frozenset[bytes]:
    """Return the headers that no longer hold once the body is relayed decoded."""
    return frozenset({b"content-encoding"}) if answer.encoding and answer.readable else frozenset()
