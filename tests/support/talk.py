"""A conversation that is written directly into a store: begins and settles exchanges with short defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from msgspec.structs import replace

from proxy.conversation import ROOT, fingerprints
from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.store import (
    Body,
    ExchangeFigures,
    Inferred,
    Opening,
    Reply,
    Settled,
    Settlement,
    Status,
    Store,
    UnnamedRequest,
    session_key,
)

_IDS = count(1)


def message(role: str, text: str, **fields: Any) -> Message:
    return ChatMessage.of({"role": role, "content": text, **fields})


def body(role: str, text: str, tokens: int = 5, **fields: Any) -> Body:
    return Body(message=message(role, text, **fields), tokens=tokens)


def opening(exchange: str, *messages: Body, **changes: Any) -> Opening:
    plain = Opening(
        tenant="tenant",
        session="session",
        exchange=exchange,
        created_at=1_000,
        kind="append",
        base=ROOT,
        messages=messages,
        instructions=None,
        instructions_tokens=0,
        digest="digest",
        model="model",
        agent=None,
        policy="default",
        policy_version="v1",
        stream=False,
        parameters={"temperature": 0.5},
        tools=None,
    )
    return replace(plain, **changes)


def settlement(exchange: str, *messages: Body, replies: tuple[Body | Reply, ...] = (), **changes: Any) -> Settlement:
    plain = Settlement(
        tenant="tenant",
        session="session",
        exchange=exchange,
        settled_at=2_000,
        status=Status.COMPLETE if replies else Status.FAILED,
        kind="append",
        base=ROOT,
        at_head=True,
        moves_head=True,
        messages=messages,
        arrivals=((),) * len(messages),
        policy_version="v1",
        agent=None,
        replies=tuple(reply if isinstance(reply, Reply) else Reply(body=reply) for reply in replies),
        cut=None,
        tokens_before=100,
        tokens_sent=60,
        receipt={"finish_reasons": ["stop"]},
        figures=ExchangeFigures(
            model="model", policy="default", tokens_before=100, tokens_sent=60, cost=0.5, added_ms=1.25
        ),
    )
    return replace(plain, **changes)


async def infer(
    store: Store, messages: Sequence[Message], *, tenant: str = "tenant", instructions: str | None = None
) -> Inferred:
    """Return what the store infers for a request that names no session."""
    names, contents = fingerprints(ROOT, messages)
    return await store.infer(
        UnnamedRequest(
            tenant=tenant, dialect="chat", messages=messages, names=names, contents=contents, instructions=instructions
        )
    )


@dataclass
class Talk:
    """One session, spoken to."""

    store: Store
    tenant: str = "tenant"
    session: str = "session"
    exchanges: list[str] = field(default_factory=list)
    bases: dict[str, str] = field(default_factory=dict)
    """The node at which each exchange was planned."""

    @property
    def key(self) -> str:
        return session_key(self.tenant, self.session)

    async def begin(self, *messages: Body, **changes: Any) -> str:
        """Open an exchange, planned at the head unless `base` is given; return its id."""
        exchange = f"exc_{next(_IDS):08d}"
        mine: dict[str, Any] = {"tenant": self.tenant, "session": self.session}
        mine["digest"] = exchange  # unique, unless a test sets it
        base: str | None = changes.get("base")
        if base is None:
            session = await self.store.session(self.tenant, self.session)
            base = session.head if session is not None else ROOT
        self.bases[exchange] = mine["base"] = base
        await self.store.begin(opening(exchange, *messages, **(mine | changes)))
        self.exchanges.append(exchange)
        return exchange

    async def settle(self, exchange: str, *messages: Body, **changes: Any) -> Settled:
        """Settle an exchange where it was planned; with `at_head=False`, at the given `base`."""
        mine: dict[str, Any] = {"tenant": self.tenant, "session": self.session}
        if changes.get("at_head", True):
            mine["base"] = self.bases.get(exchange, ROOT)
        else:
            mine["kind"] = "first"  # a session that appends stays one, and only an append can be a retry
        return await self.store.settle(settlement(exchange, *messages, **(mine | changes)))

    async def say(self, text: str, answer: str, **changes: Any) -> Settled:
        """Send a user message at the head, and settle it with an answer."""
        asked = body("user", text)
        exchange = await self.begin(asked)
        return await self.settle(exchange, asked, replies=(body("assistant", answer),), **changes)

    async def texts(self, node: str) -> list[str]:
        return [row.message.text for row in await self.store.path(self.key, node)]
