from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from proxy.tokens.cache import ENTRY_BYTES, Cached, CountCache


def test_what_is_put_is_found() -> None:
    cache = CountCache(10 * ENTRY_BYTES)
    assert cache.get("a") is None
    cache.put("a", 3)
    cache.put("b", 0)
    assert (cache.get("a"), cache.get("b")) == (3, 0)
    assert cache.cached == Cached(cached_messages=2, total_cached_tokens=3)


def test_a_key_that_is_put_again_counts_once() -> None:
    cache = CountCache(10 * ENTRY_BYTES)
    cache.put("a", 3)
    cache.put("a", 5)
    assert cache.cached == Cached(cached_messages=1, total_cached_tokens=5)


def test_the_least_recently_used_goes_first() -> None:
    cache = CountCache(2 * ENTRY_BYTES)
    cache.put("a", 1)
    cache.put("b", 10)
    cache.get("a")
    cache.put("c", 100)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (1, None, 100)
    assert cache.cached == Cached(cached_messages=2, total_cached_tokens=101)


def test_even_a_bound_of_nothing_holds_one() -> None:
    cache = CountCache(0)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.cached == Cached(cached_messages=1, total_cached_tokens=2)


def test_clearing_forgets_everything() -> None:
    cache = CountCache(10 * ENTRY_BYTES)
    cache.put("a", 3)
    cache.clear()
    assert cache.get("a") is None
    assert cache.cached == Cached(cached_messages=0, total_cached_tokens=0)


def test_threads_do_not_disturb_its_sums() -> None:
    cache = CountCache(50 * ENTRY_BYTES)

    def work(seed: int) -> None:
        for number in range(2000):
            cache.put((seed * number) % 97, number % 7)
            cache.get(number % 97)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, (3, 5, 7, 11)))
    counts = [count for key in range(97) if (count := cache.get(key)) is not None]
    assert cache.cached == Cached(cached_messages=50, total_cached_tokens=sum(counts))


def test_many_are_found_at_once_as_one_by_one() -> None:
    cache = CountCache(2 * ENTRY_BYTES)
    cache.put("a", 1)
    cache.put("b", 0)
    assert cache.get_all(["c", "b", "a", "a"]) == [None, 0, 1, 1]
    assert cache.get_all([]) == []
    cache.get_all(["b"])
    cache.put("c", 100)
    assert cache.get_all(["a", "b", "c"]) == [None, 0, 100]
