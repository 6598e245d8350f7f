"""A request on its way to the upstream: asked, and asked once more where that may help.

Once without the usage that the client did not ask for, where an upstream refuses that; once trimmed further,
where it finds the request too long. It does not read what is answered, nor relay it.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from msgspec.structs import replace

from proxy.config import Settings
from proxy.dialects import headers
from proxy.dialects.chat.cache_marks import cache_key
from proxy.dialects.chat.overflow import Overflow, overflow_of
from proxy.dialects.chat.roles import Shape, shape_of
from proxy.pipeline.background import TRIMMING, compute
from proxy.pipeline.body import Sending, body_of_view
from proxy.pipeline.reordering import SAID, Orders
from proxy.pipeline.turn import ExchangeContext
from proxy.trimming import Policy, plan
from proxy.upstream import Answer, Destination, Upstream

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


class UpstreamSender:
    """Asks the upstream for one exchange after another. One for the life of the process."""

    def __init__(self, settings: Settings, upstream: Upstream, cache_secret: bytes) -> None:
        """Ask `upstream`; with `cache_secret` sessions are named in the provider's cache."""
        self._settings = settings
        self._upstream = upstream
        self._cache_secret = cache_secret
        self._dropped = frozenset(
            {b"accept-encoding", *(name.lower().encode() for name in settings.sessions.headers)}
        )
        """Headers that do not go upstream, beside those that never do."""
        self._refuses_usage: set[tuple[str, str]] = set()
        """(address, model) of those that refuse to be asked for their usage."""
        self._orders = Orders()

    async def ask(self, turn: ExchangeContext) -> tuple[Answer, bool]:
        """Ask upstream; return its answer, and whether the usage chunk is to be kept from the client."""
        request = turn.request
        destination = self._upstream.destination(request.model)
        adds_usage = (
            request.stream
            and request.wants_usage is None
            and self._settings.upstream.include_usage == "auto"
            and (destination.base_url, request.model) not in self._refuses_usage
        )
        known: frozenset[Shape] = frozenset()
        if turn.policy is not None:
            turn.shapes = known = self._orders.of(destination.base_url, request.model)
        answer, adds_usage = await self._ask_in_order(turn, destination, adds_usage=adds_usage)
        if answer.status >= 400 and await self._rescued(turn, answer):
            turn.mark("overflowed")
            answer, adds_usage = await self._ask_in_order(turn, destination, adds_usage=adds_usage)
        if turn.shapes:
            if answer.status < 300 and turn.shapes != known:  # it was the order indeed
                self._orders.learn(destination.base_url, request.model, turn.shapes)
            self._say_order(turn)
        return answer, adds_usage

    async def _ask_in_order(
        self, turn: ExchangeContext, destination: Destination, *, adds_usage: bool
    ) -> tuple[Answer, bool]:
        """Ask, and again in the order of roles that a refusal asks for, as long as it asks for another."""
        answer, adds_usage = await self._ask_once(turn, destination, adds_usage=adds_usage)
        while answer.status >= 400 and await self._reordered(turn, answer):
            answer, adds_usage = await self._ask_once(turn, destination, adds_usage=adds_usage)
        return answer, adds_usage

    async def ask_again(self, turn: ExchangeContext, *, adds_usage: bool) -> Answer:
        """Ask upstream for the rest of a reply, after calls of the proxy's own tools; return its answer."""
        destination = self._upstream.destination(turn.request.model)
        answer, _ = await self._ask_once(turn, destination, adds_usage=adds_usage)
        return answer

    async def _ask_once(
        self, turn: ExchangeContext, destination: Destination, *, adds_usage: bool
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

    async def _reordered(self, turn: ExchangeContext, answer: Answer) -> bool:
        """Tell whether the request was refused for the order of its roles, and another can be tried.

        Then that answer is closed. What counts is what this request was sent with: others may know more.
        """
        if turn.policy is None:
            return False
        try:
            shape = shape_of(answer.status, await answer.read())
        except BaseException:  # cancelled too: nobody else holds the answer yet, and it occupies a connection
            await answer.aclose()
            raise
        if shape is None or shape in turn.shapes:
            return False
        sent, before = self._body(turn, adds_usage=False), turn.shapes
        asked: frozenset[Shape] = frozenset({shape})
        turn.shapes = before | asked
        if self._body(turn, adds_usage=False) == sent:
            turn.shapes = before  # there is nothing to put in another order
            return False
        await answer.aclose()
        return True

    def _say_order(self, turn: ExchangeContext) -> None:
        """Say with the ticket in which order roles were put, where that changed what was sent."""
        sent, shapes = self._body(turn, adds_usage=False), turn.shapes
        turn.shapes = frozenset()
        changed = self._body(turn, adds_usage=False) != sent
        turn.shapes = shapes
        if changed:
            said = tuple([SAID[shape] for shape in sorted(shapes)])
            turn.ticket = replace(turn.ticket, warnings=(*turn.ticket.warnings, *said))

    async def _rescued(self, turn: ExchangeContext, answer: Answer) -> bool:
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

    async def _send(self, turn: ExchangeContext, destination: Destination, *, adds_usage: bool) -> Answer:
        """Send the view upstream."""
        sent = headers.to_upstream(
            turn.call.headers,
            drop_credentials=not destination.forwards_credentials,
            extra_drop=self._dropped,
        )
        path = "/chat/completions"
        if turn.call.query and destination.forwards_query:
            path += f"?{turn.call.query.decode('latin-1')}"
        body = self._body(turn, adds_usage=adds_usage)
        turn.sent_bytes = len(body)
        return await self._upstream.ask(
            destination, "POST", path, [*sent, (b"accept-encoding", b"identity")], body
        )

    def _body(self, turn: ExchangeContext, *, adds_usage: bool) -> bytes:
        """Return the body to send: the client's own bytes where nothing was trimmed or added."""
        cache, key, facts = self._settings.cache, None, turn.facts
        if cache.key == "session" and facts.takes_key and turn.past.id is not None:
            key = cache_key(self._cache_secret, turn.call.tenant, turn.past.id)
        sending = Sending(
            add_usage=adds_usage,
            drop_fields=self._settings.sessions.body_fields,
            breakpoints=facts.breakpoints if cache.breakpoints == "auto" else "none",
            key=key,
            tools=turn.tools if turn.own else None,
            rounds=turn.rounds,
            shapes=turn.shapes,
        )
        return body_of_view(turn.request, turn.past, turn.ticket.plan, sending)

    async def _replan(self, turn: ExchangeContext, policy: Policy, overflow: Overflow) -> bool:
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


async def _names_usage(answer: Answer) -> bool:
    """Tell whether a refusal is about the usage that was asked for; an answer that breaks is closed."""
    try:
        body = await answer.read()
    except BaseException:  # cancelled too: nobody else holds the answer yet, and it occupies a connection
        await answer.aclose()
        raise
    return b"stream_options" in body or b"include_usage" in body
