"""Where tool results belong that come alone: at the block whose calls they answer.

A client that appends may send a result after the session went on elsewhere (another agent appended meanwhile,
or results come one by one). Nothing may stand between calls and their results, and nothing that was said may
be lost. So the block goes behind what was said since, with the results that it has, and these results follow
it: the log ends with what the next reply is about, and all that stood before the block still does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from proxy.conversation.nodes import content_hash
from proxy.dialects import Message


class ResultsPlace(NamedTuple):
    """Where results belong in a branch. All are positions in it."""

    block: int
    """The newest block with a call that the first of them answers."""
    stop: int
    """After the block and the results right after it."""
    since: int
    """The first message that was said since: from here on all goes before the block. The length of the
    branch where nothing must."""
    repeated: int | None
    """Where the very same messages stand already, behind the block; None where they are new."""


def place_of_results(
    branch: Sequence[Message], results: Sequence[Message], own: Collection[int] = ()
) -> ResultsPlace | None:
    """Return where `results` belong in `branch`.

    A reply without calls right after results that leave calls of their block open was given too early: it
    gives way to the one that knows all results.

    Args:
        branch: the log, oldest first.
        results: the new messages; what leads them decides.
        own: positions of the messages of the agent that sends them: where agents use the same ids, its own
            open call is meant.

    Returns:
        None where they do not begin with a result, or no block has such a call.
    """
    answered = results[0].answers if results else None
    newest: tuple[int, int] | None = None
    for block in range(len(branch) - 1, -1, -1) if answered else ():
        if any(call.id == answered for call in branch[block].calls):
            stop = block + 1
            while stop < len(branch) and branch[stop].role == "tool":
                stop += 1
            newest = newest or (block, stop)
            if not own or (block in own and answered not in _answers(branch, block, stop)):
                newest = block, stop
                break
    if newest is None:
        return None
    block, stop = newest
    since = stop + _is_early(branch, block, stop)
    return ResultsPlace(block=block, stop=stop, since=since, repeated=_repeated(branch, block, stop, results))


def _answers(branch: Sequence[Message], block: int, stop: int) -> set[str | None]:
    return {result.answers for result in branch[block + 1 : stop]}


def _is_early(branch: Sequence[Message], block: int, stop: int) -> bool:
    """Tell whether the message at `stop` answers some results of the block, and not all."""
    if stop == block + 1 or stop == len(branch):
        return False
    reply, answered = branch[stop], _answers(branch, block, stop)
    is_open = any(call.id not in answered for call in branch[block].calls)
    return is_open and reply.role == "assistant" and not reply.calls


def _repeated(branch: Sequence[Message], block: int, stop: int, results: Sequence[Message]) -> int | None:
    """Return where among the results of the block the very same messages begin."""
    if stop == block + 1:
        return None
    contents = [content_hash(message) for message in results]
    for start in range(block + 1, stop):
        if [content_hash(message) for message in branch[start : start + len(contents)]] == contents:
            return start
    return None
