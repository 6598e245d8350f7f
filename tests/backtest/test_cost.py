"""The simulated prompt cache, and prices. A prompt is written as its segments: name and tokens."""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.backtest.cost import (
    CacheRule,
    PriceClass,
    PromptCache,
    Segment,
    Use,
    class_of,
    price_class,
    standard_classes,
)
from proxy.config import Matching, ModelRule
from proxy.models import Catalogue, Dollars, DollarStep

BREAKPOINTS = CacheRule(matching="breakpoints")


def prompt(*parts: tuple[str, int]) -> list[Segment]:
    return [Segment(text=name.encode(), tokens=tokens) for name, tokens in parts]


SHORT = prompt(("system", 1000), ("user", 23))
ONE = prompt(("system", 1000), ("user", 100))
TWO = prompt(("system", 1000), ("user", 100), ("reply", 50), ("more", 150))


def test_uses_add_up() -> None:
    assert Use(read=1, written=2, plain=3) + Use(read=10, written=20, plain=30) == Use(read=11, written=22, plain=33)
    assert Use(read=1, written=2, plain=3).sent == 6
    assert Use().sent == 0


def test_by_blocks_whole_blocks_are_written_and_read() -> None:
    cache = PromptCache(CacheRule())
    assert cache.read(ONE) == Use(read=0, written=1024, plain=76)
    # 1,100 tokens are common, eight blocks of 128; of 1,300 tokens ten blocks are in the cache then.
    assert cache.read(TWO) == Use(read=1024, written=256, plain=20)
    assert cache.read(TWO) == Use(read=1280, written=0, plain=20)


@pytest.mark.parametrize(("shared", "read"), [(1023, 0), (1024, 1024), (1151, 1024), (1152, 1152), (5000, 4992)])
def test_by_blocks_a_common_beginning_is_read_in_whole_blocks(shared: int, read: int) -> None:
    cache = PromptCache(CacheRule())
    cache.read(prompt(("a", shared), ("b", 10)))
    assert cache.read(prompt(("a", shared), ("c", 10))).read == read


def test_below_the_smallest_size_nothing_is_read_or_written() -> None:
    cache = PromptCache(CacheRule())
    assert cache.read(SHORT) == Use(plain=1023)
    assert cache.read(SHORT) == Use(plain=1023)
    assert cache.read([*SHORT, Segment(text=b"one", tokens=1)]) == Use(written=1024)
    assert cache.read([*SHORT, Segment(text=b"one", tokens=1)]) == Use(read=1024)


def test_by_blocks_everything_after_a_change_is_written_again() -> None:
    cache = PromptCache(CacheRule())
    cache.read(prompt(("a", 2048), ("b", 1024), ("c", 1024)))
    assert cache.read(prompt(("a", 2048), ("x", 100), ("c", 1024))) == Use(read=2048, written=1024, plain=100)
    # The first prompt is still known, and so is the second.
    assert cache.read(prompt(("a", 2048), ("b", 1024), ("d", 1024))) == Use(read=3072, written=1024)
    assert cache.read(prompt(("a", 2048), ("x", 100), ("c", 1024))) == Use(read=3072, written=0, plain=100)


def test_by_blocks_the_equal_beginning_of_a_segment_counts() -> None:
    cache = PromptCache(CacheRule())
    cache.read([Segment(text=b"a" * 600 + b"b" * 400, tokens=10_000), Segment(text=b"end", tokens=5)])
    # 600 of 1,000 bytes are equal: 6,000 tokens, 46 blocks.
    assert cache.read([Segment(text=b"a" * 600 + b"c" * 400, tokens=10_000)]).read == 46 * 128
    assert cache.read([Segment(text=b"a" * 650 + b"c" * 350, tokens=10_000)]).read == 46 * 128
    assert cache.read([Segment(text=b"a" * 620 + b"c" * 380, tokens=10_000)]).read == 48 * 128


def test_at_breakpoints_only_prompts_that_ended_there_are_read() -> None:
    cache = PromptCache(BREAKPOINTS)
    assert cache.read(ONE) == Use(written=1100)
    assert cache.read(TWO) == Use(read=1100, written=200)
    # Another question after the same system prompt: no prompt ended there.
    assert cache.read(prompt(("system", 1000), ("other", 100))) == Use(written=1100)
    # A reply is dropped: what is left of TWO ends at the end of ONE.
    assert cache.read(prompt(("system", 1000), ("user", 100), ("more", 150))) == Use(read=1100, written=150)
    # A part of a segment never counts.
    assert cache.read(prompt(("system", 1000), ("users", 100))) == Use(written=1100)


def test_at_breakpoints_below_the_smallest_size_nothing_is_kept() -> None:
    cache = PromptCache(BREAKPOINTS)
    assert cache.read(SHORT) == Use(plain=1023)
    assert cache.read(SHORT) == Use(plain=1023)
    assert cache.read([*SHORT, Segment(text=b"one", tokens=1)]) == Use(written=1024)


def test_an_explicit_mark_is_a_breakpoint() -> None:
    cache = PromptCache(BREAKPOINTS)
    long = prompt(("system", 2000), ("user", 100))
    assert cache.read(long, marks=[0]) == Use(written=2100)
    assert cache.read(prompt(("system", 2000), ("other", 300))) == Use(read=2000, written=300)
    unmarked = PromptCache(BREAKPOINTS)
    unmarked.read(long)
    assert unmarked.read(prompt(("system", 2000), ("other", 300))) == Use(written=2300)


def test_unused_entries_are_forgotten_after_a_lifetime() -> None:
    for rule in (CacheRule(lifetime=300), CacheRule(matching="breakpoints", lifetime=300)):
        cache = PromptCache(rule)
        cache.read(ONE, at=1000)
        assert cache.read(ONE, at=1300).read > 0
        assert cache.read(ONE, at=1600).read > 0  # using it kept it alive
        assert cache.read(ONE, at=1901).read == 0
        assert cache.read(ONE, at=1902).read > 0


def test_by_blocks_forgotten_entries_do_not_hide_others() -> None:
    cache = PromptCache(CacheRule(lifetime=300))
    cache.read([Segment(text=b"a" * 1000, tokens=10_000)], at=0)
    cache.read([Segment(text=b"a" * 300 + b"b" * 700, tokens=10_000)], at=200)
    assert cache.read([Segment(text=b"a" * 900 + b"c" * 100, tokens=10_000)], at=400).read == 3000 // 128 * 128


def test_at_breakpoints_reading_an_entry_renews_it() -> None:
    cache = PromptCache(CacheRule(matching="breakpoints", lifetime=300))
    cache.read(ONE, at=0)
    cache.read(TWO, at=200)  # reads ONE
    assert cache.read(prompt(("system", 1000), ("user", 100), ("other", 1)), at=450) == Use(read=1100, written=1)


texts = st.text("ab", min_size=1, max_size=4).map(str.encode)


def _tokens(text: bytes) -> int:
    """Tokens are a function of the text, as those of messages are."""
    return 100 * len(text) + text.count(b"a")


def _shared(one: list[bytes], other: list[bytes]) -> int:
    """Return the tokens of the common beginning, with the share of the first part that differs."""
    tokens = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine == theirs:
            tokens += _tokens(mine)
            continue
        equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(mine, theirs, strict=False)))
        return tokens + _tokens(mine) * equal // len(mine)
    return tokens


@given(st.lists(st.lists(texts, max_size=12), max_size=12))
def test_by_blocks_the_tree_finds_the_longest_beginning_of_all_earlier_prompts(prompts: list[list[bytes]]) -> None:
    cache = PromptCache(CacheRule())
    for number, parts in enumerate(prompts):
        read = cache.read([Segment(text=text, tokens=_tokens(text)) for text in parts]).read
        shared = max((_shared(parts, earlier) for earlier in prompts[:number]), default=0)
        assert read == (shared // 128 * 128 if shared >= 1024 else 0)


@given(
    st.sampled_from(["blocks", "breakpoints"]),
    st.lists(st.tuples(st.lists(texts, max_size=12), st.sets(st.integers(0, 12))), max_size=12),
)
def test_every_token_comes_from_somewhere(matching: Matching, prompts: list[tuple[list[bytes], set[int]]]) -> None:
    cache = PromptCache(CacheRule(matching=matching, lifetime=3))
    for at, (parts, marks) in enumerate(prompts):
        segments = [Segment(text=text, tokens=_tokens(text)) for text in parts]
        use = cache.read(segments, float(at), marks)
        assert use.sent == sum(segment.tokens for segment in segments)
        assert min(use.read, use.written, use.plain) >= 0


# ------------------------------------------------------------------------------------ prices


USE = Use(read=600_000, written=300_000, plain=100_000)
"""A request of a million tokens."""


@pytest.mark.parametrize(
    ("read", "write", "dollars"),
    [
        (0.5, 1.0, 0.7),  # 0.6 * 0.5 + 0.3 * 1 + 0.1
        (0.25, 1.0, 0.55),
        (0.1, 1.0, 0.46),
        (0.1, 1.25, 0.535),  # 0.6 * 0.1 + 0.3 * 1.25 + 0.1
        (0.05, 1.25, 0.505),
    ],
)
def test_the_price_of_a_request_in_each_class(read: float, write: float, dollars: float) -> None:
    assert price_class(read, write).input_dollars(USE) == pytest.approx(dollars)
    assert price_class(read, write, dollars=3).input_dollars(USE) == pytest.approx(3 * dollars)


def test_output_has_a_price_of_its_own() -> None:
    assert price_class(0.1, dollars=2, output=5).output_dollars(USE, 100_000) == pytest.approx(1.0)
    silent = PriceClass(
        name="m", dollars=Dollars(input=1, cached_read=1, cache_write=1), prices=price_class(0.1).prices
    )
    assert silent.output_dollars(USE, 100_000) is None


def test_the_five_classes_have_equal_prices_for_policies_and_costs() -> None:
    classes = standard_classes(2.5)
    assert [each.name for each in classes] == [
        *("read 0.5", "read 0.25", "read 0.1", "read 0.1, write 1.25", "read 0.05, write 1.25")
    ]
    for each in classes:
        assert each.dollars.input == 2.5
        assert each.dollars.cached_read == pytest.approx(each.prices.read * 2.5)
        assert each.dollars.cache_write == pytest.approx(each.prices.write * 2.5)
        assert each.matching == ("blocks" if each.prices.write == 1 else "breakpoints")


@pytest.mark.parametrize(("taken", "explicit"), [("anthropic", True), ("openai", True), ("none", False)])
def test_marks_are_explicit_if_the_model_accepts_them(taken: str, explicit: bool) -> None:
    cache = {"matching": "breakpoints", "breakpoints": taken}
    rule = ModelRule.model_validate({"match": ["mine"], "prices": {"input": 2}, "cache": cache})
    found = class_of("mine", Catalogue((rule,)).facts("mine", None))
    assert found is not None
    assert found.rule(timed=False).explicit is explicit


def test_without_a_clock_nothing_is_forgotten() -> None:
    each = price_class(0.1, 1.25)
    assert each.rule(timed=True) == CacheRule(matching="breakpoints", block=128, minimum=1024, lifetime=300)
    assert each.rule(timed=False) == CacheRule(matching="breakpoints", block=128, minimum=1024, lifetime=None)


def test_a_price_step_holds_for_the_whole_request() -> None:
    dollars = Dollars(
        input=1,
        cached_read=0.1,
        cache_write=1,
        output=4,
        steps=(DollarStep(above=500_000, dollars=Dollars(input=2, cached_read=0.2, cache_write=2, output=6)),),
    )
    each = PriceClass(name="m", dollars=dollars, prices=price_class(0.1).prices)
    assert each.input_dollars(Use(plain=500_000)) == pytest.approx(0.5)
    assert each.input_dollars(Use(plain=600_000)) == pytest.approx(1.2)
    assert each.output_dollars(Use(plain=600_000), 1_000_000) == pytest.approx(6)


def test_a_model_brings_its_prices_and_its_cache() -> None:
    rule = ModelRule.model_validate(
        {
            "match": ["mine"],
            "prices": {"input": 2, "cached_read": 0.5, "cache_write": 3, "output": 8},
            "cache": {"matching": "breakpoints", "minimum": 2048, "lifetime": 60},
        }
    )
    catalogue = Catalogue((rule,))
    found = class_of("mine", catalogue.facts("mine", None))
    assert found is not None
    assert found.name == "mine"
    assert found.input_dollars(USE) == pytest.approx(0.6 * 0.5 + 0.3 * 3 + 0.1 * 2)
    assert found.rule(timed=True) == CacheRule(
        matching="breakpoints", block=found.block, minimum=2048, lifetime=60, explicit=False
    )
    assert class_of("nobody-knows", catalogue.facts("nobody-knows", None)) is None
