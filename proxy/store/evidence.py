"""Which session a request without an id belongs to, by the replies of the proxy that it sends back.

A piece of evidence that exactly one session has is enough. Of several sessions it is the first of these that is one:

1. the one at whose head the request ends
2. by ids and places: the one that alone has a piece; that ends as the request does, but for what clients change; that
   has the most evidence; whose head is the newest evidence
3. by texts alone: the one that ends as the request does; that has most of its messages; whose head is its newest reply,
   as the answer to the same question
4. by short texts: the one that ends as the request does, if no other holds all of it
5. the one that ends with a reply that broke off, and begins with what the client has of it

Evidence is written with the reply, in one transaction: any worker finds the conversation at its next request.
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
    known_prefix,
    said,
    squeezed,
)
from proxy.dialects import Message, is_random
from proxy.store import tree
from proxy.store.database import StoreConnection
from proxy.store.records import NodeRow
from proxy.store.schema import EVIDENCE, INSTRUCTIONS, SESSIONS, insert_new, session_place

_NEAR: Final = 32  # newest replies whose evidence is looked up together; older ones only where those tell nothing
_HOLDERS: Final = 500  # rows of one question: a common sentence may be in any number of sessions
_TRIED: Final = 16  # sessions that are looked at more closely, of those that are equally likely
_ASKED: Final = 64  # messages before a reply among which its question is looked for
_ENDS: Final = 64  # newest messages of a session that are compared with the request's
_ASKED_ALONE: Final = 2  # questions, the newest among them, that tell nothing: the first may have failed
_BRIEF: Final = 64  # sessions that may have the same short reply; of more nobody looks which is meant

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
    """Return what reads which of some pieces a session has."""
    of_session = _of_session(bindparam("key", type_=EVIDENCE.c.session.type), dialect)
    return select(EVIDENCE.c.piece).where(of_session, EVIDENCE.c.piece.in_(bindparam("pieces", expanding=True)))


@cache
def _insert_new_piece() -> postgresql.Insert:
    """Return what inserts a piece that the session does not have, where no constraint tells."""
    session, piece = [bindparam(f"new_{column.name}", type_=column.type) for column in EVIDENCE.columns]
    there = select(EVIDENCE.c.piece).where(_of_session(session, "postgresql"), EVIDENCE.c.piece == piece)
    row = select(session.label("session"), piece.label("piece")).where(~there.exists())
    return postgresql.insert(EVIDENCE).from_select(["session", "piece"], row)


def _of_session(session: BindParameter[str], dialect: str) -> ColumnElement[bool]:
    """Return what makes a row be of a session; PostgreSQL would read all of them if it were asked for the name."""
    if dialect == "postgresql":
        return session_place(EVIDENCE.c.session) == session_place(session)
    return EVIDENCE.c.session == session


class UnnamedRequest(Struct, frozen=True, kw_only=True):
    """A request that names no session, as far as its session depends on it."""

    tenant: str
    dialect: str
    messages: Sequence[Message]
    names: Sequence[str]  # the nodes of its messages in a row under the root
    contents: Sequence[bytes]  # their content hashes
    instructions: str | None  # version of its instructions; None where it has none


class Doubt(Struct, frozen=True, kw_only=True):
    """Why a request that resembles a session was not taken for a part of it."""

    session: str  # the id of the session that it resembles
    differs: int | None = None  # position of the first message that the session does not have
    instructions: bool = False  # whether its instructions are others
    rivals: int = 1  # how many sessions it resembles alike


class Inferred(Struct, frozen=True, kw_only=True):
    """What evidence says of a request."""

    session: str | None = None  # the id of the session that it belongs to
    relayed: tuple[int, ...] = ()
    """Positions of its replies that stand in a session of the tenant just so; where `session` is None"""
    doubt: Doubt | None = None


class _Session(Struct, frozen=True, kw_only=True):
    id: str
    head: str
    agrees: bool  # whether it was ever asked for under the request's instructions: a plan is asked for under others
    updated_at: int


def insert_evidence(connection: StoreConnection, rows: list[dict[str, Any]]) -> None:
    """Insert rows of `evidence`; those that are there already are left as they are. The session is locked."""
    if connection.dialect.name != "postgresql":
        insert_new(connection, EVIDENCE, rows)
    elif rows:
        connection.execute(_insert_new_piece(), [{f"new_{name}": row[name] for name in row} for row in rows])


def evidence_rows(
    key: str, witness: Witness, said: Iterable[tuple[str, Message]], places: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Return rows of what the messages in `said`, with their nodes, are known by, and of nodes known by their place."""
    pieces = {evidence.piece for node, message in said for evidence in witness.of(message, node)}
    pieces |= {witness.place(node).piece for node in places}
    return [{"session": key, "piece": piece} for piece in sorted(pieces)]


def infer(connection: StoreConnection, request: UnnamedRequest) -> Inferred:
    """Return the session that a request belongs to, or why there is none."""
    messages = request.messages
    if not any(message.role == "assistant" or message.answered for message in messages):
        return _Inference(connection, request).silent()
    found = _Inference(connection, request).session()
    is_reshaped = any(each.facts is None or each.facts.reshaped for each in messages)
    # It may have begun under an older version. A random id would have told it under any name.
    if found.session is None and is_reshaped and not any(is_random(name) for each in messages for name in each.ids):
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
        """Position of the newest reply, or of the newest result where there is none."""
        before = request.names[self._newest - 1] if self._newest else ROOT
        parted = request.messages[self._newest].parted if replies else ()
        self._ends = {*request.names[self._newest : self._newest + 1], *(chain(before, parts)[-1] for parts in parted)}
        """The nodes at which that reply may stand."""
        self._pieces: dict[int, list[Evidence]] = {}
        self._sessions: dict[str, _Session] = {}

    def session(self) -> Inferred:
        near, far = self._spoken[-_NEAR:], self._spoken[:-_NEAR]
        holders: dict[int, set[str]] = {}
        for places in ([self._newest], near, far):
            # Texts are looked up where nothing stronger tells anything: any number of sessions may have the same.
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
        last = None if holders else self._brief() or self._broken_off()
        if last is not None:
            return Inferred(session=last.id)
        return Inferred(relayed=self._relayed(holders), doubt=self._doubt(holders))

    def silent(self) -> Inferred:
        """Return the one session that holds all questions but the newest, and calls alone as replies.

        The client left these out. Several questions in a row are no evidence where anything else was said.
        """
        turns = [place for place, message in enumerate(self._request.messages) if message.role == "user"]
        asked = self._request.messages[: turns[-1]] if len(turns) > _ASKED_ALONE else ()
        keys = self._held_by_few([self._witness.place(self._request.names[0]).piece]) if asked else set[str]()
        found = self._only_one(self._ending_alike(keys, asked))
        return Inferred(session=found.id if found is not None else None)

    # --------------------------------------------------------------------------------- what is held by whom

    def _evidence(self, place: int) -> list[Evidence]:
        found = self._pieces.get(place)
        if found is None:
            message, node = self._request.messages[place], self._request.names[place]
            # The first message answers nothing: it is no reply of ours, and any conversation may begin with it.
            of = self._witness.of(message, node) if place else self._witness.marks(message)
            found = self._pieces[place] = [*of, *self._witness.told(message)]
            if place == self._newest:
                found += [self._witness.place(end) for end in self._ends - {node}]
        return found

    def _holders(self, places: Sequence[int], *, texts: bool) -> tuple[dict[int, set[str]], bool]:
        """Return, by piece, the sessions that hold the evidence at these places, and whether that is all of them."""
        evidence = [each for place in places for each in self._evidence(place)]
        pieces = sorted({each.piece for each in evidence if each.tells and (each.kind == "text") is texts})
        held: defaultdict[int, set[str]] = defaultdict(set)
        all_read = True
        for some in tree.in_parts(pieces):
            rows = list(self._connection.execute(_HELD, {"pieces": some}))
            if len(rows) == _HOLDERS:  # those that stand where the request ends must not be lost among the others
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
        """Return the session that the evidence at these places tells; None where it tells none, or several."""
        known = {place: [each for each in self._evidence(place) if each.piece in holders] for place in places}
        told = [(each, holders[each.piece]) for found in known.values() for each in found]
        if not told:
            return None
        counts = Counter(key for _, keys in told for key in keys)
        likely = set(counts)
        heads = {key for key in likely if self._sessions[key].head in self._ends}
        if heads:  # several that end with the very same history cannot be told apart
            return self._sessions[heads.pop()] if len(heads) == 1 else None
        if not all_read:
            return None
        if told[0][0].kind == "text":
            return self._told_by_text(counts, holders)
        ending = self._ending_alike(likely) if len(likely) > 1 else likely
        sole = {key for _, keys in told if len(keys) == 1 for key in keys}
        most = {key for key in likely if counts[key] == max(counts.values())}
        # What the client has of others may stand behind the newest reply that is known.
        newest = max(place for place, found in known.items() if found)
        return self._only_one(sole, ending, most, self._with_newest_head(most, newest) if len(most) > 1 else most)

    def _only_one(self, *better: Collection[str]) -> _Session | None:
        """Return the session of the first of some sets that holds but one; None where there is no such set."""
        return next((self._sessions[key] for keys in better if len(keys) == 1 for key in keys), None)

    def _told_by_text(self, counts: Counter[str], holders: Mapping[int, set[str]]) -> _Session | None:
        """Return the session that texts tell: in other hands each may be a common phrase, or an example."""
        tried = {key for key, _ in counts.most_common(_TRIED)} | set(self._newest_of(counts))
        same = {key for key in tried if self._sessions[key].agrees}
        likely = {key for key in same if self._unknown(key, self._newest_held(key, holders)) is None}
        if not likely:  # instructions with the time of day in them are others at each request
            standing = self._with_newest_head(tried - same, self._newest)
            return self._only_one({key for key in standing if self._has_all(key)})
        if len(likely) > 1:  # where several end as the request does, no other one is its session
            likely = self._ending_alike(likely) or likely
        known = {key: len(self._known(key, range(self._newest + 1))) for key in likely}
        most = {key for key in likely if known[key] == max(known.values())}
        standing = self._with_newest_head(most, self._newest) if len(most) > 1 else most
        return self._only_one(most, standing) or self._only_one(self._asked_alike(standing))

    def _ending_alike(self, keys: Collection[str], asked: Sequence[Message] = ()) -> set[str]:
        """Return those of some sessions that end as the request does up to its newest reply, or as what it `asked`."""
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
        """Give the newest messages of a session, the head first; the others are read when they are asked for."""
        yield head.message
        rows = tree.path_to(self._connection, key, head.node, below=max(head.depth - _ENDS, 0))
        yield from reversed([row.message for row in rows[:-1]])

    def _standing(self, found: _Session, holders: Mapping[int, set[str]]) -> _Session | None:
        """Return the session that ends as the request does, before the one `found` by a place that it has left since.

        A conversation whose calls were left out has the places of one without calls.
        """
        newest = self._evidence(self._newest)
        left = found.head not in self._ends
        if not left or any(each.kind == "id" and each.piece in holders for each in newest):
            return found
        standing = self._ending_alike(self._held_by_few([each.piece for each in newest if each.kind == "text"]))
        return self._only_one(standing) if standing else found

    def _brief(self) -> _Session | None:
        """Return the one session that ends as the request does, with a reply too short to tell anything alone.

        One that has gone on, and holds all of the request, may be meant just as well.
        """
        same = self._held_by_few([each.piece for each in self._evidence(self._newest) if not each.tells])
        ending, places = self._ending_alike(same), range(self._newest + 1)
        rivals = {key for key in same - ending if len(self._known(key, places)) == len(places)}
        return None if rivals else self._only_one(ending)

    def _broken_off(self) -> _Session | None:
        """Return the one session that ends with a reply that broke off, of which the client has only the beginning.

        A client that stops listening does not get what was under way.
        """
        names, newest = self._request.names, self._request.messages[self._newest]
        text = said(newest)
        if newest.role != "assistant" or self._newest == 0 or len(text) < TELLING:
            return None
        found: set[str] = set()
        for key in self._held_by_few([self._witness.place(names[0]).piece]):
            for head in tree.rows_of(self._connection, key, [self._sessions[key].head]):
                if head.partial and head.parent == names[self._newest - 1] and said(head.message).startswith(text):
                    found.add(key)
        return self._only_one(found)

    def _held_by_few(self, pieces: Sequence[int]) -> set[str]:
        """Return the sessions with the request's instructions that hold any of some pieces, if they are few."""
        keys: set[str] = {row.session for row in self._connection.execute(_HELD, {"pieces": pieces})}
        if len(keys) > _BRIEF:
            return set()
        self._read_sessions(keys)
        same = {key for key in keys & self._sessions.keys() if self._sessions[key].agrees}
        return same if len(same) <= _TRIED else set()

    def _has_all(self, key: str) -> bool:
        """Tell whether a session has all messages up to the newest reply.

        Behind others, the question of that reply may be without a reminder now.
        """
        places = range(self._newest + 1)
        unknown = set(places) - self._known(key, places)
        asked = max([place for place in range(self._newest) if self._request.messages[place].begins_turn], default=0)
        return not unknown or (unknown == {asked} and asked > 0 and bool(self._asked_alike([key])))

    def _newest_of(self, keys: Iterable[str]) -> list[str]:
        """Return the sessions that are looked at more closely: those that were used last."""
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
            says_nothing = all(each.kind == "place" for each in self._evidence(place))  # its calls were left out
            if place not in known and not says_nothing:
                return place
        return None

    def _known(self, key: str, places: Iterable[int]) -> set[int]:
        """Return those of some positions whose message a session has, or knows by evidence."""
        contents = {place: content_key(self._request.contents[place]) for place in places}
        there = tree.contents_there(self._connection, key, sorted(set(contents.values())))
        pieces = {place: {each.piece for each in self._evidence(place)} for place in contents}
        known: set[int] = set()
        for some in tree.in_parts(sorted(set[int]().union(*pieces.values()))):
            asked = {"key": key, "pieces": some}
            known.update(self._connection.execute(_pieces(self._connection.dialect.name), asked).scalars())
        return {place for place in contents if contents[place] in there or not known.isdisjoint(pieces[place])}

    def _with_newest_head(self, keys: Collection[str], place: int) -> set[str]:
        """Return those of some sessions whose head says what the reply at a place of the request says."""
        newest = {each.piece for each in self._evidence(place)}
        found: set[str] = set()
        for key in self._newest_of(keys):
            for row in tree.rows_of(self._connection, key, [self._sessions[key].head]):
                if any(each.piece in newest for each in self._witness.marks(row.message)):
                    found.add(key)
        return found

    def _asked_alike(self, keys: Collection[str]) -> set[str]:
        """Return those of some sessions whose head answers what the newest reply of the request answers.

        A reminder may have been put before or behind the question, and taken off; the same question goes before that.
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

    # ------------------------------------------------------------------------------------ where there is none

    def _relayed(self, holders: Mapping[int, set[str]]) -> tuple[int, ...]:
        """Return where replies stand that are known just so. What was made up before them is none of these."""
        return tuple(
            [
                place
                for place in self._spoken
                if any(holders.get(each.piece) for each in self._pieces.get(place, ()) if each.kind == "place")
            ]
        )

    def _doubt(self, holders: Mapping[int, set[str]]) -> Doubt | None:
        """Return what the request resembles."""
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
        """Return where the request parts from the session that it has the longest beginning in common with."""
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
    """Return what a user said last, but for white space; "" where no user did."""
    return squeezed(next((message.text for message in reversed(messages) if message.begins_turn), ""))
