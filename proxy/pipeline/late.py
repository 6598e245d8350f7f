"""A reply that the provider made in the background: relayed to the client that fetches it, and stored once.

Its exchange was settled earlier, when the provider announced the reply or when its stream broke off.
"""

from __future__ import annotations

import logging
from typing import Final

from msgspec import Struct

from proxy.dialects import Dialect
from proxy.dialects.jsontext import sound
from proxy.errors import StoreUnavailable
from proxy.models import cost_of, used
from proxy.pipeline.background import COUNTING, compute
from proxy.pipeline.context import Client, Headers
from proxy.pipeline.history import size_of
from proxy.pipeline.outage import keep_ids
from proxy.pipeline.relay import EVENTS, Answered, StreamRelay, headers_of_answer, relay_whole
from proxy.pipeline.services import AppServices
from proxy.pipeline.settle import count_usage, reply_of, told_error
from proxy.store import ExchangeFigures, ExchangeRow, Settlement
from proxy.upstream import Answer, Destination

_LOG: Final = logging.getLogger("palimpsest.exchange")


class LateReply(Struct, frozen=True, kw_only=True):
    """A client's fetch of a reply that the provider made in the background."""

    services: AppServices
    dialect: Dialect
    exchange: ExchangeRow  # the exchange that waits for the reply
    destination: Destination  # where the reply is fetched
    headers: Headers  # the client's headers
    query: bytes  # the client's query string
    key: str | None  # the name of the client's key

    async def relay(self, answer: Answer, client: Client) -> None:
        """Relay the provider's answer unchanged. The reply is stored before the client sees its end."""
        if answer.status == 200 and answer.media_type == EVENTS:
            relay = StreamRelay(self.dialect, answer, client, headers_of_answer, hides_usage=False)
            await relay.run(self._settle)
        else:
            await relay_whole(self.dialect, answer, client, headers_of_answer, self._settle)

    async def _settle(self, answered: Answered) -> None:
        """Store the reply if it is complete. If that fails, the client gets it anyway, and may fetch it again."""
        is_there = self.exchange.receipt["response_id"] in answered.ids and not answered.later
        if is_there and (answered.replies or not self.exchange.replies):
            try:
                await self.services.background.finish(self._store(answered))
            except StoreUnavailable:
                pass
            except Exception:  # noqa: BLE001 - whatever it is, the client gets the reply
                _LOG.exception("a reply that was made in the background could not be stored")

    async def _store(self, answered: Answered) -> None:
        row, services = self.exchange, self.services
        await services.knowledge.can_count(row.model)
        size = COUNTING * size_of([message for message, _ in answered.replies])
        settlement = await compute(size, self._settlement, answered)
        settled = await services.store.settle(settlement)
        ids, conversation = answered.ids, row.receipt.get("conversation_id")
        if conversation and settled.head in settled.replies:  # absent from the ids if the proxy expanded it
            ids = (*ids, conversation)
        await keep_ids(services.store, settlement, settled, ids)
        figures = settlement.figures
        if figures is not None and (settled.are_new or not answered.replies):  # else another request was first
            like = (self.dialect.name, row.kind, answered.status.value, row.policy)
            at = services.counts.exchanges.get(like) or services.counts.of_exchanges(*like)
            count_usage(services, at, figures, row.tenant, self.key)

    def _settlement(self, answered: Answered) -> Settlement:
        row, services = self.exchange, self.services
        tokens, dollars = used(answered.usage), services.knowledge.facts(row.model, self.dialect).dollars
        cost = None if tokens is None or dollars is None else cost_of(tokens, dollars)
        told = {
            "usage": answered.usage,
            "finish_reasons": list(answered.finish_reasons),
            "upstream_model": answered.model,
            "error": told_error(answered.error, self.destination, self.headers, self.query),
            "cost": cost,
            "cost_saved": None if cost is None else 0.0,
        }
        return Settlement(
            dialect=self.dialect.name,
            tenant=row.tenant,
            session=row.session,
            exchange=row.id,
            settled_at=services.knowledge.now,
            status=answered.status,
            kind=row.kind,
            base=row.nodes[-1] if row.nodes else row.base,
            at_head=False,
            moves_head=True,
            messages=(),
            arrivals=(),
            policy_version=row.policy_version,
            agent=row.agent,
            replies=tuple(
                [reply_of(message, partial, None, row.model, services.counter) for message, partial in answered.replies]
            ),
            cut=None,
            tokens_before=row.tokens_before,
            tokens_sent=row.tokens_sent,
            receipt={**row.receipt, **sound(told)},
            cost=cost,
            figures=ExchangeFigures(
                model=row.model,
                policy=row.policy,
                requests=0,  # counted already
                tokens_input=tokens.prompt if tokens is not None else 0,
                tokens_cached=tokens.read if tokens is not None else 0,
                tokens_written=tokens.written if tokens is not None else 0,
                tokens_output=tokens.output if tokens is not None else 0,
                priced=int(cost is not None),
                cost=cost or 0.0,
            ),
            late=True,
        )
