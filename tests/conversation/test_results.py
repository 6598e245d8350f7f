"""Where results belong that come alone."""

from __future__ import annotations

import pytest

from proxy.conversation.results import place_of_results
from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage


def _branch(words: str) -> list[Message]:
    """Make messages of words: `u` user, `a` assistant, `cXY` calls X and Y, `rX` and `sX` results of X."""
    made: list[Message] = []
    for word in words.split():
        if word[0] == "c":
            calls = [
                {"id": one, "type": "function", "function": {"name": "f", "arguments": "{}"}}
                for one in word[1:]
            ]
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
    assert place_of_results(_branch(branch), _branch(new)) == place


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
def test_of_calls_with_one_id_an_agents_own_open_one_is_meant(
    branch: str, own: list[int], block: int
) -> None:
    place = place_of_results(_branch(branch), _branch("rX"), own)
    assert place is not None
    assert place.block == block


def test_a_result_without_an_id_belongs_nowhere() -> None:
    assert place_of_results(_branch("u cX"), [ChatMessage(b'{"role":"tool","content":"x"}')]) is None
