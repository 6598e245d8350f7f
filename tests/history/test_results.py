"""Where results belong that come alone."""

from __future__ import annotations

import pytest

from proxy.history.results import place_of_results
from proxy.wire.messages import Message


def _branch(words: str) -> list[Message]:
    """Make messages of words: `u` user, `a` assistant, `cXY` calls X and Y, `rX` the result of X."""
    made: list[Message] = []
    for word in words.split():
        if word[0] == "c":
            calls = [
                {"id": one, "type": "function", "function": {"name": "f", "arguments": "{}"}}
                for one in word[1:]
            ]
            made.append(Message.of({"role": "assistant", "content": None, "tool_calls": calls}))
        elif word[0] == "r":
            made.append(Message.of({"role": "tool", "tool_call_id": word[1:], "content": "x"}))
        else:
            made.append(Message.of({"role": {"u": "user", "a": "assistant"}[word], "content": "x"}))
    return made


@pytest.mark.parametrize(
    ("branch", "new", "place"),
    [
        ("u cX", "rX", 2),
        ("u cXY", "rX rY", 2),
        ("u cXY rX a", "rY", 3),  # the other result came before, alone
        ("u cX u a", "rX", 2),  # the session went on
        ("u cX rX a u cX", "rX", 6),  # an id that was used before
        ("u cX rX a", "rX", 3),  # a second answer
        ("u cX", "rZ", None),
        ("u cX", "u", None),
        ("u cX", "", None),
        ("", "rX", None),
    ],
)
def test_results_follow_their_block_and_the_results_it_has(branch: str, new: str, place: int | None) -> None:
    assert place_of_results(_branch(branch), _branch(new)) == place


def test_a_result_without_an_id_belongs_nowhere() -> None:
    assert place_of_results(_branch("u cX"), [Message(b'{"role":"tool","content":"x"}')]) is None
