"""The cost model: whether a trim pays. It compares what the trim rewrites in the provider's cache with what it frees.

A token that is read from the cache costs `read`; one that is written to it costs `write` (uncached input = 1).
A trim makes every later request cheaper and this one more expensive: everything from its first change on must be
written to the cache again. A trim must pass these rules:

    interval    Each request since the last trim paid for reading tokens that could have been freed. The trim is due
                when these payments add up to its own cost K. If a log grows by `g` tokens per turn, that is when it
                has grown by sqrt(2 * g * K / read): the cheapest interval in the long run.
    edits       Each edit must pay for what it rewrites itself, within as many turns as there were so far.
    risk        The session may end with this request. So the net loss of all trims stays a small part of what the
                session would have cost without trims. More is risked only if it is paid back within few requests,
                compared with those so far, since long sessions tend to last. The limit is `HIGHEST_RISK`, or
                `HIGHEST_KNOWN` if the known prices already are the worst.
    doubt       The prices may be wrong. So the risk rule must also hold at the worst prices, where cached tokens are
                as cheap, and writing them is as expensive, as at any provider: there a trim gains least and costs
                most. If the worst prices are far from the known ones, a session may risk more once its user has come
                back (before, it may end with its first task). The farther off they are, the less it may risk.
    short       If cached tokens are expensive, the first trims of a short view cost nothing at the known prices.
                These must pass the doubt rule too: a session that stays short has little to save and much to lose.
    minimum     A prefix below the provider's minimum is never cached and is paid in full each time. So no trim makes
                a view so short, unless that is still cheaper than reading the whole view from the cache.

Costs are in tokens of uncached input. The cache counts as warm if the session was not idle for longer than the
cache's lifetime.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import ceil
from operator import mul, sub
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from proxy.dialects import Message
from proxy.trimming.draft import Draft
from proxy.trimming.model import ASSUMED, Account, Cut, Entry, Outlay, PlanningContext, Prices, Summary

# Limits of the net loss of all trims (cost minus savings), as a part of what the input costs without trims:
RISK: Final = 0.018  # the usual limit
RISK_IN_DOUBT: Final = 0.03  # the usual limit at the worst prices
SOON: Final = 0.17  # more is allowed if it is paid back within this part of the number of requests so far
HIGHEST_RISK: Final = 0.035  # the limit of that
HIGHEST_KNOWN: Final = 0.04  # the same if the known prices are the worst ones, so that there is no doubt
HIGHEST_IN_DOUBT: Final = 0.1  # the same at the worst prices
_FAR_OFF: Final = 4  # the worst prices are far off if the known price of a cached token is so many times the worst one
HIGHEST_FAR_OFF: Final = 0.2  # the limit at worst prices that are far off
_WORST_READ, _WORST_WRITE = 0.05, 1.25  # lowest price of a cached token; highest price of one written to the cache
EXPECTED_TURNS: Final = 8  # turns that are expected to follow at least, even in a new session

HIGHEST_READ: Final = 0.46  # upper limit of `read` in the model: above it, trimming more often saves hardly more
DEAR: Final = 0.25  # price of a cached token from which trims keep more, since losing content costs most there
SHORT: Final = 20_000  # a view of fewer tokens is short; if cached tokens are expensive, a trim may not be worth it


class Balance(Struct, frozen=True, kw_only=True):
    """How a trim changes costs."""

    loss: float  # how much more this request costs; negative if it costs less
    gain: float  # how much less each later request costs
    freed: int  # tokens that are no longer sent
    rewritten: int  # tokens of this request that are not read from the cache

    def pays_within(self, turns: float) -> bool:
        """Tell whether the trim has paid for itself after so many turns."""
        return self.freed > 0 and self.loss <= self.gain * turns

    def since(self, other: Balance) -> Balance:
        """Return the difference to another balance, one of fewer changes."""
        return Balance(
            loss=self.loss - other.loss,
            gain=self.gain - other.gain,
            freed=self.freed - other.freed,
            rewritten=self.rewritten - other.rewritten,
        )


NO_CHANGE: Final = Balance(loss=0, gain=0, freed=0, rewritten=0)  # the balance of a trim that changes nothing


class Costs(Struct, frozen=True, kw_only=True):
    """The state of a branch by which the cost of a trim is judged."""

    prices: Prices
    warm: bool  # whether the provider's cache still holds what the last request sent
    messages: tuple[Message | None, ...]  # by place the message sent without the trim; None if there is none
    tokens: tuple[int, ...]  # tokens of these messages
    summary: Summary | None  # the summary sent without the trim
    fixed: int  # tokens of instructions and tools
    cached: int  # number of places that the last request covered
    account: Account  # cost of input before this request
    earlier: int  # number of requests before the newest user message
    reads: tuple[int, ...]  # for each place the number of requests since it was added, or since the last trim

    @property
    def worst(self) -> Prices:
        """The prices at which a trim pays least."""
        return worst_of(self.prices)

    @property
    def _is_far_off(self) -> bool:
        """Whether the worst prices are far off: a trim that saves much at the known prices may lose much at them."""
        return self.prices.read >= _FAR_OFF * self.worst.read > 0

    @property
    def _is_dear_and_short(self) -> bool:
        """Whether cached tokens are expensive and the view is short."""
        return self.prices.read >= DEAR and self.stays < SHORT

    @property
    def stays(self) -> int:
        """The tokens of this request without the trim."""
        return self.fixed + summary_tokens(self.summary) + sum(self.tokens)

    @property
    def held(self) -> int:
        """The number of these tokens that the cache holds."""
        return self.fixed + summary_tokens(self.summary) + sum(self.tokens[: self.cached]) if self.warm else 0

    def balance(self, draft: Draft) -> Balance:
        """Return the balance of sending `draft` instead. Its places are those of `messages`."""
        left = 0
        if self.warm:
            left = self.fixed
            if draft.summary is self.summary:
                left += summary_tokens(self.summary) + sum(self.tokens[: self._first_change(draft)])
        return self._balance(draft.total, left, self.prices)

    def timely(self, balance: Balance, tokens: Sequence[int]) -> bool:
        """Tell whether a trim that leaves `tokens` is due (waiting has cost as much as the trim) and affordable."""
        return self._timely(balance, sum(map(mul, map(sub, self.tokens, tokens), self.reads)))

    def first_place(self, starts: Iterable[int], draft: Draft) -> int | None:
        """Return the start from which on the draft's changes save most, among those that are due and affordable.

        Returns None if there is none. If the worst prices are far off and the best start is due but not affordable
        yet, the result is None too: smaller trims would use up the allowed loss and delay the best one.
        """
        best: tuple[float, int, bool] | None = None
        waits = self._is_far_off
        for start, balance, waited in self._changed_from(starts, draft.tokens):
            saved = balance.gain * self.expected - balance.loss
            if (best is None or saved > best[0]) and self._is_due(balance, waited):
                is_affordable = self.affordable(balance)
                if is_affordable or waits:
                    best = (saved, start, is_affordable)
        return best[1] if best is not None and best[2] else None

    def may_pay(self, starts: Iterable[int], tokens: Sequence[int]) -> bool:
        """Tell whether a trim from one of `starts` on may be due and affordable if it leaves at least these `tokens`.

        True if the trim may leave less than the shortest cached prefix. There fewer tokens can cost more, so that no
        bound is known.
        """
        stays, minimum = self.stays, self.prices.minimum
        return any(
            stays - balance.freed < minimum or (self._has_waited(balance, waited) and self.affordable(balance))
            for _, balance, waited in self._changed_from(starts, tokens)
        )

    def summary_pays(self, draft: Draft, imagined: Draft, before: Balance) -> bool:
        """Tell whether it pays to make a summary and trim with it; `before` is the balance of the changes so far."""
        written = summary_tokens(imagined.summary)
        balance = self.balance(imagined).since(before)
        making = draft.total - imagined.total + written + self.prices.output * written
        return replace(balance, loss=balance.loss + making).pays_within(self.expected)

    def affordable(self, balance: Balance) -> bool:
        """Tell whether the net loss of all trims, including this one, is small or soon paid back (`RISK`, `SOON`)."""
        account, turns = self.account, self.account.turns
        if balance.loss <= 0 and not self._is_dear_and_short:
            return True
        sent, worst = self.stays - balance.freed, self.worst
        highest = HIGHEST_KNOWN if self.prices == worst else HIGHEST_RISK
        if not _is_borne(balance, account, RISK, SOON * turns, highest):
            return False
        doubted = self._balance(sent, sent - balance.rewritten, worst)
        soon, most = SOON * turns, HIGHEST_IN_DOUBT
        if self._is_far_off:
            # The farther off the worst prices are, the fewer of the earlier requests count.
            soon, most = max(soon, self.earlier * _FAR_OFF * worst.read / self.prices.read), HIGHEST_FAR_OFF
        return _is_borne(doubted, account.worst or account, RISK_IN_DOUBT, soon, most)

    def paid_back(self, balance: Balance) -> int:
        """Return the number of requests after which a trim has paid for itself."""
        return max(0, ceil(balance.loss / balance.gain)) if balance.gain > 0 else 0

    @property
    def expected(self) -> int:
        """The number of turns that are expected to follow."""
        return max(self.account.turns, EXPECTED_TURNS)

    def _timely(self, balance: Balance, waited: int) -> bool:
        """Tell whether a trim is due and affordable; `waited` counts the tokens read that it would have freed."""
        return self._is_due(balance, waited) and self.affordable(balance)

    def _changed_from(self, starts: Iterable[int], tokens: Sequence[int]) -> Iterator[tuple[int, Balance, int]]:
        """Yield (start, balance, waited) for a trim that leaves `tokens` from each start on.

        `waited` counts the tokens that requests have read so far and that this trim frees.
        """
        ahead = [0, *accumulate(self.tokens)]
        less = list(map(sub, self.tokens, tokens))
        freed, waited = [0, *accumulate(less)], [0, *accumulate(map(mul, less, self.reads))]
        stays, lead = self.stays, self.fixed + summary_tokens(self.summary)
        for start, following in pairwise([*starts, len(less)]):
            if freed[start] == freed[following]:
                continue  # nothing is freed before the next start: that one frees as much and rewrites less
            left = lead + ahead[min(start, self.cached)] if self.warm else 0
            balance = self._balance(stays - freed[-1] + freed[start], left, self.prices)
            yield start, balance, waited[-1] - waited[start]

    def _is_due(self, balance: Balance, waited: int) -> bool:
        """Tell whether waiting has cost as much as the trim, and the trimmed view can be cached."""
        stays, prices = self.stays, self.prices
        if not self._has_waited(balance, waited):
            return False
        # A view below the minimum is not cached: each request pays for all of it.
        is_cached = stays - balance.freed >= prices.minimum
        return is_cached or prices.write * prices.minimum <= prices.read * stays

    def _has_waited(self, balance: Balance, waited: int) -> bool:
        """Tell whether waiting has cost as much as the trim: requests read `waited` tokens that it would have freed."""
        rate = self.prices.factor(self.stays) * self.prices.read
        return balance.freed > 0 and balance.loss <= rate * waited

    def _balance(self, sent: int, left: int, prices: Prices) -> Balance:
        """Return the balance of sending `sent` tokens, the first `left` of them from the cache."""
        stays = self.stays
        left = left if left >= prices.minimum else 0
        loss = _once(prices, sent, left) - _once(prices, stays, self.held)
        gain = _once(prices, stays, stays) - _once(prices, sent, sent)
        return Balance(loss=loss, gain=gain, freed=stays - sent, rewritten=sent - left)

    def _first_change(self, draft: Draft) -> int:
        """Return the first place that the draft changes; if it changes none that was sent before, `cached`."""
        pairs = zip(self.messages[: self.cached], draft.messages, strict=False)
        differing = (at for at, (sent, now) in enumerate(pairs) if sent is not now and sent != now)
        first = next(differing, self.cached)
        # If only hidden rounds were dropped, the message is the same but its tokens are fewer.
        counts = zip(self.tokens[:first], draft.tokens, strict=False)
        return next((at for at, (sent, now) in enumerate(counts) if sent != now), first)


def _is_borne(balance: Balance, spent: Outlay, risk: float, turns: float, most: float) -> bool:
    """Tell whether the net loss of all trims stays within its limit.

    The limit is the part `risk` of the untrimmed cost, plus what the trim gains in `turns` turns, but at most the part
    `most` of the untrimmed cost.
    """
    borne = min(risk * spent.untrimmed + balance.gain * turns, most * spent.untrimmed)
    return balance.loss - spent.saved <= borne


def _once(prices: Prices, tokens: int, cached: int) -> float:
    """Return the cost of one request with so many `tokens`, of which `cached` are in the cache."""
    if cached < prices.minimum:
        cached = 0
    return prices.factor(tokens) * (prices.read * cached + prices.write * (tokens - cached))


def summary_tokens(summary: Summary | None) -> int:
    """Return the tokens of a summary; 0 if there is none."""
    return summary.tokens if summary is not None else 0


def reads_of(entries: Sequence[Entry], start: int) -> tuple[int, ...]:
    """Return for each message the number of requests so far that sent it: the assistant messages after it.

    Assistant messages before position `start` do not count.
    """
    reads: list[int] = []
    later = 0
    for entry in reversed(entries):
        reads.append(later)
        later += entry.message.role == "assistant" and entry.position >= start
    return tuple(reversed(reads))


def prices_of(context: PlanningContext) -> Prices:
    """Return the prices for the cost model: `read` is at most `HIGHEST_READ`, and sizes are in tokens counted here."""
    prices, scale = context.prices or ASSUMED, context.scale
    read = min(prices.read, HIGHEST_READ) * prices.served + (1 - prices.served) if prices.read < 1 else prices.read
    if scale == 1 and read == prices.read:
        return prices
    steps = tuple(replace(step, above=int(step.above / scale)) for step in prices.steps)
    return replace(prices, read=read, minimum=ceil(prices.minimum / scale), steps=steps)


def worst_of(prices: Prices) -> Prices:
    """Return the worst prices that a provider may have; without a cache (`read` of 1) the prices themselves."""
    if prices.read >= 1:
        return prices
    read = _WORST_READ * prices.served + (1 - prices.served)
    return replace(prices, read=min(prices.read, read), write=max(prices.write, _WORST_WRITE))


def account_of(entries: Sequence[Entry], cut: Cut | None, context: PlanningContext, before: int) -> Account:
    """Return the cost of a branch's input before this request; `before` are the tokens of this request untrimmed.

    Each assistant message stands for one request. The requests before the cut are in the cut's account.
    """
    prices = prices_of(context)
    start = cut.position if cut is not None else 0
    new = [entry for entry in entries if entry.position >= start]
    prefix = before - sum([entry.tokens for entry in new])
    account, freed, sent = Account(turns=0, untrimmed=0.0, saved=0.0), 0, 0
    counted = False
    if cut is not None:
        freed = max(0, prefix - cut.tokens)
        if cut.account is not None:
            # The account already includes the request that trimmed.
            account, counted, sent = cut.account, True, prefix
    turns, requests = account.turns, list[tuple[int, int]]()
    for entry in new:
        if entry.message.role == "assistant":
            if not counted:
                requests.append((prefix, sent))
                turns += 1
            counted = False
            sent = prefix
        prefix += entry.tokens
    spent = _spent(account, prices, requests, freed)
    worst = _spent(account.worst or account, worst_of(prices), requests, freed)
    return Account(turns=turns, untrimmed=spent.untrimmed, saved=spent.saved, worst=worst)


def _spent(before: Outlay, prices: Prices, requests: Iterable[tuple[int, int]], freed: int) -> Outlay:
    """Return `before` plus the cost of requests, each given as (tokens untrimmed, tokens of them in the cache)."""
    untrimmed, saved = before.untrimmed, before.saved
    for tokens, cached in requests:
        cost = _once(prices, tokens, cached)
        untrimmed += cost
        if cached:
            # 0 is cached at the first request, and at one that trimmed without an account: what it saved is unknown.
            saved += cost - _once(prices, tokens - freed, cached - freed)
    return Outlay(untrimmed=untrimmed, saved=saved)


def account_after(costs: Costs, balance: Balance, before: int) -> Account:
    """Return the account including the request that is trimmed; `before` are its tokens untrimmed."""
    account, stays, held, prices, worst = costs.account, costs.stays, costs.held, costs.prices, costs.worst
    kept, sent = held + before - stays if costs.warm else 0, stays - balance.freed
    paid = _once(prices, stays, held) + balance.loss
    spent = _after(account, _once(prices, before, kept), paid)
    paid = _once(worst, sent, sent - balance.rewritten)
    doubted = _after(account.worst or account, _once(worst, before, kept), paid)
    return Account(turns=account.turns + 1, untrimmed=spent.untrimmed, saved=spent.saved, worst=doubted)


def _after(before: Outlay, untrimmed: float, paid: float) -> Outlay:
    return Outlay(untrimmed=before.untrimmed + untrimmed, saved=before.saved + untrimmed - paid)
