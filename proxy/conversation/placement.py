"""Decides where new messages go, from facts read from the log. No other module decides this.

An append goes under the head. Tool results that come alone belong to the block whose calls they answer. A client that
appends may send results after the session has continued elsewhere (another agent appended, or results come one by
one). Nothing may stand between calls and their results, and no message may be lost. So the block moves behind the
messages that came since, together with the results that it has, and the new results follow it. The log then ends with
what the next reply is about, and everything before the block stays where it was.

Results that are sent again get the same place as before, and the head stays on what came after them. If the same
request is sent twice at once, both get the place of the one that is answered first, because neither may have known of
the other when it was planned. The replies are siblings.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, Generic, TypeVar

from msgspec import Struct

from proxy.conversation.ids import ROOT, content_hash
from proxy.dialects import Message

TWIN_MS: Final = 60_000
"""Milliseconds before a request's arrival: a twin answered within them may be unknown to the request.

Hosts' clocks differ, and a reply gets its timestamp before it is stored.
"""


class StoredMessage(Struct, frozen=True, kw_only=True):
    """A message at its place in the log."""

    node: str
    parent: str
    depth: int  # number of messages from the root to this one, including it
    agent: str | None
    message: Message


Stored = TypeVar("Stored", bound=StoredMessage)


class ResultsPlace(Struct, frozen=True, kw_only=True):
    """Where results belong in a branch. All fields are positions in it."""

    block: int  # the newest block with a call that the first result answers
    stop: int  # after the block and the results right after it
    since: int  # messages from here on move before the block; the branch's length if none must move
    repeated: int | None  # where the same results already stand behind the block; None if they are new


class Placement(Struct, Generic[Stored], frozen=True, kw_only=True):
    """Where the messages of a request go."""

    base: str  # the node under which they go, or under which `carried` goes if there is any
    depth: int = 0  # depth of `base`, if results were placed
    carried: Sequence[Stored] = ()  # stored messages that are stored again before them, in their new order
    beside: bool = False  # whether the head stays where it is
    block: Stored | None = None  # the message whose calls they answer, if more than its results stand behind it

    @property
    def end(self) -> str:
        """The current name of the stored message that they follow."""
        return self.carried[-1].node if self.carried else self.base


class StoredResults(Struct, frozen=True, kw_only=True):
    """Where the results of a finished task go."""

    base: str
    nodes: Mapping[bytes, str] = {}  # results that are stored there already: nodes by content hash


class AnsweredEarlier(Struct, frozen=True, kw_only=True):
    """A request that was answered or will be."""

    base: str
    replies: Sequence[str]
    complete: bool
    created_at: int
    exchange: str


def place_append(branch: Sequence[Stored], messages: Sequence[Message], agent: str | None) -> Placement[Stored] | None:
    """Return where an agent's results go, or None.

    `branch` is the end of the head's branch, oldest first. Returns None if the messages do not begin with a result, or
    if no block of the branch has the call that it answers.
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
    """Return where results of a finished task go. The arguments, and when it returns None, are as in `place_append`."""
    place = _place_on(branch, messages, agent)
    if place is None:
        return None
    nodes = {content_hash(row.message): row.node for row in branch[place.block + 1 : place.stop]}
    return StoredResults(base=branch[place.stop - 1].node, nodes=nodes)


def _place_on(branch: Sequence[Stored], messages: Sequence[Message], agent: str | None) -> ResultsPlace | None:
    own = [position for position, row in enumerate(branch) if agent is not None and row.agent == agent]
    return place_of_results([row.message for row in branch], messages, own)


def nearest_place(planned: str, bases: Collection[str], depths: Mapping[str, int]) -> str:
    """Return the place of a request among those of its twins; `planned` if none of them counts.

    Twins before the planned place do not count: the request knew of their replies ("continue" may come eight times).
    Of several places after it, the nearest counts.
    """
    if planned in bases:
        return planned
    unknown = [base for base in bases if depths.get(base, 0) > depths.get(planned, 0)]
    return min(unknown, key=lambda base: depths[base], default=planned)


def is_placed_anew(planned: str, first: Message, node: str, stored: Collection[str]) -> bool:
    """Tell whether an append with a planned place is placed again by the current head.

    Results always are. Any other append was planned to go where another request went. If its first message is not
    stored there, it repeats nothing that was answered: its twin is still pending, or failed. `node` is the name of the
    first message under `planned`. `stored` holds whichever of these two nodes are stored.
    """
    is_new = node not in stored or bool(first.answers)
    return is_new and (planned == ROOT or planned in stored)


def takes_head(head: str, mine: AnsweredEarlier, twins: Sequence[AnsweredEarlier]) -> bool:
    """Tell whether the head moves from a twin's reply to this one's.

    The head stays if anything came after the twin's reply. Otherwise a complete reply wins over one that broke off,
    then the answer to the newest request: that is the one a retrying client waits for.
    """
    rank = (mine.complete, mine.created_at, mine.exchange)
    return any(rank > (twin.complete, twin.created_at, twin.exchange) for twin in twins if head in twin.replies)


def place_of_results(
    branch: Sequence[Message], results: Sequence[Message], own: Collection[int] = ()
) -> ResultsPlace | None:
    """Return where `results` belong in `branch`, or None.

    Returns None if they do not begin with a result, or if no block has the call that it answers. `own` holds the
    positions of the sending agent's messages: if agents use the same ids, its own open call is meant. A reply without
    calls that came while calls of the block were still open came too early. It is left off the branch, and the reply
    that knows all results takes its place.
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
    """Tell whether the message at `stop` is a reply to some results of the block while other calls are open."""
    if stop == block + 1 or stop == len(branch):
        return False
    reply, answered = branch[stop], _answers(branch, block, stop)
    is_open = any(call.id not in answered for call in branch[block].calls)
    return is_open and reply.role == "assistant" and not reply.calls


def _repeated(branch: Sequence[Message], block: int, stop: int, results: Sequence[Message]) -> int | None:
    """Return the position in the branch where the same messages begin among the block's results; None if nowhere."""
    if stop == block + 1:
        return None
    contents, first = list(map(content_hash, results)), block + 1
    stored = list(map(content_hash, branch[first : stop + len(contents)]))
    for start in range(stop - first):
        if stored[start : start + len(contents)] == contents:
            return first + start
    return None
