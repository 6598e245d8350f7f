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
                stays a small part of what the session would have cost without any. More is risked only where
                it comes back within few requests, compared with those there were: long sessions last. It is never
                more than `HIGHEST_RISK`, or `HIGHEST_KNOWN` where nothing can be worse than the known prices.
    doubt       The prices may be wrong. So the same must hold where cached tokens are as cheap, and writing them
                is as dear, as at any provider: there a trim gains least and costs most. Where those prices are far
                from the known ones, a session risks more once its user has come back, and less the farther off they
                are. Before that it may end with its first task.
    short       Where cached tokens are dear, the first trims of a short view cost nothing at all at the known prices.
                These must pass the doubt, too: a session that stays short has little to save, and much to lose.
    minimum     A prefix shorter than the provider's shortest cached one is paid in full each time. So no trim
                makes a view so short, unless even that is cheaper than reading it whole.

Costs are in tokens of uncached input. The cache counts as warm if the session was not idle for longer than it
lives.
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

RISK: Final = 0.018  # what trimming may cost beyond what it saved, as a part of what the input costs without it,
RISK_IN_DOUBT: Final = 0.03  # and the same at the worst prices
SOON: Final = 0.17  # more is risked if the rest is paid back within this part of the requests so far;
HIGHEST_RISK: Final = 0.035  # never more than this,
HIGHEST_KNOWN: Final = 0.04  # or this where the known prices are the worst, so that there is no doubt,
HIGHEST_IN_DOUBT: Final = 0.1  # nor more than this at the worst prices
_FAR_OFF: Final = 4  # times the worst price of a cached token: the worst prices are far off the known ones then,
HIGHEST_FAR_OFF: Final = 0.2  # and never more than this is risked at them
_WORST_READ, _WORST_WRITE = 0.05, 1.25  # what a cached token costs at least, and one written to the cache at most
EXPECTED_TURNS: Final = 8  # turns to be expected at least of a session that has just begun

HIGHEST_READ: Final = 0.46  # what a cached token is taken to cost at most: above, more trims save hardly more
DEAR: Final = 0.25  # price of a cached token from which trims keep more: what they lose is missed most
SHORT: Final = 20_000  # a view of fewer tokens is short: where cached ones are dear, it may not be worth a trim


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
    earlier: int  # how many requests there were before the newest user message
    reads: tuple[int, ...]  # for each place how many requests there have been since it came, or since the last trim

    @property
    def worst(self) -> Prices:
        """The prices at which a trim pays least."""
        return worst_of(self.prices)

    @property
    def _is_far_off(self) -> bool:
        """Whether the worst prices are so far off that a trim may lose much there that saves much here."""
        return self.prices.read >= _FAR_OFF * self.worst.read > 0

    @property
    def _is_dear_and_short(self) -> bool:
        """Whether cached tokens are dear, and the view is short."""
        return self.prices.read >= DEAR and self.stays < SHORT

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
        return self._balance(draft.total, left, self.prices)

    def timely(self, balance: Balance, tokens: Sequence[int]) -> bool:
        """Tell whether waiting cost as much as the trim to these `tokens`, and whether the session can afford it."""
        return self._timely(balance, sum(map(mul, map(sub, self.tokens, tokens), self.reads)))

    def first_place(self, starts: Iterable[int], draft: Draft) -> int | None:
        """Return from which of `starts` on the changes save most, where that is timely; None where it never is.

        Where prices may be far off, a trim that saves less does not take the place of the best one as long as that
        cannot be afforded: little trims would use up what may be lost, and the best one would wait for long.
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
        """Tell whether changes from one of `starts` on may be timely that leave no fewer than these tokens.

        Below the shortest prefix that is cached, fewer tokens may cost more: there it is not known.
        """
        stays, minimum = self.stays, self.prices.minimum
        return any(
            stays - balance.freed < minimum or (self._has_waited(balance, waited) and self.affordable(balance))
            for _, balance, waited in self._changed_from(starts, tokens)
        )

    def summary_pays(self, draft: Draft, imagined: Draft, before: Balance) -> bool:
        """Tell whether making a summary and trimming for it pays; `before` is the balance of what was done already."""
        written = summary_tokens(imagined.summary)
        balance = self.balance(imagined).since(before)
        making = draft.total - imagined.total + written + self.prices.output * written
        return replace(balance, loss=balance.loss + making).pays_within(self.expected)

    def affordable(self, balance: Balance) -> bool:
        """Tell whether what trims have cost beyond what they saved, this one too, is little, or soon paid back."""
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
            # The farther off they are, the fewer of those requests count.
            soon, most = max(soon, self.earlier * _FAR_OFF * worst.read / self.prices.read), HIGHEST_FAR_OFF
        return _is_borne(doubted, account.worst or account, RISK_IN_DOUBT, soon, most)

    def paid_back(self, balance: Balance) -> int:
        """Return after how many requests a trim has paid for itself."""
        return max(0, ceil(balance.loss / balance.gain)) if balance.gain > 0 else 0

    @property
    def expected(self) -> int:
        """How many more turns are to be expected."""
        return max(self.account.turns, EXPECTED_TURNS)

    def _timely(self, balance: Balance, waited: int) -> bool:
        """Tell whether a trim is due, and the session can afford it."""
        return self._is_due(balance, waited) and self.affordable(balance)

    def _changed_from(self, starts: Iterable[int], tokens: Sequence[int]) -> Iterator[tuple[int, Balance, int]]:
        """Yield each start with what changes in cost if from there on `tokens` are left, and how many waited."""
        ahead = [0, *accumulate(self.tokens)]
        less = list(map(sub, self.tokens, tokens))
        freed, waited = [0, *accumulate(less)], [0, *accumulate(map(mul, less, self.reads))]
        stays, lead = self.stays, self.fixed + summary_tokens(self.summary)
        for start, following in pairwise([*starts, len(less)]):
            if freed[start] == freed[following]:
                continue  # to begin there changes no more than to begin with the next one, and rewrites more
            left = lead + ahead[min(start, self.cached)] if self.warm else 0
            balance = self._balance(stays - freed[-1] + freed[start], left, self.prices)
            yield start, balance, waited[-1] - waited[start]

    def _is_due(self, balance: Balance, waited: int) -> bool:
        """Tell whether waiting cost as much as a trim, and the cache will take what is left."""
        stays, prices = self.stays, self.prices
        if not self._has_waited(balance, waited):
            return False
        # Until a view has grown to the shortest prefix that is cached, each request writes all of it.
        is_cached = stays - balance.freed >= prices.minimum
        return is_cached or prices.write * prices.minimum <= prices.read * stays

    def _has_waited(self, balance: Balance, waited: int) -> bool:
        """Tell whether waiting cost as much as a trim, where `waited` tokens were read that need not have been."""
        rate = self.prices.factor(self.stays) * self.prices.read
        return balance.freed > 0 and balance.loss <= rate * waited

    def _balance(self, sent: int, left: int, prices: Prices) -> Balance:
        """Return what changes in cost if `sent` tokens are sent, the first `left` of them from the cache."""
        stays = self.stays
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


def _is_borne(balance: Balance, spent: Outlay, risk: float, turns: float, most: float) -> bool:
    """Tell whether a session bears what would be lost in all: it is this part of all, or will be in so many turns.

    It is never more than the part `most` of all.
    """
    borne = min(risk * spent.untrimmed + balance.gain * turns, most * spent.untrimmed)
    return balance.loss - spent.saved <= borne


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
    """Return the prices to reckon with (`HIGHEST_READ`), what they say of sizes in tokens as they are counted here."""
    prices, scale = context.prices or ASSUMED, context.scale
    read = min(prices.read, HIGHEST_READ) * prices.served + (1 - prices.served) if prices.read < 1 else prices.read
    if scale == 1 and read == prices.read:
        return prices
    steps = tuple(replace(step, above=int(step.above / scale)) for step in prices.steps)
    return replace(prices, read=read, minimum=ceil(prices.minimum / scale), steps=steps)


def worst_of(prices: Prices) -> Prices:
    """Return the prices that they may be at the worst, if there is a cache at all."""
    if prices.read >= 1:
        return prices
    read = _WORST_READ * prices.served + (1 - prices.served)
    return replace(prices, read=min(prices.read, read), write=max(prices.write, _WORST_WRITE))


def account_of(entries: Sequence[Entry], cut: Cut | None, context: PlanningContext, before: int) -> Account:
    """Return what the input of a branch has cost before this request, which has `before` tokens untrimmed.

    There was a request before each assistant message. What lies before the cut is in the cut's account.
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
            # The request that trimmed is in its account already.
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
    """Return what was spent after requests of so many tokens untrimmed, so many of them in the cache."""
    untrimmed, saved = before.untrimmed, before.saved
    for tokens, cached in requests:
        cost = _once(prices, tokens, cached)
        untrimmed += cost
        if cached:
            # What the request saved or lost that trimmed without an account is not known.
            saved += cost - _once(prices, tokens - freed, cached - freed)
    return Outlay(untrimmed=untrimmed, saved=saved)


def account_after(costs: Costs, balance: Balance, before: int) -> Account:
    """Return the account with the request that a trim is made at; `before` are its tokens untrimmed."""
    account, stays, held, prices, worst = costs.account, costs.stays, costs.held, costs.prices, costs.worst
    kept, sent = held + before - stays if costs.warm else 0, stays - balance.freed
    paid = _once(prices, stays, held) + balance.loss
    spent = _after(account, _once(prices, before, kept), paid)
    paid = _once(worst, sent, sent - balance.rewritten)
    doubted = _after(account.worst or account, _once(worst, before, kept), paid)
    return Account(turns=account.turns + 1, untrimmed=spent.untrimmed, saved=spent.saved, worst=doubted)


def _after(before: Outlay, untrimmed: float, paid: float) -> Outlay:
    return Outlay(untrimmed=before.untrimmed + untrimmed, saved=before.saved + untrimmed - paid)
