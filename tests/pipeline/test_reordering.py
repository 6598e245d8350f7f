from __future__ import annotations

from proxy.dialects.chat.roles import Shape
from proxy.pipeline.reordering import Orders

ONE: frozenset[Shape] = frozenset({"one_system"})
TURNS: frozenset[Shape] = frozenset({"alternate"})


def test_what_a_model_insists_on_is_remembered_and_added_up() -> None:
    orders = Orders()
    assert orders.of("a", "m") == frozenset()
    orders.learn("a", "m", ONE)
    orders.learn("a", "m", TURNS)
    assert orders.of("a", "m") == ONE | TURNS
    assert orders.of("b", "m") == orders.of("a", "n") == frozenset()


def test_only_so_many_models_are_remembered_the_newest() -> None:
    orders = Orders(2)
    for name in ("x", "y", "x", "z"):
        orders.learn("a", name, ONE)
    assert [orders.of("a", name) for name in ("x", "y", "z")] == [ONE, frozenset(), ONE]
