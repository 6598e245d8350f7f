"""What is remembered of branches that are resent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.store.history import Branches
from proxy.store.records import Mark


def marks(*names: str) -> tuple[Mark, ...]:
    return tuple(
        Mark(node=name, depth=depth, body="body", tokens=3, arrival=None)
        for depth, name in enumerate(names, 1)
    )


def test_what_was_kept_is_known_as_far_as_the_names_agree() -> None:
    branches = Branches()
    branches.keep("s", 1, marks("a", "b", "c"))
    assert branches.beginning("s", 1, ["a", "b", "c", "d"]) == marks("a", "b", "c")
    assert branches.beginning("s", 1, ["a", "b"]) == marks("a", "b")
    assert branches.beginning("s", 1, ["a", "x", "y"]) == marks("a")
    assert branches.beginning("s", 1, []) == ()


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_a_common_beginning_is_found_wherever_it_ends(kept: int, asked: int, common: int) -> None:
    branches = Branches()
    branches.keep("s", 1, marks(*(f"n{i}" for i in range(kept))))
    names = [f"n{i}" if i < common else f"x{i}" for i in range(asked)]
    assert len(branches.beginning("s", 1, names)) == min(kept, asked, common)


def test_a_session_made_again_is_another_one() -> None:
    branches = Branches()
    branches.keep("s", 1, marks("a"))
    assert branches.beginning("s", 2, ["a"]) == ()
    assert branches.beginning("t", 1, ["a"]) == ()


def test_those_that_were_not_used_for_the_longest_go() -> None:
    branches = Branches(5)
    branches.keep("s", 1, marks("a", "b"))
    branches.keep("t", 1, marks("a", "b"))
    branches.keep("s", 1, marks("a", "b", "c"))
    branches.keep("u", 1, marks("a"))
    assert branches.beginning("t", 1, ["a"]) == ()
    assert branches.beginning("s", 1, ["a", "b", "c"]) == marks("a", "b", "c")
    branches.keep("u", 1, marks(*"abcdef"))  # more than there is room for
    assert branches.beginning("u", 1, ["a"]) == marks("a")


def test_what_was_there_lately_is_guessed_whatever_has_become_of_the_session() -> None:
    branches = Branches()
    assert branches.guess("s", ["a"]) == (0, 0)
    branches.keep("s", 7, marks("a", "b"))
    assert branches.guess("s", ["a", "b", "c"]) == (2, 7)
    assert branches.guess("s", ["x"]) == (0, 7)
