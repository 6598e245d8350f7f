"""Exports a session as records, imports it, and copies it into another session (a fork).

Each record is an object with its kind in `record`, and the columns of a row. JSON in a column becomes JSON in the
record. A text is given as `data` if compact JSON of that is exactly the same text, otherwise as `text`, a string.
References are read before the rows they refer to. So nothing is missing in an export, even if the session moves on
meanwhile. Failed attempts at summaries are left out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, partial
from typing import Any, Final, TypeAlias
from uuid import uuid4

import msgspec
import orjson
from msgspec import Struct
from sqlalchemy import ColumnElement, Select, Subquery, Table, bindparam, func, null, or_, select, true, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite

from proxy.conversation import ROOT, body_id, earlier_names, node_id, version_of
from proxy.dialects import DIALECTS, Dialect, JsonObject, Message, dialect_named
from proxy.dialects.jsontext import write
from proxy.errors import Conflict, InvalidRequest, NotFound
from proxy.store import sessions, tree
from proxy.store.cuts import changes_of, decode_changes, decode_cut, keep_cut, standing_cut
from proxy.store.database import Database, Row, StoreConnection, Unit
from proxy.store.packing import encode_exchange, is_plain, require_plain
from proxy.store.portions import AT_FIRST, delete_sessions, next_count, packed_rows, portions_of
from proxy.store.records import (
    CHAT,
    FORKED,
    LIMIT,
    Amount,
    Body,
    Mark,
    SessionRow,
    Source,
    StandingCut,
    SummaryRow,
    SummaryStatus,
    Time,
    session_key,
    with_model,
)
from proxy.store.schema import (
    BODIES,
    CUTS,
    EXCHANGES,
    HIDDEN,
    INSTRUCTIONS,
    NODES,
    PENDING,
    SESSIONS,
    SUMMARIES,
    insert_into,
    insert_new,
    matching,
)
from proxy.store.summaries import add_summaries
from proxy.trimming import Change, Gap, Hidden, Summary, outside_gaps

# ----------------------------------------------------------------------------------------------------- export

FORMAT: Final = 1  # version of the format, in the first record
READY: Final = SummaryStatus.READY.value
_AT_ONCE: Final = 500  # rows per read, so that a long session need not fit into memory
PORTION: Final = 250  # messages per transaction


class _Kind(Struct, frozen=True, kw_only=True):
    """How the rows of a table become records."""

    name: str
    table: Table
    order: tuple[str, ...]  # columns to sort by; together they are unique
    json: tuple[str, ...] = ()  # columns that hold JSON
    text: str | None = None  # the column whose text must be preserved byte for byte
    only: ColumnElement[bool] | None = None  # condition for the rows to export; None: all rows


_EXCHANGE: Final = _Kind(
    name="exchange", table=EXCHANGES, order=("id",), json=("parameters", "messages", "nodes", "replies", "receipt")
)
_CUT: Final = _Kind(name="cut", table=CUTS, order=("position", "node", "policy", "agent"), json=("changes",))
_HIDDEN: Final = _Kind(name="hidden", table=HIDDEN, order=("node",), json=("before", "after"))
_SUMMARY: Final = _Kind(  # by time, so that predecessors come first
    name="summary",
    table=SUMMARIES,
    order=("created_at", "id"),
    json=("state", "usage"),
    only=SUMMARIES.c.status == READY,
)
_INSTRUCTIONS: Final = _Kind(name="instructions", table=INSTRUCTIONS, order=("created_at", "version"), text="messages")
_NODE: Final = _Kind(name="node", table=NODES, order=("depth", "node"), json=("arrival",))  # parents before children
_BODY: Final = _Kind(name="body", table=BODIES, order=("body",), text="text")


async def export_session(database: Database, key: str) -> AsyncIterator[JsonObject]:
    """Yield the records of a session, beginning with the record of the session itself.

    Raises `NotFound` if there is no such session. Also raises it at the end if the session was deleted meanwhile: then
    the records are incomplete.
    """
    first = await database.read(partial(_session, key=key))
    if first is None:
        raise NotFound("There is no such session.")
    yield first
    for part in (
        _in_order(database, key, _EXCHANGE),
        _in_order(database, key, _CUT),
        _forms(database, key),
        _in_order(database, key, _HIDDEN),
        _in_order(database, key, _SUMMARY),
        _in_order(database, key, _INSTRUCTIONS),
        _placed(database, key, _node_places, _nodes_at),
        _placed(database, key, _text_places, _texts_at),
    ):
        async for record in part:
            yield record
    last = await database.read(partial(_session, key=key))
    if last is None or last["created_at"] != first["created_at"]:
        raise NotFound("The session was deleted while it was exported.")


async def _in_order(database: Database, key: str, kind: _Kind) -> AsyncIterator[JsonObject]:
    """Yield the records of a kind, page by page."""
    after: tuple[Any, ...] | None = None
    while True:
        records = await database.read(partial(_page, key=key, kind=kind, after=after))
        for record in records:
            yield record
        if len(records) < _AT_ONCE:
            return
        after = tuple(records[-1][column] for column in kind.order)


async def _forms(database: Database, key: str) -> AsyncIterator[JsonObject]:
    """Yield the records of forms, each with the first exchange that brought it."""
    first: dict[tuple[str, str], str] = {}
    for form in await database.read(partial(tree.forms_in, key=key)):
        first.setdefault((form.node, form.body), form.exchange)
    for node, body in sorted(first):
        yield {"record": "form", "node": node, "body": body, "exchange": first[node, body]}


async def _placed(
    database: Database,
    key: str,
    places_of: Callable[..., list[_ArchivePlace]],
    records_at: Callable[..., tuple[list[JsonObject], int]],
) -> AsyncIterator[JsonObject]:
    """Yield the records of a kind that no index has in order. Their places are read once, not for each page."""
    places = await database.read(partial(places_of, key=key))
    start, count = 0, AT_FIRST
    while some := places[start : start + count]:
        records, size = await database.read(partial(records_at, key=key, places=some))
        for record in records:
            yield record
        start, count = start + count, next_count(count, size)


def _session(connection: StoreConnection, key: str) -> JsonObject | None:
    row = connection.execute(select(SESSIONS).where(SESSIONS.c.session == key, sessions.IS_THERE)).one_or_none()
    if row is None:
        return None
    record = {"record": "session", "format": FORMAT} | _columns(row)
    del record["period"]
    if record["dialect"] == CHAT:
        del record["dialect"]
    return record


class _ArchivePlace(Struct, frozen=True, kw_only=True):
    """Where the export finds a node or a text."""

    name: str  # name of the node or of the text
    node: str | None = None  # the node whose row has the text
    form: tree.Form | None = None  # the form with the packed text, so that the row of its exchange is not read again


def _node_places(connection: StoreConnection, key: str) -> list[_ArchivePlace]:
    """Return the nodes of a session, by depth."""
    rows = connection.execute(select(NODES.c.depth, NODES.c.node).where(NODES.c.session == key))
    return [_ArchivePlace(name=name) for _, name in sorted([(row.depth, row.node) for row in rows])]


def _nodes_at(connection: StoreConnection, key: str, places: Sequence[_ArchivePlace]) -> tuple[list[JsonObject], int]:
    """Return the records of these nodes, and the size of the texts that were read."""
    rows = _named_rows(connection, key, NODES, [place.name for place in places])
    found = [rows[place.name] for place in places if place.name in rows]
    return [record_of(_NODE, _values(connection, key, _NODE, row)) for row in found], sum(
        [len(row.text or "") for row in found]
    )


def _text_places(connection: StoreConnection, key: str) -> list[_ArchivePlace]:
    """Return the places of a session's texts, by name. Replies are stored with their nodes, forms with exchanges."""
    places: dict[str, _ArchivePlace] = {}
    for form in tree.forms_in(connection, key):
        places.setdefault(form.body, _ArchivePlace(name=form.body, form=form))
    replies = select(NODES.c.node, NODES.c.body).where(NODES.c.session == key, NODES.c.text.is_not(None))
    places |= {row.body: _ArchivePlace(name=row.body, node=row.node) for row in connection.execute(replies)}
    bodies = connection.execute(select(BODIES.c.body).where(BODIES.c.session == key))
    places |= {name: _ArchivePlace(name=name) for name in bodies.scalars()}
    return [places[name] for name in sorted(places)]


def _texts_at(connection: StoreConnection, key: str, places: Sequence[_ArchivePlace]) -> tuple[list[JsonObject], int]:
    """Return the records of these texts, and their size."""
    plain = [place.name for place in places if place.node is None and place.form is None]
    rows = _named_rows(connection, key, BODIES, plain)
    replies = _named_rows(connection, key, NODES, [place.node for place in places if place.node is not None])
    records: list[JsonObject] = []
    size = 0
    for place in places:
        values: Mapping[str, Any] | None = None
        if place.form is not None:
            values = {"body": place.name, "tokens": 0, "text": tree.form_text(connection, key, place.form)}
        elif place.node is not None:
            if (reply := replies.get(place.node)) is not None:
                values = {"body": reply.body, "tokens": reply.tokens, "text": reply.text}
        elif (row := rows.get(place.name)) is not None:
            values = _columns(row)
        if values is not None:
            records.append(record_of(_BODY, values))
            size += len(values["text"])
    return records, size


def _named_rows(connection: StoreConnection, key: str, table: Table, names: Sequence[str]) -> dict[str, Row]:
    """Return rows by their names. Rows that were deleted meanwhile are left out."""
    if not names:
        return {}
    found = connection.execute(_reading(connection.dialect.name, table), {"source": key, "names": names})
    return {row[1]: row for row in found.all()}  # the second column is the name


def _page(connection: StoreConnection, key: str, kind: _Kind, after: tuple[Any, ...] | None) -> list[JsonObject]:
    """Return the next records of a kind. `after` has the sort columns of the last record."""
    under_way: list[JsonObject] = []
    if kind is _EXCHANGE:
        under_way = _rows_of_page(connection, key, kind, PENDING, after)
    records = _rows_of_page(connection, key, kind, kind.table, after)
    if under_way:  # an exchange that was settled between the two reads counts as settled
        records = list({record["id"]: record for record in (*under_way, *records)}.values())
        return sorted(records, key=lambda record: encode_exchange(record["id"]))[:_AT_ONCE]
    return records


def _rows_of_page(
    connection: StoreConnection, key: str, kind: _Kind, table: Table, after: tuple[Any, ...] | None
) -> list[JsonObject]:
    order = [table.c[name] for name in kind.order]
    found = select(table).where(table.c.session == key).order_by(*order).limit(_AT_ONCE)
    if kind.only is not None:
        found = found.where(kind.only)
    if after is not None:
        found = found.where(tuple_(*order) > after)
    return [record_of(kind, _values(connection, key, kind, row)) for row in connection.execute(found).all()]


def _values(connection: StoreConnection, key: str, kind: _Kind, row: Row) -> JsonObject:
    """Return the columns of a row as they are exported."""
    values = _columns(row)
    if kind.table is CUTS:
        values["changes"] = changes_of(connection, key, row)
        del values["base"]
    elif kind.table is NODES:
        del values["text"]
    elif kind.table is EXCHANGES:
        values["parameters"] = with_model(row.parameters, row.model)
        del values["forms"]
    return values


def record_of(kind: _Kind, row: Mapping[str, Any]) -> JsonObject:
    """Return the record of a row, without its session."""
    record: JsonObject = {"record": kind.name}
    for name, value in row.items():
        if name == kind.text:
            data = orjson.loads(value)
            record |= {"data": data} if _is_written_as(data, value) else {"text": value}
        else:
            record[name] = orjson.loads(value) if name in kind.json and value is not None else value
    return record


def _is_written_as(data: Any, text: str) -> bool:
    """Tell whether compact JSON of `data` is exactly `text`."""
    try:
        return orjson.dumps(data) == text.encode()
    except TypeError:  # nested too deeply
        return False


def _columns(row: Row) -> JsonObject:
    # SQLAlchemy's names are a subclass of str; orjson accepts only str itself as a key.
    return {str(name): value for name, value in row._asdict().items() if name != "session"}


# ---------------------------------------------------------------------------------- records, read and checked


class _ArchiveRecord(Struct, frozen=True, kw_only=True, tag_field="record"):
    """A line of an export."""


class _SessionRecord(_ArchiveRecord, frozen=True, kw_only=True, tag="session"):
    format: int
    created_at: Time
    updated_at: Time
    head: str
    instructions: str | None = None
    arrival: str | None = None
    model: str | None = None
    tools: str | None = None
    dialect: str = CHAT


class _TextRecord(_ArchiveRecord, frozen=True, kw_only=True):
    data: Any = msgspec.UNSET
    text: str | None = None
    tokens: Amount

    def raw(self) -> bytes:
        """Return `text` as it is, or else compact JSON of `data`; raises ValueError if there is neither."""
        if self.text is None:
            if self.data is msgspec.UNSET:
                raise ValueError("it has neither `data` nor `text`")
            return write(self.data)
        orjson.loads(self.text)
        return self.text.encode()


class _InstructionsRecord(_TextRecord, frozen=True, kw_only=True, tag="instructions"):
    version: str
    created_at: Time


class _BodyRecord(_TextRecord, frozen=True, kw_only=True, tag="body"):
    body: str


class _NodeRecord(_ArchiveRecord, frozen=True, kw_only=True, tag="node"):
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


class _CutRecord(_ArchiveRecord, frozen=True, kw_only=True, tag="cut"):
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


class HiddenRecord(_ArchiveRecord, frozen=True, kw_only=True, tag="hidden"):
    """What was hidden from the client of a reply."""

    node: str
    before: tuple[str, ...]
    reply: str | None
    after: tuple[str, ...]
    tokens: Amount
    created_at: Time

    def read(self, dialect: Dialect) -> Hidden:
        """Return what was hidden; raises ValueError if one of its texts is not a message."""
        return Hidden(
            before=tuple([_hidden_message(text, dialect) for text in self.before]),
            reply=None if self.reply is None else _hidden_message(self.reply, dialect),
            after=tuple([_hidden_message(text, dialect) for text in self.after]),
            tokens=self.tokens,
        )


def _hidden_message(text: str, dialect: Dialect) -> Message:
    orjson.loads(text)
    if not tree.is_message(text.encode()):
        raise ValueError("what was hidden of the reply is no message")
    return dialect.message(text.encode())


class SummaryRecord(_ArchiveRecord, frozen=True, kw_only=True, tag="summary"):
    """A summary with the status `ready`."""

    id: str
    node: str
    tip: str
    recipe: str
    until: Amount
    generation: Amount
    model: str
    text: str
    state: dict[str, Any]
    tokens: Amount
    covered_messages: Amount
    covered_tokens: Amount
    created_at: Time
    predecessor: str | None = None
    asked: bool = False

    def read(self, depths: Mapping[str, int], descends: Callable[[str, str], bool]) -> SummaryRow:
        """Return the summary, without its cost, which was paid where the summary was made.

        `depths` holds the depths of all nodes. `descends(node, ancestor)` tells whether a node is below another one or
        the same. Raises ValueError if the summary does not belong to a branch of these nodes.
        """
        require_plain(id=self.id, recipe=self.recipe, model=self.model, predecessor=self.predecessor)
        for node in (self.node, self.tip):
            if node not in depths:
                raise ValueError(f"it is of a branch with {node}, which is none of the nodes")
        if depths[self.node] != self.until or not descends(self.tip, self.node):
            raise ValueError(f"it covers {self.until} messages, and its nodes are not of such a branch")
        if self.covered_messages > self.until or not self.text:
            raise ValueError(f"it says nothing of {self.until} messages, or speaks of more")
        made = msgspec.structs.asdict(self)
        return SummaryRow(**made, status=SummaryStatus.READY, reason="", usage=None, cost=None, exchange=None)


_Record: TypeAlias = (
    _SessionRecord | _InstructionsRecord | _BodyRecord | _NodeRecord | _CutRecord | HiddenRecord | SummaryRecord
)
_NOT_IMPORTED: Final = frozenset({"exchange", "form"})
"""Kinds of records that are not imported: they describe what happened in another installation."""


class Archive:
    """The records of a session, read and checked."""

    def __init__(self, session: _SessionRecord) -> None:
        """Begin with the record of the session itself."""
        self.session = session
        self.dialect = dialect_named(session.dialect)
        self.instructions: dict[str, dict[str, Any]] = {}  # rows without their session, by version
        self.nodes: list[tuple[str, str, tree.NewNode]] = []  # (parent, node, new_node), parents before children
        self.depths: dict[str, int] = {}  # by node, the number of messages from the root to it, itself included
        self.cuts: list[tuple[_CutRecord, StandingCut]] = []
        self.hidden: dict[str, tuple[Hidden, int]] = {}
        """By node, what was hidden from the client, and when that was stored."""
        self.summaries: dict[str, SummaryRow] = {}  # by id
        self.bodies: dict[str, Body] = {}  # by name

    @cached_property
    def family(self) -> _Family:
        """The index of descent. Use it only when all nodes are added."""
        return _Family([(parent, node) for parent, node, _ in self.nodes])


def read_records(records: Iterable[Mapping[str, Any]]) -> Archive:
    """Read and check the records of a session. Raises InvalidRequest with the number of a wrong line, from 1 on."""
    lines: list[tuple[int, _Record]] = []
    for line, record in enumerate(records, 1):
        with _at(line):
            if not (isinstance(record, dict) and record.get("record") in _NOT_IMPORTED):
                lines.append((line, msgspec.convert(record, _Record)))
    found = [(line, record) for line, record in lines if isinstance(record, _SessionRecord)]
    if len(found) != 1:
        raise InvalidRequest(f"The records must hold one session, and hold {len(found)}: import one export, unchanged.")
    line, session = found[0]
    with _at(line):
        if session.dialect not in DIALECTS:
            raise ValueError(f"its dialect is {session.dialect!r}, and only {', '.join(DIALECTS)} is known here")
    archive = Archive(session)
    for adding in _PASSES:
        for at, item in lines:
            add = adding.get(type(item))
            if add is not None:
                with _at(at):
                    add(archive, item)
    with _at(line):
        _check_session(archive)
    return archive


def _add_body(archive: Archive, record: _BodyRecord) -> None:
    raw = record.raw()
    _same("body", record.body, body_id(raw))
    archive.bodies[record.body] = Body(message=archive.dialect.message(raw), tokens=record.tokens)


def _add_node(archive: Archive, record: _NodeRecord) -> None:
    body = archive.bodies.get(record.body)
    if body is None or not tree.is_message(body.message.raw):
        raise ValueError(f"there is no message with the text {record.body}")
    if record.parent != ROOT and record.parent not in archive.depths:
        raise ValueError(f"its parent {record.parent} does not stand in a line above")
    if [record.node] not in earlier_names(record.parent, [body.message]):
        _same("node", record.node, node_id(record.parent, body.message))
    require_plain(agent=record.agent, policy=record.policy)
    arrival = None
    if record.arrival is not None:
        arrival = _checked(decode_changes(orjson.dumps(record.arrival).decode(), archive.dialect), 1)
    new_node = tree.NewNode(
        body=Body(message=body.message, tokens=record.tokens),
        source=record.source,
        created_at=record.created_at,
        partial=record.partial,
        agent=record.agent,
        policy=record.policy,
        arrival=arrival,
    )
    archive.nodes.append((record.parent, record.node, new_node))
    archive.depths[record.node] = archive.depths.get(record.parent, 0) + 1


def _add_instructions(archive: Archive, record: _InstructionsRecord) -> None:
    raw = record.raw()
    if record.version != version_of(tree.messages_in(raw.decode(), archive.dialect)):
        _same("version", record.version, body_id(raw))  # the name that older versions gave
    archive.instructions[record.version] = {
        "version": record.version,
        "messages": raw.decode(),
        "tokens": record.tokens,
        "created_at": record.created_at,
    }


def _add_hidden(archive: Archive, record: HiddenRecord) -> None:
    if record.node not in archive.depths:
        raise ValueError(f"it belongs to {record.node}, which is none of the nodes")
    if record.node in archive.hidden:
        raise ValueError(f"another line says already what was hidden of {record.node}")
    archive.hidden[record.node] = record.read(archive.dialect), record.created_at


def _add_summary(archive: Archive, record: SummaryRecord) -> None:
    if record.id in archive.summaries:
        raise ValueError(f"there are two summaries {record.id}")
    if record.predecessor is not None and record.predecessor not in archive.summaries:
        raise ValueError(f"its predecessor {record.predecessor} does not stand in a line above")
    archive.summaries[record.id] = record.read(archive.depths, archive.family.descends)


class _Family:
    """Tells in constant time whether a node of a tree descends from another one."""

    def __init__(self, nodes: Sequence[tuple[str, str]]) -> None:
        """Number the nodes in depth-first order, so that the descendants of each come right after it.

        `nodes` holds (parent, node), parents before children.
        """
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
        """Tell whether a node is below another one, or the same."""
        first = self._numbers[ancestor]
        return first <= self._numbers[node] < first + self._sizes[ancestor]


def _add_cut(archive: Archive, record: _CutRecord) -> None:
    end, depth = record.position, archive.depths.get(record.node)
    if depth is None:
        raise ValueError(f"it stands at {record.node}, which is none of the nodes")
    if end > depth:
        raise ValueError(f"its position is {end}, and its node has {depth} messages")
    require_plain(policy=record.policy, agent=record.agent, version=record.version)
    decided = decode_cut(orjson.dumps(record.changes).decode(), archive.dialect)
    _checked(decided.changes, end)
    if decided.summary is not None:
        _check_summary(decided.summary, end)
    _check_gaps(decided.gaps, end)
    if decided.kept is not None:
        places = outside_gaps(range(end), decided.gaps, int)
        if [archive.depths.get(name, 0) - 1 for name in decided.kept] != places:
            raise ValueError("what it kept are not the messages outside its gaps")
        if not all(archive.family.descends(record.node, name) for name in decided.kept):
            raise ValueError("what it kept is not of its branch")
    archive.cuts.append((record, standing_cut(record, decided)))


def _check_summary(summary: Summary, end: int) -> None:
    """Check that a summary covers messages before `end`, and that its counts are possible."""
    if not 0 <= summary.until <= end:
        raise ValueError(f"its summary covers {summary.until} messages, and it stands after {end}")
    counts = (summary.tokens, summary.covered_tokens, summary.generation)
    if not 0 <= summary.covered_messages <= summary.until or not all(0 <= each < LIMIT for each in counts):
        raise ValueError(f"its summary counts what {summary.until} messages cannot have")


def _check_gaps(gaps: tuple[Gap, ...], end: int) -> None:
    """Check that all gaps lie before `end`, in order and not empty, and that their counts are possible."""
    last = 0
    for gap in gaps:
        if not last <= gap.start < gap.stop <= end:
            raise ValueError(f"a gap from {gap.start} to {gap.stop} is not in order from {last} to {end}")
        if not 0 <= gap.tokens < LIMIT or not 0 <= gap.tool_calls <= gap.messages:
            raise ValueError(f"the gap at {gap.start} counts what {gap.messages} messages cannot have")
        last = gap.stop


def _checked(changes: tuple[Change, ...], end: int) -> tuple[Change, ...]:
    """Check that all changes are of messages before `end`, and valid; return them."""
    for change in changes:
        if not 0 <= change.position < end:
            raise ValueError(f"a change stands at position {change.position}, which is not in 0 to {end - 1}")
        if not (0 <= change.tokens_before < LIMIT and 0 <= change.tokens_after < LIMIT):
            raise ValueError(f"the change at position {change.position} counts what no message can have")
        if change.message is not None and not isinstance(orjson.loads(change.message.raw), dict):
            raise ValueError(f"the change at position {change.position} puts what is no message")
    return changes


_PASSES: Final[Sequence[dict[type, Callable[[Archive, Any], None]]]] = (
    {_BodyRecord: _add_body},
    {_NodeRecord: _add_node, _InstructionsRecord: _add_instructions},
    {_CutRecord: _add_cut, HiddenRecord: _add_hidden, SummaryRecord: _add_summary},
)
"""Functions that add records to an archive, by kind. Each pass needs what the passes before it added."""


def _check_session(archive: Archive) -> None:
    """Check the session's own values, and that what it refers to exists."""
    session = archive.session
    require_plain(arrival=session.arrival, model=session.model, tools=session.tools)
    if session.arrival == sessions.REMOVED:
        raise ValueError(f"its arrival {session.arrival!r} is that of no session")
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
    """Turn errors into an InvalidRequest that names the line."""
    try:
        yield
    except (msgspec.MsgspecError, ValueError, TypeError, InvalidRequest) as why:
        raise InvalidRequest(f"Line {line}: {why}.", param=f"[{line - 1}]") from why


# ----------------------------------------------------------------------------------------------------- import


async def load_session(database: Database, tenant: str, session: str, archive: Archive) -> SessionRow:
    """Create a session from an archive; raises Conflict if a session with this id exists.

    If the database has only one writer, a long session is imported in portions, so that others need not wait. It
    becomes visible when it is complete.
    """
    require_plain(tenant=tenant, session=session)
    loading = await asyncio.to_thread(_Loading, tenant, session, archive)
    if not database.in_order or len(archive.nodes) <= PORTION:
        return await database.write(loading.make, again=False)  # a retry might find its own session
    await database.write(loading.begin, again=False)
    try:
        portions = loading.portions()
        while (portion := await asyncio.to_thread(next, portions, None)) is not None:
            await database.write(partial(loading.go_on, portion=portion), durable=False)
        return await database.write(loading.finish)
    except Exception:
        if await database.read(loading.is_held):
            await delete_sessions(database, [loading.key], begins=False)
        raise


_HELD: Final = select(SESSIONS.c.session).where(*matching(SESSIONS, "arrival", "model"))


class _Loading:
    """Creates a session from an archive."""

    def __init__(self, tenant: str, session: str, archive: Archive) -> None:
        self.key = session_key(tenant, session, archive.session.dialect)
        self._tenant = tenant
        self._id = session
        self._archive = archive
        self._bodies = tree.named_bodies(new_node.body for _, _, new_node in archive.nodes)
        tools = archive.bodies.get(archive.session.tools or "")
        if tools is not None:
            self._bodies |= tree.named_bodies([tools])
        self._places: dict[str, tree.NodePlace] = {}
        self._holder = uuid4().hex
        """Marks the session's row as ours during an import in portions. Another import may delete and replace it."""

    def make(self, connection: StoreConnection) -> SessionRow:
        """Create the session in one transaction."""
        self._create(connection)
        for portion in self.portions():
            portion(connection)
        return self._set_head(connection)

    def begin(self, connection: StoreConnection) -> None:
        """Create the session's row in a state that counts as absent."""
        self._create(connection)
        self._hold(connection)

    def go_on(self, connection: StoreConnection, portion: Unit[Any]) -> None:
        """Store a portion."""
        self._require_held(connection)
        portion(connection)
        self._hold(connection)

    def finish(self, connection: StoreConnection) -> SessionRow:
        """Make the session visible, after all portions are stored."""
        self._require_held(connection)
        return self._set_head(connection)

    def is_held(self, connection: StoreConnection) -> bool:
        """Tell whether the stored part of the session is still ours."""
        asked = {"key": self.key, "arrival": sessions.REMOVED, "model": self._holder}
        return connection.execute(_HELD, asked).one_or_none() is not None

    def portions(self) -> Iterator[Unit[Any]]:
        """Yield units of work that store everything except the session's own row, in portions."""
        key, archive, places = self.key, self._archive, {ROOT: tree.root_of(None)}
        for bodies in portions_of(self._bodies.values(), lambda body: len(body.message.raw)):
            rows = packed_rows(key, bodies)
            yield partial(insert_new, table=BODIES, rows=rows)
        versions = [{"session": key} | row for row in archive.instructions.values()]
        for some in tree.in_parts(versions, PORTION):
            yield partial(insert_new, table=INSTRUCTIONS, rows=some)
        for nodes in tree.in_parts(archive.nodes, PORTION):
            yield partial(insert_new, table=NODES, rows=tree.node_rows(key, nodes, places))
        self._places = places
        for record, cut in archive.cuts:
            yield partial(keep_cut, key=key, standing=cut, agent=record.agent, exchange=None, at=record.created_at)
        for hidden in tree.in_parts([(node, *what) for node, what in archive.hidden.items()], PORTION):
            yield partial(tree.add_hidden, key=key, rows=hidden, exchange=None)
        for summaries in tree.in_parts(list(archive.summaries.values()), PORTION):
            yield partial(add_summaries, key=key, rows=summaries)

    def _create(self, connection: StoreConnection) -> None:
        created_at = self._archive.session.created_at
        if not sessions.create_session(connection, self.key, self._tenant, self._id, created_at):
            raise Conflict(f"There is a session {self._id!r} already: delete it first, or import under another id.")

    def _hold(self, connection: StoreConnection) -> None:
        values = {"arrival": sessions.REMOVED, "model": self._holder, "updated_at": int(time.time() * 1000)}
        connection.execute(_MOVE_HEAD, values | {"the_session": self.key})

    def _require_held(self, connection: StoreConnection) -> None:
        if not self.is_held(connection):
            raise Conflict(f"The session {self._id!r} was deleted, or used by somebody else, while it was made.")

    def _set_head(self, connection: StoreConnection) -> SessionRow:
        archive, said = self._archive, self._archive.session
        values = {
            "updated_at": said.updated_at,
            "instructions": said.instructions,
            "arrival": said.arrival,
            "model": said.model,
            "tools": said.tools,
            "hidden": len(archive.hidden),
            "summaries": len(archive.summaries),
        }
        return _move_head(connection, self.key, self._places.get(said.head), values)


def _move_head(
    connection: StoreConnection, key: str, head: tree.NodePlace | None, values: dict[str, Any]
) -> SessionRow:
    """Set the head of a session that was just created, and these values of its row; return it."""
    if head is not None:
        values |= {
            "head": head.node,
            "messages": head.depth,
            "rounds": head.round,
            "tokens": head.tokens_total,
            "calls": sessions.encode_calls(tree.calls_at(connection, key, head.node, head.depth)),
        }
    connection.execute(_MOVE_HEAD, values | {"the_session": key})
    made = sessions.session_of(connection, key)
    if made is None:
        raise AssertionError("the session is locked in this transaction")
    return made


# ------------------------------------------------------------------------------------------------------- fork

_SOURCE: Final = bindparam("source", type_=SESSIONS.c.session.type)
_COPY: Final = bindparam("copy", type_=SESSIONS.c.session.type)
_MOVE_HEAD: Final = update(SESSIONS).where(SESSIONS.c.session == bindparam("the_session"))
_HIDDEN_THERE: Final = select(func.count()).where(*matching(HIDDEN))
_SUMMARIES_THERE: Final = select(func.count()).where(*matching(SUMMARIES))


class _Fork(Struct, frozen=True, kw_only=True):
    """The source and the target of a fork."""

    source: SessionRow
    tenant: str
    id: str
    end: str  # the node up to which the history is copied
    at: int

    @property
    def key(self) -> str:
        return session_key(self.tenant, self.id, self.source.dialect)


async def fork_session(database: Database, tenant: str, source_key: str, node: str, as_id: str) -> SessionRow:
    """Create the session `as_id` with the history of `source_key` up to `node`; return it."""
    require_plain(session=as_id)
    source, branch = await database.read(partial(_read, tenant=tenant, key=source_key, node=node))
    fork = _Fork(source=source, tenant=tenant, id=as_id, end=node, at=int(time.time() * 1000))
    portions = list(tree.in_parts(branch, PORTION))
    last = len(portions) - 1
    try:
        first = partial(_copy_portion, fork=fork, portion=portions[0], begin=True, finish=last == 0)
        made = await database.write(first, again=False)  # a retry might find its own session
        for number, portion in enumerate(portions[1:], 1):
            made = await database.write(partial(_copy_portion, fork=fork, portion=portion, finish=number == last))
    except Conflict:
        raise  # the existing session is not ours
    except BaseException:
        await database.write(partial(_give_up, fork=fork))
        raise
    return made


def _read(connection: StoreConnection, tenant: str, key: str, node: str) -> tuple[SessionRow, list[Mark]]:
    source = sessions.session_of(connection, key)
    if source is None or source.tenant != tenant:
        raise NotFound("There is no such session.")
    if node == source.head == ROOT:
        raise NotFound("The session has no messages yet: there is nothing to share.")
    branch = tree.marks_to(connection, key, node) if node != ROOT and is_plain(node) else []
    if not branch:
        raise NotFound(f"There is no node {node!r} in this session.")
    return source, branch


def _copy_portion(
    connection: StoreConnection, fork: _Fork, portion: Sequence[Mark], *, begin: bool = False, finish: bool
) -> SessionRow:
    """Copy a portion. `begin` creates the session for the first portion; `finish` completes it after the last one."""
    if begin and not sessions.create_session(connection, fork.key, fork.tenant, fork.id, fork.at):
        raise Conflict(f"There is a session {fork.id!r} already: delete it first, or fork under another id.")
    made = sessions.locked_session(connection, fork.key)
    if made is None or made.created_at != fork.at:
        raise Conflict(f"The session {fork.id!r} was deleted while it was made.")
    if sessions.session_of(connection, fork.source.key) is None:
        raise NotFound("There is no such session: it was deleted while its history was copied.")
    nodes = [mark.node for mark in portion]
    bodies = list({mark.body for mark in portion})
    _copy(connection, fork, BODIES, bodies)
    for table in (NODES, HIDDEN, CUTS, SUMMARIES):
        _copy(connection, fork, table, nodes)
    if not _are_there(connection, fork, nodes):
        raise NotFound("There is no such session: it was deleted while its history was copied.")
    return _finish(connection, fork) if finish else made


def _finish(connection: StoreConnection, fork: _Fork) -> SessionRow:
    """Copy instructions and tools, and set the fork's head to the end of its history."""
    source = fork.source
    if source.instructions is not None:
        _copy(connection, fork, INSTRUCTIONS, [source.instructions])
    if source.tools is not None:
        _copy(connection, fork, BODIES, [source.tools])
    values = {
        "instructions": source.instructions,
        "arrival": FORKED,
        "updated_at": fork.at + 1,  # so that a search index made during the copying counts as outdated
        "model": source.model,
        "tools": source.tools,
        "scale": source.scale,
        "hidden": connection.execute(_HIDDEN_THERE, {"key": fork.key}).scalar_one_or_none(),
        "summaries": connection.execute(_SUMMARIES_THERE, {"key": fork.key}).scalar_one_or_none(),
    }
    place = tree.places_of(connection, fork.key, [fork.end])[fork.end]
    return _move_head(connection, fork.key, place, values)


def _give_up(connection: StoreConnection, fork: _Fork) -> None:
    """Delete what was copied, unless the session belongs to somebody else by now."""
    made = sessions.locked_session(connection, fork.key)
    if made is not None and made.created_at == fork.at and made.head == ROOT:
        sessions.delete_session(connection, fork.key)


def _copy(connection: StoreConnection, fork: _Fork, table: Table, names: Sequence[str]) -> None:
    """Copy the source's rows with these names. Existing rows stay as they are."""
    asked = {"source": fork.source.key, "copy": fork.key, "names": names}
    if table is SUMMARIES:
        asked["end"] = fork.end
    connection.execute(_copying(connection.dialect.name, table), asked)


def _are_there(connection: StoreConnection, fork: _Fork, nodes: Sequence[str]) -> bool:
    """Tell whether the fork has all of these nodes, and their texts."""
    asked = {"source": fork.key, "names": nodes}
    count = connection.execute(_counting(connection.dialect.name), asked).scalar_one_or_none()
    return bool(count == len(nodes))


@cache
def _copying(dialect: str, table: Table) -> postgresql.Insert | sqlite.Insert:
    columns = [column.name for column in table.c]
    rows = _named(dialect, table)
    found = select(*(_copied_value(table, rows, name) for name in columns)).select_from(rows)
    # SQLite needs some condition here. Without one it parses ON CONFLICT as the beginning of a join.
    found = found.where(rows.c.status == SummaryStatus.READY.value if table is SUMMARIES else true())
    return insert_into(dialect, table).from_select(columns, found).on_conflict_do_nothing()


@cache
def _reading(dialect: str, table: Table) -> Select[Any]:
    return select(_named(dialect, table))


@cache
def _counting(dialect: str) -> Select[int]:
    rows = _named(dialect, NODES)
    text = select(BODIES.c.body).where(BODIES.c.session == _SOURCE, BODIES.c.body == rows.c.body)
    return select(func.count()).select_from(rows).where(or_(rows.c.text.is_not(None), text.exists()))


def _named(dialect: str, table: Table) -> Subquery:
    """Return a subquery for the rows of a session with some names."""
    name = table.c[{BODIES: "body", INSTRUCTIONS: "version"}.get(table, "node")]
    of_session = select(table).where(table.c.session == _SOURCE)
    if dialect != "postgresql" or table in {CUTS, SUMMARIES}:
        return of_session.where(name.in_(bindparam("names", expanding=True))).subquery()
    # PostgreSQL's planner expects short sessions and would read the whole session for each portion. The lateral join
    # makes it look each name up by the primary key.
    names = select(func.unnest(bindparam("names", type_=postgresql.ARRAY(name.type))).label("name")).subquery()
    row = of_session.where(name == names.c.name).limit(1).lateral()
    return select(*row.c).select_from(names).join(row, true()).subquery()


def _copied_value(table: Table, rows: Subquery, name: str) -> ColumnElement[Any]:
    """Return the value of a copy's column: the original's, unless that refers to the other session."""
    if name == "session":
        return _COPY
    if name == "exchange" or (table is SUMMARIES and name in {"usage", "cost"}):
        return null()
    if table is SUMMARIES and name == "tip":
        # Any end of a branch with the summary will do. The end that it was made on may not be among the copied nodes.
        return bindparam("end", type_=SUMMARIES.c.tip.type)
    return rows.c[name]
