"""Where tool results belong that come alone: at the block whose calls they answer.

A client that appends may send a result after the session went on elsewhere (another message was
appended meanwhile, or results come one by one). Nothing may stand between calls and their results,
so these results follow their block, and the results that it has already.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.wire.messages import Message


def place_of_results(branch: Sequence[Message], results: Sequence[Message]) -> int | None:
    """Return the position in `branch` at which `results` belong.

    Args:
        branch: the log, oldest first.
        results: the new messages; what leads them decides.

    Returns:
        The number of messages of the branch that they follow: up to the newest block with a call
        that the first of them answers, and the results right after it. None where they do not begin
        with a result, or no block has such a call.
    """
    answered = results[0].answers if results else None
    if not answered:
        return None
    for position in range(len(branch) - 1, -1, -1):
        if any(call.id == answered for call in branch[position].calls):
            stop = position + 1
            while stop < len(branch) and branch[stop].role == "tool":
                stop += 1
            return stop
    return None
