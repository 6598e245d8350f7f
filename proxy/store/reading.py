"""The records of another store's session (see `archive`), read and checked. Pure: it writes nothing.

Instructions, messages with what was decided on their arrival and what the client was not shown of them,
head, cuts and summaries are taken over. Exchanges and forms are not: they tell of requests that another
store has seen, and paid for. Every name is computed again and must be the one that the record says.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
import orjson

from proxy.conversation import ROOT, body_id, node_id
from proxy.dialects.chat.message import ChatMessage
from proxy.errors import InvalidRequest
from proxy.store.amounts import LIMIT, Amount, Time
from proxy.store.archive import FORMAT
from proxy.store.encoding import decode_changes, decode_cut
from proxy.store.hidden import HiddenRecord
from proxy.store.plain import require_plain
from proxy.store.records import Body, Source, StandingCut, SummaryRow
from proxy.store.summaries import SummaryRecord
from proxy.store.texts import is_message, messages_in
from proxy.store.tree import NewNode
from proxy.trimming import Change, Cut, Gap, Hidden, Summary, outside_gaps


class _Session(msgspec.Struct, frozen=True, tag_field="record", tag="session", kw_only=True):
    format: int
    created_at: Time
    updated_at: Time
    head: str
    instructions: str | None = None
    arrival: str | None = None
    model: str | None = None
    tools: str | None = None


class _Text(msgspec.Struct, frozen=True, kw_only=True):
    data: Any = msgspec.UNSET
    text: str | None = None

    def raw(self) -> bytes:
        """Return the text: as it is given, or compact JSON of the data."""
        if self.text is None:
            if self.data is msgspec.UNSET:
                raise ValueError("it has neither `data` nor `text`")
            return orjson.dumps(self.data)
        orjson.loads(self.text)
        return self.text.encode()


class _Instructions(_Text, frozen=True, kw_only=True, tag_field="record", tag="instructions"):
    version: str
    tokens: Amount
    created_at: Time


class _Body(_Text, frozen=True, kw_only=True, tag_field="record", tag="body"):
    body: str
    tokens: Amount


class _Node(msgspec.Struct, frozen=True, tag_field="record", tag="node", kw_only=True):
    node: str
    parent: str
    body: str
    tokens: Amount
    created_at: Time
    source: Source = Source.IMPORT
    partial: bool = False
    agent: str | None = None
    policy: str | None = None
    arrival: Any = None


class _Cut(msgspec.Struct, frozen=True, tag_field="record", tag="cut", kw_only=True):
    node: str
    policy: str
    agent: str
    version: str
    position: Amount
    tokens: Amount
    messages: Amount
    tool_calls: Amount
    created_at: Time
    changes: Any


class _Exchange(msgspec.Struct, frozen=True, tag_field="record", tag="exchange", kw_only=True):
    """Not taken over."""


class _Form(msgspec.Struct, frozen=True, tag_field="record", tag="form", kw_only=True):
    """Not taken over."""


_Record: TypeAlias = (
    _Session | _Instructions | _Body | _Node | _Cut | HiddenRecord | SummaryRecord | _Exchange | _Form
)


@dataclass(slots=True)
class Archive:
    """The records of a session, read and checked."""

    session: _Session
    instructions: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """Rows without their session, by version."""
    nodes: list[tuple[str, str, NewNode]] = field(default_factory=list[tuple[str, str, NewNode]])
    """(parent, node, sprout), parents before children."""
    depths: dict[str, int] = field(default_factory=dict[str, int])
    """Of the nodes, by name: the number of messages from the root to it, itself included."""
    cuts: list[tuple[_Cut, StandingCut]] = field(default_factory=list[tuple[_Cut, StandingCut]])
    hidden: dict[str, tuple[Hidden, int]] = field(default_factory=dict[str, tuple[Hidden, int]])
    """By node, what the client was not shown of it, and when that was stored."""
    summaries: dict[str, SummaryRow] = field(default_factory=dict[str, SummaryRow])
    """By id."""


def read_records(records: Iterable[Mapping[str, Any]]) -> Archive:
    """Read and check the records of a session. Pure, and as long as they are many.

    Raises:
        InvalidRequest: one of them is wrong; its line is named, the first being 1.
    """
    lines: list[tuple[int, _Record]] = []
    for line, record in enumerate(records, 1):
        with _at(line):
            lines.append((line, msgspec.convert(record, _Record)))
    sessions = [(line, record) for line, record in lines if isinstance(record, _Session)]
    if len(sessions) != 1:
        raise InvalidRequest(
            f"The records must hold one session, and hold {len(sessions)}: import one export, unchanged."
        )
    line, session = sessions[0]
    archive = Archive(session=session)
    bodies: dict[str, Body] = {}
    for at, item in lines:
        if isinstance(item, _Body):
            with _at(at):
                bodies[item.body] = _body(item)
    for at, item in lines:
        with _at(at):
            if isinstance(item, _Node):
                _add_node(archive, item, bodies)
            elif isinstance(item, _Instructions):
                _add_instructions(archive, item)
    family = _Family([(parent, node) for parent, node, _ in archive.nodes])
    for at, item in lines:
        with _at(at):
            _add_decided(archive, item, family)
    with _at(line):
        _check(archive)
    return archive


def _body(record: _Body) -> Body:
    raw = record.raw()
    _same("body", record.body, body_id(raw))
    return Body(message=ChatMessage(raw), tokens=record.tokens)


def _add_node(archive: Archive, record: _Node, bodies: Mapping[str, Body]) -> None:
    body = bodies.get(record.body)
    if body is None or not is_message(body.message.raw):
        raise ValueError(f"there is no message with the text {record.body}")
    if record.parent != ROOT and record.parent not in archive.depths:
        raise ValueError(f"its parent {record.parent} does not stand in a line above")
    _same("node", record.node, node_id(record.parent, body.message))
    require_plain(agent=record.agent, policy=record.policy)
    sprout = NewNode(
        body=Body(message=body.message, tokens=record.tokens),
        source=record.source,
        created_at=record.created_at,
        partial=record.partial,
        agent=record.agent,
        policy=record.policy,
        arrival=None if record.arrival is None else _changes(record.arrival, 1),
    )
    archive.nodes.append((record.parent, record.node, sprout))
    archive.depths[record.node] = archive.depths.get(record.parent, 0) + 1


def _add_instructions(archive: Archive, record: _Instructions) -> None:
    raw = record.raw()
    _same("version", record.version, body_id(raw))
    messages_in(raw.decode())
    archive.instructions[record.version] = {
        "version": record.version,
        "messages": raw.decode(),
        "tokens": record.tokens,
        "created_at": record.created_at,
    }


def _add_decided(archive: Archive, item: _Record, family: _Family) -> None:
    """Take in what stands beside the nodes."""
    if isinstance(item, _Cut):
        archive.cuts.append((item, _cut(item, archive, family)))
    elif isinstance(item, HiddenRecord):
        _add_hidden(archive, item)
    elif isinstance(item, SummaryRecord):
        _add_summary(archive, item, family)


def _add_hidden(archive: Archive, record: HiddenRecord) -> None:
    if record.node not in archive.depths:
        raise ValueError(f"it belongs to {record.node}, which is none of the nodes")
    if record.node in archive.hidden:
        raise ValueError(f"another line says already what was hidden of {record.node}")
    archive.hidden[record.node] = record.read(), record.created_at


def _add_summary(archive: Archive, record: SummaryRecord, family: _Family) -> None:
    if record.id in archive.summaries:
        raise ValueError(f"there are two summaries {record.id}")
    if record.predecessor is not None and record.predecessor not in archive.summaries:
        raise ValueError(f"its predecessor {record.predecessor} does not stand in a line above")
    archive.summaries[record.id] = record.read(archive.depths, family.descends)


class _Family:
    """Who descends from whom, told at once for any two nodes of a tree."""

    def __init__(self, nodes: Sequence[tuple[str, str]]) -> None:
        """Number (parent, node), parents before children: each one's descendants come right after it."""
        self._sizes = dict.fromkeys((node for _, node in nodes), 1)
        for parent, node in reversed(nodes):
            if parent != ROOT:
                self._sizes[parent] += self._sizes[node]
        self._numbers: dict[str, int] = {}
        following = {ROOT: 0}
        for parent, node in nodes:
            number = following[parent]
            following[parent] = number + self._sizes[node]
            following[node] = number + 1
            self._numbers[node] = number

    def descends(self, node: str, ancestor: str) -> bool:
        """Tell whether a node is below another one, or that one itself."""
        first = self._numbers[ancestor]
        return first <= self._numbers[node] < first + self._sizes[ancestor]


def _cut(record: _Cut, archive: Archive, family: _Family) -> StandingCut:
    depth = archive.depths.get(record.node)
    if depth is None:
        raise ValueError(f"it stands at {record.node}, which is none of the nodes")
    if record.position > depth:
        raise ValueError(f"its position is {record.position}, and its node has {depth} messages")
    require_plain(policy=record.policy, agent=record.agent, version=record.version)
    decided = decode_cut(orjson.dumps(record.changes).decode())
    if decided.summary is not None:
        _check_summary(decided.summary, record.position)
    cut = Cut(
        position=record.position,
        policy=record.policy,
        version=record.version,
        changes=_checked(decided.changes, record.position),
        tokens=record.tokens,
        messages=record.messages,
        tool_calls=record.tool_calls,
        gaps=_checked_gaps(decided.gaps, record.position),
        summary=decided.summary,
        account=decided.account,
    )
    if decided.kept is not None:
        _check_kept(decided.kept, cut, record.node, archive, family)
    return StandingCut(cut=cut, node=record.node, kept=decided.kept)


def _check_summary(summary: Summary, end: int) -> None:
    """Check that a summary stands for messages before `end`, and counts what they can have."""
    if not 0 <= summary.until <= end:
        raise ValueError(f"its summary covers {summary.until} messages, and it stands after {end}")
    counts = (summary.tokens, summary.covered_tokens, summary.generation)
    if not 0 <= summary.covered_messages <= summary.until or not all(0 <= each < LIMIT for each in counts):
        raise ValueError(f"its summary counts what {summary.until} messages cannot have")


def _checked_gaps(gaps: tuple[Gap, ...], end: int) -> tuple[Gap, ...]:
    """Return gaps that all lie before `end`, in order, none of them empty."""
    last = 0
    for gap in gaps:
        if not last <= gap.start < gap.stop <= end:
            raise ValueError(f"a gap from {gap.start} to {gap.stop} is not in order from {last} to {end}")
        if not 0 <= gap.tokens < LIMIT or not 0 <= gap.tool_calls <= gap.messages:
            raise ValueError(f"the gap at {gap.start} counts what {gap.messages} messages cannot have")
        last = gap.stop
    return gaps


def _check_kept(kept: tuple[str, ...], cut: Cut, node: str, archive: Archive, family: _Family) -> None:
    """Check that these are the nodes of the branch before the cut that lie in no gap."""
    places = outside_gaps(range(cut.position), cut.gaps, int)
    if [archive.depths.get(name, 0) - 1 for name in kept] != places:
        raise ValueError("what it kept are not the messages outside its gaps")
    if not all(family.descends(node, name) for name in kept):
        raise ValueError("what it kept is not of its branch")


def _changes(record: Any, end: int) -> tuple[Change, ...]:
    """Return changes of messages that all lie before `end`."""
    return _checked(decode_changes(orjson.dumps(record).decode()), end)


def _checked(changes: tuple[Change, ...], end: int) -> tuple[Change, ...]:
    for change in changes:
        if not 0 <= change.position < end:
            raise ValueError(f"a change stands at position {change.position}, which is not in 0 to {end - 1}")
        if not (0 <= change.tokens_before < LIMIT and 0 <= change.tokens_after < LIMIT):
            raise ValueError(f"the change at position {change.position} counts what no message can have")
        if change.message is not None and not isinstance(orjson.loads(change.message.raw), dict):
            raise ValueError(f"the change at position {change.position} puts what is no message")
    return changes


def _check(archive: Archive) -> None:
    """Check that what the session names is there."""
    session = archive.session
    require_plain(arrival=session.arrival, model=session.model, tools=session.tools)
    if session.format != FORMAT:
        raise ValueError(f"its format is {session.format}, and only {FORMAT} is known here")
    if session.head != ROOT and session.head not in archive.depths:
        raise ValueError(f"its head {session.head} is none of the nodes")
    if session.instructions is not None and session.instructions not in archive.instructions:
        raise ValueError(f"its instructions {session.instructions} are not among the records")


def _same(what: str, said: str, computed: str) -> None:
    if said != computed:
        raise ValueError(f"its {what} is {said}, and its content has the name {computed}: it was changed")


@contextmanager
def _at(line: int) -> Generator[None]:
    """Say in which line it is that something is wrong."""
    try:
        yield
    except (msgspec.MsgspecError, ValueError, TypeError, InvalidRequest) as why:
        raise InvalidRequest(f"Line {line}: {why}.", param=f"[{line - 1}]") from why
