"""Serves requests while the store is away, and stores their exchanges later.

A request that brings its whole history is planned from that, and sent. A request that continues from a state held by
the provider is sent unchanged. A request that needs stored messages gets 503.

An exchange that cannot be stored waits in the spool. If its place in the history is known, it is stored there later.
Otherwise it is placed when it is stored, by the rules for requests. Exchanges are stored in the order in which they
ended. Storing is idempotent, so a process that was killed halfway simply starts again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from proxy.config import Settings
from proxy.conversation import Incoming, body_of, version_of
from proxy.dialects import Message, Request, dialect_named
from proxy.errors import NotFound, StoreUnavailable
from proxy.pipeline.context import RequestContext
from proxy.pipeline.history import History, HistoryLoader
from proxy.pipeline.receipt import shifted
from proxy.store import (
    HistoryQuery,
    Opening,
    ProviderState,
    Settled,
    Settlement,
    Spool,
    SpooledRecord,
    Store,
    UnnamedRequest,
    session_key,
    spool_name,
    waiting_beside,
)

_LOG: Final = logging.getLogger("palimpsest.outage")

AWAY: Final = "the store cannot be used: the request was planned by itself, and is stored later"
"""Warning of a request that was served without the store."""
WAITS: Final = "the store cannot be used: the exchange is stored later"
"""Warning of an answer that could not be stored at once."""
LOST: Final = "neither the store nor the spool can be used: the exchange is stored later, if the proxy lives that long"
"""Warning of an answer that waits in memory only."""
_REPLY_BYTES: Final = 1_048_576  # space reserved for a reply
_APPEND_SECONDS: Final = 10.0  # how long a request that needs stored messages waits while the spool is being drained
_DIRECT_SECONDS: Final = 2.0  # timeout for storing one exchange directly once the store is back
_STORE_SECONDS: Final = 20.0  # timeout for storing one batch of the spool
_UNSTORED: Final = (
    "The store cannot be used. It does not store what waits in time: look for a transaction that stands still."
)


class SpooledExchange(Struct, frozen=True, kw_only=True):
    """An exchange that waits in the spool."""

    opening: Opening
    settlement: Settlement
    same: bool = False  # whether the settlement's messages were left out because they equal the opening's
    incoming: Incoming | None = None  # decides its place later; None if the place is known
    infers: bool = False  # whether its session must be inferred, by its last reply or by `state`
    state: str = ""  # the id of the provider's state that it continues from
    ids: tuple[str, ...] = ()  # the ids under which the provider keeps the reply


def encode(spooled: SpooledExchange) -> bytes:
    """Return an exchange as a record of the spool."""
    if spooled.settlement.messages == spooled.opening.messages:
        spooled = replace(spooled, settlement=replace(spooled.settlement, messages=()), same=True)
    return _ENCODER.encode(spooled)


def decode(content: bytes) -> SpooledExchange:
    """Return the exchange of a record; the inverse of `encode`."""
    spooled = _DECODER.decode(content)
    if spooled.same:
        spooled = replace(spooled, settlement=replace(spooled.settlement, messages=spooled.opening.messages))
    return spooled


async def erase_tenant(store: Store, spool: Spool | None, tenant: str) -> int:
    """Delete everything of a tenant, in the store and in the spool. Return the number of stored sessions deleted."""

    def is_theirs(_: str, content: bytes | None) -> bool:
        try:
            return content is not None and _DECODER.decode(content).opening.tenant == tenant
        except (msgspec.MsgspecError, ValueError, KeyError):  # draining sets such a record aside
            return False

    if spool is not None:
        await asyncio.to_thread(spool.drop, is_theirs)
    return await store.erase(tenant)


def _encode_other(value: Any) -> Any:
    if isinstance(value, Message):
        return (value.dialect.name, value.raw)
    raise NotImplementedError(f"a {type(value).__name__} is not kept in the spool")


def _decode_other(kind: type, value: Any) -> Any:
    if kind is Message:
        name, raw = value
        return dialect_named(name).message(raw)
    raise NotImplementedError(f"a {kind.__name__} is not kept in the spool")


_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_DECODER: Final = msgspec.msgpack.Decoder(SpooledExchange, dec_hook=_decode_other)


def spool_at(settings: Settings) -> Spool:
    """Return the spool that the settings name, without opening it."""
    return Spool(Path(settings.store.spool), spool_name(settings.store.url), settings.store.spool_max_bytes)


def spool_of(settings: Settings) -> Spool:
    """Return the spool that the settings name, and open it if possible."""
    spool = spool_at(settings)
    try:
        spool.open()
    except StoreUnavailable as why:
        _LOG.warning("nothing can wait for the store while it is away: %s", why)
    return spool


def warn_of_others(settings: Settings) -> None:
    """Log a warning for other spools with waiting exchanges. After a change of `store.url` they are not drained."""
    name = spool_name(settings.store.url)
    for path in waiting_beside(Path(settings.store.spool), name):
        _LOG.warning(
            "%s holds exchanges that wait for a store with another store.url. If it is the same database, rename the "
            "file to %s.spool while no proxy runs",
            path,
            name,
        )


def can_serve_without(settings: Settings) -> bool:
    """Tell whether a process can start while the store is away, with the secrets that an earlier process kept."""
    spool = spool_of(settings)
    try:
        return serves_without(settings, spool)
    finally:
        spool.close()


def serves_without(settings: Settings, spool: Spool) -> bool:
    """Tell whether requests can be served while the store is away, even by a process that never reached it."""
    return settings.store.on_failure == "forward" and bool(spool.secrets)


class Outage:
    """Serves requests and keeps exchanges while the store is away. One for the life of the process."""

    def __init__(self, store: Store, spool: Spool, loader: HistoryLoader, *, forwards: bool) -> None:
        """Keep waiting exchanges in `spool`. `forwards`: requests that need no stored messages are served."""
        self._store = store
        self._spool = spool
        self._loader = loader
        self._forwards = forwards
        self._afterwards: list[Callable[[Store], Awaitable[None]]] = []
        store.circuit.drain = self.drain

    @property
    def forwards(self) -> bool:
        """Whether requests are served while the store is away."""
        return self._forwards and self._spool.usable

    async def secret(self, name: str, place: int) -> bytes:
        """Return a secret of the store. While the store is away, return the copy that the spool keeps at `place`."""
        kept = self._spool.secrets
        size = 32
        try:
            found = await self._store.secret(name)
        except StoreUnavailable:
            if len(kept) < (place + 1) * size:
                raise
            return kept[place * size : (place + 1) * size]
        try:
            before, after = kept[: place * size].ljust(place * size, b"\0"), kept[(place + 1) * size :]
            await asyncio.to_thread(self._spool.keep_secrets, before + found + after)
        except OSError as why:
            _LOG.warning("the store's secrets could not be kept beside it: %s", why)
        return found

    async def once_back(self, work: Callable[[Store], Awaitable[None]]) -> None:
        """Run `work` with the store now, or as soon as the store is back."""
        try:
            await work(self._store)
        except StoreUnavailable:
            self.later(work)

    def later(self, work: Callable[[Store], Awaitable[None]]) -> None:
        """Run `work` with the store as soon as the store is back."""
        self._afterwards.append(work)
        self._store.circuit.open(StoreUnavailable(WAITS))  # if it is back already, the work runs at once

    # -------------------------------------------------------------------------------- a request

    async def history(self, request: Request, context: RequestContext, size: int, why: StoreUnavailable) -> History:
        """Return the history of a request whose place could not be read. Raises `why` if it needs stored messages."""
        is_full = self._loader.is_full(request, context)
        if self._store.circuit.returns and not is_full and await self._store.circuit.closes(_APPEND_SECONDS):
            return await self._loader.load(request, context)
        if not (self._forwards and is_full):
            raise why
        room = await self._spool.reserve(2 * size + _REPLY_BYTES)
        return await self._loader.unplaced(request, context, room)

    async def keep(self, spooled: SpooledExchange, *, failed: bool) -> bool:
        """Put an exchange into the spool, or store it if the store is back. It is durable when this returns.

        `failed`: the store has just refused the exchange. Returns whether the exchange waits in the spool. Raises
        `StoreUnavailable` if the spool cannot be used either; the exchange then waits in memory.
        """
        opening = spooled.opening
        circuit = self._store.circuit
        if not failed and (circuit.down is None or circuit.returns) and not self._spool.flag[0]:
            # Store it directly. Otherwise requests that came during a drain would open the circuit again, and so on.
            try:
                async with asyncio.timeout(_DIRECT_SECONDS):
                    await _store_spooled(self._store.direct(), spooled)
            except (StoreUnavailable, TimeoutError):
                pass
            except Exception:  # noqa: BLE001 - it goes to the spool, which sets it aside with its reply
                _LOG.exception("an exchange could not be stored at once")
            else:
                return False
        circuit.open(StoreUnavailable(WAITS))
        try:
            await self._spool.append(session_key(opening.tenant, opening.session, opening.dialect), encode(spooled))
        except StoreUnavailable:
            self.later(partial(_store_spooled, spooled=spooled))
            raise
        return True

    # ------------------------------------------------------------------------------ when the store is back

    async def drain(self) -> bool:
        """Store what waits, unless another process is doing so. Return whether nothing waits any more.

        Raises `StoreUnavailable` if the store refuses it.
        """
        try:
            await self._store.renew()
            if self._spool.flag[0]:
                with self._spool.turn() as mine:
                    if mine:
                        await self._store_all()
            if self._spool.flag[0]:
                return False
            while self._afterwards:
                await self._do(self._afterwards[0])
                del self._afterwards[0]
        except TimeoutError as why:
            raise StoreUnavailable(_UNSTORED) from why
        return True

    async def _do(self, work: Callable[[Store], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(_STORE_SECONDS):
                await work(self._store.direct())
        except (StoreUnavailable, TimeoutError):
            raise
        except Exception:  # noqa: BLE001 - it would keep all others from being stored
            _LOG.exception("what waited in memory cannot be stored, and is lost")

    async def _store_all(self) -> None:
        direct = self._store.direct()
        number = 0
        while records := await asyncio.to_thread(self._spool.read):
            async with asyncio.timeout(_STORE_SECONDS):
                await self._store_some(direct, records)
            await asyncio.to_thread(self._spool.stored, records[-1].after)
            self._store.circuit.returns = True
            number += len(records)
        _LOG.warning("%d exchanges that waited in the spool are stored", number)

    async def _store_some(self, store: Store, records: Sequence[SpooledRecord]) -> None:
        """Store exchanges: sequentially within a session, concurrently across sessions."""
        decoded: list[tuple[SpooledRecord, SpooledExchange]] = []
        for record in records:
            try:
                decoded.append((record, decode(record.content)))
            except (msgspec.MsgspecError, ValueError, KeyError) as why:
                self._set_aside(record, why)
        by_session: dict[str, list[tuple[SpooledRecord, SpooledExchange]]] = {}
        searching = any(spooled.infers for _, spooled in decoded)  # it may belong to the session of any other
        for record, spooled in decoded:
            by_session.setdefault("" if searching else record.key, []).append((record, spooled))
        ended = await asyncio.gather(
            *[self._store_session(store, some) for some in by_session.values()], return_exceptions=True
        )
        for failure in ended:
            if failure is not None:
                raise failure

    async def _store_session(self, store: Store, some: Sequence[tuple[SpooledRecord, SpooledExchange]]) -> None:
        for record, spooled in some:
            try:
                await _store_spooled(store, spooled)
            except StoreUnavailable:
                raise
            except Exception as why:  # noqa: BLE001 - it would keep all others from being stored
                self._set_aside(record, why)

    def _set_aside(self, record: SpooledRecord, why: Exception) -> None:
        path = self._spool.set_aside(record)
        _LOG.error("an exchange that waited cannot be stored, and is kept in %s: %s: %s", path, type(why).__name__, why)


async def _store_spooled(store: Store, spooled: SpooledExchange) -> None:
    if spooled.incoming is not None:
        spooled = await placed(spooled, spooled.incoming, store)
    settlement = spooled.settlement
    settled = await store.settle(settlement, store.begin(spooled.opening))
    if settlement.replies and not settled.replies:
        raise NotFound("the messages before it are not in the store: it is an older copy, or they were deleted")
    if spooled.ids:
        await keep_ids(store, spooled.settlement, settled, spooled.ids)


async def keep_ids(store: Store, settlement: Settlement, settled: Settled, ids: Sequence[str]) -> None:
    """Keep the ids by which later requests may continue from the reply of a stored exchange.

    An answer from the store is not a new reply, so its ids point to the last message of the request. A reply that is
    still to come has no node.
    """
    from_store = settlement.receipt.get("finished")
    node = next(iter(settled.replies or (settled.nodes[-1:] if from_store else ())), "")
    await store.keep_provider_ids(settlement.tenant, settlement.session, settlement.dialect, ids, node)


async def placed(spooled: SpooledExchange, incoming: Incoming, store: Store) -> SpooledExchange:
    """Place an exchange in the history, as its request would have been placed."""
    opening, settlement = spooled.opening, spooled.settlement
    session, relayed, messages = opening.session, tuple[int, ...](), opening.messages
    state: ProviderState | None = None
    if spooled.state:
        place = await store.provider_place(opening.tenant, opening.dialect, spooled.state)
        state = ProviderState(node=None)
        if place is not None and (spooled.infers or place.session == session):
            session, state = place.session, ProviderState(node=place.node)
    elif spooled.infers:
        found = await store.infer(
            UnnamedRequest(
                tenant=opening.tenant,
                dialect=opening.dialect,
                messages=[body.message for body in messages],
                names=incoming.names,
                contents=incoming.contents,
                instructions=version_of(opening.instructions) if opening.instructions else None,
            )
        )
        session, relayed = found.session or session, found.relayed
    snapshot = await store.recall(
        HistoryQuery(
            dialect=opening.dialect,
            tenant=opening.tenant,
            session=session,
            incoming=incoming,
            messages=[body.message for body in messages],
            policy=None,
            agent=opening.agent,
            idempotency=opening.idempotency,
            instructed=opening.instructions is not None,
            state=state,
        )
    )
    arrival = snapshot.arrival
    fresh = messages[arrival.known :]
    variants = [
        (mark.node, body.message)
        for mark, body in zip(snapshot.marks, messages, strict=False)
        if body_of(body.message) != mark.body
    ]
    # Decisions name positions in the request. These are positions in the branch only if the request holds all of it.
    arrivals = settlement.arrivals[arrival.known :] if not snapshot.start else ()
    return replace(
        spooled,
        opening=replace(
            opening, session=session, kind=arrival.kind, base=arrival.base, messages=fresh, forms=tuple(variants)
        ),
        settlement=replace(
            settlement,
            session=session,
            kind=arrival.kind,
            base=arrival.base,
            at_head=arrival.at_head,
            yields=arrival.yields,
            moves_head=arrival.moves_head,
            messages=fresh,
            arrivals=arrivals,
            receipt=shifted(settlement.receipt, snapshot.start) if snapshot.start else settlement.receipt,
            relayed=relayed,
            carried=snapshot.carried,
        ),
        incoming=None,
    )
