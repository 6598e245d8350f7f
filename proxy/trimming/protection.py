"""What is never trimmed, wherever the cut is.

Pinned messages, the latest user message, calls that still wait for results, and what the policy's
`keep` names. A span is protected as a whole: half of one would break the protocol.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from proxy.conversation import Round, open_calls, span_start
from proxy.dialects import Message, Span
from proxy.trimming.policy import Keep, Policy


def protected(
    messages: Sequence[Message], spans: Sequence[Span], rounds: Sequence[Round], policy: Policy
) -> frozenset[int]:
    """Return the positions that no edit may touch, judged on the whole log of `messages`."""
    users = [position for position, message in enumerate(messages) if message.role == "user"]
    single = set(users[-1:])
    if policy.keep.first_user:
        single.update(users[:1])
    whole = set(_kept(spans, rounds, policy.keep))
    if spans and (not users or open_calls(messages) is not None):
        whole.add(spans[-1])  # without a question of a user's something must be left to answer
    if policy.pin:
        whole.update(span for span in spans if any(map(policy.pins, messages[span.start : span.stop])))
    return frozenset(single.union(*(range(span.start, span.stop) for span in whole)))


def pinned_so_far(messages: Sequence[Message], position: int, policy: Policy, floor: int = 0) -> bool:
    """Tell whether the span of a tool result is pinned by what stands in it up to that message.

    What comes after it does not count: what is decided on arrival is a function of the message
    and of what precedes it. Nor does what stands before `floor`: something between is missing.
    """
    if not policy.pin:
        return False
    near = position
    while near > floor and messages[near].is_result:
        near -= 1
    start = near + span_start(messages[near : position + 1], position - near)
    return any(policy.pins(message) for message in messages[start : position + 1])


def _kept(spans: Sequence[Span], rounds: Sequence[Round], keep: Keep) -> Iterator[Span]:
    """Yield the newest spans of each of the newest rounds."""
    for number in {each.number for each in rounds[max(0, len(rounds) - keep.rounds) :]}:
        inside = [span for span in spans if span.round == number]
        yield from inside[max(0, len(inside) - keep.spans) :]
