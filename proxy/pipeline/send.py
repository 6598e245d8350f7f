"""Sends a prepared request upstream, and retries it where a change may help.

If the upstream refuses the request, it is sent again:

    without an option that the proxy added    if the upstream refuses the option (usage, caching)
    with its roles in another order           if the upstream insists on an order
    trimmed further                           if it is too long
    untrimmed                                 if anything else in the trimmed request itself is refused
    without older reasoning                   if the upstream refuses reasoning made behind another view
"""

from __future__ import annotations

import hmac
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import sha256
from typing import Final, TypeAlias, TypeVar

from cachetools import LRUCache
from msgspec import Struct
from msgspec.structs import replace

from proxy.config import Settings
from proxy.conversation import Kind
from proxy.dialects import INSTRUCTION_ROLES, Message, Overflow, RoleOrder
from proxy.dialects.jsontext import write
from proxy.pipeline import headers
from proxy.pipeline.background import OFF_LOOP_BYTES, compute
from proxy.pipeline.prepare import Prepared, Preparer, plan_of
from proxy.pipeline.receipt import PlanReport
from proxy.trimming import Policy, merged
from proxy.upstream import Answer, Upstream

RESCUED: Final = "upstream found the request too long: it was trimmed and sent once more"
"""Warning of a request that was accepted after further trimming."""
OPENED: Final = "upstream refused the trimmed request: the original was sent, and this session is not trimmed that way"
"""Warning of a request that was accepted untrimmed."""
HELD: Final = "upstream refused the trim amid a tool loop: it waits for the end of the loop"
"""Warning of a request that was accepted as it was before this trim."""
REFUSED_BOTH: Final = "upstream refused the trimmed request, and the original too"
"""Warning of a request that was refused trimmed and untrimmed."""
UNBOUND: Final = "upstream refused reasoning that was made behind another view: all reasoning so far is left out"
"""Warning of a request that was accepted without older reasoning."""
_OF_REASONING: Final = (b"reasoning", b"thinking", b"signature", b"encrypted")
"""Words in a refusal of reasoning, in lower case."""
_OF_A_FIELD: Final = frozenset({400, 422})  # statuses that refuse an unknown field
_NOT_OF_THE_BODY: Final = frozenset({401, 403, 407, 413, 429})
"""Statuses that the original would get too: wrong credentials, too many bytes, too many requests."""
_REORDERED: Final[Mapping[RoleOrder, str]] = {
    "alternate": "upstream wants the roles to alternate: neighbouring user messages were put together",
    "one_system": "upstream wants one system message: later ones were put at its end",
}
"""Warning of a request whose roles were reordered."""

_PROVIDERS_OWN: Final = frozenset({"metadata.user_id", "prompt_cache_key", "conversation"})
"""Fields that may name the session but also mean something to the provider, so they are sent."""
_SESSIONS: Final = 256  # limit of sessions with remembered facts about cache marks
_BYTES_PER_TOKEN: Final = 4  # approximately
_MODELS: Final = 1024  # limit of models with remembered refusals; clients choose the names
_LEAST_REPLY: Final = 256  # tokens reserved for a reply if its length is not given
_MARGIN: Final = 0.8
"""The part of a window that is filled after an overflow.

The remaining text is of another kind than the removed text, so the two token counts of it may differ by a fourth. The
next turns need room too.
"""
_OPENING_SECONDS: Final = 2.0  # how long a stream's first events are held until one shows that it is no error
_TRIALS: Final = 2  # plans after an overflow; a second one is made if the first seems too long by its bytes
_LEAST_STEP: Final = 0.5  # lowest factor for the second target (an image has many bytes and few tokens)


Found = TypeVar("Found")


class _Instructed(Struct, frozen=True, kw_only=True):
    """The instructions and tools of a session's last request, and where they begin to differ between requests."""

    exchange: str
    messages: Sequence[Message]
    tools: int  # hash of the tools' JSON text
    others: bool  # whether the previous request had other tools
    place: int | None = None  # index of the first message that changed; None if nothing has changed
    at: int = 0  # characters of its text before the change

    @property
    def same(self) -> bool:
        """Whether the session's instructions and tools have stayed the same, as far as known."""
        return self.place is None and not self.others

    def shared_end(self, least: int) -> tuple[int, int] | None:
        """Return where the prefix ends that the session's requests share: (message index, characters of its text).

        Returns None if nothing has changed so far, or if the prefix has fewer than `least` bytes. The prefix ends with
        a line, or with a word if there is only one line. It only ever gets shorter, so what the provider cached is
        found again.
        """
        place, at, messages = self.place, self.at, self.messages
        if place is None or place >= len(messages) or sum([len(each.raw) for each in messages[:place]]) + at < least:
            return None
        if at:
            return place, at
        return (place - 1, len(messages[place - 1].text)) if place else None


Replanned: TypeAlias = Callable[[PlanReport, str], None]
"""Called with the current report and the event that led to it.

The event is "overflowed", "refused" or "unbound" before another plan is sent, and "refused_again" when the first plan
applies again.
"""


class Attempt(Struct, kw_only=True):
    """How a request is sent. Changes when the upstream refuses something."""

    prepared: Prepared
    report: PlanReport  # of the plan that is sent; a retry may replace it
    told: Replanned
    adds_usage: bool  # whether the proxy asks for usage that the client did not ask for, and hides it
    orders: frozenset[RoleOrder]  # the orders of roles that the upstream insists on
    rounds: Sequence[Message] = ()  # calls of the proxy's own tools and their results, sent after the view
    sent_bytes: int = 0  # size of the last body that was sent
    caches_newest: bool = False  # whether the provider may be asked to cache automatically up to the newest message
    answer: Answer | None = None  # the last answer

    def replan(self, report: PlanReport, event: str) -> None:
        """Send another plan from now on, and report the event."""
        self.report = report
        self.told(report, event)

    async def close(self) -> None:
        """Close the last answer, which occupies a connection. Called before a retry, or if nothing takes the answer."""
        if self.answer is not None:
            await self.answer.aclose()


class Sent(Struct, frozen=True, kw_only=True):
    """A request that the upstream has begun to answer: the second stage of an exchange."""

    attempt: Attempt
    answer: Answer  # the holder of this object must close it


class UpstreamSender:
    """Sends requests upstream. One for the life of the process."""

    def __init__(self, settings: Settings, upstream: Upstream, preparer: Preparer, cache_secret: bytes) -> None:
        """Send to `upstream` what `preparer` made. `cache_secret` makes the sessions' keys for the provider's cache."""
        self._settings = settings
        self._upstream = upstream
        self._preparer = preparer
        self._cache_secret = cache_secret
        self._dropped = frozenset({b"accept-encoding", *(name.lower().encode() for name in settings.sessions.headers)})
        """Headers to drop, in addition to those that never go upstream."""
        self._drop_fields = tuple([path for path in settings.sessions.body_fields if path not in _PROVIDERS_OWN])
        self._refuses_usage: LRUCache[tuple[str, str], bool] = LRUCache(_MODELS)
        """(address, model) of models that refuse a request for usage."""
        self._refuses_caching: LRUCache[tuple[str, str], bool] = LRUCache(_MODELS)
        """(address, model) of models that refuse to cache automatically up to the newest message."""
        self._unmarked: LRUCache[str, bool] = LRUCache(_SESSIONS)
        """Sessions that had an untrimmed request refused while marked. They are marked again only once trimmed."""
        self._orders: LRUCache[tuple[str, str], frozenset[RoleOrder]] = LRUCache(_MODELS)
        """The orders of roles that a model insists on. Learnt from a refusal, if reordering helped."""
        self._instructed: LRUCache[tuple[str, str | None, int | None], _Instructed] = LRUCache(2 * _SESSIONS)
        """By session, agent and tools, for providers that take cache marks. None for tools: of the last request."""

    async def send(self, prepared: Prepared, replanned: Replanned) -> Sent:
        """Send a request. Return the answer, whatever its status; raises `PalimpsestError` if there is none."""
        request, policy = prepared.request, prepared.context.policy
        model = (prepared.destination.base_url, request.model)
        known: frozenset[RoleOrder] = frozenset() if policy is None else self._orders.get(model, frozenset())
        adds_usage = (
            request.stream
            and request.wants_usage is None
            and self._settings.upstream.include_usage == "auto"
            and model not in self._refuses_usage
        )
        # A view that is trimmed anew at each request is never found in the cache again.
        lasts = policy is not None and not (policy.trigger is not None and policy.trigger.every_request)
        attempt = Attempt(
            prepared=prepared,
            report=prepared.report,
            told=replanned,
            adds_usage=adds_usage,
            caches_newest=lasts and model not in self._refuses_caching,
            orders=known,
        )
        try:
            answer = await self._ask(attempt)
            if policy is not None and (answer.status >= 400 or request.stream):
                answer = await self._accepted(attempt, policy, answer)
        except BaseException:
            await attempt.close()
            raise
        if attempt.orders:
            if answer.status < 300 and attempt.orders != known:  # the order was the cause
                self._orders[model] = self._orders.get(model, frozenset()) | attempt.orders
            if self._body(attempt, attempt.orders) != self._body(attempt, frozenset()):
                warnings = (*attempt.report.warnings, *[_REORDERED[order] for order in sorted(attempt.orders)])
                attempt.report = replace(attempt.report, warnings=warnings)
        return Sent(attempt=attempt, answer=answer)

    async def send_rounds(self, sent: Sent, rounds: Sequence[Message]) -> Answer:
        """Send the same view again with `rounds` after it: calls of the proxy's own tools, and their results."""
        attempt = replace(sent.attempt, rounds=rounds, answer=None)
        try:
            return await self._ask(attempt)
        except BaseException:
            await attempt.close()
            raise

    async def _ask(self, attempt: Attempt) -> Answer:
        """Send once. If the upstream refuses an option that the proxy added, send again without it."""
        answer = await self._post(attempt)
        if not (attempt.adds_usage or attempt.caches_newest) or answer.status < 400:
            return answer
        prepared, refusal = attempt.prepared, await answer.read()
        api, model = prepared.call.dialect.requests, (prepared.destination.base_url, prepared.request.model)
        named = api.refuses_caching(refusal)
        refusing: LRUCache[tuple[str, str], bool] | None = None
        if attempt.adds_usage and answer.status in _OF_A_FIELD and api.refuses_usage(refusal):
            attempt.adds_usage, refusing = False, self._refuses_usage
        elif attempt.caches_newest and (named or await self._may_refuse_our_mark(attempt, answer)):
            sent = self._body(attempt, attempt.orders)
            attempt.caches_newest = False
            if self._body(attempt, attempt.orders) == sent:  # the refused mark is the client's own
                return answer
            if named:
                refusing = self._refuses_caching
            else:  # the session's next refusal may have another cause; do not send those requests twice
                self._unmarked[prepared.key] = True
        else:
            return answer
        answer = await self._post(attempt)
        if refusing is not None and answer.status < 300:  # the proxy's option was the cause, not the client's request
            refusing[model] = True
        return answer

    @staticmethod
    async def _may_refuse_our_mark(attempt: Attempt, answer: Answer) -> bool:
        """Tell whether to retry an untrimmed request without our mark: our mark alone may be what is refused."""
        prepared, api = attempt.prepared, attempt.prepared.call.dialect.requests
        untrimmed = attempt.report.plan.view == prepared.request.messages
        return answer.status in _OF_A_FIELD and untrimmed and await _told(answer, api.overflow_of) is None

    async def _accepted(self, attempt: Attempt, policy: Policy, answer: Answer) -> Answer:
        """Retry a refused request in each way that may help. Return the answer that the client gets."""
        prepared, requests = attempt.prepared, attempt.prepared.call.dialect.requests
        if prepared.request.stream and requests.opening_error is not None and 200 <= answer.status < 300:
            answer = await self._past_opening(attempt, policy, answer, requests.opening_error)
        if answer.status < 400 or attempt.report is not prepared.report:  # the client gets a second refusal
            return answer
        answer = await self._reordered(attempt, answer)
        first, refusal = attempt.report, answer
        overflow = await _told(answer, requests.overflow_of) if answer.status >= 400 else None
        if await self._trim_harder(attempt, policy, overflow):
            answer = await self._reordered(attempt, await self._ask(attempt))
            # Amid a tool loop, a refusal for another reason than length is for its reasoning: relay the first refusal.
            refused = prepared.planning.binds_loop and _is_of_the_body(answer)
            if refused and await _told(answer, requests.overflow_of) is None:
                await answer.aclose()
                answer = refusal
                attempt.replan(replace(first, warnings=(*first.warnings, REFUSED_BOTH)), "refused_again")
        elif _is_of_the_body(answer):
            answer = await self._refused(attempt, answer)
        return answer

    async def _reordered(self, attempt: Attempt, answer: Answer) -> Answer:
        """Send again in the order of roles that a refusal asks for, until no new order is asked for."""
        while answer.status >= 400:
            order = await _told(answer, attempt.prepared.call.dialect.requests.demanded_order)
            if order is None or order in attempt.orders:
                return answer
            demanded: frozenset[RoleOrder] = frozenset({*attempt.orders, order})
            if self._body(attempt, demanded) == self._body(attempt, attempt.orders):
                return answer
            attempt.orders = demanded
            answer = await self._ask(attempt)
        return answer

    async def _past_opening(
        self, attempt: Attempt, policy: Policy, answer: Answer, opening_error: Callable[[bytes], bytes | None]
    ) -> Answer:
        """Trim further and ask again if a stream begins with the error that the request is too long."""
        error = await answer.opening(opening_error, _OPENING_SECONDS) if answer.readable else None
        overflow = attempt.prepared.call.dialect.requests.overflow_of(400, error) if error else None
        return await self._ask(attempt) if await self._trim_harder(attempt, policy, overflow) else answer

    async def _refused(self, attempt: Attempt, answer: Answer) -> Answer:
        """Retry after a refusal of the request itself; see `_opened` and `_unbound`."""
        if attempt.report.plan.trimmed:
            return await self._unbound(attempt, await self._opened(attempt, answer))
        # Earlier requests were accepted with this trim. If reasoning is the cause, the session can stay trimmed.
        answer = await self._unbound(attempt, answer)
        return answer if answer.status < 400 else await self._opened(attempt, answer)

    async def _opened(self, attempt: Attempt, answer: Answer) -> Answer:
        """Send the original once if the upstream refused the trimmed request.

        If the original is accepted, trimming was the cause, and the session keeps the original's plan. If it is refused
        too, the first plan stays.
        """
        prepared, first = attempt.prepared, attempt.report
        if await _told(answer, prepared.call.dialect.requests.overflow_of) is not None:
            return answer
        original = await self._preparer.original_of(prepared)
        if original is None:
            return answer
        made = original.plan
        if made.view == first.plan.view and made.summary == first.plan.summary:
            return answer
        warning = HELD if original.waits else OPENED
        attempt.replan(prepared.reported(made, (*first.beside, warning)), "refused")
        attempt.caches_newest = False  # the original is the client's own bytes
        answer = await self._ask(attempt)
        if answer.status >= 400:
            attempt.replan(replace(first, warnings=(*first.warnings, REFUSED_BOTH)), "refused_again")
        elif original.waits:
            self._preparer.let_trims_wait(prepared)
        return answer

    async def _unbound(self, attempt: Attempt, answer: Answer) -> Answer:
        """Send once without older reasoning if the upstream refused it. If it refuses again, the first plan stays."""
        if answer.status not in _OF_A_FIELD or not await _told(answer, _speaks_of_reasoning):
            return answer
        first, prepared = attempt.report, attempt.prepared
        made = await self._preparer.unbound_of(prepared, first.plan)
        if made is None:
            return answer
        warnings = [each for each in first.beside if each != REFUSED_BOTH]
        attempt.replan(prepared.reported(made, (*warnings, UNBOUND)), "unbound")
        again = await self._ask(attempt)
        if again.status < 400:
            return again
        await again.aclose()
        attempt.replan(first, "refused_again")
        return answer

    async def _trim_harder(self, attempt: Attempt, policy: Policy, overflow: Overflow | None) -> bool:
        """Trim a request that the upstream found too long to a safe size. Tell whether that made it shorter."""
        if overflow is None:
            return False
        prepared, first, size = attempt.prepared, attempt.report, attempt.sent_bytes
        history, planning = prepared.history, prepared.planning
        before = shortest = first.plan.tokens_sent
        window = overflow.window or planning.context_window
        room: float | None = None
        if window is not None:
            reply = overflow.reply or prepared.request.reply_tokens or _LEAST_REPLY
            # A reply limit as large as the window reserves nothing: the reply simply ends with the window.
            room = (window - (reply if reply < window else _LEAST_REPLY)) * _MARGIN
        # Scale by the upstream's own count of this request, if it gives one. Never scale below the usual scale or 1,
        # because a low scale may come from text that is about to be dropped.
        scale = max(overflow.asked / before if overflow.asked and before else 1.0, planning.scale, 1.0)
        target = before // 2 if room is None else min(before // 2, int(room / scale))
        for _ in range(_TRIALS):
            made = await plan_of(history, first.plan.policy, policy, planning, overflow=max(target, 1))
            if made.tokens_sent >= shortest:
                break
            shortest = made.tokens_sent
            attempt.report = prepared.reported(made, (*first.beside, RESCUED))
            if room is None or overflow.asked is None or not size:
                break
            # Many short messages may count for more than their text. The size of the body shows that.
            expected = overflow.asked * len(self._body(attempt, attempt.orders)) / size
            if expected <= room:
                break
            target = int(target * max(room / expected, _LEAST_STEP))
        if shortest < before:
            attempt.told(attempt.report, "overflowed")
        return shortest < before

    async def _post(self, attempt: Attempt) -> Answer:
        """Send the body, after closing the answer to the previous attempt."""
        await attempt.close()
        call, destination = attempt.prepared.call, attempt.prepared.destination
        body = self._body(attempt, attempt.orders)
        attempt.sent_bytes = len(body)
        sent = headers.to_upstream(
            call.headers, drop_credentials=not destination.forwards_credentials, extra_drop=self._dropped
        )
        sent.append((b"accept-encoding", b"identity"))
        path = call.dialect.requests.path
        if call.query and destination.forwards_query:
            path += f"?{call.query.decode('latin-1')}"
        attempt.answer = await self._upstream.ask(destination, "POST", path, sent, body)
        return attempt.answer

    def _body(self, attempt: Attempt, orders: Collection[RoleOrder]) -> bytes:
        """Return the body to send: the client's own bytes if nothing was trimmed or added."""
        prepared, made, settings = attempt.prepared, attempt.report.plan, self._settings
        request, history, facts, dialect = prepared.request, prepared.history, prepared.facts, prepared.call.dialect
        api = dialect.requests
        instructions, view = history.instructions, made.view
        if made.summary is not None and made.summary.role == "merge":
            instructions = merged(instructions, made.summary, dialect)
        instructions, view, newest = self._marked(attempt, instructions, view)
        if history.owed:
            view = (*history.owed, *view)
        if attempt.rounds:
            view = (*view, *attempt.rounds)
        if orders:
            whole = (*instructions, *view)
            for order in sorted(orders):
                whole = api.reordered(whole, order)
            lead = next((at for at, each in enumerate(whole) if each.role not in INSTRUCTION_ROLES), len(whole))
            instructions, view = whole[:lead], whole[lead:]
        if newest and tuple(view) == request.messages:
            goes_on = prepared.key not in self._unmarked and _is_read_again(prepared)
            newest = goes_on and attempt.report.tokens_sent >= facts.prices.minimum
        key = None
        if settings.cache.key == "session" and facts.takes_key and history.id is not None and not request.untouched:
            key = cache_key(self._cache_secret, prepared.call.tenant, history.id)
        return api.compose(
            request,
            instructions=instructions,
            messages=view,
            add_usage=attempt.adds_usage,
            drop_fields=(*self._drop_fields, *api.state_fields) if history.arrival.expanded else self._drop_fields,
            cache_key=key,
            cache_newest=newest,
            tools=prepared.tools if prepared.tools is not request.tools else None,
        )

    def _marked(
        self, attempt: Attempt, instructions: tuple[Message, ...], view: tuple[Message, ...]
    ) -> tuple[tuple[Message, ...], tuple[Message, ...], bool]:
        """Set cache marks at the ends of prefixes that later requests share.

        Returns the instructions, the view, and whether the newest message may end such a prefix.
        """
        prepared, lead = attempt.prepared, len(instructions)
        api, marks = prepared.call.dialect.requests, prepared.facts.breakpoints
        never = self._settings.cache.breakpoints == "never"
        if marks == "none" or never or api.decides_caching(prepared.request.fields):
            return instructions, view, False
        whole = (*instructions, *view)
        if attempt.report.plan.stable_ends:
            whole = api.marked(whole, [lead + end - 1 for end in attempt.report.plan.stable_ends], marks)
        lasts = not attempt.report.only_observed
        if lasts and (instructed := self._compared(prepared)) is not None:
            least = prepared.facts.prices.minimum * _BYTES_PER_TOKEN - len(prepared.tools or b"")
            if (end := instructed.shared_end(least)) is not None:
                whole = api.broken(whole, *end, marks)
            lasts = instructed.same  # behind instructions that change with each request nothing is found again
        return whole[:lead], whole[lead:], lasts and attempt.caches_newest and marks == "anthropic"

    def _compared(self, prepared: Prepared) -> _Instructed | None:
        """Compare instructions and tools with those of the session's earlier requests, and remember them.

        Returns None if they are not compared: long ones would take too long, and a side request has its own.
        """
        history = prepared.history
        if prepared.context.policy is None or history.id is None or prepared.request.untouched:
            return None
        is_long = sum([len(message.raw) for message in history.instructions]) >= OFF_LOOP_BYTES
        if is_long or history.arrival.kind is Kind.SIDE:
            return None
        tools = hash(prepared.tools)
        key, latest = (prepared.key, prepared.context.agent, tools), (prepared.key, prepared.context.agent, None)
        # Tools come before instructions in the prompt. With other tools (a subagent's, say) no prefix is shared.
        now, known, last = history.instructions, self._instructed.get(key), self._instructed.get(latest)
        place, at = (known.place, known.at) if known is not None else (None, 0)
        if known is not None and (differing := _first_difference(known.messages, now)) is not None:
            place, at = min(differing, (place, at)) if place is not None else differing
        others = last is not None and last.tools != tools
        if last is not None and last.exchange == prepared.report.exchange:  # its body is built again
            others = last.others
        found = self._instructed[key] = self._instructed[latest] = _Instructed(
            exchange=prepared.report.exchange, messages=now, tools=tools, others=others, place=place, at=at
        )
        return found


def _is_read_again(prepared: Prepared) -> bool:
    """Tell whether an untrimmed request continues its session, so that the next request likely repeats it.

    It does if its newest reply is stored at that place. A first request may be the only one, a window moves on, and
    questions that begin with the same examples share only those. Without a trigger nothing is ever trimmed.
    """
    request, arrival, policy = prepared.request, prepared.history.arrival, prepared.context.policy
    if policy is None or policy.trigger is None or request.untouched or not request.replies:
        return False
    return arrival.kind is Kind.RESEND and request.replies[-1] < arrival.known


def _first_difference(before: Sequence[Message], now: Sequence[Message]) -> tuple[int, int] | None:
    """Return where two lists of instructions begin to differ: (message index, characters before the difference).

    The characters are rounded down to whole lines, or to whole words on the first line. Returns None if they are equal.
    """
    for place, (old, new) in enumerate(zip(before, now, strict=False)):
        if old.raw == new.raw:
            continue
        text, other = new.text, old.text
        same = bisect_left(range(min(len(text), len(other))), True, key=lambda at: text[: at + 1] != other[: at + 1])
        return place, text.rfind("\n", 0, same) + 1 or text.rfind(" ", 0, same) + 1
    shorter = min(len(before), len(now))
    return (shorter, 0) if len(before) != len(now) else None


def cache_key(secret: bytes, tenant: str, session: str) -> str:
    """Return a session's cache key, 32 hexadecimal digits. It is deterministic.

    `secret` belongs to this installation, so nobody else can tell which session a key belongs to. OpenAI accepts at
    most 64 characters; 32 do not collide by chance.
    """
    return hmac.new(secret, write([tenant, session]), sha256).hexdigest()[:32]


def _is_of_the_body(answer: Answer) -> bool:
    """Tell whether the answer refuses something in the request itself."""
    return 400 <= answer.status < 500 and answer.status not in _NOT_OF_THE_BODY


async def _told(answer: Answer, of: Callable[[int, bytes], Found]) -> Found:
    """Return what `of` finds in an error. Runs in a thread if the error is long; some errors repeat the request."""
    body = await answer.read()
    return await compute(len(body), of, answer.status, body)


def _speaks_of_reasoning(_: int, body: bytes) -> bool:
    """Tell whether an error mentions reasoning. A regular expression would take a second for the longest error."""
    said = body.lower()
    return any([word in said for word in _OF_REASONING])
