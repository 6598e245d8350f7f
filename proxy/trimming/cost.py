"""The cost model: whether a trim pays, what it rewrites in the provider's cache against what it frees.

A token that is read from the cache costs `read`, one that is sent anew costs `write` (uncached input = 1).
A trim makes every later request cheaper and this one dearer: from its first change on, everything must be
written to the cache again. When is it time?

    interval    Each request since the last trim paid for reading what could have been freed. When these
                payments add up to what the trim costs, it is time. Where a log grows by `g` tokens a turn,
                that is when it has grown by sqrt(2 * g * K / read), K being what the trim costs: the cheapest
                interval in the long run.
    edits       Each edit must pay for what it rewrites itself, within as many turns as there were so far.
    risk        The session may end with this request. So what trims have cost beyond what they have saved
                stays a small part of what the session would have cost without any. So it must be, too, if
                cached tokens turn out to be as cheap as they often are: prices may be wrong.
    minimum     A prefix shorter than the provider's shortest cached one is paid in full each time. So no trim
                makes a view so short, unless even that is cheaper than reading it whole.

Costs are in tokens of uncached input. The cache counts as warm if the session was not idle for longer than it
lives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import ceil
from operator import mul, sub
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from proxy.dialects import Message
from proxy.trimming.draft import Draft
from proxy.trimming.model import ASSUMED, Account, Cut, Entry, PlanningContext, Prices, Summary

RISK: Final = 0.035  # what trimming may cost beyond what it saved, as a part of what the input costs without it
EXPECTED_TURNS: Final = 8  # turns to be expected at least of a session that has just begun

_CHEAP: Final = 0.1  # price of a cached token that a higher one may turn out to be
DEAR: Final = 0.25  # price of a cached token from which short sessions are left alone: there trims pay soonest,
_SHORT: Final = 40  # and what they lose is missed most. So many turns are short


class Balance(Struct, frozen=True, kw_only=True):
    """What a trim changes in cost."""

    loss: float  # by how much this request becomes dearer; negative where it becomes cheaper
    gain: float  # by how much each later one becomes cheaper
    freed: int  # tokens that are not sent any more
    rewritten: int  # tokens of this request that the cache does not hold then

    def pays_within(self, turns: float) -> bool:
        """Tell whether it costs less in the end, if so many turns follow."""
        return self.freed > 0 and self.loss <= self.gain * turns

    def since(self, other: Balance) -> Balance:
        """Return what this one changes in cost beyond the other."""
        return Balance(
            loss=self.loss - other.loss,
            gain=self.gain - other.gain,
            freed=self.freed - other.freed,
            rewritten=self.rewritten - other.rewritten,
        )


NO_CHANGE: Final = Balance(loss=0, gain=0, freed=0, rewritten=0)  # what a trim that changes nothing changes in cost


class Costs(Struct, frozen=True, kw_only=True):
    """What is known of a branch when a trim is judged."""

    prices: Prices
    warm: bool  # whether the provider's cache still holds what the last request sent
    messages: tuple[Message | None, ...]  # what would be sent without the trim, by place; None where nothing is
    tokens: tuple[int, ...]  # tokens of that
    summary: Summary | None  # what would be sent before it
    fixed: int  # tokens of instructions and tools
    cached: int  # how many places the last request spoke of
    account: Account  # what input has cost before this request
    reads: tuple[int, ...]  # for each place how many requests there have been since it came, or since the last trim

    @property
    def stays(self) -> int:
        """Tokens of this request without the trim."""
        return self.fixed + summary_tokens(self.summary) + sum(self.tokens)

    @property
    def held(self) -> int:
        """How many of these the cache holds."""
        return self.fixed + summary_tokens(self.summary) + sum(self.tokens[: self.cached]) if self.warm else 0

    def balance(self, draft: Draft) -> Balance:
        """Return what changes in cost if what stands in `draft` is sent instead, place by place."""
        left = 0
        if self.warm:
            left = self.fixed
            if draft.summary is self.summary:
                left += summary_tokens(self.summary) + sum(self.tokens[: self._first_change(draft)])
        return self._balance(draft.total, left)

    def timely(self, balance: Balance, tokens: Sequence[int]) -> bool:
        """Tell whether waiting cost as much as the trim to these `tokens`, and whether the session can afford it."""
        return self._timely(balance, sum(map(mul, map(sub, self.tokens, tokens), self.reads)))

    def first_place(self, starts: Iterable[int], draft: Draft) -> int | None:
        """Return from which of `starts` on the changes save most, where that is timely; None where it never is."""
        ahead = [0, *accumulate(self.tokens)]
        less = list(map(sub, self.tokens, draft.tokens))
        freed, waited = [0, *accumulate(less)], [0, *accumulate(map(mul, less, self.reads))]
        best: tuple[float, int] | None = None
        for start in starts:
            left = self.fixed + summary_tokens(self.summary) + ahead[min(start, self.cached)] if self.warm else 0
            balance = self._balance(self.stays - freed[-1] + freed[start], left)
            if self._timely(balance, waited[-1] - waited[start]):
                saved = balance.gain * self.expected - balance.loss
                if best is None or saved > best[0]:
                    best = (saved, start)
        return None if best is None else best[1]

    def summary_pays(self, draft: Draft, imagined: Draft, before: Balance) -> bool:
        """Tell whether making a summary and trimming for it pays; `before` is the balance of what was done already."""
        written = summary_tokens(imagined.summary)
        balance = self.balance(imagined).since(before)
        making = draft.total - imagined.total + written + self.prices.output * written
        return replace(balance, loss=balance.loss + making).pays_within(self.expected)

    def affordable(self, balance: Balance) -> bool:
        """Tell whether what trims have cost beyond what they saved, this one too, is a small part of all."""
        account = self.account
        if not _is_small(balance.loss, account.saved, account.untrimmed):
            return False
        if account.cheap_saved is None or account.cheap_untrimmed is None:
            return True
        return _is_small(self.cheap_loss(balance), account.cheap_saved, account.cheap_untrimmed)

    def cheap_loss(self, balance: Balance) -> float:
        """Return by how much this request becomes dearer if cached tokens are cheap."""
        cheap, sent = _cheap(self.prices), self.stays - balance.freed
        return _once(cheap, sent, sent - balance.rewritten) - _once(cheap, self.stays, self.held)

    def paid_back(self, balance: Balance) -> int:
        """Return after how many requests a trim has paid for itself."""
        return max(0, ceil(balance.loss / balance.gain)) if balance.gain > 0 else 0

    @property
    def expected(self) -> int:
        """How many more turns are to be expected."""
        return max(self.account.turns, EXPECTED_TURNS)

    def _timely(self, balance: Balance, waited: int) -> bool:
        """Tell whether a trim is timely, where `waited` tokens were read that need not have been."""
        stays, prices = self.stays, self.prices
        rate = prices.factor(stays) * prices.read
        if balance.freed <= 0 or balance.loss > rate * waited or not self.affordable(balance):
            return False
        if prices.read >= DEAR and self.account.turns < _SHORT:
            return False
        # Until a view has grown to the shortest prefix that is cached, each request writes all of it.
        is_cached = stays - balance.freed >= prices.minimum
        return is_cached or prices.write * prices.minimum <= prices.read * stays

    def _balance(self, sent: int, left: int) -> Balance:
        """Return what changes in cost if `sent` tokens are sent, the first `left` of them from the cache."""
        stays, prices = self.stays, self.prices
        left = left if left >= prices.minimum else 0
        loss = _once(prices, sent, left) - _once(prices, stays, self.held)
        gain = _once(prices, stays, stays) - _once(prices, sent, sent)
        return Balance(loss=loss, gain=gain, freed=stays - sent, rewritten=sent - left)

    def _first_change(self, draft: Draft) -> int:
        """Return the first place whose message the draft changes, or the first that was not sent before."""
        pairs = zip(self.messages[: self.cached], draft.messages, strict=False)
        differing = (at for at, (sent, now) in enumerate(pairs) if sent is not now and sent != now)
        first = next(differing, self.cached)
        # Where only what the client was not shown went, the message is the same.
        counts = zip(self.tokens[:first], draft.tokens, strict=False)
        return next((at for at, (sent, now) in enumerate(counts) if sent != now), first)


def _is_small(loss: float, saved: float, untrimmed: float) -> bool:
    """Tell whether a loss, less what was saved, is a small part of what all would have cost."""
    return loss <= 0 or loss - saved <= RISK * untrimmed


def _cheap(prices: Prices) -> Prices:
    """Return the prices where cached tokens are cheap."""
    return replace(prices, read=min(prices.read, _CHEAP))


def _once(prices: Prices, tokens: int, cached: int) -> float:
    """Return what one request costs of which so many tokens are in the cache."""
    if cached < prices.minimum:
        cached = 0
    return prices.factor(tokens) * (prices.read * cached + prices.write * (tokens - cached))


def summary_tokens(summary: Summary | None) -> int:
    """Return the tokens of a summary, 0 without one."""
    return summary.tokens if summary is not None else 0


def reads_of(entries: Sequence[Entry], start: int) -> tuple[int, ...]:
    """Return for each message how many requests there have been since it came, that one included.

    Assistant messages before position `start` do not count.
    """
    reads: list[int] = []
    later = 0
    for entry in reversed(entries):
        reads.append(later)
        later += entry.message.role == "assistant" and entry.position >= start
    return tuple(reversed(reads))


def prices_of(context: PlanningContext) -> Prices:
    """Return the prices to reckon with, what they say of sizes in tokens as they are counted here."""
    prices, scale = context.prices or ASSUMED, context.scale
    if scale == 1:
        return prices
    steps = tuple(replace(step, above=int(step.above / scale)) for step in prices.steps)
    return replace(prices, minimum=ceil(prices.minimum / scale), steps=steps)


def account_of(entries: Sequence[Entry], cut: Cut | None, context: PlanningContext, before: int) -> Account:
    """Return what the input of a branch has cost before this request, which has `before` tokens untrimmed.

    There was a request before each assistant message. What lies before the cut is in the cut's account.
    """
    prices = prices_of(context)
    start = cut.position if cut is not None else 0
    new = [entry for entry in entries if entry.position >= start]
    prefix = before - sum([entry.tokens for entry in new])
    freed = max(0, prefix - cut.tokens) if cut is not None else 0
    known = cut.account if cut is not None else None
    turns, untrimmed, saved = _spent(new, prices, prefix, freed, is_known=known is not None)
    cheap_untrimmed: float | None = None
    cheap_saved: float | None = None
    if prices.read > _CHEAP:
        _, cheap_untrimmed, cheap_saved = _spent(new, _cheap(prices), prefix, freed, is_known=known is not None)
        if known is not None:
            cheap_untrimmed += known.untrimmed if known.cheap_untrimmed is None else known.cheap_untrimmed
            cheap_saved += known.saved if known.cheap_saved is None else known.cheap_saved
    if known is not None:
        turns, untrimmed, saved = turns + known.turns, untrimmed + known.untrimmed, saved + known.saved
    return Account(
        turns=turns, untrimmed=untrimmed, saved=saved, cheap_untrimmed=cheap_untrimmed, cheap_saved=cheap_saved
    )


def _spent(
    new: Sequence[Entry], prices: Prices, prefix: int, freed: int, *, is_known: bool
) -> tuple[int, float, float]:
    """Return of the requests since a cut their number, what they would have cost untrimmed, and what was saved."""
    turns, untrimmed, saved = 0, 0.0, 0.0
    # The request that trimmed is in the cut's account already, if that has one.
    counted, sent = is_known, prefix if is_known else 0
    for entry in new:
        if entry.message.role == "assistant":
            if not counted:
                cost = _once(prices, prefix, sent)
                untrimmed += cost
                if sent:
                    # What the request saved or lost that trimmed without an account is not known.
                    saved += cost - _once(prices, prefix - freed, sent - freed)
                turns += 1
            counted = False
            sent = prefix
        prefix += entry.tokens
    return turns, untrimmed, saved


def account_after(costs: Costs, balance: Balance, before: int) -> Account:
    """Return the account with the request that a trim is made at; `before` are its tokens untrimmed."""
    account, stays, held = costs.account, costs.stays, costs.held
    cached = held + before - stays if costs.warm else 0
    untrimmed = _once(costs.prices, before, cached)
    paid = _once(costs.prices, stays, held) + balance.loss
    cheap_untrimmed: float | None = None
    cheap_saved: float | None = None
    if account.cheap_untrimmed is not None and account.cheap_saved is not None:
        cheap = _cheap(costs.prices)
        whole = _once(cheap, before, cached)
        cheap_untrimmed = account.cheap_untrimmed + whole
        cheap_saved = account.cheap_saved + whole - _once(cheap, stays, held) - costs.cheap_loss(balance)
    return Account(
        turns=account.turns + 1,
        untrimmed=account.untrimmed + untrimmed,
        saved=account.saved + untrimmed - paid,
        cheap_untrimmed=cheap_untrimmed,
        cheap_saved=cheap_saved,
    )
