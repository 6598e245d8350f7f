"""Where results belong that come alone."""

from __future__ import annotations

import pytest
from msgspec.structs import astuple

from proxy.conversation import (
    ROOT,
    AnsweredEarlier,
    StoredMessage,
    content_hash,
    is_placed_anew,
    nearest_place,
    place_append,
    place_finished,
    takes_head,
)
from proxy.conversation.placement import place_of_results
from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage


def _branch(words: str) -> list[Message]:
    """Make messages of words: `u` user, `a` assistant, `cXY` calls X and Y, `rX` and `sX` results of X."""
    made: list[Message] = []
    for word in words.split():
        if word[0] == "c":
            calls = [{"id": one, "type": "function", "function": {"name": "f", "arguments": "{}"}} for one in word[1:]]
            made.append(ChatMessage.of({"role": "assistant", "content": None, "tool_calls": calls}))
        elif word[0] in "rs":
            made.append(ChatMessage.of({"role": "tool", "tool_call_id": word[1:], "content": word[0]}))
        else:
            made.append(ChatMessage.of({"role": {"u": "user", "a": "assistant"}[word], "content": "x"}))
    return made


@pytest.mark.parametrize(
    ("branch", "new", "place"),
    [
        ("u cX", "rX", (1, 2, 2, None)),
        ("u cXY", "rX rY", (1, 2, 2, None)),
        ("u cXY rX", "rY", (1, 3, 3, None)),  # the other result came before, alone
        ("u cX rX a u cX", "rX", (5, 6, 6, None)),  # an id that was used before
        # The session went on: all that was said since goes before the block, and the results it has.
        ("u cX u a", "rX", (1, 2, 2, None)),
        ("u cXY rX u a", "rY", (1, 3, 3, None)),
        ("u cX u cY", "rX", (1, 2, 2, None)),
        ("u cX rX a", "sX", (1, 3, 3, None)),  # a second answer to a call that has one
        # A reply that knew some of the results gives way, unless it has calls of its own.
        ("u cXY rX a", "rY", (1, 3, 4, None)),
        ("u cXY rX a u a", "rY", (1, 3, 4, None)),
        ("u cXY rX cZ", "rY", (1, 3, 3, None)),
        # The same once more.
        ("u cX rX a", "rX", (1, 3, 3, 2)),
        ("u cX rX", "rX", (1, 3, 3, 2)),
        ("u cXY rX rY a u a", "rY", (1, 4, 4, 3)),
        ("u cXY rX rY a", "rX rY", (1, 4, 4, 2)),
        ("u cX rX u a", "rX u", (1, 3, 3, 2)),
        ("u cX rX a", "rX u", (1, 3, 3, None)),
        ("u cX", "rZ", None),
        ("u cX", "u", None),
        ("u cX", "", None),
        ("", "rX", None),
    ],
)
def test_results_follow_their_block_and_the_results_it_has(
    branch: str, new: str, place: tuple[int, int, int, int | None] | None
) -> None:
    found = place_of_results(_branch(branch), _branch(new))
    assert (None if found is None else astuple(found)) == place


@pytest.mark.parametrize(
    ("branch", "own", "block"),
    [
        ("u cX u cX", [], 3),
        ("u cX u cX", [0, 1], 1),
        ("u cX u cX", [0, 1, 2, 3], 3),
        ("u cX rX a u cX", [0, 1, 3], 5),  # its own is answered: it sends what another one asked for
        ("u cX u cX", [0], 3),
    ],
)
def test_of_calls_with_one_id_an_agents_own_open_one_is_meant(branch: str, own: list[int], block: int) -> None:
    place = place_of_results(_branch(branch), _branch("rX"), own)
    assert place is not None
    assert place.block == block


def test_results_that_come_again_are_hashed_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = 0

    def counted(message: Message) -> bytes:
        nonlocal hashed
        hashed += 1
        return content_hash(message)

    monkeypatch.setattr("proxy.conversation.placement.content_hash", counted)
    names = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    results = " ".join(f"r{name}" for name in names)
    place = place_of_results(_branch(f"u c{names} sA {results} u"), _branch(results))
    assert place is not None
    assert place.repeated == 3
    assert hashed <= 3 * len(names)


def test_a_result_without_an_id_belongs_nowhere() -> None:
    assert place_of_results(_branch("u cX"), [ChatMessage(b'{"role":"tool","content":"x"}')]) is None


def stored(words: str, agents: str = "") -> list[StoredMessage]:
    """Return a branch with the nodes n1, n2, …; `agents` has one letter for each message."""
    return [
        StoredMessage(node=f"n{at}", parent=f"n{at - 1}", depth=at, agent=agents[at - 1 : at] or None, message=one)
        for at, one in enumerate(_branch(words), 1)
    ]


@pytest.mark.parametrize(
    ("branch", "new", "base", "carried", "beside", "block"),
    [
        ("u cX", "rX", "n2", [], False, None),
        ("u cXY rX", "rY", "n3", [], False, None),
        ("u cX u a", "rX", "n1", ["n3", "n4", "n2"], False, "n2"),
        ("u cXY rX u", "rY", "n1", ["n4", "n2", "n3"], False, "n2"),
        ("u cXY rX a", "rY", "n3", [], False, "n2"),  # a reply that knew some of the results gives way
        ("u cX rX a", "rX", "n2", [], False, "n2"),  # the same again: only its reply came after
        ("u cX rX a u a", "rX", "n2", [], True, "n2"),  # the head stays with what came after
    ],
)
def test_an_append_of_results_follows_its_calls(
    branch: str, new: str, base: str, carried: list[str], beside: bool, block: str | None
) -> None:
    place = place_append(stored(branch), _branch(new), None)
    assert place is not None
    assert (place.base, [row.node for row in place.carried], place.beside) == (base, carried, beside)
    assert place.depth == int(base[1:])
    assert place.end == (carried[-1] if carried else base)
    assert (None if place.block is None else place.block.node) == block


def test_an_append_without_its_calls_has_no_place() -> None:
    assert place_append(stored("u a"), _branch("rX"), None) is None
    assert place_finished(stored("u a"), _branch("rX"), "A") is None


def test_an_agents_own_open_call_is_meant() -> None:
    place = place_append(stored("u cX u cX", "AABB"), _branch("rX"), "A")
    assert place is not None
    assert place.base == "n1"
    finished = place_finished(stored("u cX u cX", "AABB"), _branch("rX"), "A")
    assert finished is not None
    assert finished.base == "n2"


def test_results_of_a_finished_task_that_stand_already_are_found() -> None:
    found = place_finished(stored("u cXY rX"), _branch("rX rY"), None)
    assert found is not None
    assert found.base == "n3"
    assert found.nodes == {content_hash(_branch("rX")[0]): "n3"}


@pytest.mark.parametrize(
    ("planned", "bases", "depths", "nearest"),
    [
        ("p", ["p", "q"], {}, "p"),
        ("p", [], {}, "p"),
        ("p", ["a", "b"], {"p": 2, "a": 5, "b": 4}, "b"),
        ("p", ["a"], {"p": 2, "a": 1}, "p"),  # it knew of that one
        ("p", ["a", "gone"], {"a": 1}, "a"),
    ],
)
def test_the_nearest_twin_after_the_planned_place_counts(
    planned: str, bases: list[str], depths: dict[str, int], nearest: str
) -> None:
    assert nearest_place(planned, bases, depths) == nearest


@pytest.mark.parametrize(
    ("planned", "first", "known", "anew"),
    [
        ("p", "u", {"p"}, True),
        ("p", "u", {"p", "n"}, False),
        ("p", "rX", {"p", "n"}, True),
        ("p", "u", set[str](), False),
        (ROOT, "u", set[str](), True),
    ],
)
def test_an_append_is_placed_anew_unless_it_repeats_what_is_there(
    planned: str, first: str, known: set[str], anew: bool
) -> None:
    assert is_placed_anew(planned, _branch(first)[0], "n", known) is anew


@pytest.mark.parametrize(
    ("complete", "created_at", "replies", "takes"),
    [
        (True, 2, ["h"], True),  # it was sent last
        (False, 2, ["h"], False),  # a whole reply goes before one that broke off
        (True, 0, ["h"], False),
        (True, 2, ["other"], False),  # the session went on
    ],
)
def test_the_head_goes_to_the_better_of_two_replies(
    complete: bool, created_at: int, replies: list[str], takes: bool
) -> None:
    twin = AnsweredEarlier(base="b", replies=replies, complete=True, created_at=1, exchange="x")
    mine = AnsweredEarlier(base="b", replies=(), complete=complete, created_at=created_at, exchange="y")
    assert takes_head("h", mine, [twin]) is takes
