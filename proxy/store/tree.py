"""The rows of a session: nodes, texts, versions of instructions, and hidden rounds. All are append-only.

Nodes form a tree, like commits in git. Each text is stored once per session, byte for byte. The installation's secrets
are here too.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from typing import Any, Final, TypeVar

import msgspec
import orjson
from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import (
    ARRAY,
    ColumnElement,
    FromClause,
    LargeBinary,
    Select,
    and_,
    bindparam,
    except_,
    func,
    select,
    true,
)

from proxy.conversation import (
    ROOT,
    array_of,
    body_id,
    body_of,
    child,
    content_hash,
    content_key,
    names_under,
    version_of,
)
from proxy.dialects import Dialect, Message, begun_under
from proxy.store import sessions
from proxy.store.cuts import decode_changes, encode_changes
from proxy.store.database import Row, StoreConnection
from proxy.store.packing import (
    TEXTS,
    decode_name,
    encode_exchange,
    encode_name,
    is_against,
    pack,
    pack_against,
    sanitize,
    unpack,
)
from proxy.store.records import (
    Body,
    BranchRow,
    InstructionsRow,
    Mark,
    NodeRow,
    Opening,
    Source,
    dialect_of,
    session_key,
)
from proxy.store.schema import (
    BODIES,
    EXCHANGES,
    HIDDEN,
    INSTRUCTIONS,
    NODES,
    PENDING,
    PROVIDER_IDS,
    SECRETS,
    SESSIONS,
    content_place,
    insert_new,
    matching,
    put,
)
from proxy.trimming import Change, Hidden

# ---------------------------------------------------------------------------------------------------- secrets


def secret_of(connection: StoreConnection, name: str) -> bytes | None:
    """Return the secret with this name (32 bytes), or None if there is none."""
    found: str | None = connection.execute(select(SECRETS.c.value).where(SECRETS.c.name == name)).scalar_one_or_none()
    return None if found is None else bytes.fromhex(found)


def make_secret(connection: StoreConnection, name: str) -> bytes:
    """Return the secret with this name; make a new one if there is none."""
    fresh = secrets.token_bytes(32)
    insert_new(connection, SECRETS, [{"name": name, "value": fresh.hex()}])
    return secret_of(connection, name) or fresh


# ------------------------------------------------------------------------------------------------------ texts

_RAW_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_PREFIX: Final = re.compile(r"[0-9a-f]{8,40}", re.ASCII)
_LETTERS: Final = 40  # length of a name

_TEXT: Final = select(BODIES.c.text).where(*matching(BODIES, "body"))
_BY_PREFIX: Final = (
    select(BODIES.c.body, BODIES.c.text)
    .where(*matching(BODIES), BODIES.c.body.between(bindparam("from"), bindparam("to")))
    .limit(2)
)
_REPLIES_BY_PREFIX: Final = (
    select(NODES.c.body, NODES.c.text)
    .where(*matching(NODES), NODES.c.text.is_not(None), NODES.c.body.between(bindparam("from"), bindparam("to")))
    .distinct()
    .limit(2)
)
_FORMS: Final = tuple(
    select(table.c.id, table.c.forms).where(*matching(table), table.c.forms.is_not(None))
    for table in (PENDING, EXCHANGES)
)
_VERSION: Final = select(INSTRUCTIONS).where(*matching(INSTRUCTIONS, "version"))
_NEWEST: Final = (
    select(INSTRUCTIONS)
    .join(SESSIONS, SESSIONS.c.session == INSTRUCTIONS.c.session)
    .where(*matching(INSTRUCTIONS), INSTRUCTIONS.c.version == SESSIONS.c.instructions)
)

_BEHIND: Final = (
    select(EXCHANGES.c.instructions)
    .join_from(NODES, EXCHANGES, and_(EXCHANGES.c.session == NODES.c.session, EXCHANGES.c.id == NODES.c.exchange))
    .where(*matching(NODES, "node"))
)


def add_bodies(connection: StoreConnection, key: str, bodies: Mapping[str, Body]) -> None:
    """Store messages by the names of their texts. Existing ones stay as they are."""
    rows = [
        {"session": key, "body": name, "tokens": body.tokens, "text": body.message.raw.decode()}
        for name, body in bodies.items()
    ]
    insert_new(connection, BODIES, rows)


def named_bodies(bodies: Iterable[Body]) -> dict[str, Body]:
    """Return messages by the names of their texts, each once."""
    return {body_of(body.message): body for body in bodies}


def said_before(connection: StoreConnection, openings: Iterable[Opening]) -> dict[tuple[str, str], str]:
    """Return the stored texts of messages that these requests send in other forms, by session and node."""
    said: dict[tuple[str, str], str] = {}
    for opening in openings:
        if opening.forms:
            key = session_key(opening.tenant, opening.session, opening.dialect)
            for some in in_parts([node for node, _ in opening.forms]):
                rows = connection.execute(_TEXTS_AT, {"key": key, "nodes": some})
                said |= {(key, row[0]): row[1] for row in rows}
    return said


class Form(Struct, frozen=True, kw_only=True):
    """A different text of a stored message, as a client sent it back."""

    exchange: str  # the exchange that brought it
    node: str
    body: str  # name of the text
    packed: bytes  # packed on its own, or against the stored text of the message


def encode_forms(forms: Sequence[tuple[str, Message]], said: Mapping[str, str]) -> bytes | None:
    """Encode forms, (node, message), for the row of an exchange. `said` has the stored texts by node, if known."""
    rows: list[tuple[bytes, bytes, bytes]] = []
    for node, form in forms:
        text, stored = form.raw.decode(), said.get(node)
        packed = pack(text, TEXTS) if stored is None else pack_against(stored, text, TEXTS)
        rows.append((encode_name(node), encode_name(body_of(form)), packed))
    return msgspec.msgpack.encode(rows) if rows else None


def forms_in(connection: StoreConnection, key: str) -> list[Form]:
    """Return the forms of a session, oldest first. A form that was sent again is listed again."""
    found = {row.id: row.forms for each in _FORMS for row in connection.execute(each, {"key": key})}
    return [
        Form(exchange=exchange, node=decode_name(node), body=decode_name(body), packed=packed)
        for exchange in sorted(found, key=encode_exchange)
        for node, body, packed in _FORM_ROWS.decode(found[exchange])
    ]


_FORM_ROWS: Final = msgspec.msgpack.Decoder(list[tuple[bytes, bytes, bytes]])


def forms_of(connection: StoreConnection, key: str, exchange: str) -> dict[str, Message]:
    """Return, by node, the text in which clients sent a message back if it differs from the stored one.

    Only exchanges up to the given one count.
    """
    last = encode_exchange(exchange)
    # If a node has several forms, the last one counts.
    found = {form.node: form for form in forms_in(connection, key) if encode_exchange(form.exchange) <= last}
    api = dialect_of(key)
    return {node: api.message(form_text(connection, key, form).encode()) for node, form in found.items()}


def form_text(connection: StoreConnection, key: str, form: Form) -> str:
    """Return the text of a form."""
    said: str | None = None
    if is_against(form.packed):
        said = next((text for _, text in connection.execute(_TEXTS_AT, {"key": key, "nodes": [form.node]})), None)
    return unpack(form.packed, said)


def add_tools(connection: StoreConnection, key: str, tools: bytes, *, there: str | None = None) -> str:
    """Store the text of `tools`; return its name. `there` is a name that is known to be stored."""
    name = body_id(tools)
    if name != there:
        insert_new(connection, BODIES, [{"session": key, "body": name, "tokens": 0, "text": tools.decode()}])
    return name


def tools_of(connection: StoreConnection, key: str, body: str) -> bytes | None:
    """Return the text of tools with this name; None if there is none."""
    text: str | None = connection.execute(_TEXT, {"key": key, "body": body}).scalar_one_or_none()
    return text.encode() if text is not None and not is_message(text.encode()) else None


def message_of(connection: StoreConnection, key: str, prefix: str) -> tuple[str, Message] | None:
    """Return name and message of the text whose name begins with `prefix`; None if there is none, or several."""
    if not _PREFIX.fullmatch(prefix):
        return None
    asked = {"key": key, "from": prefix.ljust(_LETTERS, "0"), "to": prefix.ljust(_LETTERS, "f")}
    # Replies are searched for in all nodes of the session, and forms in all its forms. So these come last.
    found: dict[str, str] = {row.body: row.text for row in connection.execute(_BY_PREFIX, asked)}
    if not found:
        found = {row.body: row.text for row in connection.execute(_REPLIES_BY_PREFIX, asked)}
    if not found:
        for form in forms_in(connection, key):
            if form.body.startswith(prefix) and form.body not in found:
                found[form.body] = form_text(connection, key, form)
    if len(found) != 1:
        return None
    ((name, text),) = found.items()
    return (name, dialect_of(key).message(text.encode())) if is_message(text.encode()) else None


def add_instructions(
    connection: StoreConnection,
    key: str,
    messages: Sequence[Message],
    tokens: int,
    at: int,
    *,
    there: str | None = None,
) -> str:
    """Store a version of the instructions; return its name, which is the same for the same messages.

    `there` is a version that is known to be stored.
    """
    version = version_of(messages)
    if version == there:
        return version
    text = array_of(messages).decode()
    row = {"session": key, "version": version, "messages": text, "tokens": tokens, "created_at": at}
    insert_new(connection, INSTRUCTIONS, [row])
    return version


def instructions_of(connection: StoreConnection, key: str, version: str | None) -> InstructionsRow | None:
    """Return a version of the instructions, or the newest if `version` is None."""
    asked = {"key": key} if version is None else {"key": key, "version": version}
    row = connection.execute(_NEWEST if version is None else _VERSION, asked).one_or_none()
    if row is None:
        return None
    messages = messages_in(row.messages, dialect_of(key))
    return InstructionsRow(version=row.version, messages=messages, tokens=row.tokens, created_at=row.created_at)


def instructions_at(connection: StoreConnection, key: str, node: str) -> tuple[Message, ...]:
    """Return the instructions under which a reply was given; the newest if that is not known (an import)."""
    row = connection.execute(_BEHIND, {"key": key, "node": node}).one_or_none()
    if row is not None and row.instructions is None:
        return ()
    known = instructions_of(connection, key, None if row is None else row.instructions)
    return () if known is None else known.messages


def messages_in(text: str, dialect: Dialect) -> tuple[Message, ...]:
    """Return the messages in a JSON array, each with its original text."""
    return tuple(dialect.message(bytes(raw)) for raw in _RAW_LIST.decode(text))


def is_message(raw: bytes) -> bool:
    """Tell whether a text is a message (a JSON object), not tools (an array)."""
    return raw.lstrip(b" \t\r\n").startswith(b"{")


# ------------------------------------------------------------------------------------------------------ nodes

Name = TypeVar("Name")
_AT_ONCE: Final = 500  # names per query; databases limit the parameters

_AMONG: Final = NODES.c.node.in_(bindparam("nodes", expanding=True))
_PLACE_COLUMNS: Final = ("node", "depth", "round", "tokens_total", "recorded")
_NAMED: Final = select(*(NODES.c[name] for name in _PLACE_COLUMNS)).where(*matching(NODES), _AMONG)
_DEPTHS: Final = select(NODES.c.node, NODES.c.depth).where(*matching(NODES), _AMONG)


@cache
def _parents(dialect: str) -> Select[Any]:
    found = select(NODES.c.parent).where(*_says(dialect))
    found = found.order_by(func.abs(NODES.c.depth - bindparam("depth", type_=NODES.c.depth.type)), NODES.c.node)
    return found.limit(bindparam("most", type_=NODES.c.depth.type))


@cache
def _contents(dialect: str) -> Select[Any]:
    return select(NODES.c.content).where(*_says(dialect))


def _says(dialect: str) -> list[ColumnElement[bool]]:
    """Return the conditions for nodes of the session `key` that have one of some contents."""
    says = [*matching(NODES), NODES.c.content.in_(bindparam("contents", expanding=True))]
    if dialect == "postgresql":
        asked = func.unnest(bindparam("asked", type_=ARRAY(LargeBinary))).column_valued("content")
        there = content_place(asked, bindparam("key", type_=NODES.c.session.type))
        says.append(content_place(NODES.c.content, NODES.c.session).in_(select(there)))
    return says


def _asked_contents(key: str, contents: Sequence[str]) -> dict[str, Any]:
    return {"key": key, "contents": contents, "asked": list(map(encode_name, contents))}


_NODE_COLUMNS: Final = tuple([name for name in NodeRow.__struct_fields__ if name != "message"])
_MARK_COLUMNS: Final = Mark.__struct_fields__


def _text_of(table: FromClause) -> ColumnElement[str]:
    """Return the SQL expression for the text of a row's message: its own column, or a look-up in `bodies`."""
    found = select(BODIES.c.text).where(BODIES.c.session == bindparam("key"), BODIES.c.body == table.c.body)
    return func.coalesce(table.c.text, found.correlate(table).scalar_subquery(), type_=NODES.c.text.type)


_ROWS: Final = select(*(NODES.c[name] for name in _NODE_COLUMNS), _text_of(NODES)).where(*matching(NODES), _AMONG)
_TEXTS_AT: Final = select(NODES.c.node, _text_of(NODES)).where(*matching(NODES), _AMONG)


@cache
def _path(dialect: str, *, texts: bool) -> Select[*tuple[Any, ...]]:
    """Return the query that climbs from a node to its root, row by row. With `texts`, it reads the texts too."""
    columns = [column for column in NODES.columns if texts or column.name != "text"]
    up = select(*columns).where(*matching(NODES, "node")).cte("up", recursive=True)
    step = select(*columns).where(*matching(NODES), NODES.c.node == up.c.parent, NODES.c.depth > bindparam("below"))
    if dialect == "postgresql":
        # The planner expects a branch of ten messages and would read the whole session at each step. The lateral join
        # makes it look each parent up by its primary key.
        above = step.limit(1).lateral("above")
        step = select(*above.c).select_from(up.join(above, true()))
    up = up.union_all(step)
    if not texts:
        return select(*(up.c[name] for name in _MARK_COLUMNS)).order_by(up.c.depth)
    return select(*(up.c[name] for name in _NODE_COLUMNS), _text_of(up)).order_by(up.c.depth)


_CHILDLESS: Final = except_(
    select(NODES.c.node).where(*matching(NODES)), select(NODES.c.parent).where(*matching(NODES))
)
_LEAVES: Final = (
    select(NODES.c.node, NODES.c.depth, NODES.c.created_at)
    .where(*matching(NODES), NODES.c.node.in_(_CHILDLESS))
    .order_by(NODES.c.created_at.desc(), NODES.c.node)
)


class NodePlace(Struct, frozen=True, kw_only=True):
    """A node's place in the tree, with the sums that its children continue."""

    node: str
    depth: int
    round: int
    tokens_total: int
    recorded: str | None = None
    """The tenant, if every assistant message up to here came from upstream (or is vouched for); otherwise None."""
    is_new: bool = False  # whether it was not stored before


def root_of(tenant: str | None) -> NodePlace:
    """Return the place above a conversation's first messages. `tenant` is None if they must not identify it."""
    return NodePlace(node=ROOT, depth=0, round=0, tokens_total=0, recorded=tenant)


class NewNode(Struct, frozen=True, kw_only=True):
    """A message to insert as a node, with the other values of its row."""

    body: Body
    source: Source
    created_at: int
    partial: bool = False
    exchange: str | None = None
    agent: str | None = None  # the author, if the message itself does not name one
    has_text: bool = False  # whether the text is stored in the node's own row
    vouched: bool = False  # whether it is known to have come from upstream, although the client sent it
    policy: str | None = None
    arrival: tuple[Change, ...] | None = None


class UnknownBase(LookupError):
    """The node under which others should be inserted is not stored."""


def depths_of(connection: StoreConnection, key: str, nodes: Sequence[str]) -> dict[str, int]:
    """Return the depth of each of `nodes` that is stored. Depth 1 is right under the root."""
    return {
        row.node: row.depth
        for some in in_parts(nodes)
        for row in connection.execute(_DEPTHS, {"key": key, "nodes": some})
    }


def parents_of(connection: StoreConnection, key: str, content: str, depth: int, most: int) -> list[str]:
    """Return the parents of up to `most` nodes with this `content_key`, nearest to `depth` first."""
    asked = _asked_contents(key, [content]) | {"depth": depth, "most": most}
    return [row.parent for row in connection.execute(_parents(connection.dialect.name), asked)]


def contents_there(connection: StoreConnection, key: str, contents: Sequence[str]) -> set[str]:
    """Return the given `content_key`s that some node of the session has."""
    return {
        content
        for some in in_parts(contents)
        for content in connection.execute(_contents(connection.dialect.name), _asked_contents(key, some)).scalars()
    }


class ProviderPlace(Struct, frozen=True, kw_only=True):
    """The session and the reply that came with an id of a provider."""

    session: str  # id of the session
    node: str  # the reply; "" if it became no node
    begun: bool = False  # whether the provider holds only the first round of the reply under the id


def _of_tenant(*columns: ColumnElement[Any]) -> Select[Any]:
    """Return a query for the provider ids, among some, that came to a tenant."""
    return (
        select(*columns)
        .join_from(PROVIDER_IDS, SESSIONS, PROVIDER_IDS.c.session == SESSIONS.c.session)
        .where(
            PROVIDER_IDS.c.piece.in_(bindparam("pieces", expanding=True)),
            SESSIONS.c.tenant == bindparam("tenant"),
            SESSIONS.c.dialect == bindparam("dialect"),
        )
    )


_NEWEST_PLACES: Final = (
    _of_tenant(SESSIONS.c.id, PROVIDER_IDS.c.node, PROVIDER_IDS.c.piece)
    .order_by(SESSIONS.c.updated_at.desc(), SESSIONS.c.session)
    .limit(2)
)
_KNOWN_PIECES: Final = _of_tenant(PROVIDER_IDS.c.piece)
_NODES_OF_PIECES: Final = _of_tenant(PROVIDER_IDS.c.session, PROVIDER_IDS.c.node).where(PROVIDER_IDS.c.node != "")


def provider_place(connection: StoreConnection, tenant: str, dialect: str, name: str) -> ProviderPlace | None:
    """Return the session and the reply that came with a provider's id; None if the tenant did not get it here."""
    begun = _piece(tenant, dialect, begun_under(name))
    asked = {"pieces": [_piece(tenant, dialect, name), begun], "tenant": tenant, "dialect": dialect}
    rows = connection.execute(_NEWEST_PLACES, asked).all()
    if not rows:
        return None
    first = rows[0]
    is_begun = any(row.piece == begun and (row.id, row.node) == (first.id, first.node) for row in rows)
    return ProviderPlace(session=first.id, node=first.node, begun=is_begun)


def foreign_ids(connection: StoreConnection, tenant: str, dialect: str, names: Collection[str]) -> list[str]:
    """Return those of a provider's ids that the tenant did not get here."""
    pieces = {name: _piece(tenant, dialect, name) for name in names}
    known: set[int] = set()
    for some in in_parts(list(pieces.values())):
        asked = {"pieces": some, "tenant": tenant, "dialect": dialect}
        known.update(connection.execute(_KNOWN_PIECES, asked).scalars())
    return [name for name, piece in pieces.items() if piece not in known]


def replies_with(connection: StoreConnection, tenant: str, dialect: str, names: Collection[str]) -> list[NodeRow]:
    """Return the tenant's replies that came with any of these ids of a provider."""
    nodes: dict[str, set[str]] = {}
    for some in in_parts([_piece(tenant, dialect, name) for name in names]):
        for row in connection.execute(_NODES_OF_PIECES, {"pieces": some, "tenant": tenant, "dialect": dialect}):
            nodes.setdefault(row.session, set()).add(row.node)
    return [row for key, found in sorted(nodes.items()) for row in rows_of(connection, key, sorted(found))]


def keep_provider_ids(
    connection: StoreConnection, key: str, *, tenant: str, dialect: str, names: Collection[str], node: str
) -> None:
    """Record that these ids of a provider came with the reply at a node of a session.

    A conversation's id comes with each of its replies; the last reply counts. If the reply became no node (""), ids
    that are recorded already stay as they are.
    """
    pieces = dict.fromkeys(_piece(tenant, dialect, name) for name in names)
    if sessions.session_of(connection, key) is not None:
        rows = [{"session": key, "piece": piece, "node": node} for piece in pieces]
        if node:
            put(connection, PROVIDER_IDS, rows)
        else:
            insert_new(connection, PROVIDER_IDS, rows)


def _piece(tenant: str, dialect: str, name: str) -> int:
    named = f"{tenant}\x00{dialect}\x00{name}".encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(named, digest_size=8, person=b"palimpsest-prov").digest(), "big", signed=True)


def rows_of(connection: StoreConnection, key: str, nodes: Sequence[str]) -> list[NodeRow]:
    """Return the rows of these nodes, ordered by depth. Nodes that are not stored are left out."""
    dialect = dialect_of(key)
    asked = [{"key": key, "nodes": some} for some in in_parts(nodes)]
    rows = [_node(row, dialect) for each in asked for row in connection.execute(_ROWS, each)]
    return sorted(rows, key=lambda row: row.depth)


def path_to(connection: StoreConnection, key: str, node: str, *, below: int = 0) -> list[NodeRow]:
    """Return the branch that ends at `node`, oldest first; empty if it is not stored.

    With `below`, only `node` and its ancestors deeper than that.
    """
    asked, dialect = {"key": key, "node": node, "below": below}, dialect_of(key)
    return [_node(row, dialect) for row in connection.execute(_path(connection.dialect.name, texts=True), asked)]


def marks_to(connection: StoreConnection, key: str, node: str, *, below: int = 0) -> list[Mark]:
    """Like `path_to`, but without the texts: a client that resends its history sends them."""
    asked, dialect = {"key": key, "node": node, "below": below}, dialect_of(key)
    return [_mark(row, dialect) for row in connection.execute(_path(connection.dialect.name, texts=False), asked)]


def leaves(connection: StoreConnection, key: str) -> list[BranchRow]:
    """Return the leaves of the tree, newest first."""
    return [
        BranchRow(head=row.node, depth=row.depth, updated_at=row.created_at)
        for row in connection.execute(_LEAVES, {"key": key})
    ]


_SAID_MOST: Final = 200  # most replies of other agents that are read
_SAID_BEFORE: Final = 10_000
"""Other agents' replies are read from so many milliseconds before an agent's last turn on: some may have ended just
then."""
_ASKED_AT: Final = (
    select(EXCHANGES.c.created_at)
    .join(NODES, and_(NODES.c.session == EXCHANGES.c.session, NODES.c.exchange == EXCHANGES.c.id))
    .where(*matching(NODES, "node"))
)
_SAID: Final = (
    select(*(NODES.c[name] for name in _NODE_COLUMNS), _text_of(NODES))
    .where(
        *matching(NODES),
        NODES.c.source == Source.UPSTREAM.value,
        NODES.c.agent.is_not(None),
        NODES.c.agent != "",
        NODES.c.agent != bindparam("agent", type_=NODES.c.agent.type),
        NODES.c.created_at > bindparam("since", type_=NODES.c.created_at.type),
    )
    .order_by(NODES.c.created_at.desc(), NODES.c.node)
    .limit(_SAID_MOST)
)


def said_by_others(connection: StoreConnection, key: str, agent: str, turn: str | None) -> list[NodeRow]:
    """Return the newest replies of other agents since the request that brought the node `turn`, oldest first.

    Replies from a few seconds before that request are included. If `turn` is None, there is no limit in time.
    """
    since: int | None = None
    if turn is not None:
        since = connection.execute(_ASKED_AT, {"key": key, "node": turn}).scalar_one_or_none()
    asked = {"key": key, "agent": agent, "since": 0 if since is None else since - _SAID_BEFORE}
    return [_node(row, dialect_of(key)) for row in connection.execute(_SAID, asked)][::-1]


def insert_nodes(
    connection: StoreConnection,
    key: str,
    base: str,
    messages: Sequence[NewNode],
    replies: Sequence[NewNode],
    *,
    tenant: str | None = None,
    under: NodePlace | None = None,
) -> tuple[list[NodePlace], list[NodePlace]]:
    """Insert `messages` as a chain under `base`, and `replies` as siblings under the last of them.

    Existing nodes stay as they are. Texts that are not in the nodes' own rows must be stored in the same transaction.
    `tenant` is the conversation's owner, if requests without an id may be matched to it. `under` is the place of
    `base`; callers may pass it only if the first of `messages` is not stored under it yet (hence none of them is).

    Returns the places of the messages and the places of the replies. Raises `UnknownBase`, and writes nothing, if
    `base` is not stored.
    """
    contents = [content_hash(new_node.body.message) for new_node in (*messages, *replies)]
    names = names_under(base, contents[: len(messages)])
    end = names[-1] if names else base
    siblings = [child(end, content) for content in contents[len(messages) :]]
    stored = {ROOT: root_of(tenant)}
    stored |= places_of(connection, key, [base, *names, *siblings]) if under is None else {base: under}
    if base not in stored:
        raise UnknownBase(f"node {base} is not stored")
    new_nodes = [
        *zip([base, *names], names, messages, strict=False),
        *((end, name, new_node) for name, new_node in zip(siblings, replies, strict=True)),
    ]
    insert_new(connection, NODES, node_rows(key, new_nodes, stored, contents))
    return [stored[name] for name in names], [stored[name] for name in siblings]


def node_rows(
    key: str,
    new_nodes: Iterable[tuple[str, str, NewNode]],
    places: dict[str, NodePlace],
    contents: Sequence[bytes] | None = None,
) -> list[dict[str, Any]]:
    """Return rows for each (parent, node, new_node) whose node is not in `places`, and add its place there.

    Parents must come before children. `contents` holds the content hash of each, if known.
    """
    rows: list[dict[str, Any]] = []
    for number, (parent, node, new_node) in enumerate(new_nodes):
        if node not in places:
            under = places[parent]
            place = places[node] = _below(under, node, new_node)
            content = contents[number] if contents else content_hash(new_node.body.message)
            rows.append(_node_row(key, under, place, new_node, content))
    return rows


def in_parts(names: Sequence[Name], most: int = _AT_ONCE) -> Iterator[Sequence[Name]]:
    """Yield names in parts that are short enough for one query."""
    for start in range(0, len(names), most):
        yield names[start : start + most]


def places_of(connection: StoreConnection, key: str, nodes: Sequence[str]) -> dict[str, NodePlace]:
    """Return the places of those of `nodes` that are stored."""
    return {
        row.node: NodePlace(**row._asdict())
        for some in in_parts([node for node in nodes if node != ROOT])
        for row in connection.execute(_NAMED, {"key": key, "nodes": some})
    }


def _below(under: NodePlace, name: str, new_node: NewNode) -> NodePlace:
    role = new_node.body.message.role
    known = role != "assistant" or new_node.source is Source.UPSTREAM or new_node.vouched
    return NodePlace(
        node=name,
        depth=under.depth + 1,
        round=under.round + (role == "user"),
        tokens_total=under.tokens_total + new_node.body.tokens,
        recorded=under.recorded if known else None,
        is_new=True,
    )


def _node_row(key: str, under: NodePlace, place: NodePlace, new_node: NewNode, content: bytes) -> dict[str, Any]:
    message, arrival = new_node.body.message, new_node.arrival
    return {
        "session": key,
        "node": place.node,
        "parent": under.node,
        "depth": place.depth,
        "round": place.round,
        "tokens_total": place.tokens_total,
        "body": body_of(message),
        "tokens": new_node.body.tokens,
        "source": new_node.source.value,
        "partial": new_node.partial,
        "exchange": new_node.exchange,
        "agent": sanitize(message.agent or "") or new_node.agent,
        "policy": new_node.policy,
        # The position is left out. It follows from the node's depth, wherever the plan assumed the branch to begin.
        "arrival": None if arrival is None else encode_changes([replace(change, position=0) for change in arrival]),
        "created_at": new_node.created_at,
        "content": content_key(content),
        "recorded": place.recorded,
        "text": message.raw.decode() if new_node.has_text else None,
    }


def _node(row: Row, dialect: Dialect) -> NodeRow:
    values = dict(zip(_NODE_COLUMNS, row, strict=False))
    values["message"] = dialect.message(row[-1].encode())
    values["source"] = Source(values["source"])
    return NodeRow(**_with_arrival(values, dialect))


def _mark(row: Row, dialect: Dialect) -> Mark:
    return Mark(**_with_arrival(dict(zip(_MARK_COLUMNS, row, strict=True)), dialect))


def _with_arrival(values: dict[str, Any], dialect: Dialect) -> dict[str, Any]:
    """Decode what `on_arrival` decided about a message. The changes get the message's position."""
    if values["arrival"] is not None:
        position, changes = values["depth"] - 1, decode_changes(values["arrival"], dialect)
        values["arrival"] = tuple([replace(change, position=position) for change in changes])
    return values


# ---------------------------------------------------------------------- the tools that the newest reply calls

_NEAR: Final = 64  # the reply is searched for among so many messages, from the end upwards


def calls_of(reply: Message, *, partial: bool) -> tuple[str, ...]:
    """Return the names of the tools that a reply calls, each once. Of a `partial` reply, only complete calls count."""
    whole = reply.without_unfinished_calls() if partial else reply
    return tuple(dict.fromkeys([sanitize(call.name) for call in whole.calls]))


def calls_at(connection: StoreConnection, key: str, end: str, depth: int) -> tuple[str, ...]:
    """Return the names of the tools that the last message of a branch calls. Results after that message are skipped.

    The branch ends at the node `end`, which has this `depth`.
    """
    for row in reversed(path_to(connection, key, end, below=depth - _NEAR)):
        if row.message.role != "tool" or row.message.beside:
            return calls_of(row.message, partial=row.partial)
    return ()


# ------------------------------------------------------------------------------- what was hidden from clients

_HIDDEN_NODES: Final = select(HIDDEN.c.node).where(*matching(HIDDEN))
_HIDDEN_ROWS: Final = select(HIDDEN).where(*matching(HIDDEN), HIDDEN.c.node.in_(bindparam("nodes", expanding=True)))
_MADE: Final = select(NODES.c.node).where(*matching(NODES, "exchange"), _AMONG)


def keep_hidden(connection: StoreConnection, key: str, replies: Mapping[str, Hidden], *, exchange: str, at: int) -> int:
    """Store what was hidden from the client of some replies, by node; return for how many.

    A node that another exchange created is skipped: views that hold it already must not change.
    """
    if not replies:
        return 0
    made = connection.execute(_MADE, {"key": key, "nodes": list(replies), "exchange": exchange}).scalars()
    return add_hidden(connection, key, [(node, replies[node], at) for node in made], exchange=exchange)


def add_hidden(
    connection: StoreConnection, key: str, rows: Iterable[tuple[str, Hidden, int]], *, exchange: str | None
) -> int:
    """Store (node, what was hidden, when) for nodes that have nothing hidden yet; return how many."""
    new = [
        {
            "session": key,
            "node": node,
            "exchange": exchange,
            "before": _texts(hidden.before),
            "reply": None if hidden.reply is None else hidden.reply.raw.decode(),
            "after": _texts(hidden.after),
            "tokens": hidden.tokens,
            "created_at": at,
        }
        for node, hidden, at in rows
    ]
    insert_new(connection, HIDDEN, new)
    return len(new)


def hidden_at(connection: StoreConnection, key: str, nodes: Collection[str], total: int) -> dict[str, Hidden]:
    """Return what was hidden from the client, by node, for those of `nodes` that have something hidden.

    `total` is the number of such nodes in the session. If it is less than the number of `nodes`, the session's list of
    such nodes is searched instead.
    """
    wanted: Sequence[str] = list(nodes)
    if total < len(wanted):
        among = frozenset(nodes)
        wanted = [node for node in connection.execute(_HIDDEN_NODES, {"key": key}).scalars() if node in among]
    dialect = dialect_of(key)
    return {
        row.node: _hidden(row, dialect)
        for some in in_parts(wanted)
        for row in connection.execute(_HIDDEN_ROWS, {"key": key, "nodes": some})
    }


def _hidden(row: Row, dialect: Dialect) -> Hidden:
    before, after = (
        tuple([dialect.message(text.encode()) for text in orjson.loads(texts)]) for texts in (row.before, row.after)
    )
    reply = None if row.reply is None else dialect.message(row.reply.encode())
    return Hidden(before=before, reply=reply, after=after, tokens=row.tokens)


def _texts(messages: Iterable[Message]) -> str:
    return orjson.dumps([message.raw.decode() for message in messages]).decode()
