"""Reading and storing of cuts."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from proxy.dialects.chat import CHAT
from proxy.store.cuts import Decided, DecodedCuts, decode_cut, encode_cut
from proxy.store.records import Kept, StandingCut
from proxy.store.store import Store
from proxy.trimming import Change, Cut, Gap, Summary
from tests.support.talk import Talk, message

pytestmark = pytest.mark.anyio


def cut(position: int, *changes: Change, policy: str = "default", version: str = "v1") -> Cut:
    return Cut(position=position, policy=policy, version=version, changes=changes, tokens=50, messages=3, tool_calls=1)


async def newest(talk: Talk, head: str, policy: str = "default", agent: str | None = None) -> Cut | None:
    names = [row.node for row in await talk.store.path(talk.key, head)]
    found = await talk.store.cut(talk.key, names, policy, agent)
    return found.cut if found is not None else None


async def say(talk: Talk, text: str, made: Cut | None, **changes: object) -> str:
    """Send a message at the current head, so that the cut belongs to it."""
    session = await talk.store.session(talk.tenant, talk.session)
    base = session.head if session is not None else ""
    return (await talk.say(text, "ok", cut=made, **({"base": base} | changes))).head


async def test_a_branch_inherits_the_newest_cut_of_its_ancestors(store: Store) -> None:
    talk = Talk(store=store)
    first = await say(talk, "one", cut(1))
    second = await say(talk, "two", cut(3))
    plain = await say(talk, "three", None)
    beside = await say(talk, "zwei", None, base=first, at_head=False)
    other = await say(talk, "deux", cut(3, version="v2"), base=first, at_head=False)
    assert await newest(talk, first) == cut(1)
    assert await newest(talk, second) == cut(3)
    assert await newest(talk, plain) == cut(3)
    assert await newest(talk, beside) == cut(1)
    assert await newest(talk, other) == cut(3, version="v2")


async def test_each_policy_and_agent_has_its_own(store: Store) -> None:
    talk = Talk(store=store)
    await say(talk, "one", cut(1))
    await say(talk, "two", cut(3, policy="other"))
    head = await say(talk, "three", cut(5), agent="writer")
    assert await newest(talk, head) == cut(1)
    assert await newest(talk, head, "other") == cut(3, policy="other")
    assert await newest(talk, head, agent="writer") == cut(5)
    assert await newest(talk, head, "none") is None


async def test_the_one_is_found_behind_many_of_branches_left_behind(store: Store) -> None:
    talk = Talk(store=store)
    first = await say(talk, "one", cut(1))
    for number in range(70):
        await say(talk, f"left {number}", cut(10 + number), base=first, at_head=False)
    assert await newest(talk, first) == cut(1)


async def test_it_says_what_it_dropped_and_what_it_kept(store: Store) -> None:
    talk = Talk(store=store)
    first = await say(talk, "one", None)
    gap = Gap(start=0, stop=1, edit="drop_oldest", reason="its round was the oldest", tokens=5, tool_calls=0)
    made = replace(cut(3), gaps=(gap,))
    head = await say(talk, "two", made, kept=Kept(nodes=(first,), messages=(0,)))
    path = [row.node for row in await store.path(talk.key, head)]
    assert await store.cut(talk.key, path, "default", None) == StandingCut(
        cut=made, node=path[2], kept=(first, path[2])
    )
    assert await store.cut_at(talk.key, path[2], "default", None) == made


async def test_a_cut_that_nobody_said_what_it_kept_of_says_so(store: Store) -> None:
    talk = Talk(store=store)
    head = await say(talk, "one", cut(1))
    path = [row.node for row in await store.path(talk.key, head)]
    assert await store.cut(talk.key, path, "default", None) == StandingCut(cut=cut(1), node=path[0], kept=None)


async def test_a_cut_once_made_stays(store: Store) -> None:
    talk = Talk(store=store)
    stub = Change(
        position=0,
        edit="clear_tool_results",
        reason="old",
        message=message("tool", "…"),
        tokens_before=9,
        tokens_after=1,
    )
    gone = Change(position=1, edit="drop_oldest", reason="older", message=None, tokens_before=4, tokens_after=0)
    made = cut(2, stub, gone)
    await say(talk, "one", made, base="", at_head=False)
    head = await say(talk, "one", cut(2, version="v2"), base="", at_head=False)
    assert await newest(talk, head) == made
    node = (await store.path(talk.key, head))[0].node
    assert await store.cut_at(talk.key, node, "default", None) == made
    assert await store.cut_at(talk.key, head, "default", None) is None


def summed(position: int, text: str) -> Cut:
    return replace(
        cut(position),
        summary=Summary(
            text=text,
            role="system",
            until=position,
            tokens=9,
            kind="statistics",
            covered_messages=position,
            covered_tokens=70,
        ),
    )


async def test_the_summaries_of_a_branch_are_told_with_their_time(store: Store) -> None:
    talk = Talk(store=store)
    first = await say(talk, "one", cut(1), settled_at=10)
    await say(talk, "two", summed(3, "A"), settled_at=20)
    await say(talk, "three", summed(5, "B"), settled_at=30)
    head = await say(talk, "four", replace(summed(7, "B"), summary=summed(5, "B").summary), settled_at=40)
    beside = await say(talk, "zwei", summed(3, "C"), base=first, at_head=False, settled_at=50)

    async def told(node: str, policy: str = "default", agent: str | None = None) -> list[tuple[str, int]]:
        return [(each.text, at) for each, at in await store.summaries(talk.key, node, policy, agent)]

    assert await told(head) == [("B", 30), ("A", 20)]
    assert await told(beside) == [("C", 50)]
    assert await told(first) == await told("") == await told("\0") == await told(head, "other") == []
    assert await told(head, agent="writer") == []


async def test_a_cut_without_a_summary_ends_those_before_it(store: Store) -> None:
    talk = Talk(store=store)
    await say(talk, "one", summed(1, "A"))
    head = await say(talk, "two", cut(3, version="v2"))
    assert await store.summaries(talk.key, head, "default", None) == []


def text_of(number: int) -> str:
    shorter = message("tool", f"so short: {number:04}")
    change = Change(
        position=number, edit="clear_tool_results", reason="old", message=shorter, tokens_before=900, tokens_after=5
    )
    return encode_cut(Decided(changes=(change,), kept=("a", "b")))


def read(decoded: DecodedCuts, place: object, text: str) -> Decided:
    return decoded.read(place, text.encode(), CHAT, lambda: text)


ROOM = 8 * (len(text_of(1)) + 30 + 500)
"""A cache size at which a generation has room for four cuts."""


def test_a_text_is_read_once_and_says_what_it_says() -> None:
    decoded = DecodedCuts()
    first = read(decoded, "here", text_of(1))
    assert first == decode_cut(text_of(1), CHAT)
    assert read(decoded, "here", text_of(1)) is first
    assert read(decoded, "there", text_of(1)) == first


def test_another_text_at_the_same_place_is_another_cut() -> None:
    decoded = DecodedCuts()
    first, second = (read(decoded, "here", text_of(number)) for number in (1, 2))
    assert (first, second) == (decode_cut(text_of(1), CHAT), decode_cut(text_of(2), CHAT))
    assert read(decoded, "here", text_of(1)) == first


def test_another_text_is_another_cut_where_the_first_is_nearly_forgotten_too() -> None:
    decoded = DecodedCuts(most=ROOM)
    read(decoded, "here", text_of(1))
    for number in range(10, 14):  # fill the younger generation
        read(decoded, number, text_of(number))
    assert "here" not in decoded._held._young
    assert "here" in decoded._held._old
    assert read(decoded, "here", text_of(2)) == decode_cut(text_of(2), CHAT)


def test_a_cut_that_changes_again_and_again_leaves_others_where_they_are() -> None:
    decoded = DecodedCuts(most=ROOM)
    other = read(decoded, "other", text_of(0))
    for number in range(1, 40):
        read(decoded, "here", text_of(number))
    assert read(decoded, "other", text_of(0)) is other


def test_what_its_items_take_counts_beside_the_text() -> None:
    dropped = [
        Change(position=number, edit="drop_oldest", reason="old", message=None, tokens_before=9, tokens_after=0)
        for number in range(1000)
    ]
    gaps = [
        Gap(start=2 * number, stop=2 * number + 1, edit="drop_oldest", reason="old", tokens=9, tool_calls=0)
        for number in range(1000)
    ]
    for text in (encode_cut(Decided(changes=tuple(dropped))), encode_cut(Decided(gaps=tuple(gaps)))):
        # The text alone would fit.
        for most, stays in ((2 * len(text) + 50_000, False), (2 * len(text) + 70_000, True)):
            decoded = DecodedCuts(most)
            assert (read(decoded, "here", text) is read(decoded, "here", text)) is stays


def test_what_is_asked_for_stays_and_what_is_not_goes() -> None:
    decoded = DecodedCuts(most=ROOM)
    used, left = read(decoded, "used", text_of(1)), read(decoded, "left", text_of(2))
    for number in range(10, 40):
        read(decoded, number, text_of(number))
        assert read(decoded, "used", text_of(1)) is used
    again = read(decoded, "left", text_of(2))
    assert again == left
    assert again is not left


def test_a_text_that_would_take_half_of_the_room_is_not_held() -> None:
    decoded = DecodedCuts(most=100)
    first = read(decoded, "here", text_of(1))
    assert read(decoded, "here", text_of(1)) is not first


def test_what_is_no_text_of_a_cut_is_refused_each_time() -> None:
    decoded = DecodedCuts()
    for _ in range(2):
        with pytest.raises(ValueError, match="reason"):
            read(decoded, "here", '{"drop":[[3,0,[[0,[5]]]]]}')
