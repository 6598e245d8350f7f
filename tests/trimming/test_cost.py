"""The cost model: prices, and whether a trim pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import astuple, replace

from proxy.conversation import rounds, spans
from proxy.trimming.cost import (
    EXPECTED_TURNS,
    NO_CHANGE,
    Balance,
    Costs,
    account_after,
    account_of,
    prices_of,
    reads_of,
    worst_of,
)
from proxy.trimming.draft import Draft
from proxy.trimming.model import ASSUMED, Account, Change, Cut, Entry, Outlay, PlanningContext, Prices, Step, Summary
from proxy.trimming.planner import due, is_cold
from tests.trimming.notation import count, message

# ------------------------------------------------------------------------------------------- worth

PRICES = Prices(read=0.1, write=1.25, output=5.0, lifetime=300.0, minimum=0, source="known")
FREE_WRITING = replace(PRICES, write=1.0)
ENTRIES = tuple(
    Entry(message=message(f"user {place}"), tokens=100, ref=f"ref_{place}", position=place) for place in range(10)
)
MESSAGES = tuple(entry.message for entry in ENTRIES)
RICH = Account(turns=4, untrimmed=10**6, saved=0.0)
SUMMARY = Summary(
    text="So far.", role="merge", until=4, tokens=30, kind="statistics", covered_messages=4, covered_tokens=400
)


def costs(**fields: Any) -> Costs:
    """Return the costs of a branch of ten messages, of which the last request had eight."""
    known: dict[str, Any] = {
        "prices": PRICES,
        "warm": True,
        "messages": MESSAGES,
        "tokens": (100,) * 10,
        "summary": None,
        "fixed": 50,
        "cached": 8,
        "account": RICH,
        "earlier": 0,
        "reads": (4,) * 10,
    }
    return Costs(**{**known, **fields})


def draft(left: dict[int, int], summary: Summary | None = None) -> Draft:
    """Return the draft in which these places have only so many tokens left; with 0 nothing stands there."""
    given = Draft(
        entries=ENTRIES,
        messages=MESSAGES,
        tokens=(100,) * 10,
        spans=spans(MESSAGES),
        rounds=rounds(MESSAGES),
        protected=frozenset(),
        count=count,
        fixed_tokens=50,
        summary=summary,
    )
    changes = [
        Change(
            position=place,
            edit="an_edit",
            reason="",
            message=message("user shorter") if tokens else None,
            tokens_before=100,
            tokens_after=tokens,
        )
        for place, tokens in left.items()
    ]
    return given.after(changes)


def timely(given: Costs, after: Draft) -> bool:
    """Tell whether it is time to send what stands in a draft."""
    return given.timely(given.balance(after), after.tokens)


def reads(at: dict[int, int]) -> tuple[int, ...]:
    """Return how many requests there have been since each message came: none in other places than these."""
    return tuple(at.get(place, 0) for place in range(10))


def told(found: Balance | Account) -> Any:
    """Return the numbers of a balance or an account, to compare: sums of tenths are not exact."""
    return pytest.approx(astuple(found) if isinstance(found, Balance) else (found.turns, found.untrimmed, found.saved))


def test_a_move_rewrites_what_stands_after_its_first_change() -> None:
    # With it: 250 tokens are read, 720 written. Without: 850 are read, 200 are new.
    balance = costs().balance(draft({2: 20}))
    assert told(balance) == ((25 + 900) - (85 + 250), 8, 80, 720)
    assert (costs().stays, costs().held) == (1050, 850)
    assert [balance.pays_within(turns) for turns in (73, 74)] == [False, True]
    assert costs().paid_back(balance) == 74


def test_what_the_cache_does_not_hold_costs_nothing_to_change() -> None:
    # Only what is new is changed: 80 tokens less to write.
    balance = costs().balance(draft({9: 20}))
    assert told(balance) == (-100, 8, 80, 120)
    assert balance.pays_within(0)
    assert costs().paid_back(balance) == 0


def test_a_cold_cache_makes_a_move_free() -> None:
    balance = costs(warm=False).balance(draft({2: 20}))
    assert told(balance) == (-1.25 * 80, 8, 80, 970)
    assert costs(warm=False).held == 0
    assert timely(costs(warm=False, reads=reads({}), account=Account(turns=0, untrimmed=0, saved=0)), draft({2: 20}))


def test_a_prefix_under_the_minimum_is_not_cached() -> None:
    balance = costs(prices=replace(PRICES, minimum=300)).balance(draft({2: 20}))
    assert balance.loss == pytest.approx(1.25 * 970 - 335)
    same = costs(prices=replace(PRICES, minimum=250)).balance(draft({2: 20}))
    assert same.loss == pytest.approx(590)


def test_a_step_of_the_price_counts() -> None:
    steep = costs(prices=replace(PRICES, steps=(Step(above=1000, factor=2.0),)))
    # Without the move, 1050 tokens cost twice as much, each of them; with it 970 do not.
    assert told(steep.balance(draft({2: 20}))) == (925 - 2 * 335, 2 * 105 - 97, 80, 720)
    # It costs 255; each request since then has paid twice 8.
    waited = (replace(steep, reads=reads({2: requests})) for requests in (15, 16))
    assert [timely(given, draft({2: 20})) for given in waited] == [False, True]


def test_a_view_under_the_minimum_is_paid_in_full_again_and_again() -> None:
    # Now 1050 tokens would be written, as nothing is cached: 80 fewer is 100 less, but 970 are never read.
    short = costs(prices=replace(PRICES, minimum=971))
    assert told(short.balance(draft({2: 20}))) == (-100, 105 - 1212.5, 80, 970)
    assert not short.balance(draft({2: 20})).pays_within(1000)
    assert not timely(short, draft({2: 20}))
    cached = costs(prices=replace(PRICES, minimum=970), reads=reads({}))
    assert told(cached.balance(draft({2: 20}))) == (-100, 105 - 97, 80, 970)
    assert timely(cached, draft({2: 20}))


@pytest.mark.parametrize(("read", "cheaper"), [(0.95, False), (0.96, True)])
def test_where_reading_is_dear_a_view_may_be_so_short(read: float, cheaper: bool) -> None:
    # At most 1000 tokens are written until it is cached again; to read 1050 costs 997.5 or 1008.
    account = Account(turns=40, untrimmed=1_000_000, saved=0)
    given = costs(prices=replace(FREE_WRITING, read=read, minimum=1000), account=account)
    assert timely(given, draft({2: 20})) is cheaper


def test_from_the_places_those_are_chosen_that_leave_it_cached() -> None:
    both = draft({0: 20, 6: 20})
    chosen = [
        costs(prices=replace(PRICES, minimum=minimum)).first_place([0, 6], both) for minimum in (890, 891, 970, 971)
    ]
    assert chosen == [0, 6, 6, None]


def test_a_new_summary_takes_the_whole_log_out_of_the_cache() -> None:
    gone = dict.fromkeys(range(4), 0)
    balance = costs().balance(draft(gone, SUMMARY))
    assert told(balance) == ((5 + 1.25 * 630) - 335, 37, 370, 630)
    # The standing one is read from the cache with what follows it.
    kept = costs(summary=SUMMARY).balance(draft({2: 20}, SUMMARY))
    assert told(kept) == ((28 + 900) - (88 + 250), 8, 80, 720)


def test_nothing_changed_changes_nothing() -> None:
    assert costs().balance(draft({})) == replace(NO_CHANGE, rewritten=200)
    assert not NO_CHANGE.pays_within(100)
    assert costs().paid_back(NO_CHANGE) == 0
    assert not timely(costs(reads=(1000,) * 10), draft({}))


def test_of_two_edits_each_has_its_own_balance() -> None:
    first, both = costs().balance(draft({6: 20})), costs().balance(draft({6: 20, 2: 20}))
    # The second one has 400 tokens more written that were read, and frees 80.
    assert told(both.since(first)) == (1.15 * 400 - 1.25 * 80 + 1.25 * 80 - 1.25 * 80, 8, 80, 320)


@pytest.mark.parametrize(
    ("left", "requests", "time"),
    [
        # It costs 590; each request that read those 80 tokens has paid 8 for it, others nothing.
        ({2: 20}, {2: 73}, False),
        ({2: 20}, {2: 74}, True),
        ({2: 20}, {1: 1000, 2: 73, 3: 1000}, False),
        # With 50 tokens less in a place that came later it costs 527.5.
        ({2: 20, 5: 50}, {2: 60, 5: 9}, False),
        ({2: 20, 5: 50}, {2: 60, 5: 10}, True),
        # Of 50 tokens that are put back reading was saved: 5 a request. That move costs 652.5.
        ({2: 20, 5: 150}, {2: 90, 5: 14}, False),
        ({2: 20, 5: 150}, {2: 90, 5: 13}, True),
    ],
)
def test_it_is_time_when_waiting_has_cost_as_much(left: dict[int, int], requests: dict[int, int], time: bool) -> None:
    assert timely(costs(reads=reads(requests)), draft(left)) is time


def test_with_steady_growth_that_is_the_cheapest_interval() -> None:
    def is_time(turns: int) -> bool:
        # Each turn brings 100 tokens, all of which could go; the newest were read by one request, and so on.
        grown = costs(tokens=(100,) * turns, reads=tuple(range(turns, 0, -1)))
        return grown.timely(Balance(loss=2000, gain=10 * turns, freed=100 * turns, rewritten=0), (0,) * turns)

    # sqrt(2 * 100 * 2000 / 0.1) = 2000 tokens are twenty turns.
    assert [is_time(turns) for turns in (18, 19, 20, 21)] == [False, False, True, True]


DEAR_WRITING = Outlay(untrimmed=10**6, saved=0.0)


@pytest.mark.parametrize(
    ("account", "affordable"),
    [
        # Eighteen thousandths of all,
        (Account(turns=0, untrimmed=32_770, saved=0.0, worst=DEAR_WRITING), False),
        (Account(turns=0, untrimmed=32_790, saved=0.0, worst=DEAR_WRITING), True),
        (Account(turns=0, untrimmed=27_210, saved=100.0, worst=DEAR_WRITING), False),
        (Account(turns=0, untrimmed=27_230, saved=100.0, worst=DEAR_WRITING), True),
        (Account(turns=0, untrimmed=32_790, saved=-1.0, worst=DEAR_WRITING), False),
        (Account(turns=0, untrimmed=0.0, saved=590.0, worst=DEAR_WRITING), True),
        # or, of 590, what is gained in seventeen of a hundred requests so far: each gains eight.
        (Account(turns=200, untrimmed=17_660, saved=0.0, worst=DEAR_WRITING), False),
        (Account(turns=200, untrimmed=17_680, saved=0.0, worst=DEAR_WRITING), True),
        # Thirty-five thousandths of all are the most.
        (Account(turns=9000, untrimmed=16_850, saved=0.0, worst=DEAR_WRITING), False),
        (Account(turns=9000, untrimmed=16_870, saved=0.0, worst=DEAR_WRITING), True),
        # At the worst prices it loses 620.
        (Account(turns=0, untrimmed=10**6, saved=0.0, worst=Outlay(untrimmed=20_660, saved=0.0)), False),
        (Account(turns=0, untrimmed=10**6, saved=0.0, worst=Outlay(untrimmed=20_680, saved=0.0)), True),
        (Account(turns=0, untrimmed=10**6, saved=0.0, worst=Outlay(untrimmed=0.0, saved=620.0)), True),
        # There each later request gains four.
        (Account(turns=500, untrimmed=10**6, saved=0.0, worst=Outlay(untrimmed=9_320, saved=0.0)), False),
        (Account(turns=500, untrimmed=10**6, saved=0.0, worst=Outlay(untrimmed=9_340, saved=0.0)), True),
        # A tenth of all is the most.
        (Account(turns=9000, untrimmed=10**6, saved=0.0, worst=Outlay(untrimmed=6_190, saved=0.0)), False),
        (Account(turns=9000, untrimmed=10**6, saved=0.0, worst=Outlay(untrimmed=6_210, saved=0.0)), True),
    ],
)
def test_what_trims_lose_stays_a_small_part_of_all(account: Account, affordable: bool) -> None:
    given = costs(reads=(1000,) * 10, account=account)
    made = given.balance(draft({2: 20}))
    assert (made.loss, made.gain) == pytest.approx((590, 8))
    assert given.affordable(made) is affordable
    assert timely(given, draft({2: 20})) is affordable
    assert given.affordable(replace(made, loss=0.0))


@pytest.mark.parametrize(("read", "write", "spent"), [(0.05, 1.25, 15_510), (0.05, 1.0, 14_010), (0.051, 1.25, 17_710)])
def test_where_the_known_prices_are_the_worst_a_little_more_may_be_lost(read: float, write: float, spent: int) -> None:
    def affordable(untrimmed: float) -> bool:
        account = Account(turns=9000, untrimmed=untrimmed, saved=0.0, worst=DEAR_WRITING)
        given = costs(reads=(1000,) * 10, account=account, prices=replace(PRICES, read=read, write=write))
        return given.affordable(given.balance(draft({2: 20})))

    assert [affordable(spent - 20), affordable(spent)] == [False, True]


@pytest.mark.parametrize(
    ("read", "tokens", "affordable"),
    [(0.25, 1_900, False), (0.25, 2_100, True), (0.24, 1_900, True), (0.5, 1_900, False)],
)
def test_where_reading_is_dear_a_trim_of_a_short_view_must_pass_the_doubt_even_if_it_loses_nothing(
    read: float, tokens: int, *, affordable: bool
) -> None:
    poor = Account(turns=0, untrimmed=10**6, saved=0.0, worst=Outlay(untrimmed=100.0, saved=0.0))
    given = costs(tokens=(tokens,) * 10, account=poor, prices=replace(PRICES, read=read))
    made = Balance(loss=0.0, gain=10, freed=1000, rewritten=15_000)
    assert given.affordable(made) is affordable
    assert replace(given, account=RICH).affordable(made)


@pytest.mark.parametrize(
    ("read", "turns", "earlier", "spent"),
    [
        # At the worst prices a trim loses 620, and each later request gains four.
        *((0.1, 500, 500, 9_340), (0.19, 500, 500, 9_340)),
        # Where these may be four times off, as many requests count as there were before the newest user message,
        *((0.2, 0, 0, 20_680), (0.2, 30, 10, 19_340)),
        # and fewer where they may be farther off: at five times that, four of five,
        (0.25, 150, 100, 10_010),
        # or the usual part of all,
        (0.25, 230, 0, 15_460),
        # and a fifth of all is the most.
        (0.25, 230, 200, 3_100),
    ],
)
def test_where_prices_may_be_far_off_sessions_whose_user_came_back_risk_more(
    read: float, turns: int, earlier: int, spent: int
) -> None:
    def affordable(untrimmed: float) -> bool:
        account = Account(turns=turns, untrimmed=10**6, saved=0.0, worst=Outlay(untrimmed=untrimmed, saved=0.0))
        prices = replace(PRICES, read=read)
        given = costs(reads=(1000,) * 10, account=account, prices=prices, earlier=earlier)
        return given.affordable(given.balance(draft({2: 20})))

    assert [affordable(spent - 20), affordable(spent)] == [False, True]


def test_free_cached_tokens_are_the_worst_price_themselves() -> None:
    # It loses 650: nothing is gained by sending less of what is free.
    for untrimmed, affordable in ((36_100, False), (36_200, True)):
        account = Account(turns=0, untrimmed=untrimmed, saved=0.0, worst=DEAR_WRITING)
        given = costs(reads=(1000,) * 10, account=account, prices=replace(PRICES, read=0.0), earlier=100)
        assert given.affordable(given.balance(draft({2: 20}))) is affordable


@pytest.mark.parametrize(("read", "spent", "first"), [(0.1, 10_000, 6), (0.25, 10_000, None), (0.25, 26_000, 0)])
def test_where_prices_may_be_far_off_no_lesser_trim_takes_the_place_of_the_best(
    read: float, spent: int, first: int | None
) -> None:
    # From the first place on most is saved. At the worst prices 760 are lost there, and from the seventh on 140.
    account = Account(turns=30, untrimmed=10**6, saved=0.0, worst=Outlay(untrimmed=spent, saved=0.0))
    given = costs(reads=(1000,) * 10, account=account, prices=replace(PRICES, read=read))
    assert given.first_place([0, 6], draft({0: 20, 6: 20})) == first


def test_the_worst_prices_are_those_at_which_trims_pay_least() -> None:
    assert worst_of(PRICES) == replace(PRICES, read=0.05)
    assert worst_of(FREE_WRITING) == replace(PRICES, read=0.05)
    assert worst_of(replace(PRICES, read=0.01, write=2.0)) == replace(PRICES, read=0.01, write=2.0)
    # Of what should be cached, a half was.
    assert worst_of(replace(PRICES, read=0.55, served=0.5)).read == pytest.approx(0.525)
    without = replace(PRICES, read=1.0, write=1.0)
    assert worst_of(without) == without  # nothing is read from a cache


def test_so_many_turns_are_expected_as_there_were() -> None:
    assert costs(account=Account(turns=3, untrimmed=0, saved=0)).expected == EXPECTED_TURNS
    assert costs(account=Account(turns=30, untrimmed=0, saved=0)).expected == 30


LITTLE_AND_MUCH = {0: 90, 6: 10}
"""Ten tokens less in the first place, ninety less in the seventh: from there on the move costs 117.5."""


@pytest.mark.parametrize(
    ("starts", "requests", "turns", "first"),
    [
        # There 9 a request were paid, and 9 are saved at each later one.
        (range(10), (20, 13), 8, None),
        (range(10), (20, 14), 8, 6),
        # From the first on it costs 795, and 1 a request more was paid; 10 are saved.
        (range(10), (200, 200), 200, 6),
        ([0, 8], (400, 43), 400, None),
        ([0, 8], (400, 44), 400, 0),
        # From 3 on it costs 462.5.
        ([0, 3, 8], (51, 51), 51, None),
        ([0, 3, 8], (52, 52), 52, 3),
        ([0, 3, 8], (400, 400), 349, 0),
        ([0, 3, 8], (400, 400), 332, 3),
        ([7, 8, 9], (400, 400), 400, None),
    ],
)
def test_the_best_place_to_begin_from(
    starts: Sequence[int], requests: tuple[int, int], turns: int, first: int | None
) -> None:
    little, much = requests
    given = costs(reads=reads({0: little, 6: much}), account=Account(turns=turns, untrimmed=10**6, saved=0))
    assert given.first_place(starts, draft(LITTLE_AND_MUCH)) == first


def test_in_a_cold_cache_the_best_place_is_the_first() -> None:
    cold = costs(warm=False, reads=reads({}), account=Account(turns=0, untrimmed=0, saved=0))
    assert cold.first_place(range(10), draft(LITTLE_AND_MUCH)) == 0


def test_a_place_that_the_cache_does_not_hold_is_free() -> None:
    poor = costs(reads=reads({}), account=Account(turns=0, untrimmed=0, saved=0))
    assert poor.first_place(range(10), draft({2: 20, 9: 20})) == 9
    assert poor.first_place([2, 9], draft({2: 20, 9: 20})) == 9


def test_what_leaves_no_more_than_a_trim_that_is_timely_may_pay() -> None:
    given = costs(reads=reads({0: 20, 6: 14}))
    assert given.first_place(range(10), draft(LITTLE_AND_MUCH)) is not None
    assert given.may_pay(range(10), draft(LITTLE_AND_MUCH).tokens)
    assert given.may_pay(range(10), [0] * 10)
    assert not costs(reads=reads({})).may_pay(range(7), draft(LITTLE_AND_MUCH).tokens)


def test_where_fewer_tokens_may_be_too_few_for_the_cache_more_may_pay() -> None:
    given = costs(
        prices=replace(PRICES, minimum=1000),
        fixed=550,
        reads=(200,) * 10,
        account=Account(turns=200, untrimmed=10**6, saved=0),
    )
    # Of 1550 tokens 1350 are left, which the cache takes. At best these would be 950: too few for it.
    assert given.first_place([0], draft({0: 0, 1: 0})) == 0
    assert given.may_pay([0], draft(dict.fromkeys(range(6), 0)).tokens)


def test_a_move_is_tried_out_when_the_view_has_grown_by_a_twentieth() -> None:
    assert [due(view, 0) for view in (2047, 2048)] == [False, True]
    # 1.05 ** 156 < 2048 < 2121.9 = 1.05 ** 157
    assert [due(view, 2048) for view in (2048, 2110, 2130)] == [False, False, True]
    assert due(2050, 2047)


def test_the_cache_is_cold_when_the_session_was_idle_for_longer_than_it_lives() -> None:
    idle = [None, 0.0, 300.0, 301.0]
    assert [is_cold(PlanningContext(count=count, idle=each)) for each in idle] == [False, False, False, True]
    assert not is_cold(PlanningContext(count=count, idle=301, prices=replace(PRICES, lifetime=3600)))


def test_sizes_that_prices_speak_of_are_upstreams() -> None:
    prices = replace(PRICES, minimum=1000, steps=(Step(above=13_000, factor=2.0),))
    assert prices_of(PlanningContext(count=count, prices=prices)) is prices
    scaled = prices_of(PlanningContext(count=count, prices=prices, scale=1.3))
    assert scaled == replace(prices, minimum=770, steps=(Step(above=10_000, factor=2.0),))
    assert prices_of(PlanningContext(count=count)) == ASSUMED
    assert prices_of(PlanningContext(count=count, scale=0.5)).source == "assumed"


@pytest.mark.parametrize(
    ("read", "served", "judged"), [(0.05, 1, 0.05), (0.5, 1, 0.46), (0.5, 0.5, 0.73), (0.1, 0, 1), (1, 1, 1)]
)
def test_cached_tokens_count_as_less_than_a_half_where_they_are_served(
    read: float, served: float, judged: float
) -> None:
    prices = replace(FREE_WRITING, read=read, served=served)
    assert prices_of(PlanningContext(count=count, prices=prices)).read == pytest.approx(judged)


def talk(*tokens: int) -> list[Entry]:
    """Return a log of questions and answers in turns, with so many tokens each."""
    roles = ("user", "assistant")
    return [
        Entry(message=message(f"{roles[at % 2]} {at}"), tokens=each, ref=f"ref_{at}", position=at)
        for at, each in enumerate(tokens)
    ]


def test_a_message_was_read_by_each_request_since_it_came() -> None:
    log = talk(100, 10, 100, 10, 100)
    # The request that is judged is not counted: nobody has answered it.
    assert reads_of(log, 0) == (2, 1, 1, 0, 0)
    # A move of the cut at position 3 was made by the request that the reply there answers.
    assert reads_of(log, 3) == reads_of(log, 2) == (1, 1, 1, 0, 0)
    assert reads_of(log, 4) == (0, 0, 0, 0, 0)
    # It is positions that count, whatever of the log is there.
    assert reads_of(log[2:], 3) == (1, 0, 0)
    assert reads_of([], 0) == ()


def reckoned(entries: Sequence[Entry], cut: Cut | None = None, prices: Prices = FREE_WRITING) -> Account:
    """Return the account of a log with 50 tokens beside it."""
    before = 50 + sum(entry.tokens for entry in entries)
    return account_of(entries, cut, PlanningContext(count=count, fixed_tokens=50, prices=prices), before)


def cut_at(position: int, tokens: int, account: Account | None = None) -> Cut:
    return Cut(
        position=position, policy="p", version="v", changes=(), tokens=tokens, messages=0, tool_calls=0, account=account
    )


def test_each_request_reads_what_the_one_before_sent() -> None:
    # 150 written; then 150 read and 110 written. The third request is the one that is judged.
    assert told(reckoned(talk(100, 10, 100, 10, 100))) == (2, 150 + 125, 0)
    assert told(reckoned(talk(100))) == (0, 0, 0)
    assert told(reckoned([])) == (0, 0, 0)


def test_minimum_steps_and_the_price_of_writing_count_there_too() -> None:
    log = talk(100, 10, 100, 10, 100)
    assert told(reckoned(log, prices=replace(FREE_WRITING, minimum=200))) == (2, 150 + 260, 0)
    assert told(reckoned(log, prices=replace(FREE_WRITING, steps=(Step(above=200, factor=2.0),)))) == (
        2,
        150 + 2 * 125,
        0,
    )
    assert told(reckoned(log, prices=PRICES)) == (2, 1.25 * 150 + 15 + 1.25 * 110, 0)
    # Without prices the most common ones; their cache begins at 1024 tokens.
    assert told(account_of(log, None, PlanningContext(count=count, fixed_tokens=50), 370)) == (2, 150 + 260, 0)


LATER = talk(100, 10, 100, 10, 100, 10, 100)
CUT = cut_at(3, 200, Account(turns=5, untrimmed=1000.0, saved=40.0))
"""It freed 60 tokens of 260."""


def test_what_a_cut_says_is_gone_on_with() -> None:
    # The cut was moved by the request that the first reply after it answers: that one is in the account.
    assert told(reckoned(talk(100, 10, 100, 10, 100), CUT)) == (5, 1000, 40)
    # 260 read and 110 written, if nothing were trimmed. Of the 260, 60 are not sent.
    assert told(reckoned(LATER, CUT)) == (6, 1000 + 136, 40 + 6)


def test_what_trimming_saves_is_told_by_minimum_and_steps_too() -> None:
    # Untrimmed it is read from the cache, 136 as above; the 200 that were sent were too few for that: 310.
    short = reckoned(LATER, CUT, replace(FREE_WRITING, minimum=250))
    assert told(short) == (6, 1000 + 136, 40 + 136 - 310)
    # Untrimmed, 370 tokens cost twice as much; 310 do not.
    steep = reckoned(LATER, CUT, replace(FREE_WRITING, steps=(Step(above=350, factor=2.0),)))
    assert told(steep) == (6, 1000 + 272, 40 + 272 - 130)


def test_without_an_account_it_begins_at_the_cut() -> None:
    # What the move itself has cost or saved nobody knows.
    assert told(reckoned(talk(100, 10, 100, 10, 100), cut_at(2, 100))) == (1, 260, 0)
    assert told(reckoned(LATER, cut_at(2, 100))) == (2, 260 + 136, 6)
    # A cut that freed nothing saves nothing; it cannot save less.
    assert reckoned(LATER, cut_at(2, 900)).saved == 0


def test_an_account_is_kept_at_the_worst_prices_too() -> None:
    # 1.25 * 150 written; then 150 read and 110 written.
    worst = reckoned(talk(100, 10, 100, 10, 100)).worst
    assert worst is not None
    assert astuple(worst) == pytest.approx((1.25 * 150 + 0.05 * 150 + 1.25 * 110, 0))
    # What was stored without it is gone on with as it is; of 260 that are read, 60 are not sent.
    worst = reckoned(LATER, CUT).worst
    assert worst is not None
    assert astuple(worst) == pytest.approx((1000 + 0.05 * 260 + 1.25 * 110, 40 + 0.05 * 60))
    known = cut_at(3, 200, Account(turns=5, untrimmed=1.0, saved=2.0, worst=Outlay(untrimmed=3.0, saved=4.0)))
    worst = reckoned(LATER, known).worst
    assert worst is not None
    assert astuple(worst) == pytest.approx((3 + 0.05 * 260 + 1.25 * 110, 4 + 0.05 * 60))


def test_what_precedes_the_cut_need_not_be_there() -> None:
    whole = talk(100, 10, 100, 10, 100)
    known = PlanningContext(count=count, fixed_tokens=50, prices=FREE_WRITING)
    assert account_of(whole[3:], CUT, known, 370) == account_of(whole, CUT, known, 370)


def test_the_request_of_a_move_is_counted_with_it() -> None:
    given = costs(account=Account(turns=4, untrimmed=1000.0, saved=7.0))
    balance = given.balance(draft({2: 20}))
    # Untrimmed it has 1500 tokens: 1300 read, 200 written. 450 fewer are read; the move itself costs 590.
    after = account_after(given, balance, 1500)
    assert told(after) == (5, 1000 + 130 + 250, 7 + 45 - 590)
    # At the worst prices 1300 would be read and 200 written; with the move 250 are read and 720 written.
    assert after.worst is not None
    assert astuple(after.worst) == pytest.approx((1000 + 65 + 250, 7 + 65 + 250 - 12.5 - 900))
    cold = replace(given, warm=False)
    after = account_after(cold, cold.balance(draft({2: 20})), 1500)
    assert told(after) == (5, 1000 + 1875, 7 + 1.25 * 450 + 100)
    steep = replace(given, prices=replace(PRICES, steps=(Step(above=1200, factor=2.0),)))
    after = account_after(steep, steep.balance(draft({2: 20})), 1500)
    # What is sent, 335 without the move and 925 with it, lies below the step.
    assert told(after) == (5, 1000 + 2 * 380, 7 + 2 * 380 - 925)
    short = replace(given, prices=replace(PRICES, minimum=900))
    after = account_after(short, short.balance(draft({2: 20})), 1500)
    # Untrimmed it is in the cache; the 850 that were sent last are not, so 970 are written.
    assert told(after) == (5, 1000 + 380, 7 + 380 - 1212.5)


def test_where_only_tokens_went_that_place_is_rewritten() -> None:
    released = replace(draft({}), tokens=(100,) * 3 + (60,) + (100,) * 6)
    balance = costs().balance(released)
    assert (balance.freed, balance.rewritten) == (40, 1010 - 350)
    behind = replace(draft({}), tokens=(100,) * 9 + (60,))
    balance = costs().balance(behind)
    assert (balance.freed, balance.rewritten) == (40, 1010 - 850)


# ------------------------------------------------------------------------------------------ prices

FLAT = Prices(read=0.1, write=1.0, output=5.0, lifetime=300.0, minimum=1024)


def test_without_steps_every_request_costs_the_same() -> None:
    assert FLAT.factor(0) == FLAT.factor(10_000_000) == 1.0


@pytest.mark.parametrize(
    ("tokens", "factor"), [(0, 1.0), (128_000, 1.0), (128_001, 2.0), (272_000, 2.0), (272_001, 3.5)]
)
def test_a_step_holds_for_what_is_above_it(tokens: int, factor: float) -> None:
    prices = Prices(
        read=0.1,
        write=1.0,
        output=5.0,
        lifetime=300.0,
        minimum=1024,
        steps=(Step(above=128_000, factor=2.0), Step(above=272_000, factor=3.5)),
    )
    assert prices.factor(tokens) == factor


def test_who_does_not_say_where_prices_come_from_has_assumed_them() -> None:
    assert FLAT.source == "assumed"
