"""Finds the session of a request without an id, by the relayed replies that the request sends back.

One piece of evidence that exactly one session has is enough. If several sessions have evidence, the rules below are
tried in this order, and so are the alternatives in a rule. The first that leaves exactly one session decides:

1. The request ends at the session's head.
2. By ids and places: the session is the only one with some piece of evidence; or it ends as the request does, apart
   from what clients change; or it has the most evidence; or its head is the newest evidence.
3. By texts alone: the session ends as the request does; or it has most of the request's messages; or its head is the
   request's newest reply, and answers the same question.
4. By short texts: the session ends as the request does, and no other session holds all of the request.
5. The session ends with a reply of which the client has only the beginning.

Evidence is written with the reply, in one transaction, so any worker finds the conversation at its next request.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import BindParameter, ColumnElement, Select, bindparam, select
from sqlalchemy.dialects import postgresql

from proxy.conversation import (
    ROOT,
    TELLING,
    Evidence,
    Witness,
    chain,
    content_key,
    continues,
    earlier_names,
    is_longer,
    is_unique,
    known_prefix,
    said,
    squeezed,
)
from proxy.dialects import Message
from proxy.store import tree
from proxy.store.database import StoreConnection
from proxy.store.records import NodeRow
from proxy.store.schema import EVIDENCE, INSTRUCTIONS, SESSIONS, insert_new, session_place

_NEAR: Final = 32  # newest replies whose evidence is looked up together; older ones only if these tell nothing
_HOLDERS: Final = 500  # rows per query: a common sentence may be in any number of sessions
_TRIED: Final = 16  # most candidate sessions that are compared in detail
_ASKED: Final = 64  # the question of a reply is searched for among so many messages before it
_ENDS: Final = 64  # newest messages of a session that are compared with the request's
_ASKED_ALONE: Final = 2  # up to so many questions without replies are no evidence: the first may have failed
_BRIEF: Final = 64  # if more sessions have the same short reply, none of them is considered

_HELD: Final = (
    select(EVIDENCE.c.piece, EVIDENCE.c.session)
    .where(EVIDENCE.c.piece.in_(bindparam("pieces", expanding=True)))
    .limit(_HOLDERS)
)
_AT_HEAD: Final = (
    select(EVIDENCE.c.piece, EVIDENCE.c.session)
    .join(SESSIONS, SESSIONS.c.session == EVIDENCE.c.session)
    .where(EVIDENCE.c.piece == bindparam("piece", type_=EVIDENCE.c.piece.type), SESSIONS.c.head == bindparam("head"))
    .limit(2)
)
_USED: Final = (
    select(INSTRUCTIONS.c.version)
    .where(INSTRUCTIONS.c.session == SESSIONS.c.session, INSTRUCTIONS.c.version == bindparam("version"))
    .exists()
)
_SESSIONS: Final = select(
    *(SESSIONS.c[name] for name in ("session", "id", "head", "instructions", "updated_at")), _USED.label("used")
).where(SESSIONS.c.session.in_(bindparam("keys", expanding=True)), SESSIONS.c.tenant == bindparam("tenant"))


@cache
def _pieces(dialect: str) -> Select[Any]:
    """Return the query for those of some pieces that a session has."""
    of_session = _of_session(bindparam("key", type_=EVIDENCE.c.session.type), dialect)
    return select(EVIDENCE.c.piece).where(of_session, EVIDENCE.c.piece.in_(bindparam("pieces", expanding=True)))


@cache
def _insert_new_piece() -> postgresql.Insert:
    """Return the statement that inserts a piece unless the session has it. PostgreSQL has no constraint for that."""
    session, piece = [bindparam(f"new_{column.name}", type_=column.type) for column in EVIDENCE.columns]
    there = select(EVIDENCE.c.piece).where(_of_session(session, "postgresql"), EVIDENCE.c.piece == piece)
    row = select(session.label("session"), piece.label("piece")).where(~there.exists())
    return postgresql.insert(EVIDENCE).from_select(["session", "piece"], row)


def _of_session(session: BindParameter[str], dialect: str) -> ColumnElement[bool]:
    """Return the condition for rows of a session.

    On PostgreSQL it compares hashes, for the index by piece and hash. By name, it would read all rows of the session.
    """
    if dialect == "postgresql":
        return session_place(EVIDENCE.c.session) == session_place(session)
    return EVIDENCE.c.session == session


class UnnamedRequest(Struct, frozen=True, kw_only=True):
    """The parts of a request without a session id that decide its session."""

    tenant: str
    dialect: str
    messages: Sequence[Message]
    names: Sequence[str]  # the nodes of its messages, as a chain under the root
    contents: Sequence[bytes]  # their content hashes
    instructions: str | None  # version of its instructions; None if it has none


class Doubt(Struct, frozen=True, kw_only=True):
    """Why a request was not joined to a session that it resembles."""

    session: str  # the id of the session that it resembles
    differs: int | None = None  # position of the first message that the session does not have
    instructions: bool = False  # whether the instructions differ
    rivals: int = 1  # how many sessions it resembles equally


class Inferred(Struct, frozen=True, kw_only=True):
    """The result of inference for a request."""

    session: str | None = None  # the id of the session that it belongs to; None if there is none
    relayed: tuple[int, ...] = ()
    """Positions of the request's replies that a session of the tenant has with the same history. Only if `session` is
    None."""
    doubt: Doubt | None = None


class _Session(Struct, frozen=True, kw_only=True):
    id: str
    head: str
    agrees: bool  # whether the session was ever used with the request's instructions (a plan mode may use others)
    updated_at: int


def insert_evidence(connection: StoreConnection, rows: list[dict[str, Any]]) -> None:
    """Insert rows of `evidence`. Existing rows stay as they are. The session must be locked."""
    if connection.dialect.name != "postgresql":
        insert_new(connection, EVIDENCE, rows)
    elif rows:
        connection.execute(_insert_new_piece(), [{f"new_{name}": row[name] for name in row} for row in rows])


def evidence_rows(
    key: str, witness: Witness, said: Iterable[tuple[str, Message]], places: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Return the evidence rows of the messages in `said`, (node, message), and of nodes known by their place alone."""
    pieces = {evidence.piece for node, message in said for evidence in witness.of(message, node)}
    pieces |= {witness.place(node).piece for node in places}
    return [{"session": key, "piece": piece} for piece in sorted(pieces)]


def infer(connection: StoreConnection, request: UnnamedRequest) -> Inferred:
    """Return the session that a request belongs to, or why none was found."""
    messages = request.messages
    if not any(message.role == "assistant" or message.answered for message in messages):
        return _Inference(connection, request).silent()
    found = _Inference(connection, request).session()
    is_reshaped = any(each.facts is None or each.facts.reshaped for each in messages)
    # The session may have begun under an older version, with other names. A random id would identify it anyway.
    if found.session is None and is_reshaped and not any(is_unique(name) for each in messages for name in each.ids):
        for names in earlier_names(ROOT, messages):
            if names != list(request.names):
                before = _Inference(connection, replace(request, names=names)).session()
                if before.session is not None:
                    return before
    return found


class _Inference:
    def __init__(self, connection: StoreConnection, request: UnnamedRequest) -> None:
        self._connection = connection
        self._request = request
        self._witness = Witness(tenant=request.tenant, dialect=request.dialect)
        self._spoken = [
            place for place, message in enumerate(request.messages) if message.role == "assistant" or message.answered
        ]
        replies = [place for place in self._spoken if request.messages[place].role == "assistant"]
        self._newest = (replies or self._spoken or [0])[-1]
        """Position of the newest reply, or of the newest result if there is no reply."""
        before = request.names[self._newest - 1] if self._newest else ROOT
        parted = request.messages[self._newest].parted if replies else ()
        self._ends = {*request.names[self._newest : self._newest + 1], *(chain(before, parts)[-1] for parts in parted)}
        """The nodes that this reply may have."""
        self._pieces: dict[int, list[Evidence]] = {}
        self._sessions: dict[str, _Session] = {}

    def session(self) -> Inferred:
        near, far = self._spoken[-_NEAR:], self._spoken[:-_NEAR]
        holders: dict[int, set[str]] = {}
        for places in ([self._newest], near, far):
            # Texts are looked up only if nothing stronger is found: any number of sessions may have the same text.
            for texts in (False, True):
                new, all_read = self._holders(places, texts=texts)
                holders |= new
                found = self._decide(new, places, all_read=all_read) if new else None
                if found is not None and not texts and places == [self._newest]:
                    found = self._standing(found, new)
                if found is not None:
                    return Inferred(session=found.id)
                if new:
                    break
            if holders and places is near:
                break
        last = None if holders else self._brief() or self._begun()
        if last is not None:
            return Inferred(session=last.id)
        return Inferred(relayed=self._relayed(holders), doubt=self._doubt(holders))

    def silent(self) -> Inferred:
        """Return the session of a request without replies: the one that ends with all its questions but the newest.

        All replies of that session are calls, which the client left out. If the model said anything else, several
        questions in a row are no evidence.
        """
        turns = [place for place, message in enumerate(self._request.messages) if message.role == "user"]
        asked = self._request.messages[: turns[-1]] if len(turns) > _ASKED_ALONE else ()
        keys = self._held_by_few([self._witness.place(self._request.names[0]).piece]) if asked else set[str]()
        found = self._only_one(self._ending_alike(keys, asked))
        return Inferred(session=found.id if found is not None else None)

    # ------------------------------------------------------------------------------ which sessions hold what

    def _evidence(self, place: int) -> list[Evidence]:
        found = self._pieces.get(place)
        if found is None:
            message, node = self._request.messages[place], self._request.names[place]
            # The first message answers nothing. So it is not a relayed reply, and any conversation may begin with it.
            of = self._witness.of(message, node) if place else self._witness.marks(message)
            found = self._pieces[place] = [*of, *self._witness.earlier(message), *self._witness.told(message)]
            if place == self._newest:
                found += [self._witness.place(end) for end in self._ends - {node}]
        return found

    def _holders(self, places: Sequence[int], *, texts: bool) -> tuple[dict[int, set[str]], bool]:
        """Return, by piece, the sessions that hold the evidence at these places, and whether all were read."""
        evidence = [each for place in places for each in self._evidence(place)]
        pieces = sorted({each.piece for each in evidence if each.tells and (each.kind == "text") is texts})
        held: defaultdict[int, set[str]] = defaultdict(set)
        all_read = True
        for some in tree.in_parts(pieces):
            rows = list(self._connection.execute(_HELD, {"pieces": some}))
            if len(rows) == _HOLDERS:  # some were cut off; those whose head is the request's end must be among them
                all_read = False
                node = self._request.names[self._newest]
                rows += self._connection.execute(_AT_HEAD, {"piece": self._witness.place(node).piece, "head": node})
            for row in rows:
                held[row.piece].add(row.session)
        own = self._request.names[self._newest]
        if self._ends != {own} and self._witness.place(own).piece in held:  # the reply came whole
            for end in self._ends - {own}:
                held.pop(self._witness.place(end).piece, None)
            self._ends = {own}
        self._read_sessions({key for keys in held.values() for key in keys})
        return {piece: there for piece, keys in held.items() if (there := keys & self._sessions.keys())}, all_read

    def _read_sessions(self, keys: Collection[str]) -> None:
        new = sorted(key for key in keys if key not in self._sessions)
        version = self._request.instructions
        for some in tree.in_parts(new):
            asked = {"keys": some, "tenant": self._request.tenant, "version": version}
            for row in self._connection.execute(_SESSIONS, asked):
                agrees = row.instructions == version or row.used
                self._sessions[row.session] = _Session(
                    id=row.id, head=row.head, agrees=agrees, updated_at=row.updated_at
                )

    # --------------------------------------------------------------------------------------------- decision

    def _decide(self, holders: Mapping[int, set[str]], places: Sequence[int], *, all_read: bool) -> _Session | None:
        """Return the session that the evidence at these places identifies; None if it identifies none, or several."""
        known = {place: [each for each in self._evidence(place) if each.piece in holders] for place in places}
        told = [(each, holders[each.piece]) for found in known.values() for each in found]
        if not told:
            return None
        counts = Counter(key for _, keys in told for key in keys)
        likely = set(counts)
        heads = {key for key in likely if self._sessions[key].head in self._ends}
        if heads:  # several sessions that end with the very same history are indistinguishable
            return self._sessions[heads.pop()] if len(heads) == 1 else None
        if not all_read:
            return None
        if told[0][0].kind == "text":
            return self._told_by_text(counts, holders)
        ending = self._ending_alike(likely) if len(likely) > 1 else likely
        sole = {key for _, keys in told if len(keys) == 1 for key in keys}
        most = {key for key in likely if counts[key] == max(counts.values())}
        # After the newest known reply, the client may have replies from elsewhere.
        newest = max(place for place, found in known.items() if found)
        return self._only_one(sole, ending, most, self._with_newest_head(most, newest) if len(most) > 1 else most)

    def _only_one(self, *better: Collection[str]) -> _Session | None:
        """Return the session in the first of these sets that holds exactly one; None if no set does."""
        return next((self._sessions[key] for keys in better if len(keys) == 1 for key in keys), None)

    def _told_by_text(self, counts: Counter[str], holders: Mapping[int, set[str]]) -> _Session | None:
        """Return the session that texts alone identify. Each text may also be a common phrase, or an example."""
        tried = {key for key, _ in counts.most_common(_TRIED)} | set(self._newest_of(counts))
        same = {key for key in tried if self._sessions[key].agrees}
        likely = {key for key in same if self._unknown(key, self._newest_held(key, holders)) is None}
        if not likely:  # instructions that contain the time of day differ at each request
            standing = self._with_newest_head(tried - same, self._newest)
            return self._only_one({key for key in standing if self._has_all(key)})
        if len(likely) > 1:  # if some end as the request does, the others are out
            likely = self._ending_alike(likely) or likely
        known = {key: len(self._known(key, range(self._newest + 1))) for key in likely}
        most = {key for key in likely if known[key] == max(known.values())}
        standing = self._with_newest_head(most, self._newest) if len(most) > 1 else most
        return self._only_one(most, standing) or self._only_one(self._asked_alike(standing))

    def _ending_alike(self, keys: Collection[str], asked: Sequence[Message] = ()) -> set[str]:
        """Return the sessions that end like the request up to its newest reply, or like the messages in `asked`."""
        if len(keys) > _TRIED:
            return set()
        found: set[str] = set()
        for key in keys:
            head = next(iter(tree.rows_of(self._connection, key, [self._sessions[key].head])), None)
            if head is not None and continues(
                asked or self._request.messages[: self._newest + 1],
                self._from_the_end(key, head),
                from_root=head.depth <= _ENDS,
                silent=bool(asked),
            ):
                found.add(key)
        return found

    def _from_the_end(self, key: str, head: NodeRow) -> Iterator[Message]:
        """Yield the newest messages of a session, the head first. The others are read lazily."""
        yield head.message
        rows = tree.path_to(self._connection, key, head.node, below=max(head.depth - _ENDS, 0))
        yield from reversed([row.message for row in rows[:-1]])

    def _standing(self, found: _Session, holders: Mapping[int, set[str]]) -> _Session | None:
        """Return the session that ends as the request does, in preference to one `found` by a place but since moved on.

        A conversation whose calls the client left out has the same places as one without calls.
        """
        newest = self._evidence(self._newest)
        left = found.head not in self._ends
        if not left or any(each.kind == "id" and each.piece in holders for each in newest):
            return found
        standing = self._ending_alike(self._held_by_few([each.piece for each in newest if each.kind == "text"]))
        return self._only_one(standing) if standing else found

    def _brief(self) -> _Session | None:
        """Return the only session that ends as the request does, with a reply that is too short to be evidence alone.

        None if another session holds all of the request and has moved on: the request may belong to that one as well.
        """
        same = self._held_by_few([each.piece for each in self._evidence(self._newest) if not each.tells])
        ending, places = self._ending_alike(same), range(self._newest + 1)
        rivals = {key for key in same - ending if len(self._known(key, places)) == len(places)}
        return None if rivals else self._only_one(ending)

    def _begun(self) -> _Session | None:
        """Return the only session that ends with a reply of which the client has the beginning.

        A client that disconnects misses what was still on its way. A client that speaks, and is interrupted, keeps what
        it spoke. None if the request may belong to another session as well: one that ends so under other instructions,
        or that has the same beginning and has moved on.
        """
        names, newest = self._request.names, self._request.messages[self._newest]
        text = said(newest)
        if newest.role != "assistant" or self._newest == 0 or len(text) < TELLING:
            return None
        keys, found = self._held([self._witness.place(names[0]).piece]), set[str]()
        for key in keys:
            for head in tree.rows_of(self._connection, key, [self._sessions[key].head]):
                if head.parent == names[self._newest - 1] and said(head.message).startswith(text):
                    found.add(key)
        only = self._only_one(found)
        if only is None or not only.agrees or any(self._known(key, [self._newest]) for key in keys):
            return None
        return only

    def _held_by_few(self, pieces: Sequence[int]) -> set[str]:
        """Return the sessions with the request's instructions that hold any of these pieces; empty if they are many."""
        same = {key for key in self._held(pieces) if self._sessions[key].agrees}
        return same if len(same) <= _TRIED else set()

    def _held(self, pieces: Sequence[int]) -> set[str]:
        """Return the sessions that hold any of these pieces; empty if they are very many."""
        keys: set[str] = {row.session for row in self._connection.execute(_HELD, {"pieces": pieces})}
        if len(keys) > _BRIEF:
            return set()
        self._read_sessions(keys)
        return keys & self._sessions.keys()

    def _has_all(self, key: str) -> bool:
        """Tell whether a session has all messages up to the newest reply.

        The question of that reply may differ by a reminder, unless it is the first message.
        """
        places = range(self._newest + 1)
        unknown = set(places) - self._known(key, places)
        asked = max([place for place in range(self._newest) if self._request.messages[place].begins_turn], default=0)
        return not unknown or (unknown == {asked} and asked > 0 and bool(self._asked_alike([key])))

    def _newest_of(self, keys: Iterable[str]) -> list[str]:
        """Return the most recently used of these sessions, to be compared in detail."""
        return sorted(keys, key=lambda key: (-self._sessions[key].updated_at, key))[:_TRIED]

    def _newest_held(self, key: str, holders: Mapping[int, set[str]]) -> int:
        """Return the position of the newest message with evidence that a session holds."""
        return max(
            place
            for place, pieces in self._pieces.items()
            if any(key in holders.get(each.piece, ()) for each in pieces)
        )

    def _unknown(self, key: str, before: int) -> int | None:
        """Return the position of the first assistant message that a session does not have, up to `before`."""
        messages = self._request.messages
        replies = [place for place in self._spoken if place < before and messages[place].role == "assistant"]
        known = self._known(key, replies)
        for place in replies:
            says_nothing = all(each.kind == "place" for each in self._evidence(place))  # the client left its calls out
            if place not in known and not says_nothing:
                return place
        return None

    def _known(self, key: str, places: Iterable[int]) -> set[int]:
        """Return the positions, among some, whose message the session has or knows by evidence."""
        contents = {place: content_key(self._request.contents[place]) for place in places}
        there = tree.contents_there(self._connection, key, sorted(set(contents.values())))
        pieces = {place: {each.piece for each in self._evidence(place)} for place in contents}
        known: set[int] = set()
        for some in tree.in_parts(sorted(set[int]().union(*pieces.values()))):
            asked = {"key": key, "pieces": some}
            known.update(self._connection.execute(_pieces(self._connection.dialect.name), asked).scalars())
        return {place for place in contents if contents[place] in there or not known.isdisjoint(pieces[place])}

    def _with_newest_head(self, keys: Collection[str], place: int) -> set[str]:
        """Return the sessions whose head says the same as the reply at this position of the request."""
        newest = {each.piece for each in self._evidence(place)}
        found: set[str] = set()
        for key in self._newest_of(keys):
            for row in tree.rows_of(self._connection, key, [self._sessions[key].head]):
                if any(each.piece in newest for each in self._witness.marks(row.message)):
                    found.add(key)
        return found

    def _asked_alike(self, keys: Collection[str]) -> set[str]:
        """Return the sessions whose head answers the same question as the newest reply of the request.

        If there is none, return those whose question differs by a reminder before or after it.
        """
        question = _question(self._request.messages[: self._newest])
        equal: set[str] = set()
        alike: set[str] = set()
        for key in keys:
            head = self._sessions[key].head
            depth = max([row.depth for row in tree.rows_of(self._connection, key, [head])], default=0)
            asked = _question([row.message for row in tree.path_to(self._connection, key, head, below=depth - _ASKED)])
            if asked == question != "":
                equal.add(key)
            elif is_longer(asked, question) or is_longer(question, asked):
                alike.add(key)
        return equal or alike

    # -------------------------------------------------------------------------------------- without a session

    def _relayed(self, holders: Mapping[int, set[str]]) -> tuple[int, ...]:
        """Return the positions of replies that are known with the same history. Made-up replies are not among them."""
        return tuple(
            [
                place
                for place in self._spoken
                if any(holders.get(each.piece) for each in self._pieces.get(place, ()) if each.kind == "place")
            ]
        )

    def _doubt(self, holders: Mapping[int, set[str]]) -> Doubt | None:
        """Return which session the request resembles, and how it differs; None if it resembles none."""
        counts: Counter[str] = Counter(key for keys in holders.values() for key in keys)
        strong = {
            key
            for place in self._pieces
            for each in self._pieces[place]
            if each.kind != "text"
            for key in holders.get(each.piece, ())
        }
        if strong:
            return Doubt(session=self._sessions[min(strong)].id, rivals=len(strong))
        for key, _ in counts.most_common(1):
            session = self._sessions[key]
            if not session.agrees:
                return Doubt(session=session.id, instructions=True)
            unknown = self._unknown(key, self._newest_held(key, holders))
            return Doubt(session=session.id, differs=unknown, rivals=len(counts) if unknown is None else 1)
        return self._beginning_alike()

    def _beginning_alike(self) -> Doubt | None:
        """Return the session with the longest common prefix, and where the request differs from it."""
        names = self._request.names
        if not names or not self._spoken:
            return None
        first = self._witness.place(names[0]).piece
        rows = self._connection.execute(_HELD, {"pieces": [first]}).all()[-_TRIED:]
        self._read_sessions({row.session for row in rows})
        best: tuple[int, str] = (0, "")
        for key in sorted({row.session for row in rows} & self._sessions.keys()):

            def depths(some: Sequence[str], key: str = key) -> Mapping[str, int]:
                return tree.depths_of(self._connection, key, some)

            best = max(best, (known_prefix(names, depths), key))
        known, key = best
        return Doubt(session=self._sessions[key].id, differs=known) if 0 < known < len(names) else None


def _question(messages: Sequence[Message]) -> str:
    """Return the last question of a user, with white space normalized; "" if there is none."""
    return squeezed(next((message.text for message in reversed(messages) if message.begins_turn), ""))
