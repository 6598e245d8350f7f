"""Where new messages go: decided from the facts that were read of the log, here and nowhere else.

An append goes under the head. Tool results that come alone belong to the block whose calls they answer. A client
that appends may send one after the session went on elsewhere (another agent appended meanwhile, or results come one
by one). Nothing may stand between calls and their results, and nothing that was said may be lost. So the block goes
behind what was said since, with the results that it has, and these results follow it: the log ends with what the
next reply is about, and all that stood before the block still does.

The same results sent again have one place, and the head does not leave what came after them. The same request sent
twice at once has one place, that of the one that is answered first: neither may have known of the other when it was
planned. The replies are siblings.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, Generic, TypeVar

from msgspec import Struct

from proxy.conversation.ids import ROOT, content_hash
from proxy.dialects import Message

TWIN_MS: Final = 60_000
"""Milliseconds before a request came within which its twin was answered, if without its knowledge: hosts' clocks
differ, and a reply has its time before it is stored."""


class StoredMessage(Struct, frozen=True, kw_only=True):
    """A message at its place in the log."""

    node: str
    parent: str
    depth: int  # number of messages from the root to this one, itself included
    agent: str | None
    message: Message


Stored = TypeVar("Stored", bound=StoredMessage)


class ResultsPlace(Struct, frozen=True, kw_only=True):
    """Where results belong in a branch. All are positions in it."""

    block: int  # the newest block with a call that the first of them answers
    stop: int  # after the block and the results right after it
    since: int  # from here on all goes before the block; the branch's length where nothing must
    repeated: int | None  # where the very same messages stand already, behind the block; None where they are new


class Placement(Struct, Generic[Stored], frozen=True, kw_only=True):
    """Where the messages of a request go."""

    base: str  # the node under which they go, or what is carried along before them
    depth: int = 0  # depth of `base`, where results were placed
    carried: Sequence[Stored] = ()  # what comes to stand before them once more, in its new order
    beside: bool = False  # whether the head stays where it is
    block: Stored | None = None  # the message whose calls they answer, where anything but its results stands behind it

    @property
    def end(self) -> str:
        """The stored message that they follow, by the name that it has now."""
        return self.carried[-1].node if self.carried else self.base


class StoredResults(Struct, frozen=True, kw_only=True):
    """Where results go whose task is finished."""

    base: str
    nodes: Mapping[bytes, str] = {}  # results that stand there already: nodes by the hash of what they say


class AnsweredEarlier(Struct, frozen=True, kw_only=True):
    """A request that was answered, or is to be."""

    base: str
    replies: Sequence[str]
    complete: bool
    created_at: int
    exchange: str


def place_append(branch: Sequence[Stored], messages: Sequence[Message], agent: str | None) -> Placement[Stored] | None:
    """Return where results of an agent go by `branch`, the end of the branch of the head, oldest first.

    None where they do not begin with a result, or the branch has no block with such a call.
    """
    place = _place_on(branch, messages, agent)
    if place is None:
        return None
    block = branch[place.block] if place.stop < len(branch) else None
    if place.repeated is not None:
        base = branch[place.repeated - 1]
        came_after = len(branch) > place.repeated + len(messages) + 1  # more than the reply to them
        return Placement(base=base.node, depth=base.depth, beside=came_after, block=block)
    if block is None or place.since == len(branch):
        base = branch[place.stop - 1]
        return Placement(base=base.node, depth=base.depth, block=block)
    carried = [*branch[place.since :], *branch[place.block : place.stop]]
    return Placement(base=block.parent, depth=block.depth - 1, carried=carried, block=block)


def place_finished(branch: Sequence[Stored], messages: Sequence[Message], agent: str | None) -> StoredResults | None:
    """Return where results of a finished task go by the end of the branch of the head; None as above."""
    place = _place_on(branch, messages, agent)
    if place is None:
        return None
    nodes = {content_hash(row.message): row.node for row in branch[place.block + 1 : place.stop]}
    return StoredResults(base=branch[place.stop - 1].node, nodes=nodes)


def _place_on(branch: Sequence[Stored], messages: Sequence[Message], agent: str | None) -> ResultsPlace | None:
    own = [position for position, row in enumerate(branch) if agent is not None and row.agent == agent]
    return place_of_results([row.message for row in branch], messages, own)


def nearest_place(planned: str, bases: Collection[str], depths: Mapping[str, int]) -> str:
    """Return which of the places of a request's twins counts: `planned` where none does.

    It knew of twins whose replies come before the place for which it was planned: "continue" may come eight times.
    Of several places after that, the nearest counts.
    """
    if planned in bases:
        return planned
    unknown = [base for base in bases if depths.get(base, 0) > depths.get(planned, 0)]
    return min(unknown, key=lambda base: depths[base], default=planned)


def is_placed_anew(planned: str, first: Message, node: str, stored: Collection[str]) -> bool:
    """Tell whether the place of an append that was told where to go is judged by the head of this moment.

    Results always are. Anything else was to go where another one is. If it finds nothing of that there, it is no
    repetition of what was answered, and goes alone: its twin is still pending, or failed. `node` is the name of its
    first message under `planned`; `stored` has those of the two nodes that are stored.
    """
    is_new = node not in stored or bool(first.answers)
    return is_new and (planned == ROOT or planned in stored)


def takes_head(head: str, mine: AnsweredEarlier, twins: Sequence[AnsweredEarlier]) -> bool:
    """Tell whether the head goes from a twin's reply to this one's.

    It stays where anything came after. Else a whole reply goes before one that broke off, and the answer to what was
    sent last before the others: whoever sends again waits for that.
    """
    rank = (mine.complete, mine.created_at, mine.exchange)
    return any(rank > (twin.complete, twin.created_at, twin.exchange) for twin in twins if head in twin.replies)


def place_of_results(
    branch: Sequence[Message], results: Sequence[Message], own: Collection[int] = ()
) -> ResultsPlace | None:
    """Return where `results` belong in `branch`.

    None where they do not begin with a result, or no block has such a call. `own` are the positions of the messages of
    the agent that sends them: where agents use the same ids, its own open call is meant. A reply without calls right
    after results that leave calls of their block open was given too early: it gives way to the one that knows all.
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
    return {answered for result in branch[block + 1 : stop] for answered in result.answered}


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
    contents, first = list(map(content_hash, results)), block + 1
    stored = list(map(content_hash, branch[first : stop + len(contents)]))
    for start in range(stop - first):
        if stored[start : start + len(contents)] == contents:
            return first + start
    return None
