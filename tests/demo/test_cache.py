import pytest

from proxy.demo.cache import PrefixCache, Segment, shared_tokens


def segment(name: str, tokens: int) -> Segment:
    return Segment(text=name.encode(), tokens=tokens)


def test_a_prompt_that_was_never_read_is_not_cached() -> None:
    assert PrefixCache().read("key", "model", [segment("a", 5000)]) == 0


@pytest.mark.parametrize(
    ("shared", "cached"), [(1023, 0), (1024, 1024), (1151, 1024), (1152, 1152), (5000, 4992)]
)
def test_a_common_beginning_counts_in_blocks(shared: int, cached: int) -> None:
    cache = PrefixCache()
    cache.read("key", "model", [segment("a", shared), segment("b", 10)])
    assert cache.read("key", "model", [segment("a", shared), segment("c", 10)]) == cached


def test_any_earlier_prompt_may_hold_it() -> None:
    cache = PrefixCache()
    long = [segment("a", 1024), segment("b", 1024)]
    cache.read("key", "model", long)
    cache.read("key", "model", [segment("z", 2048)])
    assert cache.read("key", "model", [*long, segment("c", 1)]) == 2048


@pytest.mark.parametrize(("account", "model"), [("other", "model"), ("key", "other")])
def test_accounts_and_models_share_nothing(account: str, model: str) -> None:
    cache = PrefixCache()
    cache.read("key", "model", [segment("a", 2048)])
    assert cache.read(account, model, [segment("a", 2048)]) == 0


def test_of_the_first_part_that_differs_its_equal_bytes_count() -> None:
    assert shared_tokens([segment("aaaa", 8)], [segment("aabb", 8)]) == 4
    assert shared_tokens([segment("a", 3), segment("b", 3)], [segment("a", 3)]) == 3
