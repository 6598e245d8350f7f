from __future__ import annotations

from unittest.mock import patch

import pytest

from proxy.conversation import ROOT
from proxy.store import tree as lineage
from proxy.store.records import Settled
from proxy.store.store import Store
from proxy.store.tree import Lineage, marks_to
from tests.support.talk import Talk, body

pytestmark = pytest.mark.anyio


async def grown(talk: Talk, base: str, name: str, *tokens: int) -> Settled:
    """Put messages with so many tokens under `base`, and a reply of five."""
    asked = [body("user", f"{name}{number}", count) for number, count in enumerate(tokens)]
    exchange = await talk.begin(*asked, base=base)
    return await talk.settle(
        exchange, *asked, base=base, at_head=False, replies=(body("assistant", f"{name} ok"),)
    )


async def names(store: Store, talk: Talk, end: str) -> list[str]:
    return [row.node for row in await store.path(talk.key, end)]


def told(found: Lineage, end: str) -> list[str | None]:
    return [found.node_at(end, position) for position in range(found.depth(end))]


@pytest.mark.parametrize("length", [1, 63, 64, 65, 66, 319, 320, 321, 700])
async def test_a_branch_of_any_length_is_read_whole(store: Store, length: int) -> None:
    talk = Talk(store=store)
    end = (await grown(talk, ROOT, "m", *range(1, length + 1))).nodes[-1]
    found = await store.lineage(talk.key, [end])
    assert told(found, end) == await names(store, talk, end)
    assert found.depth(end) == length
    assert (found.node_at(end, length), found.node_at(end, -1)) == (None, None)
    assert found.tokens(end, 0, length) == length * (length + 1) // 2
    assert found.tokens(end, length - 1, length) == length
    assert found.tokens(end, length - 1, length + 5) == length


async def test_branches_of_branches(store: Store) -> None:
    talk = Talk(store=store)
    trunk = await grown(talk, ROOT, "trunk", *[1] * 200)
    second = await grown(talk, trunk.nodes[99], "second", *[10] * 90)
    third = await grown(talk, second.nodes[4], "third", 100)
    fourth = await grown(talk, third.replies[0], "fourth", 1000)
    other = await grown(talk, ROOT, "other", 3, 4)
    ends = [
        *(trunk.head, second.head, third.replies[0], fourth.nodes[0], other.replies[0]),
        *(trunk.nodes[0], trunk.nodes[99], second.nodes[0], second.nodes[4]),
    ]
    found = await store.lineage(talk.key, ends)
    for end in ends:
        rows = await store.path(talk.key, end)
        assert told(found, end) == [row.node for row in rows]
        for start, stop in ((0, len(rows)), (50, 102), (99, 100), (100, 106), (104, 108)):
            assert found.tokens(end, start, stop) == sum(row.tokens for row in rows[start:stop])
    assert fourth.nodes[0] in found
    assert fourth.replies[0] not in found


async def test_what_branches_share_is_read_once(store: Store) -> None:
    talk = Talk(store=store)
    trunk = await grown(talk, ROOT, "trunk", *[1] * 300)
    ends = [(await grown(talk, trunk.nodes[299], f"turn {number}", 1)).head for number in range(20)]
    read: list[int] = []

    def counted(*given: object, **named: object) -> list[object]:
        marks = marks_to(*given, **named)  # type: ignore[arg-type]  # as they came
        read.append(len(marks))
        return list(marks)

    with patch.object(lineage, "marks_to", counted):
        found = await store.lineage(talk.key, ends)
    assert all(found.depth(end) == 302 for end in ends)
    assert max(read) < 300
    assert sum(read) < 302 + 20 * 70


async def test_what_is_not_stored_has_no_branch(store: Store) -> None:
    talk = Talk(store=store)
    end = (await talk.say("one", "1")).head
    found = await store.lineage(talk.key, [end, "f" * 40, ROOT, "a\x00"])
    assert told(found, end) == await names(store, talk, end)
    for absent in ("f" * 40, ROOT):
        assert (found.depth(absent), found.node_at(absent, 0), found.tokens(absent, 0, 9)) == (0, None, 0)
    assert (await store.lineage(talk.key, [])).depth(end) == 0
    assert (await store.lineage("0" * 32, [end])).depth(end) == 0
